//! Every command with `-j` has a schema, which says what each key means.

use std::collections::BTreeSet;

use guest_tests::umpire::skipped_without_kvm;
use guest_tests::vm::Vm;
use serde_json::Value;

use super::live::RATES;
use super::schemas::{folder, schema, valid};
use super::{program, run};

fn printed(words: &[&str]) -> String {
    let output = run(words);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {told}");
    String::from_utf8(output.stdout).expect("text")
}

/// Names that the help lists under its heading of commands.
fn commands(words: &[&str]) -> Vec<String> {
    let help = printed(&[words, &["--help"]].concat());
    let listed = help.split("Commands:\n").nth(1).unwrap_or_default();
    let lines = listed.lines().take_while(|line| !line.is_empty());
    let names = lines.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    names
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

fn has_json(words: &[&str]) -> bool {
    let help = printed(&[words, &["--help"]].concat());
    help.contains("-j, --json")
}

#[test]
fn every_command_with_json_has_a_schema() {
    let has = |command: &String| {
        let below = commands(&[command]);
        has_json(&[command]) || below.iter().any(|name| has_json(&[command, name]))
    };
    let with_json: BTreeSet<String> = commands(&[]).into_iter().filter(has).collect();
    let files = std::fs::read_dir(folder()).expect("docs/schemas");
    let stem = |path: std::path::PathBuf| path.file_stem()?.to_str().map(str::to_owned);
    let schemas: BTreeSet<String> = files
        .filter_map(|entry| stem(entry.expect("an entry").path()))
        .collect();
    assert_eq!(with_json, schemas, "commands with -j, and docs/schemas");
    for command in schemas {
        let schema = schema(&command);
        jsonschema::meta::validate(&schema).unwrap_or_else(|error| panic!("{command}: {error}"));
        assert!(
            schema["$schema"]
                .as_str()
                .is_some_and(|it| it.contains("2020-12"))
        );
        described(&command, &schema);
    }
}

/// Every property says what it means, itself or by what it refers to.
fn described(place: &str, schema: &Value) {
    let properties = schema.get("properties").and_then(Value::as_object);
    for (key, property) in properties.into_iter().flatten() {
        let says = ["description", "$ref", "const"];
        let says = says.iter().any(|word| property.get(word).is_some());
        assert!(says, "{place}/{key} has no description");
    }
    match schema {
        Value::Object(members) => {
            for (key, member) in members {
                described(&format!("{place}/{key}"), member);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| described(place, item)),
        _ => {}
    }
}

#[test]
fn what_needs_no_guest_is_as_its_schema_says() {
    for entry in std::fs::read_dir(super::folder()).expect("the corpus") {
        let path = entry.expect("an entry").path();
        let name = path
            .file_name()
            .and_then(|it| it.to_str())
            .unwrap_or_default();
        let command = name.split(['-', '.']).next().unwrap_or_default();
        if path.extension().is_some_and(|it| it == "json") && command != "firefox" {
            valid(command, &std::fs::read_to_string(&path).expect("text"));
        }
    }
    valid(
        "doctor",
        &String::from_utf8_lossy(&run(&["doctor", "-j"]).stdout),
    );
    for words in [
        &["events", "-j"][..],
        &["events", "branch", "-j"],
        &["events", "instructions:u", "-j"],
        &["events", "--decode", "r5300c0", "-j"],
        &["events", "--pmu", "intel-v2", "ref-cycles", "-j"],
    ] {
        valid("events", &printed(words));
    }
}

#[test]
fn the_demo_of_a_processor_in_software_is_as_its_schema_says() {
    valid("demo", &printed(&["demo", "--engine", "emu", "-j"]));
}

#[test]
fn what_a_guest_shows_is_as_its_schema_says() {
    if skipped_without_kvm("what_a_guest_shows_is_as_its_schema_says") {
        return;
    }
    let vm = Vm::boot(&program(), RATES, &["--hypervisor-counters", "1"]);
    for words in [
        &["top", "--once", "-j"][..],
        &["pcr", "read", "PMC0", "-j"],
        &["budget", "programmable=2", "-j"],
    ] {
        valid(words[0], &vm.printed(words));
    }
    drop(vm);
    for words in [
        &["demo", "-j"][..],
        &["demo", "pcr", "-j"],
        &["demo", "host", "-j"],
    ] {
        valid("demo", &printed(words));
    }
    for words in [
        &["bench", "traps", "-j", "--iterations", "100"][..],
        &["bench", "pmi", "-j", "--samples", "100"],
        &["bench", "pcr", "-j", "--iterations", "100"],
        &["bench", "switch", "-j"],
        &["bench", "perfmon", "-j", "--part", "commands"],
        &["bench", "emu", "-j", "--length", "1", "--turns", "1"],
    ] {
        valid("bench", &printed(words));
    }
}
