//! From start to end of one run.

use std::io::stdin;

use thiserror::Error;
use vmm_sys_util::errno;
use vmm_sys_util::eventfd::EventFd;

use super::build::Machine;
use super::console::ConsoleInput;
use super::event_loop::{LoopError, Sources, Wake, serve};
use super::signals::stop_requests;
use super::state::{self, StateFileError};
use super::threads::{Ended, SharedCores, Spread, StartError, Threads};
use crate::config::RunConfig;
use crate::kvm::VcpuId;
use crate::sys::install_kick_handler;
use crate::terminal::{RawTerminal, TerminalError};
use crate::vcpu::{VcpuEnd, VcpuFailure};

/// The host failed while a guest ran, or could not start it.
#[derive(Debug, Error)]
pub enum RunError {
    /// The vCPUs cannot be started.
    #[error(transparent)]
    Start(#[from] StartError),
    /// Nothing can be waited for.
    #[error(transparent)]
    Loop(#[from] LoopError),
    /// A signal handler.
    #[error("sigaction failed: {0}")]
    Signal(errno::Error),
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    /// A vCPU's thread failed.
    #[error("{0}: {1}")]
    Vcpu(VcpuId, VcpuFailure),
    /// The guest has run, but its PMU state could not be kept.
    #[error("{source} (the run itself: {end})")]
    State {
        /// How the run ended.
        end: RunEnd,
        /// Why there is no file.
        source: Box<StateFileError>,
    },
    /// A vCPU's thread ended without a word.
    #[error("the thread of a vCPU panicked; this is a bug in Umpire")]
    Panicked,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunEnd {
    /// By the guest, at this vCPU.
    Guest(VcpuId, VcpuEnd),
    /// By SIGINT, SIGTERM or SIGHUP.
    Interrupted,
    /// By `--timeout`.
    TimedOut,
}

impl RunEnd {
    /// True if the guest ended as guests should: by itself, in good order.
    #[must_use]
    pub fn is_success(&self) -> bool {
        matches!(self, Self::Guest(_, VcpuEnd::Guest(_)))
    }
}

impl std::fmt::Display for RunEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Guest(_, VcpuEnd::Guest(end)) => end.fmt(f),
            Self::Guest(id, end) => write!(f, "{id}: {end}"),
            Self::Interrupted => f.write_str("stopped by a signal"),
            Self::TimedOut => f.write_str("stopped, because --timeout passed"),
        }
    }
}

/// Runs `machine` until it ends, with the terminal in raw mode meanwhile.
///
/// # Errors
/// [`RunError`]: the host's fault; what a guest does is a [`RunEnd`].
pub fn run(mut machine: Machine, config: &RunConfig) -> Result<RunEnd, RunError> {
    install_kick_handler().map_err(RunError::Signal)?;
    let signals = stop_requests().map_err(RunError::Signal)?;
    let ended = EventFd::new(libc::EFD_NONBLOCK).map_err(StartError::Event)?;
    let sources = Sources {
        ended: ended.try_clone().map_err(StartError::Event)?,
        signals,
        asked: machine.stop.take(),
        timeout: config.timeout,
        console: ConsoleInput::new(machine.platform.clone()),
    };
    let vcpus = std::mem::take(&mut machine.vcpus);
    let spread = Spread {
        cores: config.cores.map(|plan| SharedCores {
            plan,
            pmus: std::mem::take(&mut machine.cores),
            queues: std::mem::take(&mut machine.core_jobs),
        }),
        pin: machine.pin.take(),
    };
    let terminal = RawTerminal::enter(stdin())?;
    let mut threads = Threads::start(
        vcpus,
        machine.control.clone(),
        machine.audit.clone(),
        spread,
        &ended,
    )?;
    let wake = serve(sources);
    // A guest that ended by itself at the last moment is reported as it ended.
    let by_itself = threads.first_end().is_some();
    threads.stop();
    drop(terminal);
    // Tools hear of the end, and may look at what was counted.
    drop(machine.server.take());
    let states = threads.take_states();
    let end = outcome(wake, by_itself, threads.into_end());
    let Some(path) = &config.save_on_exit else {
        return end;
    };
    match (state::write(path, config.cpus, states), end) {
        (Ok(()), end) => {
            log::info!("the PMU state is in {}", path.display());
            end
        }
        (Err(source), Ok(end)) => Err(RunError::State {
            end,
            source: Box::new(source),
        }),
        // Why the run failed says more.
        (Err(error), Err(failure)) => {
            log::error!("{error}");
            Err(failure)
        }
    }
}

fn outcome(
    wake: Result<Wake, LoopError>,
    by_itself: bool,
    end: Option<Ended>,
) -> Result<RunEnd, RunError> {
    match (wake?, by_itself) {
        (Wake::Signal, false) => Ok(RunEnd::Interrupted),
        (Wake::Timeout, false) => Ok(RunEnd::TimedOut),
        // A thread reports its end before it wakes us, unless it panicked; the
        // others end as "stopped", which would hide it.
        (Wake::VcpuEnded, false) => Err(RunError::Panicked),
        _ => match end {
            Some((id, Ok(end))) => Ok(RunEnd::Guest(id, end)),
            Some((id, Err(failure))) => Err(RunError::Vcpu(id, failure)),
            None => Err(RunError::Panicked),
        },
    }
}
