//! Reading a profile file, whatever it holds.

use std::fmt;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;

use perfmon_abi::wire::programs::Described;
use thiserror::Error;

use super::record::{Header, LeftOut, Record, Sample, Totals};
use super::wire::{
    DESCRIBED, Decoded, HEAD, LONGEST_HEADER, LONGEST_SYMBOLS, MAGIC, VERSION, WHOLE_TRAILER,
    decode, has_chain, head, symbols_before, symbols_of,
};

/// A file that is no profile, or whose beginning cannot be used. Prints as one
/// line without the file's name.
#[derive(Debug, Error)]
pub enum ProfileError {
    /// It cannot be read.
    #[error("cannot be read: {0}")]
    Read(#[from] io::Error),
    #[error("it is empty: umpire record was ended before it wrote anything; record again")]
    Empty,
    /// It is a profile of perf's.
    #[error("it is a file of perf record; read it with: perf report -i FILE")]
    Perf,
    /// It is something else.
    #[error("it is no profile: it does not begin as files of umpire record do")]
    Foreign,
    /// It has another version.
    #[error("it is a profile of version {0}, and this umpire reads version {VERSION}")]
    Version(u32),
    /// It ends before the samples begin.
    #[error("it ends within the header: nothing was recorded; record again")]
    NoHeader,
    /// Its header cannot be used.
    #[error("its header is damaged: {0}")]
    Header(String),
}

/// How a file ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// With its trailer, which agrees with what was read. How long samples were
    /// taken, in nanoseconds.
    Whole(u64),
    /// Without a trailer: the recorder was killed, or the file was cut off.
    CutOff,
    /// With bytes that no recorder writes; what follows was not read.
    Damaged {
        /// The offset of the record in the file, in bytes.
        offset: u64,
        /// What is wrong with it.
        why: &'static str,
    },
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(_) => f.write_str("the file is whole"),
            Self::CutOff => f.write_str(
                "the file ends without a trailer, as if umpire record had been killed; \
                 what comes before is used",
            ),
            Self::Damaged { offset, why } => {
                write!(
                    f,
                    "the file is damaged at byte {offset}: {why}; what comes before is used"
                )
            }
        }
    }
}

/// Bytes of a file in memory; more than the longest record has.
const ROOM: usize = 1 << 18;

/// Reads a profile file, one record in memory at a time.
#[derive(Debug)]
pub struct ProfileReader<R: Read> {
    input: R,
    header: Header,
    /// What was read of the file and not yet looked at is in this part.
    bytes: Vec<u8>,
    part: Range<usize>,
    record: Record,
    offset: u64,
    totals: Totals,
    unknown: u64,
    ending: Option<Ending>,
}

impl<R: Read> ProfileReader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// [`ProfileError`] says why it is no profile that can be used.
    pub fn open(mut input: R) -> Result<Self, ProfileError> {
        let mut begin = Vec::new();
        input.by_ref().take(16).read_to_end(&mut begin)?;
        let version = match begin.split_first_chunk::<8>() {
            _ if begin.is_empty() => return Err(ProfileError::Empty),
            Some((b"PERFILE2", _)) => return Err(ProfileError::Perf),
            Some((magic, rest)) if *magic == MAGIC => rest,
            None if MAGIC.starts_with(&begin) => return Err(ProfileError::NoHeader),
            _ => return Err(ProfileError::Foreign),
        };
        let (version, length) = match version.split_first_chunk::<4>() {
            Some((version, length)) => (u32::from_le_bytes(*version), length),
            None => return Err(ProfileError::NoHeader),
        };
        if version != VERSION {
            return Err(ProfileError::Version(version));
        }
        let length = match length.try_into() {
            Ok(length) => u32::from_le_bytes(length),
            Err(_) => return Err(ProfileError::NoHeader),
        };
        if length > LONGEST_HEADER {
            return Err(ProfileError::Header("it is longer than 1 MiB".to_owned()));
        }
        let mut json = Vec::new();
        input
            .by_ref()
            .take(u64::from(length))
            .read_to_end(&mut json)?;
        let offset = 16 + u64::from(length);
        if json.len() as u64 != u64::from(length) {
            return Err(ProfileError::NoHeader);
        }
        Ok(Self {
            input,
            header: checked_header(&json)?,
            bytes: vec![0; ROOM],
            part: 0..0,
            record: Record::Sample(Sample::default()),
            offset,
            totals: Totals::default(),
            unknown: 0,
            ending: None,
        })
    }

    /// What is known before the first sample.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// What was read so far.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// How many records of kinds that this version does not know were passed
    /// over so far.
    #[must_use]
    pub fn unknown_records(&self) -> u64 {
        self.unknown
    }

    /// How the file ended; none before [`next_record`](Self::next_record) gave
    /// its last record.
    #[must_use]
    pub fn ending(&self) -> Option<Ending> {
        self.ending
    }

    /// The next record, which the reader keeps to read others into its memory; none at the
    /// end, of which [`ending`](Self::ending) tells. Damage ends the file.
    ///
    /// # Errors
    /// The host cannot read on.
    pub fn next_record(&mut self) -> io::Result<Option<&mut Record>> {
        while self.ending.is_none() {
            let Some((kind, payload)) = self.read_one()? else {
                self.ending = Some(Ending::CutOff);
                break;
            };
            let size = (HEAD + payload.len()) as u64;
            let payload = &self.bytes[payload];
            match decode(kind, payload, self.header.events.len(), &mut self.record) {
                Decoded::Record => {
                    self.offset += size;
                    self.totals.add(&self.record);
                    return Ok(Some(&mut self.record));
                }
                Decoded::Symbols => self.offset += size,
                Decoded::LeftOut(more) => {
                    self.offset += size;
                    self.totals.left_out.add(more);
                }
                Decoded::Unknown => {
                    self.offset += size;
                    self.unknown += 1;
                }
                Decoded::Damaged(why) => self.damaged(why),
                Decoded::Trailer(totals, _) if totals != self.recorded() => {
                    self.damaged("its trailer tells of other records than it has");
                }
                Decoded::Trailer(_, duration_ns) => {
                    self.offset += size;
                    if self.has(1)? {
                        self.damaged("there is something behind the trailer");
                    } else {
                        self.ending = Some(Ending::Whole(duration_ns));
                    }
                }
            }
        }
        Ok(None)
    }

    /// What a trailer tells of.
    fn recorded(&self) -> Totals {
        Totals {
            left_out: LeftOut::default(),
            ..self.totals
        }
    }

    fn damaged(&mut self, why: &'static str) {
        self.ending = Some(Ending::Damaged {
            offset: self.offset,
            why,
        });
    }

    /// Reads a record: its kind, and where in `bytes` the rest of it is. None if the file
    /// ends before it does.
    fn read_one(&mut self) -> io::Result<Option<(u8, Range<usize>)>> {
        if !self.has(HEAD)? {
            return Ok(None);
        }
        let Some((first, _)) = self.bytes[self.part.clone()].split_first_chunk() else {
            return Ok(None);
        };
        let (kind, length) = head(*first);
        if !self.has(HEAD + length)? {
            return Ok(None);
        }
        let start = self.part.start + HEAD;
        self.part.start = start + length;
        Ok(Some((kind, start..start + length)))
    }

    /// Reads until there are `length` bytes, no more than [`ROOM`], if the file has as many.
    fn has(&mut self, length: usize) -> io::Result<bool> {
        if self.part.len() < length {
            self.bytes.copy_within(self.part.clone(), 0);
            self.part = 0..self.part.len();
        }
        while self.part.len() < length {
            match self.input.read(&mut self.bytes[self.part.end..]) {
                Ok(0) => return Ok(false),
                Ok(more) => self.part.end += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// What a file holds, found before its samples are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Survey {
    /// A sample has callers.
    pub(super) chains: bool,
}

/// Gives every description of the file to `take`, whatever else it holds, as far as its
/// records go: they may be behind the samples that need them. Other records are passed
/// over by their lengths.
///
/// # Errors
/// It cannot be read.
pub(super) fn descriptions(
    file: impl Read + Seek,
    mut take: impl FnMut(Described),
) -> io::Result<Survey> {
    let mut survey = Survey::default();
    let mut file = BufReader::with_capacity(1 << 18, file);
    let mut start = [0; 16];
    if read_whole(&mut file, &mut start)?.is_none() {
        return Ok(survey);
    }
    let [.., a, b, c, d] = start;
    file.seek_relative(i64::from(u32::from_le_bytes([a, b, c, d])))?;
    let mut payload = Vec::new();
    let mut record = Record::Sample(Sample::default());
    let mut first = [0; HEAD];
    while read_whole(&mut file, &mut first)?.is_some() {
        let (kind, length) = head(first);
        survey.chains |= has_chain(kind, length);
        if kind != DESCRIBED {
            file.seek_relative(i64::try_from(length).unwrap_or(i64::MAX))?;
            continue;
        }
        payload.resize(length, 0);
        if read_whole(&mut file, &mut payload)?.is_none() {
            break;
        }
        match (decode(kind, &payload, 0, &mut record), &record) {
            (Decoded::Record, Record::Described(described)) => take(described.clone()),
            _ => break,
        }
    }
    Ok(survey)
}

/// Fills `bytes`; none where the file ends before.
fn read_whole(file: &mut impl Read, bytes: &mut [u8]) -> io::Result<Option<()>> {
    match file.read_exact(bytes) {
        Ok(()) => Ok(Some(())),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

/// The names of the guest's kernel that a whole file has at its end, in the form of
/// `/proc/kallsyms`; empty where it has none. Afterwards `file` is anywhere.
///
/// # Errors
/// It cannot be read.
pub(super) fn symbols(file: &mut (impl Read + Seek)) -> io::Result<Vec<u8>> {
    let end = file.seek(SeekFrom::End(0))?;
    let Some(trailer) = end.checked_sub(WHOLE_TRAILER as u64) else {
        return Ok(Vec::new());
    };
    file.seek(SeekFrom::Start(trailer))?;
    let mut bytes = [0; WHOLE_TRAILER];
    file.read_exact(&mut bytes)?;
    let length = symbols_before(&bytes).filter(|length| *length <= LONGEST_SYMBOLS);
    let start = length.and_then(|length| trailer.checked_sub(length));
    let (Some(length), Some(start)) = (length, start) else {
        return Ok(Vec::new());
    };
    file.seek(SeekFrom::Start(start))?;
    let mut pieces = Vec::new();
    file.take(length).read_to_end(&mut pieces)?;
    Ok(symbols_of(&pieces).unwrap_or_default())
}

/// The header, if names in it can be printed.
fn checked_header(json: &[u8]) -> Result<Header, ProfileError> {
    let header: Header =
        serde_json::from_slice(json).map_err(|error| ProfileError::Header(error.to_string()))?;
    let printable = |text: &String| !text.chars().any(char::is_control);
    let others = [&header.umpire, &header.vm_name, &header.host];
    let events = header.events.iter().map(|event| &event.name);
    let is_printable = others
        .into_iter()
        .chain(events)
        .chain(&header.command)
        .all(printable);
    if !is_printable {
        return Err(ProfileError::Header(
            "a name has control characters".to_owned(),
        ));
    }
    if header.events.len() > usize::from(u16::MAX) {
        Err(ProfileError::Header("it has too many events".to_owned()))
    } else {
        Ok(header)
    }
}
