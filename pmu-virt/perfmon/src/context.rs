//! One context: its event sets, its session with the tool, and what comes of commands,
//! counts and overflows.
//!
//! Sets, session, notices, throttle and sampler own their state and know nothing of each
//! other. [`Context`] lets them meet, in the order that is written here.

#[cfg(test)]
mod flow_tests;
mod ibs;
mod notice;
mod registers;
mod requests;
mod session;
mod set;
mod sets;
mod verdict;

pub use notice::Account;
pub use registers::How;
pub(crate) use registers::{Bad, UNKNOWN};
pub use session::Phase;

use std::num::NonZeroU64;
use std::sync::Arc;

use perfmon_abi::consts::{PFM_FL_OVFL_NO_MSG, PFM_FL_SYSTEM_WIDE, PFM_MAX_PMDS};
use perfmon_abi::wire::{Call, Errno, Refusal, last};
use perfmon_abi::{PmcArg, PmdArg, StartArg};
use pmu_model::ibs::IbsSample;
use pmu_model::{CountRequest, CounterId, IbsKind, Nanos, Provenance, VirtualPmd};

use super::bits::PmdBits;
use super::description::{LogicalPmu, PmdKind};
use super::format::{Control, OverflowArg, Sampler, Wish};
use super::moment::{MessageQueue, Moment, Quantities};
use super::throttle::Throttle;
use notice::{Notices, Origin};
use requests::Requests;
use session::Session;
use set::{EventSet, Period};
use sets::EventSets;
use verdict::{Answers, Verdict};

/// A counter that is to count now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Index of the PMD.
    pub pmd: u16,
    pub request: CountRequest,
    /// Events until its overflow; `None` if nobody waits for it.
    pub until: Option<NonZeroU64>,
}

/// A context, without its place on a core.
#[derive(Debug)]
pub struct Context {
    requests: Requests,
    sets: EventSets,
    session: Session,
    notices: Notices,
    throttle: Throttle,
    sampler: Option<Sampler>,
}

/// Nobody tells a quantity of a VM that has ended: what was kept is known.
struct Ended;

impl Quantities for Ended {
    fn read(&self, _: VirtualPmd) -> Option<u64> {
        None
    }
}

/// Its commands.
impl Context {
    /// A context that is attached to nothing, with set 0 (3.1.1).
    ///
    /// # Errors
    /// EINVAL: `flags` has bits that are not defined, or a combination that
    /// table 3.2 excludes.
    pub fn new(
        pmu: Arc<LogicalPmu>,
        flags: u32,
        sampler: Option<Sampler>,
    ) -> Result<Self, Refusal> {
        let session = Session::new(flags)?;
        let depth = sampler.as_ref().map_or(notice::DEPTH, Sampler::queue_depth);
        Ok(Context {
            requests: Requests::new(pmu),
            sets: EventSets::new(),
            notices: Notices::new(depth, session.has_flag(PFM_FL_OVFL_NO_MSG)),
            session,
            throttle: Throttle::default(),
            sampler,
        })
    }

    /// Carries out a command for this context. The caller has settled its counts
    /// before, and brings the counters in line with [`Context::wanted`] after,
    /// also when the command fails: elements before the bad one are done.
    ///
    /// # Errors
    /// The specification's for the command; EINVAL for a command that is not for
    /// an existing context, or needs its host (creation, load, unload of one that
    /// is attached, the configuration).
    pub fn call(&mut self, call: &mut Call, values: &dyn Quantities) -> Result<(), Refusal> {
        let pmu = self.requests.pmu();
        match call {
            Call::WritePmcs(vector) => self.sets.write_pmcs(pmu, vector),
            Call::WritePmds(vector) => self.sets.write_pmds(pmu, vector),
            Call::ReadPmds(vector) => self.read_pmds(vector, values),
            Call::Start(start) => self.start(*start),
            Call::Stop => self.session.stop(),
            Call::Restart => self.restart(),
            Call::CreateEvtsets(vector) => {
                self.session.check_sets_may_change()?;
                let sampler = self.sampler.as_ref();
                let only_set_0 = sampler.is_some_and(|it| it.format().only_set_0());
                self.sets.create(vector, only_set_0)
            }
            Call::DeleteEvtsets(vector) => {
                self.session.check_sets_may_change()?;
                self.sets.delete(vector)
            }
            Call::GetinfoEvtsets(vector) => self.sets.getinfo(vector),
            Call::GetinfoPmcs(vector) => pmu.getinfo_pmcs(vector),
            Call::GetinfoPmds(vector) => pmu.getinfo_pmds(vector),
            Call::Unload => {
                self.session.check_unload()?;
                not_for_contexts(call)
            }
            Call::Create(..)
            | Call::Load(_)
            | Call::TryLoad(_)
            | Call::SetConfig(_)
            | Call::GetConfig(_) => not_for_contexts(call),
        }
    }

    fn read_pmds(&mut self, vector: &mut [PmdArg], values: &dyn Quantities) -> Result<(), Refusal> {
        let pmu = self.requests.pmu();
        for arg in vector {
            let quantity = match pmu.pmd(arg.num).map(|pmd| pmd.what) {
                Some(PmdKind::Virtual(which)) => self.session.quantity(which, values),
                _ => None,
            };
            self.sets.read_pmd(pmu, arg, quantity)?;
        }
        Ok(())
    }

    /// Time is accounted as it passes, so that the second of two starts changes
    /// nothing, the duration included.
    fn start(&mut self, start: Option<StartArg>) -> Result<(), Refusal> {
        self.session.check_start()?;
        let active = self.sets.active();
        let named = start.map(|start| start.set);
        let set = named.unwrap_or(active);
        self.sets.check_exists("start_set", set)?;
        if self.session.start(named, active) {
            self.sets.designate(set);
        }
        Ok(())
    }

    /// PFM_RESTART: the tool has dealt with a notification (§3.1.9, §3.5.15).
    ///
    /// PMDs that overflowed and were not reset are, with their long reset value;
    /// the vCPU goes on; a switch of sets that was put off takes place;
    /// monitoring resumes. A format decides on the first and the last of these.
    ///
    /// # Errors
    /// EBUSY: the context is not loaded, or not masked and without a format that
    /// can be restarted then. Others: the format's.
    fn restart(&mut self) -> Result<(), Refusal> {
        let active = self.session.check_restart()?;
        let control = match &mut self.sampler {
            Some(sampler) => sampler.restart(active)?,
            // Without a format nothing masks but what the tool was told of, so that
            // there is always something to finish.
            None if active => {
                let reason = "monitoring is not masked: there is no notification to finish";
                return Err(Refusal::new(Errno::EBUSY, reason));
            }
            None => Control {
                reset_ovfl_pmds: true,
                ..Control::default()
            },
        };
        let pmu = self.requests.pmu();
        if control.reset_ovfl_pmds {
            self.sets.restart(pmu);
        }
        if self.session.restart(control.mask_monitoring) {
            self.sets.switch(pmu, Period::Long);
        }
        Ok(())
    }

    /// Whether it can be loaded with `set` first (3.1.7).
    ///
    /// # Errors
    /// EBUSY: it is loaded. EINVAL: there is no such set, or an explicit link
    /// leads to none.
    pub fn prepare_load(&self, set: u16) -> Result<(), Refusal> {
        self.session.check_load()?;
        self.sets.check_exists("load_set", set)?;
        self.sets.check_links()
    }

    /// It has been attached; `set` is active, nothing counts before PFM_START.
    /// What an earlier load left unhandled is forgotten.
    pub fn attached(&mut self, set: u16) {
        self.session.attach();
        self.sets.begin(set);
    }

    /// It has been detached. The PMDs keep their values, the active set is no
    /// longer told.
    pub fn detached(&mut self) {
        self.session.detach();
        self.sets.end();
    }

    /// Keeps the quantities of the VMM for reads after the context is detached.
    /// To be called before it is.
    pub fn keep_quantities(&mut self, values: &dyn Quantities) {
        self.session.keep_quantities(values);
    }

    /// What its event sets and PMDs read from now on ([`last`]); `None` while it is
    /// attached.
    #[must_use]
    pub fn last_counts(&mut self) -> Option<Vec<u8>> {
        if self.session.phase() != Phase::Unloaded {
            return None;
        }
        let (mut sets, mut pmds) = self.sets.all_reads(self.requests.pmu());
        self.sets.getinfo(&mut sets).ok()?;
        self.read_pmds(&mut pmds, &Ended).ok()?;
        let of_vmm = VirtualPmd::ALL.iter().map(|which| which.pmd());
        let shared = of_vmm.min().unwrap_or(u16::MAX);
        Some(last::encode(&sets, &pmds, shared))
    }
}

fn not_for_contexts(call: &Call) -> Result<(), Refusal> {
    let reason = format!("command {} is not for the context itself", call.command());
    Err(Refusal::new(Errno::EINVAL, reason))
}

/// What it wants counted, and what was counted.
impl Context {
    /// Per set: its number, and PMD and request of each counter that can advance.
    #[must_use]
    pub fn demands(&self) -> Vec<(u16, Vec<(u16, CountRequest)>)> {
        self.sets.demands(&self.requests)
    }

    /// What a write of a control would ask for, if that control exists and
    /// would count.
    #[must_use]
    pub fn request_of(&self, write: &PmcArg) -> Option<CountRequest> {
        self.sets.get(write.set)?;
        self.requests.of_write(write.num, write.value)
    }

    /// What the control that `write` names asks for at present, if it exists and counts.
    #[must_use]
    pub fn present_request(&self, write: &PmcArg) -> Option<CountRequest> {
        let value = self.sets.get(write.set)?.pmc_value(write.num)?;
        self.requests.of_write(write.num, value)
    }

    /// The counter behind a PMD; one that is not counted on slots, as virtual
    /// PMDs are, stands for the first.
    #[must_use]
    pub fn counter_of(&self, pmd: u16) -> CounterId {
        match self.requests.pmu().pmd(pmd).map(|pmd| pmd.what) {
            Some(PmdKind::Counter { counter, .. }) => counter,
            _ => CounterId::Programmable(0),
        }
    }

    /// The counters of the active set that are to count now; none while the
    /// context is detached, stopped or masked.
    #[must_use]
    pub fn wanted(&self) -> Vec<Wanted> {
        if !self.session.counts() {
            return Vec::new();
        }
        self.sets.wanted(&self.requests, self.sampler.is_some())
    }

    /// `events` have taken place at a counter of the active set. A wrap waits for
    /// [`Context::overflow`]; the value goes on from it, and several wraps at
    /// once are one overflow.
    pub fn count(&mut self, pmd: u16, events: u64, provenance: Provenance) {
        self.sets
            .count(self.requests.pmu(), pmd, events, provenance);
    }

    /// A counter of the active set was to count for a time in which nobody did.
    pub fn lose(&mut self, pmd: u16) {
        self.sets.lose(self.requests.pmu(), pmd);
    }

    /// `time` has passed in which the context was on its vCPU's core, or on its
    /// core. Time that counts is all the active set's, also what exceeds its
    /// timeout: the events of that time went to this set, and a rate needs both.
    /// `counted` is false for idle time of the core, in which nothing is counted:
    /// timeouts run on, the duration of a set with PFM_SETFL_EXCL_IDLE does not,
    /// and what exceeds [`Context::switch_due`] waits for [`Context::expire`],
    /// which gives it to the sets whose turn it was. Nothing passes while the
    /// context is stopped or masked.
    pub fn pass(&mut self, time: Nanos, counted: bool) {
        if !self.session.counts() {
            return;
        }
        if counted {
            self.sets.pass(time);
        } else {
            // A vCPU that is halted is no idle core.
            self.sets.idle(time, !self.is_system_wide());
        }
    }

    /// Time until the time switch; `None` if none is going to come.
    #[must_use]
    pub fn switch_due(&self) -> Option<Nanos> {
        let counts = self.session.counts();
        counts.then(|| self.sets.switch_due()).flatten()
    }

    /// The set's time is up: the next one becomes active. Where the time of
    /// several is up, as after an idle time, they take turns; what is then left
    /// of the time goes to the last. Does nothing while monitoring is stopped or
    /// masked, and while an overflow of the active set is waiting for
    /// [`Context::overflow`], or a sample for [`Context::sampled`]: it belongs to that set.
    pub fn expire(&mut self) {
        if self.session.counts() {
            self.sets.expire(self.requests.pmu());
        }
    }

    /// Of what can be counted for the samplers, chooses the best that `counts`; where
    /// nothing does, the last says so.
    pub fn choose_for_samplers(&mut self, counts: impl FnMut(&CountRequest) -> bool) {
        self.requests.choose_for_samplers(counts);
    }

    /// Whether any of its sets uses a sampler.
    #[must_use]
    pub fn uses_sampler(&self, kind: IbsKind) -> bool {
        self.sets.uses_sampler(self.requests.pmu(), kind)
    }

    /// The sampler that a write of a control would use, if that control exists.
    #[must_use]
    pub fn sampler_wanted(&self, write: &PmcArg) -> Option<IbsKind> {
        self.requests.sampler_of_write(write)
    }

    /// A sampler of the active set has come to its maximum, and its sample is to be taken.
    #[inline]
    #[must_use]
    pub fn sample_due(&self) -> Option<IbsKind> {
        self.sets.sample_due(self.requests.pmu())
    }

    /// Whether a sample may fall due while the vCPU runs.
    #[must_use]
    pub fn may_sample(&self) -> bool {
        self.session.counts() && self.sets.may_sample(self.requests.pmu())
    }

    /// Takes in a sample that was due; false if none was. The PMD of the sampler's control
    /// has overflowed then.
    pub fn sampled(&mut self, sample: &IbsSample) -> bool {
        self.sets.sampled(self.requests.pmu(), sample)
    }
}

/// Overflows (§3.4.3, §3.5.14, §3.7.6).
impl Context {
    /// A counter has wrapped, and [`Context::overflow`] has not been called.
    #[must_use]
    pub fn has_pending_overflow(&self) -> bool {
        self.sets.has_pending()
    }

    /// Deals with the overflows of the active set that [`Context::count`] found.
    /// `moment`: where the vCPU is. `values`: the quantities behind virtual PMDs
    /// that a sample may ask for.
    ///
    /// First everything is decided: what the format, or the absence of one, asks
    /// for; which thresholds were reached; whether the tool can be told. Then the
    /// effects follow in their order: mask, switch of sets, notification, short
    /// reset. A mask puts switch and reset off until PFM_RESTART.
    pub fn overflow(
        &mut self,
        moment: &Moment,
        values: &dyn Quantities,
        queue: &mut dyn MessageQueue,
    ) {
        let pending = self.sets.take_pending();
        if pending.is_empty() {
            return;
        }
        // After the switch, messages and resets are still of the set that overflowed.
        let from = self.origin();
        let set = from.active_set;
        if self.session.phase() != Phase::Loaded {
            self.notices.note_spurious();
            self.sets.keep(set, pending);
            return;
        }
        self.notices.note_overflow();
        let reached = self.sets.lower_thresholds(pending);
        let mut verdict = if self.sampler.is_some() {
            self.ask_format(pending, moment, values)
        } else {
            self.without_format(pending, reached)
        };
        let throttled = self.throttle.hit(moment.tsc);
        verdict.mask |= throttled || (verdict.notify && self.notices.cannot_notify(queue));

        self.session.overflowed(moment, verdict.mask, verdict.block);
        let kept = if verdict.mask {
            self.sets.note_masked(set);
            pending
        } else {
            verdict.keep.difference(verdict.reset)
        };
        self.sets.keep(set, kept);
        let pmu = self.requests.pmu();
        if !reached.is_empty() {
            self.sets.note_triggers(reached);
            if self.session.switches_now() {
                self.sets.switch(pmu, Period::Short);
            }
        }
        if verdict.notify {
            self.notices.notify(from, pending, queue);
        }
        if throttled {
            self.notices.throttled(from, queue);
        }
        if !verdict.mask {
            self.sets.reset(pmu, set, verdict.reset, Period::Short);
        }
    }

    fn without_format(&self, pending: PmdBits, reached: PmdBits) -> Verdict {
        let Some(set) = self.sets.active_set() else {
            return Verdict::default();
        };
        let pmu = self.requests.pmu();
        let asks = pending.iter().any(|pmd| set.pmc_of(pmu, pmd).notifies());
        Verdict::without_format(asks, set.triggers_among(pending), reached)
    }

    /// The format's handler for each PMD, by ascending index. The first error is
    /// the end of it.
    fn ask_format(
        &mut self,
        pending: PmdBits,
        moment: &Moment,
        values: &dyn Quantities,
    ) -> Verdict {
        let mut answers = Answers::default();
        if let (Some(set), Some(sampler)) = (self.sets.active_set(), &mut self.sampler) {
            let overflow = Overflow {
                pmu: self.requests.pmu(),
                number: self.sets.active(),
                set,
                moment,
                values,
            };
            let mut room = [0; PFM_MAX_PMDS as usize];
            for pmd in pending.iter() {
                let mut arg = overflow.arg(pmd, sampler.wish(), &mut room);
                let recorded = sampler.record(&mut arg, moment);
                answers.add(pmd, arg.notify, arg.control);
                if recorded.is_err() {
                    break;
                }
            }
        }
        answers.verdict(pending)
    }

    fn origin(&self) -> Origin {
        Origin {
            active_set: self.sets.active(),
            generation: self.session.generation(),
        }
    }
}

/// What a format may be told of an interrupt's overflows.
struct Overflow<'a> {
    pmu: &'a LogicalPmu,
    number: u16,
    set: &'a EventSet,
    moment: &'a Moment,
    values: &'a dyn Quantities,
}

impl<'a> Overflow<'a> {
    /// One of them. The values that its PMC asks for are written to `room`.
    fn arg<'b>(&self, pmd: u16, wish: Wish, room: &'b mut [u64]) -> OverflowArg<'b>
    where
        'a: 'b,
    {
        let (pmc, state) = (self.set.pmc_of(self.pmu, pmd), self.set.pmd(pmd));
        for (num, place) in pmc.smpl_pmds.iter().zip(room.iter_mut()) {
            *place = self.value(num);
        }
        OverflowArg {
            ovfl_pmd: pmd,
            active_set: self.number,
            last_reset: state.last_reset,
            value: self.value(pmd),
            eventid: pmc.eventid,
            notify: pmc.notifies(),
            smpl_pmds: pmc.smpl_pmds,
            values: room.get(..pmc.smpl_pmds.len()).unwrap_or_default(),
            guest: self.values.guest().filter(|_| !wish.is_empty()),
            num_pmds: u16::try_from(self.pmu.pmds().len()).unwrap_or(u16::MAX),
            control: Control::default(),
        }
    }

    /// What a sample says of a PMD.
    fn value(&self, num: u16) -> u64 {
        let Some(pmd) = self.pmu.pmd(num) else {
            return UNKNOWN;
        };
        let PmdKind::Virtual(which) = pmd.what else {
            return self.set.sampled_value(pmd);
        };
        let value = self.moment.value(which);
        value.or_else(|| self.values.read(which)).unwrap_or(UNKNOWN)
    }
}

/// What its host tells it, and asks of it.
impl Context {
    /// From now on, how often it may interrupt. A new context may as often as it
    /// likes: only its host knows the frequency of the TSC.
    pub fn set_throttle(&mut self, throttle: Throttle) {
        self.throttle = throttle;
    }

    /// Others have taken its counters.
    pub fn preempted(&mut self, queue: &mut dyn MessageQueue) {
        self.notices.preempted(self.origin(), queue);
    }

    /// It has its counters again, after a `blind` time without. The message
    /// tells all blind nanoseconds that none has told before, and how often it
    /// was preempted since it was made.
    pub fn restored(&mut self, blind: Nanos, queue: &mut dyn MessageQueue) {
        self.notices.restored(self.origin(), blind, queue);
    }

    /// Its vCPU or its VM has ended, and it is detached. No flag suppresses this
    /// message, nor does a full queue.
    pub fn ended(&mut self, queue: &mut dyn MessageQueue) {
        self.notices.ended(self.origin(), queue);
    }

    /// What has happened to it besides counting.
    #[must_use]
    pub fn account(&self) -> &Account {
        self.notices.account()
    }

    /// Where it is.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.session.phase()
    }

    /// PFM_START came, and no PFM_STOP since. It may be masked nevertheless.
    #[must_use]
    pub fn is_started(&self) -> bool {
        self.session.is_started()
    }

    /// Nothing counts before PFM_RESTART.
    #[must_use]
    pub fn is_masked(&self) -> bool {
        self.session.phase() == Phase::Masked
    }

    /// Its vCPU is kept off its core until PFM_RESTART.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.session.is_blocked()
    }

    /// It is for a core.
    fn is_system_wide(&self) -> bool {
        self.session.has_flag(PFM_FL_SYSTEM_WIDE)
    }

    /// PFM_FL_*.
    #[must_use]
    pub fn flags(&self) -> u32 {
        self.session.flags()
    }

    /// Counts the times that it was loaded.
    #[must_use]
    pub fn generation(&self) -> u16 {
        self.session.generation()
    }

    /// The event set that is active, or was last.
    #[must_use]
    pub fn active_set(&self) -> u16 {
        self.sets.active()
    }

    /// Number of its event sets.
    #[must_use]
    pub fn set_count(&self) -> usize {
        self.sets.len()
    }

    /// Its sampling format and buffer.
    #[must_use]
    pub fn sampler(&self) -> Option<&Sampler> {
        self.sampler.as_ref()
    }

    /// What its sampling format records of the guest's memory.
    #[must_use]
    pub fn wish(&self) -> Wish {
        self.sampler.as_ref().map_or(Wish::default(), Sampler::wish)
    }
}
