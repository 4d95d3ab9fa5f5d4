//! Samples of chosen processes and threads of the guest: others are left out, and counted.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use perfmon_abi::wire::programs::TaskInfo;

use super::book::Book;
use super::callers::bytes;
use crate::profile::{LeftOut, Record};

/// How long a sample waits until its task is described: a VM that has to ask its guest for it
/// takes up to 3 s.
const PATIENCE: Duration = Duration::from_secs(4);
/// Most bytes of stacks and chains that wait, and most records.
const MOST_WAITING: usize = 64 << 20;
const MOST_RECORDS: usize = 1 << 20;

/// A process or a thread that samples are wanted of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChosenTask {
    Process(u32),
    Thread(u32),
}

impl ChosenTask {
    fn is(self, task: &TaskInfo) -> bool {
        match self {
            Self::Process(pid) => task.pid == pid,
            Self::Thread(tid) => task.tid == tid,
        }
    }

    fn words(self) -> String {
        match self {
            Self::Process(pid) => format!("process {pid}"),
            Self::Thread(tid) => format!("thread {tid}"),
        }
    }
}

/// Lets samples of chosen tasks through, in their order.
#[derive(Debug)]
pub(super) struct TaskFilter {
    /// And whether a sample of it has come.
    chosen: Vec<(ChosenTask, bool)>,
    waiting: VecDeque<(Instant, Record)>,
    /// Bytes of their stacks and chains.
    bytes: usize,
    left_out: LeftOut,
}

impl TaskFilter {
    /// For these processes and threads; none if there are none.
    pub(super) fn new(processes: &[u32], threads: &[u32]) -> Option<Self> {
        let processes = processes.iter().copied().map(ChosenTask::Process);
        let threads = threads.iter().copied().map(ChosenTask::Thread);
        let chosen = processes.chain(threads).map(|one| (one, false));
        let chosen: Vec<_> = chosen.collect();
        (!chosen.is_empty()).then(|| Self {
            chosen,
            waiting: VecDeque::new(),
            bytes: 0,
            left_out: LeftOut::default(),
        })
    }

    /// Takes records in, and gives those that are wanted, of samples as far as it is known whose
    /// they are. Descriptions go first, and are kept in `book`.
    pub(super) fn push(
        &mut self,
        records: Vec<Record>,
        book: &mut Book,
        now: Instant,
    ) -> Vec<Record> {
        let mut wanted = Vec::new();
        for record in records {
            if let Record::Described(described) = &record {
                book.add(described.clone());
                wanted.push(record);
                continue;
            }
            self.bytes += bytes(&record);
            self.waiting.push_back((now, record));
        }
        while let Some((since, record)) = self.waiting.front() {
            let too_many = self.bytes > MOST_WAITING || self.waiting.len() > MOST_RECORDS;
            let is_late = *since + PATIENCE <= now || too_many;
            let is_known = match record {
                Record::Sample(sample) => book.task(sample.guest.task).is_some(),
                Record::Loss(_) | Record::Described(_) => true,
            };
            if !(is_known || is_late) {
                break;
            }
            wanted.extend(self.next(book).flatten());
        }
        wanted
    }

    /// Those of the samples that still wait: nothing more will be described.
    pub(super) fn rest(&mut self, book: &Book) -> Vec<Record> {
        let all = std::iter::from_fn(|| self.next(book));
        all.flatten().collect()
    }

    /// The next record, if there is one; none inside if it is left out.
    fn next(&mut self, book: &Book) -> Option<Option<Record>> {
        let (_, record) = self.waiting.pop_front()?;
        self.bytes = self.bytes.saturating_sub(bytes(&record));
        let Record::Sample(sample) = &record else {
            return Some(Some(record));
        };
        let Some(Some(task)) = book.task(sample.guest.task) else {
            self.left_out.unknown += 1;
            return Some(None);
        };
        let mut is_wanted = false;
        for (chosen, has_come) in &mut self.chosen {
            let is_it = chosen.is(task);
            is_wanted |= is_it;
            *has_come |= is_it;
        }
        self.left_out.others += u64::from(!is_wanted);
        Some(is_wanted.then_some(record))
    }

    /// Nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// What was left out since this was asked last.
    pub(super) fn take_left_out(&mut self) -> LeftOut {
        std::mem::take(&mut self.left_out)
    }

    /// What was left out since then, and is told there.
    pub(super) fn left_out(&self) -> LeftOut {
        self.left_out
    }

    /// Those of which no sample has come: `process 7, thread 9`.
    pub(super) fn absent(&self) -> Option<String> {
        let absent = self.chosen.iter().filter(|(_, has_come)| !has_come);
        let words: Vec<String> = absent.map(|(one, _)| one.words()).collect();
        (!words.is_empty()).then(|| words.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::super::book::testing::{moment, sample, task};
    use super::*;
    use crate::profile::{Loss, LossKind};

    fn times(records: &[Record]) -> Vec<u64> {
        let time = |record: &Record| match record {
            Record::Sample(sample) => Some(sample.time_ns),
            Record::Loss(loss) => Some(loss.time_ns),
            Record::Described(_) => None,
        };
        records.iter().filter_map(time).collect()
    }

    fn loss(time_ns: u64) -> Record {
        Record::Loss(Loss {
            time_ns,
            vm: 0,
            vcpu: None,
            kind: LossKind::Full(1),
        })
    }

    #[test]
    fn samples_of_others_are_left_out_and_counted() {
        assert!(TaskFilter::new(&[], &[]).is_none());
        let (mut book, now) = (Book::default(), Instant::now());
        let mut filter = TaskFilter::new(&[40, 50], &[61]).expect("a filter");
        let tasks = vec![
            task(1, 40, 40),
            task(2, 40, 41),
            task(3, 60, 60),
            task(4, 60, 61),
            task(5, 0, 0),
        ];
        assert_eq!(filter.push(tasks, &mut book, now).len(), 5);
        let all = (1..=5).map(|number| sample(number, number, 0));
        let mut all: Vec<Record> = all.collect();
        all.extend([sample(6, 0, 0), loss(7)]);
        assert_eq!(times(&filter.push(all, &mut book, now)), [1, 2, 4, 7]);
        let left_out = LeftOut {
            others: 2,
            unknown: 1,
        };
        assert_eq!(filter.left_out(), left_out);
        assert_eq!(filter.take_left_out(), left_out);
        assert_eq!(filter.left_out(), LeftOut::default());
        assert_eq!(filter.absent().as_deref(), Some("process 50"));
        // A thread that its process starts later is in.
        let later = vec![task(9, 50, 77), sample(8, 9, 0)];
        assert_eq!(times(&filter.push(later, &mut book, now)), [8]);
        assert_eq!(filter.absent(), None);
    }

    #[test]
    fn samples_wait_for_their_task_in_their_order() {
        let (mut book, now) = (Book::default(), Instant::now());
        let mut filter = TaskFilter::new(&[40], &[]).expect("a filter");
        let none: [Record; 0] = [];
        let early = vec![sample(1, 7, 0), loss(2), sample(3, 8, 0)];
        assert_eq!(filter.push(early, &mut book, now), none);
        assert!(!filter.is_empty());
        // What is known later has numbers of its own.
        let told = vec![task(1, 40, 40), moment(7, &[1])];
        assert_eq!(times(&filter.push(told, &mut book, now)), [1, 2]);
        // What is never described is not waited for, and is not said to be of others.
        let late = now + PATIENCE;
        assert_eq!(filter.push(Vec::new(), &mut book, late), none);
        let last = vec![sample(4, 9, 0), sample(5, 1, 0)];
        assert_eq!(filter.push(last, &mut book, late), none);
        assert_eq!(times(&filter.rest(&book)), [5]);
        let left_out = LeftOut {
            others: 0,
            unknown: 2,
        };
        assert_eq!((filter.left_out(), filter.is_empty()), (left_out, true));
    }
}
