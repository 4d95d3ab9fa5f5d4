//! Which engine runs a guest where nobody says which, and what is told of that. Nothing of it
//! needs KVM.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

use guest_tests::kernel::{Kernel, Protocol, Pty, exit, print, spin_forever};
use guest_tests::umpire;
use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, esp};
use serde_json::Value;

/// What `umpire run` is told besides kernel and engine.
const FLAGS: [&str; 4] = ["--memory", "32", "--timeout", "30"];

fn kernel(body: fn(&mut CodeAssembler) -> Result<(), IcedError>) -> Kernel {
    let kernel = Kernel::new(Protocol::Multiboot, |a, _| {
        print(a, "up\n")?;
        body(a)?;
        spin_forever(a)
    });
    kernel.expect("a kernel")
}

/// Runs the arguments with no `/dev` but an empty one, so without `/dev/kvm`; why that cannot
/// be done here, if it cannot.
fn without_kvm(program: &Path, arguments: &[&str]) -> Result<Output, String> {
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--mount", "sh", "-c", script]);
        command.arg(program).args(arguments).stdin(Stdio::null());
        let output = command.output();
        output.map_err(|error| format!("unshare: {error}"))
    };
    let empty = "mount -t tmpfs none /dev";
    let tried = unshare(empty)?;
    if !tried.status.success() {
        return Err(String::from_utf8_lossy(&tried.stderr).trim().to_owned());
    }
    unshare(&format!("{empty} && exec \"$0\" \"$@\""))
}

/// The guest has run, on the processor in software, and one line says why.
fn check(output: &Output, expected: &[&str]) {
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "up\n", "{told}");
    let of_engine = told.lines().filter(|line| line.contains("engine emu"));
    let of_engine: Vec<&str> = of_engine.collect();
    let [line] = of_engine.as_slice() else {
        panic!("one line of the engine: {told}");
    };
    for words in expected {
        assert!(line.contains(words), "no '{words}' in: {line}");
    }
}

#[test]
fn what_only_the_processor_in_software_has_runs_there() {
    let kernel = kernel(|a| exit(a, 0));
    for (flags, why) in [
        (&["--seed", "1"][..], "as --seed"),
        (&["--cycles", "simulated"], "as --cycles simulated"),
        (&["--counters", "emu"], "as --counters emu"),
    ] {
        let mut command = Command::new(umpire::path());
        command.arg("run").args(FLAGS).args(flags);
        command.arg("--kernel").arg(kernel.path());
        let output = command.stdin(Stdio::null()).output();
        let output = output.expect("umpire can be started");
        check(&output, &[why, "is only there", "its time is virtual"]);
    }
}

#[test]
fn without_kvm_the_processor_in_software_runs_the_guest() {
    const NAME: &str = "without_kvm_the_processor_in_software_runs_the_guest";
    let kernel = kernel(|a| exit(a, 0));
    let path = kernel.path();
    let file = path.to_str().expect("a name that is text");
    let run = [&["run"][..], &FLAGS, &["--kernel", file]].concat();
    match without_kvm(&umpire::path(), &run) {
        Ok(output) => check(
            &output,
            &["there is no /dev/kvm", "its time is virtual, a nanosecond"],
        ),
        Err(why) => println!("skipped: {NAME}: no /dev/kvm is not possible here: {why}"),
    }
    let clock = [&run[..], &["--counters", "clock"]].concat();
    if let Ok(output) = without_kvm(&umpire::path(), &clock) {
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains("/dev/kvm"), "{told}");
        assert_eq!(output.stdout, b"");
    }
}

/// No engine is named, and one row of the demo needs this one.
#[test]
fn without_kvm_the_demo_counts_instructions() {
    const NAME: &str = "without_kvm_the_demo_counts_instructions";
    let output = match without_kvm(&umpire::path(), &["demo", "-j"]) {
        Ok(output) => output,
        Err(why) => {
            println!("skipped: {NAME}: no /dev/kvm is not possible here: {why}");
            return;
        }
    };
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let demo: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(demo["engine"], "emu", "{demo}");
    let why = demo["because"].as_str().unwrap_or_default();
    assert!(why.contains("there is no /dev/kvm"), "{demo}");
    let counters = demo["counters"].as_array().expect("counters");
    let row = counters.iter().find(|row| row["event"] == "instructions");
    let row = row.expect("a row of instructions");
    assert_eq!(row["provenance"], "exact", "{row}");
    // A loop of five million, and some around it.
    let counted = row["counted"].as_u64().expect("a count");
    assert!((5_000_000..5_001_000).contains(&counted), "{row}");
}

/// Nothing can ever wake it: no timer runs, interrupts are off, and nobody types.
#[test]
fn a_guest_that_sleeps_for_ever_ends_with_a_status() {
    let kernel = kernel(CodeAssembler::hlt);
    let mut command = Command::new(umpire::path());
    command.arg("run").args(FLAGS).args(["--engine", "emu"]);
    command.arg("--kernel").arg(kernel.path());
    let output = command.stdin(Stdio::null()).output();
    let output = output.expect("umpire can be started");
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(6), "{told}");
    assert!(told.contains("sleeps for ever"), "{told}");
}

/// Whether all threads of a process sleep.
fn sleeps(process: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task")).expect("it runs");
    let mut stats = threads.map(|thread| {
        let file = thread.expect("a thread").path().join("stat");
        // One that has ended since has none.
        fs::read_to_string(file).unwrap_or_default()
    });
    // The state stands behind the name, which is in brackets (proc_pid_stat(5)).
    stats.all(|stat| !stat.contains(") R "))
}

/// The same at a terminal: somebody may type, so it waits in the host's time, and takes none.
#[test]
fn a_guest_that_sleeps_at_a_terminal_waits_for_the_host() {
    const LOOKS: u32 = 40;
    let pty = Pty::open().expect("a terminal");
    let kernel = kernel(CodeAssembler::hlt);
    let mut command = Command::new(umpire::path());
    command.args(["run", "--memory", "32", "--timeout", "2"]);
    command
        .args(["--engine", "emu", "--kernel"])
        .arg(kernel.path());
    command.stdin(pty.stdin().expect("a terminal"));
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("umpire can be started");
    let mut up = String::new();
    let output = child.stdout.take().expect("a pipe");
    BufReader::new(output).read_line(&mut up).expect("a line");
    assert_eq!(up, "up\n");
    let asleep = (0..LOOKS).filter(|_| {
        sleep(Duration::from_millis(20));
        sleeps(child.id())
    });
    let asleep = asleep.count();
    let output = child.wait_with_output().expect("an end");
    let told = String::from_utf8_lossy(&output.stderr);
    let first = told.lines().next().unwrap_or_default();
    assert!(
        first.contains("its time follows the host's clock"),
        "{told}"
    );
    assert_eq!(output.status.code(), Some(124), "{told}");
    assert!(asleep > 30, "asleep at {asleep} of {LOOKS} looks");
}

/// Nothing of that kind is announced and missing (`codes` of `emu`), so an old mode stands for it.
#[test]
fn what_the_processor_in_software_lacks_has_a_status_of_its_own() {
    /// EFLAGS.VM, and the bit that is always 1.
    const TO_VIRTUAL_8086: i32 = 1 << 17 | 2;
    let kernel = kernel(|a| {
        // Multiboot leaves the stack to the kernel.
        a.mov(esp, 0x10_f000)?;
        a.push(TO_VIRTUAL_8086)?;
        a.push(0)?;
        a.push(0)?;
        a.iretd()
    });
    let mut command = Command::new(umpire::path());
    command.arg("run").args(FLAGS).args(["--engine", "emu"]);
    command.arg("--kernel").arg(kernel.path());
    let output = command.stdin(Stdio::null()).output();
    let output = output.expect("umpire can be started");
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(8), "{told}");
    assert_eq!(told.lines().count(), 1, "{told}");
    for words in ["at RIP 0x1000", "virtual 8086 mode", "--engine kvm"] {
        assert!(told.contains(words), "no '{words}' in: {told}");
    }
}
