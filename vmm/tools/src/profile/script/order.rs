//! Records in the order of time, as perf prints them: a profile has those of each vCPU in turn.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;

use crate::profile::record::{Record, Sink};

fn time(record: &Record) -> Option<u64> {
    match record {
        Record::Sample(sample) => Some(sample.time_ns),
        Record::Loss(loss) => Some(loss.time_ns),
        Record::Described(_) => None,
    }
}

/// The times of all records, in the order of the file.
#[derive(Debug, Default)]
pub(super) struct Times(Vec<u64>);

impl Sink for Times {
    fn take(&mut self, record: &Record) -> io::Result<()> {
        self.0.extend(time(record));
        Ok(())
    }
}

/// Gives records on in the order of time; those of the same time in the order of the file. It
/// keeps only those that are before one that is yet to come.
pub(super) struct InOrder<'a> {
    /// For each record, the least time of those behind it in the file.
    later: Vec<u64>,
    /// How many came.
    came: usize,
    waiting: BinaryHeap<Reverse<Waiting>>,
    sink: &'a mut dyn Sink,
}

struct Waiting {
    time: u64,
    number: usize,
    record: Record,
}

impl Waiting {
    fn key(&self) -> (u64, usize) {
        (self.time, self.number)
    }
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Waiting {}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

impl<'a> InOrder<'a> {
    /// `times` are those of the records that come.
    pub(super) fn new(Times(mut later): Times, sink: &'a mut dyn Sink) -> Self {
        let mut least = u64::MAX;
        for time in later.iter_mut().rev() {
            let own = std::mem::replace(time, least);
            least = least.min(own);
        }
        Self {
            later,
            came: 0,
            waiting: BinaryHeap::new(),
            sink,
        }
    }
}

impl Sink for InOrder<'_> {
    fn take(&mut self, record: &Record) -> io::Result<()> {
        let Some(time) = time(record) else {
            return Ok(());
        };
        // What was written meanwhile has no time here; all that waits is given on then.
        let later = self.later.get(self.came).copied().unwrap_or(u64::MAX);
        let number = self.came;
        self.came += 1;
        if self.waiting.is_empty() && time <= later {
            return self.sink.take(record);
        }
        let record = record.clone();
        self.waiting.push(Reverse(Waiting {
            time,
            number,
            record,
        }));
        while let Some(Reverse(first)) = self.waiting.pop() {
            if first.time > later {
                self.waiting.push(Reverse(first));
                break;
            }
            self.sink.take(&first.record)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::profile::record::Sample;

    struct Kept(Vec<(u64, u64)>);

    impl Sink for Kept {
        fn take(&mut self, record: &Record) -> io::Result<()> {
            if let Record::Sample(sample) = record {
                self.0.push((sample.time_ns, sample.ip));
            }
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn all_come_in_the_order_of_time(times in proptest::collection::vec(0u64..9, 0..40)) {
            let sample = |(&time_ns, ip)| Record::Sample(Sample {
                time_ns,
                ip,
                ..Sample::default()
            });
            let records: Vec<Record> = times.iter().zip(0..).map(sample).collect();
            let (mut known, mut kept) = (Times::default(), Kept(Vec::new()));
            records.iter().for_each(|one| known.take(one).unwrap());
            let mut ordered = InOrder::new(known, &mut kept);
            records.iter().for_each(|one| ordered.take(one).unwrap());
            prop_assert!(ordered.waiting.is_empty());
            let mut expected: Vec<(u64, u64)> = times.into_iter().zip(0..).collect();
            expected.sort_unstable();
            prop_assert_eq!(kept.0, expected);
        }
    }
}
