//! Whether counters are enough: what leases hold on each CPU, and what is left.
//!
//! A demand is for any one counter of a set. Demands find a counter each if and only if,
//! for every set of counters, no more demands are confined to it than it has members
//! (Hall's theorem). It is enough to look at the unions of the sets that were asked for,
//! so each CPU keeps numbers for each union: how many demands leases of scope `cpu` have
//! there, the neediest thread, and outsiders.

mod pool;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::cpus::CpuSet;
use super::ids::{HostPmu, LeaseId, PmuId, TenantId, ThreadId};
use super::policy::{HostPolicy, Minimum};
use super::refusal::Refusal;
use super::terms::{Demand, Scope, Terms};
use arbiter::{CounterSet, PerKind};
pub(super) use pool::whole_kinds;
use pool::{Domain, FIXED, Histogram, MOST_UNIONS, Need, PROGRAMMABLE, Pool, kinds};

/// The CPUs that share one set of counters of a PMU: one CPU for a core PMU, all CPUs of
/// a package for its uncore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The PMU.
    pub pmu: PmuId,
    /// Which of its sets of counters.
    pub domain: u32,
}

/// What a lease needs of one PMU while one of its threads runs.
#[derive(Debug)]
struct Share {
    lease: LeaseId,
    tenant: TenantId,
    cpus: CpuSet,
    demands: Vec<Demand>,
}

/// What one lease holds, as [`Room`] sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holding<'a> {
    pub(super) lease: LeaseId,
    pub(super) tenant: TenantId,
    pub(super) terms: &'a Terms,
    /// So many of its demands.
    pub(super) holds: usize,
}

impl Holding<'_> {
    fn demands(&self) -> &[Demand] {
        &self.terms.demands[..self.holds]
    }
}

/// The counters of a host, and what is held of them.
#[derive(Clone, Debug)]
pub(super) struct Room {
    pools: Vec<Pool>,
    threads: BTreeMap<ThreadId, Vec<Arc<Share>>>,
    online: CpuSet,
    /// Where somebody who holds no lease has something.
    outside: BTreeSet<Place>,
    /// What is kept for tenants on the first PMU.
    minima: Vec<(TenantId, Minimum, Option<CpuSet>)>,
    maxima: Vec<PerKind>,
}

/// Where counters are not enough.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shortage {
    place: Place,
    reason: Short,
}

#[derive(Clone, Copy, Debug)]
enum Short {
    Union { union: usize, need: u8 },
    Maximum { most: u8 },
}

impl Room {
    pub(super) fn new(pmus: &[HostPmu]) -> Self {
        let pools: Vec<Pool> = pmus.iter().map(Pool::new).collect();
        let online = pools.iter().flat_map(|pool| pool.cpus.iter());
        Room {
            online: online.collect(),
            pools,
            threads: BTreeMap::new(),
            outside: BTreeSet::new(),
            minima: Vec::new(),
            maxima: Vec::new(),
        }
    }

    /// Keeps the tenants' minima and maxima from now on.
    pub(super) fn set_policy(&mut self, policy: &HostPolicy) {
        self.minima = policy
            .all()
            .filter(|(_, tenant)| tenant.minimum != Minimum::default())
            .map(|(id, tenant)| (id, tenant.minimum, tenant.cpus.clone()))
            .collect();
        self.maxima = policy.tenants.iter().map(|tenant| tenant.maximum).collect();
    }

    pub(super) fn online(&self) -> &CpuSet {
        &self.online
    }

    pub(super) fn set_online(&mut self, online: CpuSet) {
        // Nobody has anything on CPUs that do not run.
        self.outside.retain(|place| {
            let pool = &mut self.pools[usize::from(place.pmu.0)];
            let domain = &mut pool.domains[place.domain as usize];
            let runs = domain.cpus.meets(&online);
            if !runs {
                domain.outside.clear();
            }
            runs
        });
        self.online = online;
    }

    /// Sets what somebody who holds no lease has.
    pub(super) fn set_outside(&mut self, place: Place, outside: Vec<CounterSet>) {
        let Some(domain) = self.domain_mut(place) else {
            return;
        };
        let nobody = outside.is_empty();
        domain.outside = outside;
        if nobody {
            self.outside.remove(&place);
        } else {
            self.outside.insert(place);
        }
    }

    /// Learns which sets of counters `demands` are for. Returns whether there is one that
    /// was not known: then everything that is held has to be added anew.
    pub(super) fn learn(&mut self, demands: &[Demand]) -> Result<bool, Refusal> {
        for &Demand { pmu, counters } in demands {
            let there = self.pools.get(usize::from(pmu.0)).is_some_and(|pool| {
                let mixed = !(counters & PROGRAMMABLE).is_empty() && !(counters & FIXED).is_empty();
                (counters & !pool.counters).is_empty() && !mixed && !counters.is_empty()
            });
            if !there {
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

    /// Forgets which sets of counters were asked for.
    pub(super) fn forget(&mut self) {
        for pool in &mut self.pools {
            pool.unions = whole_kinds(pool.counters);
        }
    }

    /// Forgets what leases hold.
    pub(super) fn clear(&mut self) {
        self.threads.clear();
        for pool in &mut self.pools {
            let unions = pool.unions.len();
            for domain in &mut pool.domains {
                domain.held = vec![0; unions];
                domain.threads = vec![Histogram::default(); unions];
                domain.tenants.clear();
            }
        }
    }

    /// The first PMU of `demands` that cannot count for threads.
    pub(super) fn not_for_threads(&self, demands: &[Demand]) -> Option<PmuId> {
        let can = |pmu: PmuId| self.pools[usize::from(pmu.0)].for_threads;
        demands
            .iter()
            .map(|demand| demand.pmu)
            .find(|&pmu| !can(pmu))
    }

    /// Where `demands` are for counters of `cpus`, in order.
    fn places(&self, demands: &[Demand], cpus: &CpuSet) -> Vec<Place> {
        let mut places = Vec::with_capacity(cpus.len());
        for (pmu, pool) in (0u16..).map(PmuId).zip(&self.pools) {
            if demands.iter().any(|demand| demand.pmu == pmu) {
                let from = places.len();
                for cpu in cpus.iter() {
                    if let Some(domain) = pool.domain_of(cpu) {
                        // CPUs of one domain are often neighbours, but not always.
                        let place = Place { pmu, domain };
                        if places.last() != Some(&place) {
                            places.push(place);
                        }
                    }
                }
                if !places[from..].is_sorted_by(|one, next| one < next) {
                    places[from..].sort_unstable();
                    places.dedup();
                }
            }
        }
        places
    }

    /// The counters that `demands` take, each CPU's by itself.
    pub(super) fn counters(&self, demands: &[Demand], cpus: &CpuSet) -> u64 {
        let places = self.places(demands, cpus);
        let of_each = of_each_pmu(&places).map(|places| {
            let of_pmu = demands.iter().filter(|demand| demand.pmu == places[0].pmu);
            (of_pmu.count() * places.len()) as u64
        });
        of_each.sum()
    }

    /// The first CPU of a place.
    pub(super) fn cpu(&self, place: Place) -> u32 {
        let domain = self.domain(place);
        domain.cpus.iter().next().unwrap_or_default()
    }

    /// The place of a CPU.
    pub(super) fn place_of(&self, pmu: PmuId, cpu: u32) -> Option<Place> {
        let domain = self.pools.get(usize::from(pmu.0))?.domain_of(cpu)?;
        Some(Place { pmu, domain })
    }

    fn domain(&self, place: Place) -> &Domain {
        &self.pools[usize::from(place.pmu.0)].domains[place.domain as usize]
    }

    fn domain_mut(&mut self, place: Place) -> Option<&mut Domain> {
        let pool = self.pools.get_mut(usize::from(place.pmu.0))?;
        pool.domains.get_mut(place.domain as usize)
    }

    /// Adds what a lease holds, also where it is too much.
    pub(super) fn add(&mut self, holding: Holding<'_>) {
        if holding.holds == 0 {
            return;
        }
        let places = self.places_held(holding);
        match &holding.terms.scope {
            Scope::Cpu => self.change_cpus(holding, &places, true),
            Scope::Thread(threads) => {
                let share = Arc::new(Share {
                    lease: holding.lease,
                    tenant: holding.tenant,
                    cpus: holding.terms.cpus.clone(),
                    demands: holding.demands().to_vec(),
                });
                for &thread in threads {
                    let shares = self.threads.entry(thread).or_default();
                    change_thread(&mut self.pools, &places, shares, &share, true);
                    shares.push(share.clone());
                }
            }
        }
    }

    /// Takes away what [`Room::add`] has added.
    pub(super) fn remove(&mut self, holding: Holding<'_>) {
        if holding.holds == 0 {
            return;
        }
        let places = self.places_held(holding);
        match &holding.terms.scope {
            Scope::Cpu => self.change_cpus(holding, &places, false),
            Scope::Thread(threads) => {
                for &thread in threads {
                    let mut others = self.threads.remove(&thread).unwrap_or_default();
                    let own = |share: &Arc<Share>| share.lease == holding.lease;
                    while let Some(at) = others.iter().position(own) {
                        let share = others.remove(at);
                        change_thread(&mut self.pools, &places, &others, &share, false);
                    }
                    if !others.is_empty() {
                        self.threads.insert(thread, others);
                    }
                }
            }
        }
    }

    /// Where it holds something.
    fn places_held(&self, holding: Holding<'_>) -> Vec<Place> {
        self.places(holding.demands(), &holding.terms.cpus)
    }

    fn change_cpus(&mut self, holding: Holding<'_>, places: &[Place], add: bool) {
        for places in of_each_pmu(places) {
            let pmu = places[0].pmu;
            let pool = &mut self.pools[usize::from(pmu.0)];
            let need = pool.need(holding.demands(), pmu);
            let kinds = kinds(holding.demands(), pmu);
            for place in places {
                let domain = &mut pool.domains[place.domain as usize];
                for (held, need) in domain.held.iter_mut().zip(need) {
                    let need = u16::from(need);
                    *held = if add { *held + need } else { *held - need };
                }
                let cpu = &mut domain.tenants.entry(holding.tenant).or_default().cpu;
                let change = |old: u8, by: u8| {
                    if add {
                        old.saturating_add(by)
                    } else {
                        old - by
                    }
                };
                cpu.programmable = change(cpu.programmable, kinds.programmable);
                cpu.fixed = change(cpu.fixed, kinds.fixed);
            }
        }
    }

    /// Whether what is held is possible at the places of `holding`, which was added.
    pub(super) fn check(&self, holding: Holding<'_>) -> Result<(), Shortage> {
        let most = self.maxima.get(usize::from(holding.tenant.0));
        for places in of_each_pmu(&self.places_held(holding)) {
            let pmu = places[0].pmu;
            let pool = &self.pools[usize::from(pmu.0)];
            let need = pool.need(holding.demands(), pmu);
            for &place in places {
                if let (Some(most), Some(used)) =
                    (most, self.domain(place).tenants.get(&holding.tenant))
                {
                    for (cpu, threads, most) in [
                        (used.cpu.programmable, &used.threads[0], most.programmable),
                        (used.cpu.fixed, &used.threads[1], most.fixed),
                    ] {
                        if most != u8::MAX && u32::from(cpu) + threads.most() > u32::from(most) {
                            return Err(Shortage {
                                place,
                                reason: Short::Maximum { most },
                            });
                        }
                    }
                }
                for union in 0..pool.unions.len() {
                    if need[union] > 0 && self.slack(place, union) < 0 {
                        let need = need[union];
                        return Err(Shortage {
                            place,
                            reason: Short::Union { union, need },
                        });
                    }
                }
            }
        }
        Ok(())
    }

    /// Counters of a union that nobody needs; negative where there are too few.
    fn slack(&self, place: Place, union: usize) -> i64 {
        let (free, kept) = self.free_and_kept(place, union, None);
        free - kept
    }

    /// How many counters of a union nobody has, whatever is kept for tenants; and how
    /// many more are kept, for one tenant or for all.
    fn free_and_kept(&self, place: Place, union: usize, only: Option<TenantId>) -> (i64, i64) {
        let pool = &self.pools[usize::from(place.pmu.0)];
        let domain = &pool.domains[place.domain as usize];
        let set = pool.unions[union];
        let threads = domain.threads[union].most();
        let outside = domain
            .outside
            .iter()
            .filter(|outside| (**outside & !set).is_empty());
        let free = i64::from(set.len())
            - i64::from(domain.held[union])
            - i64::from(threads)
            - i64::try_from(outside.count()).unwrap_or(i64::MAX);
        if place.pmu != PmuId(0) {
            return (free, 0);
        }
        let (mut for_cpus, mut for_threads) = (0, threads);
        for (tenant, minimum, cpus) in &self.minima {
            let here = cpus.as_ref().is_none_or(|cpus| cpus.meets(&domain.cpus));
            if !here || only.is_some_and(|only| only != *tenant) {
                continue;
            }
            let used = domain
                .tenants
                .get(tenant)
                .map(|used| used.cpu)
                .unwrap_or_default();
            let mut thread = 0;
            if (pool.counters & PROGRAMMABLE & !set).is_empty() && !(set & PROGRAMMABLE).is_empty()
            {
                for_cpus += u32::from(minimum.cpu.programmable.saturating_sub(used.programmable));
                thread += u32::from(minimum.thread.programmable);
            }
            if (pool.counters & FIXED & !set).is_empty() && !(set & FIXED).is_empty() {
                for_cpus += u32::from(minimum.cpu.fixed.saturating_sub(used.fixed));
                thread += u32::from(minimum.thread.fixed);
            }
            for_threads = for_threads.max(thread);
        }
        (free, i64::from(for_cpus) + i64::from(for_threads - threads))
    }

    /// Why there are too few for `terms`, which are not added now.
    pub(super) fn reason<'a>(
        &self,
        shortage: Shortage,
        holders: impl Iterator<Item = Holding<'a>>,
    ) -> Refusal {
        let Shortage { place, reason } = shortage;
        let cpu = self.cpu(place);
        let (union, need) = match reason {
            Short::Maximum { most } => return Refusal::OverMaximum { cpu, most },
            Short::Union { union, need } => (union, i64::from(need)),
        };
        let pool = &self.pools[usize::from(place.pmu.0)];
        let set = pool.unions[union];
        if need > i64::from(set.len()) {
            let asked = u32::try_from(need).unwrap_or(0);
            return Refusal::MoreThanThereIs {
                pmu: place.pmu,
                cpu,
                asked,
                there: set.len(),
            };
        }
        let domain = self.domain(place);
        let outside = domain
            .outside
            .iter()
            .filter(|outside| (**outside & !set).is_empty())
            .count();
        let by: Vec<LeaseId> = holders
            .filter(|holder| {
                holder.terms.cpus.meets(&domain.cpus)
                    && holder.demands().iter().any(|demand| {
                        demand.pmu == place.pmu && !(demand.counters & set).is_empty()
                    })
            })
            .map(|holder| holder.lease)
            .collect();
        if outside > 0 && by.is_empty() {
            let counters = u32::try_from(outside).unwrap_or(u32::MAX);
            return Refusal::Outside { cpu, counters };
        }
        let (free, kept) = self.free_and_kept(place, union, None);
        if free >= need && kept > 0 {
            let keeps = |tenant| self.free_and_kept(place, union, Some(tenant)).1 > 0;
            if let Some(&(tenant, ..)) = self.minima.iter().find(|(tenant, ..)| keeps(*tenant)) {
                return Refusal::Kept { cpu, tenant };
            }
        }
        Refusal::Held { cpu, by }
    }

    /// A place where leases together hold more than is left beside outsiders, and the
    /// set of counters that is too small there.
    pub(super) fn overdrawn(&self) -> Option<(Place, CounterSet)> {
        self.outside.iter().find_map(|&place| {
            let unions = &self.pools[usize::from(place.pmu.0)].unions;
            let mut short =
                (0..unions.len()).filter(|&union| self.free_and_kept(place, union, None).0 < 0);
            Some((place, unions[short.next()?]))
        })
    }

    /// Whether so much could be had if nobody had anything, by somebody who may hold
    /// `most`.
    pub(super) fn can_have(
        &self,
        demands: &[Demand],
        cpus: &CpuSet,
        most: PerKind,
    ) -> Result<(), Refusal> {
        for (pmu, pool) in (0u16..).map(PmuId).zip(&self.pools) {
            let asked = kinds(demands, pmu);
            if asked == PerKind::default() {
                continue;
            }
            if let Some(cpu) = cpus.first_beyond(&pool.cpus) {
                return Err(Refusal::NotOnCpu { pmu, cpu });
            }
            let cpu = cpus.iter().next().unwrap_or_default();
            for (&union, need) in pool.unions.iter().zip(pool.need(demands, pmu)) {
                let (asked, there) = (u32::from(need), union.len());
                if asked > there {
                    return Err(Refusal::MoreThanThereIs {
                        pmu,
                        cpu,
                        asked,
                        there,
                    });
                }
            }
            for (asked, most) in [
                (asked.programmable, most.programmable),
                (asked.fixed, most.fixed),
            ] {
                if asked > most {
                    return Err(Refusal::OverMaximum { cpu, most });
                }
            }
        }
        Ok(())
    }

    /// Whether two sets of CPUs share counters of a PMU.
    pub(super) fn meet(&self, pmu: PmuId, one: &CpuSet, other: &CpuSet) -> bool {
        let pool = &self.pools[usize::from(pmu.0)];
        one.meets(other)
            || !pool.for_threads
                && pool
                    .domains
                    .iter()
                    .any(|domain| domain.cpus.meets(one) && domain.cpus.meets(other))
    }

    /// What leases hold of a place at most at a time, by kind.
    pub(super) fn leased(&self, place: Place) -> PerKind {
        let pool = &self.pools[usize::from(place.pmu.0)];
        let domain = self.domain(place);
        let mut leased = PerKind::default();
        for (union, set) in pool.unions.iter().enumerate() {
            let held = u32::from(domain.held[union]) + domain.threads[union].most();
            let held = u8::try_from(held).unwrap_or(u8::MAX);
            if *set == (pool.counters & PROGRAMMABLE) {
                leased.programmable = held;
            } else if *set == (pool.counters & FIXED) {
                leased.fixed = held;
            }
        }
        leased
    }

    /// What somebody who holds no lease has of a place.
    pub(super) fn outside(&self, place: Place) -> &[CounterSet] {
        &self.domain(place).outside
    }

    /// The CPUs of a place.
    pub(super) fn cpus(&self, place: Place) -> &CpuSet {
        &self.domain(place).cpus
    }
}

/// Places are in the order of their PMUs.
fn of_each_pmu(places: &[Place]) -> impl Iterator<Item = &[Place]> {
    places.chunk_by(|one, other| one.pmu == other.pmu)
}

/// One thread has `share` beside its `others`, or has it no more: at the places of it.
fn change_thread(
    pools: &mut [Pool],
    places: &[Place],
    others: &[Arc<Share>],
    share: &Share,
    add: bool,
) {
    for places in of_each_pmu(places) {
        let pmu = places[0].pmu;
        let pool = &mut pools[usize::from(pmu.0)];
        let unions = pool.unions.len();
        let of = |pool: &Pool, share: &Share| {
            (pool.need(&share.demands, pmu), kinds(&share.demands, pmu))
        };
        let (own, own_kinds) = of(pool, share);
        let others: Vec<_> = others
            .iter()
            .map(|other| (other, of(pool, other)))
            .collect();
        for place in places {
            let domain = &mut pool.domains[place.domain as usize];
            let mut before: Need = [0; MOST_UNIONS];
            let mut of_tenant = PerKind::default();
            for (other, (need, kinds)) in &others {
                if !other.cpus.meets(&domain.cpus) {
                    continue;
                }
                for (sum, need) in before.iter_mut().zip(need).take(unions) {
                    *sum = sum.saturating_add(*need);
                }
                if other.tenant == share.tenant {
                    of_tenant.programmable =
                        of_tenant.programmable.saturating_add(kinds.programmable);
                    of_tenant.fixed = of_tenant.fixed.saturating_add(kinds.fixed);
                }
            }
            let change = |histogram: &mut Histogram, without: u8, own: u8| {
                let with = without.saturating_add(own);
                let (old, new) = if add {
                    (without, with)
                } else {
                    (with, without)
                };
                histogram.remove(old);
                histogram.add(new);
            };
            for (union, histogram) in domain.threads.iter_mut().enumerate() {
                change(histogram, before[union], own[union]);
            }
            let used = &mut domain.tenants.entry(share.tenant).or_default().threads;
            change(&mut used[0], of_tenant.programmable, own_kinds.programmable);
            change(&mut used[1], of_tenant.fixed, own_kinds.fixed);
        }
    }
}
