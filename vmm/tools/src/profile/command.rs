//! `umpire report` and `umpire diff`.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use super::diff::{self, Compared, DiffOptions};
use super::error::ReportError;
use super::facts::{Facts, event_name, how_often};
use super::firefox::Firefox;
use super::input::{Input, Looked, ProfileChoice, RunError};
use super::packages;
use super::perf_data::{PerfData, PerfSurvey};
use super::pprof::Pprof;
use super::reader::Ending;
use super::record::{Sampling, Sink};
use super::report::{
    Percentage, Report, ReportOptions, title, write_header, write_json, write_text,
};
use super::stacks::Stacks;
use super::tally::SortKeys;
use crate::private;

/// `umpire report` to `out`, with warnings that have no place there to `notes`.
///
/// # Errors
/// The profile, the symbols or an option cannot be used, or an output cannot be
/// written to. Whoever closes `out` early has seen enough: that is no error.
pub fn report(
    options: &ReportOptions,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<(), ReportError> {
    let input = Input::open(&options.profile)?;
    if options.header_only {
        header(input, out)
    } else if let Some(path) = &options.perf_data {
        perf_data(options, path, input, notes)
    } else if let Some(path) = &options.pprof {
        pprof(options, path, input, notes)
    } else if options.folded || options.flamegraph.is_some() || options.firefox.is_some() {
        graphs(options, input, out, notes)
    } else {
        table(options, input, out, notes)
    }
}

/// `umpire diff` to `out`, with warnings to `notes`.
///
/// # Errors
/// A profile, the symbols or an option cannot be used, or `out` cannot be written to.
/// Whoever closes `out` early has seen enough: that is no error.
pub fn diff(
    options: &DiffOptions,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<(), ReportError> {
    let choice = |input: &Path| ProfileChoice {
        input: input.to_owned(),
        ..options.profile.clone()
    };
    let old = Input::open(&choice(&options.old))?;
    let new = Input::open(&choice(&options.new))?;
    let keys = SortKeys::of_diff(&old.names).or(options.sort.as_ref());
    let titles: Vec<&str> = keys.keys().iter().map(|key| title(*key)).collect();
    let looks = (&keys, options.percentage);
    let (old, old_end) = compared(old, looks, notes)?;
    let (new, new_end) = compared(new, looks, notes)?;
    let (had, has) = (old.names(), new.names());
    if !had.iter().any(|name| has.contains(name)) {
        return Err(ReportError::NothingInCommon {
            old: had.join(", "),
            new: has.join(", "),
        });
    }
    written(diff::write(
        &titles,
        (&old, &new),
        options.percent_limit,
        out,
    ))?;
    old_end.and(new_end)
}

/// One of two profiles, and whether it is damaged.
fn compared(
    input: Input,
    (keys, percentage): (&SortKeys, Percentage),
    notes: &mut dyn Write,
) -> Result<(Compared, Result<(), ReportError>), ReportError> {
    let (looked, mut reader) = input.split();
    let looks = diff::looks(keys.clone(), percentage);
    let events = looked.header.events.len();
    let mut report = Report::new(looks, &looked.filter, &looked.names, events);
    ran(&looked, looked.run(&mut reader, &mut [&mut report]))?;
    let end = tell(&looked, &looked.facts(&reader), notes);
    let name = |event| event_name(&looked.header, event);
    Ok((Compared::of(&report, name), end))
}

/// The table of `umpire report`.
fn table(
    options: &ReportOptions,
    input: Input,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<(), ReportError> {
    let (looked, mut reader) = input.split();
    let looks = options.looks(&looked);
    let events = looked.header.events.len();
    let mut report = Report::new(looks, &looked.filter, &looked.names, events);
    ran(&looked, looked.run(&mut reader, &mut [&mut report]))?;
    let facts = looked.facts(&reader);
    if options.header {
        written(write_header(&facts, out))?;
    }
    written(if options.json {
        write_json(&report, &facts, out)
    } else {
        write_text(&report, &facts, out)
    })?;
    if looked.names.has_stripped() {
        for line in packages::hints(&looked.names, &report.unnamed()) {
            let _ = writeln!(notes, "umpire: {line}");
        }
    }
    undamaged(&looked, &facts)
}

/// What the profile says of itself, and no more.
fn header(input: Input, out: &mut dyn Write) -> Result<(), ReportError> {
    let (looked, mut reader) = input.split();
    ran(&looked, looked.run(&mut reader, &mut []))?;
    let facts = looked.facts(&reader);
    written(write_header(&facts, out).and_then(|()| out.flush()))?;
    undamaged(&looked, &facts)
}

/// What `umpire report` makes instead of a table.
fn graphs(
    options: &ReportOptions,
    input: Input,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<(), ReportError> {
    let option = match (options.folded, &options.flamegraph) {
        (true, _) => "--folded",
        (false, Some(_)) => "--flamegraph",
        (false, None) => "--firefox",
    };
    let event = input.one_event(option)?;
    let (looked, mut reader) = input.split();
    let sampled = looked.header.events.get(usize::from(event));
    let sampling = sampled.map_or(Sampling::Period(1), |one| one.sampling);
    let mut stacks = Stacks::new(&looked.filter, &looked.names, options.weight);
    let mut firefox = Firefox::new(
        &looked.header,
        sampling,
        &looked.filter,
        &looked.names,
        options.weight,
    );
    let mut sinks: Vec<&mut dyn Sink> = Vec::new();
    if options.folded || options.flamegraph.is_some() {
        sinks.push(&mut stacks);
    }
    if options.firefox.is_some() {
        sinks.push(&mut firefox);
    }
    ran(&looked, looked.run(&mut reader, &mut sinks))?;
    let facts = looked.facts(&reader);
    if !stacks.total().fits(u64::MAX) {
        return Err(ReportError::TooManyEvents {
            name: looked.name.clone(),
            option,
            most: u64::MAX,
            hint: ", or give --weight samples",
        });
    }
    if options.folded {
        written(stacks.write_folded(out))?;
    }
    if let Some(path) = &options.flamegraph {
        if stacks.is_empty() {
            return Err(nothing_to_draw(&looked, event, path));
        }
        let note = below(&facts, event);
        let drawn = flamegraph(&stacks, (&looked, event), note, path)?;
        to_file(path, &options.profile.input, |file| {
            file.write_all(drawn.as_bytes())?;
            file.flush()
        })?;
    }
    if let Some(path) = &options.firefox {
        if firefox.is_empty() {
            return Err(nothing_to_draw(&looked, event, path));
        }
        to_file(path, &options.profile.input, |file| firefox.write(file))?;
    }
    let drawn = options.flamegraph.as_ref().map(|_| stacks.total());
    let rounded = [
        drawn.and_then(|total| total.rounded("a flame graph")),
        firefox.total().rounded("the Firefox Profiler"),
    ];
    for line in rounded.into_iter().flatten() {
        let _ = writeln!(notes, "umpire: {line}");
    }
    tell(&looked, &facts, notes)
}

fn nothing_to_draw(looked: &Looked, event: u16, path: &Path) -> ReportError {
    ReportError::NothingToDraw {
        name: looked.name.clone(),
        event: event_name(&looked.header, event),
        file: path.to_owned(),
    }
}

/// The picture: what is at the path stays there until all is drawn.
fn flamegraph(
    stacks: &Stacks<'_>,
    (looked, event): (&Looked, u16),
    note: String,
    path: &Path,
) -> Result<String, ReportError> {
    let name = event_name(&looked.header, event);
    if stacks.total().is_zero() {
        return Err(ReportError::NothingWeighs {
            name: looked.name.clone(),
            event: name,
            file: path.to_owned(),
        });
    }
    let title = format!("VM {}: {name}", looked.header.vm);
    let drawn = stacks.flamegraph(title, note);
    drawn.map_err(|error| ReportError::Write {
        file: path.to_owned(),
        error,
    })
}

/// The profile as a file of perf's, and the kernel's names beside it.
fn perf_data(
    options: &ReportOptions,
    path: &Path,
    input: Input,
    notes: &mut dyn Write,
) -> Result<(), ReportError> {
    let (looked, mut reader) = input.split();
    let mut survey = PerfSurvey::new(&looked.filter, &looked.names);
    ran(&looked, looked.run(&mut reader, &mut [&mut survey]))?;
    let kallsyms = private::behind(path, ".kallsyms");
    let mut reader = looked.again()?;
    let input = &options.profile.input;
    not_itself(path, input)?;
    to_file(&kallsyms, input, |out| {
        out.write_all(survey.kallsyms().as_bytes())?;
        out.flush()
    })?;
    let out = create(path, input)?;
    let failed = |error| ReportError::Write {
        file: path.to_owned(),
        error,
    };
    let mut data = PerfData::new(&survey, &looked.header, BufWriter::new(out)).map_err(failed)?;
    if options.profile.symfs.is_empty()
        && let Some((number, name)) = data.nowhere()
    {
        // Where nobody reads it there is nothing to be done.
        let _ = writeln!(
            notes,
            "umpire: perf will find no names for {number} of the guest's files, whose build ids \
             are not known, {name} for one: give --symfs DIR, the guest's root or a copy, here too"
        );
    }
    if looked.names.has_made() {
        let _ = writeln!(
            notes,
            "umpire: perf will find no names of code that programs made while they ran, which \
             umpire script has: perf reads /tmp/perf-PID.map of its own host alone"
        );
    }
    match looked.run(&mut reader, &mut [&mut data]) {
        Ok(()) => data.finish().map_err(failed)?,
        Err(RunError::Read(error)) => return Err(looked.failed(error)),
        Err(RunError::Write(error)) => return Err(failed(error)),
    }
    tell(&looked, &looked.facts(&reader), notes)
}

/// The profile as a file of pprof's.
fn pprof(
    options: &ReportOptions,
    path: &Path,
    input: Input,
    notes: &mut dyn Write,
) -> Result<(), ReportError> {
    let event = input.one_event("--pprof")?;
    let (looked, mut reader) = input.split();
    let mut pprof = Pprof::new(&looked.filter, &looked.names);
    ran(&looked, looked.run(&mut reader, &mut [&mut pprof]))?;
    if pprof.is_empty() {
        return Err(ReportError::NothingToDraw {
            name: looked.name.clone(),
            event: event_name(&looked.header, event),
            file: path.to_owned(),
        });
    }
    if !pprof.total().fits(Pprof::MOST) {
        return Err(ReportError::TooManyEvents {
            name: looked.name.clone(),
            option: "--pprof",
            most: Pprof::MOST,
            hint: "",
        });
    }
    let facts = looked.facts(&reader);
    to_file(path, &options.profile.input, |out| {
        pprof.write(&facts, event, options.weight, out)
    })?;
    tell(&looked, &facts, notes)
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
pub(super) fn ran(looked: &Looked, end: Result<(), RunError>) -> Result<bool, ReportError> {
    match end {
        Ok(()) => Ok(true),
        Err(RunError::Read(error)) => Err(looked.failed(error)),
        Err(RunError::Write(error)) => written(Err(error)).map(|()| false),
    }
}

pub(super) fn written(end: io::Result<()>) -> Result<(), ReportError> {
    match end {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(ReportError::Output(error)),
        _ => Ok(()),
    }
}

/// Warnings and losses, where the output has no place for them. Where nobody
/// reads them there is nothing to be done.
///
/// # Errors
/// That of [`undamaged`], which is not told here.
pub(super) fn tell(
    looked: &Looked,
    facts: &Facts<'_>,
    notes: &mut dyn Write,
) -> Result<(), ReportError> {
    let end = undamaged(looked, facts);
    let warnings = facts.warnings().into_iter().skip(usize::from(end.is_err()));
    for line in warnings.chain(facts.losses()) {
        let _ = writeln!(notes, "umpire: {line}");
    }
    end
}

/// # Errors
/// The profile is damaged, and was used up to there.
fn undamaged(looked: &Looked, facts: &Facts<'_>) -> Result<(), ReportError> {
    match facts.ending {
        Ending::Whole(_) | Ending::CutOff => Ok(()),
        Ending::Damaged { .. } => Err(ReportError::Damaged {
            name: looked.name.clone(),
            ending: facts.ending,
        }),
    }
}

/// Writes the file at `path`, which is not `input`.
fn to_file(
    path: &Path,
    input: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), ReportError> {
    let out = create(path, input)?;
    write(&mut BufWriter::new(out)).map_err(|error| ReportError::Write {
        file: path.to_owned(),
        error,
    })
}

/// A file at `path`, which is not `input`, in place of what is there. What was seen of a guest
/// is for this user alone, in whatever form.
fn create(path: &Path, input: &Path) -> Result<File, ReportError> {
    not_itself(path, input)?;
    private::create(path).map_err(|error| ReportError::Create {
        file: path.to_owned(),
        error,
    })
}

/// # Errors
/// `path` is `input`.
fn not_itself(path: &Path, input: &Path) -> Result<(), ReportError> {
    let place = |path| fs::canonicalize(path).ok();
    if place(path).is_some_and(|path| place(input) == Some(path)) {
        return Err(ReportError::ItselfAsOutput(path.to_owned()));
    }
    Ok(())
}
