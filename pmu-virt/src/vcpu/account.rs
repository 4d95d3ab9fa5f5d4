//! The accounting page: a snapshot of every counter, and reading it.

use arbiter::{Access, Cookie, CounterId, Layer, Verdict};
use pmu_model::accounting::{self, CounterAccount, CounterState, PageRegister, Word};
use pmu_model::{MsrIndex, UnavailableReason};

use super::{COUNTERS, Here, ReadOutcome, VcpuPmu, index_of};
use crate::core_pmu::CorePmu;

/// What the page shows: the words of every counter at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Snapshot {
    /// How many were taken.
    pub(super) sequence: u64,
    /// By position in `VcpuPmu::counters` and by [`Word`].
    pub(super) counters: [[u64; 4]; COUNTERS],
}

impl VcpuPmu {
    /// RDMSR of an index that the model does not have.
    pub(super) fn read_page(
        &mut self,
        here: &mut Here<'_>,
        msr: MsrIndex,
        layer: Layer,
    ) -> ReadOutcome {
        match accounting::decode(msr) {
            Some(PageRegister::Snapshot) => {
                self.take_snapshot(here);
                ReadOutcome::Value(self.snapshot.sequence)
            }
            Some(PageRegister::Sequence) => ReadOutcome::Value(self.snapshot.sequence),
            Some(PageRegister::Word(counter, word)) => self.read_word(counter, word, layer),
            None if accounting::contains(msr) => ReadOutcome::Gp,
            None => ReadOutcome::NotHandled,
        }
    }

    /// A counter that the reader may not use is as absent here as at its own
    /// register; but where that yields a value, the status word tells.
    fn read_word(&mut self, counter: CounterId, word: Word, layer: Layer) -> ReadOutcome {
        if !self.model.has(counter) {
            return ReadOutcome::Gp;
        }
        let caller = (layer, Cookie::DEFAULT);
        let verdict = self.judge(caller, counter, Access::Read);
        if verdict == Verdict::Permit {
            let words = &self.snapshot.counters[index_of(counter)];
            return ReadOutcome::Value(words[word as usize]);
        }
        if let (Verdict::Drop { .. }, Word::Status) = (verdict, word) {
            return ReadOutcome::Value(CounterAccount::NOT_GRANTED.status());
        }
        self.note_denied(caller, counter, Access::Read, verdict);
        match verdict {
            Verdict::Drop { read_as } => ReadOutcome::Value(read_as),
            Verdict::Fault | Verdict::Permit => ReadOutcome::Gp,
        }
    }

    fn take_snapshot(&mut self, here: &mut Here<'_>) {
        self.settle_all(here);
        self.snapshot.sequence = self.snapshot.sequence.wrapping_add(1);
        for counter in self.model.counters() {
            let index = index_of(counter);
            let times = &self.counters[index].times;
            self.snapshot.counters[index] = [
                self.account_of(here.as_deref(), counter).status(),
                times.time_enabled(self.ran),
                times.time_running(self.ran),
                self.counters[index].value,
            ];
        }
    }

    /// What a counter is doing. It was settled before.
    fn account_of(&self, core: Option<&CorePmu>, counter: CounterId) -> CounterAccount {
        let logical = &self.counters[index_of(counter)];
        let state = match (logical.request, logical.unavailable) {
            (None, _) => CounterState::Unused,
            (_, Some(UnavailableReason::Waiting)) => CounterState::Waiting,
            (_, Some(_)) => CounterState::Unavailable,
            (_, None) if logical.is_running() => CounterState::Counting,
            (_, None) => CounterState::Stopped,
        };
        let report = self.report_of(core, counter);
        CounterAccount {
            state,
            reading: report.map(|report| report.reading),
            loss: report.and_then(|report| report.loss),
        }
    }
}
