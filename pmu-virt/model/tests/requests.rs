//! Requests and events: round trips, and the meaning of codes.

use pmu_model::{
    CountRequest, EventCode, EventFamily, FixedFunction, KnownEvent, PmuModel, Register, Ring,
    Vendor,
};
use proptest::prelude::{Strategy, any, prop_assert, prop_assert_eq, proptest};
use proptest::sample::select;

/// Bits of an event select that each family reads.
const FAMILIES: [(EventFamily, u64); 8] = [
    (EventFamily::Intel, 0xffff_ffff),
    (EventFamily::IntelNehalem, 0xffff_ffff),
    (EventFamily::IntelSkylake, 0xffff_ffff),
    (EventFamily::IntelIceLake, 0xffff_ffff),
    (EventFamily::AmdK7, 0xffdf_ffff),
    (EventFamily::AmdFam10h, 0x30f_ffd7_ffff),
    (EventFamily::AmdZen, 0x30f_ffd7_ffff),
    (EventFamily::AmdZen4, 0x30f_ffd7_ffff),
];

const FUNCTIONS: [FixedFunction; 3] = [
    FixedFunction::Instructions,
    FixedFunction::CoreCycles,
    FixedFunction::RefCycles,
];

/// Every model with its default properties, and fixed counters in every number.
fn models() -> Vec<PmuModel> {
    let names = PmuModel::names().iter().map(|model| model.name.to_owned());
    let fixed = (0..=3).map(|n| format!("intel-v2,fixed={n}"));
    let events = ["nehalem", "skylake", "ice-lake"].map(|word| format!("intel-v4,events={word}"));
    let parse = |spec: String| PmuModel::parse(&spec).expect("a good model");
    names.chain(fixed).chain(events).map(parse).collect()
}

/// Bits that `register` of `model` has; none if the model lacks the register.
fn implemented(model: &PmuModel, register: Register) -> u64 {
    let rule = model.write_rule(register);
    rule.expect("a control register").implemented
}

/// Any combination of fields, whether a register has them or not.
fn requests() -> impl Strategy<Value = CountRequest> {
    let families = select(&FAMILIES[..]);
    // Codes of every length, or nearly none would fit into 8 bits.
    let select_code = (0u16..0x2000, select(&[0xff, 0xfff, 0x1fff][..])).prop_map(|(a, b)| a & b);
    let code = (families, select_code, any::<u8>());
    (code, any::<[bool; 9]>(), any::<u8>()).prop_map(|((family, code, umask), flags, cmask)| {
        let [usr, os, edge, pin, int, any_thread, enabled, invert, _] = flags;
        // Now and then both, seldom one: most families have neither.
        let (guest_only, host_only) = (flags[8] && usr, flags[8] && os);
        CountRequest {
            event: EventCode::Selected {
                family: family.0,
                select: code,
                umask,
            },
            usr,
            os,
            edge,
            pin,
            int,
            any_thread,
            enabled,
            invert,
            cmask,
            guest_only,
            host_only,
        }
    })
}

proptest! {
    /// Bits that a model has: register, request, register.
    #[test]
    fn registers_of_every_model_survive_the_round_trip(
        raw in any::<u64>(), model in select(models()),
    ) {
        let select = raw & implemented(&model, Register::Select(0));
        let request = CountRequest::decode(model.events(), select);
        prop_assert_eq!(request.encode(), Some(select), "{}", model.name());
        if model.has_global_control() && model.fixed() > 0 {
            let control = raw & implemented(&model, Register::FixedControl);
            let fields = (0..model.fixed()).filter_map(FixedFunction::of).map(|function| {
                CountRequest::decode_fixed(function, control).encode_fixed()
            });
            prop_assert_eq!(fields.sum::<Option<u64>>(), Some(control), "{}", model.name());
        }
    }

    /// Request, register, request: a register either holds all of a request, or
    /// there is no register value for it.
    #[test]
    fn requests_survive_the_round_trip(request in requests()) {
        let EventCode::Selected { family, select, .. } = request.event else {
            unreachable!("requests() selects");
        };
        let bits = FAMILIES.iter().find(|(one, _)| *one == family).map_or(0, |(_, bits)| *bits);
        let has = |asked: bool, bit: u32| !asked || bits & 1 << bit != 0;
        let longest = if bits & 1 << 32 != 0 { 0xfff } else { 0xff };
        let fits = select <= longest
            && has(request.any_thread, 21)
            && has(request.pin, 19)
            && has(request.guest_only, 40)
            && has(request.host_only, 41);
        match request.encode() {
            Some(raw) => {
                prop_assert!(fits, "{raw:#x}");
                prop_assert_eq!(raw & !bits, 0);
                prop_assert_eq!(CountRequest::decode(family, raw), request);
            }
            None => prop_assert!(!fits),
        }
    }

    #[test]
    fn fixed_requests_survive_the_round_trip(
        function in select(&FUNCTIONS), os: bool, usr: bool, int: bool, any_thread: bool,
    ) {
        let request = CountRequest {
            int,
            any_thread,
            enabled: os || usr,
            ..CountRequest::plain(EventCode::Fixed(function), os, usr)
        };
        let control = request.encode_fixed().expect("a field");
        prop_assert_eq!(CountRequest::decode_fixed(function, control), request);
    }

    #[test]
    fn selects_survive_the_round_trip(raw in any::<u64>(), (family, bits) in select(&FAMILIES)) {
        let request = CountRequest::decode(family, raw);
        prop_assert_eq!(request.encode(), Some(raw & bits));
        prop_assert_eq!(CountRequest::decode(family, raw & bits), request);
        prop_assert_eq!(request.encode_fixed(), None);
    }

    #[test]
    fn fixed_controls_survive_the_round_trip(raw in any::<u64>(), function in select(&FUNCTIONS)) {
        let request = CountRequest::decode_fixed(function, raw);
        let field = 0xf << (4 * u32::from(function.index()));
        prop_assert_eq!(request.encode_fixed(), Some(raw & field));
        prop_assert_eq!(request.encode(), None);
        prop_assert_eq!(request.enabled, request.os || request.usr);
        prop_assert_eq!(FixedFunction::of(function.index()), Some(function));
    }

    #[test]
    fn a_programmed_counter_serves_what_differs_in_enabling_alone(
        a in any::<u64>(), (family, _) in select(&FAMILIES), bit in 0u32..42,
    ) {
        let request = CountRequest::decode(family, a);
        let other = CountRequest::decode(family, a ^ (1 << bit));
        let same = other == request || matches!(bit, 19 | 20 | 22);
        prop_assert_eq!(request.counts_like(&other), same, "bit {}", bit);
    }
}

/// Codes and meanings are one table, read in both directions.
#[test]
fn known_events_have_codes_that_mean_them() {
    for (family, _) in FAMILIES {
        for event in KnownEvent::ALL {
            let code = EventCode::of(family, event);
            if let Some(code) = code {
                assert_eq!(code.known(), Some(event), "{family:?}");
                assert_eq!(code.family(), Some(family));
            }
            let intel = family.vendor() == Vendor::Intel;
            let nehalem = family == EventFamily::IntelNehalem;
            let old_amd = matches!(family, EventFamily::AmdK7 | EventFamily::AmdFam10h);
            let expected = match event {
                KnownEvent::LlcReferences | KnownEvent::LlcMisses => intel,
                KnownEvent::TopdownSlots => {
                    matches!(family, EventFamily::Intel | EventFamily::IntelIceLake)
                }
                KnownEvent::RefCycles => intel || family == EventFamily::AmdZen4,
                KnownEvent::ConditionalBranches => family != EventFamily::Intel && !old_amd,
                KnownEvent::TakenBranches | KnownEvent::FarBranches | KnownEvent::Returns => {
                    !nehalem
                }
                KnownEvent::Loads | KnownEvent::Stores => !old_amd,
                KnownEvent::Calls => intel,
                KnownEvent::FloatingPoint | KnownEvent::X87 | KnownEvent::Mmx | KnownEvent::Sse => {
                    !intel
                }
                KnownEvent::Strings => false,
                _ => true,
            };
            assert_eq!(code.is_some(), expected, "{family:?} {event}");
        }
    }
}

fn check(family: EventFamily, select: u16, umask: u8, expected: Option<KnownEvent>) {
    let event = EventCode::Selected {
        family,
        select,
        umask,
    };
    assert_eq!(event.known(), expected, "{family:?} {select:#x} {umask:#x}");
}

#[test]
fn codes_mean_what_the_manuals_say() {
    use EventFamily::{AmdFam10h, AmdK7, AmdZen, AmdZen4, Intel};
    for (select, umask, event) in [
        (0x3c, 0x00, KnownEvent::CoreCycles),
        (0x3c, 0x01, KnownEvent::RefCycles),
        (0xc0, 0x00, KnownEvent::Instructions),
        (0x2e, 0x4f, KnownEvent::LlcReferences),
        (0x2e, 0x41, KnownEvent::LlcMisses),
        (0xc4, 0x00, KnownEvent::Branches),
        (0xc5, 0x00, KnownEvent::MispredictedBranches),
        (0xa4, 0x01, KnownEvent::TopdownSlots),
        (0xc4, 0x20, KnownEvent::TakenBranches),
        (0xc4, 0x40, KnownEvent::FarBranches),
        (0xd0, 0x81, KnownEvent::Loads),
        (0xd0, 0x82, KnownEvent::Stores),
    ] {
        check(Intel, select, umask, Some(event));
        check(Intel, select, umask ^ 0x80, None);
    }
    for family in [AmdK7, AmdFam10h, AmdZen, AmdZen4] {
        for (select, event) in [
            (0x76, KnownEvent::CoreCycles),
            (0xc0, KnownEvent::Instructions),
            (0xc2, KnownEvent::Branches),
            (0xc3, KnownEvent::MispredictedBranches),
            (0xc4, KnownEvent::TakenBranches),
            (0xc6, KnownEvent::FarBranches),
        ] {
            check(family, select, 0, Some(event));
            check(family, 0x100 | select, 0, None);
        }
        let zen = matches!(family, AmdZen | AmdZen4);
        check(family, 0x29, 1, zen.then_some(KnownEvent::Loads));
        check(family, 0x29, 2, zen.then_some(KnownEvent::Stores));
        check(family, 0x29, 4, None);
        let p0 = (family == AmdZen4).then_some(KnownEvent::RefCycles);
        check(family, 0x120, 1, p0);
    }
}

/// Record-and-replay tools program them; each code is another event elsewhere.
#[test]
fn conditional_branches_have_the_identitys_own_code() {
    use EventFamily::{
        AmdFam10h, AmdK7, AmdZen, AmdZen4, Intel, IntelIceLake, IntelNehalem, IntelSkylake,
    };
    let codes = [(0xc4, 0x01), (0xc4, 0x11), (0xd1, 0x00)];
    let table = [
        (Intel, [false, false, false]),
        (IntelNehalem, [true, false, false]),
        (IntelSkylake, [true, false, false]),
        (IntelIceLake, [false, true, false]),
        (AmdK7, [false, false, false]),
        (AmdFam10h, [false, false, false]),
        (AmdZen, [false, false, true]),
        (AmdZen4, [false, false, true]),
    ];
    for (family, expected) in table {
        for ((select, umask), conditional) in codes.into_iter().zip(expected) {
            let event = EventCode::Selected {
                family,
                select,
                umask,
            };
            let is = event.known() == Some(KnownEvent::ConditionalBranches);
            assert_eq!(is, conditional, "{family:?} {select:#x}/{umask:#x}");
        }
    }
}

/// What a host's counter is asked for: another processor's code may be another event there.
#[test]
fn codes_of_one_processor_are_said_in_the_words_of_another() {
    use EventFamily::{AmdZen, Intel, IntelIceLake, IntelNehalem, IntelSkylake};
    let event = |family, (select, umask)| EventCode::Selected {
        family,
        select,
        umask,
    };
    let check = |family, code, host, expected: Option<(u16, u8)>| {
        let found = event(family, code).on_processor(host);
        let fields = |event: EventCode| match event {
            EventCode::Selected { select, umask, .. } => (select, umask),
            _ => (0, 0),
        };
        assert_eq!(found.map(fields), expected, "{family:?} {code:x?} {host:?}");
    };
    check(IntelSkylake, (0xc4, 0x01), IntelIceLake, Some((0xc4, 0x11)));
    check(IntelIceLake, (0xc4, 0x11), IntelNehalem, Some((0xc4, 0x01)));
    check(IntelSkylake, (0xd0, 0x81), IntelNehalem, Some((0x0b, 0x01)));
    // The taken ones alone on Ice Lake, and nobody knows what on Skylake.
    check(IntelIceLake, (0xc4, 0x01), IntelSkylake, None);
    // No processor in particular: nobody knows its code.
    check(IntelSkylake, (0xc4, 0x01), Intel, None);
    check(IntelSkylake, (0xc4, 0x00), Intel, Some((0xc4, 0x00)));
    // The same processor, none in particular, or another vendor's: as it is.
    check(IntelSkylake, (0xa2, 0x08), IntelSkylake, Some((0xa2, 0x08)));
    check(Intel, (0xc4, 0x01), IntelIceLake, Some((0xc4, 0x01)));
    check(AmdZen, (0xd1, 0x00), IntelSkylake, Some((0xd1, 0x00)));
}

#[test]
fn processors_have_the_codes_of_their_generation() {
    use EventFamily::{Intel, IntelIceLake, IntelNehalem, IntelSkylake};
    let table = [
        (0x1a, IntelNehalem),
        (0x2c, IntelNehalem),
        (0x2a, IntelSkylake),
        (0x3f, IntelSkylake),
        (0x5e, IntelSkylake),
        (0x55, IntelSkylake),
        (0x7e, IntelIceLake),
        (0x6a, IntelIceLake),
        (0x0f, Intel),
        (0x10, Intel),
    ];
    for (model, expected) in table {
        let found = EventFamily::of_processor(Vendor::Intel, 6, model);
        assert_eq!(found, Some(expected), "{model:#x}");
    }
    assert_eq!(EventFamily::of_processor(Vendor::Amd, 0x17, 0x31), None);
}

#[test]
fn nehalem_has_loads_and_stores_elsewhere() {
    use EventFamily::{Intel, IntelIceLake, IntelNehalem, IntelSkylake};
    check(IntelNehalem, 0x0b, 0x01, Some(KnownEvent::Loads));
    check(IntelNehalem, 0x0b, 0x02, Some(KnownEvent::Stores));
    for (select, umask) in [(0xd0, 0x81), (0xd0, 0x82), (0xc4, 0x20), (0xc4, 0x40)] {
        check(IntelNehalem, select, umask, None);
    }
    for family in [Intel, IntelSkylake, IntelIceLake] {
        check(family, 0x0b, 0x01, None);
        check(family, 0xd0, 0x81, Some(KnownEvent::Loads));
    }
    check(IntelSkylake, 0xa4, 0x01, None);
    check(IntelIceLake, 0xa4, 0x01, Some(KnownEvent::TopdownSlots));
}

#[test]
fn requests_are_described() {
    let cases = [
        (0x43_003c, "core cycles"),
        (0x42_003c, "core cycles:k"),
        (0x41_01c2, "event 0xc2 umask 0x1:u"),
        (0x02e7_00c0, "instructions edge inv any cmask=2"),
    ];
    for (raw, expected) in cases {
        let request = CountRequest::decode(EventFamily::Intel, raw);
        assert_eq!(request.to_string(), expected, "{raw:#x}");
    }
}

#[test]
fn only_cpl_0_is_the_kernel() {
    let rings: Vec<_> = (0..4).map(Ring::from_cpl).collect();
    assert_eq!(rings, [Ring::Kernel, Ring::User, Ring::User, Ring::User]);
}
