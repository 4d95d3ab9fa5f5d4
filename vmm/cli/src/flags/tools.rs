//! The flags of the tools that look at a running VM.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use umpire_tools::duration::Span;
use umpire_tools::find::VmChoice;
use umpire_tools::numbers::Numbers;

/// The flags of `umpire pause`, `resume` and `stop`.
#[derive(Clone, Debug, Default, Args)]
pub struct LifecycleFlags {
    /// The VM, by the name of its umpire run --name or by its process id [default: the one
    /// that UMPIRE_PERFMON names, or the only one that runs]
    #[arg(value_name = "NAME|PID", conflicts_with_all = ["vm", "control"])]
    pub name: Option<String>,
    /// The VM, as the other tools take it.
    #[command(flatten)]
    pub vm: VmChoice,
}

impl From<&LifecycleFlags> for VmChoice {
    fn from(flags: &LifecycleFlags) -> Self {
        Self {
            control: flags.vm.control.clone(),
            vm: flags.name.clone().or_else(|| flags.vm.vm.clone()),
        }
    }
}

/// The flags of `umpire ls`.
#[derive(Clone, Debug, Default, Args)]
pub struct LsFlags {
    /// Control sockets [default: of all VMs that run, where umpire run serves them, and what
    /// UMPIRE_PERFMON names]
    #[arg(value_name = "SOCKET")]
    pub sockets: Vec<PathBuf>,
    /// Only this VM, as the other tools take it.
    #[command(flatten)]
    pub vm: VmChoice,
    /// Print JSON: one object per line
    #[arg(short, long)]
    pub json: bool,
}

/// The flags of `umpire budget`.
#[derive(Clone, Debug, Default, Args)]
pub struct BudgetFlags {
    /// What every vCPU's guest may use from now on; a kind that is not named stays as it is
    /// [default: change nothing, show what there is]
    #[arg(value_name = "programmable=N,fixed=N")]
    pub budget: Option<String>,
    /// The VM.
    #[command(flatten)]
    pub vm: VmChoice,
    /// Tell who has reserved a counter that is to be taken so many milliseconds before, 0 to
    /// 60000
    #[arg(long, value_name = "MS", default_value_t = 100, requires = "budget",
          allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(0..=60_000))]
    pub grace: u32,
    /// So long; then it is as before, as 500ms, 30s or 2h [default: for good]
    #[arg(long = "for", value_name = "DURATION", requires = "budget")]
    pub duration: Option<Span>,
    /// Print JSON: one object, after a change with what there is now
    #[arg(short, long)]
    pub json: bool,
}

/// The flags of `umpire pcr`.
#[derive(Clone, Debug, Default, Args)]
pub struct PcrFlags {
    /// The VM.
    #[command(flatten)]
    pub vm: VmChoice,
    /// Only these vCPUs: 0,2-3 [default: all]
    #[arg(long, value_name = "LIST", global = true)]
    pub vcpu: Option<Numbers>,
    /// Print JSON: one object, after a change with what there is now
    #[arg(short, long, global = true)]
    pub json: bool,
    /// What to change.
    #[command(subcommand)]
    pub act: Option<PcrCommand>,
}

/// What an administrator changes.
#[derive(Clone, Debug, Subcommand)]
pub enum PcrCommand {
    /// Take a counter from its holder, whatever minimum the holder has
    Revoke {
        /// The counter: PMC1, FIXED0
        counter: String,
        /// Tell the holder so many milliseconds before, 0 to 60000
        #[arg(long, value_name = "MS", default_value_t = 0, allow_negative_numbers = true,
              value_parser = clap::value_parser!(u32).range(0..=60_000))]
        grace: u32,
    },
    /// Read a counter as the hypervisor; its owner's cookie and mode bits decide
    Read {
        /// The counter: PMC1, FIXED0
        counter: String,
        /// A file with the cookie to present, in hexadecimal [default: PCR_DEFAULT_COOKIE]
        #[arg(long, value_name = "FILE")]
        cookie: Option<PathBuf>,
    },
    /// Let a layer reserve nothing more; it keeps what it holds
    Bar {
        /// The layer
        #[arg(value_parser = ["firmware", "hypervisor", "kernel"])]
        layer: String,
    },
    /// Let a layer reserve again
    Unbar {
        /// The layer
        #[arg(value_parser = ["firmware", "hypervisor", "kernel"])]
        layer: String,
    },
    /// Change how many counters layers may hold; who holds more keeps it
    Policy {
        /// The words of umpire run --policy; what they do not name stays as it is
        #[arg(value_name = "LAYER:KEY=N[,...]", required = true)]
        shares: Vec<String>,
    },
    /// Change who reserves counters, and how layers get each other's
    Scheme {
        /// The scheme
        #[arg(value_parser = ["single", "independent", "interacting"])]
        scheme: String,
    },
}
