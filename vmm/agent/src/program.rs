//! The program: from the command line to the end of the guest.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Parser;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::process::{geteuid, setpriority_process};
use rustix::termios::{OptionalActions, QueueSelector, tcflush, tcgetattr, tcsetattr};
use thiserror::Error;

use crate::processors::Processors;
use crate::session::Session;
use crate::sys::{self, NoEvent};
use umpire_agent_wire::{Ask, Frames, MAGIC, ToVmm, VERSION, frame};

/// How often the agent says that it is there, while nobody asks.
const HELLO: Duration = Duration::from_secs(1);
/// How often it makes sure that each processor has its records.
const CHECK: Duration = Duration::from_secs(1);
/// From one look at `/proc` to the next, at least: so long, and so many times as long as the
/// look took, since nobody else runs meanwhile.
const REST: Duration = Duration::from_secs(1);
const RESTS: u32 = 10;
/// The inode of the first PID namespace (`PROC_PID_INIT_INO` in `include/linux/proc_ns.h`).
const FIRST_PIDS: u64 = 0xefff_fffc;
/// Before all usual programs.
const PRIORITY: i32 = -20;
/// The most answers that wait for the port, in bytes. The VMM asks one question at a time.
const WAITING: usize = 1 << 20;

/// Tells umpire on the host which thread runs when in this Linux guest
#[derive(Debug, Parser)]
#[command(
    name = "umpire-agent",
    version,
    after_help = "For guests whose kernel has no BTF: with it, umpire record, top and script show \
                  processes, threads and files of the guest. Run it as root in the guest, for as \
                  long as the guest runs; umpire run --agent gives the guest the port. It needs \
                  Linux 4.3 or later with perf events, and to be outside of containers.\n\nExit status: 0 after --help, 2 if it cannot work."
)]
pub struct Arguments {
    /// The serial port of umpire run --agent
    #[arg(long, value_name = "DEVICE", default_value = "/dev/ttyS1")]
    port: PathBuf,
}

/// The agent cannot work.
#[derive(Debug, Error)]
pub enum AgentError {
    /// It may not see other processes.
    #[error("only root may record what all processes do; start umpire-agent as root")]
    NotRoot,
    /// A container.
    #[error(
        "this is a PID namespace, where other processes have no numbers; start umpire-agent \
         outside of the container"
    )]
    Namespace,
    /// No port.
    #[error(
        "{} cannot be used: {cause}; umpire run --agent gives the guest this port, and --port \
         names another",
        port.display()
    )]
    Port { port: PathBuf, cause: io::Error },
    /// An old kernel.
    #[error("this kernel cannot record switches of threads; Linux 4.3 and later can")]
    NoSwitches,
    /// A kernel without perf events.
    #[error("this kernel has no perf events (CONFIG_PERF_EVENTS)")]
    NoPerf,
    /// No event.
    #[error("the kernel does not record what happens on processor {cpu}: {cause}")]
    Event {
        /// The kernel's number of the processor.
        cpu: u32,
        cause: io::Error,
    },
    #[error("/proc/cpuinfo names no processor with an APIC id; is /proc mounted?")]
    NoProcessors,
    #[error("waiting for the port failed: {0}")]
    Wait(io::Error),
}

/// Answers the VMM until it cannot any more.
///
/// # Errors
/// Why it cannot.
pub fn run(arguments: &Arguments) -> Result<(), AgentError> {
    if !geteuid().is_root() {
        return Err(AgentError::NotRoot);
    }
    if !is_first(Path::new("/proc/self/ns/pid")) {
        return Err(AgentError::Namespace);
    }
    // What it is asked for is gone soon; it runs for moments only. A guest that does not let it
    // gets its answers later.
    let _ = setpriority_process(None, PRIORITY);
    let mut port = Port::open(&arguments.port)?;
    let ended = record(&mut port);
    if let Err(error) = &ended {
        // The VMM tells it to whoever looks for names.
        port.send(&frame(&ToVmm::Bye(error.to_string())));
        let _ = port.exchange(&mut Frames::default());
    }
    ended
}

/// The PID namespace is the first one. A kernel without namespaces has no file for it.
fn is_first(namespace: &Path) -> bool {
    fs::metadata(namespace).map_or(true, |file| file.ino() == FIRST_PIDS)
}

fn record(port: &mut Port) -> Result<(), AgentError> {
    let mut session = Session::default();
    let mut processors = Processors::open(&mut session).map_err(refused)?;
    if processors.is_empty() {
        return Err(AgentError::NoProcessors);
    }
    let mut frames = Frames::default();
    let began = sys::now().tsc;
    let (mut next, mut check, mut scan) = (Instant::now(), Instant::now() + CHECK, Instant::now());
    loop {
        let asks = port.exchange(&mut frames)?;
        let now = Instant::now();
        if now >= check {
            processors.check(&mut session);
            check = now + CHECK;
        }
        processors.drain(&mut session);
        session.now(sys::now());
        for ask in &asks {
            port.send(&session.answer(ask));
            next = now + HELLO;
        }
        if now >= next {
            port.send(&frame(&ToVmm::Hello {
                magic: MAGIC,
                version: VERSION,
                session: began,
            }));
            next = now + HELLO;
        }
        port.write()?;
        if now >= scan && session.is_incomplete() {
            let took = processors.begin_again(&mut session);
            scan = Instant::now() + rest(took);
        }
        let until = next.min(check);
        wait(
            port,
            &processors,
            until.saturating_duration_since(Instant::now()),
        )?;
    }
}

/// How long nobody looks at `/proc` after a look that took so long.
fn rest(took: Duration) -> Duration {
    REST.max(took.saturating_mul(RESTS))
}

fn refused((cpu, why): (u32, NoEvent)) -> AgentError {
    match why {
        NoEvent::NoSwitches => AgentError::NoSwitches,
        NoEvent::Other(cause) => match Errno::from_io_error(&cause) {
            Some(Errno::NOSYS | Errno::NOENT) => AgentError::NoPerf,
            _ => AgentError::Event { cpu, cause },
        },
    }
}

/// Waits for a question, for room for an answer, for many records, or for the time.
fn wait(port: &Port, processors: &Processors, time: Duration) -> Result<(), AgentError> {
    let mut events = PollFlags::IN;
    events.set(PollFlags::OUT, !port.out.is_empty());
    let mut all = vec![PollFd::new(&port.device, events)];
    let rings = processors.rings();
    all.extend(rings.map(|ring| PollFd::new(ring, PollFlags::IN)));
    let time = Timespec::try_from(time).unwrap_or_default();
    match poll(&mut all, Some(&time)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(AgentError::Wait(errno.into())),
    }
}

/// The port to the VMM, which never blocks.
#[derive(Debug)]
struct Port {
    path: PathBuf,
    device: OwnedFd,
    out: VecDeque<u8>,
}

impl Port {
    fn open(path: &Path) -> Result<Self, AgentError> {
        let open = || {
            let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let device = open(path, flags, Mode::empty())?;
            // Neither echo nor line ends.
            let mut settings = tcgetattr(device.as_fd())?;
            settings.make_raw();
            tcsetattr(device.as_fd(), OptionalActions::Now, &settings)?;
            tcflush(device.as_fd(), QueueSelector::IFlush)?;
            Ok(device)
        };
        match open() {
            Ok(device) => Ok(Self {
                path: path.to_owned(),
                device,
                out: VecDeque::new(),
            }),
            Err(errno) => Err(failed(path, errno)),
        }
    }

    fn send(&mut self, frame: &[u8]) {
        // Whoever does not read gets nothing more.
        if self.out.len() + frame.len() <= WAITING {
            self.out.extend(frame);
        }
    }

    /// Writes what there is room for.
    fn write(&mut self) -> Result<(), AgentError> {
        while !self.out.is_empty() {
            match rustix::io::write(&self.device, self.out.as_slices().0) {
                Ok(0) | Err(Errno::AGAIN) => break,
                Ok(written) => drop(self.out.drain(..written)),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(failed(&self.path, errno)),
            }
        }
        Ok(())
    }

    /// Writes what there is room for, and reads what there is.
    fn exchange(&mut self, frames: &mut Frames) -> Result<Vec<Ask>, AgentError> {
        self.write()?;
        let (mut asks, mut buffer) = (Vec::new(), [0; 4096]);
        match rustix::io::read(&self.device, &mut buffer) {
            Ok(0) => return Err(failed(&self.path, Errno::IO)),
            Ok(read) => frames.push(&buffer[..read], |ask| asks.push(ask)),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return Err(failed(&self.path, errno)),
        }
        Ok(asks)
    }
}

fn failed(path: &Path, errno: Errno) -> AgentError {
    AgentError::Port {
        port: path.to_owned(),
        cause: errno.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_leave_time_to_others() {
        for (took, expected) in [(0, 1000), (50, 1000), (700, 7000)] {
            let took = Duration::from_millis(took);
            assert_eq!(rest(took), Duration::from_millis(expected));
        }
    }

    #[test]
    fn only_the_first_namespace_will_do() {
        assert!(is_first(Path::new("/proc/self/ns/none")));
        // Another one, for certain.
        assert!(!is_first(Path::new("/proc/self/ns/uts")));
    }
}
