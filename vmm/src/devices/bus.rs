//! The port map and the dispatch of a port access.

use std::fmt;
use std::io::Write;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use super::acpi_pm::{AcpiPm, TimerWidth};
use super::legacy::{ControlB, KeyboardController, control_a};
use super::pci::PciHole;
use super::rtc::Rtc;
use super::serial::{ConsoleIrqError, InterruptLine, SavedUart, SerialPort};
use super::time::DeviceClock;
use super::{DeviceOutcome, GuestEnd, ResetSource, ports};

/// What the platform devices need from outside.
pub struct PlatformParts {
    /// COM1's interrupt line, [`ports::COM1_GSI`].
    pub com1_irq: Box<dyn InterruptLine>,
    /// Receives what the guest writes to COM1, byte by byte, flushed each time.
    pub console: Box<dyn Write + Send>,
    /// The same of a second port, COM2, whose line is [`ports::COM2_GSI`]; `None`: there is
    /// none.
    pub com2: Option<(Box<dyn InterruptLine>, Box<dyn Write + Send>)>,
    /// The clocks behind the power management timer and the real-time clock.
    pub time: Box<dyn DeviceClock>,
    /// The width has to agree with the FADT.
    pub timer_width: TimerWidth,
}

impl fmt::Debug for PlatformParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlatformParts")
            .field("com1_irq", &self.com1_irq)
            .field("time", &self.time)
            .field("timer_width", &self.timer_width)
            .finish_non_exhaustive()
    }
}

impl PlatformParts {
    /// The usual parts on KVM: the host's clocks, a 32-bit timer, and a new non-blocking
    /// event descriptor, of which the second value is a copy for the irqfd.
    ///
    /// # Errors
    /// The host has no event descriptor left.
    pub fn with_console(
        console: Box<dyn Write + Send>,
    ) -> Result<(Self, EventFd), ConsoleIrqError> {
        let irq = EventFd::new(libc::EFD_NONBLOCK)?;
        let copy = irq.try_clone()?;
        let parts = Self {
            com1_irq: Box::new(irq),
            console,
            com2: None,
            time: Box::new(super::HostClock::new()),
            timer_width: TimerWidth::default(),
        };
        Ok((parts, copy))
    }
}

/// The device that answers a range of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claim {
    KeyboardController,
    ControlB,
    CmosIndex,
    CmosData,
    ControlA,
    TestExit,
    Com1,
    Com2,
    AcpiPm,
    PciAddress,
    PciData,
    Ignored,
}

/// One line of the port map.
#[derive(Clone, Debug)]
pub struct PortMapEntry {
    /// The ports, first and last.
    pub ports: RangeInclusive<u16>,
    /// What is there, in words.
    pub what: &'static str,
    claim: Claim,
}

/// Every port range that is claimed, in ascending order.
pub fn port_map() -> &'static [PortMapEntry] {
    MAP
}

const fn line(ports: RangeInclusive<u16>, claim: Claim, what: &'static str) -> PortMapEntry {
    PortMapEntry { ports, what, claim }
}

static MAP: &[PortMapEntry] = &[
    line(0x60..=0x60, Claim::KeyboardController, "i8042 data"),
    line(0x61..=0x61, Claim::ControlB, "system control B"),
    line(0x64..=0x64, Claim::KeyboardController, "i8042 command"),
    line(0x70..=0x70, Claim::CmosIndex, "CMOS index"),
    line(0x71..=0x71, Claim::CmosData, "CMOS data, RTC"),
    line(0x80..=0x80, Claim::Ignored, "POST code"),
    line(0x92..=0x92, Claim::ControlA, "system control A"),
    line(0xed..=0xed, Claim::Ignored, "I/O delay"),
    line(0xf4..=0xf7, Claim::TestExit, "test exit"),
    line(0x2f8..=0x2ff, Claim::Com2, "COM2, where it is asked for"),
    line(0x3f8..=0x3ff, Claim::Com1, "COM1"),
    line(0x600..=0x60b, Claim::AcpiPm, "ACPI PM1a, PM timer"),
    line(
        0xcf8..=0xcfb,
        Claim::PciAddress,
        "PCI address, reset control",
    ),
    line(0xcfc..=0xcff, Claim::PciData, "PCI data"),
];

/// The port space of the machine with everything in it.
#[derive(Debug)]
pub struct PortBus {
    com1: SerialPort,
    com2: Option<SerialPort>,
    keyboard: KeyboardController,
    control_b: ControlB,
    rtc: Rtc,
    pm: AcpiPm,
    pci: PciHole,
    time: Box<dyn DeviceClock>,
    unclaimed: u64,
}

/// What is kept of the devices, so that others go on where they stand. The keyboard controller
/// has no state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortsState {
    com1: SavedUart,
    com2: Option<SavedUart>,
    control_b: ControlB,
    rtc: Rtc,
    pm: AcpiPm,
    pci: PciHole,
}

/// How many accesses to absent ports are logged before the rest is only counted.
const LOGGED: u64 = 16;

impl PortBus {
    /// All devices in their reset state.
    pub fn new(parts: PlatformParts) -> Self {
        Self {
            com1: SerialPort::new(parts.com1_irq, parts.console),
            com2: parts.com2.map(|(irq, output)| SerialPort::new(irq, output)),
            keyboard: KeyboardController::new(),
            control_b: ControlB::default(),
            rtc: Rtc::default(),
            pm: AcpiPm::new(parts.timer_width),
            pci: PciHole::default(),
            time: parts.time,
            unclaimed: 0,
        }
    }

    /// An IN or INS: fills `data`, which is `count × size` bytes of a string
    /// instruction or `size` bytes of a single one; `size` is 1, 2 or 4.
    pub fn read(&mut self, port: u16, size: u8, data: &mut [u8]) {
        for element in data.chunks_mut(usize::from(size.max(1))) {
            self.read_element(port, element);
        }
    }

    /// An OUT or OUTS of `count × size` bytes. An element that ends the guest
    /// ends the instruction: the elements after it are not written.
    pub fn write(&mut self, port: u16, size: u8, data: &[u8]) -> DeviceOutcome {
        for element in data.chunks(usize::from(size.max(1))) {
            if let Some(end) = self.write_element(port, element) {
                return DeviceOutcome::Exit(end);
            }
        }
        DeviceOutcome::Continue
    }

    /// Gives console input to the guest and raises COM1's interrupt. Takes no
    /// more than fits into the receive FIFO and returns how many bytes it took;
    /// the caller keeps the rest for later. While the guest has the UART in
    /// loopback mode nothing is taken.
    pub fn enqueue(&mut self, input: &[u8]) -> usize {
        self.com1.enqueue(input)
    }

    /// As [`enqueue`](Self::enqueue), for COM2. Without one nothing is taken.
    pub fn enqueue_agent(&mut self, input: &[u8]) -> usize {
        self.com2.as_mut().map_or(0, |com2| com2.enqueue(input))
    }

    /// What is kept of the devices.
    #[must_use]
    pub fn save(&self) -> PortsState {
        PortsState {
            com1: self.com1.save(),
            com2: self.com2.as_ref().map(SerialPort::save),
            control_b: self.control_b.clone(),
            rtc: self.rtc.clone(),
            pm: self.pm.clone(),
            pci: self.pci.clone(),
        }
    }

    /// Goes on from there. Lines whose interrupt has not been looked at are raised again.
    /// A port that one of the two machines lacks keeps its state.
    pub fn restore(&mut self, state: &PortsState) {
        self.com1.restore(&state.com1);
        if let Some((com2, state)) = self.com2.as_mut().zip(state.com2.as_ref()) {
            com2.restore(state);
        }
        self.control_b = state.control_b.clone();
        self.rtc = state.rtc.clone();
        self.pm = state.pm.clone();
        self.pci = state.pci.clone();
    }

    /// Accesses to ports where nothing is.
    pub fn unclaimed(&self) -> u64 {
        self.unclaimed
    }

    fn read_element(&mut self, port: u16, data: &mut [u8]) {
        match (claim_of(port), data.len()) {
            (Some(Claim::AcpiPm), _) => {
                let offset = usize::from(port - ports::PM1A_EVENT);
                self.pm.read(offset, data, &*self.time);
            }
            (Some(Claim::PciAddress), 4) if port == 0xcf8 => {
                data.copy_from_slice(&self.pci.read_address().to_le_bytes());
            }
            _ => {
                for (i, byte) in data.iter_mut().enumerate() {
                    *byte = self.read_byte(nth_port(port, i));
                }
            }
        }
    }

    fn write_element(&mut self, port: u16, data: &[u8]) -> Option<GuestEnd> {
        match (claim_of(port), data) {
            (Some(Claim::AcpiPm), _) => {
                let offset = usize::from(port - ports::PM1A_EVENT);
                self.pm.write(offset, data).then_some(GuestEnd::PowerOff)
            }
            (Some(Claim::PciAddress), &[a, b, c, d]) if port == 0xcf8 => {
                self.pci.write_address(u32::from_le_bytes([a, b, c, d]));
                None
            }
            (Some(Claim::TestExit), _) if port == ports::TEST_EXIT => {
                let mut value = [0; 4];
                for (to, from) in value.iter_mut().zip(data) {
                    *to = *from;
                }
                Some(GuestEnd::TestExit(u32::from_le_bytes(value)))
            }
            _ => (0..data.len()).find_map(|i| self.write_byte(nth_port(port, i), data[i])),
        }
    }

    fn read_byte(&mut self, port: u16) -> u8 {
        match claim_of(port) {
            Some(Claim::KeyboardController) => self.keyboard.read(offset(port, 0x60)),
            Some(Claim::ControlB) => self.control_b.read(),
            Some(Claim::CmosData) => self.rtc.read_data(&*self.time),
            Some(Claim::ControlA) => control_a::read(),
            Some(Claim::Com1) => self.com1.read(offset(port, ports::COM1)),
            Some(Claim::Com2) => match &mut self.com2 {
                Some(com2) => com2.read(offset(port, ports::COM2)),
                None => {
                    self.note("read of", port);
                    0xff
                }
            },
            Some(Claim::PciAddress) if port == ports::RESET_CONTROL => {
                self.pci.read_reset_control()
            }
            // The block reads as a whole; a byte of it comes here when a wider
            // access starts below it.
            Some(Claim::AcpiPm) => {
                let mut byte = [0];
                let at = usize::from(port - ports::PM1A_EVENT);
                self.pm.read(at, &mut byte, &*self.time);
                byte[0]
            }
            Some(
                Claim::CmosIndex
                | Claim::TestExit
                | Claim::PciAddress
                | Claim::PciData
                | Claim::Ignored,
            ) => 0xff,
            None => {
                self.note("read of", port);
                0xff
            }
        }
    }

    fn write_byte(&mut self, port: u16, value: u8) -> Option<GuestEnd> {
        let reset = |by| Some(GuestEnd::Reset(by));
        match claim_of(port) {
            Some(Claim::KeyboardController) if self.keyboard.write(offset(port, 0x60), value) => {
                return reset(ResetSource::KeyboardController);
            }
            Some(Claim::ControlA) if control_a::write(value) => {
                return reset(ResetSource::SystemControlA);
            }
            Some(Claim::PciAddress)
                if port == ports::RESET_CONTROL && self.pci.write_reset_control(value) =>
            {
                return reset(ResetSource::ResetControl);
            }
            Some(Claim::TestExit) if port == ports::TEST_EXIT => {
                return Some(GuestEnd::TestExit(u32::from(value)));
            }
            Some(Claim::AcpiPm) => {
                let at = usize::from(port - ports::PM1A_EVENT);
                return self.pm.write(at, &[value]).then_some(GuestEnd::PowerOff);
            }
            Some(Claim::ControlB) => self.control_b.write(value),
            Some(Claim::CmosIndex) => self.rtc.write_index(value),
            Some(Claim::Com1) => self.com1.write(offset(port, ports::COM1), value),
            Some(Claim::Com2) => match &mut self.com2 {
                Some(com2) => com2.write(offset(port, ports::COM2), value),
                None => self.note("write to", port),
            },
            Some(_) => {}
            None => self.note("write to", port),
        }
        None
    }

    fn note(&mut self, verb: &str, port: u16) {
        if self.unclaimed < LOGGED {
            log::debug!("{verb} port {port:#x}: nothing is there");
        }
        self.unclaimed = self.unclaimed.saturating_add(1);
    }
}

fn claim_of(port: u16) -> Option<Claim> {
    MAP.iter()
        .find(|entry| entry.ports.contains(&port))
        .map(|entry| entry.claim)
}

/// The port of byte `i` of an access: the port space wraps, it does not end.
fn nth_port(port: u16, i: usize) -> u16 {
    port.wrapping_add(u16::try_from(i).unwrap_or(u16::MAX))
}

/// The distance from `base`, for ranges of at most 256 ports.
fn offset(port: u16, base: u16) -> u8 {
    port.wrapping_sub(base).to_le_bytes()[0]
}

#[cfg(test)]
mod tests;
