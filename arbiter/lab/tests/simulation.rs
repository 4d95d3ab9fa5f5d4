//! What holds for every experiment: a seed determines it, demands do not depend on
//! answers, and nobody gets counters that are not there.

use std::num::NonZero;
use std::sync::Mutex;

use arbiter::{Policy, Scheme};
use arbiter_lab::{
    Class, Demand, Kind, Machine, Metric, Seeds, Variant, Who, Workload, simulate, sweep,
};
use proptest::prelude::*;

fn variant(scheme: Scheme, change: impl FnOnce(&mut Policy)) -> Variant {
    let mut policy = Policy::default();
    change(&mut policy);
    Variant {
        scheme,
        name: "test".to_owned(),
        policy,
    }
}

fn small() -> (Machine, Workload) {
    let machine = Machine {
        vcpus: 12,
        cores: 3,
        migrations: 2.0,
        ..Machine::default()
    };
    let workload = Workload {
        seconds: 5.0,
        ..Workload::default()
    };
    (machine, workload)
}

#[test]
fn a_seed_determines_a_run() {
    let (machine, workload) = small();
    for scheme in Scheme::ALL {
        let variant = variant(scheme, |policy| policy.kernel.priority = 1);
        let run = |seed| simulate(&machine, &workload, &variant, seed);
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }
}

#[test]
fn demands_do_not_depend_on_the_scheme() {
    let (machine, workload) = small();
    let demands = Scheme::ALL.map(|scheme| {
        let run = simulate(&machine, &workload, &variant(scheme, |_| ()), 3);
        [Class::Hypervisor, Class::Kernel, Class::Programs]
            .map(|class| run.demands(Who::one(class)).0)
    });
    assert!(demands.iter().all(|one| *one == demands[0]), "{demands:?}");
    assert!(demands[0][2] > 100);
}

#[test]
fn a_class_without_demands_has_no_figures() {
    let (machine, mut workload) = small();
    workload.programs = Demand::NONE;
    let run = simulate(
        &machine,
        &workload,
        &variant(Scheme::Independent, |_| ()),
        1,
    );
    for metric in Metric::ALL {
        assert_eq!(
            run.value(metric, Who::one(Class::Programs)),
            None,
            "{metric:?}"
        );
    }
    assert!(run.value(Metric::Work, Who::one(Class::Kernel)) > Some(0.0));
}

#[test]
fn a_lonely_claimant_gets_all_at_once() {
    let (machine, mut workload) = small();
    workload.boot = 0;
    for class in [
        &mut workload.hypervisor,
        &mut workload.tools,
        &mut workload.programs,
    ] {
        *class = Demand::NONE;
    }
    workload.kernel = Demand {
        arrival: 0.01,
        ..workload.kernel
    };
    let run = simulate(
        &machine,
        &workload,
        &variant(Scheme::Interacting, |_| ()),
        2,
    );
    let (demands, granted, denied) = run.demands(Who::ALL);
    assert!(demands > 0 && granted == demands && denied == 0);
    assert_eq!(run.value(Metric::TimeToGrant, Who::ALL), Some(0.0));
    assert_eq!(run.value(Metric::Fairness, Who::ALL), Some(1.0));
}

/// The greedy firmware of the paper: nothing is left but the kernel's minimum.
#[test]
fn a_greedy_firmware_leaves_the_minimum() {
    let (machine, mut workload) = small();
    workload.boot = 4;
    let open = variant(Scheme::Independent, |policy| {
        policy.kernel.min.programmable = 0;
    });
    let run = simulate(&machine, &workload, &open, 1);
    assert_eq!(
        run.value(Metric::DeniedShare, Who::one(Class::Kernel)),
        Some(1.0)
    );
    assert_eq!(
        run.value(Metric::TimeToGrant, Who::one(Class::Kernel)),
        None
    );
    let fair = variant(Scheme::Independent, |_| ());
    let run = simulate(&machine, &workload, &fair, 1);
    assert!(run.value(Metric::DeniedShare, Who::one(Class::Kernel)) < Some(1.0));
    let leased = variant(Scheme::Independent, |policy| {
        policy.firmware.lease_ms = Some(100);
    });
    let later = simulate(&machine, &workload, &leased, 1);
    assert!(
        later.value(Metric::DeniedShare, Who::one(Class::Kernel))
            < run.value(Metric::DeniedShare, Who::one(Class::Kernel))
    );
}

#[test]
fn a_sweep_does_not_depend_on_its_threads() {
    let (machine, workload) = small();
    let variants = Scheme::ALL.map(|scheme| variant(scheme, |_| ()));
    let seeds = Seeds {
        first: 1,
        count: NonZero::new(3).unwrap(),
    };
    let run = |threads| {
        let threads = NonZero::new(threads).unwrap();
        sweep((&machine, &workload), &variants, seeds, threads, &|_| ())
    };
    let cells = run(1);
    assert_eq!(cells, run(4));
    assert_eq!(cells.len(), 3);
    assert!(cells.iter().all(|cell| cell.runs.len() == 3));
}

/// Claimants of fixed-function counters want one position each, whatever else is free.
#[test]
fn fixed_counters_are_wanted_by_position() {
    let (mut machine, mut workload) = small();
    machine.fixed = 1;
    workload.boot = 0;
    workload.tools = Demand::NONE;
    workload.hypervisor = Demand::NONE;
    for demand in [&mut workload.kernel, &mut workload.programs] {
        demand.fixed_share = 1.0;
    }
    let run = |machine: &Machine, workload: &Workload, variant: &Variant| {
        assert_eq!(workload.check(machine), Ok(()));
        simulate(machine, workload, variant, 1)
    };
    let open = variant(Scheme::Independent, |_| ());
    let one = run(&machine, &workload, &open);
    let fixed = Who::ALL.of(Kind::Fixed);
    assert_eq!(one.demands(Who::ALL), one.demands(fixed));
    assert_eq!(
        one.value(Metric::Work, Who::ALL.of(Kind::Programmable)),
        None
    );
    // Four times as many counters lie idle.
    let (all, of_fixed) = (
        one.value(Metric::Work, Who::ALL).unwrap(),
        one.value(Metric::Work, fixed).unwrap(),
    );
    assert!((all * 5.0 - of_fixed).abs() < 1e-9 && of_fixed > 0.5);
    let denied = one.value(Metric::DeniedShare, fixed).unwrap();
    assert!(denied > 0.1, "{denied}");
    machine.fixed = 3;
    let three = run(&machine, &workload, &open);
    assert_eq!(three.demands(fixed).0, one.demands(fixed).0);
    assert!(three.value(Metric::DeniedShare, fixed).unwrap() < denied / 2.0);
    // The firmware has all positions but what the kernel's minimum keeps.
    workload.boot_fixed = 3;
    let none = run(&machine, &workload, &open);
    assert_eq!(
        none.value(Metric::DeniedShare, Who::one(Class::Kernel)),
        Some(1.0)
    );
    let least = variant(Scheme::Independent, |policy| policy.kernel.min.fixed = 1);
    let some = run(&machine, &workload, &least);
    let of_kernel = some.value(Metric::DeniedShare, Who::one(Class::Kernel).of(Kind::Fixed));
    assert!(of_kernel < Some(1.0), "{of_kernel:?}");
    let of_firmware = some.demands(Who::one(Class::Firmware).of(Kind::Fixed));
    assert_eq!(of_firmware, (36, 24, 12));
}

/// More often than at the end of each run, and up to the whole.
#[test]
fn a_sweep_tells_how_far_it_is() {
    let (machine, mut workload) = small();
    workload.seconds = 500.0;
    let variants = [variant(Scheme::Independent, |_| ())];
    let seeds = Seeds {
        first: 1,
        count: NonZero::new(2).unwrap(),
    };
    let told = Mutex::new(Vec::new());
    let tell = |share| told.lock().unwrap().push(share);
    let threads = NonZero::<usize>::MIN;
    sweep((&machine, &workload), &variants, seeds, threads, &tell);
    let told = told.into_inner().unwrap();
    assert!(told.len() > 3 && told.is_sorted(), "{told:?}");
    assert!((told.last().unwrap() - 1.0).abs() < 1e-9, "{told:?}");
}

fn demands() -> impl Strategy<Value = Demand> {
    let rates = (0.0..20.0_f64, 1.0..500.0_f64, 1.0..300.0_f64);
    let wants = (1..6_u8, prop_oneof![Just(0.0), 0.0..1.0_f64]);
    let conduct = (wants, 0.0..1.0_f64, 0.0..1.0_f64, 0.0..150.0_f64);
    (rates, conduct).prop_map(|(rates, conduct)| Demand {
        arrival: rates.0,
        hold_ms: rates.1,
        patience_ms: rates.2,
        greed: conduct.0.0,
        fixed_share: conduct.0.1,
        yields: conduct.1,
        lends: conduct.2,
        answer_ms: conduct.3,
    })
}

fn policies() -> impl Strategy<Value = Policy> {
    let lease = || prop::option::of(10..400_u32);
    (
        0..2_u8,
        0..2_u8,
        [0..3_u8, 0..3, 0..3],
        [lease(), lease(), lease()],
        1..150_u32,
    )
        .prop_map(|(hypervisor, kernel, priorities, leases, grace_ms)| {
            let mut policy = Policy {
                grace_ms,
                ..Policy::default()
            };
            policy.hypervisor.min.programmable = hypervisor;
            policy.kernel.min.programmable = kernel;
            let shares = [
                &mut policy.firmware,
                &mut policy.hypervisor,
                &mut policy.kernel,
            ];
            for ((share, priority), lease) in shares.into_iter().zip(priorities).zip(leases) {
                share.priority = priority;
                share.lease_ms = lease;
            }
            policy
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The books of the simulation agree with the arbiter's after every event (a debug
    /// assertion), no counter is used twice, and no demand is decided twice.
    #[test]
    fn counters_and_demands_are_conserved(
        classes in [demands(), demands(), demands(), demands(), demands()],
        policy in policies(),
        scheme in prop::sample::select(&Scheme::ALL[..]),
        (boot, boot_fixed, smm) in (0..5_u8, 0..3_u8, any::<bool>()),
        seed in any::<u64>(),
    ) {
        let machine = Machine { vcpus: 6, cores: 2, counters: 4, fixed: 3, migrations: 3.0 };
        let [mut firmware, hypervisor, tools, kernel, programs] = classes;
        if !smm {
            firmware.arrival = 0.0;
        }
        let workload = Workload {
            seconds: 3.0, retry_ms: 20.0, boot, boot_fixed, smm,
            firmware, hypervisor, tools, kernel, programs,
        };
        prop_assert_eq!(workload.check(&machine), Ok(()));
        let variant = Variant { scheme, name: String::new(), policy };
        let run = simulate(&machine, &workload, &variant, seed);
        for who in Who::every().flat_map(|who| [who, who.of(Kind::Programmable), who.of(Kind::Fixed)]) {
            let (demands, granted, denied) = run.demands(who);
            prop_assert!(granted + denied <= demands);
            if who.kind.is_none() {
                let kinds = Kind::ALL.map(|kind| run.demands(who.of(kind)).0);
                prop_assert_eq!(demands, kinds[0] + kinds[1]);
            }
            for metric in Metric::ALL {
                if let Some(value) = run.value(metric, who) {
                    prop_assert!(value.is_finite() && value >= 0.0, "{metric:?} {who:?} {value}");
                }
            }
            for metric in [Metric::Work, Metric::DeniedShare, Metric::BlindShare, Metric::Fairness] {
                prop_assert!(run.value(metric, who).is_none_or(|share| share <= 1.0 + 1e-9));
            }
        }
        if scheme == Scheme::Independent && policy.kernel.lease_ms.is_none() {
            let taken = run.value(Metric::Revocations, Who::one(Class::Kernel));
            prop_assert!(taken.is_none_or(|taken| taken == 0.0));
        }
    }
}
