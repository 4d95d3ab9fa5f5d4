//! The devices of a measuring guest: a port on which it reports each batch.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm::devices::Platform;
use vmm::devices::{DeviceOutcome, GuestEnd};
use vmm::micro::UNEXPECTED_VECTOR_PORT;
use vmm::sys::pin_this_thread;
use vmm::vcpu::VcpuEnd;

use super::guest::{AFTER, BEFORE, words_of};
use crate::guest::{BATCH, samples_at};
use crate::harness::DONE;

/// What ends the guest when we want it.
const OURS: u32 = u32::MAX;

/// What a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reported {
    /// One turn of a vCPU's loop, with its number.
    Turns,
    /// Accesses of vCPU 0, with their kind.
    Accesses,
}

/// What the guest has timed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    /// Kind of access.
    pub(super) number: u32,
    /// TSC ticks.
    pub(super) ticks: Vec<u64>,
}

/// Passes batches on.
#[derive(Debug)]
pub(super) struct Reporter {
    what: Reported,
    memory: Option<GuestMemoryMmap>,
    batches: SyncSender<Batch>,
    stop: Arc<AtomicBool>,
    /// Where the guest's thread goes, once.
    cpu: Option<usize>,
    is_there: AtomicBool,
}

impl Reporter {
    pub(super) fn new(
        what: Reported,
        batches: SyncSender<Batch>,
        stop: Arc<AtomicBool>,
        cpu: Option<usize>,
    ) -> Self {
        Self {
            what,
            memory: None,
            batches,
            stop,
            cpu,
            is_there: AtomicBool::new(false),
        }
    }

    /// With the guest's memory, in which it leaves its times.
    pub(super) fn of(mut self, memory: GuestMemoryMmap) -> Self {
        self.memory = Some(memory);
        self
    }

    /// Whether an end is what we asked for.
    pub(super) fn is_ours(end: &VcpuEnd) -> bool {
        matches!(
            end,
            VcpuEnd::Stopped | VcpuEnd::Guest(GuestEnd::TestExit(OURS))
        )
    }

    fn ticks(&self, number: u32) -> Option<Vec<u64>> {
        let memory = self.memory.as_ref()?;
        match self.what {
            Reported::Turns => {
                let words = words_of(usize::try_from(number).ok()?);
                let word = |at| memory.read_obj::<u64>(GuestAddress(words + at)).ok();
                Some(vec![word(AFTER)?.wrapping_sub(word(BEFORE)?)])
            }
            Reported::Accesses => {
                let mut bytes = [0; 4 * BATCH as usize];
                let at = GuestAddress(samples_at(0));
                memory.read_slice(&mut bytes, at).ok()?;
                let (words, _) = bytes.as_chunks::<4>();
                Some(
                    words
                        .iter()
                        .map(|word| u32::from_le_bytes(*word).into())
                        .collect(),
                )
            }
        }
    }

    fn batch(&self, number: u32) -> DeviceOutcome {
        if let (Some(cpu), false) = (self.cpu, self.is_there.swap(true, Ordering::Relaxed)) {
            // The CPU was found to be allowed before.
            if let Err(error) = pin_this_thread(cpu) {
                log::warn!("the guest's thread does not stay on host CPU {cpu}: {error}");
            }
        }
        if self.stop.load(Ordering::Acquire) {
            return DeviceOutcome::Exit(GuestEnd::TestExit(OURS));
        }
        if let Some(ticks) = self.ticks(number) {
            // Who does not look at them in time does not want them.
            let _ = self.batches.try_send(Batch { number, ticks });
        }
        DeviceOutcome::Continue
    }
}

impl Platform for Reporter {
    fn port_read(&self, _: u16, _: u8, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn port_write(&self, port: u16, _: u8, data: &[u8]) -> DeviceOutcome {
        let word = u32::from_le_bytes(data.try_into().unwrap_or([0xff; 4]));
        match port {
            DONE => self.batch(word),
            UNEXPECTED_VECTOR_PORT => DeviceOutcome::Exit(GuestEnd::TestExit(word & 0xff)),
            _ => DeviceOutcome::Continue,
        }
    }

    fn mmio_read(&self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn mmio_write(&self, _: u64, _: &[u8]) {}
}
