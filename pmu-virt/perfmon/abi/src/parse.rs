//! Samples out of the buffers of the default format and of the double buffer
//! (§3.6, §6.3.1). Nothing in a buffer makes these functions panic, or allocate
//! more than a small multiple of the buffer's size.

use std::collections::BTreeMap;

use thiserror::Error;

use crate::consts::{PFM_DFL_SMPL_IIP_HDR, PFM_DFL_SMPL_NO_HDR};
use crate::field::{Field, Record};
use crate::place::GuestPlace;
use crate::records::{DefaultEntry, DefaultHeader, DoubleHeader};
use crate::{PMD_WORDS, consts};

/// A sample of any format.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Instruction pointer of the guest; `None` without any header.
    pub ip: Option<u64>,
    /// What the header of the default format tells, where there is one.
    pub entry: Option<DefaultEntry>,
    /// `reg_smpl_eventid` of the counter that overflowed, where the format
    /// records it.
    pub eventid: Option<u64>,
    /// Recorded PMDs and their values, by ascending index. `u64::MAX` is
    /// recorded for a virtual PMD that the host cannot tell.
    pub values: Vec<(u16, u64)>,
    /// Where in the guest it was taken, as far as the format records it.
    pub guest: GuestPlace,
}

/// Why a buffer cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ParseError {
    /// It ends before its header does, or its header points outside.
    #[error("the sampling buffer is too short for what its header says")]
    Short,
    /// Another format, or a later version of this.
    #[error("the sampling buffer has version {0:#x}, which is not known here")]
    Version(u32),
    /// It was not said what the samples of this counter contain.
    #[error("nothing is known of samples of PMD {pmd} in set {set}")]
    Unknown {
        /// The event set.
        set: u16,
        /// The PMD that overflowed.
        pmd: u16,
    },
    /// Samples do not say whose they are, and several counters make them.
    #[error("samples without a full header can be told apart only if one counter alone makes them")]
    Ambiguous,
    /// Samples without header and body have no bytes.
    #[error("the samples have neither header nor body")]
    Empty,
    /// The buffer ends in the middle of a sample.
    #[error("sample {0} reaches over the end of the samples")]
    Cut(u64),
}

/// What the samples of each counter contain: `reg_smpl_pmds` by set and PMD.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout(BTreeMap<(u16, u16), Vec<u16>>);

impl Layout {
    /// When `pmd` of `set` overflows, `smpl_pmds` are recorded.
    pub fn insert(&mut self, set: u16, pmd: u16, smpl_pmds: [u64; PMD_WORDS]) {
        self.0.insert((set, pmd), indices(smpl_pmds).collect());
    }

    fn of(&self, set: u16, pmd: u16) -> Result<&[u16], ParseError> {
        let body = self.0.get(&(set, pmd)).map(Vec::as_slice);
        body.ok_or(ParseError::Unknown { set, pmd })
    }

    /// The body of all samples, if there is no other.
    fn only(&self) -> Result<&[u16], ParseError> {
        let mut bodies = self.0.values();
        let first = bodies.next().ok_or(ParseError::Ambiguous)?;
        let same = bodies.all(|body| body == first);
        same.then_some(first.as_slice())
            .ok_or(ParseError::Ambiguous)
    }
}

/// The members of a vector of PMDs, ascending.
pub fn indices(words: [u64; PMD_WORDS]) -> impl Iterator<Item = u16> {
    (0..consts::PFM_MAX_PMDS).filter(move |&pmd| {
        let word = words.get(usize::from(pmd / 64));
        word.is_some_and(|word| word & (1 << (pmd % 64)) != 0)
    })
}

/// All samples of the default format's buffer, oldest first.
///
/// # Errors
/// See [`ParseError`].
pub fn default_buffer(buffer: &[u8], layout: &Layout) -> Result<Vec<Sample>, ParseError> {
    let header: DefaultHeader = header(buffer)?;
    check_version(header.version, consts::PFM_DFL_SMPL_VERSION)?;
    let begin = u64::try_from(DefaultHeader::SIZE).unwrap_or(u64::MAX);
    let bytes = range(buffer, begin, header.cur_offs)?;
    samples(bytes, header.count, header.flags, layout)
}

/// The header of the double buffer.
///
/// # Errors
/// See [`ParseError`].
pub fn double_header(buffer: &[u8]) -> Result<DoubleHeader, ParseError> {
    let header: DoubleHeader = header(buffer)?;
    check_version(header.version, consts::PFM_DOUBLE_SMPL_VERSION)?;
    Ok(header)
}

/// The full half that PFM_RESTART frees next; `None` if none is full.
#[must_use]
pub fn oldest_full(header: &DoubleHeader) -> Option<usize> {
    let full = |&half: &usize| header.state.get(half) == Some(&consts::PFM_DOUBLE_HALF_FULL);
    (0..2).filter(full).min_by_key(|&half| header.filling[half])
}

/// The samples of one half of the double buffer, 0 or 1, oldest first.
///
/// # Errors
/// See [`ParseError`].
pub fn double_half(buffer: &[u8], half: usize, layout: &Layout) -> Result<Vec<Sample>, ParseError> {
    let header = double_header(buffer)?;
    let of = |field: [u64; 2]| field.get(half).copied().ok_or(ParseError::Short);
    let bytes = range(buffer, of(header.offs)?, of(header.cur_offs)?)?;
    samples(bytes, of(header.count)?, header.flags, layout)
}

fn header<T: Record>(buffer: &[u8]) -> Result<T, ParseError> {
    let bytes = buffer.get(..T::SIZE).ok_or(ParseError::Short)?;
    Ok(T::get(bytes))
}

fn check_version(version: u32, known: u32) -> Result<(), ParseError> {
    if version >> 16 == known >> 16 {
        Ok(())
    } else {
        Err(ParseError::Version(version))
    }
}

fn range(buffer: &[u8], begin: u64, end: u64) -> Result<&[u8], ParseError> {
    let begin = usize::try_from(begin).map_err(|_| ParseError::Short)?;
    let end = usize::try_from(end).map_err(|_| ParseError::Short)?;
    buffer.get(begin..end).ok_or(ParseError::Short)
}

fn samples(
    mut bytes: &[u8],
    count: u64,
    flags: u32,
    layout: &Layout,
) -> Result<Vec<Sample>, ParseError> {
    let mut samples = Vec::new();
    for number in 0..count {
        let cut = ParseError::Cut(number);
        let mut sample = Sample::default();
        let body = if flags & PFM_DFL_SMPL_NO_HDR != 0 {
            layout.only()?
        } else if flags & PFM_DFL_SMPL_IIP_HDR != 0 {
            sample.ip = Some(take::<u64>(&mut bytes, cut)?);
            layout.only()?
        } else {
            let (head, rest) = bytes.split_at_checked(DefaultEntry::SIZE).ok_or(cut)?;
            bytes = rest;
            let entry = DefaultEntry::get(head);
            (sample.ip, sample.entry) = (Some(entry.ip), Some(entry));
            layout.of(entry.set, entry.ovfl_pmd)?
        };
        if body.is_empty() && flags & PFM_DFL_SMPL_NO_HDR != 0 {
            return Err(ParseError::Empty);
        }
        for &pmd in body {
            sample.values.push((pmd, take::<u64>(&mut bytes, cut)?));
        }
        samples.push(sample);
    }
    Ok(samples)
}

fn take<T: Field>(bytes: &mut &[u8], cut: ParseError) -> Result<T, ParseError> {
    let (head, rest) = bytes.split_at_checked(T::SIZE).ok_or(cut)?;
    *bytes = rest;
    Ok(T::get(head))
}
