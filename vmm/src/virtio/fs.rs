//! The file system device: what a driver's requests lead to.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use virtio_bindings::bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};
use virtio_bindings::virtio_ids::VIRTIO_ID_FS;
use vm_memory::GuestMemoryMmap;

use super::queue::{Broken, Chain, MOST_CHAINS, ReadyQueue, SavedQueue};
use super::registers::{CONFIGURATION, QUEUES, Registers, Wrote};
use crate::devices::InterruptLine;

/// Bytes of the tag in configuration space, padded with zeroes (5.11.4).
const TAG: usize = 36;
/// Queues for requests, beside the one for what is urgent.
const REQUEST_QUEUES: u32 = 1;
/// Bytes of a header of FUSE's replies: length, error, number of the request.
const REPLY_HEADER: usize = 16;
/// Where a request of FUSE has its number.
const UNIQUE: Range<usize> = 8..16;

/// The device. `F` answers requests of FUSE: of one, header included, it makes the reply, header
/// included, or none for a request that has none.
pub struct VirtioFs<F> {
    registers: Registers,
    queues: [Option<ReadyQueue>; QUEUES],
    configuration: [u8; TAG + 4],
    memory: GuestMemoryMmap,
    line: Box<dyn InterruptLine>,
    serve: F,
    written: Vec<Range<u64>>,
    broken: Option<Broken>,
    reply: Vec<u8>,
}

/// What is kept of the device, so that another one goes on where it stands. Of who serves
/// files nothing is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsState {
    registers: Registers,
    queues: [Option<SavedQueue>; QUEUES],
}

impl<F> fmt::Debug for VirtioFs<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VirtioFs")
            .field("registers", &self.registers)
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}

impl<F> VirtioFs<F> {
    /// A device that a guest mounts as `tag`, of which the first 36 bytes count.
    pub fn new(tag: &str, memory: GuestMemoryMmap, line: Box<dyn InterruptLine>, serve: F) -> Self {
        let mut configuration = [0; TAG + 4];
        for (to, from) in configuration.iter_mut().take(TAG).zip(tag.bytes()) {
            *to = from;
        }
        configuration[TAG..].copy_from_slice(&REQUEST_QUEUES.to_le_bytes());
        Self {
            registers: Registers::new(VIRTIO_ID_FS),
            queues: [const { None }; QUEUES],
            configuration,
            memory,
            line,
            serve,
            written: Vec::new(),
            broken: None,
            reply: Vec::new(),
        }
    }

    /// A load from the page of registers.
    pub fn load(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let Ok(offset) = u32::try_from(offset) else {
            return;
        };
        if let Some(at) = offset.checked_sub(CONFIGURATION) {
            let from = self.configuration.iter().skip(at as usize);
            for (to, from) in data.iter_mut().zip(from) {
                *to = *from;
            }
        } else if let [_, _, _, _] = data {
            data.copy_from_slice(&self.registers.load(offset).to_le_bytes());
        }
    }

    /// What the driver did, if it broke the device. The first time counts.
    #[must_use]
    pub fn broken(&self) -> Option<Broken> {
        self.broken
    }

    /// Guest-physical addresses that were written to since this was asked last.
    pub fn take_written(&mut self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.written)
    }

    /// Who served files.
    pub fn into_server(self) -> F {
        self.serve
    }

    /// What is kept of the device.
    #[must_use]
    pub fn save(&self) -> FsState {
        FsState {
            registers: self.registers.clone(),
            queues: self
                .queues
                .each_ref()
                .map(|queue| queue.as_ref().map(ReadyQueue::save)),
        }
    }

    /// Goes on from there.
    ///
    /// # Errors
    /// The queues are none that there can be.
    pub fn restore(&mut self, state: &FsState) -> Result<(), Broken> {
        for (queue, saved) in self.queues.iter_mut().zip(&state.queues) {
            let restored = saved.as_ref();
            let restored = restored.map(|saved| ReadyQueue::restored(saved, &self.memory));
            *queue = restored.transpose()?;
        }
        self.registers = state.registers.clone();
        Ok(())
    }

    fn interrupt(&mut self, cause: u32) {
        self.registers.interrupt(cause);
        if let Err(error) = self.line.raise() {
            log::debug!("virtio: cannot raise the interrupt: {error}");
        }
    }

    fn breaks(&mut self, broken: Broken) {
        self.broken.get_or_insert(broken);
        self.registers.set_broken();
        self.interrupt(VIRTIO_MMIO_INT_CONFIG);
    }
}

impl<F: FnMut(&[u8], &mut Vec<u8>)> VirtioFs<F> {
    /// A store to the page of registers. What it asks for is done when this returns.
    pub fn store(&mut self, offset: u64, data: &[u8]) {
        let (Ok(offset), &[a, b, c, d]) = (u32::try_from(offset), data) else {
            return;
        };
        // Nothing in configuration space can be written (5.11.4).
        if offset >= CONFIGURATION {
            return;
        }
        let value = u32::from_le_bytes([a, b, c, d]);
        match self.registers.store(offset, value) {
            Wrote::Nothing => {}
            Wrote::Reset => self.queues = [const { None }; QUEUES],
            Wrote::NotReady(queue) => self.queues[queue] = None,
            Wrote::Ready(queue, rings) => match ReadyQueue::new(rings, &self.memory) {
                Ok(ready) => self.queues[queue] = Some(ready),
                Err(broken) => self.breaks(broken),
            },
            Wrote::Notified(queue) => {
                if let Err(broken) = self.serve_queue(queue) {
                    self.breaks(broken);
                }
            }
        }
    }

    /// Answers all that is in a queue.
    fn serve_queue(&mut self, number: usize) -> Result<(), Broken> {
        let mut served = 0;
        while let Some(queue) = &mut self.queues[number] {
            let Some(chain) = queue.take(&self.memory)? else {
                break;
            };
            // The guest does not run meanwhile, but a reply may lie where the queue does, and
            // make more of it available each time.
            served += 1;
            if served > MOST_CHAINS {
                return Err(Broken::Heads);
            }
            self.reply.clear();
            (self.serve)(&chain.request, &mut self.reply);
            fit(&chain, &mut self.reply)?;
            queue.give_back(&chain, &self.reply, &self.memory, &mut self.written)?;
        }
        if served > 0 {
            self.interrupt(VIRTIO_MMIO_INT_VRING);
        }
        Ok(())
    }
}

/// A reply that does not fit becomes one that says so.
fn fit(chain: &Chain, reply: &mut Vec<u8>) -> Result<(), Broken> {
    let room = chain.room();
    if reply.len() <= room {
        return Ok(());
    }
    if room < REPLY_HEADER {
        return Err(Broken::NoRoom);
    }
    reply.clear();
    reply.extend(16_u32.to_le_bytes());
    reply.extend((-libc::EIO).to_le_bytes());
    let mut unique = [0; 8];
    for (to, from) in unique
        .iter_mut()
        .zip(chain.request.get(UNIQUE).unwrap_or_default())
    {
        *to = *from;
    }
    reply.extend(unique);
    Ok(())
}

#[cfg(test)]
mod tests;
