//! One access that fails without reason, wherever it is.

use arbiter::guest::{
    ArbiterError, DeniedAccess, EnforcingMaster, FullMaster, Master, MinimalMaster,
};
use arbiter::{Access, CounterSet, Layer, Verdict};

use super::machine::{Kind, PMC1, Port, Shape};

const CPUS: u32 = 3;

fn shape() -> Shape {
    Shape::new(CPUS as usize, 3, 1).legacy(2, 1)
}

fn claim(kind: Kind, port: &Port) -> Result<Box<dyn Master>, ArbiterError> {
    let (port, machine) = (port.clone(), port.discovery());
    Ok(match kind {
        Kind::Minimal => Box::new(MinimalMaster::claim(port, machine, DeniedAccess::Drop)?),
        Kind::Enforcing(denial) => Box::new(EnforcingMaster::claim(port, machine, denial)?),
        Kind::Full(denial) => Box::new(FullMaster::claim(port, machine, denial)?),
    })
}

/// The arbiter and every CPU agree on what is held, and no lock is half open.
fn check(kind: Kind, port: &Port, master: &dyn Master, open: CounterSet) {
    for cpu in 0..CPUS {
        let behind = |name| port.behind(cpu, name);
        let held: CounterSet = master.counters().iter().filter_map(behind).collect();
        assert_eq!(port.held_by(cpu, Layer::GuestKernel), held, "CPU {cpu}");
        for name in master.counters().iter() {
            let expected = if open.contains(name) {
                Verdict::Permit
            } else {
                kind.unreserved()
            };
            assert_eq!(port.legacy(cpu, name, Access::Write), Some(expected));
        }
    }
}

#[test]
fn a_claim_is_whole_or_absent() {
    for kind in Kind::ALL {
        let port = Port::kernel(&shape());
        let good = claim(kind, &port).expect("no fault");
        let accesses = u32::try_from(port.accesses()).expect("few");
        let mut whole = 0;
        for n in 0..accesses {
            let port = Port::kernel(&shape());
            port.fail_after(n);
            match claim(kind, &port) {
                Err(error) => {
                    let expected = [ArbiterError::NotKernel, ArbiterError::NoRandom][n as usize];
                    assert_eq!(error, expected);
                    assert!(port.is_pristine());
                }
                Ok(mut master) => {
                    whole += u32::from(master.counters() == good.counters());
                    assert!(master.counters().len() >= good.counters().len() - 1);
                    check(kind, &port, &*master, CounterSet::EMPTY);
                    master.finish();
                    assert!(port.is_pristine(), "{kind:?}, access {n}");
                }
            }
        }
        // The look for the legacy name that PMC2 does not have.
        assert_eq!(whole, 1, "{kind:?}");
    }
}

#[test]
fn a_call_succeeds_everywhere_or_gives_the_counter_up() {
    for kind in [
        Kind::Enforcing(DeniedAccess::Drop),
        Kind::Full(DeniedAccess::Fault),
    ] {
        let fail_at = |n: Option<u32>| {
            let port = Port::kernel(&shape());
            let mut master = kind.claim(&port);
            master.reserve_perfctr(PMC1).expect("free");
            let before = port.accesses();
            n.inspect(|n| port.fail_after(*n));
            let reserved = master.reserve_evntsel(PMC1);
            let open = [PMC1].into_iter().filter(|_| reserved.is_ok()).collect();
            check(kind, &port, &*master, open);
            (reserved, port.accesses() - before)
        };
        let (reserved, accesses) = fail_at(None);
        assert_eq!(reserved, Ok(()));
        assert_eq!(
            accesses,
            u64::from(2 * 2 * CPUS),
            "two writes, each with its name"
        );
        for n in 0..2 * 2 * CPUS {
            let lost = ArbiterError::Lost {
                counter: PMC1,
                cpu: n / 2 % CPUS,
            };
            assert_eq!(fail_at(Some(n)).0, Err(lost), "access {n}");
        }
    }
}
