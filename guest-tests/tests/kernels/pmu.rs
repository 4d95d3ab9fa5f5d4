//! The virtual PMU as a bare-metal kernel in 32-bit mode meets it.

use guest_tests::kernel::{BASE, Kernel, Protocol, Routines, exit, print};
use guest_tests::micro::wrmsr;
use guest_tests::umpire::{on_emu, skipped_without_kvm};
use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, dword_ptr, eax, ebx, ecx, edi, edx, esp, word_ptr};
use pmu_virt::{ClockBackend, CounterBackend, EmuBackend, EmuCycles, MsrIndex, PmuModel, Register};

use super::run;

type Written = Result<(), IcedError>;

const IDT: u32 = BASE + 0x8000;
const IDTR: u32 = BASE + 0x9000;
const GP_VECTOR: u32 = 13;
const CODE_SELECTOR: u32 = 0x10;
/// Present, DPL 0, 32-bit interrupt gate.
const INTERRUPT_GATE: u32 = 0x8e00;

/// Points #GP at `handler` in a new IDT.
fn catch_gp(a: &mut CodeAssembler, handler: impl FnOnce(&mut CodeAssembler) -> Written) -> Written {
    // A call over the handler leaves its address on the stack.
    let mut behind = a.create_label();
    a.call(behind)?;
    handler(a)?;
    a.set_label(&mut behind)?;
    a.pop(eax)?;
    a.mov(edx, eax)?;
    a.and(eax, 0xffff)?;
    a.or(eax, (CODE_SELECTOR << 16).cast_signed())?;
    a.and(edx, 0xffff_0000u32.cast_signed())?;
    a.or(edx, INTERRUPT_GATE.cast_signed())?;
    a.mov(edi, IDT + 8 * GP_VECTOR)?;
    a.mov(dword_ptr(edi), eax)?;
    a.mov(dword_ptr(edi + 4), edx)?;
    a.mov(edi, IDTR)?;
    a.mov(word_ptr(edi), 8 * 32 - 1)?;
    a.mov(dword_ptr(edi + 2), IDT)?;
    // LIDT [EDI]
    a.db(&[0x0f, 0x01, 0x1f])
}

/// Skips a two-byte instruction; EAX and EDX say so.
fn skip(a: &mut CodeAssembler) -> Written {
    a.add(esp, 4)?;
    a.add(dword_ptr(esp), 2)?;
    a.mov(eax, 0xbad0_bad0u32)?;
    a.mov(edx, 0xbad1_bad1u32)?;
    a.iretd()
}

/// Prints EDX:EAX.
fn print_pair(a: &mut CodeAssembler, routines: &Routines) -> Written {
    a.mov(ebx, eax)?;
    a.mov(eax, edx)?;
    a.call(routines.hex)?;
    a.mov(eax, ebx)?;
    a.call(routines.hex)?;
    print(a, "\n")
}

fn all_msrs(model: &PmuModel) -> Vec<u32> {
    let ranges = model.msr_ranges();
    ranges
        .iter()
        .flat_map(|&(first, last)| first..=last)
        .collect()
}

/// What RDMSR of a register gives at reset; `None` where it may differ or
/// raises #GP.
fn at_reset(model: &PmuModel, msr: u32) -> Option<u64> {
    match model.decode(MsrIndex(msr))? {
        Register::GlobalControl => Some(model.global_control_reset()),
        Register::PerfCapabilities => model.perf_capabilities(),
        // Write-only on some models, zero elsewhere.
        Register::GlobalStatusClear | Register::GlobalStatusSet => None,
        _ => Some(0),
    }
}

/// Who counts, in the words of `--counters`.
fn source() -> (&'static str, Box<dyn CounterBackend>) {
    if on_emu() {
        ("emu", Box::new(EmuBackend::new(EmuCycles::Simulated)))
    } else {
        ("clock", Box::new(ClockBackend::new()))
    }
}

fn every_register_is_clear(vendor: &str, name: &str) {
    // The machine leaves out what its source cannot count, where CPUID can say so.
    let (word, source) = source();
    let model = PmuModel::parse(name).expect("a model");
    let model = model.counted(|event| source.plan(event).is_ok());
    let msrs = all_msrs(&model);
    let kernel = Kernel::new(Protocol::Multiboot, |a, routines| {
        catch_gp(a, skip)?;
        for &msr in &msrs {
            a.mov(ecx, msr)?;
            a.rdmsr()?;
            print_pair(a, routines)?;
        }
        exit(a, 0)
    })
    .expect("a kernel");
    let flags = ["--cpu-vendor", vendor, "--counters", word, "--pmu", name];
    let output = run(&kernel, &flags);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{name}: {told}");
    let printed = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), msrs.len(), "{name}: {printed}");
    let mut checked = 0;
    for (msr, line) in msrs.iter().zip(lines) {
        let value = u64::from_str_radix(line, 16).expect("a number");
        if let Some(expected) = at_reset(&model, *msr) {
            assert_eq!(value, expected, "{name}: MSR {msr:#x} at reset");
            checked += 1;
        }
    }
    let counters = model.counters().count();
    assert!(
        checked > counters,
        "{name}: {checked} of {counters} counters"
    );
}

#[test]
fn at_reset_every_pmu_register_is_cleared() {
    if skipped_without_kvm("at_reset") {
        return;
    }
    for (vendor, name) in [
        ("intel", "intel-v1"),
        ("intel", "intel-v2"),
        ("intel", "intel-v3"),
        ("intel", "intel-v4"),
        ("intel", "intel-v5"),
        ("amd", "amd-k7"),
        ("amd", "amd-fam10h"),
        ("amd", "amd-core"),
        ("amd", "amd-perfmonv2"),
    ] {
        every_register_is_clear(vendor, name);
    }
}

/// A kernel that lets counter 0 run for a while and reads it twice with RDPMC.
fn rdpmc_kernel(writes: &[(u32, u32)], index: u32) -> Kernel {
    let kernel = Kernel::new(Protocol::Multiboot, |a, routines| {
        let mut again = a.create_label();
        catch_gp(a, |a| {
            print(a, "#GP\n")?;
            exit(a, 1)
        })?;
        for &(msr, value) in writes {
            a.mov(ecx, msr)?;
            a.mov(eax, value)?;
            a.mov(edx, 0)?;
            a.wrmsr()?;
        }
        a.mov(ecx, index)?;
        a.rdpmc()?;
        a.mov(edi, eax)?;
        a.mov(ebx, 200)?;
        a.set_label(&mut again)?;
        a.dec(ebx)?;
        a.jne(again)?;
        a.mov(ecx, index)?;
        a.rdpmc()?;
        print_pair(a, routines)?;
        a.mov(eax, edi)?;
        a.mov(edx, 0)?;
        print_pair(a, routines)?;
        exit(a, 0)
    });
    kernel.expect("a kernel")
}

#[test]
fn rdpmc_counts_in_32_bit_mode() {
    if skipped_without_kvm("rdpmc_counts") {
        return;
    }
    const USR_OS_EN: u32 = 0x43 << 16;
    let amd = [(0xc001_0200, USR_OS_EN | 0x76)];
    let intel = [(0x38f, 1), (0x186, USR_OS_EN | 0x3c)];
    let check = |kernel: &Kernel, flags: &[&str]| {
        let output = run(kernel, flags);
        let told = String::from_utf8_lossy(&output.stderr);
        let printed = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{flags:?}: {printed} {told}");
        let values: Vec<u64> = printed
            .lines()
            .map(|line| u64::from_str_radix(line, 16).expect("a number"))
            .collect();
        let [second, first] = values[..] else {
            panic!("{flags:?}: {printed}");
        };
        assert!(
            second > first && first > 0,
            "{flags:?}: {first} to {second}"
        );
    };
    check(
        &rdpmc_kernel(&amd, 0),
        &["--cpu-vendor", "amd", "--pmu", "amd-core"],
    );
    check(
        &rdpmc_kernel(&intel, 0),
        &["--cpu-vendor", "intel", "--pmu", "intel-v2"],
    );
    // Without a PMU there is nothing to read, and the #GP is the kernel's own.
    let none = run(&rdpmc_kernel(&amd, 0), &["--pmu", "none"]);
    assert_eq!(String::from_utf8_lossy(&none.stdout), "#GP\n");
    assert_eq!(none.status.code(), Some(3));
    // An index that the model lacks.
    let absent = run(
        &rdpmc_kernel(&amd, 6),
        &["--cpu-vendor", "amd", "--pmu", "amd-core"],
    );
    assert_eq!(String::from_utf8_lossy(&absent.stdout), "#GP\n");
}

/// PERF_CTL0 of the core extension; selects and counters alternate.
const PERF_CTL0: u32 = 0xc001_0200;
const ENABLED: u64 = 0x53_0000;
const CYCLES: u64 = 0x76;
const MISPREDICTED: u64 = 0xc3;
const UNKNOWN: u64 = 0x29;

/// Programs events as a driver does that goes from task to task: off and on, and on
/// another counter.
fn dead_events(a: &mut CodeAssembler) -> Written {
    for counter in 0..3 {
        for event in [MISPREDICTED, UNKNOWN, CYCLES] {
            for select in [event | ENABLED, event, event | ENABLED] {
                wrmsr(a, PERF_CTL0 + 2 * counter, select)?;
            }
        }
    }
    exit(a, 0)
}

/// A guest reads 0 for what nobody counts, so the log of the host says it: each event
/// once.
#[test]
fn the_log_names_what_nobody_counts_once() {
    if skipped_without_kvm("the_log_names_what_nobody_counts_once") {
        return;
    }
    let (word, _) = source();
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    let kernel = Kernel::new(Protocol::Linux64, |a, _| dead_events(a)).expect("a kernel");
    let flags = [
        &["--cpu-vendor", "amd", "--pmu", "amd-core", "-v"][..],
        &["--counters", word],
        &["--log-file", log.to_str().expect("a path")],
    ];
    let output = run(&kernel, &flags.concat());
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    let log = std::fs::read_to_string(&log).expect("a log");
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("frozen")).collect();
    let expected = [
        ("mispredicted branches", "c3"),
        ("event 0x29 umask 0x0", "29"),
    ];
    let expected = expected.map(|(event, code)| {
        format!(
            "umpire: info: vCPU 0: PMC0 stays frozen on '{event}' (r5300{code}): \
             the {word} backend cannot count {event}"
        )
    });
    assert_eq!(lines, expected, "{log}");
}
