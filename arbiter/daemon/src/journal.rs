//! The bytes of the journal: which leases there were. Pure.
//!
//! A file has a header and then records. The header is `UMPLEASE`, the version (4 bytes,
//! little endian), the boot id of the host (36 bytes) and the CRC-32 of these. A record is
//! the length of its payload (4 bytes), the CRC-32 of the payload, and the payload: JSON, a list
//! of entries that are true together. A record that is cut off or damaged ends the journal: it
//! was never answered for.
//!
//! What was decided together is one record, since half of it may be what nobody decided: that one
//! lease holds what another is yet to give up, or that a control group below another is there
//! without it. In version 1 each entry was a record.

use std::collections::BTreeMap;

use arbiter::CounterSet;
pub(crate) use arbiter_host::LeaseRecord as Stored;
use serde::{Deserialize, Serialize};

const MAGIC: &[u8; 8] = b"UMPLEASE";
/// Written from now on; those from the first on are read.
pub(crate) const VERSION: u32 = 2;
pub(crate) const FIRST: u32 = 1;
// Who changes what a lease is there says here what becomes of a journal's version.
const _: () = assert!(Stored::VERSION == 1);
const BOOT_ID: usize = 36;
/// Length of the header.
pub(crate) const HEADER: usize = 8 + 4 + BOOT_ID + 4;

/// Why a user is barred: an event of its counted after its lease had ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Barred {
    pub(crate) uid: u32,
    /// The process that had the event.
    pub(crate) pid: u32,
    pub(crate) lease: u64,
}

/// What a record says, with others.
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
    /// It is of a version of before: what is written now is not added to it.
    pub(crate) old: bool,
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

    fn add(&mut self, entry: Entry) {
        match entry {
            Entry::Lease(lease) => {
                self.next = self.next.max(lease.id + 1);
                self.leases.insert(lease.id, *lease);
            }
            Entry::Ended(id) => {
                self.next = self.next.max(id + 1);
                self.leases.remove(&id);
            }
            Entry::Next(next) => self.next = self.next.max(next),
            Entry::Barred(barred) => {
                self.barred.insert(barred.uid, barred);
            }
            Entry::Pardoned(uid) => {
                self.barred.remove(&uid);
            }
        }
    }

    /// What a journal that is written anew says of it.
    pub(crate) fn entries(&self) -> Vec<Entry> {
        let leases = self.leases.values().cloned().map(Box::new);
        let barred = self.barred.values().cloned();
        std::iter::once(Entry::Next(self.next))
            .chain(leases.map(Entry::Lease))
            .chain(barred.map(Entry::Barred))
            .collect()
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
    header_of(VERSION, boot_id)
}

fn header_of(version: u32, boot_id: &str) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(version.to_le_bytes());
    let mut id = boot_id.as_bytes().to_vec();
    id.resize(BOOT_ID, 0);
    bytes.extend(id);
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    bytes
}

/// Appends a record of these entries, which are read together or not at all.
pub(crate) fn write(entries: &[Entry], bytes: &mut Vec<u8>) {
    add_record(&serde_json::to_vec(entries).unwrap_or_default(), bytes);
}

fn add_record(payload: &[u8], bytes: &mut Vec<u8>) {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    bytes.extend(length.to_le_bytes());
    bytes.extend(crc32fast::hash(payload).to_le_bytes());
    bytes.extend(payload);
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at + 4)?;
    Some(u32::from_le_bytes(word.try_into().ok()?))
}

/// What a journal says.
pub(crate) fn recall(bytes: &[u8], boot_id: &str) -> Result<Recalled, Unusable> {
    let theirs = bytes.get(..HEADER).ok_or(Unusable::NoJournal)?;
    let whole = word(theirs, HEADER - 4) == Some(crc32fast::hash(&theirs[..HEADER - 4]));
    let version = word(theirs, MAGIC.len()).filter(|_| whole && theirs.starts_with(MAGIC));
    let version = version.ok_or(Unusable::NoJournal)?;
    if !(FIRST..=VERSION).contains(&version) {
        return Err(Unusable::Version(version));
    }
    let recalled = records(bytes);
    if theirs != header_of(version, boot_id) {
        return Err(Unusable::OtherBoot(recalled.barred));
    }
    Ok(Recalled {
        old: version < VERSION,
        ..recalled
    })
}

/// What the records behind the header say.
fn records(bytes: &[u8]) -> Recalled {
    let mut recalled = Recalled {
        next: 1,
        length: HEADER,
        ..Recalled::default()
    };
    while let Some((entries, length)) = record(&bytes[recalled.length..]) {
        recalled.length += length;
        entries.into_iter().for_each(|entry| recalled.add(entry));
    }
    recalled.cut = recalled.length < bytes.len();
    recalled
}

/// The first record, and its length.
fn record(bytes: &[u8]) -> Option<(Vec<Entry>, usize)> {
    let length = usize::try_from(word(bytes, 0)?).ok()?;
    let payload = bytes.get(8..length.checked_add(8)?)?;
    if word(bytes, 4)? != crc32fast::hash(payload) {
        return None;
    }
    let entries = if payload.starts_with(b"[") {
        serde_json::from_slice(payload).ok()?
    } else {
        // Of version 1.
        vec![serde_json::from_slice(payload).ok()?]
    };
    Some((entries, 8 + length))
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

    /// A journal in which a record is one entry.
    pub(crate) fn of_version_1(boot: &str, entries: &[serde_json::Value]) -> Vec<u8> {
        let mut bytes = header_of(1, boot);
        for entry in entries {
            add_record(entry.to_string().as_bytes(), &mut bytes);
        }
        bytes
    }

    /// A record of each.
    fn journal(entries: &[Entry]) -> Vec<u8> {
        let mut bytes = header(BOOT);
        for entry in entries {
            write(std::slice::from_ref(entry), &mut bytes);
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

    /// A record was one entry, and of threads there were numbers alone.
    #[test]
    fn a_journal_of_version_1_is_read() {
        let now = Entry::Lease(Box::new(lease(1, 2)));
        let mut of_before = serde_json::to_value(now).expect("JSON");
        let fields = of_before["l"].as_object_mut().expect("a lease");
        assert!(fields.remove("started").is_some());
        let bytes = of_version_1(BOOT, &[of_before, serde_json::json!({ "n": 9 })]);
        let recalled = recall(&bytes, BOOT).expect("a journal");
        let right = Stored {
            started: None,
            ..lease(1, 2)
        };
        assert_eq!(
            (recalled.next, recalled.cut, recalled.old),
            (9, false, true)
        );
        let anew = recall(&journal(&recalled.entries()), BOOT).expect("a journal");
        assert_eq!((&anew.leases, anew.next), (&recalled.leases, 9));
        assert!(!anew.old);
        assert_eq!(anew.leases.into_values().collect::<Vec<_>>(), [right]);
    }

    #[test]
    fn what_was_decided_together_is_there_as_a_whole_or_not_at_all() {
        let before = journal(&[Entry::Lease(Box::new(lease(1, 2)))]);
        let mut whole = before.clone();
        // Two that have what one had.
        let many = (2..6000).map(|id| Entry::Lease(Box::new(lease(id, 1))));
        let together: Vec<Entry> = std::iter::once(Entry::Ended(1)).chain(many).collect();
        write(&together, &mut whole);
        let long = whole.len() - before.len();
        assert!(long > 1 << 20, "{long}");
        let recalled = recall(&whole, BOOT).expect("a journal");
        assert_eq!((recalled.leases.len(), recalled.cut), (5998, false));
        for length in (before.len()..whole.len()).step_by(997) {
            let recalled = recall(&whole[..length], BOOT).expect("a journal");
            let left: Vec<u64> = recalled.leases.into_keys().collect();
            assert_eq!((left, recalled.length), (vec![1], before.len()));
        }
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
