//! The flags of the commands about this host's counters: `arbiterd`, `lease`, `leases`,
//! `who`, `revoke` and `hog`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use umpire_tools::duration::Span;

/// Which arbiter.
#[derive(Clone, Debug, Default, Args)]
pub struct ArbiterFlag {
    /// The arbiter's socket [default: what UMPIRE_ARBITER names, else /run/umpire/arbiter]
    #[arg(long, value_name = "SOCKET")]
    pub arbiter: Option<PathBuf>,
}

/// The flags of `umpire arbiterd`.
#[derive(Clone, Debug, Args)]
pub struct ArbiterdFlags {
    /// Where programs ask [default: what UMPIRE_ARBITER names, else /run/umpire/arbiter]
    #[arg(long, value_name = "SOCKET")]
    pub socket: Option<PathBuf>,
    /// Permission bits of the socket, in octal: who may ask. Who gets what is the policy's
    #[arg(long, value_name = "MODE", default_value = "666")]
    pub socket_mode: String,
    /// Group of the socket, by number
    #[arg(long, value_name = "GID")]
    pub socket_group: Option<u32>,
    /// Tenants, their shares and limits, and counters that the kernel does not show: a TOML
    /// file, read again at SIGHUP (docs/reference/arbiterd.md)
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Only check the --config file: what is wrong is named with line and column
    #[arg(long, requires = "config")]
    pub check_config: bool,
    /// Counters of each CPU of a host whose kernel shows no PMU: programmable=4,fixed=3
    #[arg(long, value_name = "KIND=N[,...]")]
    pub budget: Option<String>,
    /// Folder of the journal, by which leases survive the arbiter [default: none]
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Serve metrics (OpenMetrics) at a port of this host, like 127.0.0.1:9184, or at a
    /// Unix socket's path
    #[arg(long, value_name = "ADDRESS|PATH")]
    pub metrics: Option<String>,
    /// Read the kernel's files below this folder: for tests
    #[arg(long, value_name = "DIR", hide = true)]
    pub host_root: Option<PathBuf>,
    /// Say what the arbiter would do with a request, and why, and do nothing: of the one
    /// that runs at --socket, or else of one that begins with this configuration. A request
    /// is a list like counters=2,cpus=0-3,tenant=blue (--help)
    #[arg(long, value_name = "REQUEST")]
    pub explain: Option<String>,
    /// Print JSON, with --explain
    #[arg(short, long, requires = "explain")]
    pub json: bool,
    /// Log more: each decision (-v), and everything (-vv)
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// What a lease is of.
#[derive(Clone, Debug, Default, Args)]
pub struct LeaseTerms {
    /// CPUs: 0,2-3 [default: all]
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<String>,
    /// The PMU [default: the host's first]
    #[arg(long, value_name = "NAME")]
    pub pmu: Option<String>,
    /// How long the lease lasts: 30s, 500ms, 2m [default: until the end]
    #[arg(long = "for", value_name = "TIME")]
    pub duration: Option<Span>,
    /// Who is served first, and may take counters from preemptible leases: more is more
    #[arg(long, value_name = "N")]
    pub priority: Option<u8>,
    /// Let leases of higher priority take the counters
    #[arg(long)]
    pub preemptible: bool,
    /// Take what nobody else needs, and let guaranteed leases have it
    #[arg(long)]
    pub best_effort: bool,
    /// Wait for the counters if they are not free; so long at most, if a time is given
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true)]
    pub wait: Option<Option<Span>>,
    /// One of the tenants that this user belongs to [default: the first]
    #[arg(long, value_name = "NAME")]
    pub tenant: Option<String>,
    /// A name for people, in umpire who and umpire leases
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,
}

/// The flags of `umpire lease`.
#[derive(Clone, Debug, Args)]
pub struct LeaseFlags {
    /// The arbiter.
    #[command(flatten)]
    pub arbiter: ArbiterFlag,
    /// Programmable counters on each CPU [default: 1, unless --fixed or --event is given]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub counters: Option<u32>,
    /// Fixed-function counters on each CPU, of any event
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=32))]
    pub fixed: Option<u32>,
    /// A counter that can count this event of the arbiter's table; repeatable
    #[arg(long, value_name = "NAME")]
    pub event: Vec<String>,
    /// Be content with so many of the counters [default: all or nothing]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=128))]
    pub at_least: Option<u32>,
    /// What is asked for besides.
    #[command(flatten)]
    pub terms: LeaseTerms,
    /// A lease for what runs in this control group and below it, as /proc/PID/cgroup has it; '.' is
    /// the caller's own. It ends when nothing runs there any more
    #[arg(long, value_name = "PATH", conflicts_with_all = ["renew", "command"])]
    pub cgroup: Option<String>,
    /// All that runs in the group is this user's, whose tenant gets the lease
    #[arg(long, value_name = "UID", requires_all = ["cgroup", "for_group"])]
    pub for_user: Option<u32>,
    /// And of this group of users
    #[arg(long, value_name = "GID", requires = "for_user")]
    pub for_group: Option<u32>,
    /// Renew the lease, as long as the command runs
    #[arg(long, requires = "duration")]
    pub renew: bool,
    /// The command that runs while the lease is held [default: hold it until Ctrl-C]. It begins
    /// at --, or at the first word without a hyphen
    #[arg(value_name = "COMMAND", trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

impl LeaseFlags {
    /// The command, if there is one.
    ///
    /// # Errors
    /// It is a number or a time, which have options of their own.
    pub(crate) fn command(&self) -> Result<&[OsString], String> {
        let first = self.command.first().and_then(|word| word.to_str());
        match first {
            Some(word) if word.parse::<u32>().is_ok() => Err(format!(
                "'{word}' is no command; --counters {word} asks for so many counters"
            )),
            Some(word) if word.parse::<Span>().is_ok() => Err(format!(
                "'{word}' is no command; --for {word} holds the lease so long, and --wait={word} \
                 waits for it so long"
            )),
            _ => Ok(&self.command),
        }
    }
}

/// The flags of `umpire hog`.
#[derive(Clone, Debug, Args)]
pub struct HogFlags {
    /// Programmable counters on each CPU
    #[arg(value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub counters: u32,
    /// Ask nobody, and pin so many perf events on each of the CPUs instead: an outsider
    #[arg(long, conflicts_with_all = ["arbiter", "priority", "preemptible", "best_effort", "wait",
        "tenant", "label"])]
    pub no_lease: bool,
    /// The arbiter.
    #[command(flatten)]
    pub arbiter: ArbiterFlag,
    /// What is asked for besides.
    #[command(flatten)]
    pub terms: LeaseTerms,
}

/// The flags of `umpire leases`.
#[derive(Clone, Debug, Args)]
pub struct LeasesFlags {
    /// The arbiter.
    #[command(flatten)]
    pub arbiter: ArbiterFlag,
    /// Print JSON: one object per line
    #[arg(short, long)]
    pub json: bool,
}

/// The flags of `umpire who`.
#[derive(Clone, Debug, Args)]
pub struct HolderFlags {
    /// A CPU, or the label or tenant of leases [default: all CPUs]
    #[arg(value_name = "CPU|NAME")]
    pub whose: Option<String>,
    /// The arbiter.
    #[command(flatten)]
    pub arbiter: ArbiterFlag,
    /// Print JSON: one object per line
    #[arg(short, long)]
    pub json: bool,
}

/// The flags of `umpire revoke`.
#[derive(Clone, Debug, Args)]
pub struct RevokeFlags {
    /// The lease, by its number in umpire leases
    #[arg(value_name = "LEASE")]
    pub lease: u64,
    /// How long before it loses its counters the holder is told, in milliseconds
    /// [default: the policy's]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(0..=60_000))]
    pub grace: Option<u64>,
    /// The arbiter.
    #[command(flatten)]
    pub arbiter: ArbiterFlag,
    /// Print JSON: one object
    #[arg(short, long)]
    pub json: bool,
}

/// The flags of `umpire pardon`.
#[derive(Clone, Debug, Args)]
pub struct PardonFlags {
    /// The user, by its number in umpire who
    #[arg(value_name = "UID")]
    pub uid: u32,
    /// The arbiter.
    #[command(flatten)]
    pub arbiter: ArbiterFlag,
}
