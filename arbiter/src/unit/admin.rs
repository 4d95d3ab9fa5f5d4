//! What the administrator of the host does to the reservations of a vCPU while its
//! guest runs. Nobody can refuse it, and each act is recorded.

use alloc::vec::Vec;
use core::cmp::Reverse;
use core::fmt;

use super::{Context, PcrUnit, record};
use crate::audit::{Ask, AskRecord, AskResult, Event, Presented};
use crate::broker::{Pending, priority};
use crate::counter::PerKind;
use crate::policy::{Policy, PolicyError, Scheme};
use crate::reason::Reason;
use crate::reservation::{Change, ChangeKind, Effects, Revocation};
use crate::{CounterId, CounterSet, Layer, Tsc};

/// An act of the administrator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminAct {
    /// Takes a counter from its holder, whatever minimum the holder has.
    Revoke {
        /// The counter.
        counter: CounterId,
        /// How long before that the holder gets a notice, in milliseconds. With 0 the
        /// counter is taken at once.
        grace_ms: u32,
    },
    /// Bars a layer from reserving, or lets it reserve again. What it holds stays.
    Bar {
        /// The layer.
        layer: Layer,
        /// Whether it is barred from now on.
        barred: bool,
    },
    /// Sets how many counters each layer may hold. Who holds more keeps it. The time
    /// for answers stays as it is.
    SetPolicy(Policy),
    /// Sets the scheme. Who holds counters keeps them.
    SetScheme(Scheme),
    /// Sets how many counters of each kind the layers of the guest may hold together.
    /// What they hold beyond it is revoked, of the lowest priority first, whatever
    /// minimum its holder has; what an earlier budget was to take and this one leaves
    /// is spared.
    SetBudget {
        /// The most of each kind.
        most: PerKind,
        /// As for [`AdminAct::Revoke`].
        grace_ms: u32,
    },
}

/// An act that makes no sense. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminError {
    /// The machine has no such counter.
    NoCounter(CounterId),
    /// Nobody holds the counter.
    Unreserved(CounterId),
    /// The layer cannot hold counters.
    Layer(Layer),
    /// The policy cannot be kept.
    Policy(PolicyError),
}

impl fmt::Display for AdminError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AdminError::NoCounter(counter) => write!(f, "there is no counter {counter}"),
            AdminError::Unreserved(counter) => write!(f, "nobody has reserved {counter}"),
            AdminError::Layer(layer) => write!(f, "the {layer} holds no counters"),
            AdminError::Policy(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for AdminError {}

impl PcrUnit {
    /// Carries out an act of the administrator. Requests that are pending are decided
    /// anew after it.
    ///
    /// # Errors
    /// The act makes no sense, for this reason.
    pub fn administer(
        &mut self,
        act: AdminAct,
        cx: &mut Context<'_>,
    ) -> Result<Effects, AdminError> {
        // Legacy names have to see what was held before.
        let _ = self.map();
        let effects = match act {
            AdminAct::Revoke { counter, grace_ms } => self.revoke(counter, grace_ms, cx)?,
            AdminAct::Bar { layer, barred } => self.bar(layer, barred, cx)?,
            AdminAct::SetPolicy(policy) => self.set_policy(policy, cx)?,
            AdminAct::SetScheme(scheme) => self.set_scheme(scheme, cx),
            AdminAct::SetBudget { most, grace_ms } => self.set_budget(most, grace_ms, cx),
        };
        let effects = effects.and(self.serve(cx));
        self.find_deadline();
        cx.audit.asked(&AskRecord {
            layer: Layer::Hypervisor,
            ask: Ask::Administered,
            presented: Presented::Nothing,
            result: AskResult::Done,
        });
        Ok(effects)
    }

    /// Whether the administrator has barred a layer from reserving.
    pub fn is_barred(&self, layer: Layer) -> bool {
        let barred = self.barred.get(usize::from(layer.code()));
        barred.is_some_and(|barred| *barred)
    }

    /// Who reserves, and how layers get each other's counters.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Milliseconds until a lease ends or a revocation takes place, rounded up.
    pub fn ms_until(&self, at: crate::Tsc, now: crate::Tsc) -> u32 {
        self.to_ms(at - now)
    }

    fn revoke(
        &mut self,
        counter: CounterId,
        grace_ms: u32,
        cx: &mut Context<'_>,
    ) -> Result<Effects, AdminError> {
        if !self.has(counter) {
            return Err(AdminError::NoCounter(counter));
        }
        if self.bank.reservation(counter).is_none() {
            return Err(AdminError::Unreserved(counter));
        }
        Ok(self.take_back(counter, Reason::Administrator, grace_ms, cx))
    }

    /// Takes a counter from its holder after a notice of so long.
    fn take_back(
        &mut self,
        counter: CounterId,
        reason: Reason,
        grace_ms: u32,
        cx: &mut Context<'_>,
    ) -> Effects {
        let Some(held) = self.bank.reservation(counter) else {
            return Effects::NONE;
        };
        let (owner, announced) = (held.owner, held.revocation);
        let pending = self.pending(owner);
        if pending.is_some_and(|pending| pending.got.contains(counter)) {
            // Nobody uses it yet.
            return self.conclude(owner, Err(reason), cx);
        }
        if grace_ms == 0 {
            return self.revoke_now(counter, reason, cx);
        }
        let at = cx.now + self.to_ticks(grace_ms);
        let revocation = Revocation {
            // Nobody is given more time than was announced.
            at: announced.map_or(at, |announced| announced.at.min(at)),
            reason,
            wanted_by: None,
        };
        self.announce_revocation(counter, revocation, cx);
        Effects::NONE
    }

    /// Takes a counter from its holder, which nobody gets instead.
    pub(super) fn revoke_now(
        &mut self,
        counter: CounterId,
        reason: Reason,
        cx: &mut Context<'_>,
    ) -> Effects {
        let Some(owner) = self.bank.reservation(counter).map(|held| held.owner) else {
            return Effects::NONE;
        };
        let kind = ChangeKind::Release;
        let effects = self.apply(Change { counter, kind });
        record(cx, owner, Some(counter), Event::Revoked(reason));
        self.notify_revoked(owner, counter, Layer::Hypervisor, reason);
        effects.and(self.note_change(counter, cx))
    }

    fn set_budget(&mut self, most: PerKind, grace_ms: u32, cx: &mut Context<'_>) -> Effects {
        self.budget = most;
        record(cx, Layer::Hypervisor, None, Event::BudgetSet(most));
        let mut effects = Effects::NONE;
        let at = cx.now + self.to_ticks(grace_ms);
        for of_kind in [CounterId::Programmable(0), CounterId::Fixed(0)] {
            let most = u32::from(most.of(of_kind));
            loop {
                let (staying, leaving) = self.held_by_guest(of_kind, at);
                if staying.len() > most {
                    let Some(counter) = self.by_precedence(staying).next() else {
                        break;
                    };
                    // What the administrator takes anyhow goes earlier.
                    let held = self.bank.reservation(counter);
                    let announced = held.and_then(|held| held.revocation);
                    let announced = announced.filter(|one| one.wanted_by.is_none());
                    let reason = announced.map_or(Reason::Budget, |one| one.reason);
                    effects = effects.and(self.take_back(counter, reason, grace_ms, cx));
                } else if let (true, Some(counter)) =
                    (staying.len() < most, self.by_precedence(leaving).last())
                {
                    self.spare(counter, cx);
                } else {
                    break;
                }
            }
            // Who was given more time before is not.
            let (_, leaving) = self.held_by_guest(of_kind, at);
            for counter in leaving.iter() {
                let held = self.bank.reservation(counter);
                let announced = held.and_then(|held| held.revocation);
                if announced.is_some_and(|announced| grace_ms == 0 || announced.at > at) {
                    effects = effects.and(self.take_back(counter, Reason::Budget, grace_ms, cx));
                }
            }
        }
        effects
    }

    /// The time has come at which a counter was to be taken, which nobody gets instead.
    /// If the guest has given back another one meanwhile, or the hypervisor has taken it
    /// over, it stays.
    pub(super) fn end_grace(
        &mut self,
        counter: CounterId,
        reason: Reason,
        cx: &mut Context<'_>,
    ) -> Effects {
        let (staying, leaving) = self.held_by_guest(counter, cx.now);
        let room = u32::from(self.budget.of(counter)).saturating_sub(staying.len());
        // Those that are taken last.
        let goes = leaving.len().saturating_sub(room);
        let goes = usize::try_from(goes).unwrap_or(usize::MAX);
        let mut spared = self.by_precedence(leaving).skip(goes);
        let stays = spared.any(|one| one == counter) || !leaving.contains(counter);
        if reason == Reason::Budget && stays {
            self.spare(counter, cx);
            return Effects::NONE;
        }
        self.revoke_now(counter, reason, cx)
    }

    /// The counters of a kind that the layers of the guest hold: those that stay with
    /// them beyond `by`, and those that a budget is to take.
    pub(super) fn held_by_guest(&self, of_kind: CounterId, by: Tsc) -> (CounterSet, CounterSet) {
        let (mut staying, mut leaving) = (CounterSet::EMPTY, CounterSet::EMPTY);
        for counter in self.bank.held().iter() {
            let Some(held) = self.bank.reservation(counter) else {
                continue;
            };
            if !held.owner.is_guest() || !counter.is_like(of_kind) {
                continue;
            }
            match held.revocation.filter(|one| one.wanted_by.is_none()) {
                None => staying.insert(counter),
                Some(revocation) if revocation.reason == Reason::Budget => leaving.insert(counter),
                // By the administrator.
                Some(revocation) => revocation.at > by && staying.insert(counter),
            };
        }
        (staying, leaving)
    }

    /// Counters in the order in which they are taken: those first that the administrator
    /// takes anyhow, then those of the layer with the lowest priority, and of these the
    /// highest.
    fn by_precedence(&self, counters: CounterSet) -> impl Iterator<Item = CounterId> + use<> {
        let precedence = |counter: &CounterId| {
            let held = self.bank.reservation(*counter)?;
            let goes = held.revocation.filter(|one| one.wanted_by.is_none());
            let goes = goes.is_some_and(|one| one.reason == Reason::Administrator);
            Some((!goes, priority(&self.policy, held.owner)))
        };
        let mut counters: Vec<CounterId> = counters.iter().collect();
        counters.sort_by_key(|counter| (precedence(counter), Reverse(*counter)));
        counters.into_iter()
    }

    fn bar(
        &mut self,
        layer: Layer,
        barred: bool,
        cx: &mut Context<'_>,
    ) -> Result<Effects, AdminError> {
        let layer = layer.as_holder();
        let flag = self.barred.get_mut(usize::from(layer.code()));
        *flag.ok_or(AdminError::Layer(layer))? = barred;
        let event = if barred {
            Event::LayerBarred(layer)
        } else {
            Event::LayerUnbarred(layer)
        };
        record(cx, Layer::Hypervisor, None, event);
        Ok(if barred {
            self.conclude(layer, Err(Reason::Administrator), cx)
        } else {
            Effects::NONE
        })
    }

    fn set_policy(&mut self, policy: Policy, cx: &mut Context<'_>) -> Result<Effects, AdminError> {
        let there = PerKind::count(self.bank.counters().counters());
        let fits = policy.fits(there.programmable, there.fixed);
        fits.map_err(AdminError::Policy)?;
        let before = self.policy;
        self.policy = Policy {
            grace_ms: before.grace_ms,
            ..policy
        };
        for of in Policy::LAYERS {
            if let Some(share) = policy.share(of).filter(|new| before.share(of) != Some(new)) {
                let share = *share;
                record(cx, Layer::Hypervisor, None, Event::PolicySet { of, share });
            }
        }
        // A holder that is at its minimum now is not asked any more.
        for layer in Policy::LAYERS {
            if let Some(question) = self.pending(layer).and_then(|pending| pending.question) {
                self.review(question, layer);
            }
        }
        Ok(Effects::NONE)
    }

    /// Requests that are pending keep what they have gathered and begin anew: what was
    /// asked or announced for them is off, and nobody has declined anything.
    fn set_scheme(&mut self, scheme: Scheme, cx: &mut Context<'_>) -> Effects {
        for layer in Policy::LAYERS {
            let Some(pending) = self.pending_mut(layer) else {
                continue;
            };
            let question = pending.question;
            *pending = Pending {
                sequence: pending.sequence,
                got: pending.got,
                reported: pending.reported,
                waits: pending.waits,
                ..Pending::new(
                    pending.wanted,
                    pending.cookie,
                    pending.lease_ms,
                    pending.event,
                )
            };
            if let Some(question) = question {
                self.notify_cancelled(question.holder, question.counter, layer);
            }
            self.spare_all(layer, cx);
        }
        self.scheme = scheme;
        record(cx, Layer::Hypervisor, None, Event::SchemeSet(scheme));
        Effects::NONE
    }
}
