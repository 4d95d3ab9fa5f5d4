//! The arbitration among the layers of one vCPU: who holds what, who waits for what, and
//! what a decision leads to.
//!
//! The values that meet here decide and keep their own: the [`Bank`] what is held, the
//! [`Requests`] what is waited for, the [`Mailboxes`] what layers are told, the [`Rules`]
//! what the host has set. None of them calls another. The broker decides about counters
//! of other layers, from books that it only reads.
//!
//! Every act ends the same way. Its own change comes first. Then requests that have lost
//! what they had gathered are withdrawn, and questions that no longer stand are cancelled
//! ([`Arbitration::adapt`]). Then requests are served, until none gets further
//! ([`Arbitration::serve`]). What the PMU has to do is gathered on the way
//! ([`Arbitration::take_effects`]).

#[cfg(test)]
use alloc::sync::Arc;

use crate::admin::{AdminAct, AdminError};
use crate::audit::{Ask, AskRecord, AskResult, Auditor, Entropy, Event, Presented, Record};
use crate::backing::{Backing, Room};
use crate::bank::Bank;
use crate::broker::{Books, NextStep};
use crate::control::Control;
use crate::cookie::Cookie;
use crate::counter::PerKind;
use crate::firmware::Firmware;
#[cfg(test)]
use crate::layer::Phase;
use crate::mailbox::{Mailboxes, QueuedNotice};
use crate::map::{LegacyMap, Names};
use crate::message::{Answer, NoticeKind, Outcome, Reply, Wanted};
use crate::policy::{Policy, Scheme};
use crate::reason::Reason;
use crate::requests::{Pending, Question, Requests};
use crate::reservation::{Change, ChangeKind, Effects, Reservation, Revocation};
use crate::rules::{BudgetStep, Rules};
use crate::time::{Clock, Tsc};
use crate::{CounterId, CounterSet, Layer, abi};

/// The control word of a counter that the hypervisor sets aside: no other layer can
/// use it, and no shared control reaches it.
const SET_ASIDE: Control =
    match Control::new(abi::CONTROL_MANAGE_HYPERVISOR | abi::CONTROL_ACCESS_HYPERVISOR) {
        Some(control) => control,
        None => panic!("these bits exist"),
    };

/// Steps that a request can take before it waits or has its answer: each counter can be
/// asked for, announced, taken and spared once.
const STEPS: u32 = 4 * u64::BITS;

/// What an operation needs from its caller.
#[derive(Debug)]
pub struct Context<'a> {
    /// The caller's time.
    pub now: Tsc,
    /// The source of random bits.
    pub entropy: &'a mut dyn Entropy,
    /// The receiver of decisions.
    pub audit: &'a mut dyn Auditor,
}

impl Context<'_> {
    pub(crate) fn record(&mut self, layer: Layer, counter: Option<CounterId>, event: Event) {
        self.audit.record(&Record {
            layer,
            counter,
            event,
        });
    }
}

/// The arbitration of one vCPU.
#[derive(Debug)]
pub(crate) struct Arbitration {
    bank: Bank,
    rules: Rules,
    requests: Requests,
    mailboxes: Mailboxes,
    room: Room,
    names: Names,
    firmware: Firmware,
    clock: Clock,
    /// The earliest end of a lease, of a question, or of the time before a
    /// revocation.
    deadline: Option<Tsc>,
    /// What the PMU has to do for what was decided.
    effects: Effects,
}

impl Arbitration {
    pub(crate) fn new(
        bank: Bank,
        rules: Rules,
        names: Names,
        firmware: Firmware,
        clock: Clock,
    ) -> Self {
        Arbitration {
            bank,
            rules,
            requests: Requests::default(),
            mailboxes: Mailboxes::default(),
            room: Room::whole(),
            names,
            firmware,
            clock,
            deadline: None,
            effects: Effects::NONE,
        }
    }

    #[must_use]
    pub(crate) fn with_samplers(mut self) -> Self {
        self.bank = self.bank.with_samplers();
        self
    }

    #[inline]
    pub(crate) fn bank(&self) -> &Bank {
        &self.bank
    }

    pub(crate) fn requests(&self) -> &Requests {
        &self.requests
    }

    pub(crate) fn room(&self) -> &Room {
        &self.room
    }

    pub(crate) fn mailboxes(&self) -> &Mailboxes {
        &self.mailboxes
    }

    /// For who reads notices and numbers requests: nothing is decided from what stands in
    /// a mailbox.
    pub(crate) fn mailboxes_mut(&mut self) -> &mut Mailboxes {
        &mut self.mailboxes
    }

    #[inline]
    pub(crate) fn firmware(&self) -> &Firmware {
        &self.firmware
    }

    pub(crate) fn firmware_mut(&mut self) -> &mut Firmware {
        &mut self.firmware
    }

    pub(crate) fn clock(&self) -> Clock {
        self.clock
    }

    #[inline]
    pub(crate) fn deadline(&self) -> Option<Tsc> {
        self.deadline
    }

    /// Whether legacy names are ever given.
    pub(crate) fn gives_names(&self) -> bool {
        self.names.are_given()
    }

    /// The legacy names. They change once, when the firmware's phase ends.
    #[inline]
    pub(crate) fn names(&mut self) -> &LegacyMap {
        if self.names.are_old(self.firmware.phase()) {
            self.renew_names();
        }
        self.names.map()
    }

    #[cold]
    fn renew_names(&mut self) {
        // The machine may start over meanwhile: then the names are those of before, and are
        // renewed again.
        let start = self.firmware.phase().starts();
        if self.firmware.phase().is_over() {
            self.give_names(start);
        } else {
            self.names.reset();
        }
    }

    fn give_names(&mut self, start: u32) {
        // Counters that a firmware was gathering when its phase ended are not its
        // own: the request is refused at the next tick at the latest.
        let lost = match self.requests.of(Layer::Firmware) {
            Some(pending) if !self.firmware.is_alive(Layer::Firmware) => pending.got,
            _ => CounterSet::EMPTY,
        };
        self.names.give(start, &self.bank, lost);
        self.find_deadline();
    }

    /// What the PMU has to do for what was decided since this was asked last.
    pub(crate) fn take_effects(&mut self) -> Effects {
        core::mem::take(&mut self.effects)
    }

    pub(crate) fn books(&self) -> Books<'_> {
        Books {
            bank: &self.bank,
            rules: &self.rules,
            requests: &self.requests,
            most: self.room.most(),
            alive: Policy::LAYERS.map(|layer| self.firmware.is_alive(layer)),
        }
    }

    /// Finds out when [`Arbitration::tick`] next has something to do.
    pub(crate) fn find_deadline(&mut self) {
        // A request of a firmware whose phase is over is refused at the next tick.
        let is_orphaned =
            self.requests.of(Layer::Firmware).is_some() && !self.firmware.is_alive(Layer::Firmware);
        let orphaned = is_orphaned.then_some(Tsc(0));
        let ends = [self.bank.deadline(), self.requests.deadline(), orphaned];
        self.deadline = ends.into_iter().flatten().min();
    }

    /// Brings everything of the guest into its state after power-on. The hypervisor
    /// keeps what it holds.
    pub(crate) fn reset(&mut self) {
        let before = self.bank.clone();
        let waited = self.requests.of(Layer::Hypervisor);
        let unanswered = waited.map_or(CounterSet::EMPTY, |pending| pending.got);
        let waited = waited.is_some();
        self.bank.reset();
        for counter in (before.held_by(Layer::Hypervisor) & !unanswered).iter() {
            if let Some(reservation) = before.reservation(counter) {
                let mut kept = *reservation;
                kept.revocation = None;
                let kind = ChangeKind::Reserve(kept);
                // The PMU has a reset of its own, which covers the effects.
                let _ = self.bank.apply(Change { counter, kind });
            }
        }
        self.requests.reset();
        self.mailboxes = Mailboxes::default();
        if waited {
            let layer = Layer::Hypervisor;
            let reason = Some(Reason::Withdrawn);
            let notice = QueuedNotice::about_request(NoticeKind::Refused, layer, reason);
            self.mailboxes.push(layer, notice);
        }
        self.names.reset();
        self.firmware.reset();
        self.find_deadline();
    }

    /// Sets a free counter aside for the hypervisor, without a lease.
    pub(crate) fn set_aside(&mut self, counter: CounterId, cookie: Cookie, cx: &mut Context<'_>) {
        let layer = Layer::Hypervisor;
        let mut reservation = Reservation::new(layer, cookie, cookie);
        reservation.control = SET_ASIDE;
        self.apply(counter, ChangeKind::Reserve(reservation));
        self.effects.cleared.insert(counter);
        // Nobody would renew a lease for the hypervisor.
        let lease_ms = None;
        cx.record(layer, Some(counter), Event::Reserved { lease_ms });
        self.find_deadline();
    }

    /// The caller says what has a physical counter from now on.
    #[inline]
    pub(crate) fn back(&mut self, most: Backing, cx: &mut Context<'_>) {
        let told = self.room.tell(most);
        if told.is_news {
            self.take_news(most, cx);
        }
        if told.was_old || told.is_news && self.requests.wait_for_move() {
            self.serve(cx);
            self.find_deadline();
        }
    }

    fn take_news(&mut self, most: Backing, cx: &mut Context<'_>) {
        let fixed = most.fixed & self.bank.counters();
        cx.audit.asked(&AskRecord {
            layer: Layer::Hypervisor,
            ask: Ask::Backed(Backing { fixed, ..most }),
            presented: Presented::Nothing,
            result: AskResult::Done,
        });
        // What layers of the guest are about to get stays with the hypervisor where it is no
        // longer backed.
        for layer in Policy::LAYERS.into_iter().filter(|layer| layer.is_guest()) {
            let mut stays = self.books().unbacked_of(layer);
            if stays.is_empty() {
                continue;
            }
            let is_hypervisors = |question: &Question| !question.holder.is_guest();
            if let Some(question) = self.requests.take_question(layer, is_hypervisors) {
                self.cancel(question, layer);
                stays.remove(question.counter);
            }
            for counter in stays.iter() {
                self.spare(counter, cx);
            }
        }
    }

    /// The vCPU moves nowhere: requests that wait for it are refused.
    pub(crate) fn stay(&mut self, cx: &mut Context<'_>) {
        self.requests.end_moves(None);
        self.serve(cx);
        self.find_deadline();
    }

    /// Ends the firmware's phase.
    ///
    /// # Errors
    /// The value that `layer` has written is malformed, or the phase was over.
    pub(crate) fn end_phase(
        &mut self,
        value: u64,
        layer: Layer,
        cx: &mut Context<'_>,
    ) -> Result<(), Reason> {
        self.firmware.end_phase(value)?;
        cx.record(layer, None, Event::PhaseEnded);
        self.serve(cx);
        self.find_deadline();
        Ok(())
    }

    /// Makes a change that `layer` may make, starts its lease, and records it.
    pub(crate) fn carry_out(&mut self, layer: Layer, change: Change, cx: &mut Context<'_>) {
        let Change { counter, kind } = change;
        let before = self.bank.reservation(counter).copied();
        self.apply(counter, kind);
        let lease_ms = match (kind, before) {
            (ChangeKind::Reserve(_), _) => self.start_lease(counter, None, cx.now),
            (ChangeKind::Renew, Some(before)) => self.start_lease(counter, before.lease_ms, cx.now),
            (ChangeKind::HandOver { to, .. }, Some(before)) => {
                // A new owner does not inherit the lease of the former one.
                let lease_ms = before.lease_ms.filter(|_| before.owner == to);
                self.start_lease(counter, lease_ms, cx.now)
            }
            _ => None,
        };
        let event = match kind {
            ChangeKind::Nothing => return,
            ChangeKind::Reserve(_) => Event::Reserved { lease_ms },
            ChangeKind::Renew => Event::Renewed,
            ChangeKind::HandOver { .. } => Event::HandedOver {
                from: before.map_or(layer, |before| before.owner),
            },
            ChangeKind::Release => Event::Released,
            ChangeKind::SetAccess(cookie) => Event::AccessSet {
                private: !cookie.is_default(),
            },
            ChangeKind::SetControl(control) => Event::ControlSet(control),
            ChangeKind::SetDropValue(value) => Event::DropValueSet(value),
        };
        cx.record(layer, Some(counter), event);
        self.adapt(counter, cx);
        self.find_deadline();
    }

    /// A layer asks for counters that it does not hold.
    pub(crate) fn reserve(&mut self, layer: Layer, pending: Pending, cx: &mut Context<'_>) {
        let wanted = pending.wanted;
        let there = wanted.candidates() & self.bank.counters();
        let refused = if self.rules.is_barred(layer) {
            Some(Reason::Administrator)
        } else if there.len() < u32::from(wanted.count()) {
            Some(Reason::NoCounter)
        } else {
            None
        };
        if let Some(reason) = refused {
            cx.record(layer, None, Event::Refused(reason));
            self.mailboxes.set_outcome(layer, Outcome::Refused(reason));
            return;
        }
        let theirs = self.bank.held() & !self.bank.held_by(layer);
        self.requests.open(layer, pending, theirs);
        if self.books().is_untold_of(layer) {
            self.room.expire();
        }
        self.advance(layer, cx);
        if self.requests.note_shown(layer) {
            self.mailboxes.set_outcome(layer, Outcome::Pending);
        }
    }

    /// A layer withdraws its request.
    pub(crate) fn withdraw(&mut self, layer: Layer, cx: &mut Context<'_>) {
        self.conclude(layer, Err(Reason::Withdrawn), cx);
        self.serve(cx);
    }

    /// A layer asks for a counter that it holds: its lease starts anew, and if the request
    /// names an event, the counter is for that.
    ///
    /// # Errors
    /// It cannot be for that event.
    pub(crate) fn renew(
        &mut self,
        layer: Layer,
        counter: CounterId,
        asked: &Pending,
        cx: &mut Context<'_>,
    ) -> Result<(), Reason> {
        if asked.event.is_some() {
            if !self.books().can_name(layer, counter, asked) {
                return Err(Reason::Unbacked);
            }
            self.bank.set_event(counter, asked.event);
            self.room.note_held();
        }
        self.start_lease(counter, asked.lease_ms, cx.now);
        cx.record(layer, Some(counter), Event::Renewed);
        Ok(())
    }

    /// A layer gives its counter back.
    pub(crate) fn release(&mut self, counter: CounterId, cx: &mut Context<'_>) {
        self.lose(counter, Event::Released, None, cx);
        self.adapt(counter, cx);
    }

    /// A holder that was asked for a counter replies.
    ///
    /// # Errors
    /// It was not asked, or the question no longer stands.
    pub(crate) fn reply(
        &mut self,
        layer: Layer,
        reply: Reply,
        cx: &mut Context<'_>,
    ) -> Result<(), Reason> {
        let asked = self.requests.asked_for(layer, reply.counter);
        let (wanted_by, question) = asked.ok_or(Reason::Malformed)?;
        let counter = question.counter;
        if reply.yields && self.books().may_come(counter, wanted_by) {
            let _ = self.requests.take_question(wanted_by, |_| true);
            // Another component than the one that replied may have reserved the
            // counter, and learns of it by the notice.
            let notice = QueuedNotice::about(NoticeKind::Revoked, counter, wanted_by);
            let notice = notice.because(Reason::Lent);
            let event = Event::Yielded { to: wanted_by };
            self.lose(counter, event, Some(notice), cx);
            self.take(counter, wanted_by);
        } else {
            let reason = if reply.yields {
                Reason::Unbacked
            } else {
                Reason::Refused
            };
            self.requests.decline(wanted_by, reason);
            let event = Event::Declined { wanted_by, reason };
            cx.record(layer, Some(counter), event);
        }
        self.serve(cx);
        self.find_deadline();
        Ok(())
    }

    /// Tells the owner of a counter about its physical one.
    pub(crate) fn tell_owner(
        &mut self,
        counter: CounterId,
        event: Event,
        kind: NoticeKind,
        cx: &mut Context<'_>,
    ) {
        if let Some(owner) = self.bank.owner(counter) {
            cx.record(owner, Some(counter), event);
            let notice = QueuedNotice::about(kind, counter, owner);
            let notice = notice.because(event.reason());
            self.mailboxes.push(owner, notice);
        }
    }

    /// Carries out an act of the administrator. Requests that are pending are decided
    /// anew after it.
    ///
    /// # Errors
    /// The act makes no sense, for this reason.
    pub(crate) fn administer(
        &mut self,
        act: AdminAct,
        cx: &mut Context<'_>,
    ) -> Result<(), AdminError> {
        // Legacy names have to see what was held before.
        let _ = self.names();
        match act {
            AdminAct::Revoke { counter, grace_ms } => self.revoke(counter, grace_ms, cx)?,
            AdminAct::Bar { layer, barred } => self.bar(layer, barred, cx)?,
            AdminAct::SetPolicy(policy) => self.set_policy(policy, cx)?,
            AdminAct::SetScheme(scheme) => self.set_scheme(scheme, cx),
            AdminAct::SetBudget { most, grace_ms } => self.set_budget(most, grace_ms, cx),
        }
        self.serve(cx);
        self.find_deadline();
        Ok(())
    }

    fn revoke(
        &mut self,
        counter: CounterId,
        grace_ms: u32,
        cx: &mut Context<'_>,
    ) -> Result<(), AdminError> {
        if !self.bank.counters().contains(counter) {
            return Err(AdminError::NoCounter(counter));
        }
        if self.bank.owner(counter).is_none() {
            return Err(AdminError::Unreserved(counter));
        }
        self.take_back(counter, Reason::Administrator, grace_ms, cx);
        Ok(())
    }

    fn bar(&mut self, layer: Layer, barred: bool, cx: &mut Context<'_>) -> Result<(), AdminError> {
        let layer = layer.as_holder();
        let done = self.rules.bar(layer, barred);
        done.ok_or(AdminError::Layer(layer))?;
        let event = if barred {
            Event::LayerBarred(layer)
        } else {
            Event::LayerUnbarred(layer)
        };
        cx.record(Layer::Hypervisor, None, event);
        if barred {
            self.conclude(layer, Err(Reason::Administrator), cx);
        }
        Ok(())
    }

    fn set_policy(&mut self, policy: Policy, cx: &mut Context<'_>) -> Result<(), AdminError> {
        let changed = self.rules.set_policy(policy, self.bank.counters());
        for (of, share) in changed.map_err(AdminError::Policy)? {
            cx.record(Layer::Hypervisor, None, Event::PolicySet { of, share });
        }
        // A holder that is at its minimum now is not asked any more.
        for layer in Policy::LAYERS {
            self.review(layer);
        }
        Ok(())
    }

    /// Requests that are pending begin anew: what was asked or announced for them is off.
    fn set_scheme(&mut self, scheme: Scheme, cx: &mut Context<'_>) {
        for layer in Policy::LAYERS {
            if let Some(question) = self.requests.begin_anew(layer) {
                self.cancel(question, layer);
            }
            self.spare_all(layer, cx);
        }
        self.rules.set_scheme(scheme);
        cx.record(Layer::Hypervisor, None, Event::SchemeSet(scheme));
    }

    fn set_budget(&mut self, most: PerKind, grace_ms: u32, cx: &mut Context<'_>) {
        self.rules.set_budget(most);
        cx.record(Layer::Hypervisor, None, Event::BudgetSet(most));
        let at = cx.now + self.clock.to_ticks(grace_ms);
        for of_kind in [CounterId::Programmable(0), CounterId::Fixed(0)] {
            // A counter is taken once, and spared once before that.
            for _ in 0..2 * u64::BITS {
                match self.rules.budget_step(&self.bank, of_kind, at) {
                    Some(BudgetStep::Take(counter, reason)) => {
                        self.take_back(counter, reason, grace_ms, cx);
                    }
                    Some(BudgetStep::Spare(counter)) => self.spare(counter, cx),
                    None => break,
                }
            }
            // Who was given more time before is not.
            let (_, leaving) = self.bank.staying_and_leaving(of_kind, at);
            for counter in leaving.iter() {
                let announced = self.bank.revocation(counter);
                if announced.is_some_and(|announced| grace_ms == 0 || announced.at > at) {
                    self.take_back(counter, Reason::Budget, grace_ms, cx);
                }
            }
        }
    }

    /// Takes a counter from its holder after a notice of so long.
    fn take_back(
        &mut self,
        counter: CounterId,
        reason: Reason,
        grace_ms: u32,
        cx: &mut Context<'_>,
    ) {
        let Some(owner) = self.bank.owner(counter) else {
            return;
        };
        let pending = self.requests.of(owner);
        if pending.is_some_and(|pending| pending.got.contains(counter)) {
            // Nobody uses it yet.
            self.conclude(owner, Err(reason), cx);
        } else if grace_ms == 0 {
            self.revoke_now(counter, reason, cx);
        } else {
            let at = cx.now + self.clock.to_ticks(grace_ms);
            let announced = self.bank.revocation(counter);
            let revocation = Revocation {
                // Nobody is given more time than was announced.
                at: announced.map_or(at, |announced| announced.at.min(at)),
                reason,
                wanted_by: None,
            };
            self.announce(counter, revocation, cx);
        }
    }

    /// Takes a counter from its holder, which nobody gets instead.
    fn revoke_now(&mut self, counter: CounterId, reason: Reason, cx: &mut Context<'_>) {
        let notice = QueuedNotice::about(NoticeKind::Revoked, counter, Layer::Hypervisor);
        let notice = notice.because(reason);
        self.lose(counter, Event::Revoked(reason), Some(notice), cx);
        self.adapt(counter, cx);
    }

    /// Ends what is due: leases, questions, and the time before a revocation.
    pub(crate) fn tick(&mut self, cx: &mut Context<'_>) {
        // Another vCPU may have ended the firmware's phase.
        let _ = self.names();
        if self.deadline.is_none_or(|deadline| cx.now < deadline) {
            return;
        }
        // Leases end first, because a holder that they bring down to its minimum is
        // spared.
        self.end_leases(cx);
        // The administrator's revocations come next, for the same reason.
        self.end_revocations(true, cx);
        self.end_revocations(false, cx);
        self.end_questions(cx);
        self.requests.end_moves(Some(cx.now));
        self.serve(cx);
        self.find_deadline();
    }

    fn end_leases(&mut self, cx: &mut Context<'_>) {
        for counter in self.bank.held().iter() {
            if let Some(held) = self.bank.reservation(counter)
                && held.lease.is_some_and(|ends| ends <= cx.now)
            {
                let reason = Reason::Expired;
                let notice = QueuedNotice::about(NoticeKind::Expired, counter, held.owner);
                let notice = notice.because(reason);
                self.lose(counter, Event::Revoked(reason), Some(notice), cx);
                self.adapt(counter, cx);
            }
        }
    }

    fn end_revocations(&mut self, administrators: bool, cx: &mut Context<'_>) {
        for counter in self.bank.held().iter() {
            let Some(revocation) = self.bank.revocation(counter) else {
                continue;
            };
            if revocation.at > cx.now || revocation.is_administrators() != administrators {
                continue;
            }
            match revocation.wanted_by {
                // It stays due until the unit is told what can be backed now.
                Some(by) if by.is_guest() && self.room.is_old() => {}
                Some(by) => self.end_notice(counter, by, cx),
                None if revocation.reason == Reason::Budget
                    && self.rules.has_room_for(&self.bank, counter, cx.now) =>
                {
                    self.spare(counter, cx);
                }
                None => self.revoke_now(counter, revocation.reason, cx),
            }
        }
    }

    /// Revokes a counter whose announced time has come, or spares its holder: that may
    /// have given back other counters meanwhile and be down to its minimum.
    fn end_notice(&mut self, counter: CounterId, by: Layer, cx: &mut Context<'_>) {
        let waits = self.requests.of(by).is_some();
        if waits && self.books().is_justified(by, counter) {
            self.take_over(counter, by, Reason::Priority, cx);
        } else {
            self.requests.spare(by, counter);
            self.spare(counter, cx);
        }
    }

    /// Ends the questions that nobody answered in time. The holders keep their
    /// counters for now.
    fn end_questions(&mut self, cx: &mut Context<'_>) {
        let overdue = self.requests.overdue(cx.now);
        for (wanted_by, question) in Policy::LAYERS.into_iter().zip(overdue) {
            if let Some(question) = question {
                let reason = Reason::NoAnswer;
                self.requests.decline(wanted_by, reason);
                let event = Event::Declined { wanted_by, reason };
                cx.record(question.holder, Some(question.counter), event);
            }
        }
    }

    /// Makes a change of the bank; every change passes here. Legacy names follow what
    /// was held when the phase ended, so they are settled before.
    fn apply(&mut self, counter: CounterId, kind: ChangeKind) {
        let _ = self.names();
        self.room.note_held();
        let effects = self.bank.apply(Change { counter, kind });
        self.effects = self.effects.and(effects);
    }

    /// Starts the lease of a counter's owner anew: as long as policy allows, or as
    /// long as `wanted_ms` if that is shorter. Returns its length in milliseconds.
    fn start_lease(&mut self, counter: CounterId, wanted_ms: Option<u32>, now: Tsc) -> Option<u32> {
        let owner = self.bank.owner(counter)?;
        let lease_ms = self.rules.lease_ms(owner, wanted_ms);
        let ends = lease_ms.map(|ms| now + self.clock.to_ticks(ms));
        self.bank.set_lease(counter, lease_ms, ends);
        lease_ms
    }

    /// A free counter becomes one of those that the request of `layer` has gathered.
    fn take(&mut self, counter: CounterId, layer: Layer) {
        let Some(pending) = self.requests.gather(layer, counter) else {
            return;
        };
        let (cookie, event) = (pending.cookie, pending.event);
        let reservation = self.rules.granted(layer, cookie, event);
        self.apply(counter, ChangeKind::Reserve(reservation));
        // Legacy software may have used the counter, and its event would go on.
        self.effects.cleared.insert(counter);
    }

    /// The holder of a counter has it no more.
    fn lose(
        &mut self,
        counter: CounterId,
        event: Event,
        notice: Option<QueuedNotice>,
        cx: &mut Context<'_>,
    ) {
        let Some(owner) = self.bank.owner(counter) else {
            return;
        };
        self.apply(counter, ChangeKind::Release);
        cx.record(owner, Some(counter), event);
        if let Some(notice) = notice {
            self.mailboxes.push(owner, notice);
        }
    }

    /// Takes a counter from its holder for the request of `layer`, by the arbiter's own
    /// decision.
    fn take_over(
        &mut self,
        counter: CounterId,
        layer: Layer,
        reason: Reason,
        cx: &mut Context<'_>,
    ) {
        if self.bank.owner(counter).is_none() {
            return;
        }
        // The holder may have agreed to lend while a question was under way.
        let is_it = |question: &Question| question.counter == counter;
        let _ = self.requests.take_question(layer, is_it);
        let notice = QueuedNotice::about(NoticeKind::Revoked, counter, layer);
        let notice = notice.because(reason);
        self.lose(counter, Event::Revoked(reason), Some(notice), cx);
        self.take(counter, layer);
    }

    /// Asks the holder of a counter to yield it to `wanted_by`.
    fn ask(&mut self, counter: CounterId, wanted_by: Layer, cx: &mut Context<'_>) {
        let Some(holder) = self.bank.owner(counter) else {
            return;
        };
        let due = cx.now + self.clock.to_ticks(self.rules.policy().grace_ms);
        let question = Question {
            counter,
            holder,
            due,
        };
        self.requests.ask(wanted_by, question);
        cx.record(holder, Some(counter), Event::Asked { wanted_by });
        let notice = QueuedNotice::about(NoticeKind::Asked, counter, wanted_by).due(due);
        self.mailboxes.push(holder, notice);
    }

    /// Announces a revocation to the holder of a counter.
    fn announce(&mut self, counter: CounterId, revocation: Revocation, cx: &mut Context<'_>) {
        let Some(owner) = self.bank.owner(counter) else {
            return;
        };
        self.bank.set_revocation(counter, Some(revocation));
        let Revocation { at, reason, .. } = revocation;
        let wanted_by = revocation.wanted_by_as_shown();
        let event = Event::Revoking {
            wanted_by,
            reason,
            in_ms: self.clock.to_ms(at - cx.now),
        };
        cx.record(owner, Some(counter), event);
        let notice = QueuedNotice::about(NoticeKind::Revoking, counter, wanted_by);
        self.mailboxes.push(owner, notice.because(reason).due(at));
    }

    /// Takes an announced revocation back.
    fn spare(&mut self, counter: CounterId, cx: &mut Context<'_>) {
        let held = self.bank.reservation(counter);
        let Some((owner, revocation)) = held.and_then(|held| Some((held.owner, held.revocation?)))
        else {
            return;
        };
        self.bank.set_revocation(counter, None);
        cx.record(owner, Some(counter), Event::Spared);
        let wanted_by = revocation.wanted_by_as_shown();
        let notice = QueuedNotice::about(NoticeKind::Cancelled, counter, wanted_by);
        self.mailboxes.push(owner, notice);
    }

    /// Takes back all revocations that were announced for `layer`.
    fn spare_all(&mut self, layer: Layer, cx: &mut Context<'_>) {
        for counter in self.bank.announced_for(layer).iter() {
            self.spare(counter, cx);
        }
    }

    /// Notifies the holder that was asked that the question no longer stands.
    fn cancel(&mut self, question: Question, wanted_by: Layer) {
        let notice = QueuedNotice::about(NoticeKind::Cancelled, question.counter, wanted_by);
        self.mailboxes.push(question.holder, notice);
    }

    /// Adapts requests after a counter has changed hands, or its control word, and serves
    /// them.
    fn adapt(&mut self, counter: CounterId, cx: &mut Context<'_>) {
        let owner = self.bank.owner(counter);
        for layer in Policy::LAYERS {
            let Some(pending) = self.requests.of(layer) else {
                continue;
            };
            if pending.got.contains(counter) && owner != Some(layer) {
                self.requests.lose(layer, counter);
                self.conclude(layer, Err(Reason::Withdrawn), cx);
            } else {
                self.review(layer);
            }
        }
        // A layer that has got the counter in another way needs no revocation.
        if let Some(revocation) = self.bank.revocation(counter)
            && revocation.wanted_by == self.bank.owner(counter)
        {
            self.bank.set_revocation(counter, None);
        }
        self.serve(cx);
    }

    /// Cancels the question of a layer if it no longer stands: another layer holds the
    /// counter by now, or the holder is down to its minimum and must not go below it.
    fn review(&mut self, wanted_by: Layer) {
        let Some(question) = self.requests.question_of(wanted_by) else {
            return;
        };
        let Question {
            counter, holder, ..
        } = question;
        let holds = self.bank.owner(counter) == Some(holder);
        if holds && self.books().can_spare(holder, counter, wanted_by) {
            return;
        }
        self.requests.drop_question(wanted_by);
        if holds {
            self.cancel(question, wanted_by);
        }
    }

    /// Advances every request as far as it gets now.
    fn serve(&mut self, cx: &mut Context<'_>) {
        // A refusal frees counters that an earlier request may wait for. Each further round
        // has one request less.
        for _ in 0..=Policy::LAYERS.len() {
            let mut concluded = false;
            for layer in self.requests.in_order(self.rules.policy()) {
                if self.requests.of(layer).is_some() {
                    self.advance(layer, cx);
                    concluded |= self.requests.of(layer).is_none();
                }
            }
            if !concluded {
                return;
            }
        }
    }

    /// Takes the broker's steps for the request of `layer`, until it waits or has its
    /// answer.
    fn advance(&mut self, layer: Layer, cx: &mut Context<'_>) {
        for _ in 0..STEPS {
            let Some(pending) = self.requests.of(layer) else {
                return;
            };
            if !self.firmware.is_alive(layer) {
                return self.conclude(layer, Err(Reason::Phase), cx);
            }
            if pending.lacks() > 0 && self.room.is_old() && layer.is_guest() {
                // Until the unit is told what can be backed now.
                break;
            }
            let step = self.books().next(layer, pending);
            if step != NextStep::Move {
                self.requests.drop_move(layer);
            }
            let until = cx.now + self.clock.to_ticks(self.rules.policy().grace_ms);
            match step {
                NextStep::Take(counters) => {
                    for counter in counters.iter() {
                        self.take(counter, layer);
                    }
                }
                NextStep::TakeLent(counter) => self.take_over(counter, layer, Reason::Lent, cx),
                NextStep::Ask(counter) => self.ask(counter, layer, cx),
                NextStep::Announce(counter) => {
                    let revocation = Revocation {
                        at: until,
                        reason: Reason::Priority,
                        wanted_by: Some(layer),
                    };
                    self.announce(counter, revocation, cx);
                }
                NextStep::Spare(counter) => self.spare(counter, cx),
                NextStep::Move => {
                    self.requests.start_move(layer, until);
                    break;
                }
                NextStep::Wait => break,
                NextStep::Grant => return self.conclude(layer, Ok(()), cx),
                NextStep::Refuse(reason) => return self.conclude(layer, Err(reason), cx),
            }
        }
        // It goes on waiting. A counter that comes together with the answer has one record
        // only, that of the answer.
        for counter in self.requests.take_news(layer).iter() {
            cx.record(layer, Some(counter), Event::Gathered);
        }
    }

    /// Gives the request of `layer` its answer. That cancels what is under way for it,
    /// and starts the leases of what it has gathered, or gives that back.
    fn conclude(&mut self, layer: Layer, answer: Result<(), Reason>, cx: &mut Context<'_>) {
        // Legacy names have to see what the request was gathering.
        let _ = self.names();
        let Some(pending) = self.requests.close(layer) else {
            return;
        };
        if let Some(question) = pending.question {
            self.cancel(question, layer);
        }
        self.spare_all(layer, cx);
        for counter in pending.got.iter() {
            if answer.is_ok() {
                let lease_ms = match pending.wanted {
                    // Nobody would renew it; the end of what it was for ends it.
                    Wanted::Held(_) => None,
                    _ => self.start_lease(counter, pending.lease_ms, cx.now),
                };
                cx.record(layer, Some(counter), Event::Reserved { lease_ms });
                continue;
            }
            self.apply(counter, ChangeKind::Release);
            if pending.reported.contains(counter) {
                cx.record(layer, Some(counter), Event::Returned);
            }
        }
        let (outcome, kind) = match answer {
            Ok(()) => (Outcome::Granted(pending.got), NoticeKind::Granted),
            Err(reason) => {
                let counter = match pending.wanted {
                    Wanted::This(counter) => Some(counter),
                    Wanted::Any(_) | Wanted::Held(_) => None,
                };
                let counter = counter.filter(|counter| self.bank.counters().contains(*counter));
                cx.record(layer, counter, Event::Refused(reason));
                (Outcome::Refused(reason), NoticeKind::Refused)
            }
        };
        self.mailboxes.set_outcome(layer, outcome);
        // A withdrawn request has a notice too: several components of a layer may wait
        // for the answer.
        if pending.waits {
            let shown = self.mailboxes.answer(layer).unwrap_or_default();
            record_answer(layer, shown, cx);
            let notice = QueuedNotice::about_request(kind, layer, answer.err());
            self.mailboxes.push(layer, notice);
        }
    }
}

fn record_answer(layer: Layer, answer: Answer, cx: &mut Context<'_>) {
    cx.audit.asked(&AskRecord {
        layer,
        ask: Ask::Answer,
        presented: Presented::Nothing,
        result: AskResult::Answered(answer),
    });
}

#[cfg(test)]
impl Arbitration {
    /// The same arbitration in another machine, whose phase this is.
    pub(crate) fn fork(&self, phase: Arc<Phase>) -> Self {
        Arbitration {
            bank: self.bank.clone(),
            requests: self.requests.clone(),
            mailboxes: self.mailboxes.clone(),
            firmware: Firmware::new(phase, self.firmware.has_smm()),
            ..*self
        }
    }
}
