//! Pages of RAM that hold decoded code.
#![allow(
    clippy::cast_possible_truncation,
    reason = "RAM has fewer than 2^32 pages"
)]

/// A bit for each page of RAM, and which of them were written to.
#[derive(Debug)]
pub(crate) struct CodePages {
    bits: Vec<u64>,
    written: Vec<u32>,
}

impl CodePages {
    pub(crate) fn new(pages: u64) -> Self {
        Self {
            bits: vec![0; pages.div_ceil(64) as usize],
            written: Vec::new(),
        }
    }

    pub(crate) fn has(&self, page: u32) -> bool {
        let word = self.bits.get(page as usize / 64);
        word.is_some_and(|word| word >> (page % 64) & 1 != 0)
    }

    /// There is code now; whether there was none.
    pub(crate) fn set(&mut self, page: u32) -> bool {
        let new = !self.has(page);
        if let Some(word) = self.bits.get_mut(page as usize / 64) {
            *word |= 1 << (page % 64);
        }
        new
    }

    /// The page is written to: its code is none any more.
    pub(crate) fn write(&mut self, page: u32) {
        if self.has(page) {
            self.bits[page as usize / 64] &= !(1 << (page % 64));
            self.written.push(page);
        }
    }

    /// Some page with code was written to.
    pub(crate) fn is_written(&self) -> bool {
        !self.written.is_empty()
    }

    /// Pages with code that were written to since.
    pub(crate) fn take_written(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.written)
    }

    /// No page has code.
    pub(crate) fn clear(&mut self) {
        self.bits.fill(0);
        self.written.clear();
    }
}
