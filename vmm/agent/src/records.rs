//! Records of the kernel's perf events: their bytes, as `perf_event_open(2)` lays them out for
//! the events that [`sys`](crate::sys) opens. Each ends with thread, time and processor
//! (`sample_id_all` with `PERF_SAMPLE_TID`, `TIME` and `CPU`).

/// Bytes of a record's head: kind, flags, length.
pub(crate) const HEAD: usize = 8;
/// Thread, time and processor.
const TAIL: usize = 24;

const LOST: u32 = 2;
const COMM: u32 = 3;
const EXIT: u32 = 4;
const FORK: u32 = 7;
const MMAP2: u32 = 10;
const SWITCH_CPU_WIDE: u32 = 15;
/// Flags of a comm that is an exec's, of a switch away, and of a mapping with a build id in
/// place of device and inode.
const COMM_EXEC: u16 = 1 << 13;
const SWITCH_OUT: u16 = 1 << 13;
const BUILD_ID: u16 = 1 << 14;

/// A process and a thread of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ids {
    pub(crate) pid: u32,
    pub(crate) tid: u32,
}

/// What happened, and when: in ns of the clock that the event was opened with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) time: u64,
    pub(crate) what: What,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// The processor goes from one thread to another.
    Switch { from: Ids, to: Ids },
    /// A thread has come to the processor.
    Runs(Ids),
    /// Records are missing.
    Lost,
    /// Threads and processes change.
    Change(Change),
}

/// A change of what runs in the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Fork { child: Ids, parent: Ids },
    Exit(Ids),
    Comm { of: Ids, comm: String, exec: bool },
    Map { pid: u32, mapping: Mapped },
}

/// Executable memory of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mapped {
    pub(crate) start: u64,
    pub(crate) length: u64,
    pub(crate) offset: u64,
    pub(crate) file: MappedFile,
}

/// What is mapped. The name is as perf has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct MappedFile {
    pub(crate) device: u32,
    pub(crate) inode: u64,
    pub(crate) name: String,
}

/// The length of the record with this head; none if it is no record's.
pub(crate) fn length(head: [u8; HEAD]) -> Option<usize> {
    let length = usize::from(u16::from_le_bytes([head[6], head[7]]));
    (length >= HEAD).then_some(length)
}

/// What the record tells that `bytes` are; none if that is of no concern, or they are none.
pub(crate) fn record(bytes: &[u8]) -> Option<Record> {
    let (head, rest) = bytes.split_first_chunk::<HEAD>()?;
    let kind = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
    let flags = u16::from_le_bytes([head[4], head[5]]);
    let (body, tail) = rest.split_at_checked(rest.len().checked_sub(TAIL)?)?;
    let mut tail = Fields(tail);
    let (current, time) = (tail.ids()?, tail.u64()?);
    let mut body = Fields(body);
    let what = match kind {
        LOST => What::Lost,
        SWITCH_CPU_WIDE if flags & SWITCH_OUT != 0 => What::Switch {
            from: current,
            to: body.ids()?,
        },
        SWITCH_CPU_WIDE => What::Runs(current),
        COMM => What::Change(Change::Comm {
            of: body.ids()?,
            comm: body.text(),
            exec: flags & COMM_EXEC != 0,
        }),
        // The parent's come in between.
        FORK => {
            let (pid, parent, tid, by) = (body.u32()?, body.u32()?, body.u32()?, body.u32()?);
            What::Change(Change::Fork {
                child: Ids { pid, tid },
                parent: Ids {
                    pid: parent,
                    tid: by,
                },
            })
        }
        EXIT => {
            let (pid, _, tid) = (body.u32()?, body.u32()?, body.u32()?);
            What::Change(Change::Exit(Ids { pid, tid }))
        }
        MMAP2 if flags & BUILD_ID == 0 => mapping(&mut body)?,
        _ => return None,
    };
    Some(Record { time, what })
}

fn mapping(body: &mut Fields<'_>) -> Option<What> {
    let Ids { pid, .. } = body.ids()?;
    let (start, length, offset) = (body.u64()?, body.u64()?, body.u64()?);
    let (major, minor) = (body.u32()?, body.u32()?);
    // The inode's generation, which /proc does not tell, protection and flags: only what may be
    // executed is recorded.
    let (inode, _, _) = (body.u64()?, body.u64()?, body.u64()?);
    let file = MappedFile {
        device: major << 20 | minor & 0xf_ffff,
        inode,
        name: body.text(),
    };
    Some(What::Change(Change::Map {
        pid,
        mapping: Mapped {
            start,
            length,
            offset,
            file,
        },
    }))
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn ids(&mut self) -> Option<Ids> {
        Some(Ids {
            pid: self.u32()?,
            tid: self.u32()?,
        })
    }

    /// The text up to a byte 0: the rest fills up to a multiple of eight bytes.
    fn text(&mut self) -> String {
        let text = self.0.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).into_owned()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A record of thread 8 of process 7, at 99 ns.
    fn bytes(kind: u32, flags: u16, body: &[u8]) -> Vec<u8> {
        let length = u16::try_from(HEAD + body.len() + TAIL).expect("short");
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend(flags.to_le_bytes());
        bytes.extend(length.to_le_bytes());
        bytes.extend(body);
        bytes.extend([7u32, 8].map(u32::to_le_bytes).concat());
        bytes.extend(99u64.to_le_bytes());
        bytes.extend([0; 8]);
        bytes
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn records_are_read() {
        let ids = |pid, tid| Ids { pid, tid };
        let comm = [words(&[7, 8]), b"a b\0\0\0\0\0".to_vec()].concat();
        let comm_is = |exec| {
            What::Change(Change::Comm {
                of: ids(7, 8),
                comm: "a b".to_owned(),
                exec,
            })
        };
        let map = [
            words(&[
                7, 8, 0x1000, 0, 0x2000, 0, 0x3000, 0, 8, 1, 77, 0, 5, 0, 5, 2,
            ]),
            b"/bin/x\0\0".to_vec(),
        ]
        .concat();
        let mapped = What::Change(Change::Map {
            pid: 7,
            mapping: Mapped {
                start: 0x1000,
                length: 0x2000,
                offset: 0x3000,
                file: MappedFile {
                    device: 8 << 20 | 1,
                    inode: 77,
                    name: "/bin/x".to_owned(),
                },
            },
        });
        let switch = What::Switch {
            from: ids(7, 8),
            to: ids(1, 2),
        };
        let fork = What::Change(Change::Fork {
            child: ids(10, 11),
            parent: ids(1, 2),
        });
        let exit = What::Change(Change::Exit(ids(10, 11)));
        for (kind, flags, body, expected) in [
            (COMM, 0, comm.clone(), Some(comm_is(false))),
            (COMM, COMM_EXEC | 2, comm, Some(comm_is(true))),
            (MMAP2, 2, map.clone(), Some(mapped)),
            (MMAP2, BUILD_ID, map.clone(), None),
            (SWITCH_CPU_WIDE, SWITCH_OUT, words(&[1, 2]), Some(switch)),
            (
                SWITCH_CPU_WIDE,
                0,
                words(&[1, 2]),
                Some(What::Runs(ids(7, 8))),
            ),
            (FORK, 0, words(&[10, 1, 11, 2, 0, 0]), Some(fork)),
            (EXIT, 0, words(&[10, 1, 11, 2, 0, 0]), Some(exit)),
            (LOST, 0, words(&[0; 4]), Some(What::Lost)),
            (EXIT, 0, words(&[10]), None),
            (9, 0, map, None),
        ] {
            let bytes = bytes(kind, flags, &body);
            let head = bytes.first_chunk().expect("a head");
            assert_eq!(length(*head), Some(bytes.len()));
            let expected = expected.map(|what| Record { time: 99, what });
            assert_eq!(record(&bytes), expected, "{kind} {flags:#x}");
        }
        assert_eq!(length([0; HEAD]), None, "nobody would come behind it");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(bytes: Vec<u8>) {
            let _ = record(&bytes);
        }
    }
}
