//! The x87 FPU (SDM vol. 1, 8; vol. 2), whole and in integer code: nothing of it is executed by
//! the host's FPU, so no result, condition code or pointer is the host's.
//!
//! An instruction is named by its opcode as the FPU keeps it ([`Insn`]). [`X87::execute`] gives
//! the state after it, and what it stores: whoever executes it writes memory first and takes the
//! state then, so a page fault changes nothing.
//!
//! What the manual leaves undefined, or to the processor, has one value here:
//!
//! | what | SDM | ours |
//! |---|---|---|
//! | the last digit of FSIN, FCOS, FSINCOS, FPTAN, FPATAN, F2XM1, FYL2X, FYL2XP1 | vol. 1, 8.3.10 | the true value, rounded once as RC says |
//! | F2XM1 outside of -1 to 1 | vol. 2A, F2XM1 | the operand |
//! | FYL2XP1 outside of √½ - 1 to √2 - 1 | vol. 2A, FYL2XP1 | FYL2X of the sum |
//! | how far a partial remainder goes, of operands whose exponents differ by D | vol. 2A, FPREM | by 32 + D mod 32 |
//! | C0 and C3 of FPREM without a quotient | vol. 2A, FPREM | as they were |
//! | C0, C2 and C3 of what is no comparison | vol. 2A, the pages' "FPU flags affected" | as they were |
//! | C1 of FFREE and FFREEP; of FCMOVcc | vol. 2A, FFREE and FCMOVcc | 0; as it was |
//! | PE of FST where overflow or underflow is unmasked, and nothing stored | vol. 1, 8.5.4 and 8.5.5 | not set |
//! | FLD ST(i) of an empty register to a full stack | vol. 1, 8.5.1.1 | underflow |
//! | a denormal that FLD pushes, unmasked | vol. 1, 8.5.2 | pushed |
//! | digits above 9 of FBLD | vol. 2A, FBLD | by their four bits |
//! | precision control 01 | vol. 1, table 8-2 | 64 digits |
//! | FDP of what has no memory operand | vol. 1, 8.1.8 | as it was |

mod arithmetic;
mod elementary;
mod image;
mod machine;
mod memory;
mod value;

pub use image::{FXSAVE_LEN, ImageFormat};
pub use value::F80;

/// Status word: a stack fault, besides IE.
const STACK_FAULT: u16 = 1 << 6;
/// An unmasked exception is pending (ES), and its old name (B).
const SUMMARY: u16 = 1 << 7 | 1 << 15;
const C0: u16 = 1 << 8;
const C1: u16 = 1 << 9;
const C2: u16 = 1 << 10;
const C3: u16 = 1 << 14;
const TOP_SHIFT: u32 = 11;
const EXCEPTIONS: u16 = 0x3f;
/// Control word of FNINIT: all masked, 64 digits, to the nearest.
const INITIAL_CONTROL: u16 = 0x37f;

/// Registers and control of the FPU.
///
/// Code and data segments of the last instruction are 0, as on processors that have deprecated
/// them (CPUID.(7,0).EBX bit 13).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct X87 {
    /// R0 to R7: ST(0) is the one that the status word's TOP names.
    pub(crate) regs: [F80; 8],
    /// Address of the last instruction that is none of control.
    pub ip: u64,
    /// Address of its memory operand.
    pub dp: u64,
    pub(crate) control: u16,
    pub(crate) status: u16,
    /// The last such instruction (11 bits).
    pub opcode: u16,
    /// A bit a register that is not empty, R0 first, as FXSAVE has it.
    pub(crate) tags: u8,
}

impl Default for X87 {
    /// As FNINIT leaves it, with registers 0.
    fn default() -> Self {
        Self {
            regs: [F80::default(); 8],
            ip: 0,
            dp: 0,
            control: INITIAL_CONTROL,
            status: 0,
            opcode: 0,
            tags: 0,
        }
    }
}

/// An instruction, as FOP has it: the low three bits of D8 to DF, and the ModRM byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Insn(u16);

/// What an instruction does with memory. Sizes are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Nothing.
    None,
    /// Its operand is loaded.
    Load(u8),
    /// Its result is stored, if there is one.
    Store(u8),
    /// FLDENV.
    LoadEnvironment,
    /// FNSTENV.
    StoreEnvironment,
    /// FRSTOR.
    LoadState,
    /// FNSAVE.
    StoreState,
}

/// What an instruction comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// The FPU behind it.
    pub x87: X87,
    /// What is stored: as many bytes as [`Access::Store`] says. [`None`] where an unmasked
    /// exception prevents it.
    pub store: Option<[u8; 10]>,
    /// FNSTSW AX: the register.
    pub ax: Option<u16>,
    /// FCOMI and its kin: RFLAGS' ZF, PF and CF in their places; the other status flags are 0.
    pub rflags: Option<u64>,
}

impl Insn {
    /// Of the first opcode byte (D8 to DF) and the ModRM byte; [`None`] of another opcode.
    #[must_use]
    pub fn new(escape: u8, modrm: u8) -> Option<Self> {
        (escape & 0xf8 == 0xd8).then_some(Self(u16::from(escape & 7) << 8 | u16::from(modrm)))
    }

    /// The 11 bits that FOP holds.
    #[must_use]
    pub fn bits(self) -> u16 {
        self.0
    }

    fn escape(self) -> u16 {
        self.0 >> 8
    }

    /// ModRM's reg field, which is the instruction where the operand is in memory.
    fn reg(self) -> u16 {
        self.0 >> 3 & 7
    }

    /// The stack register of forms without memory.
    fn index(self) -> u16 {
        self.0 & 7
    }

    fn is_memory(self) -> bool {
        self.0 & 0xc0 != 0xc0
    }

    /// What it does with memory; [`None`] is #UD.
    #[must_use]
    pub fn access(self) -> Option<Access> {
        use Access::{Load, Store};
        if !self.is_memory() {
            return self.is_register_form().then_some(Access::None);
        }
        Some(match (self.escape(), self.reg()) {
            (0 | 2, _) | (1, 0) | (3, 0) => Load(4),
            (4, _) | (5, 0) | (7, 5) => Load(8),
            (6, _) | (7, 0) | (1, 5) => Load(2),
            (1, 2 | 3) | (3, 1..=3) => Store(4),
            (5, 1..=3) | (7, 7) => Store(8),
            (7, 1..=3) | (1 | 5, 7) => Store(2),
            (3, 5) | (7, 4) => Load(10),
            (3, 7) | (7, 6) => Store(10),
            (1, 4) => Access::LoadEnvironment,
            (1, 6) => Access::StoreEnvironment,
            (5, 4) => Access::LoadState,
            (5, 6) => Access::StoreState,
            _ => return None,
        })
    }

    fn is_register_form(self) -> bool {
        let low = self.0 & 0xff;
        match self.escape() {
            1 => !matches!(low, 0xd1..=0xd7 | 0xe2 | 0xe3 | 0xe6 | 0xe7 | 0xef),
            2 => low < 0xe0 || low == 0xe9,
            // E5 was FRSTPM of the 80287XL, and is #UD.
            3 => !matches!(low, 0xe5..=0xe7 | 0xf8..=0xff),
            5 => low < 0xf0,
            6 => !matches!(low, 0xd8 | 0xda..=0xdf),
            7 => !matches!(low, 0xe1..=0xe7 | 0xf8..=0xff),
            _ => true,
        }
    }

    /// Whether it waits for a pending exception, which is #MF then. The others are FNINIT,
    /// FNCLEX, FNSTCW, FNSTSW, FNSTENV, FNSAVE, and what the 8087 and 80287 had besides.
    #[must_use]
    pub fn waits(self) -> bool {
        if self.is_memory() {
            return !matches!((self.escape(), self.reg()), (1, 6 | 7) | (5, 6 | 7));
        }
        !matches!(self.0, 0x3e0..=0x3e4 | 0x7e0)
    }

    /// Whether it is of control, and so leaves FIP, FDP and FOP (SDM vol. 1, 8.1.8).
    #[must_use]
    pub fn is_control(self) -> bool {
        let memory = self.is_memory() && matches!((self.escape(), self.reg()), (1 | 5, 4..=7));
        memory || !self.waits()
    }
}

impl X87 {
    /// Carries out an instruction that [`Insn::access`] knows. `operand` is what it loads,
    /// `rflags` what FCMOV decides by. FLDENV, FNSTENV, FRSTOR and FNSAVE have functions of their
    /// own, and change nothing here.
    #[must_use]
    pub fn execute(&self, insn: Insn, operand: [u8; 10], rflags: u64) -> Done {
        machine::run(self, insn, operand, rflags)
    }

    /// Whether #MF is what a waiting instruction comes to.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.status & SUMMARY != 0
    }

    /// FCW.
    #[must_use]
    pub fn control(&self) -> u16 {
        self.control
    }

    /// FSW, with TOP in it.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.status
    }

    /// A bit a register that is not empty, R0 first.
    #[must_use]
    pub fn tags(&self) -> u8 {
        self.tags
    }

    /// ST(i), also if it is empty.
    #[must_use]
    pub fn register(&self, i: u8) -> F80 {
        self.regs[self.physical(i)]
    }

    /// The number of R that ST(i) is.
    fn physical(&self, i: u8) -> usize {
        usize::from((self.status >> TOP_SHIFT).wrapping_add(u16::from(i)) & 7)
    }

    /// ES and B, which are what flags and masks say, whatever was loaded.
    fn summarize(&mut self) {
        let pending = self.status & !self.control & EXCEPTIONS != 0;
        self.status = self.status & !SUMMARY | if pending { SUMMARY } else { 0 };
    }
}
