//! What an agent has told.

use std::collections::{BTreeMap, HashMap};

use perfmon_abi::wire::programs::{Described, MappingInfo, TaskInfo};
use umpire_agent_wire::{File, LONGEST_COMM, LONGEST_PATH, Mapping, Thread};

use crate::guest_kernel::described::Descriptions;

/// Most threads, files and mappings that are kept of a VM, and bytes of their names.
const THREADS: usize = 1 << 13;
const FILES: usize = 1 << 13;
const MAPPINGS: usize = 1 << 16;
const BYTES: usize = 8 << 20;

/// Threads, files and mappings by their numbers at the agent.
#[derive(Debug, Default)]
pub(super) struct Known {
    threads: HashMap<u32, (Thread, u64)>,
    files: HashMap<u32, File>,
    /// What is mapped, by memory and its first address.
    memories: HashMap<u32, BTreeMap<u64, Area>>,
    mappings: usize,
    bytes: usize,
    /// There was no room for something: what it would have replaced may be wrong.
    refused: bool,
}

/// Part of a mapping, or all of it.
#[derive(Debug, Clone, Copy)]
struct Area {
    end: u64,
    offset: u64,
    file: u32,
    /// Its number in samples; 0: it has none.
    number: u64,
}

impl Known {
    /// There is too much to keep more.
    pub(super) fn is_full(&self) -> bool {
        self.threads.len() >= THREADS
            || self.files.len() >= FILES
            || self.mappings >= MAPPINGS
            || self.bytes >= BYTES
    }

    /// What is here may not be what was told.
    pub(super) fn is_broken(&self) -> bool {
        self.refused
    }

    /// There is room. Whoever asks loses something if there is none.
    fn has_room(&mut self) -> bool {
        self.refused |= self.is_full();
        !self.refused
    }

    pub(super) fn add_thread(&mut self, thread: Thread) {
        let sane = thread.comm.len() <= LONGEST_COMM && thread.process.len() <= LONGEST_COMM;
        if sane && self.has_room() {
            self.bytes += thread.comm.len() + thread.process.len();
            self.threads.insert(thread.number, (thread, 0));
        }
    }

    pub(super) fn add_file(&mut self, file: File) {
        if file.name.len() <= LONGEST_PATH && self.has_room() {
            self.bytes += file.name.len();
            self.files.insert(file.number, file);
        }
    }

    /// Takes the place of what was mapped there before.
    pub(super) fn add_mapping(&mut self, mapping: &Mapping) {
        let start = mapping.start;
        let end = start.checked_add(mapping.length).filter(|end| *end > start);
        let Some(end) = end.filter(|_| self.has_room()) else {
            return;
        };
        let areas = self.memories.entry(mapping.memory).or_default();
        let before = areas.len();
        if let Some((&first, area)) = areas.range_mut(..start).next_back()
            && area.end > start
        {
            let whole = std::mem::replace(
                area,
                Area {
                    end: start,
                    number: 0,
                    ..*area
                },
            );
            if whole.end > end {
                let offset = whole.offset.wrapping_add(end - first);
                areas.insert(
                    end,
                    Area {
                        offset,
                        number: 0,
                        ..whole
                    },
                );
            }
        }
        while let Some((&first, &area)) = areas.range(start..end).next() {
            areas.remove(&first);
            if area.end > end {
                let offset = area.offset.wrapping_add(end - first);
                areas.insert(
                    end,
                    Area {
                        offset,
                        number: 0,
                        ..area
                    },
                );
            }
        }
        let area = Area {
            end,
            offset: mapping.offset,
            file: mapping.file,
            number: 0,
        };
        areas.insert(start, area);
        self.mappings = self
            .mappings
            .saturating_add(areas.len())
            .saturating_sub(before);
    }

    /// The numbers in samples of a thread, and of what its program has mapped at each of
    /// `addresses`; 0: not known. What has no number yet is described.
    pub(super) fn numbers(
        &mut self,
        thread: u32,
        addresses: &[u64],
        to: &Descriptions,
    ) -> Vec<u64> {
        let mut numbers = vec![0; 1 + addresses.len()];
        let Some((thread, number)) = self.threads.get_mut(&thread) else {
            return numbers;
        };
        if *number == 0 || !to.is_kept(*number) {
            *number = to.add_new(|number| of_thread(number, thread));
        }
        numbers[0] = *number;
        let Some(areas) = self.memories.get_mut(&thread.memory) else {
            return numbers;
        };
        for (address, number) in addresses.iter().zip(&mut numbers[1..]) {
            let below = areas.range_mut(..=address).next_back();
            let Some((start, area)) = below.filter(|(_, area)| *address < area.end) else {
                continue;
            };
            if area.number == 0 || !to.is_kept(area.number) {
                let file = self.files.get(&area.file);
                area.number = to.add_new(|number| of_area(number, *start, area, file));
            }
            *number = area.number;
        }
        numbers
    }
}

fn of_thread(number: u64, thread: &Thread) -> Described {
    Described::Task(TaskInfo {
        number,
        pid: thread.pid,
        tid: thread.tid,
        comm: clean(&thread.comm),
        process: clean(&thread.process),
        started_ns: thread.started_ns,
        kernel: thread.kernel,
        // It tells nothing of containers.
        inner_pid: 0,
        root: String::new(),
    })
}

fn of_area(number: u64, start: u64, area: &Area, file: Option<&File>) -> Described {
    let file = file.cloned().unwrap_or_default();
    Described::Mapping(MappingInfo {
        number,
        start,
        end: area.end,
        offset: area.offset,
        name: clean(&file.name),
        deleted: file.deleted,
        device: file.device,
        inode: file.inode,
        generation: 0,
        build_id: String::new(),
        root: String::new(),
    })
}

/// Text of the guest for terminals.
pub(super) fn clean(text: &str) -> String {
    let clean = |char: char| if char.is_control() { '?' } else { char };
    text.chars().map(clean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mapping(start: u64, length: u64, file: u32) -> Mapping {
        Mapping {
            memory: 1,
            file,
            start,
            length,
            offset: start,
        }
    }

    fn thread(number: u32) -> Thread {
        Thread {
            number,
            memory: 1,
            comm: "a\x1b[2J".to_owned(),
            ..Thread::default()
        }
    }

    /// What is mapped at each of these addresses: its first one, and the file.
    fn found(known: &mut Known, addresses: &[u64]) -> Vec<Option<(u64, u64)>> {
        let (to, _news) = Descriptions::new();
        let numbers = known.numbers(1, addresses, &to);
        let described = to.after(0).described;
        let find = |number: &u64| {
            described.iter().find_map(|one| match one {
                Described::Mapping(one) if one.number == *number => Some((one.start, one.inode)),
                _ => None,
            })
        };
        numbers[1..].iter().map(find).collect()
    }

    #[test]
    fn later_mappings_replace_earlier_ones() {
        let mut known = Known::default();
        known.add_thread(thread(1));
        for number in 1..=4 {
            let inode = number.into();
            let file = File {
                number,
                inode,
                ..File::default()
            };
            known.add_file(file);
        }
        known.add_mapping(&mapping(0x1000, 0x9000, 1));
        known.add_mapping(&mapping(0x3000, 0x1000, 2));
        known.add_mapping(&mapping(0x9000, 0x2000, 3));
        let addresses = [0xfff, 0x1000, 0x3000, 0x4000, 0x9000, 0xafff, 0xb000];
        let all = found(&mut known, &addresses);
        let expected = [
            None,
            Some((0x1000, 1)),
            Some((0x3000, 2)),
            Some((0x4000, 1)),
            Some((0x9000, 3)),
            Some((0x9000, 3)),
            None,
        ];
        assert_eq!(all, expected);
        known.add_mapping(&mapping(0, u64::MAX, 4));
        assert_eq!(found(&mut known, &[0x3000]), [Some((0, 4))]);
        known.add_mapping(&mapping(5, u64::MAX, 4));
        known.add_mapping(&mapping(5, 0, 4));
        assert_eq!(known.mappings, 1, "these make no sense");
    }

    #[test]
    fn numbers_are_given_once_and_names_are_clean() {
        let (to, _news) = Descriptions::new();
        let mut known = Known::default();
        known.add_thread(thread(1));
        known.add_mapping(&mapping(0x1000, 0x1000, 9));
        let first = known.numbers(1, &[0x1000, 0x1800, 7], &to);
        assert_eq!(first, [1, 2, 2, 0]);
        assert_eq!(known.numbers(1, &[0x1000], &to), [1, 2]);
        assert_eq!(known.numbers(2, &[0x1000], &to), [0, 0]);
        let described = to.after(0).described;
        assert_eq!(described.len(), 2);
        let Described::Task(task) = &described[0] else {
            panic!("{described:?}");
        };
        assert_eq!(task.comm, "a?[2J");
    }

    #[test]
    fn nothing_grows_without_end() {
        let mut known = Known::default();
        let name = "x".repeat(LONGEST_PATH);
        for number in 0..1 << 17 {
            known.add_thread(thread(number));
            let name = name.clone();
            known.add_file(File {
                number,
                name,
                ..File::default()
            });
            known.add_mapping(&mapping(u64::from(number) << 12, 1, number));
        }
        assert!(known.is_full() && known.is_broken() && known.bytes <= BYTES + LONGEST_PATH);
        assert!(known.mappings <= MAPPINGS + 1 && known.threads.len() <= THREADS);
    }

    proptest! {
        #[test]
        fn any_mappings_are_as_if_written_one_after_the_other(
            all in proptest::collection::vec((0u64..40, 0u64..12, 1u32..9), 0..60)
        ) {
            let mut known = Known::default();
            known.add_thread(thread(1));
            for number in 1..9 {
                let inode = number.into();
                known.add_file(File { number, inode, ..File::default() });
            }
            let mut expected = [None; 60];
            for (start, length, file) in all {
                known.add_mapping(&mapping(start, length, file));
                let places = (start..start + length).filter_map(|at| usize::try_from(at).ok());
                places.for_each(|at| expected[at] = Some(u64::from(file)));
            }
            let count = known.memories.values().map(BTreeMap::len).sum::<usize>();
            prop_assert_eq!(count, known.mappings);
            let addresses: Vec<u64> = (0..60).collect();
            let found = found(&mut known, &addresses);
            let files: Vec<_> = found.into_iter().map(|one| one.map(|(_, file)| file)).collect();
            prop_assert_eq!(files, expected);
        }
    }
}
