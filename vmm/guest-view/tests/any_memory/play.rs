//! A small kernel whose memory is changed anywhere, before it is found or after; then
//! everything is asked of it. For the tests, and for the fuzz target.
#![allow(clippy::cast_possible_truncation, reason = "addresses in 4 MiB")]

#[path = "../linux/mod.rs"]
mod linux;

use std::sync::OnceLock;

use guest_view::{Btf, Chain, KernelView, Look, Mode, Note, Registers, Search, Step};
use linux::{AREA, CALLED, CODE, ENTRY, IMAGE, INTERRUPT, KSTACK, Linux, MODULE, NODES, NOTE};
use linux::{DENTRY, DIRECT, MM, MODULE_CODE, PROGRAM_ROOT, REGS, STACK, TASK, VMA, physical};

const MIB: usize = 1 << 20;

/// What was reached.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reached {
    pub(crate) kernel: bool,
    pub(crate) task: bool,
    pub(crate) path: bool,
    pub(crate) kernel_frames: usize,
    pub(crate) program_frames: usize,
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
    let mut linux = Linux::new(start & 1 != 0);
    // `called` was called by `entry`.
    linux.word(KSTACK + 0x4000 - REGS - 8, ENTRY + 0x20);
    let mut reached = Reached::default();
    if start & 2 != 0 {
        decisions.change(&mut linux);
    }
    let mut search = Search::new(std::iter::once(0..4 << 20));
    let note = loop {
        match search.step(&linux, 64) {
            Step::Searching => {}
            Step::Found(note) => break note,
            Step::Done => return reached,
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
        return reached;
    };
    reached.kernel = true;
    decisions.change(&mut linux);
    if let Ok(Some(now)) = view.refreshed(&linux) {
        view = now;
    }
    let _ = (
        view.is_current(&linux, PROGRAM_ROOT),
        view.processor(&linux, 7),
        view.missing().count(),
    );
    for symbol in view.symbols().take(1 << 16) {
        assert!(symbol.name.bytes().all(|byte| byte.is_ascii_graphic()));
        let _ = view.symbol(symbol.address);
    }
    let mut chain = Chain::default();
    for _ in 0..3 {
        let at = decisions.registers();
        linux.bytes.set(0);
        linux.reads.set(0);
        let look = Look::at(&view, &linux);
        let task = look.task(0, &at);
        reached.task |= task.is_ok();
        look.chain(task.as_ref().ok(), &at, &mut chain);
        reached.kernel_frames = reached.kernel_frames.max(chain.kernel().len());
        reached.program_frames = reached.program_frames.max(chain.program().len());
        assert!(chain.kernel().len() <= 127 && chain.program().len() <= 127);
        if let Some(memory) = task.ok().and_then(|task| task.memory) {
            for frame in chain.program() {
                let mapping = look.mapping(memory, frame.instruction());
                if let Some(file) = mapping.ok().and_then(|mapping| mapping.file) {
                    let path = look.path(&file);
                    reached.path |= path.is_ok();
                    assert!(path.is_err() || !path.unwrap().name.contains(char::is_control));
                }
            }
        }
        assert!(linux.bytes.get() <= 2 * MIB, "{} bytes", linux.bytes.get());
        assert!(
            linux.reads.get() <= 2 * MIB / 64,
            "{} reads",
            linux.reads.get()
        );
        decisions.change(&mut linux);
    }
    reached
}

/// Any bytes as a kernel's types, or as changes of the small kernel's: where and what.
pub(crate) fn types(bytes: &[u8]) {
    static USUAL: OnceLock<Vec<u8>> = OnceLock::new();
    let Some((kind, rest)) = bytes.split_first() else {
        return;
    };
    let mut types = rest.to_vec();
    if kind % 4 != 0 {
        types = USUAL.get_or_init(usual_types).clone();
        for change in rest.chunks_exact(3) {
            let at = usize::from(change[0]) | usize::from(change[1]) << 8;
            let len = types.len();
            types[at % len] = change[2];
        }
    }
    let Ok(btf) = Btf::parse(types) else {
        return;
    };
    let _ = (
        btf.member("mm_struct", "mm_mt.ma_root"),
        btf.member("dentry", "d_name.len"),
    );
    let _ = (
        btf.member("task_struct", "pid"),
        btf.member("task_struct", "comm"),
    );
    let _ = (btf.bit_field("orc_entry", "type"), btf.size_of("pt_regs"));
    let _ = (
        btf.variable_size("x86_cpu_to_apicid"),
        btf.enumerator("maple_type", "maple_leaf_64"),
    );
}

/// The types of the small kernel.
fn usual_types() -> Vec<u8> {
    let linux = Linux::new(true);
    let start = physical(IMAGE + 0x10_0000) as usize;
    let types = &linux.memory[start..start + 0x4000];
    let last = types.iter().rposition(|byte| *byte != 0).unwrap_or(0);
    types[..last + 2].to_vec()
}
