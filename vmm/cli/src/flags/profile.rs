//! The flags of the commands that read a profile.

use clap::Args;
use umpire_tools::profile::ProfileChoice;
use umpire_tools::profile::script::Fields;

/// The flags of `umpire script`.
#[derive(Clone, Debug, Args)]
pub struct ScriptFlags {
    /// The profile.
    #[command(flatten)]
    pub profile: ProfileChoice,
    /// What a line has: comm, pid, tid, vm, vcpu, core, time, period, event, set, ring, cr3,
    /// ip, sym, dso, callchain [default: vm,vcpu,core,time,period,event,ip,sym,callchain, and
    /// comm,pid,tid,dso where the guest's tasks are known]
    #[arg(short = 'F', long, value_name = "FIELD[,...]")]
    pub fields: Option<Fields>,
    /// Print JSON: one object per line
    #[arg(short, long)]
    pub json: bool,
}
