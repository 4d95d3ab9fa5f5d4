//! Programs do what they do here, and count the same each time.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use super::{Count, Counted, compiled};

/// Words, of which some are more often there than others.
pub(super) fn words() -> String {
    let mut text = String::new();
    let mut number = 1u32;
    for _ in 0..6_000 {
        number = number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let _ = writeln!(text, "word{} {}", number >> 24, number >> 16);
    }
    text
}

/// Status and bytes of output are those of this machine, and two runs have one count.
fn check(here: &Path, options: &[&str], program: &[&str], stdin: &[u8]) -> Counted {
    let run = || Count::new(here).options(options).stdin(stdin);
    let native = run().natively(program);
    let first = run().run(program);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(
        (first.output.status.code(), text(&first.output.stdout)),
        (native.status.code(), text(&native.stdout)),
        "{program:?}: {}",
        first.told()
    );
    let second = run().run(program);
    for part in ["inputs", "counts"] {
        let (first, second) = (&first.record()[part], &second.record()[part]);
        assert_eq!(first, second, "{program:?}");
    }
    first
}

/// What is not installed is not tried: `skipped` says so.
pub(super) fn is_there(test: &str, program: &str) -> bool {
    let there = ["/usr/bin", "/bin", "/usr/local/bin"]
        .iter()
        .any(|folder| Path::new(folder).join(program).exists());
    if !there {
        println!("skipped: {test}: this machine has no {program}");
    }
    there
}

#[test]
fn programs_do_as_here_and_count_the_same_twice() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("words"), words()).expect("room");
    let script = "create table t(a, b); with recursive n(i) as (select 1 union all select i + 1 \
                  from n where i < 500) insert into t select i, i * i from n; \
                  select count(*), sum(b) from t where a % 7 = 3;";
    let pipe = "sort words | uniq -c | sort -rn | head -n 5; exit 7";
    let programs: [(&[&str], &str); 7] = [
        (&["gzip", "-nkc", "words"], ""),
        (&["sort", "--parallel=4", "-k2", "words"], ""),
        (&["openssl", "dgst", "-sha256", "words"], ""),
        (&["sqlite3", ":memory:", script], ""),
        (&["sh", "-c", pipe], ""),
        (&["wc", "-c"], "standard input"),
        (&["/usr/bin/python3", "-c", "print(sum(range(1000)))"], ""),
    ];
    for (program, stdin) in programs {
        let name = program[0].rsplit('/').next().unwrap_or_default();
        if is_there("programs_do_as_here_and_count_the_same_twice", name) {
            check(folder.path(), &[], program, stdin.as_bytes());
        }
    }
}

/// The last commits of this repository, as far as it is one here.
#[test]
fn git_shows_this_repository_as_here() {
    const TEST: &str = "git_shows_this_repository_as_here";
    if !is_there(TEST, "git") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    // What borrows objects of another folder is whole in its copy.
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let cloned = Command::new("git")
        .args(["clone", "--quiet", "--bare", "--depth", "3"])
        .arg(format!("file://{}", whole.display()))
        .arg("copy.git")
        .current_dir(folder.path())
        .output()
        .expect("git can be started");
    if !cloned.status.success() {
        let why = String::from_utf8_lossy(&cloned.stderr);
        println!("skipped: {TEST}: this is no repository: {}", why.trim());
        return;
    }
    let log = ["git", "--git-dir=copy.git", "log", "--stat", "-n", "2"];
    let counted = check(folder.path(), &[], &log, b"");
    counted.ends(0, "program 0");
    assert!(counted.output.stdout.starts_with(b"commit "));
}

/// A compiler that is not the system's, with a library of 150 MB.
#[test]
fn rustc_says_its_version_as_here() {
    let output = Command::new("rustc").args(["--print", "sysroot"]).output();
    let sysroot = output.expect("a compiler has built this").stdout;
    let sysroot = String::from_utf8(sysroot).expect("a path");
    let rustc = format!("{}/bin/rustc", sysroot.trim());
    let folder = tempfile::tempdir().expect("a folder");
    let options = ["--with", sysroot.trim()];
    let counted = check(folder.path(), &options, &[&rustc, "--version"], b"");
    counted.ends(0, "program 0");
    assert!(counted.output.stdout.starts_with(b"rustc "));
}

/// Its output has times in it: the words are those of this machine, and system calls are counted.
#[test]
fn perf_bench_runs_as_here() {
    const TEST: &str = "perf_bench_runs_as_here";
    if !is_there(TEST, "perf") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let program = ["perf", "bench", "syscall", "basic", "-l", "1000"];
    let run = || Count::new(folder.path()).options(["--syscalls"]);
    let native = run().natively(&program);
    let [first, second] = [run().run(&program), run().run(&program)];
    let words = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        let is_word = |word: &&str| !word.contains(|letter: char| letter.is_ascii_digit());
        let words = text.split_whitespace().filter(is_word);
        words.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(first.output.status.code(), native.status.code());
    assert_eq!(words(&first.output.stdout), words(&native.stdout));
    // The guest's clock is the guest's, so its times are the same too.
    assert_eq!(first.output.stdout, second.output.stdout);
    assert_eq!(first.record()["counts"], second.record()["counts"]);
    let calls = first.record()["counts"]["syscalls"].as_array();
    let calls = calls.expect("system calls").iter();
    let getppid = calls.filter(|call| call["name"] == "getppid");
    let calls: u64 = getppid.filter_map(|call| call["calls"].as_u64()).sum();
    assert_eq!(calls, 1000);
}

#[test]
fn programs_of_a_pipeline_are_told_apart() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("words"), words()).expect("room");
    let options = ["--per-program", "--syscalls"];
    let program = ["sh", "-c", "sort words | uniq -c >/dev/null"];
    let counted = Count::new(folder.path()).options(options).run(&program);
    counted.ends(0, "program 0");
    let names = counted.names();
    for name in ["/usr/bin/sort", "/usr/bin/uniq"] {
        assert!(names.contains(&name), "{names:?}");
    }
    let counts = &counted.record()["counts"];
    // The kernel's instructions are those of system calls and what else it did.
    let calls = counts["syscalls"].as_array().expect("system calls");
    let of_calls: u64 = calls
        .iter()
        .filter_map(|it| it["instructions"].as_u64())
        .sum();
    let rest = &counts["rest"];
    let rest = [
        "exception_instructions",
        "interrupt_instructions",
        "start_instructions",
    ]
    .map(|key| rest[key].as_u64().expect("a count"));
    let kernel = counted.total("kernel", "instructions");
    assert_eq!(of_calls + rest.iter().sum::<u64>(), kernel, "{counts}");
    counted.says(&[
        "By program:",
        "sort-",
        "uniq-",
        "System calls:",
        "  read\n",
        "  execve\n",
    ]);
}

/// A loop that is a million times around, with so many instructions besides.
fn looping(folder: &Path, name: &str, more: usize) -> String {
    let source = format!(
        "__asm__(\".globl _start\\n_start:\\n mov $1000000, %ecx\\nhot:\\n {} dec %ecx\\n jnz hot\\n \
         mov $60, %eax\\n xor %edi, %edi\\n syscall\\n\");\n",
        "nop\\n".repeat(more)
    );
    compiled(folder, name, &source, &["-static", "-nostdlib"]);
    format!("./{name}")
}

#[test]
fn one_more_instruction_in_a_loop_is_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let program = looping(here, "bench", 0);
    let before = Count::new(here).run(&[&program]);
    before.ends(0, "program 0");
    assert_eq!(before.total("user", "instructions"), 2_000_004);
    assert_eq!(before.total("user", "branches"), 1_000_001);
    let base = before.record().to_string();
    fs::write(here.join("base.json"), base).expect("room");
    let compared = |threshold: &str| {
        let options = ["--compare", "base.json", "--threshold", threshold];
        Count::new(here).options(options).run(&[&program])
    };
    let same = compared("0%");
    same.ends(0, "program 0")
        .says(&["Every input is that of base.json"]);
    looping(here, "bench", 1);
    let over = compared("49.99%");
    over.ends(123, "gate 123").says(&[
        "Inputs that differ from base.json:",
        "program ./bench: ",
        "2,000,004          3,000,004    +50.000 %  instructions:u  OVER",
        "umpire: against base.json: more than 49.99 % more: instructions:u +1,000,000",
    ]);
    compared("50%").ends(0, "program 0");
}

/// A function with a loop that is a million times around, with so many instructions besides.
fn with_a_function(folder: &Path, name: &str, more: usize) {
    let source = format!(
        "__attribute__((noinline)) void hot(void) {{\n\
         __asm__ volatile(\"mov $1000000, %%ecx\\n1: {} dec %%ecx\\n jnz 1b\" ::: \"ecx\"); }}\n\
         int main(void) {{ hot(); return 0; }}\n",
        "nop\\n".repeat(more)
    );
    compiled(folder, name, &source, &["-static"]);
}

/// Between two files of `--save`: the function, and its callers by what it costs them.
#[test]
fn the_function_that_grew_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let save = |name: &str, more| {
        with_a_function(here, "bench", more);
        let counted = Count::new(here).options(["--functions"]).run(&["./bench"]);
        counted.ends(0, "program 0");
        fs::write(here.join(name), counted.record().to_string()).expect("room");
    };
    save("before", 0);
    save("now", 1);
    let output = Command::new(guest_tests::umpire::path())
        .args(["count", "diff", "before", "now"])
        .current_dir(here)
        .output()
        .expect("umpire can be started");
    let told = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{told}");
    let change = |name: &str| {
        let is_it = |line: &&str| line.split_whitespace().nth(2) == Some(name);
        let line = told.lines().find(is_it);
        let own = line.and_then(|line| line.split_whitespace().next());
        own.map(str::to_owned)
    };
    assert_eq!(change("hot").as_deref(), Some("+1,000,000"), "{told}");
    assert_eq!(change("main").as_deref(), Some("0"), "{told}");
}

#[test]
fn what_the_program_is_given_is_all_that_it_has() {
    let folder = tempfile::tempdir().expect("a folder");
    let program = "echo $0 $1; env | sort; pwd; id -u; hostname; umask; cat; cat /etc/machine-id; \
                   date +%Y; nproc; touch made; ls";
    let counted = Count::new(folder.path())
        .options(["--env", "MORE=1", "-C"])
        .options([folder.path()])
        .stdin(b"in\n")
        .run(&["sh", "-c", program, "zero", "one"]);
    let here = folder.path().display();
    let expected = format!(
        "zero one\nHOME=/user\nLANG=C.UTF-8\nMORE=1\n\
         PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nPWD={here}\nTERM=dumb\n\
         {here}\n1000\numpire\n0022\nin\n2026\n1\nmade\n"
    );
    let found = String::from_utf8_lossy(&counted.output.stdout).into_owned();
    assert_eq!(found, expected, "{}", counted.told());
    // The host has this one, and does not give it.
    if Path::new("/etc/machine-id").exists() {
        counted.says(&["looked for what it was not given: /etc/machine-id"]);
    }
    assert!(!folder.path().join("made").exists());
}

#[test]
fn json_is_as_its_schema_says() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let options = ["-j", "--per-program", "--syscalls"];
    let counted = Count::new(here).options(options).run(&["true"]);
    counted.ends(0, "program 0");
    crate::golden::schemas::valid("count", &counted.told());
    let record = counted.record().to_string();
    for name in ["a.json", "b.json"] {
        fs::write(here.join(name), &record).expect("room");
    }
    let output = Command::new(guest_tests::umpire::path())
        .args(["count", "diff", "-j", "a.json", "b.json"])
        .current_dir(here)
        .output()
        .expect("umpire can be started");
    crate::golden::schemas::valid("count", &String::from_utf8_lossy(&output.stdout));
}

#[test]
fn what_a_program_writes_comes_back_by_request() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let program =
        "mkdir d; echo new >d/file; echo more >>old; rm gone; ln -s file d/link; chmod 700 d/file";
    for name in ["old", "gone"] {
        fs::write(here.join(name), "before\n").expect("room");
    }
    let counted = Count::new(here)
        .options(["--out", "back"])
        .run(&["sh", "-c", program]);
    counted.ends(0, "program 0");
    let below = here
        .join("back")
        .join(here.strip_prefix("/").expect("absolute"));
    let text = |path: &Path| fs::read_to_string(path).expect("a file");
    assert_eq!(text(&below.join("d/file")), "new\n");
    assert_eq!(text(&below.join("old")), "before\nmore\n");
    assert_eq!(
        fs::read_link(below.join("d/link")).expect("a link"),
        Path::new("file")
    );
    // The program's folder is as it was.
    assert_eq!(text(&here.join("old")), "before\n");
    assert!(here.join("gone").exists() && !here.join("d").exists());
}
