//! What names mean, and what is said of bad ones.

use pmu_model::{CountRequest, EventCode, FixedFunction, PmuModel};
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

use super::tables::{Fake, no_library};
use crate::{EventSampling, NameTable, NamedRequest, extras, models_for, resolve};

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
    check("instructions:upp", "intel-v2", 0x51_00c0, "instructions:u");
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
    refused("cpu/event=1/x", "intel-v2", "'x' is no modifier");
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
    check_error(
        "cycles:x",
        "intel-v2",
        &["'cycles:x'", "'x' is no", ":u and :k"],
    );
    check_error("cycles:", "intel-v2", &["no letter behind the last ':'"]);
    check_error("r5300c0:e", "intel-v2", &["e wants the PMU for itself"]);
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
    check("cpu/cycles,name='a::b'/", None);
    let intel = ["intel-v1", "intel-v2", "intel-v3", "intel-v4", "intel-v5"];
    check("skl::ANYTHING", Some(&intel));
    check("amd64_k8_revg::ANYTHING", Some(&["amd-k7"]));
    check("amd64_fam17h_zen2::ANYTHING", Some(&["amd-core"]));
}

/// What comes of a name with a model: the request in words, or the refusal's.
fn comes_of(name: &str, model_name: &str) -> String {
    match resolve(name, &model(model_name), &Fake::new()) {
        Ok(named) => named.request.to_string(),
        Err(error) if error.is_uncounted() => format!("not supported: {}", error.reason()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn what_people_type() {
    let skylake = "intel-v2,events=skylake";
    let table: &[(&str, &str, &str)] = &[
        // Letters.
        ("loads:P", "amd-core", "loads"),
        ("branches:kppp", "intel-v2", "branches:k"),
        ("branches:khG", "intel-v2", "branches:k"),
        ("branches:uS", "intel-v2", "branches:u"),
        ("branches:W", "intel-v2", "branches"),
        ("branches:GH", "intel-v2", "branches"),
        ("rc0:u:k", "amd-core", "instructions"),
        ("branches:kD", "amd-core", "'branches:kD': D pins"),
        ("branches:Ik", "amd-core", "'branches:Ik': I leaves out"),
        ("rc4:e", "amd-core", "'rc4:e': e wants the PMU"),
        ("branches:b", "amd-core", "b counts by a BPF program"),
        ("branches:R", "amd-core", "R asks for the latency"),
        ("branches:X", "amd-core", "X keeps perf"),
        ("branches:h", "amd-core", "h counts a hypervisor alone"),
        ("branches:uH", "amd-core", "H counts the host"),
        ("branches:uzk", "amd-core", "'z' is no modifier (in ':uzk')"),
        ("branches:kk", "amd-core", "k is there twice"),
        (
            "branches:pppp",
            "amd-core",
            "p is there more than three times",
        ),
        ("skl::INST_RETIRED:ANY_P:uP", "intel-v2", "instructions:u"),
        ("skl::INST_RETIRED:ANY_P:pp", "intel-v2", "instructions"),
        // perf's words.
        ("cpu/branches/k", "amd-core", "branches:k"),
        ("cpu/branches,name=b/P", "amd-core", "branches"),
        ("cpu/branches,name='a,b:c'/u", "amd-core", "branches:u"),
        ("cpu_core/branches,period=77/", "amd-core", "branches"),
        ("cpu/EVENT=0XC4,umask=0X20/", "intel-v2", "taken branches"),
        (
            "cpu/event=196,umask=32,freq=9/",
            "intel-v2",
            "taken branches",
        ),
        ("cpu/rc2/u", "amd-core", "branches:u"),
        (
            "cpu/r0xc2,cmask=0x2,inv/",
            "amd-core",
            "branches inv cmask=2",
        ),
        (
            "cpu/branches,cmask=1,edge/k",
            "amd-core",
            "branches:k edge cmask=1",
        ),
        (
            "cpu/cycles,inv=1,cmask=3/",
            "intel-v2",
            "core cycles inv cmask=3",
        ),
        ("cpu/cycles,inv=0/", "intel-v2", "core cycles"),
        (
            "cpu/ref-cycles,cmask=3/",
            "intel-v2",
            "reference cycles cmask=3",
        ),
        ("branches/period=100/u", "amd-core", "branches:u"),
        ("branches//k", "amd-core", "branches:k"),
        ("rc2/name=x/", "amd-core", "branches"),
        (
            "cpu/INST_RETIRED:ANY_P/u",
            "intel-v2",
            "'INST_RETIRED:ANY_P' is ambiguous",
        ),
        (
            "cpu/RETIRED_INSTRUCTIONS,name=i/u",
            "amd-core",
            "instructions:u",
        ),
        ("cpu/nosuch/", "amd-core", "event 'nosuch'"),
        ("cpu/event=1,nosuch=2/", "amd-core", "'nosuch' is no field"),
        ("cpu/event=1,umask/", "amd-core", "umask has no value"),
        ("cpu/event=1,event=2/", "amd-core", "event is there twice"),
        ("cpu/event=-1/", "amd-core", "'-1' is no number"),
        ("cpu/event=0xzz/", "amd-core", "'0xzz' is no number"),
        (
            "cpu/event=1,,inv/",
            "amd-core",
            "nothing before or behind a comma",
        ),
        ("cpu//", "amd-core", "it names no event"),
        ("cpu/name=x/", "amd-core", "it names no event"),
        ("cpu/cycles,name=/", "amd-core", "name= has no value"),
        ("cpu/cycles,period=0/", "amd-core", "period=0 is none"),
        ("cpu/cycles,period=x/", "amd-core", "'x' is no number"),
        (
            "cpu/event=1,config1=2/",
            "intel-v2",
            "not supported: has a field of a register outside of the counters",
        ),
        (
            "cpu/event=1,ldlat=30/",
            "intel-v2",
            "not supported: has a field of a register outside of the counters",
        ),
        (
            "cpu/mem-stores,ldlat=50/Pu",
            "intel-v2",
            "not supported: needs the load latency of PEBS",
        ),
        ("cpu/event=1,ldlat=3/z", "intel-v2", "'z' is no modifier"),
        ("cpu/ldlat=3/", "intel-v2", "it names no event"),
        ("cpu/cycels,ldlat=3/", "intel-v2", "did you mean cycles?"),
        (
            "cpu/event=1,in_tx/",
            "intel-v2",
            "not supported: asks for transactions",
        ),
        (
            "cpu/cycles,call-graph=fp/",
            "intel-v2",
            "call-graph is for perf alone",
        ),
        ("cpu/cycles/D", "intel-v2", "D pins"),
        (
            "cpux/cycles/",
            "intel-v2",
            "'cpux' is neither an event nor a PMU",
        ),
        // Raw codes.
        ("r0c2", "amd-core", "branches"),
        ("r0XC2", "amd-core", "branches"),
        ("r0Xc2:u", "amd-core", "branches:u"),
        ("cpu/r0XC2,inv/", "amd-core", "branches inv"),
        ("r0xC2:k", "amd-core", "branches:k"),
        ("0XC2", "amd-core", "branches"),
        ("R0c2", "amd-core", "did you mean r0c2?"),
        // Caches.
        ("L1-dcache-loads", skylake, "loads"),
        ("L1-dcache-load-misses:u", skylake, "event 0x51 umask 0x1:u"),
        ("l1d-stores", skylake, "stores"),
        ("dTLB-stores", "intel-v2", "stores"),
        ("branch-loads", "intel-v2", "branches"),
        ("branch-load-misses", "amd-fam10h", "mispredicted branches"),
        ("bpu-read-miss", "amd-fam10h", "mispredicted branches"),
        ("LLC-load-misses", "amd-fam10h", "event 0x7e umask 0x3"),
        (
            "LLC-load-misses/name=x/k",
            "amd-fam10h",
            "event 0x7e umask 0x3:k",
        ),
        ("LLC", "amd-fam10h", "event 0x7d umask 0x3"),
        (
            "L1-dcache-prefetch-misses",
            "amd-k7",
            "event 0x67 umask 0x1",
        ),
        ("dTLB-load-misses", "amd-core", "event 0x45 umask 0xf0"),
        ("iTLB-load-misses", "amd-perfmonv2", "event 0x85 umask 0xff"),
        ("L1-icache-load-misses", "amd-core", "event 0x81 umask 0x0"),
        ("node-loads", "amd-fam10h", "event 0xe9 umask 0xb8"),
        (
            "LLC-loads",
            "amd-core",
            "not supported: the PMU model amd-core has no event for LLC-loads; amd-k7 and \
             amd-fam10h have it",
        ),
        ("LLC-stores:D", "amd-core", "D pins"),
        (
            "L1-dcache-load-misses",
            "intel-v2",
            "not supported: the PMU model intel-v2 has no event for L1-dcache-load-misses; ",
        ),
        (
            "node-prefetch-misses",
            "amd-core",
            "no model's event select means it",
        ),
        (
            "L1-dcache-lods",
            "amd-core",
            "'lods' is nothing that perf counts of L1-dcache",
        ),
        (
            "dTLB-loads-stores",
            "amd-core",
            "'stores' is nothing that perf counts of dTLB",
        ),
        ("iTLB-stores", "amd-core", "perf has no stores of iTLB"),
        // Others of perf's whose code depends on the processor.
        ("bus-cycles", "intel-v2", "reference cycles"),
        (
            "bus-cycles",
            "amd-core",
            "not supported: the PMU model amd-core has no event for bus-",
        ),
        (
            "idle-cycles-frontend:u",
            "amd-fam10h",
            "event 0xd0 umask 0x0:u",
        ),
        ("stalled-cycles-backend", "amd-core", "not supported: "),
        (
            "stalled-cycles-backend",
            "intel-v2,events=nehalem",
            "event 0xb1 umask 0x3f inv cmask=1",
        ),
        (
            "slots",
            "amd-core",
            "not supported: the PMU model amd-core has no event for top-down",
        ),
        // What no counter counts.
        (
            "cs",
            "amd-core",
            "not supported: the guest's kernel counts this",
        ),
        (
            "major-faults:u",
            "amd-core",
            "not supported: the guest's kernel counts this",
        ),
        (
            "faults/name=x/",
            "amd-core",
            "not supported: the guest's kernel counts this",
        ),
        ("faults:D", "amd-core", "'faults:D': D pins"),
        (
            "cpu-clock",
            "amd-core",
            "not supported: a time that the VMM measures",
        ),
        (
            "software/cpu-clock/",
            "amd-core",
            "not supported: a time that the VMM measures",
        ),
        (
            "software/config=1/",
            "amd-core",
            "not supported: the kernel's that perf runs on",
        ),
        (
            "tool/duration_time/",
            "amd-core",
            "not supported: a time that the VMM measures",
        ),
        (
            "cpu-clock:k",
            "amd-core",
            "not supported: a time, and the VMM does not measure",
        ),
        (
            "topdown-bad-spec",
            "intel-v2",
            "not supported: needs the register PERF_METRICS",
        ),
        (
            "mem-loads",
            "intel-v2",
            "not supported: needs the load latency of PEBS",
        ),
        (
            "cstate_pkg/c2-residency/",
            "amd-core",
            "not supported: counts outside of a vCPU",
        ),
        (
            "uncore_imc_0/cas_count_read/",
            "amd-core",
            "not supported: counts outside of a vCPU",
        ),
        (
            "ibs_op//p",
            "amd-core",
            "not supported: samples instructions and counts nothing",
        ),
        ("intel_pt//u", "intel-v2", "not supported: traces"),
        (
            "cpu_atom/cycles/",
            "intel-v2",
            "not supported: counts on cores of a second kind",
        ),
        (
            "sched:sched_switch",
            "amd-core",
            "not supported: a tracepoint of the kernel",
        ),
        (
            "raw_syscalls:*",
            "amd-core",
            "not supported: a tracepoint of the kernel",
        ),
        (
            "irq:irq_handler_entry:u",
            "amd-core",
            "not supported: a tracepoint of the kernel",
        ),
        (
            "mem:0xffff0000/4:rwx",
            "amd-core",
            "not supported: a breakpoint of the kernel",
        ),
        (
            "mem:here:r",
            "amd-core",
            "not supported: a breakpoint of the kernel",
        ),
        (
            "schedule:switch",
            "amd-core",
            "not supported: taken for a tracepoint",
        ),
        (
            "iwlwifi_io:iwlwifi_dev_*",
            "intel-v2",
            "not supported: taken for a tracepoint",
        ),
        (
            "cfg80211:rdev_scan:uk",
            "amd-core",
            "not supported: taken for a tracepoint",
        ),
        ("9p:9p_client_req:p", "amd-core", "not supported: taken for"),
        ("schedule:u", "amd-core", "no event 'schedule'"),
        ("schedule:switch:on", "amd-core", "no event 'schedule'"),
        ("schedule:", "amd-core", "no event 'schedule'"),
        ("cycels:switch", "amd-core", "did you mean cycles?"),
        ("NOSUCH:EVENT", "amd-core", "no event 'NOSUCH'"),
        // The words of a processor's event, parted otherwise.
        (
            "inst_retired_any_p:k",
            "intel-v2",
            "did you mean INST_RETIRED:ANY_P?",
        ),
        (
            "retired.instructions",
            "amd-core",
            "did you mean RETIRED_INSTRUCTIONS?",
        ),
        (
            "retired.instructions:u",
            "amd-core",
            "did you mean RETIRED_INSTRUCTIONS?",
        ),
        (
            "dispatched_fpu_ops_add",
            "amd-fam10h",
            "did you mean DISPATCHED_FPU:OPS_ADD?",
        ),
        (
            "skl::l2_rqsts_miss",
            "intel-v2",
            "did you mean L2_RQSTS:MISS?",
        ),
        (
            "ex_ret_instr",
            "amd-core",
            "no event 'ex_ret_instr'; search with",
        ),
    ];
    for (name, model_name, expected) in table {
        let found = comes_of(name, model_name);
        let is_counted = resolve(name, &model(model_name), &Fake::new()).is_ok();
        let is = if is_counted {
            found == *expected
        } else {
            found.contains(expected)
        };
        assert!(is, "{name} with {model_name}: {found}");
    }
}

#[test]
fn what_a_name_says_beside_the_event() {
    let check = |name: &str, label: Option<&str>, sampling: Option<EventSampling>, precise: u8| {
        let found = extras(name);
        let found = (found.label.as_deref(), found.sampling, found.precise);
        assert_eq!(found, (label, sampling, precise), "{name}");
    };
    check("loads:u", None, None, 0);
    check("loads:upp", None, None, 2);
    check("skl::A:B:p", None, None, 1);
    check("cpu/loads,name=foo/P", Some("foo"), None, 0);
    check("cpu/loads,name='a,b'/ppp", Some("a,b"), None, 3);
    check(
        "loads/name=A.B,period=0x20/",
        Some("A.B"),
        Some(EventSampling::Period(32)),
        0,
    );
    check(
        "cpu/event=1,freq=99/:p",
        None,
        Some(EventSampling::Frequency(99)),
        1,
    );
    check("cpu/name=x", None, None, 0);
    assert!(extras("loads:S").reads && extras("loads:uW").weak && !extras("skl::A:SW").weak);
}

proptest! {
    /// A refusal says which part of the name it is about.
    #[test]
    fn a_refusal_names_a_part_of_the_name(
        event in "(cycles|loads|LLC-loads|cpu|cs|rc0|[a-zA-Z]{1,9}|L1-dcache-[a-z]{1,5})",
        fields in "(|/(event=0?x?[0-9a-z]{1,3}|name=[a-z]{0,3}|[a-z]{1,5}|inv|,){0,3}/?)",
        letters in "(|:|:[a-zA-Z]{1,4})",
        pick in 0usize..6,
    ) {
        let name = format!("{event}{fields}{letters}");
        let model = &model(PmuModel::names()[pick].name);
        if let Err(error) = resolve(&name, model, &Fake::new()) {
            let text = error.to_string();
                        let mut parts = name.split(['/', ',', ':']).filter(|part| !part.is_empty());
            let named = text.contains(&name) || parts.any(|part| text.contains(&format!("'{part}'")));
            prop_assert!((named || text.contains("has no event for")) && !text.contains('\n'), "{name}: {text}");
        }
    }

    /// Whatever somebody types is answered.
    #[test]
    fn no_name_panics(name in "\\PC*", short in "[r:.=a-zA-Z0-9_]{0,12}", pick in 0usize..6) {
        let names = Fake::new();
        let model = &model(PmuModel::names()[pick].name);
        for text in [&name, &short, &format!("skl::{short}"), &format!("INST_RETIRED:{short}"), &format!("cpu/{short}/{name}"), &format!("{short}/{name}/")] {
            let _ = (resolve(text, model, &names), extras(text));
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
