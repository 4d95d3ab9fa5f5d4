//! Who counts where: controls and slots are brought in line, for the guest and for host
//! contexts, in one order. It is here that the values meet; none of them calls another.

use arbiter::{CounterId, CounterSet, Effects};
use pmu_model::ibs::IbsSample;
use pmu_model::{
    IbsKind, IbsRegister, MAX_FIXED, MAX_PROGRAMMABLE, Progress, Register, SlotSet, Ticks, Tsc,
    Unavailable, UnavailableReason, written_count,
};

use super::access::Part;
use super::counters::Found;
use super::hosts::Hosts;
use super::page::Page;
use super::placer::{Ground, Moves, Oversubscribe, Placer};
use super::registers::Plan;
use super::saved;
use super::seat::Seat;
use super::tally::Tally;
use super::terms::counters_there;
use super::{COUNTERS, Needs, ReadOutcome, index_of};
use crate::core_pmu::CorePmu;
use crate::moment::{self, Moment};
use crate::slot_bank::Claimant;
use crate::state::{CounterName, Hex, PmuState, SavedCounter};

/// The counters of one vCPU and of its host contexts, and their places.
#[derive(Debug)]
pub(super) struct Counting {
    tally: Tally,
    placer: Placer,
    hosts: Hosts,
    page: Page,
    needs: Needs,
    /// The guest has set or started a counter, or has asked for one.
    programmed: bool,
}

impl Counting {
    pub(super) fn new(tally: Tally) -> Self {
        Counting {
            tally,
            placer: Placer::default(),
            hosts: Hosts::default(),
            page: Page::new(),
            needs: Needs::default(),
            programmed: false,
        }
    }

    /// More counters than the core has are answered so.
    pub(super) fn set_answer(&mut self, answer: Oversubscribe) {
        self.placer = Placer::new(answer);
    }

    /// Brings every register to its reset value, and stops and frees every slot of the
    /// guest. Host contexts go on: the guest does not know of them.
    pub(super) fn reset(&mut self, seat: &mut Seat<'_>) {
        self.tally.reset(seat);
        self.placer.reset();
        self.page = Page::new();
        self.programmed = false;
        self.refresh_needs(seat);
    }

    #[inline]
    pub(super) fn tally(&self) -> &Tally {
        &self.tally
    }

    #[inline]
    pub(super) fn tally_mut(&mut self) -> &mut Tally {
        &mut self.tally
    }

    #[inline]
    pub(super) fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    #[cfg(feature = "contexts")]
    pub(super) fn hosts_mut(&mut self) -> &mut Hosts {
        &mut self.hosts
    }

    /// The guest's counters, for who changes its contexts.
    #[cfg(feature = "contexts")]
    pub(super) fn beside_hosts(&mut self) -> (&Tally, &mut Hosts) {
        (&self.tally, &mut self.hosts)
    }

    pub(super) fn page(&self) -> &Page {
        &self.page
    }

    #[inline]
    pub(super) fn needs(&self) -> Needs {
        self.needs
    }

    #[inline]
    pub(super) fn is_programmed(&self) -> bool {
        self.programmed
    }

    /// The guest has made a write that sets or starts a counter, or is a step towards that.
    #[inline]
    pub(super) fn note_programmed(&mut self, programmed: bool) {
        self.programmed |= programmed;
    }

    pub(super) fn refresh_needs(&mut self, seat: &Seat<'_>) {
        let core = seat.core();
        let mut running = self.tally.counters().is_any_running();
        let mut active = false;
        if self.hosts.are_present() {
            running |= core.is_some_and(|core| core.bank().is_counting());
            active = self.hosts.are_active(core);
        }
        self.needs = match core {
            Some(core) => Needs {
                ring: running && core.backend().needs_ring(),
                stepping: running && core.backend().needs_stepping(),
                // Turns go on where none of the first counters could be had.
                counting: running || active || self.placer.is_active(),
            },
            None => Needs::default(),
        };
    }

    /// Makes a write take place that was checked, with all that follows. The status may
    /// let counters start or stop: that is a second round, and there is no third.
    pub(super) fn write(&mut self, seat: &mut Seat<'_>, plan: Plan) {
        let mut next = Some(plan);
        while let Some(plan) = next.take() {
            // Under the old controls.
            self.tally.settle_each(seat, plan.settles);
            let change = self.tally.registers_mut().commit(plan);
            for counter in change.controls.iter() {
                self.take_control(seat, counter);
            }
            for counter in change.updates.iter() {
                self.update(seat, counter);
            }
            if change.pebs {
                self.tally.take_pebs(seat, change.rearms);
            }
            if !(change.controls | change.updates).is_empty() {
                self.refresh_needs(seat);
            }
            next = change.freezes.then(|| self.plan_freeze());
        }
    }

    fn plan_freeze(&self) -> Plan {
        let (model, reach) = (self.tally.model(), &self.tally.terms().reach);
        self.tally.registers().plan_freeze(model, reach)
    }

    /// Lets freezing reach those counters that it does now.
    #[cold]
    pub(super) fn take_freeze(&mut self, seat: &mut Seat<'_>) {
        let plan = self.plan_freeze();
        self.write(seat, plan);
    }

    /// Lets a PMI that was noted stop the counters.
    #[inline]
    fn freeze_if_due(&mut self, seat: &mut Seat<'_>) {
        if self.tally.registers().is_freeze_due() {
            let (model, reach) = (self.tally.model(), &self.tally.terms().reach);
            let plan = self.tally.registers().plan_pmi(model, reach);
            self.write(seat, plan);
            self.tally.registers_mut().freeze_done();
        }
    }

    /// Before an access where PMIs freeze, so that it finds the counters as the last
    /// one left them.
    #[cold]
    pub(super) fn settle_freeze(&mut self, seat: &mut Seat<'_>) {
        self.tally.settle_all(seat);
        self.freeze_if_due(seat);
    }

    /// Settles the counters on `slots`. A PMI that this brings, or that was noted
    /// before, freezes the counters.
    fn settle_slots(&mut self, seat: &mut Seat<'_>, slots: SlotSet) {
        self.tally.settle_slots(seat, slots);
        self.freeze_if_due(seat);
        self.stop_samplers(seat);
    }

    /// A read of what belongs to one counter.
    #[inline]
    pub(super) fn read_part(
        &mut self,
        seat: &mut Seat<'_>,
        counter: CounterId,
        part: Part,
    ) -> ReadOutcome {
        ReadOutcome::Value(match part {
            Part::Count(_) => {
                self.tally.settle(seat, counter);
                self.tally.counters().value(counter)
            }
            Part::Control => match self.tally.registers().control(counter) {
                Some(control) => control,
                None => return ReadOutcome::Gp,
            },
            Part::Overflow => {
                self.tally.settle(seat, counter);
                self.tally.registers().overflow(counter)
            }
            Part::Sampler(register) => self.read_sampler(seat, register),
        })
    }

    /// A write of what belongs to one counter; false for #GP.
    #[inline]
    pub(super) fn write_part(
        &mut self,
        seat: &mut Seat<'_>,
        counter: CounterId,
        part: Part,
        value: u64,
    ) -> bool {
        let (registers, model) = (self.tally.registers(), self.tally.model());
        let plan = match part {
            Part::Count(form) => {
                let count = written_count(form, model.counter_mask(counter), value);
                if let Some(count) = count {
                    self.tally.set_count(seat, counter, count);
                }
                return count.is_some();
            }
            Part::Sampler(register) => return self.write_sampler(seat, register, value),
            Part::Control => registers.plan_control(model, counter, value),
            Part::Overflow => registers.plan_overflow(counter, value),
        };
        if let Some(plan) = plan {
            self.write(seat, plan);
        }
        plan.is_some()
    }

    /// A legacy read of a register that belongs to several counters.
    pub(super) fn read_shared(&mut self, seat: &mut Seat<'_>, register: Register) -> u64 {
        match register {
            Register::Ibs(register) => return self.read_sampler(seat, register),
            Register::GlobalStatus => self.tally.settle_all(seat),
            _ => {}
        }
        let (model, reach) = (self.tally.model(), &self.tally.terms().reach);
        self.tally.registers().read(model, reach, register)
    }

    /// A legacy write of one; false for #GP.
    pub(super) fn write_shared(
        &mut self,
        seat: &mut Seat<'_>,
        register: Register,
        value: u64,
    ) -> bool {
        if let Register::Ibs(register) = register {
            return self.write_sampler(seat, register, value);
        }
        let (model, reach) = (self.tally.model(), &self.tally.terms().reach);
        let plan = self.tally.registers().plan(model, reach, register, value);
        if let Some(plan) = plan {
            self.write(seat, plan);
        }
        plan.is_some()
    }

    fn read_sampler(&mut self, seat: &mut Seat<'_>, register: IbsRegister) -> u64 {
        let Some(kind) = control_of(register) else {
            return self.tally.samplers().read(register);
        };
        self.tally.settle(seat, CounterId::Ibs(kind));
        self.stop_samplers(seat);
        let left = self.tally.left_of(kind);
        self.tally.samplers().read_control(kind, left)
    }

    fn write_sampler(&mut self, seat: &mut Seat<'_>, register: IbsRegister, value: u64) -> bool {
        let rule = self.tally.model().write_rule(Register::Ibs(register));
        let Some(accepted) = rule.and_then(|rule| rule.accept(value)) else {
            return false;
        };
        match control_of(register) {
            None => self.tally.samplers_mut().write(register, accepted),
            Some(kind) => {
                self.tally.settle(seat, CounterId::Ibs(kind));
                self.tally.samplers_mut().write_control(kind, accepted);
                self.start_sampler(seat, kind);
            }
        }
        true
    }

    /// Lets a sampler count, if its control does.
    fn start_sampler(&mut self, seat: &mut Seat<'_>, kind: IbsKind) {
        if !self.tally.samplers().is_on(kind) {
            // It stands.
        } else if self.hosts.uses_sampler(kind) {
            self.tally.sampler_is_taken(seat, kind);
        } else {
            self.tally.start_sampler(seat, kind);
        }
        if self.tally.samplers().request(kind).is_some() {
            self.take_control(seat, CounterId::Ibs(kind));
            self.refresh_needs(seat);
        }
    }

    /// Stops what has come to its maximum.
    #[inline]
    fn stop_samplers(&mut self, seat: &mut Seat<'_>) {
        if !self.tally.samplers().has_to_stop() {
            return;
        }
        for kind in IbsKind::ALL {
            if self.tally.samplers_mut().stop(kind) {
                self.take_control(seat, CounterId::Ibs(kind));
            }
        }
        self.refresh_needs(seat);
    }

    /// The vCPU has come to a core with other sources: what runs is counted by what that
    /// one has.
    fn choose_for_samplers(&mut self, seat: &mut Seat<'_>) {
        for kind in IbsKind::ALL {
            let samplers = self.tally.samplers();
            if samplers.is_running(kind) {
                let request = samplers.choose(self.tally.model(), seat.core(), kind);
                self.tally.samplers_mut().count_instead(kind, request);
                self.take_control(seat, CounterId::Ibs(kind));
            }
        }
    }

    /// Tools' contexts have changed: what none of them uses any more counts for the guest
    /// again, if its control does.
    fn return_samplers(&mut self, seat: &mut Seat<'_>) {
        if seat.is_off() {
            // Its core will say what it counts.
            return;
        }
        for kind in IbsKind::ALL {
            if self.tally.samplers().stands(kind) && !self.hosts.uses_sampler(kind) {
                self.start_sampler(seat, kind);
            }
        }
    }

    /// Takes in a sample that was due; one that was not is dropped.
    fn sampled(&mut self, seat: &mut Seat<'_>, sample: &IbsSample) {
        self.stop_samplers(seat);
        let there = self.tally.samplers().exist();
        if there && !self.tally.samplers_mut().take(sample) && self.hosts.take_sample(sample) {
            self.arrange(seat);
        }
    }

    /// Takes in a control that was written, and gives the physical counter
    /// back if it counts something else. The counter was settled before.
    fn take_control(&mut self, seat: &mut Seat<'_>, counter: CounterId) {
        let Some(request) = self.tally.decode(counter) else {
            return;
        };
        if self.tally.counters_mut().ask(counter, request) {
            self.update(seat, counter);
            return;
        }
        // The new event may leave a place that another one can use.
        let counters = self.tally.counters();
        let leaves = counters.has_place(counter) || counters.is_wanted(counter);
        self.tally.release(seat, counter);
        self.tally.begin_anew(counter);
        self.update(seat, counter);
        if leaves && self.needs_places() {
            self.distribute(seat);
        }
    }

    /// Brings the physical counter in line with the controls. The counter was
    /// settled under the old ones.
    fn update(&mut self, seat: &mut Seat<'_>, counter: CounterId) {
        let Some(request) = self.tally.counters().request(counter) else {
            return;
        };
        let (model, terms) = (self.tally.model(), self.tally.terms());
        let registers = self.tally.registers();
        let enabled = registers.let_count(model, &terms.reach, counter);
        if !(request.can_advance() && enabled) {
            if self.tally.counters().unavailable(counter).is_some() {
                // A place that was lost is no use: the next time, a new one.
                self.tally.release(seat, counter);
            }
            let place = self.tally.counters_mut().halt(counter);
            if let (Some(bank), Some(stands)) = (seat.bank(), place) {
                bank.stop(stands);
            }
            if self.needs_places() {
                self.distribute(seat);
            }
            return;
        }
        if !terms.grant.holds(counter) {
            let reason = UnavailableReason::NotGranted;
            self.tally.counters_mut().refuse(counter, reason);
            return;
        }
        self.tally.counters_mut().want(counter);
        self.bring_up(seat, counter);
    }

    /// Has a wanted counter count on this core.
    pub(super) fn bring_up(&mut self, seat: &mut Seat<'_>, counter: CounterId) {
        let (Some(request), Some(core)) = (self.tally.counters().request(counter), seat.core())
        else {
            return;
        };
        let within = self.tally.is_within_budget(counter);
        let counters = self.tally.counters();
        if let Some(is_its) = counters.place(counter, core.bank()) {
            if within && is_its && counters.unavailable(counter).is_none() {
                self.tally.run(seat, counter, self.placer.is_allowed());
                return;
            }
            self.tally.release(seat, counter);
        }
        if let Some(reason) = self.tally.counters().dead(counter) {
            self.tally.counters_mut().note_dead(counter, reason);
            self.tally.refuse(counter, &request, reason);
            return;
        }
        let Some(core) = seat.core() else { return };
        let constraint = match core.plan_for_guest(&request) {
            Ok(plan) => plan.constraint,
            Err(Unavailable { reason }) => {
                if reason.is_lasting() {
                    self.tally.counters_mut().note_dead(counter, reason);
                }
                self.tally.refuse(counter, &request, reason);
                return;
            }
        };
        let ground = ground(&self.tally, core);
        let judged = self.placer.is_judged(ground, counter, &constraint);
        let found = if self.placer.is_active() || !within || judged {
            None
        } else {
            core.bank().find(&request, &constraint)
        };
        if found.is_none() {
            self.distribute(seat);
            return;
        }
        self.come(seat, counter, found, UnavailableReason::Waiting);
    }

    /// Whether some counter is wanted that has no place for want of one.
    fn needs_places(&self) -> bool {
        let beside_hosts = self.hosts.are_present();
        self.placer.is_active() || self.tally.counters().lack_places(beside_hosts)
    }

    /// Gives slots to all that is to be counted here ([`Placer::place`]).
    pub(super) fn distribute(&mut self, seat: &mut Seat<'_>) {
        let Some(core) = seat.core() else { return };
        let counters = self.tally.counters();
        let demands = counters.demands(core, self.placer.is_allowed());
        let contexts = self.hosts.claims(core);
        let ground = ground(&self.tally, core);
        let moves = self.placer.place(ground, demands, contexts, counters.ran());
        self.carry_out(seat, moves);
    }

    /// First all leave who move, then all come.
    fn carry_out(&mut self, seat: &mut Seat<'_>, moves: Moves) {
        let Moves {
            preempts,
            refused,
            moves,
            otherwise,
        } = moves;
        for context in preempts {
            self.hosts.preempt(seat, context);
        }
        for (counter, reason) in refused {
            self.tally.release(seat, counter);
            self.come(seat, counter, None, reason);
        }
        for (claimant, _) in &moves {
            match *claimant {
                Claimant::Guest { counter, .. } => self.tally.release(seat, counter),
                Claimant::Context { context, pmd, .. } => {
                    self.hosts.displace(seat, context, pmd);
                }
            }
        }
        for (claimant, slots) in moves {
            match claimant {
                Claimant::Guest { counter, .. } => self.come(seat, counter, slots, otherwise),
                Claimant::Context { context, pmd, .. } => {
                    self.hosts.come(seat, context, pmd, slots);
                }
            }
        }
    }

    /// Puts a counter on the slots that were found for it. `otherwise` is why
    /// there are none.
    fn come(
        &mut self,
        seat: &mut Seat<'_>,
        counter: CounterId,
        slots: Option<SlotSet>,
        otherwise: UnavailableReason,
    ) {
        let Some(request) = self.tally.counters().request(counter) else {
            return;
        };
        let turns = self.placer.is_allowed();
        let bound = match slots {
            Some(slots) => self.tally.bind(seat, counter, slots, &request, turns),
            None => Err(otherwise),
        };
        if let Err(reason) = bound {
            self.tally.refuse(counter, &request, reason);
        }
    }

    /// Brings slots in line with what host contexts want, and the guest's with
    /// what they leave. Counts were settled before.
    fn arrange(&mut self, seat: &mut Seat<'_>) {
        self.hosts.reconcile(seat);
        self.give_places(seat);
        self.refresh_needs(seat);
    }

    /// Gives host contexts the places that they miss.
    fn give_places(&mut self, seat: &mut Seat<'_>) {
        if self.hosts.place_missing(seat) {
            self.distribute(seat);
        }
        self.hosts.miss_the_rest(seat);
    }

    /// A context has come or gone, or wants something else.
    #[cfg(feature = "contexts")]
    pub(super) fn hosts_changed(&mut self, seat: &mut Seat<'_>) {
        self.hosts.note(seat.core());
        self.return_samplers(seat);
        if self.hosts.are_present() {
            self.arrange(seat);
        }
        // What it has given up may be what the guest waits for.
        if self.placer.is_active() || self.tally.counters().lack_places(true) {
            self.distribute(seat);
        }
        self.refresh_needs(seat);
    }

    /// Restores a context that was preempted and would find all that it wants;
    /// it has no places yet.
    fn restore_host(&mut self, seat: &mut Seat<'_>) {
        let Some(core) = seat.core() else { return };
        let demands = (self.tally.counters()).demands(core, self.placer.is_allowed());
        let (ground, contexts) = (ground(&self.tally, core), self.hosts.claims(core));
        let claims = self.placer.without_turns(ground, demands, contexts);
        let slots = core.bank().slots();
        (self.hosts).restore(seat, |more| claims.fit_with(more, slots));
    }

    /// The sampler whose sample is to be taken.
    #[inline]
    pub(super) fn sample_due(&self) -> Option<IbsKind> {
        let samplers = self.tally.samplers();
        if !samplers.exist() {
            return None;
        }
        samplers.due().or_else(|| self.hosts.sample_due())
    }

    /// Takes the samples that are due, of `moment`. What a context of a tool records with an
    /// overflow may be a sample of IBS, so these come last.
    pub(super) fn take_samples<M: Moment>(
        &mut self,
        seat: &mut Seat<'_>,
        moment: &mut M,
    ) -> Result<(), M::Error> {
        if let (Some(needs), false) = (self.tally.pebs_due(), seat.is_off())
            && let Some(record) = moment::record(moment, needs)?
        {
            self.tally.write_pebs(seat, moment.memory()?, &record);
            self.freeze_if_due(seat);
        }
        while let Some(kind) = self.sample_due()
            && let Some(sample) = moment::sample(moment, kind)?
        {
            self.sampled(seat, &sample);
        }
        let (sampled, told) = self.hosts.take_samples(seat, moment);
        if sampled {
            self.arrange(seat);
        }
        told
    }

    /// Takes in what happened to the vCPU.
    #[inline]
    pub(super) fn observe(&mut self, seat: &mut Seat<'_>, progress: Progress) {
        let before = self.tally.counters().ran();
        if let Some(bank) = seat.bank() {
            bank.observe(&progress);
        }
        self.tally.counters_mut().pass(&progress);
        if let Progress::Entered { tsc } = progress {
            self.hosts.enter(seat, tsc);
            return;
        }
        if self.needs.counting {
            let is_seen = !matches!(progress, Progress::Left { .. });
            self.tally.retire(is_seen);
            self.settle_overflows(seat);
            self.tally.retire(false);
        }
        if self.hosts.are_present() {
            let ran = self.tally.counters().ran() - before;
            self.observe_hosts(seat, &progress, ran);
        }
    }

    /// What was counted may have come to an overflow, or to the end of a turn.
    #[inline]
    fn settle_overflows(&mut self, seat: &mut Seat<'_>) {
        let Some(bank) = seat.bank() else { return };
        let overflowed = bank.take_overflows();
        if !overflowed.is_empty() {
            self.settle_slots(seat, overflowed);
        }
        if self.placer.is_over(self.tally.counters().ran()) {
            // The next counters get the places.
            self.placer.advance();
            self.distribute(seat);
            self.refresh_needs(seat);
        }
    }

    /// The same for the host contexts. `ran`: how long the guest did.
    fn observe_hosts(&mut self, seat: &mut Seat<'_>, progress: &Progress, ran: Ticks) {
        let overflowed = self.hosts.settle_overflows(seat);
        if !matches!(progress, Progress::Left { .. }) {
            return;
        }
        // Nothing comes of an overflow whose count nobody told; the slot is armed
        // anew.
        let disarmed = !overflowed.is_empty() && !self.hosts.overflow_waits(seat.core());
        // A write of the guest's may have displaced what nobody has told yet.
        self.hosts.miss_the_rest(seat);
        let (changed, look) = self.hosts.leave(seat, progress, ran);
        if look {
            self.restore_host(seat);
        }
        if changed || look || disarmed {
            self.arrange(seat);
        }
    }

    /// TSC value at which the guest has to be interrupted for an overflow, and for
    /// something else.
    #[inline]
    pub(super) fn deadline(&self, core: Option<&CorePmu>) -> (Option<Tsc>, Option<Tsc>) {
        let overflow = core.and_then(|core| core.bank().deadline());
        if !(self.placer.is_active() || self.hosts.are_present()) {
            return (overflow, None);
        }
        let counters = self.tally.counters();
        let turn = self.placer.rest(counters.ran()).zip(counters.entered());
        let turn = turn.map(|(rest, entered)| entered + rest);
        let host = self.hosts.deadline(core, counters.entered());
        (overflow, [turn, host].into_iter().flatten().min())
    }

    /// The vCPU sits down on a core; `is_new`: it was on another one before. Counters that
    /// are still in place are started, all as one; the others are given a place.
    pub(super) fn sit_down(&mut self, seat: &mut Seat<'_>, is_new: bool) {
        self.hosts.note(seat.core());
        if is_new {
            let all = CounterSet::first(MAX_PROGRAMMABLE, MAX_FIXED) | CounterSet::SAMPLERS;
            self.tally.counters_mut().revive(all);
            self.placer.forget_core();
            self.choose_for_samplers(seat);
        }
        let (mut before, mut refused) = (CounterSet::EMPTY, CounterSet::EMPTY);
        for counter in self.tally.counters().active().iter() {
            self.tally.come_back(seat, counter);
            match self.tally.counters_mut().find(counter) {
                Found::AsItWas => false,
                Found::Displaced => before.insert(counter),
                Found::Refused => refused.insert(counter),
            };
        }
        self.hosts.come_back(seat);
        // The context that had one may have gone while the vCPU was on no core.
        self.return_samplers(seat);
        // Those that counted before come first, so that they go on.
        for counter in before.iter().chain(refused.iter()) {
            // What was brought up before may have placed this one as well.
            if !self.tally.counters().is_running(counter) {
                self.bring_up(seat, counter);
            }
        }
        if self.hosts.are_present() {
            self.give_places(seat);
        }
    }

    /// What the vCPU is to hear of its slots since it was here last.
    pub(super) fn catch_up(&mut self, seat: &mut Seat<'_>) {
        if let Some(bank) = seat.bank() {
            let overflowed = bank.take_overflows();
            self.settle_slots(seat, overflowed);
        }
    }

    /// The vCPU is switched out. Its counters stay on the core, and are stopped
    /// when another vCPU is attached to it.
    pub(super) fn park(&mut self, seat: &mut Seat<'_>) {
        self.catch_up(seat);
        self.hosts.park(seat);
        self.refresh_needs(&Seat::Off);
    }

    /// Takes every count of the vCPU off the core on which it was parked; it is on none
    /// then.
    pub(super) fn leave(&mut self, seat: &mut Seat<'_>) {
        for counter in self.tally.counters().active().iter() {
            self.tally.release(seat, counter);
        }
        self.hosts.leave_core(seat);
        self.freeze_if_due(&mut Seat::Off);
        self.refresh_needs(&Seat::Off);
    }

    /// Does what a decision means; the terms are those of after it. The accounting page
    /// tells owners other than who asked, whose counters `of` are cleared while they count.
    pub(super) fn take_effects(&mut self, seat: &mut Seat<'_>, effects: Effects, of: CounterSet) {
        let mut taken = [None; COUNTERS];
        let there = counters_there(self.tally.model());
        let lost = effects.cleared & of & there;
        for counter in lost.iter() {
            let request = self.tally.counters().request(counter);
            taken[index_of(counter)] = request.filter(|request| request.enabled);
        }
        for counter in (effects.cleared & there).iter() {
            self.clear(seat, counter);
        }
        let reach = &self.tally.terms().reach;
        let plan = self.tally.registers().plan_pebs_reach(reach);
        self.write(seat, plan);
        for counter in (effects.reach & !effects.cleared & there).iter() {
            self.tally.settle(seat, counter);
            self.update(seat, counter);
        }
        if self.tally.registers().is_frozen() {
            self.take_freeze(seat);
        }
        self.refresh_needs(seat);
        for counter in lost.iter() {
            let request = taken[index_of(counter)];
            self.tally.counters_mut().note_taken(counter, request);
        }
    }

    /// Leaves nothing of a counter's former owner.
    fn clear(&mut self, seat: &mut Seat<'_>, counter: CounterId) {
        self.tally.clear(seat, counter);
        self.page.clear(counter);
        if self.needs_places() {
            self.distribute(seat);
        }
    }

    /// Has a counter count again whose slot the host's kernel has taken. True if it does.
    /// `has_run`: the guest has run since that was tried last.
    pub(super) fn try_again(
        &mut self,
        seat: &mut Seat<'_>,
        counter: CounterId,
        has_run: bool,
    ) -> bool {
        if has_run {
            // A source need not tell by itself yet that it is still away.
            self.tally.settle(seat, counter);
        }
        let counts = self.tally.counters().counts(counter);
        if has_run && counts {
            self.tally.losses_mut().is_back(counter);
            return true;
        }
        if self.tally.counters().is_wanted(counter) && !counts {
            self.tally.release(seat, counter);
            self.bring_up(seat, counter);
            let ran = self.tally.counters().ran();
            self.tally.losses_mut().note_try(ran);
        }
        false
    }

    /// A snapshot for the accounting page.
    pub(super) fn take_snapshot(&mut self, seat: &mut Seat<'_>) {
        self.tally.settle_all(seat);
        let counters = self.tally.counters();
        let core = seat.core();
        let all = self.tally.model().counters();
        (self.page).take(all.map(|counter| (counter, counters.words(core, counter))));
    }

    /// Takes in every count, and why one is no longer exact, so that nothing of a state is on
    /// the core alone.
    pub(super) fn settle_for_good(&mut self, seat: &mut Seat<'_>) {
        self.settle_freeze(seat);
        if let Some(core) = seat.core() {
            self.tally.counters_mut().take_losses(core.bank());
        }
        // Samplers come last, as if the guest read them: one that has come to its maximum
        // stops, and who gets its place has lost nothing by then.
        for kind in IbsKind::ALL {
            self.tally.settle(seat, CounterId::Ibs(kind));
            self.stop_samplers(seat);
        }
    }

    /// The whole state, which was settled, but for what is in counters that somebody has
    /// reserved.
    pub(super) fn save(&self) -> PmuState {
        let (model, held) = (self.tally.model(), self.tally.terms().held);
        let names = |counters: CounterSet| (counters & !held).iter().map(CounterName).collect();
        let counter = |counter| {
            if held.contains(counter) {
                SavedCounter::unused(counter)
            } else {
                self.tally.counters().save(counter)
            }
        };
        let mut state = PmuState {
            model: model.to_string(),
            selects: Vec::new(),
            fixed_control: Hex(0),
            global_control: Hex(0),
            global_status: Hex(0),
            debug_control: None,
            pebs: None,
            counters: model.counters().map(counter).collect(),
            pending_pmi: names(self.tally.interrupts().counters()),
            snapshot: self.page.save(model, held),
            was_programmed: false,
            ibs: (self.tally.samplers()).save(held, |kind| self.tally.left_of(kind)),
            reservations: None,
        };
        self.tally.registers().save(model, held, &mut state);
        if let Some(pebs) = &mut state.pebs {
            pebs.armed = names(self.tally.pebs_waiting());
        }
        // Said only where nothing else shows it, so that older versions read the others.
        state.was_programmed = self.programmed && !saved::shows_use(model, &state);
        state
    }

    /// Takes a state in, which was checked before. Counters that are reserved here stay so,
    /// and take nothing in.
    pub(super) fn restore(&mut self, seat: &mut Seat<'_>, state: &PmuState) {
        let held = self.tally.terms().held;
        let kept = self.tally.registers().global_control();
        self.reset(seat);
        (self.tally.registers_mut()).restore(held, kept, state);
        self.take_freeze(seat);
        if let Some(saved) = &state.pebs {
            let armed = saved.armed.iter().map(|name| name.0);
            self.tally.restore_pebs(armed.collect());
        }
        let model = self.tally.model();
        self.page.restore(model, &state.snapshot);
        self.programmed = state.was_programmed || saved::shows_use(model, state);
        for saved in &state.counters {
            let request = self.tally.decode(saved.counter.0);
            self.tally.counters_mut().restore(saved, request);
        }
        for saved in &state.counters {
            self.update(seat, saved.counter.0);
        }
        if let Some(saved) = &state.ibs {
            self.tally.samplers_mut().restore(saved);
            for kind in IbsKind::ALL {
                if held.contains(CounterId::Ibs(kind)) {
                    self.tally.samplers_mut().clear(kind);
                }
                self.start_sampler(seat, kind);
            }
        }
        let pending = state.pending_pmi.iter().map(|name| name.0);
        self.tally.interrupts_mut().restore(pending.collect());
        for counter in (held & counters_there(self.tally.model())).iter() {
            self.clear(seat, counter);
        }
        self.refresh_needs(seat);
    }
}

/// What wants slots on `core`.
pub(super) fn ground<'a>(tally: &'a Tally, core: &'a CorePmu) -> Ground<'a> {
    Ground {
        owner: tally.owner(),
        model: tally.model(),
        terms: tally.terms(),
        core,
    }
}

/// The sampler whose control register this is.
fn control_of(register: IbsRegister) -> Option<IbsKind> {
    match register {
        IbsRegister::FetchControl => Some(IbsKind::Fetch),
        IbsRegister::OpControl => Some(IbsKind::Op),
        _ => None,
    }
}
