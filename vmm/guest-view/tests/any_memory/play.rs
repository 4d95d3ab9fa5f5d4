//! A small kernel whose memory is changed anywhere, before it is found or after; then
//! everything is asked of it. For the tests, and for the fuzz target.
#![allow(clippy::cast_possible_truncation, reason = "addresses in 4 MiB")]

use std::cell::Cell;
use std::ops::Range;

use crate::linux::{
    AREA, CALLED, CODE, ENTRY, HEAD, IMAGE, INTERRUPT, KSTACK, Kind, Linux, MODULE, NODES, NOTE,
};
use crate::linux::{
    DENTRY, DIRECT, MM, MODULE_CODE, PROGRAM_ROOT, REGS, STACK, TASK, VMA, physical,
};
use guest_view::{Btf, Chain, GuestMemory, KernelView, Look, Mode, Note, Registers, Search, Step};

const MIB: usize = 1 << 20;

/// What was reached.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reached {
    pub(crate) kernel: bool,
    pub(crate) task: bool,
    pub(crate) path: bool,
    pub(crate) build_id: bool,
    pub(crate) kernel_frames: usize,
    pub(crate) program_frames: usize,
    /// What a stack led to cannot be executed: it has changed between two reads.
    not_code: bool,
}

/// Bytes as decisions; behind their end all are 0.
struct Decisions<'a>(&'a [u8]);

impl Decisions<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    fn word(&mut self) -> u64 {
        u64::from_le_bytes([(); 8].map(|()| self.byte()))
    }

    /// Somewhere in what is read, with a preference for what decides.
    fn place(&mut self) -> usize {
        let starts = [
            0x1000,
            NOTE,
            physical(AREA),
            physical(TASK),
            physical(MM),
            physical(VMA),
            physical(DENTRY),
            physical(NODES),
            physical(MODULE),
            physical(KSTACK) + 0x4000 - REGS - 0x100,
            physical(STACK) + 0x800,
            physical(IMAGE) + 0x2000,
            physical(IMAGE) + 0x5_0000,
            physical(IMAGE) + 0x8_0000,
            physical(IMAGE) + 0x10_0000,
            physical(MODULE_CODE),
            physical(HEAD),
            physical(HEAD) + 0x200,
        ];
        let choice = usize::from(self.byte());
        let start = starts[choice % starts.len()] as usize;
        let offset = usize::from(self.byte()) | usize::from(self.byte()) << 8;
        let within = if choice < 192 { 0x180 } else { 0x1800 };
        start + offset % within
    }

    /// A value that may be an address of something.
    fn value(&mut self) -> u64 {
        let kind = self.byte();
        let near = u64::from(self.byte()) * 8;
        match kind % 8 {
            0 => self.word(),
            1 => DIRECT + physical(TASK) + near,
            2 => NODES | near,
            3 => KSTACK + 0x4000 - REGS - near,
            4 => CALLED + near / 8,
            5 => STACK + 0x800 + near,
            6 => near / 8,
            _ => u64::MAX - near,
        }
    }

    fn change(&mut self, linux: &mut Linux) {
        for _ in 0..self.byte() % 16 {
            let place = self.place();
            let len = usize::from(self.byte() % 8) + 1;
            let value = self.value().to_le_bytes();
            linux.memory[place..place + len].copy_from_slice(&value[..len]);
        }
    }

    fn registers(&mut self) -> Registers {
        let rips = [
            CODE,
            CALLED,
            ENTRY,
            INTERRUPT,
            MODULE_CODE,
            MODULE_CODE + 0x2000,
            IMAGE,
            0,
        ];
        let choice = usize::from(self.byte());
        let rip = rips[choice % rips.len()];
        let mode = match choice / rips.len() % 8 {
            0 => Mode::User32,
            1 => Mode::Kernel,
            _ if rip < IMAGE => Mode::User,
            _ => Mode::Kernel,
        };
        let sp = if mode == Mode::Kernel {
            KSTACK + 0x4000 - REGS - 32
        } else {
            STACK + 0x800
        };
        let mut other = |usual: u64| {
            if self.byte().is_multiple_of(4) {
                self.value()
            } else {
                usual
            }
        };
        Registers {
            rip: rip.wrapping_add(other(0) & 0xff),
            rsp: other(sp),
            rbp: other(sp + 0x10),
            rdx: other(0),
            rdi: other(0),
            r10: other(sp),
            r13: other(sp),
            cr3: other(PROGRAM_ROOT),
            mode,
        }
    }
}

pub(crate) fn run(bytes: &[u8]) -> Reached {
    let mut decisions = Decisions(bytes);
    let start = decisions.byte();
    let mut linux = Linux::new(Kind::of(start.into()));
    // `called` was called by `entry`.
    linux.word(KSTACK + 0x4000 - REGS - 8, ENTRY + 0x20);
    if start & 2 != 0 {
        decisions.change(&mut linux);
    }
    let mut search = Search::new(std::iter::once(0..4 << 20));
    let note = loop {
        match search.step(&linux, 64) {
            Step::Searching => {}
            Step::Found(note) => break note,
            Step::Done => return Reached::default(),
        }
    };
    let text = (note.release(), note.build_id(), note.kernel_offset());
    let _ = (text, Note::read(&linux, decisions.word()));
    linux.bytes.set(0);
    let found = KernelView::of(&linux, note, PROGRAM_ROOT);
    assert!(
        linux.bytes.get() <= 385 * MIB,
        "{} bytes",
        linux.bytes.get()
    );
    let Ok(mut view) = found else {
        return Reached::default();
    };
    decisions.change(&mut linux);
    if let Ok(Some(now)) = view.refreshed(&linux) {
        view = now;
    }
    let _ = (
        view.is_current(&linux, PROGRAM_ROOT),
        view.processor(&linux, 7),
        view.missing().count(),
    );
    ask(&mut linux, &view, &mut decisions)
}

/// Everything that a look tells, three times; the kernel is changed behind each.
fn ask(linux: &mut Linux, view: &KernelView, decisions: &mut Decisions<'_>) -> Reached {
    let mut reached = Reached {
        kernel: true,
        ..Reached::default()
    };
    check_symbols(view);
    let mut chain = Chain::default();
    for _ in 0..3 {
        let at = decisions.registers();
        look(linux, linux, view, &at, &mut chain, &mut reached);
        assert!(!reached.not_code);
        decisions.change(linux);
    }
    reached
}

fn check_symbols(view: &KernelView) {
    for symbol in view.symbols().take(1 << 16) {
        assert!(symbol.name.bytes().all(|byte| byte.is_ascii_graphic()));
        let _ = view.symbol(symbol.address);
    }
}

/// Everything that a look at `memory` tells. `linux`, which is behind it, counts the reads.
fn look(
    memory: &dyn GuestMemory,
    linux: &Linux,
    view: &KernelView,
    at: &Registers,
    chain: &mut Chain,
    reached: &mut Reached,
) {
    linux.bytes.set(0);
    linux.reads.set(0);
    let look = Look::at(view, memory);
    let task = look.task(0, at);
    reached.task |= task.is_ok();
    look.chain(task.as_ref().ok(), at, chain);
    reached.kernel_frames = reached.kernel_frames.max(chain.kernel().len());
    reached.program_frames = reached.program_frames.max(chain.program().len());
    assert!(chain.kernel().len() <= 127 && chain.program().len() <= 127);
    if let Some(memory) = task.ok().and_then(|task| task.memory) {
        if let Some(at) = chain.registers() {
            let mut stack = vec![0; 1 << 13];
            let len = look.stack(memory, &at, &mut stack);
            let mut found = 0;
            look.code(memory, (at.sp, &stack[..len]), |mapping| {
                reached.not_code |= !mapping.is_executable;
                found += 1;
            });
            assert!(found <= 64);
        }
        let place = look.mapping(memory, at.rip);
        let id = place
            .ok()
            .and_then(|mapping| look.build_id(memory, &mapping));
        reached.build_id |= id.is_some();
        for frame in chain.program() {
            let mapping = look.mapping(memory, frame.instruction());
            if let Some(file) = mapping.ok().and_then(|mapping| mapping.file) {
                let path = look.path(&file);
                reached.path |= path.is_ok();
                assert!(path.is_err() || !path.unwrap().name.contains(char::is_control));
            }
        }
    }
    // The stack's and the build id's beside the look's own.
    let most = 2 * MIB + (128 << 10) + (64 << 10);
    assert!(linux.bytes.get() <= most, "{} bytes", linux.bytes.get());
    assert!(
        linux.reads.get() <= most / 64,
        "{} reads",
        linux.reads.get()
    );
}

/// The small kernel's memory while another processor writes: what is read differs now and
/// then from what was there a read before, and is as before at the next one.
struct Restless<'a> {
    linux: &'a Linux,
    state: Cell<u64>,
    /// One of so many reads is changed.
    calm: u64,
}

impl Restless<'_> {
    fn random(&self) -> u64 {
        let mut state = self.state.get();
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        self.state.set(state);
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

impl GuestMemory for Restless<'_> {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        let found = self.linux.read(address, buffer);
        let random = self.random();
        if !random.is_multiple_of(self.calm) || buffer.is_empty() {
            return found;
        }
        let decisions = self.random().to_le_bytes();
        let value = Decisions(&decisions).value().to_le_bytes();
        let place = (random >> 32) as usize % buffer.len();
        for (byte, value) in buffer[place & !7..].iter_mut().zip(value) {
            *byte = value;
        }
        found
    }
}

/// Asks everything while memory changes, from the search for the kernel on. One of `calm` reads
/// is not what it was.
pub(crate) fn restless(seed: u64, calm: u64) -> Reached {
    let mut linux = Linux::new(Kind::of(seed));
    linux.word(KSTACK + 0x4000 - REGS - 8, ENTRY + 0x20);
    let memory = Restless {
        linux: &linux,
        state: Cell::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
        calm,
    };
    let mut search = Search::new(std::iter::once(0..4 << 20));
    let note = loop {
        match search.step(&memory, 64) {
            Step::Searching => {}
            Step::Found(note) => break note,
            Step::Done => return Reached::default(),
        }
    };
    linux.bytes.set(0);
    let found = KernelView::of(&memory, note, PROGRAM_ROOT);
    assert!(
        linux.bytes.get() <= 385 * MIB,
        "{} bytes",
        linux.bytes.get()
    );
    let Ok(mut view) = found else {
        return Reached::default();
    };
    if let Ok(Some(now)) = view.refreshed(&memory) {
        view = now;
    }
    let _ = (
        view.is_current(&memory, PROGRAM_ROOT),
        view.processor(&memory, 7),
    );
    let mut reached = Reached {
        kernel: true,
        ..Reached::default()
    };
    check_symbols(&view);
    let mut chain = Chain::default();
    for place in [16, 17, 18, 19, 20, 21] {
        // The registers as they are, but for those of every other seed.
        let mut bytes = [place, 1, 1, 1, 1, 1, 1, 1, 1, 1];
        if seed & 2 != 0 {
            bytes[1..9].copy_from_slice(&memory.random().to_le_bytes());
        }
        let at = Decisions(&bytes).registers();
        look(&memory, &linux, &view, &at, &mut chain, &mut reached);
    }
    reached
}

/// Any bytes as a kernel's types, or as changes of the small kernel's: where and what. Then
/// a kernel with such types is asked everything.
pub(crate) fn types(bytes: &[u8]) {
    let Some((kind, rest)) = bytes.split_first() else {
        return;
    };
    let mut linux = Linux::new(Kind::of(u64::from(kind >> 2)));
    let usual = types_of(&linux);
    let types = &mut linux.memory[usual];
    let len = types.len();
    if kind % 4 == 0 {
        let _ = Btf::parse(rest.to_vec());
        let some = rest.len().min(len);
        types[..some].copy_from_slice(&rest[..some]);
    } else {
        for change in rest.chunks_exact(3) {
            let at = usize::from(change[0]) | usize::from(change[1]) << 8;
            types[at % len] = change[2];
        }
    }
    with_types(&mut linux);
}

/// Each number of the small kernel's types becomes one that sums wrap with, or products with
/// 8. Gives how often kernels were found all the same, and how often a task.
pub(crate) fn extreme_types(kind: Kind) -> (u32, u32) {
    let mut linux = Linux::new(kind);
    let (mut kernels, mut tasks) = (0, 0);
    for at in types_of(&linux).step_by(4) {
        let before = linux.memory[at..at + 4].to_vec();
        for value in [u32::MAX, 0x7fff_fff8, 0x1fff_ffff] {
            linux.memory[at..at + 4].copy_from_slice(&value.to_le_bytes());
            let found = with_types(&mut linux);
            kernels += u32::from(found.kernel);
            tasks += u32::from(found.task);
        }
        linux.memory[at..at + 4].copy_from_slice(&before);
    }
    (kernels, tasks)
}

/// Asks everything of the small kernel as it is.
fn with_types(linux: &mut Linux) -> Reached {
    if let Ok(btf) = Btf::parse(linux.memory[types_of(linux)].to_vec()) {
        let _ = (
            btf.member("mm_struct", "mm_mt.ma_root"),
            btf.bit_field("orc_entry", "type"),
            btf.variable_size("x86_cpu_to_apicid"),
        );
    }
    let note = Note::read(linux, NOTE).expect("the note");
    let Ok(view) = KernelView::of(linux, note, PROGRAM_ROOT) else {
        return Reached::default();
    };
    // In the program, in the kernel, and in a module; nothing is changed.
    let places = [16, 17, 20].map(|place| [place, 1, 1, 1, 1, 1, 1, 1, 1, 0]);
    ask(linux, &view, &mut Decisions(places.as_flattened()))
}

/// Where the small kernel has its types.
fn types_of(linux: &Linux) -> Range<usize> {
    let start = physical(IMAGE + 0x10_0000) as usize;
    start..start + linux.types
}
