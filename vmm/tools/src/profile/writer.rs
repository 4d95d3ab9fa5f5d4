//! Writing a profile file as samples come.

use std::io::{self, Write};

use super::record::{Header, LeftOut, Record, Totals};
use super::wire::{
    LONGEST_HEADER, MAGIC, VERSION, put_left_out, put_record, put_symbols, put_trailer,
};

/// Writes a profile file. Holds one record in memory at a time; wrap what it
/// writes to in a [`std::io::BufWriter`].
///
/// A file without [`finish`](Self::finish) can be read up to its last whole
/// record, with a warning.
#[derive(Debug)]
pub struct ProfileWriter<W: Write> {
    out: W,
    record: Vec<u8>,
    totals: Totals,
    latest_ns: u64,
    /// Bytes of the symbols behind the records.
    symbols: u64,
}

impl<W: Write> ProfileWriter<W> {
    /// Writes the header.
    ///
    /// # Errors
    /// `out` cannot be written to, or the header is longer than
    /// [`LONGEST_HEADER`] or has more events than a sample can refer to
    /// ([`io::ErrorKind::InvalidInput`]).
    pub fn new(mut out: W, header: &Header) -> io::Result<Self> {
        let invalid = |what| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        let json = serde_json::to_vec(header)?;
        let length = match u32::try_from(json.len()) {
            Ok(length) if length <= LONGEST_HEADER => length,
            _ => return invalid("the header of the profile is longer than 1 MiB"),
        };
        if header.events.len() > usize::from(u16::MAX) {
            return invalid("a profile has at most 65535 events");
        }
        out.write_all(&MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        out.write_all(&length.to_le_bytes())?;
        out.write_all(&json)?;
        Ok(Self {
            out,
            record: Vec::new(),
            totals: Totals::default(),
            latest_ns: 0,
            symbols: 0,
        })
    }

    /// Appends a record. A description that no reader would take, with control characters
    /// in a name say, is left out: its number stays unknown.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&mut self, record: &Record) -> io::Result<()> {
        self.record.clear();
        put_record(record, &mut self.record);
        self.out.write_all(&self.record)?;
        self.totals.add(record);
        let time_ns = match record {
            Record::Sample(sample) => sample.time_ns,
            Record::Loss(loss) => loss.time_ns,
            Record::Described(_) => 0,
        };
        self.latest_ns = self.latest_ns.max(time_ns);
        Ok(())
    }

    /// What it writes to.
    pub(crate) fn out(&mut self) -> &mut W {
        &mut self.out
    }

    /// What was written so far, for a progress line.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Appends how many samples were taken and left out, if any were, since this was told last.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write_left_out(&mut self, left_out: LeftOut) -> io::Result<()> {
        if left_out == LeftOut::default() {
            return Ok(());
        }
        self.totals.left_out.add(left_out);
        self.record.clear();
        put_left_out(left_out, &mut self.record);
        self.out.write_all(&self.record)
    }

    /// Appends the names of the guest's kernel, behind all records: text in the form of
    /// `/proc/kallsyms`.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn write_symbols(&mut self, text: &str) -> io::Result<()> {
        self.record.clear();
        self.symbols = put_symbols(text, &mut self.record);
        self.out.write_all(&self.record)
    }

    /// Writes the trailer and all that is buffered. `duration_ns` is how long
    /// samples were taken; not less than the time of the last record.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn finish(mut self, duration_ns: u64) -> io::Result<W> {
        self.record.clear();
        let duration_ns = duration_ns.max(self.latest_ns);
        put_trailer(&self.totals, duration_ns, self.symbols, &mut self.record);
        self.out.write_all(&self.record)?;
        self.out.flush()?;
        Ok(self.out)
    }
}
