//! The VM and the part of it that a tool looks at.

use std::fmt;

use clap::Args;
use perfmon_abi::LoadArg;
use perfmon_abi::consts::{PFM_FL_PREEMPTIBLE, PFM_FL_SYSTEM_WIDE};

use super::error::ToolError;
use crate::find::VmChoice;
use crate::numbers::Numbers;

/// What to do where others hold the counters, if that helps.
pub(crate) const PREEMPTIBLE_HINT: &str = "; --preemptible uses counters while the guest does not";

/// What a context is attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    /// A vCPU.
    Vcpu(u32),
    Core(u32),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vcpu(number) => write!(f, "vCPU {number}"),
            Self::Core(number) => write!(f, "core {number}"),
        }
    }
}

impl Target {
    /// The flags of a context for it.
    #[must_use]
    pub fn flags(self) -> u32 {
        match self {
            Self::Vcpu(_) => 0,
            Self::Core(_) => PFM_FL_SYSTEM_WIDE,
        }
    }

    /// How a context is attached to it, with set 0.
    #[must_use]
    pub fn load(self) -> LoadArg {
        let (Self::Vcpu(number) | Self::Core(number)) = self;
        LoadArg {
            pid: i32::try_from(number).unwrap_or(i32::MAX),
            set: 0,
        }
    }
}

/// A VM, and what of it a tool looks at. Without a choice it looks at all vCPUs.
#[derive(Clone, Debug, Default, Args)]
pub struct Selection {
    /// The VM.
    #[command(flatten)]
    pub vm: VmChoice,
    /// Only these vCPUs, wherever they run: 0,2-3 [default: all]
    #[arg(
        long = "vcpu",
        id = "vcpu",
        value_name = "LIST",
        conflicts_with = "core"
    )]
    pub vcpus: Option<Numbers>,
    /// These cores, whatever vCPU runs on them: 0,2-3
    #[arg(long = "core", id = "core", value_name = "LIST")]
    pub cores: Option<Numbers>,
    /// The same as --vcpu, beside -a too: a guest's CPUs are vCPUs
    #[arg(short = 'C', long = "cpu", value_name = "LIST", conflicts_with_all = ["vcpu", "core"])]
    pub cpus: Option<Numbers>,
    /// All cores, whatever vCPU runs on them
    #[arg(short = 'a', long, conflicts_with_all = ["vcpu", "core"])]
    pub all_cores: bool,
    /// Let the guest and others have the counters when they need them; the output says for
    /// how long they did
    #[arg(long)]
    pub preemptible: bool,
}

impl Selection {
    /// The flags of its contexts, beside those of their targets.
    pub(crate) fn flags(&self) -> u32 {
        if self.preemptible {
            PFM_FL_PREEMPTIBLE
        } else {
            0
        }
    }

    /// Whether all cores are looked at, and no vCPU by its number.
    pub(crate) fn takes_all_cores(&self) -> bool {
        self.all_cores && self.cpus.is_none()
    }

    /// The targets, of a VM with so many vCPUs and cores.
    ///
    /// # Errors
    /// It has no such vCPU or core.
    pub fn targets(&self, vcpus: u32, cores: u32) -> Result<Vec<Target>, ToolError> {
        let chosen = |list: &Numbers, what, count| {
            let missing = |number| ToolError::NoTarget {
                what,
                number,
                count,
            };
            list.below(count).map_err(missing)
        };
        Ok(
            match (self.vcpus.as_ref().or(self.cpus.as_ref()), &self.cores) {
                (Some(list), _) => of(Target::Vcpu, chosen(list, "vCPU", vcpus)?),
                (None, Some(list)) => of(Target::Core, chosen(list, "core", cores)?),
                (None, None) if self.all_cores => of(Target::Core, 0..cores),
                (None, None) => of(Target::Vcpu, 0..vcpus),
            },
        )
    }
}

fn of(target: fn(u32) -> Target, numbers: impl IntoIterator<Item = u32>) -> Vec<Target> {
    numbers.into_iter().map(target).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_checked_against_the_vm() {
        let check = |vcpus: Option<&str>, cores: Option<&str>, all_cores, expected: &str| {
            let choice = Selection {
                vcpus: vcpus.map(|list| list.parse().unwrap()),
                cores: cores.map(|list| list.parse().unwrap()),
                all_cores,
                ..Selection::default()
            };
            let text = match choice.targets(4, 2) {
                Ok(targets) => {
                    let words: Vec<String> = targets.iter().map(Target::to_string).collect();
                    words.join(", ")
                }
                Err(error) => error.to_string(),
            };
            assert_eq!(text, expected);
        };
        check(None, None, false, "vCPU 0, vCPU 1, vCPU 2, vCPU 3");
        check(None, None, true, "core 0, core 1");
        check(Some("2-3,0,2"), None, false, "vCPU 0, vCPU 2, vCPU 3");
        check(None, Some("1"), false, "core 1");
        let none = "there is no vCPU 4: the VM has 4, numbered from 0";
        check(Some("1-4294967295"), None, false, none);
        let none = "there is no core 2: the VM has 2, numbered from 0";
        check(None, Some("2"), false, none);
    }
}
