//! The one thread that runs the vCPUs of an emulated machine.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use emu::SlowPath;
use kvm_pmu::thread_cpu_time;
use pmu_virt::{PmuState, Ring};
use vmm_sys_util::eventfd::EventFd;

use super::build::EmuMachine;
use super::figures::EngineFigures;
use super::outside::{Attention, MachineThread};
use super::threads::{Ended, PATIENCE, StartError, WakeOnDrop};
use crate::audit::AuditTrail;
use crate::emu::{Room, RoomEnd};
use crate::kvm::VcpuId;
use crate::sched::pin;
use crate::vcpu::VcpuControl;

/// What is left of the vCPUs, and how they ended.
type Left = (Ended, Vec<(VcpuId, PmuState)>);

/// What the calling thread has done in `room`.
fn figures(room: &Room) -> EngineFigures {
    let slow_paths = room.slow_paths();
    EngineFigures {
        instructions: room.executed(Ring::Kernel) + room.executed(Ring::User),
        cpu_ns: u64::try_from(thread_cpu_time().as_nanos()).unwrap_or(u64::MAX),
        code_bytes: room.code_bytes() as u64,
        slow: SlowPath::ALL.map(|path| slow_paths.iter().map(|one| one.of(path)).sum()),
    }
}

/// How often a thread that was asked to stop is looked at.
const LOOK: Duration = Duration::from_millis(1);

/// The running vCPUs.
#[derive(Debug)]
pub(super) struct EmuThread {
    handle: Option<JoinHandle<()>>,
    ended: Receiver<Left>,
    control: Arc<VcpuControl>,
    attention: Arc<Attention>,
    left: Option<Left>,
}

impl EmuThread {
    /// Starts them; `wake` is written when they end.
    pub(super) fn start(
        machine: EmuMachine,
        audit: Arc<AuditTrail>,
        wake: &EventFd,
    ) -> Result<Self, StartError> {
        let EmuMachine {
            mut room,
            pin: pinned,
            control,
            attention,
        } = machine;
        let wake = WakeOnDrop(wake.try_clone().map_err(StartError::Event)?);
        let thread = attention.clone();
        let (send, ended) = channel();
        let run = move || {
            // Dropped last, also by a panic: the main thread always hears of it.
            let _wake = wake;
            let left = match pin(pinned.as_ref(), 0) {
                Ok(()) => {
                    room.comes_to(&MachineThread::of(thread));
                    let RoomEnd { vcpu, end } = room.run();
                    log::info!("{}", figures(&room));
                    let states = room.close(|vcpu, holdings| audit.keep(vcpu, holdings));
                    ((vcpu, Ok(end)), states)
                }
                Err(failure) => ((VcpuId(0), Err(failure)), Vec::new()),
            };
            // The receiver lives until the thread was joined.
            let _ = send.send(left);
        };
        let handle = Builder::new().name("vcpus".to_owned()).spawn(run);
        Ok(Self {
            handle: Some(handle.map_err(StartError::Thread)?),
            ended,
            control,
            attention,
            left: None,
        })
    }

    /// How they ended, once they have by themselves.
    pub(super) fn first_end(&mut self) -> Option<&Ended> {
        if self.left.is_none() {
            self.left = self.ended.try_recv().ok();
        }
        self.left.as_ref().map(|(ended, _)| ended)
    }

    /// Stops them and waits for their thread. What cannot be ended is a write to a console
    /// that nobody reads: such a thread is left to the end of the process.
    pub(super) fn stop(&mut self) {
        self.control.stop();
        self.attention.poke();
        let Some(handle) = self.handle.take() else {
            return;
        };
        let since = Instant::now();
        while !handle.is_finished() {
            if since.elapsed() > PATIENCE {
                log::error!("the vCPUs do not stop: is anybody reading the console's output?");
                return;
            }
            std::thread::sleep(LOOK);
        }
        // A panic was reported by the panic hook; the run ends anyway.
        let _ = handle.join();
    }

    /// The PMU state of every vCPU, after [`EmuThread::stop`].
    pub(super) fn take_states(&mut self) -> Vec<(VcpuId, PmuState)> {
        self.first_end();
        let left = self.left.as_mut();
        left.map_or_else(Vec::new, |(_, states)| std::mem::take(states))
    }

    /// How the machine ended, after [`EmuThread::stop`].
    pub(super) fn into_end(mut self) -> Option<Ended> {
        self.first_end();
        self.left.take().map(|(ended, _)| ended)
    }
}

impl Drop for EmuThread {
    fn drop(&mut self) {
        self.stop();
    }
}
