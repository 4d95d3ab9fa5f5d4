//! The devices behind a vCPU's port and memory exits.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use super::{DeviceOutcome, MmioBus, PortBus};
use crate::sync::lock;

/// What answers a vCPU's accesses to ports and to memory that is not there.
pub trait Platform: Debug + Send + Sync {
    /// IN or INS: fills `data` with elements of `width` bytes.
    fn port_read(&self, port: u16, width: u8, data: &mut [u8]);
    /// OUT or OUTS.
    fn port_write(&self, port: u16, width: u8, data: &[u8]) -> DeviceOutcome;
    /// A load.
    fn mmio_read(&self, address: u64, data: &mut [u8]);
    /// A store.
    fn mmio_write(&self, address: u64, data: &[u8]);
    /// Guest-physical addresses that devices have written to by themselves since this was asked
    /// last: code may have been there.
    fn take_written(&self) -> Vec<Range<u64>> {
        Vec::new()
    }
}

/// The real devices, shared by the vCPUs of one machine.
#[derive(Debug)]
pub struct SharedPlatform {
    ports: Mutex<PortBus>,
    mmio: Mutex<MmioBus>,
}

impl SharedPlatform {
    /// Shares `ports`.
    #[must_use]
    pub fn new(ports: PortBus) -> Self {
        Self {
            ports: Mutex::new(ports),
            mmio: Mutex::new(MmioBus::new()),
        }
    }

    /// The port devices, for the console's input.
    pub fn ports(&self) -> MutexGuard<'_, PortBus> {
        lock(&self.ports)
    }
}

impl Platform for SharedPlatform {
    fn port_read(&self, port: u16, width: u8, data: &mut [u8]) {
        lock(&self.ports).read(port, width, data);
    }

    fn port_write(&self, port: u16, width: u8, data: &[u8]) -> DeviceOutcome {
        lock(&self.ports).write(port, width, data)
    }

    fn mmio_read(&self, address: u64, data: &mut [u8]) {
        lock(&self.mmio).read(address, data);
    }

    fn mmio_write(&self, address: u64, data: &[u8]) {
        lock(&self.mmio).write(address, data);
    }
}
