//! Which options lead to which plan, and which are refused.

use super::*;

fn pmc(n: u8) -> CounterId {
    CounterId::Programmable(n)
}

fn aside(counters: &[CounterId]) -> SetAside {
    SetAside {
        named: set(counters),
        any: 0,
    }
}

/// What firmware gets of six counters where the hypervisor has set `hypervisor` aside.
fn firmware_set(
    choice: &PcrChoice,
    hypervisor: &[CounterId],
    named: &[CounterId],
    any: u8,
) -> CounterSet {
    let there = PerKind {
        programmable: 6,
        fixed: 0,
    };
    let asked = SetAside {
        named: set(named),
        any,
    };
    choice.firmware_set(there, set(hypervisor), asked)
}

#[test]
fn firmware_is_expected_to_get_what_policy_lets_it() {
    fn check(named: &[CounterId], any: u8, max: u8, expected: &[CounterId]) {
        let mut choice = PcrChoice {
            hypervisor: HypervisorCounters::These(vec![pmc(5)]),
            ..PcrChoice::default()
        };
        choice.policy.firmware.max.programmable = max;
        choice.policy.kernel.min.programmable = 2;
        let got = firmware_set(&choice, &[pmc(5)], named, any);
        assert_eq!(got, set(expected), "{named:?} and {any}, at most {max}");
    }
    check(&[], 0, 6, &[]);
    check(&[pmc(2)], 1, 6, &[pmc(2), pmc(4)]);
    check(&[pmc(0)], 5, 2, &[pmc(0), pmc(4)]);
    // The kernel's minimum is left, and the hypervisor keeps its own.
    check(&[pmc(5)], 6, 6, &[pmc(2), pmc(3), pmc(4)]);
}

/// Under the scheme that asks the hypervisor yields, down to its minimum.
#[test]
fn firmware_is_expected_to_get_what_the_hypervisor_yields() {
    fn check(scheme: Scheme, min: u8, named: &[CounterId], any: u8, expected: &[CounterId]) {
        let mut choice = PcrChoice {
            scheme,
            ..PcrChoice::default()
        };
        choice.policy.hypervisor.min.programmable = min;
        let got = firmware_set(&choice, &[pmc(4), pmc(5)], named, any);
        assert_eq!(got, set(expected), "{scheme:?}, {min}: {named:?}, {any}");
    }
    let interacting = Scheme::Interacting;
    check(interacting, 0, &[pmc(5)], 1, &[pmc(5), pmc(3)]);
    check(interacting, 1, &[pmc(4), pmc(5)], 0, &[pmc(4)]);
    check(interacting, 2, &[pmc(5)], 0, &[]);
    check(Scheme::Independent, 0, &[pmc(5)], 0, &[]);
    // The kernel keeps one; the free ones go first.
    let all = [pmc(1), pmc(2), pmc(3), pmc(4), pmc(5)];
    check(interacting, 0, &[], 3, &all[..3]);
    check(interacting, 0, &[], 6, &all);
}

fn set(counters: &[CounterId]) -> CounterSet {
    counters.iter().copied().collect()
}

#[test]
fn lists_of_counters() {
    let check = |text, expected| assert_eq!(HypervisorCounters::parse(text), expected, "{text}");
    let these = |counters: &[CounterId]| Some(HypervisorCounters::These(counters.to_vec()));
    check("0", Some(HypervisorCounters::Last(0)));
    check("32", Some(HypervisorCounters::Last(32)));
    check("33", None);
    check("PMC3", these(&[pmc(3)]));
    check("FIXED0,PMC31", these(&[CounterId::Fixed(0), pmc(31)]));
    for wrong in [
        "",
        "PMC",
        "PMC32",
        "pmc1",
        "PMC1,",
        "PMC+1",
        "PMC1,PMC1",
        "-1",
        "1,2",
    ] {
        check(wrong, None);
    }
}

#[test]
fn what_is_set_aside_and_announced() {
    fn check(
        model: &str,
        hypervisor: &str,
        firmware: &[CounterId],
        follows: FollowsGrants,
        expected: (&[CounterId], Option<(u8, u8)>),
    ) {
        let choice = PcrChoice {
            hypervisor: HypervisorCounters::parse(hypervisor).unwrap(),
            follows_grants: follows,
            ..PcrChoice::default()
        };
        let model = PmuModel::parse(model).unwrap();
        let plan = choice.plan(&model, aside(firmware)).unwrap();
        let legacy = plan
            .legacy
            .map(|legacy| (legacy.programmable, legacy.fixed));
        assert_eq!((plan.hypervisor, legacy), (set(expected.0), expected.1));
    }
    use FollowsGrants::{Auto, Off, On};
    let fixed = CounterId::Fixed;
    check("intel-v2,counters=8", "0", &[], Auto, (&[], None));
    check("intel-v2,counters=8", "0", &[], On, (&[], Some((8, 3))));
    check(
        "intel-v2,counters=8",
        "2",
        &[],
        Auto,
        (&[pmc(6), pmc(7)], Some((6, 3))),
    );
    check(
        "intel-v2,counters=8",
        "2",
        &[],
        Off,
        (&[pmc(6), pmc(7)], None),
    );
    check(
        "intel-v2,counters=8",
        "PMC0,FIXED1",
        &[pmc(3)],
        Auto,
        (&[pmc(0), fixed(1)], Some((6, 1))),
    );
    // Six or four: one that is left over is nobody's.
    check("amd-core", "1", &[], Auto, (&[pmc(5)], Some((4, 0))));
    check("amd-core", "1", &[pmc(0)], On, (&[pmc(5)], Some((4, 0))));
    check(
        "amd-core",
        "3",
        &[],
        Auto,
        (&[pmc(3), pmc(4), pmc(5)], None),
    );
    check(
        "amd-perfmonv2",
        "3",
        &[],
        Auto,
        (&[pmc(3), pmc(4), pmc(5)], Some((3, 0))),
    );
}

#[test]
fn what_a_pmu_cannot_have() {
    fn check(model: &str, change: impl Fn(&mut PcrChoice), parts: &[&str]) {
        let mut choice = PcrChoice::default();
        change(&mut choice);
        let model = PmuModel::parse(model).unwrap();
        let error = choice.plan(&model, SetAside::default()).unwrap_err();
        for part in parts {
            assert!(error.to_string().contains(part), "{error}");
        }
    }
    let hypervisor = |text: &'static str| {
        move |choice: &mut PcrChoice| {
            choice.hypervisor = HypervisorCounters::parse(text).unwrap();
        }
    };
    check(
        "amd-core",
        hypervisor("7"),
        &["7", "amd-core has 6", "fewer"],
    );
    check(
        "intel-v2,counters=4",
        hypervisor("PMC4"),
        &["no PMC4", "PMC0 to PMC3 and FIXED0 to FIXED2"],
    );
    check(
        "amd-core",
        hypervisor("FIXED0"),
        &["no FIXED0", "no fixed ones"],
    );
    check(
        "amd-core",
        hypervisor("6"),
        &["PMC5", "minimum", "--policy"],
    );
    check(
        "amd-core",
        |choice| choice.policy.kernel.min.programmable = 7,
        &["--policy", "amd-core", "7 programmable", "has 6"],
    );
    check(
        "amd-core",
        |choice| {
            choice.hypervisor = HypervisorCounters::Last(3);
            choice.follows_grants = FollowsGrants::On;
        },
        &[
            "3 of the programmable counters of amd-core",
            "amd-perfmonv2",
        ],
    );
}
