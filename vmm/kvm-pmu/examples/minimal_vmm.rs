//! A VMM of its own on kvm-ioctls and vm-memory, whose one vCPU has a virtual PMU.
//!
//! It owns its VM, its memory, its MSR filter and its `KVM_RUN` loop; kvm-pmu gives
//! it the rest. The guest counts reference cycles, takes the PMI of an overflow as
//! an NMI, and reads its counter by RDPMC. Each step that a VMM takes for the PMU is
//! marked with its number in `docs/guide/embedding.md`.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, byte_ptr, eax, ecx, edx};
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VmFd};
use kvm_pmu::{
    Answer, Exited, KvmPmu, KvmPmuParts, KvmVcpu, KvmVm, Lent, MsrDefault, MsrFilter, MsrRange,
    PmiRoute, ThreadContext, TrapEvent, TrapObserver, TrapPlan, TwiceMapped, VcpuId, VmExit,
    VmTraps, cpuid, install_kick_handler, msr_ranges, switch_off_vpmu, vcpu_fd, vm_fd,
};
use pmu_virt::{ClockBackend, CorePmu, CounterBackend as _, Grant, OwnerId, PmuModel, VcpuPmu};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

type Failure = Box<dyn Error>;

/// Where things lie in the guest's memory.
const MEMORY_SIZE: usize = 2 << 20;
const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PAGE_DIRECTORY: u64 = 0x3000;
const IDT: u64 = 0x4000;
const GDT: u64 = 0x6000;
const STACK: u64 = 0x9000;
const MAIN: u64 = 0x1_0000;
const NMI_HANDLER: u64 = 0x1_1000;
const GP_HANDLER: u64 = 0x1_2000;
/// The NMI's handler sets this byte.
const NMI_TAKEN: u64 = 0x8000;

/// Ports on which the guest reports: this VMM's MSR, the overflow status, two
/// RDPMCs, the end.
const OWN_MSR_READ: u8 = 0x10;
const STATUS: u8 = 0x11;
const FIRST_COUNT: u8 = 0x12;
const SECOND_COUNT: u8 = 0x13;
const END: u8 = 0x14;

/// An MSR of this VMM's own, which exits beside those of the PMU.
const OWN_MSR: u32 = 0x5000_0000;
const OWN_VALUE: u32 = 0xcafe;
/// Reference cycles (event 0x3c, umask 1) in all rings, with a PMI.
const SELECT: u32 = 0x0053_013c;
/// The count at which it starts, 2^20 cycles below an overflow.
const START: u32 = 0xfff0_0000;

/// What the run brought to light.
#[derive(Debug, Default)]
struct Seen {
    /// What the guest wrote to each port.
    reports: BTreeMap<u8, u32>,
    pmis: u32,
    rdpmcs: u32,
}

impl TrapObserver for Seen {
    fn event(&mut self, _: VcpuId, event: TrapEvent) {
        match event {
            TrapEvent::Pmi { delivery, .. } if delivery.route == PmiRoute::Nmi => self.pmis += 1,
            TrapEvent::Rdpmc { .. } => self.rdpmcs += 1,
            _ => {}
        }
    }
}

fn main() -> Result<(), Failure> {
    std::thread::spawn(|| {
        std::thread::sleep(Duration::from_secs(20));
        eprintln!("the guest did not end");
        std::process::exit(1);
    });
    let seen = run()?;
    println!("{seen:x?}");
    let report = |port| seen.reports.get(&port).copied().unwrap_or(0);
    let (first, second) = (report(FIRST_COUNT), report(SECOND_COUNT));
    let counted = 0 < first && first < second && seen.rdpmcs == 2;
    let overflowed = report(STATUS) == 1 && seen.pmis > 0;
    if !(counted && overflowed && report(OWN_MSR_READ) == OWN_VALUE) {
        return Err("something is missing".into());
    }
    println!("a PMI at the overflow; {first}, then {second} cycles by RDPMC");
    Ok(())
}

fn run() -> Result<Seen, Failure> {
    let kvm = Kvm::new()?;
    let vm = kvm.create_vm()?;
    let memory = guest_memory(&vm)?;
    // Step 1: KVM's own vPMU goes, before vCPUs exist; the irqchip is KVM's.
    let kvm_vm = KvmVm::new(vm_fd(&vm))?;
    switch_off_vpmu(&kvm_vm)?;
    vm.create_irq_chip()?;
    // Step 2: one filter for both.
    let model = PmuModel::parse("intel-v2")?;
    let own = [MsrRange::denied(OWN_MSR, 1)];
    let filter = MsrFilter::beside(&msr_ranges(Some(&model)), MsrDefault::Allow, &own)?;
    filter.install(&kvm_vm)?;
    let mut vcpu = KvmVcpu::new(vcpu_fd(&vm.create_vcpu(0)?), &kvm_vm, VcpuId(0))?;
    // Step 3: CPUID tells of the PMU.
    let backend = Box::new(ClockBackend::new());
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
    let (leaves, _) = cpuid::merge(
        cpuid::from_kvm(supported.as_slice()),
        Some(&model.cpuid(|request| backend.plan(request).is_ok())),
        &[],
    );
    vcpu.set_cpuid(&leaves)?;
    start_at_main(&vcpu)?;
    // Step 4: the PMU.
    let tsc_khz = vcpu.get_tsc_khz()?;
    let mut logical = VcpuPmu::detached(OwnerId(0), model, Grant::everything());
    let mut counters = Box::new(CorePmu::new(backend));
    logical.attach(&mut counters);
    let mut parts = KvmPmuParts::new(logical, tsc_khz);
    parts.traps = VmTraps::new(TrapPlan::default(), Some(Arc::new(memory.clone())));
    let mut pmu = KvmPmu::new(&vcpu, parts)?;
    // Step 5: the thread, which lends its counters.
    install_kick_handler()?;
    let mut thread = ThreadContext::new(tsc_khz)?.with_counters(Some(counters));
    let mut seen = Seen::default();
    // Step 6: every entry and its exit.
    let mut own_msr = 0;
    loop {
        let lent = Lent {
            memory: memory.for_vmm(),
            thread: &mut thread,
            observer: &mut seen,
        };
        // An error that no kick explains ends the loop here.
        let exit = match pmu.enter(&mut vcpu, lent)?.run()? {
            Exited::Pmu(_) => continue,
            Exited::Vmm(exit) => exit,
        };
        // Counts are settled: what devices take is not the guest's time.
        match exit {
            // The filter lets nothing but our own MSR out beside those of the PMU.
            VmExit::Rdmsr { .. } => vcpu.answer(Answer::Msr(own_msr)),
            VmExit::Wrmsr { value, .. } => {
                own_msr = value;
                vcpu.answer(Answer::Done);
            }
            VmExit::IoOut { port, .. } => {
                let port = u8::try_from(port)?;
                if port == END {
                    return Ok(seen);
                }
                let bytes = vcpu.io_data().iter().rev();
                let value = bytes.fold(0, |value, byte| value << 8 | u32::from(*byte));
                seen.reports.insert(port, value);
            }
            other => return Err(format!("unexpected exit: {other:?}").into()),
        }
    }
}

/// Memory with the guest's code, one page of 2 MiB, and gates for NMI and #GP. It is
/// mapped twice, so that the #GP handler can be patched, and logged as for a migration.
#[allow(unsafe_code, reason = "kvm-ioctls has no safe call for memory slots")]
fn guest_memory(vm: &VmFd) -> Result<TwiceMapped, Failure> {
    let mapped = TwiceMapped::new(&[(GuestAddress(0), MEMORY_SIZE)])?;
    let slot = kvm_userspace_memory_region {
        flags: kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES,
        memory_size: MEMORY_SIZE as u64,
        userspace_addr: mapped.for_kvm().get_host_address(GuestAddress(0))? as u64,
        ..Default::default()
    };
    // SAFETY: the caller keeps the memory mapped for as long as it uses the VM.
    unsafe { vm.set_user_memory_region(slot)? };
    let memory = mapped.for_vmm();
    let word = |at: u64, value: u64| memory.write_obj(value, GuestAddress(at));
    word(PML4, PDPT | 3)?;
    word(PDPT, PAGE_DIRECTORY | 3)?;
    word(PAGE_DIRECTORY, 1 << 7 | 3)?;
    word(GDT + 8, 0x00af_9b00_0000_ffff)?; // selector 8: 64-bit code
    for (vector, handler) in [(2, NMI_HANDLER), (13, GP_HANDLER)] {
        // A 64-bit interrupt gate of DPL 0 to selector 8; handlers lie below 2^32.
        let gate = handler & 0xffff | 8 << 16 | 0x8e00 << 32 | (handler >> 16) << 48;
        word(IDT + 16 * vector, gate)?;
    }
    memory.write_slice(&main_code()?, GuestAddress(MAIN))?;
    memory.write_slice(&nmi_code()?, GuestAddress(NMI_HANDLER))?;
    // ENDBR64, which is patched. No #GP gets behind it but one that no RDPMC raised:
    // OUT END, EAX.
    let handler = [0xf3, 0x0f, 0x1e, 0xfa, 0xe7, END];
    memory.write_slice(&handler, GuestAddress(GP_HANDLER))?;
    Ok(mapped)
}

fn wrmsr(a: &mut CodeAssembler, msr: u32, value: u32) -> Result<(), IcedError> {
    a.mov(ecx, msr)?;
    a.mov(eax, value)?;
    a.xor(edx, edx)?;
    a.wrmsr()
}

/// Reads an MSR and reports it.
fn rdmsr(a: &mut CodeAssembler, msr: u32, port: u8) -> Result<(), IcedError> {
    a.mov(ecx, msr)?;
    a.rdmsr()?;
    a.out(u32::from(port), eax)
}

fn main_code() -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    wrmsr(&mut a, OWN_MSR, OWN_VALUE)?;
    rdmsr(&mut a, OWN_MSR, OWN_MSR_READ)?;
    // The local APIC on, and PMIs as NMIs: SVR and LVTPC in x2APIC mode.
    wrmsr(&mut a, 0x80f, 0x1ff)?;
    wrmsr(&mut a, 0x834, 0x400)?;
    // IA32_PMC0, IA32_PERFEVTSEL0, IA32_PERF_GLOBAL_CTRL.
    wrmsr(&mut a, 0xc1, START)?;
    wrmsr(&mut a, 0x186, SELECT)?;
    wrmsr(&mut a, 0x38f, 1)?;
    let mut wait = a.create_label();
    a.set_label(&mut wait)?;
    a.cmp(byte_ptr(NMI_TAKEN), 0)?;
    a.je(wait)?;
    for port in [FIRST_COUNT, SECOND_COUNT] {
        a.xor(ecx, ecx)?;
        a.rdpmc()?;
        a.out(u32::from(port), eax)?;
    }
    a.out(u32::from(END), eax)?;
    a.assemble(MAIN)
}

/// Main waits meanwhile, and has nothing in registers.
fn nmi_code() -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    // IA32_PERF_GLOBAL_STATUS says which counter it was, _OVF_CTRL clears it.
    rdmsr(&mut a, 0x38e, STATUS)?;
    wrmsr(&mut a, 0x390, 1)?;
    a.mov(byte_ptr(NMI_TAKEN), 1)?;
    a.iretq()?;
    a.assemble(NMI_HANDLER)
}

/// 64-bit mode at CPL 0, with the local APIC in x2APIC mode.
fn start_at_main(vcpu: &KvmVcpu) -> Result<(), Failure> {
    let mut sregs = vcpu.get_sregs()?;
    (sregs.cs.base, sregs.cs.selector, sregs.cs.l) = (0, 8, 1);
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, 0xf);
    (sregs.idt.base, sregs.idt.limit) = (IDT, 0xfff);
    (sregs.cr0, sregs.cr3, sregs.cr4) = (1 << 31 | 1 << 5 | 1, PML4, 1 << 5);
    sregs.efer = 1 << 10 | 1 << 8;
    sregs.apic_base |= 1 << 10;
    vcpu.set_sregs(&sregs)?;
    vcpu.set_regs(&kvm_regs {
        rip: MAIN,
        rsp: STACK,
        rflags: 2,
        ..Default::default()
    })?;
    Ok(())
}
