//! The demo's guest.
//!
//! It programs a counter, reads it in both rings, asks for what nobody can
//! count, touches what is not there, and lets a counter overflow while its
//! program runs.

use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, dword_ptr, dx, eax, ebx, ecx, edx, qword_ptr, r13, rax, rcx, rdx, rsp,
};
use pmu_virt::{CounterId, EventFamily, MsrIndex, PmuModel, Register, all_pmu_msr_ranges};
use vmm::devices::ports::TEST_EXIT;
use vmm::micro::{
    KERNEL_CODE, LAPIC, MicroError, MicroGuest, SCRATCH, Start, USER_CODE, USER_CS, USER_SS,
    USER_STACK, assemble,
};

/// The guest's #GP handler writes here; the value is the low half of RIP.
pub(super) const GP_PORT: u16 = 0xe9;
/// The guest's NMI handler writes here; the value is the status it found.
pub(super) const NMI_PORT: u16 = 0xea;
/// The guest's program is over; the value is how many NMIs came.
pub(super) const PROGRAM_PORT: u16 = 0xeb;

const GP_HANDLER: u64 = KERNEL_CODE + 0x1000;
const NMI_HANDLER: u64 = KERNEL_CODE + 0x2000;
pub(super) const PROGRAM_DONE: u64 = KERNEL_CODE + 0x3000;
const NMI_VECTOR: u8 = 2;
/// UD2 leads from CPL 3 to CPL 0 on every KVM; INT n does not on a software one.
pub(super) const UD_VECTOR: u8 = 6;
const GP_VECTOR: u8 = 13;
/// How many NMIs came.
const NMIS: u64 = SCRATCH;

const CR4_PCE: u64 = 1 << 8;
const RFLAGS_FIXED: i32 = 2;
/// Both rings.
const RINGS: u64 = 1 << 16 | 1 << 17;
const INT: u64 = 1 << 20;
const ENABLE: u64 = 1 << 22;
const COUNT: u64 = RINGS | ENABLE;

const SVR: u64 = LAPIC + 0xf0;
const LVTPC: u64 = LAPIC + 0x340;
/// APIC enabled, spurious vector 0xFF.
const SVR_ON: u32 = 0x1ff;
const LVT_NMI: u32 = 0x400;

/// Cycles to the overflow: some milliseconds.
const PERIOD: u64 = 5_000_000;
/// The program gives up waiting for its NMI after this many rounds.
const PROGRAM_ROUNDS: u32 = 2_000_000_000;
/// Work for CPL 0: short, because it may run in an emulator.
const KERNEL_ROUNDS: u32 = 500;
/// 48 bits; Intel's legacy counter writes take the low 32 and extend their sign.
const WIDTH: u64 = 0xffff_ffff_ffff;
const NO_SUCH_COUNTER: u32 = 63;

/// The registers and codes that differ between models.
struct Names {
    counter: u32,
    select: [u32; 3],
    global_control: u32,
    status: u32,
    status_clear: u32,
    absent: u32,
    cycles: u64,
    reference: u64,
    instructions: u64,
}

impl Names {
    fn of(model: &PmuModel) -> Self {
        let find = |wanted: &dyn Fn(Register) -> bool| msr_of(model, wanted);
        let counter = |n| {
            let id = CounterId::Programmable(n);
            find(
                &move |register| matches!(register, Register::Counter { counter, .. } if counter == id),
            )
        };
        let select = |n| find(&move |register| register == Register::Select(n));
        let (cycles, reference) = match model.events() {
            EventFamily::Intel => (0x3c, 0x013c),
            // The select's bits 11:8 are at 35:32.
            _ => (0x76, 1 << 32 | 0x0120),
        };
        Self {
            counter: counter(0),
            select: [select(0), select(1), select(2)],
            global_control: find(&|register| register == Register::GlobalControl),
            status: find(&|register| register == Register::GlobalStatus),
            status_clear: find(&|register| register == Register::GlobalStatusClear),
            // A register of the other vendor's PMU.
            absent: all_pmu_msr_ranges()
                .iter()
                .flat_map(|&(first, last)| first..=last)
                .find(|&msr| model.decode(MsrIndex(msr)).is_none())
                .unwrap_or_default(),
            cycles,
            reference,
            instructions: 0xc0,
        }
    }
}

/// The index of the register that `wanted` accepts; 0 if the model lacks it.
pub(super) fn msr_of(model: &PmuModel, wanted: impl Fn(Register) -> bool) -> u32 {
    let ranges = model.msr_ranges();
    let mut all = ranges.iter().flat_map(|&(first, last)| first..=last);
    // The last one: the legacy indices of AMD's models come first.
    all.rfind(|&msr| model.decode(MsrIndex(msr)).is_some_and(&wanted))
        .unwrap_or_default()
}

/// The guest for `model`, which must have an overflow status register.
pub(super) fn guest(model: &PmuModel) -> Result<MicroGuest, MicroError> {
    let names = Names::of(model);
    let mut start = Start::at(KERNEL_CODE, 0);
    start.cr4 = CR4_PCE;
    Ok(MicroGuest::new()
        .code(KERNEL_CODE, assemble(KERNEL_CODE, |a| kernel(a, &names))?)
        .code(USER_CODE, assemble(USER_CODE, program)?)
        .code(GP_HANDLER, assemble(GP_HANDLER, gp_handler)?)
        .code(
            NMI_HANDLER,
            assemble(NMI_HANDLER, |a| nmi_handler(a, &names))?,
        )
        .code(
            PROGRAM_DONE,
            assemble(PROGRAM_DONE, |a| program_done(a, &names))?,
        )
        .handler(GP_VECTOR, GP_HANDLER)
        .handler(NMI_VECTOR, NMI_HANDLER)
        .handler(UD_VECTOR, PROGRAM_DONE)
        .start(start))
}

pub(super) type Written = Result<(), IcedError>;

pub(super) fn write_msr(a: &mut CodeAssembler, msr: u32, value: u64) -> Written {
    let [low, high] = halves(value);
    a.mov(ecx, msr)?;
    a.mov(eax, low)?;
    a.mov(edx, high)?;
    a.wrmsr()
}

fn halves(value: u64) -> [u32; 2] {
    [value & 0xffff_ffff, value >> 32].map(|half| u32::try_from(half).unwrap_or(0))
}

pub(super) fn read_msr(a: &mut CodeAssembler, msr: u32) -> Written {
    a.mov(ecx, msr)?;
    a.rdmsr()
}

fn read_pmc(a: &mut CodeAssembler, index: u32) -> Written {
    a.mov(ecx, index)?;
    a.rdpmc()
}

pub(super) fn out(a: &mut CodeAssembler, port: u16) -> Written {
    a.mov(dx, u32::from(port))?;
    a.out(dx, eax)
}

fn kernel(a: &mut CodeAssembler, names: &Names) -> Written {
    a.mov(r13, rsp)?;
    for (register, value) in [(SVR, SVR_ON), (LVTPC, LVT_NMI)] {
        a.mov(rax, register)?;
        a.mov(dword_ptr(rax), value)?;
    }
    write_msr(a, names.global_control, 0b111)?;
    write_msr(a, names.select[0], names.cycles | COUNT)?;
    write_msr(a, names.select[2], names.reference | COUNT)?;
    a.mov(ebx, KERNEL_ROUNDS)?;
    let mut work = a.create_label();
    a.set_label(&mut work)?;
    a.dec(ebx)?;
    a.jne(work)?;
    read_msr(a, names.counter)?;
    read_pmc(a, 0)?;
    // What nobody can count here.
    write_msr(a, names.select[1], names.instructions | COUNT)?;
    read_pmc(a, 1)?;
    // What is not there.
    read_msr(a, names.absent)?;
    read_pmc(a, NO_SUCH_COUNTER)?;
    // An overflow while the program runs.
    write_msr(a, names.select[0], names.cycles | RINGS)?;
    write_msr(a, names.counter, PERIOD.wrapping_neg() & WIDTH)?;
    write_msr(a, names.select[0], names.cycles | COUNT | INT)?;
    enter_program(a)
}

/// Goes to the program at CPL 3.
pub(super) fn enter_program(a: &mut CodeAssembler) -> Written {
    for word in [
        i32::from(USER_SS),
        i32::try_from(USER_STACK).unwrap_or(0),
        RFLAGS_FIXED,
        i32::from(USER_CS),
        i32::try_from(USER_CODE).unwrap_or(0),
    ] {
        a.push(word)?;
    }
    a.iretq()
}

/// Runs until the NMI came; reads the counter before and after.
fn program(a: &mut CodeAssembler) -> Written {
    read_pmc(a, 0)?;
    a.mov(ebx, PROGRAM_ROUNDS)?;
    a.mov(rax, NMIS)?;
    let mut again = a.create_label();
    let mut done = a.create_label();
    a.set_label(&mut again)?;
    a.cmp(dword_ptr(rax), 0)?;
    a.jne(done)?;
    a.dec(ebx)?;
    a.jne(again)?;
    a.set_label(&mut done)?;
    read_pmc(a, 0)?;
    a.ud2()
}

fn program_done(a: &mut CodeAssembler, names: &Names) -> Written {
    a.mov(rsp, r13)?;
    a.mov(rax, NMIS)?;
    a.mov(eax, dword_ptr(rax))?;
    out(a, PROGRAM_PORT)?;
    write_msr(a, names.select[0], names.cycles | RINGS)?;
    read_msr(a, names.counter)?;
    a.xor(eax, eax)?;
    out(a, TEST_EXIT)
}

/// Reports where, and goes on after the instruction: all that can fault here are
/// two bytes long.
fn gp_handler(a: &mut CodeAssembler) -> Written {
    a.push(rax)?;
    a.push(rdx)?;
    a.mov(rax, qword_ptr(rsp + 24))?;
    out(a, GP_PORT)?;
    a.pop(rdx)?;
    a.pop(rax)?;
    a.add(rsp, 8)?;
    a.add(qword_ptr(rsp), 2)?;
    a.iretq()
}

/// As a driver does: stop, look what overflowed, clear it, count anew.
fn nmi_handler(a: &mut CodeAssembler, names: &Names) -> Written {
    for register in [rax, rcx, rdx] {
        a.push(register)?;
    }
    read_msr(a, names.status)?;
    out(a, NMI_PORT)?;
    write_msr(a, names.status_clear, 0b111)?;
    write_msr(a, names.counter, 0)?;
    a.mov(rax, NMIS)?;
    a.add(dword_ptr(rax), 1)?;
    for register in [rdx, rcx, rax] {
        a.pop(register)?;
    }
    a.iretq()
}
