//! Descriptions of tasks and mappings that are kept, where not each file gets all of them.

use std::collections::{BTreeMap, BTreeSet};

use perfmon_abi::wire::programs::{Described, TaskInfo};

use super::programs::numbers;
use crate::profile::Record;

/// Most descriptions that are kept, and bytes of their names: twice what a VM keeps. What a VM
/// does not keep any more has another number in later samples.
const MOST: usize = 1 << 17;
const MOST_BYTES: usize = 32 << 20;

/// Descriptions by their last number, and which of them the file has that is being written.
#[derive(Debug, Default)]
pub(super) struct Book {
    known: BTreeMap<u64, Described>,
    bytes: usize,
    /// Numbers in samples of the file that it does not describe yet.
    wanted: BTreeSet<u64>,
    /// The last numbers of the descriptions that it has.
    told: BTreeSet<u64>,
}

impl Book {
    /// Keeps a description.
    pub(super) fn add(&mut self, described: Described) {
        self.bytes += bytes(&described);
        if let Some(before) = self.known.insert(described.number(), described) {
            self.bytes = self.bytes.saturating_sub(bytes(&before));
        }
        while self.known.len() > MOST || self.bytes > MOST_BYTES {
            let Some((number, oldest)) = self.known.pop_first() else {
                break;
            };
            self.bytes = self.bytes.saturating_sub(bytes(&oldest));
            self.told.remove(&number);
            self.wanted = self.wanted.split_off(&number.saturating_add(1));
        }
    }

    fn of(&self, number: u64) -> Option<&Described> {
        let (_, described) = self.known.range(number..).next()?;
        let first = match described {
            Described::Moment(moment) => moment.number,
            Described::Task(_) | Described::Mapping(_) => described.number(),
        };
        (first <= number).then_some(described)
    }

    /// The task with this number in samples; none inside if nobody knows it, none at all if it
    /// was not described yet.
    pub(super) fn task(&self, number: u64) -> Option<Option<&TaskInfo>> {
        if number == 0 {
            return Some(None);
        }
        let described = match self.of(number)? {
            Described::Moment(moment) => {
                let at = usize::try_from(number.saturating_sub(moment.number)).ok();
                let same = at.and_then(|at| moment.same.get(at).copied());
                same.filter(|same| *same > 0).and_then(|same| self.of(same))
            }
            described => Some(described),
        };
        Some(match described {
            Some(Described::Task(task)) => Some(task),
            _ => None,
        })
    }

    /// Takes the descriptions out of records on their way to the file, and puts those behind
    /// them that samples of the file need and it does not have.
    pub(super) fn turn(&mut self, records: &mut Vec<Record>) {
        records.retain(|record| match record {
            Record::Described(described) => {
                self.add(described.clone());
                false
            }
            Record::Sample(_) | Record::Loss(_) => true,
        });
        for record in records.iter() {
            if let Record::Sample(sample) = record {
                let new = numbers(sample).filter(|number| *number > 0 && !self.is_told(*number));
                let new: Vec<u64> = new.collect();
                self.wanted.extend(new);
            }
        }
        let wanted = std::mem::take(&mut self.wanted);
        for number in wanted {
            match self.of(number).cloned() {
                Some(described) => self.tell(described, records),
                None => {
                    self.wanted.insert(number);
                }
            }
        }
    }

    /// A number's description is in the file.
    fn is_told(&self, number: u64) -> bool {
        let last = self.of(number).map(Described::number);
        last.is_some_and(|last| self.told.contains(&last))
    }

    /// Puts a description behind `records`, and those that it leads to before it, unless the
    /// file has them.
    fn tell(&mut self, described: Described, records: &mut Vec<Record>) {
        if !self.told.insert(described.number()) {
            return;
        }
        if let Described::Moment(moment) = &described {
            for same in &moment.same {
                // A moment stands for what is none.
                let of = self
                    .of(*same)
                    .filter(|of| !matches!(of, Described::Moment(_)));
                if let Some(of) = of.cloned() {
                    self.tell(of, records);
                }
            }
        }
        records.push(Record::Described(described));
    }

    /// From now on records go to another file, which has nothing yet.
    pub(super) fn turn_over(&mut self) {
        self.told.clear();
        self.wanted.clear();
    }
}

/// What it takes, about.
fn bytes(described: &Described) -> usize {
    let names = match described {
        Described::Task(task) => task.comm.len() + task.process.len(),
        Described::Mapping(mapping) => {
            mapping.name.len() + mapping.build_id.len() + mapping.root.len()
        }
        Described::Moment(moment) => size_of_val(moment.same.as_slice()),
    };
    size_of::<Described>() + names
}

#[cfg(test)]
pub(super) mod testing {
    use perfmon_abi::compact::GuestPlace;
    use perfmon_abi::wire::programs::{MappingInfo, MomentInfo};

    use super::*;
    use crate::profile::Sample;

    pub(crate) fn task(number: u64, pid: u32, tid: u32) -> Record {
        Record::Described(Described::Task(TaskInfo {
            number,
            pid,
            tid,
            comm: format!("thread{tid}"),
            ..TaskInfo::default()
        }))
    }

    pub(crate) fn mapping(number: u64) -> Record {
        Record::Described(Described::Mapping(MappingInfo {
            number,
            end: 9,
            ..MappingInfo::default()
        }))
    }

    pub(crate) fn moment(number: u64, same: &[u64]) -> Record {
        Record::Described(Described::Moment(MomentInfo {
            number,
            same: same.to_vec(),
        }))
    }

    pub(crate) fn sample(time_ns: u64, task: u64, mapping: u64) -> Record {
        Record::Sample(Sample {
            time_ns,
            guest: GuestPlace {
                task,
                mapping,
                ..GuestPlace::default()
            },
            ..Sample::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{mapping, moment, sample, task};
    use super::*;

    fn turned(book: &mut Book, mut records: Vec<Record>) -> Vec<Record> {
        book.turn(&mut records);
        records
    }

    #[test]
    fn each_file_has_what_its_samples_need() {
        let mut book = Book::default();
        let all = vec![task(1, 7, 7), mapping(2), task(3, 8, 8), mapping(4)];
        assert_eq!(turned(&mut book, all), [], "nobody needs them");
        let first = vec![sample(1, 1, 2), sample(2, 1, 9)];
        assert_eq!(
            turned(&mut book, first.clone()),
            [
                first[0].clone(),
                first[1].clone(),
                task(1, 7, 7),
                mapping(2)
            ]
        );
        assert_eq!(turned(&mut book, vec![mapping(9)]), [mapping(9)], "later");
        let again = vec![sample(3, 1, 9)];
        assert_eq!(turned(&mut book, again.clone()), again, "once");
        // Another file has none of them.
        book.turn_over();
        assert_eq!(
            turned(&mut book, again.clone()),
            [again[0].clone(), task(1, 7, 7), mapping(9)]
        );
    }

    #[test]
    fn a_moment_brings_what_it_stands_for() {
        let mut book = Book::default();
        turned(
            &mut book,
            vec![task(1, 7, 7), mapping(2), moment(5, &[1, 2, 0])],
        );
        let records = vec![sample(1, 5, 6), sample(2, 7, 0)];
        assert_eq!(
            turned(&mut book, records.clone()),
            [
                records[0].clone(),
                records[1].clone(),
                task(1, 7, 7),
                mapping(2),
                moment(5, &[1, 2, 0]),
            ]
        );
        assert_eq!(book.task(5).flatten().map(|task| task.pid), Some(7));
        assert_eq!(book.task(7), Some(None), "it stands for nothing");
        assert_eq!(book.task(2), Some(None), "it is no task");
        assert_eq!((book.task(0), book.task(8)), (Some(None), None));
    }

    #[test]
    fn what_a_vm_forgot_is_forgotten() {
        let mut book = Book::default();
        let most = MOST as u64;
        for number in 1..=most + 10 {
            book.add(Described::Task(TaskInfo {
                number,
                ..TaskInfo::default()
            }));
            let mut records = vec![sample(number, number, 0)];
            book.turn(&mut records);
            assert_eq!(records.len(), 2);
        }
        assert!(book.known.len() <= MOST && book.told.len() <= MOST);
        assert_eq!(book.task(1), None);
        assert!(book.task(most + 10).flatten().is_some());
    }
}
