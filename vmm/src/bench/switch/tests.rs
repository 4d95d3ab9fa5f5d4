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
