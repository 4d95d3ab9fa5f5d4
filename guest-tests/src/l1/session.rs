//! One run of QEMU: its channels are forwarded, its status lines decide how it ends.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::error::L1Error;
use super::qemu::{self, Channels, Shape};
use super::sys::spawn_bound;
use super::tool::last_lines;

/// After its last status line L1 has this long to power itself off.
const POWER_OFF: Duration = Duration::from_secs(5);
/// Init says every 2 s that it is there, once it is ready. Not even a shell that sleeps goes on
/// in an L1 that says nothing for so long (docs/internals/testing.md, "Limits of L1").
const SILENCE: Duration = Duration::from_secs(60);
/// As much of it says so where the time is over.
const AT_THE_END: u32 = 4;
const LOG_LINES: usize = 25;

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The command ended with this status; 128 + N after signal N, as shells count.
    Exited(u8),
    /// The time was over and the machine was stopped.
    TimedOut,
}

/// What is known after a run besides the command's output.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// How it ended.
    pub end: End,
    /// Time from QEMU's start until `/dev/kvm` was ready in L1; none if it never was.
    pub ready: Option<Duration>,
    /// Time from QEMU's start to the end.
    pub total: Duration,
    /// L1's console: kernel messages and init's own.
    pub console: String,
}

/// Everything that QEMU is started with.
#[derive(Debug)]
pub(crate) struct Session<'a> {
    pub(crate) shape: Shape,
    pub(crate) verbose: bool,
    pub(crate) qemu: &'a Path,
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a File,
}

/// Where the command's streams go. Files from L1 come as a tar archive.
pub(crate) struct Sinks<'a> {
    pub(crate) stdout: &'a mut (dyn Write + Send),
    pub(crate) stderr: &'a mut (dyn Write + Send),
    pub(crate) files: Option<&'a mut File>,
}

/// What init reports on the status channel.
#[derive(Debug, PartialEq, Eq)]
enum Status {
    Ready,
    Alive,
    Exit(u8),
    Files,
    Error(String),
}

impl Session<'_> {
    /// Starts QEMU, forwards until the command ended or the time is over, and ends QEMU.
    pub(crate) fn run(&self, sinks: Sinks<'_>) -> Result<Outcome, L1Error> {
        let wants_files = sinks.files.is_some();
        let channels = Channels::open().map_err(L1Error::file("create", "a socket pair"))?;
        let initramfs = self.initramfs.as_raw_fd();
        let fds = channels.inherited();
        let args = qemu::arguments(self.shape, self.qemu, self.kernel, initramfs, fds);
        let mut command = qemu::command(self.qemu, args);
        let mut inherited = fds.to_vec();
        inherited.push(initramfs);
        let start = Instant::now();
        let child = spawn_bound(&mut command, inherited);
        let mut child = Guard(child.map_err(L1Error::file("start", self.qemu))?);
        // QEMU holds its own copies now; with these closed, its end is seen as the end of the streams.
        drop(channels.theirs);
        let [console, status, stdout, stderr, files] = channels.ours;
        let errors = child.0.stderr.take();
        thread::scope(|scope| {
            let verbose = self.verbose;
            let console = scope.spawn(move || log(console, verbose));
            let errors =
                scope.spawn(move || errors.map_or_else(Vec::new, |stream| log(stream, false)));
            scope.spawn(move || forward(stdout, sinks.stdout));
            scope.spawn(move || forward(stderr, sinks.stderr));
            if let Some(sink) = sinks.files {
                scope.spawn(move || forward(files, sink));
            }
            let (sender, receiver) = channel();
            scope.spawn(move || read_status(status, &sender));
            let silence = (!self.shape.icount).then_some(SILENCE);
            let patience = (self.shape.timeout, silence);
            let progress = follow(&receiver, start, patience, wants_files);
            if progress.end.is_some() {
                child.wait_for(POWER_OFF);
            }
            child.stop();
            let total = start.elapsed();
            // The streams end with QEMU, so these threads end, too.
            let text = |thread: thread::ScopedJoinHandle<'_, Vec<u8>>| {
                String::from_utf8_lossy(&thread.join().unwrap_or_default()).into_owned()
            };
            let (console, errors) = (text(console), text(errors));
            let (after, log) = (total, format!("{errors}\n{console}"));
            let log = last_lines(&log, LOG_LINES);
            let end = match progress.verdict() {
                _ if progress.silent => return Err(L1Error::StoodStill { after, log }),
                Ok(end) => end,
                Err(reason) => return Err(L1Error::Machine { after, reason, log }),
            };
            Ok(Outcome {
                end,
                ready: progress.ready,
                total,
                console,
            })
        })
    }
}

/// What the status lines have reported so far.
#[derive(Debug, Default)]
struct Progress {
    ready: Option<Duration>,
    end: Option<u8>,
    timed_out: bool,
    silent: bool,
    error: Option<String>,
}

impl Progress {
    fn verdict(&self) -> Result<End, String> {
        match (&self.error, self.end, self.timed_out, self.ready) {
            (Some(error), ..) => Err(error.clone()),
            (None, Some(status), ..) => Ok(End::Exited(status)),
            (None, None, true, _) => Ok(End::TimedOut),
            (None, None, false, None) => Err("QEMU ended before the command started".to_owned()),
            (None, None, false, Some(_)) => {
                Err("QEMU ended while the command ran: did it crash L1's kernel, or use up its memory (--memory)?".to_owned())
            }
        }
    }
}

/// Until the end, for the whole time and, where init says that it is there, the silence in it
/// that `patience` allows.
fn follow(
    statuses: &Receiver<Status>,
    start: Instant,
    (timeout, silence): (Duration, Option<Duration>),
    wants_files: bool,
) -> Progress {
    let mut progress = Progress::default();
    let mut heard = start;
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        let silence = silence.filter(|_| progress.ready.is_some());
        let status = statuses.recv_timeout(silence.unwrap_or(left).min(left));
        if status.is_ok() {
            heard = Instant::now();
        }
        match status {
            Ok(Status::Ready) => progress.ready = Some(start.elapsed()),
            Ok(Status::Alive) => {}
            Ok(Status::Exit(status)) => {
                progress.end = Some(status);
                if !wants_files {
                    return progress;
                }
            }
            Ok(Status::Files) => return progress,
            Ok(Status::Error(text)) => {
                progress.error = Some(text);
                return progress;
            }
            Err(RecvTimeoutError::Timeout) => {
                let so_long = |silence: Duration| heard.elapsed() >= silence / AT_THE_END;
                progress.silent = silence.is_some_and(so_long);
                progress.timed_out = !progress.silent;
                return progress;
            }
            Err(RecvTimeoutError::Disconnected) => return progress,
        }
    }
}

fn read_status(stream: UnixStream, statuses: &Sender<Status>) {
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        // The receiver is gone after the last line that it waits for.
        if statuses.send(parse_status(&line)).is_err() {
            return;
        }
    }
}

fn parse_status(line: &str) -> Status {
    let exit = line.strip_prefix("exit ").map(str::parse);
    match (line, exit) {
        ("ready", _) => Status::Ready,
        ("alive", _) => Status::Alive,
        ("files", _) => Status::Files,
        (_, Some(Ok(status))) => Status::Exit(status),
        _ => {
            let text = line.strip_prefix("error ");
            let text = text.map_or_else(|| format!("unknown status `{line}`"), str::to_owned);
            Status::Error(text)
        }
    }
}

/// Copies a channel to its sink, at once. A sink that fails (a closed pipe) is given up, but the
/// channel is still read to its end, so that the command is not stopped by it.
fn forward(mut stream: impl Read, sink: &mut (impl Write + ?Sized)) {
    let mut buffer = [0; 16384];
    let mut open = true;
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        open = open
            && sink
                .write_all(&buffer[..count])
                .and_then(|()| sink.flush())
                .is_ok();
    }
}

fn log(stream: impl Read, show: bool) -> Vec<u8> {
    let mut text = Vec::new();
    if show {
        forward(stream, &mut Tee(&mut text));
    } else {
        forward(stream, &mut text);
    }
    text
}

/// Keeps what it is given and shows it on stderr.
struct Tee<'a>(&'a mut Vec<u8>);

impl Write for Tee<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.extend(bytes);
        std::io::stderr().write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        std::io::stderr().flush()
    }
}

/// QEMU's process; it is ended on every way out.
struct Guard(Child);

impl Guard {
    /// Gives the process some time to end by itself.
    fn wait_for(&mut self, limit: Duration) {
        let start = Instant::now();
        while start.elapsed() < limit && matches!(self.0.try_wait(), Ok(None)) {
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn stop(&mut self) {
        // Both fail only for a process that is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_lines() {
        fn check(line: &str, expected: Status) {
            assert_eq!(parse_status(line), expected, "{line}");
        }
        check("ready", Status::Ready);
        check("alive", Status::Alive);
        check("files", Status::Files);
        check("exit 0", Status::Exit(0));
        check("exit 255", Status::Exit(255));
        check(
            "exit 256",
            Status::Error("unknown status `exit 256`".into()),
        );
        check("error no KVM", Status::Error("no KVM".into()));
        check("", Status::Error("unknown status ``".into()));
    }

    #[test]
    fn verdicts() {
        fn check(lines: &[&str], wants_files: bool, closed: bool, expected: Result<End, &str>) {
            let (sender, receiver) = channel();
            for line in lines {
                sender.send(parse_status(line)).expect("open");
            }
            let sender = (!closed).then_some(sender);
            let progress = follow(
                &receiver,
                Instant::now(),
                (Duration::from_millis(20), Some(Duration::from_secs(60))),
                wants_files,
            );
            drop(sender);
            assert!(!progress.silent, "{lines:?}");
            match (progress.verdict(), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{lines:?}"),
                (Err(found), Err(expected)) => assert!(found.contains(expected), "{found}"),
                (found, expected) => panic!("{found:?}, expected {expected:?}"),
            }
        }
        check(&["ready", "exit 7"], false, false, Ok(End::Exited(7)));
        check(&["ready", "exit 7"], true, false, Ok(End::Exited(7)));
        check(
            &["ready", "exit 0", "files"],
            true,
            true,
            Ok(End::Exited(0)),
        );
        check(&["ready"], false, false, Ok(End::TimedOut));
        check(&[], false, false, Ok(End::TimedOut));
        check(&[], false, true, Err("before the command started"));
        check(&["ready"], false, true, Err("while the command ran"));
        check(&["error no KVM"], false, false, Err("no KVM"));
    }

    /// Only what has said that it is ready says that it goes on.
    #[test]
    fn silence() {
        let silent = |lines: &[&str], timeout: u64, silence: Option<u64>| {
            let (sender, receiver) = channel();
            for line in lines {
                sender.send(parse_status(line)).expect("open");
            }
            let patience = (
                Duration::from_millis(timeout),
                silence.map(Duration::from_millis),
            );
            let progress = follow(&receiver, Instant::now(), patience, false);
            assert_ne!(progress.silent, progress.timed_out, "{lines:?}");
            progress.silent
        };
        assert!(silent(&["ready", "alive", "alive"], 60_000, Some(20)));
        assert!(silent(&["ready"], 60_000, Some(20)));
        assert!(silent(&["ready"], 40, Some(50)), "long enough at the end");
        assert!(!silent(&["ready"], 20, Some(60_000)));
        assert!(!silent(&["ready"], 20, None));
        assert!(!silent(&[], 20, Some(1)));
    }

    #[test]
    fn a_closed_sink_does_not_stop_the_stream() {
        struct Closed(usize);
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                self.0 += 1;
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let mut sink = Closed(0);
        let mut stream: &[u8] = &[1; 100_000];
        forward(&mut stream, &mut sink);
        assert_eq!((stream.len(), sink.0), (0, 1));
    }
}
