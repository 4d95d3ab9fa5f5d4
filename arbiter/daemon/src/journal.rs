//! The bytes of the journal: which leases there were. Pure.
//!
//! A file has a header and then records. The header is `UMPLEASE`, the version (4 bytes,
//! little endian), the boot id of the host (36 bytes) and the CRC-32 of these. A record is
//! the length of its payload (4 bytes), the CRC-32 of the payload, and the payload: JSON.
//! A record that is cut off or damaged ends the journal: it was never answered for.

use std::collections::BTreeMap;

use arbiter::CounterSet;
pub(crate) use arbiter_host::LeaseRecord as Stored;
use serde::{Deserialize, Serialize};

const MAGIC: &[u8; 8] = b"UMPLEASE";
const VERSION: u32 = Stored::VERSION;
const BOOT_ID: usize = 36;
/// Length of the header.
pub(crate) const HEADER: usize = 8 + 4 + BOOT_ID + 4;
/// No record is longer.
const MOST: usize = 1 << 20;

/// Why a user is barred: an event of its counted after its lease had ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Barred {
    pub(crate) uid: u32,
    /// The process that had the event.
    pub(crate) pid: u32,
    pub(crate) lease: u64,
}

/// What a record says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Entry {
    /// The lease is so now.
    #[serde(rename = "l")]
    Lease(Box<Stored>),
    /// There is no such lease any more.
    #[serde(rename = "e")]
    Ended(u64),
    /// Numbers below this were given.
    #[serde(rename = "n")]
    Next(u64),
    /// The user has no leases and no events until it is pardoned.
    #[serde(rename = "b")]
    Barred(Barred),
    /// The user is pardoned.
    #[serde(rename = "p")]
    Pardoned(u32),
}

/// What a journal comes to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Recalled {
    pub(crate) leases: BTreeMap<u64, Stored>,
    /// Numbers below this were given.
    pub(crate) next: u64,
    /// Users that are barred.
    pub(crate) barred: BTreeMap<u32, Barred>,
    /// Length of what is whole: the rest is cut off.
    pub(crate) length: usize,
    /// The journal goes on after this, and cannot be read.
    pub(crate) cut: bool,
}

impl Recalled {
    /// The counters of each PMU that leases asked for: they were there.
    pub(crate) fn counters(&self) -> BTreeMap<String, CounterSet> {
        let mut counters: BTreeMap<String, CounterSet> = BTreeMap::new();
        for (pmu, bits) in self.leases.values().flat_map(|lease| &lease.demands) {
            let known = counters.entry(pmu.clone()).or_insert(CounterSet::EMPTY);
            *known = *known | CounterSet::from_bits(*bits);
        }
        counters
    }
}

/// A journal that is not this host's of now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// It is of before the last boot: its leases have ended. Users that were barred then are.
    OtherBoot(BTreeMap<u32, Barred>),
    /// It is of another version.
    Version(u32),
    /// It has no header.
    NoJournal,
}

/// The header of a journal that begins.
pub(crate) fn header(boot_id: &str) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    let mut id = boot_id.as_bytes().to_vec();
    id.resize(BOOT_ID, 0);
    bytes.extend(id);
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    bytes
}

impl Entry {
    /// Appends the record.
    pub(crate) fn write(&self, bytes: &mut Vec<u8>) {
        let payload = serde_json::to_vec(self).unwrap_or_default();
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        bytes.extend(length.to_le_bytes());
        bytes.extend(crc32fast::hash(&payload).to_le_bytes());
        bytes.extend(payload);
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at + 4)?;
    Some(u32::from_le_bytes(word.try_into().ok()?))
}

/// What a journal says.
pub(crate) fn recall(bytes: &[u8], boot_id: &str) -> Result<Recalled, Unusable> {
    let ours = header(boot_id);
    let Some(theirs) = bytes.get(..HEADER) else {
        return Err(Unusable::NoJournal);
    };
    if theirs != ours {
        let whole = word(theirs, HEADER - 4) == Some(crc32fast::hash(&theirs[..HEADER - 4]));
        return Err(match word(theirs, 8) {
            Some(version) if whole && theirs.starts_with(MAGIC) && version != VERSION => {
                Unusable::Version(version)
            }
            Some(_) if whole && theirs.starts_with(MAGIC) => {
                Unusable::OtherBoot(records(bytes).barred)
            }
            _ => Unusable::NoJournal,
        });
    }
    Ok(records(bytes))
}

/// What the records behind the header say.
fn records(bytes: &[u8]) -> Recalled {
    let mut recalled = Recalled {
        next: 1,
        length: HEADER,
        ..Recalled::default()
    };
    while let Some((entry, length)) = record(&bytes[recalled.length..]) {
        recalled.length += length;
        match entry {
            Entry::Lease(lease) => {
                recalled.next = recalled.next.max(lease.id + 1);
                recalled.leases.insert(lease.id, *lease);
            }
            Entry::Ended(id) => {
                recalled.next = recalled.next.max(id + 1);
                recalled.leases.remove(&id);
            }
            Entry::Next(next) => recalled.next = recalled.next.max(next),
            Entry::Barred(barred) => {
                recalled.barred.insert(barred.uid, barred);
            }
            Entry::Pardoned(uid) => {
                recalled.barred.remove(&uid);
            }
        }
    }
    recalled.cut = recalled.length < bytes.len();
    recalled
}

/// The first record, and its length.
fn record(bytes: &[u8]) -> Option<(Entry, usize)> {
    let length = usize::try_from(word(bytes, 0)?)
        .ok()
        .filter(|length| *length <= MOST)?;
    let payload = bytes.get(8..8 + length)?;
    if word(bytes, 4)? != crc32fast::hash(payload) {
        return None;
    }
    Some((serde_json::from_slice(payload).ok()?, 8 + length))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const BOOT: &str = "0b5c6c3e-6f0b-4f6a-a5ae-3e6f5a1d2c3b";

    pub(crate) fn lease(id: u64, holds: usize) -> Stored {
        Stored {
            id,
            tenant: "a".into(),
            uid: 1000,
            pid: 7,
            label: "x".into(),
            demands: vec![("cpu".into(), 0xf), ("cpu".into(), 1 << 32)],
            at_least: 2,
            cpus: "0-3".into(),
            threads: Some(vec![9, 12]),
            started: Some(vec![345, 678]),
            group: None,
            with_others: false,
            by: None,
            guaranteed: true,
            priority: 3,
            preemptible: false,
            lasts: Some(5),
            waits: None,
            holds,
            generation: 1,
            waits_since: 0,
            since: Some(3),
            until: Some(8),
            leaving: Some((9, 0, Some(0))),
            blind: 0,
            arrival: 2,
        }
    }

    fn journal(entries: &[Entry]) -> Vec<u8> {
        let mut bytes = header(BOOT);
        for entry in entries {
            entry.write(&mut bytes);
        }
        bytes
    }

    fn entries() -> Vec<Entry> {
        vec![
            Entry::Lease(Box::new(lease(1, 2))),
            Entry::Lease(Box::new(lease(2, 0))),
            Entry::Lease(Box::new(lease(2, 2))),
            Entry::Ended(1),
            Entry::Next(9),
        ]
    }

    #[test]
    fn what_was_written_comes_back() {
        let recalled = recall(&journal(&entries()), BOOT).expect("a journal");
        assert_eq!(
            recalled.leases.into_values().collect::<Vec<_>>(),
            [lease(2, 2)]
        );
        assert_eq!((recalled.next, recalled.cut), (9, false));
    }

    /// A reboot ends leases, and pardons nobody.
    #[test]
    fn who_is_barred_is_so_until_it_is_pardoned_also_over_a_reboot() {
        let barred = |uid| Barred {
            uid,
            pid: 7,
            lease: 3,
        };
        let entries = [
            Entry::Barred(barred(1000)),
            Entry::Barred(barred(1001)),
            Entry::Pardoned(1000),
            Entry::Lease(Box::new(lease(1, 2))),
        ];
        let bytes = journal(&entries);
        let expected = BTreeMap::from([(1001, barred(1001))]);
        assert_eq!(recall(&bytes, BOOT).expect("a journal").barred, expected);
        let other = "11111111-6f0b-4f6a-a5ae-3e6f5a1d2c3b";
        assert_eq!(recall(&bytes, other), Err(Unusable::OtherBoot(expected)));
    }

    #[test]
    fn a_record_of_before_has_threads_without_their_start() {
        let now = Entry::Lease(Box::new(lease(1, 2)));
        let mut of_before = serde_json::to_value(now).expect("JSON");
        let fields = of_before["l"].as_object_mut().expect("a lease");
        assert!(fields.remove("started").is_some());
        let payload = serde_json::to_vec(&of_before).expect("JSON");
        let mut bytes = header(BOOT);
        let length = u32::try_from(payload.len()).expect("it is short");
        bytes.extend(length.to_le_bytes());
        bytes.extend(crc32fast::hash(&payload).to_le_bytes());
        bytes.extend(payload);
        let recalled = recall(&bytes, BOOT).expect("a journal");
        let right = Stored {
            started: None,
            ..lease(1, 2)
        };
        assert_eq!(recalled.leases.into_values().collect::<Vec<_>>(), [right]);
        assert!(!recalled.cut);
    }

    #[test]
    fn a_journal_that_is_cut_at_any_byte_has_what_is_whole() {
        let entries = entries();
        let whole = journal(&entries);
        let ends: Vec<usize> = (0..=entries.len())
            .map(|count| journal(&entries[..count]).len())
            .collect();
        for length in 0..whole.len() {
            let recalled = recall(&whole[..length], BOOT);
            let Some(last) = ends.iter().rposition(|end| *end <= length) else {
                assert_eq!(recalled, Err(Unusable::NoJournal));
                continue;
            };
            let expected = recall(&journal(&entries[..last]), BOOT).expect("whole");
            let recalled = recalled.expect("a header");
            assert_eq!(recalled.cut, length > ends[last]);
            assert_eq!(recalled.leases, expected.leases);
            assert_eq!(recalled.length, ends[last]);
        }
    }

    #[test]
    fn a_bit_that_turned_is_found() {
        let whole = journal(&entries());
        let all = recall(&whole, BOOT).expect("whole");
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            match recall(&damaged, BOOT) {
                Ok(recalled) => assert!(recalled.cut && recalled != all, "byte {at}"),
                Err(_) => assert!(at < HEADER, "byte {at}"),
            }
        }
    }

    #[test]
    fn other_boots_and_versions_are_told_apart() {
        let other = "11111111-6f0b-4f6a-a5ae-3e6f5a1d2c3b";
        let none = BTreeMap::new();
        assert_eq!(recall(&header(other), BOOT), Err(Unusable::OtherBoot(none)));
        let mut newer = header(BOOT);
        newer[8] = 9;
        let sum = crc32fast::hash(&newer[..HEADER - 4]).to_le_bytes();
        newer[HEADER - 4..].copy_from_slice(&sum);
        assert_eq!(recall(&newer, BOOT), Err(Unusable::Version(9)));
        assert_eq!(recall(b"something else", BOOT), Err(Unusable::NoJournal));
    }
}
