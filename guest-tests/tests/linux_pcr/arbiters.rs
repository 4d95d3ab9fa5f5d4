//! Firmware holds a counter, CPUID follows, and the arbiters share the others.

use std::time::Duration;

use arbiter::abi::{MSR_BASE, MSR_STATUS};
use guest_tests::linux::perf::{LOG, check_cycles_within, tsc_mhz};
use guest_tests::linux::{self, Log, MODULES, SIMULATED_CYCLES, Script, lines};
use vmm::config::Engine;

use super::{EVENTS, FIRMWARE, TOLERANCE, guest, image, is_private, perf};

/// A line that has samples taken by PMI of both events, about fifty of each.
fn record(engine: Engine) -> String {
    let period = match engine {
        Engine::Kvm => 25_000_000,
        Engine::Emu => 10_000_000,
    };
    format!(
        "echo 0 >/proc/sys/kernel/perf_cpu_time_max_percent; \
         perf record -q -e cycles -e cpu-cycles -c {period} -o /tmp/d taskset 1 spin 0.5 \
         >/dev/null; perf script -i /tmp/d --comm spin -F event >/tmp/events; \
         grep -c '^ *cycles' /tmp/events; grep -c cpu-cycles /tmp/events"
    )
}

/// On a machine without reservations the modules say so, and leave nothing behind.
#[test]
fn arbiters_find_no_reservations_elsewhere() {
    let load = |module: &&str| format!("insmod /lib/modules/{module}.ko");
    let script: Vec<String> = MODULES[..4].iter().map(load).collect();
    let script = format!(
        "{}\ndmesg | grep pcr_\ncat /proc/modules /sys/kernel/debug/kprobes/list",
        script.join("\n")
    );
    let guest = image().with_script(&script).expect("the initramfs");
    let console = guest.emulate(Duration::from_secs(120)).expect("QEMU works");
    let steps = linux::steps(&console);
    let [loads @ .., log, left] = steps.as_slice() else {
        panic!("six steps:\n{console}");
    };
    for (module, step) in MODULES.iter().zip(loads) {
        assert!(step.output.contains("No such device"), "{}", step.output);
        let line = format!("{module}: no counter reservations on this machine");
        assert!(log.output.contains(&line), "{}", log.output);
    }
    assert!(!log.output.contains("WARNING"), "{}", log.output);
    assert_eq!(left.output, "");
}

/// What differs between the models.
pub(super) struct Case {
    flags: &'static [&'static str],
    /// What the kernel has: all, and once the firmware has its own.
    counters: [u32; 2],
    /// Registers of the kernel's first counter.
    select: u32,
    counter: u32,
    /// Counts cycles.
    cycles: u32,
    /// Whether the arbiter's client gets a counter that Linux has no name for, beside firmware.
    spare: bool,
}

pub(super) const AMD_PERFMONV2: Case = Case {
    flags: &["--pmu", "amd-perfmonv2", "--scheme", "single"],
    counters: [6, 5],
    select: 0xc001_0200,
    counter: 0xc001_0201,
    cycles: 0x53_0076,
    spare: false,
};

/// Its CPUID can announce 6 counters or 4; the fifth has no name.
pub(super) const AMD_CORE: Case = Case {
    flags: &["--pmu", "amd-core"],
    counters: [6, 4],
    select: 0xc001_0000,
    counter: 0xc001_0004,
    cycles: 0x53_0076,
    spare: true,
};

pub(super) const INTEL_V2: Case = Case {
    flags: &["--cpu-vendor", "intel", "--pmu", "intel-v2"],
    counters: [4, 3],
    select: 0x186,
    counter: 0xc1,
    cycles: 0x53_003c,
    spare: false,
};

/// Firmware and arbiters get their counters from a master, and a stock kernel uses them.
#[test]
fn amd_perfmonv2_arbiters_share_with_firmware_under_a_master() {
    check(Engine::Kvm, &AMD_PERFMONV2);
}

#[test]
fn amd_core_arbiters_share_with_firmware() {
    check(Engine::Kvm, &AMD_CORE);
}

#[test]
fn intel_v2_arbiters_share_with_firmware() {
    check(Engine::Kvm, &INTEL_V2);
}

impl Case {
    /// A component that knows nothing of reservations: programs the first counter of CPU 1 and
    /// looks at it. Four lines.
    fn rogue(&self) -> String {
        let (select, counter, cycles) = (self.select, self.counter, self.cycles);
        format!(
            "msr 1 {select:#x} {cycles:#x}; msr 1 {select:#x}; \
             msr 1 {counter:#x} 4660; msr 1 {counter:#x}"
        )
    }
}

/// The number of the kernel's first counter: the firmware has the very first, where there is any.
fn first(engine: Engine) -> u32 {
    u32::from(engine == Engine::Kvm)
}

/// The statuses of the kernel's first counter on both CPUs.
fn statuses(engine: Engine) -> String {
    let register = MSR_BASE + MSR_STATUS + first(engine);
    format!("msr 0 {register:#x}; msr 1 {register:#x}")
}

fn script(engine: Engine, case: &Case) -> Script {
    let (rogue, statuses) = (case.rogue(), statuses(engine));
    let perf = perf(engine);
    let under_perf = format!(
        "perf stat -o /tmp/e -e cycles sh -c '{statuses}; spin 0.1 >/dev/null'; {statuses}"
    );
    let watchdog = "/proc/sys/kernel/nmi_watchdog";
    Script::default()
        .step("log", LOG)
        .step("plain", &perf)
        .step("record", record(engine))
        .step("msr", "insmod /lib/modules/msr.ko allow_writes=on")
        .load("minimal", "pcr_minimal", "")
        .step("minimal perf", &perf)
        .step("minimal rogue", rogue.as_str())
        .step("minimal out", "rmmod pcr_minimal")
        // The counter runs when the lock comes, so a dropped read differs from a real one.
        .step("before", rogue.as_str())
        .load("enforcing", "pcr_enforcing", "")
        .step("drop", rogue.as_str())
        .step("open", under_perf)
        .step("enforcing perf", &perf)
        .step("enforcing out", "rmmod pcr_enforcing")
        .step("watchdog", format!("echo 1 >{watchdog}"))
        .load("watched", "pcr_enforcing", "fault=1")
        .step("watched status", statuses)
        .step("watched out", "rmmod pcr_enforcing")
        .step("unwatched", format!("echo 0 >{watchdog}"))
        .step("fault", rogue)
        .step("faulting perf", &perf)
        .step("faulting out", "rmmod pcr_enforcing")
        .load("full", "pcr_full", "")
        .load("client", "pcr_client", "")
        .step("busy", "rmmod pcr_full")
        .step("perf beside", "perf stat -x, -e cycles true")
        .step("client out", "rmmod pcr_client; dmesg | grep release")
        .step("full perf", perf)
        .step("full out", "rmmod pcr_full")
}

/// The kernel counts right, without and with each arbiter; rogues are dropped, and faulted. On KVM
/// firmware holds PMC0, and CPUID follows.
pub(super) fn check(engine: Engine, case: &Case) {
    let (own, counters): (&[&str], u32) = match engine {
        Engine::Kvm => (&FIRMWARE, case.counters[1]),
        Engine::Emu => (&SIMULATED_CYCLES, case.counters[0]),
    };
    let flags = [own, case.flags].concat();
    let log = script(engine, case).run_on(&guest(engine, image(), &flags));

    log.has("log", &[&format!("... generic registers:      {counters}")]);
    let mhz = tsc_mhz(log.of("log"));
    let reports = ["plain", "minimal perf", "enforcing perf", "faulting perf"];
    for report in reports.iter().chain(&["full perf"]) {
        check_cycles_within(log.of(report), &EVENTS, mhz, TOLERANCE);
    }
    for samples in lines::<2>(log.of("record")) {
        let samples: u32 = samples.parse().expect("a number");
        assert!((20..=80).contains(&samples), "{}", log.of("record"));
    }
    for loaded in ["minimal", "enforcing", "watched", "full"] {
        if engine == Engine::Kvm {
            log.has(loaded, &["PMC0 is the firmware's on CPU 0", "CPU 1"]);
        }
        let first = first(engine);
        let locked = [first, first + 1].map(|pmc| format!("PMC{pmc} locked on 2 CPUs"));
        log.has(loaded, &locked.each_ref().map(String::as_str));
    }
    check_rogue(&log, case);
    check_locks(&log);
    check_client(&log, mhz, case.spare && engine == Engine::Kvm);
    for out in ["minimal out", "enforcing out", "faulting out", "full out"] {
        assert!(log.succeeded(out), "{}", log.of(out));
    }
}

/// The minimal arbiter enforces nothing within the kernel, the others do.
fn check_rogue(log: &Log, case: &Case) {
    for free in ["minimal rogue", "before"] {
        let [written, select, _, counted] = lines(log.of(free));
        assert_eq!(written, "written");
        assert_eq!(select, format!("{:#x}", case.cycles));
        assert_ne!(counted, "0x0");
    }
    assert_eq!(lines(log.of("drop")), ["written", "0x0", "written", "0x0"]);
    assert_eq!(lines(log.of("fault")), ["fault"; 4]);
}

/// Counters are open while the kernel's users have them, those of before included.
fn check_locks(log: &Log) {
    let open: [&str; 4] = lines(log.of("open"));
    let watched: [&str; 2] = lines(log.of("watched status"));
    assert_eq!(open.map(is_private), [false, false, true, true]);
    assert_eq!(watched.map(is_private), [false, false]);
    assert!(!log.succeeded("watched out"), "the watchdog has counters");
}

/// The client's counter is its own.
fn check_client(log: &Log, mhz: f64, spare: bool) {
    let reports: [&str; 2] = lines(log.of("client"));
    for line in reports {
        let (_, count) = line.split_once("counted ").expect("the verb");
        let (count, _) = count.split_once(' ').expect("a unit");
        let cycles: f64 = count.parse().expect("a count");
        let ratio = cycles / (2000.0 * mhz);
        println!("{ratio:.3} of the cycles of 2 ms");
        // It waits by the TSC, which goes on while the guest does not run: on a busy
        // machine that is most of the 2 ms, and none of it is counted.
        assert!(ratio > 0.05, "{line}");
        assert!(line.ends_with("it reads 0"), "{line}");
    }
    assert!(!log.succeeded("busy"), "the client needs it");
    // Linux reserves all of its counters or none.
    assert_eq!(log.succeeded("perf beside"), spare);
    if !spare {
        log.has("perf beside", &["Device or resource busy"]);
    }
    log.has(
        "client out",
        &["with a forged cookie: error -1", "release: error 0"],
    );
}
