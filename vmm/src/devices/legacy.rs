//! Single registers of the PC platform: the keyboard controller's reset command
//! and the system control ports A (0x92) and B (0x61).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use vm_superio::{I8042Device, Trigger};

/// The keyboard controller: nothing is attached, but its reset command works.
pub(super) struct KeyboardController {
    device: I8042Device<ResetFlag>,
    reset: ResetFlag,
}

/// Remembers that the reset command came, until it is taken.
#[derive(Clone, Default)]
struct ResetFlag(Arc<AtomicBool>);

impl Trigger for ResetFlag {
    type E = std::convert::Infallible;

    fn trigger(&self) -> Result<(), Self::E> {
        self.0.store(true, Ordering::Relaxed);
        Ok(())
    }
}

impl KeyboardController {
    pub(super) fn new() -> Self {
        let reset = ResetFlag::default();
        Self {
            device: I8042Device::new(reset.clone()),
            reset,
        }
    }

    /// Reads the register at `offset` from port 0x60.
    pub(super) fn read(&mut self, offset: u8) -> u8 {
        self.device.read(offset)
    }

    /// Returns true if this write resets the machine.
    pub(super) fn write(&mut self, offset: u8, value: u8) -> bool {
        match self.device.write(offset, value) {
            Ok(()) => self.reset.0.swap(false, Ordering::Relaxed),
            Err(never) => match never {},
        }
    }
}

impl fmt::Debug for KeyboardController {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyboardController")
    }
}

/// System control port A: bit 0 resets, bit 1 is the A20 gate, which is always
/// open here.
pub(super) mod control_a {
    const FAST_RESET: u8 = 1 << 0;
    const A20: u8 = 1 << 1;

    pub(in super::super) fn read() -> u8 {
        A20
    }

    /// Returns true if this write resets the machine.
    pub(in super::super) fn write(value: u8) -> bool {
        value & FAST_RESET != 0
    }
}

/// System control port B. With `KVM_PIT_SPEAKER_DUMMY` KVM answers this port
/// itself, next to its PIT; this is what remains without it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ControlB {
    written: u8,
    refresh: bool,
}

impl ControlB {
    /// Bits 3:0 (timer 2 gate, speaker, error checks off) read back as written.
    const KEPT: u8 = 0x0f;
    /// Bit 4 toggles with every memory refresh; delay loops wait for an edge.
    const REFRESH: u8 = 1 << 4;
    /// Bit 5 is the output of timer 2. We do not know it, so it reads "expired":
    /// a guest that waits for it goes on at once and rejects the measurement.
    const TIMER2_OUT: u8 = 1 << 5;

    pub(super) fn read(&mut self) -> u8 {
        self.refresh = !self.refresh;
        let refresh = if self.refresh { Self::REFRESH } else { 0 };
        self.written | refresh | Self::TIMER2_OUT
    }

    pub(super) fn write(&mut self, value: u8) {
        self.written = value & Self::KEPT;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_reset_command_on_the_command_port_resets() {
        fn check(offset: u8, value: u8, expected: bool) {
            let mut kbd = KeyboardController::new();
            assert_eq!(kbd.write(offset, value), expected, "{offset} {value:#x}");
            // The order is taken: it does not stick to the next write.
            assert!(!kbd.write(0, 0));
        }
        check(4, 0xfe, true);
        check(0, 0xfe, false);
        check(4, 0xd1, false);
    }

    #[test]
    fn a20_is_open_and_bit_0_resets() {
        assert_eq!(control_a::read(), 0x02);
        assert!(control_a::write(0x03));
        assert!(!control_a::write(0x02));
    }

    #[test]
    fn refresh_toggles() {
        let mut port = ControlB::default();
        port.write(0xff);
        assert_eq!((port.read(), port.read()), (0x3f, 0x2f));
    }
}
