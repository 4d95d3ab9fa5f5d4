//! Debian's kernels, 6.1 and 6.12, in a VMM that is not Umpire's (`guest-tests/src/bin/test-vmm`),
//! which saves them while `perf stat -I` reads a counter, ends, and goes on in a new process. What
//! `perf` has read is what `sim` says that it must have, to the last event: no count is lost in a
//! snapshot, none is made up, and a pause is no time of the guest's.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use guest_tests::hostile::Rng;
use guest_tests::l1::{End, L1Error, Machine, Output, Run};
use guest_tests::linux::{COMMAND_LINE, LinuxImage, steps};

/// How many snapshots are taken, 5 if it is not set; and the seed of their moments.
const SNAPSHOTS: &str = "UMPIRE_TEST_SNAPSHOTS";
const SEED: &str = "UMPIRE_TEST_SEED";
/// Milliseconds for which a process runs the guest before a snapshot, at the most.
const LONGEST: u32 = 400;

/// What a kernel says when it meets something that should not be.
const TROUBLE: &str = "dmesg | grep -E 'WARNING|unchecked MSR|Call Trace|BUG:|Broken BIOS|\
     Firmware Bug|dazed|perfevents: irq loop|lockup' || true";

/// Boots the kernel $2 with $3 and $4 in the VMM $1, and saves it at each of the moments that
/// follow; the next process goes on. A status other than 42, which is "saved", is the end.
const PROCESSES: &str = r#"
vmm=$1 kernel=$2 initrd=$3 cmdline=$4; shift 4
folder=$(mktemp -d) || exit 125
boot=(--kernel "$kernel" --initrd "$initrd" --cmdline "$cmdline")
for moment; do
    "$vmm" "$folder" "${boot[@]}" --save "$moment"; status=$?
    [ $status -eq 42 ] || exit $status
    boot=()
done
exec "$vmm" "$folder"
"#;

const PROGRAM: &str = env!("CARGO_BIN_EXE_test-vmm");

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_| panic!("{variable}={text}: give a whole number")))
}

/// When snapshots are taken. The first is at the exit at which the counter is enabled. The second,
/// and one in three from there on, is taken before the restored guest is entered: its counter is
/// enabled, and nobody has looked for its #GP handler yet.
fn moments(count: u64, seed: u64) -> Vec<String> {
    let mut rng = Rng::new(seed);
    let mut moment = |n| match n {
        0 => "at-enabling".to_owned(),
        n if n % 3 == 1 => "at-once".to_owned(),
        _ => (1 + rng.below(LONGEST)).to_string(),
    };
    (0..count).map(&mut moment).collect()
}

/// The guest's own last words, if it has died.
fn last_words(console: &str) -> Option<String> {
    const DEADLY: [&str; 3] = ["general protection fault", "Oops:", "Kernel panic"];
    let lines: Vec<_> = console.lines().collect();
    // The kernel's lines begin with a time.
    let is_deadly =
        |line: &&str| line.starts_with('[') && DEADLY.iter().any(|word| line.contains(word));
    let first = lines.iter().position(is_deadly)?;
    let last = lines.len().min(first + 12);
    Some(lines[first..last].join("\n"))
}

/// What happened, as the first line of a failure says it: to L1, to the VMM, or to the guest.
fn console(ran: Result<Output, L1Error>) -> (String, String) {
    let output = match ran {
        Ok(output) => output,
        Err(error) => panic!("L1 has failed, which says nothing of its guest: {error}"),
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, errors) = (text(&output.stdout), text(&output.stderr));
    if let Some(words) = last_words(&out) {
        panic!("the guest has died: {words}\n{errors}");
    }
    match output.outcome.end {
        End::Exited(0) => (out, errors),
        End::Exited(status) => panic!("the VMM ended with {status}: {errors}\n{out}"),
        End::TimedOut => panic!("neither L1 nor the guest has died, and the time is over:\n{out}"),
    }
}

/// The numbers behind these words, in each line that begins with the first.
fn told(errors: &str, word: &str) -> Vec<Vec<String>> {
    let lines = errors.lines().filter_map(|line| line.strip_prefix(word));
    lines
        .map(|line| line.split_whitespace().map(str::to_owned).collect())
        .collect()
}

/// Counts of `perf stat -x,` in intervals, of one CPU.
fn intervals(output: &str) -> Vec<u64> {
    let lines = output.lines().filter(|line| line.contains(",cycles,"));
    lines
        .map(|line| {
            let count = line.split(',').nth(2);
            let count = count.and_then(|count| count.parse().ok());
            count.unwrap_or_else(|| panic!("no count: {line}"))
        })
        .collect()
}

fn save_and_restore(image: &LinuxImage) {
    let count = number(SNAPSHOTS).unwrap_or(5);
    let now = || SystemTime::now().duration_since(UNIX_EPOCH);
    let seed = number(SEED).unwrap_or_else(|| now().expect("a clock").as_secs());
    let moments = moments(count, seed);
    println!("snapshots: {}; {SEED}={seed}", moments.join(" "));
    // Longer than all processes but the last run it, half of it in the kernel's idle loop.
    let half = 1 + count * u64::from(LONGEST) / 2000;
    let stat = format!(
        "perf stat -x, -a -A -e cycles -I 200 -o /tmp/stat sh -c 'spin {half}; sleep {half}'"
    );
    let script = [&stat, "cat /tmp/stat", TROUBLE].join("\n");
    let guest = image.with_script(&script).expect("the initramfs");
    // The NMI watchdog would count cycles; the other one counts what a busy machine takes from L1.
    let cmdline = format!("{COMMAND_LINE} nowatchdog");
    let run = Run::new("bash").args(["-c", PROCESSES, "processes"]);
    let run = run.arg(absolute(Path::new(PROGRAM)));
    let run = run
        .arg(absolute(guest.kernel()))
        .arg(absolute(guest.initrd()));
    let run = run.arg(cmdline).args(&moments);
    let timeout = Duration::from_secs(300 + 6 * count);
    // One processor: `docs/internals/testing.md`, "Limits of L1".
    let machine = Machine::new().memory_mib(2048).smp(1).timeout(timeout);
    let (out, errors) = console(machine.output(&run));
    println!("{errors}");
    let saved = told(&errors, "saved:");
    assert_eq!(saved.len(), moments.len(), "{errors}\n{out}");
    for (moment, words) in moments.iter().zip(&saved) {
        assert_eq!(words[1], "enabled", "at {moment}: {errors}");
        // Nobody has looked, or the handler is patched; but for a moment after the guest has written
        // to its page.
        let ways: &[&str] = match moment.as_str() {
            "at-once" => &["unwatched"],
            _ => &["patched", "just-written"],
        };
        assert!(ways.contains(&words[2].as_str()), "at {moment}: {errors}");
    }
    let is_patched = saved.iter().any(|words| words[2] == "patched");
    assert!(
        is_patched,
        "memory with a patch in it was never saved: {errors}"
    );
    let steps = steps(&out);
    let [stat, counts, trouble] = steps.as_slice() else {
        panic!("three steps:\n{out}");
    };
    assert_eq!(stat.status, Some(0), "{}", stat.output);
    assert_eq!(trouble.output.trim(), "");
    let counts = intervals(&counts.output);
    assert!(counts.len() > 3, "{counts:?}");
    let truth = told(&errors, "counted:");
    let [words] = truth.as_slice() else {
        panic!("one end: {errors}");
    };
    let read: u64 = words[2].parse().expect("a number");
    assert_eq!(counts.iter().sum::<u64>(), read, "{counts:?}\n{errors}");
}

fn absolute(file: &Path) -> PathBuf {
    std::path::absolute(file).expect("a working directory")
}

#[test]
fn linux_6_1_goes_on_from_snapshots_with_every_count() {
    save_and_restore(&LinuxImage::fetch().expect("the guest's image"));
}

#[test]
fn linux_6_12_goes_on_from_snapshots_with_every_count() {
    save_and_restore(&LinuxImage::fetch_newer().expect("the guest's newer image"));
}

#[test]
fn last_words_are_those_of_the_guest() {
    fn check(console: &str, expected: Option<&str>) {
        assert_eq!(last_words(console).as_deref(), expected);
    }
    check("#### begin 1: dmesg | grep Oops:\n#### done\n", None);
    check(
        "boot\n[ 1.0] general protection fault: 0000 [#1]\n[ 1.0] RIP: 0010:native_read_pmc\n",
        Some("[ 1.0] general protection fault: 0000 [#1]\n[ 1.0] RIP: 0010:native_read_pmc"),
    );
}
