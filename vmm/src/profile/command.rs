//! `umpire report` and `umpire script`.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use super::facts::{Facts, event_name, how_often};
use super::firefox::Firefox;
use super::input::{Input, Looked, RunError};
use super::record::Sampling;
use super::report::{Report, write_json, write_text};
use super::script::Script;
use super::sink::Sink;
use super::stacks::Stacks;
use crate::cli::{ReportFlags, ScriptFlags};
use crate::config::{ExitStatus, UserError};

/// `umpire report`.
///
/// # Errors
/// The profile, the symbols or a flag cannot be used, or an output cannot be
/// written to. Whoever closes standard output early has seen enough: that is no
/// error.
pub fn run_report(flags: &ReportFlags) -> Result<ExitStatus, UserError> {
    let mut out = BufWriter::new(io::stdout().lock());
    report(flags, &mut out, &mut io::stderr())?;
    Ok(ExitStatus::SUCCESS)
}

/// `umpire script`.
///
/// # Errors
/// As [`run_report`]'s.
pub fn run_script(flags: &ScriptFlags) -> Result<ExitStatus, UserError> {
    let mut out = BufWriter::new(io::stdout().lock());
    script(flags, &mut out, &mut io::stderr())?;
    Ok(ExitStatus::SUCCESS)
}

/// `umpire report` to `out`, with warnings that have no place there to `notes`.
///
/// # Errors
/// As [`run_report`]'s.
pub fn report(
    flags: &ReportFlags,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<(), UserError> {
    let input = Input::open(&flags.profile).map_err(UserError::bad_input)?;
    match flags.folded || flags.flamegraph.is_some() || flags.firefox.is_some() {
        true => graphs(flags, input, out, notes),
        false => table(flags, input, out),
    }
}

/// `umpire script` to `out`, with warnings to `notes`.
///
/// # Errors
/// As [`run_report`]'s.
pub fn script(
    flags: &ScriptFlags,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<(), UserError> {
    let input = Input::open(&flags.profile).map_err(UserError::bad_input)?;
    let (looked, mut reader) = input.split();
    let mut script = Script {
        header: &looked.header,
        filter: &looked.filter,
        symbols: &looked.symbols,
        fields: flags.fields.clone(),
        json: flags.json,
        out,
    };
    if !ran(&looked, looked.run(&mut reader, &mut [&mut script]))? {
        return Ok(());
    }
    written(script.out.flush())?;
    tell(&looked.facts(&reader), notes);
    Ok(())
}

/// The table of `umpire report`.
fn table(flags: &ReportFlags, input: Input, out: &mut dyn Write) -> Result<(), UserError> {
    let (looked, mut reader) = input.split();
    let mut report = Report::new(
        flags.sort.clone(),
        &looked.filter,
        &looked.symbols,
        looked.header.events.len(),
        flags.percent_limit,
    );
    ran(&looked, looked.run(&mut reader, &mut [&mut report]))?;
    let facts = looked.facts(&reader);
    written(match flags.json {
        true => write_json(&report, &facts, out),
        false => write_text(&report, &facts, out),
    })
}

/// What `umpire report` makes instead of a table.
fn graphs(
    flags: &ReportFlags,
    input: Input,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<(), UserError> {
    let option = match (flags.folded, &flags.flamegraph) {
        (true, _) => "--folded",
        (false, Some(_)) => "--flamegraph",
        (false, None) => "--firefox",
    };
    let event = input.one_event(option).map_err(UserError::bad_input)?;
    let (looked, mut reader) = input.split();
    let sampled = looked.header.events.get(usize::from(event));
    let sampling = sampled.map_or(Sampling::Period(1), |one| one.sampling);
    let mut stacks = Stacks::new(&looked.filter, &looked.symbols, flags.weight);
    let mut firefox = Firefox::new(
        &looked.header,
        sampling,
        &looked.filter,
        &looked.symbols,
        flags.weight,
    );
    let mut sinks: Vec<&mut dyn Sink> = Vec::new();
    if flags.folded || flags.flamegraph.is_some() {
        sinks.push(&mut stacks);
    }
    if flags.firefox.is_some() {
        sinks.push(&mut firefox);
    }
    ran(&looked, looked.run(&mut reader, &mut sinks))?;
    let facts = looked.facts(&reader);
    if flags.folded {
        written(stacks.write_folded(out))?;
    }
    let name = event_name(&looked.header, event);
    let nothing = |path: &Path| {
        let file = path.display();
        let text = format!(
            "{}: no sample of '{name}' is left to draw, so {file} is not written",
            looked.name
        );
        Err(UserError::bad_input(text))
    };
    if let Some(path) = &flags.flamegraph {
        if stacks.is_empty() {
            return nothing(path);
        }
        let title = format!("VM {}: {name}", looked.header.vm);
        let note = below(&facts, event);
        to_file(path, &flags.profile.input, |file| {
            stacks.write_flamegraph(title, note, file)
        })?;
    }
    if let Some(path) = &flags.firefox {
        if firefox.is_empty() {
            return nothing(path);
        }
        to_file(path, &flags.profile.input, |file| firefox.write(file))?;
    }
    tell(&facts, notes);
    Ok(())
}

/// What a flame graph says below its title.
fn below(facts: &Facts<'_>, event: u16) -> String {
    let event = facts.header.events.get(usize::from(event));
    let how = event.map_or(String::new(), |one| {
        format!("sampled {}; {}", how_often(one.sampling), one.how())
    });
    match facts.losses() {
        Some(losses) => format!("{how}; {losses}"),
        None => how,
    }
}

/// Whether a run came to its end; not if nobody reads what it writes.
fn ran(looked: &Looked, end: Result<(), RunError>) -> Result<bool, UserError> {
    match end {
        Ok(()) => Ok(true),
        Err(RunError::Read(error)) => Err(looked.failed(error)),
        Err(RunError::Write(error)) => written(Err(error)).map(|()| false),
    }
}

fn written(end: io::Result<()>) -> Result<(), UserError> {
    match end {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(UserError::unwritable(error))
        }
        _ => Ok(()),
    }
}

/// Warnings and losses, where the output has no place for them. Where nobody
/// reads them there is nothing to be done.
fn tell(facts: &Facts<'_>, notes: &mut dyn Write) {
    for line in facts.warnings().into_iter().chain(facts.losses()) {
        let _ = writeln!(notes, "umpire: {line}");
    }
}

/// Writes the file at `path`, which is not `input`.
fn to_file(
    path: &Path,
    input: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), UserError> {
    let place = |path| fs::canonicalize(path).ok();
    if place(path).is_some_and(|path| place(input) == Some(path)) {
        let text = format!(
            "{}: it is the profile itself; name another file",
            path.display()
        );
        return Err(UserError::bad_input(text));
    }
    let cannot = |error: io::Error| format!("{}: cannot be written: {error}", path.display());
    let file = File::create(path).map_err(|error| UserError::bad_input(cannot(error)))?;
    write(&mut BufWriter::new(file))
        .map_err(|error| UserError::with_status(cannot(error), ExitStatus::HOST_FAILURE))
}

#[cfg(test)]
mod tests;
