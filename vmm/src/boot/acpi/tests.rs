use proptest::prelude::{any, proptest};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::boot::memory::create;
use crate::boot::wire::{u16_at, u32_at, u64_at};

fn guest(cpus: u32, pm_timer: bool) -> GuestMemory {
    let mem = create(2).expect("memory");
    let end = write_tables(
        &mem,
        AcpiConfig {
            cpus,
            pm_timer,
            virtio: None,
        },
    )
    .expect("tables");
    assert!(end <= ACPI_END, "{end:#x}");
    mem
}

fn bytes(mem: &GuestMemory, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    mem.read_slice(&mut bytes, GuestAddress(address))
        .expect("inside");
    bytes
}

fn sum(bytes: &[u8]) -> u8 {
    bytes
        .iter()
        .fold(0, |sum: u8, &byte| sum.wrapping_add(byte))
}

/// Reads a table as a guest does: length from the header, then signature and checksum.
fn table(mem: &GuestMemory, address: u64, signature: &[u8; 4]) -> Vec<u8> {
    let len = u32_at(&bytes(mem, address, 8), 4).expect("length");
    let table = bytes(mem, address, usize::try_from(len).expect("short"));
    assert_eq!(&table[..4], signature);
    assert_eq!(
        sum(&table),
        0,
        "checksum of {}",
        String::from_utf8_lossy(signature)
    );
    table
}

/// FADT and MADT, found by following the pointers.
fn walk(mem: &GuestMemory) -> (Vec<u8>, Vec<u8>) {
    let rsdp = bytes(mem, RSDP_ADDRESS, 36);
    assert_eq!(&rsdp[..8], b"RSD PTR ");
    assert_eq!((sum(&rsdp[..20]), sum(&rsdp), rsdp[15]), (0, 0, 2));
    let xsdt = table(mem, u64_at(&rsdp, 24).expect("address"), b"XSDT");
    assert_eq!(xsdt.len(), 36 + 2 * 8);
    let entry = |offset| u64_at(&xsdt, offset).expect("address");
    (
        table(mem, entry(36), b"FACP"),
        table(mem, entry(44), b"APIC"),
    )
}

/// The MADT's entries as (type, content behind the two leading bytes).
fn entries(madt: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut rest = &madt[44..];
    let mut list = Vec::new();
    while let [kind, len, ..] = *rest {
        let (entry, behind) = rest.split_at(len.into());
        list.push((kind, entry[2..].to_vec()));
        rest = behind;
    }
    assert!(rest.is_empty());
    list
}

proptest! {
    #[test]
    fn tables_are_sound_for_every_guest(cpus in 1..=MAX_CPUS, pm_timer in any::<bool>()) {
        let mem = guest(cpus, pm_timer);
        let (fadt, madt) = walk(&mem);
        let dsdt = u64_at(&fadt, 140).expect("X_DSDT");
        assert_eq!(u32_at(&fadt, 40).map(u64::from), Some(dsdt));
        table(&mem, dsdt, b"DSDT");
        let apics: Vec<_> = entries(&madt).into_iter().filter(|(kind, _)| *kind == 0).collect();
        assert_eq!(apics.len(), usize::try_from(cpus).expect("few"));
        for (id, (_, apic)) in (0u8..).zip(&apics) {
            assert_eq!(apic, &[id, id, 1, 0, 0, 0]);
        }
        assert_eq!(fadt[91], if pm_timer { 4 } else { 0 });
        assert_eq!(u32_at(&fadt, 112).expect("flags") >> 8 & 1, u32::from(pm_timer));
    }
}

#[test]
fn the_fadt_names_real_registers() {
    let mem = guest(1, false);
    let (fadt, _) = walk(&mem);
    assert_eq!((fadt.len(), fadt[8], fadt[131]), (276, 6, 5));
    assert_eq!(u16_at(&fadt, 46), Some(9), "SCI");
    assert_eq!(
        u32_at(&fadt, 48),
        Some(0),
        "no SMI command port: always in ACPI mode"
    );
    assert_eq!(
        (u32_at(&fadt, 56), u32_at(&fadt, 64)),
        (Some(0x600), Some(0x604))
    );
    assert_eq!((fadt[88], fadt[89]), (4, 2));
    assert_eq!(
        fadt[116..129],
        [1, 8, 0, 1, 0xf9, 0x0c, 0, 0, 0, 0, 0, 0, 6],
        "reset"
    );
    assert_eq!(
        fadt[148..160],
        [1, 32, 0, 2, 0, 6, 0, 0, 0, 0, 0, 0],
        "PM1a event"
    );
    assert_eq!(
        fadt[172..184],
        [1, 16, 0, 2, 4, 6, 0, 0, 0, 0, 0, 0],
        "PM1a control"
    );
    assert_eq!(u32_at(&fadt, 112), Some(0x475), "flags");
    assert_eq!(
        u16_at(&fadt, 109),
        Some(5),
        "ISA, no 8042, no VGA, a CMOS clock, MSI allowed"
    );
    let facs = u32_at(&fadt, 36).expect("FACS").into();
    assert_eq!(facs % 64, 0);
    assert_eq!(bytes(&mem, facs, 8), [b'F', b'A', b'C', b'S', 64, 0, 0, 0]);
}

#[test]
fn the_timer_register_appears_with_the_timer() {
    let (fadt, _) = walk(&guest(1, true));
    assert_eq!(fadt[208..220], [1, 32, 0, 3, 8, 6, 0, 0, 0, 0, 0, 0]);
    assert_eq!(u32_at(&fadt, 76), Some(0x608));
}

#[test]
fn the_madt_wires_timer_and_sci() {
    let (_, madt) = walk(&guest(2, false));
    assert_eq!(
        (u32_at(&madt, 36), u32_at(&madt, 40)),
        (Some(0xfee0_0000), Some(1))
    );
    let rest: Vec<_> = entries(&madt).into_iter().skip(2).collect();
    let expected = [
        (1, vec![0, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0]),
        (2, vec![0, 0, 2, 0, 0, 0, 0, 0]),
        (2, vec![0, 9, 9, 0, 0, 0, 0x0d, 0]),
        (4, vec![0xff, 0, 0, 1]),
    ];
    assert_eq!(rest, expected);
}

#[test]
fn the_dsdt_has_soft_off_and_the_serial_port() {
    let mem = guest(1, false);
    let (fadt, _) = walk(&mem);
    let dsdt = table(&mem, u64_at(&fadt, 140).expect("address"), b"DSDT");
    let find = |needle: &[u8]| dsdt.windows(needle.len()).any(|window| window == needle);
    assert!(find(b"\x08_S5_\x12\x08\x04\x0a\x05\x0a\x05\x00\x00"));
    assert!(find(b"\x08_HID\x0c\x41\xd0\x05\x01"));
    assert!(find(&[
        0x47, 1, 0xf8, 3, 0xf8, 3, 1, 8, 0x22, 0x10, 0, 0x79, 0
    ]));
}

#[test]
fn aml_is_encoded_as_the_specification_says() {
    use acpi_tables::Aml;
    use acpi_tables::aml::{EISAName, IO, Package, ResourceTemplate};

    fn check(object: &dyn Aml, expected: &[u8]) {
        let mut bytes = Vec::new();
        object.to_aml_bytes(&mut bytes);
        assert_eq!(bytes[..expected.len()], *expected);
    }
    // Integers take the shortest form.
    check(&0u32, &[0]);
    check(&1u32, &[1]);
    check(&5u32, &[0x0a, 5]);
    check(&0x1234u32, &[0x0b, 0x34, 0x12]);
    check(&0x1234_5678u32, &[0x0c, 0x78, 0x56, 0x34, 0x12]);
    // Lengths grow to two bytes. A package has a byte of its own for the number of elements.
    let check_length = |len: usize, expected: &[u8]| {
        check(&Package::new(vec![&0u8; len - 1]), expected);
    };
    check_length(62, &[0x12, 63, 61]);
    check_length(63, &[0x12, 0x41, 0x04, 62]);
    check_length(0x100, &[0x12, 0x42, 0x10, 0xff]);
    check_length(4093, &[0x12, 0x4f, 0xff]);
    // Identifiers and resources.
    check(&EISAName::new("PNP0501"), &[0x0c, 0x41, 0xd0, 0x05, 0x01]);
    check(
        &IO::new(0x3f8, 0x3f8, 1, 8),
        &[0x47, 1, 0xf8, 3, 0xf8, 3, 1, 8],
    );
    check(&tables::IrqNoFlags(4), &[0x22, 0x10, 0]);
    check(&ResourceTemplate::new(vec![]), &[0x11, 5, 0x0a, 2, 0x79, 0]);
}

/// As Linux's `virtio_mmio` matches it, and its resources (6.4.3.4 and 6.4.3.6).
#[test]
fn a_virtio_device_is_described_where_there_is_one() {
    let device = VirtioDevice {
        start: 0xd000_0000,
        len: 0x1000,
        pin: 5,
    };
    let name = b"_HID\x0dLNRO0005\0";
    let memory = [0x86, 9, 0, 1, 0, 0, 0, 0xd0, 0, 0x10, 0, 0];
    // A consumer's, an edge, active high, exclusive.
    let interrupt = [0x89, 6, 0, 0b0011, 1, 5, 0, 0, 0];
    let has = |table: &[u8], part: &[u8]| table.windows(part.len()).any(|here| here == part);
    let there = tables::dsdt(Some(device));
    assert_eq!(sum(&there), 0);
    for part in [&name[..], &memory, &interrupt] {
        assert!(has(&there, part), "{part:x?} in {there:x?}");
    }
    assert!(!has(&tables::dsdt(None), b"LNRO0005"));
}
