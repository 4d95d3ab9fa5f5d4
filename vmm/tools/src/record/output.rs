//! The file that samples go to, or the pipe.

use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use pmu_model::Provenance;

use super::place::Place;
use crate::ToolError;
use crate::profile::{Header, LeftOut, ProfileWriter, Record, Totals};

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

/// Whether samples can go to standard output: not to a terminal.
///
/// # Errors
/// They cannot.
pub(super) fn check_pipe() -> Result<(), ToolError> {
    if io::stdout().is_terminal() {
        return Err(ToolError::Input(
            "-o -: standard output is a terminal; lead it to a file or a program, as in: umpire \
             record -o - | umpire report -i -"
                .to_owned(),
        ));
    }
    Ok(())
}

/// What has become of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// It has so many bytes.
    Written(u64),
    /// It has no sample, so what was at its place before is still there.
    LeftAlone,
}

/// A file, and what waits for its header.
#[derive(Debug)]
pub(super) struct Output {
    /// None: standard output.
    path: Option<PathBuf>,
    header: Header,
    /// How each event is counted, as far as this is known.
    how: Vec<Option<Provenance>>,
    waiting: Vec<Record>,
    /// Where the file is to be, and is from its first sample on.
    place: Option<Place>,
    file: Option<BufWriter<File>>,
    /// The file when all is written.
    done: Option<File>,
    writer: Option<ProfileWriter<ByteCounter<BufWriter<File>>>>,
    totals: Totals,
    /// Nobody reads the pipe any more.
    closed: bool,
    is_open: bool,
}

impl Output {
    /// For the file at `path`, or for standard output, which is `-`. Nothing is done there yet.
    pub(super) fn new(path: &Path, header: Header) -> Self {
        Self {
            path: (path != Path::new("-")).then(|| path.to_owned()),
            how: vec![None; header.events.len()],
            header,
            waiting: Vec::new(),
            place: None,
            file: None,
            done: None,
            writer: None,
            totals: Totals::default(),
            closed: false,
            is_open: false,
        }
    }

    /// Another file at the same place, to which samples go from this moment on: so many
    /// nanoseconds after 1970, at this TSC.
    pub(super) fn next(&self, start_unix_ns: u64, start_tsc: u64) -> Self {
        let path = self.path.as_deref().unwrap_or(Path::new("-"));
        let mut next = Self::new(path, self.header.clone());
        next.how.clone_from(&self.how);
        next.begin(start_unix_ns, start_tsc);
        next
    }

    /// Creates the file. One that is there stays until this one has a sample, and is kept
    /// under another name then.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn open(&mut self) -> Result<(), ToolError> {
        let file = match &self.path {
            Some(path) => Place::open(path).map(|(place, file)| {
                self.place = Some(place);
                file
            }),
            None => io::stdout().as_fd().try_clone_to_owned().map(File::from),
        };
        let name = self.name();
        let file =
            file.map_err(|error| ToolError::Input(format!("{name}: cannot be written: {error}")))?;
        self.file = Some(BufWriter::new(file));
        self.is_open = true;
        Ok(())
    }

    /// What it is called.
    pub(super) fn name(&self) -> String {
        let path = self.path.as_ref();
        path.map_or_else(
            || "standard output".to_owned(),
            |path| path.display().to_string(),
        )
    }

    /// Whether there is a file.
    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Whether nobody reads any more what is written: what comes is dropped.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
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
        let put = self.put();
        self.done(put)
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
            // Whoever reads the pipe has it at once.
            let is_first = self.totals.samples > 0 && self.place.as_ref().is_some_and(Place::waits);
            if self.path.is_none() || is_first {
                writer.out().flush()?;
            }
            if let (true, Some(place)) = (is_first, &mut self.place) {
                place.take()?;
            }
        }
        Ok(())
    }

    /// What was written so far, or waits.
    pub(super) fn totals(&self) -> Totals {
        self.totals
    }

    /// Bytes of the file so far.
    pub(super) fn bytes(&mut self) -> u64 {
        let writer = self.writer.as_mut();
        writer.map_or(0, |writer| writer.out().bytes)
    }

    /// Writes the rest, what was left out, the names of the guest's kernel and the trailer.
    ///
    /// # Errors
    /// The file takes no more.
    pub(super) fn finish(
        &mut self,
        duration_ns: u64,
        left_out: LeftOut,
        symbols: &str,
    ) -> Result<Ended, ToolError> {
        self.is_open = false;
        let put = self.put();
        self.done(put)?;
        self.totals.left_out = left_out;
        let Some(mut writer) = self.writer.take().filter(|_| !self.closed) else {
            return Ok(Ended::Written(0));
        };
        if self.totals.samples == 0 && self.place.as_ref().is_some_and(Place::would_replace) {
            self.place = None;
            return Ok(Ended::LeftAlone);
        }
        let done = writer
            .write_left_out(left_out)
            .and_then(|()| writer.write_symbols(symbols))
            .and_then(|()| writer.finish(duration_ns));
        let mut bytes = 0;
        let done = done.and_then(|counted| {
            bytes = counted.bytes;
            self.done = counted.to.into_inner().ok();
            self.place.as_mut().map_or(Ok(()), Place::take)
        });
        self.done(done)?;
        Ok(Ended::Written(bytes))
    }

    /// The file that is done, if it is not at its place any more: somebody else has removed
    /// it, or put another one there.
    pub(super) fn lost(&mut self) -> Option<File> {
        let is_lost = self.place.as_ref().is_some_and(Place::is_lost);
        self.done.take().filter(|_| is_lost)
    }

    /// A pipe that nobody reads any more is no error: somebody has seen enough.
    fn done(&mut self, end: io::Result<()>) -> Result<(), ToolError> {
        match end {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                self.closed = true;
                self.waiting.clear();
                Ok(())
            }
            Err(error) => Err(ToolError::Host {
                what: format!("{}: cannot be written", self.name()),
                error,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::profile::Sample;

    /// A recording of `records` to a file in a folder that has `before` there; how it ends, and
    /// whether the file and FILE.old are there then.
    fn recorded(before: Option<&str>, records: &[Record]) -> (Ended, bool, bool) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("p");
        if let Some(text) = before {
            fs::write(&path, text).expect("a file");
        }
        let mut output = Output::new(&path, Header::default());
        output.open().expect("a file");
        output.write(records).expect("room");
        let ended = output.finish(1, LeftOut::default(), "").expect("room");
        let is_new = fs::read(&path).ok().as_deref() != before.map(str::as_bytes);
        let kept = folder.path().join("p.old").exists();
        drop(output);
        let files = 1 + usize::from(kept);
        assert_eq!(
            fs::read_dir(folder.path()).expect("a folder").count(),
            files
        );
        (ended, is_new, kept)
    }

    #[test]
    fn a_file_gives_way_to_samples_alone() {
        let sample = [Record::Sample(Sample::default())];
        assert_eq!(
            recorded(Some("before"), &[]),
            (Ended::LeftAlone, false, false)
        );
        for (before, records, kept) in [
            (Some("before"), &sample[..], true),
            (Some(""), &[], false),
            (None, &[], false),
        ] {
            let (ended, is_new, is_kept) = recorded(before, records);
            let written = matches!(ended, Ended::Written(bytes) if bytes > 0);
            assert!(written && is_new, "{before:?}: {ended:?}");
            assert_eq!(is_kept, kept, "{before:?}");
        }
    }
}
