//! The devices of a micro-guest: a record of what it wrote, and the exit port.

use std::sync::Mutex;

use crate::devices::Platform;
use crate::devices::{DeviceOutcome, GuestEnd, ports};
use crate::sync::lock;

/// An exception or interrupt that a micro-guest has no handler for ends it:
/// its vector is written to this port.
pub const UNEXPECTED_VECTOR_PORT: u16 = 0xe0;

/// One element that the guest wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortWrite {
    pub port: u16,
    /// Value, zero-extended.
    pub value: u32,
}

/// Records port writes; ends the run at the exit port or at an unexpected vector.
#[derive(Debug, Default)]
pub struct RecordingPlatform {
    writes: Mutex<Vec<PortWrite>>,
}

impl RecordingPlatform {
    /// What was written so far, the exit port included.
    #[must_use]
    pub fn writes(&self) -> Vec<PortWrite> {
        lock(&self.writes).clone()
    }
}

impl Platform for RecordingPlatform {
    fn port_read(&self, _: u16, _: u8, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn port_write(&self, port: u16, width: u8, data: &[u8]) -> DeviceOutcome {
        let mut end = DeviceOutcome::Continue;
        let mut writes = lock(&self.writes);
        for element in data.chunks(usize::from(width.max(1))) {
            let mut word = [0; 4];
            let len = element.len().min(4);
            word[..len].copy_from_slice(&element[..len]);
            let value = u32::from_le_bytes(word);
            writes.push(PortWrite { port, value });
            if matches!(port, ports::TEST_EXIT | UNEXPECTED_VECTOR_PORT) {
                end = DeviceOutcome::Exit(GuestEnd::TestExit(value));
                break;
            }
        }
        end
    }

    fn mmio_read(&self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn mmio_write(&self, _: u64, _: &[u8]) {}
}
