//! `umpire budget`: what a guest may use becomes less and more while it runs, and its
//! registers stay.

use std::time::{Duration, Instant};

use arbiter::abi;
use guest_tests::micro::Written;
use guest_tests::umpire::{self, skipped_without_kvm};
use guest_tests::vm::Vm;
use iced_x86::code_asm::{CodeAssembler, eax, ecx, edx, rsi};
use serde_json::Value;

use super::RATES;
use super::reservations::{await_word, refused, write};

const PATIENCE: Duration = Duration::from_secs(20);
/// The guest's cookie.
const OWN: u64 = 0x1234_5678;
/// Cycles in both rings, enabled.
const CYCLES: u64 = 0x43_0076;
/// `PerfEvtSel0` of the core extension.
const SELECT: u32 = 0xc001_0200;

fn select(a: &mut CodeAssembler, n: u32, value: u64) -> Written {
    a.mov(rsi, 0u64)?;
    a.mov(ecx, SELECT + 2 * n)?;
    a.mov(eax, u32::try_from(value).expect("32 bits"))?;
    a.mov(edx, 0)?;
    a.wrmsr()
}

/// A notice of the hypervisor that the host gives fewer counters: PMC5 goes.
fn notice(kind: u64) -> u64 {
    kind | 5 << abi::NOTICE_POSITION_SHIFT
        | abi::LAYER_HYPERVISOR << abi::NOTICE_LAYER_SHIFT
        | abi::REASON_BUDGET << abi::NOTICE_REASON_SHIFT
}

/// Counts on PMC0 to PMC3, and on PMC5, which it has reserved. Stops PMC3 when it has
/// heard that it loses PMC5, and PMC2 when it has.
fn counter(a: &mut CodeAssembler) -> Written {
    for n in 0..4 {
        select(a, n, CYCLES)?;
    }
    write(a, (abi::MSR_MANAGEMENT_KEY, 5), OWN, 0)?;
    write(a, (abi::MSR_ACCESS_KEY, 5), OWN, OWN)?;
    write(a, (abi::MSR_SELECT, 5), CYCLES, OWN)?;
    await_word(a, abi::MSR_NOTICE, notice(abi::NOTICE_REVOKING))?;
    select(a, 3, 0)?;
    await_word(a, abi::MSR_NOTICE, notice(abi::NOTICE_REVOKED))?;
    select(a, 2, 0)?;
    let mut forever = a.create_label();
    a.set_label(&mut forever)?;
    // What does not count can be read all the same.
    for n in 0..6 {
        a.mov(ecx, SELECT + 1 + 2 * n)?;
        a.rdmsr()?;
    }
    a.jmp(forever)
}

fn programmable(vm: &Vm, words: &[&str]) -> Value {
    let words = [&["budget", "-j"], words].concat();
    let listing: Value = serde_json::from_str(&vm.printed(&words)).expect("JSON");
    listing["vcpus"][0]["programmable"].clone()
}

/// The counters that do not count, once they are these.
fn await_lacking(vm: &Vm, expected: &[&str]) -> Value {
    let began = Instant::now();
    loop {
        let kind = programmable(vm, &[]);
        let lacking = kind["lacking"].as_array().expect("a list").iter();
        let lacking = lacking.map(|one| one["counter"].as_str().expect("a name"));
        let found: Vec<String> = lacking.map(str::to_owned).collect();
        if found == expected {
            return kind;
        }
        assert!(began.elapsed() < PATIENCE, "{kind}, not {expected:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn await_counting(vm: &Vm, expected: u64) {
    let began = Instant::now();
    while programmable(vm, &[])["counting"] != expected {
        assert!(began.elapsed() < PATIENCE, "{}", programmable(vm, &[]));
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_guest_has_less_and_more_while_it_runs() {
    if skipped_without_kvm("a_guest_has_less_and_more") {
        return;
    }
    let rates = RATES.replace("COUNT", "8");
    let flags = ["--audit", "audit.json", "--oversubscribe", "refuse"];
    let mut vm = Vm::boot_kernel(&umpire::path(), &rates, &flags, counter);
    await_counting(&vm, 5);
    let shown = vm.printed(&["budget"]);
    let row = "0     programmable  all 6    5         1";
    assert!(shown.contains(row), "{shown}");

    // What nobody has reserved goes first.
    let kind = programmable(&vm, &["programmable=2"]);
    assert_eq!(kind["counting"], 2, "{kind}");
    assert_eq!(kind["leaving"], Value::Array(Vec::new()));
    let kind = await_lacking(&vm, &["PMC1", "PMC2", "PMC3"]);
    let why = "the VM's budget allows 2 such counters at a time";
    assert_eq!(kind["lacking"][0]["reason"], why);

    // What is reserved goes last, and its owner hears of it before.
    let kind = programmable(&vm, &["programmable=0", "--grace", "1500"]);
    assert_eq!(kind["counting"], 1, "{kind}");
    assert_eq!(kind["leaving"][0]["counter"], "PMC5");
    let kind = await_lacking(&vm, &["PMC0", "PMC1", "PMC2"]);
    assert_eq!(kind["counting"], 1, "its notice is not over: {kind}");
    let kind = await_lacking(&vm, &["PMC0", "PMC1"]);
    assert_eq!(
        (&kind["counting"], &kind["reserved"]),
        (&0.into(), &0.into())
    );

    // More for a time: what waited counts.
    let kind = programmable(&vm, &["programmable=all", "--for", "700ms"]);
    assert_eq!(kind["counting"], 2);
    assert_eq!((&kind["most"], &kind["later"]), (&Value::Null, &0.into()));
    await_lacking(&vm, &["PMC0", "PMC1"]);

    refused(&vm, &["budget", "cycles=1"], "'cycles=1' is not possible");
    refused(&vm, &["budget", "--grace", "5"], "programmable=N,fixed=N");
    vm.stop();
    let audit = std::fs::read_to_string(vm.path("audit.json")).expect("the audit");
    for part in [
        r#""event":"budget-set","budget":"programmable=2,fixed=all""#,
        r#""counter":"PMC5","event":"revoking","reason":"budget""#,
        r#""counter":"PMC5","event":"revoked","reason":"budget""#,
    ] {
        assert!(audit.contains(part), "{part} is not in: {audit}");
    }
}
