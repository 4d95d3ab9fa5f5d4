//! The thread that writes the audit file.

use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;
use thiserror::Error;
use umpire_audit::{AskLine, Footer, Header};

use super::auditors::{Inbox, Notifier, Trail};
use super::decisions::AskEntry;
use super::decisions::{AuditTime, Entry};
use super::line;
use crate::kvm::VcpuId;
use crate::sync::lock;

/// How often the writer looks for repetitions. They are due once a second at most.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The audit file could not be made, or is not complete.
#[derive(Debug, Error)]
pub enum AuditError {
    /// The file cannot be written.
    #[error(
        "--audit: cannot write {}: {cause} ({missing} decisions are missing from it)",
        path.display()
    )]
    Write {
        path: PathBuf,
        /// Why. The text has it already, so it is no source.
        cause: io::Error,
        /// Decisions that are missing from it.
        missing: u64,
    },
    /// The host has no thread for the writer.
    #[error("--audit: no thread to write it: {0}")]
    Thread(io::Error),
    /// The writer panicked.
    #[error("--audit: the thread that writes it panicked; this is a bug in Umpire")]
    Panicked,
}

/// What takes the lines of an audit instead of a file. Who writes them waits for it.
#[derive(Clone)]
pub struct AuditOut(Arc<Mutex<Option<Box<dyn Write + Send>>>>);

impl AuditOut {
    /// Lines go to `out`, and are there for good when it was flushed.
    pub fn new(out: impl Write + Send + 'static) -> Self {
        AuditOut(Arc::new(Mutex::new(Some(Box::new(out)))))
    }

    /// It writes for one machine.
    fn take(self) -> Option<Box<dyn Write + Send>> {
        lock(&self.0).take()
    }
}

impl fmt::Debug for AuditOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AuditOut")
    }
}

/// The running writer.
#[derive(Debug)]
pub(super) struct Writer {
    thread: JoinHandle<Result<(), AuditError>>,
    notifier: Notifier,
    over: Arc<AtomicBool>,
}

impl Writer {
    /// Writes into the file at `path`, or into what stands for one.
    pub(super) fn start(
        path: &Path,
        out: Option<AuditOut>,
        header: &Header,
        start: Instant,
        (trails, hosts): (Vec<Arc<Trail>>, Inbox),
    ) -> Result<Self, AuditError> {
        let failed = |cause| AuditError::Write {
            path: path.to_owned(),
            cause,
            missing: 0,
        };
        let out: Box<dyn Write + Send> = match out.and_then(AuditOut::take) {
            Some(out) => out,
            None => Box::new(File::create(path).map_err(failed)?),
        };
        let mut file = AuditFile::new(out, path);
        file.put(header, 0);
        file.flush();
        if let Some(cause) = file.failure.take() {
            return Err(failed(cause));
        }
        let (notifier, receive) = Notifier::new();
        let over = Arc::new(AtomicBool::new(false));
        let ending = over.clone();
        let thread = Builder::new()
            .name("audit".to_owned())
            .spawn(move || write(file, start, (&trails, &hosts), (&receive, &ending)))
            .map_err(AuditError::Thread)?;
        Ok(Self {
            thread,
            notifier,
            over,
        })
    }

    pub(super) fn notifier(&self) -> Notifier {
        self.notifier.clone()
    }

    /// Has the rest and the last line written.
    pub(super) fn finish(self) -> Result<(), AuditError> {
        self.over.store(true, Ordering::Release);
        self.notifier.notify();
        self.thread.join().unwrap_or(Err(AuditError::Panicked))
    }
}

fn write(
    mut file: AuditFile,
    start: Instant,
    (trails, hosts): (&[Arc<Trail>], &Inbox),
    (bell, over): (&Receiver<()>, &AtomicBool),
) -> Result<(), AuditError> {
    let now = || AuditTime::now(start);
    let mut of_hosts = 0_u64;
    loop {
        // A notification, silence for some time, and the end of the last notifier all
        // lead to a look at every trail.
        let _ = bell.recv_timeout(LOOK_EVERY);
        let last = over.load(Ordering::Acquire);
        let mut entries: Vec<(VcpuId, Entry)> = Vec::new();
        for (vcpu, trail) in (0..).map(VcpuId).zip(trails) {
            let taken = trail.take(now(), last);
            entries.extend(taken.into_iter().map(|entry| (vcpu, entry)));
        }
        // A stable sort: the entries of one vCPU stay in their order.
        entries.sort_by_key(|(_, entry)| entry.last);
        for (vcpu, entry) in &entries {
            file.put(&line::decision(*vcpu, entry), entry.count);
        }
        let asks = write_asks(&mut file, trails);
        let of_tools = hosts.take(now());
        for (line, decisions) in &of_tools {
            of_hosts = of_hosts.saturating_add(*decisions);
            file.put(line, *decisions);
        }
        if last {
            let decisions = trails.iter().map(|trail| trail.totals().decisions());
            let footer = Footer {
                end: true,
                time_ns: now().0,
                decisions: decisions.sum::<u64>().saturating_add(of_hosts),
                lines: file.lines,
                requests: Some(trails.iter().map(|trail| trail.totals().asks).sum()),
            };
            file.put(&footer, 0);
        }
        if last || asks || !entries.is_empty() || !of_tools.is_empty() {
            file.flush();
        }
        if last {
            return file.finish();
        }
    }
}

/// Writes what layers of all vCPUs asked for, by time. True if there was anything.
fn write_asks(file: &mut AuditFile, trails: &[Arc<Trail>]) -> bool {
    let mut asks: Vec<(VcpuId, AskEntry)> = Vec::new();
    for (vcpu, trail) in (0..).map(VcpuId).zip(trails) {
        asks.extend(trail.take_asks().into_iter().map(|entry| (vcpu, entry)));
    }
    asks.sort_by_key(|(_, entry)| entry.time);
    for (vcpu, entry) in &asks {
        let line = AskLine::new(entry.time.0, line::number(*vcpu), entry.number, &entry.ask);
        file.put(&line, 0);
    }
    !asks.is_empty()
}

/// The file. After its first failure nothing more is written.
struct AuditFile {
    out: BufWriter<Box<dyn Write + Send>>,
    path: PathBuf,
    failure: Option<io::Error>,
    /// Decisions since the file was flushed last, and all since it failed: nobody knows
    /// whether they are in the file.
    unsure: u64,
    lines: u64,
}

impl AuditFile {
    fn new(out: Box<dyn Write + Send>, path: &Path) -> Self {
        Self {
            out: BufWriter::new(out),
            path: path.to_owned(),
            failure: None,
            unsure: 0,
            lines: 0,
        }
    }

    /// Writes one line, which stands for `decisions` decisions.
    fn put(&mut self, line: &impl Serialize, decisions: u64) {
        self.unsure = self.unsure.saturating_add(decisions);
        self.lines += u64::from(decisions > 0);
        if self.failure.is_some() {
            return;
        }
        let written = serde_json::to_writer(&mut self.out, line)
            .map_err(io::Error::from)
            .and_then(|()| self.out.write_all(b"\n"));
        self.note(written);
    }

    fn flush(&mut self) {
        if self.failure.is_none() {
            let flushed = self.out.flush();
            self.note(flushed);
        }
        if self.failure.is_none() {
            self.unsure = 0;
        }
    }

    fn note(&mut self, done: io::Result<()>) {
        if let Err(error) = done {
            log::error!("--audit: cannot write {}: {error}", self.path.display());
            self.failure = Some(error);
        }
    }

    fn finish(self) -> Result<(), AuditError> {
        match self.failure {
            None => Ok(()),
            Some(cause) => {
                // What is in the buffer cannot be written either.
                let _ = self.out.into_parts();
                Err(AuditError::Write {
                    path: self.path,
                    cause,
                    missing: self.unsure,
                })
            }
        }
    }
}
