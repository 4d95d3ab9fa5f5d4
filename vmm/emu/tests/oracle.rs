//! Instructions of CPL 3 on the host's processor and in ours: registers, XMM registers, flags,
//! MXCSR, memory, RIP, and faults with their error codes and addresses.
//!
//! `EMU_ORACLE_CASES` sets the number of cases.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use emu::{Seg, State};
use iced_x86::{
    Code, Decoder, DecoderOptions, Instruction, MandatoryPrefix, Mnemonic, OpCodeTableKind, OpKind,
    Register, RflagsBits,
};

pub(crate) use crate::generator::Random;
use crate::guest::{Guest, Happened, PAGES, PRESENT, USER, WRITABLE};
use crate::native::{self, CODE, Case, DATA, DATA_LEN, Outcome};

const CASES: usize = 100_000;
const BATCH: usize = 2_000;

const OSFXSR: u64 = 1 << 9;
const OSXMMEXCPT: u64 = 1 << 10;

impl Random {
    /// A value of the kind that finds faults.
    pub(crate) fn value(&mut self) -> u64 {
        let small = self.below(130);
        match self.below(8) {
            0 => 0,
            1 => small,
            2 => small.wrapping_neg(),
            3 => 1 << self.below(64),
            4 => (1 << self.below(64)) - 1,
            5 => self.next() & 0xffff_ffff,
            6 => 0x8000_0000_8000_8080,
            _ => self.next(),
        }
    }

    /// A float of a format of so many bits: NaNs, infinities, denormals, zeroes, neighbours of
    /// 1, and what conversions to integers just take or just do not.
    fn float(&mut self, fraction: u32, bits: u32) -> u64 {
        let bias = (1 << (bits - fraction - 2)) - 1;
        let exponent = |power: u64| (bias + power) << fraction;
        let mask = (1 << fraction) - 1;
        let small = self.below(4);
        let magnitude = match self.below(12) {
            0 => 0,
            1 => small,
            2 => mask - small,
            3 => exponent(bias + 1),
            4 => exponent(bias + 1) | self.next() & mask | 1,
            5 => exponent(bias + 1) - 1 - small,
            6 => 1 << fraction | self.next() & mask,
            7 => exponent(0).wrapping_add(small).wrapping_sub(2),
            8 => exponent([31, 32, 63, 64][self.below(4) as usize]) + small - 2,
            9 => exponent(self.below(65)) | self.next() & mask,
            10 => exponent(self.below(24)) | (mask + 1) >> self.below(24),
            _ => self.next(),
        };
        (magnitude & (u64::MAX >> (65 - bits))) | (self.below(2) << (bits - 1))
    }

    /// A half of an XMM register.
    pub(crate) fn lanes(&mut self) -> u64 {
        match self.below(3) {
            0 => self.value(),
            1 => self.float(52, 64),
            _ => self.float(23, 32) | self.float(23, 32) << 32,
        }
    }

    /// An x87 register, of any class.
    fn extended(&mut self) -> [u64; 2] {
        let integer = u64::from(!self.chance(16)) << 63;
        let exponent = match self.below(6) {
            0 => 0,
            1 => 0x7fff,
            2 => self.below(0x8000),
            _ => 0x3fff - 4 + self.below(70),
        };
        let sig = match self.below(4) {
            0 => 0,
            1 => self.value(),
            _ => self.next(),
        };
        [
            sig & (u64::MAX >> 1) | integer,
            exponent | self.below(2) << 15,
        ]
    }

    /// x87's state: some registers empty, exceptions unmasked now and then, and seldom pending.
    fn x87(&mut self) -> [u64; 20] {
        let masks = match self.below(4) {
            0 => self.next() & 0x3f,
            _ => 0x3f,
        };
        let precision = [0, 2, 3][self.below(3) as usize];
        let control = 0x40 | masks | precision << 8 | self.below(4) << 10;
        let met = self.next() & if self.chance(16) { 0x3f } else { masks };
        let pending = if met & !masks != 0 { 0x8080 } else { 0 };
        let status = self.next() & 0x7f40 | met | pending;
        let tags = if self.chance(3) {
            self.next() & 0xff
        } else {
            // Five from the top on are there.
            u64::from(0x1f_u8.rotate_left((status >> 11 & 7) as u32))
        };
        let mut all = [0; 20];
        all[0] = control | status << 16 | tags << 32;
        for pair in all[4..].chunks_exact_mut(2) {
            pair.copy_from_slice(&self.extended());
        }
        all
    }

    /// Any MXCSR: rounding, DAZ, FTZ; half of the time all exceptions masked.
    pub(crate) fn mxcsr(&mut self) -> u64 {
        let all = self.next() & 0xffff;
        match self.below(4) {
            0 => all,
            1 => all | 0x1f80 & !(1 << (7 + self.below(6))),
            _ => all | 0x1f80,
        }
    }
}

/// Instructions that are not compared, with the reason.
pub(crate) fn not_compared(insn: &Instruction) -> Option<&'static str> {
    use Mnemonic as M;
    let segment = |register: Register| register.is_segment_register();
    if insn.memory_segment() == Register::FS {
        return Some("FS holds the host's thread");
    }
    match insn.mnemonic() {
        M::Cpuid | M::Rdtsc | M::Rdtscp | M::Rdpid | M::Rdpmc => {
            Some("the host's answer is the host's")
        }
        M::Sgdt | M::Sidt | M::Sldt | M::Str | M::Smsw | M::Lar | M::Lsl | M::Verr | M::Verw => {
            Some("the host's tables are the host's")
        }
        M::Rdfsbase | M::Rdgsbase | M::Wrfsbase | M::Wrgsbase => {
            Some("the host's thread lives there, or its kernel has not set FSGSBASE")
        }
        M::Mov | M::Push | M::Pop
            if segment(insn.op0_register()) || segment(insn.op1_register()) =>
        {
            Some("the host's selectors are the host's")
        }
        M::Syscall | M::Sysenter | M::Int | M::Int1 | M::Int3 | M::Iret | M::Iretd | M::Iretq => {
            Some("the host's kernel answers")
        }
        M::Popf | M::Popfd | M::Popfq => Some("TF and AC would be the host's: tested in `system`"),
        M::Retf => Some("the host's selectors are the host's: tested in `system`"),
        M::Jmp | M::Call if insn.is_jmp_far_indirect() || insn.is_call_far_indirect() => {
            Some("the host's selectors are the host's: tested in `system`")
        }
        M::Bsf | M::Bsr if insn.has_rep_prefix() => Some("the host has TZCNT and LZCNT"),
        M::Bswap if insn.op0_register().size() == 2 => {
            Some("undefined (SDM vol. 2A, BSWAP): tested in `undefined`")
        }
        M::Shld | M::Shrd if bits(insn) == 16 && immediate(insn) & 31 > 16 => {
            Some("counts above 16 are undefined (SDM vol. 2B, SHLD): tested in `undefined`")
        }
        M::Lds | M::Les | M::Lfs | M::Lgs | M::Lss => Some("the host's selectors are the host's"),
        M::Reservednop => Some("of 0F 0D AMD's processors know memory operands alone"),
        M::Movsxd if insn.op0_register().size() == 2 => {
            Some("AMD's processors read 32 bits (APM vol. 3, MOVSXD), Intel's 16")
        }
        M::Loope | M::Loopne if insn.has_rep_prefix() || insn.has_repne_prefix() => {
            Some("AMD's processors let the prefix decide")
        }
        M::Rcpps | M::Rcpss | M::Rsqrtps | M::Rsqrtss => {
            Some("approximate: processors differ, ours is in `emu-fpu`")
        }
        M::F2xm1
        | M::Fsin
        | M::Fcos
        | M::Fsincos
        | M::Fptan
        | M::Fpatan
        | M::Fyl2x
        | M::Fyl2xp1 => Some("processors differ; ours are rounded correctly: tested in `emu-fpu`"),
        M::Fxsave | M::Fxsave64 | M::Fxrstor | M::Fxrstor64 => {
            Some("MXCSR_MASK and x87's pointers are the processor's: tested in `vector`")
        }
        M::Fnsave | M::Fnstenv => {
            Some("pointers are the processor's: tested in `x87` and `emu-fpu`")
        }
        M::Wbnoinvd | M::Clwb | M::Clflushopt => Some("not announced"),
        _ => None,
    }
}

/// The count of a double shift that has it in its code; 0 of those by CL.
fn immediate(insn: &Instruction) -> u64 {
    match insn.op2_kind() {
        OpKind::Immediate8 => insn.immediate(2),
        _ => 0,
    }
}

fn bits(insn: &Instruction) -> u32 {
    if insn.op0_kind() == OpKind::Register {
        insn.op0_register().size() as u32 * 8
    } else {
        insn.memory_size().size() as u32 * 8
    }
}

/// Status flags that the manual leaves undefined: those of the decoder's table, and those that
/// depend on a count.
fn undefined(insn: &Instruction, registers: &[u64; 16]) -> u64 {
    use Mnemonic as M;
    let mut flags = insn.rflags_undefined();
    let count = |operand: u32| {
        let count = match insn.op_kind(operand) {
            OpKind::Register => registers[1] & 0xff,
            _ => insn.immediate(operand),
        };
        count & if bits(insn) == 64 { 63 } else { 31 }
    };
    match insn.mnemonic() {
        M::Shl | M::Sal | M::Shr | M::Sar => {
            let count = count(1);
            // SDM vol. 2B, SAL/SAR/SHL/SHR: OF of counts other than 1, CF of counts from the
            // width on, AF always; nothing of a count of 0.
            flags = if count == 0 { 0 } else { RflagsBits::AF };
            if count > 1 {
                flags |= RflagsBits::OF;
            }
            if count >= u64::from(bits(insn)) && insn.mnemonic() != M::Sar {
                flags |= RflagsBits::CF;
            }
        }
        M::Rol | M::Ror | M::Rcl | M::Rcr => {
            // SDM vol. 2B, RCL/RCR/ROL/ROR: OF of counts other than 1.
            flags = if count(1) == 1 { 0 } else { RflagsBits::OF };
        }
        M::Shld | M::Shrd => {
            let count = count(2);
            flags = if count == 0 { 0 } else { RflagsBits::AF };
            if count > 1 {
                flags |= RflagsBits::OF;
            }
        }
        _ => {}
    }
    let all = [
        (RflagsBits::OF, 0x800),
        (RflagsBits::SF, 0x80),
        (RflagsBits::ZF, 0x40),
        (RflagsBits::AF, 0x10),
        (RflagsBits::CF, 1),
        (RflagsBits::PF, 4),
    ];
    all.iter()
        .filter(|(bit, _)| flags & bit != 0)
        .map(|(_, flag)| flag)
        .sum()
}

/// Random bytes that are mostly an instruction.
pub(crate) fn bytes(random: &mut Random) -> [u8; 16] {
    let mut bytes = [0; 16];
    for byte in &mut bytes {
        *byte = random.next().to_le_bytes()[3];
    }
    let mut at = 0;
    let prefixes: &[u8] = &[0x66, 0xf2, 0xf3, 0xf0, 0x67];
    while random.chance(4) && at < 2 {
        bytes[at] = prefixes[random.below(prefixes.len() as u64) as usize];
        at += 1;
    }
    if random.chance(2) {
        bytes[at] = 0x40 | bytes[at] & 15;
        at += 1;
    }
    if random.chance(3) {
        bytes[at] = 0x0f;
    }
    bytes
}

/// Random bytes that are often an instruction of a code, which chance alone does not find.
fn bytes_of(random: &mut Random, code: Code) -> [u8; 16] {
    let mut bytes = [0; 16];
    for byte in &mut bytes {
        *byte = random.next().to_le_bytes()[3];
    }
    let op = code.op_code();
    let mut start = Vec::new();
    if op.operand_size() == 16 && op.table() == OpCodeTableKind::T0F38 {
        start.push(0x66);
    }
    match op.mandatory_prefix() {
        MandatoryPrefix::P66 => start.push(0x66),
        MandatoryPrefix::PF3 => start.push(0xf3),
        MandatoryPrefix::PF2 => start.push(0xf2),
        MandatoryPrefix::None | MandatoryPrefix::PNP => {}
    }
    if op.operand_size() == 64 || random.chance(2) {
        start.push(0x48 | bytes[0] & 7);
    }
    match op.table() {
        OpCodeTableKind::T0F => start.push(0x0f),
        OpCodeTableKind::T0F38 => start.extend([0x0f, 0x38]),
        OpCodeTableKind::T0F3A => start.extend([0x0f, 0x3a]),
        _ => {}
    }
    let opcode = op.op_code().to_be_bytes();
    start.extend(&opcode[4 - op.op_code_len() as usize..]);
    bytes[..start.len()].copy_from_slice(&start);
    bytes
}

/// Codes that no bytes are decoded to here.
fn is_elsewhere(code: Code) -> bool {
    // Near branches of 16 bits are AMD's, and so is UD0 without operands.
    let near = code.is_jcc_short_or_near()
        || code.is_loop()
        || code.is_loopcc()
        || code.is_jcx_short()
        || code.is_jmp_short_or_near()
        || code.is_call_near();
    let other = matches!(
        code,
        Code::Jmp_rm16 | Code::Call_rm16 | Code::Retnw | Code::Retnw_imm16 | Code::Ud0
    );
    near && code.op_code().operand_size() == 16 || other
}

/// A case about an instruction, with registers that lead into the data where it addresses any.
fn case(random: &mut Random, insn: &Instruction, bytes: &[u8; 16], at: u64) -> Case {
    let mut registers = [0; 16];
    for register in &mut registers {
        *register = random.value();
    }
    let mut code = *bytes;
    let spot = |random: &mut Random| {
        let edge = [DATA, DATA + 4096, DATA + DATA_LEN as u64];
        match random.below(4) {
            0 => edge[random.below(3) as usize].wrapping_add(random.below(24)) - 12,
            1 => DATA + random.below(DATA_LEN as u64),
            _ => DATA + 64 + (random.below(DATA_LEN as u64 - 160) & !7),
        }
    };
    registers[4] = spot(random);
    if insn.is_string_instruction() {
        registers[6] = spot(random);
        registers[7] = spot(random);
        registers[1] = random.below(40);
        if random.chance(8) {
            registers[1] = random.below(3000);
        }
    } else if matches!(insn.mnemonic(), Mnemonic::Maskmovdqu | Mnemonic::Maskmovq) {
        registers[7] = spot(random);
    } else if insn.mnemonic() == Mnemonic::Xlatb {
        registers[3] = spot(random);
    } else if insn.op_kinds().any(|kind| kind == OpKind::Memory) {
        address(random, insn, bytes, &mut code, &mut registers, spot);
    }
    if matches!(insn.mnemonic(), Mnemonic::Enter | Mnemonic::Leave) && !random.chance(4) {
        registers[5] = spot(random);
    }
    if matches!(insn.mnemonic(), Mnemonic::Div | Mnemonic::Idiv) && random.chance(2) {
        registers[2] = random.below(3).wrapping_sub(1);
    }
    if matches!(insn.mnemonic(), Mnemonic::Shld | Mnemonic::Shrd) && bits(insn) == 16 {
        // Only such counts have a result.
        registers[1] = registers[1] & !31 | random.below(17);
    }
    // Floats in memory are as they were made.
    let as_it_is = insn.op_register(0).is_vector_register() && random.chance(2);
    Case {
        registers,
        xmm: [[0; 2]; 16].map(|_| [random.lanes(), random.lanes()]),
        mxcsr: random.mxcsr(),
        x87: random.x87(),
        rflags: random.next() & 0xcd5 | 0x202,
        at,
        code,
        len: insn.len() as u64,
        // The accumulator of a comparison is in memory now and then.
        seed: match random.below(4) {
            _ if as_it_is => 0,
            0 => registers[0],
            _ => random.value(),
        },
    }
}

/// Whether it locks the bus, as an operand on two lines does. Intel's newer processors trap that
/// ("bus_lock_detect" in `/proc/cpuinfo`), and a Linux 6.18 under a hypervisor then tried such
/// instructions for ever. What lies on two pages is compared without LOCK.
fn locks_the_bus(insn: &Instruction, registers: &[u64; 16]) -> bool {
    let locks = insn.has_lock_prefix() || insn.mnemonic() == Mnemonic::Xchg;
    // Where it is not on its boundary it faults.
    if !locks || insn.mnemonic() == Mnemonic::Cmpxchg16b {
        return false;
    }
    let size = insn.memory_size().size() as u64;
    operand(insn, registers).is_some_and(|at| !at.is_multiple_of(size))
}

/// The linear address of an operand in memory.
fn operand(insn: &Instruction, registers: &[u64; 16]) -> Option<u64> {
    let operand = insn.op_kinds().position(|kind| kind == OpKind::Memory)?;
    let value = |register: Register, _: usize, _: usize| {
        Some(match register {
            _ if !register.is_gpr() => 0,
            _ if register.is_gpr32() => registers[register.number()] & 0xffff_ffff,
            _ => registers[register.number()],
        })
    };
    insn.virtual_address(operand as u32, 0, value)
}

/// Makes the memory operand lie at a spot, by its base or its displacement.
fn address(
    random: &mut Random,
    insn: &Instruction,
    bytes: &[u8; 16],
    code: &mut [u8; 16],
    registers: &mut [u64; 16],
    spot: impl Fn(&mut Random) -> u64,
) {
    let to = spot(random);
    let mut decoder = Decoder::with_ip(64, bytes, CODE, DecoderOptions::NONE);
    let again = decoder.decode();
    let offsets = decoder.get_constant_offsets(&again);
    let number = |register: Register| register.full_register().number();
    let base = insn.memory_base();
    if base.is_gpr() {
        let index = match insn.memory_index() {
            Register::None => 0,
            index => registers[number(index)].wrapping_mul(u64::from(insn.memory_index_scale())),
        };
        let rest = to
            .wrapping_sub(index)
            .wrapping_sub(insn.memory_displacement64());
        registers[number(base)] = rest;
        return;
    }
    let at = offsets.displacement_offset();
    match offsets.displacement_size() {
        4 if base == Register::RIP => {
            let away = to.wrapping_sub(insn.next_ip()) as u32;
            code[at..at + 4].copy_from_slice(&away.to_le_bytes());
        }
        8 => code[at..at + 8].copy_from_slice(&to.to_le_bytes()),
        _ => {}
    }
}

/// What ours makes of a case, with the instruction counted.
fn ours(guest: &mut Guest, case: &Case, pattern: &[u64; DATA_LEN / 8]) -> (Happened, State) {
    let mut page = [0xcc; 4096];
    page[case.at as usize..][..case.len as usize].copy_from_slice(&case.code[..case.len as usize]);
    guest.bytes(PAGES, &page);
    let data: Vec<u8> = pattern
        .iter()
        .flat_map(|word| (word ^ case.seed).to_le_bytes())
        .collect();
    guest.bytes(PAGES + 0x1_0000, &data);
    let mut state = guest.state(3);
    state.r[..16].copy_from_slice(&case.registers);
    state.xmm = case.xmm;
    state.mxcsr = case.mxcsr as u32;
    state.x87 = case.x87;
    state.cr4 |= OSFXSR | OSXMMEXCPT;
    state.rip = CODE + case.at;
    state.set_rflags(case.rflags);
    guest.cpu.set_state(state);
    let happened = guest.one();
    (happened, guest.cpu.state().clone())
}

/// Of several NaNs an inner product has the one that comes first in its sums, whose order is the
/// processor's.
fn same_but_for_nans(insn: &Instruction, ours: [u64; 2], native: [u64; 2]) -> bool {
    let (bits, infinity) = match insn.mnemonic() {
        Mnemonic::Dpps => (32, 0x7f80_0000_u64),
        Mnemonic::Dppd => (64, 0x7ff0_0000_0000_0000),
        _ => return ours == native,
    };
    let is_nan = |lane: u64| lane & (u64::MAX >> (65 - bits)) > infinity;
    let lanes = |value: [u64; 2]| {
        let all = u128::from(value[1]) << 64 | u128::from(value[0]);
        (0..128 / bits).map(move |n| (all >> (n * bits)) as u64 & (u64::MAX >> (64 - bits)))
    };
    lanes(ours)
        .zip(lanes(native))
        .all(|(one, other)| one == other || is_nan(one) && is_nan(other))
}

fn vectors_differ(insn: &Instruction, state: &State, native: &Outcome) -> Option<String> {
    if u64::from(state.mxcsr) != native.mxcsr {
        let (ours, native) = (state.mxcsr, native.mxcsr);
        return Some(format!("MXCSR {ours:#x}, not {native:#x}"));
    }
    let differs =
        |number: &usize| !same_but_for_nans(insn, state.xmm[*number], native.xmm[*number]);
    let number = (0..16).find(differs)?;
    let (ours, native) = (state.xmm[number], native.xmm[number]);
    Some(format!("XMM{number} {ours:#x?}, not {native:#x?}"))
}

/// Whether CR2 is the same; of images processors tell any address on the page, and Intel's of
/// MASKMOVDQU the first byte that is stored. Of two operands in memory AMD's processors load
/// the one of RSI first, and Intel's the one of RDI.
fn same_address(insn: &Instruction, ours: u64, native: u64) -> bool {
    use Mnemonic as M;
    if compares_two_strings(insn) {
        return true;
    }
    if matches!(insn.mnemonic(), M::Maskmovdqu | M::Maskmovq) {
        return native.wrapping_sub(ours) < 16;
    }
    let image = !matches!(insn.memory_size().size(), 0..=10 | 16);
    let places = if image { 12 } else { 0 };
    ours >> places == native >> places
}

/// CMPS.
fn compares_two_strings(insn: &Instruction) -> bool {
    use Mnemonic as M;
    match insn.mnemonic() {
        M::Cmpsb | M::Cmpsw | M::Cmpsq => true,
        // There is one of SSE2's.
        M::Cmpsd => insn.is_string_instruction(),
        _ => false,
    }
}

/// Flags that a repeated comparison leaves when it faults on its way are those of the last element on
/// AMD's processors, and on Intel's those of before (SDM vol. 2B, REP).
fn compares_again_and_again(insn: &Instruction) -> bool {
    use Mnemonic as M;
    let scans = matches!(insn.mnemonic(), M::Scasb | M::Scasw | M::Scasd | M::Scasq);
    (scans || compares_two_strings(insn)) && (insn.has_rep_prefix() || insn.has_repne_prefix())
}

/// Whether an exception of x87 waits that Intel's processors find before they look at the memory
/// that it leaves unwritten, and AMD's behind that.
fn leaves_memory_alone(insn: &Instruction, case: &Case, native: &Outcome) -> bool {
    use Mnemonic as M;
    const PENDING: u64 = 0x80 << 16;
    let stores = matches!(
        insn.mnemonic(),
        M::Fst | M::Fstp | M::Fist | M::Fistp | M::Fisttp | M::Fbstp
    );
    stores && native.x87[0] & !case.x87[0] & PENDING != 0
}

/// Memory that a faulting instruction may have written or not: Intel's processors store the address
/// of return before they find that a target is not canonical, and the first page's part of ten bytes
/// before they find that the second page is not there.
fn written_or_not(insn: &Instruction, case: &Case, happened: &Happened) -> Range<u64> {
    let at = match (insn.mnemonic(), happened) {
        (Mnemonic::Call, Happened::Fault(13, ..)) => Some(case.registers[4].wrapping_sub(8)),
        (Mnemonic::Fstp | Mnemonic::Fbstp, Happened::Fault(14, ..)) => {
            operand(insn, &case.registers).filter(|_| insn.memory_size().size() == 10)
        }
        _ => None,
    };
    at.map_or(0..0, |at| at..at.saturating_add(10))
}

/// What the host may keep of a register of which it does not keep all. A string instruction with
/// addresses of 32 bits clears the upper halves of its registers on Intel's processors also where its
/// first element faults; and where nothing is to be repeated those of RCX, and of the pointers of MOVS
/// and STOS.
fn kept(insn: &Instruction, number: usize, case: &Case, happened: &Happened) -> u64 {
    use Mnemonic as M;
    let narrow = insn.is_string_instruction()
        && insn.op_kinds().any(|kind| {
            matches!(
                kind,
                OpKind::MemorySegESI | OpKind::MemorySegEDI | OpKind::MemoryESEDI
            )
        });
    if !narrow {
        return u64::MAX;
    }
    let repeats = insn.has_rep_prefix() || insn.has_repne_prefix();
    let either = match happened {
        Happened::Fault(..) => matches!(number, 1 | 6 | 7),
        _ if !repeats || case.registers[1] as u32 != 0 => false,
        _ => match insn.mnemonic() {
            M::Movsb | M::Movsw | M::Movsd | M::Movsq => matches!(number, 1 | 6 | 7),
            M::Stosb | M::Stosw | M::Stosd | M::Stosq => matches!(number, 1 | 7),
            _ => number == 1,
        },
    };
    if either { 0xffff_ffff } else { u64::MAX }
}

/// Whether processors differ about the registers' order: AMD's have gone over to MMX also where
/// the instruction faults, and do not where CVTPI2PS has its operand in memory (SDM vol. 2A).
fn goes_over_to_mmx(insn: &Instruction, retired: bool) -> bool {
    let names = (0..insn.op_count()).any(|operand| insn.op_register(operand).is_mm());
    names && !retired || insn.code() == Code::Cvtpi2ps_xmm_mmm64 && !names
}

/// What of x87's state differs, pointers aside, and the flags that the manual and the host have
/// otherwise: `emu-fpu` says which.
fn x87_differs(insn: &Instruction, case: &Case, state: &State, native: &Outcome) -> Option<String> {
    use Mnemonic as M;
    // Control and status words, and tags.
    let mut word = 0xff_ffff_ffff;
    if matches!(
        insn.mnemonic(),
        M::Fcomi | M::Fcomip | M::Fucomi | M::Fucomip
    ) {
        word &= !(1 << (16 + 9));
    }
    if raised(case, state) {
        word &= !(0x4700 << 16);
    }
    if (state.x87[0] ^ native.x87[0]) & word != 0 {
        let (ours, native) = (state.x87[0], native.x87[0]);
        return Some(format!("x87 {ours:#x}, not {native:#x}"));
    }
    let at = (4..20).find(|at| {
        let mask = if at % 2 == 0 { u64::MAX } else { 0xffff };
        (state.x87[*at] ^ native.x87[*at]) & mask != 0
    })?;
    let (ours, native) = (&state.x87[at & !1..][..2], &native.x87[at & !1..][..2]);
    Some(format!("ST({}) {ours:x?}, not {native:x?}", at / 2 - 2))
}

/// Whether an unmasked exception of x87 has come.
fn raised(case: &Case, state: &State) -> bool {
    const PENDING: u64 = 0x80 << 16;
    state.x87[0] & !case.x87[0] & PENDING != 0
}

/// Where they differ.
fn differ(
    guest: &Guest,
    case: &Case,
    insn: &Instruction,
    native: &Outcome,
    ours: &(Happened, State),
) -> Option<String> {
    let (happened, state) = ours;
    let start = CODE + case.at;
    // AMD's MXCSR.MM, which Intel's processors do not have.
    if insn.mnemonic() == Mnemonic::Ldmxcsr && native.mxcsr & 1 << 17 != 0 {
        return None;
    }
    let trapped = native.trap == 3;
    // INT3 behind the instruction, or a branch to where nothing can be executed.
    let retired = trapped || native.rip != start;
    let mut mask = 0xcd5;
    mask &= !undefined(insn, &case.registers);
    let (rip, rflags, rsp) = match happened {
        Happened::Retired => (state.rip, state.rflags(), state.r[4]),
        Happened::Fault(vector, ..) => {
            let [rip, flags, rsp] = guest.frame(*vector);
            (rip, flags, rsp)
        }
        Happened::Stopped(stop) => return Some(format!("{stop:?}")),
    };
    match (retired, happened) {
        // With REX.B it is XCHG of RAX and R8 on AMD's processors, and not on Intel's.
        (true, Happened::Retired) if insn.code() == Code::Pause => return None,
        (true, Happened::Retired) => {}
        (true, Happened::Fault(12..=14, ..)) if leaves_memory_alone(insn, case, native) => {
            return None;
        }
        // AMD's processors let an exception of x87 wait where CVTPI2PS has its operand in memory.
        (_, Happened::Fault(16, ..)) if goes_over_to_mmx(insn, true) => return None,
        (false, Happened::Fault(vector, code, cr2)) => {
            // What the host has mapped in the kernel's half, and above all programs, is its own.
            let present = u64::from(*cr2 >> 46 != 0);
            let same = u64::from(*vector) == native.trap
                && (*vector != 14
                    || (same_address(insn, *cr2, native.cr2)
                        && *code | present == native.error | present));
            // Of two faults of a call, its target's (#GP) is Intel's first, its stack's AMD's.
            let either = insn.mnemonic() == Mnemonic::Call
                && *vector == 13
                && matches!(native.trap, 12 | 14);
            if either {
                return None;
            }
            if !same {
                let (trap, error, cr2) = (native.trap, native.error, native.cr2);
                return Some(format!("{happened:x?}, not {trap} {error:#x} {cr2:#x}"));
            }
            mask = 0xcd5;
            if matches!(insn.mnemonic(), Mnemonic::Div | Mnemonic::Idiv)
                || compares_again_and_again(insn)
            {
                mask = 0x400;
            }
        }
        _ => {
            let (trap, rip) = (native.trap, native.rip);
            return Some(format!("{happened:x?}, not trap {trap} at {rip:#x}"));
        }
    }
    if let Some(how) = vectors_differ(insn, state, native) {
        return Some(how);
    }
    if !goes_over_to_mmx(insn, retired)
        && let Some(how) = x87_differs(insn, case, state, native)
    {
        return Some(how);
    }
    if raised(case, state) {
        mask = 0;
    }
    let native_rip = native.rip - u64::from(trapped);
    if rip != native_rip {
        return Some(format!("RIP {rip:#x}, not {native_rip:#x}"));
    }
    for number in 0..16 {
        let value = if number == 4 { rsp } else { state.r[number] };
        let native = native.registers[number];
        if native != value && native != value & kept(insn, number, case, happened) {
            return Some(format!("register {number}: {value:#x}, not {native:#x}"));
        }
    }
    if (rflags ^ native.rflags) & mask != 0 {
        let native = native.rflags;
        return Some(format!("flags {rflags:#x}, not {native:#x}, of {mask:#x}"));
    }
    let mut data = vec![0; DATA_LEN];
    guest.read(PAGES + 0x1_0000, &mut data);
    let either = written_or_not(insn, case, happened);
    let at = (0..DATA_LEN)
        .find(|at| data[*at] != native.data[*at] && !either.contains(&(DATA + *at as u64)))?;
    let (value, native) = (data[at], native.data[at]);
    Some(format!("byte {at:#x}: {value:#x}, not {native:#x}"))
}

pub(crate) fn guest() -> Guest {
    let mut guest = Guest::new();
    guest.map(CODE, PAGES, PRESENT | USER | WRITABLE);
    for page in [0, 0x1000] {
        guest.map(
            DATA + page,
            PAGES + 0x1_0000 + page,
            PRESENT | USER | WRITABLE,
        );
    }
    let state = guest.state(3);
    assert_eq!(state.segment(Seg::Cs).selector & 3, 3);
    guest
}

/// Encodings of instructions by their code.
type Pool = BTreeMap<u16, Vec<[u8; 16]>>;

/// Instructions that are compared, so many of each code that none is crowded out by common ones;
/// and the codes that were met and are not compared.
fn instructions(random: &mut Random, codes: &[Code]) -> (Pool, BTreeSet<u16>) {
    const EACH: usize = 12;
    let mut found = Pool::new();
    let mut excused = BTreeSet::new();
    let wanted: Vec<bool> = {
        let most = codes.iter().map(|code| *code as usize).max().unwrap_or(0);
        let mut wanted = vec![false; most + 1];
        for code in codes {
            wanted[*code as usize] = true;
        }
        wanted
    };
    let mut take = |found: &mut Pool, bytes: [u8; 16]| {
        let insn = Decoder::with_ip(64, &bytes, CODE, DecoderOptions::NONE).decode();
        // Near branches of 16 bits, and LOCK MOV CR0.
        let amd = Decoder::with_ip(64, &bytes, CODE, DecoderOptions::AMD).decode();
        if insn.is_invalid() || !wanted.get(insn.code() as usize).is_some_and(|is| *is) {
            return;
        }
        if insn.code() != amd.code() || not_compared(&insn).is_some() {
            excused.insert(insn.code() as u16);
            return;
        }
        let all = found.entry(insn.code() as u16).or_default();
        if all.len() < EACH {
            all.push(bytes);
        }
    };
    for _ in 0..2_000_000 {
        take(&mut found, bytes(random));
    }
    for code in codes {
        for _ in 0..200 {
            if found
                .get(&(*code as u16))
                .is_none_or(|all| all.len() < EACH)
            {
                take(&mut found, bytes_of(random, *code));
            }
        }
    }
    (found, excused)
}

#[test]
fn instructions_do_what_the_hosts_do() {
    let cases = std::env::var("EMU_ORACLE_CASES");
    let cases = cases.ok().and_then(|n| n.parse().ok()).unwrap_or(CASES);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut pattern = [0; DATA_LEN / 8];
    for word in &mut pattern {
        *word = match random.below(3) {
            0 => 0,
            1 => random.value(),
            _ => random.lanes(),
        };
    }
    let codes = crate::codes::implemented();
    let mut guest = guest();
    let mut wrong: BTreeMap<String, (usize, String)> = BTreeMap::new();
    let mut done = 0;
    let (mut pool, excused) = instructions(&mut random, &codes);
    while done < cases {
        // Other operands and bytes, again and again.
        if done > 0 && done.is_multiple_of(1_000_000) {
            pool = instructions(&mut random, &codes).0;
        }
        let all: Vec<&Vec<[u8; 16]>> = pool.values().collect();
        let mut batch = Vec::new();
        for n in 0.. {
            if batch.len() == BATCH {
                break;
            }
            let some = all[(done + n) % all.len()];
            let bytes = some[random.below(some.len() as u64) as usize];
            let at = random.below(4096 - 32);
            let insn = Decoder::with_ip(64, &bytes, CODE + at, DecoderOptions::NONE).decode();
            // A branch into itself would run on and on.
            let target = insn.near_branch_target().wrapping_sub(CODE + at);
            if target < insn.len() as u64 {
                continue;
            }
            let case = case(&mut random, &insn, &bytes, at);
            let insn = Decoder::with_ip(64, &case.code, CODE + at, DecoderOptions::NONE).decode();
            if !locks_the_bus(&insn, &case.registers) {
                batch.push(case);
            }
        }
        let natives = native::run(&batch, &pattern);
        for (case, native) in batch.iter().zip(&natives) {
            let at = CODE + case.at;
            let insn = Decoder::with_ip(64, &case.code, at, DecoderOptions::NONE).decode();
            let ours = ours(&mut guest, case, &pattern);
            if let Some(how) = differ(&guest, case, &insn, native, &ours) {
                let entry = wrong.entry(format!("{:?}", insn.code())).or_default();
                entry.0 += 1;
                let code = &case.code[..case.len as usize];
                entry.1 = format!(
                    "{code:02x?} {insn}: {how}; before {:x?} {:#x} {:x?} {:#x} {:x?}",
                    case.registers, case.rflags, case.xmm, case.mxcsr, case.x87
                );
            }
        }
        done += BATCH;
    }
    println!("{done} cases of {} encodings", pool.len());
    let forgotten: Vec<Code> = codes
        .iter()
        .copied()
        .filter(|code| !is_elsewhere(*code))
        .filter(|code| !pool.contains_key(&(*code as u16)) && !excused.contains(&(*code as u16)))
        .collect();
    assert!(forgotten.is_empty(), "without a case: {forgotten:?}");
    let lines: Vec<String> = wrong
        .iter()
        .map(|(code, (count, how))| format!("{code} {count}: {how}"))
        .collect();
    assert!(
        wrong.is_empty(),
        "{} encodings\n{}",
        wrong.len(),
        lines.join("\n")
    );
}
