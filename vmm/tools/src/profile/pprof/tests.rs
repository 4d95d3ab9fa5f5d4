//! A profile for pprof is read again.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;

use flate2::read::GzDecoder;
use perfmon_abi::compact::CallChain;
use prost::Message;

use super::proto::{PprofSample, Profile};
use crate::profile::output_tests::Stacks;
use crate::profile::program_tests::{Place, Program, START, mapped, thread, user, with_callers};
use crate::profile::stacks::Weight;

fn written(place: &Place, weight: Weight) -> Profile {
    let path = place.path("out.pb.gz");
    place.report(|options| {
        options.pprof = Some(path.clone());
        options.weight = weight;
    });
    unpacked(&path)
}

pub(in crate::profile) fn unzipped(file: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut file = GzDecoder::new(fs::File::open(file).unwrap());
    file.read_to_end(&mut bytes).unwrap();
    bytes
}

fn unpacked(file: &Path) -> Profile {
    Profile::decode(unzipped(file).as_slice()).unwrap()
}

/// Samples and events of each stack.
pub(in crate::profile) fn values(file: &Path) -> Vec<Vec<i64>> {
    let samples = unpacked(file).sample.into_iter();
    samples.map(|one| one.value).collect()
}

/// Labels of a sample as pprof takes them in: one without text, number and unit is none.
fn kept(profile: &Profile, sample: &PprofSample) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    for label in &sample.label {
        if label.str != 0 {
            labels.insert(
                text(profile, label.key).to_owned(),
                text(profile, label.str).to_owned(),
            );
        } else if label.num() != 0 || label.num_unit != 0 {
            labels.insert(text(profile, label.key).to_owned(), label.num().to_string());
        }
    }
    labels
}

/// Stacks with their task, which has all its labels, and their numbers of samples.
pub(in crate::profile) fn of_pprof(file: &Path) -> Stacks {
    let profile = &unpacked(file);
    let index = |id: u64| usize::try_from(id - 1).unwrap();
    let mut stacks = Stacks::new();
    for sample in &profile.sample {
        let labels = kept(profile, sample);
        let keys: Vec<&str> = labels.keys().map(String::as_str).collect();
        assert_eq!(keys, ["comm", "pid", "tid", "vcpu", "vm"]);
        let frames = sample.location_id.iter().rev().map(|id| {
            let line = &profile.location[index(*id)].line[0];
            text(profile, profile.function[index(line.function_id)].name).to_owned()
        });
        let stack = [labels["comm"].clone()].into_iter().chain(frames);
        *stacks.entry(stack.collect()).or_default() += u64::try_from(sample.value[0]).unwrap();
    }
    stacks
}

fn text(profile: &Profile, number: i64) -> &str {
    &profile.string_table[usize::try_from(number).unwrap()]
}

/// The frames of a sample, from the innermost outwards.
fn frames(profile: &Profile, sample: &PprofSample) -> Vec<String> {
    let frame = |id: &u64| {
        let location = profile.location.iter().find(|one| one.id == *id).unwrap();
        match location.line.first() {
            Some(line) => {
                let id = line.function_id;
                let function = profile.function.iter().find(|one| one.id == id).unwrap();
                text(profile, function.name).to_owned()
            }
            None => format!("{:#x}", location.address),
        }
    };
    sample.location_id.iter().map(frame).collect()
}

#[test]
fn pprof_has_all_samples_with_their_callers() {
    let profile = written(&with_callers(), Weight::Samples);
    let types: Vec<(&str, &str)> = profile
        .sample_type
        .iter()
        .map(|one| (text(&profile, one.r#type), text(&profile, one.unit)))
        .collect();
    assert_eq!(types, [("samples", "count"), ("events", "count")]);
    assert_eq!(text(&profile, profile.default_sample_type), "samples");
    let sum = |value: usize| profile.sample.iter().map(|one| one.value[value]).sum();
    let sums: (i64, i64) = (sum(0), sum(1));
    assert_eq!(sums, (4, 4000));
    let mut stacks: Vec<(Vec<String>, i64)> = profile
        .sample
        .iter()
        .map(|one| (frames(&profile, one), one.value[0]))
        .collect();
    stacks.sort();
    let stack = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    let expected: [(Vec<String>, i64); 3] = [
        (stack(&["clear_page", "do_syscall_64", "main", "0x99"]), 2),
        (stack(&["main"]), 1),
        (stack(&["main", "0x99"]), 1),
    ];
    assert_eq!(stacks, expected);
    for sample in &profile.sample {
        let labels: Vec<(&str, &str, Option<i64>)> = sample
            .label
            .iter()
            .map(|one| (text(&profile, one.key), text(&profile, one.str), one.num))
            .collect();
        let expected = [
            ("pid", "", Some(40)),
            ("tid", "", Some(40)),
            ("comm", "prog", None),
            ("vm", "", Some(7)),
            ("vcpu", "", Some(0)),
        ];
        assert_eq!(labels, expected);
        // A number 0 would be left out without a unit.
        for label in sample.label.iter().filter(|one| one.str == 0) {
            assert_eq!(label.num_unit, label.key);
        }
    }
}

/// Every number leads somewhere, and files are known by their build.
#[test]
fn what_pprof_refers_to_is_there() {
    let place = with_callers();
    let profile = written(&place, Weight::Events);
    assert_eq!(text(&profile, profile.default_sample_type), "events");
    assert_eq!(profile.string_table[0], "");
    assert_eq!(profile.time_nanos, 1_700_000_000_000_000_000);
    assert_eq!((profile.duration_nanos, profile.period), (5, 1000));
    let comment = text(&profile, profile.comment[0]);
    assert_eq!(
        comment,
        "cycles: sampled every 1000 events; the counts are hardware"
    );
    let program = profile
        .mapping
        .iter()
        .find(|one| text(&profile, one.filename) == "/usr/bin/prog");
    let program = program.unwrap();
    assert_eq!(program.memory_start, START);
    assert!(program.has_functions);
    let build_id = Program::own().build_id;
    assert_eq!(text(&profile, program.build_id), build_id);
    for (index, location) in profile.location.iter().enumerate() {
        assert_eq!(location.id, index as u64 + 1);
        let mapping = location.mapping_id;
        assert!(mapping == 0 || profile.mapping.iter().any(|one| one.id == mapping));
    }
}

/// Whoever has functions is not looked for again: the host's file of that name is not the guest's.
#[test]
fn pprof_takes_no_names_from_this_host() {
    let of = |name: &str, build_id: &str| {
        let chain = CallChain::default();
        let records = [
            thread(1, 40, 40, "prog"),
            mapped(11, name, build_id),
            user(START, 1, 11, chain),
        ];
        let profile = written(&Place::new(&records), Weight::Samples);
        profile.mapping[0].has_functions
    };
    assert!(of("/usr/bin/env", ""));
    // Build ids tell pprof which file it is.
    assert!(!of("/usr/bin/env", "0123456789abcdef"));
}
