//! The bytes of a `perf.data` file, version 2, as perf's `tools/perf/Documentation/
//! perf.data-file-format.txt` and `linux/perf_event.h` describe them. Little-endian.

use super::objects::{BuildId, Identity, Object};

/// How the file begins.
pub(super) const MAGIC: [u8; 8] = *b"PERFILE2";
/// Bytes of the header of the file.
pub(super) const HEADER: u64 = 104;
/// Bytes of an event's attributes: `PERF_ATTR_SIZE_VER5`.
const ATTRIBUTES: u32 = 112;
/// Strings of features are filled up to a multiple of this.
const STRING_ALIGN: usize = 64;

/// Types of records.
const MMAP: u32 = 1;
const COMM: u32 = 3;
const EXIT: u32 = 4;
const FORK: u32 = 7;
const SAMPLE: u32 = 9;
const MMAP2: u32 = 10;
const TEXT_POKE: u32 = 20;
const BUILD_ID: u32 = 67;

/// `misc` of a record.
const KERNEL: u16 = 1;
const USER: u16 = 2;
const HAS_BUILD_ID: u16 = 1 << 14;
/// Of a FORK: the parent's mappings are not the child's.
const WITHOUT_MAPPINGS: u16 = 1 << 13;
/// Of an entry of BUILD_IDS: it says how long the build id is.
const HAS_SIZE: u16 = 1 << 15;

/// Fields of a sample: IP, TID, TIME, CPU, PERIOD and IDENTIFIER.
const FIELDS: u64 = 1 | 1 << 1 | 1 << 2 | 1 << 7 | 1 << 8 | 1 << 16;
const CALLCHAIN: u64 = 1 << 5;
/// Flags of attributes: mmap, comm, task, sample_id_all, mmap2.
const FLAGS: u64 = 1 << 8 | 1 << 9 | 1 << 13 | 1 << 18 | 1 << 23;

/// In a chain, in front of addresses of the kernel and of the program.
const CONTEXT_KERNEL: u64 = 0u64.wrapping_sub(128);
const CONTEXT_USER: u64 = 0u64.wrapping_sub(512);

/// Features, by their bits.
pub(super) const BUILD_IDS: u32 = 2;
pub(super) const HOSTNAME: u32 = 3;
pub(super) const ARCH: u32 = 6;
pub(super) const NRCPUS: u32 = 7;
pub(super) const EVENT_DESC: u32 = 12;
/// Of the first sample and of the last one: parts of the time are parts of that.
pub(super) const SAMPLE_TIME: u32 = 21;

const PROT_READ_WRITE: u32 = 3;
const PROT_READ_EXEC: u32 = 5;
const MAP_PRIVATE: u32 = 2;
/// The longest name of a file, without the NUL.
const LONGEST_NAME: usize = 4095;

/// An event.
#[derive(Clone, Debug)]
pub(super) struct Attributes<'a> {
    pub(super) name: &'a str,
    pub(super) id: u64,
    pub(super) period: u64,
    pub(super) chains: bool,
}

impl Attributes<'_> {
    fn put(&self, out: &mut Vec<u8>) {
        // The name comes with EVENT_DESC. What perf knows by a number of its own has that.
        let (kind, config): (u32, u64) = match self.name.split(':').next() {
            Some("cycles" | "cpu-cycles") => (0, 0),
            Some("instructions") => (0, 1),
            _ => (4, self.id),
        };
        let fields = if self.chains {
            FIELDS | CALLCHAIN
        } else {
            FIELDS
        };
        let end = out.len() + ATTRIBUTES as usize;
        out.extend(kind.to_le_bytes());
        out.extend(ATTRIBUTES.to_le_bytes());
        for number in [config, self.period, fields, 0, FLAGS] {
            out.extend(number.to_le_bytes());
        }
        out.resize(end, 0);
    }
}

/// The part of the file between its header and its records: identifiers and attributes.
/// Returns the offset of the attributes and their size.
pub(super) fn put_attributes(events: &[Attributes<'_>], out: &mut Vec<u8>) -> (u64, u64) {
    let ids = HEADER;
    for event in events {
        out.extend(event.id.to_le_bytes());
    }
    let start = out.len();
    for (number, event) in (0u64..).zip(events) {
        event.put(out);
        out.extend((ids + 8 * number).to_le_bytes());
        out.extend(8u64.to_le_bytes());
    }
    let size = out.len() - start;
    (HEADER + start as u64, size as u64)
}

/// The header of a file.
pub(super) fn header(attributes: (u64, u64), data: (u64, u64), features: &[u32]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    let each = u64::from(ATTRIBUTES) + 16;
    let sections = [attributes, data, (0, 0)];
    out.extend(HEADER.to_le_bytes());
    out.extend(each.to_le_bytes());
    for (offset, size) in sections {
        out.extend(offset.to_le_bytes());
        out.extend(size.to_le_bytes());
    }
    let bits = features.iter().fold(0u64, |bits, bit| bits | 1 << bit);
    for word in [bits, 0, 0, 0] {
        out.extend(word.to_le_bytes());
    }
    out
}

/// A string of a feature.
pub(super) fn put_string(text: &str, out: &mut Vec<u8>) {
    let length = (text.len() + 1).next_multiple_of(STRING_ALIGN);
    out.extend(u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    let end = out.len() + length;
    out.extend(text.as_bytes());
    out.resize(end, 0);
}

/// EVENT_DESC: the events with their names.
pub(super) fn put_event_desc(events: &[Attributes<'_>], out: &mut Vec<u8>) {
    let count = u32::try_from(events.len()).unwrap_or(u32::MAX);
    out.extend(count.to_le_bytes());
    out.extend(ATTRIBUTES.to_le_bytes());
    for event in events {
        event.put(out);
        out.extend(1u32.to_le_bytes());
        put_string(event.name, out);
        out.extend(event.id.to_le_bytes());
    }
}

/// Whose a record is, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) pid: u32,
    pub(super) tid: u32,
    pub(super) time_ns: u64,
    pub(super) cpu: u32,
    /// The event's identifier.
    pub(super) id: u64,
}

/// Something that is mapped.
#[derive(Clone, Debug)]
pub(super) struct Mapped<'a> {
    pub(super) start: u64,
    pub(super) length: u64,
    pub(super) offset: u64,
    pub(super) name: &'a str,
}

/// Appends a record: `body` writes what is behind its head.
fn put(kind: u32, misc: u16, out: &mut Vec<u8>, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend(kind.to_le_bytes());
    out.extend(misc.to_le_bytes());
    out.extend([0; 2]);
    body(out);
    // The longest has a name of LONGEST_NAME or twice MOST_FRAMES callers.
    let size = u16::try_from(out.len() - start).unwrap_or(u16::MAX);
    out[start + 6..start + 8].copy_from_slice(&size.to_le_bytes());
}

/// What every record but samples ends with.
fn put_stamp(stamp: &Stamp, out: &mut Vec<u8>) {
    out.extend(stamp.pid.to_le_bytes());
    out.extend(stamp.tid.to_le_bytes());
    out.extend(stamp.time_ns.to_le_bytes());
    out.extend(stamp.cpu.to_le_bytes());
    out.extend([0; 4]);
    out.extend(stamp.id.to_le_bytes());
}

/// A name with a NUL, filled up to 8 bytes.
fn put_name(name: &str, out: &mut Vec<u8>) {
    let mut end = name.len().min(LONGEST_NAME);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    let behind = out.len() + (end + 1).next_multiple_of(8);
    out.extend(&name.as_bytes()[..end]);
    out.resize(behind, 0);
}

/// The name of a thread, by the numbers of its process and its own.
pub(super) fn put_comm((pid, tid): (u32, u32), comm: &str, stamp: &Stamp, out: &mut Vec<u8>) {
    put(COMM, 0, out, |out| {
        out.extend(pid.to_le_bytes());
        out.extend(tid.to_le_bytes());
        put_name(comm, out);
        put_stamp(stamp, out);
    });
}

/// A thread begins, and has no name or mapping of another. `parent` is the process that began it.
pub(super) fn put_fork(thread: (u32, u32), parent: u32, stamp: &Stamp, out: &mut Vec<u8>) {
    put(FORK, WITHOUT_MAPPINGS, out, |out| {
        put_task(thread, (parent, parent), stamp, out);
    });
}

/// A thread has ended.
pub(super) fn put_exit(thread: (u32, u32), stamp: &Stamp, out: &mut Vec<u8>) {
    put(EXIT, 0, out, |out| put_task(thread, thread, stamp, out));
}

fn put_task(
    (pid, tid): (u32, u32),
    (parent_pid, parent_tid): (u32, u32),
    stamp: &Stamp,
    out: &mut Vec<u8>,
) {
    for number in [pid, parent_pid, tid, parent_tid] {
        out.extend(number.to_le_bytes());
    }
    out.extend(stamp.time_ns.to_le_bytes());
    put_stamp(stamp, out);
}

/// BUILD_IDS: what has which build id, the kernel's own parts and files of programs.
pub(super) fn put_build_ids<'a>(
    kernel: impl Iterator<Item = (&'a str, BuildId)>,
    programs: impl Iterator<Item = (&'a str, BuildId)>,
    out: &mut Vec<u8>,
) {
    let kernel = kernel.map(|one| (KERNEL, one));
    let programs = programs.map(|one| (USER, one));
    for (misc, (name, id)) in kernel.chain(programs) {
        put(BUILD_ID, misc | HAS_SIZE, out, |out| {
            // That of the host's machine, not of a guest's.
            out.extend(u32::MAX.to_le_bytes());
            let (bytes, length) = id.parts();
            out.extend(bytes);
            out.extend([length, 0, 0, 0]);
            put_name(name, out);
        });
    }
}

/// The kernel, or a module of it.
pub(super) fn put_kernel(mapped: &Mapped<'_>, stamp: &Stamp, out: &mut Vec<u8>) {
    put(MMAP, KERNEL, out, |out| {
        out.extend(u32::MAX.to_le_bytes());
        out.extend(0u32.to_le_bytes());
        for number in [mapped.start, mapped.length, mapped.offset] {
            out.extend(number.to_le_bytes());
        }
        put_name(mapped.name, out);
        put_stamp(stamp, out);
    });
}

/// A byte of the kernel has changed at `address`, to what it was.
pub(super) fn put_poke(address: u64, stamp: &Stamp, out: &mut Vec<u8>) {
    put(TEXT_POKE, KERNEL, out, |out| {
        out.extend(address.to_le_bytes());
        // No byte of before, and one of after; filled up to 8 bytes.
        out.extend([0, 0, 1, 0]);
        out.extend([0; 4]);
        put_stamp(stamp, out);
    });
}

/// What a program has mapped.
pub(super) fn put_program(mapped: &Mapped<'_>, object: &Object, stamp: &Stamp, out: &mut Vec<u8>) {
    let misc = match object.identity {
        Identity::BuildId(_) => USER | HAS_BUILD_ID,
        Identity::Inode(..) => USER,
    };
    put(MMAP2, misc, out, |out| {
        out.extend(stamp.pid.to_le_bytes());
        out.extend(stamp.tid.to_le_bytes());
        for number in [mapped.start, mapped.length, mapped.offset] {
            out.extend(number.to_le_bytes());
        }
        match object.identity {
            Identity::BuildId(id) => {
                let (bytes, length) = id.parts();
                out.extend([length, 0, 0, 0]);
                out.extend(bytes);
            }
            Identity::Inode(device, number, generation) => {
                out.extend((device >> 20).to_le_bytes());
                out.extend((device & 0xf_ffff).to_le_bytes());
                out.extend(number.to_le_bytes());
                out.extend(u64::from(generation).to_le_bytes());
            }
        }
        let protection = if object.code {
            PROT_READ_EXEC
        } else {
            PROT_READ_WRITE
        };
        out.extend(protection.to_le_bytes());
        out.extend(MAP_PRIVATE.to_le_bytes());
        put_name(mapped.name, out);
        put_stamp(stamp, out);
    });
}

/// Addresses of a chain: those of the kernel, then those of the program.
#[derive(Clone, Debug, Default)]
pub(super) struct Chain {
    pub(super) kernel: Vec<u64>,
    pub(super) program: Vec<u64>,
}

/// A sample; `chain` where samples of this file have chains.
pub(super) fn put_sample(
    (ip, period, in_kernel): (u64, u64, bool),
    chain: Option<&Chain>,
    stamp: &Stamp,
    out: &mut Vec<u8>,
) {
    let misc = if in_kernel { KERNEL } else { USER };
    put(SAMPLE, misc, out, |out| {
        out.extend(stamp.id.to_le_bytes());
        out.extend(ip.to_le_bytes());
        out.extend(stamp.pid.to_le_bytes());
        out.extend(stamp.tid.to_le_bytes());
        out.extend(stamp.time_ns.to_le_bytes());
        out.extend(stamp.cpu.to_le_bytes());
        out.extend([0; 4]);
        out.extend(period.to_le_bytes());
        let Some(chain) = chain else {
            return;
        };
        let parts = [
            (CONTEXT_KERNEL, &chain.kernel),
            (CONTEXT_USER, &chain.program),
        ];
        let parts = parts.iter().filter(|(_, addresses)| !addresses.is_empty());
        let count: usize = parts
            .clone()
            .map(|(_, addresses)| addresses.len() + 1)
            .sum();
        out.extend((count as u64).to_le_bytes());
        for (context, addresses) in parts {
            out.extend(context.to_le_bytes());
            for address in addresses.iter() {
                out.extend(address.to_le_bytes());
            }
        }
    });
}
