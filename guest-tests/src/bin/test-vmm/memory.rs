//! The guest's memory: a file that is mapped twice. It stays as it is when the process ends, so a
//! snapshot has it already.

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use kvm_pmu::{GuestBytes, PatchRefusal, ProtectPages};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

/// Bytes, from address 0 on. That is below the hole of a PC.
pub(crate) const SIZE: u64 = 384 << 20;

/// The two mappings.
#[derive(Debug)]
pub(crate) struct GuestRam {
    /// KVM's slot. Pages of it are read-only at times.
    guest: GuestMemoryMmap,
    /// All accesses of this program.
    ours: GuestMemoryMmap,
}

impl GuestRam {
    /// Of this file, which is made where a guest boots in it.
    pub(crate) fn of(file: &Path, boots: bool) -> Result<Self> {
        let mut open = OpenOptions::new();
        open.read(true).write(true).create(boots).truncate(boots);
        let said = || format!("the guest's memory, {}", file.display());
        let opened = open.open(file).with_context(said)?;
        opened.set_len(SIZE).with_context(said)?;
        let opened = Arc::new(opened);
        let map = || {
            let from = FileOffset::from_arc(opened.clone(), 0);
            let ranges = [(GuestAddress(0), usize::try_from(SIZE)?, Some(from))];
            GuestMemoryMmap::from_ranges_with_files(ranges).with_context(said)
        };
        Ok(Self {
            guest: map()?,
            ours: map()?,
        })
    }

    pub(crate) fn for_kvm(&self) -> &GuestMemoryMmap {
        &self.guest
    }

    pub(crate) fn for_vmm(&self) -> &GuestMemoryMmap {
        &self.ours
    }
}

impl ProtectPages for GuestRam {
    fn protect(&self, page: u64, writable: bool) -> Result<(), PatchRefusal> {
        let done = crate::sys::protect(&self.guest, page, writable);
        let done = done.ok_or(PatchRefusal::NotRam)?;
        done.map_err(|error| PatchRefusal::Protect(error.raw_os_error().unwrap_or(0)))
    }

    fn bytes(&self) -> &dyn GuestBytes {
        &self.ours
    }
}
