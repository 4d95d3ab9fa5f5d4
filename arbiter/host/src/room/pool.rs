//! The counters of one PMU: what is held of them on each CPU, for each union of sets.

use std::collections::BTreeMap;
use std::sync::Arc;

use arbiter::{CounterSet, PerKind};

use crate::cpus::CpuSet;
use crate::ids::{HostPmu, LeaseId, Place, PmuId, TenantId};
use crate::lease::Holding;
use crate::policy::{HostPolicy, Minimum};
use crate::refusal::Refusal;
use crate::terms::Demand;

use super::forest::{Beyond, Forest, GroupShare, MOST_UNIONS, Need, Nest, Peak, Takes, Unions};

const PROGRAMMABLE: CounterSet = CounterSet::from_bits(u32::MAX as u64);
const FIXED: CounterSet = CounterSet::from_bits((u32::MAX as u64) << 32);

/// How many threads, or control groups that are in none, need so many counters: entry 0 is of those that need one.
#[derive(Clone, Debug, Default)]
struct Histogram(Vec<u32>);

impl Histogram {
    fn most(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }

    /// One more needs so many, or no more.
    fn count(&mut self, need: u8, add: bool) {
        if add {
            self.add(need);
        } else {
            self.remove(need);
        }
    }

    /// A thread needs `own` more than `without`, or does no more.
    fn change(&mut self, without: u8, own: u8, add: bool) {
        let with = without.saturating_add(own);
        let (old, new) = if add {
            (without, with)
        } else {
            (with, without)
        };
        self.remove(old);
        self.add(new);
    }

    fn add(&mut self, need: u8) {
        if let Some(at) = usize::from(need).checked_sub(1) {
            if at >= self.0.len() {
                self.0.resize(at + 1, 0);
            }
            self.0[at] += 1;
        }
    }

    fn remove(&mut self, need: u8) {
        if let Some(at) = usize::from(need).checked_sub(1) {
            self.0[at] -= 1;
            while self.0.last() == Some(&0) {
                self.0.pop();
            }
        }
    }
}

/// What one tenant uses of a domain.
#[derive(Clone, Debug, Default)]
struct TenantUse {
    /// By leases of scope `cpu`.
    cpu: PerKind,
    /// By threads and control groups, for each kind.
    threads: [Histogram; 2],
}

#[derive(Clone, Debug)]
struct Domain {
    cpus: CpuSet,
    /// How many demands of leases of scope `cpu` are confined to each union.
    held: Vec<u16>,
    /// The same of each thread, and of each control group that is in none.
    threads: Vec<Histogram>,
    groups: Forest,
    /// Counters that somebody who holds no lease has.
    outside: Vec<CounterSet>,
    tenants: BTreeMap<TenantId, TenantUse>,
}

impl Domain {
    /// One control group more that is in none needs so much at most, or no more.
    fn count_peak(&mut self, peak: &Peak, add: bool) {
        for (histogram, need) in self.threads.iter_mut().zip(peak.need) {
            histogram.count(need, add);
        }
        for (tenant, kinds) in &peak.tenants {
            let used = &mut self.tenants.entry(*tenant).or_default().threads;
            used[0].count(kinds.programmable, add);
            used[1].count(kinds.fixed, add);
        }
    }

    /// How many outsiders' counters are of a set.
    fn outsiders(&self, set: CounterSet) -> usize {
        let of = |outside: &&CounterSet| (**outside & !set).is_empty();
        self.outside.iter().filter(of).count()
    }
}

/// What a lease needs while one of its threads runs.
#[derive(Debug)]
pub(super) struct Share {
    pub(super) lease: LeaseId,
    pub(super) tenant: TenantId,
    pub(super) cpus: CpuSet,
    pub(super) demands: Vec<Demand>,
}

/// What is kept for tenants, and what they may have at most.
#[derive(Clone, Debug, Default)]
pub(super) struct Rules {
    minima: Vec<(TenantId, Minimum, Option<CpuSet>)>,
    maxima: Vec<PerKind>,
}

impl Rules {
    pub(super) fn of(policy: &HostPolicy) -> Self {
        let minima = policy.all();
        let minima = minima.filter(|(_, tenant)| tenant.minimum != Minimum::default());
        Rules {
            minima: minima
                .map(|(id, tenant)| (id, tenant.minimum, tenant.cpus.clone()))
                .collect(),
            maxima: policy.tenants.iter().map(|tenant| tenant.maximum).collect(),
        }
    }

    fn maximum(&self, tenant: TenantId) -> Option<PerKind> {
        self.maxima.get(usize::from(tenant.0)).copied()
    }

    /// Minima are for counters of the first PMU.
    fn minima(&self, pmu: PmuId, cpus: &CpuSet) -> impl Iterator<Item = (TenantId, Minimum)> {
        let here = move |on: &Option<CpuSet>| {
            pmu == PmuId(0) && on.as_ref().is_none_or(|on| on.meets(cpus))
        };
        let minima = self.minima.iter().filter(move |(_, _, on)| here(on));
        minima.map(|&(tenant, minimum, _)| (tenant, minimum))
    }
}

/// Where counters are not enough.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shortage {
    place: Place,
    reason: Short,
}

#[derive(Clone, Copy, Debug)]
enum Short {
    Union { union: usize, need: u8 },
    Maximum { most: u8 },
    Beyond(Beyond),
}

impl Shortage {
    pub(super) fn place(&self) -> Place {
        self.place
    }
}

#[derive(Clone, Debug)]
pub(super) struct Pool {
    pmu: PmuId,
    counters: CounterSet,
    for_threads: bool,
    /// Unions of the sets that were asked for; the whole kinds come first.
    unions: Vec<CounterSet>,
    domains: Vec<Domain>,
    /// The CPUs that it counts on.
    cpus: CpuSet,
    /// The domain of each of them, by the number of the CPU: each decision asks for that of
    /// each CPU several times.
    by_cpu: Vec<u32>,
}

impl Pool {
    pub(super) fn new(id: PmuId, pmu: &HostPmu) -> Self {
        let cpus: CpuSet = pmu.domains.iter().flat_map(CpuSet::iter).collect();
        let mut by_cpu = Vec::new();
        for (index, cpus) in (0u32..).zip(&pmu.domains) {
            for cpu in cpus.iter() {
                let at = cpu as usize;
                by_cpu.resize(by_cpu.len().max(at + 1), 0);
                by_cpu[at] = index;
            }
        }
        let unions = whole_kinds(pmu.counters);
        let domain = |cpus: &CpuSet| Domain {
            cpus: cpus.clone(),
            held: vec![0; unions.len()],
            threads: vec![Histogram::default(); unions.len()],
            groups: Forest::default(),
            outside: Vec::new(),
            tenants: BTreeMap::new(),
        };
        Pool {
            pmu: id,
            counters: pmu.counters,
            for_threads: pmu.for_threads,
            domains: pmu.domains.iter().map(domain).collect(),
            unions,
            cpus,
            by_cpu,
        }
    }

    pub(super) fn cpus(&self) -> &CpuSet {
        &self.cpus
    }

    pub(super) fn is_for_threads(&self) -> bool {
        self.for_threads
    }

    pub(super) fn has_domain(&self, domain: u32) -> bool {
        (domain as usize) < self.domains.len()
    }

    /// The domain of a CPU that the PMU counts on.
    pub(super) fn domain_of(&self, cpu: u32) -> Option<u32> {
        let domain = self.by_cpu.get(cpu as usize);
        domain.copied().filter(|_| self.cpus.contains(cpu))
    }

    pub(super) fn cpus_of(&self, domain: u32) -> &CpuSet {
        &self.domain(domain).cpus
    }

    pub(super) fn outside(&self, domain: u32) -> &[CounterSet] {
        &self.domain(domain).outside
    }

    pub(super) fn set_outside(&mut self, domain: u32, outside: Vec<CounterSet>) {
        self.domains[domain as usize].outside = outside;
    }

    fn domain(&self, domain: u32) -> &Domain {
        &self.domains[domain as usize]
    }

    /// Adds the places at which it has counters for `cpus`, in order.
    pub(super) fn add_places(&self, cpus: &CpuSet, places: &mut Vec<Place>) {
        let from = places.len();
        for domain in cpus.iter().filter_map(|cpu| self.domain_of(cpu)) {
            let pmu = self.pmu;
            let place = Place { pmu, domain };
            // CPUs of one domain are often neighbours, but not always.
            if places.last() != Some(&place) {
                places.push(place);
            }
        }
        if !places[from..].is_sorted_by(|one, next| one < next) {
            places[from..].sort_unstable();
            places.dedup();
        }
    }

    /// Whether somebody can ask for any one of `set`: they are there, and of one kind.
    pub(super) fn has(&self, set: CounterSet) -> bool {
        let mixed = !(set & PROGRAMMABLE).is_empty() && !(set & FIXED).is_empty();
        (set & !self.counters).is_empty() && !mixed && !set.is_empty()
    }

    /// Adds a set, and its unions with those that it meets. Returns whether it was not
    /// known, or `None` if there would be too many.
    pub(super) fn learn(&mut self, set: CounterSet) -> Option<bool> {
        if self.unions.contains(&set) {
            return Some(false);
        }
        let mut unions = self.unions.clone();
        let mut new = vec![set];
        for &known in &self.unions {
            for at in 0..new.len() {
                if !(known & new[at]).is_empty() {
                    new.push(known | new[at]);
                }
            }
            new.sort_unstable_by_key(|set| set.bits());
            new.dedup();
        }
        new.retain(|set| !self.unions.contains(set));
        unions.extend(new);
        if unions.len() > MOST_UNIONS {
            return None;
        }
        self.unions = unions;
        Some(true)
    }

    /// Forgets which sets were asked for.
    pub(super) fn forget(&mut self) {
        self.unions = whole_kinds(self.counters);
    }

    /// Forgets what leases hold.
    pub(super) fn clear(&mut self) {
        let unions = self.unions.len();
        for domain in &mut self.domains {
            domain.held = vec![0; unions];
            domain.threads = vec![Histogram::default(); unions];
            domain.groups = Forest::default();
            domain.tenants.clear();
        }
    }

    fn need(&self, demands: &[Demand]) -> Need {
        let mut need = [0; MOST_UNIONS];
        for demand in demands.iter().filter(|demand| demand.pmu == self.pmu) {
            for (need, &union) in need.iter_mut().zip(&self.unions) {
                *need += u8::from((demand.counters & !union).is_empty());
            }
        }
        need
    }

    /// How many counters of each kind are asked for.
    fn kinds(&self, demands: &[Demand]) -> PerKind {
        let mut kinds = PerKind::default();
        for demand in demands.iter().filter(|demand| demand.pmu == self.pmu) {
            if (demand.counters & FIXED).is_empty() {
                kinds.programmable += 1;
            } else {
                kinds.fixed += 1;
            }
        }
        kinds
    }

    /// What demands take of what a group above has.
    fn takes(&self, demands: &[Demand]) -> Takes {
        Takes {
            kinds: self.kinds(demands),
            sets: self.unions_that(demands, |set, union| set == union),
        }
    }

    /// The unions of which that is so for the set of some demand.
    fn unions_that(
        &self,
        demands: &[Demand],
        is_so: impl Fn(CounterSet, CounterSet) -> bool,
    ) -> Unions {
        let sets = demands.iter().filter(|demand| demand.pmu == self.pmu);
        let unions = self.unions.iter().enumerate();
        let those = unions.filter(|(_, union)| {
            let mut sets = sets.clone().map(|demand| demand.counters);
            sets.any(|set| is_so(set, **union))
        });
        those.fold(0, |all, (at, _)| all | 1 << at)
    }

    /// A lease of scope `cpu` has `demands` at its places, or has them no more.
    pub(super) fn change_cpus(
        &mut self,
        tenant: TenantId,
        demands: &[Demand],
        places: &[Place],
        add: bool,
    ) {
        let need = self.need(demands);
        let kinds = self.kinds(demands);
        let change = |old: u8, by: u8| {
            if add {
                old.saturating_add(by)
            } else {
                old - by
            }
        };
        for place in places {
            let domain = &mut self.domains[place.domain as usize];
            for (held, need) in domain.held.iter_mut().zip(need) {
                let need = u16::from(need);
                *held = if add { *held + need } else { *held - need };
            }
            let cpu = &mut domain.tenants.entry(tenant).or_default().cpu;
            cpu.programmable = change(cpu.programmable, kinds.programmable);
            cpu.fixed = change(cpu.fixed, kinds.fixed);
        }
    }

    /// One thread has `share` beside its `others`, or has it no more: at the places of it.
    pub(super) fn change_thread(
        &mut self,
        places: &[Place],
        others: &[Arc<Share>],
        share: &Share,
        add: bool,
    ) {
        let of = |share: &Share| (self.need(&share.demands), self.kinds(&share.demands));
        let (own, own_kinds) = of(share);
        let others: Vec<_> = others.iter().map(|other| (other, of(other))).collect();
        let unions = self.unions.len();
        for place in places {
            let domain = &mut self.domains[place.domain as usize];
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
            for (union, histogram) in domain.threads.iter_mut().enumerate() {
                histogram.change(before[union], own[union], add);
            }
            let used = &mut domain.tenants.entry(share.tenant).or_default().threads;
            used[0].change(of_tenant.programmable, own_kinds.programmable, add);
            used[1].change(of_tenant.fixed, own_kinds.fixed, add);
        }
    }

    /// A lease of a control group has what it holds at its places, or has it no more.
    pub(super) fn change_group(
        &mut self,
        holding: Holding<'_>,
        nest: Nest<'_>,
        places: &[Place],
        add: bool,
    ) {
        let share = GroupShare {
            lease: holding.lease,
            tenant: holding.tenant,
            need: self.need(holding.demands()),
            takes: self.takes(holding.demands()),
            meets: self.unions_that(holding.demands(), |set, union| !(set & union).is_empty()),
        };
        for place in places {
            let domain = &mut self.domains[place.domain as usize];
            let (before, after) = domain.groups.change(nest, share, add);
            before
                .iter()
                .for_each(|peak| domain.count_peak(peak, false));
            after.iter().for_each(|peak| domain.count_peak(peak, true));
        }
    }

    /// Where the leases of a control group, and of those that it is in, are together more than
    /// one above has in a domain.
    pub(super) fn beyond(&self, domain: u32, nest: Nest<'_>) -> Option<Beyond> {
        self.domain(domain).groups.beyond(nest)
    }

    /// Whether a lease of a control group in others, that held this instead of what it does,
    /// would have more than one of those: then it need not be tried.
    pub(super) fn would_be_beyond(
        &self,
        holding: Holding<'_>,
        to: usize,
        nest: Nest<'_>,
        places: &[Place],
    ) -> Result<(), Shortage> {
        let more = self.takes(
            holding
                .terms
                .demands
                .get(holding.holds..to)
                .unwrap_or_default(),
        );
        let beyond = |place: &Place| {
            let beyond = self
                .domain(place.domain)
                .groups
                .would_be_beyond(nest, more)?;
            let reason = Short::Beyond(beyond);
            Some(Shortage {
                place: *place,
                reason,
            })
        };
        places.iter().find_map(beyond).map_or(Ok(()), Err)
    }

    /// Whether what is held at `places` is possible, where a lease has its part of it: `within`
    /// is where it is in control groups with leases, if it is in one.
    pub(super) fn check(
        &self,
        holding: Holding<'_>,
        within: &[Nest<'_>],
        places: &[Place],
        rules: &Rules,
    ) -> Result<(), Shortage> {
        let tenant = holding.tenant;
        let need = self.need(holding.demands());
        for &place in places {
            let mut within = within.iter();
            if let Some(beyond) = within.find_map(|nest| self.beyond(place.domain, *nest)) {
                let reason = Short::Beyond(beyond);
                return Err(Shortage { place, reason });
            }
            if let Some(most) = self.above_maximum(place.domain, tenant, rules) {
                let reason = Short::Maximum { most };
                return Err(Shortage { place, reason });
            }
            for (union, &need) in need.iter().enumerate().take(self.unions.len()) {
                if need > 0 {
                    let free = self.free(place.domain, union);
                    if free < self.kept(place.domain, union, rules, None) {
                        let reason = Short::Union { union, need };
                        return Err(Shortage { place, reason });
                    }
                }
            }
        }
        Ok(())
    }

    /// The maximum that a tenant is above in a domain.
    fn above_maximum(&self, domain: u32, tenant: TenantId, rules: &Rules) -> Option<u8> {
        let most = rules.maximum(tenant)?;
        let used = self.domain(domain).tenants.get(&tenant)?;
        let of_kinds = [
            (used.cpu.programmable, &used.threads[0], most.programmable),
            (used.cpu.fixed, &used.threads[1], most.fixed),
        ];
        of_kinds.into_iter().find_map(|(cpu, threads, most)| {
            let above = u32::from(cpu) + threads.most() > u32::from(most);
            (most != u8::MAX && above).then_some(most)
        })
    }

    /// How many counters of a union nobody has, whatever is kept for tenants; negative where
    /// there are too few.
    fn free(&self, domain: u32, union: usize) -> i64 {
        let domain = self.domain(domain);
        let set = self.unions[union];
        i64::from(set.len())
            - i64::from(domain.held[union])
            - i64::from(domain.threads[union].most())
            - i64::try_from(domain.outsiders(set)).unwrap_or(i64::MAX)
    }

    /// How many more counters of a union are kept for one tenant, or for all.
    fn kept(&self, domain: u32, union: usize, rules: &Rules, only: Option<TenantId>) -> i64 {
        let domain = self.domain(domain);
        let set = self.unions[union];
        let has_all =
            |kind: CounterSet| (self.counters & kind & !set).is_empty() && !(set & kind).is_empty();
        let (programmable, fixed) = (has_all(PROGRAMMABLE), has_all(FIXED));
        let threads = domain.threads[union].most();
        let (mut for_cpus, mut for_threads) = (0, threads);
        for (tenant, minimum) in rules.minima(self.pmu, &domain.cpus) {
            if only.is_some_and(|only| only != tenant) {
                continue;
            }
            let used = domain.tenants.get(&tenant);
            let used = used.map(|used| used.cpu).unwrap_or_default();
            let mut thread = 0;
            if programmable {
                for_cpus += u32::from(minimum.cpu.programmable.saturating_sub(used.programmable));
                thread += u32::from(minimum.thread.programmable);
            }
            if fixed {
                for_cpus += u32::from(minimum.cpu.fixed.saturating_sub(used.fixed));
                thread += u32::from(minimum.thread.fixed);
            }
            for_threads = for_threads.max(thread);
        }
        i64::from(for_cpus) + i64::from(for_threads - threads)
    }

    /// Why there are too few. `holders` says who holds counters of a set there.
    pub(super) fn reason(
        &self,
        shortage: Shortage,
        rules: &Rules,
        holders: impl FnOnce(CounterSet) -> Vec<LeaseId>,
    ) -> Refusal {
        let domain = shortage.place.domain;
        let cpu = self.cpus_of(domain).iter().next().unwrap_or_default();
        let (union, need) = match shortage.reason {
            Short::Maximum { most } => return Refusal::OverMaximum { cpu, most },
            Short::Beyond(Beyond { above }) => return Refusal::BeyondGroup { cpu, above },
            Short::Union { union, need } => (union, need),
        };
        let set = self.unions[union];
        if u32::from(need) > set.len() {
            return Refusal::MoreThanThereIs {
                pmu: self.pmu,
                cpu,
                asked: u32::from(need),
                there: set.len(),
            };
        }
        let outside = self.domain(domain).outsiders(set);
        let by = holders(set);
        if outside > 0 && by.is_empty() {
            let counters = u32::try_from(outside).unwrap_or(u32::MAX);
            return Refusal::Outside { cpu, counters };
        }
        if self.free(domain, union) >= i64::from(need) {
            let keeps = |tenant: &TenantId| self.kept(domain, union, rules, Some(*tenant)) > 0;
            let minima = rules.minima(self.pmu, self.cpus_of(domain));
            if let Some(tenant) = minima.map(|(tenant, _)| tenant).find(keeps) {
                return Refusal::Kept { cpu, tenant };
            }
        }
        Refusal::Held { cpu, by }
    }

    /// A set of which leases hold more in a domain than is left beside outsiders.
    pub(super) fn overdrawn(&self, domain: u32) -> Option<CounterSet> {
        let mut unions = 0..self.unions.len();
        let short = unions.find(|&union| self.free(domain, union) < 0)?;
        Some(self.unions[short])
    }

    /// Whether so much could be had if nobody had anything, by somebody who may hold
    /// `most`.
    pub(super) fn could_give(
        &self,
        demands: &[Demand],
        cpus: &CpuSet,
        most: PerKind,
    ) -> Result<(), Refusal> {
        let pmu = self.pmu;
        let asked = self.kinds(demands);
        if asked == PerKind::default() {
            return Ok(());
        }
        if let Some(cpu) = cpus.first_beyond(&self.cpus) {
            return Err(Refusal::NotOnCpu { pmu, cpu });
        }
        let cpu = cpus.iter().next().unwrap_or_default();
        for (&union, need) in self.unions.iter().zip(self.need(demands)) {
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
        Ok(())
    }

    /// Whether two sets of CPUs share counters.
    pub(super) fn meet(&self, one: &CpuSet, other: &CpuSet) -> bool {
        let shared = |domain: &Domain| domain.cpus.meets(one) && domain.cpus.meets(other);
        one.meets(other) || !self.for_threads && self.domains.iter().any(shared)
    }

    /// What leases hold of a domain at most at a time, by kind.
    pub(super) fn leased(&self, domain: u32) -> PerKind {
        let domain = self.domain(domain);
        let mut leased = PerKind::default();
        for (union, set) in self.unions.iter().enumerate() {
            let held = u32::from(domain.held[union]) + domain.threads[union].most();
            let held = u8::try_from(held).unwrap_or(u8::MAX);
            if *set == (self.counters & PROGRAMMABLE) {
                leased.programmable = held;
            } else if *set == (self.counters & FIXED) {
                leased.fixed = held;
            }
        }
        leased
    }
}

/// Whether two sets, each of one kind, are of the same.
pub(super) fn are_of_one_kind(one: CounterSet, other: CounterSet) -> bool {
    (one & FIXED).is_empty() == (other & FIXED).is_empty()
}

/// All counters of each kind that there is.
pub(crate) fn whole_kinds(counters: CounterSet) -> Vec<CounterSet> {
    let kinds = [counters & PROGRAMMABLE, counters & FIXED];
    kinds.into_iter().filter(|kind| !kind.is_empty()).collect()
}
