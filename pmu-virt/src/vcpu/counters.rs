//! The counters as the guest sees them: what each of them is to count and has counted,
//! how long, how exactly, and by which slot.

use std::num::NonZeroU64;

use arbiter::{CounterId, CounterSet};
use pmu_model::accounting::{CounterAccount, CounterState};
use pmu_model::{
    CountRequest, LossReason, Progress, Provenance, Reading, SlotIndex, SlotSet, Ticks, Tsc,
    UnavailableReason,
};

use super::times::Times;
use super::{COUNTERS, index_of};
use crate::assign::Demand;
use crate::core_pmu::CorePmu;
use crate::slot_bank::{Settled, SlotBank, SlotLease};
use crate::state::{CounterName, Hex, SavedCounter};

/// One counter that the guest uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterReport {
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

/// What comes of a settlement.
#[derive(Clone, Copy, Debug)]
pub(super) enum Outcome {
    Nothing,
    /// A carry out of the counter's width, or the event that PEBS waits for.
    Overflow,
    /// Nobody has counted.
    Uncounted(UnavailableReason),
}

/// How a counter is found that was on the core before.
#[derive(Clone, Copy, Debug)]
pub(super) enum Found {
    /// It counts or stands still as it did.
    AsItWas,
    /// It is to count, and has lost its place.
    Displaced,
    /// The same, and there was no place for it before.
    Refused,
}

/// A counter as the guest sees it.
#[derive(Debug, Default)]
struct Logical {
    /// What its control asks for, decoded; `None` until that is written.
    request: Option<CountRequest>,
    /// Count at the last settlement, always within the counter's width.
    value: u64,
    /// Events since the guest programmed it.
    counted: u64,
    /// The physical counter that counts for it.
    lease: Option<SlotLease>,
    /// When it was to count, and when it did.
    times: Times,
    /// How its events were counted, as told at the last settlement.
    provenance: Option<Provenance>,
    /// Why they are no longer exact, as told when it last left a place.
    loss: Option<LossReason>,
    /// What it was to count when it was taken from its owner; told until another event
    /// is selected.
    taken: Option<CountRequest>,
    unavailable: Option<UnavailableReason>,
    /// The core where it was last has no source for the event, and need not be asked
    /// again. Another core may have one.
    dead: Option<UnavailableReason>,
}

impl Logical {
    #[inline]
    fn is_running(&self) -> bool {
        self.lease.as_ref().is_some_and(SlotLease::is_running)
    }
}

/// All counters of one vCPU.
#[derive(Debug)]
pub(super) struct Counters {
    all: [Logical; COUNTERS],
    /// Every counter that has a place, or is wanted and not dead, is among these.
    /// Switches look at no others.
    active: CounterSet,
    /// How long the guest has run, halted time left out.
    ran: Ticks,
    /// TSC at entry, while the guest runs.
    entered: Option<Tsc>,
}

impl Counters {
    pub(super) fn new() -> Self {
        Counters {
            all: std::array::from_fn(|_| Logical::default()),
            active: CounterSet::EMPTY,
            ran: Ticks(0),
            entered: None,
        }
    }

    #[inline]
    fn of(&self, counter: CounterId) -> &Logical {
        &self.all[index_of(counter)]
    }

    #[inline]
    fn of_mut(&mut self, counter: CounterId) -> &mut Logical {
        &mut self.all[index_of(counter)]
    }

    /// After a reset of the guest. The clock goes on.
    pub(super) fn reset(&mut self) {
        for counter in &mut self.all {
            *counter = Logical::default();
        }
        self.active = CounterSet::EMPTY;
    }

    /// Lets the time of the guest pass.
    #[inline]
    pub(super) fn pass(&mut self, progress: &Progress) {
        match *progress {
            Progress::Entered { tsc } => self.entered = Some(tsc),
            Progress::Left { tsc, halted, .. } => {
                let entered = self.entered.take().unwrap_or(tsc);
                self.ran += tsc - entered - halted;
            }
            Progress::Retired { .. }
            | Progress::Delivered { .. }
            | Progress::Executed { .. }
            | Progress::Lost { .. } => {}
        }
    }

    #[inline]
    pub(super) fn ran(&self) -> Ticks {
        self.ran
    }

    pub(super) fn entered(&self) -> Option<Tsc> {
        self.entered
    }

    #[inline]
    pub(super) fn active(&self) -> CounterSet {
        self.active
    }

    pub(super) fn is_any_running(&self) -> bool {
        self.active
            .iter()
            .any(|counter| self.of(counter).is_running())
    }

    pub(super) fn is_running(&self, counter: CounterId) -> bool {
        self.of(counter).is_running()
    }

    /// What the control of `counter` asks for at present.
    #[inline]
    pub(super) fn request(&self, counter: CounterId) -> Option<CountRequest> {
        self.of(counter).request
    }

    /// What a counter that has a place counts.
    pub(super) fn placed_request(&self, counter: CounterId) -> Option<CountRequest> {
        let logical = self.of(counter);
        logical.request.filter(|_| logical.lease.is_some())
    }

    #[inline]
    pub(super) fn value(&self, counter: CounterId) -> u64 {
        self.of(counter).value
    }

    /// The guest has set the count.
    pub(super) fn set_value(&mut self, counter: CounterId, value: u64) {
        let ran = self.ran;
        let logical = self.of_mut(counter);
        logical.value = value;
        logical.times.start_over(ran);
    }

    /// Sets it to its reset value as of a record. Where that came late, what was counted
    /// since the overflow is counted from there on; whole periods of it have no record.
    pub(super) fn reload(&mut self, counter: CounterId, reset: u64, mask: u64, is_late: bool) {
        let since = if is_late {
            self.value(counter) % (mask - reset).saturating_add(1)
        } else {
            0
        };
        self.set_value(counter, reset + since);
    }

    /// Whether a counter is to count, as far as the guest can say.
    pub(super) fn is_wanted(&self, counter: CounterId) -> bool {
        self.of(counter).times.is_enabled()
    }

    /// Those that are to count, as far as the guest can say.
    pub(super) fn wanted(&self) -> CounterSet {
        let wanted = self.active.iter();
        wanted.filter(|one| self.is_wanted(*one)).collect()
    }

    /// Why it does not count although it is to.
    pub(super) fn unavailable(&self, counter: CounterId) -> Option<UnavailableReason> {
        self.of(counter).unavailable
    }

    /// It does not count from now on, for this reason; false if that is known.
    pub(super) fn refuse(&mut self, counter: CounterId, reason: UnavailableReason) -> bool {
        self.of_mut(counter).unavailable.replace(reason) != Some(reason)
    }

    /// Whether it counts, as far as was told.
    pub(super) fn counts(&self, counter: CounterId) -> bool {
        let logical = self.of(counter);
        logical.unavailable.is_none() && logical.is_running()
    }

    /// Whether some counter is wanted that has no place for want of one; what a host
    /// context has may be had again.
    pub(super) fn lack_places(&self, beside_hosts: bool) -> bool {
        self.all.iter().any(|logical| match logical.unavailable {
            Some(UnavailableReason::Conflict(_) | UnavailableReason::Budget { .. }) => true,
            Some(UnavailableReason::Busy { .. }) => beside_hosts,
            _ => false,
        })
    }

    /// The core has no source for what it counts.
    pub(super) fn dead(&self, counter: CounterId) -> Option<UnavailableReason> {
        self.of(counter).dead
    }

    pub(super) fn note_dead(&mut self, counter: CounterId, reason: UnavailableReason) {
        self.of_mut(counter).dead = Some(reason);
        self.active.remove(counter);
    }

    /// Another core may have a source for what the last one had none for.
    pub(super) fn revive(&mut self, counters: CounterSet) {
        for counter in counters.iter() {
            if self.of_mut(counter).dead.take().is_some() {
                self.active.insert(counter);
            }
        }
    }

    /// It is to count from now on.
    pub(super) fn want(&mut self, counter: CounterId) {
        let ran = self.ran;
        self.active.insert(counter);
        self.of_mut(counter).times.enable(ran);
    }

    /// Stops a counter that the guest has disabled. Its place is kept, for
    /// drivers enable it again soon; it goes to whoever needs it. Yields the place.
    pub(super) fn halt(&mut self, counter: CounterId) -> Option<&SlotLease> {
        let ran = self.ran;
        let logical = self.of_mut(counter);
        logical.unavailable = None;
        logical.times.disable(ran);
        let lease = logical.lease.as_mut()?;
        lease.stand();
        Some(lease)
    }

    /// Its control asks for this from now on. True if that is what it counts already.
    pub(super) fn ask(&mut self, counter: CounterId, request: CountRequest) -> bool {
        let before = self.of_mut(counter).request.replace(request);
        before.is_some_and(|before| before.counts_like(&request))
    }

    /// It counts something else from now on; it has left its place.
    pub(super) fn begin_anew(&mut self, counter: CounterId) {
        let logical = self.of_mut(counter);
        let taken = logical.taken.zip(logical.request);
        let taken = taken.filter(|(taken, request)| taken.counts_like(request));
        logical.taken = taken.map(|(taken, _)| taken);
        logical.loss = taken.map(|_| LossReason::Taken);
        logical.counted = 0;
        logical.provenance = None;
        logical.dead = None;
        logical.times = Times::default();
    }

    /// Every place.
    pub(super) fn leases(&self) -> impl Iterator<Item = &SlotLease> {
        self.all.iter().filter_map(|logical| logical.lease.as_ref())
    }

    /// The place of a counter that has one.
    #[inline]
    pub(super) fn lease(&self, counter: CounterId) -> Option<&SlotLease> {
        self.of(counter).lease.as_ref()
    }

    /// The same, to take in what its slot tells.
    #[inline]
    pub(super) fn lease_mut(&mut self, counter: CounterId) -> Option<&mut SlotLease> {
        self.of_mut(counter).lease.as_mut()
    }

    /// Adds what a physical counter has counted since the last settlement. A carry out of
    /// the counter's width is an overflow, as is any event while PEBS `awaits` one; the
    /// counter goes on.
    #[inline]
    pub(super) fn take(
        &mut self,
        counter: CounterId,
        settled: Settled,
        mask: u64,
        awaits: bool,
    ) -> Outcome {
        let ran = self.ran;
        let logical = self.of_mut(counter);
        let (counted, provenance) = match settled {
            Settled::Counted(events, provenance) => (events, provenance),
            Settled::Uncounted(reason) => {
                logical.times.lose(ran);
                return Outcome::Uncounted(reason);
            }
        };
        if logical.unavailable.is_some() {
            // The source counts again, and knows itself what it has missed.
            logical.unavailable = None;
            logical.times.start_over(ran);
            if logical.is_running() {
                logical.times.run(ran);
            }
        }
        // Events of before keep their label, whoever counts now.
        let before = logical.provenance.unwrap_or(provenance);
        logical.provenance = Some(before.and(provenance));
        let events = logical.times.commit(ran, counted);
        if events == 0 {
            return Outcome::Nothing;
        }
        logical.counted = logical.counted.wrapping_add(events);
        let wrapped = events > mask - logical.value;
        logical.value = logical.value.wrapping_add(events) & mask;
        if wrapped || awaits {
            Outcome::Overflow
        } else {
            Outcome::Nothing
        }
    }

    /// Those of which an overflow was told on these slots; their next ones have to be
    /// armed.
    pub(super) fn overflowed_on(&mut self, slots: SlotSet) -> CounterSet {
        let mut overflowed = CounterSet::EMPTY;
        for counter in self.active.iter() {
            if let Some(lease) = &mut self.of_mut(counter).lease
                && slots.contains(lease.slot())
            {
                lease.overflowed();
                overflowed.insert(counter);
            }
        }
        overflowed
    }

    /// In how many events the next overflow is due that somebody waits for. Without INT and
    /// PEBS nobody does: status is settled when it is read. Behind an overflow with PEBS it
    /// is the next event that is waited for.
    #[inline]
    pub(super) fn overflow_in(
        &self,
        counter: CounterId,
        mask: u64,
        has_pebs: bool,
        awaits: bool,
    ) -> Option<NonZeroU64> {
        let logical = self.of(counter);
        let wanted = has_pebs || logical.request.is_some_and(|request| request.int);
        let after = if awaits {
            1
        } else {
            (mask - logical.value).saturating_add(1)
        };
        NonZeroU64::new(after).filter(|_| wanted)
    }

    /// Whether it has a place, and that is still its own.
    pub(super) fn place(&self, counter: CounterId, bank: &SlotBank) -> Option<bool> {
        let lease = self.of(counter).lease.as_ref()?;
        Some(bank.holds(lease))
    }

    pub(super) fn has_place(&self, counter: CounterId) -> bool {
        self.of(counter).lease.is_some()
    }

    /// It has a place from now on.
    pub(super) fn come(&mut self, counter: CounterId, lease: SlotLease) {
        self.active.insert(counter);
        self.of_mut(counter).lease = Some(lease);
    }

    /// Has it count in its place, which is yielded if it stood. Where counters take no turns,
    /// the time until now was refused, not waited for.
    pub(super) fn run(&mut self, counter: CounterId, takes_turns: bool) -> Option<&SlotLease> {
        let ran = self.ran;
        let logical = self.of_mut(counter);
        let refused = matches!(
            logical.unavailable.take(),
            Some(UnavailableReason::Budget { .. })
        );
        let lease = logical.lease.as_mut().filter(|lease| !lease.is_running())?;
        // What was settled last still holds: a stopped slot stands still.
        lease.run();
        logical.times.run(ran);
        if refused || !takes_turns {
            logical.times.start_over(ran);
        }
        Some(lease)
    }

    /// It leaves its place. What was counted there is to be taken in, and
    /// [`Counters::left`] to be called.
    pub(super) fn leave(&mut self, counter: CounterId) -> Option<SlotLease> {
        self.of_mut(counter).lease.take()
    }

    /// It has left its place. The first reason why a count is no longer exact is the one
    /// that counts.
    pub(super) fn left(&mut self, counter: CounterId, loss: Option<LossReason>) {
        let ran = self.ran;
        let logical = self.of_mut(counter);
        logical.loss = logical.loss.or(loss);
        logical.times.stop(ran);
    }

    /// How it is found when its vCPU is back on the core.
    pub(super) fn find(&mut self, counter: CounterId) -> Found {
        let logical = &self.all[index_of(counter)];
        match (logical.times.is_enabled(), logical.unavailable) {
            (false, _) if logical.lease.is_none() => {
                self.active.remove(counter);
                Found::AsItWas
            }
            (true, None) if !logical.is_running() => Found::Displaced,
            (true, Some(_)) if !logical.is_running() => Found::Refused,
            _ => Found::AsItWas,
        }
    }

    /// Leaves nothing of its former owner. A place that it still has stands, and is given
    /// back when the vCPU returns there.
    pub(super) fn clear(&mut self, counter: CounterId) {
        let mut lease = self.leave(counter);
        if let Some(lease) = &mut lease {
            lease.stand();
        } else {
            self.active.remove(counter);
        }
        *self.of_mut(counter) = Logical {
            lease,
            ..Logical::default()
        };
    }

    /// What was to count when it was taken from its owner.
    pub(super) fn note_taken(&mut self, counter: CounterId, request: Option<CountRequest>) {
        self.of_mut(counter).taken = request;
    }

    /// What all counters that are wanted want and can be had. With `turns` none comes first
    /// for having a place already.
    pub(super) fn demands(&self, core: &CorePmu, turns: bool) -> Vec<Demand> {
        let wanted = self.wanted();
        let demand = |counter| {
            let logical = self.of(counter);
            let request = logical.request.as_ref()?;
            Some(Demand {
                counter,
                constraint: core.plan_for_guest(request).ok()?.constraint,
                held: self.slot_on(core, counter),
            })
        };
        let mut demands: Vec<Demand> = wanted.iter().filter_map(demand).collect();
        if !turns {
            // Those that have a place come first, so that they keep one, and
            // then those that were not refused before.
            demands.sort_by_key(|demand| {
                let logical = self.of(demand.counter);
                (demand.held.is_none(), logical.unavailable.is_some())
            });
        }
        demands
    }

    /// The slot that it has on `core`.
    fn slot_on(&self, core: &CorePmu, counter: CounterId) -> Option<SlotIndex> {
        let lease = self.of(counter).lease.as_ref()?;
        core.bank().holds(lease).then(|| lease.slot())
    }

    /// One counter for people and tools; none for one that is not in use.
    pub(super) fn report(
        &self,
        core: Option<&CorePmu>,
        counter: CounterId,
    ) -> Option<CounterReport> {
        let logical = self.of(counter);
        let event = logical.request?;
        let time_enabled = logical.times.time_enabled(self.ran);
        let time_running = logical.times.time_running(self.ran);
        let on_core = core.zip(logical.lease.as_ref());
        let on_core = on_core.and_then(|(core, lease)| {
            let (reading, loss) = core.bank().peek(lease)?;
            let source = core.backend().source(lease.slot());
            Some((reading, loss, source))
        });
        let reading = reading_of(
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

    /// The same for the guest: the words of the accounting page.
    pub(super) fn words(&self, core: Option<&CorePmu>, counter: CounterId) -> [u64; 4] {
        let times = &self.of(counter).times;
        [
            self.account(core, counter).status(),
            times.time_enabled(self.ran).0,
            times.time_running(self.ran).0,
            self.value(counter),
        ]
    }

    fn account(&self, core: Option<&CorePmu>, counter: CounterId) -> CounterAccount {
        let logical = self.of(counter);
        let state = match (logical.request, logical.unavailable) {
            (None, _) => CounterState::Unused,
            (_, Some(UnavailableReason::Waiting)) => CounterState::Waiting,
            (_, Some(_)) => CounterState::Unavailable,
            (_, None) if logical.is_running() => CounterState::Counting,
            (_, None) => CounterState::Stopped,
        };
        let report = self.report(core, counter);
        CounterAccount {
            state,
            reading: report.map(|report| report.reading),
            loss: match report {
                Some(report) => report.loss,
                None => logical.taken.map(|_| LossReason::Taken),
            },
        }
    }

    /// Why counts in these slots are no longer exact is known here from now on.
    pub(super) fn take_losses(&mut self, bank: &SlotBank) {
        for logical in &mut self.all {
            let told = logical.lease.as_ref().and_then(|lease| bank.peek(lease));
            logical.loss = logical.loss.or(told.and_then(|(_, loss)| loss));
        }
    }

    /// A counter for a state. It was settled before.
    pub(super) fn save(&self, counter: CounterId) -> SavedCounter {
        let logical = self.of(counter);
        SavedCounter {
            counter: CounterName(counter),
            value: Hex(logical.value),
            programmed: logical.request.is_some(),
            events: logical.counted,
            time_enabled: logical.times.time_enabled(self.ran).0,
            time_running: logical.times.time_running(self.ran).0,
            time_unaccounted: logical.times.unaccounted(self.ran).0,
            provenance: logical.provenance,
            loss: logical.request.and(logical.loss),
        }
    }

    /// Takes one in after a reset; `request` is what its control asks for.
    pub(super) fn restore(&mut self, saved: &SavedCounter, request: Option<CountRequest>) {
        let logical = self.of_mut(saved.counter.0);
        logical.request = request.filter(|_| saved.programmed);
        logical.value = saved.value.0;
        logical.counted = saved.events;
        logical.times = Times::restored(
            Ticks(saved.time_enabled),
            Ticks(saved.time_running),
            Ticks(saved.time_unaccounted),
        );
        logical.provenance = saved.provenance;
        logical.loss = saved.loss;
    }
}

/// What was counted, or why nothing was; none for a counter not in use. `shared`: it has
/// waited.
fn reading_of(live: Option<Reading>, logical: &Logical, shared: bool) -> Option<Reading> {
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
