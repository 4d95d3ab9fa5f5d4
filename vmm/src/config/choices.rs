//! Options whose values are words.

use std::path::PathBuf;

use arbiter::{CounterSet, PerKind, Policy};
use kvm_pmu::TrapMode;
use pmu_virt::{ModelError, PmuModel};
use thiserror::Error;

use crate::cpuid::Identity;
use crate::firmware::{CounterSpec, FirmwareChoice};

/// A module that a Multiboot kernel gets beside itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootModule {
    pub path: PathBuf,
    /// The words after the file's name; empty without any.
    pub cmdline: String,
}

impl BootModule {
    /// `FILE` or `FILE,WORDS`; none if there is no file name.
    pub fn parse(text: &str) -> Option<Self> {
        let (path, cmdline) = text.split_once(',').unwrap_or((text, ""));
        (!path.is_empty()).then(|| Self {
            path: path.into(),
            cmdline: cmdline.to_owned(),
        })
    }
}

/// `--firmware`, `--firmware-counter` and `--firmware-delay`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FirmwareConfig {
    /// What runs before the kernel.
    pub image: FirmwareChoice,
    /// The counters that it reserves; none without firmware.
    pub counters: Vec<CounterSpec>,
    /// Milliseconds for which it stays in its phase after that.
    pub delay_ms: u32,
}

/// `--pmu`.
#[derive(Clone, Debug, Default)]
pub enum PmuChoice {
    /// No PMU: CPUID and the MSRs of both vendors show none.
    None,
    /// The best model for the guest CPU's vendor.
    #[default]
    Auto,
    Model(PmuModel),
}

impl PmuChoice {
    /// `none`, `auto`, or a model by name with its properties.
    ///
    /// # Errors
    /// There is no such model, or it cannot have these properties.
    pub fn parse(text: &str) -> Result<Self, ModelError> {
        match text {
            "none" => Ok(Self::None),
            "auto" => Ok(Self::Auto),
            model => PmuModel::parse(model).map(Self::Model),
        }
    }
}

/// `--cpu-vendor`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpuVendor {
    /// The host's.
    #[default]
    Host,
    Amd,
    Intel,
}

impl CpuVendor {
    /// The possible words.
    pub const ALLOWED: &'static str = "host, amd or intel";

    /// What a word stands for.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "host" => Some(Self::Host),
            "amd" => Some(Self::Amd),
            "intel" => Some(Self::Intel),
            _ => None,
        }
    }
}

/// The words of `--cpu-model`.
pub const CPU_MODELS: &str = "host, nehalem, skylake, skylake-server, ice-lake, \
     ice-lake-server, k8, fam10h, zen2, zen3 or zen4";

/// What one of them stands for: a processor, or `host` for no particular one.
#[must_use]
pub fn cpu_model(text: &str) -> Option<Option<Identity>> {
    match text {
        "host" => Some(None),
        name => Identity::parse(name).map(Some),
    }
}

/// `--unpack`: whether a compressed kernel is unpacked before the guest starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnpackChoice {
    /// Where the guest would be slow at it.
    #[default]
    Auto,
    /// On the host.
    Always,
    /// By the kernel's own code, in the guest.
    Never,
}

impl UnpackChoice {
    /// The possible words.
    pub const ALLOWED: &'static str = "auto, always or never";

    /// What a word stands for.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Self::Auto),
            "always" => Some(Self::Always),
            "never" => Some(Self::Never),
            _ => None,
        }
    }
}

/// `--oversubscribe`: what happens where a vCPU wants more counters than its
/// core has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OversubscribeChoice {
    /// They take turns, and counts are scaled and labelled so.
    #[default]
    Multiplex,
    /// The ones that find no place stay frozen, and reports call them unavailable.
    Refuse,
}

impl OversubscribeChoice {
    /// The possible words.
    pub const ALLOWED: &'static str = "multiplex or refuse";

    /// What a word stands for.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "multiplex" => Some(Self::Multiplex),
            "refuse" => Some(Self::Refuse),
            _ => None,
        }
    }
}

/// `--budget`: how many physical counters each vCPU's guest may use at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetChoice {
    /// Of programmable counters; none if that was not said.
    pub programmable: Option<u8>,
    /// Of fixed-function ones, likewise.
    pub fixed: Option<u8>,
    /// CPUID announces the nearest number that it can, where it cannot say this one.
    pub round: bool,
}

impl BudgetChoice {
    /// The possible words.
    pub const ALLOWED: &'static str =
        "programmable=N, fixed=N or both with a comma between, N from 0 to 32 or all";
    /// Those of `umpire run`.
    pub const ALLOWED_AT_START: &'static str = "programmable=N, fixed=N or both, N from 0 to 32 or all, and round if CPUID may announce \
         another number; with commas between";

    /// What the words stand for; `round` only where a guest is to be started.
    #[must_use]
    pub fn parse(text: &str, at_start: bool) -> Option<Self> {
        let mut choice = Self {
            programmable: None,
            fixed: None,
            round: false,
        };
        for word in text.split(',') {
            let (name, number) = word.split_once('=').unwrap_or((word, ""));
            let once = match name {
                "programmable" => set_once(&mut choice.programmable, number),
                "fixed" => set_once(&mut choice.fixed, number),
                "round" => {
                    number.is_empty() && at_start && !std::mem::replace(&mut choice.round, true)
                }
                _ => false,
            };
            if !once {
                return None;
            }
        }
        (choice.programmable.is_some() || choice.fixed.is_some()).then_some(choice)
    }

    /// The budget, where what is not said is not limited.
    #[must_use]
    pub fn most(self) -> PerKind {
        PerKind {
            programmable: self.programmable.unwrap_or(u8::MAX),
            fixed: self.fixed.unwrap_or(u8::MAX),
        }
    }

    /// Whether `policy` can keep its promises within it. Of none at all nobody has any.
    ///
    /// # Errors
    /// The minima of the guest's layers together are more.
    pub fn leaves_minima(self, policy: &Policy) -> Result<(), BudgetError> {
        let (firmware, kernel) = (policy.firmware.min, policy.kernel.min);
        let programmable = (firmware.programmable, kernel.programmable);
        let fixed = (firmware.fixed, kernel.fixed);
        let kinds = [
            ("programmable", self.programmable, programmable, "min"),
            ("fixed", self.fixed, fixed, "min-fixed"),
        ];
        for (kind, most, (firmware, kernel), min) in kinds {
            let minima = firmware.saturating_add(kernel);
            if let Some(most) = most.filter(|most| (1..minima).contains(most)) {
                return Err(BudgetError::BelowMinima {
                    kind,
                    most,
                    minima,
                    min,
                });
            }
        }
        Ok(())
    }

    /// What CPUID announces, of `visible` counters without it.
    ///
    /// # Errors
    /// The model has no way to say it, and nobody allowed it to say something else.
    pub fn announced(self, model: &PmuModel, visible: PerKind) -> Result<PerKind, BudgetError> {
        let most = self.most();
        let there = model.counts();
        let kinds = [
            ("programmable", self.programmable, there.programmable),
            ("fixed", self.fixed, there.fixed),
        ];
        for (kind, asked, there) in kinds {
            if let Some(asked) = asked.filter(|n| *n != u8::MAX && *n > there && !self.round) {
                let model = model.name();
                return Err(BudgetError::TooMany {
                    kind,
                    asked,
                    there,
                    model,
                });
            }
        }
        let wanted = PerKind {
            programmable: visible.programmable.min(most.programmable),
            fixed: visible.fixed.min(most.fixed),
        };
        let can = |programmable| model.can_announce(CounterSet::first(programmable, wanted.fixed));
        if let Some(announced) = can(wanted.programmable)
            && (self.round || announced == wanted)
        {
            return Ok(announced);
        }
        let above = (wanted.programmable..=visible.programmable).find_map(can);
        above.filter(|_| self.round).ok_or(BudgetError::Announce {
            most: wanted.programmable,
            model: model.name(),
        })
    }
}

fn set_once(value: &mut Option<u8>, number: &str) -> bool {
    let parsed = match number {
        "all" => Some(u8::MAX),
        _ => number
            .parse()
            .ok()
            .filter(|n| *n <= arbiter::MAX_PROGRAMMABLE),
    };
    value.is_none() && parsed.is_some_and(|parsed| value.replace(parsed).is_none())
}

/// A budget that a guest cannot have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BudgetError {
    /// CPUID has no way to say it.
    #[error(
        "--budget: CPUID cannot say that {model} has {most} programmable counters; add ,round to \
         announce the nearest number that it can say, of which no more than the budget count at \
         a time{}", if *most > 0 { ", or choose a model that can, as amd-perfmonv2 or intel-v2" } else { "" }
    )]
    Announce {
        /// How many were to be announced.
        most: u8,
        model: &'static str,
    },
    /// More than there are.
    #[error(
        "--budget {kind}={asked}: the PMU model {model} has {there}; give at most that, or all, \
         or add ,round"
    )]
    TooMany {
        kind: &'static str,
        asked: u8,
        /// The model's.
        there: u8,
        model: &'static str,
    },
    /// Each layer of the guest would wait for the other's minimum.
    #[error(
        "--budget {kind}={most}: --policy keeps {minima} for firmware and kernel together, so \
         neither could reserve all of its own; give at least {minima}, or lower {min}= there"
    )]
    BelowMinima {
        kind: &'static str,
        /// The budget.
        most: u8,
        /// Both minima.
        minima: u8,
        /// The word of the policy.
        min: &'static str,
    },
}

/// The words of `--rdpmc-trap`.
pub const TRAP_MODES: &str = "auto, patch, breakpoint or none";

/// What one of them stands for.
#[must_use]
pub fn trap_mode(text: &str) -> Option<TrapMode> {
    match text {
        "auto" => Some(TrapMode::Auto),
        "patch" => Some(TrapMode::Patch),
        "breakpoint" => Some(TrapMode::Breakpoint),
        "none" => Some(TrapMode::None),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_in_words() {
        let parse = |text| BudgetChoice::parse(text, true);
        let choice = |programmable, fixed, round| {
            Some(BudgetChoice {
                programmable,
                fixed,
                round,
            })
        };
        assert_eq!(
            parse("programmable=4,fixed=2"),
            choice(Some(4), Some(2), false)
        );
        assert_eq!(parse("fixed=0"), choice(None, Some(0), false));
        assert_eq!(
            parse("programmable=all,round"),
            choice(Some(255), None, true)
        );
        for wrong in [
            "",
            "round",
            "4",
            "programmable",
            "programmable=",
            "programmable=33",
            "programmable=-1",
            "programmable=1,programmable=2",
            "fixed=1,",
            "fixed=1,round=1",
            "fixed=1,round,round",
            "slots=1",
        ] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
        assert_eq!(BudgetChoice::parse("fixed=1,round", false), None);
    }

    #[test]
    fn every_processor_is_among_the_words() {
        let names: Vec<_> = Identity::all().map(Identity::name).collect();
        let words = CPU_MODELS.replace(" or ", ", ");
        assert_eq!(words, format!("host, {}", names.join(", ")));
        assert_eq!(cpu_model("host"), Some(None));
        assert_eq!(cpu_model("zen2"), Some(Identity::parse("zen2")));
        assert_eq!(cpu_model("Zen2"), None);
    }

    #[test]
    fn a_budget_below_the_minima_is_refused() {
        let mut policy = Policy::default();
        policy.kernel.min.programmable = 2;
        policy.firmware.min.programmable = 1;
        policy.firmware.min.fixed = 2;
        let check = |text: &str, expected: Option<&str>| {
            let choice = BudgetChoice::parse(text, true).expect("a budget");
            let refused = choice.leaves_minima(&policy).err();
            let refused = refused.map(|error| error.to_string());
            match expected {
                None => assert_eq!(refused, None, "{text}"),
                Some(part) => assert!(refused.expect(text).contains(part), "{text}"),
            }
        };
        check("programmable=3,fixed=2", None);
        check("programmable=0,fixed=all", None);
        check("programmable=2", Some("programmable=2: --policy keeps 3"));
        check(
            "programmable=3,fixed=1",
            Some("at least 2, or lower min-fixed="),
        );
    }

    #[test]
    fn what_cpuid_cannot_say_is_refused_or_rounded() {
        // The model, the budget, and what is announced without and with `round`.
        let table = [
            ("intel-v2,counters=4,fixed=3", (4, 3), Some((4, 3)), (4, 3)),
            ("intel-v2,counters=4,fixed=3", (2, 1), Some((2, 1)), (2, 1)),
            ("intel-v2,counters=4,fixed=3", (0, 3), None, (1, 3)),
            ("amd-perfmonv2", (3, 0), Some((3, 0)), (3, 0)),
            ("amd-core", (6, 0), Some((6, 0)), (6, 0)),
            ("amd-core", (4, 0), Some((4, 0)), (4, 0)),
            ("amd-core", (5, 0), None, (4, 0)),
            ("amd-core", (2, 0), None, (4, 0)),
            ("amd-k7", (2, 0), None, (4, 0)),
            ("amd-k7", (4, 0), Some((4, 0)), (4, 0)),
            ("amd-k7", (8, 0), None, (4, 0)),
            ("amd-k7", (4, 1), None, (4, 0)),
            ("intel-v2", (255, 255), Some((4, 3)), (4, 3)),
        ];
        for (model, (programmable, fixed), exact, rounded) in table {
            let model = PmuModel::parse(model).expect("a model");
            let announced = |round| {
                let choice = BudgetChoice {
                    programmable: Some(programmable),
                    fixed: Some(fixed),
                    round,
                };
                let announced = choice.announced(&model, model.counts());
                announced.ok().map(|it| (it.programmable, it.fixed))
            };
            let name = model.name();
            assert_eq!(announced(false), exact, "{name} {programmable}");
            assert_eq!(announced(true), Some(rounded), "{name} {programmable}");
        }
    }
}
