//! What an experiment simulates: the machine, and what each class of claimants wants.

use core::fmt;

use arbiter::{Policy, Scheme};
use serde::Deserialize;

use crate::figures::Class;
use crate::random::Micros;

/// The machine of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Machine {
    /// vCPUs. Each is arbitrated separately.
    pub vcpus: u32,
    /// Cores. The vCPUs of a core share its time equally.
    pub cores: u32,
    /// Programmable counters of a vCPU, and of a core.
    pub counters: u8,
    /// Fixed-function counters of a vCPU, and of a core.
    pub fixed: u8,
    /// How often a vCPU moves to another core, per second.
    pub migrations: f64,
}

impl Default for Machine {
    fn default() -> Self {
        Machine {
            vcpus: 64,
            cores: 8,
            counters: 4,
            fixed: 0,
            migrations: 0.2,
        }
    }
}

/// What one class of claimants wants.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Demand {
    /// Demands per second: of a vCPU, or of a core for the tools. They arrive as a
    /// Poisson process. 0 means none.
    pub arrival: f64,
    /// Mean time for which counters are wanted, in milliseconds; exponential.
    pub hold_ms: f64,
    /// Mean time after which a demand that got nothing is given up, in milliseconds;
    /// exponential. The more urgent a claimant, the shorter.
    pub patience_ms: f64,
    /// The most counters of one demand; each number from 1 on is equally likely.
    pub greed: u8,
    /// How likely a demand is for one fixed-function counter instead. It wants it by its
    /// position, and each position is equally likely.
    pub fixed_share: f64,
    /// How likely a holder of this class yields a counter that it is asked for.
    pub yields: f64,
    /// How likely a holder of this class lends its counters.
    pub lends: f64,
    /// Mean time until a holder of this class answers a question, in milliseconds;
    /// exponential.
    pub answer_ms: f64,
}

impl Demand {
    /// No demand.
    pub const NONE: Demand = Demand {
        arrival: 0.0,
        hold_ms: 100.0,
        patience_ms: 200.0,
        greed: 1,
        fixed_share: 0.0,
        yields: 0.5,
        lends: 0.0,
        answer_ms: 1.0,
    };
}

impl Default for Demand {
    fn default() -> Self {
        Demand::NONE
    }
}

/// What all classes want, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Workload {
    /// Length of a run in seconds of virtual time.
    pub seconds: f64,
    /// Time after which a refused demand is made again, in milliseconds; exponential.
    pub retry_ms: f64,
    /// Programmable counters that the firmware of each vCPU asks for at boot, one by one.
    /// It keeps what it gets when its phase ends.
    pub boot: u8,
    /// Fixed-function counters that it asks for then, from position 0 on.
    pub boot_fixed: u8,
    /// Whether the firmware goes on in SMM after its phase: it answers, renews its
    /// leases, and makes the demands of `firmware`.
    pub smm: bool,
    /// The firmware in SMM.
    pub firmware: Demand,
    /// The hypervisor's own demands at each vCPU.
    pub hypervisor: Demand,
    /// Tools of the host. Each wants its counters on every vCPU that runs on its core.
    pub tools: Demand,
    /// The guest's kernel.
    pub kernel: Demand,
    /// Programs of the guest. Their kernel asks for them.
    pub programs: Demand,
}

impl Default for Workload {
    /// A machine on which every class asks for something.
    fn default() -> Self {
        Workload {
            seconds: 30.0,
            retry_ms: 50.0,
            boot: 1,
            boot_fixed: 0,
            smm: false,
            firmware: Demand::NONE,
            hypervisor: Demand {
                arrival: 0.5,
                answer_ms: 0.0,
                yields: 1.0,
                ..Demand::NONE
            },
            tools: Demand {
                arrival: 0.2,
                hold_ms: 1000.0,
                answer_ms: 0.0,
                ..Demand::NONE
            },
            kernel: Demand {
                arrival: 2.0,
                hold_ms: 200.0,
                ..Demand::NONE
            },
            programs: Demand {
                arrival: 4.0,
                hold_ms: 250.0,
                greed: 3,
                ..Demand::NONE
            },
        }
    }
}

impl Workload {
    /// What a class demands after boot.
    pub fn of(&self, class: Class) -> &Demand {
        match class {
            Class::Firmware => &self.firmware,
            Class::Hypervisor => &self.hypervisor,
            Class::Tools => &self.tools,
            Class::Kernel => &self.kernel,
            Class::Programs => &self.programs,
        }
    }

    /// The virtual time of a run.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a workload lasts a day at most"
    )]
    pub(crate) fn length(&self) -> Micros {
        (self.seconds * 1e6) as Micros
    }
}

/// What a sweep varies.
#[derive(Clone, Debug, PartialEq)]
pub struct Variant {
    pub scheme: Scheme,
    /// The name of the policy.
    pub name: String,
    pub policy: Policy,
}

/// A value that no experiment can have.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanError {
    /// The key with its table, as in the file.
    pub key: String,
    pub value: f64,
    /// What the value should be.
    pub wanted: &'static str,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PlanError { key, value, wanted } = self;
        write!(f, "{key} = {value}: give {wanted}")
    }
}

impl std::error::Error for PlanError {}

/// The key, its value, whether the value will do, and what would.
type Check = (&'static str, f64, bool, &'static str);

fn first_wrong(table: &str, checks: &[Check]) -> Result<(), PlanError> {
    let wrong = checks.iter().find(|(_, _, good, _)| !good);
    wrong.map_or(Ok(()), |(key, value, _, wanted)| {
        Err(PlanError {
            key: format!("{table}.{key}"),
            value: *value,
            wanted,
        })
    })
}

/// The longest time, in milliseconds: a day.
const DAY_MS: f64 = 86_400_000.0;

impl Machine {
    /// Checks that there can be such a machine.
    ///
    /// # Errors
    /// The value that is wrong.
    pub fn check(&self) -> Result<(), PlanError> {
        let Machine {
            vcpus,
            cores,
            counters,
            fixed,
            migrations,
        } = *self;
        first_wrong(
            "machine",
            &[
                (
                    "vcpus",
                    vcpus.into(),
                    (1..=100_000).contains(&vcpus),
                    "1 to 100000",
                ),
                (
                    "cores",
                    cores.into(),
                    (1..=10_000).contains(&cores),
                    "1 to 10000",
                ),
                (
                    "counters",
                    counters.into(),
                    (1..=32).contains(&counters),
                    "1 to 32",
                ),
                ("fixed", fixed.into(), fixed <= 32, "0 to 32"),
                (
                    "migrations",
                    migrations,
                    rate(migrations),
                    "0 to 100000 per second",
                ),
            ],
        )
    }
}

const TIMES: &str = "0.001 to 86400000 milliseconds";

fn time(ms: f64) -> bool {
    (0.001..=DAY_MS).contains(&ms)
}

fn rate(value: f64) -> bool {
    (0.0..=100_000.0).contains(&value)
}

impl Workload {
    /// Checks that there can be such a workload on `machine`.
    ///
    /// # Errors
    /// The value that is wrong.
    pub fn check(&self, machine: &Machine) -> Result<(), PlanError> {
        let (seconds, retry) = (self.seconds, self.retry_ms);
        first_wrong(
            "workload",
            &[
                (
                    "seconds",
                    seconds,
                    time(seconds * 1000.0),
                    "a time up to 86400 seconds",
                ),
                ("retry-ms", retry, time(retry), TIMES),
                ("boot", self.boot.into(), self.boot <= 32, "0 to 32"),
                (
                    "boot-fixed",
                    self.boot_fixed.into(),
                    self.boot_fixed <= machine.fixed,
                    "at most as many as machine.fixed",
                ),
            ],
        )?;
        for class in Class::ALL {
            self.check_demand(class, machine)?;
        }
        if self.firmware.arrival > 0.0 && !self.smm {
            return Err(PlanError {
                key: "workload.firmware.arrival".to_owned(),
                value: self.firmware.arrival,
                wanted: "0, or smm = true: firmware without SMM ends with its phase",
            });
        }
        Ok(())
    }

    fn check_demand(&self, class: Class, machine: &Machine) -> Result<(), PlanError> {
        let demand = self.of(class);
        let likely = |p: f64| (0.0..=1.0).contains(&p);
        let chance = "a probability from 0 to 1";
        let answer = demand.answer_ms;
        let fixed = demand.fixed_share;
        first_wrong(
            &format!("workload.{}", class.name()),
            &[
                (
                    "arrival",
                    demand.arrival,
                    rate(demand.arrival),
                    "0 to 100000 per second",
                ),
                ("hold-ms", demand.hold_ms, time(demand.hold_ms), TIMES),
                (
                    "patience-ms",
                    demand.patience_ms,
                    time(demand.patience_ms),
                    TIMES,
                ),
                (
                    "greed",
                    demand.greed.into(),
                    (1..=32).contains(&demand.greed),
                    "1 to 32",
                ),
                ("fixed-share", fixed, likely(fixed), chance),
                (
                    "fixed-share",
                    fixed,
                    fixed == 0.0 || machine.fixed > 0,
                    "0, or set machine.fixed",
                ),
                ("yields", demand.yields, likely(demand.yields), chance),
                ("lends", demand.lends, likely(demand.lends), chance),
                ("answer-ms", answer, answer == 0.0 || time(answer), TIMES),
            ],
        )
    }
}
