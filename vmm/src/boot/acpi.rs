//! The ACPI tables: what stock kernels need to find their CPUs, interrupt controllers, serial
//! port, and the ways to turn the machine off and to reset it.
//!
//! RSDP → XSDT → FADT (→ FACS, DSDT) and MADT. There is no PCI root: guests see no PCI bus.
//! Source: ACPI Specification 6.5, chapter 5.

mod tables;

use super::memory::{ACPI_END, ACPI_START, FACS_START, GuestMemory, MemoryError, write};
use super::wire::align_up;

/// Where guests find the RSDP: the start of the area that they scan for it.
pub const RSDP_ADDRESS: u64 = ACPI_START;
/// The most CPUs that the MADT describes.
pub const MAX_CPUS: u32 = 64;
/// The interrupt (ISA and global number) by which power events reach the guest.
pub const SCI_IRQ: u8 = 9;
/// `SLP_TYP` of S5, "soft off": a write of `SLP_EN` with this type to
/// [`AcpiPorts::pm1a_control`] turns the machine off.
pub const S5_SLEEP_TYPE: u8 = 5;
/// What a guest writes to [`AcpiPorts::reset`] to reset the machine.
pub const RESET_VALUE: u8 = 0x06;

/// The I/O ports that the tables promise, for the devices behind them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AcpiPorts {
    /// PM1a event block: status (2 bytes), then enable (2 bytes).
    pub pm1a_event: u16,
    /// PM1a control block, 2 bytes.
    pub pm1a_control: u16,
    /// Power-management timer, 4 bytes, 32 bits at 3.579545 MHz; only where the machine has one.
    pub pm_timer: u16,
    /// Reset register, 1 byte.
    pub reset: u16,
    /// COM1, 8 bytes.
    pub com1: u16,
    /// COM1's interrupt.
    pub com1_irq: u8,
}

/// The ports of every guest.
pub const PORTS: AcpiPorts = AcpiPorts {
    pm1a_event: 0x600,
    pm1a_control: 0x604,
    pm_timer: 0x608,
    reset: 0xcf9,
    com1: 0x3f8,
    com1_irq: 4,
};

/// A virtio device behind memory-mapped registers, which no bus finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VirtioDevice {
    /// Guest-physical address of its registers.
    pub start: u32,
    /// Their bytes.
    pub len: u32,
    /// Its pin of the I/O APIC, on which edges are interrupts.
    pub pin: u8,
}

/// What differs between guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AcpiConfig {
    /// CPUs, 1 to [`MAX_CPUS`]; the APIC ID of each is its number.
    pub(crate) cpus: u32,
    /// Whether there is a timer at [`AcpiPorts::pm_timer`].
    pub(crate) pm_timer: bool,
    /// A virtio device.
    pub(crate) virtio: Option<VirtioDevice>,
}

/// Writes all tables and gives the address behind the last one.
pub(crate) fn write_tables(mem: &GuestMemory, config: AcpiConfig) -> Result<u64, MemoryError> {
    let mut next = RSDP_ADDRESS + tables::RSDP_LEN;
    let mut place = |table: &[u8]| {
        let address = align_up(next, 16).unwrap_or(ACPI_END);
        next = address + table.len() as u64;
        write(mem, address, table).map(|()| address)
    };
    write(mem, FACS_START, &tables::facs())?;
    let dsdt = place(&tables::dsdt(config.virtio))?;
    let fadt = place(&tables::fadt(dsdt, FACS_START, config.pm_timer))?;
    let madt = place(&tables::madt(config.cpus))?;
    let xsdt = place(&tables::xsdt(&[fadt, madt]))?;
    write(mem, RSDP_ADDRESS, &tables::rsdp(xsdt))?;
    Ok(next)
}

#[cfg(test)]
mod tests;
