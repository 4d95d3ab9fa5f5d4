//! `--audit arbiter`: the lines of a VM's audit go into that of the host.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use umpire_lease::{Arbiter, AuditIn, CallError, MOST_LINES, NoReply, Reason};

/// How long lines wait for an arbiter that is away: longer than a restart takes.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOKS: Duration = Duration::from_millis(100);

/// Takes lines, and gives them to the arbiter when it is flushed.
#[derive(Debug)]
pub(super) struct AuditLines {
    socket: PathBuf,
    /// The VM's lease, which may become another one.
    lease: Arc<AtomicU64>,
    arbiter: Option<Arbiter>,
    text: Vec<u8>,
}

impl AuditLines {
    pub(super) fn new(socket: PathBuf, lease: Arc<AtomicU64>) -> Self {
        AuditLines {
            socket,
            lease,
            arbiter: None,
            text: Vec::new(),
        }
    }

    /// Gives the arbiter these lines; they are in its file then.
    fn send(&mut self, lines: &[String]) -> Result<(), CallError> {
        let arbiter = match &mut self.arbiter {
            Some(arbiter) => arbiter,
            none => none.insert(Arbiter::connect(&self.socket)?),
        };
        let lease = self.lease.load(Ordering::Relaxed);
        let lines = lines.to_vec();
        let _: NoReply = arbiter.call("Audit", &AuditIn { lease, lines })?;
        Ok(())
    }
}

/// Whether it may go better in a moment: the arbiter is started anew, or the VM is about to
/// get another lease.
fn passes(error: &CallError) -> bool {
    match error {
        CallError::Refused(why) => why.reason == Reason::NoSuchLease,
        CallError::Other(_) => false,
        _ => true,
    }
}

impl Write for AuditLines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let text = std::mem::take(&mut self.text);
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        let until = Instant::now() + PATIENCE;
        for lines in lines.chunks(MOST_LINES) {
            while let Err(error) = self.send(lines) {
                self.arbiter = None;
                if !passes(&error) || until <= Instant::now() {
                    return Err(io::Error::other(error.to_string()));
                }
                std::thread::sleep(LOOKS);
            }
        }
        Ok(())
    }
}
