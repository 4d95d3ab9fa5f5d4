//! `umpire pcr`: reservations of a guest that holds counters, shown and administered.
//! What the guest learns of it shows in what it reserves and gives back.

use std::time::{Duration, Instant};

use arbiter::abi;
use guest_tests::kernel::halt_forever;
use guest_tests::micro::Written;
use guest_tests::umpire::{self, skipped_without_kvm};
use guest_tests::vm::Vm;
use iced_x86::code_asm::{CodeAssembler, eax, ecx, edx, rsi};
use serde_json::Value;

use super::{RATES, boot_idle};

const PATIENCE: Duration = Duration::from_secs(20);
/// The guest's cookie.
const OWN: u64 = 0x1234_5678;

fn msr(offset: u32, n: u32) -> u32 {
    abi::MSR_BASE + offset + n
}

pub(super) fn write(
    a: &mut CodeAssembler,
    (offset, n): (u32, u32),
    value: u64,
    cookie: u64,
) -> Written {
    a.mov(rsi, cookie)?;
    a.mov(ecx, msr(offset, n))?;
    a.mov(eax, u32::try_from(value).expect("32 bits"))?;
    a.mov(edx, 0)?;
    a.wrmsr()
}

/// Reads until the low half of a register is `value`.
pub(super) fn await_word(a: &mut CodeAssembler, offset: u32, value: u64) -> Written {
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.mov(ecx, msr(offset, 0))?;
    a.rdmsr()?;
    a.cmp(eax, i32::try_from(value).expect("31 bits"))?;
    a.jne(again)
}

/// A notice of the administrator about a counter.
fn notice(kind: u64, n: u64) -> u64 {
    kind | n << abi::NOTICE_POSITION_SHIFT
        | abi::LAYER_HYPERVISOR << abi::NOTICE_LAYER_SHIFT
        | abi::REASON_ADMINISTRATOR << abi::NOTICE_REASON_SHIFT
}

/// Holds PMC1 and PMC5. Reserves PMC3 when it has heard that PMC1 was revoked. Is told
/// that it will lose PMC3, then that it has; asks for another counter, and gives PMC5
/// back when the administrator refuses.
fn holder(a: &mut CodeAssembler) -> Written {
    write(a, (abi::MSR_MANAGEMENT_KEY, 1), OWN, 0)?;
    write(a, (abi::MSR_ACCESS_KEY, 1), OWN, OWN)?;
    write(a, (abi::MSR_MANAGEMENT_KEY, 5), OWN, 0)?;
    await_word(a, abi::MSR_NOTICE, notice(abi::NOTICE_REVOKED, 1))?;
    write(a, (abi::MSR_MANAGEMENT_KEY, 3), OWN, 0)?;
    await_word(a, abi::MSR_NOTICE, notice(abi::NOTICE_REVOKING, 3))?;
    await_word(a, abi::MSR_NOTICE, notice(abi::NOTICE_REVOKED, 3))?;
    let any = abi::REQUEST_RESERVE | 1 << abi::REQUEST_WHICH_SHIFT;
    write(a, (abi::MSR_REQUEST, 0), any, OWN)?;
    let refused = abi::ANSWER_REFUSED
        | abi::REASON_ADMINISTRATOR << abi::ANSWER_REASON_SHIFT
        | 1 << abi::ANSWER_NUMBER_SHIFT;
    await_word(a, abi::MSR_ANSWER, refused)?;
    write(a, (abi::MSR_MANAGEMENT_KEY, 5), 0, OWN)?;
    let mut forever = a.create_label();
    a.set_label(&mut forever)?;
    a.jmp(forever)
}

fn listing(vm: &Vm) -> Value {
    serde_json::from_str(&vm.printed(&["pcr", "-j"])).expect("JSON")
}

/// The counters of vCPU 0 that somebody holds.
fn held(vm: &Vm) -> Vec<String> {
    let listing = listing(vm);
    let rows = listing["vcpus"][0]["reservations"].as_array();
    let rows = rows.expect("reservations").iter();
    rows.map(|row| row["counter"].as_str().expect("a name").to_owned())
        .collect()
}

pub(super) fn await_held(vm: &Vm, expected: &[&str]) {
    let began = Instant::now();
    loop {
        let found = held(vm);
        if found == expected {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "{found:?}, not {expected:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(super) fn refused(vm: &Vm, words: &[&str], expected: &str) {
    let output = vm.tool(words);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{words:?}: {told}");
    assert!(told.contains(expected), "'{expected}' is not in: {told}");
    assert_eq!(told.lines().count(), 1, "{told}");
}

/// Holds PMC1, which the hypervisor may use as well, and PMC5, which it may not. Both have
/// 77.
fn lender(a: &mut CodeAssembler) -> Written {
    let kernels = abi::CONTROL_MANAGE_KERNEL | abi::CONTROL_ACCESS_KERNEL;
    for (n, control) in [(1, kernels | abi::CONTROL_ACCESS_HYPERVISOR), (5, kernels)] {
        write(a, (abi::MSR_MANAGEMENT_KEY, n), OWN, 0)?;
        write(a, (abi::MSR_ACCESS_KEY, n), OWN, OWN)?;
        write(a, (abi::MSR_COUNTER, n), 77, OWN)?;
        write(a, (abi::MSR_CONTROL, n), control, OWN)?;
    }
    halt_forever(a)
}

/// A tool reads counters of the guest as the hypervisor: what it gets is the owner's
/// choice, by cookie and mode bits.
#[test]
fn the_hypervisor_reads_what_an_owner_lets_it() {
    if skipped_without_kvm("the_hypervisor_reads") {
        return;
    }
    let rates = RATES.replace("COUNT", "8");
    let flags = ["--audit", "audit.json"];
    let mut vm = Vm::boot_kernel(&umpire::path(), &rates, &flags, lender);
    await_held(&vm, &["PMC1", "PMC5"]);
    for (name, text) in [("right", format!("{OWN:#x}\n")), ("wrong", "1".to_owned())] {
        std::fs::write(vm.path(name), text).expect("a file");
    }
    let has = |counter: &str, value: u8| format!("{counter} has {value} on vCPU 0\n");
    let not =
        |counter: &str| format!("{counter} is not the hypervisor's to read on vCPU 0: dropped\n");
    for (words, expected) in [
        (&["PMC0"][..], has("PMC0", 0)),
        (&["PMC1", "--cookie", "right"], has("PMC1", 77)),
        (&["pmc1", "--cookie", "wrong"], not("PMC1")),
        (&["PMC1"], not("PMC1")),
        (&["PMC5", "--cookie", "right"], not("PMC5")),
    ] {
        let words = [&["pcr", "read"], words].concat();
        assert_eq!(vm.printed(&words), expected, "{words:?}");
    }
    let json = vm.printed(&["pcr", "-j", "read", "PMC1", "--cookie", "right"]);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["vcpus"][0]["read"]["value"], 77, "{json}");
    let json = vm.printed(&["pcr", "-j", "read", "PMC5", "--cookie", "right"]);
    assert!(json.contains(r#""read":"dropped""#), "{json}");
    assert!(listing(&vm)["vcpus"][0].get("read").is_none());

    refused(&vm, &["pcr", "read", "PMC9"], "there is no PMC9");
    refused(&vm, &["pcr", "read", "PMC"], "'PMC' is no counter");
    std::fs::write(vm.path("odd"), "0x1234567890abcd").expect("a file");
    for file in ["odd", "rates.toml"] {
        let words = ["pcr", "read", "PMC1", "--cookie", file];
        refused(&vm, &words, "the file has no cookie");
    }
    refused(
        &vm,
        &["pcr", "read", "PMC1", "--cookie", "absent"],
        "absent",
    );
    vm.stop();
    let audit = std::fs::read_to_string(vm.path("audit.json")).expect("the audit");
    for part in [
        r#""layer":"hypervisor","counter":"PMC1","event":"dropped-read","reason":"cookie""#,
        r#""layer":"hypervisor","counter":"PMC5","event":"dropped-read","reason":"layer""#,
    ] {
        assert!(audit.contains(part), "{part} is not in: {audit}");
    }
}

#[test]
fn an_administrator_is_in_control_while_the_guest_runs() {
    if skipped_without_kvm("an_administrator") {
        return;
    }
    let rates = RATES.replace("COUNT", "8");
    let flags = ["--audit", "audit.json"];
    let mut vm = Vm::boot_kernel(&umpire::path(), &rates, &flags, holder);
    await_held(&vm, &["PMC1", "PMC5"]);

    // What there is, without a cookie.
    let shown = vm.printed(&["pcr"]);
    assert!(
        shown.contains("scheme independent, 100 ms to answer"),
        "{shown}"
    );
    assert!(shown.contains("0     PMC1     kernel  private"), "{shown}");
    assert!(shown.contains("0     PMC5     kernel  shared"), "{shown}");
    for text in [&shown, &vm.printed(&["pcr", "-j"])] {
        for cookie in [OWN.to_string(), format!("{OWN:x}")] {
            assert!(!text.contains(&cookie), "{text}");
        }
    }

    // What makes no sense changes nothing.
    refused(
        &vm,
        &["pcr", "revoke", "PMC2"],
        "nobody has reserved PMC2; umpire pcr",
    );
    refused(&vm, &["pcr", "revoke", "PMC6"], "there is no counter PMC6");
    refused(&vm, &["pcr", "revoke", "RAX"], "'RAX' is no counter");
    refused(&vm, &["pcr", "--vcpu", "1"], "there is no vCPU 1");
    refused(
        &vm,
        &["pcr", "policy", "firmware:min=4", "hypervisor:min=2"],
        "add up to 7 programmable counters and the PMU has 6",
    );
    refused(
        &vm,
        &["pcr", "policy", "kernel:max=0"],
        "at least 1 and at most 0",
    );
    assert_eq!(held(&vm), ["PMC1", "PMC5"]);

    // The guest hears of it, and takes PMC3.
    let told = vm.printed(&["pcr", "revoke", "pmc1"]);
    assert_eq!(told, "PMC1 is revoked on vCPU 0\n");
    await_held(&vm, &["PMC3", "PMC5"]);

    // Whoever holds more than a new maximum keeps it.
    let told = vm.printed(&["pcr", "policy", "kernel:max=1,lease=1000"]);
    assert_eq!(told, "the policy of kernel is set on vCPU 0\n");
    let told = vm.printed(&["pcr", "scheme", "interacting", "--vcpu", "0"]);
    assert_eq!(told, "the scheme is interacting on vCPU 0\n");
    assert_eq!(held(&vm), ["PMC3", "PMC5"]);
    let told = vm.printed(&["pcr", "bar", "kernel"]);
    assert_eq!(told, "the kernel may reserve nothing on vCPU 0\n");
    let now = listing(&vm);
    let vcpu = &now["vcpus"][0];
    assert_eq!(vcpu["scheme"], "interacting");
    let kernel = &vcpu["layers"][2];
    assert_eq!(kernel["layer"], "kernel");
    assert_eq!(kernel["max"], 1);
    assert_eq!(kernel["min"], 1, "what was not named stays");
    assert_eq!(kernel["lease_ms"], 1000);
    assert_eq!(kernel["barred"], true);
    assert_eq!(vcpu["layers"][0]["barred"], false);

    // With notice. The guest, barred, asks in vain and gives PMC5 back.
    let told = vm.printed(&["pcr", "revoke", "PMC3", "--grace", "2000", "-j"]);
    let row: Value = serde_json::from_str(&told).expect("JSON");
    let row = &row["vcpus"][0]["reservations"][0];
    assert_eq!(row["counter"], "PMC3");
    assert_eq!(row["revoked_for"], "administrator");
    assert!(
        (1..=2000).contains(&row["revoked_in_ms"].as_u64().expect("ms")),
        "{row}"
    );
    await_held(&vm, &[]);
    assert!(vm.printed(&["pcr"]).contains("no counter is reserved"));
    let told = vm.printed(&["pcr", "unbar", "kernel"]);
    assert_eq!(told, "the kernel may reserve on vCPU 0\n");
    let told = vm.printed(&["pcr", "policy", "kernel:lease=none", "-j"]);
    assert!(told.contains(r#""lease_ms":null"#), "{told}");
    assert!(!vm.printed(&["pcr"]).contains("barred"));
    vm.stop();

    // Every act is in the audit.
    let audit = std::fs::read_to_string(vm.path("audit.json")).expect("a file");
    for expected in [
        r#""layer":"kernel","counter":"PMC1","event":"revoked","reason":"administrator""#,
        r#""event":"policy-set","of":"kernel","policy":"kernel:min=1,min-fixed=0,priority=0,max=1,lease=1000""#,
        r#""event":"scheme-set","scheme":"interacting""#,
        r#""layer":"hypervisor","event":"layer-barred","of":"kernel""#,
        r#""event":"revoking","reason":"administrator","wanted_by":"hypervisor","in_ms":2000"#,
        r#""layer":"kernel","counter":"PMC3","event":"revoked","reason":"administrator""#,
        r#""event":"refused","reason":"administrator""#,
        r#""event":"layer-unbarred","of":"kernel""#,
    ] {
        assert!(audit.contains(expected), "{expected} is not in:\n{audit}");
    }
    let replay = vm.tool(&["arbitrate", "--replay", "audit.json"]);
    let told = String::from_utf8_lossy(&replay.stderr);
    assert!(
        told.contains("an administrator changed reservations"),
        "{told}"
    );
}

/// vCPUs that were never started, and those that share a core with others.
#[test]
fn vcpus_that_do_not_run_are_administered_too() {
    if skipped_without_kvm("vcpus_that_do_not_run") {
        return;
    }
    for cores in [&["--cpus", "3"][..], &["--cpus", "3", "--cores", "1"]] {
        let flags = [cores, &["--hypervisor-counters", "PMC5"]].concat();
        let vm = boot_idle(8, &flags);
        let shown = vm.printed(&["pcr"]);
        assert!(shown.contains("vCPU 0-2: scheme independent"), "{shown}");
        assert_eq!(
            shown.matches("PMC5     hypervisor  private").count(),
            3,
            "{shown}"
        );
        let told = vm.printed(&["pcr", "revoke", "PMC5", "--vcpu", "1-2"]);
        assert_eq!(told, "PMC5 is revoked on vCPU 1-2\n");
        // On the one that is left.
        let told = vm.printed(&["pcr", "revoke", "PMC5"]);
        assert_eq!(told, "PMC5 is revoked on vCPU 0\n");
        let told = vm.printed(&["pcr", "scheme", "single"]);
        assert_eq!(told, "the scheme is single on vCPU 0-2\n");
        let shown = vm.printed(&["pcr"]);
        assert!(shown.contains("vCPU 0-2: scheme single"), "{shown}");
        assert!(shown.contains("no counter is reserved"), "{shown}");
    }
}

#[test]
fn whoever_may_not_count_on_cores_changes_nothing() {
    if skipped_without_kvm("whoever_may_not_count_on_cores") {
        return;
    }
    let vm = boot_idle(8, &["--control-sys-gid", "12345"]);
    assert!(vm.printed(&["pcr"]).contains("no counter is reserved"));
    refused(
        &vm,
        &["pcr", "bar", "kernel"],
        "only members of group 12345 (cf_sys_gid)",
    );
    assert!(!vm.printed(&["pcr"]).contains("barred"));
    let off = boot_idle(8, &["--pcr", "off"]);
    refused(&off, &["pcr"], "--pcr off");
}
