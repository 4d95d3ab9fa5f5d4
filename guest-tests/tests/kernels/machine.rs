//! Console input, a second processor, and the configuration file.

use std::fs;
use std::io::Write as _;
use std::process::Stdio;

use guest_tests::kernel::{Kernel, Protocol, exit, print};
use guest_tests::umpire::skipped_without_kvm;
use iced_x86::code_asm::{
    CodeAssembler, al, byte_ptr, dword_ptr, dx, eax, ebx, ecx, edi, edx, esi,
};

use super::{check, run_command};

#[test]
fn what_is_typed_reaches_the_guest() {
    if skipped_without_kvm("what_is_typed") {
        return;
    }
    // Echoes every byte from COM1 until a `q` comes.
    let kernel = Kernel::new(Protocol::Multiboot, |a, _| {
        let (mut again, mut end) = (a.create_label(), a.create_label());
        a.set_label(&mut again)?;
        a.mov(edx, 0x3fd)?;
        a.in_(al, dx)?;
        a.test(al, 1)?;
        a.je(again)?;
        a.mov(edx, 0x3f8)?;
        a.in_(al, dx)?;
        a.cmp(al, i32::from(b'q'))?;
        a.je(end)?;
        a.out(dx, al)?;
        a.jmp(again)?;
        a.set_label(&mut end)?;
        exit(a, 0)
    })
    .expect("a kernel");
    // More than the receiver's 64 bytes, so some of it has to wait.
    let text = "The quick brown fox jumps over the lazy dog. "
        .repeat(5)
        .replace('q', "k");
    let mut child = run_command(&kernel, &[])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("umpire can be started");
    let mut input = child.stdin.take().expect("a pipe");
    input.write_all(text.as_bytes()).expect("a pipe");
    input.write_all(b"q").expect("a pipe");
    drop(input);
    let output = child.wait_with_output().expect("an end");
    assert_eq!(String::from_utf8_lossy(&output.stdout), text);
    assert_eq!(output.status.code(), Some(1));
}

/// Where the second processor starts (vector 0x60), and its flag.
const TRAMPOLINE: u32 = 0x6_0000;
const FLAG: u32 = TRAMPOLINE + 0x100;
/// Real mode: `mov byte cs:[0x100], 0x5a; hlt; jmp $ - 1`.
const AP_CODE: [u8; 9] = [0x2e, 0xc6, 0x06, 0x00, 0x01, 0x5a, 0xf4, 0xeb, 0xfd];

/// Enables the local APIC, then sends INIT and two start-up IPIs (SDM vol. 3A,
/// 10.4.4.1): KVM finds no destination for a disabled APIC's.
fn start_second(a: &mut CodeAssembler) -> Result<(), iced_x86::IcedError> {
    const SVR: u32 = 0xfee0_00f0;
    const ENABLED: u32 = 0x1ff;
    const ICR_LOW: u32 = 0xfee0_0300;
    const ICR_HIGH: u32 = 0xfee0_0310;
    const INIT: u32 = 0x4500;
    const START: u32 = 0x4600 | TRAMPOLINE >> 12;
    for (offset, byte) in (0..).zip(AP_CODE) {
        a.mov(edi, TRAMPOLINE + offset)?;
        a.mov(byte_ptr(edi), i32::from(byte))?;
    }
    for (register, value) in [
        (SVR, ENABLED),
        (ICR_HIGH, 1 << 24),
        (ICR_LOW, INIT),
        (ICR_LOW, START),
        (ICR_LOW, START),
    ] {
        a.mov(edi, register)?;
        a.mov(eax, value)?;
        a.mov(dword_ptr(edi), eax)?;
    }
    Ok(())
}

#[test]
fn the_second_processor_starts_by_init_and_sipi() {
    if skipped_without_kvm("the_second_processor") {
        return;
    }
    let kernel = Kernel::new(Protocol::Multiboot, |a, _| {
        let mut again = a.create_label();
        start_second(a)?;
        a.mov(edi, FLAG)?;
        a.set_label(&mut again)?;
        a.pause()?;
        a.cmp(byte_ptr(edi), 0x5a)?;
        a.jne(again)?;
        print(a, "two\n")?;
        exit(a, 2)
    })
    .expect("a kernel");
    check(&kernel, &["--cpus", "2"], "two\n", 5);
    // Alone it waits for ever.
    check(&kernel, &["--timeout", "0.5"], "", 124);
}

#[test]
fn a_file_gives_options_and_flags_win() {
    if skipped_without_kvm("a_file_gives_options") {
        return;
    }
    let kernel = Kernel::new(Protocol::Multiboot, |a, routines| {
        a.mov(esi, dword_ptr(ebx + 16))?;
        a.call(routines.text)?;
        print(a, "\n")?;
        a.mov(ecx, dword_ptr(ebx + 8))?;
        a.mov(eax, ecx)?;
        a.call(routines.hex)?;
        exit(a, 0)
    })
    .expect("a kernel");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("run.toml");
    let path = kernel.path();
    fs::write(
        &file,
        format!(
            "kernel = '{}'\ncmdline = 'of the file'\nmemory = 48\npmu = 'none'\ntimeout = 20\n",
            path.display()
        ),
    )
    .expect("a file");
    let name = path
        .file_name()
        .expect("a name")
        .to_string_lossy()
        .into_owned();
    let output = |flags: &[&str]| {
        let output = std::process::Command::new(guest_tests::umpire::path())
            .args(["run", "--config"])
            .arg(&file)
            .args(flags)
            .stdin(Stdio::null())
            .output()
            .expect("umpire can be started");
        assert_eq!(
            output.status.code(),
            Some(1),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8_lossy(&output.stdout).replace(&name, "K")
    };
    // Upper memory in KiB: 47 MiB, then 15.
    let of_the_file = output(&[]);
    assert!(
        of_the_file.ends_with("K of the file\n0000bc00"),
        "{of_the_file}"
    );
    let of_flags = output(&["--cmdline", "of the flag", "--memory", "16"]);
    assert!(of_flags.ends_with("K of the flag\n00003c00"), "{of_flags}");
}
