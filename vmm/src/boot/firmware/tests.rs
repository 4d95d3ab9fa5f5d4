//! Images of firmware: good ones lie where they want, bad ones are named.

use std::path::{Path, PathBuf};

use proptest::prelude::{ProptestConfig, any, proptest};
use proptest::sample::Index;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::boot::memory::{
    BOOT_INFO_START, Conventional, FIRMWARE_START, ZERO_PAGE_START, create, regions,
};
use crate::boot::state::CODE_SELECTOR;
use crate::boot::testing::ElfBuilder;

const LINUX: Surroundings = Surroundings {
    kernel: BootEntry::Linux64 {
        rip: 0x100_0000,
        zero_page: ZERO_PAGE_START,
    },
    cpus: 3,
    pm_timer: true,
};

fn elf() -> ElfBuilder {
    ElfBuilder::elf64()
        .entry(layout::IMAGE + 0x10)
        .segment(layout::IMAGE, &[0x90; 0x20], 0x4000)
}

fn flat(len: usize) -> Vec<u8> {
    let mut bytes = vec![0x90; len];
    bytes[8..16].copy_from_slice(b"UMPIREFW");
    bytes
}

fn load_bytes(
    bytes: &[u8],
    around: Surroundings,
) -> Result<(GuestMemory, InitialState), BootError> {
    let mem = create(2).expect("memory");
    // An image from an earlier life of the memory.
    let place = GuestAddress(layout::IMAGE);
    mem.write_slice(&[0xee; 0x1_6000], place).expect("dirtied");
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), bytes).expect("a file");
    let request = FirmwareRequest {
        image: FirmwareImage::File(file.path().to_owned()),
        counters: Vec::new(),
        delay_ms: 0,
    };
    let (state, _) = load(&mem, &request, around)?;
    Ok((mem, state))
}

fn area_of(mem: &GuestMemory) -> Config {
    let mut area = [0; config::SIZE];
    mem.read_slice(&mut area, GuestAddress(layout::CONFIG))
        .expect("inside");
    Config::parse(&area).expect("it was written here")
}

#[test]
fn an_elf_file_is_entered_in_64_bit_mode_with_its_configuration() {
    let (mem, state) = load_bytes(&elf().build(), LINUX).expect("loaded");
    assert_eq!(
        (state.rip, state.rsi),
        (layout::IMAGE + 0x10, layout::CONFIG)
    );
    assert_eq!(
        (state.rsp, state.cr3),
        (layout::STACK_TOP, layout::PAGE_TABLES)
    );
    assert_eq!((state.cr0, state.efer), (0x8000_0031, 0x500));
    let word = |address| mem.read_obj::<u64>(GuestAddress(address)).expect("inside");
    assert_eq!(word(layout::IMAGE), 0x9090_9090_9090_9090);
    assert_eq!(word(layout::IMAGE + 0x20), 0, "zeroed");
    let gdt = |selector: u16| word(layout::GDT + u64::from(selector));
    assert_eq!(gdt(layout::CODE_32), 0x00cf_9b00_0000_ffff);
    assert_eq!(gdt(layout::CODE_64), 0x00af_9b00_0000_ffff);
    assert_eq!(gdt(layout::DATA), 0x00cf_9300_0000_ffff);
    assert_eq!(gdt(layout::TASK), 0x0000_8b00_0600_0067);
    assert_eq!(
        word(layout::PAGE_TABLES),
        (layout::PAGE_TABLES + 0x1000) | 3
    );
    let config = area_of(&mem);
    assert_eq!((config.cpus, config.pm_timer), (3, PORTS.pm_timer));
    let kernel = config.kernel;
    assert_eq!((kernel.mode, kernel.code), (Mode::Long, CODE_SELECTOR));
    assert_eq!((kernel.rip, kernel.rsi), (0x100_0000, ZERO_PAGE_START));
}

#[test]
fn every_kernel_is_described() {
    let entries = [
        (
            BootEntry::Pvh {
                rip: 0x100_0000,
                start_info: BOOT_INFO_START,
            },
            Protocol::Pvh,
            (0, BOOT_INFO_START),
        ),
        (
            BootEntry::Multiboot {
                rip: 0x10_0040,
                info: BOOT_INFO_START,
            },
            Protocol::Multiboot,
            (0x2bad_b002, BOOT_INFO_START),
        ),
    ];
    for (entry, protocol, registers) in entries {
        let around = Surroundings {
            kernel: entry,
            cpus: 1,
            pm_timer: false,
        };
        let (mem, _) = load_bytes(&elf().build(), around).expect("loaded");
        let config = area_of(&mem);
        assert_eq!(config.pm_timer, 0);
        let kernel = config.kernel;
        assert_eq!((kernel.protocol, kernel.mode), (protocol, Mode::Protected));
        assert_eq!((kernel.rax, kernel.rbx), registers);
        assert_eq!((kernel.cr0, kernel.cr3, kernel.efer), (0x11, 0, 0));
    }
}

#[test]
fn a_flat_image_begins_at_its_first_byte() {
    let (mem, state) = load_bytes(&flat(0x100), LINUX).expect("loaded");
    assert_eq!(state.rip, layout::IMAGE);
    let word = |address| mem.read_obj::<u64>(GuestAddress(address)).expect("inside");
    assert_eq!(word(layout::IMAGE + 8), u64::from_le_bytes(*b"UMPIREFW"));
    assert_eq!(word(layout::IMAGE + 0x100), 0, "zeroed");
    let last = layout::IMAGE + layout::IMAGE_SIZE - 8;
    assert_eq!(word(last), 0, "to the end");
}

#[test]
fn the_builtin_firmware_is_one_that_is_accepted() {
    let Some(bytes) = ::firmware::image() else {
        // libtest hides what a test prints, so where everything has to be there
        // the gap is a failure.
        assert!(
            std::env::var_os("CI").is_none_or(|ci| ci != "true"),
            "there is no builtin firmware: the Rust target x86_64-unknown-none is missing; run \
             `rustup target add x86_64-unknown-none`"
        );
        println!("skipped: the_builtin_firmware: the Rust target x86_64-unknown-none is missing");
        return;
    };
    let mem = create(2).expect("memory");
    let request = FirmwareRequest {
        image: FirmwareImage::Builtin(bytes),
        counters: Vec::new(),
        delay_ms: 0,
    };
    let (state, span) = load(&mem, &request, LINUX).expect("loaded");
    assert!((span.start..span.end).contains(&state.rip));
    // The other processors start at the image's first byte.
    assert_eq!(span.start, layout::IMAGE);
}

#[test]
fn images_that_cannot_be_used_are_named() {
    fn check(bytes: &[u8], part: &str) {
        let error = load_bytes(bytes, LINUX).expect_err(part).to_string();
        assert!(error.contains(part), "no {part:?} in: {error}");
        assert!(!error.contains('\n'), "{error}");
        if !error.contains("truncated") {
            assert!(error.starts_with("--firmware "), "{error}");
            assert!(error.contains("docs/guide/firmware.md"), "{error}");
        }
    }
    let entry = elf();
    let good = entry.build();
    check(b"", "it is an empty file");
    check(b"#!/bin/sh\nexit 0\n", "it is a script");
    check(
        b"no firmware at all",
        "neither an ELF64 file nor a flat image",
    );
    check(&flat(0x100)[..15], "neither an ELF64 file nor a flat image");
    check(&flat(0x1_6001), "firmware's place is 0x80000-0x96000");
    check(&good[..30], "truncated: the ELF header");
    check(&good[..80], "truncated: the program headers");
    check(&good[..good.len() - 1], "truncated: a segment");
    let at = |address| {
        ElfBuilder::elf64()
            .entry(address)
            .segment(address, &[0; 4], 8)
    };
    check(&at(layout::IMAGE - 4).build(), "firmware's place");
    check(&at(layout::CONFIG - 4).build(), "firmware's place");
    check(&at(0x10_0000).build(), "it wants 0x100000-0x100008");
    check(&at(u64::MAX - 2).build(), "firmware's place");
    check(&elf().entry(0).build(), "entry point lies in none");
    check(
        &elf().entry(layout::IMAGE + 0x4000).build(),
        "entry point lies in none",
    );
    check(&ElfBuilder::elf64().build(), "entry point lies in none");
    check(
        &elf().segment(layout::IMAGE + 0x3fff, &[0; 4], 8).build(),
        "overlap",
    );
    check(
        &ElfBuilder::elf64()
            .entry(layout::IMAGE)
            .segment(layout::IMAGE, &[0; 8], 4)
            .build(),
        "more bytes in the file than in memory",
    );
    check(&elf().interpreter().build(), "a program for Linux");
    let of_32_bits = ElfBuilder::elf32()
        .entry(layout::IMAGE)
        .segment(layout::IMAGE, &[0; 4], 8);
    check(&of_32_bits.build(), "32-bit ELF file");
    let mut patched = good.clone();
    patched[5] = 2;
    check(&patched, "big-endian");
    patched = good.clone();
    patched[4] = 3;
    check(&patched, "ELF class");
    patched = good.clone();
    patched[18] = 0xb7;
    check(&patched, "another machine");
    patched = good;
    patched[16] = 1;
    check(&patched, "object file");
}

#[test]
fn files_that_are_none_are_named_as_firmware() {
    let mem = create(2).expect("memory");
    let check = |path: &Path, part: &str| {
        let request = FirmwareRequest {
            image: FirmwareImage::File(path.to_owned()),
            counters: Vec::new(),
            delay_ms: 0,
        };
        let error = load(&mem, &request, LINUX).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    };
    check(
        &PathBuf::from("absent.fw"),
        "cannot read firmware absent.fw",
    );
    check(&std::env::temp_dir(), "not a regular file");
}

#[test]
fn more_counters_than_there_is_room_for_are_refused() {
    let counter = CounterRequest {
        position: config::Position::Any,
        private: true,
        keep: false,
        yields: false,
        control: arbiter::Control::INITIAL,
        drop_value: 0,
        select: 0,
    };
    let request = |count: usize| FirmwareRequest {
        image: FirmwareImage::Builtin(&[]),
        counters: vec![counter; count],
        delay_ms: 0x1234,
    };
    let whole = configuration(&request(64), LINUX).expect("room");
    assert_eq!((whole.counters().len(), whole.delay_ms), (64, 0x1234));
    let error = configuration(&request(65), LINUX).expect_err("too many");
    assert!(error.to_string().contains("given 65 times, 64"), "{error}");
    let around = Surroundings { cpus: 65, ..LINUX };
    let error = configuration(&request(0), around).expect_err("too many");
    assert!(error.to_string().contains("give 1 to 64"), "{error}");
}

#[test]
fn firmwares_memory_is_reserved_in_every_map() {
    let mem = create(2).expect("memory");
    let map = regions(&mem, Conventional::Firmware).expect("a map");
    assert_eq!((map[0].start, map[0].len), (0, FIRMWARE_START));
    assert_eq!((map[1].start, map[1].kind.e820_type()), (FIRMWARE_START, 2));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Damaged images are an error or lie in firmware's own place.
    #[test]
    fn damaged_images_touch_nothing_else(
        is_elf: bool,
        damage in proptest::collection::vec((any::<Index>(), any::<u8>()), 1..16),
        cut: Index,
    ) {
        let mut bytes = if is_elf { elf().build() } else { flat(0x200) };
        for (index, byte) in damage {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(cut.index(bytes.len()) + 1);
        if let Ok((mem, state)) = load_bytes(&bytes, LINUX) {
            let end = layout::IMAGE + layout::IMAGE_SIZE;
            assert!((layout::IMAGE..end).contains(&state.rip));
            let word: u64 = mem.read_obj(GuestAddress(layout::IMAGE - 8)).expect("inside");
            assert_eq!(word, 0);
            let _ = area_of(&mem);
        }
    }
}
