//! Who has counters and no lease: what was seen of them, and what is shown. Pure.

use crate::budget::{Holder, Holders};
use arbiter::{CounterSet, PerKind};
use arbiter_host::{HostArbiter, OutsiderKind, Place, Scope};
use umpire_lease as wire;

use super::barred::Takers;
use super::shown::Viewer;
use crate::probe::{Outside, Seen};

/// What is known of others beside that: who has taken counters, and whether the NMI watchdog
/// has a lease.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beside<'a> {
    pub(super) arbiter: &'a HostArbiter,
    pub(super) takers: &'a Takers,
    pub(super) watchdog_has_lease: bool,
}

#[derive(Debug, Default)]
pub(super) struct Outsiders {
    /// What they have, as it was measured.
    outside: Outside,
    /// Who has counters and no lease, as far as the kernel shows.
    holders: Option<Holders>,
}

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

impl Outsiders {
    pub(super) fn set_holders(&mut self, holders: Option<Holders>) {
        self.holders = holders;
    }

    pub(super) fn holders(&self) -> Option<&Holders> {
        self.holders.as_ref()
    }

    /// What a look saw before is of other CPUs.
    pub(super) fn look_anew(&mut self) {
        self.outside.look_anew();
    }

    /// What they have of a place, as it was measured.
    pub(super) fn measured(&self, place: Place) -> &[CounterSet] {
        self.outside.of(place)
    }

    /// Takes over what was seen of a place. Whether anything was.
    pub(super) fn see(&mut self, seen: &Seen, beside: Beside<'_>) -> bool {
        let place = seen.place;
        let arbiter = beside.arbiter;
        let Some(pmu) = arbiter.pmus().get(usize::from(place.pmu.0)) else {
            return false;
        };
        let unused = self.unused(arbiter, place);
        let leased = arbiter.leased(place);
        let leased = PerKind {
            programmable: leased.programmable.saturating_sub(unused.programmable),
            fixed: leased.fixed.saturating_sub(unused.fixed),
        };
        let may_be_any = seen.free == Some(0) && self.may_be_any(beside);
        self.outside.see(seen, pmu.counters, leased, may_be_any)
    }

    /// Whether somebody may have counters who has no lease, as far as anybody knows.
    fn may_be_any(&self, beside: Beside<'_>) -> bool {
        self.holders.is_none() || !self.all(beside, None).is_empty()
    }

    /// What leases of scope `cpu` hold of a place whose holders have no perf event open, nor
    /// the registers: surely they use none of it. Nothing where processes are hidden.
    fn unused(&self, arbiter: &HostArbiter, place: Place) -> PerKind {
        let mut unused = PerKind::default();
        let holders = self.holders.as_ref().filter(|holders| holders.hidden == 0);
        let Some(holders) = holders else {
            return unused;
        };
        let pmu = &arbiter.pmus()[usize::from(place.pmu.0)];
        let domain = usize::try_from(place.domain).ok();
        let Some(cpus) = domain.and_then(|domain| pmu.domains.get(domain)) else {
            return unused;
        };
        for lease in arbiter.leases() {
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

    /// All of them, or those of one CPU.
    pub(super) fn all(&self, beside: Beside<'_>, only: Option<u32>) -> Vec<wire::Outsider> {
        let found = self.holders.iter().flat_map(|holders| &holders.found);
        let shown = found.filter_map(|holder| of_kernel(holder, beside, only));
        let mut outsiders: Vec<wire::Outsider> = shown.collect();
        for ((uid, pid), (events, cpus)) in beside.takers {
            if outsiders.iter().any(|known| known.pid == Some(*pid)) {
                continue;
            }
            outsiders.push(wire::Outsider {
                what: OutsiderKind::Process,
                name: format!("of user {uid}, after its lease had ended"),
                pid: Some(*pid),
                uid: Some(*uid),
                events: Some(*events),
                cpus: Some(cpus.to_string()),
            });
        }
        let hidden = self.holders.as_ref().map(|holders| holders.hidden);
        if let Some(hidden) = hidden.filter(|hidden| *hidden > 0) {
            outsiders.push(wire::Outsider {
                what: OutsiderKind::Hidden,
                name: format!("{hidden} processes that the arbiter may not look at"),
                ..wire::Outsider::default()
            });
        }
        outsiders
    }
}

/// One that the kernel shows; `None`: a lease accounts for it, or it is on other CPUs.
fn of_kernel(holder: &Holder, beside: Beside<'_>, only: Option<u32>) -> Option<wire::Outsider> {
    match holder {
        Holder::NmiWatchdog { cpus } => {
            let here = only.is_none_or(|cpu| cpus.contains(cpu));
            (here && !beside.watchdog_has_lease).then(|| wire::Outsider {
                what: OutsiderKind::NmiWatchdog,
                name: "the kernel's NMI watchdog".to_owned(),
                cpus: Some(cpus.to_string()),
                ..wire::Outsider::default()
            })
        }
        Holder::Process {
            pid,
            uid,
            comm,
            events,
            msr_cpus,
            ..
        } => {
            // Who has asked for a control group's has ended, mostly, and its number is anybody's.
            let leases = beside.arbiter.leases();
            let mut held = leases.filter(|lease| lease.terms.scope.group().is_none());
            let ours = held.any(|lease| is_of(holder, lease.owner.pid));
            (!ours).then(|| wire::Outsider {
                what: OutsiderKind::Process,
                name: comm.clone(),
                pid: Some(*pid),
                uid: Some(*uid),
                events: Some(*events),
                cpus: (!msr_cpus.is_empty()).then(|| msr_cpus.to_string()),
            })
        }
    }
}

/// As far as `viewer` may know them: of other users there is their number.
pub(super) fn shown(
    all: impl Iterator<Item = wire::Outsider>,
    viewer: Viewer,
) -> Vec<wire::Outsider> {
    let mut shown = Vec::new();
    let (mut others, mut of_others) = (0, 0);
    for outsider in all {
        match outsider.uid {
            Some(uid) if !viewer.knows(uid) => {
                others += u32::from(outsider.what == OutsiderKind::Process);
                of_others += outsider.events.unwrap_or(0);
            }
            _ => shown.push(outsider),
        }
    }
    if others > 0 {
        shown.push(wire::Outsider {
            what: OutsiderKind::Process,
            name: format!("{others} processes of other users"),
            events: Some(of_others),
            ..wire::Outsider::default()
        });
    }
    shown
}
