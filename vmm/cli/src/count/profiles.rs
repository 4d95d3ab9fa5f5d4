//! The files that Callgrind would have written of a run: profiles, and its log.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io::{self, BufWriter, Write};
use std::os::unix::process::parent_id;
use std::path::Path;
use std::process;

use attribution::{Contexts, Costs, Counts, PartEnd, ProfileHead, write_callgrind};
use umpire_count::number::grouped;

use super::valgrind::{ValgrindOptions, expanded};
use super::whole;
use crate::exit::UserError;

/// A process of the run, with the programs that it was, by their places.
#[derive(Debug, Default, PartialEq, Eq)]
struct OneProcess {
    /// In the guest.
    pid: u32,
    parent: u32,
    programs: Vec<usize>,
}

/// The processes that Callgrind would have counted: without `--trace-children` none that another
/// program has become. A forked one is always counted.
fn processes(counts: &Counts, trace_children: bool) -> Vec<OneProcess> {
    let mut all: Vec<OneProcess> = Vec::new();
    let mut is_traced: BTreeMap<u32, bool> = BTreeMap::new();
    for (place, program) in counts.programs.iter().enumerate() {
        let parent = is_traced.get(&program.parent).copied().unwrap_or(true);
        let known = is_traced.get(&program.pid).copied();
        // What has its number already has executed another program.
        let traced = trace_children || known.is_none() && parent;
        is_traced.insert(program.pid, traced);
        if !traced {
            continue;
        }
        match all.iter_mut().find(|one| one.pid == program.pid) {
            Some(one) => one.programs.push(place),
            None => all.push(OneProcess {
                pid: program.pid,
                parent: program.parent,
                programs: vec![place],
            }),
        }
    }
    all
}

/// What a file of the profile has: some parts of programs, by their places.
#[derive(Debug, PartialEq, Eq)]
struct OneDump {
    parts: BTreeSet<usize>,
    /// From 1 on, and what is behind the file's name.
    number: usize,
    suffix: String,
    trigger: String,
}

/// The dumps that some programs asked for, and the one at their end.
fn dumps(contexts: &Contexts, programs: &BTreeSet<usize>) -> Vec<OneDump> {
    let mut all = Vec::new();
    let mut last = BTreeSet::new();
    let parts = contexts.parts.iter().enumerate();
    for (place, part) in parts.filter(|(_, part)| programs.contains(&part.program)) {
        match &part.end {
            PartEnd::Program => {
                last.insert(place);
            }
            PartEnd::Dropped => {}
            PartEnd::Dumped(name) => {
                let number = all.len() + 1;
                all.push(OneDump {
                    parts: BTreeSet::from([place]),
                    number,
                    suffix: format!(".{number}"),
                    trigger: format!("Client Request: {name}"),
                });
            }
        }
    }
    all.push(OneDump {
        parts: last,
        number: all.len() + 1,
        suffix: String::new(),
        trigger: "Program termination".to_owned(),
    });
    all
}

/// Writes the files of a run of the command line `title`.
pub(super) fn write(
    options: &ValgrindOptions,
    counts: &Counts,
    title: &str,
) -> Result<(), UserError> {
    let none = Contexts::default();
    let contexts = counts.contexts.as_ref().unwrap_or(&none);
    let all = processes(counts, options.trace_children);
    let first = all.first().map_or(0, |one| one.pid);
    // Who has started this process knows the first one by its number.
    let number = |pid: u32| process::id().wrapping_add(pid.wrapping_sub(first));
    // Processes whose files have one name are one, as whose name does not depend on them.
    let mut files: BTreeMap<(OsString, Option<OsString>), Vec<&OneProcess>> = BTreeMap::new();
    for one in &all {
        let pid = number(one.pid);
        let log = options.log.as_ref();
        let log = log.map(|pattern| expanded(pattern, pid)).transpose()?;
        let names = (expanded(&options.profile, pid)?, log);
        files.entry(names).or_default().push(one);
    }
    for ((profile, log), together) in &files {
        let Some(one) = together.first() else {
            continue;
        };
        let programs = together.iter().flat_map(|one| one.programs.iter().copied());
        let programs: BTreeSet<usize> = programs.collect();
        // It is the last program that it was; of the first one the arguments are known.
        let command = match programs.last() {
            Some(0) | None => title,
            Some(program) => &counts.programs[*program].name,
        };
        let told = Told {
            options,
            pid: number(one.pid),
            parent: if one.pid == first {
                parent_id()
            } else {
                number(one.parent)
            },
            command,
        };
        let dumps = dumps(contexts, &programs);
        for dump in &dumps {
            profiles(&told, counts, (&programs, dump), profile)?;
        }
        let all = dumps.iter().flat_map(|dump| dump.parts.iter().copied());
        let all: BTreeSet<usize> = all.collect();
        let total = Costs::of_chosen(counts, |root| all.contains(&root.part)).total();
        told.log(log.as_deref(), total)?;
    }
    Ok(())
}

/// Writes a dump: a file, or one for each thread of these programs.
fn profiles(
    told: &Told<'_>,
    counts: &Counts,
    (programs, dump): (&BTreeSet<usize>, &OneDump),
    name: &OsStr,
) -> Result<(), UserError> {
    let none = Contexts::default();
    let contexts = counts.contexts.as_ref().unwrap_or(&none);
    let put = |thread: Option<(usize, u32)>| {
        let costs = Costs::of_chosen(counts, |root| {
            let is_of = |(_, tid): (usize, u32)| {
                let program = contexts.parts.get(root.part).map(|part| part.program);
                let program = program.and_then(|program| counts.programs.get(program));
                let found = program.and_then(|program| program.threads.get(root.thread));
                found.is_some_and(|found| found.tid == tid)
            };
            dump.parts.contains(&root.part) && thread.is_none_or(is_of)
        });
        let mut file = name.to_owned();
        file.push(&dump.suffix);
        if let Some((thread, _)) = thread {
            file.push(format!("-{thread:02}"));
        }
        let head = ProfileHead {
            pid: told.pid,
            command: told.command,
            part: dump.number,
            thread: thread.map(|(thread, _)| thread),
            trigger: &dump.trigger,
            plain_names: told.options.plain_names,
        };
        whole::write("--callgrind-out-file", Path::new(&file), |file| {
            let mut out = BufWriter::new(file);
            write_callgrind(counts, &costs, &head, &mut out)?;
            out.flush()
        })
    };
    if !told.options.separate_threads {
        return put(None);
    }
    let threads = programs
        .iter()
        .flat_map(|program| &counts.programs[*program].threads);
    let mut known = BTreeSet::new();
    let threads = threads.filter(|thread| known.insert(thread.tid));
    for (number, thread) in (1..).zip(threads) {
        put(Some((number, thread.tid)))?;
    }
    Ok(())
}

/// Of whom files tell.
struct Told<'a> {
    options: &'a ValgrindOptions,
    pid: u32,
    parent: u32,
    command: &'a str,
}

impl Told<'_> {
    /// Writes the log: to a file, or to standard error.
    fn log(&self, name: Option<&OsStr>, total: u64) -> Result<(), UserError> {
        match name {
            Some(name) => whole::write("--log-file", Path::new(name), |file| {
                file.write_all(self.lines(total).as_bytes())
            }),
            None if self.options.quiet => Ok(()),
            // Whoever has closed it does not want to know.
            None => {
                let _ = io::stderr().write_all(self.lines(total).as_bytes());
                Ok(())
            }
        }
    }

    fn lines(&self, total: u64) -> String {
        let version = env!("CARGO_PKG_VERSION");
        let mut lines = vec![
            format!("Callgrind's options and files, by umpire count {version}: it is not Valgrind"),
            format!("Command: {}", self.command),
            format!("Parent PID: {}", self.parent),
            String::new(),
        ];
        for note in &self.options.notes {
            lines.extend([note.clone(), String::new()]);
        }
        lines.extend([
            "Events    : Ir".to_owned(),
            format!("Collected : {total}"),
            String::new(),
            format!("I   refs:      {}", grouped(total)),
        ]);
        let pid = self.pid;
        let lines = lines.iter().map(|line| format!("=={pid}== {line}\n"));
        lines.collect()
    }
}

#[cfg(test)]
mod tests {
    use attribution::{Part, Program};

    use super::*;

    fn program(pid: u32, parent: u32) -> Program {
        Program {
            pid,
            parent,
            ..Program::default()
        }
    }

    #[test]
    fn processes_are_those_of_callgrind() {
        let counts = Counts {
            programs: vec![
                program(10, 1),
                // Forked, and another program then, which forks.
                program(11, 10),
                program(11, 10),
                program(12, 11),
                // Forked only.
                program(13, 10),
            ],
            ..Counts::default()
        };
        let seen = |trace| {
            let all = processes(&counts, trace);
            let all = all.into_iter().map(|one| (one.pid, one.programs));
            all.collect::<Vec<_>>()
        };
        let expected = [
            (10, vec![0]),
            (11, vec![1, 2]),
            (12, vec![3]),
            (13, vec![4]),
        ];
        assert_eq!(seen(true), expected);
        assert_eq!(seen(false), [(10, vec![0]), (11, vec![1]), (13, vec![4])]);
    }

    #[test]
    fn dumps_are_parts_and_what_was_dropped_is_none() {
        let part = |program, end| Part { program, end };
        let contexts = Contexts {
            parts: vec![
                part(0, PartEnd::Dropped),
                part(1, PartEnd::Program),
                part(0, PartEnd::Dumped("x".to_owned())),
                part(0, PartEnd::Program),
            ],
            ..Contexts::default()
        };
        let all = dumps(&contexts, &BTreeSet::from([0]));
        let expected = [
            (BTreeSet::from([2]), 1, ".1", "Client Request: x"),
            (BTreeSet::from([3]), 2, "", "Program termination"),
        ];
        let expected = expected.map(|(parts, number, suffix, trigger)| OneDump {
            parts,
            number,
            suffix: suffix.to_owned(),
            trigger: trigger.to_owned(),
        });
        assert_eq!(all, expected);
    }
}
