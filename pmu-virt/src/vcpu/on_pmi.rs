//! FREEZE_PERFMON_ON_PMI: a PMI stops the counters.
//!
//! The legacy freeze, that of versions 2 and 3: when a counter overflows that
//! asks for a PMI, the enable bits of the global control register are cleared,
//! and software sets them again (SDM vol. 3B, "Freezing LBR and Performance
//! Counters on PMI"). The control bit lies in IA32_DEBUGCTL, whose other bits are
//! the processor's.

use arbiter::{CounterId, Shared};
use pmu_model::{DEBUGCTL, MsrIndex};

use super::{Here, MsrWrite, ReadOutcome, VcpuPmu, WriteOutcome};

/// `IA32_DEBUGCTL.FREEZE_PERFMON_ON_PMI`.
const FREEZE_PERFMON_ON_PMI: u64 = 1 << 12;

/// Whether PMIs stop the counters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Freeze {
    /// The guest wants it.
    pub(super) on: bool,
    /// There was a PMI that did not take effect yet.
    due: bool,
}

impl VcpuPmu {
    /// RDMSR of an MSR that the model shares with the processor.
    pub(super) fn read_shared_msr(&self, msr: MsrIndex) -> Option<ReadOutcome> {
        let bits = u64::from(self.freeze.on) * FREEZE_PERFMON_ON_PMI;
        self.shares(msr).then_some(ReadOutcome::Merge(bits))
    }

    /// WRMSR of an index that the model does not have: one that it shares with the
    /// processor, or none of ours.
    pub(super) fn write_shared_msr(&self, msr: MsrIndex, value: u64) -> MsrWrite {
        if !self.shares(msr) {
            return WriteOutcome::NotHandled.into();
        }
        MsrWrite {
            rest: Some(value & !FREEZE_PERFMON_ON_PMI),
            ..WriteOutcome::Done.into()
        }
    }

    /// The processor has taken its bits of a write, [`MsrWrite::rest`]; `value` is what the guest wrote.
    pub fn rest_taken(&mut self, msr: MsrIndex, value: u64) {
        if self.shares(msr) {
            self.freeze.on = value & FREEZE_PERFMON_ON_PMI != 0;
        }
    }

    fn shares(&self, msr: MsrIndex) -> bool {
        msr == DEBUGCTL && self.model.can_freeze()
    }

    /// A counter has overflowed that asks for a PMI. That of a counter which
    /// freezing does not reach stops no others: its owner keeps out of it.
    pub(super) fn note_pmi(&mut self, counter: CounterId) {
        let reached = || self.reached_by(Shared::Freeze).contains(counter);
        self.freeze.due |= self.freeze.on && reached();
    }

    /// Lets a PMI that has just been noted stop the counters. The bits that are
    /// cleared are those that the guest can set again: of counters that have a
    /// legacy name, and whose owners let both freezing and the global control
    /// register reach them.
    #[inline]
    pub(super) fn freeze_if_due(&mut self, here: &mut Here<'_>) {
        if std::mem::take(&mut self.freeze.due) {
            self.freeze_counters(here);
        }
    }

    #[cold]
    fn freeze_counters(&mut self, here: &mut Here<'_>) {
        let frozen = self.touchable(Shared::GlobalControl) & self.touchable(Shared::Freeze);
        self.write_global_control(here, self.global_control & !frozen.bits());
        // Counters that were settled for it may have overflowed as well; all
        // that can be stopped has been.
        self.freeze.due = false;
    }

    /// Before an access, so that it finds the counters as the last PMI left them.
    #[inline]
    pub(super) fn settle_freeze(&mut self, here: &mut Here<'_>) {
        if self.freeze.on {
            self.settle_all(here);
            self.freeze_if_due(here);
        }
    }
}
