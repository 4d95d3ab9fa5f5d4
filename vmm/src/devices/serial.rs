//! COM1 and COM2: 16550A UARTs (vm-superio) between the guest and a console, and an agent.

use std::fmt;
use std::io::{self, Write};

use thiserror::Error;
use vm_superio::Serial;
use vm_superio::Trigger;
use vm_superio::serial::{Error as UartError, NoEvents};
use vmm_sys_util::eventfd::EventFd;

/// A serial port's interrupt event descriptor cannot be used.
#[derive(Debug, Error)]
#[error("cannot make the interrupt line of a serial port: {0}")]
pub struct ConsoleIrqError(#[from] io::Error);

type Console = Box<dyn Write + Send>;

/// The interrupt line of a device, which an edge raises. Raising it twice before anybody looks
/// is one interrupt.
pub trait InterruptLine: fmt::Debug + Send {
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
#[derive(Debug)]
struct IrqLine(Box<dyn InterruptLine>);

impl Trigger for IrqLine {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.raise()
    }
}

pub(super) struct SerialPort {
    uart: Serial<IrqLine, NoEvents, Console>,
    lost: u64,
}

impl SerialPort {
    pub(super) fn new(irq: Box<dyn InterruptLine>, console: Console) -> Self {
        Self {
            uart: Serial::new(IrqLine(irq), console),
            lost: 0,
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
