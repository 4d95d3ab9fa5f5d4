use std::path::Path;

use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::boot::memory::{Conventional, MIB, create, regions};
use crate::boot::testing::{ElfBuilder, multiboot_header};

/// Length of what every header begins with.
const HEADER_LEN: usize = size_of::<HeaderStart>();

fn check(bytes: Vec<u8>, expected: Result<(Option<u64>, LoadSegment), &str>) {
    let image = Image::from_bytes("kernel", Path::new("k"), bytes.clone());
    let header = find_header(&bytes).expect("header");
    match (parse(&image, header), expected) {
        (Ok(kernel), Ok((entry, segment))) => {
            assert_eq!(
                kernel,
                MultibootKernel {
                    entry,
                    segments: vec![segment]
                }
            );
        }
        (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
        (result, expected) => panic!("{result:?}, expected {expected:?}"),
    }
}

fn flat(flags: u32, addresses: [u32; 5]) -> Vec<u8> {
    let mut bytes = vec![0x90; 16];
    bytes.extend(multiboot_header(flags));
    bytes.extend(addresses.iter().flat_map(|word| word.to_le_bytes()));
    bytes.resize(0x100, 0x90);
    bytes
}

#[test]
fn headers_need_magic_checksum_alignment_and_place() {
    let header = multiboot_header(3);
    let at = |offset: usize| {
        let mut bytes = vec![0; offset];
        bytes.extend(&header);
        find_header(&bytes)
    };
    assert_eq!(
        at(0),
        Some(MultibootHeader {
            offset: 0,
            flags: 3
        })
    );
    assert_eq!(
        at(SEARCH_LEN - HEADER_LEN),
        Some(MultibootHeader {
            offset: 8180,
            flags: 3
        })
    );
    assert_eq!(at(2), None);
    assert_eq!(at(SEARCH_LEN - HEADER_LEN + 4), None);
    let mut wrong = header.clone();
    wrong[8] ^= 1;
    assert_eq!(find_header(&wrong), None);
    for len in 0..HEADER_LEN {
        assert_eq!(find_header(&header[..len]), None);
    }
}

#[test]
fn mandatory_flags_must_be_known() {
    let elf = |flags: u32| {
        let mut code = multiboot_header(flags);
        code.resize(64, 0x90);
        ElfBuilder::elf32()
            .entry(0x10_0010)
            .segment(0x10_0000, &code, 64)
            .build()
    };
    let segment = LoadSegment {
        offset: ElfBuilder::elf32().segment(0x10_0000, b"", 0).data_offset(),
        address: 0x10_0000,
        linked: 0x10_0000,
        file_len: 64,
        memory_len: 64,
    };
    check(elf(0), Ok((Some(0x10_0010), segment)));
    check(elf(3), Ok((Some(0x10_0010), segment)));
    check(elf(1 << 20), Ok((Some(0x10_0010), segment)));
    check(elf(4), Err("video mode"));
    check(elf(0x80), Err("unknown features (flags 0x80)"));
}

#[test]
fn addresses_of_the_header_are_used_and_checked() {
    let base = 0x10_0000;
    let segment = |offset, file_len, memory_len| LoadSegment {
        offset,
        address: base.into(),
        linked: base.into(),
        file_len,
        memory_len,
    };
    let bit = ADDRESSES;
    check(
        flat(bit, [base + 16, base, base + 0x80, base + 0x200, base + 8]),
        Ok((Some(0x10_0008), segment(0, 0x80, 0x200))),
    );
    check(
        flat(bit, [base + 8, base, 0, 0, base + 8]),
        Ok((Some(0x10_0008), segment(8, 0xf8, 0xf8))),
    );
    check(
        flat(bit, [base + 16, base, 0, 0, 0]),
        Ok((None, segment(0, 0x100, 0x100))),
    );
    check(
        flat(bit, [base + 17, base, 0, 0, base]),
        Err("precedes the file"),
    );
    check(
        flat(bit, [base - 1, base, 0, 0, base]),
        Err("precedes the file"),
    );
    check(
        flat(bit, [base + 16, base, base - 1, 0, base]),
        Err("load_end_addr precedes"),
    );
    check(
        flat(bit, [base + 16, base, base + 64, base + 63, base]),
        Err("bss_end_addr precedes"),
    );
    check(
        flat(bit, [0; 5])[..40].to_vec(),
        Err("the Multiboot header ends"),
    );
    check(flat(0, [0; 5]), Err("no ELF file"));
}

#[test]
fn the_information_structure_leads_to_map_modules_and_strings() {
    let mem = create(64).expect("memory");
    let map = regions(&mem, Conventional::Free).expect("map");
    let module = LoadedModule {
        span: Span {
            start: 0x20_0000,
            end: 0x20_0123,
        },
        string: 0x3_1000,
    };
    write_info(&mem, &[module, module], &map).expect("written");
    let word =
        |address: u64| u64::from(mem.read_obj::<u32>(GuestAddress(address)).expect("inside"));
    let info = |offset: u64| word(BOOT_INFO_START + offset);
    assert_eq!(info(0), 0x24d);
    assert_eq!((info(4), info(8)), (639, 63 * MIB / 1024));
    assert_eq!((info(16), info(20)), (CMDLINE_START, 2));
    let second = info(24) + 16;
    assert_eq!(
        [0, 4, 8, 12].map(|field| word(second + field)),
        [0x20_0000, 0x20_0123, 0x3_1000, 0]
    );
    let mut at = info(48);
    for region in &map {
        assert_eq!(word(at + 4), region.start & 0xffff_ffff);
        assert_eq!(word(at + 20), u64::from(region.kind.e820_type()));
        at += word(at) + 4;
    }
    assert_eq!(at, info(48) + info(44));
    let name: [u8; 7] = mem.read_obj(GuestAddress(info(64))).expect("inside");
    assert_eq!(&name, b"Umpire\0");
}
