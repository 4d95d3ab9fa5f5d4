//! PMU accesses as a table: what the guest does, and what it must see.

use std::fmt;

use anyhow::{Result, ensure};
use iced_x86::code_asm::{CodeAssembler, eax, ecx, edx, esi, qword_ptr, r14, r15, rax, rdx, rsi};
use vmm::micro::{KERNEL_CS, MicroGuest, USER_CS};

use super::lab::{Entry, Lab, LabRun, Setup};
use super::program::{
    FAULT, Program, VALUE, Written, enter_user, exit, log_value, low, spin, spin_for,
};

/// One access and its expected result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// WRMSR: index, value.
    Write(u32, u64),
    /// WRMSR that raises #GP.
    WriteGp(u32, u64),
    /// RDMSR: index, value.
    Read(u32, u64),
    /// RDMSR: index, least and greatest value.
    ReadWithin(u32, u64, u64),
    /// RDMSR that raises #GP.
    ReadGp(u32),
    /// RDPMC: ECX, value.
    Rdpmc(u32, u64),
    /// RDPMC: ECX, least and greatest value.
    RdpmcWithin(u32, u64, u64),
    /// RDPMC that raises #GP.
    RdpmcGp(u32),
    /// An access that presents this cookie.
    With(u64, &'static Op),
    /// A loop of so many rounds.
    Spin(u32),
    /// A loop for so many ticks of the TSC.
    Wait(u64),
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Op::Write(msr, value) => write!(f, "WRMSR {msr:#x} ← {value:#x}"),
            Op::WriteGp(msr, value) => write!(f, "WRMSR {msr:#x} ← {value:#x}: #GP"),
            Op::Read(msr, value) => write!(f, "RDMSR {msr:#x} = {value:#x}"),
            Op::ReadWithin(msr, least, most) => {
                write!(f, "RDMSR {msr:#x} in {least:#x}..={most:#x}")
            }
            Op::ReadGp(msr) => write!(f, "RDMSR {msr:#x}: #GP"),
            Op::Rdpmc(index, value) => write!(f, "RDPMC {index:#x} = {value:#x}"),
            Op::RdpmcWithin(index, least, most) => {
                write!(f, "RDPMC {index:#x} in {least:#x}..={most:#x}")
            }
            Op::RdpmcGp(index) => write!(f, "RDPMC {index:#x}: #GP"),
            Op::With(cookie, op) => write!(f, "with {cookie:#x}: {op}"),
            Op::Spin(times) => write!(f, "{times} rounds of a loop"),
            Op::Wait(ticks) => write!(f, "{ticks} ticks of the TSC"),
        }
    }
}

/// Accesses from reset on, first at CPL 0, then at CPL 3.
#[derive(Debug, Clone, Copy)]
pub struct Script<'a> {
    /// What is shown.
    pub name: &'a str,
    /// CR4 bits.
    pub cr4: u64,
    /// At CPL 0.
    pub kernel: &'a [Op],
    /// At CPL 3.
    pub user: &'a [Op],
}

impl Script<'_> {
    /// Plays the script and compares each access with its outcome.
    ///
    /// # Errors The first access with another result.
    pub fn check(&self, lab: &Lab, setup: &Setup) -> Result<LabRun> {
        let ran = lab.run(setup, &self.guest()?)?;
        let ops = self.kernel.iter().map(|op| (op, KERNEL_CS));
        let ops: Vec<_> = ops
            .chain(self.user.iter().map(|op| (op, USER_CS)))
            .collect();
        let context = format!("'{}' on {}", self.name, setup.model);
        for (index, (op, cs)) in ops.iter().enumerate() {
            let entry = ran.log.get(index);
            ensure!(
                entry.is_some_and(|entry| op.agrees(entry, *cs)),
                "{context}: access {index}: {op}; the guest saw {entry:x?}"
            );
        }
        ensure!(
            ran.log.len() == ops.len(),
            "{context}: {} accesses, but {} log entries",
            ops.len(),
            ran.log.len()
        );
        Ok(ran)
    }

    fn guest(&self) -> Result<MicroGuest> {
        let mut program = Program::new()?.kernel(|a| {
            self.kernel.iter().try_for_each(|op| op.write(a))?;
            if self.user.is_empty() {
                exit(a)
            } else {
                enter_user(a, 0)
            }
        })?;
        if !self.user.is_empty() {
            program = program.user(|a| {
                self.user.iter().try_for_each(|op| op.write(a))?;
                a.ud2()
            })?;
        }
        Ok(program.start(self.cr4))
    }
}

impl Op {
    /// The access, and one log entry with its result.
    fn write(&self, a: &mut CodeAssembler) -> Written {
        let ecx_value = match *self {
            Op::Write(index, _)
            | Op::WriteGp(index, _)
            | Op::Read(index, _)
            | Op::ReadWithin(index, ..)
            | Op::ReadGp(index)
            | Op::Rdpmc(index, _)
            | Op::RdpmcWithin(index, ..)
            | Op::RdpmcGp(index) => index,
            Op::With(cookie, op) => {
                a.mov(rsi, cookie)?;
                op.write(a)?;
                return a.xor(esi, esi);
            }
            Op::Spin(times) => {
                spin(a, times)?;
                return log_value(a);
            }
            Op::Wait(ticks) => {
                spin_for(a, ticks)?;
                return log_value(a);
            }
        };
        let (mut fault, mut next) = (a.create_label(), a.create_label());
        a.lea(r14, qword_ptr(fault))?;
        a.lea(r15, qword_ptr(next))?;
        a.mov(ecx, ecx_value)?;
        match *self {
            Op::Write(_, value) | Op::WriteGp(_, value) => {
                a.mov(eax, low(value))?;
                a.mov(edx, low(value >> 32))?;
            }
            _ => {
                // So that upper halves that are not cleared show.
                a.mov(rax, -1i64)?;
                a.mov(rdx, -1i64)?;
            }
        }
        a.set_label(&mut fault)?;
        match self {
            Op::Write(..) | Op::WriteGp(..) => a.wrmsr()?,
            Op::Read(..) | Op::ReadWithin(..) | Op::ReadGp(..) => a.rdmsr()?,
            _ => a.rdpmc()?,
        }
        log_value(a)?;
        a.set_label(&mut next)?;
        a.nop()
    }

    fn agrees(&self, entry: &Entry, cs: u16) -> bool {
        let read = || (entry.kind == VALUE).then_some((entry.a, entry.b));
        let within = |least: u64, most: u64| {
            read().is_some_and(|(low, high)| {
                let clean = low >> 32 == 0 && high >> 32 == 0;
                clean && (least..=most).contains(&(high << 32 | low))
            })
        };
        match *self {
            Op::With(_, op) => op.agrees(entry, cs),
            Op::Write(..) | Op::Spin(_) | Op::Wait(_) => entry.kind == VALUE,
            Op::Read(_, value) | Op::Rdpmc(_, value) => within(value, value),
            Op::ReadWithin(_, least, most) | Op::RdpmcWithin(_, least, most) => within(least, most),
            Op::WriteGp(..) | Op::ReadGp(_) | Op::RdpmcGp(_) => {
                *entry
                    == Entry {
                        kind: FAULT + 13,
                        a: 0,
                        b: 0,
                        c: cs.into(),
                    }
            }
        }
    }
}
