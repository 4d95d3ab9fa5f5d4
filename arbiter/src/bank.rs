//! The reservations of one vCPU's counters: a state machine.
//!
//! Deciding and doing are apart. [`Bank::check`] and [`Bank::plan`] decide and
//! change nothing. [`Bank::apply`] does what a plan says. Policy stands between
//! them and may refuse a plan ([`Policy::admit`](crate::Policy::admit)).

use alloc::boxed::Box;

use crate::control::{Control, Shared};
use crate::cookie::Cookie;
use crate::message::NamedEvent;
use crate::reason::Reason;
use crate::reservation::{Change, ChangeKind, Effects, Operation, Reservation, Revocation};
use crate::time::{Tsc, earliest};
use crate::{Access, CounterId, CounterSet, Layer, Verdict};

/// The reservations of one vCPU.
#[derive(Clone, Debug)]
pub struct Bank {
    programmable: u8,
    fixed: u8,
    /// There are samplers.
    ibs: bool,
    /// Programmable counters by index, then fixed ones, then samplers.
    slots: Box<[Option<Reservation>]>,
    held: CounterSet,
    /// Counters that no layer holds.
    free: CounterSet,
    /// Counters that each of [`Shared::ALL`] reaches.
    reached: [CounterSet; Shared::ALL.len()],
}

impl Bank {
    /// A bank of free counters. It holds at most [`MAX_PROGRAMMABLE`](crate::MAX_PROGRAMMABLE)
    /// programmable and [`MAX_FIXED`](crate::MAX_FIXED) fixed-function ones.
    pub fn new(programmable: u8, fixed: u8) -> Self {
        let (programmable, fixed) = (
            programmable.min(crate::MAX_PROGRAMMABLE),
            fixed.min(crate::MAX_FIXED),
        );
        Bank::empty(programmable, fixed, false)
    }

    fn empty(programmable: u8, fixed: u8, ibs: bool) -> Self {
        let mut bank = Bank {
            programmable,
            fixed,
            ibs,
            slots: Box::default(),
            held: CounterSet::EMPTY,
            free: CounterSet::EMPTY,
            reached: [CounterSet::EMPTY; Shared::ALL.len()],
        };
        bank.free = bank.counters();
        bank.reached = [bank.free; Shared::ALL.len()];
        bank.slots = bank.free.iter().map(|_| None).collect();
        bank
    }

    /// The same bank with both samplers, free.
    #[must_use]
    pub fn with_samplers(self) -> Self {
        Bank::empty(self.programmable, self.fixed, true)
    }

    /// Forgets every reservation.
    pub fn reset(&mut self) {
        *self = Bank::empty(self.programmable, self.fixed, self.ibs);
    }

    /// Every counter of the bank.
    pub fn counters(&self) -> CounterSet {
        let counters = CounterSet::first(self.programmable, self.fixed);
        if self.ibs {
            counters | CounterSet::SAMPLERS
        } else {
            counters
        }
    }

    /// Whether samplers are among them.
    pub fn has_samplers(&self) -> bool {
        self.ibs
    }

    /// Counters that a layer holds.
    #[inline]
    pub fn held(&self) -> CounterSet {
        self.held
    }

    /// Counters that `layer` holds. A guest and [`Policy`](crate::Policy) see
    /// hypervisor and host tools as one layer, and so does this.
    pub fn held_by(&self, layer: Layer) -> CounterSet {
        let is_its = |counter: &CounterId| {
            self.reservation(*counter)
                .is_some_and(|reservation| reservation.owner.code() == layer.code())
        };
        self.held.iter().filter(is_its).collect()
    }

    /// Counters that the layers of the guest hold.
    pub fn held_by_guest(&self) -> CounterSet {
        self.held & !self.held_by(Layer::Hypervisor)
    }

    /// Counters that no layer holds.
    pub fn free(&self) -> CounterSet {
        self.free
    }

    /// Counters that a shared control reaches.
    #[inline]
    pub fn reached_by(&self, shared: Shared) -> CounterSet {
        self.reached[shared as usize]
    }

    /// The reservation of a counter. `None` means that the counter is free or does
    /// not exist.
    pub fn reservation(&self, counter: CounterId) -> Option<&Reservation> {
        self.slots.get(self.index(counter)?)?.as_ref()
    }

    /// The layer that holds a counter.
    pub fn owner(&self, counter: CounterId) -> Option<Layer> {
        self.reservation(counter)
            .map(|reservation| reservation.owner)
    }

    /// The announced revocation of a counter.
    pub(crate) fn revocation(&self, counter: CounterId) -> Option<Revocation> {
        self.reservation(counter)?.revocation
    }

    /// Counters whose revocation was announced for `layer`.
    pub(crate) fn announced_for(&self, layer: Layer) -> CounterSet {
        let is_its = |counter: &CounterId| {
            let revocation = self.revocation(*counter);
            revocation.is_some_and(|revocation| revocation.wanted_by == Some(layer))
        };
        self.held.iter().filter(is_its).collect()
    }

    /// The counters of a kind that the layers of the guest hold: those that stay with
    /// them beyond `by`, and those that a budget is to take.
    pub(crate) fn staying_and_leaving(
        &self,
        of_kind: CounterId,
        by: Tsc,
    ) -> (CounterSet, CounterSet) {
        let (mut staying, mut leaving) = (CounterSet::EMPTY, CounterSet::EMPTY);
        for counter in self.held.iter() {
            let Some(held) = self.reservation(counter) else {
                continue;
            };
            if !held.owner.is_guest() || !counter.is_like(of_kind) {
                continue;
            }
            match held.revocation.filter(Revocation::is_administrators) {
                None => staying.insert(counter),
                Some(revocation) if revocation.reason == Reason::Budget => leaving.insert(counter),
                // The administrator named it, and it stays until its own time.
                Some(revocation) => revocation.at > by && staying.insert(counter),
            };
        }
        (staying, leaving)
    }

    /// The earliest end of a lease, or of the time before a revocation.
    pub(crate) fn deadline(&self) -> Option<Tsc> {
        let ends = self.held.iter().filter_map(|counter| {
            let reservation = self.reservation(counter)?;
            let revocation = reservation.revocation.map(|revocation| revocation.at);
            earliest(reservation.lease, revocation)
        });
        ends.min()
    }

    /// The lease of a counter that is held lasts so long, and ends then.
    pub(crate) fn set_lease(&mut self, counter: CounterId, ms: Option<u32>, ends: Option<Tsc>) {
        if let Some(reservation) = self.held_mut(counter) {
            reservation.lease_ms = ms;
            reservation.lease = ends;
        }
    }

    /// Announces a revocation, or takes the announced one back.
    pub(crate) fn set_revocation(&mut self, counter: CounterId, revocation: Option<Revocation>) {
        if let Some(reservation) = self.held_mut(counter) {
            reservation.revocation = revocation;
        }
    }

    /// A counter that is held is for this event from now on.
    pub(crate) fn set_event(&mut self, counter: CounterId, event: Option<NamedEvent>) {
        if let Some(reservation) = self.held_mut(counter) {
            reservation.event = event;
        }
    }

    fn held_mut(&mut self, counter: CounterId) -> Option<&mut Reservation> {
        let index = self.index(counter)?;
        self.slots.get_mut(index)?.as_mut()
    }

    #[inline]
    fn index(&self, counter: CounterId) -> Option<usize> {
        match counter {
            CounterId::Programmable(n) if n < self.programmable => Some(usize::from(n)),
            CounterId::Fixed(n) if n < self.fixed => {
                Some(usize::from(self.programmable) + usize::from(n))
            }
            CounterId::Ibs(kind) if self.ibs => {
                Some(usize::from(self.programmable) + usize::from(self.fixed) + kind as usize)
            }
            _ => None,
        }
    }

    /// The verdict on an access to a counter or to its control. An access to a
    /// counter that does not exist raises #GP.
    #[inline]
    pub fn check(
        &self,
        layer: Layer,
        cookie: Cookie,
        counter: CounterId,
        access: Access,
    ) -> Verdict {
        if self.free.contains(counter) && cookie.is_default() {
            return Verdict::Permit;
        }
        self.check_reserved(layer, cookie, counter, access)
    }

    fn check_reserved(
        &self,
        layer: Layer,
        cookie: Cookie,
        counter: CounterId,
        access: Access,
    ) -> Verdict {
        match self.reservation(counter) {
            // The layer comes first: a layer in which no cookie is valid must not learn
            // whether it presented the right one.
            Some(reservation)
                if reservation.control.accesses(layer) && reservation.is_access(cookie) =>
            {
                Verdict::Permit
            }
            _ => self.deny(layer, counter, access),
        }
    }

    /// The verdict on an access with a wrong cookie. It compares no cookie.
    pub(crate) fn deny(&self, layer: Layer, counter: CounterId, access: Access) -> Verdict {
        match self.reservation(counter) {
            Some(reservation) if reservation.control.faults(layer, access) => Verdict::Fault,
            Some(reservation) => Verdict::Drop {
                read_as: reservation.drop_value,
            },
            // A free counter expects the default cookie and drops others.
            None if self.free.contains(counter) => Verdict::Drop { read_as: 0 },
            None => Verdict::Fault,
        }
    }

    /// The change that `operation` of `layer` makes if `layer` presents `cookie`.
    ///
    /// # Errors
    /// The operation is denied for this reason. The guest gets #GP.
    pub fn plan(
        &self,
        layer: Layer,
        cookie: Cookie,
        counter: CounterId,
        operation: Operation,
    ) -> Result<Change, Reason> {
        if self.index(counter).is_none() {
            return Err(Reason::NoCounter);
        }
        let kind = match self.reservation(counter) {
            None => Self::plan_unreserved(layer, cookie, operation)?,
            Some(reservation) => Self::plan_reserved(reservation, layer, cookie, operation)?,
        };
        Ok(Change { counter, kind })
    }

    fn plan_unreserved(
        layer: Layer,
        cookie: Cookie,
        operation: Operation,
    ) -> Result<ChangeKind, Reason> {
        if !cookie.is_default() {
            return Err(Reason::Unreserved);
        }
        match operation {
            Operation::Manage(new) if new.is_default() => Ok(ChangeKind::Nothing),
            Operation::Manage(new) => Ok(ChangeKind::Reserve(Reservation::new(
                layer,
                new,
                Cookie::DEFAULT,
            ))),
            Operation::SetAccess(_) | Operation::SetControl(_) | Operation::SetDropValue(_) => {
                Err(Reason::Unreserved)
            }
        }
    }

    fn plan_reserved(
        reservation: &Reservation,
        layer: Layer,
        cookie: Cookie,
        operation: Operation,
    ) -> Result<ChangeKind, Reason> {
        // The layer comes first: a layer in which no cookie is valid must not learn
        // whether it presented the right one.
        if !reservation.control.manages(layer) {
            return Err(Reason::Layer);
        }
        if !reservation.is_management(cookie) {
            return Err(Reason::Cookie);
        }
        Ok(match operation {
            Operation::Manage(new) if new.is_default() => ChangeKind::Release,
            Operation::Manage(new) if reservation.is_management(new) => ChangeKind::Renew,
            Operation::Manage(new) => ChangeKind::HandOver {
                to: layer,
                management: new,
            },
            Operation::SetAccess(new) => ChangeKind::SetAccess(new),
            Operation::SetControl(control) => ChangeKind::SetControl(control),
            Operation::SetDropValue(value) => ChangeKind::SetDropValue(value),
        })
    }

    /// Makes a change that was planned or that the arbiter decided itself. A change
    /// that no longer fits the counter's state does nothing.
    pub fn apply(&mut self, change: Change) -> Effects {
        let Change { counter, kind } = change;
        let Some(index) = self.index(counter) else {
            return Effects::NONE;
        };
        let slot = &mut self.slots[index];
        let mut effects = Effects::NONE;
        match (kind, slot.as_mut()) {
            (ChangeKind::Reserve(reservation), None) => *slot = Some(reservation),
            (ChangeKind::Release, Some(_)) => {
                *slot = None;
                effects.cleared.insert(counter);
            }
            (ChangeKind::HandOver { to, management }, Some(reservation)) => {
                reservation.hand_over(to, management);
            }
            (ChangeKind::SetAccess(cookie), Some(reservation)) => reservation.set_access(cookie),
            (ChangeKind::SetControl(control), Some(reservation)) => reservation.control = control,
            (ChangeKind::SetDropValue(value), Some(reservation)) => {
                reservation.drop_value = value;
            }
            // A renewal concerns the lease alone, and the unit keeps leases.
            (ChangeKind::Nothing | ChangeKind::Renew, _)
            | (ChangeKind::Reserve(_), Some(_))
            | (
                ChangeKind::Release
                | ChangeKind::HandOver { .. }
                | ChangeKind::SetAccess(_)
                | ChangeKind::SetControl(_)
                | ChangeKind::SetDropValue(_),
                None,
            ) => return effects,
        }
        self.note_state(counter, &mut effects);
        effects
    }

    /// Updates the sets after the state of one counter has changed.
    fn note_state(&mut self, counter: CounterId, effects: &mut Effects) {
        let reservation = self.reservation(counter).copied();
        self.held.set(counter, reservation.is_some());
        self.free.set(counter, reservation.is_none());
        let control = reservation.map_or(Control::INITIAL, |reservation| reservation.control);
        for shared in Shared::ALL {
            let set = &mut self.reached[shared as usize];
            let reached = control.reached_by(shared);
            if set.contains(counter) != reached {
                set.set(counter, reached);
                effects.reach.insert(counter);
            }
        }
    }
}
