//! Names, properties, ranges of MSRs.

use std::collections::BTreeMap;

use pmu_model::{EventFamily, MsrIndex, PmuModel, Vendor, all_pmu_msr_ranges};

#[test]
fn properties_are_taken() {
    let model =
        PmuModel::parse("intel-v2,counters=8,fixed=2,width=40,fixed-width=44,full-width=off")
            .expect("a good model");
    assert_eq!(
        (
            model.name(),
            model.programmable(),
            model.fixed(),
            model.width(),
            model.fixed_width(),
            model.full_width(),
        ),
        ("intel-v2", 8, 2, 40, 44, false)
    );
    assert_eq!(PmuModel::default_for(Vendor::Intel).name(), "intel-v2");
    assert_eq!(PmuModel::default_for(Vendor::Amd).name(), "amd-core");
    for summary in PmuModel::names() {
        let model = PmuModel::parse(summary.name).expect("a listed name");
        assert_eq!(
            (model.name(), model.vendor()),
            (summary.name, summary.vendor)
        );
        assert!(!summary.summary.is_empty());
    }
}

fn check_error(spec: &str, expected: &str) {
    let error = PmuModel::parse(spec).expect_err(spec);
    assert_eq!(error.to_string(), expected, "{spec}");
}

const OR_A_MAP: &str = ", or a bit for each counter as 0x0 to 0x7";

/// What is printed is parsed to the same, and a file of an older version means the same.
#[test]
fn models_are_printed_as_they_are_parsed() {
    let check = |spec: &str, expected: &str| {
        let model = PmuModel::parse(spec).expect(spec);
        assert_eq!(model.to_string(), expected, "{spec}");
        let again = PmuModel::parse(expected).expect(expected);
        assert_eq!(again.to_string(), expected);
    };
    check(
        "intel-v2",
        "intel-v2,counters=4,fixed=3,width=48,fixed-width=48,full-width=on",
    );
    check(
        "intel-v2,perf-capabilities=off,full-width=off",
        "intel-v2,counters=4,fixed=3,width=48,fixed-width=48,full-width=off",
    );
    check(
        "intel-v3,perf-capabilities=on,full-width=off",
        "intel-v3,counters=4,fixed=3,width=48,fixed-width=48,full-width=off,perf-capabilities=on",
    );
    check(
        "intel-v4,events=skylake",
        "intel-v4,counters=4,fixed=3,width=48,fixed-width=48,full-width=on,events=skylake",
    );
    check(
        "amd-core,events=zen",
        "amd-core,counters=6,fixed=0,width=48,fixed-width=0,full-width=off",
    );
    check(
        "intel-v5,fixed=0x6",
        "intel-v5,counters=8,fixed=0x6,width=48,fixed-width=48,full-width=on",
    );
    check(
        "intel-v5,fixed=0x3",
        "intel-v5,counters=8,fixed=2,width=48,fixed-width=48,full-width=on",
    );
    let v4 = "intel-v4,counters=4,fixed=3,width=48,fixed-width=48,full-width=on";
    check("intel-v4,pebs=off", v4);
    check("intel-v4,pebs=skid", &format!("{v4},pebs=skid"));
    check(
        "intel-v4,pebs-format=4,pebs=exact",
        &format!("{v4},pebs=exact"),
    );
    check(
        "intel-v4,pebs=exact,pebs-format=3",
        &format!("{v4},pebs=exact,pebs-format=3"),
    );
    check(
        "intel-v2,full-width=off,pebs=skid",
        "intel-v2,counters=4,fixed=3,width=48,fixed-width=48,full-width=off,\
         perf-capabilities=on,pebs=skid",
    );
}

#[test]
fn impossible_pebs_is_named() {
    let check = |spec: &str, expected: &str| check_error(spec, expected);
    check(
        "intel-v4,pebs=on",
        "'pebs=on' of PMU model intel-v4 is not possible; give exact, skid or off",
    );
    check(
        "intel-v4,pebs=skid,pebs-format=5",
        "'pebs-format=5' of PMU model intel-v4 is not possible; give 3 or 4",
    );
    check(
        "intel-v4,pebs-format=3",
        "'pebs-format=3' of PMU model intel-v4 is not possible; give pebs=exact or pebs=skid \
         with it",
    );
    check(
        "intel-v4,pebs=skid,full-width=off,perf-capabilities=off",
        "'perf-capabilities=off' of PMU model intel-v4 is not possible; give on, or pebs=off and \
         full-width=off with it",
    );
    for model in ["intel-v1", "amd-core", "amd-perfmonv2"] {
        check(
            &format!("{model},pebs=skid"),
            &format!("property 'pebs' of PMU model {model} cannot be changed: it is always off"),
        );
    }
}

#[test]
fn bad_properties_are_named() {
    let models = "intel-v1, intel-v2, intel-v3, intel-v4, intel-v5, amd-k7, amd-fam10h, amd-core, amd-perfmonv2";
    check_error(
        "pentium",
        &format!("no PMU model is called 'pentium'; known are {models}"),
    );
    check_error(
        "",
        &format!("no PMU model is called ''; known are {models}"),
    );
    check_error(
        "intel-v2,lbr=on",
        "PMU model intel-v2 has no property 'lbr'; known are counters, fixed, width, fixed-width, full-width, perf-capabilities, ibs, freeze, events, pebs, pebs-format",
    );
    check_error(
        "intel-v2,",
        "PMU model intel-v2 has no property ''; known are counters, fixed, width, fixed-width, full-width, perf-capabilities, ibs, freeze, events, pebs, pebs-format",
    );
    for spec in ["intel-v2,counters", "intel-v2,counters="] {
        check_error(
            spec,
            "property 'counters' of PMU model intel-v2 needs a value: counters=VALUE",
        );
    }
    for (spec, property) in [
        ("intel-v2,ibs=on", "ibs"),
        ("amd-k7,ibs=on", "ibs"),
        ("intel-v4,freeze=on", "freeze"),
        ("amd-core,freeze=on", "freeze"),
    ] {
        let model = spec.split(',').next().unwrap_or_default();
        check_error(
            spec,
            &format!(
                "property '{property}' of PMU model {model} cannot be changed: it is always off"
            ),
        );
    }
    check_error(
        "amd-core,ibs=yes",
        "'ibs=yes' of PMU model amd-core is not possible; give on or off",
    );
    check_error(
        "intel-v2,width=40,width=40",
        "property 'width' of PMU model intel-v2 is given twice; keep one",
    );
    for value in ["9", "0", "-1", "many", "300"] {
        check_error(
            &format!("intel-v2,counters={value}"),
            &format!(
                "'counters={value}' of PMU model intel-v2 is not possible; give a number from 1 to 8"
            ),
        );
    }
    check_error(
        "intel-v2,width=64",
        "'width=64' of PMU model intel-v2 is not possible; give a number from 32 to 63",
    );
    check_error(
        "intel-v2,full-width=yes",
        "'full-width=yes' of PMU model intel-v2 is not possible; give on or off",
    );
    for (value, allowed) in [("intel-v4,fixed=0x6", ""), ("intel-v5,fixed=0x8", OR_A_MAP)] {
        let (model, fixed) = value.split_once(',').expect("a property");
        check_error(
            value,
            &format!(
                "'{fixed}' of PMU model {model} is not possible; give a number from 0 to 3{allowed}"
            ),
        );
    }
    check_error(
        "intel-v3,perf-capabilities=off",
        "'perf-capabilities=off' of PMU model intel-v3 is not possible; give on, or \
         full-width=off with it",
    );
    check_error(
        "amd-k7,perf-capabilities=on",
        "property 'perf-capabilities' of PMU model amd-k7 cannot be changed: it is always off",
    );
    check_error(
        "intel-v4,events=zen",
        "'events=zen' of PMU model intel-v4 is not possible; give intel, nehalem, skylake, ice-lake",
    );
    check_error(
        "amd-k7,events=zen",
        "property 'events' of PMU model amd-k7 cannot be changed: it is always k7",
    );
    check_error(
        "intel-v1,fixed=3",
        "property 'fixed' of PMU model intel-v1 cannot be changed: it is always 0",
    );
    check_error(
        "amd-core,counters=4",
        "property 'counters' of PMU model amd-core cannot be changed: it is always 6",
    );
    check_error(
        "amd-k7,full-width=on",
        "property 'full-width' of PMU model amd-k7 cannot be changed: it is always off",
    );
}

#[test]
fn all_ranges_cover_sampling_facilities_too() {
    let ranges = all_pmu_msr_ranges();
    for msr in [
        0x3f1,
        0x3f6,
        0x600,
        0x392,
        0x329,
        0xc001_1030,
        0xc001_103d,
        0xc001_0230,
    ] {
        let found = ranges
            .iter()
            .any(|(first, last)| (*first..=*last).contains(&msr));
        assert!(found, "{msr:#x}");
    }
}

/// No index belongs to two registers, and each decodes to its own.
#[test]
fn decoding_is_the_list_of_registers() {
    let specs = PmuModel::names().iter().map(|summary| summary.name);
    for spec in specs.chain([
        "intel-v2,fixed=0",
        "intel-v2,full-width=off,counters=8",
        "intel-v5,fixed=0x5",
    ]) {
        let model = PmuModel::parse(spec).expect("a good model");
        let mut known = BTreeMap::new();
        for (msr, register) in model.registers() {
            assert_eq!(known.insert(msr, register), None, "{spec}: {msr:#x}");
        }
        let near = known.keys().flat_map(|msr| [msr - 1, *msr, msr + 1]);
        for msr in near.chain([0, u32::MAX]) {
            let expected = known.get(&msr).copied();
            assert_eq!(model.decode(MsrIndex(msr)), expected, "{spec}: {msr:#x}");
        }
    }
}

/// A code of no processor in particular is one of each Intel processor; that of one is its own.
#[test]
fn only_what_is_of_no_processor_covers_others() {
    for own in EventFamily::ALL {
        let covered: Vec<EventFamily> = EventFamily::ALL
            .into_iter()
            .filter(|processor| own.covers(*processor))
            .collect();
        let expected = match own {
            EventFamily::Intel => vec![
                EventFamily::Intel,
                EventFamily::IntelNehalem,
                EventFamily::IntelSkylake,
                EventFamily::IntelIceLake,
            ],
            other => vec![other],
        };
        assert_eq!(covered, expected, "{own:?}");
    }
}
