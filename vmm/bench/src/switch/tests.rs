//! The scenarios on `clock`: figures that do not depend on the machine.

use pmu_virt::{BackendEnv, Sources};

use super::*;

fn clock() -> Source {
    let clock = Sources::parse("clock").unwrap();
    Source::new(clock.iter().next().unwrap(), BackendEnv::default()).unwrap()
}

#[test]
fn operations_are_as_wanted() {
    let report = measure(&[clock()], Vec::new(), 2_000, 2_500_000).unwrap();
    let [idle, back, crowd] = &report.rows[..] else {
        panic!("{:?}", report.rows);
    };
    assert_eq!(idle.umpire.operations, 0.0);
    assert!(back.umpire.operations <= 2.0, "{back:?}");
    assert!(
        crowd.umpire.operations * 3.0 <= crowd.naive.operations,
        "{crowd:?}"
    );
    // Eight counters out and eight in, whatever is used.
    assert_eq!(idle.naive.operations, 16.0);
    assert_eq!(idle.naive_used.operations, 0.0);
}

/// Rates that a switch would lose parts of, were it to begin anew.
#[test]
fn every_way_counts_the_same_on_sim() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let rate =
        "phases = [{ us = 3, rate = 0.7 }, { us = 2, kernel = 31.3, user = 1 }]\nnoise = 0.5";
    let events = ["cycles", "ref-cycles", "instructions", "branches"];
    let table = events.map(|event| format!("[event.{event}]\n{rate}\n"));
    std::fs::write(file.path(), table.concat()).unwrap();
    let sources = Sources::parse(&format!("sim={}", file.path().display())).unwrap();
    let env = BackendEnv {
        tsc_khz: 2_500_000,
        ..BackendEnv::default()
    };
    let sim = Source::new(sources.iter().next().unwrap(), env).unwrap();
    assert!(sim.is_repeatable());
    let report = measure(&[sim], Vec::new(), 500, 2_500_000).unwrap();
    assert_eq!(report.rows.len(), 3, "{:?}", report.left_out);
}

#[test]
fn a_way_that_counts_wrongly_is_found() {
    let model = PmuModel::parse(MODEL).unwrap();
    let source = clock();
    let [_, back, _] = schedule::all(100);
    let codes = codes(&model, &source).unwrap().unwrap();
    let way = |counters: usize| {
        let vcpus = [selects(&codes, counters), selects(&codes, 0)];
        Naive::new(&model, &vcpus, vec![source.open().unwrap()], true)
    };
    let (mut right, mut wrong) = (way(4), way(3));
    let mut ways: [&mut dyn Way; 2] = [&mut right, &mut wrong];
    race(&mut ways, &back, 2_500_000).unwrap();
    let found = agree(&mut ways, &back);
    assert!(matches!(found, Err(BenchError::Miscount(_))), "{found:?}");
}
