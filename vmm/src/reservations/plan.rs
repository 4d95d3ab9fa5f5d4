//! Counter reservations as they are chosen, and what that means for a PMU.

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
    /// The possible words.
    pub const ALLOWED: &'static str =
        "a number of programmable counters, 0 to 32, or a list, as PMC3,FIXED0,IBSOP";

    /// What a number or a list of names stands for.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if let Ok(number) = text.parse::<u8>() {
            return (number <= arbiter::MAX_PROGRAMMABLE).then_some(Self::Last(number));
        }
        let counters = text
            .split(',')
            .map(CounterId::named)
            .collect::<Option<Vec<_>>>()?;
        let all: CounterSet = counters.iter().copied().collect();
        let distinct = usize::try_from(all.len()) == Ok(counters.len());
        distinct.then_some(Self::These(counters))
    }
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
    /// The possible words.
    pub const ALLOWED: &'static str = "auto, on or off";

    /// What a word stands for.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
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
    /// What the firmware is expected to hold when its phase ends.
    pub firmware: CounterSet,
    /// How many counters CPUID announces, where these are not all.
    pub legacy: Option<PerKind>,
}

/// Reservations that this PMU cannot have.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PcrPlanError {
    #[error("--policy, on the PMU model {model}: {source}")]
    Policy {
        model: &'static str,
        source: PolicyError,
    },
    /// More than there are.
    #[error("--hypervisor-counters {asked}: the PMU model {model} has {there}; give fewer")]
    TooMany {
        asked: u8,
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
        counter: CounterId,
        model: &'static str,
        /// Its counters.
        there: PerKind,
    },
    /// A sampler of a model without.
    #[error(
        "--hypervisor-counters: the PMU model {model} has no {counter}; only AMD models with \
         ibs=on have samplers"
    )]
    NoSampler {
        counter: CounterId,
        model: &'static str,
    },
    /// The policy is against it.
    #[error("--hypervisor-counters: {counter} cannot be reserved, as {reason}; change --policy")]
    Refused { counter: CounterId, reason: Reason },
    /// CPUID has no way to say it.
    #[error(
        "--cpuid-follows-grants on: {left} of the programmable counters of {model} are left to the \
         kernel, which CPUID cannot say; set fewer aside, or choose a model that can, as \
         amd-perfmonv2 or intel-v2"
    )]
    Announce {
        /// How many are left.
        left: u8,
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
    /// The plan for a PMU of `model`, with these counters set aside for
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
        let firmware = self.firmware_set(there, hypervisor, firmware);
        let aside = hypervisor | firmware;
        let legacy = match self.follows_grants {
            FollowsGrants::Off => None,
            FollowsGrants::Auto if aside.counters().is_empty() => None,
            FollowsGrants::Auto | FollowsGrants::On => {
                let all = CounterSet::first(there.programmable, there.fixed);
                self.announced(model, all & !aside)?
            }
        };
        Ok(PcrPlan {
            policy: self.policy,
            scheme: self.scheme,
            hypervisor,
            firmware,
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
            if let (CounterId::Ibs(_), false) = (counter, model.has(counter)) {
                return Err(PcrPlanError::NoSampler {
                    counter,
                    model: model.name(),
                });
            }
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
    /// this stand-in for it does. Under the scheme that asks, the hypervisor yields
    /// what is above its minimum.
    fn firmware_set(&self, there: PerKind, hypervisor: CounterSet, asked: SetAside) -> CounterSet {
        let mut bank = Bank::new(there.programmable, there.fixed).with_samplers();
        let asks = self.scheme == Scheme::Interacting;
        let reserve = |bank: &mut Bank, layer, counter| {
            self.policy.admit(bank, layer, counter)?;
            let others = bank.held_by(Layer::Hypervisor);
            let spares =
                PerKind::count(others).of(counter) > self.policy.hypervisor.min.of(counter);
            // Stand-ins: what counts is that somebody holds it.
            let (presented, own) = if asks && others.contains(counter) && spares {
                (Cookie::from_random(1), 2)
            } else {
                (Cookie::DEFAULT, 1)
            };
            let manage = Operation::Manage(Cookie::from_random(own));
            let _ = bank.apply(bank.plan(layer, presented, counter, manage)?);
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
            let lent = if asks {
                bank.held_by(Layer::Hypervisor)
            } else {
                CounterSet::EMPTY
            };
            let free = last_first.clone().filter(|counter| free.contains(*counter));
            let lent = last_first.filter(|counter| lent.contains(*counter));
            let mut got = Err(Reason::NoneFree);
            for counter in free.chain(lent) {
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
        let mut bank = Bank::new(there.programmable, there.fixed).with_samplers();
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
             it will schedule events onto counters that drop them (see docs/reference/pcr.md)"
        );
        Ok(None)
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
