//! The scenarios on `clock`: figures that do not depend on the machine.

use super::*;

#[test]
fn operations_are_as_wanted() {
    let source = Source { name: "clock" };
    let report = measure(&[source], Vec::new(), 2_000, 2_500_000).unwrap();
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
    let source = Source { name: "clock" };
    let [_, back, _] = schedule::all(100);
    let codes = codes(&model, &source).unwrap().unwrap();
    let way = |counters: usize| {
        let vcpus = [selects(&codes, counters), selects(&codes, 0)];
        Naive::new(&model, &vcpus, vec![source.open().unwrap()], true)
    };
    let (mut right, mut wrong) = (way(4), way(3));
    let raced = race(&mut [&mut right, &mut wrong], &back, 2_500_000);
    assert!(matches!(raced, Err(BenchError::Miscount(_))), "{raced:?}");
}
