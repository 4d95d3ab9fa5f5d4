//! Whether the random sequences of `props` go everywhere: a comparison that
//! never comes across an overflow says nothing about overflows.

use std::collections::BTreeMap;

use perfmon_abi::consts as pfm;
use perfmon_abi::wire::{Call, Errno};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use super::bench::MOMENT;
use super::model::{Model, State};
use super::play::Step;
use super::steps::{flags, steps};

/// Plays a step to the model alone; the error, if it is a command and fails.
fn play(model: &mut Model, step: &Step) -> Option<Errno> {
    match step {
        Step::Call(call) => return model.call(&mut call.clone()).err(),
        Step::Load(set) if model.may_load(*set).is_ok() => model.load(*set),
        Step::Load(set) => return model.may_load(*set).err(),
        Step::Unload if model.state != State::Unloaded => model.unload(true),
        Step::Unload => return model.call(&mut Call::Unload).err(),
        Step::Count(which, events, _) => {
            let wanted = model.wanted();
            if let Some((pmd, _)) = wanted.get(*which % wanted.len().max(1)) {
                model.count(*pmd, *events, pfm::PFM_PROV_EXACT);
            }
        }
        Step::Pass(ns, counted) => model.pass(*ns, *counted),
        Step::Expire => model.expire(),
        Step::Overflow(_) => model.overflow(&MOMENT),
        Step::ReadMessages => model.queue.clear(),
        // The sequences of `steps` have no more.
        _ => {}
    }
    None
}

/// What is worth having been at, in this step.
fn places(before: &Model, step: &Step, after: &Model, error: Option<Errno>) -> Vec<&'static str> {
    let mut places = Vec::new();
    let mut at = |place, is_there: bool| {
        if is_there {
            places.push(place);
        }
    };
    let switches = after.runs() - before.runs().min(after.runs());
    let masked = before.state == State::Loaded && after.state == State::Masked;
    let unmasked = before.state == State::Masked && after.state == State::Loaded;
    let overflow = matches!(step, Step::Overflow(_)) && !before.wrapped.is_empty();
    at("masked", masked);
    at(
        "masked by several counters",
        masked && before.wrapped.len() > 1,
    );
    at("masked and blocked", masked && after.blocked);
    at("masked, switch put off", masked && after.switch_later);
    at(
        "masked, queue full",
        masked && before.queue.len() == 8 && after.queue.len() == 8,
    );
    at(
        "masked, no message",
        masked && after.queue.last() == Some(&None),
    );
    at("switched by overflow", overflow && !masked && switches == 1);
    at("reset by overflow", overflow && !masked && switches == 0);
    at("overflow while stopped", overflow && !before.started);
    at("restarted", unmasked);
    at("restarted with a switch", unmasked && switches == 1);
    at(
        "switched by time",
        matches!(step, Step::Expire) && switches == 1,
    );
    at(
        "several time switches",
        matches!(step, Step::Expire) && switches > 2,
    );
    let start = matches!(step, Step::Call(Call::Start(Some(_)))) && error.is_none();
    at(
        "start chooses while masked",
        start && before.state == State::Masked && switches == 1,
    );
    at(
        "start chooses with an overflow",
        start && switches == 1 && !before.wrapped.is_empty(),
    );
    let reset = |arg: &perfmon_abi::PmdArg| arg.flags & pfm::PFM_REGFL_READ_RESET != 0;
    let reads = matches!(step, Step::Call(Call::ReadPmds(v)) if v.iter().any(reset));
    at(
        "read and reset while it counts",
        reads && error.is_none() && before.started,
    );
    at("EINVAL", error == Some(Errno::EINVAL));
    at("EBUSY", error == Some(Errno::EBUSY));
    places
}

const PLACES: &[&str] = &[
    "masked",
    "masked by several counters",
    "masked and blocked",
    "masked, switch put off",
    "masked, queue full",
    "masked, no message",
    "switched by overflow",
    "reset by overflow",
    "overflow while stopped",
    "restarted",
    "restarted with a switch",
    "switched by time",
    "several time switches",
    "start chooses while masked",
    "start chooses with an overflow",
    "read and reset while it counts",
    "EINVAL",
    "EBUSY",
];

#[test]
fn random_sequences_go_everywhere() {
    let mut runner = TestRunner::deterministic();
    let mut seen: BTreeMap<&str, u32> = BTreeMap::new();
    for _ in 0..1500 {
        let tree = (flags(), steps()).new_tree(&mut runner);
        let (flags, steps) = tree.expect("a sequence").current();
        let mut model = Model::new(flags);
        for step in &steps {
            let before = model.clone();
            let error = play(&mut model, step);
            for place in places(&before, step, &model, error) {
                *seen.entry(place).or_default() += 1;
            }
        }
    }
    for place in PLACES {
        let times = seen.get(place).copied().unwrap_or(0);
        assert!(times >= 5, "{place}: {times} times; all: {seen:?}");
    }
}
