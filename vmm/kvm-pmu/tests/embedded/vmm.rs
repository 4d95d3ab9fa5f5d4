//! A VMM that is not Umpire's, as `docs/guide/embedding.md` describes one. Its vCPUs run on the
//! thread of the test, one after the other.

use std::sync::Arc;

use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, eax, ecx, edx, r10, r11, rax, rdx};
use kvm_bindings::{
    KVM_CAP_SPLIT_IRQCHIP, KVM_CAP_X2APIC_API, KVM_MAX_CPUID_ENTRIES, KVM_MP_STATE_RUNNABLE,
    kvm_enable_cap, kvm_mp_state, kvm_regs, kvm_sregs,
};
use kvm_ioctls::{Kvm, VmFd};
use kvm_pmu::cpuid::{self, Leaves};
use kvm_pmu::{
    Answer, Armed, Entered, Exited, KvmPmu, KvmPmuError, KvmPmuParts, KvmVcpu, KvmVm, Lent,
    MsrFilter, SharedMemory, ThreadContext, TrapEvent, TrapMode, TrapObserver, TrapPlan,
    TwiceMapped, VcpuId, VmExit, VmTraps, install_kick_handler, msr_ranges, switch_off_vpmu,
    vcpu_fd, vm_fd,
};
use pmu_virt::{ClockBackend, CorePmu, Grant, OwnerId, PmuModel, PmuState, VcpuPmu};
use vm_memory::{Bytes, GuestAddress};

pub(crate) type Written = Result<(), IcedError>;

const MEMORY_SIZE: usize = 2 << 20;
const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PAGE_DIRECTORY: u64 = 0x3000;
pub(crate) const IDT: u64 = 0x4000;
pub(crate) const GDT: u64 = 0x6000;
const STACK: u64 = 0x9000;
pub(crate) const MAIN: u64 = 0x1_0000;
pub(crate) const HANDLER: u64 = 0x1_2000;

/// Ports on which a guest reports: what it read, that it is to be saved or otherwise
/// treated, that it has met a #GP, and its end.
pub(crate) const VALUE: u8 = 0x12;
pub(crate) const PAUSE: u8 = 0x13;
pub(crate) const END: u8 = 0x14;
pub(crate) const GP_TAKEN: u8 = 0x15;
/// A device's port, and its memory.
pub(crate) const DEVICE: u8 = 0x16;
pub(crate) const MMIO: u64 = 2 << 20;

pub(crate) const COUNTER: u32 = 0xc1;
pub(crate) const SELECT: u32 = 0x186;
pub(crate) const GLOBAL: u32 = 0x38f;
/// Enabled, of an event in no ring: the count stays as it is.
pub(crate) const ON: u32 = 0x0040_013c;
/// Reference cycles in all rings.
pub(crate) const CYCLES: u32 = 0x0043_013c;
pub(crate) const COUNT: u32 = 0x1234_5678;

/// A handler that is patched, and one that is not.
pub(crate) const ENDBR64: &[u8] = &[0xf3, 0x0f, 0x1e, 0xfa];
pub(crate) const PUSH: &[u8] = &[0x50];

/// One VM.
pub(crate) struct Vmm {
    // The VM goes before its memory.
    pub(crate) vm: VmFd,
    kvm: KvmVm,
    pub(crate) traps: Arc<VmTraps>,
    pub(crate) memory: TwiceMapped,
    cpuid: Leaves,
    model: PmuModel,
}

/// One vCPU with its PMU.
pub(crate) struct Vcpu {
    pub(crate) kvm: KvmVcpu,
    pub(crate) pmu: KvmPmu,
    pub(crate) thread: ThreadContext,
    pub(crate) seen: Seen,
    /// Times that `KVM_RUN` was interrupted.
    pub(crate) kicks: u32,
    /// What answers loads of port [`DEVICE`] and address [`MMIO`].
    pub(crate) device: fn(&Vmm),
}

/// How the #GP handler came to be watched.
#[derive(Debug, Default)]
pub(crate) struct Seen(pub(crate) Vec<Armed>);

impl TrapObserver for Seen {
    fn event(&mut self, _: VcpuId, event: TrapEvent) {
        if let TrapEvent::Armed(armed) = event {
            self.0.push(armed);
        }
    }
}

impl Vmm {
    /// The same in memory that the VMM has mapped itself, and `shared` again for KVM.
    pub(crate) fn in_shared(mut self, shared: Arc<SharedMemory>) -> Self {
        super::sys::share_memory(&self.vm, &self.memory, &shared, MEMORY_SIZE);
        self.traps = VmTraps::new(TrapPlan::default(), Some(shared));
        self
    }

    /// Without a guest yet.
    pub(crate) fn new(mode: TrapMode) -> Self {
        Self::with_chips(mode, |vm| vm.create_irq_chip().unwrap())
    }

    /// The same with local APICs alone, as many VMMs have it, and IDs of 32 bits.
    pub(crate) fn with_split_irqchip(mode: TrapMode) -> Self {
        Self::with_chips(mode, |vm| {
            for (cap, argument) in [(KVM_CAP_SPLIT_IRQCHIP, 24), (KVM_CAP_X2APIC_API, 1)] {
                let mut request = kvm_enable_cap {
                    cap,
                    ..Default::default()
                };
                request.args[0] = argument;
                vm.enable_cap(&request).unwrap();
            }
        })
    }

    fn with_chips(mode: TrapMode, make: impl FnOnce(&VmFd)) -> Self {
        let kvm = Kvm::new().unwrap();
        let vm = kvm.create_vm().unwrap();
        let memory = TwiceMapped::new(&[(GuestAddress(0), MEMORY_SIZE)]).unwrap();
        super::sys::set_memory(&vm, &memory, MEMORY_SIZE);
        let kvm_vm = KvmVm::new(vm_fd(&vm)).unwrap();
        switch_off_vpmu(&kvm_vm).unwrap();
        make(&vm);
        let model = PmuModel::parse("intel-v2").unwrap();
        let filter = MsrFilter::new(&msr_ranges(Some(&model))).unwrap();
        filter.install(&kvm_vm).unwrap();
        let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        let (leaves, _) = cpuid::merge(cpuid::from_kvm(supported.as_slice()), None, &[]);
        let plan = TrapPlan {
            mode,
            obstacle: None,
        };
        Self {
            traps: VmTraps::new(plan, Some(Arc::new(memory.clone()))),
            vm,
            kvm: kvm_vm,
            memory,
            cpuid: leaves,
            model,
        }
    }

    /// With 64-bit code at [`MAIN`] and a #GP handler that begins with `first`, reports, and
    /// stops.
    pub(crate) fn with(
        mode: TrapMode,
        first: &[u8],
        main: impl FnOnce(&mut CodeAssembler) -> Written,
    ) -> Self {
        Self::new(mode).loaded(first, main)
    }

    /// The same in this VM.
    pub(crate) fn loaded(
        self,
        first: &[u8],
        main: impl FnOnce(&mut CodeAssembler) -> Written,
    ) -> Self {
        let vmm = self;
        for (at, entry) in [
            (PML4, PDPT | 3),
            (PDPT, PAGE_DIRECTORY | 3),
            (PAGE_DIRECTORY, 1 << 7 | 3),
            (PAGE_DIRECTORY + 8, MMIO | 1 << 7 | 3),
            (GDT + 8, 0x00af_9b00_0000_ffff),
            // A 64-bit interrupt gate.
            (
                IDT + 16 * 13,
                HANDLER & 0xffff | 8 << 16 | 0x8e00 << 32 | (HANDLER >> 16) << 48,
            ),
        ] {
            vmm.put(at, &entry.to_le_bytes());
        }
        vmm.put(HANDLER, &[first, &[0xe7, GP_TAKEN, 0xf4]].concat());
        vmm.code(MAIN, 64, main);
        vmm
    }

    pub(crate) fn put(&self, at: u64, bytes: &[u8]) {
        let memory = self.memory.for_vmm();
        memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    /// Puts code at `at`.
    pub(crate) fn code(
        &self,
        at: u64,
        bitness: u32,
        write: impl FnOnce(&mut CodeAssembler) -> Written,
    ) {
        let mut a = CodeAssembler::new(bitness).unwrap();
        write(&mut a).unwrap();
        self.put(at, &a.assemble(at).unwrap());
    }

    /// The first byte of the handler, as the guest sees it.
    pub(crate) fn handler_byte(&self) -> u8 {
        let memory = self.memory.for_vmm();
        memory.read_obj(GuestAddress(HANDLER)).unwrap()
    }

    /// The PMU of vCPU `id`, on no core.
    pub(crate) fn pmu(&self, id: u32) -> VcpuPmu {
        VcpuPmu::detached(OwnerId(id), self.model.clone(), Grant::everything())
    }

    /// vCPU `id`; its PMU takes `state` in before the PMU is handed over.
    pub(crate) fn vcpu(&self, id: u32, state: Option<&PmuState>) -> Vcpu {
        install_kick_handler().unwrap();
        let fd = self.vm.create_vcpu(id.into()).unwrap();
        let kvm = KvmVcpu::new(vcpu_fd(&fd), &self.kvm, VcpuId(id)).unwrap();
        kvm.set_cpuid(&self.cpuid).unwrap();
        let tsc_khz = kvm.get_tsc_khz().unwrap();
        let mut logical = self.pmu(id);
        let mut counters = Box::new(CorePmu::new(Box::new(ClockBackend::new())));
        logical.attach(&mut counters);
        if let Some(state) = state {
            logical.restore(Some(&mut counters), state).unwrap();
        }
        let mut parts = KvmPmuParts::new(logical, tsc_khz);
        parts.traps = self.traps.clone();
        Vcpu {
            pmu: KvmPmu::new(&kvm, parts).unwrap(),
            kvm,
            thread: ThreadContext::new(tsc_khz)
                .unwrap()
                .with_counters(Some(counters)),
            seen: Seen::default(),
            kicks: 0,
            device: |_| {},
        }
    }

    /// The same at `rip` in 64-bit mode at CPL 0.
    pub(crate) fn started(&self, id: u32, rip: u64, state: Option<&PmuState>) -> Vcpu {
        let vcpu = self.vcpu(id, state);
        let mut sregs = vcpu.kvm.get_sregs().unwrap();
        (sregs.cs.base, sregs.cs.selector, sregs.cs.l) = (0, 8, 1);
        (sregs.gdt.base, sregs.gdt.limit) = (GDT, 0xf);
        (sregs.idt.base, sregs.idt.limit) = (IDT, 0xfff);
        (sregs.cr0, sregs.cr3, sregs.cr4) = (1 << 31 | 1 << 5 | 1, PML4, 1 << 5);
        sregs.efer = 1 << 10 | 1 << 8;
        let regs = kvm_regs {
            rip,
            rsp: STACK - 0x800 * u64::from(id % 4),
            rflags: 2,
            ..Default::default()
        };
        vcpu.set(&regs, &sregs);
        vcpu
    }
}

impl Vcpu {
    pub(crate) fn set(&self, regs: &kvm_regs, sregs: &kvm_sregs) {
        self.kvm.set_sregs(sregs).unwrap();
        self.kvm.set_regs(regs).unwrap();
        let mp_state = KVM_MP_STATE_RUNNABLE;
        self.kvm.set_mp_state(kvm_mp_state { mp_state }).unwrap();
    }

    /// Before a `KVM_RUN`.
    pub(crate) fn enter<'a>(&'a mut self, vmm: &'a Vmm) -> Result<Entered<'a>, KvmPmuError> {
        let lent = Lent {
            memory: vmm.memory.for_vmm(),
            thread: &mut self.thread,
            observer: &mut self.seen,
        };
        self.pmu.enter(&mut self.kvm, lent)
    }

    /// The loop, to the next report.
    pub(crate) fn run(&mut self, vmm: &Vmm) -> Result<(u8, u32), KvmPmuError> {
        loop {
            let exited = self.enter(vmm)?.run()?;
            self.kicks += u32::from(exited == Exited::Pmu(VmExit::Interrupted));
            match exited {
                Exited::Pmu(_) => {}
                Exited::Vmm(VmExit::IoOut { port, .. }) => {
                    let mut word = [0; 4];
                    let data = self.kvm.io_data();
                    word[..data.len()].copy_from_slice(data);
                    let port = u8::try_from(port).unwrap();
                    return Ok((port, u32::from_le_bytes(word)));
                }
                Exited::Vmm(VmExit::IoIn { .. }) => {
                    (self.device)(vmm);
                    self.kvm.io_data().fill(7);
                }
                Exited::Vmm(VmExit::MmioRead { .. }) => {
                    (self.device)(vmm);
                    self.kvm.answer(Answer::Mmio([7; 8]));
                }
                Exited::Vmm(other) => panic!("{other:?}, {:x?}", self.kvm.get_regs()),
            }
        }
    }

    /// What is reported up to the end, a #GP or a pause.
    pub(crate) fn reports(&mut self, vmm: &Vmm) -> Vec<(u8, u32)> {
        let mut reports = Vec::new();
        loop {
            let report = self.run(vmm).unwrap();
            reports.push(report);
            if [END, GP_TAKEN, PAUSE].contains(&report.0) {
                return reports;
            }
        }
    }

    /// Has KVM complete the last OUT, and leaves the thread: registers and the PMU may be
    /// read, saved and reset.
    pub(crate) fn leave(&mut self) {
        self.kvm.set_immediate_exit(true);
        assert_eq!(self.kvm.enter(), Ok(VmExit::Interrupted));
        self.kvm.set_immediate_exit(false);
        let thread = &mut self.thread;
        self.pmu.leave_thread(&mut self.kvm, thread).unwrap();
    }

    /// The state of its PMU, counts settled.
    pub(crate) fn save(&self) -> PmuState {
        self.pmu.pmu().unwrap().save().unwrap()
    }
}

pub(crate) fn wrmsr(a: &mut CodeAssembler, msr: u32, value: u32) -> Written {
    a.mov(ecx, msr)?;
    a.mov(eax, value)?;
    a.xor(edx, edx)?;
    a.wrmsr()
}

pub(crate) fn report(a: &mut CodeAssembler, port: u8) -> Written {
    a.out(u32::from(port), eax)
}

/// Counter 0 at [`COUNT`], and on.
pub(crate) fn enable(a: &mut CodeAssembler) -> Written {
    wrmsr(a, COUNTER, COUNT)?;
    wrmsr(a, SELECT, ON)?;
    wrmsr(a, GLOBAL, 1)
}

/// The same, and off again.
pub(crate) fn stopped(a: &mut CodeAssembler) -> Written {
    enable(a)?;
    wrmsr(a, GLOBAL, 0)?;
    wrmsr(a, SELECT, 0)
}

/// Reads counter 0 and reports it.
pub(crate) fn read(a: &mut CodeAssembler) -> Written {
    a.xor(ecx, ecx)?;
    a.rdpmc()?;
    report(a, VALUE)
}

/// Spins for `ticks` of the TSC, without an exit.
pub(crate) fn spin_for(a: &mut CodeAssembler, ticks: u64) -> Written {
    let tsc = |a: &mut CodeAssembler| -> Written {
        a.rdtsc()?;
        a.shl(rdx, 32)?;
        a.or(rax, rdx)
    };
    let mut again = a.create_label();
    tsc(a)?;
    a.mov(r10, rax)?;
    a.mov(r11, ticks)?;
    a.add(r10, r11)?;
    a.set_label(&mut again)?;
    tsc(a)?;
    a.cmp(rax, r10)?;
    a.jb(again)
}
