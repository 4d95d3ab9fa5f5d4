//! What goes over the port between the VMM and the agent.
//!
//! A frame is a message in postcard's encoding, behind it the four bytes (little-endian) of its
//! CRC-32, the whole encoded with COBS, between two bytes 0. What is not such a frame is passed
//! over: a terminal on the same port may write there, and either side may begin in the middle.
//!
//! The agent says [`ToVmm::Hello`] each second in which it was not asked. The VMM asks with
//! [`Ask`], one at a time, and the agent answers with [`ToVmm::Told`]: what the VMM has not been
//! told yet of the threads that are meant, and last the [`Item::Threads`] themselves.

#![forbid(unsafe_code)]

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The version of all this.
pub const VERSION: u16 = 1;

/// The first number of a [`ToVmm::Hello`].
pub const MAGIC: u32 = 0x6d70_6167;

/// The longest frame, without the bytes around it.
pub const LONGEST: usize = 8192;

/// Most moments of one question.
pub const MOMENTS: usize = 64;

/// The longest names that are told, in bytes: of a path, and of a thread.
pub const LONGEST_PATH: usize = 4096;
/// As [`LONGEST_PATH`].
pub const LONGEST_COMM: usize = 64;

/// From the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToVmm {
    /// It is there.
    Hello {
        /// [`MAGIC`].
        magic: u32,
        /// [`VERSION`].
        version: u16,
        /// Tells agents that run one after the other.
        session: u64,
    },
    /// It ends, and why.
    Bye(String),
    /// Part of the answer to a question.
    Told {
        /// Of the question.
        sequence: u32,
        /// Counts the parts from 0: one that is missing shows.
        part: u32,
        /// To be taken in order.
        items: Vec<Item>,
    },
}

/// A question of the VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    pub sequence: u32,
    /// The VMM has forgotten everything that it was told.
    pub forget: bool,
    /// Of which it wants to know the threads, in the order of the TSC.
    pub moments: Vec<Moment>,
}

/// A moment in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// The APIC id of a processor.
    pub apic_id: u32,
    /// The guest's TSC: how far behind the moment before it; of the first its value.
    pub tsc: u64,
}

/// What the VMM is told. Numbers stay until it forgets all of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Item {
    /// A thread, as it is now.
    Thread(Thread),
    /// A file, or what is mapped without one.
    File(File),
    /// More of what a process has mapped. What was mapped there before is no longer.
    Mapping(Mapping),
    /// The numbers of the threads at the question's moments, in its order; 0: not known. It ends
    /// the answer.
    Threads(Vec<u32>),
}

/// A thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Thread {
    /// Its number, from 1 on. What has another name later has another number.
    pub number: u32,
    /// The number of its memory, from 1 on; 0: it has none of its own.
    pub memory: u32,
    /// The process; 0 for the idle threads.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// When it began, in ns since the kernel did.
    pub started_ns: u64,
    /// It is one of the kernel's own.
    pub kernel: bool,
    /// Its name.
    pub comm: String,
    /// The name of the process's first thread.
    pub process: String,
}

/// What is mapped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct File {
    /// Its number, from 1 on.
    pub number: u32,
    /// Its device as `MAJOR << 20 | MINOR`; 0 without a file.
    pub device: u32,
    pub inode: u64,
    /// The file has no name any more.
    pub deleted: bool,
    /// The file as the guest names it, or as perf names what is none: `[vdso]`, `//anon`.
    pub name: String,
}

/// Executable memory of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// The number of the memory.
    pub memory: u32,
    /// The number of the file.
    pub file: u32,
    /// Its first address.
    pub start: u64,
    /// Its bytes.
    pub length: u64,
    /// Bytes from the start of the file to `start`.
    pub offset: u64,
}

/// `message` as a frame. One that is longer than [`LONGEST`] is taken by no one.
#[must_use]
pub fn frame(message: &impl Serialize) -> Vec<u8> {
    // What has no length is of no message here.
    let mut plain = postcard::to_stdvec(message).unwrap_or_default();
    plain.extend(crc32fast::hash(&plain).to_le_bytes());
    let mut frame = vec![0];
    frame.extend(cobs::encode_vec(&plain));
    frame.push(0);
    frame
}

/// Finds the frames in what comes over the port.
#[derive(Debug, Default)]
pub struct Frames {
    bytes: Vec<u8>,
    /// What there is now is too long for a frame.
    is_noise: bool,
}

impl Frames {
    /// Takes `bytes`, and hands each message that is whole then to `take`.
    pub fn push<T: DeserializeOwned>(&mut self, bytes: &[u8], mut take: impl FnMut(T)) {
        for byte in bytes {
            if *byte != 0 {
                self.is_noise |= self.bytes.len() >= LONGEST;
                if !self.is_noise {
                    self.bytes.push(*byte);
                }
                continue;
            }
            if let Some(message) = message(&mut self.bytes).filter(|_| !self.is_noise) {
                take(message);
            }
            self.bytes.clear();
            self.is_noise = false;
        }
    }
}

fn message<T: DeserializeOwned>(frame: &mut [u8]) -> Option<T> {
    let length = cobs::decode_in_place(frame).ok()?;
    let (plain, sum) = frame.get(..length)?.split_last_chunk()?;
    if u32::from_le_bytes(*sum) != crc32fast::hash(plain) {
        return None;
    }
    match postcard::take_from_bytes(plain) {
        Ok((message, [])) => Some(message),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn all<T: DeserializeOwned>(bytes: &[u8]) -> Vec<T> {
        let mut found = Vec::new();
        Frames::default().push(bytes, |one| found.push(one));
        found
    }

    fn hello() -> ToVmm {
        ToVmm::Hello {
            magic: MAGIC,
            version: VERSION,
            session: 3,
        }
    }

    fn told() -> ToVmm {
        ToVmm::Told {
            sequence: 7,
            part: 0,
            items: vec![
                Item::Thread(Thread {
                    number: 1,
                    memory: 2,
                    pid: 300,
                    tid: 301,
                    started_ns: 1 << 40,
                    kernel: false,
                    comm: "a\0b".to_owned(),
                    process: "ä".to_owned(),
                }),
                Item::File(File {
                    number: 3,
                    name: "/bin/true".to_owned(),
                    ..File::default()
                }),
                Item::Mapping(Mapping {
                    memory: 2,
                    file: 3,
                    start: u64::MAX,
                    ..Mapping::default()
                }),
                Item::Threads(vec![1, 0]),
            ],
        }
    }

    #[test]
    fn messages_come_through_noise() {
        let (one, two) = (frame(&hello()), frame(&told()));
        let cut = &two[..two.len() / 2];
        for (bytes, expected) in [
            ([&one[..], &two].concat(), vec![hello(), told()]),
            ([b"login: ", &one[..]].concat(), vec![hello()]),
            ([cut, &one].concat(), vec![hello()]),
            ([&vec![7; 3 * LONGEST][..], &one].concat(), vec![hello()]),
            (
                [&one[1..], &[0, 0, 0], &two].concat(),
                vec![hello(), told()],
            ),
            (cut.to_vec(), Vec::new()),
        ] {
            assert_eq!(all::<ToVmm>(&bytes), expected);
        }
    }

    #[test]
    fn a_changed_bit_is_no_message() {
        let good = frame(&told());
        for place in 0..8 * good.len() {
            let mut bad = good.clone();
            bad[place / 8] ^= 1 << (place % 8);
            let found = all::<ToVmm>(&bad);
            // A byte around the frame does not change it.
            assert!(found.is_empty() || found == [told()], "bit {place}");
        }
    }

    proptest! {
        #[test]
        fn questions_come_back(
            sequence: u32,
            forget: bool,
            moments in vec((any::<u32>(), any::<u64>()), 0..MOMENTS),
            noise: Vec<u8>,
        ) {
            let moments = moments.into_iter().map(|(apic_id, tsc)| Moment { apic_id, tsc });
            let ask = Ask { sequence, forget, moments: moments.collect() };
            let bytes = frame(&ask);
            prop_assert!(bytes.len() <= LONGEST);
            prop_assert_eq!(all::<Ask>(&bytes), vec![ask.clone()]);
            prop_assert_eq!(all::<Ask>(&[noise, bytes].concat()).pop(), Some(ask));
        }

        #[test]
        fn any_bytes_are_taken(mut bytes: Vec<u8>) {
            let _ = all::<ToVmm>(&bytes);
            // Also as the content of a frame that is none.
            bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
            let mut frame = cobs::encode_vec(&bytes);
            frame.push(0);
            let _ = all::<ToVmm>(&frame);
        }
    }
}
