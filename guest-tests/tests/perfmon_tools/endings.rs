//! Guests that end, or are killed, while they are watched, and guests that are no Linux: what
//! was measured is kept.

use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use guest_tests::micro::Written;
use guest_tests::umpire::{self, skipped_without_kvm};
use guest_tests::vm::Vm;
use iced_x86::code_asm::{CodeAssembler, ax, dx, eax, edx, rax, rcx, rdx};

use super::{RATES, boot};

const PATIENCE: Duration = Duration::from_secs(20);
/// Of the TSC, at most 2 s of it and at least half a second.
const TICKS: u64 = 2 << 30;
const PM1A_CONTROL: u32 = 0x604;
/// SLP_EN, and SLP_TYP 5.
const POWER_OFF: u32 = 1 << 13 | 5 << 10;

/// Computes for a while, and powers the machine off.
fn a_while(a: &mut CodeAssembler) -> Written {
    let mut again = a.create_label();
    let tsc = |a: &mut CodeAssembler| {
        a.rdtsc()?;
        a.shl(rdx, 32)?;
        a.or(rax, rdx)
    };
    tsc(a)?;
    a.mov(rcx, TICKS)?;
    a.add(rcx, rax)?;
    a.set_label(&mut again)?;
    tsc(a)?;
    a.cmp(rax, rcx)?;
    a.jb(again)?;
    a.mov(edx, PM1A_CONTROL)?;
    a.mov(eax, POWER_OFF)?;
    a.out(dx, ax)
}

fn start(vm: &Vm, words: &[&str]) -> Child {
    let mut command = vm.command(words);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("umpire can be started")
}

/// It ends by itself, soon and with status 0; what it has said.
fn end(child: Child) -> (String, String) {
    let began = Instant::now();
    let output: Output = child.wait_with_output().expect("an end");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, told) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{told}");
    assert!(began.elapsed() < PATIENCE, "{told}");
    (out, told)
}

/// A recording has samples, and said so in its last line; no other one says more than why
/// there are no names.
fn kept(vm: &Vm, file: &str, told: &str) {
    let lines: Vec<&str> = told.lines().collect();
    let Some((last, others)) = lines.split_last() else {
        panic!("nothing was said");
    };
    assert!(last.contains(&format!(" samples; {file} has ")), "{told}");
    let is_known = |line: &&str| line.contains("names");
    assert!(others.len() <= 1 && others.iter().all(is_known), "{told}");
    let output = vm.tool(&["script", "-i", file, "-F", "ip,ring"]);
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{file}"
    );
    let text = String::from_utf8_lossy(&output.stdout);
    let samples = text.lines().filter(|line| !line.starts_with('#')).count();
    let count = last
        .split_whitespace()
        .nth(1)
        .and_then(|count| count.parse().ok());
    assert!(samples > 20 && count == Some(samples), "{samples}: {told}");
}

fn await_counting(vm: &Vm) {
    let began = Instant::now();
    while !vm.printed(&["ls"]).contains("counting") {
        assert!(began.elapsed() < PATIENCE, "somebody counts");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Three tools watch the VM, the last one with `flags`, until `end_it` has ended it, and keep
/// what they have measured.
fn watched(vm: &Vm, flags: &[&str], end_it: impl FnOnce()) {
    let track = start(vm, &["track", "-c", "cycles", "-T", "0.1"]);
    let record = start(vm, &["record", "-F", "200", "-o", "plain.data"]);
    await_counting(vm);
    // More than there is time for.
    let words = [
        "record",
        "-g",
        "-F",
        "200",
        "-o",
        "chains.data",
        "--for",
        "60s",
    ];
    let chains = start(vm, &[&words[..], flags].concat());
    end_it();
    for (child, file) in [(chains, "chains.data"), (record, "plain.data")] {
        kept(vm, file, &end(child).1);
    }
    let (lines, told) = end(track);
    tracked(&lines);
    assert!(told.lines().count() <= 1, "{told}");
}

/// `track` has printed ticks, and what they come to.
fn tracked(lines: &str) {
    let of = |event: &str| {
        let lines = lines
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        let lines = lines.filter(|words| words.get(2) == Some(&event));
        let counts = lines.filter_map(|words| words.get(3)?.parse::<u64>().ok());
        counts.collect::<Vec<_>>()
    };
    let (ticks, ends) = (of("tick"), of("exit"));
    assert!(ticks.iter().sum::<u64>() > 0, "{lines}");
    assert_eq!(ends.len(), 1, "{lines}");
    assert!(ends[0] >= ticks.iter().sum(), "{lines}");
}

/// While a tool looks for longer than the VM is there.
fn ended_meanwhile(words: &[&str], after: Duration) -> (String, String) {
    let mut vm = boot(8, &[]);
    let child = start(&vm, words);
    std::thread::sleep(after);
    vm.stop();
    end(child)
}

#[test]
fn runs_that_were_made_are_printed() {
    if skipped_without_kvm("runs_that_were_made") {
        return;
    }
    // Between two of them, or in one: most of the time of a run is after that of a context.
    let words = [
        "stat", "--log-fd", "1", "-r", "50", "-x", ";", "-e", "cycles", "sleep", "0.3",
    ];
    let (out, told) = ended_meanwhile(&words, Duration::from_secs(2));
    assert!(told.contains("no further run was made: "), "{told}");
    let count = out.split(';').next().and_then(|it| it.parse::<u64>().ok());
    assert!(count.is_some_and(|count| count > 0), "{out}");
}

#[test]
fn an_interval_has_what_was_counted_in_it() {
    if skipped_without_kvm("an_interval_has") {
        return;
    }
    let words = [
        "stat",
        "--log-fd",
        "1",
        "-I",
        "400",
        "-x",
        ";",
        "-e",
        "cycles,vm-exits",
        "sleep",
        "4",
    ];
    let (out, told) = ended_meanwhile(&words, Duration::from_secs(2));
    let mut last = 0.0;
    let mut before = 0.0;
    let mut missing = 0;
    for line in out.lines() {
        let fields: Vec<&str> = line.split(';').map(str::trim).collect();
        let [time, count, _, _, ran, ..] = fields.as_slice() else {
            panic!("{line}");
        };
        let (time, ran): (f64, f64) = (time.parse().expect(line), ran.parse().expect(line));
        if time > last {
            (before, last) = (last, time);
        }
        // In nanoseconds; a vCPU's clock may differ a little.
        assert!(ran / 1e9 <= (last - before) * 1.1 + 0.05, "{line}: {out}");
        assert_ne!(*count, "<not supported>", "{out}");
        missing += usize::from(*count == "<not counted>");
    }
    assert!(missing >= 4, "{out}{told}");
}

/// From its first instruction to its last: `--resume` lets it go when everything counts.
#[test]
fn a_guest_that_powers_off() {
    if skipped_without_kvm("a_guest_that_powers_off") {
        return;
    }
    let rates = RATES.replace("COUNT", "8");
    let vm = Vm::boot_kernel(&umpire::path(), &rates, &["--paused"], a_while);
    watched(&vm, &["--resume"], || {});
}

#[test]
fn a_vm_that_is_killed() {
    if skipped_without_kvm("a_vm_that_is_killed") {
        return;
    }
    let vm = boot(8, &[]);
    watched(&vm, &[], || {
        std::thread::sleep(Duration::from_millis(2500));
        vm.signal("-KILL");
    });
    // There is nobody left to ask.
    let late = vm.tool(&["record", "--for", "1s"]);
    let told = String::from_utf8_lossy(&late.stderr);
    assert_eq!(
        (late.status.code(), told.lines().count()),
        (Some(2), 1),
        "{told}"
    );
}

/// What is no Linux has samples as before there were names, and it is said once why.
#[test]
fn what_is_no_linux_is_said() {
    if skipped_without_kvm("what_is_no_linux_is_said") {
        return;
    }
    let vm = boot(8, &[]);
    let words = ["record", "-g", "-F", "500", "--for", "1s", "-o", "a.data"];
    let output = vm.tool(&words);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{told}");
    kept(&vm, "a.data", &told);
    let why = "programs of the guest have no names: what runs is no Linux kernel, or one that \
               has just begun";
    assert_eq!(told.matches(why).count(), 1, "{told}");
    let map = vm.path("System.map");
    std::fs::write(&map, "0000000000100040 T hot_loop\n").expect("a file");
    // Without tasks a row is a symbol, and a stack is that of a vCPU.
    let map = map.display().to_string();
    let with_names = |words: &[&str]| {
        let words = [words, &["-i", "a.data", "--symbols", &map]].concat();
        vm.printed(&words)
    };
    let report = with_names(&["report"]);
    let rows: Vec<&str> = report
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect();
    assert!(rows.iter().any(|row| row.ends_with("hot_loop")), "{report}");
    assert!(
        !report.contains("Command") && !report.contains("[unknown]"),
        "{report}"
    );
    let folded = with_names(&["report", "--folded"]);
    assert!(
        folded
            .lines()
            .all(|line| line.contains(";vCPU 0;kernel;hot_loop ")),
        "{folded}"
    );
    let script = with_names(&["script", "-j", "-F", "pid,sym,callchain"]);
    assert!(
        script.contains("hot_loop") && !script.contains("\"pid\":1"),
        "{script}"
    );
}
