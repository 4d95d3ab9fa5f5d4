//! Beside a VM: an LWP is a vCPU.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use guest_tests::kernel::{BASE, spin_forever};
use guest_tests::micro::Written;
use guest_tests::umpire::{self, skipped_without_kvm};
use guest_tests::vm::Vm;
use iced_x86::code_asm::{CodeAssembler, byte_ptr, eax, ecx, edi, edx, esi};
use perfmon_abi::consts::PFM_PROV_SIMULATED;
use perfmon_abi::{PmcArg, PmdArg};
use umpire_perfmon::{Client, WholeVm};

use super::{program, signals, values};

/// Events per microsecond.
const RATES: &str = "counters = 4\n\
    [event.cycles]\nrate = 2000\n\
    [event.instructions]\nrate = 500\n";
/// The guest computes at ring 0.
const EVENTS: &str = "pic0=cycles,pic1=instructions,sys,nouser";
const PATIENCE: Duration = Duration::from_secs(30);

fn boot(flags: &[&str]) -> Vm {
    Vm::boot(&umpire::path(), RATES, flags)
}

/// The program `name`, about vCPU `vcpu` of `vm`.
fn command(vm: &Vm, vcpu: u32, name: &str, words: &[&str]) -> Command {
    let mut command = Command::new(program(name));
    command
        .args(words)
        .env("UMPIRE_VCPU", format!("{}:{vcpu}", vm.socket()))
        .env("PERFEVENTS", EVENTS)
        // The vCPU may have to wait for a CPU.
        .env("CPC_TEST_SLOWER", "10");
    command
}

/// What it says; it succeeds.
fn said(mut command: Command) -> String {
    let output = command.output().expect("a program");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}{told}");
    println!("{said}{told}");
    said
}

#[test]
fn example_1_measures_a_vcpu() {
    if skipped_without_kvm("example_1_measures_a_vcpu") {
        return;
    }
    let vm = boot(&[]);
    let said = said(command(&vm, 0, "measure", &[]));
    assert!(said.starts_with("event: pic0=cycles,pic1=instructions,sys,nouser\n"));
    let values = values(&said);
    assert_eq!(values.len(), 20, "{said}");
    for (cycles, instructions) in &values {
        assert!(cycles.abs_diff(4 * instructions) <= 4, "{said}");
    }
    let seen = values.iter().filter(|(cycles, _)| *cycles > 0).count();
    assert!(seen >= 18, "{said}");
}

#[test]
fn example_2_hears_of_each_overflow() {
    if skipped_without_kvm("example_2_hears_of_each_overflow") {
        return;
    }
    let vm = boot(&[]);
    let said = said(command(&vm, 0, "overflow", &[]));
    let signals = signals(&said);
    assert!(signals.len() >= 3, "{said}");
    let code = u64::from(BASE)..u64::from(BASE) + 0x1000;
    for (address, cycles, instructions) in signals {
        assert!(code.contains(&address), "the guest's code: {said}");
        // Since the preset 1,000 cycles before the overflow.
        let counted = cycles + 1000;
        assert!(counted.abs_diff(4 * instructions) <= 4, "{said}");
    }
}

#[test]
fn calls_do_what_the_pages_say() {
    if skipped_without_kvm("calls_do_what_the_pages_say") {
        return;
    }
    let vm = boot(&["--cpus", "2"]);
    for check in ["states", "rings", "words"] {
        said(command(&vm, 0, "rules", &[check]));
    }
    // A vCPU that never runs counts nothing, and is there.
    let mut other = command(&vm, 1, "rules", &["states"]);
    assert!(!other.output().expect("a program").status.success());
}

#[test]
fn refusals_have_numbers_and_sub_codes() {
    if skipped_without_kvm("refusals_have_numbers_and_sub_codes") {
        return;
    }
    let vm = boot(&["--event-filter", "architectural"]);
    let number = |number: i32| number.to_string();
    let refused = |events, errno, subcode: &str| {
        said(command(
            &vm,
            0,
            "rules",
            &["refused", events, &number(errno), subcode],
        ))
    };
    // Denied by the VM: EACCES, CPC_HV_NO_ACCESS.
    refused("pic0=0x64,umask0=9", libc::EACCES, "11");
    // Nobody counts it, which is not supported here: ENOTSUP, CPC_PIC_NOT_CAPABLE.
    refused("pic0=branches", libc::ENOTSUP, "6");
    // Five events, four counters: EAGAIN, CPC_RESOURCE_UNAVAIL.
    refused("cycles,cycles,cycles,cycles,cycles", libc::EAGAIN, "5");
}

#[test]
fn nobody_is_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let none = folder.path().join("none.sock").display().to_string();
    for (vcpu, errno) in [
        (none.as_str(), libc::ENOSYS),
        ("no-such-vm:0", libc::ENOSYS),
        ("", libc::EINVAL),
        ("a:b", libc::EINVAL),
    ] {
        let mut command = Command::new(program("rules"));
        command.args(["nobody", &errno.to_string()]);
        command.env("UMPIRE_VCPU", vcpu);
        said(command);
    }
}

/// A VM that has a name, and serves where such a VM does. It ends with the test.
struct Named(Child);

impl Drop for Named {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_vm_is_named_by_its_name_or_process() {
    if skipped_without_kvm("a_vm_is_named_by_its_name_or_process") {
        return;
    }
    let runtime = tempfile::tempdir().expect("a folder");
    let rates = runtime.path().join("rates.toml");
    std::fs::write(&rates, RATES).expect("a file");
    let kernel = guest_tests::vm::spinning();
    let vm = Command::new(umpire::path())
        .env("XDG_RUNTIME_DIR", runtime.path())
        .args(["run", "--name", "web1", "--memory", "32", "--timeout", "60"])
        .args(["--pmu", "amd-core", "--cpu-vendor", "amd"])
        .args(["--host-policy", "host-first", "--counters"])
        .arg(format!("sim={}", rates.display()))
        .arg("--kernel")
        .arg(kernel.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn();
    let vm = Named(vm.expect("umpire can be started"));
    let socket = runtime.path().join("umpire/web1.sock");
    let began = Instant::now();
    while Client::connect(&socket).is_err() {
        assert!(began.elapsed() < PATIENCE, "the VM serves its socket");
        std::thread::sleep(Duration::from_millis(20));
    }
    let about = |vcpu: &str, words: &[&str]| {
        let mut command = Command::new(program("rules"));
        command.args(words).env("UMPIRE_VCPU", vcpu);
        command.env("XDG_RUNTIME_DIR", runtime.path());
        command
            .env("PERFEVENTS", EVENTS)
            .env("CPC_TEST_SLOWER", "10");
        said(command);
    };
    for vcpu in ["web1:0", "web1", &format!("{}:0", vm.0.id())] {
        about(vcpu, &["states"]);
    }
    about("web2:0", &["nobody", &libc::ENOSYS.to_string()]);
    about("web1:1", &["nobody", &libc::ESRCH.to_string()]);
}

/// A program that says how far it is, and goes on when its input ends.
struct Talking {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
}

impl Talking {
    fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a program");
        let out = BufReader::new(child.stdout.take().expect("a pipe"));
        Talking { child, out }
    }

    fn hear(&mut self, word: &str) {
        let mut line = String::new();
        self.out.read_line(&mut line).expect("a line");
        assert_eq!(line.trim(), word);
    }

    fn go_on(&mut self) {
        self.child.stdin.take();
    }

    fn join(mut self) {
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).expect("text");
        assert!(self.child.wait().expect("an end").success(), "{rest}");
        println!("{rest}");
    }
}

#[test]
fn somebody_who_counts_system_wide_invalidates() {
    if skipped_without_kvm("somebody_who_counts_system_wide_invalidates") {
        return;
    }
    let vm = boot(&[]);
    let mut program = Talking::start(command(&vm, 0, "rules", &["system_wide"]));
    program.hear("bound");
    let mut stat = vm.command(&["stat", "-a", "-e", "cycles", "--for", "60s"]);
    let mut stat = stat.stderr(Stdio::null()).spawn().expect("umpire stat");
    program.go_on();
    program.hear("invalid");
    guest_tests::vm::signal(&stat, "-INT");
    stat.wait().expect("an end");
    program.hear("again");
    program.join();
}

/// Where the second processor starts (vector 0x60).
const TRAMPOLINE: u32 = 0x6_0000;

/// Some seconds after boot the other processors start.
fn others_start_later(a: &mut CodeAssembler) -> Written {
    // 2^33 to 3 * 2^32 ticks of the time stamp counter: some 3 to 5 seconds.
    let mut wait = a.create_label();
    a.rdtsc()?;
    a.mov(esi, edx)?;
    a.add(esi, 3)?;
    a.set_label(&mut wait)?;
    a.pause()?;
    a.rdtsc()?;
    a.cmp(edx, esi)?;
    a.jb(wait)?;
    others_start(a)
}

/// All other processors are started, by the x2APIC (SDM vol. 3A, 10.12), and spin.
fn others_start(a: &mut CodeAssembler) -> Written {
    const APIC_BASE: u32 = 0x1b;
    const ENABLE: u32 = 0xc00;
    const SPURIOUS: u32 = 0x80f;
    const COMMAND: u32 = 0x830;
    const OTHERS: u32 = 3 << 18;
    const INIT: u32 = OTHERS | 0x4500;
    const START: u32 = OTHERS | 0x4600 | TRAMPOLINE >> 12;
    // Real mode: `jmp $`.
    for (offset, byte) in (0..).zip([0xeb, 0xfe]) {
        a.mov(edi, TRAMPOLINE + offset)?;
        a.mov(byte_ptr(edi), byte)?;
    }
    a.mov(ecx, APIC_BASE)?;
    a.rdmsr()?;
    a.or(eax, i32::try_from(ENABLE).unwrap_or(0))?;
    a.wrmsr()?;
    a.mov(ecx, SPURIOUS)?;
    a.mov(eax, 0x1ff)?;
    a.mov(edx, 0)?;
    a.wrmsr()?;
    for command in [INIT, START, START] {
        a.mov(ecx, COMMAND)?;
        a.mov(edx, 0)?;
        a.mov(eax, command)?;
        a.wrmsr()?;
    }
    spin_forever(a)
}

#[test]
fn vcpus_that_start_later_inherit() {
    if skipped_without_kvm("vcpus_that_start_later_inherit") {
        return;
    }
    for signals in ["0", "1"] {
        let vm = Vm::boot_kernel(&umpire::path(), RATES, &["--cpus", "2"], others_start_later);
        let mut program = Talking::start(command(&vm, 0, "rules", &["later", signals]));
        program.hear("bound");
        await_second(&vm);
        program.go_on();
        program.join();
    }
}

/// The second vCPU has not started yet, and does now.
fn await_second(vm: &Vm) {
    let offline = || vm.printed(&["ls", &vm.socket()]).contains("offline");
    assert!(offline(), "it was there before the second one starts");
    let began = Instant::now();
    while offline() {
        assert!(began.elapsed() < PATIENCE, "the second one starts");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A VM-wide handle has contexts on vCPUs that have not started: they count from the first
/// instruction on, and are in the sum.
#[test]
fn a_sum_over_a_vm_has_vcpus_that_start_later() {
    if skipped_without_kvm("a_sum_over_a_vm_has_vcpus_that_start_later") {
        return;
    }
    let vm = Vm::boot_kernel(&umpire::path(), RATES, &["--cpus", "2"], others_start_later);
    let client = Client::connect(vm.socket()).expect("a client");
    let (event, count) = (0x43_0076, PmdArg::default());
    let cycles = PmcArg {
        value: event,
        ..PmcArg::default()
    };
    let run_time = 72;
    let whole = WholeVm::attach(&client, 0, (&[cycles], &[count]), &[run_time]).expect("contexts");
    whole.start(&client).expect("they count");
    assert_eq!(whole.of(&client, 1).expect("counts").counts[0].value, 0);
    await_second(&vm);
    let counted = || whole.of(&client, 1).expect("counts");
    let began = Instant::now();
    while counted().counts[0].value == 0 {
        assert!(began.elapsed() < PATIENCE, "it counts");
        std::thread::sleep(Duration::from_millis(20));
    }
    // Both are of one moment, and 2 cycles are a nanosecond: none is missing since it started.
    // There are more where its thread waited for a CPU, which is no time that it ran.
    let second = counted();
    let [cycles, ran] = [0, 1].map(|index| second.counts[index].value);
    assert!(cycles / 2 + ran / 10 + 1_000_000 > ran, "{second:?}");
    whole.stop(&client).expect("they stop");
    let [one, other] = [0, 1].map(|vcpu| whole.of(&client, vcpu).expect("counts").counts[0].value);
    let sum = whole.sum(&client).expect("a sum").counts[0];
    assert_eq!(
        (sum.value, sum.provenance),
        (one + other, PFM_PROV_SIMULATED)
    );
}

#[test]
fn signals_are_about_the_vcpu_that_has_overflowed() {
    if skipped_without_kvm("signals_are_about_the_vcpu_that_has_overflowed") {
        return;
    }
    let flags = ["--cpus", "3"];
    let vm = Vm::boot_kernel(&umpire::path(), RATES, &flags, others_start);
    said(command(&vm, 0, "robust", &["several"]));
}

#[test]
fn programs_fork_and_block_and_end_threads() {
    if skipped_without_kvm("programs_fork_and_block_and_end_threads") {
        return;
    }
    // The second vCPU is never started.
    let vm = boot(&["--cpus", "2"]);
    for check in ["handler", "blocked", "waits", "forks", "cancelled"] {
        said(command(&vm, 0, "robust", &[check]));
    }
}

#[test]
fn a_processor_has_the_counters_of_this_vm() {
    if skipped_without_kvm("a_processor_has_the_counters_of_this_vm") {
        return;
    }
    let vm = boot(&[
        "--pmu",
        "intel-v2,counters=3,fixed=1",
        "--cpu-vendor",
        "intel",
    ]);
    let mut words = command(&vm, 0, "rules", &["words"]);
    words.env("CPC_TEST_PICS", "4");
    said(words);
}

#[test]
fn a_vm_that_is_started_again_is_found_again() {
    if skipped_without_kvm("a_vm_that_is_started_again_is_found_again") {
        return;
    }
    for (check, pmu) in [
        (&["restarted", "1"][..], "amd-core"),
        (&["restarted", "0"], "amd-k7"),
        (&["others_restarted"], "amd-core"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let link = folder.path().join("link.sock");
        let lead_to = |vm: &Vm| {
            let _ = std::fs::remove_file(&link);
            std::os::unix::fs::symlink(vm.socket(), &link).expect("a link");
        };
        let vm = boot(&["--cpus", "2"]);
        lead_to(&vm);
        let mut command = command(&vm, 0, "rules", check);
        command.env("UMPIRE_VCPU", format!("{}:0", link.display()));
        let mut program = Talking::start(command);
        program.hear("bound");
        drop(vm);
        program.hear("lost");
        let again = boot(&["--cpus", "2", "--pmu", pmu, "--cpu-vendor", "amd"]);
        lead_to(&again);
        program.join();
    }
}
