//! The rules of the host for one vCPU's layers, which its administrator can change while
//! the guest runs: policy, scheme, budget, and who is barred.

use alloc::vec::Vec;
use core::cmp::Reverse;

use crate::bank::Bank;
use crate::cookie::Cookie;
use crate::counter::PerKind;
use crate::message::NamedEvent;
use crate::policy::{LAYERS, Policy, PolicyError, Scheme, Share};
use crate::reason::Reason;
use crate::reservation::{Change, ChangeKind, Operation, Reservation, Revocation};
use crate::time::Tsc;
use crate::{CounterId, CounterSet, Layer};

/// What the host has set for the layers of one vCPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    policy: Policy,
    scheme: Scheme,
    /// What the administrator leaves to the layers of the guest together.
    budget: PerKind,
    /// Layers, by code, that the administrator has barred from reserving.
    barred: [bool; LAYERS],
}

/// What a budget does to one counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BudgetStep {
    /// Its holder is to lose it, for this reason.
    Take(CounterId, Reason),
    /// An earlier budget was to take it, and this one leaves it.
    Spare(CounterId),
}

impl Rules {
    pub(crate) fn new(policy: Policy, scheme: Scheme) -> Self {
        Rules {
            policy,
            scheme,
            budget: PerKind::ALL,
            barred: [false; LAYERS],
        }
    }

    pub(crate) fn policy(&self) -> &Policy {
        &self.policy
    }

    pub(crate) fn scheme(&self) -> Scheme {
        self.scheme
    }

    pub(crate) fn is_barred(&self, layer: Layer) -> bool {
        let barred = self.barred.get(usize::from(layer.code()));
        barred.is_some_and(|barred| *barred)
    }

    /// Bars a layer, or lets it reserve again. `None`: it cannot hold counters.
    pub(crate) fn bar(&mut self, layer: Layer, barred: bool) -> Option<()> {
        *self.barred.get_mut(usize::from(layer.code()))? = barred;
        Some(())
    }

    pub(crate) fn set_scheme(&mut self, scheme: Scheme) {
        self.scheme = scheme;
    }

    #[cfg(test)]
    pub(crate) fn budget(&self) -> PerKind {
        self.budget
    }

    pub(crate) fn set_budget(&mut self, most: PerKind) {
        self.budget = most;
    }

    /// Sets how many of these counters each layer may hold. The time for answers stays.
    /// Returns the shares that are others than before.
    ///
    /// # Errors
    /// They do not suffice.
    pub(crate) fn set_policy(
        &mut self,
        policy: Policy,
        there: CounterSet,
    ) -> Result<impl Iterator<Item = (Layer, Share)> + use<>, PolicyError> {
        let there = PerKind::count(there.counters());
        policy.fits(there.programmable, there.fixed)?;
        let before = self.policy;
        self.policy = Policy {
            grace_ms: before.grace_ms,
            ..policy
        };
        Ok(Policy::LAYERS.into_iter().filter_map(move |layer| {
            let share = policy.share(layer)?;
            (before.share(layer) != Some(share)).then_some((layer, *share))
        }))
    }

    /// How long a lease of `owner` lasts that wants it to be so long, in milliseconds.
    pub(crate) fn lease_ms(&self, owner: Layer, wanted_ms: Option<u32>) -> Option<u32> {
        let allowed = self.policy.share(owner).and_then(|share| share.lease_ms);
        match (wanted_ms, allowed) {
            (Some(wanted_ms), Some(allowed)) => Some(wanted_ms.min(allowed)),
            (wanted_ms, allowed) => wanted_ms.or(allowed),
        }
    }

    /// The reservation that a request with this cookie gets.
    pub(crate) fn granted(
        &self,
        layer: Layer,
        cookie: Cookie,
        event: Option<NamedEvent>,
    ) -> Reservation {
        let mut reservation = match self.scheme {
            Scheme::SingleMaster => Reservation::granted(layer, cookie),
            Scheme::Independent | Scheme::Interacting => Reservation::new(layer, cookie, cookie),
        };
        reservation.event = event;
        reservation
    }

    /// The change that an operation of `layer` makes under this scheme if it presents
    /// `cookie`.
    ///
    /// # Errors
    /// The operation is denied for this reason.
    pub(crate) fn plan(
        &self,
        bank: &Bank,
        (layer, cookie): (Layer, Cookie),
        counter: CounterId,
        operation: Operation,
    ) -> Result<Change, Reason> {
        let held = bank.reservation(counter);
        let is_masters = self.scheme == Scheme::SingleMaster
            && (layer.is_guest() || held.is_some_and(Reservation::is_masters));
        if is_masters {
            plan_for_master(bank, (layer, cookie), counter, operation)
        } else {
            bank.plan(layer, cookie, counter, operation)
        }
    }

    /// Checks that `layer` may dispose of its counter with `cookie`. That takes the
    /// management cookie, or that of the grant under a single master.
    ///
    /// # Errors
    /// It may not, for this reason.
    pub(crate) fn check_cookie(
        &self,
        bank: &Bank,
        layer: Layer,
        counter: CounterId,
        cookie: Cookie,
    ) -> Result<(), Reason> {
        if self.scheme != Scheme::SingleMaster {
            let operation = Operation::Manage(Cookie::DEFAULT);
            return bank.plan(layer, cookie, counter, operation).map(drop);
        }
        let reservation = bank.reservation(counter).ok_or(Reason::Unreserved)?;
        if reservation.is_management(cookie) {
            Ok(())
        } else {
            Err(Reason::Cookie)
        }
    }

    /// What the budget does next among counters of a kind, where those stay that are not
    /// taken by `at`. `None`: the guest holds as many as it may.
    pub(crate) fn budget_step(
        &self,
        bank: &Bank,
        of_kind: CounterId,
        at: Tsc,
    ) -> Option<BudgetStep> {
        let most = u32::from(self.budget.of(of_kind));
        let (staying, leaving) = bank.staying_and_leaving(of_kind, at);
        if staying.len() > most {
            let counter = self.by_precedence(bank, staying).next()?;
            // What the administrator takes anyhow goes earlier, for that reason.
            let announced = bank.revocation(counter);
            let announced = announced.filter(Revocation::is_administrators);
            let reason = announced.map_or(Reason::Budget, |one| one.reason);
            return Some(BudgetStep::Take(counter, reason));
        }
        if staying.len() == most {
            return None;
        }
        let last = self.by_precedence(bank, leaving).last()?;
        Some(BudgetStep::Spare(last))
    }

    /// Whether a counter whose time is over stays with its holder: the guest has given
    /// back another one meanwhile, or the hypervisor has taken it over.
    pub(crate) fn has_room_for(&self, bank: &Bank, counter: CounterId, now: Tsc) -> bool {
        let (staying, leaving) = bank.staying_and_leaving(counter, now);
        let room = u32::from(self.budget.of(counter)).saturating_sub(staying.len());
        let goes = leaving.len().saturating_sub(room);
        let goes = usize::try_from(goes).unwrap_or(usize::MAX);
        // Those that are taken last.
        let mut spared = self.by_precedence(bank, leaving).skip(goes);
        spared.any(|one| one == counter) || !leaving.contains(counter)
    }

    /// Counters in the order in which they are taken: those first that the administrator
    /// takes anyhow, then those of the layer with the lowest priority, and of these the
    /// highest.
    fn by_precedence(
        &self,
        bank: &Bank,
        counters: CounterSet,
    ) -> impl Iterator<Item = CounterId> + use<> {
        let precedence = |counter: &CounterId| {
            let held = bank.reservation(*counter)?;
            let goes = held.revocation.filter(Revocation::is_administrators);
            let goes = goes.is_some_and(|one| one.reason == Reason::Administrator);
            Some((!goes, self.policy.priority(held.owner)))
        };
        let mut counters: Vec<CounterId> = counters.iter().collect();
        counters.sort_by_key(|counter| (precedence(counter), Reverse(*counter)));
        counters.into_iter()
    }
}

/// Plans an operation under a single master. Only the master reserves and takes back. The
/// layer that was granted a counter renews it, and sets its cookies, control word and drop
/// value, with the cookie of its request.
fn plan_for_master(
    bank: &Bank,
    (layer, cookie): (Layer, Cookie),
    counter: CounterId,
    operation: Operation,
) -> Result<Change, Reason> {
    let is_key = matches!(operation, Operation::Manage(_) | Operation::SetAccess(_));
    let reservation = match bank.reservation(counter) {
        Some(reservation) if reservation.owner == layer && !cookie.is_default() => reservation,
        _ if is_key => return Err(Reason::Master),
        _ if !bank.counters().contains(counter) => return Err(Reason::NoCounter),
        Some(reservation) if reservation.owner == layer => return Err(Reason::Cookie),
        Some(_) => return Err(Reason::Layer),
        None => return Err(Reason::Unreserved),
    };
    if !reservation.is_management(cookie) {
        return Err(Reason::Cookie);
    }
    let kind = match operation {
        Operation::Manage(new) if new.is_default() => return Err(Reason::Master),
        Operation::Manage(new) if reservation.is_management(new) => ChangeKind::Renew,
        Operation::Manage(management) => ChangeKind::HandOver {
            to: layer,
            management,
        },
        Operation::SetAccess(new) => ChangeKind::SetAccess(new),
        Operation::SetControl(control) => ChangeKind::SetControl(control),
        Operation::SetDropValue(value) => ChangeKind::SetDropValue(value),
    };
    Ok(Change { counter, kind })
}
