//! The configuration, read again at SIGHUP: on a thread of its own, since the sources of users
//! and groups may take their time, and taken over when it is there.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread::Builder;

use super::{Arbiterd, now};
use crate::config::ArbiterConfig;

/// What the file says now, or why it cannot be used.
type Said = Result<Box<ArbiterConfig>, String>;

/// The file, and whether it is being read.
#[derive(Debug)]
pub(super) struct Reloads {
    file: Option<PathBuf>,
    /// What it said when it was read last.
    said: Option<Box<ArbiterConfig>>,
    reading: Option<Receiver<Said>>,
    /// It is to be read once more after that.
    again: bool,
    /// Can be read from when the file was read.
    pub(super) is_read: UnixStream,
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
}

impl Arbiterd {
    /// The file is to be read again.
    pub(super) fn reload(&mut self) {
        // However many signals there were.
        let _ = self.hangup.read(&mut [0; 64]);
        self.manager.reloads();
        if self.reloads.reading.is_some() {
            self.reloads.again = true;
        } else {
            self.read_configuration();
        }
    }

    fn read_configuration(&mut self) {
        let root = self.service.config().root.clone();
        if let Err(why) = self.reloads.read(root) {
            self.reloaded(Err(why));
        }
    }

    /// Takes over what the file says, when it was read.
    pub(super) fn take_configuration(&mut self) {
        let _ = self.reloads.is_read.read(&mut [0; 64]);
        let Some(reading) = &self.reloads.reading else {
            return;
        };
        let said = match reading.try_recv() {
            Ok(said) => said,
            Err(TryRecvError::Empty) => return,
            Err(TryRecvError::Disconnected) => Err("its thread has ended".to_owned()),
        };
        self.reloads.reading = None;
        if std::mem::take(&mut self.reloads.again) {
            // It may have changed while it was read.
            return self.read_configuration();
        }
        let taken = said.and_then(|config| {
            self.service.reload((*config).clone(), now())?;
            Ok(config)
        });
        self.reloaded(taken);
    }

    fn reloaded(&mut self, taken: Said) {
        let file = self.reloads.file.as_deref().unwrap_or(Path::new(""));
        self.service.reloaded(file, taken.as_ref().err());
        match taken {
            Ok(config) => {
                let file = file.display();
                log::info!("{file}: read again");
                let before = self.reloads.said.replace(config);
                let said = before.as_ref().zip(self.reloads.said.as_ref());
                let later = said.map(|(before, now)| now.counts_later(before));
                let later = later.unwrap_or_default();
                if !later.is_empty() {
                    log::warn!("{file}: what has changed in {later} counts from the next start on");
                }
                self.host.follow_config(&mut self.service, now());
                for (id, connection) in &self.connections {
                    let stranger = self.service.config().is_stranger(&connection.client);
                    self.room.add(*id, connection.client.uid, stranger);
                }
                self.manager
                    .tell("READY=1\nSTATUS=Serves; the configuration was read again.");
            }
            Err(error) => {
                log::error!("{error}; the rules stay as they were");
                self.manager.tell(&format!(
                    "READY=1\nSTATUS=Serves by the rules of before: the reload failed: {}",
                    error.replace('\n', " ")
                ));
            }
        }
    }
}
