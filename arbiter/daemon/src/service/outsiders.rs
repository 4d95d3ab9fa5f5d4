//! Who has counters and no lease: what was seen of them, and what is shown.

use arbiter::PerKind;
use arbiter_host::{BootTime, CpuSet, HostPmu, Place, PmuId, Scope};
use umpire_budget::{Holder, Holders};
use umpire_lease as wire;

use super::Service;
use super::shown::Viewer;
use crate::probe::Seen;

/// Whether it is process `pid`, or one that it started.
fn is_of(holder: &Holder, pid: u32) -> bool {
    match holder {
        Holder::NmiWatchdog { .. } => false,
        Holder::Process {
            pid: this,
            ancestors,
            ..
        } => *this == pid || ancestors.contains(&pid),
    }
}

impl Service {
    /// Takes over what was seen of the counters.
    pub(crate) fn see(&mut self, places: &[Seen], holders: Option<Holders>, now: BootTime) {
        self.holders = holders;
        for seen in places {
            let place = seen.place;
            let Some(pmu) = self.arbiter.pmus().get(usize::from(place.pmu.0)) else {
                continue;
            };
            let unused = self.unused(place);
            let leased = self.arbiter.leased(place);
            let leased = PerKind {
                programmable: leased.programmable.saturating_sub(unused.programmable),
                fixed: leased.fixed.saturating_sub(unused.fixed),
            };
            let Some(now_outside) = seen.outside(pmu.counters, leased) else {
                continue;
            };
            // A lease may have come or gone between look and judgement: what two looks in a
            // row saw is there.
            let known = self.measured.get(&place).map_or(&[][..], Vec::as_slice);
            let less = now_outside.len() < known.len();
            let outside = if less && seen.free == Some(0) && self.may_be_outside() {
                // A holder has come, and found less than it holds. What it has now explains
                // no counter that outsiders had before, as long as none is free.
                known.to_vec()
            } else {
                let before = self
                    .seen
                    .insert(place, now_outside.clone())
                    .unwrap_or_default();
                if before.len() < now_outside.len() {
                    before
                } else {
                    now_outside
                }
            };
            self.measured.insert(place, outside);
            self.set_outside(place, now);
        }
        self.settle();
    }

    /// Whether somebody may have counters who has no lease, as far as anybody knows.
    fn may_be_outside(&self) -> bool {
        self.holders.is_none() || !self.all_outsiders(None).is_empty()
    }

    /// What leases of scope `cpu` hold of a place whose holders have no perf event open, nor
    /// the registers: surely they use none of it. Nothing where processes are hidden.
    fn unused(&self, place: Place) -> PerKind {
        let mut unused = PerKind::default();
        let holders = self.holders.as_ref().filter(|holders| holders.hidden == 0);
        let Some(holders) = holders else {
            return unused;
        };
        let pmu = &self.arbiter.pmus()[usize::from(place.pmu.0)];
        let domain = usize::try_from(place.domain).ok();
        let Some(cpus) = domain.and_then(|domain| pmu.domains.get(domain)) else {
            return unused;
        };
        for lease in self.arbiter.leases() {
            let whole = lease.terms.scope == Scope::Cpu && lease.owner.pid != 0;
            let holds = whole && lease.holds > 0 && lease.terms.cpus.meets(cpus);
            if !holds || holders.found.iter().any(|one| is_of(one, lease.owner.pid)) {
                continue;
            }
            let demands = lease.terms.demands.iter().take(lease.holds);
            for demand in demands.filter(|demand| demand.pmu == place.pmu) {
                if PerKind::count(demand.counters).fixed > 0 {
                    unused.fixed += 1;
                } else {
                    unused.programmable += 1;
                }
            }
        }
        unused
    }

    /// How many counters outsiders have of those that `cpus` share.
    pub(super) fn outside(&self, pmu: &HostPmu, cpus: &CpuSet) -> u32 {
        let index = self
            .arbiter
            .pmus()
            .iter()
            .position(|other| other.name == pmu.name);
        let index = index.and_then(|index| u16::try_from(index).ok()).map(PmuId);
        let place = index
            .zip(cpus.iter().next())
            .and_then(|(pmu, cpu)| self.arbiter.place(pmu, cpu));
        place.map_or(0, |place| {
            u32::try_from(self.arbiter.outside(place).len()).unwrap_or(u32::MAX)
        })
    }

    /// Who has counters, or may, without a lease: as far as the kernel shows, and as far as
    /// `viewer` may know.
    pub(super) fn outsiders(&self, only: Option<u32>, viewer: Viewer) -> Vec<wire::Outsider> {
        let mut shown = Vec::new();
        let (mut others, mut of_others) = (0, 0);
        for outsider in self.all_outsiders(only).into_iter().chain(self.barred()) {
            match outsider.uid {
                Some(uid) if !viewer.knows(uid) => {
                    others += u32::from(outsider.what == "process");
                    of_others += outsider.events.unwrap_or(0);
                }
                _ => shown.push(outsider),
            }
        }
        if others > 0 {
            shown.push(wire::Outsider {
                what: "process".to_owned(),
                name: format!("{others} processes of other users"),
                events: Some(of_others),
                ..wire::Outsider::default()
            });
        }
        shown
    }

    /// All of them.
    fn all_outsiders(&self, only: Option<u32>) -> Vec<wire::Outsider> {
        let found = self.holders.iter().flat_map(|holders| &holders.found);
        let ours = |one: &Holder| {
            let mut leases = self.arbiter.leases();
            leases.any(|lease| is_of(one, lease.owner.pid))
        };
        let shown = found.filter_map(|holder| match holder {
            Holder::NmiWatchdog { cpus } => (only.is_none_or(|cpu| cpus.contains(cpu))
                && !self.has_watchdog())
            .then(|| wire::Outsider {
                what: "nmi-watchdog".to_owned(),
                name: "the kernel's NMI watchdog".to_owned(),
                cpus: Some(cpus.to_string()),
                ..wire::Outsider::default()
            }),
            Holder::Process {
                pid,
                uid,
                comm,
                events,
                msr_cpus,
                ..
            } => (!ours(holder)).then(|| wire::Outsider {
                what: "process".to_owned(),
                name: comm.clone(),
                pid: Some(*pid),
                uid: Some(*uid),
                events: Some(*events),
                cpus: (!msr_cpus.is_empty()).then(|| msr_cpus.to_string()),
            }),
        });
        let mut outsiders: Vec<wire::Outsider> = shown.collect();
        for ((uid, pid), (events, cpus)) in self.takers() {
            if outsiders.iter().any(|known| known.pid == Some(pid)) {
                continue;
            }
            outsiders.push(wire::Outsider {
                what: "process".to_owned(),
                name: format!("of user {uid}, after its lease had ended"),
                pid: Some(pid),
                uid: Some(uid),
                events: Some(events),
                cpus: Some(cpus.to_string()),
            });
        }
        if let Some(hidden) = self
            .holders
            .as_ref()
            .map(|holders| holders.hidden)
            .filter(|hidden| *hidden > 0)
        {
            outsiders.push(wire::Outsider {
                what: "hidden".to_owned(),
                name: format!("{hidden} processes that the arbiter may not look at"),
                ..wire::Outsider::default()
            });
        }
        outsiders
    }
}
