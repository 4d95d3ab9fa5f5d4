//! How a run ends, and that the terminal is as it was.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use guest_tests::kernel::{Kernel, Protocol, Pty, exit, print, put, send_signal, spin_forever};
use guest_tests::umpire::{on_emu, skipped_without_kvm};
use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, ax, dx, eax, edx};

use super::{check, run, run_command};

type Written = Result<(), IcedError>;
type Body = fn(&mut CodeAssembler) -> Written;

const PM1A_CONTROL: u32 = 0x604;
/// SLP_EN, and SLP_TYP 5.
const POWER_OFF: u32 = 1 << 13 | 5 << 10;

fn kernel(body: Body) -> Kernel {
    let kernel = Kernel::new(Protocol::Multiboot, |a, _| {
        print(a, "up\n")?;
        body(a)?;
        spin_forever(a)
    });
    kernel.expect("a kernel")
}

fn power_off(a: &mut CodeAssembler) -> Written {
    a.mov(edx, PM1A_CONTROL)?;
    a.mov(eax, POWER_OFF)?;
    a.out(dx, ax)
}

/// The IDT is empty at the start, so the first exception is the third.
fn triple_fault(a: &mut CodeAssembler) -> Written {
    a.ud2()
}

#[test]
fn guests_end_by_power_off_reset_and_test_exit() {
    if skipped_without_kvm("guests_end") {
        return;
    }
    let ends: [(Body, i32); 6] = [
        (power_off, 0),
        (|a| put(a, 0x64, 0xfe), 0),
        (|a| put(a, 0xcf9, 0x06), 0),
        (|a| put(a, 0x92, 0x01), 0),
        (|a| exit(a, 0), 1),
        (|a| exit(a, 0x7f), 255),
    ];
    for (body, status) in ends {
        check(&kernel(body), &[], "up\n", status);
    }
}

#[test]
fn a_triple_fault_is_reported_as_such() {
    if skipped_without_kvm("a_triple_fault") {
        return;
    }
    let output = run(&kernel(triple_fault), &[]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(6), "{told}");
    assert_eq!(told.lines().count(), 1, "{told}");
    assert!(told.contains("triple fault"), "{told}");
}

/// Replaces the time that every kernel has.
const TIME_OUT: &[&str] = &["--timeout", "0.3"];

/// Four vCPUs on three cores: vCPU 0 shares its core with one that waits for its
/// start-up IPI, the others have a core for themselves.
const ON_A_CORE: &[&str] = &["--cpus", "4", "--cores", "3", "--pin", "0"];

/// What ends a run from outside.
#[derive(Clone, Copy, Debug)]
enum Push {
    Nothing,
    Signal(i32),
}

/// Runs a kernel on a terminal and looks at the terminal before, while the guest
/// runs, and after.
fn on_a_terminal(body: Body, flags: &[&str], push: Push, status: i32) {
    let pty = Pty::open().expect("a terminal");
    let before = pty.mode().expect("a mode");
    assert!(before.is_cooked());
    let kernel = kernel(body);
    let mut child = run_command(&kernel, flags)
        .stdin(pty.stdin().expect("a terminal"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("umpire can be started");
    if let Push::Signal(signal) = push {
        wait_for(&mut child, || !pty.mode().expect("a mode").is_cooked());
        // Threads start behind the terminal's change; any moment must do.
        send_signal(child.id(), signal).expect("a signal");
    }
    let output = child.wait_with_output().expect("an end");
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{push:?}: {told}");
    assert_eq!(pty.mode().expect("a mode"), before, "{push:?}: {told}");
}

fn wait_for(child: &mut Child, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "it takes too long"
        );
        assert_eq!(child.try_wait().expect("a child"), None, "it ended early");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn every_way_out_restores_the_terminal() {
    if skipped_without_kvm("every_way_out") {
        return;
    }
    let endless: Body = |_| Ok(());
    let sleeping: Body = |a| {
        a.cli()?;
        a.hlt()
    };
    let ways: [(Body, &[&str], Push, i32); 13] = [
        (power_off, &[], Push::Nothing, 0),
        (|a| exit(a, 3), &[], Push::Nothing, 7),
        (triple_fault, &[], Push::Nothing, 6),
        (endless, TIME_OUT, Push::Nothing, 124),
        (sleeping, TIME_OUT, Push::Nothing, 124),
        (endless, &[], Push::Signal(libc::SIGINT), 130),
        (endless, &["--cpus", "2"], Push::Signal(libc::SIGTERM), 130),
        (sleeping, &[], Push::Signal(libc::SIGTERM), 130),
        (endless, &[], Push::Signal(libc::SIGHUP), 130),
        (power_off, ON_A_CORE, Push::Nothing, 0),
        (triple_fault, ON_A_CORE, Push::Nothing, 6),
        (endless, ON_A_CORE, Push::Signal(libc::SIGINT), 130),
        (sleeping, ON_A_CORE, Push::Signal(libc::SIGTERM), 130),
    ];
    // On the processor in software no vCPUs share a core.
    let ways = ways
        .into_iter()
        .filter(|(_, flags, ..)| !on_emu() || !flags.contains(&"--cores"));
    for (body, flags, push, status) in ways {
        on_a_terminal(body, flags, push, status);
    }
}
