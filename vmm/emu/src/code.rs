//! Pages of RAM that hold decoded code.
#![allow(
    clippy::cast_possible_truncation,
    reason = "RAM has fewer than 2^32 pages"
)]

/// What processors that share RAM tell each other: numbers of pages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CodeChanges {
    /// Pages of which the processor has begun to hold decoded code.
    pub(crate) held: Vec<u32>,
    /// Pages with code, its own or another's, that it has written to.
    pub(crate) written: Vec<u32>,
}

impl CodeChanges {
    /// There is nothing to tell.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty() && self.written.is_empty()
    }
}

/// A bit for each page of RAM.
#[derive(Debug)]
struct PageBits(Vec<u64>);

impl PageBits {
    fn new(pages: u64) -> Self {
        Self(vec![0; pages.div_ceil(64) as usize])
    }

    fn has(&self, page: u32) -> bool {
        let word = self.0.get(page as usize / 64);
        word.is_some_and(|word| word >> (page % 64) & 1 != 0)
    }

    fn set(&mut self, page: u32, to: bool) {
        if let Some(word) = self.0.get_mut(page as usize / 64) {
            *word = *word & !(1 << (page % 64)) | u64::from(to) << (page % 64);
        }
    }
}

/// Which pages hold decoded code, and which of them were written to.
#[derive(Debug)]
pub(crate) struct CodePages {
    own: PageBits,
    /// Pages of which other processors hold code; none where there are no others.
    others: Option<PageBits>,
    written: Vec<u32>,
    changes: CodeChanges,
    pages: u64,
}

impl CodePages {
    pub(crate) fn new(pages: u64) -> Self {
        Self {
            own: PageBits::new(pages),
            others: None,
            written: Vec::new(),
            changes: CodeChanges::default(),
            pages,
        }
    }

    /// There are other processors, which are told.
    pub(crate) fn share(&mut self) {
        let pages = self.pages;
        self.others.get_or_insert_with(|| PageBits::new(pages));
    }

    pub(crate) fn has(&self, page: u32) -> bool {
        self.own.has(page) || self.is_others(page)
    }

    fn is_others(&self, page: u32) -> bool {
        self.others.as_ref().is_some_and(|others| others.has(page))
    }

    /// There is code now; whether there was none.
    pub(crate) fn set(&mut self, page: u32) -> bool {
        let new = !self.has(page);
        if self.others.is_some() && !self.own.has(page) {
            self.changes.held.push(page);
        }
        self.own.set(page, true);
        new
    }

    /// Another processor has code there; whether nobody had.
    pub(crate) fn set_others(&mut self, page: u32) -> bool {
        let new = !self.has(page);
        if let Some(others) = &mut self.others {
            others.set(page, true);
        }
        new
    }

    /// The page is written to: its code is none any more.
    pub(crate) fn write(&mut self, page: u32) {
        if !self.has(page) {
            return;
        }
        if let Some(others) = &mut self.others {
            others.set(page, false);
            self.changes.written.push(page);
        }
        self.forget(page);
    }

    /// Another processor has written to the page.
    pub(crate) fn written_by_others(&mut self, page: u32) {
        if let Some(others) = &mut self.others {
            others.set(page, false);
        }
        self.forget(page);
    }

    fn forget(&mut self, page: u32) {
        if self.own.has(page) {
            self.own.set(page, false);
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

    /// What others are to be told.
    pub(crate) fn take_changes(&mut self) -> CodeChanges {
        std::mem::take(&mut self.changes)
    }

    /// No page has code of this processor's.
    pub(crate) fn clear(&mut self) {
        self.own.0.fill(0);
        self.written.clear();
    }
}
