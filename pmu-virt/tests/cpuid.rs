//! What CPUID says with each backend, and how backends are named.

use pmu_virt::{
    ClockBackend, CountRequest, CounterBackend, CpuidRegs, PmuModel, Source, Sources, StepBackend,
    Vendor, backend_names,
};

fn counted_by(backend: &dyn CounterBackend) -> impl Fn(&CountRequest) -> bool {
    |request| backend.plan(request).is_ok()
}

fn leaf(spec: &str, backend: &dyn CounterBackend) -> CpuidRegs {
    PmuModel::parse(spec)
        .expect(spec)
        .cpuid(counted_by(backend))
        .leaf_0xa
}

#[test]
fn leaf_0xa_says_what_there_is_and_what_cannot_be_counted() {
    let (clock, step) = (ClockBackend::new(), StepBackend::new());
    // The clock has core and reference cycles: bits 0 and 2 are clear.
    // Steps have instructions and branches: bits 1 and 5 are clear.
    let table: [(&str, &dyn CounterBackend, [u32; 4]); 9] = [
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
        (
            "intel-v3",
            &clock,
            [0x0730_0403, 0b111_1010, 0, 3 | 48 << 5],
        ),
        (
            "intel-v4",
            &clock,
            [0x0730_0404, 0b111_1010, 0, 3 | 48 << 5],
        ),
        // Any-thread is no more: bit 15.
        (
            "intel-v5",
            &clock,
            [0x0730_0805, 0b111_1010, 0b111, 3 | 48 << 5 | 1 << 15],
        ),
        (
            "intel-v5,fixed=2",
            &clock,
            [0x0730_0805, 0b111_1010, 0b011, 2 | 48 << 5 | 1 << 15],
        ),
        // Only the first ones without a gap are a number.
        (
            "intel-v5,counters=4,fixed=0x5",
            &step,
            [0x0730_0405, 0b101_1101, 0b101, 1 | 48 << 5 | 1 << 15],
        ),
    ];
    for (spec, backend, [eax, ebx, ecx, edx]) in table {
        let expected = CpuidRegs { eax, ebx, ecx, edx };
        assert_eq!(leaf(spec, backend), expected, "{spec} {}", backend.name());
    }
}

/// Version 5 leaves a fixed-function counter out that nobody counts; before, CPUID has
/// only a number, and the counter stays.
#[test]
fn a_fixed_counter_that_nobody_counts_is_left_out_where_cpuid_can_say_so() {
    let (clock, step) = (ClockBackend::new(), StepBackend::new());
    let table: [(&str, &dyn CounterBackend, &str, [u32; 2]); 5] = [
        ("intel-v5", &clock, "0x6", [0b110, 0]),
        ("intel-v5", &step, "1", [0b001, 1]),
        ("intel-v5,fixed=0x5", &clock, "0x4", [0b100, 0]),
        ("intel-v5,fixed=1", &clock, "0", [0, 0]),
        ("intel-v4", &clock, "3", [0, 3]),
    ];
    for (spec, backend, fixed, [ecx, first]) in table {
        let model = PmuModel::parse(spec).expect(spec);
        let numbers = model.fixed();
        let model = model.counted(counted_by(backend));
        let found = model.to_string();
        assert!(found.contains(&format!(",fixed={fixed},")), "{found}");
        // What is written reads back as the same.
        let again = PmuModel::parse(&found).expect("its own text");
        assert_eq!(again.to_string(), found);
        assert!(again.counters().eq(model.counters()), "{found}");
        // Its numbers stay: reservations go by them.
        assert_eq!(model.fixed(), numbers, "{spec}");
        let leaf = model.cpuid(counted_by(backend)).leaf_0xa;
        assert_eq!([leaf.ecx, leaf.edx & 0x1f], [ecx, first], "{found}");
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
        (
            "intel-v2,full-width=off,perf-capabilities=on",
            true,
            Some(0),
            false,
            false,
            0,
        ),
        ("intel-v4", true, Some(0x2000), false, false, 0),
        ("intel-v5,full-width=off", false, None, false, false, 0),
        ("amd-k7", false, None, false, false, 0),
        ("amd-fam10h", false, None, false, false, 0),
        ("amd-core", false, None, true, false, 0),
        ("amd-perfmonv2", false, None, true, true, 6),
        ("amd-perfmonv2,counters=4", false, None, true, true, 4),
    ];
    for (spec, pdcm, capabilities, core, v2, counters) in table {
        let model = PmuModel::parse(spec).expect(spec);
        let cpuid = model.cpuid(counted_by(&clock));
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
        let names: Vec<_> = sources.iter().map(Source::name).collect();
        assert_eq!(names, [summary.name]);
    }
}

#[test]
fn words_stand_for_what_the_host_has() {
    let cases = [
        ("auto", "perf,clock", "clock"),
        ("perf", "perf", "perf,clock"),
        ("step,perf", "step,perf", "step,perf,clock"),
        ("perf,step", "perf,step", "perf,clock,step"),
        ("perf,step,clock", "perf,step,clock", "perf,step,clock"),
        ("clock,perf", "clock,perf", "clock,perf"),
        ("msr=3:force", "msr=3:force", "msr=3:force"),
    ];
    for (text, with, without) in cases {
        let sources = Sources::parse(text).unwrap_or_else(|error| panic!("{error}"));
        for (hardware, expected) in [(true, with), (false, without)] {
            let here = sources.on_host(|| hardware).to_string();
            assert_eq!(here, expected, "{text}, hardware events: {hardware}");
        }
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

/// IBS is announced as far as somebody counts: ops where there are instructions, all of it
/// where there are cycles or instructions.
#[test]
fn instruction_based_sampling_is_announced_as_it_can_be_counted() {
    let (clock, step) = (ClockBackend::new(), StepBackend::new());
    let check = |spec: &str, counts: &dyn Fn(&CountRequest) -> bool, expected: u32| {
        let model = PmuModel::parse(spec).expect(spec).counted(counts);
        assert_eq!(model.cpuid(counts).leaf_8000001b.eax, expected, "{spec}");
    };
    for plain in ["amd-k7", "amd-core", "amd-perfmonv2,ibs=off", "intel-v2"] {
        check(plain, &counted_by(&clock), 0);
    }
    check("amd-fam10h,ibs=on", &counted_by(&clock), 0x8f);
    check("amd-fam10h,ibs=on", &counted_by(&step), 0x9f);
    check("amd-core,ibs=on", &counted_by(&clock), 0xef);
    check("amd-perfmonv2,ibs=on", &counted_by(&step), 0xff);
    check("amd-core,ibs=on", &|_| false, 0);
}

#[test]
fn freezing_is_announced_where_it_is_wanted() {
    let clock = ClockBackend::new();
    for (spec, expected) in [("amd-perfmonv2", 1), ("amd-perfmonv2,freeze=on", 0b101)] {
        let model = PmuModel::parse(spec).expect(spec);
        let cpuid = model.cpuid(counted_by(&clock));
        assert_eq!(cpuid.leaf_80000022.eax, expected, "{spec}");
    }
}
