//! `umpire arbitrate`: plays a script of who wants which counter when, under one
//! scheme or all three; simulates an experiment; or replays a real run. The arbiter is the one that guests
//! get; nothing else is.

mod experiment;
mod format;
mod input;
mod json;
mod print;
mod replay;

use std::io::{self, BufWriter, Write};
use std::path::Path;

use arbiter::{PerKind, PolicyError, Scheme};
use arbiter_lab::script::{Script, Setup, Trace, play};
use thiserror::Error;

use crate::config::{PolicyTextError, parse_policy};
use crate::exit::{self, ExitStatus, UserError};
use crate::flags::ArbitrateFlags;
use input::InputError;

/// A script that was played under one scheme.
#[derive(Debug)]
struct Play {
    scheme: Scheme,
    trace: Trace,
}

/// What cannot be arbitrated.
#[derive(Debug, Error)]
enum ArbitrateError {
    #[error("--scheme: '{0}' is no scheme; give single, independent, interacting or all")]
    Scheme(String),
    #[error("--policy: {0}")]
    Policy(#[from] PolicyTextError),
    #[error("--policy: {0}")]
    Machine(#[from] PolicyError),
    #[error("--counters 0 without --fixed N: there is nothing to arbitrate")]
    NoCounters,
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(transparent)]
    Experiment(#[from] experiment::ExperimentError),
    #[error(transparent)]
    Trail(#[from] replay::TrailError),
}

/// `umpire arbitrate`.
///
/// # Errors
/// The script or a flag cannot be used, or standard output cannot be written to.
/// Whoever closes it early has seen enough: that is no error.
pub fn run(flags: &ArbitrateFlags) -> Result<ExitStatus, UserError> {
    report(flags, &mut BufWriter::new(io::stdout().lock()))?;
    Ok(ExitStatus::SUCCESS)
}

/// Plays the script and writes the report to `out`.
///
/// # Errors
/// The script or a flag cannot be used, or `out` cannot be written to. Whoever
/// closes `out` early has seen enough: that is no error.
pub fn report(flags: &ArbitrateFlags, out: &mut dyn Write) -> Result<(), UserError> {
    if let Some(path) = &flags.experiment.experiment {
        return experiment::report(flags, path, out);
    }
    if let Some(path) = &flags.experiment.replay {
        return replay::report(flags, path, out);
    }
    let (script, plays) = prepare(flags).map_err(UserError::bad_input)?;
    let written = if flags.json {
        json::write(&script, &plays, out)
    } else {
        print::write(&script, &plays, out)
    };
    exit::written(written.and_then(|()| out.flush()))
}

fn prepare(flags: &ArbitrateFlags) -> Result<(Script, Vec<Play>), ArbitrateError> {
    let schemes = schemes(&flags.scheme)?;
    let counters = PerKind {
        programmable: flags.counters,
        fixed: flags.fixed,
    };
    let mut policy = parse_policy(&flags.policy)?;
    policy.grace_ms = flags.grace;
    if counters == PerKind::default() {
        return Err(ArbitrateError::NoCounters);
    }
    policy.fits(counters.programmable, counters.fixed)?;
    // Without one the other forms of the command are meant.
    let script = input::read(flags.script.as_deref().unwrap_or(Path::new("-")))?;
    let played = |scheme| Play {
        scheme,
        trace: play(
            &script,
            &Setup {
                counters,
                policy,
                scheme,
            },
        ),
    };
    let plays = schemes.into_iter().map(played).collect();
    Ok((script, plays))
}

/// The schemes that `--scheme` names.
fn schemes(word: &str) -> Result<Vec<Scheme>, ArbitrateError> {
    match Scheme::named(word) {
        Some(scheme) => Ok(vec![scheme]),
        None if word == "all" => Ok(Scheme::ALL.to_vec()),
        None => Err(ArbitrateError::Scheme(word.to_owned())),
    }
}
