//! The record of a run: what it was made of, how it ended, and what it counted.

use attribution::{Counts, Events};
use serde::{Deserialize, Serialize};

use crate::event::Event;
use crate::inputs::Inputs;

/// The version of the file that [`Record::to_json`] writes, and the one that [`Record::parse`]
/// takes.
pub const VERSION: u32 = 1;

/// What a file of `umpire count --save` holds: one JSON object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The version of this format: 1.
    #[serde(rename = "umpire-count")]
    pub version: u32,
    /// The digest of all inputs.
    pub digest: String,
    /// What the run depends on, by name: digests of contents, and short values as they are.
    pub inputs: Inputs,
    /// How the program ended.
    pub outcome: Outcome,
    /// What was counted.
    pub counts: Counts,
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// By itself, with this status.
    Exited(u8),
    /// By a signal of this number.
    Signalled(u8),
}

impl Outcome {
    /// The status that a shell has of it.
    #[must_use]
    pub fn status(self) -> u8 {
        match self {
            Outcome::Exited(status) => status,
            Outcome::Signalled(signal) => signal.saturating_add(128),
        }
    }
}

/// The head of the file, whatever version it is of.
#[derive(Deserialize)]
struct Head {
    #[serde(rename = "umpire-count")]
    version: u32,
}

/// A file that is no record.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// It is something else.
    #[error("it is no file of umpire count --save: {0}")]
    Foreign(#[source] serde_json::Error),
    /// Of another version of Umpire.
    #[error(
        "it is of format {0}, and this umpire reads format {VERSION}: make it anew with --save"
    )]
    Version(u32),
    /// Of this version, and broken.
    #[error("it is damaged: {0}; make it anew with --save")]
    Damaged(#[source] serde_json::Error),
    /// Somebody has changed an input in it.
    #[error("it is damaged: its digest is not that of its inputs; make it anew with --save")]
    Digest,
    /// Counts whose sum no run could have.
    #[error("it is damaged: its counts are too large; make it anew with --save")]
    Large,
}

impl Record {
    /// The record of a run.
    #[must_use]
    pub fn new(inputs: Inputs, outcome: Outcome, counts: Counts) -> Self {
        Record {
            version: VERSION,
            digest: inputs.digest(),
            inputs,
            outcome,
            counts,
        }
    }

    /// The record in a file.
    ///
    /// # Errors
    /// The file holds none, or not one that can be used.
    pub fn parse(bytes: &[u8]) -> Result<Self, RecordError> {
        let head: Head = serde_json::from_slice(bytes).map_err(RecordError::Foreign)?;
        if head.version != VERSION {
            return Err(RecordError::Version(head.version));
        }
        let record: Record = serde_json::from_slice(bytes).map_err(RecordError::Damaged)?;
        if record.digest != record.inputs.digest() {
            return Err(RecordError::Digest);
        }
        if !can_be_summed(&record.counts) {
            return Err(RecordError::Large);
        }
        Ok(record)
    }

    /// The content of the file.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Maps with keys that are strings, and integers: nothing that JSON has not.
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }
}

/// Whether no sum over programs, nor over regions, is too large, on both sides together.
fn can_be_summed(counts: &Counts) -> bool {
    let threads = counts.programs.iter().flat_map(|one| &one.threads);
    let regions = counts.regions.iter();
    fit(threads.flat_map(|one| [&one.user, &one.kernel]))
        && fit(regions.flat_map(|one| [&one.user, &one.kernel]))
}

fn fit<'a>(sides: impl Iterator<Item = &'a Events> + Clone) -> bool {
    let fits = |of: &dyn Fn(&Events) -> u64| {
        let mut sides = sides.clone();
        sides
            .try_fold(0u64, |sum, side| sum.checked_add(of(side)))
            .is_some()
    };
    Event::all().all(|event| fits(&|side| event.of(side)))
        && fits(&|side| side.ticks)
        && fits(&|side| side.deliveries)
}

/// The last part of a program's path.
#[must_use]
pub fn short_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
pub(crate) mod tests {
    use attribution::{Function, Program, Region, Rest, Syscall, Thread};

    use super::*;
    use crate::Chosen;

    /// So many instructions, a fifth as many branches.
    pub(crate) fn tally(instructions: u64) -> Events {
        Events {
            instructions,
            branches: instructions / 5,
            loads: instructions / 4,
            stores: instructions / 8,
            ticks: instructions + 7,
            ..Events::default()
        }
    }

    pub(crate) fn program(name: &str, pid: u32, user: u64, kernel: u64) -> Program {
        Program {
            name: name.to_owned(),
            pid,
            parent: 1,
            threads: vec![Thread {
                tid: pid,
                comm: short_name(name).to_owned(),
                user: tally(user),
                kernel: tally(kernel),
            }],
        }
    }

    pub(crate) fn function(name: &str, own: u64, inclusive: u64) -> Function {
        Function {
            object: "/usr/bin/gzip".to_owned(),
            name: name.to_owned(),
            own,
            inclusive,
            calls: 1,
        }
    }

    /// A region, with a tenth as much in the kernel.
    pub(crate) fn region(program: &str, name: &str, user: u64) -> Region {
        Region {
            name: name.to_owned(),
            program: program.to_owned(),
            pid: 101,
            user: tally(user),
            kernel: tally(user / 10),
            ..Region::default()
        }
    }

    /// A shell that starts gzip.
    pub(crate) fn record() -> Record {
        let mut inputs = Inputs::default();
        inputs.add("kernel", "6.1.192-2");
        inputs.add("program", crate::inputs::digest(b"gzip"));
        let syscall = |name: &str, calls, instructions| Syscall {
            number: 0,
            name: name.to_owned(),
            calls,
            instructions,
        };
        let counts = Counts {
            programs: vec![
                program("/bin/sh", 100, 200_000, 90_000),
                program("/usr/bin/gzip", 101, 1_000_000, 34_567),
            ],
            syscalls: vec![syscall("read", 12, 34_000), syscall("write", 2, 4_000)],
            rest: Rest {
                exceptions: 20,
                exception_instructions: 80_000,
                interrupts: 1,
                interrupt_instructions: 567,
                start_instructions: 6_000,
            },
            functions: Some(vec![
                function("deflate", 900_000, 980_000),
                function("longest_match", 80_000, 80_000),
            ]),
            ..Counts::default()
        };
        Record::new(inputs, Outcome::Exited(0), counts)
    }

    #[test]
    fn what_is_written_is_read() {
        let record = record();
        let text = record.to_json();
        assert_eq!(Record::parse(text.as_bytes()).expect("a record"), record);
    }

    #[test]
    fn sums() {
        let counts = record().counts;
        let total = |text: &str| text.parse::<Chosen>().expect("an event").of(&counts);
        assert_eq!(total("instructions:u"), 1_200_000);
        assert_eq!(total("instructions:k"), 124_567);
        assert_eq!(total("instructions"), 1_324_567);
        assert_eq!(total("loads:u"), 300_000);
    }

    #[test]
    fn files_that_are_no_record() {
        fn check(text: &str, expected: &str) {
            let error = Record::parse(text.as_bytes()).expect_err(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        check("", "it is no file of umpire count --save");
        check("{}", "it is no file of umpire count --save");
        check("{\"umpire-count\": 2}", "it is of format 2");
        check("{\"umpire-count\": 1}", "it is damaged");
        let good = record().to_json();
        check(&good.replace("6.1.192-2", "6.1.193-1"), "its digest");
        check(&good.replace("\"loads\"", "\"mores\""), "it is damaged");
        check(&good.replace("\"tid\"", "\"tidy\""), "it is damaged");
        check(&good[..good.len() / 2], "it is no file");
        let mut large = record();
        large.counts.programs[0].threads[0].user.loads = u64::MAX;
        check(&large.to_json(), "its counts are too large");
        let mut large = record();
        large.counts.regions = vec![region("a", "b", 1), region("a", "b", 1)];
        large.counts.regions[1].kernel.instructions = u64::MAX;
        check(&large.to_json(), "its counts are too large");
    }

    #[test]
    fn statuses_are_those_of_a_shell() {
        assert_eq!(Outcome::Exited(3).status(), 3);
        assert_eq!(Outcome::Signalled(9).status(), 137);
        assert_eq!(Outcome::Signalled(255).status(), 255);
    }
}
