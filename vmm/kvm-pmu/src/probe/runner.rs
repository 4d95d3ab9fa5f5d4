//! Runs one probe guest, never for longer than a second.

use std::os::fd::AsFd as _;
use std::time::Duration;

use guest_exit::VmExit;
use kvm_bindings::{KVM_GUESTDBG_ENABLE, kvm_guest_debug, kvm_regs};
use pmu_virt::cpuid::hide_obstacles;

use super::{Host, ProbeError};
use crate::cpuid;
use crate::error::VcpuId;
use crate::layout;
use crate::memory::GuestBytes as _;
use crate::sys::{BareVm, KickTimer, SharedMemory, check_kicks, install_kick_handler, ioctl};
use crate::vcpu::KvmVcpu;
use crate::vm::{KvmVm, switch_off_vpmu};

const PATIENCE: Duration = Duration::from_secs(1);

/// Ends a probe that meets a vector which it does not handle: OUT 0xE0, EAX; HLT.
const END: [u8; 3] = [0xe7, 0xe0, 0xf4];
/// So that CPL 3 may use its report ports; and the bit that is always 1.
const RFLAGS: u64 = 0x3000 | 2;

/// Where an SMI leads, in 16-bit code (SDM vol. 3C, 34.4 "SMRAM"). The probe's guest has the same
/// memory in and out of that mode.
pub(super) const SMM_ENTRY: u64 = 0x3_8000;

/// What a probe's guest executes, on a machine in 64-bit mode.
pub(super) struct Code {
    cpl: u8,
    start: u64,
    pieces: Vec<(u64, Vec<u8>)>,
    handlers: Vec<(u8, u64)>,
}

impl Code {
    /// Nothing yet. It will start at CPL `cpl`.
    pub(super) fn new(cpl: u8) -> Self {
        Self {
            cpl,
            start: 0,
            pieces: Vec::new(),
            handlers: Vec::new(),
        }
    }

    /// With code at `base`; it starts at the first that it is given.
    pub(super) fn at(mut self, base: u64, code: &[&[u8]]) -> Self {
        if self.pieces.is_empty() {
            self.start = base;
        }
        self.pieces.push((base, code.concat()));
        self
    }

    /// With a handler of `vector` at `base`.
    pub(super) fn handler(mut self, vector: u8, base: u64, code: &[&[u8]]) -> Self {
        self.handlers.push((vector, base));
        self.at(base, code)
    }

    /// Puts all of it into `memory`, with tables.
    fn load(&self, memory: &SharedMemory) {
        layout::write_tables(memory, 1);
        for vector in 0..=u8::MAX {
            let stub = layout::STUBS + u64::from(vector) * layout::STUB_SIZE;
            memory.write(stub, &END);
            layout::write_gate(memory, vector, stub);
        }
        for &(vector, handler) in &self.handlers {
            layout::write_gate(memory, vector, handler);
        }
        for (base, bytes) in &self.pieces {
            memory.write(*base, bytes);
        }
    }
}

/// A probe guest with one vCPU.
pub(super) struct Probe {
    // Goes before the VM, of which it has a duplicate.
    vcpu: KvmVcpu,
    vm: BareVm,
}

impl Probe {
    /// Whatever KVM makes of `code`, a kick ends it: where none would come to this thread there is
    /// no guest.
    pub(super) fn new(host: &Host<'_>, code: &Code) -> Result<Self, ProbeError> {
        install_kick_handler().map_err(ProbeError::Kicks)?;
        check_kicks()?;
        let vm = BareVm::new(host.kvm(), layout::MEMORY_SIZE, host.has_smm())?;
        code.load(vm.memory());
        let pmu_vm = KvmVm::new(&vm)?;
        switch_off_vpmu(&pmu_vm)?;
        let fd = ioctl::create_vcpu(vm.as_fd(), 0);
        let fd = fd.map_err(|error| ProbeError::Ioctl("KVM_CREATE_VCPU", error))?;
        let vcpu = KvmVcpu::new(fd, &pmu_vm, VcpuId(0))?;
        let supported = ioctl::supported_cpuid(host.kvm());
        let supported =
            supported.map_err(|error| ProbeError::Ioctl("KVM_GET_SUPPORTED_CPUID", error))?;
        let mut leaves = cpuid::from_kvm(&supported);
        // Nothing is kept.
        let _ = hide_obstacles(&mut leaves, &[]);
        vcpu.set_cpuid(&leaves)?;
        let reset = vcpu.get_sregs()?;
        vcpu.set_sregs(&layout::special_registers(&reset, 0, code.cpl))?;
        let rsp = match code.cpl {
            3 => layout::user_stack(0),
            _ => layout::kernel_stack(0),
        };
        vcpu.set_regs(&kvm_regs {
            rip: code.start,
            rsp,
            rflags: RFLAGS,
            ..Default::default()
        })?;
        Ok(Self { vcpu, vm })
    }

    pub(super) fn vcpu(&self) -> &KvmVcpu {
        &self.vcpu
    }

    /// Its memory.
    pub(super) fn memory(&self) -> &SharedMemory {
        self.vm.memory()
    }

    /// Has KVM complete what the last exit was about, without entering the guest.
    pub(super) fn complete(&mut self) -> Result<(), ProbeError> {
        let vcpu = &mut self.vcpu;
        vcpu.set_immediate_exit(true);
        vcpu.run()?;
        vcpu.set_immediate_exit(false);
        Ok(())
    }

    /// Whether the last exit was from system management mode.
    pub(super) fn in_smm(&self) -> bool {
        self.vcpu().in_smm()
    }

    /// The bytes of the IN or OUT that was the last exit.
    pub(super) fn io_data(&mut self) -> &[u8] {
        self.vcpu.io_data()
    }

    /// Asks for guest debugging; false if KVM refuses.
    pub(super) fn debug(&self, control: u32, dr0: u64, dr7: u64) -> bool {
        let mut request = kvm_guest_debug {
            control: control | KVM_GUESTDBG_ENABLE,
            ..Default::default()
        };
        request.arch.debugreg[0] = dr0;
        request.arch.debugreg[7] = dr7;
        self.vcpu().set_guest_debug(&request).is_ok()
    }

    /// Runs to the next exit; a probe that hangs ends in
    /// [`VmExit::Interrupted`].
    pub(super) fn run(&mut self) -> Result<VmExit, ProbeError> {
        let timer = KickTimer::for_this_thread().map_err(ProbeError::Kicks)?;
        timer.arm(PATIENCE);
        let vcpu = &mut self.vcpu;
        let exit = vcpu.with_kicks(KvmVcpu::run)?;
        drop(timer);
        vcpu.set_immediate_exit(false);
        Ok(exit)
    }
}
