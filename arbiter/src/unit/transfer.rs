//! Transfers: counters change hands, and their holders are notified.

use super::{Context, PcrUnit, record};
use crate::audit::Event;
use crate::broker::Question;
use crate::mailbox::QueuedNotice;
use crate::message::NoticeKind;
use crate::policy::Scheme;
use crate::reason::Reason;
use crate::reservation::{Change, ChangeKind, Effects, Reservation, Revocation};
use crate::{CounterId, Layer};

impl PcrUnit {
    /// Puts a notice into the mailbox of a layer.
    pub(super) fn notify(&mut self, layer: Layer, notice: QueuedNotice) {
        if let Some(mailbox) = self.mailbox_mut(layer) {
            mailbox.push(notice);
        }
    }

    /// Adds a free counter to those that the request of `layer` has gathered.
    pub(super) fn take(&mut self, counter: CounterId, layer: Layer) -> Effects {
        let is_masters = self.scheme == Scheme::SingleMaster;
        let Some(pending) = self.pending_mut(layer) else {
            return Effects::NONE;
        };
        pending.got.insert(counter);
        let (cookie, event) = (pending.cookie, pending.event);
        let mut reservation = if is_masters {
            Reservation::granted(layer, cookie)
        } else {
            Reservation::new(layer, cookie, cookie)
        };
        reservation.event = event;
        let kind = ChangeKind::Reserve(reservation);
        let mut effects = self.apply(Change { counter, kind });
        // Legacy software may have used the counter, and its event would go on.
        effects.cleared.insert(counter);
        effects
    }

    /// Takes a counter from its holder, by the arbiter's own decision.
    pub(super) fn take_over(
        &mut self,
        counter: CounterId,
        layer: Layer,
        reason: Reason,
        cx: &mut Context<'_>,
    ) -> Effects {
        let Some(owner) = self.bank.reservation(counter).map(|held| held.owner) else {
            return Effects::NONE;
        };
        if let Some(pending) = self.pending_mut(layer) {
            // The holder may have agreed to lend while a question was under way.
            pending
                .question
                .take_if(|question| question.counter == counter);
        }
        let effects = self.apply(Change {
            counter,
            kind: ChangeKind::Release,
        });
        record(cx, owner, Some(counter), Event::Revoked(reason));
        self.notify_revoked(owner, counter, layer, reason);
        effects.and(self.take(counter, layer))
    }

    /// Notifies a layer that it has lost a counter.
    pub(super) fn notify_revoked(
        &mut self,
        owner: Layer,
        counter: CounterId,
        to: Layer,
        reason: Reason,
    ) {
        self.notify(
            owner,
            QueuedNotice {
                kind: NoticeKind::Revoked,
                counter: Some(counter),
                layer: to,
                reason: Some(reason),
                due: None,
            },
        );
    }

    /// Asks the holder of a counter to yield it to `wanted_by`.
    pub(super) fn ask(&mut self, counter: CounterId, wanted_by: Layer, cx: &mut Context<'_>) {
        let due = cx.now + self.to_ticks(self.policy.grace_ms);
        let holder = self.bank.reservation(counter).map(|held| held.owner);
        let (Some(holder), Some(pending)) = (holder, self.pending_mut(wanted_by)) else {
            return;
        };
        pending.question = Some(Question {
            counter,
            holder,
            due,
        });
        record(cx, holder, Some(counter), Event::Asked { wanted_by });
        self.notify(
            holder,
            QueuedNotice {
                kind: NoticeKind::Asked,
                counter: Some(counter),
                layer: wanted_by,
                reason: None,
                due: Some(due),
            },
        );
    }

    /// Announces to the holder of a counter that it will be revoked for `wanted_by`.
    pub(super) fn announce(&mut self, counter: CounterId, wanted_by: Layer, cx: &mut Context<'_>) {
        let at = cx.now + self.to_ticks(self.policy.grace_ms);
        self.announce_revocation(
            counter,
            Revocation {
                at,
                reason: Reason::Priority,
                wanted_by: Some(wanted_by),
            },
            cx,
        );
    }

    /// Announces a revocation to the holder of the counter.
    pub(super) fn announce_revocation(
        &mut self,
        counter: CounterId,
        revocation: Revocation,
        cx: &mut Context<'_>,
    ) {
        let Revocation { at, reason, .. } = revocation;
        let in_ms = self.to_ms(at - cx.now);
        let Some(reservation) = self.bank.reservation_mut(counter) else {
            return;
        };
        let owner = reservation.owner;
        reservation.revocation = Some(revocation);
        let wanted_by = revocation.wanted_by_as_shown();
        let event = Event::Revoking {
            wanted_by,
            reason,
            in_ms,
        };
        record(cx, owner, Some(counter), event);
        self.notify(
            owner,
            QueuedNotice {
                kind: NoticeKind::Revoking,
                counter: Some(counter),
                layer: wanted_by,
                reason: Some(reason),
                due: Some(at),
            },
        );
    }

    /// Cancels an announced revocation.
    pub(super) fn spare(&mut self, counter: CounterId, cx: &mut Context<'_>) {
        let Some(reservation) = self.bank.reservation_mut(counter) else {
            return;
        };
        let owner = reservation.owner;
        if let Some(revocation) = reservation.revocation.take() {
            record(cx, owner, Some(counter), Event::Spared);
            self.notify_cancelled(owner, counter, revocation.wanted_by_as_shown());
        }
    }

    /// The host's kernel has taken the physical counter of one that a layer holds, or it
    /// `is_back`. Its owner gets a notice; what it holds stays.
    pub fn note_taken(&mut self, counter: CounterId, is_back: bool, cx: &mut Context<'_>) {
        let Some(owner) = self.bank.reservation(counter).map(|held| held.owner) else {
            return;
        };
        let (event, kind) = if is_back {
            (Event::Back, NoticeKind::Back)
        } else {
            (Event::Taken, NoticeKind::Taken)
        };
        self.tell(owner, counter, (event, kind, None), cx);
    }

    /// What its owner selects in a counter cannot be counted beside what is held: the owner
    /// gets a notice, and keeps what it holds.
    pub fn note_unbacked(&mut self, counter: CounterId, cx: &mut Context<'_>) {
        let Some(owner) = self.bank.reservation(counter).map(|held| held.owner) else {
            return;
        };
        let reason = Reason::Unbacked;
        let news = (Event::Refused(reason), NoticeKind::Taken, Some(reason));
        self.tell(owner, counter, news, cx);
    }

    /// Tells the owner of a counter about its physical one.
    fn tell(
        &mut self,
        owner: Layer,
        counter: CounterId,
        (event, kind, reason): (Event, NoticeKind, Option<Reason>),
        cx: &mut Context<'_>,
    ) {
        record(cx, owner, Some(counter), event);
        self.notify(
            owner,
            QueuedNotice {
                kind,
                counter: Some(counter),
                layer: owner,
                reason,
                due: None,
            },
        );
    }

    /// Cancels all revocations that were announced for `layer`.
    pub(super) fn spare_all(&mut self, layer: Layer, cx: &mut Context<'_>) {
        for counter in self.bank.held().iter() {
            let held = self.bank.reservation(counter);
            let revocation = held.and_then(|held| held.revocation);
            if revocation.is_some_and(|revocation| revocation.wanted_by == Some(layer)) {
                self.spare(counter, cx);
            }
        }
    }

    /// Notifies a holder that a question or an announcement no longer stands.
    pub(super) fn notify_cancelled(&mut self, holder: Layer, counter: CounterId, wanted_by: Layer) {
        self.notify(
            holder,
            QueuedNotice {
                kind: NoticeKind::Cancelled,
                counter: Some(counter),
                layer: wanted_by,
                reason: None,
                due: None,
            },
        );
    }
}
