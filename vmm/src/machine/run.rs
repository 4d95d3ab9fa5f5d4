//! From start to end of one run.

use std::io::stdin;
use std::sync::Arc;

use pmu_virt::PmuState;
use thiserror::Error;
use vmm_sys_util::errno;
use vmm_sys_util::eventfd::EventFd;

use super::build::{KvmMachine, Machine, Runner};
use super::console::ConsoleInput;
use super::emu_thread::EmuThread;
use super::event_loop::{LoopError, Sources, Wake, serve};
use super::signals::stop_requests;
use super::state::{self, StateFileError};
use super::threads::{Ended, SharedCores, Spread, StartError, Threads};
use crate::audit::AuditTrail;
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

/// The threads that run the vCPUs.
enum RunningVcpus {
    Kvm(Threads),
    Emu(EmuThread),
}

impl RunningVcpus {
    /// Starts all of them; `wake` is written when one ends.
    fn start(
        runner: Runner,
        audit: Arc<AuditTrail>,
        config: &RunConfig,
        wake: &EventFd,
    ) -> Result<Self, StartError> {
        match runner {
            Runner::Kvm(machine) => {
                let KvmMachine {
                    vcpus,
                    cores: pmus,
                    core_jobs: queues,
                    pin,
                    control,
                    ..
                } = *machine;
                let shared = |plan| SharedCores { plan, pmus, queues };
                let cores = config.cores.map(shared);
                let spread = Spread { cores, pin };
                Threads::start(vcpus, control, audit, spread, wake).map(Self::Kvm)
            }
            Runner::Emu(machine) => EmuThread::start(*machine, audit, wake).map(Self::Emu),
        }
    }

    /// The first vCPU that ended by itself, once one has.
    fn first_end(&mut self) -> Option<&Ended> {
        match self {
            Self::Kvm(threads) => threads.first_end(),
            Self::Emu(thread) => thread.first_end(),
        }
    }

    /// Stops all vCPUs and waits for their threads.
    fn stop(&mut self) {
        match self {
            Self::Kvm(threads) => threads.stop(),
            Self::Emu(thread) => thread.stop(),
        }
    }

    /// The PMU state of every vCPU that has stopped.
    fn take_states(&mut self) -> Vec<(VcpuId, PmuState)> {
        match self {
            Self::Kvm(threads) => threads.take_states(),
            Self::Emu(thread) => thread.take_states(),
        }
    }

    /// How the machine ended.
    fn into_end(self) -> Option<Ended> {
        match self {
            Self::Kvm(threads) => threads.into_end(),
            Self::Emu(thread) => thread.into_end(),
        }
    }
}

/// Runs `machine` until it ends, with the terminal in raw mode meanwhile.
///
/// # Errors
/// [`RunError`]: the host's fault; what a guest does is a [`RunEnd`].
pub fn run(mut machine: Machine, config: &RunConfig) -> Result<RunEnd, RunError> {
    let mut console = ConsoleInput::new(machine.platform.clone());
    match &machine.runner {
        Runner::Kvm(_) => install_kick_handler().map_err(|error| RunError::Signal(error.into()))?,
        // An agent's requests are input as well, and may come at any time.
        Runner::Emu(_) if config.agent => {}
        Runner::Emu(machine) => console.tell_end(machine.attention.clone()),
    }
    let signals = stop_requests().map_err(RunError::Signal)?;
    let ended = EventFd::new(libc::EFD_NONBLOCK).map_err(StartError::Event)?;
    let sources = Sources {
        ended: ended.try_clone().map_err(StartError::Event)?,
        signals,
        asked: machine.stop.take(),
        timeout: config.timeout,
        console,
    };
    let terminal = RawTerminal::enter(stdin())?;
    let Machine {
        runner,
        audit,
        server,
        ..
    } = machine;
    let mut running = RunningVcpus::start(runner, audit, config, &ended)?;
    let wake = serve(sources);
    // A guest that ended by itself at the last moment is reported as it ended.
    let by_itself = running.first_end().is_some();
    running.stop();
    drop(terminal);
    // Tools hear of the end, and may look at what was counted.
    drop(server);
    let states = running.take_states();
    let end = outcome(wake, by_itself, running.into_end());
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
