//! COM1 and COM2: 16550A UARTs (vm-superio) between the guest and a console, and an agent.

use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use vm_superio::Serial;
use vm_superio::Trigger;
use vm_superio::serial::{Error as UartError, NoEvents, SerialState};
use vmm_sys_util::eventfd::EventFd;

/// A serial port's interrupt event descriptor cannot be used.
#[derive(Debug, Error)]
#[error("cannot make the interrupt line of a serial port: {0}")]
pub struct ConsoleIrqError(#[from] io::Error);

type Console = Box<dyn Write + Send>;

/// The interrupt line of a device, which an edge raises. Raising it twice before anybody looks
/// is one interrupt.
pub trait InterruptLine: fmt::Debug + Send + Sync {
    /// Raises it. Never waits.
    ///
    /// # Errors
    /// Whoever listens to the line is not told.
    fn raise(&self) -> io::Result<()>;
}

/// A line that KVM raises when the event descriptor is written.
impl InterruptLine for EventFd {
    fn raise(&self) -> io::Result<()> {
        match self.write(1) {
            // The counter is full: the line is raised already.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
            other => other,
        }
    }
}

/// A line as the UART has it.
#[derive(Clone, Debug)]
struct IrqLine(Arc<dyn InterruptLine>);

impl Trigger for IrqLine {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.raise()
    }
}

/// What is kept of a UART.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedUart {
    /// Divisor latch, low and high.
    divisor: [u8; 2],
    interrupt_enable: u8,
    interrupt_identification: u8,
    /// Line control and status.
    line: [u8; 2],
    /// Modem control and status.
    modem: [u8; 2],
    scratch: u8,
    /// What the guest has not read.
    received: Vec<u8>,
}

pub(super) struct SerialPort {
    uart: Serial<IrqLine, NoEvents, Console>,
    lost: u64,
}

impl SerialPort {
    pub(super) fn new(irq: Box<dyn InterruptLine>, console: Console) -> Self {
        Self {
            uart: Serial::new(IrqLine(irq.into()), console),
            lost: 0,
        }
    }

    pub(super) fn save(&self) -> SavedUart {
        let state = self.uart.state();
        SavedUart {
            divisor: [state.baud_divisor_low, state.baud_divisor_high],
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line: [state.line_control, state.line_status],
            modem: [state.modem_control, state.modem_status],
            scratch: state.scratch,
            received: state.in_buffer,
        }
    }

    /// Goes on from there. More than the FIFO holds is nothing that any UART had.
    pub(super) fn restore(&mut self, saved: &SavedUart) {
        let state = SerialState {
            baud_divisor_low: saved.divisor[0],
            baud_divisor_high: saved.divisor[1],
            interrupt_enable: saved.interrupt_enable,
            interrupt_identification: saved.interrupt_identification,
            line_control: saved.line[0],
            line_status: saved.line[1],
            modem_control: saved.modem[0],
            modem_status: saved.modem[1],
            scratch: saved.scratch,
            in_buffer: saved.received.clone(),
        };
        let line = self.uart.interrupt_evt().clone();
        let sink: Console = Box::new(io::sink());
        let old = std::mem::replace(&mut self.uart, Serial::new(line.clone(), sink));
        let console = old.into_writer();
        match Serial::from_state(&state, line, NoEvents, console) {
            Ok(uart) => self.uart = uart,
            Err(e) => log::warn!("the console's state is lost, and its output: {e}"),
        }
    }

    pub(super) fn read(&mut self, offset: u8) -> u8 {
        self.uart.read(offset)
    }

    pub(super) fn write(&mut self, offset: u8, value: u8) {
        match self.uart.write(offset, value) {
            Ok(()) => {}
            Err(UartError::IOError(e)) => {
                if self.lost == 0 {
                    log::warn!("console output is lost: {e}");
                }
                self.lost = self.lost.saturating_add(1);
            }
            // The guest polls on when an interrupt is missing; nothing is lost.
            Err(e) => log::debug!("serial port: {e}"),
        }
    }

    pub(super) fn free(&self) -> usize {
        self.uart.fifo_capacity()
    }

    pub(super) fn enqueue(&mut self, input: &[u8]) -> usize {
        let fits = input.len().min(self.free());
        if fits == 0 {
            return 0;
        }
        match self.uart.enqueue_raw_bytes(&input[..fits]) {
            Ok(taken) => taken,
            // The bytes are in the FIFO, only the interrupt failed.
            Err(UartError::Trigger(e)) => {
                log::debug!("serial port: cannot raise the interrupt: {e}");
                fits
            }
            Err(_) => 0,
        }
    }

    /// Bytes of guest output that the console refused.
    #[cfg(test)]
    pub(super) fn lost(&self) -> u64 {
        self.lost
    }
}

impl fmt::Debug for SerialPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SerialPort")
            .field("free", &self.free())
            .field("lost", &self.lost)
            .finish_non_exhaustive()
    }
}
