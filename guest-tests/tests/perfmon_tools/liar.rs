//! A guest that lies as an agent: what it writes to the second serial port is noise, too long,
//! without an end, or names files outside of `--symfs`. Recordings last as long as they should,
//! and keep what was measured.

use std::os::unix::fs::symlink;
use std::process::Output;
use std::time::{Duration, Instant};

use guest_tests::linux::own_program;
use guest_tests::umpire::skipped_without_kvm;
use iced_x86::code_asm::{
    CodeAssembler, al, dx, ecx, edx, qword_ptr, r9, r13, r13d, r15, r15d, rcx, rsi,
};
use object::{Object as _, ObjectSegment as _, ObjectSymbol as _};
use serde_json::Value;

use super::rings::{self, DATA, Guest, IN_KERNEL, IN_WINDOW, ROOT, WINDOW, printed};

const COM2: u32 = 0x2f8;
const COM2_STATUS: u32 = 0x2fd;
/// Where the guest's kernel is, behind its program.
const BEHIND: usize = 0x400;
const KERNEL: u64 = IN_KERNEL + BEHIND as u64;

/// Messages in the form of `umpire-agent`: postcard, a CRC-32, COBS, between zeros. It is
/// written here once more, so that it can say what the agent never does.
mod say {
    pub(super) fn number(value: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut left = value;
        while left > 0x7f {
            bytes.push(left.to_le_bytes()[0] | 0x80);
            left >>= 7;
        }
        bytes.push(left.to_le_bytes()[0]);
        bytes
    }

    fn text(text: &str) -> Vec<u8> {
        [number(text.len() as u64), text.as_bytes().to_vec()].concat()
    }

    fn numbers(values: &[u64]) -> Vec<u8> {
        values.iter().flat_map(|value| number(*value)).collect()
    }

    pub(super) fn frame(mut plain: Vec<u8>) -> Vec<u8> {
        let mut crc = u32::MAX;
        for byte in &plain {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = crc >> 1 ^ (0xedb8_8320 & 0u32.wrapping_sub(crc & 1));
            }
        }
        plain.extend((!crc).to_le_bytes());
        let mut frame = vec![0];
        for mut part in plain.split(|byte| *byte == 0) {
            while part.len() >= 254 {
                frame.push(255);
                frame.extend(&part[..254]);
                part = &part[254..];
            }
            frame.push(part.len().to_le_bytes()[0] + 1);
            frame.extend(part);
        }
        frame.push(0);
        frame
    }

    pub(super) fn hello() -> Vec<u8> {
        frame(numbers(&[0, 0x6d70_6167, 1, 4711]))
    }

    pub(super) fn told(sequence: u64, part: u64, items: &[Vec<u8>]) -> Vec<u8> {
        let head = numbers(&[2, sequence, part, items.len() as u64]);
        frame([head, items.concat()].concat())
    }

    pub(super) fn thread(number: u64, memory: u64, comm: &str) -> Vec<u8> {
        let head = numbers(&[0, number, memory, 40 + number, 50 + number, 1, 0]);
        [head, text(comm), text(comm)].concat()
    }

    pub(super) fn file(number: u64, name: &str) -> Vec<u8> {
        [numbers(&[1, number, 9, number, 0]), text(name)].concat()
    }

    pub(super) fn mapping(
        memory: u64,
        file: u64,
        (start, length, offset): (u64, u64, u64),
    ) -> Vec<u8> {
        numbers(&[2, memory, file, start, length, offset])
    }

    pub(super) fn threads(threads: &[u64]) -> Vec<u8> {
        [numbers(&[3, threads.len() as u64]), numbers(threads)].concat()
    }
}

/// A guest that says the first of `said`, then another one behind each question; or all, one
/// after the other, once it was asked.
fn guest(said: &[Vec<u8>], waits: bool) -> tempfile::NamedTempFile {
    let mut data = Vec::new();
    for one in said {
        data.extend((one.len() as u64).to_le_bytes());
        data.extend(one);
        data.resize(data.len().next_multiple_of(8), 0);
    }
    data.extend([0; 8]);
    let mut own = rings::code(IN_WINDOW, |a| {
        let (mut again, mut spin) = (a.create_label(), a.create_label());
        a.xor(r13d, r13d)?;
        a.xor(r15d, r15d)?;
        a.set_label(&mut again)?;
        a.mov(ecx, 200_000)?;
        a.set_label(&mut spin)?;
        a.dec(ecx)?;
        a.jne(spin)?;
        a.ud2()?;
        a.jmp(again)
    });
    own.resize(BEHIND, 0);
    own.extend(rings::code(KERNEL, |a| speak(a, waits)));
    let program = rings::Program {
        root: ROOT,
        rip: IN_WINDOW,
        rsp: WINDOW + DATA - 0x100,
        rbp: 0,
        kernel: KERNEL,
    };
    rings::image(&program, &data, &[], (&own, &[]))
}

/// R15: bit 0, the first was said; bit 1, in the middle of a question. R13: a question came.
/// R9: what is said next.
fn speak(a: &mut CodeAssembler, waits: bool) -> guest_tests::micro::Written {
    let (mut begun, mut hear, mut nothing) = (a.create_label(), a.create_label(), a.create_label());
    let (mut say, mut byte, mut end) = (a.create_label(), a.create_label(), a.create_label());
    a.test(r15, r15)?;
    a.jne(begun)?;
    a.inc(r15)?;
    a.mov(r9, WINDOW + DATA)?;
    a.jmp(say)?;
    a.set_label(&mut begun)?;
    a.nop()?;
    a.set_label(&mut hear)?;
    a.mov(edx, COM2_STATUS)?;
    a.in_(al, dx)?;
    a.test(al, 1)?;
    a.je(nothing)?;
    a.mov(edx, COM2)?;
    a.in_(al, dx)?;
    a.test(al, al)?;
    a.jne(hear)?;
    a.xor(r15, 2)?;
    a.test(r15d, 2)?;
    a.jne(hear)?;
    a.mov(r13d, 1)?;
    a.set_label(&mut say)?;
    a.mov(rcx, qword_ptr(r9))?;
    a.test(rcx, rcx)?;
    a.je(end)?;
    a.lea(rsi, qword_ptr(r9 + 8))?;
    a.mov(edx, COM2)?;
    a.set_label(&mut byte)?;
    a.lodsb()?;
    a.out(dx, al)?;
    a.dec(rcx)?;
    a.jne(byte)?;
    a.add(rsi, 7)?;
    a.and(rsi, -8)?;
    a.mov(r9, rsi)?;
    a.jmp(end)?;
    a.set_label(&mut nothing)?;
    if !waits {
        a.test(r13, r13)?;
        a.jne(say)?;
    }
    a.nop()?;
    a.set_label(&mut end)?;
    rings::resume(a)
}

/// Records, and how long that took.
fn recorded(vm: &Guest, time: &str) -> (Output, Duration) {
    let began = Instant::now();
    let words = [
        "record", "-a", "-g", "-F", "97", "-o", "a.data", "--for", time,
    ];
    let output = vm.run(&words);
    (output, began.elapsed())
}

fn symbol_of(program: &[u8]) -> u64 {
    let file = object::File::parse(program).expect("a program");
    let leaf = file.symbols().find(|symbol| symbol.name() == Ok("leaf"));
    let leaf = leaf.expect("a symbol").address();
    let segment = file
        .segments()
        .find(|one| (one.address()..one.address() + one.size()).contains(&leaf));
    let segment = segment.expect("a segment");
    leaf - segment.address() + segment.file_range().0
}

#[test]
fn an_agent_that_lies() {
    if skipped_without_kvm("an_agent_that_lies") {
        return;
    }
    let program = own_program("walk").expect("a program");
    // The guest's loop is where the program has `leaf`, wherever the file is.
    let leaf = symbol_of(&program);
    let place = (IN_WINDOW, 0x1000, leaf);
    let names = [
        "/inside",
        "/../../secret",
        "/link",
        "../secret",
        "/usr/\x1b]0;x\x07\n../../secret",
    ];
    let mut all = Vec::new();
    let mut every: Vec<u64> = Vec::new();
    for (number, name) in (1..).zip(names) {
        all.push(say::thread(number, number, "\x1b[2J\x07\nroot"));
        all.push(say::file(number, name));
        all.push(say::mapping(number, number, place));
        // Makes no sense.
        all.push(say::mapping(number, number, (u64::MAX, u64::MAX, u64::MAX)));
        every.push(number);
    }
    let answer = |sequence: u64, known: bool| {
        let mut items = if known { Vec::new() } else { all.clone() };
        // More threads than there are moments, and each in its turn.
        let turn = usize::try_from(sequence).expect("small") % every.len();
        items.push(say::threads(&[&every[turn..], &every[..turn]].concat()));
        say::told(sequence, 0, &items)
    };
    let noise: Vec<u8> = (1..=255).cycle().step_by(7).take(20_000).collect();
    let huge = say::frame([say::number(1), say::number(u64::MAX >> 1), b"x".to_vec()].concat());
    let mut said = vec![
        [
            noise,
            vec![0],
            huge,
            say::hello()[..9].to_vec(),
            say::hello(),
        ]
        .concat(),
        // One part is missing; what was told counts no more.
        [say::told(1, 0, &all), say::told(1, 5, &[])].concat(),
        // Of another question, and of threads that nobody knows.
        [
            answer(999, false),
            say::told(2, 0, &[say::threads(&[77; 4000])]),
        ]
        .concat(),
        answer(3, false),
    ];
    said.extend((4..3000).map(|sequence| answer(sequence, true)));
    let vm = Guest::boot(guest(&said, true), &["--agent"]);
    let root = vm.path("root");
    std::fs::create_dir(&root).expect("a folder");
    std::fs::write(root.join("inside"), &program).expect("a file");
    std::fs::write(vm.path("secret"), &program).expect("a file");
    symlink("../secret", root.join("link")).expect("a link");
    let (output, took) = recorded(&vm, "2s");
    printed("record", &output);
    let told = String::from_utf8_lossy(&output.stderr);
    println!("{took:?}: {told}");
    assert!(took < Duration::from_secs(15), "{took:?}");
    assert_eq!(told.lines().count(), 1, "{told}");
    let report = ["report", "-j", "-i", "a.data", "--symfs", "root"];
    let sorted = [&report[..], &["--sort", "pid,comm,dso,symbol"]].concat();
    let output = vm.run(&sorted);
    let report = printed("report", &output);
    let report: Value = serde_json::from_str(&report).expect("JSON");
    let rows = report["events"][0]["rows"].as_array().expect("rows");
    let mut seen = Vec::new();
    for row in rows {
        let (dso, symbol) = (row["dso"].as_str(), row["symbol"].as_str());
        let Some(dso) = dso.filter(|_| row["pid"].is_u64()) else {
            continue;
        };
        let is_inside = dso == "inside";
        assert!(symbol == Some("leaf") || !is_inside, "{row}");
        assert!(
            symbol.is_none_or(|name| name == "[unknown]") || is_inside,
            "{row}"
        );
        seen.push(dso.to_owned());
    }
    assert!(seen.iter().any(|dso| dso == "inside"), "{report}");
    assert!(
        seen.iter().filter(|dso| *dso == "secret").count() >= 1,
        "{report}"
    );
    for how in ["report", "script"] {
        printed(how, &vm.run(&[how, "-i", "a.data", "--symfs", "root"]));
    }
    // The code of a file outside is not shown either.
    let shown = vm.run(&["annotate", "-i", "a.data", "--symfs", "root"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(!shown.contains("secret"), "{shown}");
}

#[test]
fn an_answer_without_an_end() {
    if skipped_without_kvm("an_answer_without_an_end") {
        return;
    }
    let mut said = vec![say::hello()];
    for part in 0..20_000u64 {
        let items = [
            say::thread(part + 1, 1, "endless"),
            say::file(part + 1, "/bin/endless"),
            say::mapping(1, part + 1, (part << 12, 1 << 12, 0)),
        ];
        said.push(say::told(1, part, &items));
    }
    let vm = Guest::boot(guest(&said, false), &["--agent"]);
    let before = vm.kib("VmRSS:");
    let (output, took) = recorded(&vm, "1s");
    let told = String::from_utf8_lossy(&output.stderr);
    println!("{took:?}, {before} KiB, then {}: {told}", vm.kib("VmRSS:"));
    assert_eq!(output.status.code(), Some(0), "{told}");
    assert!(took < Duration::from_secs(15), "{took:?}");
    assert_eq!(told.lines().count(), 2, "{told}");
    assert!(told.contains(" samples; a.data has "), "{told}");
    assert!(vm.kib("VmRSS:") < before + (32 << 10));
    let script = printed("script", &vm.run(&["script", "-i", "a.data"]));
    assert!(script.lines().count() >= 20, "{script}");
}

/// A guest whose agent tells of five threads in turn, in so many processes.
fn five_threads() -> Guest {
    let mut all = Vec::new();
    let every: Vec<u64> = (1..=5).collect();
    for number in &every {
        all.push(say::thread(*number, *number, &format!("name{number}")));
        all.push(say::file(*number, &format!("/bin/file{number}")));
        all.push(say::mapping(*number, *number, (IN_WINDOW, 0x1000, 0)));
    }
    let answer = |sequence: u64| {
        let mut items = if sequence == 1 {
            all.clone()
        } else {
            Vec::new()
        };
        let turn = usize::try_from(sequence).expect("small") % every.len();
        let turns = [&every[turn..], &every[..turn]].concat();
        items.push(say::threads(&turns.repeat(8)));
        say::told(sequence, 0, &items)
    };
    let said = std::iter::once(say::hello()).chain((1..3000).map(answer));
    Guest::boot(guest(&said.collect::<Vec<_>>(), true), &["--agent"])
}

/// What `umpire report` says of a whole file, and the process and thread of each row.
fn tasks_of(vm: &Guest, file: &str) -> (Value, Vec<(u64, u64)>) {
    let words = ["report", "-j", "-i", file, "--sort", "pid,tid"];
    let report = printed("report", &vm.run(&words));
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["complete"], true, "{report}");
    let rows = report["events"][0]["rows"].as_array().expect("rows");
    let task = |row: &Value| Some((row["pid"].as_u64()?, row["tid"].as_u64()?));
    let tasks = rows.iter().filter_map(task).collect();
    (report, tasks)
}

/// `-p` and `-t` take in what the guest's own numbers say, and count the rest.
#[test]
fn samples_of_chosen_processes() {
    if skipped_without_kvm("samples_of_chosen_processes") {
        return;
    }
    let vm = five_threads();
    let words = [
        "record", "-a", "-F", "97", "-p", "41,4711", "-t", "53", "-o", "p.data", "--for", "3s",
    ];
    let output = vm.run(&words);
    printed("record", &output);
    let told = String::from_utf8_lossy(&output.stderr);
    let (report, mut tasks) = tasks_of(&vm, "p.data");
    tasks.sort_unstable();
    assert_eq!(tasks, [(41, 51), (43, 53)], "{told}: {report}");
    let totals = &report["totals"];
    let (taken, left) = (totals["samples"].as_u64(), totals["left_out"].as_u64());
    assert!(taken > Some(10) && left > taken, "{totals}");
    assert_eq!(report["header"]["processes"], serde_json::json!([41, 4711]));
    assert!(told.contains(" samples of others "), "{told}");
    let absent = "no sample of the guest's process 4711";
    assert_eq!(
        told.matches(absent).count(),
        2,
        "soon, and at the end: {told}"
    );
    // The others are not in the file by name either.
    let bytes = std::fs::read(vm.path("p.data")).expect("a file");
    let text = String::from_utf8_lossy(&bytes);
    for (number, is_there) in [(1, true), (2, false), (3, true), (4, false), (5, false)] {
        for name in [format!("name{number}"), format!("/bin/file{number}")] {
            assert_eq!(text.contains(&name), is_there, "{name}");
        }
    }
    let text = printed("report", &vm.run(&["report", "-i", "p.data"]));
    assert!(text.contains(" samples of others "), "{text}");
}

/// Each has the descriptions of its own samples, whatever was described before.
#[test]
fn several_files_have_the_tasks_of_their_samples() {
    if skipped_without_kvm("several_files_have_the_tasks") {
        return;
    }
    let vm = five_threads();
    let words = [
        "record",
        "-a",
        "-F",
        "97",
        "--switch-output=2s",
        "-o",
        "s.data",
        "--for",
        "5s",
    ];
    let output = vm.run(&words);
    printed("record", &output);
    let told = String::from_utf8_lossy(&output.stderr);
    let named = |line: &str| {
        Some(
            line.split_whitespace()
                .find(|word| word.starts_with("s.data."))?
                .to_owned(),
        )
    };
    let files: Vec<String> = told.lines().filter_map(named).collect();
    assert!(files.len() >= 2, "{told}");
    for file in &files[..2] {
        let (report, mut tasks) = tasks_of(&vm, file);
        tasks.sort_unstable();
        let all: Vec<(u64, u64)> = (1..=5).map(|number| (40 + number, 50 + number)).collect();
        assert_eq!(tasks, all, "{file}: {told}: {report}");
    }
}
