//! Call chains: the frames of the kernel, and behind them those of its program, which are
//! found by frame pointers.

use crate::frame::{End, Frame};
use crate::registers::{Mode, ProgramRegisters, Registers, Saved};
use crate::space::Space;
use crate::unwind::{Entered, State, Unwinder};

/// Depth of a chain where nobody says another: that of perf (`PERF_MAX_STACK_DEPTH`).
pub const DEPTH: usize = 127;
/// Behind every program's memory, with page tables of five levels.
const PROGRAM: u64 = 1 << 56;

/// The callers of a place: first the kernel's frames, then those of a program. One is used
/// again and again, so that taking a chain allocates nothing.
#[derive(Debug, Clone)]
pub struct Chain {
    frames: Vec<Frame>,
    depth: usize,
    kernel: usize,
    kernel_end: Option<End>,
    program_end: Option<End>,
    registers: Option<ProgramRegisters>,
}

impl Default for Chain {
    fn default() -> Self {
        Self::with_depth(DEPTH)
    }
}

impl Chain {
    /// For at most `depth` frames of the kernel, and as many of a program.
    #[must_use]
    pub fn with_depth(depth: usize) -> Self {
        Self {
            frames: Vec::with_capacity(depth.saturating_mul(2).min(4096)),
            depth,
            kernel: 0,
            kernel_end: None,
            program_end: None,
            registers: None,
        }
    }

    /// The kernel's frames, the innermost first.
    #[must_use]
    pub fn kernel(&self) -> &[Frame] {
        &self.frames[..self.kernel]
    }

    /// The program's frames, the innermost first.
    #[must_use]
    pub fn program(&self) -> &[Frame] {
        &self.frames[self.kernel..]
    }

    /// Why the kernel's part ends; `None` where it has none.
    #[must_use]
    pub fn kernel_end(&self) -> Option<End> {
        self.kernel_end
    }

    /// Why the program's part ends; `None` where a thread of the kernel runs, or of a program
    /// whose memory is gone already.
    #[must_use]
    pub fn program_end(&self) -> Option<End> {
        self.program_end
    }

    /// The program's registers where its part begins.
    #[must_use]
    pub fn registers(&self) -> Option<ProgramRegisters> {
        self.registers
    }

    pub(crate) fn clear(&mut self) {
        self.frames.clear();
        self.kernel = 0;
        self.kernel_end = None;
        self.program_end = None;
        self.registers = None;
    }

    /// The kernel's part, from `at` on.
    pub(crate) fn walk_kernel(&mut self, unwinder: &Unwinder<'_>, at: &Registers) -> Walked {
        let mut state = State::new(at);
        let mut walked = Walked {
            entered: None,
            on_stack: false,
        };
        self.push(state.ip, true, false);
        let end = loop {
            walked.on_stack |= unwinder.stack.contains(&state.sp);
            if self.frames.len() >= self.depth {
                break End::Depth;
            }
            match unwinder.next(&mut state) {
                Ok(None) => self.push(state.ip, state.interrupted, state.guessed),
                Ok(Some(program)) => {
                    walked.entered = Some(program);
                    break End::Entry;
                }
                Err(end) => break end,
            }
        };
        self.kernel = self.frames.len();
        self.kernel_end = Some(end);
        walked
    }

    /// The program's part, by its frame pointers.
    pub(crate) fn walk_program(&mut self, space: &Space<'_>, at: &ProgramRegisters) {
        self.registers = Some(*at);
        self.push(at.ip, true, false);
        let bytes = at.pointer();
        let (mut below, mut bp) = (at.sp, at.bp);
        let end = loop {
            if self.frames.len() - self.kernel >= self.depth {
                break End::Depth;
            }
            let Some(frame) = bp.filter(|bp| *bp != 0) else {
                break End::Outermost;
            };
            if frame < below || frame >= PROGRAM || frame % bytes != 0 {
                break End::Direction;
            }
            let Some((caller, back)) = at.frame(space, frame) else {
                break End::Unreadable;
            };
            if back == 0 {
                break End::Outermost;
            }
            if back >= PROGRAM {
                break End::NotCode;
            }
            self.push(back, false, true);
            (below, bp) = (frame + 2 * bytes, Some(caller));
        };
        self.program_end = Some(end);
    }

    /// The program's part, where its memory is not known; where it is, may be.
    pub(crate) fn no_program(&mut self, at: Option<&ProgramRegisters>) {
        if let Some(at) = at {
            self.push(at.ip, true, false);
        }
        self.program_end = Some(End::NoProgram);
    }

    fn push(&mut self, address: u64, interrupted: bool, guessed: bool) {
        self.frames.push(Frame {
            address,
            interrupted,
            guessed,
        });
    }
}

/// What was met on the way through the kernel's frames.
pub(crate) struct Walked {
    /// The registers of the program that entered the kernel, if the chain comes so far.
    pub(crate) entered: Option<Entered>,
    /// A frame is on the task's stack, below the registers that were saved there: the entry
    /// into the kernel is over, and they are those of the program.
    pub(crate) on_stack: bool,
}

impl ProgramRegisters {
    pub(crate) fn running(at: &Registers) -> Self {
        Self {
            ip: at.rip,
            sp: at.rsp,
            bp: Some(at.rbp),
            mode: at.mode,
        }
    }

    pub(crate) fn entered(saved: &Saved) -> Self {
        Self {
            ip: saved.ip,
            sp: saved.sp,
            bp: saved.general.map(|general| general.bp),
            mode: saved.mode,
        }
    }

    /// Bytes of a pointer.
    fn pointer(&self) -> u64 {
        if self.mode == Mode::User32 { 4 } else { 8 }
    }

    /// What a frame pointer leads to: the caller's, and the return address.
    fn frame(&self, space: &Space<'_>, at: u64) -> Option<(u64, u64)> {
        if self.mode == Mode::User32 {
            let both = space.u64(at).ok()?;
            return Some((both & 0xffff_ffff, both >> 32));
        }
        let both: [u8; 16] = space.array(at)?;
        let both = u128::from_le_bytes(both);
        let low = u64::try_from(both & u128::from(u64::MAX)).ok()?;
        Some((low, u64::try_from(both >> 64).ok()?))
    }
}
