//! The life of a reservation: a kernel reserves a counter, a program is denied, and
//! the lease ends. The audit records show every decision.
//!
//! `cargo run -p arbiter --example reservation`

use std::sync::Arc;

use arbiter::{
    Access, Caller, Context, Cookie, CounterId, GuardLimits, Layer, NoEntropy, PcrConfig,
    PcrRegister, PcrUnit, PerKind, Phase, Policy, Record, Scheme, Tsc, Verdict,
};

const COUNTER: CounterId = CounterId::Programmable(0);
/// The cookies that the kernel chooses. They have 48 bits, and a kernel draws them
/// at random.
const MANAGEMENT: u64 = 0x1111_2222_3333;
const ACCESS: u64 = 0x4444_5555_6666;

/// A write of the kernel to a register of the reservations, with `presented` in RSI.
fn write(
    unit: &mut PcrUnit,
    register: PcrRegister,
    value: u64,
    presented: u64,
    cx: &mut Context<'_>,
) {
    let layer = Layer::GuestKernel;
    let effects = unit.write(register, value, Caller { layer, presented }, cx);
    println!("kernel writes {register:?}: {effects:?}");
}

fn main() {
    // The kernel's reservations end after 50 ms unless it renews them.
    let mut policy = Policy::default();
    policy.kernel.lease_ms = Some(50);
    let mut unit = PcrUnit::new(PcrConfig {
        counters: PerKind {
            programmable: 4,
            fixed: 3,
        },
        widths: PerKind {
            programmable: 48,
            fixed: 48,
        },
        policy,
        scheme: Scheme::Independent,
        guard: GuardLimits::with_ticks_per_ms(1),
        // The clock of this program has one tick a millisecond.
        ticks_per_ms: 1,
        phase: Arc::new(Phase::new(false)),
        legacy: None,
        smm: false,
    });
    let mut records: Vec<Record> = Vec::new();
    let mut cx = Context {
        now: Tsc(0),
        entropy: &mut NoEntropy,
        audit: &mut records,
    };

    // A free counter expects the default cookie, and the first key reserves it. The
    // access cookie then locks out everybody who does not present it.
    let (management, access) = (
        PcrRegister::ManagementKey(COUNTER),
        PcrRegister::AccessKey(COUNTER),
    );
    write(&mut unit, management, MANAGEMENT, 0, &mut cx);
    write(&mut unit, access, ACCESS, MANAGEMENT, &mut cx);

    // A program without the cookie reads 0. The caller reports every denied access,
    // so that it is recorded and a guess is counted.
    let program = (Layer::GuestUser, Cookie::DEFAULT);
    let verdict = unit.check(program, COUNTER, Access::Rdpmc, cx.now);
    println!("program reads {COUNTER}: {verdict:?}");
    if verdict != Verdict::Permit {
        unit.denied(program, COUNTER, Access::Rdpmc, verdict, &mut cx);
    }
    let kernel = (
        Layer::GuestKernel,
        Cookie::new(ACCESS).expect("it has 48 bits"),
    );
    let verdict = unit.check(kernel, COUNTER, Access::Read, cx.now);
    println!("kernel reads {COUNTER} with its cookie: {verdict:?}");

    // The kernel does not renew. The caller ticks when the deadline has come, and
    // clears in its PMU what the effects name.
    cx.now = unit.deadline().expect("the lease ends");
    let effects = unit.tick(&mut cx);
    println!("at {} ms: {effects:?}", cx.now.0);
    assert!(unit.bank().reservation(COUNTER).is_none());

    println!("the audit records:");
    for Record {
        layer,
        counter,
        event,
    } in records
    {
        let counter = counter.map_or(String::new(), |counter| counter.to_string());
        let reason = event.reason().map_or(String::new(), |why| why.to_string());
        let layer = layer.to_string();
        println!("  {layer:12} {counter:5} {:12} {reason}", event.name());
    }
}
