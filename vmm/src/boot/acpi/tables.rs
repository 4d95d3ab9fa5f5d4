//! The tables as bytes, ready to be placed. Structures and AML come from `acpi_tables`. This file
//! has their contents for this machine, and the three structures that the crate lacks.
//!
//! The crate's own XSDT and MADT name another creator and another revision, so both are built
//! from its plain table, [`Sdt`].

use acpi_tables::aml::{
    Device, EISAName, IO, Interrupt, Memory32Fixed, Name, Package, ResourceTemplate, Scope,
};
use acpi_tables::facs::FACS;
use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::{Aml, AmlSink};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{Immutable, IntoBytes};

use super::super::memory::{IOAPIC_START, LAPIC_START};
use super::{PORTS, RESET_VALUE, S5_SLEEP_TYPE, SCI_IRQ, VirtioDevice};

/// Length of the root pointer in bytes.
pub(super) const RSDP_LEN: u64 = size_of::<Rsdp>() as u64;

const OEM_ID: [u8; 6] = *b"UMPIRE";
const OEM_TABLE_ID: [u8; 8] = *b"UMPIREVM";
const CREATOR_ID: [u8; 4] = *b"UMPR";
const REVISION: u32 = 1;

/// Root pointer (5.2.5.3).
pub(super) fn rsdp(xsdt: u64) -> Vec<u8> {
    Rsdp::new(OEM_ID, xsdt).as_bytes().to_vec()
}

/// Table of tables (5.2.8).
pub(super) fn xsdt(tables: &[u64]) -> Vec<u8> {
    let mut body = Vec::new();
    for &address in tables {
        body.qword(address);
    }
    finish(*b"XSDT", 1, &body)
}

/// Firmware control structure (5.2.10): holds only its global lock; it has no checksum.
pub(super) fn facs() -> Vec<u8> {
    let mut facs = FACS::new();
    facs.version = 2;
    facs.as_bytes().to_vec()
}

/// Fixed description table (5.2.9).
pub(super) fn fadt(dsdt: u64, facs: u64, pm_timer: bool) -> Vec<u8> {
    const BOOT_ISA_DEVICES: u16 = 1 << 0;
    const BOOT_NO_VGA: u16 = 1 << 2;
    // Latencies above 100 and 1000 µs mean that C2 and C3 do not exist.
    const NO_C2: u16 = 101;
    const NO_C3: u16 = 1001;

    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, REVISION)
        .preferred_pm_profile(PmProfile::EnterpriseServer)
        .flag(Flags::Wbinvd)
        .flag(Flags::ProcC1)
        // These three mean that there is no such fixed button, and no RTC wake bit.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::FixRtc)
        .flag(Flags::ResetRegSup);
    fadt.creator_id = CREATOR_ID;
    fadt.creator_revision = REVISION.to_le_bytes();
    fadt.firmware_ctrl = low_half(facs).into();
    // Some guests read only the narrow field, others only the wide one.
    fadt.dsdt = low_half(dsdt).into();
    fadt.x_dsdt = dsdt.into();
    fadt.sci_int = u16::from(SCI_IRQ).into();
    // The SMI command port stays 0: the machine is always in ACPI mode.
    fadt.pm1a_evt_blk = u32::from(PORTS.pm1a_event).into();
    fadt.pm1_evt_len = 4;
    fadt.x_pm1a_evt_blk = io_register(PORTS.pm1a_event, 4, AccessSize::WordAccess);
    fadt.pm1a_cnt_blk = u32::from(PORTS.pm1a_control).into();
    fadt.pm1_cnt_len = 2;
    fadt.x_pm1a_cnt_blk = io_register(PORTS.pm1a_control, 2, AccessSize::WordAccess);
    if pm_timer {
        fadt = fadt.flag(Flags::TmrValExt);
        fadt.pm_tmr_blk = u32::from(PORTS.pm_timer).into();
        fadt.pm_tmr_len = 4;
        fadt.x_pm_tmr_blk = io_register(PORTS.pm_timer, 4, AccessSize::DwordAccess);
    }
    fadt.p_lvl2_lat = NO_C2.into();
    fadt.p_lvl3_lat = NO_C3.into();
    // No 8042: what is at its ports takes the command to reset, and Linux would wait a second
    // for a keyboard.
    fadt.iapc_boot_arch = (BOOT_ISA_DEVICES | BOOT_NO_VGA).into();
    fadt.reset_reg = io_register(PORTS.reset, 1, AccessSize::ByteAccess);
    fadt.reset_value = RESET_VALUE;
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(*b"Umpire\0\0").into();
    bytes(&fadt.finalize())
}

/// An ISA interrupt that is not wired to the input of its own number (5.2.12.5).
#[derive(Clone, IntoBytes, Immutable)]
#[repr(C)]
struct InterruptSourceOverride {
    kind: u8,
    len: u8,
    bus: u8,
    source: u8,
    gsi: U32,
    flags: U16,
}

/// The local interrupt pin that carries NMIs (5.2.12.7).
#[derive(Clone, IntoBytes, Immutable)]
#[repr(C)]
struct LocalApicNmi {
    kind: u8,
    len: u8,
    processor_uid: u8,
    flags: U16,
    pin: u8,
}

/// Interrupt controllers (5.2.12): a local APIC for each CPU, an I/O APIC, and how the ISA
/// interrupts are wired to it.
pub(super) fn madt(cpus: u32) -> Vec<u8> {
    const PCAT_COMPATIBLE: u32 = 1;
    const ISA_BUS: u8 = 0;
    const TIMER_IRQ: u8 = 0;
    const TIMER_GSI: u32 = 2;
    const CONFORMS_TO_BUS: u16 = 0;
    const ACTIVE_HIGH_LEVEL: u16 = 0b1101;
    const ALL_CPUS: u8 = 0xff;
    const LINT1: u8 = 1;
    const IOAPIC_ID: u8 = 0;
    const FIRST_GSI: u32 = 0;

    let mut body = Vec::new();
    body.dword(low_half(LAPIC_START));
    body.dword(PCAT_COMPATIBLE);
    // Bounded by `MAX_CPUS`, so no APIC ID reaches the broadcast value 255.
    for id in (0..=u8::MAX).take(usize::try_from(cpus).unwrap_or(0)) {
        ProcessorLocalApic::new(id, id, EnabledStatus::Enabled).to_aml_bytes(&mut body);
    }
    IoApic::new(IOAPIC_ID, low_half(IOAPIC_START), FIRST_GSI).to_aml_bytes(&mut body);
    for (source, gsi, flags) in [
        (TIMER_IRQ, TIMER_GSI, CONFORMS_TO_BUS),
        (SCI_IRQ, SCI_IRQ.into(), ACTIVE_HIGH_LEVEL),
    ] {
        let wiring = InterruptSourceOverride {
            kind: 2,
            len: 10,
            bus: ISA_BUS,
            source,
            gsi: gsi.into(),
            flags: flags.into(),
        };
        body.vec(wiring.as_bytes());
    }
    let nmi = LocalApicNmi {
        kind: 4,
        len: 6,
        processor_uid: ALL_CPUS,
        flags: CONFORMS_TO_BUS.into(),
        pin: LINT1,
    };
    body.vec(nmi.as_bytes());
    finish(*b"APIC", 5, &body)
}

/// `IRQNoFlags () { irq }` (6.4.2.1): edge-triggered, active high; the number is below 16.
pub(super) struct IrqNoFlags(pub(super) u8);

impl Aml for IrqNoFlags {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.byte(0x22);
        sink.word(1 << (self.0 & 15));
    }
}

/// The device by whose name Linux finds registers of virtio (its `virtio_mmio`).
struct RawVirtio(VirtioDevice);

impl Aml for RawVirtio {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let VirtioDevice { start, len, pin } = self.0;
        let registers = Memory32Fixed::new(true, start, len);
        // It takes interrupts: edges, active high, nobody else's.
        let interrupt = Interrupt::new(true, true, false, false, pin.into());
        let resources = ResourceTemplate::new(vec![&registers, &interrupt]);
        let hid = Name::new("_HID".into(), &"LNRO0005");
        let uid = Name::new("_UID".into(), &0u8);
        let resources = Name::new("_CRS".into(), &resources);
        Device::new("VIO0".into(), vec![&hid, &uid, &resources]).to_aml_bytes(sink);
    }
}

/// Description of the devices that no bus finds, and of soft-off.
pub(super) fn dsdt(virtio: Option<VirtioDevice>) -> Vec<u8> {
    const PRESENT_ENABLED_SHOWN_WORKING: u8 = 0xf;

    let s5 = Package::new(vec![&S5_SLEEP_TYPE, &S5_SLEEP_TYPE, &0u8, &0u8]);
    let s5 = Name::new("_S5_".into(), &s5);
    let ports = IO::new(PORTS.com1, PORTS.com1, 1, 8);
    let irq = IrqNoFlags(PORTS.com1_irq);
    let com1 = [
        Name::new("_HID".into(), &EISAName::new("PNP0501")),
        Name::new("_UID".into(), &1u8),
        Name::new("_STA".into(), &PRESENT_ENABLED_SHOWN_WORKING),
        Name::new("_CRS".into(), &ResourceTemplate::new(vec![&ports, &irq])),
    ];
    let com1 = com1.iter().map(|name| name as &dyn Aml).collect();
    let com1 = Device::new("COM1".into(), com1);
    let virtio = virtio.map(RawVirtio);
    let mut devices: Vec<&dyn Aml> = vec![&com1];
    devices.extend(virtio.iter().map(|device| device as &dyn Aml));
    let system_bus = Scope::new("\\_SB_".into(), devices);
    // Revision 2: integers have 64 bits.
    finish(*b"DSDT", 2, &[bytes(&s5), bytes(&system_bus)].concat())
}

/// Generic address of a register in I/O space (5.2.3.2).
fn io_register(port: u16, len: u8, access: AccessSize) -> GAS {
    GAS::new(AddressSpace::SystemIo, len * 8, 0, access, port.into())
}

fn bytes(object: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    object.to_aml_bytes(&mut bytes);
    bytes
}

/// Puts the common header in front (5.2.6), with our creator in place of the crate's.
fn finish(signature: [u8; 4], revision: u8, body: &[u8]) -> Vec<u8> {
    const HEADER_LEN: u32 = 36;
    const CREATOR: usize = 28;
    let mut table = Sdt::new(
        signature,
        HEADER_LEN,
        revision,
        OEM_ID,
        OEM_TABLE_ID,
        REVISION,
    );
    table.append_slice(body);
    table.write_bytes(CREATOR, &CREATOR_ID);
    table.write_u32(CREATOR + CREATOR_ID.len(), REVISION);
    table.as_slice().to_vec()
}

/// All tables and controllers lie below 4 GiB, so the upper half is 0.
fn low_half(address: u64) -> u32 {
    u32::try_from(address).unwrap_or(u32::MAX)
}
