//! The vCPUs' threads.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::EventFd;

use super::run::RunError;
use crate::kvm::VcpuId;
use crate::sys::KickTarget;
use crate::vcpu::{Vcpu, VcpuControl, VcpuEnd, VcpuFailure, VcpuParts};

/// How often vCPUs that were asked to stop are kicked again.
const KICK_AGAIN: Duration = Duration::from_millis(5);

/// How long vCPUs may take to stop.
const PATIENCE: Duration = Duration::from_secs(5);

type Ended = (VcpuId, Result<VcpuEnd, VcpuFailure>);

/// Wakes the main thread when a vCPU's thread ends.
struct WakeOnDrop(EventFd);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        // An event whose counter is full wakes its reader all the same.
        let _ = self.0.write(1);
    }
}

/// The running vCPUs.
#[derive(Debug)]
pub(super) struct Threads {
    handles: Vec<JoinHandle<()>>,
    targets: Arc<Mutex<Vec<KickTarget>>>,
    control: Arc<VcpuControl>,
    ended: std::sync::mpsc::Receiver<Ended>,
    first: Option<Ended>,
}

impl Threads {
    /// Starts every vCPU; `wake` is written whenever one ends.
    pub(super) fn start(
        vcpus: Vec<VcpuParts>,
        control: Arc<VcpuControl>,
        wake: &EventFd,
    ) -> Result<Self, RunError> {
        let (send, ended) = channel();
        let mut threads = Self {
            handles: Vec::with_capacity(vcpus.len()),
            targets: Arc::default(),
            control,
            ended,
            first: None,
        };
        for parts in vcpus {
            let wake = wake.try_clone().map_err(RunError::Event)?;
            match threads.spawn(parts, send.clone(), wake) {
                Ok(handle) => threads.handles.push(handle),
                Err(error) => {
                    threads.stop();
                    return Err(RunError::Thread(error));
                }
            }
        }
        Ok(threads)
    }

    fn spawn(
        &self,
        parts: VcpuParts,
        send: Sender<Ended>,
        wake: EventFd,
    ) -> std::io::Result<JoinHandle<()>> {
        let id = parts.kvm.id();
        let targets = self.targets.clone();
        Builder::new().name(format!("vcpu{}", id.0)).spawn(move || {
            // Dropped last, also by a panic: the main thread always hears of it.
            let _wake = WakeOnDrop(wake);
            lock(&targets).push(KickTarget::current());
            let end = Vcpu::new(parts).and_then(|mut vcpu| vcpu.run());
            // The receiver lives until all threads were joined.
            let _ = send.send((id, end));
        })
    }

    /// The first vCPU that ended by itself, once one has.
    pub(super) fn first_end(&mut self) -> Option<&Ended> {
        if self.first.is_none() {
            self.first = self.ended.try_recv().ok();
        }
        self.first.as_ref()
    }

    /// Stops all vCPUs and waits for their threads.
    ///
    /// A kick ends whatever a guest does. What it cannot end is a write to a
    /// console that nobody reads: after [`PATIENCE`] such threads are left to
    /// the end of the process.
    pub(super) fn stop(&mut self) {
        self.control.stop();
        let since = Instant::now();
        while self.handles.iter().any(|handle| !handle.is_finished()) {
            if since.elapsed() > PATIENCE {
                log::error!("a vCPU does not stop: is anybody reading the console's output?");
                self.handles.retain(JoinHandle::is_finished);
                break;
            }
            for target in lock(&self.targets).iter() {
                target.kick();
            }
            std::thread::sleep(KICK_AGAIN);
        }
        for handle in self.handles.drain(..) {
            // A panic was reported by the panic hook; the run ends anyway.
            let _ = handle.join();
        }
    }

    /// How the machine ended, after [`Threads::stop`].
    pub(super) fn into_end(mut self) -> Option<Ended> {
        self.first_end();
        self.first.take()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
