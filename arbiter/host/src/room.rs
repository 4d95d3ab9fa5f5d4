//! Whether counters are enough: what leases hold on each CPU, and what is left.
//!
//! A demand is for any one counter of a set. Demands find a counter each if and only if,
//! for every set of counters, no more demands are confined to it than it has members
//! (Hall's theorem). It is enough to look at the unions of the sets that were asked for,
//! so each CPU keeps numbers for each union: how many demands leases of scope `cpu` have
//! there, the neediest thread or control group (`forest`), and outsiders.

mod forest;
mod pool;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arbiter::{CounterSet, PerKind};

use super::cpus::CpuSet;
use super::ids::{GroupId, HostPmu, Place, PmuId, ThreadId};
use super::lease::Holding;
use super::policy::HostPolicy;
use super::refusal::Refusal;
use super::terms::{Demand, Scope, Terms};
#[cfg(test)]
pub(crate) use forest::JOINED;
pub(crate) use forest::{MOST_BELOW, MOST_THREADS_BELOW};
use forest::{Nest, NodeId};
use pool::{Pool, Rules, Share, are_of_one_kind};
pub(crate) use pool::{Shortage, whole_kinds};

/// The counters of a host, and what is held of them.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    pools: Vec<Pool>,
    threads: BTreeMap<ThreadId, Vec<Arc<Share>>>,
    /// How many leases of each control group hold something, of its parts, and of threads in it.
    groups: BTreeMap<NodeId, usize>,
    /// Which of these are below each control group.
    below: BTreeMap<GroupId, BTreeSet<NodeId>>,
    online: CpuSet,
    /// Where somebody who holds no lease has something.
    outside: BTreeSet<Place>,
    rules: Rules,
}

impl Room {
    pub(crate) fn new(pmus: &[HostPmu]) -> Self {
        let pools = (0u16..).map(PmuId).zip(pmus);
        let pools: Vec<Pool> = pools.map(|(id, pmu)| Pool::new(id, pmu)).collect();
        let online = pools.iter().flat_map(|pool| pool.cpus().iter());
        Room {
            online: online.collect(),
            pools,
            threads: BTreeMap::new(),
            groups: BTreeMap::new(),
            below: BTreeMap::new(),
            outside: BTreeSet::new(),
            rules: Rules::default(),
        }
    }

    /// Keeps the tenants' minima and maxima from now on.
    pub(crate) fn set_policy(&mut self, policy: &HostPolicy) {
        self.rules = Rules::of(policy);
    }

    pub(crate) fn online(&self) -> &CpuSet {
        &self.online
    }

    pub(crate) fn set_online(&mut self, online: CpuSet) {
        // Nobody has anything on CPUs that do not run.
        self.outside.retain(|place| {
            let pool = &mut self.pools[usize::from(place.pmu.0)];
            let runs = pool.cpus_of(place.domain).meets(&online);
            if !runs {
                pool.set_outside(place.domain, Vec::new());
            }
            runs
        });
        self.online = online;
    }

    /// Sets what somebody who holds no lease has.
    pub(crate) fn set_outside(&mut self, place: Place, outside: Vec<CounterSet>) {
        let pool = self.pools.get_mut(usize::from(place.pmu.0));
        let Some(pool) = pool.filter(|pool| pool.has_domain(place.domain)) else {
            return;
        };
        if outside.is_empty() {
            self.outside.remove(&place);
        } else {
            self.outside.insert(place);
        }
        pool.set_outside(place.domain, outside);
    }

    /// What somebody who holds no lease has of a place.
    pub(crate) fn outside(&self, place: Place) -> &[CounterSet] {
        self.pool(place.pmu).outside(place.domain)
    }

    /// What leases hold of a place at most at a time, by kind.
    pub(crate) fn leased(&self, place: Place) -> PerKind {
        self.pool(place.pmu).leased(place.domain)
    }

    pub(crate) fn cpus(&self, place: Place) -> &CpuSet {
        self.pool(place.pmu).cpus_of(place.domain)
    }

    /// The place of a CPU.
    pub(crate) fn place_of(&self, pmu: PmuId, cpu: u32) -> Option<Place> {
        let domain = self.pools.get(usize::from(pmu.0))?.domain_of(cpu)?;
        Some(Place { pmu, domain })
    }

    fn pool(&self, pmu: PmuId) -> &Pool {
        &self.pools[usize::from(pmu.0)]
    }

    /// Learns which sets of counters `demands` are for. A set that is new makes it count
    /// anew what `held` says, which is all that is held.
    pub(crate) fn learn<'a>(
        &mut self,
        demands: &[Demand],
        held: impl Iterator<Item = Holding<'a>> + Clone,
    ) -> Result<(), Refusal> {
        let mut learnt = self.learn_sets(demands);
        if learnt == Err(Refusal::TooManyKinds) {
            // Those that nobody asks for any more make room for others.
            self.pools.iter_mut().for_each(Pool::forget);
            for holding in held.clone() {
                // They were learnt before, when there were more.
                let _ = self.learn_sets(&holding.terms.demands);
            }
            learnt = self.learn_sets(demands);
            self.count(held.clone());
        }
        // Of a set that is refused, others may have been learnt.
        if learnt != Ok(false) {
            self.count(held);
        }
        learnt.map(|_| ())
    }

    /// The same, but what is held has to be counted after it, by [`Room::count`]. Returns
    /// whether a set was new.
    pub(crate) fn learn_sets(&mut self, demands: &[Demand]) -> Result<bool, Refusal> {
        for &Demand { pmu, counters } in demands {
            let pool = self.pools.get(usize::from(pmu.0));
            if !pool.is_some_and(|pool| pool.has(counters)) {
                return Err(Refusal::NoSuchCounters { pmu, counters });
            }
        }
        let mut new = false;
        for &Demand { pmu, counters } in demands {
            let pool = &mut self.pools[usize::from(pmu.0)];
            new |= pool.learn(counters).ok_or(Refusal::TooManyKinds)?;
        }
        Ok(new)
    }

    /// Counts anew what is held.
    pub(crate) fn count<'a>(&mut self, held: impl Iterator<Item = Holding<'a>>) {
        self.threads.clear();
        self.groups.clear();
        self.below.clear();
        self.pools.iter_mut().for_each(Pool::clear);
        held.for_each(|holding| self.add(holding));
    }

    /// The first PMU of `demands` that cannot count for threads.
    pub(crate) fn not_for_threads(&self, demands: &[Demand]) -> Option<PmuId> {
        let mut pmus = demands.iter().map(|demand| demand.pmu);
        pmus.find(|&pmu| !self.pool(pmu).is_for_threads())
    }

    /// Whether so much could be had if nobody had anything, by somebody who may hold
    /// `most`.
    pub(crate) fn could_give(
        &self,
        demands: &[Demand],
        cpus: &CpuSet,
        most: PerKind,
    ) -> Result<(), Refusal> {
        let mut pools = self.pools.iter();
        pools.try_for_each(|pool| pool.could_give(demands, cpus, most))
    }

    /// Whether both can want the same counter, so that one could have what the other gives up.
    /// That of a control group is not to be had that way by one below it, nor the reverse.
    pub(crate) fn compete(&self, one: &Terms, other: &Terms) -> bool {
        let are_nested = one.scope.is_of_groups()
            && (one.scope.is_below(&other.scope) || other.scope.is_below(&one.scope));
        !are_nested && self.meet(one, other, |a, b| !(a & b).is_empty())
    }

    /// Whether what one gets can be what the other lacks. So it is with counters of one kind,
    /// also if no single one would do for both: others hold any of them, or may.
    pub(crate) fn disturb(&self, one: &Terms, other: &Terms) -> bool {
        self.meet(one, other, are_of_one_kind)
    }

    fn meet(
        &self,
        one: &Terms,
        other: &Terms,
        is_same: impl Fn(CounterSet, CounterSet) -> bool,
    ) -> bool {
        let pairs = one
            .demands
            .iter()
            .flat_map(|a| other.demands.iter().map(move |b| (a, b)));
        let mut same = pairs.filter(|(a, b)| a.pmu == b.pmu);
        same.any(|(a, b)| {
            is_same(a.counters, b.counters) && self.pool(a.pmu).meet(&one.cpus, &other.cpus)
        })
    }

    /// Where `demands` are for counters of `cpus`, in order.
    fn places(&self, demands: &[Demand], cpus: &CpuSet) -> Vec<Place> {
        let mut places = Vec::with_capacity(cpus.len());
        for (pmu, pool) in (0u16..).map(PmuId).zip(&self.pools) {
            if demands.iter().any(|demand| demand.pmu == pmu) {
                pool.add_places(cpus, &mut places);
            }
        }
        places
    }

    fn places_of(&self, holding: Holding<'_>) -> Vec<Place> {
        self.places(holding.demands(), &holding.terms.cpus)
    }

    /// The counters that `demands` take, each CPU's by itself.
    pub(crate) fn counters(&self, demands: &[Demand], cpus: &CpuSet) -> u64 {
        let places = self.places(demands, cpus);
        let of_each = of_each_pmu(&places).map(|(pmu, places)| {
            let of_pmu = demands.iter().filter(|demand| demand.pmu == pmu);
            (of_pmu.count() * places.len()) as u64
        });
        of_each.sum()
    }

    /// Adds what a lease holds, also where it is too much.
    pub(crate) fn add(&mut self, holding: Holding<'_>) {
        if holding.holds == 0 {
            return;
        }
        let places = self.places_of(holding);
        let threads = match &holding.terms.scope {
            Scope::Cpu => return self.change_cpus(holding, &places, true),
            Scope::Group(_) | Scope::Part(_) => return self.change_groups(holding, &places, true),
            Scope::Thread(threads) => threads,
        };
        let share = Arc::new(Share {
            lease: holding.lease,
            tenant: holding.tenant,
            cpus: holding.terms.cpus.clone(),
            demands: holding.demands().to_vec(),
        });
        for &thread in threads {
            let shares = self.threads.entry(thread).or_default();
            for (pmu, places) in of_each_pmu(&places) {
                let pool = &mut self.pools[usize::from(pmu.0)];
                pool.change_thread(places, shares, &share, true);
            }
            shares.push(share.clone());
        }
    }

    /// Takes away what [`Room::add`] has added.
    pub(crate) fn remove(&mut self, holding: Holding<'_>) {
        if holding.holds == 0 {
            return;
        }
        let places = self.places_of(holding);
        let threads = match &holding.terms.scope {
            Scope::Cpu => return self.change_cpus(holding, &places, false),
            Scope::Group(_) | Scope::Part(_) => return self.change_groups(holding, &places, false),
            Scope::Thread(threads) => threads,
        };
        for &thread in threads {
            let mut others = self.threads.remove(&thread).unwrap_or_default();
            let own = |share: &Arc<Share>| share.lease == holding.lease;
            while let Some(at) = others.iter().position(own) {
                let share = others.remove(at);
                for (pmu, places) in of_each_pmu(&places) {
                    let pool = &mut self.pools[usize::from(pmu.0)];
                    pool.change_thread(places, &others, &share, false);
                }
            }
            if !others.is_empty() {
                self.threads.insert(thread, others);
            }
        }
    }

    fn change_cpus(&mut self, holding: Holding<'_>, places: &[Place], add: bool) {
        for (pmu, places) in of_each_pmu(places) {
            let pool = &mut self.pools[usize::from(pmu.0)];
            pool.change_cpus(holding.tenant, holding.demands(), places, add);
        }
    }

    fn change_groups(&mut self, holding: Holding<'_>, places: &[Place], add: bool) {
        let scope = &holding.terms.scope;
        let in_groups: Vec<GroupId> = scope.above().collect();
        let above = self.leased_above(scope);
        for node in nodes(scope) {
            let count = self.groups.entry(node).or_default();
            let others = *count - usize::from(!add);
            *count = others + usize::from(add);
            if others == 0 {
                self.set_node(node, &in_groups, add);
            }
            let none = BTreeSet::new();
            let below = match node {
                NodeId::Group(group) | NodeId::Parts(group) => self.below.get(&group),
                NodeId::Thread(..) => None,
            };
            let nest = Nest {
                id: node,
                above: &above,
                below: below.unwrap_or(&none),
            };
            for (pmu, places) in of_each_pmu(places) {
                let pool = &mut self.pools[usize::from(pmu.0)];
                pool.change_group(holding, nest, places, add);
            }
        }
    }

    /// A control group has the first lease that holds something, or has none any more; so with
    /// what is within one.
    fn set_node(&mut self, node: NodeId, above: &[GroupId], has: bool) {
        if !has {
            self.groups.remove(&node);
        }
        for above in above {
            let below = self.below.entry(*above).or_default();
            if has {
                below.insert(node);
            } else {
                below.remove(&node);
            }
            if below.is_empty() {
                self.below.remove(above);
            }
        }
    }

    /// How many leases of this control group hold something.
    pub(crate) fn holding(&self, group: GroupId) -> usize {
        let count = self.groups.get(&NodeId::Group(group));
        count.copied().unwrap_or(0)
    }

    /// Whether a lease of this control group holds something.
    pub(crate) fn has_group(&self, group: GroupId) -> bool {
        self.groups.contains_key(&NodeId::Group(group))
    }

    /// Whether what a lease of a control group, or within one, holds, which was added, is more
    /// somewhere than a group above it has.
    pub(crate) fn is_beyond(&self, holding: Holding<'_>) -> bool {
        let within = self.within(holding);
        if within.is_empty() {
            return false;
        }
        let above = self.leased_above(&holding.terms.scope);
        let within = nests(within, &above);
        let places = self.places_of(holding);
        let is_beyond = |place: &Place| {
            let mut within = within.iter();
            within.any(|nest| self.pool(place.pmu).beyond(place.domain, *nest).is_some())
        };
        places.iter().any(is_beyond)
    }

    /// Where a lease is in control groups, if one above it has a lease.
    fn within(&self, holding: Holding<'_>) -> Vec<NodeId> {
        let scope = &holding.terms.scope;
        if !scope.is_of_groups() {
            return Vec::new();
        }
        if matches!(scope, Scope::Part(_)) || scope.above().any(|above| self.has_group(above)) {
            return nodes(scope);
        }
        Vec::new()
    }

    /// The lease holds the first `to` of its demands, also where that is too much.
    pub(crate) fn change(&mut self, holding: Holding<'_>, to: usize) {
        self.remove(holding);
        self.add(holding.with(to));
    }

    /// The same, if they fit.
    pub(crate) fn fit(&mut self, holding: Holding<'_>, to: usize) -> Result<(), Shortage> {
        if holding.terms.scope.is_of_groups() {
            self.would_be_beyond(holding, to)?;
        }
        self.change(holding, to);
        let fits = self.check(holding.with(to));
        if fits.is_err() {
            self.change(holding.with(to), holding.holds);
        }
        fits
    }

    fn would_be_beyond(&self, holding: Holding<'_>, to: usize) -> Result<(), Shortage> {
        let within = self.within(holding);
        if within.is_empty() {
            return Ok(());
        }
        let above = self.leased_above(&holding.terms.scope);
        let places = self.places_of(holding.with(to));
        nests(within, &above).into_iter().try_for_each(|nest| {
            of_each_pmu(&places).try_for_each(|(pmu, places)| {
                self.pool(pmu).would_be_beyond(holding, to, nest, places)
            })
        })
    }

    /// What is above a lease and holds something, from the outermost on.
    fn leased_above(&self, scope: &Scope) -> Vec<NodeId> {
        let is_parts = matches!(scope, Scope::Part(part) if part.with_others);
        let own = nodes(scope).first().copied().filter(|_| is_parts);
        let above = scope.above();
        let above = above.flat_map(|id| [NodeId::Group(id), NodeId::Parts(id)]);
        above
            .filter(|id| self.groups.contains_key(id) && Some(*id) != own)
            .collect()
    }

    /// Whether what is held is possible at the places of `holding`, which was added.
    fn check(&self, holding: Holding<'_>) -> Result<(), Shortage> {
        let places = self.places_of(holding);
        let above = self.leased_above(&holding.terms.scope);
        let within = nests(self.within(holding), &above);
        of_each_pmu(&places).try_for_each(|(pmu, places)| {
            self.pool(pmu).check(holding, &within, places, &self.rules)
        })
    }

    /// Why there are too few for somebody else than `holders`, who hold the others.
    pub(crate) fn reason<'a>(
        &self,
        shortage: Shortage,
        holders: impl Iterator<Item = Holding<'a>>,
    ) -> Refusal {
        let Place { pmu, domain } = shortage.place();
        let pool = self.pool(pmu);
        pool.reason(shortage, &self.rules, |set| {
            let has = |demand: &Demand| demand.pmu == pmu && !(demand.counters & set).is_empty();
            holders
                .filter(|holder| holder.terms.cpus.meets(pool.cpus_of(domain)))
                .filter(|holder| holder.demands().iter().any(has))
                .map(|holder| holder.lease)
                .collect()
        })
    }

    /// A place where leases together hold more than is left beside outsiders, and the
    /// set of counters that is too small there.
    pub(crate) fn overdrawn(&self) -> Option<(Place, CounterSet)> {
        let overdrawn = |&place: &Place| {
            let set = self.pool(place.pmu).overdrawn(place.domain)?;
            Some((place, set))
        };
        self.outside.iter().find_map(overdrawn)
    }
}

/// These where they are, of which nothing is looked at that is below them.
fn nests(nodes: Vec<NodeId>, above: &[NodeId]) -> Vec<Nest<'_>> {
    const NONE: &BTreeSet<NodeId> = &BTreeSet::new();
    let nest = |id| Nest {
        id,
        above,
        below: NONE,
    };
    nodes.into_iter().map(nest).collect()
}

/// What a lease of a control group, or within one, is among these.
fn nodes(scope: &Scope) -> Vec<NodeId> {
    match scope {
        Scope::Cpu | Scope::Thread(_) => Vec::new(),
        Scope::Group(group) => vec![NodeId::Group(group.id)],
        Scope::Part(part) if part.with_others => vec![NodeId::Parts(part.of.id)],
        Scope::Part(part) => {
            let threads = part.threads.iter();
            threads
                .map(|thread| NodeId::Thread(part.of.id, *thread))
                .collect()
        }
    }
}

/// Places are in the order of their PMUs.
fn of_each_pmu(places: &[Place]) -> impl Iterator<Item = (PmuId, &[Place])> {
    let chunks = places.chunk_by(|one, other| one.pmu == other.pmu);
    chunks.map(|places| (places[0].pmu, places))
}
