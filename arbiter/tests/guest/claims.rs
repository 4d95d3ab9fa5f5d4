//! What an arbiter gets, and what the others keep.

use arbiter::guest::{ArbiterError, DeniedAccess, FullMaster, Key, Master, MinimalMaster, PcrPort};
use arbiter::{Access, CounterId, CounterSet, Layer, Scheme, Verdict, abi};

use super::machine::{FIXED0, FIXED1, PMC0, PMC1, PMC2, Port, Shape, key, msr, set};

const FIRMWARE: Key = match Key::new(0xf1) {
    Some(key) => key,
    None => Key::DEFAULT,
};

/// A machine whose firmware holds counters, each on one CPU.
fn with_firmware(shape: &Shape, held: &[(u32, CounterId)]) -> Port {
    let mut port = Port::new(shape);
    for (cpu, counter) in held {
        port.hold(*cpu, *counter, FIRMWARE).expect("a free counter");
    }
    port.end_phase()
}

fn check(shape: &Shape, held: &[(u32, CounterId)], expected: &[CounterId]) {
    for scheme in Scheme::ALL {
        check_under(&shape.under(scheme), held, expected);
    }
}

fn check_under(shape: &Shape, held: &[(u32, CounterId)], expected: &[CounterId]) {
    let port = with_firmware(shape, held);
    let before: Vec<_> = (0..port.cpus()).map(|cpu| port.held(cpu)).collect();
    let mut master =
        MinimalMaster::claim(port.clone(), port.discovery(), DeniedAccess::Drop).expect("a kernel");
    assert_eq!(master.counters(), set(expected), "{shape:?} {held:?}");
    for cpu in 0..port.cpus() {
        // What has no name keeps its place.
        let behind = |name| port.behind(cpu, name).unwrap_or(name);
        let mine: CounterSet = master.counters().iter().map(behind).collect();
        assert_eq!(port.held_by(cpu, Layer::GuestKernel), mine, "CPU {cpu}");
        assert_eq!(port.held_by(cpu, Layer::Firmware), before[cpu as usize]);
    }
    master.finish();
    assert_eq!(master.counters(), CounterSet::EMPTY);
    for cpu in 0..port.cpus() {
        assert_eq!(port.held(cpu), before[cpu as usize], "CPU {cpu}");
    }
    assert_eq!(port.wrong_cookies(), 0);
}

#[test]
fn a_counter_has_to_be_free_on_every_cpu() {
    let shape = |cpus| Shape::new(cpus, 3, 2);
    check(&shape(1), &[], &[PMC0, PMC1, PMC2, FIXED0, FIXED1]);
    check(&shape(4), &[], &[PMC0, PMC1, PMC2, FIXED0, FIXED1]);
    check(&shape(1), &[(0, PMC1)], &[PMC0, PMC2, FIXED0, FIXED1]);
    for cpu in 0..4 {
        let held = [(cpu, PMC1), (3 - cpu, FIXED0)];
        check(&shape(4), &held, &[PMC0, PMC2, FIXED1]);
    }
    let everything = [(0, PMC0), (1, PMC1), (2, PMC2), (0, FIXED0), (1, FIXED1)];
    check(&shape(3), &everything, &[]);
    check(&Shape::new(2, 0, 2), &[(1, FIXED0)], &[FIXED1]);
}

#[test]
fn legacy_names_are_followed_on_each_cpu() {
    let shape = Shape::new(2, 4, 2).legacy(3, 1);
    check(&shape, &[], &[PMC0, PMC1, PMC2, FIXED0, FIXED1]);
    // Another counter of each CPU is the firmware's; names hide that.
    let held = [(0, PMC0), (1, CounterId::Programmable(3))];
    check(&shape, &held, &[PMC0, PMC1, PMC2, FIXED0, FIXED1]);
    let more = [(0, PMC0), (1, PMC1), (1, PMC2)];
    check(&shape, &more, &[PMC0, PMC1, FIXED0, FIXED1]);
    // Fixed-function counters have their own names or none.
    check(&shape, &[(1, FIXED0)], &[PMC0, PMC1, PMC2, FIXED1]);
}

#[test]
fn the_firmware_is_shut_out() {
    let port = Port::kernel(&Shape::new(2, 2, 1));
    let master =
        MinimalMaster::claim(port.clone(), port.discovery(), DeniedAccess::Drop).expect("a kernel");
    let firmware = port.as_layer(Layer::Firmware);
    for counter in master.counters().iter() {
        for cpu in 0..2 {
            let dropped = Verdict::Drop { read_as: 0 };
            let write = |port: &Port| port.verdict(cpu, counter, Key::DEFAULT, Access::Write);
            assert_eq!(write(&firmware), dropped, "{counter}");
            assert_eq!(write(&port), Verdict::Permit, "{counter}");
            assert!(firmware.clone().hold(cpu, counter, FIRMWARE).is_err());
        }
    }
}

#[test]
fn no_claim_in_the_firmwares_phase() {
    let port = Port::new(&Shape::new(2, 4, 3));
    let claim = MinimalMaster::claim(port.clone(), port.discovery(), DeniedAccess::Drop);
    assert_eq!(claim.map(drop), Err(ArbiterError::NotKernel));
    assert!(port.is_pristine());
}

#[test]
fn no_claim_without_random_numbers() {
    let port = Port::kernel(&Shape::new(2, 4, 3));
    port.run_dry();
    let claim = FullMaster::claim(port.clone(), port.discovery(), DeniedAccess::Drop);
    assert_eq!(claim.map(drop), Err(ArbiterError::NoRandom));
    assert!(port.is_pristine());
}

#[test]
fn the_kernels_own_random_numbers_serve_where_there_is_no_register() {
    /// A kernel with a source of its own.
    struct Own(Port, Option<u64>);
    impl PcrPort for Own {
        fn cpus(&self) -> u32 {
            self.0.cpus()
        }
        fn rdmsr_with(
            &mut self,
            cpu: u32,
            msr: u32,
            key: Key,
        ) -> Result<u64, arbiter::guest::Fault> {
            assert_ne!(msr, abi::MSR_BASE + abi::MSR_RANDOM);
            self.0.rdmsr_with(cpu, msr, key)
        }
        fn wrmsr_with(
            &mut self,
            cpu: u32,
            msr: u32,
            value: u64,
            key: Key,
        ) -> Result<(), arbiter::guest::Fault> {
            self.0.wrmsr_with(cpu, msr, value, key)
        }
        fn random(&mut self) -> Option<u64> {
            self.1
        }
    }
    let mut port = Port::kernel(&Shape::new(1, 1, 0));
    let mut machine = port.discovery();
    machine.features &= !abi::FEATURE_RANDOM;
    let none = MinimalMaster::claim(Own(port.clone(), None), machine, DeniedAccess::Drop);
    assert_eq!(none.map(drop), Err(ArbiterError::NoRandom));
    // Bits 63:48 are cut, and 0 is not a cookie.
    for (bits, cookie) in [(0xffff_1234_5678_9abc, 0x1234_5678_9abc), (7 << 48, 1)] {
        let master =
            MinimalMaster::claim(Own(port.clone(), Some(bits)), machine, DeniedAccess::Drop);
        assert_eq!(master.expect("a kernel").counters(), set(&[PMC0]));
        let register = msr(abi::MSR_MANAGEMENT_KEY, PMC0);
        assert!(port.wrmsr_with(0, register, 0, key(cookie)).is_ok());
    }
}

/// A counter that the firmware holds on one CPU counts for legacy software on the
/// others, which a claim leaves alone.
#[test]
fn a_claim_leaves_running_counters_alone_that_it_cannot_have() {
    for cpu in 0..3 {
        let port = with_firmware(&Shape::new(3, 3, 0), &[(cpu, PMC1)]);
        let others: Vec<u32> = (0..3).filter(|other| *other != cpu).collect();
        let select = msr(abi::MSR_SELECT, PMC1);
        let mut legacy = port.clone();
        for other in &others {
            legacy.wrmsr(*other, select, 0x41_003c).expect("nobody's");
        }
        let mut master = MinimalMaster::claim(port.clone(), port.discovery(), DeniedAccess::Drop)
            .expect("a kernel");
        assert_eq!(master.counters(), set(&[PMC0, PMC2]));
        for other in &others {
            assert_eq!(legacy.rdmsr(*other, select), Ok(0x41_003c), "CPU {other}");
        }
        master.finish();
    }
}
