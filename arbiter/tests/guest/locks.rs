//! The classic calls, and the lock that follows them.

use arbiter::guest::{ArbiterError, DeniedAccess, Part};
use arbiter::{Access, CounterId, Layer, Shared, Verdict};

use super::machine::{FIXED0, Kind, PMC0, PMC1, Port, Shape};

const CPUS: u32 = 3;

fn port() -> Port {
    Port::kernel(&Shape::new(CPUS as usize, 4, 2))
}

/// What legacy software of `layer` meets on every CPU.
fn check(port: &Port, layer: Layer, counter: CounterId, access: Access, expected: Verdict) {
    for cpu in 0..CPUS {
        let verdict = port.as_layer(layer).legacy(cpu, counter, access);
        assert_eq!(
            verdict,
            Some(expected),
            "{layer}: {access:?} of {counter} on CPU {cpu}"
        );
    }
}

#[test]
fn each_register_has_one_owner() {
    for kind in Kind::ALL {
        let mut master = kind.claim(&port());
        for counter in [PMC0, CounterId::Programmable(3), FIXED0] {
            let in_use = Err(ArbiterError::InUse(counter));
            assert_eq!(master.reserve_perfctr(counter), Ok(()), "{kind:?}");
            assert_eq!(master.reserve_perfctr(counter), in_use);
            assert_eq!(master.reserve_evntsel(counter), Ok(()));
            assert_eq!(master.reserve_evntsel(counter), in_use);
            master.release_perfctr(counter);
            assert_eq!(master.reserve_evntsel(counter), in_use);
            assert_eq!(master.reserve_perfctr(counter), Ok(()));
        }
        for absent in [
            CounterId::Programmable(4),
            CounterId::Programmable(200),
            CounterId::Fixed(2),
        ] {
            let unavailable = Err(ArbiterError::Unavailable(absent));
            assert_eq!(master.reserve_perfctr(absent), unavailable, "{kind:?}");
            assert_eq!(master.reserve_evntsel(absent), unavailable);
            assert_eq!(master.renew(absent), unavailable);
            // A release always succeeds.
            master.release_perfctr(absent);
            master.release_evntsel(absent);
        }
    }
}

#[test]
fn the_lock_opens_for_both_registers_alone() {
    for kind in Kind::ALL {
        let port = port();
        let mut master = kind.claim(&port);
        use Part::{Evntsel, Perfctr};
        // Reserve (true) or release, and whether both are reserved then.
        let steps = [
            (true, Perfctr, false),
            (true, Evntsel, true),
            (false, Perfctr, false),
            (true, Perfctr, true),
            (false, Evntsel, false),
            (false, Evntsel, false),
            (false, Perfctr, false),
            (false, Perfctr, false),
            (true, Evntsel, false),
        ];
        for (reserve, part, open) in steps {
            if reserve {
                master.reserve(part, PMC1).expect("free");
            } else {
                master.release(part, PMC1);
            }
            let expected = if open {
                Verdict::Permit
            } else {
                kind.unreserved()
            };
            for access in [Access::Read, Access::Write] {
                check(&port, Layer::GuestKernel, PMC1, access, expected);
                check(&port, Layer::GuestKernel, PMC0, access, kind.unreserved());
            }
            check(&port, Layer::GuestUser, PMC1, Access::Rdpmc, expected);
        }
        master.finish();
        assert!(port.is_pristine() && port.wrong_cookies() == 0, "{kind:?}");
    }
}

#[test]
fn a_kernels_rdpmc_never_faults() {
    for denial in [DeniedAccess::Drop, DeniedAccess::Fault] {
        let port = port();
        let _master = Kind::Enforcing(denial).claim(&port);
        let dropped = Verdict::Drop { read_as: 0 };
        check(&port, Layer::GuestKernel, PMC0, Access::Rdpmc, dropped);
    }
}

#[test]
fn the_shared_control_of_fixed_counters_stops_at_a_locked_one() {
    for kind in Kind::ALL {
        let port = port();
        let mut master = kind.claim(&port);
        let reached =
            |port: &Port, counter| port.control(2, counter).reached_by(Shared::FixedControl);
        let unlocked = kind == Kind::Minimal;
        assert_eq!(reached(&port, FIXED0), unlocked, "{kind:?}");
        for part in [Part::Perfctr, Part::Evntsel] {
            master.reserve(part, FIXED0).expect("free");
        }
        assert!(reached(&port, FIXED0));
        for shared in Shared::ALL {
            assert!(port.control(0, FIXED0).reached_by(shared));
        }
        assert_eq!(reached(&port, CounterId::Fixed(1)), unlocked);
        master.release(Part::Evntsel, FIXED0);
        assert_eq!(reached(&port, FIXED0), unlocked);
    }
}

#[test]
fn a_second_arbiter_gets_nothing_until_the_first_is_done() {
    let port = port();
    let mut first = Kind::Minimal.claim(&port);
    assert!(
        Kind::Full(DeniedAccess::Drop)
            .claim(&port)
            .counters()
            .is_empty()
    );
    first.finish();
    assert_eq!(
        Kind::Full(DeniedAccess::Drop).claim(&port).counters().len(),
        6
    );
}
