//! The VM that a tool looks at.

use std::path::{Path, PathBuf};

use perfmon::LogicalPmu;
use perfmon_abi::wire::Hello;
use perfmon_abi::wire::info::{CountableInfo, MachineInfo, ModelInfo};
use perfmon_abi::{Config, Record};
use pmu_model::KnownEvent;
use umpire_perfmon::{Call, Client};

use super::error::{ToolError, refused};
use crate::find::{VmChoice, connect};

/// A VM and what has to be known of it.
#[derive(Debug)]
pub struct Vm {
    /// Its control socket.
    pub socket: PathBuf,
    /// The connection.
    pub client: Client,
    /// What it says of its PMU.
    pub model: ModelInfo,
    /// The registers that follow from this.
    pub pmu: LogicalPmu,
    /// What there was when it was found.
    pub machine: MachineInfo,
    /// Most bytes of a vector argument.
    arg_size_max: usize,
}

impl Vm {
    /// The VM that is meant.
    ///
    /// # Errors
    /// None or several are meant, it does not answer, or it is one of another version.
    pub fn find(choice: &VmChoice) -> Result<Self, ToolError> {
        Self::at(&choice.socket()?)
    }

    /// The VM behind a socket.
    ///
    /// # Errors
    /// None answers, or it is one of another version.
    pub fn at(path: &Path) -> Result<Self, ToolError> {
        let client = connect(path)?;
        let model = client.model().map_err(refused("asking for the PMU"))?;
        let machine = client.list().map_err(refused("asking for the VM"))?;
        let mut config = Call::GetConfig(Config::default());
        client
            .ask(&mut config)
            .map_err(refused("asking for the interface"))?;
        let arg_size_max = match config {
            Call::GetConfig(config) => config.arg_size_max,
            _ => 0,
        };
        let arg_size_max = usize::try_from(arg_size_max).unwrap_or(usize::MAX);
        let pmu = LogicalPmu::served(&model).map_err(ToolError::Model)?;
        Ok(Self {
            socket: path.to_owned(),
            client,
            model,
            pmu,
            machine,
            arg_size_max,
        })
    }

    /// How many of these fit into a command.
    #[must_use]
    pub fn at_once<T: Record>(&self) -> usize {
        (self.arg_size_max / T::SIZE).max(1)
    }

    /// What is sampled where nobody says: cycles, or instructions in a VM where these alone are
    /// counted.
    #[must_use]
    pub fn usual_event(&self) -> &'static str {
        usual_event(&self.model.countable)
    }

    /// Out of which lease what is counted here is taken: whoever began the VM, or asks now, named
    /// no group. `None`: out of none.
    #[must_use]
    pub(crate) fn within(&self) -> Option<String> {
        let above = self.model.lease_within?;
        Some(format!(
            "what is counted here is taken out of lease {above}, of the control group that the VM \
             is in"
        ))
    }

    /// `VM 4711 (vmlinuz)`.
    #[must_use]
    pub fn title(&self) -> String {
        match self.machine.guest.as_str() {
            "" => format!("VM {}", self.machine.pid),
            guest => format!("VM {} ({guest})", self.machine.pid),
        }
    }
}

/// Said where instructions are sampled and nobody chose them.
pub(crate) const NO_CYCLES: &str =
    "cycles cannot be counted here, so instructions are sampled; -e EVENT chooses another event";

fn usual_event(countable: &[CountableInfo]) -> &'static str {
    let counts = |event: KnownEvent| {
        let name = event.to_string();
        countable.iter().any(|info| info.event == name)
    };
    // A VMM that does not say may count cycles.
    if counts(KnownEvent::Instructions) && !counts(KnownEvent::CoreCycles) {
        "instructions"
    } else {
        "cycles"
    }
}

/// The same for the VM that is meant, with its socket.
///
/// # Errors
/// None or several are meant, or it does not answer.
pub(crate) fn meet(choice: &VmChoice) -> Result<(PathBuf, Client, Hello), ToolError> {
    let socket = choice.socket()?;
    let client = connect(&socket)?;
    let hello = client.hello().map_err(refused("asking for the VM"))?;
    Ok((socket, client, hello))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pmu_model::PmuModel;

    #[test]
    fn instructions_are_sampled_where_nobody_counts_cycles() {
        let check = |events: &[&str], expected| {
            let info = |event: &&str| CountableInfo {
                event: (*event).to_owned(),
                select: None,
                provenance: "exact".to_owned(),
            };
            let countable: Vec<CountableInfo> = events.iter().map(info).collect();
            assert_eq!(usual_event(&countable), expected, "{events:?}");
        };
        check(&["instructions", "branches"], "instructions");
        check(&["core cycles", "instructions"], "cycles");
        // Nothing is said, or neither is counted: the VM says why not.
        check(&[], "cycles");
        check(&["branches"], "cycles");
    }

    /// Every model comes back from what a VM says of it.
    #[test]
    fn models_survive_the_wire() {
        let names = PmuModel::names().iter().map(|summary| summary.name);
        let others = [
            "intel-v4,events=skylake",
            "intel-v5,events=ice-lake",
            "intel-v5,fixed=0x6",
            "intel-v5,fixed=0x0",
        ];
        for name in names.chain(others) {
            let model = PmuModel::parse(name).unwrap();
            let info = ModelInfo {
                model: model.name().to_owned(),
                event_family: if model.has_usual_events() {
                    model.name().to_owned()
                } else {
                    model.events().name().to_owned()
                },
                counters: "sim".to_owned(),
                programmable: model.programmable().into(),
                fixed: model.fixed_map().count_ones(),
                fixed_map: Some(model.fixed_map()),
                counter_width: model.width().into(),
                tsc_khz: 1,
                virtual_time: false,
                lease_within: None,
                vcpus: 1,
                cores: 1,
                core_cpus: Vec::new(),
                virtual_pmds: Vec::new(),
                countable: Vec::new(),
            };
            let again = LogicalPmu::served(&info).unwrap();
            assert_eq!(format!("{:?}", again.model()), format!("{model:?}"));
        }
    }
}
