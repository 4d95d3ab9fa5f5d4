//! Debian's kernels, 6.1 and 6.12, in a VMM that is not Umpire's (`guest-tests/src/bin/test-vmm`),
//! which saves them while `perf stat -I` reads a counter, ends, and goes on in a new process. What
//! `perf` has read is what `sim` says that it must have, to the last event: no count is lost in a
//! snapshot, none is made up, and a pause is no time of the guest's.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use guest_tests::hostile::Rng;
use guest_tests::l1::{End, L1Error, Machine, Outcome, Output, Run};
use guest_tests::linux::{COMMAND_LINE, LinuxImage, steps};

/// How many snapshots are taken, 5 if it is not set; and the seed of their moments.
const SNAPSHOTS: &str = "UMPIRE_TEST_SNAPSHOTS";
const SEED: &str = "UMPIRE_TEST_SEED";
/// Milliseconds for which a process runs the guest before a snapshot, at the most.
const LONGEST: u32 = 400;
/// Those of `perf stat -I` between two reads.
const INTERVAL: u32 = 200;

/// What a kernel says when it meets something that should not be.
const TROUBLE: &str = "dmesg | grep -E 'WARNING|unchecked MSR|Call Trace|BUG:|Broken BIOS|\
     Firmware Bug|dazed|perfevents: irq loop|lockup' || true";

/// Boots the kernel $2 with $3, $4 and $5 vCPUs in the VMM $1, which takes $6 resets, and saves it
/// at each of the moments that follow; the next process goes on. A status other than 42, which is "saved", is the end.
const PROCESSES: &str = r#"
vmm=$1 kernel=$2 initrd=$3 cmdline=$4 cpus=$5 resets=$6; shift 6
folder=$(mktemp -d) || exit 125
boot=(--kernel "$kernel" --initrd "$initrd" --cmdline "$cmdline" --cpus "$cpus" --resets "$resets")
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

/// When snapshots are taken: first at the exit at which a counter is enabled, and then threes in an
/// order of chance. One of each three is taken before the restored guest is entered: its counter is
/// enabled, and nobody has looked for its #GP handler yet. Of several vCPUs, another one is taken
/// after the first has run alone: its handler is patched while the others stand still.
fn moments(count: u64, seed: u64, cpus: usize) -> Vec<String> {
    let mut rng = Rng::new(seed);
    let mut moments = vec!["at-enabling".to_owned()];
    while (moments.len() as u64) < count {
        let mut time = || 1 + rng.below(LONGEST);
        let alone = if cpus == 1 { "" } else { "alone-" };
        let mut three = vec![
            "at-once".to_owned(),
            format!("{alone}{}", time()),
            time().to_string(),
        ];
        while let Some(left) = u32::try_from(three.len()).ok().filter(|left| *left > 0) {
            let place = usize::try_from(rng.below(left)).expect("a place in it");
            moments.push(three.swap_remove(place));
        }
    }
    moments.truncate(usize::try_from(count).expect("a length"));
    moments
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

/// What the console and the VMM have said of a guest that has ended by itself; or else whose
/// failure it was, in the first line: L1's, the VMM's, or the guest's.
fn verdict(ran: Result<Output, L1Error>) -> Result<(String, String), String> {
    let said = |error| format!("L1 has failed, which says nothing of its guest: {error}");
    let output = ran.map_err(said)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, errors) = (text(&output.stdout), text(&output.stderr));
    // First, as a kernel of L1's in which something has broken ends its programs as it likes.
    if let Some(words) = last_words(&output.outcome.console) {
        return Err(format!("L1's own kernel has died: {words}"));
    }
    if let Some(words) = last_words(&out) {
        return Err(format!("the guest has died: {words}\n{errors}"));
    }
    match output.outcome.end {
        End::Exited(0) => Ok((out, errors)),
        End::Exited(status) => Err(format!("the VMM ended with {status}: {errors}\n{out}")),
        End::TimedOut => Err(format!(
            "neither L1 nor the guest has died, and the time is over:\n{errors}\n{out}\n{}",
            output.outcome.console
        )),
    }
}

/// The numbers behind these words, in each line that begins with the first.
fn told(errors: &str, word: &str) -> Vec<Vec<String>> {
    let lines = errors.lines().filter_map(|line| line.strip_prefix(word));
    lines
        .map(|line| line.split_whitespace().map(str::to_owned).collect())
        .collect()
}

/// Of what was told of a vCPU that was saved or reset: whether a counter of its counted then.
fn is_enabled(words: &[String]) -> bool {
    words[2] == "enabled"
}

/// Counts of `perf stat -x,` in intervals, of one CPU.
fn intervals(output: &str, cpu: usize) -> Vec<u64> {
    let cpu = format!(",CPU{cpu},");
    let lines = output.lines();
    let lines = lines.filter(|line| line.contains(",cycles,") && line.contains(&cpu));
    lines
        .map(|line| {
            let count = line.split(',').nth(2);
            let count = count.and_then(|count| count.parse().ok());
            count.unwrap_or_else(|| panic!("no count: {line}"))
        })
        .collect()
}

/// Each CPU but the first goes and comes again, and then all of them count. A machine of several
/// is reset once, at any moment while they do so.
fn script(half: u64, cpus: usize) -> String {
    let mut steps = Vec::new();
    if cpus > 1 {
        let counts = (0..cpus).map(|cpu| format!("grep -sq ',CPU{cpu},[1-9]' /tmp/first"));
        let counts = counts.collect::<Vec<_>>().join(" && ");
        // No orderly end, at which the kernel would stop its counters. It waits for no output
        // either, so that what `perf` has printed is looked at here.
        steps.push(format!(
            "[ -n \"$reset\" ] && echo again || {{ \
             perf stat -x, -a -A -e cycles -I {INTERVAL} -o /tmp/first spin 60 & \
             until {counts}; do sleep 1; done; echo b >/proc/sysrq-trigger; }}"
        ));
    }
    for cpu in 1..cpus {
        let online = format!("/sys/devices/system/cpu/cpu{cpu}/online");
        steps.push(format!("echo 0 >{online} && echo 1 >{online} && nproc"));
    }
    let busy = vec![format!("spin {half} &"); cpus].concat();
    steps.push(format!(
        "perf stat -x, -a -A -e cycles -I {INTERVAL} -o /tmp/stat sh -c '{busy} wait; sleep {half}'"
    ));
    steps.extend(["cat /tmp/stat".to_owned(), TROUBLE.to_owned()]);
    steps.join("\n")
}

/// Holds what was told of each snapshot against its moment.
fn check_saved(moments: &[String], errors: &str, cpus: usize) {
    let saved = told(errors, "saved:");
    assert_eq!(saved.len(), moments.len() * cpus, "{errors}");
    // Milliseconds for which all vCPUs have run after the first snapshot, at which `perf` still
    // enables its counters, the first vCPU's first. From then on it only reads them.
    let mut all_have_run = 0;
    let mut were_enabled = vec![false; cpus];
    were_enabled[0] = true;
    for (moment, vcpus) in moments.iter().zip(saved.chunks(cpus)) {
        all_have_run += moment.parse().unwrap_or(0);
        for (n, words) in vcpus.iter().enumerate() {
            assert_eq!(words[0], n.to_string(), "{errors}");
            were_enabled[n] |= is_enabled(words) || all_have_run >= INTERVAL;
            assert_eq!(is_enabled(words), were_enabled[n], "at {moment}: {errors}");
            let is_entered = n == 0 || !moment.starts_with("alone-");
            // Nobody has looked, or the handler is patched; but for a moment after the guest has
            // written to its page.
            let ways: &[&str] = match moment.as_str() {
                // The others are wherever they are.
                "at-enabling" if !is_enabled(words) => &["unwatched", "patched", "just-written"],
                "at-once" => &["unwatched"],
                _ if !is_entered => &["unwatched"],
                _ => &["patched", "just-written"],
            };
            assert!(ways.contains(&words[3].as_str()), "at {moment}: {errors}");
        }
    }
    let is_patched = saved.iter().any(|words| words[3] == "patched");
    assert!(
        is_patched,
        "memory with a patch in it was never saved: {errors}"
    );
}

fn save_and_restore(image: &LinuxImage, cpus: usize) {
    let count = number(SNAPSHOTS).unwrap_or(5);
    let now = || SystemTime::now().duration_since(UNIX_EPOCH);
    let seed = number(SEED).unwrap_or_else(|| now().expect("a clock").as_secs());
    let moments = moments(count, seed, cpus);
    println!("snapshots: {}; {SEED}={seed}", moments.join(" "));
    // Longer than all processes but the last run it, half of it in the kernel's idle loop. A vCPU
    // that sleeps hears of its patch at the next interval.
    let half = 1 + count * u64::from(LONGEST + INTERVAL) / 2000;
    let guest = image.with_script(&script(half, cpus));
    let guest = guest.expect("the initramfs");
    // The NMI watchdog would count cycles; the other one counts what a busy machine takes from L1.
    // What the kernel cannot do ends it, so that it does not go on without the task that asked; and
    // where ACPI is reduced it asks EFI for a reset, and then a BIOS, neither of which is here.
    let cmdline = format!("{COMMAND_LINE} nowatchdog oops=panic reboot=acpi");
    let run = Run::new("bash").args(["-c", PROCESSES, "processes"]);
    let run = run.arg(absolute(Path::new(PROGRAM)));
    let run = run
        .arg(absolute(guest.kernel()))
        .arg(absolute(guest.initrd()));
    let resets = if cpus == 1 { "0" } else { "1" };
    let run = run.arg(cmdline).arg(cpus.to_string()).arg(resets);
    let run = run.args(&moments);
    let timeout = Duration::from_secs(300 + 6 * count);
    // One processor: `docs/internals/testing.md`, "Limits of L1".
    let machine = Machine::new().memory_mib(2048).smp(1).timeout(timeout);
    let (out, errors) = verdict(machine.output(&run)).unwrap_or_else(|whose| panic!("{whose}"));
    println!("{errors}");
    check_saved(&moments, &errors, cpus);
    let steps = steps(&out);
    let Some((first, [stat, counts, trouble])) = steps.split_last_chunk() else {
        panic!("three steps at least:\n{out}");
    };
    if cpus > 1 {
        let [counting, again, plugged] = first else {
            panic!("a reset, and what follows:\n{out}");
        };
        assert_eq!(counting.status, None, "no reset:\n{out}");
        // `perf` had printed a count of each CPU, or the task would not have gone on.
        let reset = told(&errors, "reset:");
        let counts = |words: &Vec<String>| is_enabled(words) && words[1] != "0";
        assert!(reset.iter().all(counts), "{errors}");
        assert_eq!(reset.len(), cpus, "one reset: {errors}");
        assert_eq!(again.output.trim(), "again");
        assert_eq!(plugged.output.trim(), cpus.to_string());
    }
    assert_eq!(stat.status, Some(0), "{}", stat.output);
    assert_eq!(trouble.output.trim(), "");
    let truth = told(&errors, "counted:");
    assert_eq!(truth.len(), cpus, "one end: {errors}");
    for (cpu, words) in truth.iter().enumerate() {
        let counts = intervals(&counts.output, cpu);
        assert!(counts.len() > 3, "CPU {cpu}: {counts:?}");
        let read: u64 = words[3].parse().expect("a number");
        let sum: u64 = counts.iter().sum();
        assert_eq!(sum, read, "CPU {cpu}: {counts:?}\n{errors}");
    }
}

fn absolute(file: &Path) -> PathBuf {
    std::path::absolute(file).expect("a working directory")
}

#[test]
fn linux_6_1_goes_on_from_snapshots_with_every_count() {
    save_and_restore(&LinuxImage::fetch().expect("the guest's image"), 1);
}

#[test]
fn linux_6_12_goes_on_from_snapshots_with_every_count() {
    save_and_restore(
        &LinuxImage::fetch_newer().expect("the guest's newer image"),
        1,
    );
}

#[test]
fn linux_6_1_of_two_vcpus_goes_on_from_snapshots_with_every_count() {
    save_and_restore(&LinuxImage::fetch().expect("the guest's image"), 2);
}

#[test]
fn linux_6_12_of_two_vcpus_goes_on_from_snapshots_with_every_count() {
    save_and_restore(
        &LinuxImage::fetch_newer().expect("the guest's newer image"),
        2,
    );
}

#[test]
fn a_third_of_the_moments_finds_nobody_watching() {
    for (seed, cpus) in (0..100).zip([1, 2].into_iter().cycle()) {
        let moments = moments(50, seed, cpus);
        assert_eq!((moments.len(), moments[0].as_str()), (50, "at-enabling"));
        let are = |found: fn(&str) -> bool| moments.iter().filter(|moment| found(moment)).count();
        let unwatched = are(|moment| moment == "at-once");
        assert!((16..=17).contains(&unwatched), "{moments:?}");
        let alone = are(|moment| moment.starts_with("alone-"));
        assert_eq!((16..=17).contains(&alone), cpus == 2, "{moments:?}");
    }
    assert_ne!(moments(5, 1, 1), moments(5, 2, 1));
}

#[test]
fn a_counter_that_stops_is_found() {
    fn check(moments: &[&str], second: &[&str], fails: bool) {
        let moments: Vec<_> = moments.iter().map(|moment| (*moment).to_owned()).collect();
        let lines = second
            .iter()
            .map(|counts| format!("saved: 0 9 enabled patched\nsaved: 1 9 {counts} patched\n"));
        let errors: String = lines.collect();
        let checked = std::panic::catch_unwind(|| check_saved(&moments, &errors, 2));
        assert_eq!(checked.is_err(), fails, "{errors}");
    }
    check(&["at-enabling", "1"], &["disabled", "disabled"], false);
    check(&["at-enabling", "1"], &["disabled", "enabled"], false);
    check(&["at-enabling", "200"], &["disabled", "disabled"], true);
    check(&["1", "2"], &["enabled", "disabled"], true);
}

const OOPS: &str = "[ 1.0] general protection fault: 0000 [#1]\n[ 1.0] RIP: 0010:native_read_pmc";

#[test]
fn last_words_are_those_of_a_kernel() {
    fn check(console: &str, expected: Option<&str>) {
        assert_eq!(last_words(console).as_deref(), expected);
    }
    check("#### begin 1: dmesg | grep Oops:\n#### done\n", None);
    check(&format!("boot\n{OOPS}\n"), Some(OOPS));
}

/// An L1 that ends itself says nothing of its guest, whatever the guest had said by then.
#[test]
fn a_failure_is_l1s_or_the_vmms_or_the_guests() {
    fn check(end: End, (l1, console): (&str, &str), expected: &str) {
        let (ready, total) = (None, Duration::ZERO);
        let output = Output {
            outcome: Outcome {
                end,
                ready,
                total,
                console: l1.to_owned(),
            },
            stdout: console.into(),
            stderr: "said\n".into(),
        };
        let whose = verdict(Ok(output)).unwrap_or_else(|whose| (whose, String::new()));
        assert!(whose.0.starts_with(expected), "{whose:?}");
    }
    check(End::Exited(0), ("", "boot\n"), "boot");
    check(
        End::Exited(0),
        ("", OOPS),
        "the guest has died: [ 1.0] general",
    );
    check(
        End::Exited(1),
        ("", OOPS),
        "the guest has died: [ 1.0] general",
    );
    check(
        End::TimedOut,
        ("", OOPS),
        "the guest has died: [ 1.0] general",
    );
    check(
        End::Exited(137),
        (OOPS, ""),
        "L1's own kernel has died: [ 1.0]",
    );
    check(End::Exited(1), ("", "boot\n"), "the VMM ended with 1: said");
    check(End::TimedOut, ("", "boot\n"), "neither L1 nor the guest");
    let ended = L1Error::Machine {
        after: Duration::ZERO,
        reason: "QEMU ended while the command ran".into(),
        log: String::new(),
    };
    let whose = verdict(Err(ended)).expect_err("no output");
    assert!(
        whose.starts_with("L1 has failed, which says nothing of its guest"),
        "{whose}"
    );
}
