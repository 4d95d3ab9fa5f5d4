//! Counter reservations as they are configured, and what that means for a PMU.

use arbiter::{
    Bank, Cookie, CounterId, CounterSet, Layer, Operation, PerKind, Policy, PolicyError, Reason,
    Scheme,
};
use pmu_virt::PmuModel;
use thiserror::Error;

use crate::firmware::SetAside;

/// `--pcr on` and what goes with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PcrChoice {
    /// `--policy` and `--grace`.
    pub policy: Policy,
    /// `--scheme`.
    pub scheme: Scheme,
    /// `--hypervisor-counters`.
    pub hypervisor: HypervisorCounters,
    /// `--cpuid-follows-grants`.
    pub follows_grants: FollowsGrants,
}

impl Default for PcrChoice {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            scheme: Scheme::default(),
            hypervisor: HypervisorCounters::Last(0),
            follows_grants: FollowsGrants::Auto,
        }
    }
}

/// The counters that the hypervisor holds from the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HypervisorCounters {
    /// So many programmable ones, from the last one on: kernels use the first
    /// ones first.
    Last(u8),
    /// These.
    These(Vec<CounterId>),
}

impl HypervisorCounters {
    pub(super) const ALLOWED: &'static str =
        "a number of programmable counters, 0 to 32, or a list, as PMC3,FIXED0";

    pub(super) fn parse(text: &str) -> Option<Self> {
        if let Ok(number) = text.parse::<u8>() {
            return (number <= arbiter::MAX_PROGRAMMABLE).then_some(Self::Last(number));
        }
        let counters = text.split(',').map(counter).collect::<Option<Vec<_>>>()?;
        let all: CounterSet = counters.iter().copied().collect();
        let distinct = usize::try_from(all.len()) == Ok(counters.len());
        distinct.then_some(Self::These(counters))
    }
}

/// A counter by its name.
fn counter(name: &str) -> Option<CounterId> {
    let digits = |text: &str| match text.bytes().all(|byte| byte.is_ascii_digit()) {
        true => text.parse::<u8>().ok(),
        false => None,
    };
    let counter = match (name.strip_prefix("PMC"), name.strip_prefix("FIXED")) {
        (Some(index), _) => CounterId::Programmable(digits(index)?),
        (_, Some(index)) => CounterId::Fixed(digits(index)?),
        _ => return None,
    };
    counter.position().map(|_| counter)
}

/// `--cpuid-follows-grants`: whether CPUID announces only the counters that are
/// left to the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FollowsGrants {
    /// As soon as anything is set aside.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl FollowsGrants {
    pub(super) const ALLOWED: &'static str = "auto, on or off";

    pub(super) fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Self::Auto),
            "on" => Some(Self::On),
            "off" => Some(Self::Off),
            _ => None,
        }
    }
}

/// The reservations of one machine; by default nothing is set aside.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PcrPlan {
    /// Who may hold how many.
    pub policy: Policy,
    /// Who reserves.
    pub scheme: Scheme,
    /// What the hypervisor reserves on every vCPU.
    pub hypervisor: CounterSet,
    /// How many counters CPUID announces, where these are not all.
    pub legacy: Option<PerKind>,
}

/// Reservations that this PMU cannot have.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PcrPlanError {
    /// The policy.
    #[error("--policy, on the PMU model {model}: {source}")]
    Policy {
        /// The model.
        model: &'static str,
        /// Why.
        source: PolicyError,
    },
    /// More than there are.
    #[error("--hypervisor-counters {asked}: the PMU model {model} has {there}; give fewer")]
    TooMany {
        /// As asked for.
        asked: u8,
        /// The model.
        model: &'static str,
        /// Its programmable counters.
        there: u8,
    },
    /// One that there is not.
    #[error(
        "--hypervisor-counters: the PMU model {model} has no {counter}; it has {}",
        having(*there)
    )]
    NoCounter {
        /// Which one.
        counter: CounterId,
        /// The model.
        model: &'static str,
        /// Its counters.
        there: PerKind,
    },
    /// The policy is against it.
    #[error("--hypervisor-counters: {counter} cannot be reserved, as {reason}; change --policy")]
    Refused {
        /// Which one.
        counter: CounterId,
        /// Why.
        reason: Reason,
    },
    /// CPUID has no way to say it.
    #[error(
        "--cpuid-follows-grants on: {left} of the programmable counters of {model} are left to the \
         kernel, which CPUID cannot say; set fewer aside, or choose a model that can, as \
         amd-perfmonv2 or intel-v2"
    )]
    Announce {
        /// How many are left.
        left: u8,
        /// The model.
        model: &'static str,
    },
}

fn having(there: PerKind) -> String {
    let last = |name: &str, count: u8| format!("{name}0 to {name}{}", count.saturating_sub(1));
    let fixed = match there.fixed {
        0 => "no fixed ones".to_owned(),
        count => last("FIXED", count),
    };
    format!("{} and {fixed}", last("PMC", there.programmable))
}

impl PcrChoice {
    /// What it comes to on a PMU of `model`, with these counters set aside for
    /// the firmware.
    ///
    /// # Errors
    /// The PMU cannot have it.
    pub fn plan(&self, model: &PmuModel, firmware: SetAside) -> Result<PcrPlan, PcrPlanError> {
        let there = PerKind {
            programmable: model.programmable(),
            fixed: model.fixed(),
        };
        self.policy
            .fits(there.programmable, there.fixed)
            .map_err(|source| PcrPlanError::Policy {
                model: model.name(),
                source,
            })?;
        let hypervisor = self.hypervisor_set(model, there)?;
        let aside = hypervisor | self.firmware_set(there, hypervisor, firmware);
        let legacy = match self.follows_grants {
            FollowsGrants::Off => None,
            FollowsGrants::Auto if aside.is_empty() => None,
            FollowsGrants::Auto | FollowsGrants::On => {
                let all = CounterSet::first(there.programmable, there.fixed);
                self.announced(model, all & !aside)?
            }
        };
        Ok(PcrPlan {
            policy: self.policy,
            scheme: self.scheme,
            hypervisor,
            legacy,
        })
    }

    fn hypervisor_set(&self, model: &PmuModel, there: PerKind) -> Result<CounterSet, PcrPlanError> {
        let counters: Vec<CounterId> = match &self.hypervisor {
            HypervisorCounters::Last(asked) => match there.programmable.checked_sub(*asked) {
                Some(first) => (first..there.programmable)
                    .map(CounterId::Programmable)
                    .collect(),
                None => {
                    return Err(PcrPlanError::TooMany {
                        asked: *asked,
                        model: model.name(),
                        there: there.programmable,
                    });
                }
            },
            HypervisorCounters::These(counters) => counters.clone(),
        };
        let mut held = CounterSet::EMPTY;
        for counter in counters {
            if !model.has(counter) {
                return Err(PcrPlanError::NoCounter {
                    counter,
                    model: model.name(),
                    there,
                });
            }
            self.admit(counter, there, held)?;
            held.insert(counter);
        }
        Ok(held)
    }

    /// The counters that the firmware will have got when its phase is over: it
    /// asks for them in this order, on every vCPU, and the arbiter answers as
    /// this stand-in for it does.
    fn firmware_set(&self, there: PerKind, hypervisor: CounterSet, asked: SetAside) -> CounterSet {
        let mut bank = Bank::new(there.programmable, there.fixed);
        let reserve = |bank: &mut Bank, layer, counter| {
            self.policy.admit(bank, layer, counter)?;
            // A stand-in: what counts is that somebody holds it.
            let manage = Operation::Manage(Cookie::from_random(1));
            let _ = bank.apply(bank.plan(layer, Cookie::DEFAULT, counter, manage)?);
            Ok::<(), Reason>(())
        };
        for counter in hypervisor.iter() {
            // Whether it may have them was looked at before.
            let _ = reserve(&mut bank, Layer::Hypervisor, counter);
        }
        for counter in asked.named.iter() {
            if let Err(reason) = reserve(&mut bank, Layer::Firmware, counter) {
                log::warn!("--firmware-counter: {counter} will be refused: {reason}");
            }
        }
        for nth in 1..=asked.any {
            // The last one first, as kernels begin with the first.
            let last_first = (0..there.programmable).rev().map(CounterId::Programmable);
            let free = bank.free();
            let mut got = Err(Reason::NoneFree);
            for counter in last_first.filter(|counter| free.contains(*counter)) {
                got = reserve(&mut bank, Layer::Firmware, counter);
                if got.is_ok() {
                    break;
                }
            }
            if let Err(reason) = got {
                let left = asked.any - nth + 1;
                log::warn!("--firmware-counter: {left} of any place will be refused: {reason}");
                break;
            }
        }
        bank.held_by(Layer::Firmware)
    }

    /// Whether policy lets the hypervisor have `counter` beside those it has.
    fn admit(
        &self,
        counter: CounterId,
        there: PerKind,
        held: CounterSet,
    ) -> Result<(), PcrPlanError> {
        let refused = |reason| PcrPlanError::Refused { counter, reason };
        let mut bank = Bank::new(there.programmable, there.fixed);
        for held in held.iter() {
            // A stand-in: what counts is that somebody holds it.
            let reserve = Operation::Manage(Cookie::from_random(1));
            let change = bank.plan(Layer::Hypervisor, Cookie::DEFAULT, held, reserve);
            let _ = bank.apply(change.map_err(refused)?);
        }
        let admitted = self.policy.admit(&bank, Layer::Hypervisor, counter);
        admitted.map_err(refused)
    }

    /// What CPUID says of the counters that are left; `None` where it cannot, and
    /// need not.
    fn announced(
        &self,
        model: &PmuModel,
        left: CounterSet,
    ) -> Result<Option<PerKind>, PcrPlanError> {
        let announced = model.can_announce(left);
        if announced.is_some() {
            return Ok(announced);
        }
        let left = PerKind::count(left).programmable;
        let model = model.name();
        if self.follows_grants == FollowsGrants::On {
            return Err(PcrPlanError::Announce { left, model });
        }
        log::warn!(
            "CPUID cannot announce that only {left} counters of {model} are left to the kernel: \
             it will schedule events onto counters that drop them (see docs/pcr.md)"
        );
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn firmware_is_expected_to_get_what_policy_lets_it() {
        fn check(named: &[CounterId], any: u8, max: u8, expected: &[CounterId]) {
            let mut choice = PcrChoice {
                hypervisor: HypervisorCounters::These(vec![pmc(5)]),
                ..PcrChoice::default()
            };
            choice.policy.firmware.max.programmable = max;
            choice.policy.kernel.min.programmable = 2;
            let there = PerKind {
                programmable: 6,
                fixed: 0,
            };
            let asked = SetAside {
                named: set(named),
                any,
            };
            let got = choice.firmware_set(there, set(&[pmc(5)]), asked);
            assert_eq!(got, set(expected), "{named:?} and {any}, at most {max}");
        }
        check(&[], 0, 6, &[]);
        check(&[pmc(2)], 1, 6, &[pmc(2), pmc(4)]);
        check(&[pmc(0)], 5, 2, &[pmc(0), pmc(4)]);
        // The kernel's minimum is left, and the hypervisor keeps its own.
        check(&[pmc(5)], 6, 6, &[pmc(2), pmc(3), pmc(4)]);
    }

    fn set(counters: &[CounterId]) -> CounterSet {
        counters.iter().copied().collect()
    }

    #[test]
    fn lists_of_counters() {
        let check =
            |text, expected| assert_eq!(HypervisorCounters::parse(text), expected, "{text}");
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
}
