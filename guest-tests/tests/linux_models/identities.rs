//! Debian's kernels on each named processor: the driver takes the path that is meant for it,
//! with its own tables, samples precise events by PEBS or IBS where there is one, and the kernel
//! warns of nothing.

use guest_tests::linux::perf::{
    COUNT_LOOPS, LOG, check_cycles_within, count, count_samples, near, samples, tsc_mhz,
};
use guest_tests::linux::{LinuxImage, Step, UnderUmpire};
use pmu_virt::Vendor;
use vmm::config::Engine;
use vmm::cpuid::Identity;

use super::{
    TOLERANCE, TROUBLE, check_instructions, counted, cycles, fixed, folded, newer, older, sampling,
};

/// A processor, and what shows which path the kernel took.
pub(super) struct Processor {
    name: &'static str,
    /// Family, model and stepping in `/proc/cpuinfo`.
    found: [u16; 3],
    /// What the kernel's log says of its driver.
    driver: &'static str,
    /// `caps/pmu_name`, which Intel's driver alone has.
    path: &'static str,
    /// Events of the path's own tables in sysfs; with a `!` one that it must not have.
    events: &'static [&'static str],
    /// What the kernel's log says of the processor besides.
    quirk: &'static str,
    /// Version and programmable counters.
    counts: [u8; 2],
    precise: Option<&'static Precise>,
}

/// Precise events of a processor whose PMU has a property for them.
struct Precise {
    /// `--pmu`; without [`Precise`] it is the processor's own.
    pmu: &'static str,
    /// What the kernel's log says of it.
    detected: &'static str,
    /// `caps/max_precise`.
    most: &'static str,
    /// Samples are marked as exact, and there are as many as the period has room for.
    exact: bool,
    /// `-a` where the kernel has no such samples of a task.
    of: &'static str,
}

/// Skylake's own format: the driver's constraints say which counters take it. The most precise
/// cycles are INST_RETIRED.PREC_DIST there.
const PEBS_3: Precise = Precise {
    pmu: "intel-v4,pebs=skid,pebs-format=3",
    detected: "PEBS fmt3+, Skylake events",
    most: "3",
    exact: true,
    of: "",
};

const PEBS_4: Precise = Precise {
    pmu: "intel-v5,pebs=skid",
    detected: "PEBS fmt4+-baseline",
    ..PEBS_3
};

const IBS: Precise = Precise {
    pmu: "amd-perfmonv2,ibs=on",
    detected: "perf: AMD IBS detected (0x000000ef)",
    most: "0",
    exact: false,
    of: "-a",
};

impl Precise {
    /// Lines of a script for [`Precise::check`]: cycles by period, and what `perf record` takes by
    /// itself.
    fn script(&self, engine: Engine) -> [String; 6] {
        let record = format!("perf record -q {}", self.of);
        let (seconds, period) = sampling(engine);
        let rate = match engine {
            Engine::Kvm => 100,
            Engine::Emu => 1000,
        };
        [
            "echo 0 > /proc/sys/kernel/perf_cpu_time_max_percent".to_owned(),
            "dmesg | grep -E 'PEBS|IBS'; cat /sys/bus/event_source/devices/cpu/caps/max_precise"
                .to_owned(),
            format!(
                "{record} -e cycles:pp -c {period} -o /tmp/pp \
                 perf stat -x, -o /tmp/stat -e cycles taskset 1 spin {seconds}; cat /tmp/stat"
            ),
            count_samples("/tmp/pp"),
            format!(
                "{record} -F {rate} -o /tmp/own taskset 1 spin {}",
                seconds / 2.0
            ),
            count_samples("/tmp/own"),
        ]
    }

    fn check(&self, engine: Engine, name: &str, steps: &[Step]) {
        let [_, detected, stat, cycles, _, own] = steps else {
            panic!("six steps");
        };
        let said = detected.output.trim();
        assert!(said.contains(self.detected), "{name}: {said}");
        assert!(
            said.ends_with(&format!("\n{}", self.most)),
            "{name}: {said}"
        );
        let [cycles, own] = [cycles, own].map(|step| samples(&step.output));
        println!("{name}: {cycles:?}, then {own:?}");
        assert!(cycles.busy >= 20 && own.busy >= 10, "{cycles:?}, {own:?}");
        if self.exact {
            let (_, period) = sampling(engine);
            let expected = count(&stat.output, "cycles") / f64::from(period);
            near("samples", cycles.busy.into(), expected, TOLERANCE);
            for found in [cycles, own] {
                assert_eq!(found.exact, found.all, "{name}: all are exact");
            }
        }
    }
}

const NEHALEM: Processor = Processor {
    name: "nehalem",
    found: [6, 0x1a, 5],
    driver: "Nehalem events, Intel PMU driver.",
    path: "nehalem",
    events: &["stalled-cycles-frontend", "!topdown-total-slots"],
    quirk: "CPU erratum AAJ80 worked around",
    counts: [3, 4],
    precise: None,
};

const SKYLAKE: Processor = Processor {
    name: "skylake",
    found: [6, 0x5e, 3],
    driver: "Skylake events, full-width counters, Intel PMU driver.",
    path: "skylake",
    events: &["topdown-total-slots", "!stalled-cycles-frontend"],
    quirk: "",
    counts: [4, 4],
    precise: None,
};

pub(super) const SKYLAKE_SERVER: Processor = Processor {
    name: "skylake-server",
    found: [6, 0x55, 4],
    ..SKYLAKE
};

const ICE_LAKE: Processor = Processor {
    name: "ice-lake",
    found: [6, 0x7e, 5],
    driver: "Icelake events, AnyThread deprecated, full-width counters, Intel PMU driver.",
    path: "icelake",
    events: &["ref-cycles", "!topdown-total-slots", "!slots"],
    quirk: "",
    counts: [5, 8],
    precise: None,
};

const ICE_LAKE_SERVER: Processor = Processor {
    name: "ice-lake-server",
    found: [6, 0x6a, 6],
    ..ICE_LAKE
};

/// Version 5, with precise events.
pub(super) const ICE_LAKE_PEBS: Processor = Processor {
    precise: Some(&PEBS_4),
    ..ICE_LAKE_SERVER
};

const ZEN2: Processor = Processor {
    name: "zen2",
    found: [0x17, 0x31, 0],
    driver: "Fam17h+ core perfctr, AMD PMU driver.",
    path: "",
    events: &["branch-misses", "cache-misses"],
    quirk: "",
    counts: [0, 6],
    precise: None,
};

pub(super) const ZEN3: Processor = Processor {
    name: "zen3",
    found: [0x19, 0x01, 1],
    ..ZEN2
};

const ZEN4: Processor = Processor {
    name: "zen4",
    found: [0x19, 0x11, 1],
    counts: [2, 6],
    ..ZEN2
};

const K8: Processor = Processor {
    name: "k8",
    found: [0xf, 0x21, 2],
    driver: "Performance Events: AMD PMU driver.",
    counts: [0, 4],
    ..ZEN2
};

const FAM10H: Processor = Processor {
    name: "fam10h",
    found: [0x10, 0x02, 3],
    quirk: "using AMD E400 aware idle routine",
    ..K8
};

/// 6.12 says nothing of the idle routine.
pub(super) const FAM10H_QUIET: Processor = Processor {
    quirk: "",
    ..FAM10H
};

const CPU: &str = "for key in 'cpu family' 'model[^ ]*' stepping; \
     do grep -m1 \"^$key.*: [0-9]*$\" /proc/cpuinfo; done | sed 's/.*: //'";
const PATH: &str = "cat /sys/bus/event_source/devices/cpu/caps/pmu_name || true";
const EVENTS: &str = "ls -1 --color=never /sys/bus/event_source/devices/cpu/events";
const QUIRK: &str = "dmesg | grep -E 'erratum|aware idle' || true";
const EVENTS_COUNTED: &str = "cycles,instructions";

fn vendor_of(name: &str) -> &'static str {
    let identity = Identity::parse(name).expect("a processor");
    match identity.vendor() {
        Vendor::Intel => "intel",
        Vendor::Amd => "amd",
    }
}

fn check(engine: Engine, processor: &Processor, image: LinuxImage) {
    let name = processor.name;
    println!("{name}");
    let vendor = vendor_of(name);
    let pmu = processor.precise.map_or("auto", |precise| precise.pmu);
    let flags = [
        ["--cpu-vendor", vendor],
        ["--cpu-model", name],
        cycles(engine),
        ["--pmu", pmu],
    ];
    let precise = processor.precise.map(|precise| precise.script(engine));
    let counting = counted(engine, EVENTS_COUNTED);
    let script: Vec<String> = [LOG, CPU, PATH, EVENTS, QUIRK, &counting, COUNT_LOOPS]
        .map(str::to_owned)
        .into_iter()
        .chain(precise.into_iter().flatten())
        .chain([TROUBLE.to_owned()])
        .collect();
    let guest = UnderUmpire::on(engine, image, flags.as_flattened());
    let steps = guest.run(&script.join("\n")).successes();
    let [
        log,
        cpu,
        path,
        events,
        quirk,
        counted,
        exact,
        sampled @ ..,
        trouble,
    ] = steps.as_slice()
    else {
        panic!("eight steps and more");
    };
    let log = folded(&log.output);
    let [version, counters] = processor.counts;
    let fixed = fixed(vendor, version, engine).count_ones();
    for line in [
        processor.driver.to_owned(),
        format!("... version: {version}"),
        format!("... generic registers: {counters}"),
        format!("... fixed-purpose events: {fixed}"),
    ] {
        assert!(log.contains(&line), "{name}: no {line:?} in:\n{log}");
    }
    let found = processor.found.map(|number| number.to_string()).join("\n");
    assert_eq!(cpu.output, found, "{name}");
    if !processor.path.is_empty() {
        assert_eq!(path.output, processor.path, "{name}");
    }
    let has = |event: &str| events.output.lines().any(|line| line == event);
    for event in processor.events {
        let wanted = event.strip_prefix('!');
        assert_eq!(
            has(wanted.unwrap_or(event)),
            wanted.is_none(),
            "{name}: {event}"
        );
    }
    assert!(
        quirk.output.contains(processor.quirk),
        "{name}: {}",
        quirk.output
    );
    check_cycles_within(&counted.output, &["cycles"], tsc_mhz(&log), TOLERANCE);
    check_instructions(engine, name, vendor, counted, exact);
    if let Some(precise) = processor.precise {
        precise.check(engine, name, sampled);
    }
    assert_eq!(trouble.output.trim(), "", "{name}");
}

pub(super) fn check_all(engine: Engine, processors: &[Processor], image: impl Fn() -> LinuxImage) {
    for processor in processors {
        check(engine, processor, image());
    }
}

#[test]
fn linux_6_1_takes_the_path_of_each_intel_processor() {
    let skylake = Processor {
        precise: Some(&PEBS_3),
        ..SKYLAKE
    };
    check_all(Engine::Kvm, &[NEHALEM, skylake, ICE_LAKE], older);
}

#[test]
fn linux_6_1_takes_the_path_of_each_amd_processor() {
    let zen4 = Processor {
        precise: Some(&IBS),
        ..ZEN4
    };
    check_all(Engine::Kvm, &[K8, FAM10H, ZEN2, zen4], older);
}

/// Of the newer kernel what KVM has a part in: records that the VMM writes into a guest's memory.
#[test]
fn linux_6_12_takes_the_path_and_the_records_of_ice_lake() {
    check(Engine::Kvm, &ICE_LAKE_PEBS, newer());
}
