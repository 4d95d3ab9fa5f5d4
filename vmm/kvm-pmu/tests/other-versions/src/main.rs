//! A VMM with other versions of kvm-ioctls, kvm-bindings and vm-memory than kvm-pmu has, and none
//! of its features, nor of pmu-virt's. Its guest counts, and reads the counter by RDPMC before and
//! after a device. Another copy of kvm-pmu in the same process, with statics of its own, has the
//! same signal.

#[cfg(feature = "ioctls-0-22")]
use {bindings_12 as kvm_bindings, ioctls_22 as kvm_ioctls};
#[cfg(feature = "ioctls-0-24")]
use {bindings_14 as kvm_bindings, ioctls_24 as kvm_ioctls};

mod sys;

use std::error::Error;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2, kvm_regs};
use kvm_ioctls::{Kvm, VcpuFd};
use kvm_pmu::cpuid::{self, CpuidRegs, Leaf, Leaves};
use kvm_pmu::{
    Armed, Errno, Exited, GuestBytes, KickTarget, KvmPmu, KvmPmuParts, KvmVcpu, KvmVm, Lent, MsrFilter,
    SharedMemory, ThreadContext, TrapEvent, TrapObserver, TrapPlan, VcpuId, VmExit, VmTraps,
    install_kick_handler, msr_ranges, switch_off_vpmu,
};
use pmu_virt::{ClockBackend, CorePmu, CounterBackend as _, Grant, OwnerId, PmuModel, VcpuPmu};
use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryMmap};

type Failure = Box<dyn Error>;

const SIZE: usize = 2 << 20;
const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PAGE_DIRECTORY: u64 = 0x3000;
const IDT: u64 = 0x4000;
const GDT: u64 = 0x6000;
const STACK: u64 = 0x9000;
const MAIN: u64 = 0x1_0000;
const GP_HANDLER: u64 = 0x1_2000;

const VALUE: u8 = 0x12;
const DEVICE: u8 = 0x13;
const END: u8 = 0x14;
/// Where the counter starts. It counts reference cycles in all rings.
const COUNT: u32 = 0x1234_5678;

/// This VMM's memory, with its own vm-memory.
struct Memory(GuestMemoryMmap);

impl GuestBytes for Memory {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.0.read_slice(buffer, GuestAddress(address)).is_ok()
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        self.0.write_slice(bytes, GuestAddress(address)).is_ok()
    }
}

/// How the #GP handler came to be watched.
#[derive(Debug, Default)]
struct Seen(Vec<Armed>);

impl TrapObserver for Seen {
    fn event(&mut self, _: VcpuId, event: TrapEvent) {
        if let TrapEvent::Armed(armed) = event {
            self.0.push(armed);
        }
    }
}

fn main() -> Result<(), Failure> {
    let kvm = Kvm::new()?;
    let vm = kvm.create_vm()?;
    let (memory, file) = guest_memory()?;
    let shared = Arc::new(SharedMemory::new(|_, _| ()));
    let slot = shared.add((0, SIZE), (file.as_fd(), 0))?;
    sys::set_memory(&vm, slot, SIZE as u64)?;
    let pmu_vm = KvmVm::new(sys::vm_fd(&vm))?;
    switch_off_vpmu(&pmu_vm)?;
    vm.create_irq_chip()?;
    let model = PmuModel::parse("intel-v2")?;
    MsrFilter::new(&msr_ranges(Some(&model)))?.install(&pmu_vm)?;
    let mut fd = vm.create_vcpu(0)?;
    start_at_main(&fd)?;
    let mut vcpu = KvmVcpu::new(sys::vcpu_fd(&fd), &pmu_vm, VcpuId(0))?;
    let backend = Box::new(ClockBackend::new());
    let pmu_leaves = model.cpuid(|request| backend.plan(request).is_ok());
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
    let supported = leaves_of(supported.as_slice());
    let (leaves, _) = cpuid::merge(supported, Some(&pmu_leaves), &[]);
    vcpu.set_cpuid(&leaves)?;
    let tsc_khz = vcpu.get_tsc_khz()?;
    let mut logical = VcpuPmu::detached(OwnerId(0), model, Grant::everything());
    let mut counters = Box::new(CorePmu::new(backend));
    logical.attach(&mut counters);
    let mut parts = KvmPmuParts::new(logical, tsc_khz);
    parts.traps = VmTraps::new(TrapPlan::default(), Some(shared));
    let mut pmu = KvmPmu::new(&vcpu, parts)?;
    install_kick_handler()?;
    // The last one has the signal.
    kvm_pmu_copy::install_kick_handler()?;
    let mut thread = ThreadContext::new(tsc_khz)?.with_counters(Some(counters));
    let mut seen = Seen::default();
    let mut values = Vec::new();
    let mut kicked = false;
    loop {
        let lent = Lent {
            memory: &memory,
            thread: &mut thread,
            observer: &mut seen,
        };
        let entered = pmu.enter(&mut vcpu, lent)?;
        if !kicked {
            KickTarget::current().kick();
        }
        // Entered by this VMM's own means.
        let ran = fd.run().map(drop).map_err(|error| Errno(error.errno()));
        let exited = entered.after_exit(ran)?;
        if !kicked && exited != Exited::Pmu(VmExit::Interrupted) {
            return Err(format!("a kick before KVM_RUN is lost: {exited:?}").into());
        }
        kicked = true;
        match exited {
            Exited::Pmu(_) => {}
            Exited::Vmm(VmExit::IoIn { .. }) => vcpu.io_data().fill(7),
            Exited::Vmm(VmExit::IoOut { port, .. }) => {
                let word = vcpu.io_data().first_chunk().copied().unwrap_or_default();
                if port == u16::from(END) {
                    break;
                }
                values.push(u32::from_le_bytes(word));
            }
            Exited::Vmm(other) => return Err(format!("unexpected exit: {other:?}").into()),
        }
    }
    println!("{values:x?} {:?}", seen.0);
    is_right(&values, &seen)?;
    both_copies_are_kicked(tsc_khz)?;
    println!("counted and read");
    Ok(())
}

fn is_right(values: &[u32], seen: &Seen) -> Result<(), Failure> {
    let &[before, 0x0707_0707, after] = values else {
        return Err("a report is missing".into());
    };
    if before <= COUNT || after <= before {
        return Err(format!("nothing was counted from {COUNT:#x} on").into());
    }
    if seen.0 != [Armed::Patch] {
        return Err("the handler was not patched".into());
    }
    Ok(())
}

/// Whichever copy installs its handler once more, as a VMM may with each vCPU.
fn both_copies_are_kicked(tsc_khz: u32) -> Result<(), Failure> {
    for first in [true, false, true] {
        if first {
            install_kick_handler()?;
        } else {
            kvm_pmu_copy::install_kick_handler()?;
        }
        ThreadContext::new(tsc_khz)?;
        kvm_pmu_copy::ThreadContext::new(tsc_khz)?;
    }
    Ok(())
}

/// From this VMM's kvm-bindings.
fn leaves_of(entries: &[kvm_cpuid_entry2]) -> Leaves {
    let leaf = |entry: &kvm_cpuid_entry2| Leaf {
        leaf: entry.function,
        // KVM_CPUID_FLAG_SIGNIFCANT_INDEX.
        subleaf: (entry.flags & 1 != 0).then_some(entry.index),
        regs: CpuidRegs {
            eax: entry.eax,
            ebx: entry.ebx,
            ecx: entry.ecx,
            edx: entry.edx,
        },
    };
    entries.iter().map(leaf).collect()
}

/// WRMSR of a value of 32 bits.
fn wrmsr(msr: u32, value: u32) -> Vec<u8> {
    let (msr, value) = (msr.to_le_bytes(), value.to_le_bytes());
    // MOV ECX; MOV EAX; XOR EDX, EDX; WRMSR.
    [&[0xb9], &msr[..], &[0xb8], &value, &[0x31, 0xd2, 0x0f, 0x30]].concat()
}

/// Shared, so that the handler can be patched: a file without a name.
fn guest_memory() -> Result<(Memory, Arc<File>), Failure> {
    let path = std::env::temp_dir().join(format!("other-versions-{}", std::process::id()));
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)?;
    std::fs::remove_file(&path)?;
    file.set_len(SIZE as u64)?;
    let file = Arc::new(file);
    let from = FileOffset::from_arc(file.clone(), 0);
    let memory = GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0), SIZE, Some(from))])?;
    let gate = GP_HANDLER & 0xffff | 8 << 16 | 0x8e00 << 32 | (GP_HANDLER >> 16) << 48;
    for (at, word) in [
        (PML4, PDPT | 3),
        (PDPT, PAGE_DIRECTORY | 3),
        (PAGE_DIRECTORY, 1 << 7 | 3),
        (GDT + 8, 0x00af_9b00_0000_ffff),
        (IDT + 16 * 13, gate),
    ] {
        memory.write_obj(word, GuestAddress(at))?;
    }
    // MOV ECX, 1000; LOOP there: something to count. XOR ECX, ECX; RDPMC; OUT VALUE, EAX.
    let read = [
        &[0xb9, 0xe8, 0x03, 0, 0, 0xe2, 0xfe][..],
        &[0x31, 0xc9, 0x0f, 0x33, 0xe7, VALUE],
    ]
    .concat();
    let main = [
        &wrmsr(0xc1, COUNT)[..],
        &wrmsr(0x186, 0x0043_013c),
        &wrmsr(0x38f, 1),
        &read,
        // IN EAX, DEVICE; OUT VALUE, EAX.
        &[0xe5, DEVICE, 0xe7, VALUE],
        &read,
        &[0xe7, END],
    ];
    memory.write_slice(&main.concat(), GuestAddress(MAIN))?;
    // ENDBR64; OUT END, EAX.
    let handler = [0xf3, 0x0f, 0x1e, 0xfa, 0xe7, END];
    memory.write_slice(&handler, GuestAddress(GP_HANDLER))?;
    Ok((Memory(memory), file))
}

/// 64-bit mode at CPL 0.
fn start_at_main(vcpu: &VcpuFd) -> Result<(), Failure> {
    let mut sregs = vcpu.get_sregs()?;
    (sregs.cs.base, sregs.cs.selector, sregs.cs.l) = (0, 8, 1);
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, 0xf);
    (sregs.idt.base, sregs.idt.limit) = (IDT, 0xfff);
    (sregs.cr0, sregs.cr3, sregs.cr4) = (1 << 31 | 1 << 5 | 1, PML4, 1 << 5);
    sregs.efer = 1 << 10 | 1 << 8;
    vcpu.set_sregs(&sregs)?;
    vcpu.set_regs(&kvm_regs {
        rip: MAIN,
        rsp: STACK,
        rflags: 2,
        ..Default::default()
    })?;
    Ok(())
}
