//! A budget that shrinks and grows while a Linux guest counts. Its kernel notices nothing; the
//! accounting page says which counters wait or stand still, and why.

use guest_tests::linux::perf::{LOG, near, tsc_mhz};
use guest_tests::linux::{Log, Script, UnderUmpire};
use vmm::config::Engine;

use super::{guest, image};

/// Linux gives one of them the fixed-function counter for cycles.
const EVENTS: &str = "cycles,cpu-cycles,r3c,r3c,task-clock";
/// About as many cycles in a microsecond as the TSC has.
const RATES: &str = "[event.cycles]\nrate = MHZ\n";
/// How far cycles of a processor may be from its time by the TSC, of which it is idle for a while.
/// What goes wrong here does so by two thirds or more.
const TOLERANCE: f64 = 0.6;

/// All that processor 0 does for so many seconds, by `perf`, and what the page says meanwhile, after
/// the host did `before`.
fn counted(before: &str, seconds: f64) -> String {
    format!(
        "{}; rm -f /tmp/s; perf stat -C 0 -x, -o /tmp/s -e {EVENTS} \
         sh -c 'taskset 1 spin {seconds} >/dev/null; taskset 1 pmu-accounting'; cat /tmp/s",
        UnderUmpire::on_host(before)
    )
}

/// The events of a report, and what they should be.
fn cycles(log: &Log, step: &str) -> (Vec<f64>, f64) {
    let rows = log.of(step).lines().map(|line| line.split(',').collect());
    let rows: Vec<Vec<&str>> = rows.filter(|row: &Vec<&str>| row.len() > 4).collect();
    let of = |row: &Vec<&str>| row[0].parse::<f64>().expect("a count");
    let (time, events): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row[2] == "task-clock");
    let ms = of(time.first().expect("task-clock"));
    let events: Vec<f64> = events.into_iter().map(of).collect();
    assert_eq!(events.len(), 4, "{}", log.of(step));
    (events, ms * 1000.0 * tsc_mhz(log.of("log")))
}

#[test]
fn perf_counts_on_whatever_the_budget() {
    check(Engine::Kvm);
}

/// On KVM both processors share one core, on emu each has its own.
pub(super) fn check(engine: Engine) {
    let (mhz, seconds, cores): (_, _, &[&str]) = match engine {
        Engine::Kvm => ("2500", 1.5, &["--cores", "1"]),
        Engine::Emu => ("1000", 0.5, &[]),
    };
    let folder = tempfile::tempdir().expect("a folder");
    let rates = folder.path().join("rates.toml");
    std::fs::write(&rates, RATES.replace("MHZ", mhz)).expect("a file");
    let rates = format!("sim={}", rates.display());
    let flags = [
        ["--cpu-vendor", "intel"],
        ["--pmu", "intel-v2"],
        ["--oversubscribe", "multiplex"],
        ["--counters", &rates],
    ];
    let flags = [flags.as_flattened(), cores].concat();
    let guest = guest(engine, image(), &flags);
    let script = Script::default()
        .step("log", LOG)
        .step("msr", "insmod /lib/modules/msr.ko")
        .step("turns", counted("budget programmable=1", seconds))
        .step(
            "without",
            counted("budget programmable=all,fixed=0", seconds),
        )
        .step("whole", counted("budget fixed=all", seconds));
    let log = script.run_on(&guest.with_host(folder.path().join("out")));

    // Three of them take turns on one counter, and nobody in the guest knows.
    let (events, right) = cycles(&log, "turns");
    for one in events {
        near("in turns", one, right, TOLERANCE);
    }
    assert_eq!(log.of("turns").matches("waiting").count(), 2);
    // The one in the fixed-function counter stands still.
    let (events, right) = cycles(&log, "without");
    let still = events.iter().filter(|one| **one < right / 10.0).count();
    assert_eq!(still, 1, "{}", log.of("without"));
    log.has("without", &["the host lets the guest use fewer counters"]);
    let (events, right) = cycles(&log, "whole");
    for one in events {
        near("whole", one, right, TOLERANCE);
    }
    assert!(!log.of("whole").contains("fewer counters"));
}
