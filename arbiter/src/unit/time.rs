//! Deadlines: the ends of leases, of questions, and of the time before a
//! revocation.

use super::{Context, PcrUnit, record};
use crate::audit::Event;
use crate::broker::is_justified;
use crate::mailbox::QueuedNotice;
use crate::message::NoticeKind;
use crate::policy::Policy;
use crate::reason::Reason;
use crate::reservation::{Change, ChangeKind, Effects};
use crate::time::Tsc;
use crate::{CounterId, Layer};

impl PcrUnit {
    /// Ends what is due: leases, questions, and the time before a revocation.
    pub fn tick(&mut self, cx: &mut Context<'_>) -> Effects {
        let mut effects = Effects::NONE;
        // Another vCPU may have ended the firmware's phase.
        let _ = self.map();
        if self.deadline.is_none_or(|deadline| cx.now < deadline) {
            return effects;
        }
        let now = cx.now;
        let is_due = |at: Tsc| at <= now;
        // Leases end first, because a holder that they bring down to its minimum is
        // spared.
        for counter in self.bank.held().iter() {
            if let Some(reservation) = self.bank.reservation(counter)
                && reservation.lease.is_some_and(is_due)
            {
                effects = effects.and(self.expire(reservation.owner, counter, cx));
            }
        }
        // The administrator's revocations come next, for the same reason.
        for by_administrator in [true, false] {
            for counter in self.bank.held().iter() {
                if let Some(reservation) = self.bank.reservation(counter)
                    && let Some(revocation) = reservation.revocation
                    && is_due(revocation.at)
                    && revocation.wanted_by.is_none() == by_administrator
                {
                    if self.held_anew && revocation.wanted_by.is_some_and(Layer::is_guest) {
                        // It stays due until it is told what can be backed now.
                        continue;
                    }
                    effects = effects.and(match revocation.wanted_by {
                        Some(by) => self.end_notice(counter, by, cx),
                        None => self.end_grace(counter, revocation.reason, cx),
                    });
                }
            }
        }
        self.end_questions(cx);
        self.end_moves(Some(now));
        effects = effects.and(self.serve(cx));
        self.find_deadline();
        effects
    }

    /// Revokes a counter whose announced time has come, or spares its holder.
    fn end_notice(&mut self, counter: CounterId, by: Layer, cx: &mut Context<'_>) -> Effects {
        // The holder may have given back other counters meanwhile and be down to its
        // minimum.
        let is_justified = is_justified(&self.view(by), by, counter) && self.may_come(counter, by);
        match self.pending_mut(by) {
            Some(_) if is_justified => self.take_over(counter, by, Reason::Priority, cx),
            Some(pending) => {
                pending.spared.insert(counter);
                self.spare(counter, cx);
                Effects::NONE
            }
            None => {
                self.spare(counter, cx);
                Effects::NONE
            }
        }
    }

    fn expire(&mut self, owner: Layer, counter: CounterId, cx: &mut Context<'_>) -> Effects {
        let effects = self.apply(Change {
            counter,
            kind: ChangeKind::Release,
        });
        record(cx, owner, Some(counter), Event::Revoked(Reason::Expired));
        self.notify(
            owner,
            QueuedNotice {
                kind: NoticeKind::Expired,
                counter: Some(counter),
                layer: owner,
                reason: Some(Reason::Expired),
                due: None,
            },
        );
        effects.and(self.note_change(counter, cx))
    }

    /// Ends the questions that nobody answered in time. The holders keep their
    /// counters for now.
    fn end_questions(&mut self, cx: &mut Context<'_>) {
        for wanted_by in Policy::LAYERS {
            let Some(pending) = self.pending_mut(wanted_by) else {
                continue;
            };
            let Some(question) = pending.question.filter(|question| question.due <= cx.now) else {
                continue;
            };
            let reason = Reason::NoAnswer;
            pending.decline(question, reason);
            let event = Event::Declined { wanted_by, reason };
            record(cx, question.holder, Some(question.counter), event);
        }
    }

    /// Requests that wait for a move until `now`, or at all, wait no longer.
    pub(super) fn end_moves(&mut self, now: Option<Tsc>) {
        for layer in Policy::LAYERS {
            if let Some(pending) = self.pending_mut(layer)
                && pending
                    .move_by
                    .is_some_and(|by| now.is_none_or(|now| by <= now))
            {
                pending.move_by = None;
                pending.stays = true;
            }
        }
    }

    /// Starts the lease of a counter's owner anew: as long as policy allows, or as
    /// long as `wanted_ms` if that is shorter. Returns its length in milliseconds.
    pub(super) fn start_lease(
        &mut self,
        counter: CounterId,
        wanted_ms: Option<u32>,
        now: Tsc,
    ) -> Option<u32> {
        let owner = self.bank.reservation(counter)?.owner;
        let allowed = self.policy.share(owner).and_then(|share| share.lease_ms);
        let lease_ms = match (wanted_ms, allowed) {
            (Some(wanted_ms), Some(allowed)) => Some(wanted_ms.min(allowed)),
            (wanted_ms, allowed) => wanted_ms.or(allowed),
        };
        let ends = lease_ms.map(|ms| now + self.to_ticks(ms));
        let reservation = self.bank.reservation_mut(counter)?;
        reservation.lease_ms = lease_ms;
        reservation.lease = ends;
        lease_ms
    }

    /// The time at which [`PcrUnit::tick`] next has something to do.
    #[inline]
    pub fn deadline(&self) -> Option<Tsc> {
        self.deadline
    }

    pub(super) fn find_deadline(&mut self) {
        let ends = self.bank.held().iter().filter_map(|counter| {
            let reservation = self.bank.reservation(counter)?;
            let revocation = reservation.revocation.map(|revocation| revocation.at);
            earliest(reservation.lease, revocation)
        });
        let questions = self.mailboxes.iter().filter_map(|mailbox| {
            let pending = mailbox.pending.as_ref()?;
            earliest(
                pending.question.map(|question| question.due),
                pending.move_by,
            )
        });
        // A request of a firmware whose phase is over is refused at the next tick.
        let is_orphaned =
            self.pending(Layer::Firmware).is_some() && !self.is_alive(Layer::Firmware);
        let orphaned = is_orphaned.then_some(Tsc(0));
        self.deadline = ends.chain(questions).chain(orphaned).min();
    }
}

pub(super) fn earliest(a: Option<Tsc>, b: Option<Tsc>) -> Option<Tsc> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}
