//! Kernels that do what none should, through `umpire run --engine emu`: each comes to an end that
//! a line and a status tell, or to its time-out, and takes no more memory than its guest has and
//! a bound beside. No KVM, no L1.

use std::fs;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use guest_tests::kernel::{Kernel, Protocol, exit, print, spin_forever};
use guest_tests::micro::Written;
use guest_tests::umpire;
use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, byte_ptr, cr3, dword_ptr, eax, ebx, ecx, edx, ptr, qword_ptr, r8,
    r14, r15, rax, rbx, rcx, rdi, rsi, rsp, ymm0, ymm1,
};
use vmm::boot::memory::PAGE_TABLES_START;

/// What a guest is given, in seconds of the host's.
const TIME_OUT: &str = "0.5";
/// How much later one that was told to end has ended, on a busy machine.
const LATE: Duration = Duration::from_secs(10);
const FAULT: i32 = 6;
const TIMED_OUT: i32 = 124;

/// Behind the code, in the kernel's own memory: gates of an IDT, and its pointer.
const IDT: u32 = guest_tests::kernel::BASE + 0x8000;
const IDT_POINTER: u32 = IDT + 0x1000;
const STACK: u64 = guest_tests::kernel::BASE as u64 + 0xf000;

fn kernel(body: impl FnOnce(&mut CodeAssembler) -> Written) -> Kernel {
    Kernel::new(Protocol::Linux64, |a, _| body(a)).expect("a kernel")
}

fn command(kernel: &Kernel, flags: &[&str]) -> Command {
    let mut command = Command::new(umpire::path());
    command.args(["run", "--engine", "emu", "--control", "none"]);
    command.args(flags);
    command.arg("--kernel").arg(kernel.path());
    command.stdin(Stdio::null());
    command
}

fn run(kernel: &Kernel, flags: &[&str]) -> Output {
    let began = Instant::now();
    let flags = [flags, &["--timeout", TIME_OUT]].concat();
    let output = command(kernel, &flags).output();
    let output = output.expect("umpire can be started");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(began.elapsed() < LATE, "{:?}: {told}", began.elapsed());
    assert!(!told.contains("panicked"), "{told}");
    output
}

/// Runs it to one of these ends, which one line tells, and gives that.
fn ends(kernel: &Kernel, flags: &[&str], with: &[i32]) -> (i32, String) {
    let output = run(kernel, flags);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    // A process that a signal has ended has no status.
    let status = output.status.code();
    let status = status.unwrap_or_else(|| panic!("{:?}: {told}", output.status));
    assert!(with.contains(&status), "status {status}: {told}");
    assert_eq!(told.lines().count(), 1, "{told}");
    (status, told)
}

/// Whatever the exception, the guest goes on at `on` with a new stack.
fn catch_all(a: &mut CodeAssembler, on: CodeLabel) -> Written {
    let mut again = a.create_label();
    a.lea(rax, ptr(on))?;
    a.mov(rdi, u64::from(IDT))?;
    a.mov(ecx, 256)?;
    a.set_label(&mut again)?;
    // An interrupt gate to the loader's code segment.
    a.mov(edx, eax)?;
    a.and(edx, 0xffff)?;
    a.or(edx, 0x10_0000)?;
    a.mov(dword_ptr(rdi), edx)?;
    a.mov(edx, eax)?;
    a.and(edx, 0xffff_0000_u32.cast_signed())?;
    a.or(edx, 0x8e00)?;
    a.mov(dword_ptr(rdi + 4), edx)?;
    a.mov(qword_ptr(rdi + 8), 0)?;
    a.add(rdi, 16)?;
    a.dec(ecx)?;
    a.jne(again)?;
    a.mov(rdi, u64::from(IDT_POINTER))?;
    a.mov(dword_ptr(rdi), 0xfff | (IDT << 16).cast_signed())?;
    a.mov(dword_ptr(rdi + 4), (IDT >> 16).cast_signed())?;
    a.mov(dword_ptr(rdi + 8), 0)?;
    a.lidt(ptr(rdi))
}

/// Another number in R15 (Marsaglia's xorshift); changes R14.
fn random(a: &mut CodeAssembler) -> Written {
    for (left, count) in [(true, 13), (false, 7), (true, 17)] {
        a.mov(r14, r15)?;
        if left {
            a.shl(r14, count)?;
        } else {
            a.shr(r14, count)?;
        }
        a.xor(r15, r14)?;
    }
    Ok(())
}

/// Writes random entries to its page tables and goes through them, whatever that raises; if `long`,
/// not to those entries by which its own code is found.
fn scribbler(seed: u64, long: bool) -> Kernel {
    kernel(|a| {
        let mut again = a.create_label();
        a.mov(r15, seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)?;
        catch_all(a, again)?;
        a.set_label(&mut again)?;
        a.mov(rsp, STACK)?;
        random(a)?;
        // Of the first four of the six tables.
        a.mov(ebx, 0x3ff8)?;
        a.and(rbx, r15)?;
        if long {
            a.or(rbx, 8)?;
        }
        a.add(rbx, i32::try_from(PAGE_TABLES_START).expect("low"))?;
        a.mov(rax, r15)?;
        a.ror(rax, 23)?;
        a.mov(qword_ptr(rbx), rax)?;
        a.mov(rax, cr3)?;
        a.mov(cr3, rax)?;
        random(a)?;
        // Below 4 GiB, where there is something or was.
        a.mov(ecx, 0xffff_fff8_u32)?;
        a.and(rcx, r15)?;
        a.add(qword_ptr(rcx), 1)?;
        a.jmp(again)
    })
}

#[test]
fn page_tables_of_random_entries() {
    let flags = ["--memory", "32"];
    for seed in 0..16 {
        // An entry of its code is hit soon.
        let (_, told) = ends(&scribbler(seed, false), &flags, &[FAULT]);
        println!("seed {seed}: {}", told.trim());
        let (_, told) = ends(&scribbler(seed, true), &flags, &[FAULT, TIMED_OUT]);
        println!("seed {seed}, long: {}", told.trim());
    }
}

/// The local APIC, the I/O APIC, nothing at all, and behind the end of memory.
#[test]
fn jumps_to_where_no_memory_is() {
    for to in [0xfee0_0000_u64, 0xfec0_0000, 0xd000_0000, 0x0800_0000] {
        let kernel = kernel(|a| {
            a.mov(rax, to)?;
            a.jmp(rax)
        });
        let (_, told) = ends(&kernel, &["--memory", "32"], &[FAULT]);
        println!("{to:#x}: {}", told.trim());
        assert!(told.contains(&format!("{to:#x}")), "{to:#x}: {told}");
    }
}

#[test]
fn loops_without_an_end() {
    let bodies: [fn(&mut CodeAssembler) -> Written; 7] = [
        // Two bytes that jump to themselves, also with all interrupts off.
        |a| a.db(&[0xeb, 0xfe]),
        |a| {
            a.cli()?;
            spin_forever(a)
        },
        // With addresses of 32 bits, which begin anew: through memory, holes and devices.
        |a| rep(a, &[0x67, 0xf3, 0xa4]),
        |a| rep(a, &[0x67, 0xf3, 0xac]),
        |a| rep(a, &[0x67, 0xf2, 0xae]),
        // To a port.
        |a| rep(a, &[0x67, 0xf3, 0x6e]),
        // Each interrupt sends the next, and each exception is one.
        |a| {
            let mut on = a.create_label();
            catch_all(a, on)?;
            a.set_label(&mut on)?;
            a.mov(rsp, STACK)?;
            a.ud2()
        },
    ];
    for (number, body) in bodies.into_iter().enumerate() {
        println!("loop {number}");
        ends(&kernel(body), &["--memory", "32"], &[TIMED_OUT]);
    }
}

/// Has a string instruction executed again and again, with the most that it can be told, and
/// from the end of the memory of 32 MiB on, so that nothing of the guest's is overwritten.
fn rep(a: &mut CodeAssembler, bytes: &[u8]) -> Written {
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.mov(edx, 0x80)?;
    a.mov(rdi, 0x0200_0000_u64)?;
    a.mov(rsi, rdi)?;
    a.mov(rcx, -1_i64)?;
    a.mov(eax, 0x5a)?;
    a.db(bytes)?;
    a.jmp(again)
}

/// An exception in each handler, until the stack has come to the beginning of memory.
#[test]
fn exceptions_in_exceptions() {
    let kernel = kernel(|a| {
        let mut on = a.create_label();
        catch_all(a, on)?;
        a.mov(rsp, STACK)?;
        a.set_label(&mut on)?;
        a.ud2()
    });
    let (_, told) = ends(&kernel, &["--memory", "32"], &[FAULT]);
    assert!(told.contains("triple fault"), "{told}");
}

/// Local APICs that send each other all that there is, to addresses that are there or not.
#[test]
fn interrupts_of_all_kinds_without_an_end() {
    let kernel = kernel(|a| {
        let mut again = a.create_label();
        a.mov(r15, 0x1234_5678_9abc_def1_u64)?;
        catch_all(a, again)?;
        a.mov(r8, 0xfee0_0000_u64)?;
        a.mov(dword_ptr(r8 + 0xf0), 0x1ff)?;
        a.set_label(&mut again)?;
        a.mov(rsp, STACK)?;
        a.sti()?;
        random(a)?;
        a.mov(rax, r15)?;
        a.mov(dword_ptr(r8 + 0x310), eax)?;
        a.shr(rax, 32)?;
        a.mov(dword_ptr(r8 + 0x300), eax)?;
        a.mov(dword_ptr(r8 + 0xb0), 0)?;
        a.jmp(again)
    });
    let flags = ["--memory", "32", "--cpus", "4"];
    let (_, told) = ends(&kernel, &flags, &[FAULT, TIMED_OUT]);
    println!("{told}");
}

/// Whose instructions CPUID does not announce: what they need, and what to build for.
#[test]
fn avx_is_named_with_what_to_build_for() {
    let kernel = kernel(|a| {
        a.vaddps(ymm0, ymm0, ymm1)?;
        exit(a, 0)
    });
    let output = run(&kernel, &["--memory", "32"]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(FAULT), "{told}");
    let lines: Vec<&str> = told.lines().collect();
    let [why, end] = lines.as_slice() else {
        panic!("two lines: {told}");
    };
    for words in ["#UD at RIP 0x", "Vaddps_ymm", "AVX", "build for x86-64-v2"] {
        assert!(why.contains(words), "no '{words}' in {why}");
    }
    assert!(end.contains("triple fault"), "{end}");
}

#[test]
fn kernels_of_other_processors_are_refused() {
    let image = Kernel::image(Protocol::Linux64, |a, _| exit(a, 0)).expect("an image");
    // `e_machine` of an ELF file (gABI): AArch64, RISC-V, i386.
    for machine in [183_u16, 243, 3] {
        let mut image = image.clone();
        image[18..20].copy_from_slice(&machine.to_le_bytes());
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), image).expect("a file");
        let mut command = Command::new(umpire::path());
        command.args(["run", "--engine", "emu", "--kernel"]);
        let output = command.arg(file.path()).stdin(Stdio::null()).output();
        let output = output.expect("umpire can be started");
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{machine}: {told}");
        assert_eq!(told.lines().count(), 1, "{told}");
        println!("{}", told.trim());
        for words in ["can be booted", "give a bzImage"] {
            assert!(told.contains(words), "{told}");
        }
    }
}

/// The most memory that a process has had, in MiB.
fn peak(child: &Child) -> u64 {
    let file = format!("/proc/{}/status", child.id());
    let status = fs::read_to_string(file).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let kib: u64 = kib.and_then(|kib| kib.parse().ok()).expect("a number");
    kib >> 10
}

/// All of its memory is code, which it executes, and rewrites, and executes.
#[test]
fn code_everywhere_takes_bounded_memory() {
    const MIB: u64 = 1 << 20;
    /// Memory of the guest, of which what lies between these is code.
    const MEMORY: &str = "96";
    const CODE: std::ops::Range<u64> = 4 * MIB..92 * MIB;
    /// Beside the guest's memory: the program itself, decoded code.
    const BESIDE: u64 = 160;
    /// Of eight bytes.
    const NOPS: [u64; 2] = [0x9066_6666_6666_6666, 0x9066_6666_6666_662e];
    let kernel = kernel(|a| {
        for nop in NOPS {
            let mut behind = a.create_label();
            a.mov(rdi, CODE.start)?;
            a.mov(rcx, (CODE.end - CODE.start) / 8)?;
            a.mov(rax, nop)?;
            a.rep().stosq()?;
            // JMP through R8 ends them.
            a.lea(r8, ptr(behind))?;
            a.mov(byte_ptr(rdi), 0x41)?;
            a.mov(byte_ptr(rdi + 1), 0xff)?;
            a.mov(byte_ptr(rdi + 2), 0xe0)?;
            a.mov(rax, CODE.start)?;
            a.jmp(rax)?;
            a.set_label(&mut behind)?;
            print(a, ".")?;
        }
        spin_forever(a)
    });
    let mut command = command(&kernel, &["--memory", MEMORY, "--timeout", "60"]);
    command.stdout(Stdio::piped());
    let mut child = command.spawn().expect("umpire can be started");
    let mut dots = [0; 2];
    let output = child.stdout.as_mut().expect("a pipe");
    std::io::Read::read_exact(output, &mut dots).expect("two dots");
    let most = peak(&child);
    child.kill().expect("it runs");
    let _ = child.wait();
    let guest: u64 = MEMORY.parse().expect("a number");
    println!("{most} MiB at most for a guest of {guest} MiB");
    assert!(most <= guest + BESIDE, "{most} MiB");
}
