//! A quick form of each part of `umpire bench arbiter`.

use std::process::Command;

use serde_json::Value;

use crate::golden::schemas::valid;

/// What the command measures.
fn measured(flags: &[&str]) -> Value {
    let mut command = Command::new("timeout");
    command.arg("120").arg(guest_tests::umpire::path());
    let output = command
        .args(["bench", "arbiter", "-j"])
        .args(flags)
        .output();
    let output = output.expect("it starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{flags:?}: {errors}");
    valid("bench", &String::from_utf8_lossy(&output.stdout));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["failures"], Value::Array(Vec::new()));
    report
}

fn rows<'a>(report: &'a Value, part: &str) -> &'a [Value] {
    report[part].as_array().map_or(&[], Vec::as_slice)
}

fn above_zero(value: &Value) -> bool {
    value.as_f64().is_some_and(|number| number > 0.0)
}

#[test]
fn the_arbiter_is_measured() {
    let report = measured(&[
        "--part",
        "core,requests,revocation,restart,groups",
        "--leases",
        "300",
        "--clients",
        "8",
        "--load",
        "200",
        "--rounds",
        "10",
    ]);
    let core = rows(&report, "core");
    assert_eq!(core.len(), 24);
    assert!(core.iter().all(|row| above_zero(&row["per_second"])));
    let requests = rows(&report, "requests");
    assert_eq!(
        requests
            .iter()
            .map(|row| &row["leases"])
            .collect::<Vec<_>>(),
        [0, 300]
    );
    for row in requests {
        assert!(above_zero(&row["per_second"]), "{row}");
        assert!(row["met"].is_boolean(), "{row}");
    }
    let revocation = rows(&report, "revocation");
    assert_eq!(revocation.len(), 2);
    for row in revocation {
        assert!(above_zero(&row["time"]["p99_ns"]), "{row}");
    }
    let restart = &report["restart"];
    assert_eq!(
        (&restart["leases"], &restart["starts"]),
        (&300.into(), &1.into())
    );
    assert!(above_zero(&restart["answers"]["p50_ns"]), "{restart}");
    assert!(above_zero(&restart["memory"]["per_lease"]), "{restart}");
    let groups = &report["groups"];
    let core = rows(groups, "core");
    assert_eq!(core.len(), 6);
    assert!(core.iter().all(|row| above_zero(&row["ratio"])));
    let served = rows(groups, "served");
    assert_eq!(served.is_empty(), groups["not_served"].is_string());
    for row in served {
        assert!(above_zero(&row["lease"]["p50_ns"]), "{row}");
        assert!(above_zero(&row["end"]["p50_ns"]), "{row}");
    }
    let counts: Vec<&Value> = served.iter().map(|row| &row["groups"]).collect();
    assert!(counts.is_empty() || counts == [1, 30, 300], "{counts:?}");
    assert_eq!(rows(&report, "traps").len(), 0, "it was not asked for");
}

#[test]
fn a_guests_accesses_are_measured_beside_the_arbiter() {
    let name = "a_guests_accesses_are_measured_beside_the_arbiter";
    if guest_tests::umpire::skipped_without_kvm(name) {
        return;
    }
    if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() < 2) {
        println!("skipped: {name}: it needs two CPUs");
        return;
    }
    let report = measured(&["--part", "traps", "--iterations", "100"]);
    let traps = rows(&report, "traps");
    assert_eq!(traps.len(), 2);
    for way in traps {
        assert!(above_zero(&way["decisions_per_second"]), "{way}");
        assert_eq!(rows(way, "rows").len(), 6);
        assert_eq!(rows(way, "same").len(), 6);
    }
}
