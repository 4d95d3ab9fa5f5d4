//! The scenario's report, of made-up plays.

use arbiter::{CounterId, Event, Layer, Reason, Record};
use pmu_virt::PmuModel;

use super::report::acts;
use super::scenario;
use super::transcript::{Outcome, Played};

fn played(step: usize, outcome: Option<Outcome>, decisions: Vec<(Record, u32)>) -> Played {
    Played {
        step,
        outcome,
        notices: 0,
        decisions,
        micros: 7,
    }
}

#[test]
fn every_model_that_auto_stands_for_can_play() {
    for vendor in [pmu_virt::Vendor::Intel, pmu_virt::Vendor::Amd] {
        let model = PmuModel::default_for(vendor);
        assert!(model.programmable() >= 4, "{model}");
        let acts = scenario::acts(&model);
        assert!(super::guest::guest(&acts).is_ok(), "{model}");
    }
}

#[test]
fn a_step_that_was_not_reached_is_left_out() {
    let scenario = scenario::acts(&PmuModel::default_for(pmu_virt::Vendor::Amd));
    let report = acts(&scenario, &[played(0, None, Vec::new())]);
    let steps: Vec<_> = report.iter().flat_map(|act| &act.steps).collect();
    assert_eq!(steps.len(), 1);
    assert_eq!(steps[0].outcome, "(the guest ended here)");
}

#[test]
fn outcomes_and_decisions_are_told_in_words() {
    let scenario = scenario::acts(&PmuModel::default_for(pmu_virt::Vendor::Amd));
    let refusal = Record {
        layer: Layer::GuestKernel,
        counter: Some(CounterId::Programmable(0)),
        event: Event::Refused(Reason::Cookie),
    };
    let plays = [
        played(0, Some(Outcome::Done), Vec::new()),
        played(1, Some(Outcome::Fault), vec![(refusal, 17)]),
        played(2, Some(Outcome::Read(42)), Vec::new()),
    ];
    let report = acts(&scenario, &plays);
    let steps: Vec<_> = report.iter().flat_map(|act| &act.steps).collect();
    let outcomes: Vec<_> = steps.iter().map(|step| step.outcome.as_str()).collect();
    assert_eq!(outcomes, ["done", "#GP", "42"]);
    assert_eq!(
        steps[1].decisions,
        ["PMC0 refused: the cookie is wrong (17 times)"]
    );
}
