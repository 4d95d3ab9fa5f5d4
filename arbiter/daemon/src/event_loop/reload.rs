//! The configuration, read again at SIGHUP: on a thread of its own, since the sources of users
//! and groups may take their time, and taken over when it is there.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread::Builder;

use crate::config::ArbiterConfig;

/// What the file says now, or why it cannot be used.
pub(super) type FileSaid = Result<Box<ArbiterConfig>, String>;

/// The file, and whether it is being read.
#[derive(Debug)]
pub(super) struct Reloads {
    file: Option<PathBuf>,
    /// What it said when it was read last.
    said: Option<Box<ArbiterConfig>>,
    reading: Option<Receiver<FileSaid>>,
    /// It is to be read once more after that.
    again: bool,
    /// Can be read from when the file was read.
    is_read: UnixStream,
    tells: UnixStream,
}

impl Reloads {
    /// # Errors
    /// There are no descriptors.
    pub(super) fn new(file: Option<&Path>) -> io::Result<Self> {
        let (is_read, tells) = UnixStream::pair()?;
        is_read.set_nonblocking(true)?;
        Ok(Reloads {
            said: file.and_then(|file| ArbiterConfig::read(file).ok().map(Box::new)),
            file: file.map(Path::to_owned),
            reading: None,
            again: false,
            is_read,
            tells,
        })
    }

    /// Has a thread read the file.
    fn read(&mut self, root: PathBuf) -> Result<(), String> {
        let Some(file) = self.file.clone() else {
            return Err("SIGHUP: there is no --config file to read again".to_owned());
        };
        let failed = |error| format!("no thread can read {}: {error}", file.display());
        let mut tells = self.tells.try_clone().map_err(failed)?;
        let (send, reading) = channel();
        let path = file.clone();
        let body = move || {
            let read = ArbiterConfig::read(&path).map_err(|error| error.to_string());
            let said = read.map(|config| Box::new(ArbiterConfig { root, ..config }));
            for warning in said.iter().flat_map(|config| config.warnings()) {
                log::warn!("{}: {warning}", path.display());
            }
            // Somebody waits for it, or the arbiter ends.
            let _ = send.send(said);
            let _ = tells.write(&[0]);
        };
        let thread = Builder::new().name("read-config".to_owned()).spawn(body);
        thread.map_err(failed)?;
        self.reading = Some(reading);
        Ok(())
    }

    /// Can be read from when the file was read.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.is_read.as_fd()
    }

    /// The file that is read.
    pub(super) fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// The file is to be read again; once more, if it is being read.
    ///
    /// # Errors
    /// It cannot be.
    pub(super) fn begin(&mut self, root: PathBuf) -> Result<(), String> {
        if self.reading.is_some() {
            self.again = true;
            return Ok(());
        }
        self.read(root)
    }

    /// What the file says, when it was read.
    pub(super) fn take(&mut self, root: PathBuf) -> Option<FileSaid> {
        let _ = self.is_read.read(&mut [0; 64]);
        let said = match self.reading.as_ref()?.try_recv() {
            Ok(said) => said,
            Err(TryRecvError::Empty) => return None,
            Err(TryRecvError::Disconnected) => Err("its thread has ended".to_owned()),
        };
        self.reading = None;
        if std::mem::take(&mut self.again) {
            // It may have changed while it was read.
            return self.read(root).err().map(Err);
        }
        Some(said)
    }

    /// That is in force now. Returns the names of what has changed and counts later, or nothing.
    pub(super) fn taken(&mut self, config: Box<ArbiterConfig>) -> String {
        let before = self.said.replace(config);
        let said = before.as_ref().zip(self.said.as_ref());
        let later = said.map(|(before, now)| now.counts_later(before));
        later.unwrap_or_default()
    }
}
