//! The guest's debug registers are the guest's: what uses them in an unmodified Linux works with
//! every model, and while counters run, as it does without a PMU. `perf`'s own tests, breakpoints
//! as events, `gdb`, and a debugger of ours that is exact to the last hit.

use std::sync::OnceLock;

use guest_tests::linux::perf::{count, field};
use guest_tests::linux::{LinuxImage, Log, SIMULATED_CYCLES, Script, UnderUmpire};

/// Without the NMI watchdog no counter is used before the script's.
const NO_WATCHDOG: &str = "nmi_watchdog=0";

/// L1 loses one hit of a breakpoint in some 400 000, also without a PMU (docs/internals/testing.md, "Limits
/// of L1"), and these tests count ten thousands: so one that fails has two tries more.
const IN_L1: &str = "1 2 3";
/// Nothing is lost.
const ON_EMU: &str = "1";

fn perf_tests(tries: &str) -> String {
    format!(
        "for i in {tries}; do \
         perf test Breakpoint Watchpoint Sigtrap 'bp modify' >/tmp/p 2>&1; \
         grep -q FAILED /tmp/p || break; done; cat /tmp/p"
    )
}

/// What they come to on an x86 whose debug registers work: x86 has no watchpoint for reads alone.
const PERF_RESULTS: [(&str, &str); 9] = [
    ("Breakpoint overflow signal handler", "Ok"),
    ("Breakpoint overflow sampling", "Ok"),
    ("Breakpoint accounting", "Ok"),
    ("Read Only Watchpoint", "Skip (missing hardware support)"),
    ("Write Only Watchpoint", "Ok"),
    ("Read / Write Watchpoint", "Ok"),
    ("Modify Watchpoint", "Ok"),
    ("Sigtrap", "Ok"),
    ("x86 bp modify", "Ok"),
];

/// Rounds of [`mem`].
const ROUNDS: u32 = 300;

/// A breakpoint and a watchpoint as events, and what else is in `with`, so often; the reports
/// are the output.
fn mem(tries: &str, with: &str) -> String {
    let program = format!("breakpoints run {ROUNDS}");
    mem_of(tries, with, &program)
}

fn mem_of(tries: &str, with: &str, program: &str) -> String {
    format!(
        "rm -f /tmp/m; for i in {tries}; do perf stat -x, --append -o /tmp/m \
         -e mem:$(breakpoints where called):x:u -e mem:$(breakpoints where stored):w:u \
         {with} {program}; done; cat /tmp/m"
    )
}

fn debug(tries: &str) -> String {
    format!("sh -c 'for i in {tries}; do breakpoints debug 20; done'")
}

const DEBUGGED: &str = "hardware breakpoint: 20\n\
     write watchpoint: 40\n\
     access watchpoint: 60\n\
     four slots: 20 40 20 20\n\
     single step: 320, wrong 0";

/// `gdb` with these commands, without the lines that have a process's number.
fn gdb(commands: &[&str]) -> String {
    let commands: Vec<String> = commands
        .iter()
        .map(|line| format!("-ex '{line}'"))
        .collect();
    format!(
        "gdb -q -batch -nx -ex 'set debuginfod enabled off' -ex 'set width 0' {} breakpoints 2>&1 | \
         grep -v '^.Inferior'",
        commands.join(" ")
    )
}

fn gdb_breakpoints() -> String {
    gdb(&[
        "starti run 30",
        "hbreak called",
        "continue",
        "continue",
        "delete",
        "watch *(long *)&stored",
        "continue",
        "continue",
        "delete",
        "awatch *(long *)&stored",
        "continue",
        "continue",
        "delete",
        "hbreak called",
        "hbreak round_of_target",
        "watch *(long *)&stored",
        "awatch *((long *)&stored + 1)",
        "continue",
        "continue",
        "continue",
        "continue",
    ])
}

const GDB_STOPS: [&str; 4] = ["Breakpoint ", "Old value = ", "New value = ", "Value = "];
/// At what the commands above stop, and with which values.
const GDB_STOPPED: [&str; 15] = [
    // The function.
    "Breakpoint 1",
    "Breakpoint 1",
    // The write watchpoint: rounds count down, and the second write of each is the complement.
    "Old value = -30",
    "New value = 28",
    "Old value = 28",
    "New value = -29",
    // The access watchpoint: a write and a read.
    "Old value = -29",
    "New value = 27",
    "Value = 27",
    // All four: the second word, the first one, and in the next round both functions.
    "Old value = 28",
    "New value = 27",
    "Old value = 27",
    "New value = -28",
    "Breakpoint 5",
    "Breakpoint 4",
];

fn gdb_rdpmc() -> String {
    gdb(&[
        "starti count 3",
        "hbreak *&rdpmc",
        "continue",
        "x/i $pc",
        "stepi",
        "x/i $pc",
        "print ($rdx << 32 | $rax) != 0",
        "stepi",
        "x/i $pc",
        "continue",
        "x/i $pc",
    ])
}

/// What the kernel's handler of #GP begins with: CLAC, or what an OUT and the rest of that are.
const UNTOUCHED: &str = "0x0f\t0x01\t0xca";
const PATCHED: &str = "0xe6\t0x01\t0xca";

/// The guest with these flags of `umpire run`.
fn guest(flags: &[&str]) -> UnderUmpire {
    UnderUmpire::new(image(), flags).with_kernel_options(NO_WATCHDOG)
}

fn image() -> LinuxImage {
    static IMAGE: OnceLock<LinuxImage> = OnceLock::new();
    let fetch = || LinuxImage::fetch().and_then(LinuxImage::with_gdb);
    IMAGE
        .get_or_init(|| fetch().expect("the guest's image"))
        .clone()
}

/// The bytes of the kernel's #GP handler while a counter runs, as the kernel itself sees them.
const HANDLER: &str = "at=$(grep -w asm_exc_general_protection /proc/kallsyms | cut -d' ' -f1); \
     perf stat -a -x, -o /tmp/h -e cycles \
     gdb -q -batch -nx -ex 'core-file /proc/kcore' -ex \"x/4xb 0x$at\" 2>&1 | grep '^0x'";

/// Everything that uses debug registers: before a counter was used, while one runs, and after.
fn script(tries: &str) -> Script {
    let gdb = gdb_breakpoints();
    let [perf_tests, debug] = [perf_tests(tries), debug(tries)];
    Script::default()
        .step("mem before", mem(tries, ""))
        .step("gdb before", &gdb)
        .step(
            "perf tests beside",
            format!("perf stat -a -x, -o /tmp/t -e cycles sh -c \"{perf_tests}\""),
        )
        .step("counted", "cat /tmp/t")
        .step("mem beside", mem(tries, "-e cycles"))
        .step(
            "debug beside",
            format!("perf stat -x, -o /tmp/d -e cycles {debug}"),
        )
        .step(
            "debug beside PMIs",
            format!("perf record -q -a -e cycles -c 10000000 -o /tmp/r {debug}"),
        )
        .step(
            "gdb beside",
            format!("perf stat -a -x, -o /tmp/g -e cycles sh -c \"{gdb}\""),
        )
        .step("perf tests after", &perf_tests)
        .step("mem after", mem(tries, ""))
        .step("debug after", debug)
}

/// Adds what needs a counter: RDPMC at CPL 3, under a debugger.
fn with_rdpmc(script: Script) -> Script {
    script
        .step("rdpmc", "breakpoints rdpmc 20")
        .step("handler", HANDLER)
        .step("gdb rdpmc", gdb_rdpmc())
}

/// The results of `perf test`, without colours.
fn results(output: &str) -> Vec<(String, String)> {
    let mut plain = String::new();
    let mut rest = output;
    while let Some((before, after)) = rest.split_once("\x1b[") {
        plain += before;
        rest = after.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';');
        rest = rest.strip_prefix('m').unwrap_or(rest);
    }
    plain += rest;
    let line = |line: &str| {
        let (number, rest) = line.split_once(": ")?;
        let (name, result) = rest.rsplit_once(':')?;
        let numbered = number.trim().starts_with(|c: char| c.is_ascii_digit());
        let (name, result) = (name.trim(), result.trim());
        (numbered && !result.is_empty()).then(|| (name.to_owned(), result.to_owned()))
    };
    plain.lines().filter_map(line).collect()
}

fn check_perf_tests(log: &Log, step: &str) {
    let found = results(log.of(step));
    let expected = PERF_RESULTS.map(|(name, result)| (name.to_owned(), result.to_owned()));
    assert_eq!(found, expected, "{step}:\n{}", log.of(step));
}

/// The counts of [`mem`]: all there, but for the hit that L1 may lose.
fn check_mem(log: &Log, step: &str, tries: &str) {
    let report = log.of(step);
    for (kind, exact) in [(":x:u", ROUNDS), (":w:u", 2 * ROUNDS)] {
        let lines = report.lines().filter(|line| line.contains(kind));
        let counts = lines.map(|line| line.split(',').next().and_then(|text| text.parse().ok()));
        let counts: Option<Vec<u32>> = counts.collect();
        let counts = counts.unwrap_or_else(|| panic!("{step}: not counted:\n{report}"));
        assert_eq!(counts.len(), tries.split(' ').count(), "{step}:\n{report}");
        assert!(counts.contains(&exact), "{step}:\n{report}");
        let near = exact - exact / 100..=exact;
        assert!(
            counts.iter().all(|count| near.contains(count)),
            "{step}:\n{report}"
        );
    }
}

/// What the guest sets is in force soon. But its handler takes its breakpoints away and sets them
/// again at each hit, which nobody sees before the next look: not all are hit.
fn check_late(log: &Log, step: &str) {
    let report = log.of(step);
    for (kind, exact) in [(":x:u", ROUNDS), (":w:u", 2 * ROUNDS)] {
        let lines = report.lines().filter(|line| line.contains(kind));
        let counts = lines.map(|line| line.split(',').next().and_then(|text| text.parse().ok()));
        let counts: Vec<Option<u32>> = counts.collect();
        let is_hit = |count: &Option<u32>| count.is_some_and(|count| (1..=exact).contains(&count));
        assert!(
            counts.len() == 3 && counts.iter().all(is_hit),
            "{step}:\n{report}"
        );
    }
}

fn check_debug(log: &Log, step: &str) {
    let output = log.of(step);
    assert!(output.contains(DEBUGGED), "{step}:\n{output}");
}

/// Each of [`script`]'s steps came to what it comes to without a PMU.
fn check_debuggers(log: &Log, tries: &str) {
    for step in ["perf tests beside", "perf tests after"] {
        check_perf_tests(log, step);
    }
    for step in ["mem before", "mem beside", "mem after"] {
        check_mem(log, step, tries);
    }
    for step in ["debug beside", "debug beside PMIs", "debug after"] {
        check_debug(log, step);
    }
    let gdb = log.of("gdb before");
    let stop = |line: &&str| GDB_STOPS.iter().any(|stop| line.starts_with(stop));
    let stops = gdb.lines().filter(stop).map(|line| line.split(',').next());
    let stops: Vec<_> = stops.flatten().collect();
    assert_eq!(stops, GDB_STOPPED, "{gdb}");
    assert_eq!(log.of("gdb beside"), gdb);
}

/// A model, with RDPMC trapped by a patched byte: CLAC's first one has become that of an OUT.
fn check_model(flags: &[&str]) {
    check_on(&guest(flags), (IN_L1, PATCHED));
}

/// A model, where the kernel's handler of #GP begins with `handler`.
fn check_on(guest: &UnderUmpire, (tries, handler): (&str, &str)) {
    let log = with_rdpmc(script(tries)).run_on(guest);
    log.has("handler", &[handler]);
    check_debuggers(&log, tries);
    assert!(count(log.of("counted"), "cycles") > 0.0);
    assert!(count(log.of("mem beside"), "cycles") > 0.0);
    log.has(
        "rdpmc",
        &[
            "single step over RDPMC: 20, with a count 20, breakpoint behind it 20, wrong 0",
            "breakpoints on RDPMC and behind it: 20 20",
        ],
    );
    log.has(
        "gdb rdpmc",
        &[
            "<rdpmc>:\trdpmc",
            "<after_rdpmc>:\tnop",
            "$1 = 1",
            "<after_rdpmc+1>:\tnop",
        ],
    );
}

#[test]
fn debuggers_work_without_a_pmu() {
    let log = script(IN_L1).run_on(&guest(&["--pmu", "none"]));
    check_debuggers(&log, IN_L1);
    assert_eq!(field(log.of("counted"), "cycles"), "<not supported>");
}

#[test]
fn debuggers_work_with_amd_core() {
    check_model(&["--pmu", "amd-core"]);
}

/// Here the patch is asked for: what cannot be patched would end the guest.
#[test]
fn debuggers_work_with_amd_perfmonv2() {
    check_model(&["--pmu", "amd-perfmonv2", "--rdpmc-trap", "patch"]);
}

#[test]
fn debuggers_work_with_intel_v2() {
    check_model(&["--cpu-vendor", "intel", "--pmu", "intel-v2"]);
}

/// The breakpoint has a debug register from the first write of a counter on, which Linux does as
/// it boots: what the guest sets works a little later, before its counters have run, beside them,
/// and when they have stopped for long, and beside them all of it does. The guest's text is its
/// own.
#[test]
fn debug_registers_come_late_with_the_breakpoint_trap() {
    let late = |with: &str| mem_of(IN_L1, with, &format!("breakpoints late {ROUNDS}"));
    let script = Script::default()
        .step("mem before", late(""))
        .step("handler", HANDLER)
        .step("mem beside", late("-a -e cycles"))
        .step("rest", "sleep 1; spin 0.5")
        .step("mem after", late(""));
    let flags = ["--pmu", "amd-core", "--rdpmc-trap", "breakpoint"];
    let log = script.run_on(&guest(&flags));
    log.has("handler", &[UNTOUCHED]);
    check_mem(&log, "mem beside", IN_L1);
    for step in ["mem before", "mem after"] {
        check_late(&log, step);
    }
    assert!(count(log.of("mem beside"), "cycles") > 0.0);
}

/// On the engine emu nobody else uses debug registers, and no handler of the guest's is touched.
#[test]
fn debuggers_work_with_intel_v2_on_emu() {
    let flags = [&SIMULATED_CYCLES, ["--pmu", "intel-v2"].as_slice()].concat();
    check_on(&guest(&flags).emulated(), (ON_EMU, UNTOUCHED));
}
