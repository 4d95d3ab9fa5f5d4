//! The platform devices that a guest reaches by port I/O, and what an access to
//! one of them can lead to.
//!
//! Everything here is a state machine: a register access goes in, bytes and a
//! [`DeviceOutcome`] come out. The only effects are the interrupt lines of COM1
//! and COM2 and what takes their output, all handed in at construction. Time comes from a
//! [`DeviceClock`], so tests set it. Interrupt controllers, the PIT and the
//! local APIC live in the engine and are not modelled here.
//!
//! # Threat model
//!
//! The guest is hostile: it chooses every port, width, count and value.
//!
//! | threat | answer |
//! |---|---|
//! | an access wider than the device, or across its end | split into bytes at consecutive ports; bytes nobody claims read as all ones |
//! | an odd width or an empty buffer from the exit | handled element by element; a width of 0 counts as 1 |
//! | endless accesses to absent ports fill the host's log | only the first accesses are logged, the rest are counted ([`PortBus::unclaimed`]) |
//! | console output faster than the host drains it | the vCPU that writes waits in `write`; nothing is buffered here |
//! | a console that fails (closed pipe) | bytes are counted as lost, the guest goes on, the first failure is logged |
//! | console input faster than the guest reads | the receive FIFO holds 64 bytes, [`PortBus::enqueue`] takes no more than fit |
//! | a guest that masks, ignores or storms the UART interrupt | raising a line ([`InterruptLine`]) twice is one interrupt, and never blocks |
//! | bytes to COM2 faster than the agent's thread reads them | at most 1 MiB waits, the rest is lost; the vCPU never waits |
//! | ending the run | only the documented registers do: test exit, ACPI sleep, the three reset registers |

mod acpi_pm;
mod bus;
mod legacy;
mod mmio;
mod pci;
mod platform;
mod rtc;
mod serial;
mod time;

pub use acpi_pm::{PM_TIMER_HZ, SLP_TYP_POWER_OFF, TimerWidth};
pub use bus::{PlatformParts, PortBus, PortMapEntry, PortsState, port_map};
pub use mmio::MmioBus;
pub use platform::{Platform, SharedPlatform};
pub use serial::{ConsoleIrqError, InterruptLine};
pub use time::{DeviceClock, HostClock};

use std::fmt;

/// The port addresses that ACPI tables and guests have to agree on with this
/// module.
pub mod ports {
    /// COM1's first register; eight byte-wide registers follow each other.
    pub const COM1: u16 = 0x3f8;
    /// The interrupt line (GSI) of COM1.
    pub const COM1_GSI: u32 = 4;
    /// COM2's first register, as that of [`COM1`].
    pub const COM2: u16 = 0x2f8;
    /// The interrupt line (GSI) of COM2.
    pub const COM2_GSI: u32 = 3;
    /// ACPI PM1a event block: status (2 bytes), enable (2 bytes).
    pub const PM1A_EVENT: u16 = 0x600;
    /// The reset control register; the FADT names it as its reset register.
    pub const RESET_CONTROL: u16 = 0xcf9;
    /// The value for [`RESET_CONTROL`] that resets the machine.
    pub const RESET_VALUE: u8 = 0x06;
    /// Index of the century byte in the CMOS memory (for the FADT).
    pub const CMOS_CENTURY: u8 = 0x32;
    /// The port whose writes end the run with a status of the guest's choice.
    pub const TEST_EXIT: u16 = 0xf4;
}

/// Which register a guest used to reset the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetSource {
    /// Command 0xFE (pulse the reset line) to the keyboard controller, port 0x64.
    KeyboardController,
    /// The reset control register, port 0xCF9, which is also ACPI's reset register.
    ResetControl,
    /// The fast reset bit of system control port A, port 0x92.
    SystemControlA,
}

impl fmt::Display for ResetSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KeyboardController => "the keyboard controller (port 0x64)",
            Self::ResetControl => "the reset register (port 0xcf9)",
            Self::SystemControlA => "system control port A (port 0x92)",
        })
    }
}

/// How a guest asked for its own end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestEnd {
    /// It wrote this value to the test-exit port.
    TestExit(u32),
    /// It entered ACPI sleep state S5.
    PowerOff,
    /// It reset the machine.
    Reset(ResetSource),
}

impl GuestEnd {
    /// The process exit status that stands for this end: `value × 2 + 1` in
    /// 8 bits for a test exit (so it is never 0), 0 for a power-off or a reset.
    pub fn exit_status(self) -> u8 {
        match self {
            Self::TestExit(value) => value.to_le_bytes()[0].wrapping_mul(2).wrapping_add(1),
            Self::PowerOff | Self::Reset(_) => 0,
        }
    }
}

impl fmt::Display for GuestEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TestExit(value) => write!(f, "the guest wrote {value:#x} to the test-exit port"),
            Self::PowerOff => f.write_str("the guest powered off"),
            Self::Reset(by) => write!(f, "the guest reset the machine through {by}"),
        }
    }
}

/// What the VMM has to do after a device access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a guest that ended must not be entered again"]
pub enum DeviceOutcome {
    /// Enter the guest again.
    Continue,
    /// The guest asked for its end.
    Exit(GuestEnd),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(end: GuestEnd, expected: u8) {
        assert_eq!(end.exit_status(), expected, "{end}");
    }

    #[test]
    fn exit_statuses() {
        check(GuestEnd::TestExit(0), 1);
        check(GuestEnd::TestExit(0x10), 33);
        check(GuestEnd::TestExit(0x7f), 255);
        check(GuestEnd::TestExit(0x80), 1);
        check(GuestEnd::TestExit(0xffff_ffff), 255);
        check(GuestEnd::PowerOff, 0);
        check(GuestEnd::Reset(ResetSource::ResetControl), 0);
    }
}
