//! The program: from the command line to the end of the guest.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Parser;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::process::{geteuid, setpriority_process};
use rustix::termios::{OptionalActions, QueueSelector, tcflush, tcgetattr, tcsetattr};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use thiserror::Error;

use crate::guest::Guest;
use crate::proc;
use crate::records;
use crate::session::Session;
use crate::sys::{self, NoEvent, Ring};
use umpire_agent_wire::{Ask, Frames, MAGIC, ToVmm, VERSION, frame};

/// How often the agent says that it is there, while nobody asks.
const HELLO: Duration = Duration::from_secs(1);
/// Before all usual programs.
const PRIORITY: i32 = -20;
/// A tick of `/proc` in ns: `USER_HZ` is 100 on x86-64.
const TICK_NS: u64 = 10_000_000;
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
                  Linux 4.3 or later with perf events, and what processors are online when it \
                  starts.\n\nExit status: 0 after --help, 2 if it cannot work."
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
    /// No port.
    #[error(
        "{} cannot be used: {cause}; umpire run --agent gives the guest this port, and --port \
         names another",
        port.display()
    )]
    Port {
        /// The port.
        port: PathBuf,
        /// Why.
        cause: io::Error,
    },
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
        /// Why.
        cause: io::Error,
    },
    /// No processors.
    #[error("/proc/cpuinfo names no processor with an APIC id; is /proc mounted?")]
    NoProcessors,
    /// Waiting fails.
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

fn record(port: &mut Port) -> Result<(), AgentError> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let processors = proc::processors(&cpuinfo);
    if processors.is_empty() {
        return Err(AgentError::NoProcessors);
    }
    let mut rings = rings(&processors)?;
    let mut session = Session::new(Guest::default(), processors.iter().map(|(_, id)| *id));
    begin(&mut session);
    show_up(&processors);
    let mut frames = Frames::default();
    let began = sys::now().tsc;
    let mut next = Instant::now();
    loop {
        let asks = port.exchange(&mut frames)?;
        for (apic_id, ring) in &mut rings {
            ring.drain(|bytes| {
                if let Some(record) = records::record(bytes) {
                    session.take(*apic_id, record);
                }
            });
        }
        session.now(sys::now());
        if session.is_incomplete() {
            begin(&mut session);
        }
        let now = Instant::now();
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
        wait(port, &rings, next.saturating_duration_since(Instant::now()))?;
    }
}

/// Begins with what runs now.
fn begin(session: &mut Session) {
    let since = sys::now().ns;
    session.begin_again(proc::guest(Path::new("/proc"), TICK_NS), since);
}

/// The records of each processor, by APIC id.
fn rings(processors: &[(u32, u32)]) -> Result<Vec<(u32, Ring)>, AgentError> {
    let open = |&(cpu, apic_id): &(u32, u32)| match Ring::open(cpu) {
        Ok(ring) => Ok((apic_id, ring)),
        Err(NoEvent::NoSwitches) => Err(AgentError::NoSwitches),
        Err(NoEvent::Other(cause)) => Err(match Errno::from_io_error(&cause) {
            Some(Errno::NOSYS | Errno::NOENT) => AgentError::NoPerf,
            _ => AgentError::Event { cpu, cause },
        }),
    };
    processors.iter().map(open).collect()
}

/// Runs on each processor once, so that the kernel records who runs there.
fn show_up(processors: &[(u32, u32)]) {
    let Ok(all) = sched_getaffinity(None) else {
        return;
    };
    for (cpu, _) in processors {
        let cpu = usize::try_from(*cpu).unwrap_or(usize::MAX);
        if cpu < CpuSet::MAX_CPU {
            let mut one = CpuSet::new();
            one.set(cpu);
            // Of a processor where it may not run the first switch tells.
            let _ = sched_setaffinity(None, &one);
        }
    }
    let _ = sched_setaffinity(None, &all);
}

/// Waits for a question, for room for an answer, for many records, or for the time.
fn wait(port: &Port, rings: &[(u32, Ring)], time: Duration) -> Result<(), AgentError> {
    let mut events = PollFlags::IN;
    events.set(PollFlags::OUT, !port.out.is_empty());
    let mut all = vec![PollFd::new(&port.device, events)];
    all.extend(
        rings
            .iter()
            .map(|(_, ring)| PollFd::new(ring, PollFlags::IN)),
    );
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

    /// Writes what there is room for, and reads what there is.
    fn exchange(&mut self, frames: &mut Frames) -> Result<Vec<Ask>, AgentError> {
        while !self.out.is_empty() {
            match rustix::io::write(&self.device, self.out.as_slices().0) {
                Ok(0) | Err(Errno::AGAIN) => break,
                Ok(written) => drop(self.out.drain(..written)),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(failed(&self.path, errno)),
            }
        }
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
