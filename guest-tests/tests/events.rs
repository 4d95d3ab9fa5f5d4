//! Event names with the libpfm4 that is installed, and `umpire events`.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Output, Stdio};

use guest_tests::umpire;
use pmu_virt::PmuModel;
use serde_json::Value;
use umpire_events::{
    AttributeKind, Entry, NameTable, NamedEvent, family_of, identify, models_of, names, resolve,
};

/// The tables, or none with the reason printed. What it prints counts as a
/// skipped test.
fn library(test: &str) -> Option<Box<dyn NameTable>> {
    let names = names();
    match names.missing() {
        None => Some(names),
        Some(missing) => {
            println!("skipped: {test}: {missing}");
            None
        }
    }
}

fn umpire(arguments: &[&str]) -> Output {
    let mut command = Command::new(umpire::path());
    command.args(arguments).stdin(Stdio::null());
    command.output().expect("the program can be started")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn names_have_the_codes_of_the_manuals() {
    let Some(names) = library("names_have_the_codes_of_the_manuals") else {
        return;
    };
    let check = |name: &str, model: &str, code: u64, words: &str| {
        let model = PmuModel::parse(model).expect("a model");
        let named = resolve(name, &model, names.as_ref()).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(named.code, code, "{name}: {:#x}", named.code);
        assert_eq!(named.request.to_string(), words, "{name}");
    };
    let name = "amd64_fam10h_barcelona::RETIRED_INSTRUCTIONS";
    check(name, "amd-fam10h", 0x53_00c0, "instructions");
    check(
        "skl::INST_RETIRED:ANY_P",
        "intel-v2",
        0x53_00c0,
        "instructions",
    );
    check(
        "skl::INST_RETIRED:ANY_P:u:c=2:i",
        "intel-v2",
        0x2d1_00c0,
        "instructions:u inv cmask=2",
    );
    let name = "amd64_k8_revg::DISPATCHED_FPU:0xff:k";
    check(name, "amd-k7", 0x52_ff00, "event 0x0 umask 0xff:k");
    let name = "amd64_fam10h_barcelona::MEMORY_CONTROLLER_REQUESTS";
    check(name, "amd-fam10h", 0x1_0053_fff0, "event 0x1f0 umask 0xff");
    check(
        "skl::UNHALTED_REFERENCE_CYCLES",
        "intel-v2",
        0x53_0300,
        "reference cycles",
    );
    check(
        "icl::INST_RETIRED:ANY:k",
        "intel-v2",
        0x52_0100,
        "instructions:k",
    );
    check(
        "RETIRED_INSTRUCTIONS",
        "amd-core",
        0x53_00c0,
        "instructions",
    );
    check(
        "amd64_fam19h_zen4::RETIRED_INSTRUCTIONS",
        "amd-perfmonv2",
        0x53_00c0,
        "instructions",
    );
    check(
        "snb::BR_INST_RETIRED:NEAR_TAKEN",
        "intel-v1",
        0x53_20c4,
        "taken branches",
    );
}

#[test]
fn bad_names_get_an_answer() {
    let Some(names) = library("bad_names_get_an_answer") else {
        return;
    };
    let check = |name: &str, model: &str, parts: &[&str]| {
        let model = PmuModel::parse(model).expect("a model");
        let error = resolve(name, &model, names.as_ref())
            .expect_err(name)
            .to_string();
        for part in parts {
            assert!(error.contains(part), "{name}: no {part:?} in: {error}");
        }
    };
    check("skl::INST_RETIRD", "intel-v2", &["skl", "INST_RETIRED"]);
    check("skl::INST_RETIRED:ANYP", "intel-v2", &["ANY_P?"]);
    check(
        "skl::INST_RETIRED:c=300",
        "intel-v2",
        &["a value it cannot have"],
    );
    check(
        "skl::CYCLE_ACTIVITY",
        "intel-v2",
        &["skl::CYCLE_ACTIVITY needs a unit mask"],
    );
    check("skl::INST_RETIRED:t", "intel-v2", &["any-thread (bit 21)"]);
    check(
        "skl::OFFCORE_RESPONSE_0:DMND_DATA_RD:ANY_RESPONSE",
        "intel-v2",
        &["OFFCORE_RSP"],
    );
    check(
        "skl::INST_RETIRED",
        "amd-core",
        &["intel-v1 to intel-v5", "amd-core"],
    );
    check(
        "icl::INST_RETIRED:ANY_P",
        "intel-v4,events=skylake",
        &["models with events=ice-lake"],
    );
    check(
        "INST_RETIRED:ANY_P",
        "intel-v2",
        &["ambiguous", "wsm::INST_RETIRED:ANY_P (r5301c0)"],
    );
    check(
        "glm::CPU_CLK_UNHALTED:REF",
        "intel-v2",
        &["selects no event"],
    );
    check("perf::CYCLES", "amd-core", &["operating system's"]);
    check(
        "netburst::GLOBAL_POWER_EVENTS",
        "intel-v2",
        &["no PMU model"],
    );
    check("x::y", "intel-v2", &["no event table 'x'"]);
    let core = "core::BR_INST_RETIRED:MISPRED_TAKEN";
    check(core, "intel-v2", &["0x5308c4", "near returns"]);
    let fam16h = "amd64_fam16h::RETIRED_MMX_AND_FP_INSTRUCTIONS:SSE";
    check(fam16h, "amd-fam10h", &["0x5302cb", "MMX instructions"]);
    let fam11h = "amd64_fam11h_turion::RETIRED_MMX_AND_FP_INSTRUCTIONS:ALL";
    check(fam11h, "amd-fam10h", &["0x530fcb"]);
}

/// Every event and unit mask of every table either has a code that fits into
/// the registers of the model, or a reason.
#[test]
fn every_event_of_every_table_is_answered() {
    let Some(names) = library("every_event_of_every_table_is_answered") else {
        return;
    };
    let output = umpire(&["events", "*", "-j"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut codes = 0;
    for line in text(&output.stdout).lines() {
        let line: Value = serde_json::from_str(line).expect("an object on each line");
        if line["kind"] != "event" {
            continue;
        }
        let masks = line["unit_masks"].as_array().expect("a list").iter();
        for one in masks.chain([&line]) {
            let code = one["code"].as_str();
            assert!(code.is_some() != one["problem"].is_string(), "{one}");
            codes += usize::from(code.is_some());
        }
        assert!(!line["tables"].as_array().expect("a list").is_empty());
    }
    let usable = names
        .tables()
        .iter()
        .filter(|table| family_of(table).is_ok());
    let events: usize = usable.map(|table| table.events).sum();
    assert!(
        events > 1000 && codes > events / 2,
        "{events} events, {codes} codes"
    );
}

/// Unit masks and modifiers of an event for a test: each unit mask of the first few
/// alone, two and three together, each with another modifier.
fn endings(event: &NamedEvent) -> Vec<String> {
    let of = |kind| {
        let attributes = event.attributes.iter();
        let named = attributes.filter(move |one| one.kind == kind);
        named.map(|one| format!(":{}", one.name))
    };
    let masks: Vec<String> = of(AttributeKind::UnitMask).collect();
    let mut endings: Vec<String> = masks.iter().take(4).cloned().collect();
    endings.extend(masks.windows(2).take(2).map(<[String]>::concat));
    endings.extend(masks.windows(3).take(1).map(<[String]>::concat));
    if masks.is_empty() {
        endings.push(String::new());
    }
    let modifiers = ["", ":u", ":k", ":e:c=1", ":i:c=2:u"];
    let with = endings.iter().zip(modifiers.iter().cycle());
    with.map(|(ending, modifier)| format!("{ending}{modifier}"))
        .collect()
}

/// The code of a name decodes to the name; with several unit masks, to one of the
/// same event that means as much.
#[test]
fn names_and_codes_go_both_ways() {
    let Some(names) = library("names_and_codes_go_both_ways") else {
        return;
    };
    let (mut checked, mut several) = (0, 0);
    for table in names.tables() {
        let Ok(family) = family_of(table) else {
            continue;
        };
        let models = models_of(family);
        let model = models.last().expect("a model of each vocabulary");
        let events = names.events(&table.name);
        // A part of each table, another one each time.
        let some = events.iter().skip(checked % 23).step_by(23);
        for (event, ending) in some.flat_map(|event| {
            let with = move |ending| (event, ending);
            endings(event).into_iter().map(with)
        }) {
            let full = format!("{}::{}{ending}", table.name, event.name);
            let Ok(named) = resolve(&full, model, names.as_ref()) else {
                continue;
            };
            let code = format!("r{:x}", named.code);
            let found = identify(&code, Some(&table.name), names.as_ref(), &|_| Vec::new());
            let found = found.unwrap_or_else(|error| panic!("{full} {code}: {error}"));
            let of_model = found.iter().find_map(|entry| match entry {
                Entry::Code(code) if code.models.contains(&model.name()) => Some(code),
                _ => None,
            });
            let found = &of_model.expect("an entry of the model").names;
            let whole = |name: &str| format!("{}::{name}", table.name);
            let is_same = |name: &str| {
                let event_of = name.split(':').next();
                let meant = resolve(&whole(name), model, names.as_ref());
                event_of == Some(&event.name) && meant.is_ok_and(|it| it.request == named.request)
            };
            assert!(
                found
                    .iter()
                    .any(|one| whole(&one.name) == full || is_same(&one.name)),
                "{full} {code}: {found:?}"
            );
            checked += 1;
            let masks = event.attributes.iter().filter(|one| {
                one.kind == AttributeKind::UnitMask && ending.contains(&format!(":{}", one.name))
            });
            several += usize::from(masks.count() > 1);
        }
    }
    assert!(checked > 100 && several > 10, "{checked} names, {several}");
}

#[test]
fn every_form_of_the_help_is_resolved() {
    if library("every_form_of_the_help_is_resolved").is_none() {
        return;
    }
    let check = |arguments: &[&str], models: &[&str], name: &str| {
        let output = umpire(&[&["events", "-j"], arguments].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let first = text(&output.stdout);
        let lines = first.lines().map(|line| {
            let line: Value = serde_json::from_str(line).expect("an object on each line");
            line
        });
        let codes: Vec<Value> = lines.filter(|line| line["kind"] == "code").collect();
        let with = codes.iter().flat_map(|line| line["models"].as_array());
        let with: Vec<&str> = with.flatten().filter_map(Value::as_str).collect();
        assert_eq!(with, models, "{arguments:?}: {codes:?}");
        let all = codes.iter().flat_map(|line| line["names"].as_array());
        let found = all.flatten().any(|one| one["name"] == name);
        assert!(found, "{arguments:?}: no {name} in {codes:?}");
    };
    let all = [
        "intel-v1",
        "intel-v2",
        "intel-v3",
        "intel-v4",
        "intel-v5",
        "amd-k7",
        "amd-fam10h",
        "amd-core",
        "amd-perfmonv2",
    ];
    check(&["r5300c0"], &all, "INST_RETIRED:ANY_P");
    check(&["0x5300c0"], &all, "RETIRED_INSTRUCTIONS");
    check(&["rc0:u"], &all, "RETIRED_INSTRUCTIONS:u");
    check(&["instructions:u"], &all, "instructions:u");
    check(
        &["cycles:k", "--pmu", "amd-core"],
        &["amd-core"],
        "cpu-cycles:k",
    );
    check(
        &["skl::INST_RETIRED:ANY_P:u:c=2:i"],
        &all[..5],
        "INST_RETIRED:ANY_P:i:c=2:u",
    );
    check(
        &["amd64_fam10h_barcelona::DISPATCHED_FPU:OPS_ADD:OPS_MULTIPLY:k"],
        &["amd-fam10h"],
        "DISPATCHED_FPU:OPS_ADD:OPS_MULTIPLY:k",
    );
    // A processor's own code is another event for the model that stands for none.
    let skylake = [&all[..5], &["intel-v2,events=skylake"]].concat();
    check(
        &["skl::BR_INST_RETIRED:CONDITIONAL:k"],
        &skylake,
        "conditional-branches:k",
    );
    check(
        &[
            "conditional-branches:u",
            "--pmu",
            "intel-v4,events=ice-lake",
        ],
        &["intel-v4"],
        "BR_INST_RETIRED:COND:u",
    );
    check(
        &["RETIRED_INSTRUCTIONS:u"],
        &["amd-k7", "amd-fam10h", "amd-core", "amd-perfmonv2"],
        "RETIRED_INSTRUCTIONS:u",
    );
    for (name, parts) in [
        ("instrctions:u", ["'instrctions'", "instructions?"]),
        ("skl::INST_RETIRD:u", ["table skl", "INST_RETIRED?"]),
        (
            "skl::L2_RQSTS:MISS:PF_HIT:u",
            ["do not go together", ":MISS"],
        ),
        ("r53c0c0c0c0c0c0c0c0", ["'r53c0c0c0c0c0c0c0c0'", "1 to 16"]),
    ] {
        let output = umpire(&["events", name]);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{name}: {told}");
        assert_eq!(told.lines().count(), 1, "{told}");
        for part in parts {
            assert!(told.contains(part), "{name}: no {part:?} in: {told}");
        }
    }
}

#[test]
fn a_list_can_be_read_in_part() {
    let mut child = Command::new(umpire::path())
        .args(["events", "*"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program can be started");
    let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    output.read_line(&mut line).expect("a line");
    // As `head -1` does.
    drop(output);
    let mut told = String::new();
    let mut errors = child.stderr.take().expect("a pipe");
    errors.read_to_string(&mut told).expect("text");
    let status = child.wait().expect("its end");
    assert_eq!((status.code(), told.as_str()), (Some(0), ""));
    assert!(line.starts_with("Generic names"), "{line}");
}

/// A library that cannot be loaded stands before the real one.
#[test]
fn without_libpfm_generic_names_are_left() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("libpfm.so.4"), "no library").expect("a file");
    let umpire = |arguments: &[&str]| {
        Command::new(umpire::path())
            .args(arguments)
            .env("LD_LIBRARY_PATH", folder.path())
            .stdin(Stdio::null())
            .output()
            .expect("the program can be started")
    };
    let output = umpire(&["events"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let list = text(&output.stdout);
    assert!(
        list.contains("r53003c") && list.contains("apt-get install libpfm4"),
        "{list}"
    );
    for arguments in [
        &["events", "--pmu", "skl"][..],
        &["events", "retired"],
        &["demo", "--event", "skl::INST_RETIRED:ANY_P"],
    ] {
        let output = umpire(arguments);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {told}");
        assert_eq!(told.lines().count(), 1, "{told}");
        assert!(told.contains("apt-get install libpfm4"), "{told}");
    }
}
