//! The words for happenings, plans, and the demo itself where this host has a KVM.

use pmu_virt::{ClockBackend, MsrIndex, PmuModel, ReadOutcome, Ring, Vendor, WriteOutcome};
use umpire_events::{LibraryError, NoTables};
use vmm::doctor::{self, Refusal};
use vmm::kvm::VcpuId;
use vmm::vcpu::TrapEvent;

use super::record::{Happening, What, describe};
use super::{
    CounterRow, Engine, Plan, decline, host_vendor, perform, perform_emulated, write_report,
};
use crate::flags::DemoFlags;

const SELECT1: MsrIndex = MsrIndex(0xc001_0202);
const COUNTER0: MsrIndex = MsrIndex(0xc001_0201);

/// The outcome cells of `events` under amd-perfmonv2 with the clock backend.
fn check(events: &[TrapEvent], expected: &[&str]) {
    let happenings: Vec<_> = events
        .iter()
        .map(|event| Happening {
            micros: 0,
            vcpu: VcpuId(0),
            what: What::Trap(event.clone()),
        })
        .collect();
    let model = PmuModel::parse("amd-perfmonv2").unwrap();
    let rows = describe(&happenings, &model, &ClockBackend::new());
    let outcomes: Vec<_> = rows.iter().map(|row| row.outcome.as_str()).collect();
    assert_eq!(outcomes, expected);
}

fn write(msr: MsrIndex, value: u64) -> TrapEvent {
    TrapEvent::MsrWrite {
        msr,
        value,
        outcome: WriteOutcome::Done,
    }
}

fn rdpmc(index: u32, outcome: ReadOutcome) -> TrapEvent {
    TrapEvent::Rdpmc {
        index,
        ring: Ring::Kernel,
        outcome,
    }
}

#[test]
fn what_nobody_counts_is_not_called_a_count() {
    let zero = ReadOutcome::Value(0);
    check(
        &[
            write(SELECT1, 0x43_00c0),
            rdpmc(1, zero),
            rdpmc(0, zero),
            write(SELECT1, 0x43_0076),
            rdpmc(1, zero),
        ],
        &[
            "the clock backend cannot count instructions: stays frozen",
            "frozen: not a count",
            "count 0",
            "count core cycles, derived",
            "count 0",
        ],
    );
}

#[test]
fn presets_and_faults() {
    check(
        &[
            write(COUNTER0, 0xffff_ffff_fff0),
            write(COUNTER0, 16),
            rdpmc(63, ReadOutcome::Gp),
        ],
        &[
            "set: 16 before the overflow",
            "set: count 16",
            "no such counter: its #GP passes on to the guest's handler",
        ],
    );
}

#[test]
fn without_kvm_no_count_is_shown() {
    let refusal = Refusal::Obstacle(vmm::probe::HostRefusal::Unknown);
    let mut text = Vec::new();
    decline(&refusal, "demo", false, &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("nothing was counted: the RDPMC"), "{text}");
    assert!(text.contains("cargo l1"), "{text}");
    let mut json = Vec::new();
    decline(&refusal, "demo", true, &mut json).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["shown"], false);
}

#[test]
fn without_kvm_instructions_are_counted_to_the_last_one() {
    let show = || {
        let plan = Plan::tour(Vendor::Intel).unwrap();
        let because = Some("the reason".to_owned());
        perform_emulated(&plan, because).unwrap()
    };
    let report = show();
    let [cycles, instructions, _] = &report.counters[..] else {
        panic!("{:?}", report.counters);
    };
    assert_eq!(instructions.event, "instructions");
    assert_eq!(instructions.provenance, "exact");
    assert_eq!(cycles.provenance, "simulated");
    assert_eq!(report.pmis, 1);
    // Nothing of the host's goes in.
    let again = show();
    assert_eq!(
        (&report.rows, &report.counters),
        (&again.rows, &again.counters)
    );
    let mut text = Vec::new();
    write_report(&report, false, &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(
        text.contains("KVM cannot be used here: the reason."),
        "{text}"
    );
    assert!(!text.contains("<not supported>"), "{text}");
}

/// On a host that cannot run it, the refusal must be a stated one.
#[test]
fn the_demo_shows_an_overflow_and_its_pmi() {
    let host = match doctor::open() {
        Ok(host) => host,
        Err(refusal) => return assert!(matches!(refusal, Refusal::Host(_)), "{refusal}"),
    };
    let probe = doctor::check(&host).unwrap();
    let report = perform(&host, &probe, &Plan::tour(host_vendor()).unwrap()).unwrap();
    let outcomes: Vec<_> = report.rows.iter().map(|row| row.outcome.as_str()).collect();
    let found = |part: &str| outcomes.iter().any(|outcome| outcome.contains(part));
    for part in [
        "PMI: NMI into the guest",
        "frozen",
        "no such counter",
        "no such register",
    ] {
        assert!(found(part), "no {part:?} in {outcomes:#?}");
    }
    assert_eq!(report.pmis, 1);
    let times: Vec<_> = report.rows.iter().map(|row| row.time_us).collect();
    assert!(times.is_sorted(), "{times:?}");
    let uncounted = report.counters.iter().filter(|row| row.counted.is_none());
    assert_eq!(uncounted.count(), 1);
    let mut text = Vec::new();
    write_report(&report, false, &mut text).unwrap();
    assert!(String::from_utf8(text).unwrap().contains("<not supported>"));
}

/// The last line sends nobody to an engine that cannot count the event either.
#[test]
fn the_last_line_promises_what_a_processor_in_software_counts() {
    let tour = Plan::tour(Vendor::Intel).unwrap();
    let mut report = perform_emulated(&tour, None).unwrap();
    report.engine = Engine::Kvm.to_string();
    let line = "a processor in software counts exactly: umpire demo --engine emu";
    for (events, expected) in [
        (
            &["instructions"][..],
            Some("What is <not supported> here, "),
        ),
        (&["branch-misses"], None),
        (
            &["instructions", "branch-misses"],
            Some("Some of what is <not supported> here, "),
        ),
        (&["cycles"], None),
    ] {
        let plan = plan(&flags(events, Some("intel-v2"), None)).unwrap();
        let clock = ClockBackend::new();
        let rows = plan.events.iter();
        report.counters = rows
            .map(|event| CounterRow::of_event(event, &[], &clock))
            .collect();
        let mut text = Vec::new();
        write_report(&report, false, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let found = text.lines().find_map(|one| one.strip_suffix(line));
        assert_eq!(found, expected, "{text}");
    }
}

fn flags(events: &[&str], pmu: Option<&str>, counters: Option<&str>) -> DemoFlags {
    DemoFlags {
        events: events.iter().map(|event| (*event).to_owned()).collect(),
        pmu: pmu.map(str::to_owned),
        counters: counters.map(str::to_owned),
        ..DemoFlags::default()
    }
}

/// The plan without libpfm4 on AMD's processor.
fn plan(flags: &DemoFlags) -> Result<Plan, String> {
    let names = NoTables(LibraryError::TooLate);
    Plan::new(flags, Vendor::Amd, &names).map_err(|error| error.to_string())
}

#[test]
fn every_event_gets_a_counter() {
    let check = |events: &[&str], pmu: Option<&str>, model: &str, counters: &[&str]| {
        let plan = plan(&flags(events, pmu, None)).unwrap();
        let placed: Vec<_> = plan
            .events
            .iter()
            .map(|one| one.counter.to_string())
            .collect();
        assert_eq!(
            (plan.model.name(), placed),
            (
                model,
                counters.iter().map(|one| (*one).to_owned()).collect()
            )
        );
    };
    check(&[], None, "amd-perfmonv2", &[]);
    check(
        &["cycles", "branches"],
        None,
        "amd-perfmonv2",
        &["PMC0", "PMC1"],
    );
    check(
        &["cycles"; 6],
        None,
        "amd-perfmonv2",
        &["PMC0", "PMC1", "PMC2", "PMC3", "PMC4", "PMC5"],
    );
    let mixed = ["cycles", "ref-cycles", "loads", "r530100"];
    check(
        &mixed,
        Some("intel-v2"),
        "intel-v2",
        &["PMC0", "FIXED2", "PMC1", "FIXED0"],
    );
    // AMD has no slots: another model is taken.
    check(&["slots", "cycles"], None, "intel-v5", &["PMC0", "PMC1"]);
}

#[test]
fn bad_plans_are_named() {
    let check = |events: &[&str], pmu: Option<&str>, counters: Option<&str>, parts: &[&str]| {
        let error = plan(&flags(events, pmu, counters)).expect_err("a bad plan");
        assert!(!error.contains('\n'), "{error}");
        for part in parts {
            assert!(error.contains(part), "no {part:?} in: {error}");
        }
    };
    check(&["cycels"], None, None, &["--event", "cycels", "cycles"]);
    check(
        &["slots", "loads"],
        Some("amd-core"),
        None,
        &["--event", "slots", "intel-v2"],
    );
    check(
        &["cycles"],
        Some("z80"),
        None,
        &["--pmu", "z80", "amd-core"],
    );
    check(
        &["cycles"],
        None,
        Some("abacus"),
        &["--counters", "abacus", "step"],
    );
    check(
        &["cycles"; 7],
        None,
        None,
        &["7 events", "amd-perfmonv2 has 6"],
    );
    check(
        &["cycles"; 3],
        Some("intel-v1"),
        None,
        &["3 events", "intel-v1 has 2"],
    );
    let twice = ["ref-cycles:u", "r530300"];
    check(
        &twice,
        Some("intel-v2"),
        None,
        &["ref-cycles:u", "r530300", "fixed counter 2"],
    );
}

/// The work of the guest is known: 100 rounds of a load, a store and two
/// branches, of which every second one and all but the last are taken.
#[test]
fn events_are_counted_where_the_guest_works() {
    let host = match doctor::open() {
        Ok(host) => host,
        Err(error) => {
            println!("skipped: events_are_counted_where_the_guest_works: {error}");
            return;
        }
    };
    let probe = doctor::check(&host).unwrap();
    let step = pmu_virt::Sources::parse("step").unwrap();
    if let Err(refusal) = doctor::check_backends(&probe, &step) {
        println!("skipped: events_are_counted_where_the_guest_works: {refusal}");
        return;
    }
    let events = [
        "loads:k",
        "branches:k",
        "taken-branches:k",
        "instructions:k",
        "branch-misses:k",
    ];
    for model in [
        "intel-v2,counters=5",
        "intel-v1,counters=5",
        "amd-perfmonv2",
        "amd-core",
    ] {
        let plan = plan(&flags(&events, Some(model), Some("step"))).unwrap();
        let report = perform(&host, &probe, &plan).unwrap();
        let counts: Vec<_> = report.counters.iter().map(|row| row.counted).collect();
        let [
            Some(loads),
            Some(branches),
            Some(taken),
            Some(instructions),
            None,
        ] = counts[..]
        else {
            panic!("{model}: {counts:?}");
        };
        assert_eq!(loads, 100, "{model}");
        // AMD counts the delivery of the UD2 that ends the work as a taken branch.
        let delivery = u64::from(plan.model.vendor() == Vendor::Amd);
        assert_eq!(
            (branches, taken),
            (200 + delivery, 149 + delivery),
            "{model}"
        );
        // Two before the first round, three before the WRMSR that stops them all;
        // without one for all, the accesses to the others as well.
        if plan.model.has_global_control() {
            assert_eq!(instructions, 605, "{model}");
        } else {
            assert!(
                (605..630).contains(&instructions),
                "{model}: {instructions}"
            );
        }
        let last = &report.counters[4];
        assert!(
            !last.supported && last.provenance == "unavailable",
            "{last:?}"
        );
        assert!(
            report.counters[..4].iter().all(|row| row.reason.is_none()),
            "{report:#?}"
        );
        let mut text = Vec::new();
        write_report(&report, false, &mut text).unwrap();
        assert!(String::from_utf8(text).unwrap().contains("<not supported>"));
    }
}

/// A source that cannot be had is bad input, whoever finds that out.
#[test]
fn counters_that_cannot_be_had_are_bad_input() {
    let rates = || vmm::counters::CounterError::LargeRates { path: "r".into() };
    let status = |error| super::refused(error).status();
    assert_eq!(
        status(super::DemoError::Counters(rates())),
        crate::exit::ExitStatus::BAD_INPUT
    );
    assert_eq!(
        status(super::DemoError::Guest("astray".to_owned())),
        crate::exit::ExitStatus::HOST_FAILURE
    );
}
