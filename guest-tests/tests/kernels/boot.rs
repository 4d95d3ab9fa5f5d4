//! What a kernel finds at its first instruction, by each protocol.

use std::fs;

use guest_tests::kernel::{Kernel, Protocol, Routines, exit, print};
use guest_tests::umpire::skipped_without_kvm;
use iced_x86::IcedError;
use iced_x86::code_asm::{
    AsmMemoryOperand, CodeAssembler, dword_ptr, eax, ebp, ebx, edi, esi, rsi,
};

use super::{check, run};

type Written = Result<(), IcedError>;

/// Prints `name`, a blank and the word at `place`, in a line.
fn field(
    a: &mut CodeAssembler,
    routines: &Routines,
    name: &str,
    place: AsmMemoryOperand,
) -> Written {
    print(a, &format!("{name} "))?;
    a.mov(eax, place)?;
    a.call(routines.hex)?;
    print(a, "\n")
}

/// Prints the string whose address is at `place`, in a line.
fn string(
    a: &mut CodeAssembler,
    routines: &Routines,
    name: &str,
    place: AsmMemoryOperand,
) -> Written {
    print(a, &format!("{name} "))?;
    a.mov(esi, place)?;
    a.call(routines.text)?;
    print(a, "\n")
}

/// Prints what the Multiboot information at EBX says (Multiboot Specification
/// 0.6.96, 3.3).
fn multiboot(a: &mut CodeAssembler, routines: &Routines) -> Written {
    let (mut again, mut end) = (a.create_label(), a.create_label());
    a.mov(edi, eax)?;
    print(a, "magic ")?;
    a.mov(eax, edi)?;
    a.call(routines.hex)?;
    print(a, "\n")?;
    field(a, routines, "flags", dword_ptr(ebx))?;
    field(a, routines, "lower", dword_ptr(ebx + 4))?;
    field(a, routines, "upper", dword_ptr(ebx + 8))?;
    string(a, routines, "cmdline", dword_ptr(ebx + 16))?;
    field(a, routines, "modules", dword_ptr(ebx + 20))?;
    a.mov(edi, dword_ptr(ebx + 24))?;
    string(a, routines, "module", dword_ptr(edi))?;
    string(a, routines, "string", dword_ptr(edi + 8))?;
    // The memory map: its length and address, entries of a size of their own.
    a.mov(edi, dword_ptr(ebx + 48))?;
    a.mov(ebp, dword_ptr(ebx + 44))?;
    a.add(ebp, edi)?;
    a.set_label(&mut again)?;
    a.cmp(edi, ebp)?;
    a.jae(end)?;
    for offset in [4, 12, 20] {
        a.mov(eax, dword_ptr(edi + offset))?;
        a.call(routines.hex)?;
        print(a, " ")?;
    }
    print(a, "\n")?;
    a.add(edi, dword_ptr(edi))?;
    a.add(edi, 4)?;
    a.jmp(again)?;
    a.set_label(&mut end)?;
    exit(a, 0x15)
}

#[test]
fn a_multiboot_kernel_gets_its_information_and_ends_by_the_test_exit() {
    if skipped_without_kvm("a_multiboot_kernel") {
        return;
    }
    let kernel = Kernel::new(Protocol::Multiboot, multiboot).expect("a kernel");
    let module = tempfile::NamedTempFile::new().expect("a file");
    fs::write(module.path(), b"what the module holds\0").expect("a file");
    let path = module.path().display();
    let output = run(
        &kernel,
        &[
            "--cmdline",
            "one two=3",
            "--module",
            &format!("{path},four five"),
        ],
    );
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        output.status.code(),
        Some(0x15 * 2 + 1),
        "{told}\n{printed}"
    );
    let line = |name: &str| {
        let prefix = format!("{name} ");
        let found = printed.lines().find_map(|line| line.strip_prefix(&prefix));
        found.unwrap_or_else(|| panic!("no {name} in:\n{printed}"))
    };
    let number = |name: &str| u32::from_str_radix(line(name), 16).expect("a number");
    assert_eq!(number("magic"), 0x2bad_b002);
    // Memory sizes, command line, modules, memory map.
    assert_eq!(number("flags") & 0x4d, 0x4d);
    // KiB below 1 MiB, up to the extended BIOS data, and above, to 32 MiB.
    assert_eq!((number("lower"), number("upper")), (639, 31 * 1024));
    assert!(line("cmdline").ends_with(" one two=3"), "{printed}");
    assert_eq!(number("modules"), 1);
    assert_eq!(line("module"), "what the module holds");
    assert!(line("string").ends_with(" four five"), "{printed}");
    // Conventional memory and what is above 1 MiB, both available (type 1).
    assert!(
        printed.contains("00000000 0009fc00 00000001 \n"),
        "{printed}"
    );
    assert!(
        printed.contains("00100000 01f00000 00000001 \n"),
        "{printed}"
    );
}

#[test]
fn a_pvh_kernel_gets_its_start_info() {
    if skipped_without_kvm("a_pvh_kernel") {
        return;
    }
    let kernel = Kernel::new(Protocol::Pvh, |a, routines| {
        field(a, routines, "magic", dword_ptr(ebx))?;
        string(a, routines, "cmdline", dword_ptr(ebx + 24))?;
        exit(a, 0)
    })
    .expect("a kernel");
    check(
        &kernel,
        &["--cmdline", "a=b"],
        "magic 336ec578\ncmdline a=b\n",
        1,
    );
}

#[test]
fn a_64_bit_kernel_gets_its_zero_page() {
    if skipped_without_kvm("a_64_bit_kernel") {
        return;
    }
    let kernel = Kernel::new(Protocol::Linux64, |a, routines| {
        // cmd_line_ptr and boot_flag of the setup header; RSI is the routines' too.
        a.mov(ebx, esi)?;
        a.mov(edi, dword_ptr(rsi + 0x1fc))?;
        string(a, routines, "cmdline", dword_ptr(ebx + 0x228))?;
        a.shr(edi, 16)?;
        print(a, "boot flag ")?;
        a.mov(eax, edi)?;
        a.call(routines.hex)?;
        print(a, "\n")?;
        exit(a, 2)
    })
    .expect("a kernel");
    check(
        &kernel,
        &["--cmdline", "quiet"],
        "cmdline quiet\nboot flag 0000aa55\n",
        5,
    );
}
