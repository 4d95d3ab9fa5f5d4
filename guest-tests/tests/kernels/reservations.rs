//! Counter reservations by `umpire run`: CPUID, the audit file and the summary,
//! and that no cookie is told to anybody.

use std::process::Stdio;
use std::time::{Duration, Instant};

use arbiter::abi;
use guest_tests::kernel::{Kernel, Protocol, exit, print, send_signal, spin_forever};
use guest_tests::micro::{Written, wrmsr};
use guest_tests::umpire::skipped_without_kvm;
use iced_x86::code_asm::{CodeAssembler, eax, ebx, ecx, esi, rsi};
use serde_json::Value;

use super::{check, run, run_command};

const KEY: u64 = 0x1a2b_3c4d_5e6f;
const ACCESS: u64 = 0x0fed_cba9_8765;
/// The legacy counter of PMC1, and how often it is clobbered.
const LEGACY: u32 = 0xc001_0203;
const CLOBBERED: u32 = 300;

/// Every model of AMD's, on hosts of either vendor.
const AMD: [&str; 4] = ["--cpu-vendor", "amd", "--pmu", "amd-core"];

fn pcr(offset: u32, position: u32) -> u32 {
    abi::MSR_BASE + offset + position
}

/// Reserves PMC1, shuts others out, and is one of them.
fn clobbers(a: &mut CodeAssembler) -> Written {
    // The loader left a pointer there, which would be a wrong cookie.
    a.xor(esi, esi)?;
    wrmsr(a, pcr(abi::MSR_MANAGEMENT_KEY, 1), KEY)?;
    a.mov(rsi, KEY)?;
    wrmsr(a, pcr(abi::MSR_ACCESS_KEY, 1), ACCESS)?;
    a.mov(ebx, CLOBBERED)?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    wrmsr(a, LEGACY, 0x5a)?;
    a.dec(ebx)?;
    a.jne(again)?;
    a.mov(ecx, pcr(abi::MSR_RANDOM, 0))?;
    a.rdmsr()?;
    exit(a, 0)
}

#[test]
fn decisions_are_in_the_audit_file_and_summed_up() {
    if skipped_without_kvm("decisions_are_in_the_audit_file") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let audit = folder.path().join("audit");
    let log = folder.path().join("log");
    let kernel = Kernel::new(Protocol::Linux64, |a, _| clobbers(a)).expect("a kernel");
    let flags = [
        &AMD[..],
        &["--hypervisor-counters", "1", "-vvv"],
        &["--audit", audit.to_str().expect("a path")],
        &["--log-file", log.to_str().expect("a path")],
    ];
    let output = run(&kernel, &flags.concat());
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{told}");
    for part in [
        "umpire: counter reservations: 303 decisions",
        "PMC1    kernel     private  dropped 300, faulted 0",
        "PMC5    hypervisor private  dropped 0, faulted 0",
        "kernel      access-set 1, dropped-write 300, reserved 1",
        "hypervisor  reserved 1",
    ] {
        assert!(told.contains(part), "no {part:?} in {told}");
    }

    let text = std::fs::read_to_string(&audit).expect("an audit file");
    let parse = |line: &str| serde_json::from_str::<Value>(line).expect("JSON");
    let lines: Vec<Value> = text.lines().map(parse).collect();
    assert_eq!(lines[0]["format"], "umpire-audit");
    assert_eq!(lines[0]["version"], 1);
    let started = lines[0]["started"].as_str().expect("a time");
    assert!(started.ends_with('Z') && started.contains('T'), "{started}");
    // That it asked for the counter may be written before.
    let first = lines.iter().find(|line| line["event"] == "reserved");
    let first = first.expect("a reservation");
    assert_eq!(
        (&first["layer"], &first["counter"]),
        (&"hypervisor".into(), &"PMC5".into())
    );
    let dropped = lines.iter().filter(|line| line["event"] == "dropped-write");
    let mut sum = 0;
    for line in dropped {
        assert_eq!(line["reason"], "held");
        assert_eq!(line["counter"], "PMC1");
        sum += line["count"].as_u64().unwrap_or(1);
    }
    assert_eq!(sum, u64::from(CLOBBERED));
    let last = lines.last().expect("lines");
    assert_eq!(last["end"], true);
    assert_eq!(last["decisions"], 303);

    let log = std::fs::read_to_string(&log).expect("a log");
    assert!(log.contains("not shown"), "the log has no access to a key");
    assert!(log.contains("0x5a"), "the log has no other access");
    for secret in [KEY, ACCESS] {
        for text in [&log, &text, &told] {
            for form in [
                format!("{secret:x}"),
                format!("{secret:X}"),
                secret.to_string(),
            ] {
                assert!(!text.contains(&form), "a cookie in {text}");
            }
        }
    }
}

/// A terminal that goes away ends the run as SIGTERM does.
#[test]
fn the_audit_file_is_whole_after_a_hangup() {
    if skipped_without_kvm("the_audit_file_is_whole") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let audit = folder.path().join("audit");
    let kernel = Kernel::new(Protocol::Linux64, |a, _| {
        a.xor(esi, esi)?;
        wrmsr(a, pcr(abi::MSR_MANAGEMENT_KEY, 1), KEY)?;
        spin_forever(a)
    })
    .expect("a kernel");
    let flags = ["--audit", audit.to_str().expect("a path")];
    let child = run_command(&kernel, &[&AMD[..], &flags].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("umpire can be started");
    let read = || std::fs::read_to_string(&audit).unwrap_or_default();
    let since = Instant::now();
    while !read().contains("\"reserved\"") {
        assert!(since.elapsed() < Duration::from_secs(20), "no decision");
        std::thread::sleep(Duration::from_millis(5));
    }
    send_signal(child.id(), libc::SIGHUP).expect("a signal");
    let output = child.wait_with_output().expect("an end");
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{told}");
    assert!(told.contains("counter reservations: 1 decisions"), "{told}");
    let text = read();
    let last = text.lines().last().expect("lines");
    let last: Value = serde_json::from_str(last).expect("JSON");
    assert_eq!(
        (&last["end"], &last["decisions"]),
        (&true.into(), &1.into())
    );
}

/// CPUID as the kernel sees it.
#[test]
fn cpuid_tells_what_is_left_and_where_the_block_is() {
    if skipped_without_kvm("cpuid_tells_what_is_left") {
        return;
    }
    let kernel = Kernel::new(Protocol::Multiboot, |a, routines| {
        use iced_x86::code_asm::{edi, edx};
        for leaf in [abi::CPUID_LEAF, 0x8000_0022] {
            a.mov(eax, leaf)?;
            a.xor(ecx, ecx)?;
            a.cpuid()?;
            a.mov(edi, edx)?;
            a.call(routines.hex)?;
            a.mov(eax, ebx)?;
            a.call(routines.hex)?;
            a.mov(eax, edi)?;
            a.call(routines.hex)?;
            print(a, "\n")?;
        }
        exit(a, 0)
    })
    .expect("a kernel");
    let model = ["--cpu-vendor", "amd", "--pmu", "amd-perfmonv2"];
    let run = |more: &[&str], expected: &str| {
        check(&kernel, &[&model[..], more].concat(), expected, 1);
    };
    // Version, base, sizes; PerfMonV2 and the number of counters.
    run(&[], "00000003554d600000300006\n000000010000000600000000\n");
    run(
        &["--hypervisor-counters", "2"],
        "00000003554d600000300006\n000000010000000400000000\n",
    );
    run(
        &[
            "--hypervisor-counters",
            "2",
            "--cpuid-follows-grants",
            "off",
        ],
        "00000003554d600000300006\n000000010000000600000000\n",
    );
    run(
        &["--pcr", "off"],
        "000000000000000000000000\n000000010000000600000000\n",
    );
}

#[test]
fn reservations_that_a_pmu_cannot_have_are_refused() {
    if skipped_without_kvm("reservations_that_a_pmu_cannot_have") {
        return;
    }
    let kernel = Kernel::new(Protocol::Multiboot, |a, _| exit(a, 0)).expect("a kernel");
    let refused = |more: &[&str], parts: &[&str]| {
        let output = run(&kernel, &[&AMD[..], more].concat());
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{more:?}: {told}");
        assert_eq!(told.lines().count(), 1, "{told}");
        for part in parts {
            assert!(told.contains(part), "{more:?}: no {part:?} in {told}");
        }
    };
    refused(&["--hypervisor-counters", "7"], &["amd-core has 6"]);
    refused(&["--hypervisor-counters", "FIXED0"], &["no FIXED0"]);
    refused(&["--hypervisor-counters", "6"], &["PMC5", "--policy"]);
    refused(
        &["--policy", "kernel:min=7"],
        &["--policy", "amd-core", "7 programmable"],
    );
    refused(
        &["--hypervisor-counters", "3", "--cpuid-follows-grants", "on"],
        &["--cpuid-follows-grants on", "amd-perfmonv2"],
    );
}
