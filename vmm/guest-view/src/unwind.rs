//! The way from a frame of the kernel to its caller's: by ORC, as
//! `arch/x86/kernel/unwind_orc.c` goes, or by frame pointers where there is none.

use std::ops::Range;

use crate::frame::End;
use crate::orc::{Base, Entry, FrameKind};
use crate::registers::{General, Mode, Registers, Saved, SavedLayout};
use crate::space::Space;

/// The kernel's half of linear memory, with page tables of five levels; with four it is a
/// part of that.
const KERNEL: u64 = 0xff00_0000_0000_0000;
/// Where a kernel's code is: its image and behind it the modules, and code that it made
/// itself (`Documentation/arch/x86/x86_64/mm.rst`).
const CODE: Range<u64> = 0xffff_ffff_8000_0000..0xffff_ffff_ff00_0000;
/// Most bytes of a frame that a frame pointer leads over.
const MOST_FRAME: u64 = 1 << 18;

/// A frame of the kernel.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) ip: u64,
    pub(crate) sp: u64,
    bp: u64,
    /// The last registers that were saved, as long as no call is behind them.
    general: Option<General>,
    pub(crate) interrupted: bool,
    /// A frame pointer led here.
    pub(crate) guessed: bool,
}

impl State {
    pub(crate) fn new(at: &Registers) -> Self {
        Self {
            ip: at.rip,
            sp: at.rsp,
            bp: at.rbp,
            general: Some(General {
                bp: at.rbp,
                dx: at.rdx,
                di: at.rdi,
                r10: at.r10,
                r13: at.r13,
            }),
            interrupted: true,
            guessed: false,
        }
    }
}

/// What the kernel's stacks are walked by.
pub(crate) struct Unwinder<'a> {
    pub(crate) space: &'a Space<'a>,
    pub(crate) saved: Option<&'a SavedLayout>,
    /// The task's stack, up to the registers of its program.
    pub(crate) stack: Range<u64>,
    /// Code that returns to an address that a tracer keeps.
    pub(crate) trampolines: &'a [Range<u64>],
    /// Whether there is ORC at an address, and what it says.
    pub(crate) orc: &'a dyn Fn(u64) -> OrcLookup,
}

/// The registers of a program that entered the kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entered {
    /// Of the whole `struct pt_regs`, also where only the processor's part is saved.
    pub(crate) address: u64,
    pub(crate) saved: Saved,
    /// A frame pointer led to them.
    pub(crate) guessed: bool,
}

/// What the kernel's tables have for an address.
pub(crate) enum OrcLookup {
    /// There is none: a kernel or a module without ORC, or code that is not known, of a module
    /// that came since or of the kernel's own making.
    None,
    /// An entry that is no entry.
    Unknown,
    Entry(Entry),
}

impl Unwinder<'_> {
    /// Goes to the caller's frame, or gives the registers of the program that called.
    pub(crate) fn next(&self, state: &mut State) -> Result<Option<Entered>, End> {
        let place = state.ip.wrapping_sub(u64::from(!state.interrupted));
        if self.trampolines.iter().any(|code| code.contains(&place)) {
            return Err(End::NoTable);
        }
        let entry = match (self.orc)(place) {
            OrcLookup::Entry(entry) => entry,
            OrcLookup::Unknown => return Err(End::NoTable),
            OrcLookup::None => return self.by_frame_pointer(state),
        };
        match entry.kind {
            FrameKind::Undefined => return Err(End::NoTable),
            FrameKind::End => return Err(End::Outermost),
            _ => {}
        }
        let (sp, indirect) = self.caller_sp(state, &entry)?;
        let before = state.sp;
        let program = match entry.kind {
            FrameKind::Registers | FrameKind::Interrupt => {
                self.interrupted(state, sp, entry.kind)?
            }
            _ => {
                state.ip = self.on_stack(sp.wrapping_sub(8))?;
                state.sp = sp;
                state.general = None;
                // On one stack callers are above. Other stacks are reached by what was
                // interrupted, or by a pointer that is on this one.
                if !indirect && sp <= before {
                    return Err(End::Direction);
                }
                None
            }
        };
        if program.is_some() {
            return Ok(program);
        }
        state.bp = match entry.bp {
            Base::Undefined => state.general.map_or(state.bp, |general| general.bp),
            Base::PreviousSp => self.on_stack(offset(sp, entry.bp_offset))?,
            Base::Bp => self.on_stack(offset(state.bp, entry.bp_offset))?,
            _ => return Err(End::NoTable),
        };
        state.interrupted = entry.interrupted;
        self.check_code(state)
    }

    /// What was found as the caller's address is one.
    fn check_code(&self, state: &State) -> Result<Option<Entered>, End> {
        if !CODE.contains(&state.ip) {
            return Err(End::NotCode);
        }
        // A tracer has put its own function in the place of the caller.
        let is_it = |code: &Range<u64>| code.start == state.ip;
        if !state.interrupted && self.trampolines.iter().any(is_it) {
            return Err(End::NoTable);
        }
        Ok(None)
    }

    /// The caller's stack pointer, and whether it was found on the stack.
    fn caller_sp(&self, state: &State, entry: &Entry) -> Result<(u64, bool), End> {
        let general = || state.general.ok_or(End::NoRegister);
        let by = entry.sp_offset;
        Ok(match entry.sp {
            Base::Sp => (offset(state.sp, by), false),
            Base::Bp => (offset(state.bp, by), false),
            Base::SpIndirect => (offset(self.on_stack(state.sp)?, by), true),
            Base::BpIndirect => (self.on_stack(offset(state.bp, by))?, true),
            Base::R10 => (general()?.r10, true),
            Base::R13 => (general()?.r13, true),
            Base::Di => (general()?.di, true),
            Base::Dx => (general()?.dx, true),
            // No table has it so far, and nobody has kept it.
            Base::Ax => return Err(End::NoRegister),
            Base::Undefined | Base::PreviousSp => return Err(End::NoTable),
        })
    }

    /// Goes to what was interrupted, whose registers are at `sp`.
    fn interrupted(
        &self,
        state: &mut State,
        sp: u64,
        frame: FrameKind,
    ) -> Result<Option<Entered>, End> {
        let layout = self.saved.ok_or(End::NoTable)?;
        let kernels = (sp >= KERNEL).then_some(sp).ok_or(End::Unreadable)?;
        let (address, saved) = if frame == FrameKind::Registers {
            (kernels, layout.whole(self.space, kernels))
        } else {
            let whole = kernels.wrapping_sub(layout.processors_part());
            (whole, layout.part(self.space, kernels))
        };
        let mut saved = saved.ok_or(End::Unreadable)?;
        // Where only the processor's part is saved, the others are as they were last known.
        saved.general = saved.general.or(state.general);
        state.general = saved.general;
        (state.ip, state.sp) = (saved.ip, saved.sp);
        Ok((saved.mode != Mode::Kernel).then_some(Entered {
            address,
            saved,
            guessed: state.guessed,
        }))
    }

    /// As the kernel does for code without tables: it may have a frame pointer.
    fn by_frame_pointer(&self, state: &mut State) -> Result<Option<Entered>, End> {
        let above = state.bp.wrapping_sub(state.sp);
        if !state.bp.is_multiple_of(8) || above > MOST_FRAME {
            return Err(End::Direction);
        }
        let (caller, back) = (
            self.on_stack(state.bp)?,
            self.on_stack(state.bp.wrapping_add(8))?,
        );
        *state = State {
            ip: back,
            sp: state.bp.wrapping_add(16),
            bp: caller,
            general: None,
            interrupted: false,
            guessed: true,
        };
        self.check_code(state)
    }

    /// What a kernel's stack has there.
    fn on_stack(&self, at: u64) -> Result<u64, End> {
        let kernels = (at >= KERNEL).then_some(at);
        let found = kernels.and_then(|at| self.space.u64(at).ok());
        found.ok_or(End::Unreadable)
    }
}

fn offset(at: u64, by: i16) -> u64 {
    at.wrapping_add_signed(by.into())
}
