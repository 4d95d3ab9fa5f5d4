//! The words for happenings, and the demo itself where this host has a KVM.

use pmu_virt::{ClockBackend, MsrIndex, PmuModel, ReadOutcome, Ring, WriteOutcome};

use super::record::{Happening, What, describe};
use super::{decline, perform, write_report};
use crate::doctor::{self, Refusal};
use crate::kvm::VcpuId;
use crate::vcpu::TrapEvent;

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
    let refusal = Refusal::Obstacle("the reason");
    let mut text = Vec::new();
    decline(&refusal, false, &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("nothing was counted: the reason"), "{text}");
    assert!(text.contains("cargo l1"), "{text}");
    let mut json = Vec::new();
    decline(&refusal, true, &mut json).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["shown"], false);
}

/// On a host that cannot run it, the refusal must be a stated one.
#[test]
fn the_demo_shows_an_overflow_and_its_pmi() {
    let host = match doctor::open() {
        Ok(host) => host,
        Err(refusal) => return assert!(matches!(refusal, Refusal::Host(_)), "{refusal}"),
    };
    let probe = doctor::check(&host).unwrap();
    let report = perform(&host, &probe).unwrap();
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
    assert!(String::from_utf8(text).unwrap().contains("<not counted>"));
}
