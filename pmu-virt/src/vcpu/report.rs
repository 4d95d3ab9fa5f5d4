//! What a vCPU's counters count, for people and tools, and for the guest: the
//! accounting page.

use arbiter::{Access, Cookie, CounterId, Layer, PcrUnit, Verdict};
use pmu_model::accounting::{self, CounterAccount, CounterState, PageRegister, Word};
use pmu_model::{
    CountRequest, LossReason, MsrIndex, Provenance, Reading, Ticks, UnavailableReason,
};

use super::{COUNTERS, Here, Logical, ReadOutcome, VcpuPmu, index_of};
use crate::core_pmu::CorePmu;

/// One counter that the guest uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterReport {
    /// Which counter.
    pub counter: CounterId,
    /// What the guest asked for; `Display` describes it.
    pub event: CountRequest,
    /// Events counted since the guest programmed it, or why there are none.
    pub reading: Reading,
    /// Name of the source that counts; none if nothing does at present.
    pub source: Option<&'static str>,
    /// Guest time in which it was to count.
    pub time_enabled: Ticks,
    /// Guest time in which a physical counter counted for it.
    pub time_running: Ticks,
    /// Why the count is no longer exact, if it once was.
    pub loss: Option<LossReason>,
    /// The guest-visible count at the last settlement.
    pub value: u64,
    /// Whether it is running now.
    pub running: bool,
}

impl VcpuPmu {
    /// The counters in use: those that are bound to a physical counter, those
    /// that should be but cannot, and those that are on but never advance.
    pub fn report(&self, core: Option<&CorePmu>) -> Vec<CounterReport> {
        let core = self.if_here(core);
        self.model
            .counters()
            .filter_map(|counter| self.report_of(core, counter))
            .collect()
    }

    /// True if the guest has enabled a counter in its control, whether or not it
    /// counts, or may believe so as somebody has reserved one: sooner or later its
    /// count is read.
    pub fn has_enabled(&self) -> bool {
        let enabled = |counter| self.request_of(counter).is_some_and(|event| event.enabled);
        let reserved = |unit: &PcrUnit| !unit.bank().held().is_empty();
        self.model.counters().any(enabled) || self.reservations().is_some_and(reserved)
    }

    /// True once the guest has set or started a counter, or has asked for one, since the
    /// PMU's reset, also before it was saved: from then on its guest may read a count at
    /// any time, however long ago the last counter was stopped.
    #[inline]
    pub fn is_programmed(&self) -> bool {
        self.programmed
    }

    pub(super) fn report_of(
        &self,
        core: Option<&CorePmu>,
        counter: CounterId,
    ) -> Option<CounterReport> {
        let logical = &self.counters[index_of(counter)];
        let event = self.request_of(counter)?;
        let time_enabled = logical.times.time_enabled(self.ran);
        let time_running = logical.times.time_running(self.ran);
        let on_core = core.zip(logical.lease.as_ref());
        let on_core = on_core.and_then(|(core, lease)| {
            let (reading, loss) = core.bank.peek(lease)?;
            let source = core.backend().source(lease.slot());
            Some((reading, loss, source))
        });
        let reading = self.reading_of(
            on_core.map(|(reading, ..)| reading),
            logical,
            time_enabled != time_running,
        )?;
        Some(CounterReport {
            counter,
            event,
            reading,
            source: on_core.map(|(_, _, source)| source),
            time_enabled,
            time_running,
            loss: logical
                .loss
                .or_else(|| on_core.and_then(|(_, loss, _)| loss)),
            value: logical.value,
            running: logical.is_running(),
        })
    }

    /// What was counted, or why nothing was; none for a counter not in use.
    fn reading_of(
        &self,
        live: Option<Reading>,
        logical: &Logical,
        shared: bool,
    ) -> Option<Reading> {
        let event = logical.request?;
        let waits = logical.unavailable == Some(UnavailableReason::Waiting);
        if let Some(reason) = logical.unavailable
            && !(waits && logical.provenance.is_some())
        {
            return Some(Reading::Unavailable(reason));
        }
        let (since, provenance) = match live {
            Some(Reading::Counted { value, provenance }) => {
                let all = match logical.provenance {
                    Some(before) => before.and(provenance),
                    None => provenance,
                };
                (
                    logical.lease.map_or(0, |lease| lease.since(value)),
                    Some(all),
                )
            }
            Some(Reading::Unavailable(reason)) => return Some(Reading::Unavailable(reason)),
            None => (0, logical.provenance),
        };
        if let Some(provenance) = provenance {
            return Some(Reading::Counted {
                value: logical.counted.wrapping_add(since),
                provenance: if shared {
                    provenance.and(Provenance::Scaled)
                } else {
                    provenance
                },
            });
        }
        // Nothing was to be counted, so zero is a count somebody took.
        (event.enabled && !event.can_advance()).then_some(Reading::Counted {
            value: 0,
            provenance: Provenance::Exact,
        })
    }
}

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
            // CPUID tells of so many counters, not of which are left out.
            let told = matches!(counter, CounterId::Fixed(n) if n < self.model.fixed());
            return if told {
                ReadOutcome::Value(0)
            } else {
                ReadOutcome::Gp
            };
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
                times.time_enabled(self.ran).0,
                times.time_running(self.ran).0,
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
            loss: match report {
                Some(report) => report.loss,
                None => logical.taken.map(|_| LossReason::Taken),
            },
        }
    }
}
