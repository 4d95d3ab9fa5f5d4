//! Counters as a resource of Slurm: from what the arbiter of a node has to the lines of Slurm's
//! files, the rule by which `--counters` becomes a GRES, what of it a node lacks, and what a job's
//! counters came to.
//!
//! A counter is a CPU's. So a job whose CPUs are its own asks Slurm for nothing: its lease is one
//! of its control group, on its CPUs. Where jobs share CPUs, Slurm counts counters for each node,
//! as GRES of two names ([`PROGRAMMABLE`], [`FIXED`]), for of a GRES with types an untyped request
//! gets some of each.
//!
//! Nothing here runs a program or opens a file. The plugin of slurmstepd is `spank/`, in C.
#![forbid(unsafe_code)]

mod account;
mod check;
mod plugin;
mod rule;
mod share;

pub use account::{AccountReader, AccountsRow, FIELDS_END, JobAccount, epilog};
pub use check::{Facts, Finding, PluginLine, check, config_value};
pub use plugin::{SlurmVersion, plugin_version};
pub use rule::{Confined, job_submit};
pub use share::{Kept, NoShare, Share, gres_lines, jobs_share};

/// The GRES of programmable counters.
pub const PROGRAMMABLE: &str = "pmc";
/// The GRES of fixed-function counters.
pub const FIXED: &str = "pmcfixed";
