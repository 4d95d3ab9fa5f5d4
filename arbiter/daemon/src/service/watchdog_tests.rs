//! For which CPUs the NMI watchdog has a lease.

use arbiter_host::{CpuSet, HostArbiter};

use super::*;
use crate::config::ArbiterConfig;

/// A host of four CPUs with two counters each, whose watchdog nobody takes.
fn service() -> Service {
    let text = "[[pmu]]\nprogrammable = 2\nperf-type = 1\ncpus = \"0-3\"\n\
                [watchdog]\nkeep = true\n";
    let config = ArbiterConfig::parse("test".as_ref(), text).expect("a configuration");
    let config = config.with_watchdog().expect("a tenant for it");
    let pmus = config.host_pmus(&CpuSet::from_iter(0..4));
    let arbiter = HostArbiter::new(pmus, config.policy.clone()).expect("the policy fits");
    Service::new(arbiter, config)
}

#[test]
fn the_watchdog_has_a_lease_for_the_cpus_that_it_watches() {
    let mut service = service();
    let look = |service: &mut Service, cpus: &[u32]| -> Vec<u32> {
        let cpus = CpuSet::from_iter(cpus.iter().copied());
        service.set_watchdog((!cpus.is_empty()).then_some(cpus), BootTime(1));
        let leases: Vec<_> = service.arbiter().leases().collect();
        assert!(leases.len() <= 1, "{leases:?}");
        let of = |lease: &&Lease| lease.terms.cpus.iter().collect();
        leases.first().map(of).unwrap_or_default()
    };
    assert_eq!(look(&mut service, &[0, 1, 2, 3]), [0, 1, 2, 3]);
    // Somebody has written another kernel.watchdog_cpumask.
    assert_eq!(look(&mut service, &[0, 2]), [0, 2]);
    assert_eq!(look(&mut service, &[0, 1]), [0, 1]);
    // A CPU that goes offline may come back.
    service.set_online(&CpuSet::from_iter([0]), BootTime(2));
    assert_eq!(look(&mut service, &[0, 1]), [0, 1]);
    assert_eq!(look(&mut service, &[0]), [0]);
    assert_eq!(look(&mut service, &[]), [] as [u32; 0]);
}
