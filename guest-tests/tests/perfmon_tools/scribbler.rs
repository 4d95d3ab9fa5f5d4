//! A guest that rewrites what tools read of it: page tables, symbols, types, unwind tables,
//! tasks, mappings and modules of a small Linux, at random, while it is sampled.
//!
//! Its program runs at CPL 3, at the processor's own speed on every KVM: some million words a
//! second. It writes some, waits, and writes back what was there, so that now and then
//! there is a Linux. What itself runs by is in page tables of its own.

#[path = "../../../vmm/guest-view/tests/linux/mod.rs"]
mod linux;

use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use guest_tests::micro::Written;
use guest_tests::umpire::skipped_without_kvm;
use iced_x86::code_asm::{
    CodeAssembler, cl, eax, ebx, ecx, edx, qword_ptr, r8, r9, r10, r11, r12, r12d, r13, r14, r15,
    rax, rcx, rdi, rdx, rsi, rsp,
};
use perfmon_abi::wire::kernel::KernelRequest;
use perfmon_abi::wire::programs::ProgramsRequest;
use serde_json::Value;
use tempfile::NamedTempFile;
use umpire_perfmon::Client;

use self::linux::{
    AREA, CALLED, CODE, DENTRY, ENTRY, HEAD, IMAGE, KSTACK, Kind, Linux, MM, MODULE, MODULE_CODE,
    NODES, NOTE, PROGRAM_ROOT, REGS, STACK, TASK, VMA, physical,
};
use super::rings::{self, DATA, Guest, KEPT, PATIENCE, WINDOW, WINDOW_ENTRY, printed};

const SEEDS: u64 = 4;
/// How long each guest is sampled.
const TIME: &str = "2s";
/// The VM's memory may grow by what a kernel's symbols and types take; of them a kernel may
/// claim much.
const GROWTH_KIB: u64 = 64 << 10;
const PEAK_KIB: u64 = 512 << 10;
/// Places of which each guest rewrites 16; a power of two of bytes.
const PLACES: usize = 16;
/// Where the small Linux has its program's code.
const CODE_AT: usize = 0x2_0000;

/// What is rewritten: page tables but for the entries that the guest runs by, and everything
/// that is read of a Linux.
fn places() -> Vec<(u64, u64)> {
    vec![
        // The kernel's root, and of the program's root the direct map and `cpu_entry_area`.
        (0x1000, 0x1000),
        (PROGRAM_ROOT + 8 * 272, 16),
        (PROGRAM_ROOT + 8 * 508, 16),
        // The direct map's.
        (0x4000, 0x40),
        (0x5000, 0x40),
        (0x7000 + 0x800, 0x800),
        (0xd000 + 0x800, 0x800),
        (0xb000, 0x1000),
        (NOTE, 0x400),
        (physical(AREA), 0x400),
        (physical(TASK), 0x400),
        (physical(TASK) + 0x100, 0x40),
        (physical(MM), 0x100),
        (physical(VMA), 0x200),
        (physical(VMA) + 0xb00, 0x80),
        (physical(DENTRY), 0x400),
        (physical(NODES), 0x100),
        (physical(NODES) + 0x100, 0x100),
        (physical(MODULE), 0x800),
        (physical(MODULE_CODE) + 0x800, 0x10),
        (physical(KSTACK) + 0x4000 - 0x100, 0x100),
        (physical(STACK) + 0x800, 0x80),
        (physical(IMAGE) + 0x2000, 0x20),
        (physical(IMAGE) + 0x3000, 0x10),
        // Names, count, base and offsets, tokens, index, unwind tables, types.
        (physical(IMAGE) + 0x4_0000, 0x200),
        (physical(IMAGE) + 0x5_0000, 0x10),
        (physical(IMAGE) + 0x5_1000, 0x80),
        (physical(IMAGE) + 0x6_0000, 0x400),
        (physical(IMAGE) + 0x7_0000, 0x200),
        (physical(IMAGE) + 0x8_0000, 0x20),
        (physical(IMAGE) + 0x9_0000, 0x20),
        (physical(IMAGE) + 0x10_0000, 0x1000),
        (physical(HEAD), 0x400),
    ]
}

/// A random number; changes RAX.
fn next(a: &mut CodeAssembler) -> Written {
    a.mov(rax, r8)?;
    a.shl(rax, 13)?;
    a.xor(r8, rax)?;
    a.mov(rax, r8)?;
    a.shr(rax, 7)?;
    a.xor(r8, rax)?;
    a.mov(rax, r8)?;
    a.shl(rax, 17)?;
    a.xor(r8, rax)
}

/// A place to RDI; changes RAX, RCX and RDX.
fn place(a: &mut CodeAssembler) -> Written {
    next(a)?;
    a.mov(rcx, r8)?;
    a.and(ecx, i32::try_from(PLACES).expect("few") - 1)?;
    a.shl(ecx, 4)?;
    a.mov(rdi, qword_ptr(r11 + rcx))?;
    a.mov(rdx, qword_ptr(r11 + rcx + 8))?;
    a.mov(rcx, r8)?;
    a.shr(rcx, 8)?;
    a.and(rcx, rdx)?;
    a.add(rdi, rcx)
}

/// Waits for 1 to 2 million instructions.
fn wait(a: &mut CodeAssembler) -> Written {
    let mut again = a.create_label();
    next(a)?;
    a.mov(rcx, r8)?;
    a.shr(rcx, 61)?;
    a.lea(ecx, iced_x86::code_asm::dword_ptr(rcx + rcx * 2))?;
    a.mov(eax, 1)?;
    a.shl(eax, cl)?;
    a.set_label(&mut again)?;
    a.dec(eax)?;
    a.jne(again)
}

/// Writes up to 32 words, waits, writes back what was there, waits; now and then it calls the
/// kernel. R9: memory, R10: as it was, R11: the places, and behind them what was written.
fn program(a: &mut CodeAssembler, seed: u64) -> Written {
    const WRITTEN: i32 = 0x1000;
    a.mov(r8, seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)?;
    a.mov(r9, WINDOW)?;
    a.mov(r10, WINDOW + DATA)?;
    a.mov(r11, WINDOW + KEPT)?;
    let mut round = a.create_label();
    let mut write = a.create_label();
    let (mut small, mut near) = (a.create_label(), a.create_label());
    let mut done = a.create_label();
    let mut back = a.create_label();
    a.set_label(&mut round)?;
    next(a)?;
    a.mov(r12, r8)?;
    a.and(r12d, 31)?;
    a.inc(r12d)?;
    a.mov(r13, r12)?;
    a.set_label(&mut write)?;
    place(a)?;
    a.mov(r15, rdi)?;
    a.mov(qword_ptr(r11 + r13 * 8 + WRITTEN), rdi)?;
    next(a)?;
    a.mov(rsi, r8)?;
    a.mov(rdx, r8)?;
    a.shr(rdx, 61)?;
    a.cmp(edx, 7)?;
    a.je(done)?;
    a.cmp(edx, 6)?;
    a.je(small)?;
    a.cmp(edx, 3)?;
    a.jae(near)?;
    // What is elsewhere.
    place(a)?;
    a.mov(rsi, qword_ptr(r10 + rdi))?;
    a.jmp(done)?;
    a.set_label(&mut near)?;
    a.mov(rsi, qword_ptr(r10 + r15))?;
    a.mov(rcx, r8)?;
    a.shr(rcx, 20)?;
    a.and(ecx, 0xff)?;
    a.lea(rsi, qword_ptr(rsi + rcx * 8))?;
    a.jmp(done)?;
    a.set_label(&mut small)?;
    a.shr(rsi, 50)?;
    a.set_label(&mut done)?;
    a.mov(qword_ptr(r9 + r15), rsi)?;
    a.dec(r13)?;
    a.jne(write)?;
    wait(a)?;
    a.set_label(&mut back)?;
    a.mov(rdi, qword_ptr(r11 + r12 * 8 + WRITTEN))?;
    a.mov(rsi, qword_ptr(r10 + rdi))?;
    a.mov(qword_ptr(r9 + rdi), rsi)?;
    a.dec(r12)?;
    a.jne(back)?;
    wait(a)?;
    next(a)?;
    a.mov(ebx, iced_x86::code_asm::r8d)?;
    a.and(ebx, 7)?;
    a.jne(round)?;
    a.ud2()?;
    a.jmp(round)
}

/// What the kernel does: it stands in `called` for a millisecond or so, with a stack that only
/// tools read.
fn kernel(at: u64) -> Vec<u8> {
    let own_stack = KSTACK + 0x4000 - REGS - 32;
    rings::code(at, |a| {
        let mut again = a.create_label();
        if at == ENTRY {
            a.mov(r14, rsp)?;
            a.mov(rsp, own_stack)?;
            a.mov(rax, CALLED)?;
            return a.jmp(rax);
        }
        a.mov(ecx, 800)?;
        a.set_label(&mut again)?;
        a.dec(ecx)?;
        a.jne(again)?;
        a.mov(rsp, r14)?;
        rings::resume(a)
    })
}

/// The guest of a seed: which places it rewrites, and what runs.
fn guest(seed: u64) -> NamedTempFile {
    let mut linux = Linux::new(Kind::of(seed));
    // The vCPU's number at the local APIC.
    linux.half(AREA + 0x300, 0);
    linux.word(KSTACK + 0x4000 - REGS - 8, ENTRY + 0x20);
    let (index, entry) = WINDOW_ENTRY;
    let place = usize::try_from(PROGRAM_ROOT).expect("a place") + 8 * index;
    linux.memory[place..place + 8].copy_from_slice(&entry.to_le_bytes());
    linux.put(ENTRY, &kernel(ENTRY));
    linux.put(CALLED, &kernel(CALLED));
    let runs = rings::code(CODE, |a| program(a, seed));
    assert!(runs.len() < 0x1000);
    linux.memory[CODE_AT..][..runs.len()].copy_from_slice(&runs);
    let used = |page: &usize| {
        linux.memory[page * 0x1000..][..0x1000]
            .iter()
            .any(|it| *it != 0)
    };
    let mut copied: Vec<Range<usize>> = Vec::new();
    for page in (0..linux.memory.len() / 0x1000).filter(used) {
        let range = page * 0x1000..(page + 1) * 0x1000;
        match copied.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => copied.push(range),
        }
    }
    let mut kept = Vec::new();
    let all = places();
    for number in 0..PLACES {
        // Each seed has other ones; all have some.
        let step = usize::try_from(seed).expect("small") * 2 + 1;
        let (start, size) = all[(number * step + usize::from(seed > 1) * PLACES) % all.len()];
        assert!(size.is_power_of_two());
        kept.extend(start.to_le_bytes());
        kept.extend(((size - 1) & !7).to_le_bytes());
    }
    let program = rings::Program {
        root: PROGRAM_ROOT,
        rip: CODE,
        rsp: STACK + 0x800,
        rbp: STACK + 0x810,
        kernel: ENTRY,
    };
    rings::image(&program, &linux.memory, &copied, (&[], &kept))
}

/// Asks what tools ask, until `end`; says how often the kernel was known.
fn ask(socket: &Path, seed: u64, end: Instant) -> (u32, u32) {
    let client = Client::connect(socket).expect("a client");
    let (mut known, mut asked) = (0, 0);
    let mut since = 0;
    while Instant::now() < end {
        let cr3 = [PROGRAM_ROOT, 0x1000, seed << 12, u64::MAX][asked as usize % 4];
        // That none is found is no error of the VM's.
        if let Ok(kernel) = client.kernel(&KernelRequest { cr3 }) {
            known += 1;
            let is_clean = |char: char| char.is_ascii_graphic() || " \t\n".contains(char);
            assert!(kernel.kallsyms.chars().all(is_clean));
        }
        let programs = client.programs(&ProgramsRequest { since });
        since = programs.expect("an answer").next;
        asked += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
    (known, asked)
}

/// What is known of samples.
#[derive(Debug, Default)]
struct Tally {
    samples: u32,
    in_kernel: u32,
    tasks: u32,
    files: u32,
    symbols: u32,
    /// In the kernel, and in the program, chains of more than two frames.
    entered: u32,
    programs: u32,
}

fn count(script: &str) -> Tally {
    let mut tally = Tally::default();
    for line in script.lines() {
        let sample: Value = serde_json::from_str(line).expect("JSON");
        if sample["kind"] != "sample" {
            continue;
        }
        let chain = sample["callchain"].as_array().map_or(0, Vec::len);
        let is_kernel = sample["ring"] == "kernel";
        tally.samples += 1;
        tally.in_kernel += u32::from(is_kernel);
        tally.tasks += u32::from(!sample["pid"].is_null());
        tally.files += u32::from(sample["dso"] == "/opt/bin/server");
        tally.symbols += u32::from(is_kernel && sample["symbol"] == "called");
        tally.entered += u32::from(is_kernel && chain > 2);
        tally.programs += u32::from(!is_kernel && chain > 2);
    }
    tally
}

fn check(seed: u64) -> Vec<Tally> {
    let mut vm = Guest::boot(guest(seed), &[]);
    let before = vm.kib("VmRSS:");
    let began = Instant::now();
    let record = |words: &[&str]| {
        let words = [&["record", "-a", "--for", TIME], words].concat();
        vm.command(&words).spawn().expect("umpire can be started")
    };
    let pointers = record(&["-g", "-F", "2000", "-o", "pointers.data"]);
    let tables = record(&["--call-graph", "dwarf", "--symfs", ".", "-o", "tables.data"]);
    let top = vm.command(&["top", "--once", "-j", "-d", "1"]).spawn();
    let top = top.expect("umpire can be started");
    let socket = vm.path("vm.sock");
    let known = ask(&socket, seed, began + Duration::from_secs(2));
    for (what, child) in [("-g", pointers), ("dwarf", tables), ("top", top)] {
        let output = child.wait_with_output().expect("an end");
        let text = printed(what, &output);
        assert_eq!(text.is_empty(), what != "top", "{what}: {text}");
    }
    let took = began.elapsed();
    assert!(took < PATIENCE, "{took:?}");
    let (after, peak) = (vm.kib("VmRSS:"), vm.kib("VmHWM:"));
    let fields = ["-F", "pid,ip,ring,sym,dso,callchain"];
    let mut tallies = Vec::new();
    for file in ["pointers.data", "tables.data"] {
        let script = [&["script", "-j", "-i", file][..], &fields].concat();
        tallies.push(count(&printed("script", &vm.run(&script))));
        let report = vm.run(&["report", "-i", file, "-g"]);
        assert!(printed("report", &report).contains('%'));
    }
    println!(
        "seed {seed}: {known:?} {took:?}, {before} KiB, then {after}, at most {peak}: {tallies:?}"
    );
    for tally in &tallies {
        assert!(tally.samples > 20 && tally.in_kernel > 0, "{tally:?}");
    }
    assert!(after <= before + GROWTH_KIB && peak <= PEAK_KIB);
    // Nothing stays behind, and it ends as any other.
    let listed: Value = serde_json::from_str(&printed("ls", &vm.run(&["ls", "-j"]))).expect("JSON");
    assert_eq!(listed["machine"]["contexts"], Value::Array(Vec::new()));
    assert_eq!(vm.stop(), Some(130));
    tallies
}

#[test]
fn a_guest_that_rewrites_what_tools_read() {
    if skipped_without_kvm("a_guest_that_rewrites_what_tools_read") {
        return;
    }
    let all: Vec<Tally> = (0..SEEDS).flat_map(check).collect();
    // Now and then there is a Linux, and all of it is found; at other times there is none.
    let sum = |of: fn(&Tally) -> u32| all.iter().map(of).sum::<u32>();
    let (tasks, symbols) = (sum(|it| it.tasks), sum(|it| it.symbols));
    assert!(tasks > 50 && tasks < sum(|it| it.samples), "{all:?}");
    assert!(symbols > 50 && sum(|it| it.files) > 20, "{all:?}");
    let (entered, programs) = (sum(|it| it.entered), sum(|it| it.programs));
    assert!(entered > 20 && programs > 20, "{all:?}");
}
