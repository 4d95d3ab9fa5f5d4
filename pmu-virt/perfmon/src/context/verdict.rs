//! What is decided about an interrupt's overflows, before anything of it takes effect.

use crate::bits::PmdBits;
use crate::format::Control;

/// What is to come of an interrupt.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Verdict {
    pub(super) mask: bool,
    pub(super) notify: bool,
    pub(super) block: bool,
    /// PMDs to reset now, unless monitoring is masked.
    pub(super) reset: PmdBits,
    /// PMDs that are left as they are, to be reset later.
    pub(super) keep: PmdBits,
}

impl Verdict {
    /// Notification masks. A counter that does not ask for it just wraps, unless
    /// it is one of the `triggers`: that one is reset, after a switch, which takes place
    /// when any has `reached` its threshold, when its set becomes active again (§3.7.7).
    pub(super) fn without_format(notify: bool, triggers: PmdBits, reached: PmdBits) -> Self {
        Verdict {
            mask: notify,
            notify,
            block: notify,
            reset: if reached.is_empty() {
                triggers
            } else {
                PmdBits::EMPTY
            },
            keep: triggers,
        }
    }
}

/// What a format has answered to the overflows of one interrupt so far.
#[derive(Debug, Default)]
pub(super) struct Answers {
    any: Control,
    reset: PmdBits,
    /// A counter that asks for notification overflowed, or gets one.
    asks: bool,
    notify: bool,
}

impl Answers {
    /// `asks`: the PMC of `pmd` asks for notification.
    pub(super) fn add(&mut self, pmd: u16, asks: bool, answer: Control) {
        self.asks |= asks;
        self.notify |= answer.notify_user && asks;
        self.any.notify_user |= answer.notify_user;
        self.any.block_thread |= answer.block_thread;
        self.any.mask_monitoring |= answer.mask_monitoring;
        if answer.reset_ovfl_pmds {
            self.reset.insert(pmd);
        }
    }

    /// PMDs that the format was not asked about are reset at a restart.
    pub(super) fn verdict(self, overflowed: PmdBits) -> Verdict {
        let any = self.any;
        Verdict {
            mask: any.mask_monitoring,
            // A format that stops, as a full buffer does, tells whoever asked
            // for notification by any of the overflowed counters (§3.6.5).
            notify: self.notify || (any.notify_user && any.mask_monitoring && self.asks),
            block: any.block_thread,
            reset: self.reset,
            keep: overflowed,
        }
    }
}
