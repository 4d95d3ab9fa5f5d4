//! Counts against those of two others, who count in other ways: Callgrind, and single steps on
//! this machine's processor. Where the two disagree the steps are right.

mod binary;
mod callgrind;
mod functions;
mod stepped;

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::Path;
use std::process::Command;

use bench_programs::{HostError, PROGRAMS, ProgramFile, as_command};

use super::programs::{is_there, words};
use super::{Count, Counted, ENVIRONMENT, compiled};
use functions::{Functions, PLTS, Tally};

/// Instructions by file and place in it.
type Spots = HashMap<(String, u64), u64>;

/// What makes the C library take one path on three processors: of what they have beyond each
/// other, it uses nothing.
const NO_AVX: (&str, &str) = (
    "GLIBC_TUNABLES",
    "glibc.cpu.hwcaps=-AVX_Fast_Unaligned_Load,-Fast_Unaligned_Copy,-SSSE3,-AVX,-AVX2,-AVX512F,\
     -AVX512VL,-AVX512BW,-BMI1,-BMI2,-LZCNT,-MOVBE,-ERMS,-FSRM,-RTM,-XSAVE,-XSAVEC",
);
/// Who did not get to count, in the words that `test.sh` looks for.
fn skipped(test: &str, error: &dyn std::fmt::Display) {
    println!("skipped: {test}: valgrind cannot be started: {error}");
}

#[test]
fn programs_of_the_bench_count_as_under_callgrind() {
    const TEST: &str = "programs_of_the_bench_count_as_under_callgrind";
    let Some(image) = bench_programs::image() else {
        println!("skipped: {TEST}: the Rust target x86_64-unknown-none is missing");
        return;
    };
    let file = ProgramFile::new(image).expect("a file");
    let path = file.path().display().to_string();
    let folder = tempfile::tempdir().expect("a folder");
    for program in PROGRAMS {
        let callgrind = match file.run_in_callgrind(&program, 1) {
            Err(HostError::Start { error, .. }) => return skipped(TEST, &error),
            callgrind => callgrind.expect(program.name),
        };
        let [letter, rounds] = as_command(&program, 1);
        let counted = Count::new(folder.path())
            .options(["-e", "instructions:u"])
            .run(&[&path, &letter, &rounds]);
        counted.ends(0, "program 0");
        let result = counted.output.stdout.first_chunk().copied();
        assert_eq!(result.map(u64::from_le_bytes), Some(callgrind.run.result));
        let count = counted.total("user", "instructions");
        println!(
            "{}: {count} against {}",
            program.name, callgrind.instructions
        );
        assert!(
            count.abs_diff(callgrind.instructions) <= 200,
            "{}",
            program.name
        );
    }
}

/// Why somebody else counts another number in a function: a difference without one of these is a
/// fault.
struct Cause {
    object: &'static str,
    /// Empty for all of the file's.
    function: &'static str,
    why: &'static str,
}

const LOADER: &str = "ld-linux-x86-64.so.2";
const CAUSES: [Cause; 4] = [
    Cause {
        object: LOADER,
        function: "",
        why: "start-up: Valgrind has a library of its own loaded, in which each name is looked up \
              first; and each processor says otherwise what it is",
    },
    Cause {
        object: "repeats",
        function: "copy",
        why: "REP: Callgrind counts each iteration",
    },
    Cause {
        object: "[vdso]",
        function: "",
        why: "vDSO: under Callgrind there is none; that of another kernel is another",
    },
    Cause {
        object: "libc.so.6",
        function: "__clock_gettime",
        why: "vDSO: without it the clock is read by a system call",
    },
];

impl Cause {
    fn of(object: &str, function: &str) -> Option<&'static Self> {
        CAUSES.iter().find(|cause| {
            let all = cause.function.is_empty();
            cause.object == object && (all || cause.function == function)
        })
    }
}

/// A program that repeats a string instruction, and asks for the time, so many times.
const REPEATS: &str = r#"
#include <stdlib.h>
#include <time.h>
static char from[1000], to[1000];
__attribute__((noinline)) void copy(void) {
    void *into = to, *out_of = from;
    unsigned long bytes = sizeof to;
    __asm__ volatile("rep movsb" : "+D"(into), "+S"(out_of), "+c"(bytes) :: "memory");
}
int main(int count, char **words) {
    struct timespec time;
    for (int turns = atoi(words[count - 1]); turns > 0; turns--) {
        copy();
        clock_gettime(CLOCK_MONOTONIC, &time);
    }
    return 0;
}
"#;
/// Iterations of a repetition. Callgrind has one more, which finds nothing left.
const ITERATIONS: u64 = 1000;

/// The functions of a program in the small machine, and what it wrote.
fn counted(here: &Path, program: &[&str]) -> (Functions, Vec<u8>) {
    let variable = format!("{}={}", NO_AVX.0, NO_AVX.1);
    let counted = Count::new(here)
        .options(["--callgrind", "profile", "--env", &variable])
        .run(program);
    counted.ends(0, "program 0");
    let functions = Functions::of(here, &counted);
    assert_eq!(
        functions.umpire.total(),
        counted.total("user", "instructions")
    );
    (functions, counted.output.stdout)
}

/// What is more than a thousandth of `whole`.
fn is_large(difference: u64, whole: &Tally) -> bool {
    difference * 1000 > whole.total()
}

/// Each large difference has a cause, which joins `met`. All that have none are as little together,
/// but for `start` instructions: how libc asks the processor, and the users of a machine.
fn differ_for_causes(
    (umpire, other): (&Tally, &Tally),
    start: u64,
    met: &mut BTreeSet<&'static str>,
) {
    let mut nameless = 0;
    for (key, own, others) in umpire.beside(other) {
        let (object, function) = key;
        let difference = own.abs_diff(others);
        let cause = Cause::of(object, function);
        nameless += cause.map_or(difference, |_| 0);
        if is_large(difference, umpire) {
            let why = cause.map(|cause| cause.why);
            println!("{object} {function}: {own} against {others}: {why:?}");
            met.insert(why.unwrap_or_else(|| panic!("{key:?}: {own} against {others}")));
        }
    }
    let nameless = nameless.saturating_sub(start);
    assert!(!is_large(nameless, umpire), "{nameless} beyond a start");
}

#[test]
fn functions_count_as_under_callgrind() {
    const TEST: &str = "functions_count_as_under_callgrind";
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path().canonicalize().expect("a path");
    fs::write(here.join("words"), words()).expect("room");
    compiled(&here, "repeats", REPEATS, &[]);
    let script = "create table t(a, b); with recursive n(i) as (select 1 union all select i + 1 \
                  from n where i < 2000) insert into t select i, i * i from n; \
                  select count(*), sum(b) from t where a % 7 = 3;";
    let programs: [&[&str]; 4] = [
        &["gzip", "-nkc", "words"],
        &["sort", "--parallel=1", "-S", "8M", "-k2", "words"],
        &["sqlite3", ":memory:", script],
        &["./repeats", "5000"],
    ];
    let mut met = BTreeSet::new();
    for program in programs {
        if !program[0].starts_with('.') && !is_there(TEST, program[0]) {
            continue;
        }
        let (output, spots) = match callgrind::run(&here, program) {
            Err(error) => return skipped(TEST, &error),
            Ok(run) => run,
        };
        let (functions, stdout) = counted(&here, program);
        assert_eq!(stdout, output.stdout, "{program:?}");
        let callgrind = functions.tally(&spots);
        println!("{program:?}: {}", functions.umpire.total());
        differ_for_causes((&functions.umpire, &callgrind), 10_000, &mut met);
        for tally in [&functions.umpire, &callgrind] {
            assert_ne!(tally.of(PLTS.0, PLTS.1), 0, "{program:?} calls no library");
        }
        annotated(&here, functions.umpire.total());
    }
    let repeats = callgrind::run(&here, programs[3]).expect("it ran before").1;
    let (functions, _) = counted(&here, programs[3]);
    let [umpire, callgrind] =
        [&functions.umpire, &functions.tally(&repeats)].map(|tally| tally.of("repeats", "copy"));
    assert_eq!(callgrind - umpire, 5000 * ITERATIONS);
    let causes: BTreeSet<_> = CAUSES.iter().map(|cause| cause.why).collect();
    assert_eq!(met, causes, "a cause is of nothing");
}

/// Valgrind's own program reads what `--callgrind` has written.
fn annotated(here: &Path, total: u64) {
    let output = Command::new("callgrind_annotate")
        .arg("profile")
        .current_dir(here)
        .output()
        .expect("it is Valgrind's");
    let said = String::from_utf8_lossy(&output.stdout).replace(',', "");
    let line = said.lines().find(|line| line.ends_with("PROGRAM TOTALS"));
    let found = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    assert_eq!(found, Some(total), "{said}");
}

/// No function of a program is counted as Callgrind counts it against what single steps say; and
/// where Umpire and Callgrind disagree, the steps side with Umpire, or all three are of another
/// processor, kernel or start. Of the loader Callgrind and the steps may agree by themselves.
#[test]
fn single_steps_decide() {
    const TEST: &str = "single_steps_decide";
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path().canonicalize().expect("a path");
    fs::write(here.join("words"), &words()[..100]).expect("room");
    compiled(&here, "repeats", REPEATS, &[]);
    for program in [&["gzip", "-nkc", "words"][..], &["./repeats", "20"]] {
        let (functions, stdout) = counted(&here, program);
        let umpire = &functions.umpire;
        let stepped = stepped::run(&here, program);
        assert_eq!(stepped.stdout, stdout, "{program:?}");
        let steps = functions.tally(&stepped.spots);
        println!("{program:?}: {} against {}", umpire.total(), steps.total());
        differ_for_causes((umpire, &steps), 1_000, &mut BTreeSet::new());
        let callgrind = match callgrind::run(&here, program) {
            Err(error) => {
                skipped(TEST, &error);
                continue;
            }
            Ok((_, spots)) => functions.tally(&spots),
        };
        let mut decided = 0;
        for ((object, function), own, others) in umpire.beside(&callgrind) {
            let by_steps = steps.of(object, function);
            if is_large(own.abs_diff(others), umpire) {
                println!("{object} {function}: {own}, Callgrind {others}, steps {by_steps}");
                // Callgrind and the steps run on one processor, whose vendor the loader asks it in
                // its own way; the small machine has another.
                let asks_the_processor = object == LOADER;
                assert!(
                    is_large(others.abs_diff(by_steps), umpire) || asks_the_processor,
                    "{object} {function}: {own}, but {others} and {by_steps}"
                );
                decided += u32::from(!is_large(own.abs_diff(by_steps), umpire));
            }
        }
        assert!(decided > 0, "{program:?}: there was nothing to decide");
        if program[0] == "./repeats" {
            let iterations = functions.tally(&stepped.iterations);
            assert_eq!(steps.of("repeats", "copy"), umpire.of("repeats", "copy"));
            assert_eq!(iterations.of("repeats", "copy"), 20 * (ITERATIONS - 1));
        }
    }
}
