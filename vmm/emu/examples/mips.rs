//! Millions of instructions a second, with all events counted, on small programs in pages of
//! their own: `cargo run --release -p emu --example mips`.
#![allow(clippy::print_stdout, reason = "it is a program")]

use std::time::Duration;

use emu::{Cpu, Cpuid, EventClass, Ram, Ring, State, VmExit};
use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, al, bl, byte_ptr, dl, dword_ptr, eax, ebx, ecx, edx, qword_ptr, r8,
    r9, rax, rbx, rcx, rdi, rdx, rsi, xmm0, xmm1, xmm2, xmmword_ptr,
};
use rustix::time::{ClockId, clock_gettime};
use vm_memory::{Bytes, GuestAddress};

const SIZE: u64 = 16 << 20;
const CODE: u64 = 0x10_0000;
const DATA: u64 = 0x20_0000;
const TABLES: u64 = 0x1000;

type Program = fn(&mut CodeAssembler) -> Result<(), IcedError>;

/// Identity, in pages of 4 KiB.
fn tables(ram: &Ram) {
    let write = |at: u64, value: u64| {
        let bytes = value.to_le_bytes();
        ram.memory()
            .write_slice(&bytes, GuestAddress(at))
            .expect("memory");
    };
    write(TABLES, 0x2000 | 7);
    write(0x2000, 0x3000 | 7);
    for directory in 0..SIZE >> 21 {
        let table = 0x4000 + directory * 0x1000;
        write(0x3000 + 8 * directory, table | 7);
        for page in 0..512 {
            write(table + 8 * page, directory << 21 | page << 12 | 7);
        }
    }
}

fn label(code: &mut CodeAssembler) -> Result<CodeLabel, IcedError> {
    let mut label = code.create_label();
    code.set_label(&mut label)?;
    Ok(label)
}

fn sum(code: &mut CodeAssembler) -> Result<(), IcedError> {
    code.mov(rdx, DATA)?;
    code.xor(ecx, ecx)?;
    let again = label(code)?;
    code.mov(rbx, rcx)?;
    code.and(ebx, 0x7fff)?;
    code.add(rax, qword_ptr(rdx + rbx * 8))?;
    code.add(ecx, 1)?;
    code.jne(again)
}

fn random_memory(code: &mut CodeAssembler) -> Result<(), IcedError> {
    code.mov(rdx, DATA)?;
    code.mov(eax, 12345)?;
    let again = label(code)?;
    code.imul_3(eax, eax, 1_664_525)?;
    code.add(eax, 1_013_904_223)?;
    code.mov(ecx, eax)?;
    code.shr(ecx, 12)?;
    code.add(dword_ptr(rdx + rcx), eax)?;
    code.test(eax, eax)?;
    code.jne(again)
}

fn copy_bytes(code: &mut CodeAssembler) -> Result<(), IcedError> {
    let outer = label(code)?;
    code.mov(rsi, DATA)?;
    code.mov(rdi, DATA + 0x10_0000)?;
    code.mov(ecx, 0x1_0000)?;
    let again = label(code)?;
    code.mov(al, byte_ptr(rsi))?;
    code.mov(byte_ptr(rdi), al)?;
    code.inc(rsi)?;
    code.inc(rdi)?;
    code.dec(ecx)?;
    code.jne(again)?;
    code.jmp(outer)
}

fn calls(code: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut fib = code.create_label();
    let mut small = code.create_label();
    let outer = label(code)?;
    code.mov(eax, 25)?;
    code.call(fib)?;
    code.jmp(outer)?;
    code.set_label(&mut fib)?;
    code.cmp(eax, 2)?;
    code.jb(small)?;
    code.push(rbx)?;
    code.push(rcx)?;
    code.mov(ebx, eax)?;
    code.dec(eax)?;
    code.call(fib)?;
    code.mov(ecx, eax)?;
    code.lea(eax, dword_ptr(rbx - 2))?;
    code.call(fib)?;
    code.add(eax, ecx)?;
    code.pop(rcx)?;
    code.pop(rbx)?;
    code.set_label(&mut small)?;
    code.ret()
}

fn crc(code: &mut CodeAssembler) -> Result<(), IcedError> {
    code.mov(r8, DATA)?;
    code.mov(r9, DATA + 0x1000)?;
    let outer = label(code)?;
    code.xor(ecx, ecx)?;
    let again = label(code)?;
    code.movzx(edx, byte_ptr(r9 + rcx))?;
    code.xor(dl, al)?;
    code.shr(eax, 8)?;
    code.xor(eax, dword_ptr(r8 + rdx * 4))?;
    code.inc(ecx)?;
    code.cmp(ecx, 0x1_0000)?;
    code.jne(again)?;
    code.jmp(outer)
}

fn sieve(code: &mut CodeAssembler) -> Result<(), IcedError> {
    code.mov(rsi, DATA)?;
    let outer = label(code)?;
    code.mov(ecx, 2)?;
    let next = label(code)?;
    code.lea(edx, dword_ptr(rcx + rcx))?;
    let mark = label(code)?;
    code.mov(byte_ptr(rsi + rdx), bl)?;
    code.add(edx, ecx)?;
    code.cmp(edx, 0x10_0000)?;
    code.jb(mark)?;
    code.inc(ecx)?;
    code.cmp(ecx, 1024)?;
    code.jb(next)?;
    code.jmp(outer)
}

/// Sums of vectors of integers.
fn vectors(code: &mut CodeAssembler) -> Result<(), IcedError> {
    code.mov(rdx, DATA)?;
    code.xor(ecx, ecx)?;
    let again = label(code)?;
    code.movdqu(xmm0, xmmword_ptr(rdx + rcx))?;
    code.paddd(xmm1, xmm0)?;
    code.pxor(xmm2, xmm0)?;
    code.movdqa(xmmword_ptr(rdx + rcx), xmm1)?;
    code.add(ecx, 16)?;
    code.and(ecx, 0xffff)?;
    code.jmp(again)
}

/// A polynomial of a double.
fn doubles(code: &mut CodeAssembler) -> Result<(), IcedError> {
    code.mov(rdx, DATA)?;
    code.mov(eax, 3)?;
    let again = label(code)?;
    code.cvtsi2sd(xmm0, eax)?;
    code.movsd_2(xmm1, qword_ptr(rdx))?;
    code.mulsd(xmm1, xmm0)?;
    code.addsd(xmm1, xmm0)?;
    code.divsd(xmm1, xmm0)?;
    code.movsd_2(qword_ptr(rdx), xmm1)?;
    code.dec(eax)?;
    code.jmp(again)
}

/// Pages cleared and copied, which count as an instruction each.
fn strings(code: &mut CodeAssembler) -> Result<(), IcedError> {
    let again = label(code)?;
    code.mov(rdi, DATA)?;
    code.mov(ecx, 512)?;
    code.rep().stosq()?;
    code.mov(rsi, DATA)?;
    code.mov(rdi, DATA + 0x1000)?;
    code.mov(ecx, 512)?;
    code.rep().movsq()?;
    code.jmp(again)
}

/// What a kernel's locks and entries are made of.
fn system(code: &mut CodeAssembler) -> Result<(), IcedError> {
    code.mov(rdx, DATA)?;
    let again = label(code)?;
    code.pushfq()?;
    code.cli()?;
    code.swapgs()?;
    code.lock().xadd(dword_ptr(rdx), eax)?;
    code.lock().cmpxchg(qword_ptr(rdx), rcx)?;
    code.bt(dword_ptr(rdx), 3)?;
    code.sti()?;
    code.popfq()?;
    code.jmp(again)
}

/// Of this thread: others may use the machine.
fn processor_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(now).expect("a time")
}

fn run(name: &str, program: Program) {
    const WARM: u64 = 1_000_000;
    const LONG: u64 = 200_000_000;
    let ram = Ram::zeroed(SIZE).expect("memory");
    tables(&ram);
    let mut code = CodeAssembler::new(64).expect("an assembler");
    program(&mut code).expect("a program");
    let bytes = code.assemble(CODE).expect("code");
    ram.memory()
        .write_slice(&bytes, GuestAddress(CODE))
        .expect("memory");
    // Its pages are any code's.
    let (cpl, ring) = if name == "system" {
        (0, Ring::Kernel)
    } else {
        (3, Ring::User)
    };
    let mut cpu = Cpu::new(ram, Cpuid::implemented());
    let mut state = State::long_mode(TABLES, cpl);
    state.rip = CODE;
    state.r[4] = 0xf_0000;
    // OSFXSR, OSXMMEXCPT.
    state.cr4 |= 3 << 9;
    cpu.set_state(state);
    assert_eq!(cpu.run(WARM), VmExit::Budget);
    cpu.take_totals(ring);
    let start = processor_time();
    assert_eq!(cpu.run(LONG), VmExit::Budget);
    let seconds = (processor_time() - start).as_secs_f64();
    let totals = cpu.take_totals(ring);
    let instructions = totals.of(EventClass::Instructions);
    #[allow(clippy::cast_precision_loss, reason = "it is far below 2^52")]
    let millions = instructions as f64 / seconds / 1e6;
    println!(
        "{name:14} {millions:6.0} million a second; {} loads, {} stores, {} branches",
        totals.of(EventClass::Loads),
        totals.of(EventClass::Stores),
        totals.of(EventClass::Branches)
    );
}

fn main() {
    let programs: [(&str, Program); 10] = [
        ("sum", sum),
        ("random memory", random_memory),
        ("sieve", sieve),
        ("copy", copy_bytes),
        ("calls", calls),
        ("crc", crc),
        ("vectors", vectors),
        ("doubles", doubles),
        ("strings", strings),
        ("system", system),
    ];
    for (name, program) in programs {
        run(name, program);
    }
}
