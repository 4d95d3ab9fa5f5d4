//! What `umpire events` prints.

use pmu_model::CountRequest;
use pmu_virt::{BackendEnv, ClockBackend, CounterBackend, StepBackend};
use serde_json::Value;

use super::tables::{Fake, no_library};
use crate::{BackendUse, NameTable, Pattern, Question, list, write_list};

/// What the backends that every host has can count.
fn backends(request: &CountRequest) -> Vec<BackendUse> {
    let env = BackendEnv {
        tsc_khz: 1_000_000,
        host_vendor: None,
        host_events: None,
        overflow_signal: 0,
        steps_cpl3: true,
    };
    let all: [Box<dyn CounterBackend>; 2] = [
        Box::new(ClockBackend::new()),
        Box::new(StepBackend::on(&env)),
    ];
    let counted = |backend: Box<dyn CounterBackend>| {
        let provenance = backend.plan(request).ok()?.provenance;
        Some(BackendUse {
            backend: backend.name(),
            provenance: provenance.to_string(),
        })
    };
    all.into_iter().filter_map(counted).collect()
}

fn printed(pattern: Option<&str>, pmu: Option<&str>, json: bool, names: &dyn NameTable) -> String {
    let question = Question {
        pattern: pattern.map(Pattern::new),
        pmu: pmu.map(str::to_owned),
    };
    let entries = list(&question, names, &backends).expect("a list");
    let mut out = Vec::new();
    write_list(&entries, json, &mut out).expect("memory takes all");
    String::from_utf8(out).expect("text")
}

/// Lines of the text for a pattern and a PMU, spaces made one. What `perf` counts
/// depends on the host, so it may stand at a line's end or not.
fn check(pattern: Option<&str>, pmu: Option<&str>, expected: &[&str], absent: &[&str]) {
    let text = printed(pattern, pmu, false, &Fake::new());
    let lines: Vec<String> = text
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    for line in expected {
        assert!(
            lines
                .iter()
                .any(|one| one == line || one.starts_with(&format!("{line}, perf "))),
            "no {line:?} in:\n{text}"
        );
    }
    for part in absent {
        assert!(!text.contains(part), "{part:?} in:\n{text}");
    }
}

#[test]
fn generic_names_and_tables() {
    check(
        None,
        None,
        &[
            "cycles, cpu-cycles core cycles",
            "Intel r53003c clock derived",
            "AMD r530076 clock derived",
            "every model r5300c0 step exact",
            "intel-v2 to intel-v5 r530300 fixed counter 2, clock exact",
            "amd-perfmonv2 r100530120 clock exact",
            "skl 5 events for intel-v1 to intel-v5: Processor skl",
            "amd64_fam17h_zen2 1 events for amd-core: Processor amd64_fam17h_zen2, this host",
        ],
        &["netburst", "rapl", "skl::"],
    );
}

#[test]
fn one_table() {
    check(
        None,
        Some("skl"),
        &[
            "skl::INST_RETIRED r5300c0 instructions: step exact",
            "Counts inst_retired",
            ":ANY_P (default) r5300c0 instructions: step exact",
            ":ALL r5301c0 no backend",
            "modifiers :u :k :c=N",
            "skl::UNHALTED_REFERENCE_CYCLES r530300 fixed counter 2, reference cycles: clock exact",
            "skl::OFFCORE_RESPONSE_0 needs a register outside of the counters",
            "skl::L2_RQSTS needs a unit mask",
            ":ANY intel-v2 has no any-thread (bit 21)",
        ],
        &["wsm", "Generic"],
    );
    check(Some("offcore"), Some("skl"), &[], &["INST_RETIRED"]);
}

#[test]
fn one_model() {
    check(
        None,
        Some("amd-core"),
        &["amd-core r530129 step derived"],
        &["ref-cycles", "intel-v2"],
    );
}

#[test]
fn patterns() {
    // The same event of several tables is one entry.
    check(
        Some("unhalted_ref*"),
        None,
        &["in the tables skl wsm"],
        &["INST_RETIRED", "Generic"],
    );
    check(
        Some("*:any_p"),
        None,
        &["skl::INST_RETIRED r5300c0 instructions: step exact"],
        &["OFFCORE"],
    );
    check(
        Some("cycles"),
        None,
        &["cycles, cpu-cycles core cycles"],
        &["taken-branches"],
    );
    assert_eq!(
        printed(Some("nothing like it"), None, false, &Fake::new()),
        ""
    );
}

#[test]
fn json_is_one_object_a_line() {
    let text = printed(None, Some("skl"), true, &Fake::new());
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("an object"))
        .collect();
    assert_eq!(lines.len(), 5);
    assert!(
        lines
            .iter()
            .all(|line| line["kind"] == "event" && line["tables"][0] == "skl")
    );
    assert_eq!(lines[0]["code"], "r5300c0");
    assert_eq!(lines[0]["backends"][0]["backend"], "step");
    assert_eq!(lines[0]["unit_masks"][0]["name"], "ANY_P");
    assert_eq!(lines[1]["fixed"], 2);
    assert!(lines[2]["problem"].as_str().is_some());
    for line in printed(None, None, true, &Fake::new()).lines() {
        let line: Value = serde_json::from_str(line).expect("an object");
        assert!(["generic", "quantity", "table"].contains(&line["kind"].as_str().expect("a kind")));
    }
}

#[test]
fn without_libpfm_the_package_is_named() {
    let text = printed(None, None, false, &no_library());
    assert!(
        text.contains("cycles") && text.contains("apt-get install libpfm4"),
        "{text}"
    );
    let last = printed(None, None, true, &no_library());
    assert!(
        last.lines()
            .last()
            .is_some_and(|line| line.contains("\"no-tables\""))
    );
    let question = |pmu: &str| Question {
        pattern: None,
        pmu: Some(pmu.to_owned()),
    };
    let error = list(&question("skl"), &no_library(), &backends)
        .expect_err("no table")
        .to_string();
    assert!(
        error.contains("'skl'") && error.contains("libpfm4"),
        "{error}"
    );
    let error = list(&question("skk"), &Fake::new(), &backends)
        .expect_err("no table")
        .to_string();
    assert!(error.contains("'skk'") && error.contains("skl"), "{error}");
    let error = list(&question("rapl"), &Fake::new(), &backends)
        .expect_err("unusable")
        .to_string();
    assert!(error.contains("outside of the cores"), "{error}");
}
