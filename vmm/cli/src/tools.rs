//! `umpire stat`, `track`, `record`, `top`, `ls`, `pcr`, `budget`, `report` and `script`: from
//! their flags to the tools.

use std::fs;
use std::io::{self, BufWriter};
use std::path::Path;

use umpire_tools::budget::{BudgetChange, BudgetOptions};
use umpire_tools::duration::Span;
use umpire_tools::lifecycle;
use umpire_tools::ls::LsOptions;
use umpire_tools::pcr::{PcrAct, PcrOptions, Presented};
use umpire_tools::profile::{
    self, AnnotateOptions, DiffOptions, ReportError, ReportOptions, ScriptOptions,
};
use umpire_tools::record::RecordOptions;
use umpire_tools::stat::StatOptions;
use umpire_tools::stat::track::TrackOptions;
use umpire_tools::top::TopOptions;
use umpire_tools::{Completion, ToolError};
use vmm::config::BudgetChoice;

use crate::config::{SettingError, parse_policy_changes};
use crate::exit::{ExitStatus, UserError};
use crate::flags::{BudgetFlags, LifecycleFlags, LsFlags, PcrCommand, PcrFlags};

/// `umpire stat`.
///
/// # Errors
/// There is no VM, no such event, vCPU or core, or counts cannot be written where they go.
pub fn stat(options: &StatOptions) -> Result<ExitStatus, UserError> {
    Ok(status(umpire_tools::stat::run(options)?))
}

/// `umpire track`.
///
/// # Errors
/// There is no VM, no such event or vCPU, or the lines cannot be written.
pub fn track(options: &TrackOptions) -> Result<ExitStatus, UserError> {
    Ok(status(umpire_tools::stat::track::run(options)?))
}

/// `umpire record`.
///
/// # Errors
/// There is no VM, no such event, vCPU or core, the VM refuses, or the file
/// cannot be written.
pub fn record(options: &RecordOptions) -> Result<ExitStatus, UserError> {
    Ok(status(umpire_tools::record::run(options)?))
}

/// `umpire pause` and `umpire resume`.
///
/// # Errors
/// There is no VM, or it refuses.
pub fn pause(flags: &LifecycleFlags, paused: bool) -> Result<ExitStatus, UserError> {
    lifecycle::pause(&flags.into(), paused, &mut io::stderr())?;
    Ok(ExitStatus::SUCCESS)
}

/// `umpire stop`.
///
/// # Errors
/// There is no VM, or it does not end.
pub fn stop(flags: &LifecycleFlags) -> Result<ExitStatus, UserError> {
    lifecycle::stop(&flags.into(), &mut io::stderr())?;
    Ok(ExitStatus::SUCCESS)
}

/// `umpire top`.
///
/// # Errors
/// There is no VM, no such event, none can be looked at, there is no terminal, or standard
/// output cannot be written to.
pub fn top(options: &TopOptions) -> Result<ExitStatus, UserError> {
    let mut out = BufWriter::new(io::stdout());
    let ending = umpire_tools::top::run(options, &mut out, &mut io::stderr())?;
    Ok(status(ending))
}

/// `umpire ls`.
///
/// # Errors
/// A socket that was named does not answer, or standard output cannot be written
/// to.
pub fn ls(flags: &LsFlags) -> Result<ExitStatus, UserError> {
    let mut sockets = flags.sockets.clone();
    if flags.vm.control.is_some() || flags.vm.vm.is_some() {
        sockets.insert(0, flags.vm.socket()?);
    }
    let options = LsOptions {
        sockets,
        json: flags.json,
    };
    let mut out = BufWriter::new(io::stdout().lock());
    umpire_tools::ls::run(&options, &mut out, &mut io::stderr())?;
    Ok(ExitStatus::SUCCESS)
}

/// `umpire pcr`.
///
/// # Errors
/// There is no VM or vCPU, the VM refuses, or standard output cannot be written to.
pub fn pcr(flags: &PcrFlags) -> Result<ExitStatus, UserError> {
    let act = match &flags.act {
        None => PcrAct::Show,
        Some(PcrCommand::Revoke { counter, grace }) => PcrAct::Revoke {
            counter: counter.to_uppercase(),
            grace_ms: *grace,
        },
        Some(PcrCommand::Read { counter, cookie }) => PcrAct::Read {
            counter: counter.to_uppercase(),
            cookie: cookie
                .as_deref()
                .map(cookie_in)
                .transpose()?
                .unwrap_or_default(),
        },
        Some(PcrCommand::Bar { layer }) => PcrAct::Bar {
            layer: layer.clone(),
        },
        Some(PcrCommand::Unbar { layer }) => PcrAct::Unbar {
            layer: layer.clone(),
        },
        Some(PcrCommand::Policy { shares }) => PcrAct::Policy {
            shares: parse_policy_changes(shares).map_err(UserError::bad_input)?,
        },
        Some(PcrCommand::Scheme { scheme }) => PcrAct::Scheme {
            scheme: scheme.clone(),
        },
    };
    let options = PcrOptions {
        vm: flags.vm.clone(),
        vcpus: flags.vcpu.clone(),
        json: flags.json,
        act,
    };
    let mut out = BufWriter::new(io::stdout().lock());
    umpire_tools::pcr::run(&options, &mut out, &mut io::stderr())?;
    Ok(ExitStatus::SUCCESS)
}

/// The cookie in a file. What the file has instead is not shown: it may be a cookie.
fn cookie_in(path: &Path) -> Result<Presented, UserError> {
    let text = fs::read_to_string(path)
        .map_err(|error| UserError::bad_input(format!("--cookie {}: {error}", path.display())))?;
    let text = text.trim();
    let digits = text.strip_prefix("0x").unwrap_or(text);
    let plain = digits.chars().all(|digit| digit.is_ascii_hexdigit());
    let cookie = u64::from_str_radix(digits, 16)
        .ok()
        .filter(|cookie| plain && cookie >> 48 == 0);
    cookie.map(Presented).ok_or_else(|| {
        let what = "the file has no cookie: a hexadecimal number of 48 bits";
        UserError::bad_input(format!("--cookie {}: {what}", path.display()))
    })
}

/// `umpire budget`.
///
/// # Errors
/// The words make no sense, there is no VM, it refuses, or standard output cannot be
/// written to.
pub fn budget(flags: &BudgetFlags) -> Result<ExitStatus, UserError> {
    let change = |words: &String| {
        let choice = BudgetChoice::parse(words, false).ok_or_else(|| SettingError::Choice {
            value: words.clone(),
            allowed: BudgetChoice::ALLOWED,
        });
        let choice = choice.map_err(UserError::bad_input)?;
        let ms = |span: Span| u64::try_from(span.0.as_millis()).unwrap_or(u64::MAX);
        Ok::<_, UserError>(BudgetChange {
            programmable: choice.programmable,
            fixed: choice.fixed,
            grace_ms: flags.grace,
            for_ms: flags.duration.map(ms),
        })
    };
    let options = BudgetOptions {
        vm: flags.vm.clone(),
        json: flags.json,
        change: flags.budget.as_ref().map(change).transpose()?,
    };
    let mut out = BufWriter::new(io::stdout().lock());
    umpire_tools::budget::run(&options, &mut out)?;
    Ok(ExitStatus::SUCCESS)
}

/// `umpire report`.
///
/// # Errors
/// The profile, the symbols or a flag cannot be used, or an output cannot be
/// written to. Whoever closes standard output early has seen enough: that is no
/// error.
pub fn report(options: &ReportOptions) -> Result<ExitStatus, UserError> {
    let mut out = BufWriter::new(io::stdout().lock());
    profile::report(options, &mut out, &mut io::stderr())?;
    Ok(ExitStatus::SUCCESS)
}

/// `umpire annotate`.
///
/// # Errors
/// The profile, a file or a flag cannot be used, no code is known, or standard output cannot be
/// written to. Whoever closes it early has seen enough: that is no error.
pub fn annotate(options: &AnnotateOptions) -> Result<ExitStatus, UserError> {
    let mut out = BufWriter::new(io::stdout().lock());
    profile::annotate(options, &mut out, &mut io::stderr())?;
    Ok(ExitStatus::SUCCESS)
}

/// `umpire diff`.
///
/// # Errors
/// A profile, the symbols or a flag cannot be used, or standard output cannot be written to.
pub fn diff(options: &DiffOptions) -> Result<ExitStatus, UserError> {
    let mut out = BufWriter::new(io::stdout().lock());
    profile::diff(options, &mut out, &mut io::stderr())?;
    Ok(ExitStatus::SUCCESS)
}

/// `umpire script`.
///
/// # Errors
/// The profile, the symbols or a flag cannot be used, or standard output cannot
/// be written to. Whoever closes it early has seen enough: that is no error.
pub fn script(options: &ScriptOptions) -> Result<ExitStatus, UserError> {
    let mut out = BufWriter::new(io::stdout().lock());
    profile::script(options, &mut out, &mut io::stderr())?;
    Ok(ExitStatus::SUCCESS)
}

fn status(ending: Completion) -> ExitStatus {
    match ending {
        Completion::Complete => ExitStatus::SUCCESS,
        Completion::CutShort => ExitStatus::INTERRUPTED,
        Completion::Command(status) => ExitStatus::of_command(status),
    }
}

impl From<ToolError> for UserError {
    fn from(error: ToolError) -> Self {
        let status = match &error {
            ToolError::Host { .. } | ToolError::Output(_) | ToolError::Counts(_) => {
                ExitStatus::HOST_FAILURE
            }
            _ => ExitStatus::BAD_INPUT,
        };
        Self::with_status(error, status)
    }
}

impl From<ReportError> for UserError {
    fn from(error: ReportError) -> Self {
        let status = match &error {
            ReportError::Write { .. } | ReportError::Unreadable { .. } | ReportError::Output(_) => {
                ExitStatus::HOST_FAILURE
            }
            _ => ExitStatus::BAD_INPUT,
        };
        Self::with_status(error, status)
    }
}
