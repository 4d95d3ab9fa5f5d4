//! A very small Linux in 4 MiB of memory: everything that guest-view reads of one, and
//! nothing else. Of three kinds: as 6.1, as 6.12 and as 7.3 has it.
#![allow(dead_code, reason = "each test, fuzz target and bench uses a part")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "all is small"
)]

pub(crate) mod btf;

use std::cell::Cell;

use btf::Types;
use guest_view::{GuestMemory, Mode, Registers};

const MIB: u64 = 1 << 20;
/// Of the image: linear and physical.
pub(crate) const IMAGE: u64 = 0xffff_ffff_8100_0000;
const IMAGE_AT: u64 = 2 * MIB;
const PHYS_BASE: i64 = 0x20_0000 - 0x100_0000;
const START_KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// All memory, as the kernel maps it.
pub(crate) const DIRECT: u64 = 0xffff_8880_0000_0000;
const KERNEL_ROOT: u64 = 0x1000;
pub(crate) const PROGRAM_ROOT: u64 = 0x6000;
pub(crate) const NOTE: u64 = 0xa000;
/// A program's file from its start on, its code and its stack.
pub(crate) const HEAD: u64 = 0x3f_f000;
pub(crate) const CODE: u64 = 0x40_0000;
pub(crate) const STACK: u64 = 0x40_1000;
const HEAD_AT: u64 = 0x2_2000;
const STACK_AT: u64 = 0x2_1000;
const ENTRY_STACK_AT: u64 = 0x1_0000;
/// Objects in the direct map.
pub(crate) const AREA: u64 = DIRECT + 0x3_0000;
pub(crate) const TASK: u64 = DIRECT + 0x3_2000;
pub(crate) const LEADER: u64 = DIRECT + 0x3_3000;
pub(crate) const MM: u64 = DIRECT + 0x3_4000;
pub(crate) const VMA: u64 = DIRECT + 0x3_5000;
pub(crate) const HEAD_VMA: u64 = DIRECT + 0x3_5b00;
const FILE: u64 = DIRECT + 0x3_5100;
pub(crate) const INODE: u64 = DIRECT + 0x3_5200;
const SUPER: u64 = DIRECT + 0x3_5300;
pub(crate) const DENTRY: u64 = DIRECT + 0x3_5400;
const NAMES: u64 = DIRECT + 0x3_5800;
const MOUNT: u64 = DIRECT + 0x3_5900;
/// The idle task, in the image, the first process, and where its root is.
const IDLE: u64 = IMAGE + 0x4000;
pub(crate) const FIRST: u64 = DIRECT + 0x3_7000;
pub(crate) const FIRST_FS: u64 = DIRECT + 0x3_7800;
pub(crate) const NODES: u64 = DIRECT + 0x3_6000;
pub(crate) const MODULE: u64 = DIRECT + 0x3_8000;
/// 16 KiB of a task's kernel stack.
pub(crate) const KSTACK: u64 = DIRECT + 0x4_0000;
/// A stack on which a processor begins to enter the kernel, in `cpu_entry_area`.
pub(crate) const ENTRY_STACK: u64 = 0xffff_fe00_0001_0000;
/// Code of a module, within the image's large page.
pub(crate) const MODULE_CODE: u64 = IMAGE + 0x1f_0000;
/// Where a kernel of [`Kind::V7_3`] has its per-CPU variables.
const PER_CPU: u64 = IMAGE + 0x1d_0000;
/// Functions of the kernel, 0x100 bytes each: an entry, one that is called, one that
/// interrupts, and one without a table.
pub(crate) const ENTRY: u64 = IMAGE + 0x1000;
pub(crate) const CALLED: u64 = IMAGE + 0x1100;
pub(crate) const INTERRUPT: u64 = IMAGE + 0x1200;
/// In the last part of that: what returns to an address that a tracer keeps.
pub(crate) const TRAMPOLINE: u64 = IMAGE + 0x1280;
/// Of the program's file.
pub(crate) const BUILD_ID: [u8; 20] = *b"\x01\x23 is the build id..";
/// Of a pt_regs.
pub(crate) const REGS: u64 = 168;

/// What it is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    V6_1,
    V6_12,
    V7_3,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::V6_1, Self::V6_12, Self::V7_3];

    /// One of them, as a number from outside chooses.
    pub(crate) fn of(number: u64) -> Self {
        Self::ALL[(number % 3) as usize]
    }

    pub(crate) fn release(self) -> &'static str {
        match self {
            Self::V6_1 => "6.1-toy",
            Self::V6_12 => "6.12-toy",
            Self::V7_3 => "7.3-toy",
        }
    }
}

pub(crate) struct Linux {
    pub(crate) memory: Vec<u8>,
    pub(crate) kind: Kind,
    /// Not [`Kind::V6_1`].
    newer: bool,
    /// Bytes of its types.
    pub(crate) types: usize,
    pub(crate) reads: Cell<usize>,
    pub(crate) bytes: Cell<usize>,
}

impl GuestMemory for Linux {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.reads.set(self.reads.get() + 1);
        self.bytes.set(self.bytes.get() + buffer.len());
        let start = usize::try_from(address).unwrap_or(usize::MAX);
        let end = start.saturating_add(buffer.len());
        let found = self.memory.get(start..end);
        found.map(|found| buffer.copy_from_slice(found)).is_some()
    }
}

/// Where linear addresses of the kernel are.
pub(crate) fn physical(linear: u64) -> u64 {
    match linear {
        DIRECT..=0xffff_8880_003f_ffff => linear - DIRECT,
        IMAGE..=0xffff_ffff_811f_ffff => linear - IMAGE + IMAGE_AT,
        HEAD..CODE => linear - HEAD + HEAD_AT,
        STACK..=0x40_1fff => linear - STACK + STACK_AT,
        ENTRY_STACK..=0xffff_fe00_0001_0fff => linear - ENTRY_STACK + ENTRY_STACK_AT,
        _ => panic!("{linear:#x} is not mapped"),
    }
}

/// Members of the structures, as bytes from their starts.
pub(crate) mod at {
    pub(crate) const CPU: u64 = 0x14;
    pub(crate) const FLAGS: u64 = 0x2c;
    pub(crate) const ON_CPU: u64 = 0x34;
    pub(crate) const STACK: u64 = 0x20;
    pub(crate) const EXECUTES: u64 = 0x108;
    pub(crate) const PID: u64 = 0x100;
    pub(crate) const TGID: u64 = 0x104;
    pub(crate) const COMM: u64 = 0x200;
    pub(crate) const MM: u64 = 0x110;
    pub(crate) const LEADER: u64 = 0x120;
    pub(crate) const STARTED: u64 = 0x130;
    pub(crate) const TASKS: u64 = 0x140;
    pub(crate) const FS: u64 = 0x150;
    pub(crate) const THREAD_PID: u64 = 0x158;
    pub(crate) const MM_TREE: u64 = 0x40;
    pub(crate) const MM_PGD: u64 = 0x60;
    pub(crate) const VMA_MM: u64 = 0x10;
    pub(crate) const DENTRY_INODE: u64 = 0x30;
    pub(crate) const MODULE_LIST: u64 = 8;
}

impl Linux {
    pub(crate) fn new(kind: Kind) -> Self {
        let mut linux = Self {
            memory: vec![0; 4 << 20],
            kind,
            newer: kind != Kind::V6_1,
            types: 0,
            reads: Cell::new(0),
            bytes: Cell::new(0),
        };
        linux.page_tables();
        linux.tasks();
        linux.mappings();
        linux.file();
        linux.tables();
        linux
    }

    pub(crate) fn registers(&self, rip: u64, rsp: u64, rbp: u64) -> Registers {
        let kernel = rip >= DIRECT;
        Registers {
            rip,
            rsp,
            rbp,
            rdx: 0,
            rdi: 0,
            r10: 0,
            r13: 0,
            cr3: PROGRAM_ROOT,
            mode: if kernel { Mode::Kernel } else { Mode::User },
        }
    }

    pub(crate) fn put(&mut self, linear: u64, bytes: &[u8]) {
        let at = physical(linear) as usize;
        self.memory[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn word(&mut self, linear: u64, word: u64) {
        self.put(linear, &word.to_le_bytes());
    }

    pub(crate) fn half(&mut self, linear: u64, word: u32) {
        self.put(linear, &word.to_le_bytes());
    }

    fn page_tables(&mut self) {
        const LARGE: u64 = 0x83;
        let mut entry = |table: u64, index: u64, entry: u64| {
            let at = (table + 8 * index) as usize;
            self.memory[at..at + 8].copy_from_slice(&entry.to_le_bytes());
        };
        for root in [KERNEL_ROOT, PROGRAM_ROOT] {
            entry(root, 511, 0x2003);
            entry(root, 273, 0x4003);
            entry(root, 508, 0xb003);
        }
        entry(0x2000, 510, 0x3003);
        entry(0x3000, 8, IMAGE_AT | LARGE);
        entry(0x4000, 0, 0x5003);
        entry(0xb000, 0, 0xc003);
        entry(0xc000, 0, LARGE);
        entry(0x5000, 0, LARGE);
        entry(0x5000, 1, IMAGE_AT | LARGE);
        entry(PROGRAM_ROOT, 0, 0x7007);
        entry(0x7000, 0, 0x8007);
        entry(0x8000, 1, 0xd007);
        entry(0xd000, 0x1ff, HEAD_AT | 5);
        entry(0x8000, 2, 0x9007);
        entry(0x9000, 0, 0x2_0005);
        entry(0x9000, 1, STACK_AT | 7);
    }

    fn tasks(&mut self) {
        let hot = self.kind == Kind::V6_12;
        let current = if hot { 0x100 } else { 0x200 };
        self.word(AREA + current, TASK);
        // pcpu_hot.top_of_stack, or cpu_current_top_of_stack.
        let top = if hot { 0x118 } else { 0x208 };
        self.word(AREA + top, KSTACK + 0x4000);
        // x86_cpu_to_apicid.
        self.half(AREA + 0x300, 7);
        for (task, pid, comm) in [
            (TASK, 43, &b"worker\x1b[1m\0"[..]),
            (LEADER, 42, b"server\0"),
        ] {
            self.half(task + at::CPU, 0);
            let queued = if self.kind == Kind::V7_3 { 1 << 8 } else { 0 };
            self.half(task + at::ON_CPU, queued | 1);
            self.half(task + at::FLAGS, 0x40_0000);
            self.half(task + at::PID, pid);
            self.half(task + at::TGID, 42);
            self.put(task + at::COMM, comm);
            self.word(task + at::MM, MM);
            self.word(task + at::LEADER, LEADER);
            self.word(task + at::STACK, KSTACK);
            self.word(task + at::STARTED, 123_456_789);
        }
        self.word(MM + at::MM_PGD, DIRECT + PROGRAM_ROOT);
        self.registers_of_program(CODE + 0x10, STACK + 0x800, STACK + 0x810);
        // Two frames of the program, and its first.
        self.word(STACK + 0x810, STACK + 0x840);
        self.word(STACK + 0x818, CODE + 0x123);
        self.word(STACK + 0x840, 0);
        self.word(STACK + 0x848, CODE + 0x456);
    }

    /// As an entry into the kernel saves them.
    pub(crate) fn registers_of_program(&mut self, ip: u64, sp: u64, bp: u64) {
        self.saved(KSTACK + 0x4000 - REGS, ip, 0x33, sp, bp);
    }

    /// A `struct pt_regs` at `at`.
    pub(crate) fn saved(&mut self, at: u64, ip: u64, cs: u64, sp: u64, bp: u64) {
        self.word(at + 32, bp);
        self.word(at + 128, ip);
        self.word(at + 136, cs);
        self.word(at + 152, sp);
    }

    fn mappings(&mut self) {
        // A root of two slots: the mappings are in the leaf of the first.
        let (leaf, empty) = (NODES + 0x100, NODES + 0x200);
        self.word(MM + at::MM_TREE, NODES | 3 << 3 | 2);
        self.word(NODES, MM | 1);
        self.word(NODES + 8, 0x7fff_ffff);
        self.word(NODES + 16, u64::MAX);
        let wide_slots = 8 + 8 * 9;
        self.word(NODES + wide_slots, leaf | 1 << 3 | 4);
        self.word(NODES + wide_slots + 8, empty | 1 << 3 | 4);
        self.word(leaf, NODES | 6);
        for (index, pivot) in [HEAD - 1, CODE - 1, CODE + 0xfff, STACK + 0xfff]
            .into_iter()
            .enumerate()
        {
            self.word(leaf + 8 + 8 * index as u64, pivot);
        }
        let slots = 8 + 8 * 15;
        self.word(leaf + slots + 8, HEAD_VMA);
        self.word(leaf + slots + 16, VMA);
        self.word(leaf + slots + 24, VMA + 0x80);
        let areas = [
            (VMA, CODE, FILE),
            (VMA + 0x80, STACK, 0),
            (HEAD_VMA, HEAD, FILE),
        ];
        for (area, start, file) in areas {
            self.word(area, start);
            self.word(area + 8, start + 0x1000);
            self.word(area + at::VMA_MM, MM);
            self.word(area + 0x18, if start == HEAD { 0 } else { 3 });
            self.word(area + 0x20, file);
            self.word(area + 0x28, if file == 0 { 0x10_0173 } else { 0x75 });
        }
        self.word(FILE + 0x10, MOUNT + 0x20);
        self.word(FILE + 0x18, DENTRY);
        self.word(FILE + 0x20, INODE);
        for inode in [INODE, INODE + 0x40] {
            self.word(inode + 8, SUPER);
        }
        self.word(INODE + 16, 4711);
        self.half(INODE + 24, 9);
        self.half(SUPER + 4, 8 << 20 | 1);
        // "server" in "bin" of a file system that is mounted at "opt" of the root.
        let dentries = [
            ("server", 1, 1),
            ("bin", 2, 1),
            ("/", 2, 0),
            ("opt", 4, 1),
            ("/", 4, 0),
        ];
        for (index, (name, parent, hashed)) in dentries.into_iter().enumerate() {
            let (dentry, text) = (DENTRY + 0x80 * index as u64, NAMES + 0x10 * index as u64);
            self.put(text, name.as_bytes());
            self.word(dentry, DENTRY + 0x80 * parent);
            self.half(dentry + 0xc, name.len() as u32);
            self.word(dentry + 0x10, text);
            self.word(dentry + 0x20, hashed);
            let inode = if index == 0 { INODE } else { INODE + 0x40 };
            self.word(dentry + at::DENTRY_INODE, inode);
        }
        // The first process, behind the idle one, has the same root.
        self.word(IDLE + at::TASKS, FIRST + at::TASKS);
        self.half(FIRST + at::PID, 1);
        self.word(FIRST + at::FS, FIRST_FS);
        self.word(FIRST_FS + 0x18, DENTRY + 4 * 0x80);
        let root = MOUNT + 0x80;
        self.word(MOUNT, root);
        self.word(MOUNT + 8, DENTRY + 3 * 0x80);
        self.word(MOUNT + 0x20, DENTRY + 2 * 0x80);
        self.word(root, root);
        self.word(root + 8, DENTRY + 4 * 0x80);
        self.word(root + 0x20, DENTRY + 4 * 0x80);
    }

    /// What the program's file begins with: notes of properties, then of its build id.
    fn file(&mut self) {
        self.put(HEAD, b"\x7fELF\x02\x01\x01");
        self.word(HEAD + 32, 0x40);
        self.half(HEAD + 54, 56 | 3 << 16);
        for (index, (kind, at, bytes, align)) in [
            (1, 0, 0x1000, 0x1000),
            (4, 0x200, 0x20, 8),
            (4, 0x220, 0x44, 4),
        ]
        .into_iter()
        .enumerate()
        {
            let segment = HEAD + 0x40 + 56 * index as u64;
            self.half(segment, kind);
            self.word(segment + 8, at);
            self.word(segment + 32, bytes);
            self.word(segment + 48, align);
        }
        let mut notes = Vec::new();
        for (kind, content) in [(5, &[0xff; 16][..]), (1, &[0; 16]), (3, &BUILD_ID)] {
            for word in [4, content.len() as u32, kind] {
                notes.extend(word.to_le_bytes());
            }
            notes.extend(b"GNU\0");
            notes.extend(content);
        }
        self.put(HEAD + 0x200, &notes);
    }

    /// Symbols, types, unwind tables and the note.
    fn tables(&mut self) {
        let btf = self.types().bytes();
        self.put(IMAGE + 0x10_0000, &btf);
        self.types = btf.len();
        let unwind = self.unwind(IMAGE + 0x8_0000, IMAGE + 0x9_0000);
        // The module, in a list of its own.
        let list = IMAGE + 0x3000;
        self.word(list, MODULE + at::MODULE_LIST);
        self.word(MODULE + at::MODULE_LIST, list);
        self.put(MODULE + 0x18, b"toy");
        self.word(MODULE + 0x58, MODULE_CODE);
        self.half(MODULE + 0x60, 0x1000);
        self.word(MODULE + 0x68, MODULE + 0x100);
        self.half(MODULE + 0x70, 1);
        self.word(MODULE + 0x78, MODULE + 0x600);
        self.word(MODULE + 0x80, MODULE + 0x700);
        self.half(MODULE + 0x600, (MODULE_CODE - IMAGE) as u32);
        // Relative to where it is, in the direct map: too far for 32 bits. So the module's
        // table is in the image, as its code is.
        let table = MODULE_CODE + 0x800;
        self.word(MODULE + 0x78, table);
        self.half(table, (MODULE_CODE as u32).wrapping_sub(table as u32));
        let entry = self.entry(5, 8, 1, -16, "call");
        self.put(MODULE + 0x700, &entry);
        self.word(MODULE + 0x100, MODULE + 0x200);
        self.half(MODULE + 0x108, 2);
        self.word(MODULE + 0x110, MODULE + 0x300);
        self.word(MODULE + 0x118, MODULE + 0x400);
        self.half(MODULE + 0x200 + 24, 1);
        self.word(MODULE + 0x200 + 24 + 8, MODULE_CODE + 0x10);
        self.put(MODULE + 0x300, b"\0toy_function\0");
        self.put(MODULE + 0x400, b"?t");
        let variables = IMAGE + 0x2000;
        self.word(variables, DIRECT + NOTE);
        self.half(variables + 8, 1);
        // Since 6.15 per-CPU variables have addresses like all others.
        let per_cpu = if self.kind == Kind::V7_3 { PER_CPU } else { 0 };
        self.word(variables + 16, AREA.wrapping_sub(per_cpu));
        let mut symbols = vec![
            ("Ax86_cpu_to_apicid", per_cpu + 0x300),
            ("T_stext", IMAGE),
            ("Tentry", ENTRY),
            ("tcalled", CALLED),
            ("tcalled_alias", CALLED),
            ("tinterrupt", INTERRUPT),
            ("tarch_rethook_trampoline", TRAMPOLINE),
            ("T_etext", IMAGE + 0x1300),
            ("Bvmcoreinfo_note", variables),
            ("Bnr_cpu_ids", variables + 8),
            ("D__per_cpu_offset", variables + 16),
            ("dmodules", list),
            ("Dinit_task", IDLE),
            ("R__start_orc_unwind_ip", IMAGE + 0x8_0000),
            ("R__stop_orc_unwind_ip", IMAGE + 0x8_0000 + 4 * unwind),
            ("R__start_orc_unwind", IMAGE + 0x9_0000),
            ("R__start_BTF", IMAGE + 0x10_0000),
            ("R__stop_BTF", IMAGE + 0x10_0000 + btf.len() as u64),
            ("B_end", IMAGE + 0x1e_0000),
        ];
        let letter = if self.newer { "D" } else { "R" };
        let end = format!("{letter}__stop_orc_unwind");
        symbols.push((&end, IMAGE + 0x9_0000 + 6 * unwind));
        // Neither 6.1 nor 7.3 keeps them together.
        if self.kind == Kind::V6_12 {
            symbols.insert(0, ("Apcpu_hot", 0x100));
        } else {
            symbols.insert(0, ("Acurrent_task", per_cpu + 0x200));
            symbols.insert(1, ("Acpu_current_top_of_stack", per_cpu + 0x208));
        }
        self.symbols(&symbols);
    }

    /// Each byte stands for itself, but 0x01, which is `called`.
    fn symbols(&mut self, symbols: &[(&str, u64)]) {
        let base = IMAGE;
        let (names, count, tokens, index) = (0x4_0000, 0x5_0000, 0x6_0000, 0x7_0000);
        let (offsets, relative) = (0x5_1000, 0x5_0008);
        let mut compressed = Vec::new();
        for (name, _) in symbols {
            let name = name.replace("called", "\x01");
            compressed.push(name.len() as u8);
            compressed.extend(name.bytes());
        }
        self.put(IMAGE + names, &compressed);
        self.half(IMAGE + count, symbols.len() as u32);
        // Since 7.0 each offset is from its own place on.
        let has_base = self.kind != Kind::V7_3;
        if has_base {
            self.word(IMAGE + relative, base);
        }
        for (index, (_, address)) in (0..).zip(symbols) {
            let place = IMAGE + offsets + 4 * index;
            let offset = match *address {
                of_processor @ ..0x1000 => of_processor,
                address if has_base => base.wrapping_sub(1).wrapping_sub(address),
                address => address.wrapping_sub(place),
            };
            self.half(place, offset as u32);
        }
        let (mut text, mut places) = (Vec::new(), Vec::new());
        for byte in 0..=255u8 {
            places.extend((text.len() as u16).to_le_bytes());
            match byte {
                1 => text.extend(b"called"),
                _ => text.push(byte),
            }
            text.push(0);
        }
        self.put(IMAGE + tokens, &text);
        self.put(IMAGE + index, &places);
        let root = (KERNEL_ROOT as i64 - PHYS_BASE) as u64 + START_KERNEL_MAP;
        let image = |offset: u64| IMAGE + offset;
        let relative = if has_base {
            format!("SYMBOL(kallsyms_relative_base)={:x}\n", image(relative))
        } else {
            String::new()
        };
        let note = format!(
            "OSRELEASE={}\nBUILD-ID=0123\nSYMBOL(swapper_pg_dir)={root:x}\nSYMBOL(_stext)={IMAGE:x}\n\
             SYMBOL(kallsyms_names)={:x}\nSYMBOL(kallsyms_num_syms)={:x}\n\
             SYMBOL(kallsyms_token_table)={:x}\nSYMBOL(kallsyms_token_index)={:x}\n\
             SYMBOL(kallsyms_offsets)={:x}\n{relative}\
             NUMBER(phys_base)={PHYS_BASE}\nNUMBER(pgtable_l5_enabled)=0\nKERNELOFFSET=0\n",
            self.kind.release(),
            image(names),
            image(count),
            image(tokens),
            image(index),
            image(offsets),
        );
        self.half(DIRECT + NOTE, 11);
        self.half(DIRECT + NOTE + 4, note.len() as u32);
        self.put(DIRECT + NOTE + 12, b"VMCOREINFO\0\0");
        self.put(DIRECT + NOTE + 24, note.as_bytes());
    }

    /// The kernel's unwind table; gives the number of its entries.
    fn unwind(&mut self, addresses: u64, entries: u64) -> u64 {
        let table = [
            (IMAGE, self.entry(0, 0, 0, 0, "undefined")),
            (ENTRY, self.entry(5, 0, 0, 0, "regs")),
            // Has pushed RBP, and has 16 bytes of its own.
            (CALLED, self.entry(5, 32, 1, -16, "call")),
            (INTERRUPT, self.entry(5, 0, 0, 0, "partial")),
            (IMAGE + 0x1300, self.entry(0, 0, 0, 0, "end")),
        ];
        for (index, (address, entry)) in (0..).zip(table) {
            let place = addresses + 4 * index;
            self.half(place, (address as u32).wrapping_sub(place as u32));
            self.put(entries + 6 * index, &entry);
        }
        5
    }

    /// An entry of the unwind tables; registers as before 7.3.
    pub(crate) fn entry(
        &self,
        sp: u16,
        sp_offset: i16,
        bp: u16,
        bp_offset: i16,
        kind: &str,
    ) -> [u8; 6] {
        let kind = match (self.newer, kind) {
            (true, "undefined") => 0,
            (true, "end") => 1,
            (true, "call") => 2,
            (true, "regs") => 3 | 8,
            (true, _) => 4 | 8,
            (false, "regs") => 1,
            (false, "partial") => 2,
            (false, "end") => 4,
            (false, _) => 0,
        };
        let number = |register: u16| match (self.kind, register) {
            (Kind::V7_3, 1) => 8,
            (Kind::V7_3, 3) => 5,
            (Kind::V7_3, 5) => 3,
            (Kind::V7_3, 8) => 10,
            (_, same) => same,
        };
        let bits = number(sp) | number(bp) << 4 | kind << 8;
        let [a, b] = sp_offset.to_le_bytes();
        let [c, d] = bp_offset.to_le_bytes();
        let [e, f] = bits.to_le_bytes();
        [a, b, c, d, e, f]
    }

    fn types(&self) -> Types {
        let mut types = Types::default();
        let byte = types.int("char", 1);
        let (short, half, long) = (
            types.int("short", 2),
            types.int("int", 4),
            types.int("long", 8),
        );
        let pid = types.typedef("pid_t", half);
        let pointer = types.pointer();
        let bit = |bytes: u64| 8 * bytes as u32;
        let comm = types.array(byte, 16);
        // 7.3 has a byte, and another one right behind it.
        let on_cpu = if self.kind == Kind::V7_3 { byte } else { half };
        let tasks = types.array(pointer, 2);
        let info = types.structure("thread_info", 24, &[("flags", long, 0), ("cpu", half, 160)]);
        types.packed(
            "task_struct",
            0x400,
            &[
                ("in_execve", half, 1 << 24 | (bit(at::EXECUTES) + 3)),
                ("thread_info", info, 0),
                ("stack", pointer, bit(at::STACK)),
                ("flags", half, bit(at::FLAGS)),
                ("on_cpu", on_cpu, bit(at::ON_CPU)),
                (
                    "on_rq",
                    on_cpu,
                    bit(at::ON_CPU) + if byte == on_cpu { 8 } else { 32 },
                ),
                ("pid", pid, bit(at::PID)),
                ("tgid", pid, bit(at::TGID)),
                ("mm", pointer, bit(at::MM)),
                ("group_leader", pointer, bit(at::LEADER)),
                ("start_boottime", long, bit(at::STARTED)),
                ("tasks", tasks, bit(at::TASKS)),
                ("fs", pointer, bit(at::FS)),
                ("thread_pid", pointer, bit(at::THREAD_PID)),
                ("comm", comm, bit(at::COMM)),
            ],
        );
        if self.kind == Kind::V6_12 {
            let hot = types.structure(
                "",
                64,
                &[
                    ("current_task", pointer, 0),
                    ("top_of_stack", long, bit(0x18)),
                ],
            );
            let pad = types.array(byte, 64);
            let either = types.union("", 64, &[("", hot, 0), ("pad", pad, 0)]);
            types.structure("pcpu_hot", 64, &[("", either, 0)]);
        }
        let tree = types.structure("maple_tree", 16, &[("ma_root", pointer, 64)]);
        let context = types.structure("mm_context_t", 8, &[("vdso", pointer, 0)]);
        let inner = types.structure(
            "",
            0x100,
            &[
                ("mm_mt", tree, bit(at::MM_TREE - 8)),
                ("pgd", pointer, bit(at::MM_PGD)),
                ("context", context, bit(0x80)),
            ],
        );
        types.structure("mm_struct", 0x100, &[("", inner, 0)]);
        let (nine, ten) = (types.array(long, 9), types.array(pointer, 10));
        types.structure(
            "maple_arange_64",
            256,
            &[("pivot", nine, 64), ("slot", ten, bit(80))],
        );
        let (fifteen, sixteen) = (types.array(long, 15), types.array(pointer, 16));
        let slots = types.union("", 128, &[("slot", sixteen, 0)]);
        types.structure(
            "maple_range_64",
            256,
            &[("pivot", fifteen, 64), ("", slots, bit(128))],
        );
        let kinds = [
            "maple_dense",
            "maple_leaf_64",
            "maple_range_64",
            "maple_arange_64",
        ];
        let kinds: Vec<_> = kinds.into_iter().zip(0..).collect();
        types.enumeration("maple_type", &kinds);
        // Since 6.3 there are two names for them.
        let either = types.union("", 8, &[("vm_flags", long, 0), ("__vm_flags", long, 0)]);
        let flags = if self.newer {
            ("", either, bit(0x28))
        } else {
            ("vm_flags", long, bit(0x28))
        };
        types.structure(
            "vm_area_struct",
            0x80,
            &[
                ("vm_start", long, 0),
                ("vm_end", long, 64),
                ("vm_mm", pointer, bit(at::VMA_MM)),
                ("vm_pgoff", long, bit(0x18)),
                ("vm_file", pointer, bit(0x20)),
                flags,
            ],
        );
        let path = types.structure("path", 16, &[("mnt", pointer, 0), ("dentry", pointer, 64)]);
        types.structure("fs_struct", 40, &[("root", path, bit(0x10))]);
        let upid = types.structure("upid", 16, &[("nr", half, 0), ("ns", pointer, 64)]);
        // Since 6.5 the array has no length.
        let numbers = types.array(upid, if self.newer { 0 } else { 1 });
        types.structure(
            "pid",
            0x70,
            &[("level", half, 32), ("numbers", numbers, bit(0x60))],
        );
        types.structure(
            "file",
            64,
            &[("f_path", path, bit(0x10)), ("f_inode", pointer, bit(0x20))],
        );
        types.structure(
            "inode",
            64,
            &[
                ("i_sb", pointer, 64),
                ("i_ino", long, 128),
                ("i_generation", half, 192),
            ],
        );
        types.structure("super_block", 64, &[("s_dev", half, 32)]);
        let both = types.structure("", 8, &[("hash", half, 0), ("len", half, 32)]);
        let either = types.union("", 8, &[("", both, 0), ("hash_len", long, 0)]);
        let name = types.structure("qstr", 16, &[("", either, 0), ("name", pointer, 64)]);
        let hash = types.structure(
            "hlist_bl_node",
            16,
            &[("next", pointer, 0), ("pprev", pointer, 64)],
        );
        types.structure(
            "dentry",
            128,
            &[
                ("d_parent", pointer, 0),
                ("d_name", name, 64),
                ("d_inode", pointer, bit(at::DENTRY_INODE)),
                ("d_hash", hash, bit(0x18)),
            ],
        );
        let inner = types.structure("vfsmount", 32, &[("mnt_root", pointer, 0)]);
        types.structure(
            "mount",
            128,
            &[
                ("mnt_parent", pointer, 0),
                ("mnt_mountpoint", pointer, 64),
                ("mnt", inner, bit(0x20)),
            ],
        );
        let cs = if self.newer {
            types.union("", 8, &[("cs", short, 0), ("csx", long, 0)])
        } else {
            long
        };
        let cs_name = if self.newer { "" } else { "cs" };
        types.structure(
            "pt_regs",
            REGS as u32,
            &[
                ("r13", long, bit(16)),
                ("bp", long, bit(32)),
                ("r10", long, bit(56)),
                ("dx", long, bit(96)),
                ("di", long, bit(112)),
                ("ip", long, bit(128)),
                (cs_name, cs, bit(136)),
                ("sp", long, bit(152)),
            ],
        );
        let field = |width: u32, at: u32| width << 24 | at;
        let mut members = vec![
            ("sp_offset", short, 0),
            ("bp_offset", short, 16),
            ("sp_reg", half, field(4, 32)),
            ("bp_reg", half, field(4, 36)),
        ];
        if self.newer {
            members.extend([("type", half, field(3, 40)), ("signal", half, field(1, 43))]);
        } else {
            members.extend([("type", half, field(2, 40)), ("end", half, field(1, 42))]);
        }
        types.packed("orc_entry", 6, &members);
        let list = types.structure("list_head", 16, &[("next", pointer, 0)]);
        let title = types.array(byte, 56);
        let arch = types.structure(
            "mod_arch_specific",
            24,
            &[
                ("num_orcs", half, 0),
                ("orc_unwind_ip", pointer, 64),
                ("orc_unwind", pointer, 128),
            ],
        );
        let memory = types.structure(
            "module_memory",
            16,
            &[("base", pointer, 0), ("size", half, 64)],
        );
        let layouts = types.array(memory, 2);
        let code = if self.newer {
            ("mem", layouts, bit(0x58))
        } else {
            ("core_layout", memory, bit(0x58))
        };
        types.structure(
            "module",
            0x100,
            &[
                ("state", half, 0),
                ("list", list, bit(at::MODULE_LIST)),
                ("name", title, bit(0x18)),
                code,
                ("kallsyms", pointer, bit(0x68)),
                ("arch", arch, bit(0x70)),
            ],
        );
        types.enumeration("mod_mem_type", &[("MOD_TEXT", 0), ("MOD_DATA", 1)]);
        types.enumeration(
            "module_state",
            &[("MODULE_STATE_LIVE", 0), ("MODULE_STATE_UNFORMED", 3)],
        );
        types.structure(
            "mod_kallsyms",
            32,
            &[
                ("symtab", pointer, 0),
                ("num_symtab", half, 64),
                ("strtab", pointer, 128),
                ("typetab", pointer, 192),
            ],
        );
        let apic = if self.newer { half } else { short };
        types.variable("x86_cpu_to_apicid", apic);
        types
    }
}
