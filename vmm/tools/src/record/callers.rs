//! Callers of programs by their files: samples wait until what they need is described.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::profile::Record;
use crate::profile::unwind::ProgramUnwinder;

/// How long a sample waits for a description: those of a VM come within a tenth of a second.
const PATIENCE: Duration = Duration::from_secs(2);
/// Most bytes of stacks and chains that wait.
const MOST_WAITING: usize = 64 << 20;

/// Records on their way to the file, in their order.
#[derive(Debug)]
pub(super) struct ProgramCallers {
    unwinder: ProgramUnwinder,
    waiting: VecDeque<(Instant, Record)>,
    /// Bytes of their stacks and chains.
    bytes: usize,
}

impl ProgramCallers {
    pub(super) fn new(unwinder: ProgramUnwinder) -> Self {
        Self {
            unwinder,
            waiting: VecDeque::new(),
            bytes: 0,
        }
    }

    /// Takes records in, and gives those that are complete. Descriptions go first.
    pub(super) fn push(&mut self, records: Vec<Record>, now: Instant) -> Vec<Record> {
        let mut complete = Vec::new();
        for record in records {
            if let Record::Described(described) = &record {
                self.unwinder.add(described.clone());
                complete.push(record);
                continue;
            }
            self.bytes += bytes(&record);
            self.waiting.push_back((now, record));
        }
        while let Some((since, record)) = self.waiting.front() {
            let is_late = *since + PATIENCE <= now || self.bytes > MOST_WAITING;
            let is_known = match record {
                Record::Sample(sample) => self.unwinder.knows(&sample.guest),
                _ => true,
            };
            if !(is_known || is_late) {
                break;
            }
            complete.extend(self.next());
        }
        complete
    }

    /// Those that still wait: nothing more will be described.
    pub(super) fn rest(&mut self) -> Vec<Record> {
        std::iter::from_fn(|| self.next()).collect()
    }

    fn next(&mut self) -> Option<Record> {
        let (_, mut record) = self.waiting.pop_front()?;
        self.bytes -= bytes(&record);
        if let Record::Sample(sample) = &mut record {
            self.unwinder.unwind(&mut sample.guest);
        }
        Some(record)
    }

    /// Nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Why callers are missing; a line each.
    pub(super) fn warnings(&self) -> Vec<String> {
        self.unwinder.warnings()
    }
}

/// Bytes of its stack and chain.
pub(super) fn bytes(record: &Record) -> usize {
    match record {
        Record::Sample(sample) => {
            let (chain, stack) = (&sample.guest.chain, &sample.guest.stack);
            size_of_val(chain.program.as_slice())
                + size_of_val(chain.kernel.as_slice())
                + size_of_val(stack.mappings.as_slice())
                + stack.bytes.len()
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use perfmon_abi::compact::{CallChain, ChainEnd, GuestPlace, ProgramFrame, ProgramStack};
    use perfmon_abi::wire::programs::{Described, MappingInfo};

    use super::*;
    use crate::profile::symfs::Symfs;
    use crate::profile::{Loss, LossKind, Sample};

    fn sample(time_ns: u64, mapping: u64, bytes: usize) -> Record {
        Record::Sample(Sample {
            time_ns,
            guest: GuestPlace {
                chain: CallChain {
                    program: vec![
                        ProgramFrame {
                            address: 1,
                            mapping
                        };
                        3
                    ],
                    program_end: Some(ChainEnd::Outermost),
                    ..CallChain::default()
                },
                stack: ProgramStack {
                    bytes: vec![1; bytes],
                    ..ProgramStack::default()
                },
                ..GuestPlace::default()
            },
            ..Sample::default()
        })
    }

    fn described(number: u64) -> Record {
        Record::Described(Described::Mapping(MappingInfo {
            number,
            end: 9,
            ..MappingInfo::default()
        }))
    }

    /// What came out: times, and whether it has callers of no file's saying.
    fn times(records: &[Record]) -> Vec<u64> {
        let time = |record: &Record| match record {
            Record::Sample(sample) => {
                let GuestPlace { chain, stack, .. } = &sample.guest;
                assert!(stack.is_empty() && chain.program.len() == 1);
                assert_eq!(chain.program_end, Some(ChainEnd::Broken));
                Some(sample.time_ns)
            }
            Record::Loss(loss) => Some(loss.time_ns),
            Record::Described(_) => None,
        };
        records.iter().filter_map(time).collect()
    }

    fn callers() -> ProgramCallers {
        let symfs = Symfs::open(&["/".into()]).unwrap().unwrap();
        ProgramCallers::new(ProgramUnwinder::new(symfs, 64))
    }

    #[test]
    fn samples_wait_for_descriptions_in_their_order() {
        let (mut callers, now) = (callers(), Instant::now());
        let loss = Record::Loss(Loss {
            time_ns: 3,
            vm: 0,
            vcpu: None,
            kind: LossKind::Full(1),
        });
        let came = callers.push(vec![sample(1, 0, 8), sample(2, 7, 8), loss], now);
        assert_eq!(times(&came), [1], "what it needs was described");
        assert_eq!(callers.push(vec![sample(4, 0, 8)], now), []);
        let came = callers.push(vec![described(7)], now);
        assert!(matches!(came[0], Record::Described(_)));
        assert_eq!(times(&came), [2, 3, 4]);
        // What is never described is not waited for.
        assert_eq!(callers.push(vec![sample(5, 8, 8)], now), []);
        assert_eq!(times(&callers.push(Vec::new(), now + PATIENCE)), [5]);
        assert_eq!(callers.push(vec![sample(6, 8, 8)], now), []);
        assert_eq!(times(&callers.rest()), [6]);
        assert_eq!((callers.bytes, callers.rest()), (0, Vec::new()));
    }

    #[test]
    fn no_more_wait_than_there_is_room_for() {
        let (mut callers, now) = (callers(), Instant::now());
        let size = MOST_WAITING / 2 - 3 * size_of::<ProgramFrame>();
        assert_eq!(
            callers.push(vec![sample(1, 8, size), sample(2, 8, size)], now),
            []
        );
        assert_eq!(times(&callers.push(vec![sample(3, 8, 8)], now)), [1]);
    }

    #[test]
    fn frames_take_room() {
        let frames = 3 * size_of::<ProgramFrame>();
        assert_eq!(bytes(&sample(1, 8, 8)), frames + 8);
    }

    /// A guest whose agent describes it later, and has no stacks.
    #[test]
    fn samples_without_a_stack_do_not_wait() {
        let mut callers = callers();
        let came = callers.push(vec![sample(1, 8, 0)], Instant::now());
        assert_eq!(times(&came), [1]);
        assert!(callers.is_empty());
    }
}
