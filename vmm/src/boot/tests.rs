use std::path::{Path, PathBuf};

use proptest::prelude::{ProptestConfig, any, proptest};
use proptest::sample::Index;
use tempfile::{NamedTempFile, TempDir};
use vm_memory::{Bytes, GuestAddress};

use super::memory::{CMDLINE_START, create};
use super::testing::{BzImageBuilder, ElfBuilder, FORMATS, compress, multiboot_header, note};
use super::*;

const LOAD: u64 = 16 * MIB;

fn vmlinux() -> ElfBuilder {
    ElfBuilder::elf64()
        .entry(LOAD)
        .segment(LOAD, &[0x90; 4096], 8192)
}

fn pvh_kernel() -> ElfBuilder {
    let entry = u32::try_from(LOAD + 16).expect("low");
    vmlinux().notes(&note(b"Xen\0", 18, &entry.to_le_bytes()))
}

fn multiboot_kernel() -> ElfBuilder {
    let mut code = multiboot_header(3);
    code.resize(0x100, 0x90);
    ElfBuilder::elf32()
        .entry(MIB + 12)
        .segment(MIB, &code, 0x200)
}

fn bzimage(compression: Compression) -> Vec<u8> {
    let vmlinux = vmlinux().build();
    let mut payload = compress(compression, &vmlinux);
    if compression != Compression::Gzip {
        payload.extend(u32::try_from(vmlinux.len()).expect("short").to_le_bytes());
    }
    BzImageBuilder::new(&payload).build()
}

fn request(kernel: &Path) -> BootRequest {
    BootRequest {
        kernel: kernel.to_owned(),
        initrd: None,
        cmdline: "console=ttyS0".into(),
        modules: Vec::new(),
        cpus: 2,
        unpack: Unpack::Never,
        pm_timer: false,
        virtio: None,
        rng_seed: None,
        firmware: None,
    }
}

/// Files of one test; they vanish with it.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("folder"))
    }

    fn add(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, content).expect("written");
        path
    }
}

/// Loads into 32 MiB; the error's text must contain `expected`, or the description must.
fn check(
    request: &BootRequest,
    expected: Result<&str, &str>,
) -> Option<(GuestMemory, LoadedGuest)> {
    let mem = create(32).expect("memory");
    match (load(&mem, request), expected) {
        (Ok(guest), Ok(part)) => {
            assert!(guest.describe().contains(part), "{}", guest.describe());
            Some((mem, guest))
        }
        (Err(error), Err(part)) => {
            assert!(error.to_string().contains(part), "{error}");
            None
        }
        (result, expected) => panic!("{result:?}, expected {expected:?}"),
    }
}

fn string_at(mem: &GuestMemory, address: u64) -> String {
    let mut bytes = vec![0; 256];
    mem.read_slice(&mut bytes, GuestAddress(address))
        .expect("inside");
    let end = bytes
        .iter()
        .position(|&byte| byte == 0)
        .expect("terminated");
    String::from_utf8(bytes[..end].to_vec()).expect("text")
}

#[test]
fn every_kind_is_loaded_and_entered_its_own_way() {
    let files = Files::new();
    let kernel = |content: Vec<u8>| files.add("kernel", &content);
    let (_, guest) = check(
        &request(&kernel(vmlinux().build())),
        Ok("Linux 64-bit entry at 0x1000000, kernel at 0x1000000-0x1002000"),
    )
    .expect("loaded");
    assert_eq!(
        guest.entry,
        BootEntry::Linux64 {
            rip: LOAD,
            zero_page: ZERO_PAGE_START
        }
    );
    assert_eq!(guest.state, InitialState::linux64(LOAD, ZERO_PAGE_START));

    let (_, guest) = check(
        &request(&kernel(pvh_kernel().build())),
        Ok("PVH entry at 0x1000010"),
    )
    .expect("loaded");
    assert_eq!(guest.state, InitialState::pvh(LOAD + 16, BOOT_INFO_START));

    let (mem, guest) = check(
        &request(&kernel(multiboot_kernel().build())),
        Ok("Multiboot entry at 0x10000c"),
    )
    .expect("loaded");
    assert_eq!(
        guest.state,
        InitialState::multiboot(MIB + 12, BOOT_INFO_START, 0x2bad_b002)
    );
    assert_eq!(string_at(&mem, CMDLINE_START), "kernel console=ttyS0");

    let (mem, guest) = check(
        &request(&kernel(bzimage(Compression::Gzip))),
        Ok("entry at 0x1000200"),
    )
    .expect("loaded");
    assert_eq!(
        guest.entry,
        BootEntry::Linux64 {
            rip: LOAD + 0x200,
            zero_page: ZERO_PAGE_START
        }
    );
    assert_eq!(string_at(&mem, CMDLINE_START), "console=ttyS0");
    assert_eq!(string_at(&mem, acpi::RSDP_ADDRESS)[..8], *"RSD PTR ");
}

#[test]
fn a_bzimage_of_every_compression_is_unpacked() {
    let files = Files::new();
    for format in FORMATS {
        let kernel = files.add("kernel", &bzimage(format));
        for unpack in [Unpack::Always, Unpack::Auto { slow_cpl0: true }] {
            let request = BootRequest {
                unpack,
                ..request(&kernel)
            };
            let (mem, guest) = check(
                &request,
                Ok(&format!("unpacked on the host from {format} to")),
            )
            .expect("loaded");
            assert_eq!(guest.state.rip, LOAD);
            let header: u32 = mem
                .read_obj(GuestAddress(ZERO_PAGE_START + 0x202))
                .expect("inside");
            assert_eq!(header.to_le_bytes(), *b"HdrS");
        }
        let fast = Unpack::Auto { slow_cpl0: false };
        check(
            &BootRequest {
                unpack: fast,
                ..request(&kernel)
            },
            Ok("entry at 0x1000200"),
        );
    }
}

#[test]
fn payloads_that_cannot_be_used_are_named() {
    let files = Files::new();
    let check = |payload: &[u8], part: &str| {
        let kernel = files.add("kernel", &BzImageBuilder::new(payload).build());
        check(
            &BootRequest {
                unpack: Unpack::Always,
                ..request(&kernel)
            },
            Err(part),
        );
    };
    check(b"\x89LZO\0", "no compression known here");
    check(b"\x1f\x8b\x08\0", "its gzip payload is damaged");
    check(&compress(Compression::Gzip, b"no ELF"), "not an ELF file");
    check(
        &compress(Compression::Xz, &vec![0; 33 << 20]),
        "more than 33554432 bytes",
    );
    let small = ElfBuilder::elf32().segment(LOAD, b"code", 4).build();
    check(&compress(Compression::Lz4, &small), "32-bit kernel");
}

#[test]
fn initrd_and_modules_go_to_the_kernels_that_take_them() {
    let files = Files::new();
    let initrd = Some(files.add("initrd", &[1; 5000]));
    let module = ModuleRequest {
        path: files.add("module", &[2; 5000]),
        cmdline: "x=y".into(),
    };
    let linux = request(&files.add("vmlinux", &vmlinux().build()));
    let pvh = request(&files.add("pvh", &pvh_kernel().build()));
    let multiboot = request(&files.add("multiboot", &multiboot_kernel().build()));
    let bzimage = request(&files.add("bzimage", &bzimage(Compression::Zstd)));
    for linux in [&linux, &pvh, &bzimage] {
        let (mem, _) = check(
            &BootRequest {
                initrd: initrd.clone(),
                ..linux.clone()
            },
            Ok("initrd at 0x1ffe000-0x1fff388"),
        )
        .expect("loaded");
        assert_eq!(
            mem.read_obj::<u8>(GuestAddress(0x1ff_f387))
                .expect("inside"),
            1
        );
        check(
            &BootRequest {
                modules: vec![module.clone()],
                ..linux.clone()
            },
            Err("is not a Multiboot kernel"),
        );
    }
    check(
        &BootRequest {
            initrd,
            ..multiboot.clone()
        },
        Err("give it with --module"),
    );
    let modules = vec![module.clone(), module.clone()];
    check(
        &BootRequest {
            modules,
            ..multiboot.clone()
        },
        Ok(", 2 modules"),
    );
    let modules = vec![module; 257];
    check(
        &BootRequest {
            modules,
            ..multiboot
        },
        Err("257 modules were given, 256"),
    );
}

#[test]
fn bad_requests_name_what_to_do() {
    let files = Files::new();
    let kernel = files.add("kernel", &vmlinux().build());
    let good = request(&kernel);
    let elf = |builder: ElfBuilder| request(&files.add("other", &builder.build()));
    check(
        &BootRequest {
            cpus: 0,
            ..good.clone()
        },
        Err("give 1 to 64"),
    );
    check(
        &BootRequest {
            cpus: 65,
            ..good.clone()
        },
        Err("give 1 to 64"),
    );
    check(
        &BootRequest {
            cmdline: "x".repeat(2048),
            ..good.clone()
        },
        Err("this kernel takes 2047"),
    );
    check(
        &BootRequest {
            cmdline: "x\0".into(),
            ..good.clone()
        },
        Err("NUL byte"),
    );
    check(
        &request(Path::new("/nonexistent")),
        Err("cannot read kernel /nonexistent"),
    );
    check(&request(files.0.path()), Err("not a regular file"));
    check(
        &BootRequest {
            initrd: Some("/nonexistent".into()),
            ..good
        },
        Err("cannot read initrd /nonexistent"),
    );
    check(&elf(vmlinux().entry(0)), Err("entry point lies outside"));
    check(
        &elf(vmlinux().segment(40 * MIB, b"", 1)),
        Err("give --memory 41 or more"),
    );
    check(
        &elf(ElfBuilder::elf32().segment(MIB, b"code", 4)),
        Err("neither a Multiboot header nor a PVH note"),
    );
    let note = note(b"Xen\0", 18, &[0xff; 4]);
    check(
        &elf(vmlinux().notes(&note)),
        Err("entry point lies outside"),
    );
}

/// The images that the properties below damage.
fn images() -> Vec<Vec<u8>> {
    let mut flat = multiboot_header(1 << 16);
    for word in [0x10_0000u32, 0x10_0000, 0, 0, 0x10_0004] {
        flat.extend(word.to_le_bytes());
    }
    let mut images = vec![
        vmlinux().build(),
        pvh_kernel().build(),
        multiboot_kernel().build(),
        flat,
    ];
    images.extend(FORMATS.map(bzimage));
    images
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    #[test]
    fn damaged_images_never_panic_or_touch_what_is_not_theirs(
        image in any::<Index>(),
        damage in proptest::collection::vec((0usize..0x300, any::<u8>()), 0..6),
        cut in proptest::option::of(any::<Index>()),
        unpack in any::<bool>(),
    ) {
        let images = images();
        let mut bytes = image.get(&images).clone();
        for (offset, value) in damage {
            if let Some(byte) = bytes.get_mut(offset) {
                *byte = value;
            }
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let file = NamedTempFile::new().expect("file");
        std::fs::write(file.path(), &bytes).expect("written");
        let unpack = if unpack { Unpack::Always } else { Unpack::Never };
        let mem = create(24).expect("memory");
        match load(&mem, &BootRequest { unpack, ..request(file.path()) }) {
            Ok(guest) => assert!((MIB..24 * MIB).contains(&guest.state.rip)),
            Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
        }
        let mut low = vec![0; 0x9_0000 - 0x4_0000];
        mem.read_slice(&mut low, GuestAddress(0x4_0000)).expect("inside");
        assert!(low.iter().all(|&byte| byte == 0), "free conventional memory was written");
    }
}
