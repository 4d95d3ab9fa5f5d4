//! Firmware before the kernel: the kernel finds what it finds without.

use std::fs;
use std::path::Path;

use arbiter::abi;
use firmware::layout;
use guest_tests::kernel::{BASE, Kernel, Protocol, Routines, count_low, exit, print};
use guest_tests::micro::wrmsr;
use guest_tests::umpire::{skipped_without_firmware, skipped_without_kvm};
use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, ax, byte_ptr, cr0, cr2, cr3, cr4, dword_ptr, eax, ebp, ebx, ecx, edi, edx, esi,
    esp, qword_ptr, r8, r9, r10, r11, r12, r13, r14, r15, rax, rbp, rbx, rcx, rdi, rdx, rsi, rsp,
    word_ptr,
};

use super::{check, run};

type Written = Result<(), IcedError>;

/// Where a kernel keeps what it found, and how many words that is.
const FOUND: u32 = BASE + 0x8000;
const WORDS: u32 = 60;
const EFER: u32 = 0xc000_0080;
const APIC_BASE: u32 = 0x1b;

const BUILTIN: [&str; 2] = ["--firmware", "builtin"];

/// Stores every register in words from [`FOUND`] on, before it changes it.
fn store_registers(a: &mut CodeAssembler, protocol: Protocol) -> Written {
    if protocol == Protocol::Linux64 {
        let general = [
            rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15,
        ];
        for (at, register) in (FOUND..).step_by(8).zip(general) {
            a.mov(qword_ptr(at), register)?;
        }
        a.pushfq()?;
        a.pop(rax)?;
    } else {
        let general = [eax, ecx, edx, ebx, esp, ebp, esi, edi];
        for (at, register) in (FOUND..).step_by(4).zip(general) {
            a.mov(dword_ptr(at), register)?;
        }
        a.pushfd()?;
        a.pop(eax)?;
    }
    a.mov(dword_ptr(FOUND + 0x80), eax)?;
    for (at, control) in (FOUND + 0x84..).step_by(4).zip([cr0, cr2, cr3, cr4]) {
        match protocol {
            Protocol::Linux64 => a.mov(rax, control)?,
            Protocol::Pvh | Protocol::Multiboot => a.mov(eax, control)?,
        }
        a.mov(dword_ptr(at), eax)?;
    }
    use iced_x86::code_asm::{cs, ds, es, fs, gs, ss};
    for (at, segment) in (FOUND + 0x94..).step_by(4).zip([cs, ds, es, fs, gs, ss]) {
        a.mov(ax, segment)?;
        a.mov(word_ptr(at), ax)?;
    }
    a.str(ax)?;
    a.mov(word_ptr(FOUND + 0xac), ax)?;
    if protocol == Protocol::Linux64 {
        a.sgdt(qword_ptr(FOUND + 0xb0))?;
        a.sidt(qword_ptr(FOUND + 0xc0))?;
    } else {
        a.sgdt(dword_ptr(FOUND + 0xb0))?;
        a.sidt(dword_ptr(FOUND + 0xc0))?;
    }
    for (at, msr) in (FOUND + 0xd0..).step_by(8).zip([EFER, APIC_BASE]) {
        a.mov(ecx, msr)?;
        a.rdmsr()?;
        a.mov(dword_ptr(at), eax)?;
        a.mov(dword_ptr(at + 4), edx)?;
    }
    Ok(())
}

/// Prints `count` words from `from` on, in one line.
fn print_words(a: &mut CodeAssembler, routines: &Routines, from: u32, count: u32) -> Written {
    let mut again = a.create_label();
    a.mov(edi, from)?;
    a.mov(ebp, count)?;
    a.set_label(&mut again)?;
    a.mov(eax, dword_ptr(edi))?;
    a.call(routines.hex)?;
    print(a, " ")?;
    a.add(edi, 4)?;
    a.dec(ebp)?;
    a.jne(again)?;
    print(a, "\n")
}

fn dumping(protocol: Protocol) -> Kernel {
    let kernel = Kernel::new(protocol, |a, routines| {
        store_registers(a, protocol)?;
        print_words(a, routines, FOUND, WORDS)?;
        // The descriptor table and the task state segment.
        print_words(a, routines, 0x500, 12)?;
        print_words(a, routines, 0x600, 26)?;
        exit(a, 0)
    });
    kernel.expect("a kernel")
}

const PROTOCOLS: [Protocol; 3] = [Protocol::Linux64, Protocol::Pvh, Protocol::Multiboot];

#[test]
fn every_kernel_finds_the_registers_that_it_finds_without_firmware() {
    if skipped_without_kvm("every_kernel_finds") || skipped_without_firmware("every_kernel_finds") {
        return;
    }
    for protocol in PROTOCOLS {
        let kernel = dumping(protocol);
        for cpus in ["1", "4"] {
            let told = |flags: &[&str]| {
                let output = run(&kernel, &[&["--cpus", cpus], flags].concat());
                let log = String::from_utf8_lossy(&output.stderr).into_owned();
                assert_eq!(output.status.code(), Some(1), "{protocol:?}: {log}");
                String::from_utf8_lossy(&output.stdout).into_owned()
            };
            let without = told(&[]);
            assert_eq!(without.lines().count(), 3, "{without}");
            assert_eq!(told(&BUILTIN), without, "{protocol:?} with {cpus} vCPUs");
        }
    }
}

#[test]
fn the_memory_map_reserves_what_is_the_firmwares() {
    if skipped_without_kvm("the_memory_map") || skipped_without_firmware("the_memory_map") {
        return;
    }
    let kernel = Kernel::new(Protocol::Multiboot, |a, routines| {
        // KiB of conventional memory, and the first two entries of the map.
        a.mov(eax, dword_ptr(ebx + 4))?;
        a.call(routines.hex)?;
        print(a, "\n")?;
        a.mov(ebx, dword_ptr(ebx + 48))?;
        for entry in [0, 24] {
            for word in [4, 12, 20] {
                a.mov(eax, dword_ptr(ebx + entry + word))?;
                a.call(routines.hex)?;
                print(a, " ")?;
            }
            print(a, "\n")?;
        }
        exit(a, 0)
    })
    .expect("a kernel");
    let with = "00000200\n00000000 00080000 00000001 \n00080000 00020000 00000002 \n";
    check(&kernel, &BUILTIN, with, 1);
    let without = "0000027f\n00000000 0009fc00 00000001 \n0009fc00 00000400 00000002 \n";
    check(&kernel, &["--firmware", "none"], without, 1);
}

/// Starts every other processor, one after the other, and prints a letter for
/// each that has come.
#[test]
fn the_other_processors_wait_for_the_kernel() {
    if skipped_without_kvm("the_other_processors")
        || skipped_without_firmware("the_other_processors")
    {
        return;
    }
    const CPUS: u32 = 4;
    /// Real mode: `inc byte cs:[0x100]; hlt; jmp $ - 1`.
    const CODE: [u8; 8] = [0x2e, 0xfe, 0x06, 0x00, 0x01, 0xf4, 0xeb, 0xfd];
    const TRAMPOLINE: u32 = 0x6_0000;
    const APIC: u32 = 0xfee0_0000;
    let kernel = Kernel::new(Protocol::Multiboot, |a, _| {
        for (at, byte) in (TRAMPOLINE..).zip(CODE) {
            a.mov(byte_ptr(at), i32::from(byte))?;
        }
        a.mov(dword_ptr(APIC + 0xf0), 0x1ff)?;
        for cpu in 1..CPUS {
            for command in [0x4500, 0x4660, 0x4660] {
                a.mov(dword_ptr(APIC + 0x310), (cpu << 24).cast_signed())?;
                a.mov(dword_ptr(APIC + 0x300), command)?;
            }
            let mut again = a.create_label();
            a.set_label(&mut again)?;
            a.pause()?;
            a.cmp(byte_ptr(TRAMPOLINE + 0x100), cpu)?;
            a.jne(again)?;
            print(a, "*")?;
        }
        exit(a, 0)
    })
    .expect("a kernel");
    let flags = [&BUILTIN[..], &["--cpus", "4"]].concat();
    check(&kernel, &flags, "***", 1);
    let shared = [&flags[..], &["--cores", "1"]].concat();
    check(&kernel, &shared, "***", 1);
}

/// A file with `bytes`, as a flag.
fn image(folder: &Path, bytes: &[u8]) -> [String; 2] {
    let path = folder.join("firmware");
    fs::write(&path, bytes).expect("a file");
    ["--firmware".to_owned(), path.display().to_string()]
}

/// Every `from` in the built-in firmware made `to`.
fn patched(from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut bytes = firmware::image().expect("it is there").to_vec();
    let places: Vec<_> = bytes.windows(from.len()).enumerate().collect();
    let places = places.into_iter().filter(|(_, found)| *found == from);
    let places: Vec<_> = places.map(|(at, _)| at).collect();
    assert!(!places.is_empty(), "the firmware has no {from:x?}");
    for at in places {
        bytes[at..at + to.len()].copy_from_slice(to);
    }
    bytes
}

#[test]
fn firmware_that_cannot_go_on_says_so_and_ends_the_run() {
    if skipped_without_kvm("firmware_that_cannot")
        || skipped_without_firmware("firmware_that_cannot")
    {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let kernel = Kernel::new(Protocol::Pvh, |a, _| exit(a, 0)).expect("a kernel");
    let check = |bytes: &[u8], text: &str, status: u32| {
        let flags = image(folder.path(), bytes);
        let output = run(&kernel, &flags.each_ref().map(String::as_str));
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(
            told.starts_with("umpire-firmware: ") && told.contains(text),
            "{told}"
        );
        assert_eq!(told.lines().count(), 1, "{told}");
        let status = i32::try_from(status * 2 + 1).expect("small");
        assert_eq!(output.status.code(), Some(status), "{told}");
    };
    // Firmware that looks for another magic than there is; it is in its message too.
    let other = patched(b"UMPIREFW", b"umpirefw");
    let text = "the configuration is malformed: it does not begin with umpirefw\n";
    check(&other, text, layout::EXIT_MALFORMED);
    // CPUID made UD2.
    let text = "exception 6, error code 0x0, at 0x8";
    check(
        &patched(&[0x0f, 0xa2], &[0x0f, 0x0b]),
        text,
        layout::EXIT_CRASHED,
    );
}

/// A flat image that runs `body`.
fn flat(body: impl FnOnce(&mut CodeAssembler) -> Written) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).expect("an assembler");
    let mut code = a.create_label();
    let assemble = || -> Result<Vec<u8>, IcedError> {
        a.jmp(code)?;
        a.nops_with_size(6)?;
        a.db(b"UMPIREFW")?;
        a.set_label(&mut code)?;
        body(&mut a)?;
        a.assemble(layout::IMAGE)
    };
    assemble().expect("it can be assembled")
}

/// CPUID was made for a firmware that reserves nothing.
#[test]
fn an_image_that_reserves_what_nobody_named_is_told() {
    if skipped_without_kvm("an_image_that_reserves") {
        return;
    }
    let bytes = flat(|a| {
        a.xor(esi, esi)?;
        wrmsr(a, abi::MSR_BASE + abi::MSR_MANAGEMENT_KEY + 5, 0x1234_5678)?;
        wrmsr(a, abi::MSR_BASE + abi::MSR_PHASE, abi::PHASE_END)?;
        exit(a, 5)
    });
    let folder = tempfile::tempdir().expect("a folder");
    let [flag, path] = image(folder.path(), &bytes);
    let kernel = Kernel::new(Protocol::Pvh, |a, _| exit(a, 0)).expect("a kernel");
    let check = |more: &[&str], warns: bool| {
        let model = ["--cpu-vendor", "amd", "--pmu", "amd-perfmonv2"];
        let flags = [&model[..], &[&flag, &path], more].concat();
        let output = run(&kernel, &flags);
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(11), "{told}");
        let warned = told
            .lines()
            .filter(|line| line.contains("the firmware holds PMC5"));
        assert_eq!(warned.count(), usize::from(warns), "{told}");
    };
    check(&[], true);
    check(&["--firmware-counter", "cycles,on=PMC4"], true);
    check(&["--firmware-counter", "cycles,on=PMC5"], false);
}

#[test]
fn a_flat_image_of_ones_own_runs_before_the_kernel() {
    if skipped_without_kvm("a_flat_image") {
        return;
    }
    let bytes = flat(|a| {
        // The area's address and magic, then what it says of CPUs and kernel.
        a.mov(rbx, rsi)?;
        a.mov(rax, qword_ptr(rbx))?;
        a.mov(rcx, i64::from_le_bytes(*b"UMPIREFW"))?;
        a.cmp(rax, rcx)?;
        let mut wrong = a.create_label();
        a.jne(wrong)?;
        a.cmp(byte_ptr(rbx + 0x10), 2)?;
        a.jne(wrong)?;
        print(a, "flat\n")?;
        exit(a, 5)?;
        a.set_label(&mut wrong)?;
        exit(a, 6)
    });
    let folder = tempfile::tempdir().expect("a folder");
    let [flag, path] = image(folder.path(), &bytes);
    let kernel = Kernel::new(Protocol::Pvh, |a, _| exit(a, 0)).expect("a kernel");
    check(&kernel, &[&flag, &path, "--cpus", "2"], "flat\n", 11);
}

/// What firmware leaves behind, as the kernel reads it out of the configuration
/// area: state, vCPUs that answered, results of the first and the last vCPU.
#[test]
fn counters_are_reserved_on_every_processor() {
    if skipped_without_kvm("counters_are_reserved")
        || skipped_without_firmware("counters_are_reserved")
    {
        return;
    }
    const AREA: u32 = 0x9_6000;
    let kernel = Kernel::new(Protocol::Multiboot, |a, routines| {
        print_words(a, routines, AREA + 0x900, 4)?;
        print_words(a, routines, AREA + 0x1000, 1)?;
        print_words(a, routines, AREA + 0x1000 + 3 * 64, 1)?;
        exit(a, 0)
    })
    .expect("a kernel");
    let counters = [
        "--cpu-vendor",
        "amd",
        "--pmu",
        "amd-perfmonv2",
        "--firmware-counter",
        "cycles,error=fault,isolate",
        "--firmware-counter",
        "instructions,on=PMC1,lend",
        "--firmware-counter",
        "cycles,access=shared",
    ];
    let flags = [&BUILTIN[..], &counters, &["--cpus", "4"]].concat();
    // The one that is named comes first.
    let expected = "\
        umpire-firmware: counter 0: position 1 reserved on 4 of 4 CPUs, others are dropped\n\
        umpire-firmware: counter 1: position 5 reserved on 4 of 4 CPUs, others fault\n\
        umpire-firmware: counter 2: position 4 reserved on 4 of 4 CPUs, shared\n\
        00000002 00000000 0000000f 00000000 \n80040501 \n80040501 \n";
    check(&kernel, &flags, expected, 1);
}

/// The hypervisor holds PMC4 and PMC5. It yields what the firmware asks for, down to its
/// minimum, and CPUID was made for that.
#[test]
fn the_firmware_asks_the_hypervisor() {
    if skipped_without_kvm("the_firmware_asks") || skipped_without_firmware("the_firmware_asks") {
        return;
    }
    let kernel = Kernel::new(Protocol::Pvh, |a, _| exit(a, 0)).expect("a kernel");
    let base = [
        "--cpu-vendor",
        "amd",
        "--pmu",
        "amd-perfmonv2",
        "--hypervisor-counters",
        "2",
    ];
    let check = |more: &[&str], expected: &str| {
        let flags = [&BUILTIN[..], &base, more].concat();
        let output = run(&kernel, &flags);
        let log = String::from_utf8_lossy(&output.stderr);
        let printed = String::from_utf8_lossy(&output.stdout);
        let own = printed.replace("umpire-firmware: counter ", "");
        assert_eq!(own, expected, "{more:?}: {log}");
        assert!(!log.contains("the firmware holds"), "{log}");
        assert_eq!(output.status.code(), Some(1), "{log}");
    };
    let interacting = ["--scheme", "interacting"];
    let named = ["--firmware-counter", "cycles,on=PMC5,access=shared"];
    let flags = [&interacting[..], &named, &["--cpus", "2"]].concat();
    let expected = "\
        0: asked for on CPU 0, position 5 granted\n\
        0: asked for on CPU 1, position 5 granted\n\
        0: position 5 reserved on 2 of 2 CPUs, shared\n";
    check(&flags, expected);
    // Five of any place: three are free beside the kernel's minimum.
    let any = ["--firmware-counter", "cycles"].repeat(5);
    let flags = [&interacting[..], &any].concat();
    let expected = "\
        3: asked for on CPU 0, position 5 granted\n\
        4: asked for on CPU 0, position 4 granted\n\
        0: position 3 reserved on 1 of 1 CPUs, others are dropped\n\
        1: position 2 reserved on 1 of 1 CPUs, others are dropped\n\
        2: position 1 reserved on 1 of 1 CPUs, others are dropped\n\
        3: position 5 reserved on 1 of 1 CPUs, others are dropped\n\
        4: position 4 reserved on 1 of 1 CPUs, others are dropped\n";
    check(&flags, expected);
    let minimum = ["--policy", "hypervisor:min=2"];
    let flags = [&interacting[..], &named, &minimum].concat();
    let refused = "0: position 5 reserved on 0 of 1 CPUs, refused elsewhere\n";
    let expected = format!("0: asked for on CPU 0, refused: held\n{refused}");
    check(&flags, &expected);
    let expected = format!("0: asked for on CPU 0, refused: held\n{refused}");
    check(&named, &expected);
}

#[test]
fn without_reservations_the_kernel_is_entered_all_the_same() {
    if skipped_without_kvm("without_reservations")
        || skipped_without_firmware("without_reservations")
    {
        return;
    }
    for protocol in PROTOCOLS {
        let kernel = Kernel::new(protocol, |a, _| exit(a, 3)).expect("a kernel");
        // Counters for it would be refused.
        check(&kernel, &[&BUILTIN[..], &["--pcr", "off"]].concat(), "", 7);
    }
}

/// Looks for a kept cookie in all of the firmware's memory: it is where it is to
/// be, once, and the one that is not kept is nowhere.
#[test]
fn cookies_stay_only_where_they_were_asked_to() {
    if skipped_without_kvm("cookies_stay_only") || skipped_without_firmware("cookies_stay_only") {
        return;
    }
    const COOKIES: u32 = 0x9_6a00;
    let kernel = Kernel::new(Protocol::Linux64, |a, routines| {
        // The first counter's pair is 0, the second's is not; then how often the
        // second's management cookie occurs.
        for at in [0, 4, 8, 12] {
            a.mov(eax, dword_ptr(COOKIES + at))?;
            a.call(routines.hex)?;
        }
        print(a, " ")?;
        a.mov(rbx, qword_ptr(COOKIES + 16))?;
        for at in [16, 24] {
            let mut zero = a.create_label();
            a.cmp(qword_ptr(COOKIES + at), 0)?;
            a.je(zero)?;
            print(a, "kept ")?;
            a.set_label(&mut zero)?;
            a.nop()?;
        }
        count_low(a, u32::try_from(layout::START).expect("low"), rbx)?;
        a.call(routines.hex)?;
        print(a, "\n")?;
        exit(a, 0)
    })
    .expect("a kernel");
    let counters = [
        "--firmware-counter",
        "cycles",
        "--firmware-counter",
        "cycles,keep",
        "--cpus",
        "2",
    ];
    let output = run(&kernel, &[&BUILTIN[..], &counters].concat());
    let told = String::from_utf8_lossy(&output.stdout);
    let last = told.lines().last().expect("a line");
    assert_eq!(last, format!("{:032} kept kept 00000001", 0), "{told}");
}
