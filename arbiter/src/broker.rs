//! The broker decides how a layer that is short gets counters, from books that it only
//! reads. Others carry the decisions out.
//!
//! [`next`] looks at the books and at one request, and returns the next step. The
//! arbitration makes the step and asks again, until the step is to wait or the request has
//! its answer. This ends: each step takes a counter, or rules out one more counter
//! that could have been asked for or revoked.

use core::cmp::Reverse;

use crate::backing::{Backed, Backing};
use crate::bank::Bank;
use crate::counter::PerKind;
use crate::message::Wanted;
use crate::policy::{LAYERS, Policy, Scheme};
use crate::reason::Reason;
use crate::requests::{Pending, Requests};
use crate::reservation::{Change, ChangeKind};
use crate::rules::Rules;
use crate::{CounterId, CounterSet, Layer};

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

/// All that decisions are made from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Books<'a> {
    pub(crate) bank: &'a Bank,
    pub(crate) rules: &'a Rules,
    pub(crate) requests: &'a Requests,
    /// What the caller says of the guest's core.
    pub(crate) most: Backing,
    /// Layers, by code, whose code can run now, and so can answer a question.
    pub(crate) alive: [bool; LAYERS],
}

impl<'a> Books<'a> {
    /// What has a physical counter of its own.
    fn backed(&self) -> Backed {
        let guests = Policy::LAYERS.into_iter().filter(|layer| layer.is_guest());
        let coming = guests.map(|layer| self.coming_to(layer));
        Backed {
            most: self.most,
            coming: coming.fold(CounterSet::EMPTY, |all, one| all | one),
        }
    }

    /// Counters of the hypervisor's that `layer` is about to get: the one that it was asked
    /// for, and those whose revocation was announced.
    fn coming_to(&self, layer: Layer) -> CounterSet {
        let question = self.requests.question_of(layer);
        let asked = question.filter(|question| !question.holder.is_guest());
        let asked = asked.map(|question| question.counter);
        let announced = self.bank.announced_for(layer) & self.bank.held_by(Layer::Hypervisor);
        announced | asked.into_iter().collect()
    }

    /// Those of [`Books::coming_to`] that stay with the hypervisor, because they are no
    /// longer backed.
    pub(crate) fn unbacked_of(&self, layer: Layer) -> CounterSet {
        let coming = self.coming_to(layer);
        let Some(of_kind) = coming.iter().next() else {
            return CounterSet::EMPTY;
        };
        let mut backed = self.backed();
        backed.coming = backed.coming & !coming;
        if backed.left(self.holders(), layer, of_kind, None) >= coming.len() {
            return CounterSet::EMPTY;
        }
        coming
    }

    fn holders(&self) -> (&'a Bank, &'a Policy) {
        (self.bank, self.rules.policy())
    }

    /// Whether a counter that `layer` is about to get from its holder has a physical one.
    pub(crate) fn may_come(&self, counter: CounterId, layer: Layer) -> bool {
        let mut backed = self.backed();
        backed.coming.remove(counter);
        let pending = self.requests.of(layer);
        let room = pending.and_then(|pending| backed.room_for(layer, pending.kind()));
        if self.bank.owner(counter).is_some_and(Layer::is_guest) {
            return room.is_none_or(|room| room.can_have(counter));
        }
        backed.left(self.holders(), layer, counter, room) > 0
    }

    /// Whether nothing was said of what `layer` asks for.
    pub(crate) fn is_untold_of(&self, layer: Layer) -> bool {
        self.requests.of(layer).is_some_and(|pending| {
            let told = self.backed().told_of(layer, pending.event);
            told.is_err()
        })
    }

    /// Whether a counter that `layer` holds can be for the event of this request.
    pub(crate) fn can_name(&self, layer: Layer, counter: CounterId, pending: &Pending) -> bool {
        let room = self.backed().room_for(layer, pending.kind());
        let held = self.bank.reservation(counter);
        let is_new = held.is_some_and(|held| held.event != pending.event);
        !is_new || room.is_none_or(|room| room.can_have(counter))
    }

    /// Checks that a change which `layer` planned is admitted.
    ///
    /// # Errors
    /// It is not, for this reason.
    pub(crate) fn admit(&self, layer: Layer, change: &Change) -> Result<(), Reason> {
        let owner = self.bank.owner(change.counter);
        let takes = match change.kind {
            ChangeKind::Reserve(_) => true,
            ChangeKind::HandOver { to, .. } => owner.is_some_and(|owner| owner != to),
            ChangeKind::Nothing
            | ChangeKind::Renew
            | ChangeKind::Release
            | ChangeKind::SetAccess(_)
            | ChangeKind::SetControl(_)
            | ChangeKind::SetDropValue(_) => false,
        };
        if !takes {
            return Ok(());
        }
        if self.rules.is_barred(layer) {
            return Err(Reason::Administrator);
        }
        let (bank, policy) = self.holders();
        policy.admit(bank, layer, change.counter)?;
        // From one layer of the guest's to another nothing more is needed.
        if owner.is_some_and(Layer::is_guest) {
            return Ok(());
        }
        match self
            .backed()
            .left((bank, policy), layer, change.counter, None)
        {
            0 => Err(Reason::Unbacked),
            _ => Ok(()),
        }
    }

    /// How many programmable counters a core has to back for the layers of the guest, so
    /// that a request which waits for a move goes on there. `None`: none does.
    pub(crate) fn move_needs(&self) -> Option<u8> {
        let waiting = Policy::LAYERS.into_iter().filter_map(|layer| {
            let pending = self.requests.of(layer)?;
            pending.move_by?;
            needs(&self.seen_by(layer), layer, pending)
        });
        waiting.min()
    }

    /// The next step for the request of `layer`.
    pub(crate) fn next(&self, layer: Layer, pending: &Pending) -> NextStep {
        next(&self.seen_by(layer), layer, pending)
    }

    /// Whether the announced revocation of a counter for `layer` takes place now.
    pub(crate) fn is_justified(&self, layer: Layer, counter: CounterId) -> bool {
        is_justified(&self.seen_by(layer), layer, counter) && self.may_come(counter, layer)
    }

    /// Whether `holder` may be asked for a counter that `wanted_by` wants.
    pub(crate) fn can_spare(&self, holder: Layer, counter: CounterId, wanted_by: Layer) -> bool {
        can_spare(&self.seen_by(wanted_by), holder, counter)
    }

    /// What the request of `layer` is decided from.
    fn seen_by(&self, layer: Layer) -> View<'a> {
        let mut backed = self.backed();
        if let Some(question) = self.requests.question_of(layer) {
            // It is one of those that the layer can have, and no other's.
            backed.coming.remove(question.counter);
        }
        View {
            scheme: self.rules.scheme(),
            bank: self.bank,
            policy: self.rules.policy(),
            backed,
            busy: self.requests.busy_for_others(layer),
            answers: self.alive,
        }
    }
}

/// What one request is decided from.
#[derive(Clone, Copy, Debug)]
struct View<'a> {
    scheme: Scheme,
    bank: &'a Bank,
    policy: &'a Policy,
    /// What the layers of the guest can hold together.
    backed: Backed,
    /// Counters that requests of other layers have gathered or ask for.
    busy: CounterSet,
    /// Layers, by code, that can answer a question.
    answers: [bool; LAYERS],
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
fn next(view: &View<'_>, layer: Layer, pending: &Pending) -> NextStep {
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
fn needs(view: &View<'_>, layer: Layer, pending: &Pending) -> Option<u8> {
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
        let priority = owner.map_or(0, |owner| view.policy.priority(owner));
        (is_justified(view, layer, *counter), Reverse(priority))
    };
    announced
        .iter()
        .min_by_key(keeps)
        .map_or(NextStep::Wait, NextStep::Spare)
}

/// Whether the announced revocation of this counter for `layer` may still take
/// place.
fn is_justified(view: &View<'_>, layer: Layer, counter: CounterId) -> bool {
    let owner = view.bank.reservation(counter).map(|held| held.owner);
    owner.is_some_and(|owner| {
        owner != layer
            && view.policy.priority(owner) < view.policy.priority(layer)
            && can_spare(view, owner, counter)
    })
}

/// Whether `holder` has more counters of this one's kind than its minimum.
fn can_spare(view: &View<'_>, holder: Layer, counter: CounterId) -> bool {
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
    others.sort_by_key(|other| view.policy.priority(*other));
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
        let may_force = view.policy.priority(other) < view.policy.priority(layer);
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

/// The `count` members at the highest positions. Unmodified kernels begin with the
/// low ones, so those are left to them.
fn highest(set: CounterSet, count: u32) -> CounterSet {
    let surplus = set.len().saturating_sub(count);
    let skip = usize::try_from(surplus).unwrap_or(usize::MAX);
    set.iter().skip(skip).collect()
}
