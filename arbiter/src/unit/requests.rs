//! Requests and replies: what layers write to their mailbox, and the answers and
//! notices that they read from it.

use super::{Caller, Context, PcrUnit, record};
use crate::audit::{Ask, AskRecord, AskResult, Event, Presented};
use crate::broker::{Pending, Question};
use crate::cookie::Cookie;
use crate::mailbox::Mailbox;
use crate::message::{Answer, Notice, Outcome, Reply, Request, Wanted};
use crate::policy::Scheme;
use crate::reason::Reason;
use crate::reservation::{Change, ChangeKind, Effects, Operation};
use crate::time::Tsc;
use crate::{CounterId, CounterSet, Layer};

/// The lowest vector that an interrupt can have.
const LEAST_VECTOR: u64 = 16;

impl PcrUnit {
    /// Makes a request for a layer. A guest's layer writes `REQUEST` for it, and the
    /// hypervisor calls this. If the answer is [`Outcome::Pending`],
    /// [`PcrUnit::answer`] returns the later one.
    ///
    /// # Errors
    /// An earlier request is pending ([`Reason::Busy`]), this cookie cannot withdraw
    /// it ([`Reason::Cookie`]), or the layer cannot hold counters
    /// ([`Reason::Layer`]). A guest gets #GP. Nothing has changed then, the answer to
    /// the last request included.
    pub fn request(
        &mut self,
        layer: Layer,
        request: Request,
        cx: &mut Context<'_>,
    ) -> Result<(Answer, Effects), Reason> {
        let holder = layer.as_holder();
        let (ask, presented) = self.describe(holder, &request);
        let done = self.make_request(holder, request, cx);
        // The trail tells a host's tool from the hypervisor, which holds for it.
        let asker = if layer.is_guest() { holder } else { layer };
        cx.audit.asked(&AskRecord {
            layer: asker,
            ask,
            presented,
            result: match (&done, ask) {
                (Ok(_), Ask::Withdraw) => AskResult::Done,
                (Ok((answer, _)), _) => AskResult::Answered(*answer),
                (Err(reason), _) => AskResult::Faulted(*reason),
            },
        });
        done
    }

    /// A request without its cookie.
    fn describe(&self, layer: Layer, request: &Request) -> (Ask, Presented) {
        match *request {
            Request::Reserve {
                wanted,
                cookie,
                lease_ms,
                event,
            } => {
                let own = match wanted {
                    Wanted::This(counter) => self.bank.held_by(layer).contains(counter),
                    Wanted::Any(_) | Wanted::Held(_) => false,
                };
                let presented = match wanted {
                    Wanted::This(counter) if own => self.presented(layer, counter, cookie),
                    _ => Presented::Of(layer),
                };
                let ask = Ask::Reserve {
                    wanted,
                    lease_ms,
                    event,
                };
                (ask, presented)
            }
            Request::Release { counter, cookie } => (
                Ask::Release(counter),
                self.presented(layer, counter, cookie),
            ),
            Request::Withdraw { cookie } => {
                let right = self.pending(layer).map(|one| one.cookie.matches(cookie));
                let presented = match right {
                    Some(true) => Presented::Of(layer),
                    Some(false) => Presented::Wrong,
                    None => Presented::Of(layer),
                };
                (Ask::Withdraw, presented)
            }
        }
    }

    fn make_request(
        &mut self,
        layer: Layer,
        request: Request,
        cx: &mut Context<'_>,
    ) -> Result<(Answer, Effects), Reason> {
        let mailbox = self.mailbox_mut(layer).ok_or(Reason::Layer)?;
        let effects = match request {
            Request::Withdraw { cookie } => {
                let pending = mailbox.pending.as_ref();
                // Otherwise one component of a layer could withdraw the request of
                // another.
                if pending.is_some_and(|pending| !pending.cookie.matches(cookie)) {
                    return Err(Reason::Cookie);
                }
                let effects = self.conclude(layer, Err(Reason::Withdrawn), cx);
                effects.and(self.serve(cx))
            }
            _ if mailbox.pending.is_some() => return Err(Reason::Busy),
            Request::Release { counter, cookie } => {
                mailbox.number();
                let released = self.release(layer, counter, cookie, cx);
                self.settle(layer, counter, released, cx)
            }
            Request::Reserve {
                wanted,
                cookie,
                lease_ms,
                event,
            } => {
                mailbox.number();
                self.reserve(layer, Pending::new(wanted, cookie, lease_ms, event), cx)
            }
        };
        self.find_deadline();
        Ok((self.answer(layer), effects))
    }

    fn reserve(&mut self, layer: Layer, mut pending: Pending, cx: &mut Context<'_>) -> Effects {
        let wanted = pending.wanted;
        if let Wanted::This(counter) = wanted {
            let holder = self.bank.reservation(counter).map(|held| held.owner);
            if holder == Some(layer) {
                let renewed = self.renew(layer, counter, &pending, cx);
                return self.settle(layer, counter, renewed, cx);
            }
        }
        if self.is_barred(layer) {
            let reason = Reason::Administrator;
            record(cx, layer, None, Event::Refused(reason));
            self.set_outcome(layer, Outcome::Refused(reason));
            return Effects::NONE;
        }
        let there = wanted.candidates() & self.bank.counters();
        if there.len() < u32::from(wanted.count()) {
            record(cx, layer, None, Event::Refused(Reason::NoCounter));
            self.set_outcome(layer, Outcome::Refused(Reason::NoCounter));
            return Effects::NONE;
        }
        self.sequence += 1;
        pending.sequence = self.sequence;
        pending.theirs = self.bank.held() & !self.bank.held_by(layer);
        if let Some(mailbox) = self.mailbox_mut(layer) {
            mailbox.pending = Some(pending);
        }
        let pending = self.pending(layer);
        let told = pending.map(|pending| self.backing().told_of(layer, pending.event));
        self.held_anew |= told.is_some_and(|told| told.is_err());
        let effects = self.advance(layer, cx);
        if let Some(pending) = self.pending_mut(layer) {
            pending.waits = true;
            self.set_outcome(layer, Outcome::Pending);
        }
        effects
    }

    /// Gives a counter back that the hypervisor holds for a host's tool, with the cookie
    /// of its request. A request of the hypervisor that is pending is not in the way, and
    /// its answer stays. What is somebody else's by now stays theirs.
    pub fn give_back(
        &mut self,
        counter: CounterId,
        cookie: Cookie,
        cx: &mut Context<'_>,
    ) -> Effects {
        let presented = self.presented(Layer::Hypervisor, counter, cookie);
        let released = self.release(Layer::Hypervisor, counter, cookie, cx);
        cx.audit.asked(&AskRecord {
            layer: Layer::HostTool,
            ask: Ask::Release(counter),
            presented,
            result: match &released {
                Ok(_) => AskResult::Done,
                Err(reason) => AskResult::Faulted(*reason),
            },
        });
        self.find_deadline();
        released.unwrap_or(Effects::NONE)
    }

    /// Renews the lease of a layer that asks for a counter that it holds.
    fn renew(
        &mut self,
        layer: Layer,
        counter: CounterId,
        pending: &Pending,
        cx: &mut Context<'_>,
    ) -> Result<Effects, Reason> {
        self.check_cookie(layer, counter, pending.cookie)?;
        if pending.event.is_some() {
            self.name_event(layer, counter, pending)?;
        }
        self.start_lease(counter, pending.lease_ms, cx.now);
        record(cx, layer, Some(counter), Event::Renewed);
        Ok(Effects::NONE)
    }

    /// A counter that is held is for the event of this request from now on.
    fn name_event(
        &mut self,
        layer: Layer,
        counter: CounterId,
        pending: &Pending,
    ) -> Result<(), Reason> {
        let room = self.backing().room_for(layer, pending.kind());
        let held = self.bank.reservation(counter);
        let is_new = held.is_some_and(|held| held.event != pending.event);
        if is_new && room.is_some_and(|room| !room.can_have(counter)) {
            return Err(Reason::Unbacked);
        }
        if let Some(held) = self.bank.reservation_mut(counter) {
            held.event = pending.event;
        }
        self.note_held();
        Ok(())
    }

    fn release(
        &mut self,
        layer: Layer,
        counter: CounterId,
        cookie: Cookie,
        cx: &mut Context<'_>,
    ) -> Result<Effects, Reason> {
        if !self.has(counter) {
            return Err(Reason::NoCounter);
        }
        let holder = self.bank.reservation(counter).map(|held| held.owner);
        match holder {
            None => return Err(Reason::Unreserved),
            Some(holder) if holder != layer => return Err(Reason::Held),
            Some(_) => self.check_cookie(layer, counter, cookie)?,
        }
        let kind = ChangeKind::Release;
        let effects = self.apply(Change { counter, kind });
        record(cx, layer, Some(counter), Event::Released);
        Ok(effects.and(self.note_change(counter, cx)))
    }

    /// Checks that `layer` may dispose of its counter with `cookie`. That takes the
    /// management cookie, or that of the grant under a single master.
    fn check_cookie(&self, layer: Layer, counter: CounterId, cookie: Cookie) -> Result<(), Reason> {
        if self.scheme != Scheme::SingleMaster {
            let operation = Operation::Manage(Cookie::DEFAULT);
            return self.bank.plan(layer, cookie, counter, operation).map(drop);
        }
        let reservation = self.bank.reservation(counter).ok_or(Reason::Unreserved)?;
        if reservation.is_management(cookie) {
            Ok(())
        } else {
            Err(Reason::Cookie)
        }
    }

    /// Answers a request that is about one counter, now that it is `done` or refused.
    fn settle(
        &mut self,
        layer: Layer,
        counter: CounterId,
        done: Result<Effects, Reason>,
        cx: &mut Context<'_>,
    ) -> Effects {
        match done {
            Ok(effects) => {
                let counters: CounterSet = [counter].into_iter().collect();
                self.set_outcome(layer, Outcome::Granted(counters));
                effects
            }
            Err(reason) => {
                let counter = self.has(counter).then_some(counter);
                record(cx, layer, counter, Event::Refused(reason));
                // A layer that gives a counter back knows that the counter has a
                // cookie, so even the default one is a guess.
                self.guessed(reason, layer, false, cx);
                self.set_outcome(layer, Outcome::Refused(reason.as_shown()));
                Effects::NONE
            }
        }
    }

    fn set_outcome(&mut self, layer: Layer, outcome: Outcome) {
        if let Some(mailbox) = self.mailbox_mut(layer) {
            mailbox.answer.outcome = outcome;
        }
    }

    /// The answer to the last request of a layer.
    pub fn answer(&self, layer: Layer) -> Answer {
        let mailbox = self.mailbox(layer);
        mailbox.map_or(Answer::default(), |mailbox| mailbox.answer)
    }

    /// Replies for a layer of the guest, which writes `REPLY`. That takes the
    /// counter's cookie, as giving it back does: a component of a layer must neither
    /// give away nor keep a counter of another component.
    pub(super) fn reply_presenting(
        &mut self,
        caller: Caller,
        reply: Reply,
        cx: &mut Context<'_>,
    ) -> Result<Effects, Reason> {
        let layer = caller.layer.as_holder();
        self.asked_for(layer, reply.counter)
            .ok_or(Reason::Malformed)?;
        let cookie = Cookie::new(caller.presented).ok_or(Reason::Malformed)?;
        if let Err(reason) = self.check_cookie(layer, reply.counter, cookie) {
            let presented = self.presented(layer, reply.counter, cookie);
            cx.audit.asked(&AskRecord {
                layer,
                ask: Ask::Reply(reply),
                presented,
                result: AskResult::Faulted(reason),
            });
            return Err(reason);
        }
        self.reply(layer, reply, cx)
    }

    /// The question about a counter that `layer` was asked, and the layer that wants
    /// the counter.
    fn asked_for(&self, layer: Layer, counter: CounterId) -> Option<(Layer, Question)> {
        crate::Policy::LAYERS.into_iter().find_map(|wanted_by| {
            let question = self.pending(wanted_by)?.question?;
            let is_it = question.counter == counter && question.holder == layer;
            is_it.then_some((wanted_by, question))
        })
    }

    /// Replies for a holder that was asked for a counter. A guest's layer writes
    /// `REPLY` for it. The hypervisor calls this, and needs no cookie.
    ///
    /// # Errors
    /// [`Reason::Malformed`]: the layer was not asked, or the question no longer
    /// stands. Nothing has changed, and a guest gets #GP.
    pub fn reply(
        &mut self,
        layer: Layer,
        reply: Reply,
        cx: &mut Context<'_>,
    ) -> Result<Effects, Reason> {
        let layer = layer.as_holder();
        let done = self.make_reply(layer, reply, cx);
        cx.audit.asked(&AskRecord {
            layer,
            ask: Ask::Reply(reply),
            presented: Presented::Of(layer),
            result: match &done {
                Ok(_) => AskResult::Done,
                Err(reason) => AskResult::Faulted(*reason),
            },
        });
        done
    }

    fn make_reply(
        &mut self,
        layer: Layer,
        reply: Reply,
        cx: &mut Context<'_>,
    ) -> Result<Effects, Reason> {
        let asked = self.asked_for(layer, reply.counter);
        let (wanted_by, question) = asked.ok_or(Reason::Malformed)?;
        let counter = question.counter;
        let comes = reply.yields && self.may_come(counter, wanted_by);
        let pending = self.pending_mut(wanted_by).ok_or(Reason::Malformed)?;
        let mut effects = Effects::NONE;
        if comes {
            pending.question = None;
            let kind = ChangeKind::Release;
            effects = self.apply(Change { counter, kind });
            record(cx, layer, Some(counter), Event::Yielded { to: wanted_by });
            // Another component than the one that replied may have reserved the
            // counter, and learns of it here.
            self.notify_revoked(layer, counter, wanted_by, Reason::Lent);
            effects = effects.and(self.take(counter, wanted_by));
        } else {
            let reason = if reply.yields {
                Reason::Unbacked
            } else {
                Reason::Refused
            };
            pending.decline(question, reason);
            record(
                cx,
                layer,
                Some(counter),
                Event::Declined { wanted_by, reason },
            );
        }
        effects = effects.and(self.serve(cx));
        self.find_deadline();
        Ok(effects)
    }

    /// Whether [`PcrUnit::next_notice`] has a notice for the layer.
    #[inline]
    pub fn has_notice(&self, layer: Layer) -> bool {
        self.mailbox(layer)
            .is_some_and(|mailbox| !mailbox.is_empty())
    }

    /// Takes the oldest notice out of a layer's queue.
    pub fn next_notice(&mut self, layer: Layer, now: Tsc) -> Option<Notice> {
        let (notice, lost) = self.mailbox_mut(layer)?.pop()?;
        let rest = notice.due.map(|due| self.to_ms(due - now));
        Some(Notice {
            kind: notice.kind,
            counter: notice.counter,
            layer: notice.layer,
            reason: notice.reason,
            rest_ms: rest.unwrap_or(0),
            lost,
        })
    }

    /// The vector of an interrupt to raise on this vCPU, because notices have come for
    /// the layer that runs at CPL 0. It is returned once for all that have come.
    pub fn take_notice(&mut self) -> Option<u8> {
        let layer = self.phase.layer(true, false);
        self.mailbox_mut(layer)?.take_vector()
    }

    /// Whether to raise an SMI on this vCPU, because notices have come for the firmware,
    /// which has left code in SMM.
    #[inline]
    pub fn wants_smi(&self) -> bool {
        let firmware = self.mailbox(Layer::Firmware);
        self.phase.is_in_smm() && firmware.is_some_and(Mailbox::is_due)
    }

    /// An SMI was raised for all that have come.
    pub fn smi_sent(&mut self) {
        if let Some(mailbox) = self.mailbox_mut(Layer::Firmware) {
            mailbox.announced();
        }
    }

    pub(super) fn set_notice_vector(
        &mut self,
        value: u64,
        layer: Layer,
    ) -> Result<Effects, Reason> {
        let mailbox = self.mailbox_mut(layer).ok_or(Reason::Layer)?;
        let vector = u8::try_from(value).ok();
        let vector = vector.filter(|_| value == 0 || value >= LEAST_VECTOR);
        mailbox.set_vector(vector.ok_or(Reason::Malformed)?);
        Ok(Effects::NONE)
    }
}
