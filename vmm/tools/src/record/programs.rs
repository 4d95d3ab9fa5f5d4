//! What the numbers of tasks and mappings in samples stand for, as the VM tells it.

use std::time::{Duration, Instant};

use perfmon_abi::wire::programs::{Described, ProgramsInfo, ProgramsRequest};
use umpire_perfmon::Client;

use crate::profile::{Record, Sample};

/// How long the last descriptions are waited for: a VM that has to ask its guest for them takes
/// up to 3 s. And how often they are asked for meanwhile.
const PATIENCE: Duration = Duration::from_secs(4);
/// How long they are waited for while some come.
const LONGEST: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(10);
/// Most questions at a time.
const QUESTIONS: u32 = 8;

/// What was asked already.
#[derive(Debug, Default)]
pub(super) struct AskedPrograms {
    /// Where the next question begins.
    next: u64,
    /// The greatest number that a sample has, and that was described.
    met: u64,
    described: u64,
    /// The last answer said that there is more.
    more: bool,
    /// The least number that a sample has; 0: none has one.
    least: u64,
    /// The greatest number of which it is known what it stands for.
    named: u64,
    /// The VM answered no more.
    gone: bool,
    /// Descriptions that the VM did not keep.
    lost: u64,
    /// Why nothing is known.
    unknown: Option<String>,
}

impl AskedPrograms {
    /// Takes note of the numbers in samples.
    pub(super) fn take(&mut self, records: &[Record]) {
        for record in records {
            if let Record::Sample(sample) = record {
                self.met = self.met.max(greatest(sample));
                let least = numbers(sample).filter(|number| *number > 0).min();
                let before = Some(self.least).filter(|least| *least > 0);
                self.least = before.into_iter().chain(least).min().unwrap_or(0);
            }
        }
    }

    /// A sample had a task, or there is a reason why none will have: of what samples have met,
    /// the VM is asked only then.
    pub(super) fn is_ready(&mut self, client: &Client) -> bool {
        let asks = || client.programs(&ProgramsRequest { since: u64::MAX });
        self.has_tasks() || asks().map_or(true, |info| info.unknown.is_some())
    }

    /// Why the VM knows no task, if it says so.
    pub(super) fn why_unknown(&self, client: &Client) -> Option<String> {
        let info = client.programs(&ProgramsRequest { since: u64::MAX });
        info.map_or_else(|_| self.unknown.clone(), |info| info.unknown)
    }

    /// A sample had a task.
    pub(super) fn has_tasks(&self) -> bool {
        self.met > 0
    }

    /// The descriptions that are there, if samples need any that were not told yet. What
    /// cannot be asked for stays unknown: the VM may be gone.
    pub(super) fn ask(&mut self, client: &Client) -> Vec<Record> {
        let mut records = Vec::new();
        // A guest may always have more to tell.
        for _ in 0..QUESTIONS {
            if !(self.more || self.met > self.described || self.met == 0) {
                break;
            }
            let info = client.programs(&ProgramsRequest { since: self.next });
            self.gone = info.is_err();
            let Ok(info) = info else {
                break;
            };
            let told = info.described.len();
            self.answered(info, &mut records);
            if told == 0 {
                break;
            }
        }
        records
    }

    fn answered(&mut self, info: ProgramsInfo, records: &mut Vec<Record>) {
        for one in &info.described {
            self.described = self.described.max(one.number());
            let is_known = match one {
                Described::Moment(moment) => moment.same.iter().any(|number| *number > 0),
                Described::Task(_) | Described::Mapping(_) => true,
            };
            if is_known {
                self.named = self.named.max(one.number());
            }
        }
        // What was told before this recording began is none of its samples'.
        if self.next > 0 {
            self.lost = self.lost.saturating_add(info.lost);
        }
        (self.next, self.more) = (info.next, info.more);
        self.unknown = info.unknown;
        records.extend(info.described.into_iter().map(Record::Described));
    }

    /// Those that are still missing at the end.
    pub(super) fn rest(&mut self, client: &Client, pause: impl FnMut()) -> Vec<Record> {
        let records = self.wait(client, (PATIENCE, LONGEST), pause);
        // Samples that nobody could describe have no numbers to ask for.
        if let Ok(info) = client.programs(&ProgramsRequest { since: u64::MAX }) {
            self.unknown = info.unknown;
        }
        records
    }

    /// Those that are missing, as far as they come one after the other with `patience` between
    /// them, and all in the `longest` time.
    pub(super) fn within(
        &mut self,
        client: &Client,
        patience: Duration,
        longest: Duration,
    ) -> Vec<Record> {
        self.wait(client, (patience, longest), || ())
    }

    /// The same; in `pause`, which is called again and again, something else can be done.
    fn wait(
        &mut self,
        client: &Client,
        (patience, longest): (Duration, Duration),
        mut pause: impl FnMut(),
    ) -> Vec<Record> {
        let began = Instant::now();
        let mut end = began + patience;
        let mut records = self.ask(client);
        while (self.more || self.met > self.described) && Instant::now() < end {
            std::thread::sleep(PAUSE);
            pause();
            let further = self.ask(client);
            if !further.is_empty() {
                end = (began + longest).min(Instant::now() + patience);
            }
            if further.is_empty() && !self.more {
                break;
            }
            records.extend(further);
        }
        records
    }

    /// What the user has to know.
    pub(super) fn note(&self) -> Option<String> {
        if self.lost > 0 {
            return Some(format!(
                "the VM has forgotten {} descriptions of programs; their samples have no names",
                self.lost
            ));
        }
        if let Some(why) = &self.unknown {
            let which = if self.has_names() { "some " } else { "" };
            return Some(format!("{which}programs of the guest have no names: {why}"));
        }
        if self.met > self.described {
            let why = if self.gone {
                "the VM ended before it had described all programs"
            } else {
                "the VM did not describe all programs in time"
            };
            return Some(format!("{why}; some samples have no names"));
        }
        let nobody = self.met > 0 && !self.has_names();
        nobody
            .then(|| "programs of the guest have no names: the guest knows none of them".to_owned())
    }

    /// It is known of a sample what ran.
    fn has_names(&self) -> bool {
        self.least > 0 && self.named >= self.least
    }
}

/// The numbers of tasks and mappings in `sample`; 0: none.
pub(super) fn numbers(sample: &Sample) -> impl Iterator<Item = u64> {
    let guest = &sample.guest;
    let frames = guest.chain.program.iter().map(|frame| frame.mapping);
    let numbers = frames.chain(guest.stack.mappings.iter().copied());
    numbers.chain([guest.task, guest.mapping])
}

fn greatest(sample: &Sample) -> u64 {
    numbers(sample).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use perfmon_abi::compact::{CallChain, GuestPlace, ProgramFrame};
    use perfmon_abi::wire::programs::{Described, MomentInfo, TaskInfo};

    #[test]
    fn the_greatest_number_may_be_anywhere() {
        let sample = |task, mapping, frame| Sample {
            guest: GuestPlace {
                task,
                mapping,
                chain: CallChain {
                    program: vec![ProgramFrame {
                        address: 9,
                        mapping: frame,
                    }],
                    ..CallChain::default()
                },
                ..GuestPlace::default()
            },
            ..Sample::default()
        };
        for (sample, expected) in [
            (sample(3, 2, 1), 3),
            (sample(1, 3, 2), 3),
            (sample(1, 2, 3), 3),
        ] {
            assert_eq!(greatest(&sample), expected);
        }
    }

    #[test]
    fn answers_are_taken_in() {
        let task = |number| {
            Described::Task(TaskInfo {
                number,
                ..TaskInfo::default()
            })
        };
        let mut programs = AskedPrograms::default();
        let mut records = Vec::new();
        let info = ProgramsInfo {
            described: vec![task(2), task(1)],
            next: 2,
            more: true,
            lost: 1,
            unknown: None,
        };
        programs.answered(info.clone(), &mut records);
        assert_eq!(records.len(), 2);
        assert_eq!((programs.next, programs.described), (2, 2));
        assert_eq!(programs.note(), None, "those were of others");
        programs.answered(info, &mut records);
        assert!(
            programs
                .note()
                .is_some_and(|note| note.contains("forgotten 1"))
        );
        let nothing = ProgramsInfo {
            unknown: Some("it is no Linux".to_owned()),
            ..ProgramsInfo::default()
        };
        let mut programs = AskedPrograms::default();
        programs.answered(nothing.clone(), &mut records);
        let note = programs.note().unwrap_or_default();
        assert!(note.ends_with("have no names: it is no Linux"), "{note}");
        // Samples that have tasks need no excuse, but that these were never described.
        let mut programs = AskedPrograms {
            met: 1,
            least: 1,
            ..AskedPrograms::default()
        };
        let of = |described, unknown: Option<&str>| ProgramsInfo {
            described,
            unknown: unknown.map(str::to_owned),
            ..ProgramsInfo::default()
        };
        programs.answered(of(vec![task(1)], None), &mut records);
        assert_eq!(programs.note(), None);
        programs.met = 2;
        programs.gone = true;
        let note = programs.note().unwrap_or_default();
        assert!(note.contains("ended before"), "{note}");
        // It is there, but slow.
        programs.gone = false;
        let note = programs.note().unwrap_or_default();
        assert!(note.contains("in time; some samples"), "{note}");
        // Who told them ended.
        programs.answered(of(vec![task(2)], Some("it ended")), &mut records);
        let note = programs.note().unwrap_or_default();
        assert_eq!(note, "some programs of the guest have no names: it ended");
    }

    #[test]
    fn samples_of_which_nothing_is_known_are_told() {
        let moment = |number, same| {
            Described::Moment(MomentInfo {
                number,
                same: vec![same, 0],
            })
        };
        let sample = |task| {
            let guest = GuestPlace {
                task,
                ..GuestPlace::default()
            };
            Record::Sample(Sample {
                guest,
                ..Sample::default()
            })
        };
        let mut programs = AskedPrograms::default();
        programs.take(&[sample(0), sample(7), sample(5), sample(9)]);
        assert_eq!((programs.least, programs.met), (5, 9));
        let answers = |programs: &mut AskedPrograms, described| {
            let info = ProgramsInfo {
                described,
                ..ProgramsInfo::default()
            };
            programs.answered(info, &mut Vec::new());
            programs.note()
        };
        // The first is of a recording before.
        let none = vec![moment(3, 2), moment(5, 0), moment(7, 0), moment(9, 0)];
        let note = answers(&mut programs, none).unwrap_or_default();
        assert!(
            note.starts_with("programs of the guest have no names"),
            "{note}"
        );
        assert_eq!(answers(&mut programs, vec![moment(9, 2)]), None);
    }
}
