//! What others read in lines of `umpire script`, by the rules of three readers of `perf script`.
//!
//! The rules are in words of our own here; `guest-tests` runs real readers where there are any.

use std::collections::BTreeMap;

use inferno::collapse::Collapse;
use perfmon_abi::compact::{CallChain, ChainEnd};
use proptest::prelude::*;

use super::words;
use crate::profile::program_tests::{Place, START, chain, kernel, mapped, thread, user};
use crate::profile::test_elf::{OFFSET, elf};
use crate::profile::{Loss, LossKind, Record};

/// A sample as a reader takes it.
#[derive(Debug, PartialEq, Eq)]
struct Read {
    comm: String,
    pid: String,
    tid: String,
    /// As it is written; readers that take none have an empty one.
    time: String,
    period: String,
    /// The innermost first.
    stack: Vec<String>,
}

/// White space, digits, `/` and digits, white space: the first such place that has two letters
/// in front of it. So FlameGraph's collapser and speedscope find name and numbers of a task.
fn task_from_the_left(line: &str) -> Option<(String, String, String)> {
    let all: Vec<char> = line.chars().collect();
    if all.first()?.is_whitespace() {
        return None;
    }
    (2..all.len()).find_map(|at| {
        let mut rest = all[at..].iter().copied().peekable();
        let mut take = |has: fn(&char) -> bool| -> String {
            let mut taken = String::new();
            while let Some(one) = rest.next_if(has) {
                taken.push(one);
            }
            taken
        };
        let blank = take(|one| one.is_whitespace());
        let first = take(char::is_ascii_digit);
        let slash = take(|one| *one == '/');
        let second = take(char::is_ascii_digit);
        let end = take(|one| one.is_whitespace());
        let found = ![&blank, &first, &end].iter().any(|part| part.is_empty());
        let _ = slash;
        let comm = || all[..at].iter().collect::<String>();
        found.then(|| (comm().trim_end().to_owned(), first, second))
    })
}

/// A line of a stack: an address, a name, and one word in brackets behind it.
fn frame(line: &str) -> Option<String> {
    let line = line.trim_start();
    let end = line.find(|one: char| !one.is_alphanumeric() && one != '_')?;
    let (open, close) = (line.rfind(" (")?, line.rfind(')')?);
    let object = line.get(open + 2..close)?;
    if end == 0 || object.contains(char::is_whitespace) {
        return None;
    }
    let name = line.get(end..open)?.trim_start();
    let digits = |text: &str| {
        let digits = text.strip_prefix("0x");
        digits.is_some_and(|rest| rest.bytes().all(|one| one.is_ascii_hexdigit()))
    };
    let plain = match name.rsplit_once('+') {
        Some((plain, offset)) if digits(offset) => plain,
        _ => name,
    };
    // Both collapser and Firefox pass over what begins with a bracket.
    (!plain.is_empty() && !plain.starts_with('(')).then(|| plain.to_owned())
}

/// FlameGraph's: comments are left out, an empty line ends a sample, and what begins none is a
/// line of a stack, or it warns.
fn collapser(text: &str) -> Vec<Read> {
    let (mut all, mut open): (Vec<Read>, Option<Read>) = (Vec::new(), None);
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if line.is_empty() {
            all.extend(open.take());
        } else if let Some((comm, pid, tid)) = task_from_the_left(line) {
            let mut words = line.trim_end().rsplit(char::is_whitespace);
            let _event = words.next().filter(|event| event.ends_with(':'));
            let mut words = words.filter(|word| !word.is_empty());
            let period = words.next().unwrap_or_default().to_owned();
            let colon = words.next().is_some_and(|word| word.ends_with(':'));
            open = Some(Read {
                comm,
                pid,
                tid,
                time: String::new(),
                period: if colon { period } else { "1".to_owned() },
                stack: Vec::new(),
            });
        } else {
            let frame = frame(line).unwrap_or_else(|| panic!("not known: {line:?}"));
            open.as_mut().expect("a sample").stack.push(frame);
        }
    }
    all
}

/// speedscope's: paragraphs; the time is the first number with a point and a colon behind a
/// blank.
fn speedscope(text: &str) -> Vec<Read> {
    let paragraphs = text.split("\n\n").filter_map(|paragraph| {
        let mut lines = paragraph
            .lines()
            .filter(|line| !line.trim_start().starts_with('#'));
        let head = lines.next()?;
        let (comm, pid, tid) = task_from_the_left(head)?;
        let time = head.split_whitespace().skip(1).find_map(|word| {
            let (whole, rest) = word.strip_suffix(':')?.split_once('.')?;
            let digits =
                |text: &str| !text.is_empty() && text.bytes().all(|one| one.is_ascii_digit());
            (digits(whole) && digits(rest)).then(|| format!("{whole}.{rest}"))
        });
        Some(Read {
            comm,
            pid,
            tid,
            time: time.expect("a time"),
            period: String::new(),
            stack: lines.filter_map(frame).collect(),
        })
    });
    paragraphs.collect()
}

/// Firefox's: the last number with a colon is the time, and the last number in front of it,
/// which may have another and `/` before it, the thread.
fn firefox(text: &str) -> Vec<Read> {
    let mut lines = text.lines();
    let mut all = Vec::new();
    while let Some(line) = lines.next() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let blanks = || line.match_indices(char::is_whitespace).map(|(at, _)| at);
        let mut time = blanks().filter_map(|at| {
            let (time, _) = line[at + 1..].split_once(':')?;
            let plain = |one: u8| one.is_ascii_digit() || one == b'.';
            (!time.is_empty() && time.bytes().all(plain)).then_some((at, time))
        });
        let (end, time) = time
            .next_back()
            .unwrap_or_else(|| panic!("no time: {line:?}"));
        let before = &line[..end];
        let mut task = blanks().filter(|at| *at < end).filter_map(|at| {
            let is_word = |one: char| one.is_ascii_alphanumeric() || one == '_';
            let word = &before[at + 1..];
            let word = &word[..word
                .find(|one| !is_word(one) && one != '/')
                .unwrap_or(word.len())];
            let digits =
                |text: &&str| !text.is_empty() && text.bytes().all(|one| one.is_ascii_digit());
            let mut parts = word.split('/');
            let first = parts.next().filter(digits)?;
            let second = parts.next().filter(digits);
            Some((
                at,
                second.map(|_| first).unwrap_or_default(),
                second.unwrap_or(first),
            ))
        });
        let (at, pid, tid) = task
            .next_back()
            .unwrap_or_else(|| panic!("no task: {line:?}"));
        all.push(Read {
            comm: before[..at].trim().to_owned(),
            pid: pid.to_owned(),
            tid: tid.to_owned(),
            time: time.to_owned(),
            period: String::new(),
            stack: lines
                .by_ref()
                .take_while(|one| !one.trim().is_empty())
                .filter_map(frame)
                .collect(),
        });
    }
    all
}

/// Firefox takes a text for perf's by perf's header, or by a first line that has a name, numbers,
/// a CPU in brackets or none, and a time.
fn is_known_to_firefox(text: &str) -> bool {
    let first = text.lines().next().unwrap_or_default();
    let task = task_from_the_left(first);
    let words: Vec<&str> = first.split_whitespace().rev().collect();
    let is_time =
        |word: &&str| word.ends_with(':') && word.starts_with(|one: char| one.is_ascii_digit());
    let time = words.iter().position(is_time);
    let behind = |at: usize| words.get(at).is_some_and(|word| !word.contains('='));
    let near = time.is_some_and(|at| {
        let cpu = words.get(at + 1).is_some_and(|word| word.starts_with('['));
        behind(at + 1 + usize::from(cpu))
    });
    text.starts_with("# ========\n") || task.is_some() && near
}

/// What inferno, which reads what FlameGraph's collapser does, makes of it.
fn inferno(text: &str) -> BTreeMap<String, u64> {
    let mut folder = inferno::collapse::perf::Folder::default();
    let mut out = Vec::new();
    folder.collapse(text.as_bytes(), &mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    let mut all = BTreeMap::new();
    for line in text.lines() {
        let (stack, number) = line.rsplit_once(' ').unwrap();
        let (comm, frames) = stack.split_once(';').unwrap();
        let frames: Vec<String> = frames.split(';').map(tidy).collect();
        let number: u64 = number.parse().unwrap();
        *all.entry(format!("{comm};{}", frames.join(";")))
            .or_default() += number;
    }
    all
}

/// The same of what was sampled, without what inferno tidies in names of functions.
fn collapsed(samples: &[Read]) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for read in samples {
        let frames = read.stack.iter().rev().map(|name| tidy(name));
        let comm = read.comm.replace(' ', "_");
        let stack: Vec<String> = [comm].into_iter().chain(frames).collect();
        let period: u64 = read.period.parse().unwrap();
        *all.entry(stack.join(";")).or_default() += period;
    }
    all
}

/// Semicolons are colons there, and of what is behind a bracket only some is left.
fn tidy(name: &str) -> String {
    let name = name.replace(';', ":");
    name.split('(').next().unwrap_or_default().to_owned()
}

/// Each reader takes `samples` from the text of the profile.
fn check(place: &Place, samples: &[Read]) {
    for fields in [None, Some("+vm,+vcpu,+core,+set,+ring,+cr3")] {
        let text = place.script(fields, false);
        assert!(is_known_to_firefox(&text), "{text}");
        assert_eq!(inferno(&text), collapsed(samples), "{text}");
        let without = |time: bool, read: &Read| Read {
            comm: read.comm.clone(),
            pid: read.pid.clone(),
            tid: read.tid.clone(),
            time: if time {
                read.time.clone()
            } else {
                String::new()
            },
            period: if time {
                String::new()
            } else {
                read.period.clone()
            },
            stack: read.stack.clone(),
        };
        let expected = |time| {
            samples
                .iter()
                .map(|read| without(time, read))
                .collect::<Vec<_>>()
        };
        assert_eq!(collapser(&text), expected(false), "{text}");
        assert_eq!(speedscope(&text), expected(true), "{text}");
        assert_eq!(firefox(&text), expected(true), "{text}");
    }
}

fn at(record: Record, ns: u64) -> Record {
    match record {
        Record::Sample(mut sample) => {
            sample.time_ns = ns;
            Record::Sample(sample)
        }
        other => other,
    }
}

const KERNEL: [u64; 2] = [0xffff_ffff_8100_1010, 0xffff_ffff_8100_2020];

fn read(comm: &str, (pid, tid): (u32, u32), time: &str, stack: &[&str]) -> Read {
    Read {
        comm: comm.to_owned(),
        pid: pid.to_string(),
        tid: tid.to_string(),
        time: time.to_owned(),
        period: "1000".to_owned(),
        stack: stack.iter().map(|name| (*name).to_owned()).collect(),
    }
}

/// Losses in front and behind, samples without callers, programs without a name, samples of
/// nobody, one vCPU behind the other, and names of functions with what lines are made of.
#[test]
fn readers_of_perf_script_read_it() {
    const NAMES: [&str; 5] = [
        "(anonymous namespace)::run(int)",
        "worker 12",
        "std::map<int (*)(char), long>::find(int) const",
        "a;b (c)",
        "7 8/9",
    ];
    let loss = |time_ns| {
        Record::Loss(Loss {
            time_ns,
            vm: 7,
            vcpu: Some(0),
            kind: LossKind::Full(3),
        })
    };
    let program = |count: u64| {
        let addresses: Vec<u64> = (0..count).map(|at| START + OFFSET + 4 * at).collect();
        chain(&[], &addresses, ChainEnd::Broken)
    };
    let both = chain(&KERNEL, &[START + OFFSET], ChainEnd::Outermost);
    let place = Place::new(&[
        thread(1, 4_000_000, 4_000_001, "a"),
        thread(2, 40, 41, "tmux: server 5"),
        mapped(11, "/opt/my app/prog", ""),
        loss(1),
        at(user(START + OFFSET, 1, 11, program(5)), 5_000_000),
        at(kernel(KERNEL[0], 2, both), 1_001_000),
        loss(2_000_000),
        at(user(START + OFFSET, 0, 11, CallChain::default()), 3_000_000),
    ]);
    std::fs::create_dir_all(place.path("root/opt/my app")).unwrap();
    let functions: Vec<(&str, u64, u64)> = NAMES
        .iter()
        .zip((0x40_1000..).step_by(4))
        .map(|(name, address)| (*name, address, 4))
        .collect();
    let file = elf(0x40_1000, &[0xc3; 20], &functions);
    std::fs::write(place.path("root/opt/my app/prog"), file).unwrap();
    let shown = NAMES.map(words::symbol);
    let shown: Vec<&str> = shown.iter().map(String::as_str).collect();
    check(
        &place,
        &[
            read(
                r"tmux: server\x205",
                (40, 41),
                "0.001001",
                &["clear_page", "do_syscall_64", shown[0]],
            ),
            read("[unknown]", (0, 0), "0.003000", &shown[..1]),
            read("a", (4_000_000, 4_000_001), "0.005000", &shown),
        ],
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a program calls itself, readers take its name as it is written.
    #[test]
    fn no_name_of_a_thread_leads_readers_astray(
        names in proptest::collection::vec("[ a1/.:;#{\\[(x\u{a0}\u{2028}\\\\]{0,12}", 1..6),
        tid in prop_oneof![0u32..20, 9_990u32..10_010, Just(u32::MAX)],
    ) {
        let mut records = Vec::new();
        let mut samples = Vec::new();
        for (name, number) in names.iter().zip(1..) {
            records.push(thread(number, tid, tid, name));
            let own = chain(&KERNEL, &[], ChainEnd::Outermost);
            records.push(at(kernel(KERNEL[0], number, own), number * 1000));
            let time = format!("0.{number:06}");
            let stack = ["clear_page", "do_syscall_64"];
            samples.push(read(&words::comm(name), (tid, tid), &time, &stack));
        }
        check(&Place::new(&records), &samples);
    }
}
