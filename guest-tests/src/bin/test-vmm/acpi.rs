//! The tables by which a kernel finds its processors, the I/O APIC, the serial port, and how to
//! end: hardware-reduced ACPI, for there is no 8259, no PIT and no PM timer.

use acpi_tables::aml::{Device, EISAName, IO, Interrupt, Name, Package, ResourceTemplate, Scope};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink as _};
use anyhow::Result;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::devices::{COM1, COM1_PIN, OFF, RESET};
use crate::ioapic;

/// Where the root pointer is, with the tables behind it.
pub(crate) const ROOT: u64 = 0xe_0000;

const LOCAL_APIC: u32 = 0xfee0_0000;
const WHO: [u8; 6] = *b"TESTER";
const WHAT: [u8; 8] = *b"TESTVMM ";
/// `SLP_TYP` of "off"; any number, as the VMM ends at each.
const OFF_TYPE: u8 = 5;

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn port(number: u16) -> GAS {
    let space = AddressSpace::SystemIo;
    GAS::new(space, 8, 0, AccessSize::ByteAccess, number.into())
}

/// Writes all of them, for so many processors.
pub(crate) fn write(memory: &GuestMemoryMmap, cpus: u8) -> Result<()> {
    let mut next = ROOT + 0x40;
    let mut place = |table: Vec<u8>| -> Result<u64> {
        let at = next;
        memory.write_slice(&table, GuestAddress(at))?;
        next = (at + table.len() as u64).next_multiple_of(16);
        Ok(at)
    };
    let dsdt = place(dsdt())?;
    let fadt = place(fadt(dsdt))?;
    let madt = place(madt(cpus))?;
    let mut xsdt = XSDT::new(WHO, WHAT, 1);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = place(bytes(&xsdt))?;
    let root = bytes(&Rsdp::new(WHO, xsdt));
    Ok(memory.write_slice(&root, GuestAddress(ROOT))?)
}

fn fadt(dsdt: u64) -> Vec<u8> {
    let mut fadt = FADTBuilder::new(WHO, WHAT, 1)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup);
    // Neither VGA nor a clock of CMOS, for which the kernel would wait.
    fadt.iapc_boot_arch = (1 << 2 | 1 << 5).into();
    fadt.reset_reg = port(RESET);
    fadt.sleep_control_reg = port(OFF);
    fadt.sleep_status_reg = port(OFF + 1);
    bytes(&fadt.finalize())
}

fn madt(cpus: u8) -> Vec<u8> {
    let at = LocalInterruptController::Address(LOCAL_APIC);
    let mut madt = MADT::new(WHO, WHAT, 1, at);
    for number in 0..cpus {
        madt.add_structure(ProcessorLocalApic::new(
            number,
            number,
            EnabledStatus::Enabled,
        ));
    }
    madt.add_structure(IoApic::new(0, ioapic::START, 0));
    bytes(&madt)
}

/// The serial port, and that the machine can be turned off.
fn dsdt() -> Vec<u8> {
    let ports = IO::new(COM1, COM1, 1, 8);
    let irq = Interrupt::new(true, true, false, false, COM1_PIN.into());
    let names = [
        Name::new("_HID".into(), &EISAName::new("PNP0501")),
        Name::new("_UID".into(), &0u8),
        Name::new("_CRS".into(), &ResourceTemplate::new(vec![&ports, &irq])),
    ];
    let names = names.iter().map(|name| name as &dyn Aml).collect();
    let com1 = Device::new("COM1".into(), names);
    let bus = Scope::new("\\_SB_".into(), vec![&com1]);
    let off = Package::new(vec![&OFF_TYPE, &OFF_TYPE]);
    let off = Name::new("_S5_".into(), &off);
    let mut body = Vec::new();
    body.vec(&bytes(&off));
    body.vec(&bytes(&bus));
    let mut table = Sdt::new(*b"DSDT", 36, 2, WHO, WHAT, 1);
    table.append_slice(&body);
    table.as_slice().to_vec()
}
