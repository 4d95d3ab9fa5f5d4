//! What has to be known of a guest's kernel.

use emu::Ram;
use guest_view::{BtfError, GuestMemory, KernelView, NoKernel, Search, Step, TaskPlaces};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// Notes that are tried. A guest has one, and crashed kernels leave some.
const MOST_NOTES: usize = 16;
/// Pages of one step of a search.
const PAGES: usize = 1 << 16;

/// Why what a kernel does cannot be attributed.
#[derive(Debug, Error)]
pub enum KernelError {
    /// Nothing in memory says that it is a Linux kernel.
    #[error("no Linux kernel was found in the guest's memory; it has to be 6.0 or later")]
    None,
    /// There is one, which says too little.
    #[error(transparent)]
    Unusable(#[from] NoKernel),
    /// It lacks what tasks are told apart by.
    #[error("the kernel {release} cannot be followed: {error}; it needs CONFIG_DEBUG_INFO_BTF")]
    Lacks {
        /// As `uname -r` prints it.
        release: String,
        /// What is missing.
        error: BtfError,
    },
}

/// Where a kernel does what tasks are told apart by: to be found once, and kept with a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Kernel(pub(crate) TaskPlaces);

impl Kernel {
    /// What is needed of `view`.
    ///
    /// # Errors
    /// [`KernelError::Lacks`].
    pub fn of(view: &KernelView) -> Result<Self, KernelError> {
        let places = view.places().map_err(|error| KernelError::Lacks {
            release: view.release().to_owned(),
            error,
        })?;
        Ok(Self(places))
    }

    /// Where the kernel is to be waited for, as `Room::observe` of `vmm` wants it.
    #[must_use]
    pub fn places(&self) -> [u64; 4] {
        let TaskPlaces {
            switch,
            begin,
            exec,
            exit,
            ..
        } = self.0;
        [switch, begin, exec, exit]
    }
}

/// The kernel that runs in this memory; `cr3` is that of any of its processors. It reads all of
/// the memory if it has to, and some 20 MiB in any case.
///
/// # Errors
/// [`KernelError`].
pub fn find(memory: &GuestMemoryMmap, cr3: u64) -> Result<KernelView, KernelError> {
    let ram = Ram::new(memory.clone()).map_err(|_| KernelError::None)?;
    let ram = Physical(&ram);
    let regions = memory.iter().map(|region| {
        let GuestAddress(start) = region.start_addr();
        start..start.saturating_add(region.len())
    });
    let mut search = Search::new(regions);
    let mut last = KernelError::None;
    let mut notes = 0;
    loop {
        match search.step(&ram, PAGES) {
            Step::Searching => {}
            Step::Found(note) if notes < MOST_NOTES => {
                notes += 1;
                match KernelView::of(&ram, note, cr3) {
                    Ok(view) => return Ok(view),
                    Err(error) => last = error.into(),
                }
            }
            Step::Found(_) | Step::Done => return Err(last),
        }
    }
}

/// A processor's RAM, by guest-physical addresses.
pub(crate) struct Physical<'a>(pub(crate) &'a Ram);

impl GuestMemory for Physical<'_> {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        let mut at = address;
        let mut rest = buffer;
        while !rest.is_empty() {
            let Some(offset) = self.0.offset_of(at) else {
                return false;
            };
            let room = usize::try_from(4096 - (at & 0xfff)).unwrap_or(1);
            let len = room.min(rest.len());
            let (part, after) = rest.split_at_mut(len);
            self.0.bytes_at(offset, part);
            rest = after;
            at = at.wrapping_add(len as u64);
        }
        true
    }
}
