//! Where in its guest a sample was taken.

/// Most frames of either part of a chain: as many as perf takes
/// (`PERF_MAX_STACK_DEPTH`).
pub const MOST_FRAMES: usize = 127;

/// Most bytes of a program's stack in a sample: as many as perf takes.
pub const MOST_STACK: usize = 65_528;
/// Most mappings that the words of a stack lead to.
pub const MOST_STACK_MAPPINGS: usize = 64;

/// What runs on a vCPU, as the VMM sees it in the guest's memory. Tasks and mappings have
/// numbers, from 1 on, that PROGRAMS describes ([`crate::wire::programs`]); 0 is one that is
/// not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestPlace {
    pub task: u64,
    /// What its program has mapped where the instruction pointer is; 0 also in the kernel.
    pub mapping: u64,
    /// The callers, if they were asked for.
    pub chain: CallChain,
    /// What the program's callers can be found by, if it was asked for.
    pub stack: ProgramStack,
}

/// The top of a program's stack, with what the unwind tables of its files (DWARF CFI) need
/// beside it. The program is at the first frame of [`CallChain::program`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgramStack {
    /// The stack pointer.
    pub sp: u64,
    /// The frame pointer's register; none where it is not known.
    pub bp: Option<u64>,
    /// Numbers of what is mapped, and may be executed, where words of the stack point to.
    pub mappings: Vec<u64>,
    /// The memory from `sp` on, as far as it could be read.
    pub bytes: Vec<u8>,
}

impl ProgramStack {
    /// There is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Nothing is in it from now on; it keeps its room.
    pub fn clear(&mut self) {
        (self.sp, self.bp) = (0, None);
        self.mappings.clear();
        self.bytes.clear();
    }
}

/// Callers, the innermost first: those in the kernel, then those in the program. The first
/// frame is where the sample was taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallChain {
    /// An address in each frame's instruction: in a caller that of its call.
    pub kernel: Vec<u64>,
    /// Why there are no more of them; none where there is no such part.
    pub kernel_end: Option<ChainEnd>,
    /// Frames of the program.
    pub program: Vec<ProgramFrame>,
    /// Why there are no more of them; none where there is no such part.
    pub program_end: Option<ChainEnd>,
}

impl CallChain {
    /// There is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.kernel_end.is_none() && self.program_end.is_none()
    }

    /// Nothing is in it from now on; it keeps its room.
    pub fn clear(&mut self) {
        self.kernel.clear();
        self.program.clear();
        (self.kernel_end, self.program_end) = (None, None);
    }
}

/// A frame of a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProgramFrame {
    /// An address in its instruction.
    pub address: u64,
    /// What is mapped there; 0: not known.
    pub mapping: u64,
}

/// Why a part of a chain has no further frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ChainEnd {
    /// The last frame is the outermost function.
    Outermost = 1,
    /// The program entered the kernel there; its part follows.
    Entry = 2,
    /// There are more frames than are recorded.
    Depth = 3,
    /// It is broken: the next frame is not known.
    Broken = 4,
    /// The program's registers or memory are not known.
    NoProgram = 5,
}

impl ChainEnd {
    /// By its number.
    #[must_use]
    pub fn of(number: u8) -> Option<Self> {
        const ALL: [ChainEnd; 5] = [
            ChainEnd::Outermost,
            ChainEnd::Entry,
            ChainEnd::Depth,
            ChainEnd::Broken,
            ChainEnd::NoProgram,
        ];
        ALL.into_iter().find(|end| *end as u8 == number)
    }
}
