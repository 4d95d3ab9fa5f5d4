//! Serving requests: carrying out what the broker decides about them.

use super::{Context, PcrUnit, record};
use crate::audit::{Ask, AskRecord, AskResult, Event, Presented};
use crate::backing::Backed;
use crate::broker::{self, NextStep, Pending, Question, View, priority};
use crate::mailbox::{Mailbox, QueuedNotice};
use crate::message::{NoticeKind, Outcome, Wanted};
use crate::policy::Policy;
use crate::reason::Reason;
use crate::reservation::{Change, ChangeKind, Effects};
use crate::{CounterId, CounterSet, Layer};

impl PcrUnit {
    /// The mailbox of a layer. `None` means that the layer has none.
    pub(super) fn mailbox(&self, layer: Layer) -> Option<&Mailbox> {
        self.mailboxes.get(usize::from(layer.code()))
    }

    pub(super) fn mailbox_mut(&mut self, layer: Layer) -> Option<&mut Mailbox> {
        self.mailboxes.get_mut(usize::from(layer.code()))
    }

    pub(super) fn pending(&self, layer: Layer) -> Option<&Pending> {
        self.mailbox(layer)?.pending.as_ref()
    }

    pub(super) fn pending_mut(&mut self, layer: Layer) -> Option<&mut Pending> {
        self.mailbox_mut(layer)?.pending.as_mut()
    }

    /// Whether code of this layer can run now, and so can answer.
    pub(super) fn is_alive(&self, layer: Layer) -> bool {
        match layer {
            Layer::Firmware => self.smm || !self.phase.is_over(),
            Layer::GuestKernel => self.phase.is_over(),
            Layer::Hypervisor | Layer::GuestUser | Layer::HostTool => true,
        }
    }

    /// What has a physical counter of its own.
    pub(super) fn backing(&self) -> Backed {
        let guests = Policy::LAYERS.into_iter().filter(|layer| layer.is_guest());
        let coming = guests.map(|layer| self.coming_to(layer));
        Backed {
            most: self.backed,
            coming: coming.fold(CounterSet::EMPTY, |all, one| all | one),
        }
    }

    /// Counters of the hypervisor's that `layer` is about to get: the one that it was asked
    /// for, and those whose revocation was announced.
    fn coming_to(&self, layer: Layer) -> CounterSet {
        let question = self.pending(layer).and_then(|pending| pending.question);
        let asked = question.filter(|question| !question.holder.is_guest());
        let held = self.bank.held_by(Layer::Hypervisor);
        let announced = held.iter().filter(|counter| {
            let held = self.bank.reservation(*counter);
            let revocation = held.and_then(|held| held.revocation);
            revocation.is_some_and(|one| one.wanted_by == Some(layer))
        });
        asked
            .map(|question| question.counter)
            .into_iter()
            .chain(announced)
            .collect()
    }

    /// Counters of the hypervisor's that layers of the guest are about to get stay with
    /// it where they are no longer backed.
    pub(super) fn stop_what_comes(&mut self, cx: &mut Context<'_>) {
        for layer in Policy::LAYERS.into_iter().filter(|layer| layer.is_guest()) {
            let coming = self.coming_to(layer);
            let Some(of_kind) = coming.iter().next() else {
                continue;
            };
            let mut backed = self.backing();
            backed.coming = backed.coming & !coming;
            if backed.left((&self.bank, &self.policy), layer, of_kind, None) >= coming.len() {
                continue;
            }
            let question = self.pending_mut(layer).and_then(|pending| {
                let of_hypervisor = |question: &mut Question| !question.holder.is_guest();
                pending.question.take_if(of_hypervisor)
            });
            if let Some(question) = question {
                self.notify_cancelled(question.holder, question.counter, layer);
            }
            let asked = question.map(|question| question.counter);
            for counter in coming.iter().filter(|counter| asked != Some(*counter)) {
                self.spare(counter, cx);
            }
        }
    }

    /// Whether a counter that `layer` is about to get from its holder has a physical one.
    pub(super) fn may_come(&self, counter: CounterId, layer: Layer) -> bool {
        let owner = self.bank.reservation(counter).map(|held| held.owner);
        let mut backed = self.backing();
        backed.coming = backed.coming & !CounterSet::from_iter([counter]);
        let pending = self.pending(layer);
        let room = pending.and_then(|pending| backed.room_for(layer, pending.kind()));
        if owner.is_some_and(Layer::is_guest) {
            return room.is_none_or(|room| room.can_have(counter));
        }
        backed.left((&self.bank, &self.policy), layer, counter, room) > 0
    }

    /// What the broker decides the request of `layer` from.
    pub(super) fn view(&self, layer: Layer) -> View<'_> {
        let others = Policy::LAYERS.into_iter().filter(|other| *other != layer);
        let busy = others.filter_map(|other| self.pending(other));
        let busy = busy.fold(CounterSet::EMPTY, |busy, pending| {
            let asked = pending.question.map(|question| question.counter);
            busy | pending.got | asked.into_iter().collect()
        });
        let mut backed = self.backing();
        let question = self.pending(layer).and_then(|pending| pending.question);
        if let Some(question) = question {
            // It is one of those that the layer can have, and no other's.
            backed.coming.remove(question.counter);
        }
        View {
            scheme: self.scheme,
            bank: &self.bank,
            policy: &self.policy,
            backed,
            busy,
            answers: Policy::LAYERS.map(|layer| self.is_alive(layer)),
        }
    }

    /// Adapts requests after a counter has changed hands, or its control word.
    pub(super) fn note_change(&mut self, counter: CounterId, cx: &mut Context<'_>) -> Effects {
        let owner = self.bank.reservation(counter).map(|held| held.owner);
        let mut effects = Effects::NONE;
        for layer in Policy::LAYERS {
            let Some(pending) = self.pending_mut(layer) else {
                continue;
            };
            if pending.got.contains(counter) && owner != Some(layer) {
                // The layer has passed on what its request had gathered.
                pending.got.remove(counter);
                effects = effects.and(self.conclude(layer, Err(Reason::Withdrawn), cx));
            } else if let Some(question) = pending.question {
                self.review(question, layer);
            }
        }
        if let Some(reservation) = self.bank.reservation_mut(counter)
            && reservation
                .revocation
                .is_some_and(|revocation| revocation.wanted_by == Some(reservation.owner))
        {
            reservation.revocation = None;
        }
        effects.and(self.serve(cx))
    }

    /// Cancels a question that no longer stands: another layer holds the counter by
    /// now, or the holder is down to its minimum and must not go below it.
    pub(super) fn review(&mut self, question: Question, wanted_by: Layer) {
        let Question {
            counter, holder, ..
        } = question;
        let owner = self.bank.reservation(counter).map(|held| held.owner);
        let holds = owner == Some(holder);
        if holds && broker::can_spare(&self.view(wanted_by), holder, counter) {
            return;
        }
        if let Some(pending) = self.pending_mut(wanted_by) {
            pending.question = None;
            pending.declined.insert(counter);
        }
        if holds {
            self.notify_cancelled(holder, counter, wanted_by);
        }
    }

    /// Advances every request as far as it gets now: those of higher priority first,
    /// then those that came first.
    pub(super) fn serve(&mut self, cx: &mut Context<'_>) -> Effects {
        let mut effects = Effects::NONE;
        // A refusal frees counters that an earlier request may wait for. This ends,
        // because each further round has one request less.
        loop {
            let mut order = Policy::LAYERS;
            order.sort_by_key(|layer| {
                let sequence = self.pending(*layer).map(|pending| pending.sequence);
                (u8::MAX - priority(&self.policy, *layer), sequence)
            });
            let mut concluded = false;
            for layer in order {
                if self.pending(layer).is_some() {
                    effects = effects.and(self.advance(layer, cx));
                    concluded |= self.pending(layer).is_none();
                }
            }
            if !concluded {
                return effects;
            }
        }
    }

    /// Takes the broker's steps for the request of `layer`, until it waits or has its
    /// answer.
    pub(super) fn advance(&mut self, layer: Layer, cx: &mut Context<'_>) -> Effects {
        let mut effects = Effects::NONE;
        while let Some(pending) = self.pending(layer) {
            if !self.is_alive(layer) {
                return effects.and(self.conclude(layer, Err(Reason::Phase), cx));
            }
            if pending.lacks() > 0 && self.held_anew && layer.is_guest() {
                // Until it is told what can be backed now.
                self.report_gathered(layer, cx);
                return effects;
            }
            let step = broker::next(&self.view(layer), layer, pending);
            if step != NextStep::Move
                && let Some(pending) = self.pending_mut(layer)
            {
                pending.move_by = None;
            }
            match step {
                NextStep::Take(counters) => {
                    for counter in counters.iter() {
                        effects = effects.and(self.take(counter, layer));
                    }
                }
                NextStep::TakeLent(counter) => {
                    effects = effects.and(self.take_over(counter, layer, Reason::Lent, cx));
                }
                NextStep::Ask(counter) => self.ask(counter, layer, cx),
                NextStep::Announce(counter) => self.announce(counter, layer, cx),
                NextStep::Spare(counter) => self.spare(counter, cx),
                NextStep::Move => {
                    let by = cx.now + self.to_ticks(self.policy.grace_ms);
                    if let Some(pending) = self.pending_mut(layer) {
                        pending.move_by.get_or_insert(by);
                    }
                    self.report_gathered(layer, cx);
                    return effects;
                }
                NextStep::Wait => {
                    self.report_gathered(layer, cx);
                    return effects;
                }
                NextStep::Grant => return effects.and(self.conclude(layer, Ok(()), cx)),
                NextStep::Refuse(reason) => {
                    return effects.and(self.conclude(layer, Err(reason), cx));
                }
            }
        }
        effects
    }

    /// Records what a request has gathered that goes on waiting. A counter that comes
    /// together with the answer has one record only, that of the answer.
    fn report_gathered(&mut self, layer: Layer, cx: &mut Context<'_>) {
        let Some(pending) = self.pending_mut(layer) else {
            return;
        };
        let news = pending.got & !pending.reported;
        pending.reported = pending.got;
        for counter in news.iter() {
            record(cx, layer, Some(counter), Event::Gathered);
        }
    }

    /// Gives the request of `layer` its answer. That cancels what is under way for it,
    /// and starts the leases of what it has gathered, or gives that back.
    pub(super) fn conclude(
        &mut self,
        layer: Layer,
        answer: Result<(), Reason>,
        cx: &mut Context<'_>,
    ) -> Effects {
        // Legacy names have to see what the request was gathering.
        let _ = self.map();
        let pending = self.mailbox_mut(layer).and_then(|one| one.pending.take());
        let Some(pending) = pending else {
            return Effects::NONE;
        };
        if let Some(question) = pending.question {
            self.notify_cancelled(question.holder, question.counter, layer);
        }
        self.spare_all(layer, cx);
        let mut effects = Effects::NONE;
        for counter in pending.got.iter() {
            match answer {
                Ok(()) => {
                    let lease_ms = match pending.wanted {
                        // Nobody would renew it; the end of what it was for ends it.
                        Wanted::Held(_) => None,
                        _ => self.start_lease(counter, pending.lease_ms, cx.now),
                    };
                    record(cx, layer, Some(counter), Event::Reserved { lease_ms });
                }
                Err(_) => {
                    effects = effects.and(self.apply(Change {
                        counter,
                        kind: ChangeKind::Release,
                    }));
                    if pending.reported.contains(counter) {
                        record(cx, layer, Some(counter), Event::Returned);
                    }
                }
            }
        }
        let (outcome, kind, reason) = match answer {
            Ok(()) => (Outcome::Granted(pending.got), NoticeKind::Granted, None),
            Err(reason) => {
                let counter = match pending.wanted {
                    Wanted::This(counter) => Some(counter),
                    Wanted::Any(_) | Wanted::Held(_) => None,
                };
                let counter = counter.filter(|counter| self.has(*counter));
                record(cx, layer, counter, Event::Refused(reason));
                (Outcome::Refused(reason), NoticeKind::Refused, Some(reason))
            }
        };
        if let Some(mailbox) = self.mailbox_mut(layer) {
            mailbox.answer.outcome = outcome;
        }
        // A withdrawn request has a notice too: several components of a layer may wait
        // for the answer.
        if pending.waits {
            cx.audit.asked(&AskRecord {
                layer,
                ask: Ask::Answer,
                presented: Presented::Nothing,
                result: AskResult::Answered(self.answer(layer)),
            });
            let (counter, due) = (None, None);
            self.notify(
                layer,
                QueuedNotice {
                    kind,
                    counter,
                    layer,
                    reason,
                    due,
                },
            );
        }
        effects
    }
}
