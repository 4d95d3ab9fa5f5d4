//! The registers of a virtio device (virtio 1.2, 4.2.2), without legacy ones.

use serde::{Deserialize, Serialize};
use virtio_bindings::bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
    VIRTIO_F_VERSION_1,
};
use virtio_bindings::bindings::virtio_mmio::{
    VIRTIO_MMIO_CONFIG, VIRTIO_MMIO_DEVICE_FEATURES, VIRTIO_MMIO_DEVICE_FEATURES_SEL,
    VIRTIO_MMIO_DEVICE_ID, VIRTIO_MMIO_DRIVER_FEATURES, VIRTIO_MMIO_DRIVER_FEATURES_SEL,
    VIRTIO_MMIO_INTERRUPT_ACK, VIRTIO_MMIO_INTERRUPT_STATUS, VIRTIO_MMIO_MAGIC_VALUE,
    VIRTIO_MMIO_QUEUE_AVAIL_HIGH, VIRTIO_MMIO_QUEUE_AVAIL_LOW, VIRTIO_MMIO_QUEUE_DESC_HIGH,
    VIRTIO_MMIO_QUEUE_DESC_LOW, VIRTIO_MMIO_QUEUE_NOTIFY, VIRTIO_MMIO_QUEUE_NUM,
    VIRTIO_MMIO_QUEUE_NUM_MAX, VIRTIO_MMIO_QUEUE_READY, VIRTIO_MMIO_QUEUE_SEL,
    VIRTIO_MMIO_QUEUE_USED_HIGH, VIRTIO_MMIO_QUEUE_USED_LOW, VIRTIO_MMIO_SHM_BASE_HIGH,
    VIRTIO_MMIO_SHM_LEN_LOW, VIRTIO_MMIO_STATUS, VIRTIO_MMIO_VERSION,
};

use super::queue::{MOST_CHAINS, Rings};

/// "virt".
const MAGIC: u32 = u32::from_le_bytes(*b"virt");
/// The layout of registers that is not the legacy one.
const MODERN: u32 = 2;
/// The features of the device: it is not a legacy one, and nothing else.
const FEATURES: u64 = 1 << VIRTIO_F_VERSION_1;
/// Queues of the device: one for what is urgent, one for requests.
pub(super) const QUEUES: usize = 2;

/// What a store leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wrote {
    /// Registers alone have changed.
    Nothing,
    /// A queue is ready from now on.
    Ready(usize, Rings),
    /// It is no longer.
    NotReady(usize),
    /// There is something in a queue.
    Notified(usize),
    /// The device is as after power-up.
    Reset,
}

/// The registers of one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Registers {
    device_id: u32,
    status: u32,
    device_features_word: u32,
    driver_features_word: u32,
    driver_features: u64,
    queue: u32,
    rings: [Rings; QUEUES],
    ready: [bool; QUEUES],
    interrupts: u32,
}

impl Registers {
    pub(super) fn new(device_id: u32) -> Self {
        Self {
            device_id,
            status: 0,
            device_features_word: 0,
            driver_features_word: 0,
            driver_features: 0,
            queue: 0,
            rings: [Rings::default(); QUEUES],
            ready: [false; QUEUES],
            interrupts: 0,
        }
    }

    /// A load of 4 bytes below the configuration space.
    pub(super) fn load(&self, offset: u32) -> u32 {
        let queue = self.selected();
        match offset {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => MODERN,
            VIRTIO_MMIO_DEVICE_ID => self.device_id,
            VIRTIO_MMIO_DEVICE_FEATURES => word(FEATURES, self.device_features_word),
            VIRTIO_MMIO_QUEUE_NUM_MAX => queue.map_or(0, |_| MOST_CHAINS.into()),
            VIRTIO_MMIO_QUEUE_READY => queue.map_or(0, |queue| self.ready[queue].into()),
            VIRTIO_MMIO_INTERRUPT_STATUS => self.interrupts,
            VIRTIO_MMIO_STATUS => self.status,
            // There is no shared memory: its length reads as -1 (4.2.2).
            VIRTIO_MMIO_SHM_LEN_LOW..=VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            _ => 0,
        }
    }

    /// A store of 4 bytes there.
    pub(super) fn store(&mut self, offset: u32, value: u32) -> Wrote {
        match offset {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.device_features_word = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.driver_features_word = value,
            VIRTIO_MMIO_DRIVER_FEATURES => self.set_features(value),
            VIRTIO_MMIO_QUEUE_SEL => self.queue = value,
            VIRTIO_MMIO_QUEUE_READY => return self.set_ready(value & 1 != 0),
            VIRTIO_MMIO_QUEUE_NOTIFY => return self.notify(value),
            VIRTIO_MMIO_INTERRUPT_ACK => self.interrupts &= !value,
            VIRTIO_MMIO_STATUS if value == 0 => {
                *self = Self::new(self.device_id);
                return Wrote::Reset;
            }
            VIRTIO_MMIO_STATUS => self.set_status(value),
            _ => self.set_ring(offset, value),
        }
        Wrote::Nothing
    }

    /// What is used or has changed makes an interrupt, until the driver has seen it.
    pub(super) fn interrupt(&mut self, cause: u32) {
        self.interrupts |= cause;
    }

    /// The device does nothing more until it is reset.
    pub(super) fn set_broken(&mut self) {
        self.status |= VIRTIO_CONFIG_S_NEEDS_RESET;
    }

    fn selected(&self) -> Option<usize> {
        usize::try_from(self.queue)
            .ok()
            .filter(|queue| *queue < QUEUES)
    }

    fn set_features(&mut self, value: u32) {
        // What was agreed upon stays (3.1.1).
        if self.status & VIRTIO_CONFIG_S_FEATURES_OK != 0 {
            return;
        }
        let shift = match self.driver_features_word {
            0 => 0,
            1 => 32,
            // Bits that no device has: they cannot be agreed upon.
            _ if value != 0 => {
                self.driver_features |= !FEATURES & (1 << 63);
                return;
            }
            _ => return,
        };
        let mask = u64::from(u32::MAX) << shift;
        self.driver_features = self.driver_features & !mask | u64::from(value) << shift;
    }

    fn set_status(&mut self, value: u32) {
        // The device's own bit cannot be cleared but by a reset.
        let own = self.status & VIRTIO_CONFIG_S_NEEDS_RESET;
        let mut status = value & 0xff | own;
        // The bit sticks where the device can do with these features: one from before version
        // 1 it cannot serve, and others it does not have (6.1).
        if self.driver_features != FEATURES {
            status &= !VIRTIO_CONFIG_S_FEATURES_OK;
        }
        self.status = status;
    }

    fn is_running(&self) -> bool {
        const RUNS: u32 = VIRTIO_CONFIG_S_DRIVER_OK | VIRTIO_CONFIG_S_FEATURES_OK;
        self.status & (RUNS | VIRTIO_CONFIG_S_NEEDS_RESET) == RUNS
    }

    fn set_ready(&mut self, ready: bool) -> Wrote {
        let Some(queue) = self.selected().filter(|queue| self.ready[*queue] != ready) else {
            return Wrote::Nothing;
        };
        self.ready[queue] = ready;
        if ready {
            Wrote::Ready(queue, self.rings[queue])
        } else {
            Wrote::NotReady(queue)
        }
    }

    fn notify(&self, queue: u32) -> Wrote {
        let queue = usize::try_from(queue).unwrap_or(QUEUES);
        if self.is_running() && self.ready.get(queue) == Some(&true) {
            Wrote::Notified(queue)
        } else {
            Wrote::Nothing
        }
    }

    /// Where a queue lies is said before it is ready.
    fn set_ring(&mut self, offset: u32, value: u32) {
        let Some(queue) = self.selected().filter(|queue| !self.ready[*queue]) else {
            return;
        };
        let rings = &mut self.rings[queue];
        let (low, high) = (u64::from(value), u64::from(value) << 32);
        const LOW: u64 = u32::MAX as u64;
        match offset {
            // One that is larger than any queue is none.
            VIRTIO_MMIO_QUEUE_NUM => rings.size = u16::try_from(value).unwrap_or(0),
            VIRTIO_MMIO_QUEUE_DESC_LOW => rings.descriptors = rings.descriptors & !LOW | low,
            VIRTIO_MMIO_QUEUE_DESC_HIGH => rings.descriptors = rings.descriptors & LOW | high,
            VIRTIO_MMIO_QUEUE_AVAIL_LOW => rings.available = rings.available & !LOW | low,
            VIRTIO_MMIO_QUEUE_AVAIL_HIGH => rings.available = rings.available & LOW | high,
            VIRTIO_MMIO_QUEUE_USED_LOW => rings.used = rings.used & !LOW | low,
            VIRTIO_MMIO_QUEUE_USED_HIGH => rings.used = rings.used & LOW | high,
            _ => {}
        }
    }
}

/// Where configuration space begins.
pub(super) const CONFIGURATION: u32 = VIRTIO_MMIO_CONFIG;

fn word(features: u64, number: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = features.to_le_bytes();
    match number {
        0 => u32::from_le_bytes([a, b, c, d]),
        1 => u32::from_le_bytes([e, f, g, h]),
        _ => 0,
    }
}
