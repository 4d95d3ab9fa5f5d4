//! Private counters of the fully enforcing master.

use arbiter::guest::{ArbiterError, DeniedAccess, FullMaster, Key, Master, PcrPort, Private};
use arbiter::{Access, CounterId, CounterSet, Layer, Shared, Verdict, abi};

use super::machine::{FIXED0, PMC0, PMC1, PMC2, Port, Shape, key, msr, set};

const CPUS: u32 = 2;

fn machine() -> (Port, FullMaster<Port>) {
    let port = Port::kernel(&Shape::new(CPUS as usize, 3, 1));
    let master = FullMaster::claim(port.clone(), port.discovery(), DeniedAccess::Fault);
    (port, master.expect("a kernel"))
}

/// Checks the verdict on an access with `key`, on every CPU.
fn check(port: &Port, counter: CounterId, key: Key, expected: Verdict) {
    for cpu in 0..CPUS {
        for access in [Access::Read, Access::Write] {
            let verdict = port.verdict(cpu, counter, key, access);
            assert_eq!(verdict, expected, "{access:?} of {counter} on CPU {cpu}");
        }
    }
}

#[test]
fn nobody_else_has_access() {
    let (port, mut master) = machine();
    let first = master.acquire(set(&[PMC1, PMC2])).expect("free");
    let second = master.acquire(set(&[PMC1, PMC2])).expect("free");
    assert_eq!((first.counter, second.counter), (PMC1, PMC2));
    assert_ne!(first.key, second.key);
    for (mine, others) in [(first, second), (second, first)] {
        check(&port, mine.counter, mine.key, Verdict::Permit);
        check(&port, mine.counter, others.key, Verdict::Fault);
        check(&port, mine.counter, Key::DEFAULT, Verdict::Fault);
        check(&port, mine.counter, key(5), Verdict::Fault);
        let firmware = port.as_layer(Layer::Firmware);
        check(&firmware, mine.counter, mine.key, Verdict::Fault);
        for shared in Shared::ALL {
            assert!(!port.control(1, mine.counter).reached_by(shared));
        }
    }
    let none = master.acquire(set(&[PMC1, PMC2]));
    assert_eq!(none, Err(ArbiterError::NoneFree));
}

#[test]
fn classic_and_private_users_exclude_each_other() {
    let (port, mut master) = machine();
    master.reserve_evntsel(PMC0).expect("free");
    let held = master.acquire(CounterSet::from_bits(!0)).expect("free");
    assert_eq!(held.counter, PMC1, "one register of PMC0 is reserved");
    let in_use = Err(ArbiterError::InUse(PMC1));
    assert_eq!(master.reserve_perfctr(PMC1), in_use);
    assert_eq!(master.reserve_evntsel(PMC1), in_use);
    // A classic release of what was never reserved must not open it.
    master.release_perfctr(PMC1);
    master.release_evntsel(PMC1);
    check(&port, PMC1, held.key, Verdict::Permit);
    check(&port, PMC1, Key::DEFAULT, Verdict::Fault);
    assert_eq!(master.give_up(held), Ok(()));
    check(&port, PMC1, held.key, Verdict::Fault);
    master.reserve_perfctr(PMC1).expect("free");
    master.reserve_evntsel(PMC1).expect("free");
    check(&port, PMC1, Key::DEFAULT, Verdict::Permit);
}

#[test]
fn only_the_holder_gives_up() {
    let (port, mut master) = machine();
    let held = master.acquire(set(&[PMC2])).expect("free");
    let wrong = [
        Private {
            key: key(5),
            ..held
        },
        Private {
            key: Key::DEFAULT,
            ..held
        },
        Private {
            counter: PMC0,
            ..held
        },
        Private {
            counter: CounterId::Fixed(40),
            ..held
        },
    ];
    for wrong in wrong {
        let not_yours = Err(ArbiterError::NotYours(wrong.counter));
        assert_eq!(master.give_up(wrong), not_yours);
        check(&port, PMC2, held.key, Verdict::Permit);
    }
    assert_eq!(master.give_up(held), Ok(()));
    assert_eq!(master.give_up(held), Err(ArbiterError::NotYours(PMC2)));
    let again = master.acquire(set(&[PMC2])).expect("free");
    assert_ne!(again.key, held.key);
    assert_eq!(master.give_up(held), Err(ArbiterError::NotYours(PMC2)));
}

#[test]
fn nothing_is_left_to_the_next_user() {
    let (mut port, mut master) = machine();
    for counter in [PMC0, FIXED0] {
        // A classic user leaves its select behind, as some do.
        master.reserve_perfctr(counter).expect("free");
        master.reserve_evntsel(counter).expect("free");
        for cpu in 0..CPUS {
            port.wrmsr(cpu, msr(abi::MSR_SELECT, counter), 0x42)
                .expect("open");
        }
        master.release_perfctr(counter);
        master.release_evntsel(counter);
        let held = master.acquire(set(&[counter])).expect("free");
        for cpu in 0..CPUS {
            for row in [abi::MSR_SELECT, abi::MSR_COUNTER] {
                assert_eq!(port.rdmsr_with(cpu, msr(row, counter), held.key), Ok(0));
                let written = port.wrmsr_with(cpu, msr(row, counter), 0x99, held.key);
                assert_eq!(written, Ok(()));
            }
        }
        master.give_up(held).expect("mine");
        master.reserve_perfctr(counter).expect("free");
        master.reserve_evntsel(counter).expect("free");
        for row in [abi::MSR_SELECT, abi::MSR_COUNTER] {
            assert_eq!(port.rdmsr(1, msr(row, counter)), Ok(0));
        }
    }
    master.finish();
    assert!(port.is_pristine());
}

#[test]
fn without_random_numbers_there_is_no_private_counter() {
    let (port, mut master) = machine();
    port.run_dry();
    let none = master.acquire(set(&[PMC0]));
    assert_eq!(none, Err(ArbiterError::NoRandom));
    assert_eq!(master.reserve_perfctr(PMC0), Ok(()));
}

#[test]
fn a_key_is_never_printed() {
    let held = Private {
        counter: PMC0,
        key: key(0xabcd),
    };
    let printed = format!("{held:?} {:?}", machine().1);
    assert!(!printed.contains("abcd") && !printed.contains("43981"));
    assert!(printed.contains("Key(..)"));
}
