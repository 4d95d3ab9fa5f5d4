//! The file that samples go to.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use pmu_model::Provenance;
use rustix::fs::{OFlags, fcntl_setfl};

use crate::ToolError;
use crate::profile::{Header, ProfileWriter, Record, Totals};

/// Records that wait at most for the header, which says how each event is
/// counted: nobody knows before it was.
const WAITING: usize = 1 << 16;

/// Counts bytes.
#[derive(Debug)]
struct ByteCounter<W> {
    to: W,
    bytes: u64,
}

impl<W: Write> Write for ByteCounter<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.to.write(buffer)?;
        self.bytes = self.bytes.saturating_add(written as u64);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// A file, and what waits for its header.
#[derive(Debug)]
pub(super) struct Output {
    name: String,
    header: Header,
    /// How each event is counted, as far as this is known.
    how: Vec<Option<Provenance>>,
    waiting: Vec<Record>,
    file: Option<BufWriter<File>>,
    writer: Option<ProfileWriter<ByteCounter<BufWriter<File>>>>,
    totals: Totals,
}

impl Output {
    /// Creates the file, or empties the one that is there.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn create(path: &Path, header: Header) -> Result<Self, ToolError> {
        let name = path.display().to_string();
        // A pipe that nobody reads would make the tool wait, maybe for ever.
        let mut options = File::options();
        let options = options.write(true).create(true).truncate(true);
        let file = options
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(path)
            .and_then(|file| {
                fcntl_setfl(&file, OFlags::empty())?;
                Ok(file)
            });
        let file =
            file.map_err(|error| ToolError::Input(format!("{name}: cannot be written: {error}")))?;
        Ok(Self {
            name,
            how: vec![None; header.events.len()],
            header,
            waiting: Vec::new(),
            file: Some(BufWriter::new(file)),
            writer: None,
            totals: Totals::default(),
        })
    }

    /// Sampling begins now: so many nanoseconds after 1970, at this TSC.
    pub(super) fn begin(&mut self, start_unix_ns: u64, start_tsc: u64) {
        (self.header.start_unix_ns, self.header.start_tsc) = (start_unix_ns, start_tsc);
    }

    /// An event is counted so.
    pub(super) fn learn(&mut self, event: usize, provenance: Provenance) {
        if let Some(how) = self.how.get_mut(event) {
            *how = Some(how.map_or(provenance, |one| one.and(provenance)));
        }
    }

    /// Whether nothing more has to be learned.
    pub(super) fn is_learned(&self) -> bool {
        self.writer.is_some() || self.how.iter().all(Option::is_some)
    }

    /// Appends records, or keeps them until the header can be written.
    ///
    /// # Errors
    /// The file takes no more.
    pub(super) fn write(&mut self, records: &[Record]) -> Result<(), ToolError> {
        records.iter().for_each(|record| self.totals.add(record));
        self.waiting.extend_from_slice(records);
        if !self.is_learned() && self.waiting.len() < WAITING {
            return Ok(());
        }
        self.put().map_err(|error| self.failed(error))
    }

    fn put(&mut self) -> io::Result<()> {
        if let Some(file) = self.file.take() {
            for (event, how) in self.header.events.iter_mut().zip(&self.how) {
                event.provenance = *how;
            }
            let to = ByteCounter { to: file, bytes: 0 };
            self.writer = Some(ProfileWriter::new(to, &self.header)?);
        }
        if let Some(writer) = &mut self.writer {
            for record in self.waiting.drain(..) {
                writer.write(&record)?;
            }
        }
        Ok(())
    }

    /// What was written so far, or waits.
    pub(super) fn totals(&self) -> Totals {
        self.totals
    }

    /// Writes the rest, the names of the guest's kernel and the trailer, and how many bytes the file has.
    ///
    /// # Errors
    /// The file takes no more.
    pub(super) fn finish(mut self, duration_ns: u64, symbols: &str) -> Result<u64, ToolError> {
        self.put().map_err(|error| self.failed(error))?;
        let Some(mut writer) = self.writer.take() else {
            return Ok(0);
        };
        let done = writer
            .write_symbols(symbols)
            .and_then(|()| writer.finish(duration_ns));
        done.map(|counted| counted.bytes)
            .map_err(|error| self.failed(error))
    }

    fn failed(&self, error: io::Error) -> ToolError {
        ToolError::Host {
            what: format!("{}: cannot be written", self.name),
            error,
        }
    }
}
