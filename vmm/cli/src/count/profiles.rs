//! The files that Callgrind would have written of a run: profiles, and its log.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io::{self, BufWriter, Write};
use std::os::unix::process::parent_id;
use std::path::Path;
use std::process;

use attribution::{ContextCosts, Contexts, Costs, Counts, PartEnd, ProfileHead, write_callgrind};
use umpire_count::number::grouped;

use super::ended::failed;
use super::valgrind::{LOG, PROFILE, ValgrindOptions, expanded};
use super::whole;
use crate::exit::UserError;

/// Numbers that Linux has for processes at most (`PID_MAX_LIMIT`).
const PIDS: u64 = 1 << 22;

/// A process of the run, with the programs that it was, by their places.
#[derive(Debug, Default, PartialEq, Eq)]
struct OneProcess {
    /// In the guest.
    pid: u32,
    parent: u32,
    programs: Vec<usize>,
}

/// The processes that Callgrind would have written files of: without `--trace-children` none that
/// has executed another program. A forked one is always counted.
fn processes(counts: &Counts, trace_children: bool) -> Vec<OneProcess> {
    let mut all: Vec<OneProcess> = Vec::new();
    // Whether it is counted, and its place in `all`.
    let mut known: BTreeMap<u32, (bool, usize)> = BTreeMap::new();
    let mut gone = BTreeSet::new();
    for (place, program) in counts.programs.iter().enumerate() {
        let parent = known
            .get(&program.parent)
            .is_none_or(|(counted, _)| *counted);
        let before = known.get(&program.pid).copied();
        // What has its number already has executed another program.
        let counted = trace_children || before.is_none() && parent;
        let at = before.map_or(all.len(), |(_, at)| at);
        known.insert(program.pid, (counted, at));
        if !counted {
            // Its counts went with the program that it was.
            if before.is_some_and(|(before, _)| before) {
                gone.insert(program.pid);
            }
            continue;
        }
        match all.get_mut(at) {
            Some(one) => one.programs.push(place),
            None => all.push(OneProcess {
                pid: program.pid,
                parent: program.parent,
                programs: vec![place],
            }),
        }
    }
    all.retain(|one| !gone.contains(&one.pid));
    all
}

/// What a file of the profile has: some parts of programs, by their places.
#[derive(Debug, PartialEq, Eq)]
struct OneDump {
    parts: Vec<usize>,
    /// From 1 on, and what is behind the file's name.
    number: usize,
    suffix: String,
    trigger: String,
}

/// The dumps that programs asked for in these parts, and the one at their end.
fn dumps(contexts: &Contexts, parts: impl Iterator<Item = usize>) -> Vec<OneDump> {
    let mut all = Vec::new();
    let mut last = Vec::new();
    for place in parts {
        match contexts.parts.get(place).map(|part| &part.end) {
            Some(PartEnd::Program) => last.push(place),
            Some(PartEnd::Dumped(name)) => {
                let number = all.len() + 1;
                all.push(OneDump {
                    parts: vec![place],
                    number,
                    suffix: format!(".{number}"),
                    trigger: format!("Client Request: {name}"),
                });
            }
            Some(PartEnd::Dropped) | None => {}
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

/// What was counted, by what files are made of.
struct CountedRun<'a> {
    counts: &'a Counts,
    contexts: &'a Contexts,
    costs: ContextCosts<'a>,
    /// The parts of each program, and the roots of each part.
    parts: Vec<Vec<usize>>,
    roots: Vec<Vec<usize>>,
}

impl<'a> CountedRun<'a> {
    fn new(counts: &'a Counts, contexts: &'a Contexts) -> Self {
        let mut parts = vec![Vec::new(); counts.programs.len()];
        for (place, part) in contexts.parts.iter().enumerate() {
            if let Some(all) = parts.get_mut(part.program) {
                all.push(place);
            }
        }
        let mut roots = vec![Vec::new(); contexts.parts.len()];
        for (place, root) in contexts.roots.iter().enumerate() {
            if let Some(all) = roots.get_mut(root.part) {
                all.push(place);
            }
        }
        Self {
            counts,
            contexts,
            costs: ContextCosts::new(contexts),
            parts,
            roots,
        }
    }

    fn parts_of(&self, programs: &BTreeSet<usize>) -> impl Iterator<Item = usize> {
        let parts = programs
            .iter()
            .filter_map(|program| self.parts.get(*program));
        parts.flatten().copied()
    }

    fn roots_of(&self, part: usize) -> impl Iterator<Item = usize> {
        self.roots.get(part).into_iter().flatten().copied()
    }

    /// The number that the thread of a root has in the guest.
    fn thread(&self, root: usize) -> Option<u32> {
        let root = self.contexts.roots.get(root)?;
        let program = self.contexts.parts.get(root.part)?.program;
        let thread = self
            .counts
            .programs
            .get(program)?
            .threads
            .get(root.thread)?;
        Some(thread.tid)
    }
}

/// The number of a process that is so far behind the first one in the guest, which has that of
/// this process, `own`. It is above all numbers of this machine's processes: a run beside this one
/// has files by such a number.
fn number(own: u32, behind: u32) -> u64 {
    u64::from(own) + u64::from(behind) * PIDS
}

/// Writes the files of a run of the command line `title`.
pub(super) fn write(
    options: &ValgrindOptions,
    counts: &Counts,
    title: &str,
) -> Result<(), UserError> {
    let none = Contexts::default();
    let contexts = counts.contexts.as_ref().unwrap_or(&none);
    let lost = contexts.lost_dumps.saturating_add(contexts.lost_drops);
    if lost > 0 {
        return Err(failed(format!(
            "--as callgrind: no file is written: {lost} requests of the program to dump or to zero \
             counts are more than there is room for (4,096 dumps)"
        )));
    }
    let counted = CountedRun::new(counts, contexts);
    let all = processes(counts, options.trace_children);
    let first = counts.programs.first().map_or(0, |program| program.pid);
    // Who has started this process knows the first one by its number.
    let number = |pid: u32| number(process::id(), pid.wrapping_sub(first));
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
        let command = match one.programs.last() {
            Some(0) | None => title,
            Some(program) => &counts.programs[*program].name,
        };
        let told = Told {
            options,
            pid: number(one.pid),
            parent: if one.pid == first {
                parent_id().into()
            } else {
                number(one.parent)
            },
            command,
        };
        let total = told.profiles(&counted, &programs, profile)?;
        told.log(log.as_deref(), total)?;
    }
    Ok(())
}

/// Of whom files tell.
struct Told<'a> {
    options: &'a ValgrindOptions,
    pid: u64,
    parent: u64,
    command: &'a str,
}

impl Told<'_> {
    /// Writes the dumps of these programs; the instructions of all of them.
    fn profiles(
        &self,
        counted: &CountedRun<'_>,
        programs: &BTreeSet<usize>,
        name: &OsStr,
    ) -> Result<u64, UserError> {
        let threads = programs
            .iter()
            .flat_map(|program| &counted.counts.programs[*program].threads);
        let mut known = BTreeSet::new();
        let threads: Vec<u32> = threads
            .map(|thread| thread.tid)
            .filter(|thread| known.insert(*thread))
            .collect();
        let mut begun = BTreeSet::new();
        let mut seen = counted.parts_of(programs).peekable();
        let mut total = 0;
        for dump in dumps(counted.contexts, counted.parts_of(programs)) {
            let mut roots: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
            for root in dump.parts.iter().flat_map(|part| counted.roots_of(*part)) {
                let thread = counted.thread(root).unwrap_or_default();
                roots.entry(thread).or_default().push(root);
            }
            if !self.options.separate_threads {
                let costs = counted.costs.below(roots.into_values().flatten());
                total += costs.total();
                self.profile(counted.counts, &costs, (&dump, None), name)?;
                continue;
            }
            let last = dump.parts.last().copied();
            while let Some(part) = seen.next_if(|part| Some(*part) <= last) {
                begun.extend(
                    counted
                        .roots_of(part)
                        .filter_map(|root| counted.thread(root)),
                );
            }
            let is_end = dump.suffix.is_empty();
            for (number, thread) in (1..).zip(&threads) {
                // A thread that begins later is in no dump.
                if !is_end && !begun.contains(thread) {
                    continue;
                }
                let costs = counted
                    .costs
                    .below(roots.remove(thread).unwrap_or_default());
                total += costs.total();
                self.profile(counted.counts, &costs, (&dump, Some(number)), name)?;
            }
        }
        Ok(total)
    }

    fn profile(
        &self,
        counts: &Counts,
        costs: &Costs,
        (dump, thread): (&OneDump, Option<usize>),
        name: &OsStr,
    ) -> Result<(), UserError> {
        let mut file = name.to_owned();
        file.push(&dump.suffix);
        if let Some(thread) = thread {
            file.push(format!("-{thread:02}"));
        }
        let head = ProfileHead {
            pid: self.pid,
            command: self.command,
            part: dump.number,
            thread,
            trigger: &dump.trigger,
            plain_names: self.options.plain_names,
        };
        whole::write(PROFILE, Path::new(&file), |file| {
            let mut out = BufWriter::new(file);
            write_callgrind(counts, costs, &head, &mut out)?;
            out.flush()
        })
    }

    /// Writes the log: to a file, or to standard error.
    fn log(&self, name: Option<&OsStr>, total: u64) -> Result<(), UserError> {
        match name {
            Some(name) => whole::write(LOG, Path::new(name), |file| {
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
        assert_eq!(seen(false), [(10, vec![0]), (13, vec![4])]);
    }

    #[test]
    fn numbers_are_no_other_processes() {
        assert_eq!(number(77, 0), 77);
        let most = u32::try_from(PIDS).expect("few") - 1;
        assert!(number(1, 1) > u64::from(most));
        // Those of two runs beside each other are not the same either.
        assert_ne!(number(77, 1), number(78, 1));
        assert!(number(most, 1) < number(1, 2));
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
        let all = dumps(&contexts, [0, 2, 3].into_iter());
        let expected = [
            (vec![2], 1, ".1", "Client Request: x"),
            (vec![3], 2, "", "Program termination"),
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
