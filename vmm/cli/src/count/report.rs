//! What is printed and kept of a run, and whether it passes the gate.

use std::fs::{self, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use attribution::{Costs, Counts, ProfileHead, Region};
use umpire_count::compare::{Comparison, Gate, Threshold};
use umpire_count::{Chosen, Outcome, Record, json, markdown, table};

use super::ended::{Ended, Who, failed, with_advice};
use super::valgrind::ValgrindOptions;
use super::{perf_data, profiles, whole};
use crate::exit::{UserError, complain, written};
use crate::flags::CountFlags;

/// Larger than any record; a file that is named by mistake is not read whole.
const LARGEST: u64 = 256 << 20;

/// What is to be made of a run.
#[derive(Debug)]
pub(super) struct RunReport<'a> {
    flags: &'a CountFlags,
    /// Whose files are to be written, too.
    as_tool: Option<&'a ValgrindOptions>,
    /// The events that were asked for; none: those that suit.
    events: Vec<Chosen>,
    /// The run to compare with, and its file.
    before: Option<(PathBuf, Record)>,
}

impl<'a> RunReport<'a> {
    /// As the options say.
    pub(super) fn of(
        flags: &'a CountFlags,
        as_tool: Option<&'a ValgrindOptions>,
    ) -> Result<Self, UserError> {
        let events = match &flags.events[..] {
            [] => Vec::new(),
            lists => Chosen::list(&lists.join(",")).map_err(failed)?,
        };
        for (name, path) in [
            ("--save", &flags.gate.save),
            ("--callgrind", &flags.callgrind),
            ("--folded", &flags.folded),
            ("--perf-data", &flags.perf_data),
        ] {
            if let Some(path) = path {
                whole::may_write(name, path)?;
            }
        }
        if let Some(options) = as_tool {
            options.may_write()?;
        }
        for (name, path) in [
            ("-o", &flags.out.output),
            ("--summary", &flags.gate.summary),
            ("--status-file", &flags.out.status_file),
        ] {
            let Some(path) = path else { continue };
            // Of who ended an earlier run nothing may be left; the others keep what is there
            // until there is something to write.
            let is_status = name == "--status-file";
            let mut options = OpenOptions::new();
            let options = if is_status {
                options.write(true).truncate(true)
            } else {
                options.append(true)
            };
            let opened = options.create(true).open(path);
            opened.map_err(|error| failed(format!("{name} {}: {error}", path.display())))?;
        }
        if let Some(folder) = &flags.guest.out {
            let made = fs::create_dir_all(folder);
            made.map_err(|error| failed(format!("--out {}: {error}", folder.display())))?;
        }
        let before = flags.gate.compare.as_deref();
        let before = before.map(|path| Ok::<_, UserError>((path.to_owned(), read(path)?)));
        Ok(RunReport {
            flags,
            as_tool,
            events,
            before: before.transpose()?,
        })
    }

    /// Prints and keeps the run: how the command ends.
    pub(super) fn finish(
        &self,
        record: &Record,
        title: &str,
        elapsed: Option<Duration>,
    ) -> Result<Ended, UserError> {
        let comparison = self.before.as_ref().map(|(path, before)| {
            let events = match &self.events[..] {
                [] => &Gate::DEFAULT,
                events => events,
            };
            let gate = Gate {
                events,
                threshold: Some(self.flags.gate.threshold.unwrap_or(Threshold::NONE)),
                kernel: self.flags.gate.gate_kernel,
                regions_alone: self.flags.gate.gate_regions,
            };
            let name = path.display().to_string();
            (name, Comparison::of(before, record, &gate))
        });
        let comparison = comparison.as_ref().map(|(name, one)| (name.as_str(), one));
        let added = |region: &Region| region.more > 0 || region.is_rest;
        if self.as_tool.is_none() && record.counts.regions.iter().any(added) {
            complain(
                &"more regions than there is room for (4,096): from there on those of one name are \
                 added up, and others are one, '(the rest)', that is not in the gate",
            );
        }
        self.print(record, title, elapsed, comparison)?;
        self.keep(record, title, comparison)?;
        let ended = match record.outcome {
            Outcome::Exited(status) => Ended::by_program(status),
            Outcome::Signalled(_) => Ended {
                who: Who::Signal,
                status: record.outcome.status(),
            },
        };
        match comparison {
            // A gate that holds nothing would let everything pass.
            Some((name, one)) if !one.judges() && ended == Ended::by_program(0) => {
                Err(failed(if self.flags.gate.gate_regions {
                    format!("--gate-regions: this run and {name} have no region of one name")
                } else {
                    "-e has the kernel's counts alone, which --gate-kernel puts into the gate"
                        .to_owned()
                }))
            }
            // Of a program that failed the counts mean little.
            Some((name, one)) if one.fails() && ended == Ended::by_program(0) => {
                complain(&format_args!("against {name}: {}", one.failure()));
                Ok(Ended::by(Who::Gate))
            }
            _ => Ok(ended),
        }
    }

    /// Writes the files that the options name, but for that of `-o`.
    fn keep(
        &self,
        record: &Record,
        title: &str,
        comparison: Option<(&str, &Comparison<'_>)>,
    ) -> Result<(), UserError> {
        if let Some(path) = &self.flags.gate.save {
            self.save(path, record)?;
        }
        self.write_profiles(&record.counts, title)?;
        if let Some(path) = &self.flags.gate.summary {
            let text = markdown::summary(record, title, self.shown(), comparison);
            let file = OpenOptions::new().append(true).create(true).open(path);
            file.and_then(|mut file| file.write_all(text.as_bytes()))
                .map_err(|error| {
                    failed(format!(
                        "--summary {}: {}",
                        path.display(),
                        with_advice(&error)
                    ))
                })?;
        }
        Ok(())
    }

    /// The files for other tools.
    fn write_profiles(&self, counts: &Counts, title: &str) -> Result<(), UserError> {
        if let Some(path) = &self.flags.callgrind {
            let costs = Costs::of_all(counts);
            let head = ProfileHead {
                pid: counts
                    .programs
                    .first()
                    .map_or(0, |program| program.pid.into()),
                command: title,
                part: 1,
                trigger: "Program termination",
                ..ProfileHead::default()
            };
            buffered("--callgrind", path, |out| {
                attribution::write_callgrind(counts, &costs, &head, out)
            })?;
        }
        if let Some(options) = self.as_tool {
            profiles::write(options, counts, title)?;
        }
        let lost = counts.contexts.as_ref().map(|all| all.lost_drops);
        if let Some(lost @ 1..) = lost {
            complain(&format_args!(
                "chains of calls have what CALLGRIND_ZERO_STATS was to drop: the program did so \
                 {lost} times after there was no room for more"
            ));
        }
        if let Some(path) = &self.flags.folded {
            buffered("--folded", path, |out| {
                attribution::write_folded(counts, out)
            })?;
        }
        if let Some(path) = &self.flags.perf_data {
            whole::write("--perf-data", path, |file| {
                perf_data::write(counts, title, file)
            })?;
        }
        Ok(())
    }

    /// Who called whom is kept for the process that compares runs alone: it may be much.
    fn save(&self, path: &Path, record: &Record) -> Result<(), UserError> {
        let text = if self.flags.keep_contexts || record.counts.contexts.is_none() {
            record.to_json()
        } else {
            let mut less = record.clone();
            less.counts.contexts = None;
            less.to_json()
        };
        whole::write("--save", path, |file| file.write_all(text.as_bytes()))
    }

    fn shown(&self) -> &[Chosen] {
        match &self.events[..] {
            [] => &Chosen::DEFAULT,
            events => events,
        }
    }

    fn print(
        &self,
        record: &Record,
        title: &str,
        elapsed: Option<Duration>,
        comparison: Option<(&str, &Comparison<'_>)>,
    ) -> Result<(), UserError> {
        let path = self.flags.out.output.as_deref();
        if path.is_none() && self.as_tool.is_some() {
            // That tool prints none, and whoever has started it may read what it prints.
            return Ok(());
        }
        // Written at once: harnesses run programs beside each other.
        let mut text = Vec::new();
        let written = self.write(record, title, elapsed, comparison, &mut text);
        let put = || match path {
            None => io::stderr().write_all(&text),
            Some(path) => {
                if let Some(mut open) = whole::open_already(path)? {
                    return open.write_all(&text);
                }
                let append = self.flags.out.append;
                let mut options = OpenOptions::new();
                let options = options.create(true).write(true).append(append);
                options.truncate(!append).open(path)?.write_all(&text)
            }
        };
        written
            .and_then(|()| put())
            .map_err(|error| unwritten(path, &error))
    }

    fn write(
        &self,
        record: &Record,
        title: &str,
        elapsed: Option<Duration>,
        comparison: Option<(&str, &Comparison<'_>)>,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let CountFlags {
            per_program,
            syscalls,
            ..
        } = *self.flags;
        let events = self.shown();
        if self.flags.out.json {
            let wanted = json::Wanted {
                title,
                events,
                per_program,
                syscalls,
            };
            json::write(record, &wanted, out)?;
            return match comparison {
                Some((_, one)) => json::write_comparison(one, out),
                None => Ok(()),
            };
        }
        let shown = table::Shown {
            title,
            events,
            per_program,
            syscalls,
            elapsed: elapsed.map(|time| time.as_secs_f64()),
        };
        table::write(record, &shown, out)?;
        match comparison {
            Some((name, one)) => one.write(name, out),
            None => Ok(()),
        }
    }
}

fn buffered(
    option: &str,
    path: &Path,
    content: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), UserError> {
    whole::write(option, path, |file| {
        let mut out = BufWriter::new(file);
        content(&mut out)?;
        out.flush()
    })
}

fn unwritten(path: Option<&Path>, error: &io::Error) -> UserError {
    match path {
        Some(path) => failed(format!("-o {}: {}", path.display(), with_advice(error))),
        None => failed(format!("cannot write to standard error: {error}")),
    }
}

/// The record in a file.
pub(super) fn read(path: &Path) -> Result<Record, UserError> {
    let shown = path.display();
    let unreadable = |error: &dyn std::fmt::Display| failed(format!("{shown}: {error}"));
    let length = fs::metadata(path)
        .map_err(|error| unreadable(&error))?
        .len();
    if length > LARGEST {
        return Err(unreadable(
            &"it is no file of umpire count --save, which are smaller",
        ));
    }
    let bytes = fs::read(path).map_err(|error| unreadable(&error))?;
    Record::parse(&bytes).map_err(|error| unreadable(&error))
}

/// `umpire count diff`.
pub(super) fn diff(before: &Path, now: &Path, as_json: bool) -> Result<(), UserError> {
    let name = before.display().to_string();
    let records = [read(before)?, read(now)?];
    let gate = Gate {
        events: &Gate::DEFAULT,
        threshold: None,
        kernel: false,
        regions_alone: false,
    };
    let comparison = Comparison::of(&records[0], &records[1], &gate);
    let mut out = BufWriter::new(io::stdout().lock());
    let done = if as_json {
        json::write_comparison(&comparison, &mut out)
    } else {
        comparison.write(&name, &mut out)
    };
    let lacking = [before, now].into_iter().zip(&records);
    for (path, _) in lacking.filter(|(_, record)| record.counts.functions.is_none()) {
        complain(&format_args!(
            "{} has no functions: it was saved without --functions",
            path.display()
        ));
    }
    written(done.and_then(|()| out.flush())).map_err(failed)
}
