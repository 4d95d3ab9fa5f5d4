//! What a name or a code stands for.

use pmu_model::PmuModel;
use proptest::prelude::{prop_assert, proptest};
use proptest::sample::{select, subsequence};

use super::tables::{Fake, no_library};
use crate::{
    BackendUse, CodeEntry, Entry, EventError, NameTable, code_of, decode, family_of, generic_names,
    identify, is_code, models_of, resolve, write_list,
};

fn entries(
    text: &str,
    pmu: Option<&str>,
    names: &dyn NameTable,
) -> Result<Vec<CodeEntry>, EventError> {
    let found = identify(text, pmu, names, &|_| Vec::<BackendUse>::new())?;
    let codes = found.into_iter().map(|entry| match entry {
        Entry::Code(code) => code,
        other => panic!("{text}: {other:?}"),
    });
    Ok(codes.collect())
}

/// The names of an entry, those of tables with their tables.
fn names_of(entry: &CodeEntry) -> Vec<String> {
    let names = entry.names.iter().map(|name| match name.tables.as_slice() {
        [] => name.name.clone(),
        tables => format!("{} in {}", name.name, tables.join(" ")),
    });
    names.collect()
}

/// The names that `text` has with `model`.
fn check(text: &str, model: &str, expected: &[&str]) {
    let found = entries(text, None, &Fake::new()).unwrap_or_else(|e| panic!("{text}: {e}"));
    let of_model = found.iter().find(|entry| entry.models.contains(&model));
    let entry = of_model.unwrap_or_else(|| panic!("{text} with {model}: {found:?}"));
    assert_eq!(names_of(entry), expected, "{text} with {model}");
}

fn decoded(text: &str, pmu: &str, names: &dyn NameTable) -> Result<Vec<String>, EventError> {
    let entries = decode(text, Some(pmu), names, &|_| Vec::<BackendUse>::new())?;
    let names = entries.iter().flat_map(|entry| match entry {
        Entry::Code(code) => names_of(code),
        other => panic!("{text}: {other:?}"),
    });
    Ok(names.collect())
}

/// Every generic name comes back from its code, however the code is written.
#[test]
fn codes_lead_back_to_names() {
    for summary in PmuModel::names() {
        let model = PmuModel::parse(summary.name).unwrap();
        for name in generic_names() {
            let Ok(named) = resolve(name, &model, &no_library()) else {
                continue;
            };
            let code = code_of(&named.request);
            for text in [
                format!("r{code:x}"),
                format!("{code:#x}"),
                format!("r{:x}", code & 0xf_0000_ffff),
                format!("cpu/config={code:#x}/"),
            ] {
                let found = decoded(&text, summary.name, &no_library());
                let found = found.unwrap_or_else(|error| panic!("{text}: {error}"));
                assert!(found.iter().any(|it| it == name), "{text}: {found:?}");
            }
        }
    }
}

#[test]
fn what_is_no_code_or_has_no_name_is_refused() {
    let refused = |text: &str, says: &str| {
        let error = decoded(text, "amd-core", &Fake::new())
            .expect_err(text)
            .to_string();
        assert!(error.contains(says) && !error.contains('\n'), "{error}");
    };
    refused("cycles", "no code");
    refused("", "no code");
    refused("0166", "no code");
    refused("r53fffe", "no event of amd-core");
    refused("r80000000000000c0", "no bits");
    refused("cpu/event=0x1000/", "12 bits");
    let error = decoded("r53fffe", "amd-core", &no_library()).expect_err("no tables");
    assert!(error.to_string().contains("libpfm4"), "{error}");
}

/// The three forms that `umpire events --help` lists, with each model.
#[test]
fn every_form_of_the_help_stands_for_something() {
    let names = Fake::new();
    let check = |text: &str, models: &[&str]| {
        let found = entries(text, None, &names).unwrap_or_else(|error| panic!("{error}"));
        let counted = found.iter().filter(|entry| !entry.names.is_empty());
        let mut with: Vec<&str> = counted.flat_map(|entry| entry.models.clone()).collect();
        with.sort_unstable();
        assert_eq!(with, models, "{text}: {found:?}");
        for model in models {
            let found = entries(text, Some(model), &names).expect("one model");
            assert_eq!(found.len(), 1, "{text} with {model}");
            assert_eq!(found[0].models, [*model]);
        }
    };
    let every = [
        "amd-core",
        "amd-fam10h",
        "amd-k7",
        "amd-perfmonv2",
        "intel-v1",
        "intel-v2",
        "intel-v3",
        "intel-v4",
        "intel-v5",
    ];
    check("cycles", &every);
    check("instructions:u", &every);
    check("r5300c0", &every);
    check("r5300c0:k", &every);
    check("0x5300c0", &every);
    check("rc0", &every);
    let intel = ["intel-v1", "intel-v2", "intel-v3", "intel-v4", "intel-v5"];
    check("skl::INST_RETIRED:ANY_P:u", &intel);
    check("skl::INST_RETIRED:ANY_P:u:e:i:c=2", &intel);
    check("L2_RQSTS:MISS:k", &intel);
    let several = "amd64_fam10h_barcelona::DISPATCHED_FPU:OPS_ADD:OPS_STORE:u:c=1";
    check(several, &["amd-fam10h"]);
    check("DISPATCHED_FPU:OPS_ADD:OPS_STORE:e", &["amd-fam10h"]);
    check(
        "RETIRED_INSTRUCTIONS:u",
        &["amd-core", "amd-fam10h", "amd-k7"],
    );
}

#[test]
fn a_code_has_its_names() {
    check(
        "r5300c0",
        "intel-v2",
        &["instructions", "INST_RETIRED:ANY_P in skl"],
    );
    check(
        "rc0",
        "amd-core",
        &[
            "instructions",
            "RETIRED_INSTRUCTIONS in amd64_fam17h_zen1 amd64_fam17h_zen2",
        ],
    );
    check(
        "r5100c0",
        "intel-v1",
        &["instructions:u", "INST_RETIRED:ANY_P:u in skl"],
    );
    // A generic name takes no counter mask.
    check(
        "r2d200c0",
        "intel-v1",
        &["INST_RETIRED:ANY_P:i:c=2:k in skl"],
    );
    check(
        "r530300",
        "intel-v2",
        &["ref-cycles", "UNHALTED_REFERENCE_CYCLES in skl wsm"],
    );
    check(
        "r570500",
        "amd-fam10h",
        &["DISPATCHED_FPU:OPS_ADD:OPS_STORE:e in amd64_fam10h_barcelona"],
    );
    check("r530800", "amd-fam10h", &[]);
    check("cycles", "amd-k7", &["cycles", "cpu-cycles"]);
    // A code of a table that means something else to the model is no name of it.
    check("r530100", "intel-v2", &["INST_RETIRED:ANY in icl"]);
}

#[test]
fn one_table_is_asked_alone() {
    let names = Fake::new();
    let found = entries("r530300", Some("wsm"), &names).expect("a code");
    assert_eq!(
        names_of(&found[0]),
        ["ref-cycles", "UNHALTED_REFERENCE_CYCLES in wsm"]
    );
    let found = entries("INST_RETIRED:ANY_P:u", Some("wsm"), &names).expect("a name");
    assert_eq!(names_of(&found[0]), ["INST_RETIRED:ANY_P:u in wsm"]);
}

#[test]
fn a_model_that_cannot_take_it_says_why() {
    let found = entries("r10053fff0", None, &Fake::new()).expect("a code");
    let refused = found.iter().find(|entry| entry.models == ["amd-k7"]);
    let text = format!("{refused:?}");
    assert!(text.contains("event select above 0xff"), "{text}");
    // A model that has no such event is not in the list.
    let found = entries("ref-cycles", None, &Fake::new()).expect("a name");
    let models: Vec<&str> = found.iter().flat_map(|one| one.models.clone()).collect();
    let intel = ["intel-v1", "intel-v2", "intel-v3", "intel-v4", "intel-v5"];
    assert_eq!(models, [&intel[..], &["amd-perfmonv2"]].concat());
}

#[test]
fn bad_names_say_what_is_wrong_and_what_is_near() {
    let check = |text: &str, pmu: Option<&str>, parts: &[&str]| {
        let error = entries(text, pmu, &Fake::new())
            .expect_err(text)
            .to_string();
        assert!(!error.contains('\n'), "{error}");
        for part in parts {
            assert!(error.contains(part), "{text}: no {part:?} in: {error}");
        }
    };
    check("instrctions:u", None, &["'instrctions'", "instructions?"]);
    check("instructions:x", None, &["'x' is no", ":u and :k"]);
    check("skl::INST_RETIERD:u", None, &["skl", "INST_RETIRED?"]);
    check("skl::INST_RETIRED:ANYP:u", None, &["'ANYP'", "ANY_P?"]);
    check("skk::INST_RETIRED", None, &["'skk'", "skl"]);
    check("INST_RETIRED:ANY_P:u", None, &["ambiguous", "wsm::"]);
    check("r12345678901234567", None, &["1 to 16"]);
    check("r8000000000000000", None, &["bits 0x8000000000000000"]);
    check("ref-cycles:u", Some("amd-core"), &["amd-core has no event"]);
    check("r5300c0", Some("skk"), &["'skk'", "skl"]);
    check("skl::L2_RQSTS:u", None, &["needs a unit mask"]);
}

#[test]
fn without_libpfm_there_are_generic_names() {
    let found = entries("r5300c0", None, &no_library()).expect("a code");
    // Intel's, where the event is architectural, and AMD's.
    assert_eq!(found.len(), 2, "{found:?}");
    for entry in &found {
        assert_eq!(names_of(entry), ["instructions"]);
    }
    let error = entries("skl::INST_RETIRED:u", None, &no_library()).expect_err("no tables");
    assert!(error.to_string().contains("apt-get install libpfm4"));
}

#[test]
fn words_are_no_codes() {
    for text in [
        "rc0",
        "r5300c0",
        "r5300c0:u",
        "0xc0",
        "0xcafe",
        "r1.k",
        "loads:D",
        "cs:u",
    ] {
        assert!(is_code(text), "{text}");
    }
    for text in [
        "read",
        "rc",
        "r",
        "0x",
        "c0",
        "r5300cx",
        "skl::r5300c0",
        "loads",
        "skl::loads:u",
        "r1*",
        "",
    ] {
        assert!(!is_code(text), "{text}");
    }
}

#[test]
fn text_and_json() {
    let check = |text: &str, json: bool, expected: &str| {
        let backends = |_: &_| {
            vec![BackendUse {
                backend: "step",
                provenance: "exact".to_owned(),
            }]
        };
        let found = identify(text, Some("intel-v2"), &Fake::new(), &backends).expect("a code");
        let mut out = Vec::new();
        write_list(&found, json, &mut out).expect("memory takes all");
        assert_eq!(String::from_utf8(out).expect("text"), expected);
    };
    check(
        "r2d500c0",
        false,
        "What this stands for with each PMU model, and every name of it\n  \
         intel-v2                         r2d500c0      instructions: step exact\n      \
         event select 0xc0, unit mask 0x0, architectural Instruction Retired\n      \
         u: at CPL 1 to 3, edge: transitions, inv, cmask=2: cycles with fewer than 2\n      \
         INST_RETIRED:ANY_P:e:i:c=2:u         in skl\n",
    );
    check(
        "rc0:k",
        true,
        "{\"kind\":\"code\",\"name\":\"rc0:k\",\"models\":[\"intel-v2\"],\"code\":\"r5200c0\",\
         \"fixed\":null,\"event\":\"instructions\",\
         \"backends\":[{\"backend\":\"step\",\"provenance\":\"exact\"}],\
         \"select\":\"0xc0\",\"umask\":\"0x0\",\"architectural\":\"Instruction Retired\",\"modifiers\":[\"k\"],\
         \"names\":[{\"name\":\"instructions:k\",\"tables\":[]},\
         {\"name\":\"INST_RETIRED:ANY_P:k\",\"tables\":[\"skl\"]}]}\n",
    );
}

proptest! {
    /// The code of a name has this name.
    #[test]
    fn a_name_is_among_the_names_of_its_code(
        event in select(vec![
            ("skl", "INST_RETIRED", vec![":ANY_P", ":ALL"], 1),
            ("skl", "L2_RQSTS", vec![":MISS"], 1),
            ("wsm", "UNHALTED_REFERENCE_CYCLES", vec![], 0),
            ("amd64_k8_revg", "RETIRED_INSTRUCTIONS", vec![], 0),
            ("amd64_fam10h_barcelona", "MEMORY_CONTROLLER_REQUESTS", vec![], 0),
            ("amd64_fam10h_barcelona", "DISPATCHED_FPU",
             vec![":OPS_ADD", ":OPS_MULTIPLY", ":OPS_STORE"], 3),
        ]),
        masks in subsequence(vec![0usize, 1, 2], 0..=3),
        flags in subsequence(vec![":e", ":i"], 0..=2),
        cmask in 0u8..4,
        ring in select(vec!["", ":u", ":k"]),
    ) {
        let names = Fake::new();
        let (table, event, known, most) = event;
        let chosen = masks.iter().filter_map(|mask| known.get(*mask).copied()).take(most);
        let chosen: String = chosen.collect();
        let cmask = if cmask > 0 { format!(":c={cmask}") } else { String::new() };
        let rest = format!("{event}{chosen}{}{cmask}{ring}", flags.concat());
        let tables = names.tables().iter().find(|one| one.name == table);
        let family = family_of(tables.expect("a table")).expect("a model's");
        for model in models_of(family) {
            let Ok(named) = resolve(&format!("{table}::{rest}"), &model, &names) else {
                continue;
            };
            let code = named.code;
            let found = entries(&format!("r{code:x}"), Some(model.name()), &names);
            let found = found.expect("its code");
            let of_table = found[0].names.iter().filter(|name| name.tables.iter().any(|t| t == table));
            let of_table: Vec<&str> = of_table.map(|name| name.name.as_str()).collect();
            // Without a unit mask, that of the default is written out.
            let is_it = |name: &&str| {
                **name == rest || chosen.is_empty() && name.starts_with(event)
            };
            prop_assert!(of_table.iter().any(is_it), "{} r{:x}: {:?}", rest, code, found);
        }
    }

    /// Every name of a code stands for the code, and whatever is typed is answered.
    #[test]
    fn every_name_of_a_code_means_it(code in 0u64..1 << 36, short in "[r:.=a-zA-Z0-9_]{0,12}") {
        let names = Fake::new();
        for model in ["intel-v2", "amd-fam10h"] {
            let _ = entries(&short, Some(model), &names);
            let text = format!("r{:x}", code & 0xf_ffff_ffff);
            let Ok(found) = entries(&text, Some(model), &names) else {
                continue;
            };
            let model = PmuModel::parse(model).expect("a model");
            let wanted = resolve(&text, &model, &names).expect("a code").request;
            for name in &found[0].names {
                let tables = name.tables.iter().map(|table| format!("{table}::{}", name.name));
                let full = if name.tables.is_empty() { vec![name.name.clone()] } else { tables.collect() };
                for full in full {
                    let meant = resolve(&full, &model, &names).expect("a name").request;
                    prop_assert!(meant == wanted, "{} {}: {:?} {:?}", text, full, meant, wanted);
                }
            }
        }
    }
}
