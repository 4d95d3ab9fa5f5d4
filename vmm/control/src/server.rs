//! The server: how it starts, and how it ends. Its one thread is in `event_loop`.

mod administration;
mod answer;
mod buffers;
mod connections;
mod contexts;
mod event_loop;
mod events;
mod handed;
mod inventory;
mod kernel;
mod limits;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use perfmon_abi::wire::info::CountableInfo;
use pmu_virt::perfmon::{FormatRegistry, LogicalPmu};
use pmu_virt::{CountRequest, EventFilters};
use thiserror::Error;

use crate::config::ControlConfig;
use crate::dispatcher::JobDispatcher;
use crate::job::Notifier;
use crate::kernel::GuestKernel;
use crate::lease::LeaseDesk;
use crate::quantities::MemoryProbe;
use event_loop::EventLoop;
use limits::Limits;
use umpire_service::{Closer, Kind, Listener, SocketError, Wording, raise_open_files};

/// How long tools may look at their contexts after the machine has ended.
const LINGER: Duration = Duration::from_secs(1);
/// How much longer the server's thread may take to end.
const GRACE: Duration = Duration::from_secs(2);
/// How messages call the socket.
const WORDING: Wording = Wording {
    option: "--control",
    server: "VMM",
};
/// How often [`Server::stop`] looks whether the thread has ended.
const END_POLL: Duration = Duration::from_millis(1);

/// The server could not be started.
#[derive(Debug, Error)]
pub enum ServerError {
    /// The socket cannot be had.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The process has no descriptor or thread left.
    #[error("host tools cannot be served: {0} (limit of open files: `ulimit -n`)")]
    Io(#[from] io::Error),
}

/// An event that the VM's backend counts, and how well.
pub(crate) type Countable = (CountRequest, CountableInfo);

/// The VM whose vCPUs and cores tools look at.
#[derive(Debug)]
pub(crate) struct ServedVm {
    /// The name of what the guest boots.
    pub(crate) guest: String,
    /// The name of the counter backend.
    pub(crate) counters: String,
    /// The registers that tools see.
    pub(crate) pmu: Arc<LogicalPmu>,
    pub(crate) formats: Arc<FormatRegistry>,
    pub(crate) tsc_khz: u32,
    /// The VM's TSC is a clock of its own.
    pub(crate) virtual_time: bool,
    /// The host CPUs that cores are kept on, if they are.
    pub(crate) core_cpus: Vec<u32>,
    /// Most contexts of a vCPU, and of a core.
    pub(crate) contexts_per_vcpu: usize,
    /// The way to the vCPUs and cores.
    pub(crate) dispatcher: JobDispatcher,
    /// Which events whose tools may count.
    pub(crate) events: EventFilters,
    /// Who gets counters of the host for contexts, if these need a lease.
    pub(crate) lease_desk: Option<LeaseDesk>,
    pub(crate) memory: Option<MemoryProbe>,
    /// Who can say what the guest's kernel is.
    pub(crate) kernel: Option<Arc<dyn GuestKernel>>,
    /// What can be counted, and how well.
    pub(crate) countable: Vec<Countable>,
}

/// The running server. It stops when it is dropped.
#[derive(Debug)]
pub struct Server {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Stop {
    requested: AtomicBool,
    notifier: Notifier,
}

impl Server {
    /// Serves `vm` as `config` says, from now on.
    ///
    /// # Errors
    /// The socket cannot be had, or the host has no descriptor or thread left.
    pub(crate) fn start(vm: ServedVm, config: &ControlConfig) -> Result<Self, ServerError> {
        let files = raise_open_files();
        let limits = Limits::new(config, files, vm.dispatcher.vcpus());
        let listener = Listener::new(
            &config.socket,
            Kind::PacketsWithRights,
            &config.access,
            WORDING,
            &Closer::new(files),
        )?;
        let stop = Arc::new(Stop {
            requested: AtomicBool::new(false),
            notifier: Notifier::new()?,
        });
        let event_loop = EventLoop::new(vm, config, limits, listener, &stop)?;
        let requested = stop.clone();
        let thread = Builder::new()
            .name("control".to_owned())
            .spawn(move || event_loop.run(&requested))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Stops the server, after every vCPU and core has ended. Tools may look at
    /// contexts that have got PFM_MSG_END for a second. Then the socket is removed.
    pub fn stop(&mut self) {
        self.stop.requested.store(true, Ordering::Release);
        self.stop.notifier.notify();
        if let Some(thread) = self.thread.take() {
            let began = Instant::now();
            while !thread.is_finished() && began.elapsed() < LINGER + GRACE {
                std::thread::sleep(END_POLL);
            }
            if thread.is_finished() {
                // A panic was reported by the panic hook.
                let _ = thread.join();
            } else {
                log::warn!("the server of host tools does not end, and is left behind");
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests;
