//! Names, properties, CPUID.

use pmu_virt::{
    ClockBackend, CounterBackend, CpuidRegs, PmuModel, Sources, StepBackend, Vendor,
    all_pmu_msr_ranges, backend_names,
};

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

#[test]
fn bad_properties_are_named() {
    let models = "intel-v1, intel-v2, amd-k7, amd-fam10h, amd-core, amd-perfmonv2";
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
        "PMU model intel-v2 has no property 'lbr'; known are counters, fixed, width, fixed-width, full-width",
    );
    check_error(
        "intel-v2,",
        "PMU model intel-v2 has no property ''; known are counters, fixed, width, fixed-width, full-width",
    );
    for spec in ["intel-v2,counters", "intel-v2,counters="] {
        check_error(
            spec,
            "property 'counters' of PMU model intel-v2 needs a value: counters=VALUE",
        );
    }
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

fn leaf(spec: &str, backend: &dyn CounterBackend) -> CpuidRegs {
    PmuModel::parse(spec).expect(spec).cpuid(backend).leaf_0xa
}

#[test]
fn leaf_0xa_says_what_there_is_and_what_cannot_be_counted() {
    let (clock, step) = (ClockBackend::new(), StepBackend::new());
    // The clock has core and reference cycles: bits 0 and 2 are clear.
    // Steps have instructions and branches: bits 1 and 5 are clear.
    let table: [(&str, &dyn CounterBackend, [u32; 4]); 4] = [
        ("intel-v1", &clock, [0x0728_0201, 0b111_1010, 0, 0]),
        (
            "intel-v2",
            &clock,
            [0x0730_0402, 0b111_1010, 0, 3 | 48 << 5],
        ),
        ("intel-v2", &step, [0x0730_0402, 0b101_1101, 0, 3 | 48 << 5]),
        (
            "intel-v2,counters=8,fixed=1,width=40,fixed-width=32",
            &step,
            [0x0728_0802, 0b101_1101, 0, 1 | 32 << 5],
        ),
    ];
    for (spec, backend, [eax, ebx, ecx, edx]) in table {
        let expected = CpuidRegs { eax, ebx, ecx, edx };
        assert_eq!(leaf(spec, backend), expected, "{spec} {}", backend.name());
    }
}

#[test]
fn the_other_leaves_follow_the_model() {
    let clock = ClockBackend::new();
    // PDCM, PERF_CAPABILITIES, PerfCtrExtCore, PerfMonV2, counters told.
    let table = [
        ("intel-v1", false, None, false, false, 0),
        (
            "intel-v1,full-width=on",
            true,
            Some(0x2000),
            false,
            false,
            0,
        ),
        ("intel-v2", true, Some(0x2000), false, false, 0),
        ("intel-v2,full-width=off", false, None, false, false, 0),
        ("amd-k7", false, None, false, false, 0),
        ("amd-fam10h", false, None, false, false, 0),
        ("amd-core", false, None, true, false, 0),
        ("amd-perfmonv2", false, None, true, true, 6),
        ("amd-perfmonv2,counters=4", false, None, true, true, 4),
    ];
    for (spec, pdcm, capabilities, core, v2, counters) in table {
        let model = PmuModel::parse(spec).expect(spec);
        let cpuid = model.cpuid(&clock);
        assert_eq!(cpuid.pdcm, pdcm, "{spec}");
        assert_eq!(cpuid.perf_capabilities, capabilities, "{spec}");
        assert_eq!(cpuid.perfctr_core, core, "{spec}");
        assert_eq!(cpuid.perfmon_v2, v2, "{spec}");
        let leaf = CpuidRegs {
            eax: u32::from(v2),
            ebx: counters,
            ..CpuidRegs::default()
        };
        assert_eq!(cpuid.leaf_80000022, leaf, "{spec}");
        if model.vendor() == Vendor::Amd {
            assert_eq!(cpuid.leaf_0xa, CpuidRegs::default(), "{spec}");
        }
    }
}

#[test]
fn every_backend_that_is_listed_can_be_named() {
    for summary in backend_names() {
        let text = match summary.name {
            "sim" => "sim=rates.toml",
            name => name,
        };
        let sources = Sources::parse(text).unwrap_or_else(|error| panic!("{error}"));
        let names: Vec<_> = sources.iter().map(pmu_virt::Source::name).collect();
        assert_eq!(names, [summary.name]);
    }
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

#[test]
fn sources_are_read_and_named_again() {
    let good = [
        "auto",
        "clock",
        "clock,step",
        "perf,clock",
        "sim=rates.toml",
        "sim=/a/b.toml,clock",
        "msr",
        "msr=3",
        "msr:force",
        "msr=3:force,clock",
    ];
    for text in good {
        let sources = Sources::parse(text).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(sources.to_string(), text);
    }
    let bad = [
        ("", "no counter backend is called ''"),
        ("tsc", "'tsc'; known are auto"),
        ("clock,clock", "clock is named twice"),
        ("auto,step", "auto stands for a whole list"),
        ("sim", "sim=FILE.toml"),
        ("sim=", "sim=FILE.toml"),
        ("msr=x", "CPU is the number"),
        ("msr:foo", "CPU is the number"),
        ("msr=3:forced", "CPU is the number"),
        ("clock=1", "takes no options"),
        ("step:force", "takes no options"),
        ("clock,", "no counter backend is called ''"),
    ];
    for (text, part) in bad {
        let error = Sources::parse(text).expect_err(text).to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
}
