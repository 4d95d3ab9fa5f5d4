//! Counters that an arbiter loses, and how it finds out.

use arbiter::guest::{ArbiterError, DeniedAccess, FullMaster};
use arbiter::{Policy, Share};

use super::machine::{Kind, PMC0, PMC1, Port, Shape, set};

const LEASE_MS: u32 = 50;

fn port() -> Port {
    let mut policy = Policy::default();
    policy.kernel = Share {
        lease_ms: Some(LEASE_MS),
        ..policy.kernel
    };
    Port::kernel(&Shape {
        policy,
        ..Shape::new(3, 2, 0)
    })
}

#[test]
fn a_lost_counter_is_given_back_everywhere() {
    for kind in [
        Kind::Enforcing(DeniedAccess::Drop),
        Kind::Full(DeniedAccess::Drop),
    ] {
        let port = port();
        let mut master = kind.claim(&port);
        port.pass(1, u64::from(LEASE_MS));
        let lost = ArbiterError::Lost {
            counter: PMC0,
            cpu: 1,
        };
        assert_eq!(master.reserve_perfctr(PMC0), Err(lost), "{kind:?}");
        assert_eq!(master.counters(), set(&[PMC1]));
        let unavailable = Err(ArbiterError::Unavailable(PMC0));
        assert_eq!(master.reserve_perfctr(PMC0), unavailable);
        for (cpu, held) in [(0, &[PMC1][..]), (1, &[]), (2, &[PMC1])] {
            assert_eq!(port.held(cpu), set(held), "CPU {cpu}");
        }
        master.release_evntsel(PMC0);
        master.release_perfctr(PMC1);
        assert!(master.counters().is_empty(), "the release has found out");
        assert!(port.is_pristine());
    }
}

#[test]
fn a_renewed_lease_goes_on() {
    for kind in Kind::ALL {
        let port = port();
        let mut master = kind.claim(&port);
        for _ in 0..5 {
            for cpu in 0..3 {
                port.pass(cpu, u64::from(LEASE_MS) / 5);
            }
            assert_eq!(master.renew(PMC0), Ok(()), "{kind:?}");
        }
        assert_eq!(port.held(0), set(&[PMC0]));
        let lost = ArbiterError::Lost {
            counter: PMC1,
            cpu: 0,
        };
        assert_eq!(master.renew(PMC1), Err(lost));
        assert_eq!(master.counters(), set(&[PMC0]));
    }
}

#[test]
fn a_private_counter_can_be_lost() {
    let port = port();
    let mut master =
        FullMaster::claim(port.clone(), port.discovery(), DeniedAccess::Drop).expect("a kernel");
    let held = master.acquire(set(&[PMC1])).expect("free");
    port.pass(2, u64::from(LEASE_MS));
    let lost = ArbiterError::Lost {
        counter: PMC1,
        cpu: 2,
    };
    assert_eq!(master.give_up(held), Err(lost));
    assert_eq!(master.give_up(held), Err(ArbiterError::NotYours(PMC1)));
    let acquired = master.acquire(set(&[PMC0, PMC1]));
    assert!(matches!(
        acquired,
        Err(ArbiterError::Lost { counter: PMC0, .. })
    ));
    assert_eq!(
        master.acquire(set(&[PMC0, PMC1])),
        Err(ArbiterError::NoneFree)
    );
    assert!(port.is_pristine());
}
