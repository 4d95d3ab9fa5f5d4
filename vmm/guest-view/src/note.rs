//! Where a Linux says where it is: VMCOREINFO, the ELF note that it keeps for crash
//! dumps (`kernel/crash_core.c` in 6.1, `kernel/vmcore_info.c` since 6.9), page-aligned
//! in memory of its own.

use std::ops::Range;

use guest_exit::{GuestMemory, Paging};

use crate::bytes::u32_at;

const PAGE: u64 = 0x1000;
/// `n_namesz`, `n_descsz` and `n_type`, then the name in whole words.
const HEADER: usize = 24;
/// `VMCOREINFO_BYTES`: what the text can have.
const MOST: usize = 0x1000;
const NAME: &[u8; 12] = b"VMCOREINFO\0\0";
/// Where the kernel's image is mapped before `phys_base` (`__START_KERNEL_map`,
/// `arch/x86/include/asm/page_64_types.h`).
const IMAGE: u64 = 0xffff_ffff_8000_0000;

/// A search through guest memory for the notes of Linux kernels, in steps.
#[derive(Debug, Clone)]
pub struct Search {
    left: Vec<Range<u64>>,
}

/// What a step of a search came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// There is more memory to look at.
    Searching,
    /// Something that looks like a note; a later step goes on behind it.
    Found(Note),
    /// All memory was looked at.
    Done,
}

impl Search {
    /// Through `ram`, ranges of guest-physical addresses.
    #[must_use]
    pub fn new(ram: impl IntoIterator<Item = Range<u64>>) -> Self {
        let mut left: Vec<_> = ram.into_iter().collect();
        left.reverse();
        Self { left }
    }

    /// Looks at `pages` pages at most: 24 bytes of each, and 4 KiB of what may be a note.
    pub fn step(&mut self, memory: &dyn GuestMemory, pages: usize) -> Step {
        for _ in 0..pages {
            let Some(range) = self.left.last_mut() else {
                return Step::Done;
            };
            let at = range.start.checked_next_multiple_of(PAGE);
            let Some(at) = at.filter(|at| *at < range.end) else {
                self.left.pop();
                continue;
            };
            range.start = at.saturating_add(PAGE);
            if let Some(note) = Note::read(memory, at) {
                return Step::Found(note);
            }
        }
        if self.left.is_empty() {
            Step::Done
        } else {
            Step::Searching
        }
    }
}

/// What a note says. Nothing of it is known to be true before a
/// [`KernelView`](crate::KernelView) was made of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Guest-physical address.
    pub address: u64,
    text: String,
}

impl Note {
    /// The note at `address`, if there is one.
    #[must_use]
    pub fn read(memory: &dyn GuestMemory, address: u64) -> Option<Self> {
        let header: [u8; HEADER] = memory.array(address)?;
        let word = |at| u32_at(&header, at);
        let bytes = usize::try_from(word(4)).ok()?;
        if word(0) != 11 || word(8) != 0 || header[12..] != NAME[..] || bytes > MOST {
            return None;
        }
        let mut text = vec![0; bytes];
        if !memory.read(address.checked_add(HEADER as u64)?, &mut text) {
            return None;
        }
        let text = String::from_utf8(text).ok()?;
        let odd = |c: char| c != '\n' && !(' '..='~').contains(&c);
        (!text.contains(odd)).then_some(Self { address, text })
    }

    /// The kernel's release, as `uname -r` prints it.
    #[must_use]
    pub fn release(&self) -> Option<&str> {
        self.value("OSRELEASE")
    }

    /// The kernel's build id in hexadecimal digits; kernels since 5.15 have it.
    #[must_use]
    pub fn build_id(&self) -> Option<&str> {
        self.value("BUILD-ID")
    }

    /// How far the kernel has moved itself (KASLR), in bytes.
    #[must_use]
    pub fn kernel_offset(&self) -> Option<u64> {
        hexadecimal(self.value("KERNELOFFSET")?)
    }

    /// The linear address of a symbol that the note names.
    pub(crate) fn symbol(&self, name: &str) -> Option<u64> {
        let found = hexadecimal(self.of("SYMBOL", name)?);
        found.filter(|address| *address >= IMAGE)
    }

    /// The kernel's own page tables, which map all of the kernel's memory and no program's,
    /// and whether they have five levels.
    pub(crate) fn paging(&self) -> Option<(Paging, bool)> {
        let number = |name| self.of("NUMBER", name)?.parse::<i64>().ok();
        let in_image = self.symbol("swapper_pg_dir")?.checked_sub(IMAGE)?;
        let root = in_image.wrapping_add_signed(number("phys_base")?);
        let five = number("pgtable_l5_enabled")? != 0;
        Some((Paging::long_mode(root, five), five))
    }

    fn of(&self, kind: &str, name: &str) -> Option<&str> {
        self.text.lines().find_map(|line| {
            let rest = line.strip_prefix(kind)?.strip_prefix('(')?;
            rest.strip_prefix(name)?.strip_prefix(")=")
        })
    }

    fn value(&self, name: &str) -> Option<&str> {
        let mut lines = self.text.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
    }
}

fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}
