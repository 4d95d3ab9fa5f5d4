//! Instructions on the register stack: its faults, exceptions and condition codes.

use super::arithmetic::{Arith, Order, arithmetic, compare, extract, integral, nan_of, remainder};
use super::arithmetic::{Quotient, scale, square_root};
use super::memory::{self, Bytes};
use super::value::{BEFORE, Calc, Class, Control, DENORMAL, F80, INVALID, Operand, narrowed};
use super::value::{OVERFLOW, UNDERFLOW};
use super::{C0, C1, C2, C3, Done, EXCEPTIONS, Insn, STACK_FAULT, SUMMARY, X87, elementary};
use crate::soft::{DOUBLE, Rounding, SINGLE};

const CF: u64 = 1;
const PF: u64 = 4;
const ZF: u64 = 0x40;

/// Digits of the constants behind the 64 that a register holds decide on rounding: here these
/// 64, and whether to the nearest is up (SDM vol. 2, FLDPI).
const CONSTANTS: [(u16, u64, bool); 5] = [
    // log2 10, log2 e, π, log10 2, ln 2.
    (0x4000, 0xd49a_784b_cd1b_8afe, false),
    (0x3fff, 0xb8aa_3b29_5c17_f0bb, true),
    (0x4000, 0xc90f_daa2_2168_c234, true),
    (0x3ffd, 0x9a20_9a84_fbcf_f798, true),
    (0x3ffe, 0xb172_17f7_d1cf_79ab, true),
];

/// What a comparison sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Into {
    Codes,
    Flags,
}

struct Machine {
    x87: X87,
    control: Control,
    rflags: u64,
    operand: [u8; 10],
    store: Option<[u8; 10]>,
    ax: Option<u16>,
    set_rflags: Option<u64>,
}

pub(super) fn run(x87: &X87, insn: Insn, operand: [u8; 10], rflags: u64) -> Done {
    let mut machine = Machine {
        x87: *x87,
        control: Control::of(x87.control),
        rflags,
        operand,
        store: None,
        ax: None,
        set_rflags: None,
    };
    if insn.is_memory() {
        machine.memory(insn);
    } else {
        machine.registers(insn);
    }
    Done {
        x87: machine.x87,
        store: machine.store,
        ax: machine.ax,
        rflags: machine.set_rflags,
    }
}

/// The arithmetic of an opcode's three bits, in the forms whose destination is ST(0); [`None`]
/// are FCOM and FCOMP.
fn arith(bits: u16) -> Option<Arith> {
    Some(match bits {
        0 => Arith::Add,
        1 => Arith::Mul,
        4 => Arith::Sub,
        5 => Arith::SubReverse,
        6 => Arith::Div,
        7 => Arith::DivReverse,
        _ => return None,
    })
}

fn stack_index(insn: Insn) -> u8 {
    u8::from(insn.index() & 1 != 0)
        | u8::from(insn.index() & 2 != 0) << 1
        | u8::from(insn.index() & 4 != 0) << 2
}

impl Machine {
    /// Forms with a memory operand, by the escape and ModRM's reg field.
    fn memory(&mut self, insn: Insn) {
        let reg = insn.reg();
        match (insn.escape(), reg) {
            (0, _) => self.with_memory(reg, Operand::of_single(self.word())),
            (4, _) => self.with_memory(reg, Operand::of_double(self.long())),
            (2, _) => self.with_memory(reg, self.integer(4).into()),
            (6, _) => self.with_memory(reg, self.integer(2).into()),
            (1, 0) => self.load_real(Operand::of_single(self.word())),
            (5, 0) => self.load_real(Operand::of_double(self.long())),
            (3, 5) => self.load(F80::of_bytes(self.operand)),
            (3, 0) => self.load(self.integer(4)),
            (7, 0) => self.load(self.integer(2)),
            (7, 5) => self.load(self.integer(8)),
            (7, 4) => self.load(memory::load_decimal(self.operand)),
            (1, 2 | 3) => self.store_real(SINGLE, reg == 3),
            (5, 2 | 3) => self.store_real(DOUBLE, reg == 3),
            (3, 7) => self.store_extended(),
            (3, 1) => self.store_integer(4, Rounding::Zero, true),
            (5, 1) => self.store_integer(8, Rounding::Zero, true),
            (7, 1) => self.store_integer(2, Rounding::Zero, true),
            (3, 2 | 3) => self.store_integer(4, self.control.rounding, reg == 3),
            (7, 2 | 3) => self.store_integer(2, self.control.rounding, reg == 3),
            (7, 7) => self.store_integer(8, self.control.rounding, true),
            (7, 6) => {
                let control = self.control;
                self.store_bytes(memory::decimal_indefinite(), true, |value| {
                    memory::store_decimal(value, &control)
                });
            }
            (1, 5) => {
                let word = u16::from_le_bytes([self.operand[0], self.operand[1]]);
                self.x87.control = word & 0x1f3f | 0x40;
                self.x87.summarize();
            }
            (1, 7) => self.store = Some(memory::low(u64::from(self.x87.control))),
            (5, 7) => self.store = Some(memory::low(u64::from(self.x87.status))),
            _ => {}
        }
    }

    /// Forms of registers alone.
    fn registers(&mut self, insn: Insn) {
        let i = stack_index(insn);
        let reg = insn.reg();
        match (insn.escape(), reg) {
            (0, 2 | 3) => self.compare_registers(i, reg & 1, false, Into::Codes),
            (0, _) => self.arith_to_top(reg, i),
            // FCOM2, FCOMP3 and FCOMP5 are names of the same.
            (4, 2 | 3) => self.compare_registers(i, reg & 1, false, Into::Codes),
            (6, 2) => self.compare_registers(i, 1, false, Into::Codes),
            (6, 3) => self.compare_registers(1, 2, false, Into::Codes),
            (4, _) => self.arith_to(reg, i, 0),
            (6, _) => self.arith_to(reg, i, 1),
            (1, 0) => self.load_register(i),
            (1 | 5 | 7, 1) => self.exchange(i),
            (1, 3) => self.store_unchecked(i),
            (1, 2) => {}
            (1, _) => self.alone(insn),
            (2, 5) => self.compare_registers(1, 2, true, Into::Codes),
            (2 | 3, 0..=3) => self.move_if(i, insn.escape() == 3, reg),
            (3, 4) => self.administer(insn.index()),
            (3, 5) => self.compare_registers(i, 0, true, Into::Flags),
            (3, 6) => self.compare_registers(i, 0, false, Into::Flags),
            (5, 0) => {
                self.round_up(false);
                self.set_empty(i);
            }
            (5, 2 | 3) => self.store_register(i, reg & 1),
            (5, 4 | 5) => self.compare_registers(i, reg & 1, true, Into::Codes),
            (7, 0) => {
                self.round_up(false);
                self.set_empty(i);
                self.pop(1);
            }
            (7, 2 | 3) => self.store_register(i, 1),
            (7, 4) => self.ax = Some(self.x87.status),
            (7, 5) => self.compare_registers(i, 1, true, Into::Flags),
            (7, 6) => self.compare_registers(i, 1, false, Into::Flags),
            _ => {}
        }
    }

    /// D9 E0 to D9 FF.
    fn alone(&mut self, insn: Insn) {
        let control = self.control;
        match insn.bits() & 0x1f {
            0x00 => self.sign(F80::negated),
            0x01 => self.sign(F80::absolute),
            0x04 => self.test(),
            0x05 => self.examine(),
            0x08 => self.load(F80::ONE),
            at @ 0x09..=0x0d => self.load_constant(usize::from(at - 9)),
            0x0e => self.load(F80::zero(false)),
            0x10 => self.unary(|value| elementary::power_less_one(value, &control)),
            0x11 => self.binary_pop(|x, y| elementary::log(x, y, &control)),
            0x12 => self.tangent(),
            0x13 => self.binary_pop(|x, y| elementary::arctangent(x, y, &control)),
            0x14 => self.extract(),
            0x15 => self.remainder(true),
            0x16 => self.move_top(7),
            0x17 => self.move_top(1),
            0x18 => self.remainder(false),
            0x19 => self.binary_pop(|x, y| elementary::log_of_one_more(x, y, &control)),
            0x1a => self.unary(|value| square_root(value, &control)),
            0x1b => self.sine_cosine(),
            0x1c => self.unary(|value| integral(value, &control)),
            0x1d => self.scale(),
            0x1e => self.turn_function(elementary::sine),
            0x1f => self.turn_function(elementary::cosine),
            _ => {}
        }
    }

    /// FNENI, FNDISI, FNCLEX, FNINIT, FNSETPM: the first two are the 8087's, the last the
    /// 80287's, and do nothing.
    fn administer(&mut self, index: u16) {
        match index {
            2 => self.x87.status &= !(EXCEPTIONS | STACK_FAULT | SUMMARY),
            3 => self.x87 = self.x87.initialized(),
            _ => {}
        }
    }

    fn word(&self) -> u32 {
        let [a, b, c, d, ..] = self.operand;
        u32::from_le_bytes([a, b, c, d])
    }

    fn long(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.operand;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    fn integer(&self, bytes: u8) -> F80 {
        F80::of_integer(memory::load_integer(self.operand, bytes))
    }

    /// ST(i), or [`None`] where it is empty.
    fn st(&self, i: u8) -> Option<F80> {
        let full = self.x87.tags >> self.x87.physical(i) & 1 != 0;
        full.then(|| self.x87.register(i))
    }

    fn set(&mut self, i: u8, value: F80) {
        let at = self.x87.physical(i);
        self.x87.regs[at] = value;
        self.x87.tags |= 1 << at;
    }

    fn set_empty(&mut self, i: u8) {
        self.x87.tags &= !(1 << self.x87.physical(i));
    }

    fn pop(&mut self, count: u16) {
        for _ in 0..count {
            self.set_empty(0);
            self.x87.turn(1);
        }
    }

    fn code(&mut self, bits: u16, of: u16) {
        self.x87.status = self.x87.status & !of | bits & of;
    }

    fn round_up(&mut self, up: bool) {
        self.code(if up { C1 } else { 0 }, C1);
    }

    /// Raises exceptions; whether one is unmasked.
    fn signal(&mut self, flags: u16) -> bool {
        self.x87.status |= flags;
        self.x87.summarize();
        self.control.unmasked(flags) != 0
    }

    /// A stack fault; whether it is masked (SDM vol. 1, 8.5.1.1). C1 tells overflow.
    fn stack_fault(&mut self, overflow: bool) -> bool {
        self.round_up(overflow);
        !self.signal(INVALID | STACK_FAULT)
    }

    /// Takes a result to a register and pops; or raises, and changes neither.
    fn finish(&mut self, calc: Calc, to: u8, pops: u16) {
        self.round_up(false);
        if self.control.unmasked(calc.flags & BEFORE) != 0 {
            self.signal(calc.flags & BEFORE);
            return;
        }
        self.round_up(calc.up);
        self.signal(calc.flags);
        self.set(to, calc.value);
        self.pop(pops);
    }

    /// A result where an operand was empty.
    fn finish_empty(&mut self, to: u8, pops: u16) {
        if self.stack_fault(false) {
            self.set(to, F80::INDEFINITE);
            self.pop(pops);
        }
    }

    /// ST(0) op memory, or their comparison.
    fn with_memory(&mut self, reg: u16, operand: Operand) {
        let Some(op) = arith(reg) else {
            self.compared(
                self.st(0).map(|st| (st.into(), operand)),
                reg & 1,
                false,
                Into::Codes,
            );
            return;
        };
        match self.st(0) {
            Some(st) => self.finish(arithmetic(op, st.into(), operand, &self.control), 0, 0),
            None => self.finish_empty(0, 0),
        }
    }

    /// ST(0) op ST(i), to ST(0).
    fn arith_to_top(&mut self, reg: u16, i: u8) {
        match (arith(reg), self.st(0), self.st(i)) {
            (Some(op), Some(a), Some(b)) => {
                self.finish(arithmetic(op, a.into(), b.into(), &self.control), 0, 0);
            }
            _ => self.finish_empty(0, 0),
        }
    }

    /// ST(0) op ST(i), to ST(i): so the opcode's FSUB is FSUBR by its mnemonic, and FDIV is
    /// FDIVR (SDM vol. 2, FSUB and FDIV).
    fn arith_to(&mut self, reg: u16, i: u8, pops: u16) {
        match (arith(reg), self.st(0), self.st(i)) {
            (Some(op), Some(a), Some(b)) => {
                self.finish(arithmetic(op, a.into(), b.into(), &self.control), i, pops);
            }
            _ => self.finish_empty(i, pops),
        }
    }

    fn compare_registers(&mut self, i: u8, pops: u16, quiet: bool, into: Into) {
        let operands = self.st(0).zip(self.st(i));
        let operands = operands.map(|(a, b)| (a.into(), b.into()));
        self.compared(operands, pops, quiet, into);
    }

    /// FCOM, FUCOM and their kin; [`None`] of an empty register.
    fn compared(
        &mut self,
        operands: Option<(Operand, Operand)>,
        pops: u16,
        quiet: bool,
        into: Into,
    ) {
        self.round_up(false);
        let (order, unmasked) = match operands {
            Some((a, b)) => {
                let (order, flags) = compare(a, b, quiet);
                (order, self.signal(flags))
            }
            None => (Order::Unordered, !self.stack_fault(false)),
        };
        if unmasked {
            return;
        }
        match into {
            Into::Codes => {
                let codes = match order {
                    Order::Greater => 0,
                    Order::Less => C0,
                    Order::Equal => C3,
                    Order::Unordered => C0 | C2 | C3,
                };
                self.code(codes, C0 | C2 | C3);
            }
            Into::Flags => {
                self.set_rflags = Some(match order {
                    Order::Greater => 0,
                    Order::Less => CF,
                    Order::Equal => ZF,
                    Order::Unordered => ZF | PF | CF,
                });
            }
        }
        self.pop(pops);
    }

    /// FTST.
    fn test(&mut self) {
        let zero = F80::zero(false).into();
        self.compared(
            self.st(0).map(|st| (st.into(), zero)),
            0,
            false,
            Into::Codes,
        );
    }

    /// FXAM (SDM vol. 2, table 3-43).
    fn examine(&mut self) {
        let value = self.x87.register(0);
        let codes = match self.st(0).map(F80::class) {
            None => C3 | C0,
            Some(Class::Unsupported) => 0,
            Some(Class::Quiet | Class::Signaling) => C0,
            Some(Class::Finite {
                denormal: false, ..
            }) => C2,
            Some(Class::Infinity) => C2 | C0,
            Some(Class::Zero) => C3,
            Some(Class::Finite { denormal: true, .. }) => C3 | C2,
        };
        let sign = if value.is_negative() { C1 } else { 0 };
        self.code(codes | sign, C0 | C1 | C2 | C3);
    }

    /// FCHS and FABS.
    fn sign(&mut self, change: fn(F80) -> F80) {
        match self.st(0) {
            Some(st) => self.finish(Calc::exact(change(st)), 0, 0),
            None => self.finish_empty(0, 0),
        }
    }

    fn unary(&mut self, make: impl FnOnce(F80) -> Calc) {
        match self.st(0) {
            Some(st) => self.finish(make(st), 0, 0),
            None => self.finish_empty(0, 0),
        }
    }

    /// Of ST(0) and ST(1), to ST(1); then pops.
    fn binary_pop(&mut self, make: impl FnOnce(F80, F80) -> Calc) {
        match (self.st(0), self.st(1)) {
            (Some(x), Some(y)) => self.finish(make(x, y), 1, 1),
            _ => self.finish_empty(1, 1),
        }
    }

    /// FSCALE.
    fn scale(&mut self) {
        match (self.st(0), self.st(1)) {
            (Some(a), Some(b)) => self.finish(scale(a, b, &self.control), 0, 0),
            _ => self.finish_empty(0, 0),
        }
    }

    /// Pushes a value, or raises a stack overflow.
    fn load(&mut self, value: F80) {
        self.round_up(false);
        let full = self.st(7).is_some();
        if full && !self.stack_fault(true) {
            return;
        }
        self.x87.turn(7);
        self.set(0, if full { F80::INDEFINITE } else { value });
    }

    /// FLD of a real of 32 or 64 bits.
    fn load_real(&mut self, operand: Operand) {
        self.round_up(false);
        if self.st(7).is_some() {
            self.load(operand.value);
            return;
        }
        let flags = match operand.class() {
            Class::Signaling => INVALID,
            Class::Finite { .. } if operand.denormal => DENORMAL,
            _ => 0,
        };
        self.signal(flags);
        // A denormal is pushed, whether its exception is masked or not.
        if self.control.unmasked(flags & INVALID) == 0 {
            let value = nan_of(operand.value, operand.value).map_or(operand.value, |nan| nan.value);
            self.load(value);
        }
    }

    /// FLD ST(i). Of an empty register and a full stack the first is told.
    fn load_register(&mut self, i: u8) {
        match self.st(i) {
            Some(value) => self.load(value),
            None if self.stack_fault(false) => {
                self.x87.turn(7);
                self.set(0, F80::INDEFINITE);
            }
            None => {}
        }
    }

    /// FLDL2T to FLDLN2, rounded as the control word says.
    fn load_constant(&mut self, at: usize) {
        let (se, sig, nearest_is_up) = CONSTANTS[at];
        let up = match self.control.rounding {
            Rounding::Nearest => nearest_is_up,
            Rounding::Up => true,
            Rounding::Down | Rounding::Zero => false,
        };
        self.load(F80 {
            sig: sig + u64::from(up),
            se,
        });
    }

    /// FST ST(i).
    fn store_register(&mut self, i: u8, pops: u16) {
        match self.st(0) {
            Some(st) => self.finish(Calc::exact(st), i, pops),
            None => self.finish_empty(i, pops),
        }
    }

    /// FSTPNCE, an undocumented FSTP ST(i): an empty register is popped, and copied to none.
    fn store_unchecked(&mut self, i: u8) {
        self.round_up(false);
        if let Some(st) = self.st(0) {
            self.set(i, st);
        }
        self.pop(1);
    }

    /// FXCH: an empty register is the indefinite.
    fn exchange(&mut self, i: u8) {
        self.round_up(false);
        let (a, b) = (self.st(0), self.st(i));
        if (a.is_none() || b.is_none()) && !self.stack_fault(false) {
            return;
        }
        self.set(0, b.unwrap_or(F80::INDEFINITE));
        self.set(i, a.unwrap_or(F80::INDEFINITE));
    }

    /// FCMOVcc; both registers are looked at, whatever the condition says.
    fn move_if(&mut self, i: u8, negated: bool, condition: u16) {
        let mask = match condition {
            0 => CF,
            1 => ZF,
            2 => CF | ZF,
            _ => PF,
        };
        let holds = (self.rflags & mask != 0) != negated;
        match (self.st(0), self.st(i)) {
            (Some(_), Some(value)) if holds => self.set(0, value),
            (Some(_), Some(_)) => {}
            _ => self.finish_empty(0, 0),
        }
    }

    /// FINCSTP and FDECSTP: TOP alone.
    fn move_top(&mut self, by: u16) {
        self.round_up(false);
        self.x87.turn(by);
    }

    /// FXTRACT: ST(0) is its exponent, and above it its significand.
    fn extract(&mut self) {
        let Some(st) = self.st(0) else {
            return self.two_empty();
        };
        if self.st(7).is_some() {
            return self.two_full();
        }
        let (exponent, significand) = extract(st);
        self.finish_two(exponent, significand);
    }

    /// A result in ST(0), and another pushed.
    fn finish_two(&mut self, first: Calc, second: F80) {
        let unmasked = self.control.unmasked(first.flags & BEFORE) != 0;
        self.finish(first, 0, 0);
        if !unmasked {
            self.x87.turn(7);
            self.set(0, second);
        }
    }

    /// Two results of an empty register.
    fn two_empty(&mut self) {
        if self.stack_fault(false) {
            self.set(0, F80::INDEFINITE);
            self.x87.turn(7);
            self.set(0, F80::INDEFINITE);
        }
    }

    /// Two results, with no room for the second.
    fn two_full(&mut self) {
        if self.stack_fault(true) {
            self.set(0, F80::INDEFINITE);
            self.x87.turn(7);
            self.set(0, F80::INDEFINITE);
        }
    }

    /// FPREM and FPREM1: C0, C3, C1 are the quotient's low bits, C2 says that it is not done.
    fn remainder(&mut self, nearest: bool) {
        self.code(0, C2);
        let (Some(a), Some(b)) = (self.st(0), self.st(1)) else {
            return self.finish_empty(0, 0);
        };
        let result = remainder(a, b, nearest, &self.control);
        self.finish(result.calc, 0, 0);
        if self.control.unmasked(result.calc.flags & BEFORE) != 0 {
            return;
        }
        let codes = match result.quotient {
            Quotient::None => return,
            Quotient::Partial => C2,
            Quotient::Low(low) => [(4, C0), (2, C3), (1, C1)]
                .iter()
                .filter(|(bit, _)| low & bit != 0)
                .fold(0, |codes, (_, code)| codes | code),
        };
        self.code(codes, C0 | C1 | C2 | C3);
    }

    /// FSIN and FCOS. C2 of an operand out of range, which stays.
    fn turn_function(&mut self, make: fn(F80, &Control) -> Option<Calc>) {
        self.code(0, C2);
        let Some(st) = self.st(0) else {
            return self.finish_empty(0, 0);
        };
        match make(st, &self.control) {
            Some(calc) => self.finish(calc, 0, 0),
            None => self.code(C2, C1 | C2),
        }
    }

    /// FSINCOS: ST(0) is the sine, and above it the cosine.
    fn sine_cosine(&mut self) {
        let control = self.control;
        self.two_of_turn(|st| {
            let (sine, cosine) = (
                elementary::sine(st, &control)?,
                elementary::cosine(st, &control)?,
            );
            Some((sine.with(cosine.flags), cosine.value))
        });
    }

    /// FPTAN: ST(0) is the tangent, and above it 1, or the NaN again.
    fn tangent(&mut self) {
        let control = self.control;
        self.two_of_turn(|st| {
            let calc = elementary::tangent(st, &control)?;
            let above = if calc.value.is_nan() {
                calc.value
            } else {
                F80::ONE
            };
            Some((calc, above))
        });
    }

    fn two_of_turn(&mut self, make: impl FnOnce(F80) -> Option<(Calc, F80)>) {
        self.code(0, C2);
        let Some(st) = self.st(0) else {
            return self.two_empty();
        };
        if self.st(7).is_some() {
            return self.two_full();
        }
        match make(st) {
            Some((first, second)) => self.finish_two(first, second),
            None => self.code(C2, C1 | C2),
        }
    }

    /// FST and FSTP of a real of 32 or 64 bits.
    fn store_real(&mut self, format: crate::soft::Format, pops: bool) {
        let control = self.control;
        let double = format == DOUBLE;
        let indefinite = if double {
            0xfff8_0000_0000_0000
        } else {
            0xffc0_0000
        };
        self.store_bytes(memory::low(indefinite), pops, |value| {
            let stored = narrowed(value, format, &control);
            Bytes {
                bytes: memory::low(stored.bits),
                flags: stored.flags,
                up: stored.up,
            }
        });
    }

    /// FSTP of 80 bits: as they are.
    fn store_extended(&mut self) {
        self.store_bytes(F80::INDEFINITE.to_bytes(), true, |value| Bytes {
            bytes: value.to_bytes(),
            flags: 0,
            up: false,
        });
    }

    fn store_integer(&mut self, bytes: u8, rounding: Rounding, pops: bool) {
        self.store_bytes(memory::integer_indefinite(bytes), pops, |value| {
            memory::store_integer(value, bytes, rounding)
        });
    }

    /// Stores what is made of ST(0): nothing, where an exception that says so is unmasked.
    fn store_bytes(&mut self, indefinite: [u8; 10], pops: bool, make: impl FnOnce(F80) -> Bytes) {
        let bytes = match self.st(0) {
            Some(st) => {
                self.round_up(false);
                let made = make(st);
                let prevents = BEFORE | OVERFLOW | UNDERFLOW;
                if self.control.unmasked(made.flags & prevents) != 0 {
                    self.signal(made.flags);
                    return;
                }
                self.round_up(made.up);
                self.signal(made.flags);
                made.bytes
            }
            None if self.stack_fault(false) => indefinite,
            None => return,
        };
        self.store = Some(bytes);
        self.pop(u16::from(pops));
    }
}
