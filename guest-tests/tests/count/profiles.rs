//! What `umpire count` writes for other tools: chains of calls, files of perf's and of Callgrind's.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use guest_tests::umpire;

use super::programs::is_there;
use super::{Count, TIMEOUT, compiled, fetched};

/// The same work by two ways, of which the second calls itself.
const WAYS: &str = r"
#define ALONE __attribute__((noipa))
ALONE void leaf(int turns) { for (volatile int turn = 0; turn < turns; turn++) ; }
ALONE void left(void) { leaf(1000); leaf(1000); }
ALONE void right(int deep) { if (deep) right(deep - 1); else leaf(3000); __asm__ volatile(``); }
int main(void) { left(); right(2); return 0; }
";

fn ways(folder: &Path) -> String {
    let source = WAYS.replace("``", "\"\"");
    compiled(folder, "ways", &source, &["-static"]);
    "./ways".to_owned()
}

/// Chains of `leaf` from `main` on, without the turns of its loop.
fn leaves(lines: &[(Vec<String>, u64)]) -> BTreeMap<Vec<&str>, u64> {
    let mut all = BTreeMap::new();
    for (chain, count) in lines {
        let main = chain.iter().position(|name| name == "main");
        if let Some(main) = main.filter(|_| chain.last().is_some_and(|last| last == "leaf")) {
            let chain = chain[main..].iter().map(String::as_str).collect();
            *all.entry(chain).or_insert(0) += count;
        }
    }
    all
}

fn folded(text: &str) -> Vec<(Vec<String>, u64)> {
    let line = |line: &str| {
        let (chain, count) = line.rsplit_once(' ').expect("a count");
        let chain = chain.split(';').map(str::to_owned).collect();
        (chain, count.parse().expect("a number"))
    };
    text.lines().map(line).collect()
}

/// What `perf script` prints of a file: of each sample the period, and the chain from the outermost
/// function on.
fn scripted(folder: &Path) -> Vec<(Vec<String>, u64)> {
    let output = Command::new("perf")
        .args(["script", "-F", "period,ip,sym", "-i", "perf.data"])
        .current_dir(folder)
        .output()
        .expect("perf");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output:?}");
    let samples = text
        .split("\n\n")
        .map(str::trim)
        .filter(|one| !one.is_empty());
    let sample = |sample: &str| {
        let mut lines = sample.lines();
        let period = lines.next().expect("a period").trim();
        let mut chain: Vec<String> = lines
            .map(|line| line.split_whitespace().nth(1).unwrap_or("").to_owned())
            .collect();
        chain.reverse();
        (chain, period.parse().expect("a number"))
    };
    samples.map(sample).collect()
}

#[test]
fn chains_of_calls_are_those_of_the_program() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let program = ways(here);
    let files = [
        "--folded",
        "folded",
        "--perf-data",
        "perf.data",
        "--callgrind",
        "out",
    ];
    let counted = Count::new(here).options(files).run(&[&program]);
    counted.ends(0, "program 0");
    // It is none of what is saved.
    assert!(counted.record()["counts"].get("contexts").is_none());
    let text = fs::read_to_string(here.join("folded")).expect("a file");
    let lines = folded(&text);
    let user = counted.total("user", "instructions");
    assert_eq!(lines.iter().map(|(_, count)| count).sum::<u64>(), user);
    assert!(lines.iter().all(|(chain, _)| chain[0] == "ways"), "{text}");
    let found = leaves(&lines);
    let chains = [
        vec!["main", "left", "leaf"],
        vec!["main", "right", "right", "right", "leaf"],
    ];
    assert_eq!(found.keys().cloned().collect::<Vec<_>>(), chains);
    // Two calls of 1,000 turns, and one of 3,000: a turn is the same in both.
    let [left, right] = chains.map(|chain| found[&chain]);
    let turn = (right - left) / 1_000;
    assert!(
        turn >= 3 && left > 2_000 * turn && right > 3_000 * turn,
        "{found:?}"
    );
    if is_there("perf.data", "perf") {
        let lines = scripted(here);
        assert_eq!(lines.iter().map(|(_, count)| count).sum::<u64>(), user);
        assert_eq!(leaves(&lines), found);
    }
}

/// It asks for dumps, and has forgotten what was before; a thread, and a process that becomes
/// another program.
const DUMPS: &str = r#"
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <valgrind/callgrind.h>
#define ALONE __attribute__((noipa))
ALONE void work(int turns) { for (volatile int turn = 0; turn < turns; turn++) ; }
static void *thread(void *none) { work(5000); return none; }
int main(int count, char **words) {
    pthread_t other;
    if (count > 1 && !strcmp(words[1], "die")) { raise(SIGUSR1); }
    work(1000);
    CALLGRIND_ZERO_STATS;
    work(2000);
    CALLGRIND_DUMP_STATS_AT("first");
    work(3000);
    pthread_create(&other, 0, thread, 0);
    pthread_join(other, 0);
    if (!fork()) { execl("/bin/true", "true", (char *)0); }
    wait(0);
    return 7;
}
"#;

/// By umpire, or by Valgrind itself.
fn profiled(valgrind: bool, here: &Path, words: &[&str]) -> Output {
    let mut command = if valgrind {
        Command::new("valgrind")
    } else {
        fetched();
        let mut command = Command::new(umpire::path());
        command.args(["count", "--timeout", TIMEOUT, "--as", "callgrind"]);
        command
    };
    command
        .arg("--tool=callgrind")
        .args(words)
        .current_dir(here);
    command.output().expect("it can be started")
}

/// What a folder has of a process's files: its lines about what it is of, by the name behind the
/// number of the process, which is written `N` and, of the second one, `M`.
fn profiles(folder: &Path) -> BTreeMap<String, Vec<String>> {
    let names = fs::read_dir(folder).expect("a folder");
    let names = names.map(|entry| entry.expect("a file").file_name());
    let names = names.map(|name| name.to_string_lossy().into_owned());
    let mut found = Vec::new();
    for name in names {
        let text = fs::read_to_string(folder.join(&name)).expect("text");
        let pid = |line: &str| line.strip_prefix("pid: ")?.parse::<u32>().ok();
        // Valgrind leaves an empty file where each thread has its own.
        let Some(pid) = text.lines().find_map(pid) else {
            continue;
        };
        found.push((pid, name, text));
    }
    let first = found.iter().map(|(pid, ..)| *pid).min();
    let mut all = BTreeMap::new();
    for (pid, name, text) in found {
        let letter = if first == Some(pid) { "N" } else { "M" };
        let about = ["part: ", "thread: ", "desc: Trigger: ", "events: "];
        let is_about = |line: &&str| about.iter().any(|about| line.starts_with(about));
        let lines = text.lines().filter(is_about).map(str::to_owned);
        all.insert(name.replace(&pid.to_string(), letter), lines.collect());
    }
    all
}

/// Instructions of functions of this name.
fn own(file: &Path, function: &str) -> u64 {
    let text = fs::read_to_string(file).expect("text");
    let name = format!("fn={function}");
    let after = text.lines().skip_while(|line| *line != name).nth(1);
    let cost = after.and_then(|line| line.split(' ').nth(1));
    cost.map_or(0, |cost| cost.parse().expect("a number"))
}

#[test]
fn files_of_callgrind_are_those_of_valgrind() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    compiled(here, "dumps", DUMPS, &["-pthread"]);
    let options = ["--compress-strings=no", "--callgrind-out-file=own/out.#%p"];
    let check = |more: &[&str]| {
        let words = [&options[..], more, &["./dumps"]].concat();
        let both = [false, true].map(|valgrind| {
            if valgrind && !is_there("callgrind", "valgrind") {
                return None;
            }
            let files = here.join("own");
            fs::create_dir(&files).expect("a folder");
            let output = profiled(valgrind, here, &words);
            assert_eq!(output.status.code(), Some(7), "{output:?}");
            let found = profiles(&files);
            let cost = |name: &str| {
                let file = fs::read_dir(&files)
                    .expect("a folder")
                    .map(|one| one.expect("one"));
                let file = file.map(|file| file.path());
                let mut file = file.filter(|file| file.to_string_lossy().ends_with(name));
                file.next().map(|file| own(&file, "work"))
            };
            let costs = [".1", ".1-01", "-02"].map(cost);
            fs::remove_dir_all(&files).expect("removed");
            Some((found, costs))
        });
        let [Some(ours), theirs] = both else {
            panic!("Umpire is there");
        };
        if let Some(theirs) = theirs {
            assert_eq!(ours, theirs, "{more:?}");
        }
        ours
    };
    let (found, _) = check(&[]);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["out.#N", "out.#N.1"]);
    let threads = ["--separate-threads=yes", "--trace-children=yes"];
    let (found, costs) = check(&threads);
    let names = ["out.#M-01", "out.#N-01", "out.#N-02", "out.#N.1-01"];
    assert!(
        names.iter().all(|name| found.contains_key(*name)),
        "{found:?}"
    );
    // Three thousand turns, and five thousand in the thread.
    let [_, first, second] = costs.map(|cost| cost.unwrap_or(0));
    assert!(first > 0 && second > 2 * first, "{costs:?}");
}

#[test]
fn a_harness_is_served_as_by_valgrind() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    compiled(here, "dumps", DUMPS, &["-pthread"]);
    // As gungraun gives them, which also asks for caches.
    let words = "--error-exitcode=0 --trace-children=yes --fair-sched=try --vgdb=no \
        --I1=32768,8,64 --D1=32768,8,64 --LL=8388608,16,64 --cache-sim=yes --compress-strings=no \
        --compress-pos=no --dump-line=yes --dump-instr=no --combine-dumps=no \
        --separate-threads=yes --toggle-collect=w*k --callgrind-out-file=a.out.#%p \
        --log-file=a.log.#%p ./dumps die";
    let words: Vec<&str> = words.split_whitespace().collect();
    let output = profiled(false, here, &words);
    // SIGUSR1.
    assert_eq!(output.status.signal(), Some(10), "{output:?}");
    // It may have booted the machine; the log is in its file, and there is no table.
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(
        told.lines().all(|line| line.starts_with("umpire: ")),
        "{told}"
    );
    let names = fs::read_dir(here).expect("a folder");
    let names = names.map(|entry| entry.expect("a file").file_name());
    let names: Vec<String> = names
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    let log = names
        .iter()
        .find(|name| name.starts_with("a.log.#"))
        .expect("a log");
    let pid = log.rsplit('#').next().expect("a number");
    let text = fs::read_to_string(here.join(log)).expect("text");
    for line in ["Command: ./dumps die", "Events    : Ir", "Collected : 0"] {
        assert!(text.contains(&format!("=={pid}== {line}\n")), "{text}");
    }
    assert!(
        text.contains("--cache-sim=yes: no cache is simulated"),
        "{text}"
    );
    assert!(names.contains(&format!("a.out.#{pid}-01")), "{names:?}");

    // What it collects is what the function executes, and its variables are those of the harness.
    let words = [
        "-q",
        "--toggle-collect=work",
        "--callgrind-out-file=b",
        "./dumps",
    ];
    let output = profiled(false, here, &words);
    assert_eq!(
        (output.status.code(), &*output.stderr),
        (Some(7), &b""[..]),
        "{output:?}"
    );
    let text = fs::read_to_string(here.join("b")).expect("text");
    let total = text.lines().find_map(|line| line.strip_prefix("totals: "));
    let [first, last] = ["b.1", "b"].map(|name| own_compressed(&here.join(name), "work"));
    assert_eq!(total, Some(last.to_string().as_str()), "{text}");
    // Two thousand turns, then three and five.
    assert!(last > 3 * first && last < 5 * first, "{first} {last}");

    let output = profiled(false, here, &["--dump-instr=yes", "./dumps"]);
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        told,
        "umpire: --as callgrind: --dump-instr=yes is not served: costs are those of functions, not \
         of instructions\n"
    );
}

/// Of a file whose names are numbers.
fn own_compressed(file: &Path, function: &str) -> u64 {
    let text = fs::read_to_string(file).expect("text");
    let is = |line: &&str| line.starts_with("fn=") && line.ends_with(&format!(" {function}"));
    let after = text.lines().skip_while(|line| !is(line)).nth(1);
    let cost = after.and_then(|line| line.split(' ').nth(1));
    cost.map_or(0, |cost| cost.parse().expect("a number"))
}

#[test]
fn files_that_cannot_be_written_are_named_first() {
    let folder = tempfile::tempdir().expect("a folder");
    for option in ["--folded", "--perf-data", "--callgrind"] {
        let words: [&OsStr; 2] = [option.as_ref(), "gone/file".as_ref()];
        let counted = Count::new(folder.path()).options(words).run(&["true"]);
        counted.ends(125, "umpire 125");
        counted.says(&[&format!("{option} gone/file: ")]);
    }
}
