//! A Linux at its 64-bit entry point. Source: the kernel's `Documentation/arch/x86/boot.rst`.

use std::fs::File;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_pmu::KvmVcpu;
use linux_loader::bootparam::{boot_e820_entry, boot_params};
use linux_loader::configurator::linux::LinuxBootConfigurator;
use linux_loader::configurator::{BootConfigurator as _, BootParams};
use linux_loader::loader::bzimage::BzImage;
use linux_loader::loader::{Cmdline, KernelLoader as _, load_cmdline};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::{acpi, memory};

const GDT: u64 = 0x500;
const ZERO_PAGE: u64 = 0x7000;
const PML4: u64 = 0x9000;
const PDPT: u64 = 0xa000;
const DIRECTORY: u64 = 0xb000;
const STACK: u64 = 0x1_0000;
const COMMAND_LINE: u64 = 0x2_0000;
const LOW_END: u64 = 0x9_fc00;
const HIGH: u64 = 0x10_0000;
const LARGE_PAGE: u64 = 2 << 20;
/// From the first byte of what was loaded.
const ENTRY: u64 = 0x200;
const RAM: u32 = 1;

/// What is booted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel<'a> {
    pub(crate) kernel: &'a Path,
    pub(crate) initrd: &'a Path,
    pub(crate) command_line: &'a str,
}

impl Kernel<'_> {
    /// Loads it for so many processors, and has the first of them, `vcpu`, begin there.
    pub(crate) fn load(&self, memory: &GuestMemoryMmap, vcpu: &KvmVcpu, cpus: u8) -> Result<()> {
        let said = || format!("the kernel, {}", self.kernel.display());
        let mut image = File::open(self.kernel).with_context(said)?;
        let high = Some(GuestAddress(HIGH));
        let loaded = BzImage::load(memory, None, &mut image, high).with_context(said)?;
        let header = loaded
            .setup_header
            .context("the kernel has no setup header")?;
        let mut line = Cmdline::new(0x1000)?;
        line.insert_str(self.command_line)?;
        load_cmdline(memory, GuestAddress(COMMAND_LINE), &line)?;
        let mut page = boot_params {
            hdr: header,
            acpi_rsdp_addr: acpi::ROOT,
            ..Default::default()
        };
        page.hdr.type_of_loader = 0xff;
        page.hdr.cmd_line_ptr = u32::try_from(COMMAND_LINE)?;
        (page.hdr.ramdisk_image, page.hdr.ramdisk_size) = self.load_initrd(memory)?;
        let ranges = [(0, LOW_END), (HIGH, memory::SIZE)];
        for ((start, end), entry) in ranges.iter().zip(&mut page.e820_table) {
            *entry = boot_e820_entry {
                addr: *start,
                size: end - start,
                r#type: RAM,
            };
        }
        page.e820_entries = 2;
        let page = BootParams::new(&page, GuestAddress(ZERO_PAGE));
        LinuxBootConfigurator::write_bootparams(&page, memory)?;
        acpi::write(memory, cpus)?;
        begin(memory, vcpu, loaded.kernel_load.0 + ENTRY)
    }

    /// At the end of the memory.
    fn load_initrd(&self, memory: &GuestMemoryMmap) -> Result<(u32, u32)> {
        let said = || format!("the initrd, {}", self.initrd.display());
        let mut file = File::open(self.initrd).with_context(said)?;
        let len = file.metadata().with_context(said)?.len();
        ensure!(
            len < memory::SIZE / 2,
            "{}: {len} bytes are too many for a guest with {}",
            said(),
            memory::SIZE
        );
        let start = (memory::SIZE - len) & !0xfff;
        let at = GuestAddress(start);
        let loaded = memory.read_exact_volatile_from(at, &mut file, usize::try_from(len)?);
        loaded.with_context(said)?;
        Ok((u32::try_from(start)?, u32::try_from(len)?))
    }
}

/// 64-bit mode at CPL 0 with the first GiB mapped to itself.
fn begin(memory: &GuestMemoryMmap, vcpu: &KvmVcpu, entry: u64) -> Result<()> {
    let word = |at: u64, value: u64| memory.write_obj(value, GuestAddress(at));
    word(PML4, PDPT | 3)?;
    word(PDPT, DIRECTORY | 3)?;
    for page in 0..512 {
        word(DIRECTORY + 8 * page, (page * LARGE_PAGE) | (1 << 7) | 3)?;
    }
    // Selectors 0x10 and 0x18, as the kernel wants them: code of 64 bits, and data.
    word(GDT + 0x10, 0x00af_9b00_0000_ffff)?;
    word(GDT + 0x18, 0x00cf_9300_0000_ffff)?;
    let mut sregs = vcpu.get_sregs()?;
    let data = kvm_segment {
        limit: u32::MAX,
        selector: 0x18,
        type_: 3,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    sregs.cs = kvm_segment {
        selector: 0x10,
        type_: 0xb,
        db: 0,
        l: 1,
        ..data
    };
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, 0x1f);
    (sregs.cr0, sregs.cr3, sregs.cr4) = (1 << 31 | 1 << 5 | 1, PML4, 1 << 5);
    sregs.efer = 1 << 10 | 1 << 8;
    vcpu.set_sregs(&sregs)?;
    vcpu.set_regs(&kvm_regs {
        rip: entry,
        rsi: ZERO_PAGE,
        rsp: STACK,
        rflags: 2,
        ..Default::default()
    })?;
    Ok(())
}
