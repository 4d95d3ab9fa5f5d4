//! The control groups that have leases of one set of counters: a group is in another one, or in
//! none, and the one that is in none needs, while anything runs in it, the larger of what its
//! own leases hold and of what those of groups below it hold along one path, together. So a
//! lease below another is taken out of that one's, as long as it is not [`Beyond`] it: no more of a
//! kind, and each for a set in which that one has a counter.
//!
//! Each group keeps what the neediest path below it holds, so a change looks at the groups above
//! it and at what is directly below each of them, and at nothing else.

use std::collections::{BTreeMap, BTreeSet};

use arbiter::PerKind;

use crate::ids::{GroupId, LeaseId, TenantId, ThreadId};

/// Most unions of the sets that are asked for on one PMU.
pub(super) const MOST_UNIONS: usize = 64;

/// Most leases of the control groups below one: what is above a lease, and beside it there, is
/// looked at for each change on each CPU.
pub(crate) const MOST_BELOW: usize = 64;
/// Most threads of these leases. Each of them is a node on each CPU, and takes its room there.
pub(crate) const MOST_THREADS_BELOW: usize = 32;

/// How many demands are confined to each union.
pub(super) type Need = [u8; MOST_UNIONS];
/// Some of the unions, a bit for each.
pub(super) type Unions = u64;

/// What one lease of a group holds there.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupShare {
    pub(super) lease: LeaseId,
    pub(super) tenant: TenantId,
    /// How many demands are confined to each union.
    pub(super) need: Need,
    pub(super) takes: Takes,
    /// The unions in which some demand has a counter.
    pub(super) meets: Unions,
}

/// What demands take of what a group above has.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Takes {
    pub(super) kinds: PerKind,
    /// The sets that they are for, which are unions.
    pub(super) sets: Unions,
}

impl Takes {
    fn and(self, other: Takes) -> Takes {
        let (one, more) = (self.kinds, other.kinds);
        Takes {
            kinds: PerKind {
                programmable: one.programmable.saturating_add(more.programmable),
                fixed: one.fixed.saturating_add(more.fixed),
            },
            sets: self.sets | other.sets,
        }
    }
}

/// Who is among the groups that have leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum NodeId {
    Group(GroupId),
    /// The leases of a group's parts that are for more than threads. What these run may be
    /// anywhere in the group, so all else that is in it has only what they leave.
    Parts(GroupId),
    /// A thread that runs in a group, and in none with leases that is in that one.
    Thread(GroupId, ThreadId),
}

/// Where a group is among those that have leases, on any CPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Nest<'a> {
    pub(super) id: NodeId,
    /// Those that it is in, from the outermost on.
    pub(super) above: &'a [NodeId],
    /// Those in it, at whatever depth.
    pub(super) below: &'a BTreeSet<NodeId>,
}

/// What is needed at most, each way of needing it by itself.
#[derive(Clone, Debug)]
pub(super) struct Peak {
    pub(super) need: Need,
    takes: Takes,
    /// What each tenant has of it at most.
    pub(super) tenants: BTreeMap<TenantId, PerKind>,
}

/// More is held along a path than a group above has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beyond {
    /// A lease of the group above; `None`: it has none here.
    pub(super) above: Option<LeaseId>,
}

impl Peak {
    fn none() -> Self {
        Peak {
            need: [0; MOST_UNIONS],
            takes: Takes::default(),
            tenants: BTreeMap::new(),
        }
    }

    fn of(share: &GroupShare) -> Self {
        Peak {
            need: share.need,
            takes: share.takes,
            tenants: BTreeMap::from([(share.tenant, share.takes.kinds)]),
        }
    }

    fn and(self, other: &Peak) -> Self {
        self.with(other, u8::saturating_add)
    }

    fn or(self, other: &Peak) -> Self {
        self.with(other, u8::max)
    }

    /// Whether it is no less than the other in any way.
    fn is_at_least(&self, other: &Peak) -> bool {
        let covers = |one: PerKind, other: PerKind| {
            one.programmable >= other.programmable && one.fixed >= other.fixed
        };
        let mut tenants = other.tenants.iter();
        self.need
            .iter()
            .zip(&other.need)
            .all(|(one, other)| one >= other)
            && covers(self.takes.kinds, other.takes.kinds)
            && other.takes.sets & !self.takes.sets == 0
            && tenants.all(|(tenant, has)| {
                covers(self.tenants.get(tenant).copied().unwrap_or_default(), *has)
            })
    }

    fn with(mut self, other: &Peak, join: fn(u8, u8) -> u8) -> Self {
        #[cfg(test)]
        JOINED.set(JOINED.get() + 1);
        let kinds = |one: PerKind, other: PerKind| PerKind {
            programmable: join(one.programmable, other.programmable),
            fixed: join(one.fixed, other.fixed),
        };
        self.need = std::array::from_fn(|at| join(self.need[at], other.need[at]));
        self.takes = Takes {
            kinds: kinds(self.takes.kinds, other.takes.kinds),
            sets: self.takes.sets | other.takes.sets,
        };
        for (tenant, has) in &other.tenants {
            let own = self.tenants.entry(*tenant).or_default();
            *own = kinds(*own, *has);
        }
        self
    }
}

/// A group that has leases here, its parts, or a thread in it.
#[derive(Clone, Debug)]
struct Node {
    /// The innermost that it is in; `None`: it is in none.
    above: Option<NodeId>,
    /// It is a [`NodeId::Parts`].
    is_parts: bool,
    shares: Vec<GroupShare>,
    /// What its leases hold together.
    own: Peak,
    /// The unions in which one of them has a counter.
    meets: Unions,
    /// What the neediest path holds that begins with each group which is in it and in none
    /// between.
    children: BTreeMap<NodeId, Peak>,
    /// The most of these.
    below: Peak,
}

impl Node {
    fn peak(&self) -> Peak {
        if self.is_parts {
            // What is below is not taken out of it.
            return self.path();
        }
        self.own.clone().or(&self.below)
    }

    fn path(&self) -> Peak {
        self.own.clone().and(&self.below)
    }

    fn has_child(&mut self, id: NodeId, path: Peak) {
        let was = self.children.insert(id, path.clone());
        self.below = std::mem::replace(&mut self.below, Peak::none()).or(&path);
        if let Some(was) = was {
            self.had_child(&was);
        }
    }

    /// A path below it does not hold that any more. The most is looked for anew only where it may
    /// be less than it was.
    fn had_child(&mut self, was: &Peak) {
        if !self.children.values().any(|one| one.is_at_least(was)) {
            let children = std::mem::take(&mut self.children);
            self.has_children(children);
        }
    }

    fn has_children(&mut self, children: BTreeMap<NodeId, Peak>) {
        self.children = children;
        self.below = self.children.values().fold(Peak::none(), Peak::or);
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Forest {
    nodes: BTreeMap<NodeId, Node>,
}

impl Forest {
    /// A lease of a group holds `share`, or holds it no more. Returns what groups that are in
    /// none needed before, and need now, as far as that may not be the same.
    pub(super) fn change(
        &mut self,
        nest: Nest<'_>,
        share: GroupShare,
        add: bool,
    ) -> (Vec<Peak>, Vec<Peak>) {
        let before = if self.nodes.contains_key(&nest.id) {
            self.peak_over(nest.id)
        } else if add {
            self.enter(nest)
        } else {
            return (Vec::new(), Vec::new());
        };
        let Some(node) = self.nodes.get_mut(&nest.id) else {
            return (before, Vec::new());
        };
        node.shares.retain(|other| other.lease != share.lease);
        if add {
            node.shares.push(share);
        }
        if node.shares.is_empty() {
            return (before, self.leave(nest.id));
        }
        let own = node.shares.iter().map(Peak::of);
        node.own = own.fold(Peak::none(), |sum, one| sum.and(&one));
        let meets = node.shares.iter().map(|share| share.meets);
        node.meets = meets.fold(0, |all, one| all | one);
        self.tell_above(nest.id);
        (before, self.peak_over(nest.id))
    }

    /// A group that has nothing yet. Returns what was needed where it is now.
    fn enter(&mut self, nest: Nest<'_>) -> Vec<Peak> {
        let mut above = nest.above.iter().rev();
        let above = above.find(|id| self.nodes.contains_key(id)).copied();
        let is_next = |id: &&NodeId| self.nodes.get(id).is_some_and(|node| node.above == above);
        let next: Vec<NodeId> = nest.below.iter().filter(is_next).copied().collect();
        let before = match above {
            Some(above) => self.peak_over(above),
            None => self.peaks(&next),
        };
        let mut node = Node {
            above,
            is_parts: matches!(nest.id, NodeId::Parts(_)),
            shares: Vec::new(),
            own: Peak::none(),
            meets: 0,
            children: BTreeMap::new(),
            below: Peak::none(),
        };
        node.has_children(self.put_below(&next, Some(nest.id)));
        if let Some(above) = above.and_then(|above| self.nodes.get_mut(&above)) {
            next.iter().for_each(|id| {
                above.children.remove(id);
            });
        }
        self.nodes.insert(nest.id, node);
        before
    }

    /// A group has nothing any more. Returns what is needed where it was.
    fn leave(&mut self, id: NodeId) -> Vec<Peak> {
        let Some(node) = self.nodes.remove(&id) else {
            return Vec::new();
        };
        let next: Vec<NodeId> = node.children.keys().copied().collect();
        let paths = self.put_below(&next, node.above);
        let Some(above) = node.above else {
            return self.peaks(&next);
        };
        if let Some(over) = self.nodes.get_mut(&above) {
            let was = over.children.remove(&id);
            // These hold no more together than the one that was above them.
            over.children.extend(paths);
            if let Some(was) = was {
                over.had_child(&was);
            }
        }
        self.tell_above(above);
        self.peak_over(above)
    }

    /// These groups are in that one from now on, and in none between. Returns what is held
    /// along the paths that begin with them.
    fn put_below(&mut self, ids: &[NodeId], above: Option<NodeId>) -> BTreeMap<NodeId, Peak> {
        let mut paths = BTreeMap::new();
        for id in ids {
            if let Some(node) = self.nodes.get_mut(id) {
                node.above = above;
                paths.insert(*id, node.path());
            }
        }
        paths
    }

    /// What a group holds, or what is below it, has changed.
    fn tell_above(&mut self, id: NodeId) {
        let mut at = self.nodes.get(&id).map(|node| (id, node));
        while let Some((id, node)) = at {
            let Some(above) = node.above else {
                return;
            };
            let path = node.path();
            if let Some(over) = self.nodes.get_mut(&above) {
                over.has_child(id, path);
            }
            at = self.nodes.get(&above).map(|node| (above, node));
        }
    }

    /// The groups above one, from the innermost on.
    fn above(&self, id: NodeId) -> impl Iterator<Item = &Node> {
        let over = |node: &&Node| self.nodes.get(&node.above?);
        std::iter::successors(self.nodes.get(&id), over).skip(1)
    }

    /// What the outermost group above one needs, or that one.
    fn peak_over(&self, id: NodeId) -> Vec<Peak> {
        let root = self.above(id).last().or(self.nodes.get(&id));
        root.map(Node::peak).into_iter().collect()
    }

    fn peaks(&self, ids: &[NodeId]) -> Vec<Peak> {
        let nodes = ids.iter().filter_map(|id| self.nodes.get(id));
        nodes.map(Node::peak).collect()
    }

    /// Where the leases of a group, those of groups below it, and of those between it and one
    /// above, are together more of a kind than that one's, or one of them is for counters of which
    /// that has none, if there is any above.
    pub(super) fn beyond(&self, nest: Nest<'_>) -> Option<Beyond> {
        match self.nodes.get(&nest.id) {
            Some(node) if self.has_all_above(nest) => {
                Self::beyond_over(node.path().takes, self.above(nest.id))
            }
            _ => Some(Beyond { above: None }),
        }
    }

    /// Whether each group above one has something here. What one further out has here is not for
    /// those in a group that has its lease elsewhere.
    fn has_all_above(&self, nest: Nest<'_>) -> bool {
        let mut above = nest.above.iter();
        above.all(|id| matches!(id, NodeId::Parts(_)) || self.nodes.contains_key(id))
    }

    /// The same, if a group that is in others held so much more: what that needs at least is
    /// looked at, and nothing changed.
    pub(super) fn would_be_beyond(&self, nest: Nest<'_>, more: Takes) -> Option<Beyond> {
        let held = match self.nodes.get(&nest.id) {
            Some(node) => node.path().takes.and(more),
            None => more,
        };
        let mut above = nest.above.iter().rev();
        let above = above.find_map(|id| Some((id, self.nodes.get(id)?)));
        let Some((id, node)) = above.filter(|_| self.has_all_above(nest)) else {
            return Some(Beyond { above: None });
        };
        Self::beyond_over(held, std::iter::once(node).chain(self.above(*id)))
    }

    /// So much is held along the paths that begin in `above`, from the innermost on.
    fn beyond_over<'a>(mut held: Takes, above: impl Iterator<Item = &'a Node>) -> Option<Beyond> {
        let mut short = None;
        // Parts may be there a moment longer than the group that they are of, and nothing is taken
        // out of them.
        let mut is_in_one = false;
        // Of several that have too little, the outermost is named.
        for node in above {
            is_in_one |= !node.is_parts;
            let (takes, has) = (held.kinds, node.own.takes.kinds);
            let is_short = takes.programmable > has.programmable
                || takes.fixed > has.fixed
                || held.sets & !node.meets != 0;
            if is_short && !node.is_parts {
                short = Some(Beyond {
                    above: node.shares.first().map(|share| share.lease),
                });
            }
            held = held.and(node.own.takes);
        }
        if is_in_one {
            short
        } else {
            Some(Beyond { above: None })
        }
    }
}

#[cfg(test)]
thread_local! {
    /// How often one peak was joined with another: what changes cost.
    pub(crate) static JOINED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(lease: u64, need: u8) -> GroupShare {
        GroupShare {
            lease: LeaseId(lease),
            tenant: TenantId(0),
            need: [need; MOST_UNIONS],
            takes: Takes {
                kinds: PerKind {
                    programmable: need,
                    fixed: 0,
                },
                sets: 1,
            },
            meets: 1,
        }
    }

    /// As many groups as there may be below one, however they are put.
    #[test]
    fn a_change_costs_what_is_above_and_beside_it() {
        let most = MOST_BELOW as u64;
        let node = |id| NodeId::Group(GroupId(id));
        let above: Vec<NodeId> = (1..=4).map(node).collect();
        let leaves: BTreeSet<NodeId> = (5..5 + most - 3).map(node).collect();
        let mut forest = Forest::default();
        let none = BTreeSet::new();
        let number = |id| match id {
            NodeId::Group(id) | NodeId::Parts(id) | NodeId::Thread(id, _) => id.0,
        };
        let nest = |id: NodeId| {
            let depth = above
                .iter()
                .position(|one| *one == id)
                .unwrap_or(above.len());
            (depth, id)
        };
        let mut change = |id: NodeId, need: u8, below: &BTreeSet<NodeId>, add: bool| {
            let (depth, id) = nest(id);
            let nest = Nest {
                id,
                above: &above[..depth],
                below,
            };
            JOINED.set(0);
            let (before, after) = forest.change(nest, share(number(id), need), add);
            assert!(before.len().max(after.len()) as u64 <= most);
            (JOINED.get(), forest.beyond(nest).is_some())
        };
        for (id, need) in above.iter().zip([8, 4, 2, 1]) {
            change(*id, need, &none, true);
        }
        for id in &leaves {
            let (cost, beyond) = change(*id, 1, &none, true);
            assert!(!beyond && cost <= most + 32, "{cost}");
        }
        // With the outermost gone, each ends by itself.
        let mut all = 0;
        for id in above.iter().chain(&leaves) {
            all += change(*id, 0, &leaves, false).0;
        }
        assert!(all <= 32 * most, "{all}");
    }

    /// Threads of one lease are alike, so that what they need at most is known with one of them.
    #[test]
    fn those_that_are_alike_go_without_a_look_at_the_others() {
        let over = [NodeId::Group(GroupId(1))];
        let none = BTreeSet::new();
        let mut forest = Forest::default();
        let mut change = |id: NodeId, need: u8, add: bool| {
            let above = if id == over[0] { &[][..] } else { &over };
            let nest = Nest {
                id,
                above,
                below: &none,
            };
            JOINED.set(0);
            let (_, after) = forest.change(nest, share(7, need), add);
            let below = forest.nodes.get(&over[0]).map(|node| node.below.need[0]);
            (JOINED.get(), below, after.len())
        };
        let thread = |number| NodeId::Thread(GroupId(1), ThreadId { number, started: 1 });
        change(over[0], 8, true);
        let most = u32::try_from(MOST_THREADS_BELOW).expect("a few");
        for number in 0..most {
            let need = if number == 3 { 5 } else { 2 };
            change(thread(number), need, true);
        }
        // It was the one that needed most.
        let (cost, below, _) = change(thread(3), 0, false);
        assert!(below == Some(2) && cost > MOST_THREADS_BELOW as u64 / 2);
        for number in (4..most).chain(0..2) {
            let (cost, below, _) = change(thread(number), 0, false);
            assert!(below == Some(2) && cost <= 8, "{cost}");
        }
        assert_eq!(change(thread(2), 0, false).1, Some(0));
    }
}
