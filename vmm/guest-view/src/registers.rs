//! Registers of a vCPU as a look at its guest needs them, and those that a kernel keeps
//! on its stacks.

use crate::btf::BtfError;
use crate::bytes::u64_at;
use crate::layout::Types;
use crate::space::Space;

/// Bytes of `struct pt_regs` at most.
const MOST: usize = 256;
/// `__USER32_CS` (`arch/x86/include/asm/segment.h`): a 32-bit program's code.
const USER32_CS: u16 = 0x23;

/// What a vCPU executes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The kernel: CPL 0.
    Kernel,
    /// A 64-bit program: CPL 3.
    User,
    /// A 32-bit program.
    User32,
}

impl Mode {
    /// By the code segment's selector.
    pub fn of_cs(cs: u16) -> Self {
        match cs & 3 {
            3 if cs == USER32_CS => Self::User32,
            3 => Self::User,
            _ => Self::Kernel,
        }
    }
}

/// Registers of a vCPU at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registers {
    pub rip: u64,
    pub rsp: u64,
    pub rbp: u64,
    pub rdx: u64,
    pub rdi: u64,
    pub r10: u64,
    pub r13: u64,
    pub cr3: u64,
    pub mode: Mode,
}

/// Registers of a program, as far as they are known while its vCPU runs it or the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProgramRegisters {
    /// The instruction pointer.
    pub ip: u64,
    /// The stack pointer.
    pub sp: u64,
    /// The frame pointer's register; none where the entry into the kernel has not saved it yet.
    pub bp: Option<u64>,
    /// Of 64 or 32 bits; never the kernel.
    pub mode: Mode,
}

/// Registers that an entry into the kernel has saved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Saved {
    pub(crate) ip: u64,
    pub(crate) sp: u64,
    pub(crate) mode: Mode,
    /// Not in the processor's own part of them.
    pub(crate) general: Option<General>,
}

/// The general registers that unwinding may need.
#[derive(Debug, Clone, Copy)]
pub(crate) struct General {
    pub(crate) bp: u64,
    pub(crate) dx: u64,
    pub(crate) di: u64,
    pub(crate) r10: u64,
    pub(crate) r13: u64,
}

/// Where `struct pt_regs` has them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SavedLayout {
    pub(crate) size: u64,
    ip: usize,
    cs: usize,
    sp: usize,
    bp: usize,
    dx: usize,
    di: usize,
    r10: usize,
    r13: usize,
}

impl SavedLayout {
    pub(crate) fn of(types: Types<'_>) -> Result<Self, BtfError> {
        const NAME: &str = "pt_regs";
        let unexpected = || BtfError::Unexpected(NAME.to_owned());
        let size = types.0.size_of(NAME)? as usize;
        let inside = |offset: u64| {
            let offset = usize::try_from(offset).unwrap_or(MOST);
            let is_inside = size <= MOST && offset + 8 <= size;
            is_inside.then_some(offset).ok_or_else(unexpected)
        };
        let at = |name| inside(types.u64(NAME, name)?);
        // Since 6.9 two bytes, in a union with FRED's.
        let cs = types.0.member(NAME, "cs")?;
        let layout = Self {
            size: size as u64,
            ip: at("ip")?,
            cs: inside(cs.offset.into())?,
            sp: at("sp")?,
            bp: at("bp")?,
            dx: at("dx")?,
            di: at("di")?,
            r10: at("r10")?,
            r13: at("r13")?,
        };
        if layout.cs < layout.ip || layout.sp < layout.ip {
            return Err(unexpected());
        }
        Ok(layout)
    }

    /// Bytes to the processor's own part.
    pub(crate) fn processors_part(&self) -> u64 {
        self.ip as u64
    }

    /// All of them, at `address`.
    pub(crate) fn whole(&self, space: &Space<'_>, address: u64) -> Option<Saved> {
        let mut bytes = [0; MOST];
        let size = usize::try_from(self.size).ok()?;
        if !space.read(address, &mut bytes[..size]) {
            return None;
        }
        let at = |offset| u64_at(&bytes, offset);
        let general = General {
            bp: at(self.bp),
            dx: at(self.dx),
            di: at(self.di),
            r10: at(self.r10),
            r13: at(self.r13),
        };
        Some(Saved {
            general: Some(general),
            ..self.interrupted(&bytes)
        })
    }

    /// The processor's own part of them, from `ip` on, at `address`.
    pub(crate) fn part(&self, space: &Space<'_>, address: u64) -> Option<Saved> {
        let mut bytes = [0; MOST];
        let size = usize::try_from(self.size).ok()?;
        if !space.read(address, &mut bytes[self.ip..size]) {
            return None;
        }
        Some(self.interrupted(&bytes))
    }

    fn interrupted(&self, bytes: &[u8; MOST]) -> Saved {
        Saved {
            ip: u64_at(bytes, self.ip),
            sp: u64_at(bytes, self.sp),
            mode: Mode::of_cs(u16::from_le_bytes([bytes[self.cs], bytes[self.cs + 1]])),
            general: None,
        }
    }
}
