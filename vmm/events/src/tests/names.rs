//! What names mean, and what is said of bad ones.

use pmu_model::{CountRequest, EventCode, FixedFunction, PmuModel};
use proptest::prelude::{any, prop_assert_eq, proptest};

use super::tables::{Fake, no_library};
use crate::{NameTable, NamedRequest, models_for, resolve};

fn model(name: &str) -> PmuModel {
    PmuModel::parse(name).expect("a model")
}

fn found(name: &str, model_name: &str, names: &dyn NameTable) -> NamedRequest {
    resolve(name, &model(model_name), names).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The code and the request's words.
fn check(name: &str, model_name: &str, code: u64, words: &str) {
    let named = found(name, model_name, &Fake::new());
    assert_eq!(named.code, code, "{name}: {:#x}", named.code);
    assert_eq!(named.request.to_string(), words, "{name}");
    assert!(named.request.enabled && !named.request.int, "{name}");
    assert_eq!(named.name, name);
}

/// What is said of a name that stands for nothing.
fn refused(name: &str, model_name: &str, words: &str) {
    let found = resolve(name, &model(model_name), &Fake::new());
    let told = found.expect_err(name).to_string();
    assert!(told.contains(words), "{told}");
}

#[test]
fn names_of_tables() {
    let name = "amd64_fam10h_barcelona::RETIRED_INSTRUCTIONS";
    check(name, "amd-fam10h", 0x53_00c0, "instructions");
    check(
        "skl::INST_RETIRED:ANY_P",
        "intel-v2",
        0x53_00c0,
        "instructions",
    );
    check(
        "skl::inst_retired:ANY_P:u",
        "intel-v1",
        0x51_00c0,
        "instructions:u",
    );
    check("SKL::INST_RETIRED", "intel-v2", 0x53_00c0, "instructions");
    let name = "amd64_k8_revg::DISPATCHED_FPU:0xff:k";
    check(name, "amd-k7", 0x52_ff00, "event 0x0 umask 0xff:k");
    let name = "amd64_fam10h_barcelona::MEMORY_CONTROLLER_REQUESTS";
    check(name, "amd-fam10h", 0x1_0053_fff0, "event 0x1f0 umask 0xff");
    let name = "skl::INST_RETIRED:ANY_P:c=2";
    check(name, "intel-v2", 0x253_00c0, "instructions cmask=2");
    // :h leaves libpfm's code without a ring, which would count nothing.
    let name = "amd64_fam10h_barcelona::RETIRED_INSTRUCTIONS:h";
    check(
        name,
        "amd-fam10h",
        0x200_0050_00c0,
        "instructions host-only",
    );
}

#[test]
fn perfs_words() {
    check("cpu/event=0x3c,umask=0/", "intel-v2", 0x3c, "core cycles");
    check("cpu/event=0xc0/u", "intel-v2", 0xc0, "instructions:u");
    check(
        "cpu/event=0xc0,cmask=2,inv,edge/k",
        "intel-v2",
        0x284_00c0,
        "instructions:k edge inv cmask=2",
    );
    check(
        "cpu/config=0x5300c0/",
        "intel-v2",
        0x53_00c0,
        "instructions",
    );
    check(
        "cpu/instructions/u",
        "amd-core",
        0x51_00c0,
        "instructions:u",
    );
    check(
        "cpu/event=0x1f0,umask=0xff/",
        "amd-fam10h",
        0x1_0000_fff0,
        "event 0x1f0 umask 0xff",
    );
    // All that is counted is the guest's.
    check("cycles:G", "intel-v2", 0x53_003c, "core cycles");
    check("cycles:uG", "intel-v2", 0x51_003c, "core cycles:u");
    check("cpu/event=0xc0/Gu", "intel-v2", 0xc0, "instructions:u");
    check(
        "skl::INST_RETIRED:ANY_P:G",
        "intel-v2",
        0x53_00c0,
        "instructions",
    );
    refused("cycles:H", "intel-v2", "H counts the host");
    refused("instructions:upp", "intel-v2", "p asks for precise samples");
    refused("cpu/event=1/pp", "intel-v2", "p asks for precise samples");
    refused(
        "cpu/event=0x100/",
        "intel-v2",
        "event=0x100 has more than 8 bits",
    );
    refused("cpu/event=1,umask=300/", "intel-v2", "has more than 8 bits");
    refused(
        "cpu/event=1,frequency=3/",
        "intel-v2",
        "'frequency' is no field",
    );
    refused("cpu/event=x/", "intel-v2", "'x' is no number");
    refused("cpu/event=1", "intel-v2", "there is no second '/'");
    refused("cpu/event=1,any/", "amd-core", "any-thread");
    refused("cpu/event=1/x", "intel-v2", ":u, :k, :uk and :G only");
}

#[test]
fn names_without_a_table() {
    check(
        "RETIRED_INSTRUCTIONS",
        "amd-core",
        0x53_00c0,
        "instructions",
    );
    check(
        "UNHALTED_REFERENCE_CYCLES:k",
        "intel-v2",
        0x52_0300,
        "reference cycles:k",
    );
}

#[test]
fn generic_names() {
    check("cycles", "intel-v2", 0x53_003c, "core cycles");
    check("cpu-cycles", "amd-core", 0x53_0076, "core cycles");
    check("Instructions:u", "amd-k7", 0x51_00c0, "instructions:u");
    check("branches:k", "amd-perfmonv2", 0x52_00c2, "branches:k");
    check(
        "branch-misses:uk",
        "intel-v1",
        0x53_00c5,
        "mispredicted branches",
    );
    check("loads:u:k", "amd-core", 0x53_0129, "loads");
    check(
        "cache-misses",
        "intel-v2",
        0x53_412e,
        "last-level cache misses",
    );
    check(
        "cache-misses",
        "amd-core",
        0x53_0964,
        "event 0x64 umask 0x9",
    );
    check(
        "ref-cycles",
        "amd-perfmonv2",
        0x1_0053_0120,
        "reference cycles",
    );
    check("ref-cycles", "intel-v1", 0x53_013c, "reference cycles");
    check("ref-cycles:k", "intel-v2", 0x52_0300, "reference cycles:k");
    check(
        "ref-cycles",
        "intel-v2,fixed=2",
        0x53_013c,
        "reference cycles",
    );
}

#[test]
fn raw_codes() {
    check("r5300c0", "intel-v2", 0x53_00c0, "instructions");
    check("r5300c0", "amd-k7", 0x53_00c0, "instructions");
    check("r5300C0:k", "amd-k7", 0x53_00c0, "instructions:k");
    check("r4100c0", "amd-core", 0x41_00c0, "instructions:u");
    // Neither USR nor OS: both.
    check("rc0", "amd-core", 0xc0, "instructions");
    check(
        "r10053fff0",
        "amd-fam10h",
        0x1_0053_fff0,
        "event 0x1f0 umask 0xff",
    );
    check(
        "r15500c2",
        "amd-core",
        0x155_00c2,
        "branches:u edge cmask=1",
    );
}

#[test]
fn pseudo_codes_go_to_the_fixed_counter_that_means_them() {
    let check = |name: &str, expected: FixedFunction| {
        let request = found(name, "intel-v2", &Fake::new()).request;
        let plain = CountRequest::plain(EventCode::Fixed(expected), true, true);
        assert_eq!(request, plain, "{name}");
    };
    check("skl::UNHALTED_REFERENCE_CYCLES", FixedFunction::RefCycles);
    check("icl::INST_RETIRED:ANY", FixedFunction::Instructions);
    check("glm::CPU_CLK_UNHALTED:CORE", FixedFunction::CoreCycles);
    check("ref-cycles", FixedFunction::RefCycles);
    check("r530100", FixedFunction::Instructions);
    check("r530200", FixedFunction::CoreCycles);
    check("r530300", FixedFunction::RefCycles);
    // On AMD, event select 0 is an event like others.
    let amd = found("r530300", "amd-k7", &Fake::new()).request;
    assert_eq!(amd.to_string(), "event 0x0 umask 0x3");
}

fn check_error(name: &str, model_name: &str, parts: &[&str]) {
    check_error_with(&Fake::new(), name, model_name, parts);
}

fn check_error_with(names: &dyn NameTable, name: &str, model_name: &str, parts: &[&str]) {
    let error = resolve(name, &model(model_name), names)
        .expect_err(name)
        .to_string();
    assert!(!error.contains('\n'), "{error}");
    for part in parts {
        assert!(error.contains(part), "{name}: no {part:?} in: {error}");
    }
}

#[test]
fn bad_names_are_refused_with_what_would_be_right() {
    for name in ["", " ", "a b", "cycles\u{7}", &"x".repeat(600)] {
        check_error(name, "intel-v2", &["no event name", "r5300c0"]);
    }
    check_error("r12345678901234567", "intel-v2", &["1 to 16"]);
    check_error(
        "cycels",
        "intel-v2",
        &["'cycels'", "intel-v2", "did you mean cycles?"],
    );
    check_error("cycles:x", "intel-v2", &["'cycles:x'", "':x'", ":u, :k"]);
    check_error("cycles:", "intel-v2", &[":u, :k"]);
    check_error("r5300c0:e", "intel-v2", &["':e'"]);
    check_error("skk::INST_RETIRED", "intel-v2", &["'skk'", "skl"]);
    check_error("skl::INST_RETIERD", "intel-v2", &["skl", "INST_RETIRED?"]);
    check_error("skl::", "intel-v2", &["skl has no event ''"]);
    check_error("::INST_RETIRED", "intel-v2", &["no event table ''"]);
    check_error(
        "skl::INST_RETIRED:ANYP",
        "intel-v2",
        &["'ANYP'", "ANY_P?", ":c=N"],
    );
    check_error(
        "skl::INST_RETIRED:c=300",
        "intel-v2",
        &["a value it cannot have"],
    );
    check_error(
        "skl::L2_RQSTS",
        "intel-v2",
        &["needs a unit mask", "skl::L2_RQSTS:MISS"],
    );
    check_error(
        "INST_RETIRED:ANY_P",
        "intel-v2",
        &[
            "ambiguous",
            "skl::INST_RETIRED:ANY_P (r5300c0)",
            "wsm::INST_RETIRED:ANY_P (r5301c0)",
        ],
    );
}

#[test]
fn what_the_model_cannot_take_is_named() {
    check_error(
        "skl::INST_RETIRED",
        "amd-core",
        &["skl::INST_RETIRED", "intel-v1 to intel-v5", "amd-core"],
    );
    check_error(
        "amd64_k8_revg::RETIRED_INSTRUCTIONS",
        "amd-core",
        &["amd-k7", "amd-core"],
    );
    check_error(
        "L2_RQSTS:MISS",
        "amd-core",
        &["skl::L2_RQSTS:MISS", "intel-v1 to intel-v5"],
    );
    check_error(
        "ref-cycles",
        "amd-core",
        &["reference cycles", "amd-core", "amd-perfmonv2 have"],
    );
    check_error("loads", "amd-fam10h", &["loads", "amd-core"]);
    check_error(
        "skl::OFFCORE_RESPONSE_0",
        "intel-v2",
        &["register outside of the counters"],
    );
    check_error(
        "skl::CPU_CLK_UNHALTED:ANY",
        "intel-v2",
        &["0x73003c", "any-thread (bit 21)"],
    );
    check_error(
        "r10053fff0",
        "amd-k7",
        &["0x10053fff0", "event select above 0xff"],
    );
    check_error("r200005300c0", "intel-v2", &["host-only (bit 41)"]);
    check_error("r100005300c0", "amd-k7", &["guest-only (bit 40)"]);
    check_error("r3005300c0", "intel-v2", &["in_tx (bit 32", "in_tx_cp"]);
    // What a PEBS record has is no part of an event, on a model with such records either.
    let adaptive = ["adaptive PEBS record (bit 34)"];
    for model in ["intel-v2", "intel-v5", "intel-v5,pebs=exact"] {
        check_error("r4005300c0", model, &adaptive);
    }
    check_error(
        "r8000000000000000",
        "amd-core",
        &["bits 0x8000000000000000"],
    );
    check_error(
        "skl::UNHALTED_REFERENCE_CYCLES",
        "intel-v1",
        &["counter 2", "no fixed counters"],
    );
    check_error(
        "r530300",
        "intel-v2,fixed=1",
        &["fixed counter 2", "one fixed counter"],
    );
    check_error(
        "icl::TOPDOWN:SLOTS",
        "intel-v2",
        &["fixed counter 3", "0 to 2"],
    );
    check_error("r1530300", "intel-v2", &["edge, invert or counter mask"]);
    check_error(
        "netburst::GLOBAL_POWER_EVENTS",
        "intel-v2",
        &["netburst", "no PMU model"],
    );
    check_error(
        "rapl::RAPL_ENERGY_PKG",
        "intel-v2",
        &["rapl", "outside of the cores"],
    );
    check_error("perf::CYCLES", "intel-v2", &["perf", "operating system's"]);
    // Codes of libpfm that would count something else if taken at their word.
    check_error(
        "glm::CPU_CLK_UNHALTED:REF",
        "intel-v2",
        &["0x530100", "selects no event"],
    );
    check_error(
        "icl::TOPDOWN:BACKEND_BOUND_SLOTS",
        "intel-v2",
        &["0x530200"],
    );
}

#[test]
fn without_libpfm_generic_names_and_raw_codes_are_left() {
    let names = no_library();
    for (name, code) in [
        ("cycles", 0x53_0076),
        ("instructions:k", 0x52_00c0),
        ("r5300c2", 0x53_00c2),
    ] {
        assert_eq!(found(name, "amd-core", &names).code, code, "{name}");
    }
    for name in ["skl::INST_RETIRED", "RETIRED_INSTRUCTIONS"] {
        check_error_with(&names, name, "amd-core", &[name, "apt-get install libpfm4"]);
    }
    check_error_with(&names, "instruction", "amd-core", &["instructions?"]);
    assert_eq!(
        models_for("skl::INST_RETIRED", &names).map(|models| models.is_some()),
        Ok(false)
    );
}

#[test]
fn tables_tell_their_models() {
    let check = |name: &str, expected: Option<&[&str]>| {
        let models = models_for(name, &Fake::new()).expect("a usable table");
        let models = models.map(|models| models.iter().map(PmuModel::name).collect::<Vec<_>>());
        assert_eq!(models.as_deref(), expected, "{name}");
    };
    check("cycles", None);
    check("r5300c0", None);
    check("RETIRED_INSTRUCTIONS", None);
    let intel = ["intel-v1", "intel-v2", "intel-v3", "intel-v4", "intel-v5"];
    check("skl::ANYTHING", Some(&intel));
    check("amd64_k8_revg::ANYTHING", Some(&["amd-k7"]));
    check("amd64_fam17h_zen2::ANYTHING", Some(&["amd-core"]));
}

proptest! {
    /// Whatever somebody types is answered.
    #[test]
    fn no_name_panics(name in "\\PC*", short in "[r:.=a-zA-Z0-9_]{0,12}", pick in 0usize..6) {
        let names = Fake::new();
        let model = &model(PmuModel::names()[pick].name);
        for text in [&name, &short, &format!("skl::{short}"), &format!("INST_RETIRED:{short}")] {
            let _ = resolve(text, model, &names);
            let _ = models_for(text, &names);
        }
    }

    /// A raw code is either refused or counted as the model's register has it.
    #[test]
    fn raw_codes_are_taken_as_they_are(code in any::<u64>(), bits in 0u32..64, pick in 0usize..6) {
        let model = &model(PmuModel::names()[pick].name);
        let code = code >> bits;
        let rule = model.write_rule(pmu_model::Register::Select(0)).expect("selects");
        let text = format!("r{code:x}");
        let Ok(named) = resolve(&text, model, &no_library()) else {
            return Ok(());
        };
        prop_assert_eq!(named.code, code);
        prop_assert_eq!(code & !rule.implemented, 0);
        if let Some(raw) = named.request.encode() {
            // INT and EN are the programmer's; no ring means both.
            let own = !(1 << 20 | 1 << 22);
            let rings = if code & 0b11 << 16 == 0 { 0b11 << 16 } else { 0 };
            prop_assert_eq!(raw & own, (code | rings) & own);
        }
    }
}
