//! `umpire arbitrate --experiment`: reads the experiment, simulates it, and reports.

mod file;
mod html;
mod plot;
mod rows;

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use arbiter_lab::{Seeds, sweep};
use thiserror::Error;

use super::ArbitrateError;
use crate::exit::{self, UserError};
use crate::flags::ArbitrateFlags;
use file::Experiment;
pub(super) use file::ExperimentError;
use rows::Report;

/// A file that a report cannot be written to.
#[derive(Debug, Error)]
#[error("{flag}: cannot write {}: {cause}", path.display())]
struct OutputError {
    flag: &'static str,
    path: PathBuf,
    cause: io::Error,
}

/// Simulates the experiment in the file at `path`, and writes its figures to `out` and
/// to the files that the flags name.
pub(super) fn report(
    flags: &ArbitrateFlags,
    path: &Path,
    out: &mut dyn Write,
) -> Result<(), UserError> {
    let experiment = read(flags, path).map_err(UserError::bad_input)?;
    // Whoever waits for an hour must not hear only then that a file cannot be written.
    let csv = create("--csv", flags.experiment.csv.as_deref())?;
    let html = create("--html", flags.experiment.html.as_deref())?;
    let report = simulate(&experiment, flags.experiment.threads);
    fill("--csv", csv, |file| rows::csv(&report, file))?;
    fill("--html", html, |file| {
        html::write(&experiment, &report, file)
    })?;
    let written = if flags.json {
        rows::json(&report, out)
    } else {
        rows::table(&experiment, &report, out)
    };
    exit::written(written.and_then(|()| out.flush()))
}

fn read(flags: &ArbitrateFlags, path: &Path) -> Result<Experiment, ArbitrateError> {
    let mut experiment = Experiment::read(path)?;
    if flags.scheme != "all" {
        experiment.schemes = super::schemes(&flags.scheme)?;
    }
    let given = &flags.experiment;
    experiment.machine.vcpus = given.vcpus.unwrap_or(experiment.machine.vcpus);
    experiment.machine.cores = given.cores.unwrap_or(experiment.machine.cores);
    if let Some(seeds) = given.seeds.and_then(NonZero::new) {
        experiment.seeds = seeds;
    }
    Ok(experiment)
}

type Output<'a> = Option<(&'a Path, File)>;

fn create<'a>(flag: &'static str, path: Option<&'a Path>) -> Result<Output<'a>, UserError> {
    let Some(path) = path else { return Ok(None) };
    let made = File::create(path).map_err(|cause| {
        let path = path.to_owned();
        UserError::bad_input(OutputError { flag, path, cause })
    });
    Ok(Some((path, made?)))
}

fn fill(
    flag: &'static str,
    output: Output<'_>,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), UserError> {
    let Some((path, file)) = output else {
        return Ok(());
    };
    let mut file = BufWriter::new(file);
    let written = write(&mut file).and_then(|()| file.flush());
    written.map_err(|cause| {
        let path = path.to_owned();
        let error = OutputError { flag, path, cause };
        UserError::with_status(error, exit::ExitStatus::HOST_FAILURE)
    })
}

fn simulate(experiment: &Experiment, threads: Option<u16>) -> Report {
    let one = NonZero::<usize>::MIN;
    let threads = threads.and_then(|threads| NonZero::new(threads.into()));
    let threads = threads.unwrap_or(std::thread::available_parallelism().unwrap_or(one));
    let variants = experiment.variants();
    let runs = variants.len() * experiment.seeds.get() as usize;
    let threads = threads.min(NonZero::new(runs).unwrap_or(one));
    let start = Instant::now();
    let told = Mutex::new(start);
    let progress = |what: &str, share: f64| {
        const EVERY: Duration = Duration::from_secs(2);
        let Ok(mut told) = told.lock() else { return };
        if told.elapsed() >= EVERY {
            *told = Instant::now();
            let (percent, elapsed) = (share * 100.0, start.elapsed().as_secs());
            eprintln!("umpire: {percent:.0} % {what}, {elapsed} s");
        }
    };
    let cells = sweep(
        (&experiment.machine, &experiment.workload),
        &variants,
        Seeds {
            first: experiment.first_seed,
            count: experiment.seeds,
        },
        threads,
        &|share| progress("simulated", share),
    );
    Report {
        cells,
        guesses: rows::guesses(experiment, &|share| {
            progress("of the cookies guessed", share);
        }),
        elapsed: start.elapsed(),
        threads,
        has_fixed: experiment.machine.fixed > 0,
    }
}
