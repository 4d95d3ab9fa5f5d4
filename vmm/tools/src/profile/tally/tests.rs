//! Rows are those of a naive tally that goes through the whole chain of every sample.

use std::collections::{BTreeMap, BTreeSet};

use perfmon_abi::compact::{CallChain, ChainEnd, GuestPlace, ProgramFrame};
use perfmon_abi::wire::programs::{Described, MappingInfo, TaskInfo};
use proptest::prelude::*;

use super::*;
use crate::profile::programs::Programs;
use crate::profile::symbols::{SymbolTable, parse};

const KERNEL: u64 = 0xffff_ffff_8100_0000;

fn names() -> Names {
    let symbols = format!("{KERNEL:x} T one\n{:x} T two\n", KERNEL + 8);
    let raw = parse(symbols.as_bytes()).unwrap();
    let mut programs = Programs::default();
    for (number, comm) in [(1, "a"), (2, "b"), (3, "a")] {
        programs.add(Described::Task(TaskInfo {
            number,
            pid: 40,
            tid: u32::try_from(number).unwrap(),
            comm: comm.to_owned(),
            process: "a".to_owned(),
            ..TaskInfo::default()
        }));
    }
    for (number, name) in [(11, "/bin/x"), (12, "/bin/y"), (13, "/lib/x")] {
        programs.add(Described::Mapping(MappingInfo {
            number,
            start: 0,
            end: 100,
            name: name.to_owned(),
            ..MappingInfo::default()
        }));
    }
    Names::new(SymbolTable::new(raw, 0), programs, None)
}

fn ends() -> impl Strategy<Value = Option<ChainEnd>> {
    prop_oneof![
        Just(None),
        Just(Some(ChainEnd::Outermost)),
        Just(Some(ChainEnd::Entry)),
        Just(Some(ChainEnd::Depth)),
        Just(Some(ChainEnd::Broken)),
    ]
}

prop_compose! {
    /// Few places, so that chains have some of them twice, and samples share chains.
    fn sample()(
        (task, mapping, cr3) in (0u64..5, 10u64..15, proptest::option::of(0u64..3)),
        (ring, vcpu, core) in (0usize..3, 0u32..2, 0u32..2),
        (ip, period) in (0u64..20, prop_oneof![1u64..100, Just(u64::MAX)]),
        kernel in proptest::collection::vec(0u64..20, 0..5),
        program in proptest::collection::vec((0u64..3, 10u64..15), 0..5),
        (kernel_end, program_end) in (ends(), ends()),
    ) -> Sample {
        let ring = [None, Some(Ring::Kernel), Some(Ring::User)][ring];
        let frame = |(address, mapping)| ProgramFrame { address, mapping };
        Sample {
            ip: if ring == Some(Ring::User) { ip } else { KERNEL + ip },
            period,
            cr3: cr3.map(|cr3| cr3 << 12),
            vcpu,
            core,
            ring,
            guest: GuestPlace {
                task,
                mapping,
                chain: CallChain {
                    kernel: kernel.into_iter().map(|at| KERNEL + at).collect(),
                    kernel_end,
                    program: program.into_iter().map(frame).collect(),
                    program_end,
                },
                ..GuestPlace::default()
            },
            ..Sample::default()
        }
    }
}

/// Own and total, and what the samples of each path amount to.
type Model = BTreeMap<Key, (Sum, Sum, BTreeMap<(Vec<CodeLocation>, u32), Sum>)>;

/// One sample after the other, and one location of it after the other.
fn model(samples: &[Sample], keys: &SortKeys, names: &Names, wanted: Rows) -> Model {
    let mut paths = Paths::new(names);
    let mut rows = Model::new();
    for sample in samples {
        let path = paths.of(sample, Callers::Kept);
        let chain: Vec<CodeLocation> = paths.outwards(path).collect();
        let one = Sum::of(sample);
        let mut met = BTreeSet::new();
        for (inside, location) in (0..).zip(&chain) {
            let mut key = Group::of(sample, keys, names).key(keys, names);
            key.location = keys.has(SortKey::Symbol).then_some(*location);
            let object = || names.word(&location.object(names));
            key.dso = keys.has(SortKey::Dso).then(object);
            let is_row = location.is_layer() && (inside == 0 || wanted.children);
            if is_row && met.insert(key) {
                let (own, total, of_paths) = rows.entry(key).or_default();
                total.add(one);
                if inside == 0 {
                    own.add(one);
                }
                if wanted.paths {
                    of_paths
                        .entry((chain.clone(), inside))
                        .or_default()
                        .add(one);
                }
            }
        }
    }
    rows
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn rows_are_those_of_a_naive_tally(
        samples in proptest::collection::vec(sample(), 0..40),
        keys in proptest::sample::subsequence(SortKey::ALL.to_vec(), 1..4),
        (children, with_paths) in (any::<bool>(), any::<bool>()),
    ) {
        let (names, keys) = (names(), SortKeys::from(keys));
        let wanted = Rows { children, paths: with_paths };
        let mut paths = Paths::new(&names);
        let mut tally = SampleTally::default();
        for sample in &samples {
            tally.add(sample, &keys, Callers::Kept, &mut paths);
        }
        let rows = tally.rows(&keys, &paths, wanted);
        let mut found = Model::new();
        for row in &rows {
            let mut of_paths = BTreeMap::new();
            for path in &row.paths {
                let chain = tally.outwards(*path, &paths).collect();
                let sum: &mut Sum = of_paths.entry((chain, path.inside)).or_default();
                sum.add(tally.sum(*path));
            }
            let before = found.insert(row.key, (row.own, row.total, of_paths));
            prop_assert!(before.is_none(), "{:?} has two rows", row.key);
        }
        prop_assert_eq!(found, model(&samples, &keys, &names, wanted));
        prop_assert!(rows.is_sorted_by_key(|row| std::cmp::Reverse(row.total.events)));
    }
}
