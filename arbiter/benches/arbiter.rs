//! What arbitration itself costs, without a trap and without a PMU.
//!
//! `cargo bench -p arbiter --bench arbiter`; the goal is at most 10 ns added to
//! an access.

use std::hint::black_box;
use std::sync::Arc;

use arbiter::{
    Access, Caller, Context, Cookie, CounterId, Entropy, GuardLimits, Layer, NoAudit, PcrConfig,
    PcrRegister, PcrUnit, PerKind, Phase, Policy, Scheme, Tsc, Verdict,
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const MANAGEMENT: u64 = 0x1234_5678_9abc;
const ACCESS: u64 = 0x0fed_cba9_8765;
const INITIAL: u64 = 0x000f_00ff;
const FAULT: u64 = INITIAL | 0x300;
/// The last programmable counter of six, and a fixed-function counter.
const COUNTERS: [CounterId; 2] = [CounterId::Programmable(5), CounterId::Fixed(1)];

/// A constant: the cost of the host's random numbers is not the arbiter's.
#[derive(Debug)]
struct Constant;

impl Entropy for Constant {
    fn bits(&mut self) -> Option<u64> {
        Some(MANAGEMENT)
    }
}

/// Six programmable and three fixed-function counters.
fn unit(lease_ms: Option<u32>) -> PcrUnit {
    let mut policy = Policy::default();
    policy.kernel.lease_ms = lease_ms;
    PcrUnit::new(PcrConfig {
        counters: PerKind {
            programmable: 6,
            fixed: 3,
        },
        widths: PerKind {
            programmable: 48,
            fixed: 48,
        },
        policy,
        scheme: Scheme::Independent,
        guard: GuardLimits::with_ticks_per_ms(2_000_000),
        ticks_per_ms: 2_000_000,
        phase: Arc::new(Phase::new(false)),
        legacy: None,
        smm: false,
    })
}

fn caller(presented: u64) -> Caller {
    let layer = Layer::GuestKernel;
    Caller { layer, presented }
}

/// A write as the kernel does it, at the time `now`.
fn write(unit: &mut PcrUnit, register: PcrRegister, value: u64, presented: u64, now: u64) {
    let mut cx = Context {
        now: Tsc(now),
        entropy: &mut Constant,
        audit: &mut NoAudit,
    };
    let done = unit.write(register, value, caller(presented), &mut cx);
    assert!(done.is_some(), "{register:?} was refused");
}

/// Both counters reserved, with an access cookie and this control word.
fn reserved(word: u64) -> PcrUnit {
    let mut unit = unit(None);
    for counter in COUNTERS {
        for (register, value, presented) in [
            (PcrRegister::ManagementKey(counter), MANAGEMENT, 0),
            (PcrRegister::AccessKey(counter), ACCESS, MANAGEMENT),
            (PcrRegister::Control(counter), word, MANAGEMENT),
        ] {
            write(&mut unit, register, value, presented, 0);
        }
    }
    unit
}

fn check(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("check");
    let dropped = Verdict::Drop { read_as: 0 };
    for (name, unit, cookie, expected) in [
        ("unreserved", unit(None), 0, Verdict::Permit),
        ("permit", reserved(INITIAL), ACCESS, Verdict::Permit),
        ("drop", reserved(INITIAL), 0, dropped),
        ("fault", reserved(FAULT), 0, Verdict::Fault),
    ] {
        let cookie = Cookie::new(cookie).expect("48 bits");
        for counter in COUNTERS {
            let verdict = unit.check((Layer::GuestKernel, cookie), counter, Access::Read, Tsc(0));
            assert_eq!(verdict, expected, "{name} {counter}");
            group.bench_function(format!("{name} {counter}"), |bencher| {
                bencher.iter(|| {
                    black_box(&unit).check(
                        black_box((Layer::GuestKernel, cookie)),
                        black_box(counter),
                        black_box(Access::Read),
                        black_box(Tsc(0)),
                    )
                });
            });
        }
    }
    group.finish();
}

/// Reserving and giving back at once: two WRMSRs. With a lease each changes the
/// deadline as well.
fn reserve(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("reserve and release");
    group.throughput(Throughput::Elements(1));
    for (name, lease_ms) in [("without lease", None), ("with lease", Some(1000))] {
        let mut unit = unit(lease_ms);
        let register = PcrRegister::ManagementKey(COUNTERS[0]);
        let mut now = 0;
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                now += 1;
                write(&mut unit, register, MANAGEMENT, 0, now);
                write(&mut unit, register, 0, MANAGEMENT, now);
            });
        });
    }
    group.finish();
}

/// What comes after a drop: the record, and the guard's count of a wrong cookie.
fn denied(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("denied");
    let mut unit = reserved(INITIAL);
    for (name, cookie) in [("default cookie", 0), ("wrong cookie", MANAGEMENT)] {
        let cookie = Cookie::new(cookie).expect("48 bits");
        let mut now = 0;
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                now += 1;
                let mut cx = Context {
                    now: Tsc(now),
                    entropy: &mut Constant,
                    audit: &mut NoAudit,
                };
                let (layer, counter) = (Layer::GuestKernel, COUNTERS[0]);
                let verdict = unit.check((layer, cookie), counter, Access::Read, Tsc(0));
                unit.denied(
                    (layer, cookie),
                    counter,
                    Access::Read,
                    black_box(verdict),
                    &mut cx,
                );
            });
        });
    }
    group.finish();
}

/// What every exit pays: is there anything to be done by now?
fn tick(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("tick");
    for (name, lease_ms) in [("nothing due", Some(1000)), ("no lease", None)] {
        let mut unit = unit(lease_ms);
        let register = PcrRegister::ManagementKey(COUNTERS[0]);
        write(&mut unit, register, MANAGEMENT, 0, 0);
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let mut cx = Context {
                    now: Tsc(black_box(1)),
                    entropy: &mut Constant,
                    audit: &mut NoAudit,
                };
                unit.tick(&mut cx)
            });
        });
    }
    group.finish();
}

criterion_group!(benches, check, reserve, denied, tick);
criterion_main!(benches);
