//! Tests of the file for perf: what a reader of its records says of each sample is what
//! `umpire script` says, and so is what perf itself says.

mod guest;
mod reader;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use perfmon_abi::compact::CallChain;
use perfmon_abi::wire::programs::{Described, MappingInfo, TaskInfo};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use super::super::program_tests::{Place, kernel, mapped, thread, user};
use super::super::record::{Record, Sample};
use super::super::test_elf::{OFFSET, elf};
use reader::PerfFile;

/// Of a sample: whose, when, what, and where.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Line {
    time_ns: u64,
    comm: String,
    pid: u32,
    tid: u32,
    cpu: u32,
    period: u64,
    event: String,
    /// Where it was taken, and its callers.
    frames: Vec<Frame>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Frame {
    ip: u64,
    /// Empty where nobody looked for it.
    symbol: String,
    dso: String,
}

impl Frame {
    fn new(ip: u64, symbol: &str, dso: &str) -> Self {
        Self {
            ip,
            symbol: symbol.to_owned(),
            dso: dso.to_owned(),
        }
    }
}

const FIELDS: &str = "comm,pid,tid,vcpu,time,period,event,ip,sym,dso,callchain";

/// What `umpire script` says, in the order of time.
fn ours(place: &Place) -> Vec<Line> {
    ours_of(place, &[])
}

/// The same of samples that the words of a command line choose.
fn ours_of(place: &Place, words: &[&str]) -> Vec<Line> {
    let text = place.script_with(words, Some(FIELDS), true);
    let mut lines: Vec<Line> = text.lines().map(our_line).collect();
    lines.sort();
    lines
}

fn our_line(text: &str) -> Line {
    let json: serde_json::Value = serde_json::from_str(text).unwrap();
    let number = |key: &str| json[key].as_u64().unwrap();
    let small = |key: &str| u32::try_from(number(key)).unwrap();
    let word = |json: &serde_json::Value| json.as_str().unwrap_or("[unknown]").to_owned();
    let frame = |json: &serde_json::Value| {
        let digits = json["ip"].as_str()?.strip_prefix("0x")?;
        let ip = u64::from_str_radix(digits, 16).unwrap();
        Some(Frame::new(ip, &word(&json["symbol"]), &word(&json["dso"])))
    };
    let is_known = !json["pid"].is_null();
    let id = |key: &str| if is_known { small(key) } else { super::NOBODY };
    let chain = json["callchain"].as_array();
    Line {
        time_ns: number("time_ns"),
        comm: word(&json["comm"]),
        pid: id("pid"),
        tid: id("tid"),
        cpu: small("vcpu"),
        period: number("period"),
        event: word(&json["event"]),
        // A frame that is missing has no address; perf has no word for that.
        frames: match chain {
            Some(chain) => chain.iter().filter_map(frame).collect(),
            None => frame(&json).into_iter().collect(),
        },
    }
}

/// The export of a profile, in its folder.
fn export(place: &Place) -> std::path::PathBuf {
    export_of(place, &[])
}

/// The same of samples that the words of a command line choose.
fn export_of(place: &Place, words: &[&str]) -> std::path::PathBuf {
    let file = place.path("perf.data");
    let name = file.display().to_string();
    place.printed(&[words, &["--perf-data", &name]].concat());
    file
}

/// What the installed perf prints, as `words` say; none where there is no perf.
fn perf(test: &str, file: &Path, words: &[&str]) -> Option<String> {
    let mut perf = Command::new("perf");
    // Nothing of this user's settings, nor a pager.
    perf.env("PERF_CONFIG", "/dev/null").env("PAGER", "cat");
    match perf.args(words).arg("-i").arg(file).output() {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "perf {words:?}: {errors}");
            Some(text)
        }
        Err(error) => {
            println!("skipped: {test}: perf cannot be run: {error}");
            None
        }
    }
}

/// What `perf script` says with these options more, in the order of time.
fn perfs(test: &str, place: &Place, more: &[&str]) -> Option<Vec<Line>> {
    let fields = "comm,pid,tid,cpu,time,period,event,ip,sym,dso";
    let words = [&["script", "--ns", "-F", fields], more].concat();
    let text = perf(test, &place.path("perf.data"), &words)?;
    let mut lines: Vec<Line> = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        match line.strip_prefix('\t') {
            Some(frame) => lines.last_mut().unwrap().frames.push(perf_frame(frame)),
            None => lines.push(perf_line(line)),
        }
    }
    lines.sort();
    Some(lines)
}

/// `comm pid/tid [cpu] seconds.nanoseconds: period event: ip symbol (dso)`
fn perf_line(line: &str) -> Line {
    let line = line.trim_start();
    let at = line.find(" [0").unwrap_or_else(|| panic!("{line}"));
    let (whose, rest) = line.split_at(at);
    let (comm, ids) = whose.trim_end().rsplit_once(' ').unwrap();
    let (pid, tid) = ids.split_once('/').unwrap();
    let mut words = rest.split_whitespace();
    let mut next = || words.next().unwrap_or_else(|| panic!("{line}"));
    let cpu = next().trim_matches(['[', ']']).to_owned();
    let time = next().trim_end_matches(':').replace('.', "");
    let period = next().parse().unwrap();
    let event = next();
    let place = rest.split_once(event).unwrap().1;
    Line {
        time_ns: time.parse().unwrap(),
        comm: comm.trim().to_owned(),
        pid: pid.trim().parse().unwrap(),
        tid: tid.parse().unwrap(),
        cpu: cpu.parse().unwrap(),
        period,
        event: event.trim_end_matches(':').to_owned(),
        frames: match place.trim() {
            "" => Vec::new(),
            place => vec![perf_frame(place)],
        },
    }
}

/// `ip symbol (dso)`
fn perf_frame(text: &str) -> Frame {
    let (ip, rest) = text.trim().split_once(' ').unwrap();
    let (symbol, dso) = rest.rsplit_once(" (").unwrap();
    let ip = u64::from_str_radix(ip, 16).unwrap();
    Frame::new(ip, symbol, dso.strip_suffix(')').unwrap())
}

/// What a reader of the records says; symbols are in no record.
fn read(place: &Place) -> Vec<Line> {
    let mut lines = PerfFile::parse(&fs::read(place.path("perf.data")).unwrap()).lines();
    lines.sort();
    lines
}

fn without_symbols(lines: &[Line]) -> Vec<Line> {
    let mut lines = lines.to_vec();
    let frames = lines.iter_mut().flat_map(|line| &mut line.frames);
    frames.for_each(|frame| frame.symbol.clear());
    lines.sort();
    lines
}

/// perf has addresses of chains within files, from 6.1 on; ours are the program's.
fn within_files(mut lines: Vec<Line>) -> Vec<Line> {
    let frames = lines.iter_mut().flat_map(|line| &mut line.frames);
    let programs = frames.filter(|frame| frame.ip < 1 << 63);
    programs.for_each(|frame| frame.ip %= guest::SLOT);
    lines.sort();
    lines
}

fn at(time_ns: u64, record: Record) -> Record {
    match record {
        Record::Sample(sample) => Record::Sample(Sample { time_ns, ..sample }),
        other => other,
    }
}

fn mapping(info: MappingInfo) -> Record {
    Record::Described(Described::Mapping(info))
}

fn task(info: TaskInfo) -> Record {
    Record::Described(Described::Task(info))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever a guest does, the records say of each sample what we say.
    #[test]
    fn records_say_what_we_say(plan in guest::plans()) {
        let place = Place::with_events(2, &guest::records(&plan));
        export_of(&place, plan.words());
        prop_assert_eq!(read(&place), without_symbols(&ours_of(&place, plan.words())));
    }
}

/// And perf reads the records as we do.
#[test]
fn perf_says_what_we_say() {
    const TEST: &str = "perf_says_what_we_say";
    let nobody = Place::new(&[]);
    export(&nobody);
    match perfs(TEST, &nobody, &[]) {
        Some(none) => assert_eq!(none, []),
        None => return,
    }
    let cases = ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(48)
    };
    // The same guests each time: the file is read by a program that may not be there.
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(cases, rng);
    let seen = RefCell::new(BTreeSet::new());
    let run = runner.run(&guest::plans(), |plan| {
        let place = Place::with_events(2, &guest::records(&plan));
        guest::put_files(&place);
        export_of(&place, plan.words());
        let kallsyms = place.path("perf.data.kallsyms").display().to_string();
        let root = place.path("root").display().to_string();
        let more = ["--kallsyms", &kallsyms, "--symfs", &root];
        if let Some(found) = perfs(TEST, &place, &more) {
            let ours = ours_of(&place, plan.words());
            let frames = ours.iter().flat_map(|line| &line.frames);
            let symbols = frames.map(|frame| frame.symbol.clone());
            seen.borrow_mut().extend(symbols);
            prop_assert_eq!(within_files(found), within_files(ours));
        }
        Ok(())
    });
    run.unwrap_or_else(|error| panic!("{error}"));
    let seen = seen.into_inner();
    let all = ["[unknown]", "clear_page", "nft_do_chain", "of_a", "of_prog"];
    let missing = all.into_iter().find(|symbol| !seen.contains(*symbol));
    assert!(
        seen.is_empty() || missing.is_none(),
        "{missing:?}: {seen:?}"
    );
}

/// perf reads no names unless there is a kernel, and its modules' are among these.
#[test]
fn a_module_alone_has_its_names() {
    let place = Place::new(&[
        thread(1, 40, 40, "who"),
        at(1000, kernel(0xffff_ffff_8100_1010, 1, CallChain::default())),
        at(2000, kernel(0xffff_ffff_c000_0123, 1, CallChain::default())),
    ]);
    let words = ["--dsos", "[nf_tables]"];
    export_of(&place, &words);
    let kallsyms = place.path("perf.data.kallsyms").display().to_string();
    let more = ["--kallsyms", &kallsyms];
    if let Some(lines) = perfs("a_module_alone_has_its_names", &place, &more) {
        assert_eq!(lines, ours_of(&place, &words));
        assert_eq!(lines[0].frames[0].symbol, "nft_do_chain");
    }
}

/// A thread that is renamed and back, and an address that two libraries have in turn.
#[test]
fn a_change_back_is_a_change() {
    let mut records = vec![
        thread(1, 40, 41, "waits"),
        thread(2, 40, 41, "works"),
        mapped(11, "/opt/one.so", ""),
        mapped(12, "/opt/two.so", ""),
    ];
    let turns = [(1, 11), (2, 12), (1, 11), (1, 12), (2, 11), (1, 0), (1, 11)];
    for (time, (task, mapping)) in (1000..).step_by(1000).zip(turns) {
        let sample = user(0x5555_0000_1000, task, mapping, CallChain::default());
        records.push(at(time, sample));
    }
    let place = Place::new(&records);
    export(&place);
    let lines = read(&place);
    let said: Vec<_> = lines
        .iter()
        .map(|line| format!("{} {}", line.comm, line.frames[0].dso))
        .collect();
    let expected = [
        "waits /opt/one.so",
        "works /opt/two.so",
        "waits /opt/one.so",
        "waits /opt/two.so",
        "works /opt/one.so",
        "waits [unknown]",
        "waits /opt/one.so",
    ];
    assert_eq!(said, expected);
    if let Some(lines) = perfs("a_change_back_is_a_change", &place, &[]) {
        assert_eq!(lines, ours(&place));
    }
}

/// Where the ring was not sampled, a name of the kernel or the address tells.
#[test]
fn a_sample_without_a_ring_is_where_we_say() {
    let sample = |time, ip, mapping| match at(time, user(ip, 1, mapping, CallChain::default())) {
        Record::Sample(sample) => Record::Sample(Sample {
            ring: None,
            ..sample
        }),
        other => other,
    };
    let place = Place::new(&[
        thread(1, 40, 40, "who"),
        mapped(11, "/opt/one.so", ""),
        sample(1000, 0xffff_ffff_8100_1010, 0),
        sample(2000, 0xffff_ffff_9000_0000, 0),
        sample(3000, 0x1234, 0),
        sample(4000, 0x5555_0000_1000, 11),
    ]);
    export(&place);
    assert_eq!(read(&place), without_symbols(&ours(&place)));
}

/// Of two vCPUs each has its samples in order, and the file has one vCPU's first.
#[test]
fn a_change_is_told_when_it_was() {
    let sample = |time, task, vcpu| match at(time, kernel(0x10, task, CallChain::default())) {
        Record::Sample(sample) => Record::Sample(Sample { vcpu, ..sample }),
        other => other,
    };
    let place = Place::new(&[
        thread(1, 40, 40, "first"),
        thread(2, 40, 40, "second"),
        sample(1000, 1, 0),
        sample(3000, 1, 0),
        sample(5000, 2, 0),
        sample(2000, 2, 1),
        sample(4000, 2, 1),
        sample(6000, 1, 1),
    ]);
    export(&place);
    let comms: Vec<_> = read(&place).into_iter().map(|line| line.comm).collect();
    let expected = ["first", "second", "first", "second", "second", "first"];
    assert_eq!(comms, expected);
}

/// perf takes a part of the time of what the header says that there is.
#[test]
fn a_part_of_the_time_is_one_of_all_samples() {
    let sample = |ms: u64| {
        let sample = user(0x1000, 1, 0, CallChain::default());
        at(ms * 1_000_000, sample)
    };
    let samples = [700, 100, 400, 200, 1100].map(sample);
    let place = Place::new(&[&[thread(1, 40, 40, "who")], &samples[..]].concat());
    let file = export(&place);
    let read = PerfFile::parse(&fs::read(&file).unwrap());
    assert_eq!(read.sampled_ns, Some((100_000_000, 1_100_000_000)));
    const TEST: &str = "a_part_of_the_time_is_one_of_all_samples";
    if let Some(lines) = perfs(TEST, &place, &["--time", "50%/1"]) {
        let times: Vec<u64> = lines.iter().map(|line| line.time_ns / 1_000_000).collect();
        assert_eq!(times, [100, 200, 400]);
    }
    let none = Place::new(&[]);
    let file = export(&none);
    assert_eq!(PerfFile::parse(&fs::read(file).unwrap()).sampled_ns, None);
}

/// A number that another process or thread has later.
#[test]
fn who_has_a_number_later_is_another() {
    let of = |number, pid, tid, started_ns| {
        task(TaskInfo {
            number,
            pid,
            tid,
            comm: format!("t{number}"),
            process: format!("p{pid}"),
            started_ns,
            kernel: false,
            inner_pid: 0,
            root: String::new(),
        })
    };
    let mut records = vec![
        of(1, 5, 5, 10),
        of(2, 5, 7, 20),
        // The number of a thread is a process's, then a thread's again.
        of(3, 7, 7, 30),
        of(4, 9, 7, 40),
        of(5, 5, 5, 50),
        mapped(11, "/opt/one.so", ""),
        mapped(12, "/opt/two.so", ""),
    ];
    let turns = [
        (1, 11),
        (2, 11),
        (3, 0),
        (3, 12),
        (1, 11),
        (4, 0),
        (5, 0),
        (5, 12),
    ];
    for (time, (task, mapping)) in (1000..).step_by(1000).zip(turns) {
        let sample = user(0x5555_0000_1000, task, mapping, CallChain::default());
        records.push(at(time, sample));
    }
    let place = Place::new(&records);
    export(&place);
    assert_eq!(read(&place), without_symbols(&ours(&place)));
    if let Some(lines) = perfs("who_has_a_number_later_is_another", &place, &[]) {
        assert_eq!(lines, ours(&place));
    }
}

/// A profile says what a mapping is that its sample is not in, or whose end is before its start.
#[test]
fn what_makes_no_sense_is_told_page_by_page() {
    let odd = |number, start, end| {
        mapping(MappingInfo {
            number,
            start,
            end,
            name: format!("/opt/{number}.so"),
            ..MappingInfo::default()
        })
    };
    let user = |ip, mapping| user(ip, 1, mapping, CallChain::default());
    let place = Place::new(&[
        thread(1, 40, 40, "odd"),
        odd(11, 0x9000, 0x1000),
        odd(12, 0x1_0000, 0x2_0000),
        odd(13, 0, u64::MAX),
        at(1000, user(0x5000, 11)),
        at(2000, user(0x3_0000, 12)),
        at(3000, user(0x3_1000, 13)),
        at(4000, user(0x3_1000, 0)),
        at(5000, user(u64::MAX, 12)),
        at(6000, user(u64::MAX - 1, 77)),
    ]);
    export(&place);
    let read = read(&place);
    let ours = without_symbols(&ours(&place));
    // The last address of all cannot be in front of an end.
    assert_eq!(read[..4], ours[..4]);
    assert_eq!(read.len(), 6);
}

/// The names of the kernel, where samples have none around them, by perf's rule of where a
/// symbol ends.
#[test]
fn names_of_the_kernel_end_where_they_do() {
    let check = |addresses: &[u64], expected: &str| {
        let base = 0xffff_ffff_8100_0000;
        let samples = addresses
            .iter()
            .map(|at| kernel(base + at, 1, CallChain::default()));
        let place = Place::new(&samples.collect::<Vec<_>>());
        export(&place);
        let text = fs::read_to_string(place.path("perf.data.kallsyms")).unwrap();
        let short = text.replace("ffffffff8", "").replace("ffffffff", "");
        let short = short.replace("\t", " ");
        assert_eq!(short.lines().collect::<Vec<_>>().join(", "), expected);
    };
    // clear_page is from 1000 to 2000, do_syscall_64 from there to 3000, the module's at
    // c000_0000 ends with its page.
    check(&[], "");
    check(
        &[0x1010],
        "1000000 T _text, 1001000 T clear_page, 1002000 t unknown",
    );
    check(
        &[0x1010, 0x2010],
        "1000000 T _text, 1001000 T clear_page, 1002000 T do_syscall_64, 1003000 t unknown",
    );
    // Far above and below.
    check(
        &[0x1010, 0x9010],
        "1000000 T _text, 1001000 T clear_page, 100a000 t [unknown]",
    );
    // In a module alone, and with what has no name in front of it.
    check(
        &[0x3f00_0123],
        "bffff000 T _text, c0000000 T nft_do_chain [nf_tables], c0001000 t unknown [nf_tables]",
    );
    check(
        &[0x3eff_f800, 0x3f00_0123],
        "bfffe000 T _text, bffff000 t [unknown], c0000000 T nft_do_chain [nf_tables], \
         c0001000 t unknown [nf_tables]",
    );
    // No name at all.
    check(&[0x9010], "1008000 T _text, 100a000 t [unknown]");
    // Behind the page of a symbol's beginning.
    check(
        &[0x3010, 0x4010],
        "1002000 T _text, 1003000 T _etext, 1005000 t [unknown]",
    );
}

#[test]
fn what_is_near_behind_a_name_does_not_have_it() {
    let check = |nameless: &[u64], named: &str, expected: &str| {
        let nameless = nameless.iter().copied().collect();
        let text = super::kallsyms::Kallsyms::new(0x1000, &nameless).text(named);
        let short = text.replace("000000000000", "").replace('\t', " ");
        assert_eq!(short.lines().collect::<Vec<_>>().join(", "), expected);
    };
    let near = "0000000000002010 t f\n0000000000002100 d .\n";
    check(
        &[0x2100],
        near,
        "1000 T _text, 2010 T f, 2100 t unknown, 3000 t [unknown]",
    );
    check(
        &[0x3fff],
        near,
        "1000 T _text, 2010 T f, 2100 t unknown, 4000 t [unknown]",
    );
    check(&[0x4000], near, "1000 T _text, 2010 T f, 5000 t [unknown]");
    // A function that is longer than perf would have it.
    let long = "0000000000002010 t f\n0000000000005000 d .\n";
    check(
        &[0x9000],
        long,
        "1000 T _text, 2010 T f, 5000 t unknown, a000 t [unknown]",
    );
    // In front of all.
    let expected = "1000 T _text, 2000 t [unknown], 3010 T f, 3100 t unknown";
    let higher = near.replace("20", "30").replace("21", "31");
    check(&[0x2000], &higher, expected);
    // Another one behind it, near or far.
    let two = format!("{near}0000000000002300 t g\n0000000000002400 d .\n");
    let expected = "1000 T _text, 2010 T f, 2100 t unknown, 2300 T g, 2400 t unknown";
    check(&[0x2200], &two, expected);
    let two = format!("{near}0000000000009300 t g\n0000000000009400 d .\n");
    let expected = "1000 T _text, 2010 T f, 8000 t [unknown], 9300 T g, 9400 t unknown";
    check(&[0x7000], &two, expected);
    let module = format!("{near}0000000000009300 t g\t[m]\n0000000000009400 d .\t[m]\n");
    let expected = "1000 T _text, 2010 T f, 2100 t unknown, 9300 T g [m], 9400 t unknown [m]";
    check(&[], &module, expected);
}

const JIT: u32 = 0x3f_fff1;

/// Removes a file when it goes.
struct Removed(std::path::PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// A process of this host with the number of one of the guest has left names of just-in-time
/// code, and the guest ran a program of which this host has another by the same name.
#[test]
fn perf_takes_no_name_of_this_host_for_a_program() {
    const TEST: &str = "perf_takes_no_name_of_this_host_for_a_program";
    let jit = Removed(format!("/tmp/perf-{JIT}.map").into());
    fs::write(&jit.0, "0 ffffffffffff of_this_host\n").unwrap();
    let program = super::super::program_tests::Program::own();
    let own = std::env::current_exe().unwrap().display().to_string();
    let names = [
        ("//anon", false),
        ("[heap]", false),
        ("[stack]", false),
        ("[stack:41]", false),
        ("[vdso]", false),
        ("[vvar]", false),
        ("[vsyscall]", false),
        ("[uprobes]", false),
        ("/dev/zero", true),
        ("/memfd:jit", true),
        ("/SYSV0000002a", true),
        ("/anon_hugepage", true),
        (&own, false),
        (&jit.0.display().to_string(), false),
        ("[kernel.kallsyms]", false),
        ("[nf_tables]", false),
    ];
    let mut records = vec![thread(1, JIT, JIT, "node")];
    let mut numbered = 2u64..;
    for ((name, deleted), number) in names.iter().zip(&mut numbered) {
        let start = number << 32;
        records.push(mapping(MappingInfo {
            number,
            start,
            end: start + (1 << 32),
            name: (*name).to_owned(),
            deleted: *deleted,
            ..MappingInfo::default()
        }));
        let sample = user(start + program.main, 1, number, CallChain::default());
        records.push(at(number * 1000, sample));
    }
    // So that there is a module.
    records.push(at(
        900_000,
        kernel(0xffff_ffff_c000_0123, 1, CallChain::default()),
    ));
    let place = Place::new(&records);
    export(&place);
    // A file without these words would be opened here.
    let file = PerfFile::parse(&fs::read(place.path("perf.data")).unwrap());
    let told: Vec<_> = file.mappings().collect();
    for ((_, is_code, id), (name, _)) in told.iter().zip(&names) {
        let memory = [
            "//anon",
            "[heap]",
            "[stack",
            "/dev/zero",
            "/SYSV",
            "/anon_h",
        ];
        let is_memory = memory.iter().any(|begin| name.starts_with(begin));
        assert_eq!(*is_code, !is_memory, "{name}");
        assert!(id.starts_with(b"ump:"), "{name}: {id:?}");
    }
    assert_eq!(told.len(), names.len());
    assert!(file.build_ids["[vdso]"].starts_with(b"ump:"));
    let kallsyms = place.path("perf.data.kallsyms").display().to_string();
    let root = place.path("root").display().to_string();
    let ways: [&[&str]; 3] = [&[], &["--kallsyms", &kallsyms], &["--symfs", &root]];
    for more in ways {
        let Some(lines) = perfs(TEST, &place, more) else {
            return;
        };
        let programs: Vec<_> = lines.iter().take(names.len()).collect();
        for (line, (name, _)) in programs.iter().zip(&names) {
            let frame = &line.frames[0];
            assert_eq!(frame.symbol, "[unknown]", "{name} {more:?}");
            // What perf reads or has for itself has another name.
            let is_perfs = ["/tmp/perf-", "[kernel", "[nf_"];
            let is_perfs = is_perfs.iter().any(|begin| name.starts_with(begin));
            let before = if is_perfs { "0:0" } else { "" };
            assert_eq!(frame.dso, format!("{before}{name}"), "{more:?}");
        }
    }
}

/// Whoever exports without the guest's files is told what perf will not find.
#[test]
fn who_gives_no_files_is_told_so() {
    let notes = |build_id: &str, with_files: bool| {
        let place = Place::new(&[
            thread(1, 40, 40, "who"),
            mapped(11, "/opt/one.so", build_id),
            mapped(12, "//anon", ""),
            mapped(13, "[vdso]", ""),
            mapping(MappingInfo {
                number: 14,
                name: "/memfd:jit".to_owned(),
                deleted: true,
                ..MappingInfo::default()
            }),
        ]);
        let mut options = place.options();
        options.perf_data = Some(place.path("perf.data"));
        if !with_files {
            options.profile.symfs.clear();
        }
        let mut notes = Vec::new();
        super::super::report(&options, &mut Vec::new(), &mut notes).unwrap();
        String::from_utf8(notes).unwrap()
    };
    let told = notes("", false);
    assert!(told.contains("1 of the guest's files"), "{told}");
    assert!(
        told.contains("/opt/one.so for one: give --symfs DIR"),
        "{told}"
    );
    assert_eq!(notes("00112233", false), "");
    assert!(!notes("", true).contains("build ids are not known"));
}

/// Neither for the kernel, whose names are beside the file or nowhere.
#[test]
fn perf_takes_no_name_of_this_host_for_the_kernel() {
    const TEST: &str = "perf_takes_no_name_of_this_host_for_the_kernel";
    let addresses = [
        0xffff_ffff_8100_1010u64,
        0xffff_ffff_8120_0010,
        0xffff_ffff_8180_0010,
        0xffff_ffff_c000_0123,
    ];
    let mut records = vec![thread(1, 40, 40, "init")];
    for (time, address) in (1000..).step_by(1000).zip(addresses) {
        records.push(at(time, kernel(address, 1, CallChain::default())));
    }
    let place = Place::new(&records);
    export(&place);
    let file = PerfFile::parse(&fs::read(place.path("perf.data")).unwrap());
    assert_eq!(file.build_ids["[kernel.kallsyms]"].len(), 20);
    assert_eq!(file.build_ids["[nf_tables]"].len(), 20);
    let Some(lines) = perfs(TEST, &place, &[]) else {
        return;
    };
    for line in &lines {
        let symbol = &line.frames[0].symbol;
        // A name of its own there may be, of the module that has one.
        assert_eq!(symbol, "[unknown]", "{line:?}");
    }
    let ids = perf(TEST, &place.path("perf.data"), &["buildid-list"]).unwrap();
    assert!(ids.contains(" [kernel.kallsyms]\n"), "{ids}");
    let kallsyms = place.path("perf.data.kallsyms").display().to_string();
    let lines = perfs(TEST, &place, &["--kallsyms", &kallsyms]).unwrap();
    assert_eq!(lines, ours(&place));
}
