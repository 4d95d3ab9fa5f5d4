//! The devices of the small machine: those of a PC, the file system, and the port by which its
//! first program says how far it is.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use vm_memory::GuestMemoryMmap;

use super::console::Console;
use crate::boot::acpi::VirtioDevice;
use crate::devices::{
    DeviceOutcome, GuestEnd, Platform, PlatformParts, PortBus, PortsState, TimerWidth, ports,
};
use crate::emu::{Lines, VirtualClock};
use crate::sync::lock;
use crate::vcpu::VcpuControl;
use crate::virtio::{Broken, FsState, VirtioFs, WINDOW};

/// The file system's registers, in the hole below 4 GiB, where no memory is.
pub(super) const VIRTIO: VirtioDevice = VirtioDevice {
    start: 0xd000_0000,
    len: WINDOW,
    pin: 5,
};

/// How the first program of the guest says how far it is, and what it mounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signals {
    /// The tag of the file system.
    pub tag: &'static str,
    /// The port to which it writes a byte.
    pub port: u16,
    /// The byte that says: go on from here for each job.
    pub ready: u8,
    /// The byte that says that all has been said.
    pub done: u8,
}

/// What is kept of the devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DevicesState {
    ports: PortsState,
    files: FsState,
}

/// What the devices are connected to.
pub(super) struct Connections {
    pub(super) memory: GuestMemoryMmap,
    pub(super) lines: Arc<Lines>,
    pub(super) clock: VirtualClock,
    pub(super) console: Console,
    /// Ends the run when a device is broken.
    pub(super) control: Arc<VcpuControl>,
}

/// The devices. `F` answers requests for files.
pub(super) struct CountPlatform<F> {
    ports: Mutex<PortBus>,
    /// None once who served files was taken back.
    files: Mutex<Option<VirtioFs<F>>>,
    signals: Signals,
    control: Arc<VcpuControl>,
}

impl<F> fmt::Debug for CountPlatform<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CountPlatform").finish_non_exhaustive()
    }
}

impl<F> CountPlatform<F> {
    pub(super) fn new(connections: Connections, signals: Signals, serve: F) -> Self {
        let Connections {
            memory,
            lines,
            clock,
            console,
            control,
        } = connections;
        let line = |pin| Box::new(lines.to_pin(pin));
        let parts = PlatformParts {
            com1_irq: line(ports::COM1_GSI.to_le_bytes()[0]),
            console: Box::new(console),
            com2: None,
            time: Box::new(clock),
            timer_width: TimerWidth::default(),
        };
        let files = VirtioFs::new(signals.tag, memory, line(VIRTIO.pin), serve);
        Self {
            ports: Mutex::new(PortBus::new(parts)),
            files: Mutex::new(Some(files)),
            signals,
            control,
        }
    }

    pub(super) fn save(&self) -> Option<DevicesState> {
        Some(DevicesState {
            ports: lock(&self.ports).save(),
            files: lock(&self.files).as_ref()?.save(),
        })
    }

    pub(super) fn restore(&self, state: &DevicesState) -> Result<(), Broken> {
        lock(&self.ports).restore(&state.ports);
        match lock(&self.files).as_mut() {
            Some(files) => files.restore(&state.files),
            None => Ok(()),
        }
    }

    /// What the guest's driver did, if it broke the file system.
    pub(super) fn broken(&self) -> Option<Broken> {
        lock(&self.files).as_ref()?.broken()
    }

    /// Who served files, once.
    pub(super) fn take_server(&self) -> Option<F> {
        lock(&self.files).take().map(VirtioFs::into_server)
    }
}

fn in_window(address: u64) -> Option<u64> {
    let offset = address.checked_sub(VIRTIO.start.into())?;
    (offset < VIRTIO.len.into()).then_some(offset)
}

impl<F: FnMut(&[u8], &mut Vec<u8>) + Send> Platform for CountPlatform<F> {
    fn port_read(&self, port: u16, width: u8, data: &mut [u8]) {
        lock(&self.ports).read(port, width, data);
    }

    fn port_write(&self, port: u16, width: u8, data: &[u8]) -> DeviceOutcome {
        if port == self.signals.port {
            let signal = data.first().copied().unwrap_or(0);
            return DeviceOutcome::Exit(GuestEnd::TestExit(signal.into()));
        }
        if port == ports::TEST_EXIT {
            return DeviceOutcome::Continue;
        }
        lock(&self.ports).write(port, width, data)
    }

    fn mmio_read(&self, address: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let (Some(offset), Some(files)) = (in_window(address), &*lock(&self.files)) {
            files.load(offset, data);
        }
    }

    fn mmio_write(&self, address: u64, data: &[u8]) {
        let mut files = lock(&self.files);
        if let (Some(offset), Some(files)) = (in_window(address), &mut *files) {
            files.store(offset, data);
            if files.broken().is_some() {
                self.control.stop();
            }
        }
    }

    fn take_written(&self) -> Vec<Range<u64>> {
        let mut files = lock(&self.files);
        files.as_mut().map_or_else(Vec::new, VirtioFs::take_written)
    }
}
