//! What a VM leaves of contexts when it ends.
//!
//! The last packet of a connection is [`PACKET`], with a sealed memory file: what
//! PFM_GETINFO_EVTSETS and PFM_READ_PMDS would answer from then on, for each context that has
//! a handle there. The file has 8 bytes as the packet's, the number of these contexts, and a
//! [`Place`] for each, by ascending handle. Where such a place points to is a [`Header`],
//! then the event sets by ascending number, then PMDs by ascending set and number: all of
//! set 0, of other sets those of which there is something to tell. What a set does not have
//! is at its default there, or, from [`Header::shared`] on, as in set 0.

use crate::{PmdArg, Record, SetInfo};

/// The packet, and the beginning of the file.
pub const PACKET: [u8; 8] = *b"PFLAST01";
/// Where the number of contexts is, 8 bytes.
pub const COUNT_AT: u64 = 8;
/// Where the first [`Place`] is.
pub const PLACES_AT: u64 = 16;

/// Where the counts of a context are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub handle: u64,
    /// Bytes from the beginning of the file.
    pub at: u64,
}

/// The beginning of a context's counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Event sets.
    pub sets: u64,
    /// PMDs of all of them.
    pub pmds: u64,
    /// PMDs from this number on are the context's, not a set's.
    pub shared: u64,
}

fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

impl Place {
    /// Its bytes in the file.
    pub const SIZE: usize = 16;

    /// The place in these bytes.
    #[must_use]
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Self {
        let [handle, at] = words(bytes);
        Place { handle, at }
    }
}

impl Header {
    /// Its bytes in the file.
    pub const SIZE: usize = 24;

    /// Behind the header, where event set number `index` begins; `None` for a file that
    /// claims to be larger than any is.
    #[must_use]
    pub fn set_at(&self, index: u64) -> Option<u64> {
        index
            .checked_mul(SetInfo::SIZE as u64)?
            .checked_add(Self::SIZE as u64)
    }

    /// The same of PMD number `index`.
    #[must_use]
    pub fn pmd_at(&self, index: u64) -> Option<u64> {
        let pmds = index.checked_mul(PmdArg::SIZE as u64)?;
        self.set_at(self.sets)?.checked_add(pmds)
    }

    /// The header in these bytes.
    #[must_use]
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Self {
        let [sets, pmds, shared] = words(bytes);
        Header { sets, pmds, shared }
    }
}

/// The counts of a context: `sets` and `pmds` are in order.
#[must_use]
pub fn encode(sets: &[SetInfo], pmds: &[PmdArg], shared: u16) -> Vec<u8> {
    let words = [sets.len() as u64, pmds.len() as u64, shared.into()];
    let mut bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
    bytes.extend(SetInfo::vector_to_bytes(sets));
    bytes.extend(PmdArg::vector_to_bytes(pmds));
    bytes
}

/// The file: the counts of contexts, by ascending handle.
#[must_use]
pub fn encode_all(contexts: &[(u32, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = PACKET.to_vec();
    bytes.extend((contexts.len() as u64).to_le_bytes());
    let mut at = PLACES_AT + (contexts.len() * Place::SIZE) as u64;
    for (handle, counts) in contexts {
        bytes.extend(u64::from(*handle).to_le_bytes());
        bytes.extend(at.to_le_bytes());
        at += counts.len() as u64;
    }
    bytes.extend(contexts.iter().flat_map(|(_, counts)| counts));
    bytes
}
