//! Hosts, tenants and terms for tests.

use arbiter::{CounterSet, Nanos, PerKind};
use arbiter_host::{
    BootTime, Caller, Change, CpuSet, Demand, Group, GroupId, HostArbiter, HostPmu, HostPolicy,
    Minimum, Outcome, Owner, Part, PmuId, Refusal, Scope, Tenant, TenantId, Terms, ThreadId, Waits,
};

pub(crate) const CORE: PmuId = PmuId(0);
pub(crate) const UNCORE: PmuId = PmuId(1);
pub(crate) const MS: u64 = 1_000_000;

pub(crate) fn cpus(text: &str) -> CpuSet {
    text.parse().expect("a list of CPUs")
}

pub(crate) fn at_ms(ms: u64) -> BootTime {
    BootTime(ms * MS)
}

/// Four CPUs with 3 programmable and 2 fixed-function counters each, and an uncore PMU
/// with 2 counters for each two CPUs.
pub(crate) fn pmus() -> Vec<HostPmu> {
    vec![
        HostPmu {
            name: "cpu".into(),
            counters: CounterSet::first(3, 2),
            domains: (0..4).map(|cpu| CpuSet::from_iter([cpu])).collect(),
            for_threads: true,
        },
        HostPmu {
            name: "uncore".into(),
            counters: CounterSet::first(2, 0),
            domains: vec![cpus("0-1"), cpus("2-3")],
            for_threads: false,
        },
    ]
}

/// Tenants `a` and `b` that may do everything; `b` has twice the share. `kept` has a
/// minimum of each scope, and a maximum.
pub(crate) fn policy() -> HostPolicy {
    let open = |name: &str| Tenant {
        priority: 9,
        ..Tenant::open(name)
    };
    let one = PerKind {
        programmable: 1,
        fixed: 0,
    };
    HostPolicy {
        tenants: vec![
            open("a"),
            Tenant {
                share: 2,
                ..open("b")
            },
            Tenant {
                minimum: Minimum {
                    cpu: one,
                    thread: one,
                },
                maximum: PerKind {
                    programmable: 2,
                    fixed: 1,
                },
                ..open("kept")
            },
        ],
        ..HostPolicy::default()
    }
}

/// The same without the tenant that has a minimum.
pub(crate) fn open_policy() -> HostPolicy {
    let mut policy = policy();
    policy.tenants.pop();
    policy
}

pub(crate) fn caller(tenant: u16) -> Caller {
    Caller {
        tenant: TenantId(tenant),
        uid: 1000 + u32::from(tenant),
        operator: false,
    }
}

pub(crate) fn owner(tenant: u16) -> Owner {
    Owner {
        tenant: TenantId(tenant),
        uid: caller(tenant).uid,
        pid: 1,
        label: format!("of {tenant}"),
        by: None,
    }
}

pub(crate) fn programmable(count: usize) -> Vec<Demand> {
    vec![
        Demand {
            pmu: CORE,
            counters: CounterSet::first(3, 0)
        };
        count
    ]
}

/// A guaranteed lease of whole CPUs that nobody can preempt.
pub(crate) fn terms(demands: Vec<Demand>, on: &str) -> Terms {
    Terms {
        at_least: demands.len(),
        demands,
        cpus: cpus(on),
        scope: Scope::Cpu,
        guaranteed: true,
        priority: 0,
        preemptible: false,
        lasts: None,
        waits: Waits::No,
    }
}

pub(crate) fn of_threads(threads: &[u32]) -> Scope {
    Scope::Thread(threads.iter().map(|number| thread(*number, 0)).collect())
}

/// The groups above each of 1 to 6: two trees, one of them three deep.
const ABOVE: [&[u64]; 6] = [&[], &[1], &[1, 2], &[1], &[], &[5]];

/// One of the groups 1 to 6.
pub(crate) fn of_group(id: u64) -> Scope {
    let above = ABOVE[usize::try_from(id).expect("a small number") - 1];
    let group = Group {
        id: GroupId(id),
        above: above.iter().copied().map(GroupId).collect(),
        path: format!("/{id}"),
    };
    Scope::Group(group.into())
}

/// For threads in one of these groups, or for all that the first of them has others run there.
pub(crate) fn of_part(id: u64, threads: &[u32], with_others: bool) -> Scope {
    let group = of_group(id);
    let threads = threads.iter().map(|number| thread(*number, 0));
    Scope::Part(Box::new(Part {
        of: group.group().expect("it is one").clone(),
        threads: threads.collect(),
        with_others,
    }))
}

pub(crate) fn thread(number: u32, started: u64) -> ThreadId {
    ThreadId { number, started }
}

/// An arbiter, and the time.
pub(crate) struct Host {
    pub(crate) arbiter: HostArbiter,
    pub(crate) now: BootTime,
    pub(crate) out: Vec<Change>,
}

impl Host {
    pub(crate) fn new(policy: HostPolicy) -> Self {
        let arbiter = HostArbiter::new(pmus(), policy).expect("the policy fits");
        Host {
            arbiter,
            now: BootTime(0),
            out: Vec::new(),
        }
    }

    pub(crate) fn ask(&mut self, tenant: u16, terms: Terms) -> Result<Outcome, Refusal> {
        self.arbiter
            .request(owner(tenant), terms, self.now, &mut self.out)
    }

    /// The lease that is granted at once.
    pub(crate) fn granted(&mut self, tenant: u16, terms: Terms) -> arbiter_host::LeaseId {
        match self.ask(tenant, terms) {
            Ok(Outcome::Granted { lease, .. }) => lease,
            other => panic!("not granted: {other:?}"),
        }
    }

    /// The lease that waits.
    pub(crate) fn waiting(&mut self, tenant: u16, terms: Terms) -> arbiter_host::LeaseId {
        match self.ask(
            tenant,
            Terms {
                waits: Waits::Always,
                ..terms
            },
        ) {
            Ok(Outcome::Waits { lease, .. }) => lease,
            other => panic!("does not wait: {other:?}"),
        }
    }

    pub(crate) fn release(&mut self, tenant: u16, lease: arbiter_host::LeaseId) {
        self.arbiter
            .release(lease, 0, None, caller(tenant), self.now, &mut self.out)
            .expect("it is its own");
    }

    pub(crate) fn pass(&mut self, ms: u64) {
        self.now = self.now.after(Nanos(ms * MS));
        self.arbiter.advance(self.now, &mut self.out);
    }

    pub(crate) fn holds(&self, lease: arbiter_host::LeaseId) -> Option<usize> {
        self.arbiter.lease(lease).map(|lease| lease.holds)
    }

    pub(crate) fn changes(&mut self) -> Vec<Change> {
        core::mem::take(&mut self.out)
    }
}
