//! What is at ports: the serial port, and two registers by which the machine ends.

use std::io::{Stdout, stdout};

use anyhow::{Result, anyhow};
use vm_superio::Serial;
use vm_superio::serial::{NoEvents, SerialState};

use crate::ioapic::{Interrupts, Pin};

/// Ports of the serial port, and its input of the I/O APIC.
pub(crate) const COM1: u16 = 0x3f8;
pub(crate) const COM1_PIN: u8 = 4;
/// A store turns the machine off; its neighbour is the status.
pub(crate) const OFF: u16 = 0x600;
/// A store resets the machine.
pub(crate) const RESET: u16 = 0x604;

const OFF_NOW: u8 = 1 << 5;

/// How a guest ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    Off,
    /// As after a panic.
    Reset,
}

/// The devices at ports.
pub(crate) struct Ports {
    serial: Serial<Pin, NoEvents, Stdout>,
}

impl Ports {
    /// With a serial port that is in this state, or that nobody has used.
    pub(crate) fn new(chip: &Interrupts, state: Option<&SavedSerial>) -> Result<Self> {
        let pin = Pin {
            chip: chip.clone(),
            number: COM1_PIN,
        };
        let state = state.map_or_else(SerialState::default, SavedSerial::state);
        let serial = Serial::from_state(&state, pin, NoEvents, stdout());
        let serial = serial.map_err(|error| anyhow!("the serial port: {error}"))?;
        Ok(Self { serial })
    }

    pub(crate) fn save(&self) -> SavedSerial {
        SavedSerial::of(&self.serial.state())
    }

    /// A byte that is read.
    pub(crate) fn load(&mut self, port: u16) -> u8 {
        match port.checked_sub(COM1) {
            Some(offset @ 0..8) => self.serial.read(offset.to_le_bytes()[0]),
            // Nothing drives the bus.
            _ => 0xff,
        }
    }

    /// Takes a byte in.
    pub(crate) fn store(&mut self, port: u16, byte: u8) -> Result<Option<Ending>> {
        match (port, port.checked_sub(COM1)) {
            (_, Some(offset @ 0..8)) => {
                let stored = self.serial.write(offset.to_le_bytes()[0], byte);
                stored.map_err(|error| anyhow!("the serial port: {error}"))?;
                Ok(None)
            }
            (OFF, _) if byte & OFF_NOW != 0 => Ok(Some(Ending::Off)),
            (RESET, _) => Ok(Some(Ending::Reset)),
            _ => Ok(None),
        }
    }
}

/// A serial port's registers, in the order of [`SerialState`]; nothing is ever typed, so that
/// its buffer is empty.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct SavedSerial([u8; 9]);

impl SavedSerial {
    fn of(state: &SerialState) -> Self {
        Self([
            state.baud_divisor_low,
            state.baud_divisor_high,
            state.interrupt_enable,
            state.interrupt_identification,
            state.line_control,
            state.line_status,
            state.modem_control,
            state.modem_status,
            state.scratch,
        ])
    }

    fn state(&self) -> SerialState {
        let [
            low,
            high,
            enable,
            identification,
            line,
            line_status,
            modem,
            modem_status,
            scratch,
        ] = self.0;
        SerialState {
            baud_divisor_low: low,
            baud_divisor_high: high,
            interrupt_enable: enable,
            interrupt_identification: identification,
            line_control: line,
            line_status,
            modem_control: modem,
            modem_status,
            scratch,
            in_buffer: Vec::new(),
        }
    }
}
