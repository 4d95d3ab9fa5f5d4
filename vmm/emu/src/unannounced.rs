//! Instructions that CPUID does not announce, for whoever wants to tell the user why a program
//! gets #UD.

use std::collections::BTreeSet;

use iced_x86::Code;

/// An instruction that raised #UD because CPUID does not announce it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotAnnounced {
    /// RIP of the instruction.
    pub rip: u64,
    /// What it is; [`Code::cpuid_features`] says what it would need.
    pub code: Code,
}

/// Each is told once; there are as many as the decoder has codes. They are no part of the
/// guest's state.
#[derive(Debug, Default)]
pub(crate) struct Unannounced {
    known: BTreeSet<Code>,
    waiting: Vec<NotAnnounced>,
}

impl Unannounced {
    pub(crate) fn met(&mut self, code: Code, rip: u64) {
        if self.known.insert(code) {
            self.waiting.push(NotAnnounced { rip, code });
        }
    }

    /// Those that have not been told yet, in their order.
    pub(crate) fn take(&mut self) -> Vec<NotAnnounced> {
        std::mem::take(&mut self.waiting)
    }
}
