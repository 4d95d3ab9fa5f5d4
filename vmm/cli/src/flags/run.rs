//! The options of `umpire run`.

use std::path::PathBuf;

use clap::{ArgAction, Args};
use serde::{Deserialize, Deserializer};

/// The options of `umpire run`, each under one name: `--name` as a flag, `name` as a
/// key of the configuration file. All are optional here, and types are as wide as
/// TOML's: module `config` checks values, so that a flag and a key get the same
/// answer.
#[derive(Clone, Debug, Default, Args, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct RunFlags {
    /// Kernel: ELF vmlinux, bzImage, or a Multiboot v1 ELF kernel
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// What runs the guest: kvm, emu (a processor in software, which counts each instruction on
    /// any host, without /dev/kvm; see below), or auto (kvm where it can be used, else emu)
    /// [default: auto]
    #[arg(long, value_name = "auto|kvm|emu")]
    pub engine: Option<String>,
    /// With --engine emu: what core cycles are, none (nobody counts them) or simulated (ticks
    /// of virtual time, so labelled: for watchdogs, and for guests that know no other event)
    /// [default: none]
    #[arg(long, value_name = "HOW")]
    pub cycles: Option<String>,
    /// With --engine emu: take random numbers and the clock of day from this number, so that
    /// two runs count the same to the last instruction; cookies can then be guessed
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<i64>,
    /// With --engine emu: the guest's time follows the host's clock, and an idle guest waits
    /// [default: on without a seed where standard input is a terminal or with --paused, else off]
    #[arg(long, value_name = "on|off", num_args = 0..=1, default_missing_value = "on")]
    #[serde(deserialize_with = "switch_or_text")]
    pub real_time: Option<String>,
    /// Initial RAM disk
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// Kernel command line, e.g. "console=ttyS0 root=/dev/ram0"
    #[arg(long, value_name = "STR", allow_hyphen_values = true)]
    pub cmdline: Option<String>,
    /// Multiboot module and its command line; repeatable, order is kept
    #[arg(long, value_name = "FILE[,WORDS]")]
    pub module: Option<Vec<String>>,
    /// Guest memory in MiB, 16 to 1048576 [default: 512]
    #[arg(long, value_name = "MIB", allow_negative_numbers = true)]
    pub memory: Option<i64>,
    /// Number of vCPUs, 1 to 64 [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub cpus: Option<i64>,
    /// Run the vCPUs on this many threads, each a core on which they take turns, 1 to
    /// --cpus [default: a thread for each vCPU]
    #[arg(long, value_name = "M", allow_negative_numbers = true)]
    pub cores: Option<i64>,
    /// How long a vCPU runs while others wait for its core, in milliseconds, 1 to 1000;
    /// with --cores [default: 5]
    #[arg(long, value_name = "MS", allow_negative_numbers = true)]
    pub slice: Option<i64>,
    /// Keep the threads that run vCPUs on these host CPUs, one each, in turn: 0,2-3
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    pub pin: Option<String>,
    /// Virtual PMU: a model below with its properties, auto, or none [default: auto]
    #[arg(long, value_name = "MODEL[,PROPERTY=VALUE...]")]
    pub pmu: Option<String>,
    /// Where counts come from: backends below in order of preference, separated by
    /// commas; each event goes to the first that can count it [default: auto]
    #[arg(long, value_name = "BACKEND[,...]")]
    pub counters: Option<String>,
    /// Which events the guest and tools of the host may count: architectural (cycles,
    /// instructions, branches), standard (nothing that sees beyond the core), all, or a file
    /// of rules (docs/guide/events.md) [default: all]
    #[arg(long, value_name = "PROFILE|FILE")]
    pub event_filter: Option<PathBuf>,
    /// If a vCPU wants more counters than there are: multiplex (they take turns, counts
    /// are scaled and labelled) or refuse (the surplus is unavailable) [default: multiplex]
    #[arg(long, value_name = "HOW")]
    pub oversubscribe: Option<String>,
    /// How many physical counters each vCPU's guest may use at a time; CPUID announces no
    /// more, which has to be exact without the word round; umpire budget changes it later
    /// [default: all]
    #[arg(long, value_name = "programmable=N,fixed=N[,round]")]
    pub budget: Option<String>,
    /// Ask the host's arbiter (umpire arbiterd) for a lease on the physical counters of the
    /// guest's PMU: its socket, none, own (an arbiter of the VM's own, of the counters that
    /// are measured, or stated: own:programmable=8), or auto (where a physical PMU counts:
    /// the host's, if one runs, or own) [default: auto]
    #[arg(long, value_name = "auto|own[:BUDGET]|none|SOCKET")]
    pub arbiter: Option<PathBuf>,
    /// If they cannot all be had: refuse (the VM does not start, and who holds what is
    /// told) or fewer (it starts with as many as there are, which CPUID announces)
    /// [default: refuse; fewer with an arbiter of the VM's own]
    #[arg(long, value_name = "HOW")]
    pub arbiter_shortage: Option<String>,
    /// What the lease is to be like, see below
    #[arg(long, value_name = "KEY=VALUE[,...]")]
    pub arbiter_terms: Option<String>,
    /// CPU vendor that the guest sees: host, amd or intel [default: host]
    #[arg(long, value_name = "VENDOR")]
    pub cpu_vendor: Option<String>,
    /// Processor that the guest sees, of that vendor: host, nehalem, skylake,
    /// skylake-server, ice-lake, ice-lake-server, k8, fam10h, zen2, zen3 or zen4; its event
    /// codes are the PMU's, and --pmu auto means its PMU [default: host]
    #[arg(long, value_name = "NAME")]
    pub cpu_model: Option<String>,
    /// Hide a CPU feature, named as in /proc/cpuinfo, and all that needs it; repeatable
    #[arg(long, value_name = "NAME")]
    pub hide_feature: Option<Vec<String>>,
    /// Unpack a compressed kernel on the host: auto (where guest kernels run slowly),
    /// always or never [default: auto]
    #[arg(long, value_name = "WHEN")]
    pub unpack: Option<String>,
    /// How RDPMC is trapped: auto (patch where it can be, or else breakpoint), patch (one
    /// byte of the guest's #GP handler), breakpoint (takes the guest's debug registers) or
    /// none (RDPMC raises #GP) [default: auto]
    #[arg(long, value_name = "HOW")]
    pub rdpmc_trap: Option<String>,
    /// Least time between two PMIs of one vCPU in microseconds, 1 to 1000000; an
    /// earlier PMI is late, never lost; none with --engine emu unless it is given [default: 100]
    #[arg(long, value_name = "MICROSECONDS", allow_negative_numbers = true)]
    pub pmi_floor: Option<i64>,
    /// Counter reservations for guests: on or off [default: on]
    #[arg(long, value_name = "on|off")]
    #[serde(deserialize_with = "switch_or_text")]
    pub pcr: Option<String>,
    /// How many counters a layer may reserve; one for each layer, see below
    #[arg(long, value_name = "LAYER:KEY=N[,...]")]
    pub policy: Option<Vec<String>>,
    /// Who reserves counters: single (the hypervisor, for all), independent (each layer,
    /// first come, first served) or interacting (layers ask each other) [default: independent]
    #[arg(long, value_name = "HOW")]
    pub scheme: Option<String>,
    /// How long a layer is given to answer, or to prepare for a revocation, in
    /// milliseconds, 1 to 60000 [default: 100]
    #[arg(long, value_name = "MS", allow_negative_numbers = true)]
    pub grace: Option<i64>,
    /// Reserve counters for the hypervisor on every vCPU: a number of programmable ones,
    /// from the last one on, or a list as PMC3,FIXED0 [default: 0]
    #[arg(long, value_name = "N|LIST", allow_hyphen_values = true)]
    #[serde(deserialize_with = "number_or_text")]
    pub hypervisor_counters: Option<String>,
    /// Whether CPUID announces only the counters that are left to the kernel: auto (if
    /// any are set aside), on or off [default: auto]
    #[arg(long, value_name = "WHEN")]
    pub cpuid_follows_grants: Option<String>,
    /// Write every decision about counters to this file, a line of JSON each, or into the
    /// host's audit (arbiter)
    #[arg(long, value_name = "FILE|arbiter")]
    pub audit: Option<PathBuf>,
    /// Stop the guest after this many seconds (fractions allowed), with exit status 124
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    pub timeout: Option<f64>,
    /// Firmware that runs before the kernel and reserves counters: builtin, none, or an
    /// image of your own [default: none]
    #[arg(long, value_name = "builtin|none|FILE")]
    pub firmware: Option<PathBuf>,
    /// A counter that the firmware reserves on every vCPU; repeatable, see below
    #[arg(long, value_name = "EVENT[,WORD...]")]
    pub firmware_counter: Option<Vec<String>>,
    /// Milliseconds for which the firmware stays in its phase after it has reserved, and
    /// answers who asks for its counters [default: 0]
    #[arg(long, value_name = "MS", allow_negative_numbers = true)]
    pub firmware_delay: Option<i64>,
    /// When the run ends, however it ends, write the PMU state of all vCPUs to this file
    #[arg(long, value_name = "FILE")]
    pub save_on_exit: Option<PathBuf>,
    /// Start with the PMU state in this file, which --save-on-exit wrote; same --pmu and
    /// --cpus
    #[arg(long, value_name = "FILE")]
    pub restore: Option<PathBuf>,
    /// The VM's name, by which tools find it: up to 64 letters, digits, '.', '_' and '-'
    /// [default: the process id]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Give the guest a second serial port, /dev/ttyS1, at which umpire-agent tells tools what
    /// runs in it: for Linux guests whose kernel has no BTF
    #[arg(long, value_name = "on|off", num_args = 0..=1, default_missing_value = "on")]
    #[serde(deserialize_with = "switch_or_text")]
    pub agent: Option<String>,
    /// Let the guest begin only when umpire resume says so
    #[arg(long, value_name = "on|off", num_args = 0..=1, default_missing_value = "on")]
    #[serde(deserialize_with = "switch_or_text")]
    pub paused: Option<String>,
    /// Count events of all vCPUs from the guest's first instruction on, and print the counts
    /// on standard error at its end [default events: those of umpire stat]
    #[arg(long, value_name = "EVENTS", num_args = 0..=1, default_missing_value = "")]
    #[serde(deserialize_with = "events_or_none")]
    pub stat: Option<String>,
    /// Sample the cycles of all vCPUs from the guest's first instruction on, 1000 times a
    /// second, for umpire report; instructions where --engine emu has no cycles
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// Serve host tools (umpire stat, record, ls) on this socket, or not at all; see below
    /// [default: NAME.sock in XDG_RUNTIME_DIR/umpire, of root in /run/umpire]
    #[arg(long, value_name = "SOCKET|none")]
    pub control: Option<PathBuf>,
    /// Permission bits of the socket, in octal [default: 600]
    #[arg(long, value_name = "OCTAL")]
    pub control_mode: Option<String>,
    /// Group of the socket, by number, for a --control-mode that lets a group in
    #[arg(long, value_name = "GID", allow_negative_numbers = true)]
    pub control_group: Option<i64>,
    /// How many tools may be connected at a time, 1 to 4096 [default: 64]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub control_connections: Option<i64>,
    /// Only this group may create contexts for cores, by number [default: whoever may
    /// connect]
    #[arg(long, value_name = "GID", allow_negative_numbers = true)]
    pub control_sys_gid: Option<i64>,
    /// Only this group may create contexts for vCPUs, by number [default: whoever may
    /// connect]
    #[arg(long, value_name = "GID", allow_negative_numbers = true)]
    pub control_thread_gid: Option<i64>,
    /// Most bytes of a command's vector argument, 4096 to 64484 [default: 4096]
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true)]
    pub control_arg_size: Option<i64>,
    /// Memory for the sampling buffers of all tools in KiB, 4 to 1073741824
    /// [default: 65536]
    #[arg(long, value_name = "KIB", allow_negative_numbers = true)]
    pub control_buffers: Option<i64>,
    /// Who gets counters that guest and tools both want: guest-first, host-first, shares
    /// or shares:host=N, with N counters for tools [default: guest-first]
    #[arg(long, value_name = "HOW")]
    pub host_policy: Option<String>,
    /// How often a tool's context may interrupt its vCPU in a second, 1 to 10000000;
    /// one that does so more often is masked, and its tool hears of it [default: 100000]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub sampling_rate_max: Option<i64>,
    /// How many contexts of tools a vCPU may have at a time, and a core, 1 to 16; 1 is
    /// what perfmon2 says [default: 16]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub contexts_per_vcpu: Option<i64>,
    /// TOML file with any of these options under the same names; flags win
    #[arg(long, value_name = "FILE.toml")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// More log lines: once for information, twice for debugging, three times for all
    #[arg(short, long, action = ArgAction::Count)]
    #[serde(skip)]
    pub verbose: u8,
    /// The key `verbose` of the configuration file, a number.
    #[arg(skip)]
    #[serde(rename = "verbose")]
    pub verbosity: Option<i64>,
    /// Write log lines to this file instead of standard error
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
}

/// A list of counters, or how many: a value that reads the same as a number and as
/// a string.
fn number_or_text<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a number or a string")]
    enum Value {
        Number(i64),
        Text(String),
    }
    Ok(Some(match Value::deserialize(from)? {
        Value::Number(number) => number.to_string(),
        Value::Text(text) => text,
    }))
}

/// A word, or what a file says of it without one.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected true, false or a string")]
enum Switch {
    On(bool),
    Text(String),
}

/// `on` or `off`, also as `true` or `false`.
fn switch_or_text<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let word = |on| if on { "on" } else { "off" };
    Ok(Some(match Switch::deserialize(from)? {
        Switch::On(on) => word(on).to_owned(),
        Switch::Text(text) => text,
    }))
}

/// Events; `true` is those where nobody says, and `false` that nothing is counted.
fn events_or_none<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(match Switch::deserialize(from)? {
        Switch::On(on) => on.then(String::new),
        Switch::Text(text) => Some(text),
    })
}
