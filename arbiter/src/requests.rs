//! The requests that wait for their answer: what each has gathered, whom it has asked, and
//! what it has been told.

use core::array;

use crate::cookie::Cookie;
use crate::message::{NamedEvent, Wanted};
use crate::policy::{LAYERS, Policy};
use crate::reason::Reason;
use crate::time::{Tsc, earliest};
use crate::{CounterId, CounterSet, Layer};

/// The event that each layer's request is about, by the layer's code. The inner `None`
/// means any, the outer one that nothing is asked for.
pub type AskedEvents = [Option<Option<NamedEvent>>; LAYERS];

/// A request for counters that has no answer yet. All may read it, and [`Requests`] alone
/// changes it.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    /// The place of the request in the order of all layers' requests.
    pub(crate) sequence: u64,
    pub(crate) wanted: Wanted,
    /// Counters that others held when it came; one of them that is given back is as good
    /// as one that is yielded.
    pub(crate) theirs: CounterSet,
    pub(crate) cookie: Cookie,
    pub(crate) lease_ms: Option<u32>,
    /// The event that the counters are for; `None`: any.
    pub(crate) event: Option<NamedEvent>,
    /// Counters that the request has gathered. The layer holds them already, so
    /// that nobody else takes them. If the request is refused it gives them back.
    pub(crate) got: CounterSet,
    /// The gathered counters that the audit trail has.
    pub(crate) reported: CounterSet,
    /// Counters that their holders declined to yield.
    pub(crate) declined: CounterSet,
    /// Counters whose announced revocation did not take place.
    pub(crate) spared: CounterSet,
    /// Layers, by code, that did not answer in time.
    pub(crate) silent: [bool; LAYERS],
    /// The reason that holders gave, for a refusal.
    pub(crate) refusal: Option<Reason>,
    pub(crate) question: Option<Question>,
    /// The vCPU is to move to another core by then, which backs what is asked for.
    pub(crate) move_by: Option<Tsc>,
    /// It did not.
    pub(crate) stays: bool,
    /// The answer has shown the request as pending, so a notice announces its end.
    pub(crate) waits: bool,
}

/// A question to a holder: does it yield this counter?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Question {
    pub(crate) counter: CounterId,
    pub(crate) holder: Layer,
    /// When the answer is due, in the caller's ticks.
    pub(crate) due: Tsc,
}

impl Pending {
    pub(crate) fn new(
        wanted: Wanted,
        cookie: Cookie,
        lease_ms: Option<u32>,
        event: Option<NamedEvent>,
    ) -> Self {
        Pending {
            sequence: 0,
            wanted,
            theirs: CounterSet::EMPTY,
            cookie,
            lease_ms,
            event,
            got: CounterSet::EMPTY,
            reported: CounterSet::EMPTY,
            declined: CounterSet::EMPTY,
            spared: CounterSet::EMPTY,
            silent: [false; LAYERS],
            refusal: None,
            question: None,
            move_by: None,
            stays: false,
            waits: false,
        }
    }

    /// What it is about, as a core is asked whether it backs that.
    pub(crate) fn kind(&self) -> (Wanted, Option<NamedEvent>) {
        (self.wanted, self.event)
    }

    /// How many counters more it needs.
    pub(crate) fn lacks(&self) -> u32 {
        u32::from(self.wanted.count()).saturating_sub(self.got.len())
    }
}

/// The pending requests of a vCPU's layers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Requests {
    /// By the layer's code.
    of: [Option<Pending>; LAYERS],
    /// The number of the last request that had to be arbitrated.
    sequence: u64,
}

impl Requests {
    /// The pending request of a layer.
    pub(crate) fn of(&self, layer: Layer) -> Option<&Pending> {
        self.of.get(usize::from(layer.code()))?.as_ref()
    }

    fn of_mut(&mut self, layer: Layer) -> Option<&mut Pending> {
        self.of.get_mut(usize::from(layer.code()))?.as_mut()
    }

    /// The question that the request of a layer has asked.
    pub(crate) fn question_of(&self, layer: Layer) -> Option<Question> {
        self.of(layer)?.question
    }

    /// Whether any is pending.
    pub(crate) fn are_any(&self) -> bool {
        self.of.iter().any(Option::is_some)
    }

    /// Whether one waits until the vCPU moves to a core that backs it.
    pub(crate) fn wait_for_move(&self) -> bool {
        let mut pending = self.of.iter().flatten();
        pending.any(|pending| pending.move_by.is_some())
    }

    /// The events that requests of the guest's layers are about.
    pub(crate) fn events(&self) -> AskedEvents {
        Policy::LAYERS.map(|layer| {
            let pending = self.of(layer).filter(|_| layer.is_guest());
            pending.map(|pending| pending.event)
        })
    }

    /// The question about a counter that `holder` was asked, and the layer that wants the
    /// counter.
    pub(crate) fn asked_for(&self, holder: Layer, counter: CounterId) -> Option<(Layer, Question)> {
        Policy::LAYERS.into_iter().find_map(|wanted_by| {
            let question = self.question_of(wanted_by)?;
            let is_it = question.counter == counter && question.holder == holder;
            is_it.then_some((wanted_by, question))
        })
    }

    /// Counters that requests of layers other than `layer` have gathered or ask for.
    pub(crate) fn busy_for_others(&self, layer: Layer) -> CounterSet {
        let others = Policy::LAYERS.into_iter().filter(|other| *other != layer);
        let busy = others.filter_map(|other| self.of(other));
        busy.fold(CounterSet::EMPTY, |busy, pending| {
            let asked = pending.question.map(|question| question.counter);
            busy | pending.got | asked.into_iter().collect()
        })
    }

    /// The layers in the order in which they are served: those of higher priority first,
    /// then those whose request came first.
    pub(crate) fn in_order(&self, policy: &Policy) -> [Layer; LAYERS] {
        let mut order = Policy::LAYERS;
        order.sort_by_key(|layer| {
            let sequence = self.of(*layer).map(|pending| pending.sequence);
            (u8::MAX - policy.priority(*layer), sequence)
        });
        order
    }

    /// The earliest time at which a question is due or a move was to be made.
    pub(crate) fn deadline(&self) -> Option<Tsc> {
        let due = self.of.iter().flatten().filter_map(|pending| {
            let question = pending.question.map(|question| question.due);
            earliest(question, pending.move_by)
        });
        due.min()
    }

    /// The questions that are due at `now`, by the layer that asks.
    pub(crate) fn overdue(&self, now: Tsc) -> [Option<Question>; LAYERS] {
        array::from_fn(|code| {
            let question = self.of[code].as_ref()?.question?;
            (question.due <= now).then_some(question)
        })
    }

    /// A request comes in. `theirs`: what others hold.
    pub(crate) fn open(&mut self, layer: Layer, pending: Pending, theirs: CounterSet) {
        self.sequence += 1;
        if let Some(slot) = self.of.get_mut(usize::from(layer.code())) {
            *slot = Some(Pending {
                sequence: self.sequence,
                theirs,
                ..pending
            });
        }
    }

    /// The request of a layer has its answer.
    pub(crate) fn close(&mut self, layer: Layer) -> Option<Pending> {
        self.of.get_mut(usize::from(layer.code()))?.take()
    }

    /// Forgets every request.
    pub(crate) fn reset(&mut self) {
        self.of = Default::default();
    }

    /// The request of a layer gathers a counter.
    pub(crate) fn gather(&mut self, layer: Layer, counter: CounterId) -> Option<&Pending> {
        let pending = self.of_mut(layer)?;
        pending.got.insert(counter);
        Some(pending)
    }

    /// The layer has passed on what its request had gathered.
    pub(crate) fn lose(&mut self, layer: Layer, counter: CounterId) {
        if let Some(pending) = self.of_mut(layer) {
            pending.got.remove(counter);
        }
    }

    /// What has been gathered since this was asked last.
    pub(crate) fn take_news(&mut self, layer: Layer) -> CounterSet {
        let Some(pending) = self.of_mut(layer) else {
            return CounterSet::EMPTY;
        };
        let news = pending.got & !pending.reported;
        pending.reported = pending.got;
        news
    }

    /// The layer has seen that its request is pending. Returns whether it still is.
    pub(crate) fn note_shown(&mut self, layer: Layer) -> bool {
        let pending = self.of_mut(layer);
        pending.map(|pending| pending.waits = true).is_some()
    }

    pub(crate) fn ask(&mut self, layer: Layer, question: Question) {
        if let Some(pending) = self.of_mut(layer) {
            pending.question = Some(question);
        }
    }

    /// The question of a layer no longer stands, if it is such a one.
    pub(crate) fn take_question(
        &mut self,
        layer: Layer,
        which: impl FnOnce(&Question) -> bool,
    ) -> Option<Question> {
        let pending = self.of_mut(layer)?;
        pending.question.take_if(|question| which(question))
    }

    /// The question of a layer no longer stands, and it will not be asked again.
    pub(crate) fn drop_question(&mut self, layer: Layer) {
        if let Some(pending) = self.of_mut(layer)
            && let Some(question) = pending.question.take()
        {
            pending.declined.insert(question.counter);
        }
    }

    /// The holder who was asked keeps its counter.
    pub(crate) fn decline(&mut self, layer: Layer, reason: Reason) {
        let Some(pending) = self.of_mut(layer) else {
            return;
        };
        let Some(question) = pending.question.take() else {
            return;
        };
        pending.declined.insert(question.counter);
        if reason == Reason::NoAnswer {
            pending.silent[usize::from(question.holder.code())] = true;
        }
        // A refusal says more than silence.
        if pending.refusal != Some(Reason::Refused) {
            pending.refusal = Some(reason);
        }
    }

    /// An announced revocation of a counter does not take place.
    pub(crate) fn spare(&mut self, layer: Layer, counter: CounterId) {
        if let Some(pending) = self.of_mut(layer) {
            pending.spared.insert(counter);
        }
    }

    /// The request waits for a move of the vCPU, until `by` if it did not wait yet.
    pub(crate) fn start_move(&mut self, layer: Layer, by: Tsc) {
        if let Some(pending) = self.of_mut(layer) {
            pending.move_by.get_or_insert(by);
        }
    }

    /// The request needs no move any more.
    pub(crate) fn drop_move(&mut self, layer: Layer) {
        if let Some(pending) = self.of_mut(layer) {
            pending.move_by = None;
        }
    }

    /// Requests that wait for a move until `now`, or at all, wait no longer.
    pub(crate) fn end_moves(&mut self, now: Option<Tsc>) {
        for pending in self.of.iter_mut().flatten() {
            let is_over = |by: Tsc| now.is_none_or(|now| by <= now);
            if pending.move_by.is_some_and(is_over) {
                pending.move_by = None;
                pending.stays = true;
            }
        }
    }

    /// The request of a layer keeps what it has gathered and begins anew: nobody has
    /// declined anything. Returns the question that it had asked.
    pub(crate) fn begin_anew(&mut self, layer: Layer) -> Option<Question> {
        let pending = self.of_mut(layer)?;
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
        question
    }
}
