//! A kernel in 4 MiB, as 6.1, 6.12 and 7.3 have it: what is found, and what is unknown.
#![allow(clippy::cast_possible_truncation, reason = "addresses in 4 MiB")]

use std::cell::Cell;

use crate::linux::{
    self, BUILD_ID, CALLED, CODE, DENTRY, ENTRY, ENTRY_STACK, FIRST, FIRST_FS, HEAD, HEAD_VMA,
    IMAGE, INODE, INTERRUPT, KSTACK, Kind, Linux, MM, MODULE, MODULE_CODE, NODES, NOTE,
    PROGRAM_ROOT, REGS, STACK, TASK, TRAMPOLINE, VMA, at, physical,
};
use guest_view::{
    Chain, End, GuestMemory, KernelView, Look, Mode, NoKernel, Note, Search, Step, Task, Unknown,
};

fn note(linux: &Linux) -> Note {
    let mut search = Search::new(std::iter::once(0x800..4 << 20));
    for _ in 0..1024 {
        match search.step(linux, 3) {
            Step::Searching => {}
            Step::Found(note) => return note,
            Step::Done => break,
        }
    }
    panic!("no note");
}

fn view(linux: &Linux) -> KernelView {
    let view = KernelView::of(linux, note(linux), PROGRAM_ROOT).expect("a kernel");
    assert_eq!(view.missing().count(), 0, "{:?}", view.missing().next());
    view
}

/// Of every kind.
fn each(check: impl Fn(Linux)) {
    for kind in Kind::ALL {
        println!("{kind:?}");
        check(Linux::new(kind));
    }
}

/// The task, after `change`, as the program runs.
fn task(mut linux: Linux, change: impl Fn(&mut Linux)) -> Result<Task, Unknown> {
    let view = view(&linux);
    change(&mut linux);
    let at = linux.registers(CODE, STACK + 0x800, STACK + 0x810);
    Look::at(&view, &linux).task(0, &at)
}

#[test]
fn the_note_is_found_in_steps() {
    each(|linux| {
        let note = note(&linux);
        assert_eq!(note.address, NOTE);
        assert_eq!(note.build_id(), Some("0123"));
        assert_eq!(note.kernel_offset(), Some(0));
        let release = note.release().map(str::to_owned);
        assert_eq!(release.as_deref(), Some(linux.kind.release()));
    });
}

#[test]
fn a_search_ends() {
    let linux = Linux::new(Kind::V7_3);
    let mut search = Search::new([0..0x3000, u64::MAX - 0x1000..u64::MAX]);
    assert_eq!(search.step(&linux, 1), Step::Searching);
    assert_eq!(search.step(&linux, 1000), Step::Done);
    assert!(linux.reads.get() <= 5);
}

#[test]
fn a_note_of_another_kernel_is_refused() {
    each(|mut linux| {
        let note = note(&linux);
        let other = KernelView::of(&linux, note.clone(), 0x20_0000);
        assert_eq!(other.unwrap_err(), NoKernel::NotRunning(NOTE));
        // A program's tables, under page-table isolation.
        assert!(KernelView::of(&linux, note.clone(), PROGRAM_ROOT | 7).is_ok());
        // A copy at another place.
        let copy = linux.memory[NOTE as usize..][..0x1000].to_vec();
        linux.memory[0x10_0000..][..0x1000].copy_from_slice(&copy);
        let copied = Note::read(&linux, 0x10_0000).expect("a note");
        let copied = KernelView::of(&linux, copied, PROGRAM_ROOT);
        assert_eq!(copied.unwrap_err(), NoKernel::NotRunning(0x10_0000));
    });
}

#[test]
fn an_old_kernel_is_named() {
    let mut linux = Linux::new(Kind::V6_1);
    let place = linux
        .memory
        .windows(8)
        .position(|bytes| bytes == b"kallsyms");
    linux.memory[place.expect("the note")] = b'x';
    let found = KernelView::of(&linux, note(&linux), PROGRAM_ROOT);
    let at = linux
        .memory
        .windows(17)
        .position(|bytes| bytes == b"kallsyms_num_syms");
    linux.memory[at.expect("the note")] = b'x';
    let older = KernelView::of(&linux, note(&linux), PROGRAM_ROOT);
    assert_eq!(found.unwrap_err(), NoKernel::Symbols);
    assert_eq!(older.unwrap_err(), NoKernel::Old("6.1-toy".to_owned()));
}

/// Without `CONFIG_KALLSYMS_ALL` a kernel names its functions alone.
#[test]
fn a_kernel_that_names_no_data_is_unproved() {
    each(|mut linux| {
        let name = b"vmcoreinfo_note";
        let place = linux.memory.windows(name.len()).position(|at| at == name);
        linux.memory[place.expect("the symbol")] = b'x';
        let found = KernelView::of(&linux, note(&linux), PROGRAM_ROOT);
        assert!(matches!(found, Err(NoKernel::Unproved(_))), "{found:?}");
    });
}

#[test]
fn a_kernel_for_one_processor_has_symbols() {
    each(|mut linux| {
        let name = b"nr_cpu_ids";
        let place = linux.memory.windows(name.len()).position(|at| at == name);
        linux.memory[place.expect("the symbol")] = b'x';
        let view = KernelView::of(&linux, note(&linux), PROGRAM_ROOT).expect("a kernel");
        assert_eq!(view.processors(), 0);
        assert_eq!(view.processor(&linux, 7), None);
        assert!(view.symbol(CALLED).is_some());
    });
}

#[test]
fn symbols_of_kernel_and_module() {
    each(|linux| {
        let view = view(&linux);
        let check = |address: u64, expected: Option<(&str, char, u64, Option<&str>)>| {
            let found = view.symbol(address);
            let found = found.map(|found| (found.name, found.kind, found.address, found.module));
            assert_eq!(found, expected, "{address:#x}");
        };
        check(IMAGE, Some(("_stext", 'T', IMAGE, None)));
        check(CALLED - 1, Some(("entry", 'T', ENTRY, None)));
        check(CALLED + 5, Some(("called", 't', CALLED, None)));
        check(
            MODULE_CODE + 0x11,
            Some(("toy_function", 't', MODULE_CODE + 0x10, Some("toy"))),
        );
        check(MODULE_CODE + 5, None);
        check(MODULE_CODE + 0x1000, None);
        check(IMAGE - 1, None);
        check(0x300, None);
        assert_eq!(
            view.symbols().last().map(|last| last.name),
            Some("toy_function")
        );
        assert_eq!(view.processors(), 1);
        assert_eq!(view.processor(&linux, 7), Some(0));
        assert_eq!(view.processor(&linux, 8), None);
    });
}

#[test]
fn modules_come_and_go() {
    each(|mut linux| {
        let view = view(&linux);
        assert!(view.is_current(&linux, PROGRAM_ROOT));
        assert!(!view.is_current(&linux, 0x20_0000), "another one runs");
        assert!(view.refreshed(&linux).expect("a list").is_none());
        linux.word(IMAGE + 0x3000, IMAGE + 0x3000);
        let empty = view.refreshed(&linux).expect("a list").expect("a change");
        assert_eq!(empty.symbol(MODULE_CODE + 0x11), None);
        assert!(view.symbol(MODULE_CODE + 0x11).is_some());
        // A list without an end.
        linux.word(IMAGE + 0x3000, MODULE + at::MODULE_LIST);
        linux.word(MODULE + at::MODULE_LIST, MODULE + at::MODULE_LIST);
        assert_eq!(
            view.refreshed(&linux).unwrap_err(),
            Unknown::TooMany("modules")
        );
        linux.half(linux::DIRECT + NOTE + 24, 0);
        assert!(!view.is_current(&linux, PROGRAM_ROOT));
    });
}

/// A small kernel that has another module in the same place from some read on.
struct Changing {
    before: Linux,
    after: Linux,
    left: Cell<usize>,
}

impl GuestMemory for Changing {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        let now = self.left.get();
        self.left.set(now.saturating_sub(1));
        let linux = if now == 0 { &self.after } else { &self.before };
        linux.read(address, buffer)
    }
}

#[test]
fn a_module_has_no_other_ones_symbols() {
    each(|mut before| {
        let kernel = {
            let list = IMAGE + 0x3000;
            before.word(list, list);
            let view = view(&before);
            before.word(list, MODULE + at::MODULE_LIST);
            view
        };
        let mut after = Linux::new(before.kind);
        after.put(MODULE + 0x18, b"new");
        after.put(MODULE + 0x301, b"new");
        let memory = Changing {
            before,
            after,
            left: Cell::new(0),
        };
        let [mut whole, mut refused] = [0; 2];
        for reads in 0..100 {
            memory.left.set(reads);
            let Ok(found) = kernel.refreshed(&memory) else {
                refused += 1;
                continue;
            };
            let found = found.expect("a module");
            let symbol = found.symbol(MODULE_CODE + 0x11).expect("a symbol");
            assert_eq!(Some(&symbol.name[..3]), symbol.module, "{reads} reads");
            whole += 1;
        }
        assert!(whole > 10 && refused > 10, "{whole} {refused}");
    });
}

#[test]
fn the_task_that_runs() {
    each(|linux| {
        let task = task(linux, |_| {}).expect("a task");
        assert_eq!((task.pid, task.tgid, task.is_kernel), (43, 42, false));
        assert_eq!(
            (task.comm.to_string().as_str(), task.comm.bytes().len()),
            ("worker?[1m", 10)
        );
        assert_eq!(task.process.to_string(), "server");
        assert_eq!(task.started, 123_456_789);
        assert_eq!(task.memory.map(|memory| memory.root), Some(PROGRAM_ROOT));
    });
}

#[test]
fn a_task_that_cannot_be_is_unknown() {
    fn check(change: impl Fn(&mut Linux), expected: Unknown) {
        each(|linux| assert_eq!(task(linux, &change).unwrap_err(), expected));
    }
    check(
        |linux| linux.half(TASK + at::CPU, 1),
        Unknown::Inconsistent("tasks"),
    );
    check(
        |linux| linux.half(TASK + at::ON_CPU, 0),
        Unknown::Inconsistent("tasks"),
    );
    check(
        |linux| linux.word(TASK + at::STACK, 0),
        Unknown::Inconsistent("stacks"),
    );
    // Another task's: not as large as a stack, and not where one begins.
    for other in [0x10, 0x1000, 0x3ff8] {
        check(
            |linux| linux.word(TASK + at::STACK, KSTACK + other),
            Unknown::Inconsistent("stacks"),
        );
    }
    check(
        |linux| linux.word(TASK + at::STACK, KSTACK - 0x4000),
        Unknown::Inconsistent("stacks"),
    );
    check(
        |linux| linux.word(TASK + at::MM, 0),
        Unknown::Inconsistent("page tables"),
    );
    check(
        |linux| linux.word(TASK + at::MM, 0x1234),
        Unknown::Unmapped(0x1234 + at::MM_PGD),
    );
    check(
        |linux| linux.word(MM + at::MM_PGD, linux::DIRECT + 0x20_0000),
        Unknown::Inconsistent("page tables"),
    );
    let linux = Linux::new(Kind::V7_3);
    let view = view(&linux);
    let at = linux.registers(CODE, STACK, STACK);
    assert_eq!(
        Look::at(&view, &linux).task(1, &at).unwrap_err(),
        Unknown::Processor
    );
}

#[test]
fn kernels_threads_have_no_program() {
    each(|mut linux| {
        let view = view(&linux);
        linux.word(TASK + at::MM, 0);
        linux.half(TASK + at::FLAGS, 0x20_0040);
        let at = linux.registers(CALLED, KSTACK + 0x1000, 0);
        let look = Look::at(&view, &linux);
        let task = look.task(0, &at).expect("a task");
        assert!(task.is_kernel && task.memory.is_none());
        let mut chain = Chain::default();
        look.chain(Some(&task), &at, &mut chain);
        assert_eq!((chain.program().len(), chain.program_end()), (0, None));
    });
}

#[test]
fn what_is_mapped() {
    each(|mut linux| {
        let view = view(&linux);
        let at = linux.registers(CODE, STACK, STACK);
        let task = Look::at(&view, &linux).task(0, &at).expect("a task");
        let memory = task.memory.expect("a program");
        let found = |linux: &Linux, address| Look::at(&view, linux).mapping(memory, address);
        let code = found(&linux, CODE + 5).expect("a mapping");
        assert_eq!(
            (code.start, code.end, code.offset),
            (CODE, CODE + 0x1000, 0x3000)
        );
        let file = code.file.expect("a file");
        assert_eq!(
            (file.device, file.inode, file.generation),
            (8 << 20 | 1, 4711, 9)
        );
        let path = Look::at(&view, &linux).path(&file).expect("a path");
        assert_eq!(
            (path.name.as_str(), path.deleted),
            ("/opt/bin/server", false)
        );
        let stack = found(&linux, STACK + 0xfff).expect("a mapping");
        assert_eq!((stack.file, stack.offset, stack.is_vdso), (None, 0, false));
        assert!(code.is_executable && !stack.is_executable);
        for nothing in [0, HEAD - 1, STACK + 0x1000, u64::MAX] {
            assert_eq!(
                found(&linux, nothing),
                Err(Unknown::NoMapping),
                "{nothing:#x}"
            );
        }
        linux.word(MM + 0x80, STACK);
        assert!(found(&linux, STACK).expect("a mapping").is_vdso);
        // Unlinked, and renamed to something for a terminal.
        linux.word(DENTRY + 0x20, 0);
        linux.put(linux::DIRECT + 0x3_5800, b"s\x1brver");
        let path = Look::at(&view, &linux).path(&file).expect("a path");
        assert_eq!(
            (path.name.as_str(), path.deleted),
            ("/opt/bin/s?rver", true)
        );
        // Another program's, and one that has moved.
        linux.word(VMA + at::VMA_MM, MM + 8);
        assert_eq!(found(&linux, CODE), Err(Unknown::Inconsistent("mappings")));
        linux.word(VMA + at::VMA_MM, MM);
        linux.word(VMA, CODE + 0x800);
        assert_eq!(found(&linux, CODE), Err(Unknown::Inconsistent("mappings")));
        // A node that was removed; one that leads to itself.
        linux.word(NODES, NODES);
        assert_eq!(found(&linux, CODE), Err(Unknown::Inconsistent("mappings")));
        linux.word(NODES, MM | 1);
        linux.word(NODES + 80, NODES | 3 << 3 | 4);
        assert_eq!(found(&linux, CODE), Err(Unknown::TooMany("mappings")));
        // A directory in itself.
        linux.word(DENTRY + 0x80, DENTRY);
        assert_eq!(
            Look::at(&view, &linux).path(&file),
            Err(Unknown::TooMany("names"))
        );
    });
}

/// A name that begins elsewhere than the first process's root is a container's.
#[test]
fn a_files_root() {
    each(|mut linux| {
        let view = view(&linux);
        let at = linux.registers(CODE, STACK, STACK);
        let task = Look::at(&view, &linux).task(0, &at).expect("a task");
        let memory = task.memory.expect("a program");
        let code = Look::at(&view, &linux).mapping(memory, CODE + 5);
        let file = code.expect("a mapping").file.expect("a file");
        let path = |linux: &Linux| Look::at(&view, linux).path(&file).expect("a path");
        let check = |linux: &Linux, expected: &str| {
            let path = path(linux);
            assert_eq!(path.name, "/opt/bin/server");
            assert_eq!(path.root, expected);
        };
        check(&linux, "");
        let [bin, device, opt, root] = [1, 2, 3, 4].map(|index| DENTRY + 0x80 * index);
        // Whoever is not the first says nothing, nor does one that ends.
        linux.word(FIRST_FS + 0x18, bin);
        linux.half(FIRST + at::PID, 2);
        check(&linux, "");
        linux.half(FIRST + at::PID, 1);
        linux.word(FIRST + at::FS, 0);
        check(&linux, "");
        linux.word(FIRST + at::FS, FIRST_FS);
        // Its root is on another device.
        linux.word(FIRST_FS + 0x18, device);
        check(&linux, "8:1");
        // The name's root is a folder below that of the first process.
        let [folder, web] = [5, 6].map(|index| DENTRY + 0x80 * index);
        linux.word(FIRST_FS + 0x18, folder);
        for (dentry, parent, name) in [
            (root, web, &b"r"[..]),
            (web, folder, b"web"),
            (folder, folder, b"/"),
        ] {
            linux.word(dentry, parent);
            linux.half(dentry + 0xc, name.len() as u32);
            linux.word(dentry + 0x10, linux::DIRECT + 0x3_7a00 + (dentry & 0x380));
            linux.put(linux::DIRECT + 0x3_7a00 + (dentry & 0x380), name);
        }
        check(&linux, "/web/r");
        // And one of another device.
        linux.word(FIRST_FS + 0x18, device);
        check(&linux, "8:1/web/r");
        // What lies over another root is the one that is seen.
        linux.word(linux::DIRECT + 0x3_5908, root);
        linux.word(opt, opt);
        let path = path(&linux);
        assert_eq!(
            (path.name.as_str(), path.root.as_str()),
            ("/bin/server", "")
        );
        // A folder in itself.
        linux.word(linux::DIRECT + 0x3_5908, opt);
        linux.word(opt, root);
        linux.word(FIRST_FS + 0x18, device);
        linux.word(folder, root);
        let endless = Look::at(&view, &linux).path(&file);
        assert_eq!(endless, Err(Unknown::TooMany("names")));
    });
}

/// The process's number in its own namespace, and its root.
#[test]
fn what_a_process_is_inside_of_a_container() {
    each(|mut linux| {
        let view = view(&linux);
        let at = linux.registers(CODE, STACK, STACK);
        let task = Look::at(&view, &linux).task(0, &at).expect("a task");
        let check = |linux: &Linux, pid: Option<u32>, root: &str| {
            let inside = Look::at(&view, linux).inside(&task);
            assert_eq!((inside.pid, inside.root.as_str()), (pid, root));
        };
        check(&linux, None, "");
        let (pid, fs) = (linux::DIRECT + 0x3_e000, linux::DIRECT + 0x3_e800);
        // Numbers are those of the process, which is its first thread.
        linux.word(linux::LEADER + at::THREAD_PID, pid);
        linux.word(TASK + at::FS, fs);
        for (level, number) in [(0, 42), (1, 17), (2, 1)] {
            linux.half(pid + 0x60 + 16 * level, number);
        }
        let [device, opt, root] = [2, 3, 4].map(|index| DENTRY + 0x80 * index);
        linux.word(fs + 0x18, root);
        check(&linux, None, "");
        linux.half(pid + 4, 2);
        check(&linux, Some(1), "");
        linux.half(pid + 4, 1);
        linux.word(fs + 0x18, opt);
        check(&linux, Some(17), "/opt");
        linux.word(fs + 0x18, device);
        check(&linux, Some(17), "8:1");
        linux.half(pid + 4, 33);
        check(&linux, None, "8:1");
        // Another task is there now.
        linux.half(pid + 4, 1);
        linux.half(TASK + at::PID, 44);
        check(&linux, None, "");
    });
}

#[test]
fn the_build_id_of_a_file() {
    each(|mut linux| {
        let view = view(&linux);
        let at = linux.registers(CODE, STACK, STACK);
        let task = Look::at(&view, &linux).task(0, &at).expect("a task");
        let memory = task.memory.expect("a program");
        let mapping = |linux: &Linux, at| Look::at(&view, linux).mapping(memory, at);
        let code = mapping(&linux, CODE).expect("a mapping");
        let found = |linux: &Linux| Look::at(&view, linux).build_id(memory, &code);
        let id = found(&linux).expect("an id");
        assert_eq!(id.bytes(), BUILD_ID);
        assert!(id.to_string().starts_with("012320"), "{id}");
        // Of the first mapping, too; anonymous memory has none.
        let head = mapping(&linux, HEAD).expect("a mapping");
        assert_eq!(Look::at(&view, &linux).build_id(memory, &head), Some(id));
        let stack = mapping(&linux, STACK).expect("a mapping");
        assert_eq!(Look::at(&view, &linux).build_id(memory, &stack), None);
        let head = linux.memory[physical(HEAD) as usize..][..0x400].to_vec();
        let stack_before = linux.memory[physical(STACK) as usize..][..0x400].to_vec();
        linux.put(STACK, &head);
        assert_eq!(Look::at(&view, &linux).build_id(memory, &stack), None);
        linux.put(STACK, &stack_before);
        let (notes, segment) = (HEAD + 0x220, HEAD + 0x40 + 2 * 56);
        let odd = [
            // Other magic, 32 bits, segments elsewhere, of another size, or none.
            (HEAD, 0),
            (HEAD + 4, 1),
            (HEAD + 32, 0xf90),
            (HEAD + 32, u64::MAX),
            (HEAD + 54, 57),
            (HEAD + 56, 2),
            // Notes elsewhere, too few bytes, or without an end.
            (segment + 8, 0xff8),
            (segment + 8, u64::MAX - 8),
            (segment + 32, 0x40),
            (notes, u64::MAX),
            (notes + 0x20, 20 << 32 | 3),
            (notes + 0x20, 21 << 32 | 4),
            (notes + 0x20, 4),
            (notes + 0x28, 0x20_554e_4700_0003),
            // Another file's start, and none that is mapped.
            (HEAD_VMA + 0x20, 0),
            (HEAD_VMA + 0x18, 1),
            // Something else is there now.
            (VMA + 0x18, 4),
            (MM + at::MM_PGD, linux::DIRECT + 0x20_0000),
        ];
        for (place, value) in odd {
            let before = linux.memory[physical(place) as usize..][..8].to_vec();
            linux.word(place, value);
            assert_eq!(found(&linux), None, "{place:#x}: {value:#x}");
            linux.put(place, &before);
            assert_eq!(found(&linux), Some(id));
        }
        // Its page is not in memory.
        linux.memory[0xdff8] = 0;
        assert_eq!(found(&linux), None);
    });
}

/// A path is asked for when there is time, and what the kernel had there may be another's.
#[test]
fn a_path_is_never_another_files() {
    each(|mut linux| {
        let view = view(&linux);
        let at = linux.registers(CODE, STACK, STACK);
        let task = Look::at(&view, &linux).task(0, &at).expect("a task");
        let memory = task.memory.expect("a program");
        let file = |linux: &Linux| {
            let mapping = Look::at(&view, linux).mapping(memory, CODE);
            mapping.expect("a mapping").file.expect("a file")
        };
        let path = |linux: &Linux, file| Look::at(&view, linux).path(file);
        let first = file(&linux);
        assert_eq!(first, file(&linux));
        let changes = [
            // The name is that of another inode, or of none.
            (DENTRY + at::DENTRY_INODE, INODE + 0x40),
            (DENTRY + at::DENTRY_INODE, 0),
            // The inode is another file's.
            (INODE + 16, 4712),
            (INODE + 24, 10),
        ];
        for (place, other) in changes {
            let before = linux.memory[physical(place) as usize..][..8].to_vec();
            linux.word(place, other);
            let found = path(&linux, &first);
            assert!(found.is_err(), "{place:#x}: {found:?}");
            linux.put(place, &before);
            assert!(path(&linux, &first).is_ok());
        }
        // An overlay's file has an inode of its own, and the name that of the overlay.
        linux.word(DENTRY + at::DENTRY_INODE, INODE + 0x40);
        let overlaid = file(&linux);
        assert_ne!(overlaid, first);
        assert!(path(&linux, &overlaid).is_ok());
        linux.word(INODE + 0x40 + 16, 5);
        assert_eq!(path(&linux, &overlaid), Err(Unknown::Inconsistent("files")));
    });
}

/// Addresses of the frames, and why both parts end.
type Found = (Vec<u64>, Option<End>, Vec<u64>, Option<End>);

fn chain_at(linux: &Linux, view: &KernelView, rip: u64, rsp: u64, rbp: u64) -> Found {
    let at = linux.registers(rip, rsp, rbp);
    let look = Look::at(view, linux);
    let task = look.task(0, &at).expect("a task");
    let mut chain = Chain::with_depth(8);
    look.chain(Some(&task), &at, &mut chain);
    let addresses = |frames: &[guest_view::Frame]| frames.iter().map(|f| f.address).collect();
    (
        addresses(chain.kernel()),
        chain.kernel_end(),
        addresses(chain.program()),
        chain.program_end(),
    )
}

const PROGRAM: [u64; 3] = [CODE + 0x10, CODE + 0x123, CODE + 0x456];

#[test]
fn a_programs_chain() {
    each(|mut linux| {
        let view = view(&linux);
        let found = chain_at(&linux, &view, CODE, STACK + 0x800, STACK + 0x810);
        let frames = vec![CODE, CODE + 0x123, CODE + 0x456];
        assert_eq!(found, (vec![], None, frames, Some(End::Outermost)));
        let mut end = |value: u64, expected: End| {
            linux.word(STACK + 0x810, value);
            let found = chain_at(&linux, &view, CODE, STACK + 0x800, STACK + 0x810);
            assert_eq!(found.3, Some(expected), "{value:#x}");
        };
        end(STACK + 0x810, End::Direction);
        end(STACK + 0x821, End::Direction);
        end(0x7fff_0000_0000, End::Unreadable);
        end(1 << 60, End::Direction);
        end(0, End::Outermost);
        linux.word(STACK + 0x818, 1 << 60);
        let found = chain_at(&linux, &view, CODE, STACK + 0x800, STACK + 0x810);
        assert_eq!((found.2.len(), found.3), (1, Some(End::NotCode)));
    });
}

#[test]
fn a_stack_and_the_code_that_it_leads_to() {
    each(|mut linux| {
        let view = view(&linux);
        // In the kernel: the program's registers are those that it has saved.
        let sp = KSTACK + 0x4000 - REGS - 32;
        linux.word(sp + 24, ENTRY + 0x20);
        // No code: a number, what is nowhere, and the stack itself. Code, the last twice.
        let words = [12, 0x5000_0000, STACK + 8, HEAD + 8, CODE + 8, CODE + 16];
        for (at, word) in (0u64..).zip(words) {
            linux.word(STACK + 0x900 + 8 * at, word);
        }
        let of_stack = |linux: &Linux, mode, pushed: u64| {
            let at = linux.registers(CALLED, sp, 0);
            let look = Look::at(&view, linux);
            let task = look.task(0, &at).expect("a task");
            let mut chain = Chain::default();
            look.chain(Some(&task), &at, &mut chain);
            let mut at = chain.registers().expect("they are saved");
            assert_eq!(
                (at.ip, at.sp, at.mode),
                (CODE + 0x10, STACK + 0x800, Mode::User)
            );
            assert_eq!(at.bp, Some(STACK + 0x810));
            at.mode = mode;
            at.sp -= pushed;
            let memory = task.memory.expect("a program");
            let mut stack = vec![0; 0x1000];
            let len = look.stack(memory, &at, &mut stack);
            let (mut starts, reads) = (Vec::new(), linux.reads.get());
            look.code(memory, (at.sp, &stack[..len]), |found| {
                starts.push(found.start);
            });
            assert!(
                linux.reads.get() - reads < 100,
                "{}",
                linux.reads.get() - reads
            );
            (len, starts)
        };
        let program = |linux: &Linux, mode| of_stack(linux, mode, 0);
        // The frames of the chain come first.
        assert_eq!(program(&linux, Mode::User), (0x800, vec![CODE, HEAD]));
        assert_eq!(program(&linux, Mode::User32), (0, vec![]));
        // Where it has pushed less than a word, words are where they were.
        for pushed in [1, 2, 7] {
            let (len, starts) = of_stack(&linux, Mode::User, pushed);
            assert_eq!(
                (len, starts),
                (0x800 + usize::try_from(pushed).unwrap(), vec![CODE, HEAD])
            );
        }
        // Code that may not be executed any more.
        linux.word(HEAD_VMA + 0x28, 0x71);
        assert_eq!(program(&linux, Mode::User), (0x800, vec![CODE]));
    });
}

#[test]
fn a_chain_without_a_task() {
    each(|linux| {
        let view = view(&linux);
        let mut chain = Chain::default();
        let at = linux.registers(CODE + 3, STACK + 0x800, STACK + 0x810);
        Look::at(&view, &linux).chain(None, &at, &mut chain);
        assert_eq!(chain.program().len(), 1);
        assert_eq!(chain.program()[0].address, CODE + 3);
        assert_eq!(chain.program_end(), Some(End::NoProgram));
    });
}

#[test]
fn a_32_bit_programs_chain() {
    each(|mut linux| {
        let view = view(&linux);
        linux.half(STACK + 0x10, (STACK + 0x20) as u32);
        linux.half(STACK + 0x14, 0x40_0123);
        let mut at = linux.registers(CODE, STACK, STACK + 0x10);
        at.mode = Mode::User32;
        let look = Look::at(&view, &linux);
        let task = look.task(0, &at).expect("a task");
        let mut chain = Chain::default();
        look.chain(Some(&task), &at, &mut chain);
        assert_eq!(chain.program().len(), 2);
        assert_eq!(chain.program()[1].address, CODE + 0x123);
        assert_eq!(chain.program()[1].instruction(), CODE + 0x122);
    });
}

#[test]
fn the_kernels_chain() {
    each(|mut linux| {
        let view = view(&linux);
        let top = KSTACK + 0x4000 - REGS;
        // `called` was called by the module's function, and that by `entry`.
        let sp = top - 32 - 8;
        linux.word(sp + 24, MODULE_CODE + 0x20);
        linux.word(sp + 32, ENTRY + 0x20);
        let kernel = vec![CALLED + 9, MODULE_CODE + 0x20, ENTRY + 0x20];
        let found = chain_at(&linux, &view, CALLED + 9, sp, 0);
        let expected = (
            kernel,
            Some(End::Entry),
            PROGRAM.to_vec(),
            Some(End::Outermost),
        );
        assert_eq!(found, expected);
    });
}

#[test]
fn through_an_interrupt_of_the_kernel() {
    each(|mut linux| {
        let view = view(&linux);
        let top = KSTACK + 0x4000 - REGS;
        let sp = top - 32;
        linux.word(sp + 24, ENTRY + 0x20);
        // The processor's part of the registers, on another stack.
        let other = KSTACK + 0x100;
        linux.saved(other - 128, CALLED, 0x10, sp, 0);
        let found = chain_at(&linux, &view, INTERRUPT, other, 0x5555);
        let kernel = vec![INTERRUPT, CALLED, ENTRY + 0x20];
        let expected = (
            kernel,
            Some(End::Entry),
            PROGRAM.to_vec(),
            Some(End::Outermost),
        );
        assert_eq!(found, expected);
    });
}

#[test]
fn what_entered_the_kernel_just_now() {
    each(|mut linux| {
        let view = view(&linux);
        // Only the processor has saved registers; those of the stack's top are old.
        let sp = ENTRY_STACK + 0x100;
        linux.saved(sp - 128, CODE + 0x77, 0x33, STACK + 0x800, 0);
        let found = chain_at(&linux, &view, INTERRUPT, sp, STACK + 0x810);
        let program = vec![CODE + 0x77, CODE + 0x123, CODE + 0x456];
        let expected = (
            vec![INTERRUPT],
            Some(End::Entry),
            program,
            Some(End::Outermost),
        );
        assert_eq!(found, expected);
        // Not on the task's stack: nobody knows where the program is.
        let found = chain_at(&linux, &view, IMAGE + 0x1300, STACK, 0);
        assert_eq!((found.2, found.3), (vec![], Some(End::NoProgram)));
    });
}

/// `__switch_to` runs on the next task's stack before it says which task that is.
#[test]
fn in_the_middle_of_a_switch() {
    each(|mut linux| {
        let view = view(&linux);
        let next = KSTACK + 0x8000 - REGS;
        linux.word(next - 8, ENTRY + 0x20);
        linux.saved(next, CODE + 0x77, 0x33, STACK + 0x800, STACK + 0x810);
        let found = chain_at(&linux, &view, CALLED + 9, next - 32, 0);
        let kernel = vec![CALLED + 9, ENTRY + 0x20];
        let nobody = (kernel, Some(End::Entry), vec![], Some(End::NoProgram));
        assert_eq!(found, nobody);
        // The processor's part alone, where no processor saves it.
        linux.saved(next - 0x200 - 128, CODE + 0x77, 0x33, STACK + 0x800, 0);
        let found = chain_at(&linux, &view, INTERRUPT, next - 0x200, 0);
        assert_eq!((found.2, found.3), (vec![], Some(End::NoProgram)));
        // It is the task's own at the top of the task's stack.
        let top = KSTACK + 0x4000 - REGS;
        let found = chain_at(&linux, &view, INTERRUPT, top + 128, STACK + 0x810);
        assert_eq!((found.2, found.3), (PROGRAM.to_vec(), Some(End::Outermost)));
    });
}

/// Its memory is the new program's, and its registers may be those of the one before.
#[test]
fn a_task_that_becomes_another_program() {
    each(|mut linux| {
        let view = view(&linux);
        let sp = KSTACK + 0x4000 - REGS - 32;
        linux.word(sp + 24, ENTRY + 0x20);
        linux.half(TASK + at::EXECUTES, 1 << 3);
        let found = chain_at(&linux, &view, CALLED + 9, sp, 0);
        let kernel = vec![CALLED + 9, ENTRY + 0x20];
        let nobody = (kernel, Some(End::Entry), vec![], Some(End::NoProgram));
        assert_eq!(found, nobody);
        linux.half(TASK + at::EXECUTES, !(1 << 3));
        let found = chain_at(&linux, &view, CALLED + 9, sp, 0);
        assert_eq!(found.2, PROGRAM.to_vec());
    });
}

#[test]
fn a_broken_chain_says_so() {
    each(|mut linux| {
        let view = view(&linux);
        let sp = KSTACK + 0x1000;
        let program = |found: Found| (found.0.len(), found.1.expect("kernel"), found.2);
        // The program's part is known all the same.
        let known = PROGRAM.to_vec();
        let found = chain_at(&linux, &view, CALLED, sp, 0);
        assert_eq!(program(found), (1, End::NotCode, known.clone()));
        let found = chain_at(&linux, &view, IMAGE + 4, sp, 0);
        assert_eq!(program(found), (1, End::NoTable, known.clone()));
        linux.word(sp + 24, CALLED + 1);
        linux.word(sp + 24 + 32, CALLED + 1);
        let found = chain_at(&linux, &view, CALLED, sp, 0);
        assert_eq!(program(found), (3, End::NotCode, known.clone()));
        for frame in 0..64 {
            linux.word(sp + 24 + 32 * frame, CALLED + 1);
        }
        let found = chain_at(&linux, &view, CALLED, sp, 0);
        assert_eq!(program(found), (8, End::Depth, known));
        // No stack at all.
        let found = chain_at(&linux, &view, CALLED, 0xffff_c900_0000_0000, 0);
        assert_eq!(program(found), (1, End::Unreadable, vec![]));
    });
}

#[test]
fn code_without_tables_has_frame_pointers() {
    each(|mut linux| {
        let view = view(&linux);
        let (sp, top) = (KSTACK + 0x1000, KSTACK + 0x4000 - REGS);
        // Behind the module: the kernel made it itself.
        let made = MODULE_CODE + 0x2000;
        linux.word(sp + 0x40, 0x1111);
        linux.word(sp + 0x48, CALLED + 4);
        linux.word(sp + 0x50 + 24, ENTRY + 1);
        // `entry` has its registers right above.
        linux.saved(sp + 0x70, CODE + 0x10, 0x33, STACK + 0x800, STACK + 0x810);
        let found = chain_at(&linux, &view, made, sp, sp + 0x40);
        let kernel = vec![made, CALLED + 4, ENTRY + 1];
        assert_eq!((found.0, found.1), (kernel, Some(End::Entry)));
        let found = chain_at(&linux, &view, made, sp, sp - 8);
        assert_eq!(found.1, Some(End::Direction));
        let found = chain_at(&linux, &view, made, top, top);
        assert_eq!(found.1, Some(End::NotCode));
    });
}

#[test]
fn what_frame_pointers_say_is_a_guess() {
    fn guessed(frames: &[guest_view::Frame]) -> Vec<bool> {
        frames.iter().map(|frame| frame.guessed).collect()
    }
    each(|mut linux| {
        let view = view(&linux);
        let look = Look::at(&view, &linux);
        let mut chain = Chain::default();
        let at = linux.registers(CODE, STACK + 0x800, STACK + 0x810);
        let task = look.task(0, &at).expect("a task");
        look.chain(Some(&task), &at, &mut chain);
        assert_eq!(guessed(chain.program()), [false, true, true]);
        // Code without a table, called by the kernel's.
        let sp = KSTACK + 0x4000 - REGS - 0x70;
        linux.word(sp + 0x40, 0x1111);
        linux.word(sp + 0x48, CALLED + 9);
        linux.word(sp + 0x50 + 24, ENTRY + 1);
        let at = linux.registers(MODULE_CODE + 0x2000, sp, sp + 0x40);
        Look::at(&view, &linux).chain(Some(&task), &at, &mut chain);
        assert_eq!(chain.kernel_end(), Some(End::Entry));
        assert_eq!(guessed(chain.kernel()), [false, true, true]);
        assert_eq!(guessed(chain.program()), [false, true, true]);
        // Nobody knows whether the stack is one on which a processor entered the kernel.
        let other = ENTRY_STACK + 0x100;
        linux.saved(other - 128, CODE + 0x77, 0x33, STACK + 0x800, 0);
        linux.word(other - 0x10, 0x1111);
        linux.word(other - 8, INTERRUPT + 4);
        let at = linux.registers(MODULE_CODE + 0x2000, other - 0x20, other - 0x10);
        Look::at(&view, &linux).chain(Some(&task), &at, &mut chain);
        assert_eq!(chain.kernel().len(), 2);
        assert_eq!(chain.program_end(), Some(End::NoProgram));
    });
}

#[test]
fn a_tracer_keeps_the_caller() {
    each(|mut linux| {
        let view = view(&linux);
        let sp = KSTACK + 0x4000 - REGS - 32;
        linux.word(sp + 24, TRAMPOLINE);
        let found = chain_at(&linux, &view, CALLED, sp, 0);
        let known = PROGRAM.to_vec();
        assert_eq!((found.0, found.1), (vec![CALLED], Some(End::NoTable)));
        assert_eq!(found.2, known);
        // What the tracer calls is still known.
        linux.word(sp + 24, TRAMPOLINE + 4);
        let found = chain_at(&linux, &view, CALLED, sp, 0);
        let kernel = vec![CALLED, TRAMPOLINE + 4];
        assert_eq!((found.0, found.1), (kernel, Some(End::NoTable)));
        let found = chain_at(&linux, &view, TRAMPOLINE, sp, 0);
        assert_eq!((found.0, found.1), (vec![TRAMPOLINE], Some(End::NoTable)));
    });
}

#[test]
fn a_look_reads_little() {
    each(|mut linux| {
        let view = view(&linux);
        let sp = KSTACK + 0x4000 - REGS - 32;
        linux.word(sp + 24, ENTRY + 0x20);
        linux.reads.set(0);
        let _ = chain_at(&linux, &view, CALLED, sp, 0);
        assert!(linux.reads.get() < 60, "{} reads", linux.reads.get());
    });
}

#[test]
fn a_kernel_without_types_has_symbols() {
    each(|mut linux| {
        let btf = physical(IMAGE + 0x10_0000) as usize;
        linux.memory[btf] ^= 1;
        let view = KernelView::of(&linux, note(&linux), PROGRAM_ROOT).expect("a kernel");
        assert_eq!(view.missing().count(), 4);
        assert_eq!(
            view.symbol(CALLED).map(|symbol| symbol.name),
            Some("called")
        );
        let at = linux.registers(CODE, STACK, STACK);
        assert_eq!(Look::at(&view, &linux).task(0, &at), Err(Unknown::Types));
    });
}
