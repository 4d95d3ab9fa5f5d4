//! The broker decides how a layer that is short gets counters. Others carry the
//! decisions out.
//!
//! [`next`] looks at the bank and at one request, and returns the next step. The
//! unit makes the step and asks again, until the step is to wait or the request has
//! its answer. This ends: each step takes a counter, or rules out one more counter
//! that could have been asked for or revoked.

use core::cmp::Reverse;

use crate::backing::Backed;
use crate::bank::Bank;
use crate::cookie::Cookie;
use crate::counter::PerKind;
use crate::message::{NamedEvent, Wanted};
use crate::policy::{Policy, Scheme};
use crate::reason::Reason;
use crate::time::Tsc;
use crate::{CounterId, CounterSet, Layer};

/// A request for counters that has no answer yet.
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

/// Layers that can hold counters, and so have a mailbox.
pub(crate) const LAYERS: usize = Policy::LAYERS.len();

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

    /// Notes that a holder keeps its counter.
    pub(crate) fn decline(&mut self, question: Question, reason: Reason) {
        self.question = None;
        self.declined.insert(question.counter);
        if reason == Reason::NoAnswer {
            self.silent[usize::from(question.holder.code())] = true;
        }
        // A refusal says more than silence.
        if self.refusal != Some(Reason::Refused) {
            self.refusal = Some(reason);
        }
    }
}

/// The next step for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// Take these free counters.
    Take(CounterSet),
    /// Take this counter from its holder, who lends it.
    TakeLent(CounterId),
    /// Ask the holder of this counter to yield it.
    Ask(CounterId),
    /// Announce to the holder of this counter that it will be revoked.
    Announce(CounterId),
    /// Let the holder of this counter keep it after all.
    Spare(CounterId),
    /// Have the vCPU move to another core, which backs what is asked for, and wait for
    /// that.
    Move,
    /// Wait: a question or an announced revocation is under way.
    Wait,
    /// Grant the request: it has all that it asked for.
    Grant,
    /// Refuse the request.
    Refuse(Reason),
}

/// What a decision is made from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub(crate) scheme: Scheme,
    pub(crate) bank: &'a Bank,
    pub(crate) policy: &'a Policy,
    /// What the layers of the guest can hold together.
    pub(crate) backed: Backed,
    /// Counters that requests of other layers have gathered or ask for.
    pub(crate) busy: CounterSet,
    /// Layers, by code, that can answer a question.
    pub(crate) answers: [bool; LAYERS],
}

/// What other layers could contribute to a request.
#[derive(Default)]
struct Sources {
    /// How many counters could be had in some way. Minima limit the number.
    reachable: u32,
    /// The same from layers of the guest, whose counters are backed already.
    backed: u32,
    lent: Option<CounterId>,
    ask: Option<CounterId>,
    force: Option<CounterId>,
    /// A request of another layer is about some of the counters.
    contended: bool,
}

/// Decides the next step for the request of `layer`.
pub(crate) fn next(view: &View<'_>, layer: Layer, pending: &Pending) -> NextStep {
    let need = pending.lacks();
    if need == 0 {
        return NextStep::Grant;
    }
    let holdings = Holdings::of(view, pending.wanted);
    if holdings.held(layer) + need > holdings.max(view.policy, layer) {
        return NextStep::Refuse(Reason::Maximum);
    }
    let candidates = pending.wanted.candidates();
    let free = match pending.wanted {
        Wanted::Held(_) => view.bank.free() & candidates & pending.theirs,
        Wanted::Any(_) | Wanted::This(_) => view.bank.free() & candidates,
    };
    let usable = holdings.unowed(view.policy, layer).min(free.len());
    let announced = holdings.announced_for(layer);
    // What comes from nobody or from the hypervisor has to be backed anew.
    let rules = (view.bank, view.policy);
    let room = view.backed.room_for(layer, pending.kind());
    let more = view.backed.left(rules, layer, holdings.of_kind, room);
    let sources = sources(view, layer, pending, &holdings, more);
    let others = usable + sources.reachable - sources.backed;
    let suffices = |more: u32| announced.len() + sources.backed + others.min(more) >= need;
    if !suffices(more) {
        let elsewhere = view.backed.elsewhere();
        let room = elsewhere.room_for(layer, pending.kind());
        let there = elsewhere.left(rules, layer, holdings.of_kind, room);
        if !pending.stays && suffices(there) {
            return NextStep::Move;
        }
        return NextStep::Refuse(pending.refusal.unwrap_or(match pending.wanted {
            _ if announced.len() + sources.backed + others >= need => Reason::Unbacked,
            _ if sources.contended => Reason::Busy,
            _ if free.len() >= need => Reason::Minimum,
            Wanted::Held(_) if holdings.above_minima(view.policy, layer) < need => Reason::Minimum,
            Wanted::This(_) | Wanted::Held(_) => Reason::Held,
            Wanted::Any(_) => Reason::NoneFree,
        }));
    }
    let usable = usable.min(more);
    if usable != 0 {
        return NextStep::Take(highest(free, usable.min(need)));
    }
    if let Some(counter) = sources.lent {
        return NextStep::TakeLent(counter);
    }
    match (announced.len(), sources.ask, sources.force) {
        (under_way, ..) if under_way > need => surplus(view, layer, announced),
        (under_way, ..) if under_way == need || pending.question.is_some() => NextStep::Wait,
        (_, Some(counter), _) => NextStep::Ask(counter),
        (_, None, Some(counter)) => NextStep::Announce(counter),
        (_, None, None) => NextStep::Refuse(pending.refusal.unwrap_or(Reason::NoneFree)),
    }
}

/// How many programmable counters a core would have to back for the layers of the guest, so
/// that the request of `layer` goes on there.
pub(crate) fn needs(view: &View<'_>, layer: Layer, pending: &Pending) -> Option<u8> {
    let most = view.backed.most;
    if view.backed.room_for(layer, pending.kind()).is_some() {
        let held = PerKind::count(view.bank.held_by_guest()).programmable;
        let all = u32::from(held) + pending.lacks();
        return u8::try_from(all).ok().filter(|all| *all <= most.elsewhere);
    }
    let mut enough = most.programmable.saturating_add(1)..=most.elsewhere;
    enough.find(|programmable| {
        let mut there = *view;
        there.backed.most.programmable = *programmable;
        next(&there, layer, pending) != NextStep::Move
    })
}

/// Chooses the revocation to cancel when more were announced than are needed: one
/// that would not take place anyway, else one of the layer of highest priority.
fn surplus(view: &View<'_>, layer: Layer, announced: CounterSet) -> NextStep {
    let keeps = |counter: &CounterId| {
        let owner = view.bank.reservation(*counter).map(|held| held.owner);
        let priority = owner.map_or(0, |owner| priority(view.policy, owner));
        (is_justified(view, layer, *counter), Reverse(priority))
    };
    announced
        .iter()
        .min_by_key(keeps)
        .map_or(NextStep::Wait, NextStep::Spare)
}

/// Whether the announced revocation of this counter for `layer` may still take
/// place.
pub(crate) fn is_justified(view: &View<'_>, layer: Layer, counter: CounterId) -> bool {
    let owner = view.bank.reservation(counter).map(|held| held.owner);
    owner.is_some_and(|owner| {
        owner != layer
            && priority(view.policy, owner) < priority(view.policy, layer)
            && can_spare(view, owner, counter)
    })
}

/// Whether `holder` has more counters of this one's kind than its minimum.
pub(crate) fn can_spare(view: &View<'_>, holder: Layer, counter: CounterId) -> bool {
    let holdings = Holdings::of(view, Wanted::This(counter));
    holdings.for_minima(holder).len() > holdings.min(view.policy, holder)
}

/// `more`: counters that nobody in the guest has now and that `layer` can have.
fn sources(
    view: &View<'_>,
    layer: Layer,
    pending: &Pending,
    holdings: &Holdings,
    more: u32,
) -> Sources {
    let mut sources = Sources::default();
    if view.scheme == Scheme::Independent {
        return sources;
    }
    let mut others = Policy::LAYERS;
    // Stable, so that layers of one priority keep their order.
    others.sort_by_key(|other| priority(view.policy, *other));
    for other in others.into_iter().filter(|other| *other != layer) {
        if !other.is_guest() && more == 0 {
            continue;
        }
        let taken = holdings.announced | view.busy;
        let wanted = holdings.of_layer(other) & pending.wanted.candidates();
        let wanted = match view.backed.room_for(layer, pending.kind()) {
            Some(room) if other.is_guest() && room.more == 0 => wanted & room.instead_of,
            _ => wanted,
        };
        sources.contended |= !(wanted & taken & !holdings.announced_for(layer)).is_empty();
        // A counter that is announced or asked for counts as gone.
        let held = holdings.for_minima(other);
        let committed = (held & taken).len() + holdings.min(view.policy, other);
        let spare = held.len().saturating_sub(committed);
        if spare == 0 {
            continue;
        }
        let code = usize::from(other.code());
        let may_ask =
            view.scheme == Scheme::Interacting && view.answers[code] && !pending.silent[code];
        let may_force = priority(view.policy, other) < priority(view.policy, layer);
        let mut had = 0;
        for counter in (wanted & !taken).iter() {
            let lends = view
                .bank
                .reservation(counter)
                .is_some_and(|reservation| reservation.control.lends());
            let ask = may_ask && !pending.declined.contains(counter);
            let force = may_force && !pending.spared.contains(counter);
            had += u32::from(lends || ask || force);
            // Within the first layer that has one, the highest counter wins.
            let note = |slot: &mut Option<CounterId>, is: bool| {
                let from_before = slot.is_some_and(|counter| !wanted.contains(counter));
                if is && !from_before {
                    *slot = Some(counter);
                }
            };
            note(&mut sources.lent, lends);
            note(&mut sources.ask, ask);
            note(&mut sources.force, force);
        }
        sources.reachable += had.min(spare);
        if other.is_guest() {
            sources.backed += had.min(spare);
        }
    }
    sources
}

/// Who holds how many counters of one kind.
struct Holdings {
    of_kind: CounterId,
    free: u32,
    by_layer: [CounterSet; LAYERS],
    announced: CounterSet,
    announced_by: [CounterSet; LAYERS],
}

impl Holdings {
    fn of(view: &View<'_>, wanted: Wanted) -> Holdings {
        let of_kind = match wanted {
            Wanted::Any(_) | Wanted::Held(_) => CounterId::Programmable(0),
            Wanted::This(counter) => counter,
        };
        let mut holdings = Holdings {
            of_kind,
            free: PerKind::count(for_minima(of_kind, view.bank.free()))
                .of(of_kind)
                .into(),
            by_layer: [CounterSet::EMPTY; LAYERS],
            announced: CounterSet::EMPTY,
            announced_by: [CounterSet::EMPTY; LAYERS],
        };
        for counter in view.bank.held().iter() {
            let Some(reservation) = view.bank.reservation(counter) else {
                continue;
            };
            if !counter.is_like(of_kind) {
                continue;
            }
            insert(&mut holdings.by_layer, reservation.owner, counter);
            if let Some(revocation) = reservation.revocation {
                holdings.announced.insert(counter);
                if let Some(layer) = revocation.wanted_by {
                    insert(&mut holdings.announced_by, layer, counter);
                }
            }
        }
        holdings
    }

    fn of_layer(&self, layer: Layer) -> CounterSet {
        get(&self.by_layer, layer)
    }

    fn announced_for(&self, layer: Layer) -> CounterSet {
        get(&self.announced_by, layer)
    }

    fn held(&self, layer: Layer) -> u32 {
        self.of_layer(layer).len()
    }

    /// Those of a layer's that its minimum is about.
    fn for_minima(&self, layer: Layer) -> CounterSet {
        for_minima(self.of_kind, self.of_layer(layer))
    }

    fn min(&self, policy: &Policy, layer: Layer) -> u32 {
        let share = policy.share(layer);
        share.map_or(0, |share| u32::from(share.least(self.of_kind)))
    }

    fn max(&self, policy: &Policy, layer: Layer) -> u32 {
        let share = policy.share(layer);
        share.map_or(0, |share| u32::from(share.max.of(self.of_kind)))
    }

    /// Counters that other layers hold beyond their minima.
    fn above_minima(&self, policy: &Policy, layer: Layer) -> u32 {
        let others = Policy::LAYERS.into_iter().filter(|other| *other != layer);
        let held = |other| self.for_minima(other).len();
        let spare = others.map(|other| held(other).saturating_sub(self.min(policy, other)));
        spare.sum()
    }

    /// Free counters that no other layer's minimum needs.
    fn unowed(&self, policy: &Policy, layer: Layer) -> u32 {
        let owed = Policy::LAYERS.into_iter().filter(|other| *other != layer);
        let held = |other| self.for_minima(other).len();
        let owed = owed.map(|other| self.min(policy, other).saturating_sub(held(other)));
        self.free.saturating_sub(owed.sum())
    }
}

/// Those of `set` that minima are about, or for a sampler all.
fn for_minima(of_kind: CounterId, set: CounterSet) -> CounterSet {
    match of_kind {
        CounterId::Ibs(_) => set,
        _ => set.counters(),
    }
}

fn insert(sets: &mut [CounterSet; LAYERS], layer: Layer, counter: CounterId) {
    if let Some(set) = sets.get_mut(usize::from(layer.code())) {
        set.insert(counter);
    }
}

fn get(sets: &[CounterSet; LAYERS], layer: Layer) -> CounterSet {
    let set = sets.get(usize::from(layer.code()));
    set.copied().unwrap_or(CounterSet::EMPTY)
}

pub(crate) fn priority(policy: &Policy, layer: Layer) -> u8 {
    policy.share(layer).map_or(0, |share| share.priority)
}

/// The `count` members at the highest positions. Unmodified kernels begin with the
/// low ones, so those are left to them.
fn highest(set: CounterSet, count: u32) -> CounterSet {
    let surplus = set.len().saturating_sub(count);
    let skip = usize::try_from(surplus).unwrap_or(usize::MAX);
    set.iter().skip(skip).collect()
}
