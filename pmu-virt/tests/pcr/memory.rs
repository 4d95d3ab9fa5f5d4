//! What the reservations of one vCPU cost in memory, and that no guest can make
//! it more.

use arbiter::{NoAudit, abi};
use pmu_virt::{
    Caller, ClockBackend, Grant, Holdings, MsrIndex, PmuModel, Reservations, WriteOutcome,
};

use super::machine::*;
use super::sys::{held, made};
use crate::seated::Seated;

#[derive(Debug)]
struct NoEntropy;

impl arbiter::Entropy for NoEntropy {
    fn bits(&mut self) -> Option<u64> {
        None
    }
}

const MOST: i64 = 4096;

#[test]
fn a_vcpus_reservations_take_at_most_4_kib_whatever_the_guest_does() {
    let spec = "intel-v2,counters=8,fixed=3";
    let model = PmuModel::parse(spec).expect(spec);
    let setup = Setup::of(spec);
    let pmu = Seated::new(
        model.clone(),
        Box::new(ClockBackend::new()),
        Grant::everything(),
    );
    // All vCPUs of a VM share it.
    let holdings = Holdings::default();
    let before = held();
    let mut pmu = pmu.with_reservations(Reservations {
        unit: unit(&setup, &model),
        entropy: Box::new(NoEntropy),
        audit: Box::new(NoAudit),
        holdings,
    });
    let new = held() - before;
    assert!((0..=MOST).contains(&new), "{new} bytes");
    // Every counter, then more requests than any queue holds, from each layer.
    let mut write = |layer, presented, msr, value| {
        let _ = pmu.wrmsr(MsrIndex(msr), value, Caller { layer, presented });
    };
    for n in (0..8).chain(32..35) {
        write(KERNEL, 0, management(n), M);
    }
    for round in 0..1_000u64 {
        for layer in [FIRMWARE, KERNEL] {
            let event = round % 2 * (abi::REQUEST_EVENT | 0x3c << abi::REQUEST_SELECT_SHIFT);
            let any = abi::REQUEST_RESERVE | (1 + round % 8) << abi::REQUEST_WHICH_SHIFT | event;
            write(layer, A, abi::MSR_BASE + abi::MSR_REQUEST, any);
            write(layer, A, abi::MSR_BASE + abi::MSR_REPLY, round);
        }
        let n = u32::try_from(round % 8).expect("it is below 8");
        write(KERNEL, M, management(n), 0);
        write(KERNEL, 0, management(n), M);
    }
    let used = held() - before;
    assert!((0..=MOST).contains(&used), "{used} bytes");
    println!("{new} bytes at first, {used} bytes in use");
}

/// A kernel sets its counters up when it switches programs.
#[test]
fn a_write_of_a_register_of_the_block_allocates_nothing() {
    let model = PmuModel::parse("intel-v2").expect("a model");
    let backend = counts_all_that_is_fixed();
    let unit = unit(&Setup::of("intel-v2"), &model);
    let pmu = Seated::new(model, backend, Grant::everything());
    let mut pmu = pmu.with_reservations(Reservations {
        unit,
        entropy: Box::new(NoEntropy),
        audit: Box::new(NoAudit),
        holdings: Holdings::default(),
    });
    let mut write = |msr, value| {
        let caller = Caller {
            layer: KERNEL,
            presented: M,
        };
        let before = made();
        let outcome = pmu.wrmsr(MsrIndex(msr), value, caller);
        assert_eq!(outcome, WriteOutcome::Done, "{msr:#x}");
        made() - before
    };
    let named = abi::REQUEST_EVENT | 0x3c << abi::REQUEST_SELECT_SHIFT;
    let request = abi::REQUEST_RESERVE | 4 << abi::REQUEST_WHICH_SHIFT | named;
    write(abi::MSR_BASE + abi::MSR_REQUEST, request);
    for n in 0..4 {
        assert_eq!(write(drop_value(n), 7), 0, "PMC{n}");
        assert_eq!(write(control(n), abi::CONTROL_GLOBAL_CTRL), 0, "PMC{n}");
    }
}
