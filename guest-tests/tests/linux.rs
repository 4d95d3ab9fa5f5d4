//! The main job, end to end: `umpire run` boots an unmodified Debian kernel, on KVM in L1 or here on
//! the engine emu, and its own `perf` works with the virtual PMU.

use guest_tests::linux::perf::{
    COUNT_LOOPS, LOG, check_cycles, check_cycles_within, check_loops, count, cycle_ratios, field,
    near, tsc_mhz,
};
use guest_tests::linux::{LinuxImage, SIMULATED_CYCLES, Step, UnderUmpire};
use pmu_virt::Vendor;
use vmm::config::Engine;

/// How far the number of samples may be from count / period.
const SAMPLES_TOLERANCE: f64 = 0.10;
/// How far the cycles of two vCPUs may be from those of the processor that they share.
const BOTH_TOLERANCE: f64 = 0.10;

fn guest(flags: &[&str]) -> UnderUmpire {
    guest_on(Engine::Kvm, flags)
}

fn guest_on(engine: Engine, flags: &[&str]) -> UnderUmpire {
    let image = LinuxImage::fetch().expect("the guest's image");
    UnderUmpire::on(engine, image, flags)
}

/// How much of it is measured.
struct Amount {
    /// Reports: one of them has to be right where neighbours may disturb it.
    rounds: &'static str,
    /// For how long each program runs.
    seconds: f64,
    /// Cycles between two samples.
    period: u32,
    /// What the counts of cycles are.
    provenance: &'static str,
    /// An event that nobody counts.
    dead: &'static str,
}

impl Amount {
    fn on(engine: Engine) -> Self {
        match engine {
            // About 100 samples a second on a TSC of 2 to 3 GHz.
            Engine::Kvm => Self {
                rounds: "1 2 3",
                seconds: 1.0,
                period: 25_000_000,
                provenance: "derived",
                dead: "r1d1",
            },
            // A second of a guest takes some of the host's.
            Engine::Emu => Self {
                rounds: "1",
                seconds: 0.1,
                period: 2_000_000,
                provenance: "simulated",
                // On AMD's processors D1H are conditional branches.
                dead: "r17d",
            },
        }
    }

    fn reports(&self) -> usize {
        self.rounds.split(' ').count()
    }

    /// Samples by PMI of a program that runs twice as long as the others.
    fn record(&self) -> String {
        format!(
            "perf record -q -e cycles -c {} -o /tmp/data \
             perf stat -x, -o /tmp/stat -e cycles taskset 1 spin {}",
            self.period,
            2.0 * self.seconds
        )
    }

    /// Counters of the second vCPU, read by the guest's own program while `perf` has them: one that
    /// is counted, and one whose event nobody counts.
    fn accounts(&self) -> String {
        format!(
            "insmod /lib/modules/msr.ko && taskset 2 perf stat -x, -o /tmp/c -e cycles,{} \
             -- pmu-accounting -x, 1 && cat /tmp/c",
            self.dead
        )
    }

    fn accounts_of_all(&self) -> String {
        let dead = self.dead;
        format!("perf stat -a -o /tmp/c -e {dead} -- pmu-accounting")
    }

    /// Both vCPUs at once; then the reports of the first one.
    fn both(&self) -> String {
        let report = |mask, file| {
            format!(
                "taskset {mask} perf stat -x, --append -o {file} -e cycles,task-clock spin {}",
                self.seconds
            )
        };
        format!(
            "for i in {}; do {} & {}; wait; done; cat /tmp/a",
            self.rounds,
            report(1, "/tmp/a"),
            report(2, "/tmp/b")
        )
    }
}

/// Samples of `spin` taken by PMI, against the count of the same run.
fn check_samples(stat: &str, samples: &str, period: u32) {
    let symbols: Vec<&str> = samples.lines().map(str::trim).collect();
    let number = symbols.len();
    let expected = count(stat, "cycles") / f64::from(period);
    let (found, busy) = (
        f64::from(u32::try_from(number).expect("some hundred")),
        symbols
            .iter()
            .filter(|line| line.contains("spin_hot"))
            .count(),
    );
    near("samples", found, expected, SAMPLES_TOLERANCE);
    assert!(
        2 * busy > number,
        "{busy} of {number} in spin_hot:\n{samples}"
    );
}

const SAMPLES: &str = "perf script -i /tmp/data --comm spin,taskset -F ip,sym";
/// The steps that every model shares, with the events of `stat`.
fn script(amount: &Amount, stat: &str) -> String {
    let Amount {
        rounds, seconds, ..
    } = amount;
    [
        LOG,
        // In emulation a PMI takes so long that the kernel would lower the rate.
        "echo 0 > /proc/sys/kernel/perf_cpu_time_max_percent",
        &format!(
            "for i in {rounds}; do \
             perf stat -x, --append -o /tmp/s -e {stat},task-clock taskset 1 spin {seconds}; \
             done; cat /tmp/s"
        ),
        COUNT_LOOPS,
        &amount.record(),
        "cat /tmp/stat",
        SAMPLES,
        &amount.both(),
        "cat /tmp/b",
        &amount.accounts(),
        &amount.accounts_of_all(),
    ]
    .join("\n")
}

/// What the guest's own program says of a counted event and of one that nobody counts, to scripts
/// and to people.
fn check_accounts(csv: &str, table: &str, amount: &Amount) {
    println!("{csv}\n{table}");
    let of = |state: &str, provenance: &str| -> Vec<&str> {
        let found = csv.lines().map(|line| line.split(',').collect::<Vec<_>>());
        let mut found =
            found.filter(|fields| fields.len() == 10 && fields[4..6] == [state, provenance]);
        found
            .next_back()
            .unwrap_or_else(|| panic!("no {state} counter in:\n{csv}"))
    };
    let counted = of("counting", amount.provenance);
    let dead = of("unavailable", "none");
    assert_eq!((counted[0], counted[3]), ("1", "uk"), "{csv}");
    assert_eq!(dead[..4], ["1", dead[1], amount.dead, "uk"], "{csv}");
    let ticks = |fields: &[&str], at: usize| -> u64 { fields[at].parse().expect("a number") };
    assert!(ticks(&counted, 7) > 0, "{csv}");
    assert_eq!(counted[7], counted[8], "{csv}");
    assert!(ticks(&dead, 7) > 0, "{csv}");
    assert_eq!(ticks(&dead, 8), 0, "{csv}");
    assert_eq!(
        (counted[9], dead[9]),
        ("", "no source of the host counts the event")
    );
    // The same of both vCPUs; and nothing there looks like a count of 0.
    for vcpu in ["0", "1"] {
        let line = table.lines().find(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.len() > 4 && [words[0], words[2], words[4]] == [vcpu, amount.dead, "unavailable"]
        });
        let line = line.unwrap_or_else(|| panic!("no line for vCPU {vcpu} in:\n{table}"));
        assert!(line.contains("<not counted>   0.00 %"), "{line}");
        assert!(line.ends_with(dead[9]), "{line}");
    }
}

/// Two busy vCPUs on one processor, L1's or emu's thread: each counts what it ran, together that
/// processor.
fn check_both(first: &str, second: &str, mhz: f64, reports: usize) {
    let [first, second] = [first, second].map(|output| cycle_ratios(output, &["cycles"], mhz));
    println!("cycles to task-clock: {first:.4?} and {second:.4?}");
    assert!(first.len() == reports && second.len() == reports);
    let part = |ratio: &f64| (0.25..0.75).contains(ratio);
    assert!(first.iter().chain(&second).all(part));
    // Exits and switches take time of the processor that nobody counts.
    let mut both = first.iter().zip(&second).map(|(a, b)| a + b);
    assert!(both.any(|both| (both - 1.0).abs() <= BOTH_TOLERANCE));
}

/// A model, and what shows that the kernel found it.
struct Model {
    flags: &'static [&'static str],
    /// Events that count cycles.
    cycles: &'static [&'static str],
    log: &'static [&'static str],
}

const AMD_CORE: Model = Model {
    flags: &["--pmu", "amd-core", "--cpus", "2"],
    cycles: &["cycles"],
    log: &[
        "core perfctr, AMD PMU driver",
        "... generic registers:      6",
        "... bit width:              48",
    ],
};

const INTEL_V2: Model = Model {
    flags: &["--cpu-vendor", "intel", "--pmu", "intel-v2", "--cpus", "2"],
    cycles: &["cycles", "ref-cycles"],
    log: &[
        "Intel PMU driver",
        "... version:                2",
        "... generic registers:      4",
        "... fixed-purpose events:   3",
    ],
};

/// What is the same on either engine; then the kernel's log, and the report of its cycles and of
/// `loops`.
fn check_model(engine: Engine, model: &Model) -> [String; 3] {
    let amount = Amount::on(engine);
    let cycles: &[&str] = match engine {
        Engine::Kvm => &[],
        Engine::Emu => &SIMULATED_CYCLES,
    };
    let flags = [model.flags, cycles].concat();
    let stat = format!("{},instructions", model.cycles.join(","));
    let guest = guest_on(engine, &flags).alone();
    let steps = guest.run(&script(&amount, &stat)).successes();
    let outputs: Vec<String> = steps.into_iter().map(|step| step.output).collect();
    let [
        dmesg,
        _,
        counted,
        loops,
        _,
        stat,
        samples,
        first,
        second,
        accounts,
        all,
    ] = <[String; 11]>::try_from(outputs).expect("eleven steps");
    for line in model.log {
        assert!(dmesg.contains(line), "no {line:?} in:\n{dmesg}");
    }
    assert!(!dmesg.contains("Broken BIOS"), "{dmesg}");
    let mhz = tsc_mhz(&dmesg);
    check_cycles(&counted, model.cycles, mhz);
    check_samples(&stat, &samples, amount.period);
    check_both(&first, &second, mhz, amount.reports());
    check_accounts(&accounts, &all, &amount);
    [dmesg, counted, loops]
}

#[test]
fn amd_core_counts_and_samples_in_debians_kernel() {
    check_model(Engine::Kvm, &AMD_CORE);
}

#[test]
fn amd_core_counts_and_samples_on_emu() {
    let [.., loops] = check_model(Engine::Emu, &AMD_CORE);
    check_loops(&loops, Vendor::Amd);
}

/// `clock` counts no instructions.
#[test]
fn intel_v2_counts_and_samples_in_debians_kernel() {
    let [dmesg, counted, _] = check_model(Engine::Kvm, &INTEL_V2);
    let marked = "CPUID marked event: 'instructions' unavailable";
    assert!(dmesg.contains(marked), "{dmesg}");
    assert_eq!(field(&counted, "instructions"), "<not supported>");
}

#[test]
fn intel_v2_counts_and_samples_on_emu() {
    let [dmesg, _, loops] = check_model(Engine::Emu, &INTEL_V2);
    assert!(!dmesg.contains("'instructions' unavailable"), "{dmesg}");
    check_loops(&loops, Vendor::Intel);
}

/// Each way of trapping RDPMC serves the kernel's driver; patched, the guest keeps all
/// of its debug registers, and its breakpoints work beside its counters.
#[test]
fn each_rdpmc_trap_serves_debians_kernel() {
    let script = format!(
        "{LOG}\n\
         for i in 1 2 3; do \
         perf stat -x, --append -o /tmp/s -e cycles,task-clock taskset 1 spin 1; \
         done; cat /tmp/s\n\
         perf test 23 2>&1"
    );
    // Beside a breakpoint the VMM kicks the vCPU every millisecond, which takes a loop 11 to 22 %
    // of its time in L1. That time runs on the guest's task-clock and is not counted.
    for (mode, said, tolerance) in [
        ("patch", "RDPMC is trapped by a patch", 0.10),
        ("breakpoint", "RDPMC is trapped by a breakpoint", 0.25),
    ] {
        let flags = [
            "--pmu",
            "amd-core",
            "--cpus",
            "2",
            "--rdpmc-trap",
            mode,
            "-vv",
        ];
        let run = guest(&flags).alone().run(&script);
        assert!(run.errors.contains(said), "{mode}:\n{}", run.errors);
        let steps = run.successes();
        let mhz = tsc_mhz(&steps[0].output);
        check_cycles_within(&steps[1].output, &["cycles"], mhz, tolerance);
        // Watchpoints, after a counter was used.
        let watched = &steps[2].output;
        println!("{watched}");
        assert!(mode != "patch" || !watched.contains("FAILED"), "{watched}");
    }
}

/// Four vCPUs on two cores, all busy: each gets on, and their cycles are those of two cores.
#[test]
fn vcpus_share_cores_under_debians_kernel() {
    let load = "nproc\n\
         for c in 1 2 4 8; do \
         taskset $c perf stat -x, -o /tmp/s$c -e cycles,task-clock spin 2 & done; wait\n\
         cat /tmp/s1\ncat /tmp/s2\ncat /tmp/s4\ncat /tmp/s8\n\
         sleep 1";
    let flags = ["--pmu", "amd-core", "--cpus", "4", "--cores", "2"];
    // Both cores' threads take turns on L1's processor.
    let script = format!("{load}\n{LOG}");
    let steps = guest(&flags).run(&script).successes();
    let [nproc, _, reports @ .., _, dmesg] = steps.as_slice() else {
        panic!("eight steps");
    };
    assert_eq!(nproc.output.trim(), "4");
    let mhz = tsc_mhz(&dmesg.output);
    let (mut all, mut longest) = (0.0, 0.0f64);
    for Step { output, .. } in reports {
        let (cycles, clock) = (
            count(output, "cycles"),
            count(output, "task-clock") * mhz * 1000.0,
        );
        println!("cycles to task-clock: {:.3}", cycles / clock);
        // Traps take their part on a busy host, and so does the neighbour on the core.
        assert!(cycles > 0.05 * clock, "{output}");
        all += cycles;
        longest = longest.max(clock);
    }
    // They do not start all at once.
    let cores = all / longest;
    assert!(cores < 2.5, "the cycles of {cores:.2} cores: {reports:#?}");
    for trouble in ["soft lockup", "self-detected stall"] {
        assert!(!dmesg.output.contains(trouble), "{}", dmesg.output);
    }
}

fn check_without_a_pmu(engine: Engine, vendor: &str) {
    let flags = ["--pmu", "none", "--cpu-vendor", vendor];
    let stat = "perf stat -x, -o /tmp/s -e cycles true; cat /tmp/s";
    let guest = guest_on(engine, &flags);
    let steps = guest.run(&format!("{LOG}\n{stat}")).successes();
    let dmesg = &steps[0].output;
    for driver in ["AMD PMU driver", "Intel PMU driver"] {
        assert!(!dmesg.contains(driver), "{dmesg}");
    }
    assert!(!dmesg.contains("Broken BIOS"), "{dmesg}");
    assert_eq!(field(&steps[1].output, "cycles"), "<not supported>");
}

/// L1's processor is AMD's.
#[test]
fn without_a_pmu_the_kernel_finds_none() {
    check_without_a_pmu(Engine::Kvm, "host");
}

#[test]
fn without_a_pmu_the_kernel_finds_none_on_emu() {
    for vendor in ["amd", "intel"] {
        check_without_a_pmu(Engine::Emu, vendor);
    }
}

/// Without a trap KVM's #GP ends the kernel, at its first RDPMC and not before.
#[test]
fn without_a_trap_the_kernel_ends_at_its_first_rdpmc() {
    let guest = guest(&["--pmu", "amd-core", "--rdpmc-trap", "none"])
        .with_kernel_options("nmi_watchdog=0 oops=panic");
    let script = format!("{LOG}\nperf stat -e cycles true\necho went on");
    let (console, errors) = guest.run_to_any_end(&script);
    for line in [
        "AMD PMU driver",
        "general protection fault",
        "RIP: 0010:native_read_pmc",
        "Kernel panic - not syncing: Fatal exception",
    ] {
        assert!(
            console.contains(line),
            "no {line:?} in:\n{console}\n{errors}"
        );
    }
    assert!(!console.contains("#### begin 3"), "{console}");
}
