//! The tables as bytes, ready to be placed.

use super::super::memory::{IOAPIC_START, LAPIC_START};
use super::super::wire::put;
use super::{PORTS, RESET_VALUE, S5_SLEEP_TYPE, SCI_IRQ, aml};

/// Length of the root pointer in bytes.
pub(super) const RSDP_LEN: u64 = 36;

const OEM_ID: [u8; 6] = *b"UMPIRE";
const OEM_TABLE_ID: [u8; 8] = *b"UMPIREVM";
const CREATOR_ID: [u8; 4] = *b"UMPR";
const REVISION: [u8; 4] = 1u32.to_le_bytes();
const HEADER_LEN: usize = 36;
const CHECKSUM: usize = 9;

/// Root pointer (5.2.5.3).
pub(super) fn rsdp(xsdt: u64) -> Vec<u8> {
    let mut table = [0; 36];
    put(&mut table, 0, b"RSD PTR ");
    put(&mut table, 9, &OEM_ID);
    let revision_with_xsdt = 2;
    put(&mut table, 15, &[revision_with_xsdt]);
    put(&mut table, 20, &36u32.to_le_bytes());
    put(&mut table, 24, &xsdt.to_le_bytes());
    // The first checksum covers what ACPI 1.0 knew, the second all.
    table[8] = checksum(&table[..20]);
    table[32] = checksum(&table);
    table.to_vec()
}

/// Table of tables (5.2.8).
pub(super) fn xsdt(tables: &[u64]) -> Vec<u8> {
    let body: Vec<u8> = tables
        .iter()
        .flat_map(|address| address.to_le_bytes())
        .collect();
    finish(*b"XSDT", 1, &body)
}

/// Firmware control structure (5.2.10): holds only its global lock; it has no checksum.
pub(super) fn facs() -> Vec<u8> {
    let mut table = [0; 64];
    put(&mut table, 0, b"FACS");
    put(&mut table, 4, &64u32.to_le_bytes());
    let version = 2;
    put(&mut table, 32, &[version]);
    table.to_vec()
}

/// Fixed description table (5.2.9).
pub(super) fn fadt(dsdt: u64, facs: u64, pm_timer: bool) -> Vec<u8> {
    const LEN: usize = 276;
    const FLAG_WBINVD: u32 = 1 << 0;
    const FLAG_C1_ON_ALL: u32 = 1 << 2;
    // Set: there is no such fixed button, or RTC wake bit.
    const FLAG_NO_POWER_BUTTON: u32 = 1 << 4;
    const FLAG_NO_SLEEP_BUTTON: u32 = 1 << 5;
    const FLAG_NO_FIXED_RTC: u32 = 1 << 6;
    const FLAG_TIMER_32_BITS: u32 = 1 << 8;
    const FLAG_RESET_REGISTER: u32 = 1 << 10;
    const BOOT_ISA_DEVICES: u16 = 1 << 0;
    const BOOT_8042: u16 = 1 << 1;
    const BOOT_NO_VGA: u16 = 1 << 2;
    // Latencies above 100 and 1000 µs say that C2 and C3 do not exist.
    const NO_C2: u16 = 101;
    const NO_C3: u16 = 1001;
    const ENTERPRISE_SERVER: u8 = 4;

    let flags = FLAG_WBINVD
        | FLAG_C1_ON_ALL
        | FLAG_NO_POWER_BUTTON
        | FLAG_NO_SLEEP_BUTTON
        | FLAG_NO_FIXED_RTC
        | FLAG_RESET_REGISTER
        | if pm_timer { FLAG_TIMER_32_BITS } else { 0 };
    let boot_arch = BOOT_ISA_DEVICES | BOOT_8042 | BOOT_NO_VGA;
    let (timer_port, timer_len) = if pm_timer {
        (PORTS.pm_timer, 4)
    } else {
        (0, 0)
    };

    // Offsets as in table 5.9, less the header's length.
    let mut body = [0; LEN - HEADER_LEN];
    let mut field = |offset: usize, value: &[u8]| put(&mut body, offset - HEADER_LEN, value);
    field(36, &low_half(facs));
    field(40, &low_half(dsdt));
    field(45, &[ENTERPRISE_SERVER]);
    field(46, &u16::from(SCI_IRQ).to_le_bytes());
    // SMI_CMD stays 0: the machine is always in ACPI mode.
    field(56, &u32::from(PORTS.pm1a_event).to_le_bytes());
    field(64, &u32::from(PORTS.pm1a_control).to_le_bytes());
    field(76, &u32::from(timer_port).to_le_bytes());
    field(88, &[4]);
    field(89, &[2]);
    field(91, &[timer_len]);
    field(96, &NO_C2.to_le_bytes());
    field(98, &NO_C3.to_le_bytes());
    field(109, &boot_arch.to_le_bytes());
    field(112, &flags.to_le_bytes());
    field(116, &io_register(PORTS.reset, 1));
    field(128, &[RESET_VALUE]);
    let minor_version = 5;
    field(131, &[minor_version]);
    field(140, &dsdt.to_le_bytes());
    field(148, &io_register(PORTS.pm1a_event, 4));
    field(172, &io_register(PORTS.pm1a_control, 2));
    if pm_timer {
        field(208, &io_register(timer_port, timer_len));
    }
    field(268, b"Umpire\0\0");
    finish(*b"FACP", 6, &body)
}

/// Interrupt controllers (5.2.12): a local APIC for each CPU, an I/O APIC, and how the ISA
/// interrupts are wired to it.
pub(super) fn madt(cpus: u32) -> Vec<u8> {
    const PCAT_COMPATIBLE: u32 = 1;
    const ENABLED: u32 = 1;
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
    body.extend(low_half(LAPIC_START));
    body.extend(PCAT_COMPATIBLE.to_le_bytes());
    // Bounded by `MAX_CPUS`, so no APIC ID reaches the broadcast value 255.
    for id in (0..=u8::MAX).take(usize::try_from(cpus).unwrap_or(0)) {
        body.extend([0, 8, id, id]);
        body.extend(ENABLED.to_le_bytes());
    }
    body.extend([1, 12, IOAPIC_ID, 0]);
    body.extend(low_half(IOAPIC_START));
    body.extend(FIRST_GSI.to_le_bytes());
    for (irq, gsi, wiring) in [
        (TIMER_IRQ, TIMER_GSI, CONFORMS_TO_BUS),
        (SCI_IRQ, SCI_IRQ.into(), ACTIVE_HIGH_LEVEL),
    ] {
        body.extend([2, 10, ISA_BUS, irq]);
        body.extend(gsi.to_le_bytes());
        body.extend(wiring.to_le_bytes());
    }
    body.extend([4, 6, ALL_CPUS]);
    body.extend(CONFORMS_TO_BUS.to_le_bytes());
    body.push(LINT1);
    finish(*b"APIC", 5, &body)
}

/// Description of the devices that no bus finds, and of soft-off.
pub(super) fn dsdt() -> Vec<u8> {
    let sleep = u32::from(S5_SLEEP_TYPE);
    let s5 = [
        aml::integer(sleep),
        aml::integer(sleep),
        aml::integer(0),
        aml::integer(0),
    ];
    let com1 = [
        aml::name(*b"_HID", &aml::pnp_id(0x0501)),
        aml::name(*b"_UID", &aml::integer(1)),
        aml::name(*b"_STA", &aml::integer(0xf)),
        aml::name(
            *b"_CRS",
            &aml::resources(&[aml::io_ports(PORTS.com1, 8), aml::irq(PORTS.com1_irq)]),
        ),
    ]
    .concat();
    let body = [
        aml::name(*b"_S5_", &aml::package(&s5)),
        aml::root_scope(*b"_SB_", &aml::device(*b"COM1", &com1)),
    ]
    .concat();
    // Revision 2: integers have 64 bits.
    finish(*b"DSDT", 2, &body)
}

/// Generic address of a register in I/O space (5.2.3.2).
fn io_register(port: u16, bytes: u8) -> Vec<u8> {
    const SYSTEM_IO: u8 = 1;
    // Access size 1, 2, 3 stands for 1, 2, 4 bytes; the event block is two 16-bit registers.
    let access = if bytes == 1 { 1 } else { 2 };
    let access = if port == PORTS.pm_timer { 3 } else { access };
    [
        &[SYSTEM_IO, bytes * 8, 0, access][..],
        &u64::from(port).to_le_bytes(),
    ]
    .concat()
}

/// Puts the common header in front (5.2.6) and fills in length and checksum.
fn finish(signature: [u8; 4], revision: u8, body: &[u8]) -> Vec<u8> {
    let mut table = vec![0; HEADER_LEN];
    let len = u32::try_from(HEADER_LEN + body.len()).expect("tables are short");
    put(&mut table, 0, &signature);
    put(&mut table, 4, &len.to_le_bytes());
    put(&mut table, 8, &[revision]);
    put(&mut table, 10, &OEM_ID);
    put(&mut table, 16, &OEM_TABLE_ID);
    put(&mut table, 24, &REVISION);
    put(&mut table, 28, &CREATOR_ID);
    put(&mut table, 32, &REVISION);
    table.extend_from_slice(body);
    table[CHECKSUM] = checksum(&table);
    table
}

/// The byte that makes the sum of all bytes 0.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, &byte| sum.wrapping_sub(byte))
}

/// All tables and controllers lie below 4 GiB, so the upper half is 0.
fn low_half(address: u64) -> [u8; 4] {
    let [a, b, c, d, ..] = address.to_le_bytes();
    [a, b, c, d]
}
