//! `umpire slurm`: asks the arbiter and Slurm's own commands, and prints what `umpire-slurm` makes
//! of their answers.

mod account;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use umpire_arbiterd::{ArbiterConfig, hierarchies};
use umpire_lease::{Arbiter, WhoIn, WhoOut};
use umpire_slurm::{
    Confined, Facts, Kept, PluginLine, Share, check, config_value, epilog, gres_lines, job_submit,
    jobs_share, plugin_version,
};

use crate::exit::{ExitStatus, UserError, written};
use crate::flags::{SlurmCommand, SlurmFlags, SlurmShareFlags};

/// How long one of Slurm's commands may take: its controller may be away.
const PATIENCE: Duration = Duration::from_secs(15);
/// Where the loader looks for libraries, besides its own configuration.
const LIBRARIES: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu",
    "/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/lib",
];

/// `umpire slurm`.
///
/// # Errors
/// There is no arbiter or no Slurm, or something differs.
pub fn run(flags: &SlurmFlags) -> Result<ExitStatus, UserError> {
    match &flags.command {
        SlurmCommand::Gres(flags) => {
            let share = share(flags).map_err(UserError::bad_input)?;
            print(&gres_lines(&node(flags.node.as_ref())?, share))?;
            Ok(ExitStatus::SUCCESS)
        }
        SlurmCommand::JobSubmit { unconfined } => {
            let confined = if *unconfined {
                Confined::No
            } else {
                Confined::Yes
            };
            print(&job_submit(confined))?;
            Ok(ExitStatus::SUCCESS)
        }
        SlurmCommand::Check(flags) => check_node(flags),
        SlurmCommand::Epilog { config } => print_epilog(config),
        SlurmCommand::Account(flags) => account::run(flags),
    }
}

fn print_epilog(config: &Path) -> Result<ExitStatus, UserError> {
    let program = std::env::current_exe();
    let program =
        program.map_err(|error| UserError::bad_input(format!("this program: {error}")))?;
    let (Some(program), Some(config)) = (program.to_str(), config.to_str()) else {
        return Err(UserError::bad_input(
            "a path that is not UTF-8 cannot stand in a script",
        ));
    };
    print(&epilog(program, config).map_err(UserError::bad_input)?)?;
    Ok(ExitStatus::SUCCESS)
}

fn print(text: &str) -> Result<(), UserError> {
    let mut out = io::stdout().lock();
    written(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// Slurm's name of this node. It becomes a part of lines and paths.
fn node(given: Option<&String>) -> Result<String, UserError> {
    let host = || fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = match given {
        Some(name) => name.clone(),
        None => host()
            .trim()
            .split('.')
            .next()
            .unwrap_or_default()
            .to_owned(),
    };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || !name.chars().all(is_plain) {
        let what = format!("--node {name}: no name of a node; give one as sinfo -N prints it");
        return Err(UserError::bad_input(what));
    }
    Ok(name)
}

fn socket(flags: &SlurmShareFlags) -> PathBuf {
    let given = flags.arbiter.arbiter.clone();
    given.unwrap_or_else(umpire_lease::default_socket)
}

/// What tenants are promised, and what `--keep` says.
fn kept(flags: &SlurmShareFlags) -> Result<Vec<Kept>, String> {
    let mut kept = vec![Kept {
        tenant: "--keep".to_owned(),
        share: Share {
            programmable: flags.keep.unwrap_or(0),
            fixed: flags.keep_fixed.unwrap_or(0),
        },
    }];
    if let Some(file) = &flags.config {
        let config = ArbiterConfig::read(file).map_err(|error| error.to_string())?;
        kept.extend(config.policy.tenants.iter().map(|tenant| Kept {
            tenant: tenant.name.clone(),
            share: Share {
                programmable: tenant.minimum.cpu.programmable.into(),
                fixed: tenant.minimum.cpu.fixed.into(),
            },
        }));
    }
    Ok(kept)
}

/// What the arbiter has for jobs.
fn share(flags: &SlurmShareFlags) -> Result<Share, String> {
    let kept = kept(flags)?;
    let mut arbiter = Arbiter::connect(&socket(flags)).map_err(|error| error.to_string())?;
    let who = arbiter.call("Who", &WhoIn { cpu: None });
    let WhoOut { places, outsiders } = who.map_err(|error| error.to_string())?;
    let share = jobs_share(&places, &outsiders, flags.pmu.as_deref(), &kept);
    share.map_err(|error| error.to_string())
}

/// What one of Slurm's commands prints, if it does so within `patience`.
fn ask_slurm(program: &str, words: &[&str], patience: Duration) -> Result<String, UserError> {
    let wrong = |why: String| UserError::bad_input(format!("{program} {}: {why}", words.join(" ")));
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn();
    let mut child = child.map_err(|error| wrong(format!("{error}; is this a node of Slurm?")))?;
    // What it prints fits into no pipe on a large site, so it is read while it is waited for.
    let mut out = child
        .stdout
        .take()
        .ok_or_else(|| wrong("no output".to_owned()))?;
    let reader = std::thread::spawn(move || io::read_to_string(&mut out));
    let until = Instant::now() + patience;
    let status = loop {
        match child.try_wait().map_err(|error| wrong(error.to_string()))? {
            Some(status) => break status,
            None if Instant::now() >= until => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(wrong(format!("no answer within {patience:.1?}")));
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let text = reader
        .join()
        .map_err(|_| wrong("its output cannot be read".to_owned()))?;
    let text = text.map_err(|error| wrong(error.to_string()))?;
    if status.success() {
        return Ok(text);
    }
    let errors = child.stderr.take().map(io::read_to_string);
    let errors = errors.and_then(Result::ok).unwrap_or_default();
    let first = [&text, &errors].into_iter().find_map(|text| {
        let mut lines = text.lines().map(str::trim);
        lines.find(|line| !line.is_empty()).map(str::to_owned)
    });
    Err(wrong(first.unwrap_or_else(|| status.to_string())))
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// Whether the library that the plugin opens is there.
fn library(line: &PluginLine) -> Result<(), String> {
    let name = line.word("library", "libumpire_lease.so");
    let is_there = if name.contains('/') {
        Path::new(name).is_file()
    } else {
        LIBRARIES
            .iter()
            .any(|folder| Path::new(folder).join(name).is_file())
    };
    if is_there {
        return Ok(());
    }
    Err(format!(
        "plugstack.conf: the library {name} is not there; library=/PATH names it"
    ))
}

fn facts(flags: &SlurmShareFlags) -> Result<Facts, UserError> {
    let node = node(flags.node.as_ref())?;
    let config = ask_slurm("scontrol", &["show", "config"], PATIENCE)?;
    let show = |words: &[&str]| {
        let words = [&["--oneliner", "show"], words].concat();
        ask_slurm("scontrol", &words, PATIENCE)
    };
    let node_text = show(&["node", &node])?;
    let partitions = show(&["partition"])?;
    let file = config_value(&config, "SLURM_CONF").unwrap_or("/etc/slurm/slurm.conf");
    let beside = |name: &str| Path::new(file).with_file_name(name);
    let plugstack = config_value(&config, "PlugStackConfig");
    let plugstack = plugstack.map_or_else(|| beside("plugstack.conf"), PathBuf::from);
    let plugstack = read(&plugstack);
    let line = plugstack
        .as_deref()
        .ok()
        .and_then(PluginLine::find)
        .unwrap_or_default();
    let plugin = fs::read(&line.file)
        .map_err(|error| error.to_string())
        .and_then(|bytes| plugin_version(&bytes));
    Ok(Facts {
        job_submit: read(&beside("job_submit.lua")),
        library: library(&line),
        share: share(flags),
        socket: socket(flags),
        has_groups: hierarchies(Path::new("/")).is_ok_and(|all| !all.is_empty()),
        node,
        config,
        node_text,
        partitions,
        plugstack,
        plugin,
    })
}

fn check_node(flags: &SlurmShareFlags) -> Result<ExitStatus, UserError> {
    let findings = check(&facts(flags)?);
    let lines = findings.iter().map(|finding| {
        let word = if finding.is_well {
            "ok     "
        } else {
            "differs"
        };
        format!("{word}  {}\n", finding.text)
    });
    print(&lines.collect::<String>())?;
    if findings.iter().all(|finding| finding.is_well) {
        Ok(ExitStatus::SUCCESS)
    } else {
        Ok(ExitStatus::BAD_INPUT)
    }
}
