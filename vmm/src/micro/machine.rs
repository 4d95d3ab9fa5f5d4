//! A micro-guest's memory and vCPUs.

use std::sync::Arc;

use emu::State;
use kvm_bindings::{KVM_MP_STATE_RUNNABLE, kvm_mp_state, kvm_regs, kvm_segment, kvm_sregs};
use kvm_pmu::layout;
use pmu_virt::cpuid::hide_obstacles;
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::code::{CodeError, assemble};
use super::platform::UNEXPECTED_VECTOR_PORT;
use crate::emu::state_of;
use crate::kvm::{
    GuestRam, Host, HostError, KvmVcpu, KvmVm, SMM_ENTRY, VcpuError, VcpuId, VmError, VmOptions,
};

/// A micro-guest could not be made.
#[derive(Debug, Error)]
pub enum MicroError {
    /// Its code is wrong.
    #[error(transparent)]
    Code(#[from] CodeError),
    /// Its memory could not be had.
    #[error("guest memory: {0}")]
    Memory(String),
    /// KVM refused.
    #[error(transparent)]
    Host(#[from] HostError),
    /// KVM refused.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// KVM refused.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
}

/// Where and how one vCPU starts.
#[derive(Debug, Clone, Copy)]
pub struct Start {
    /// First instruction.
    pub rip: u64,
    /// 0 or 3.
    pub cpl: u8,
    /// CR4 bits besides PAE and OSFXSR.
    pub cr4: u64,
    /// RFLAGS bits besides the fixed one.
    pub rflags: u64,
    /// RDI, for the guest's use.
    pub rdi: u64,
}

impl Start {
    /// Starts at `rip` in ring `cpl` with interrupts off.
    #[must_use]
    pub fn at(rip: u64, cpl: u8) -> Self {
        Self {
            rip,
            cpl,
            cr4: 0,
            rflags: 0,
            rdi: 0,
        }
    }
}

/// Code, handlers and vCPUs of a micro-guest.
#[derive(Debug, Clone, Default)]
pub struct MicroGuest {
    code: Vec<(u64, Vec<u8>)>,
    handlers: Vec<(u8, u64)>,
    starts: Vec<Start>,
    lstar: Option<u64>,
    smm: Option<Vec<u8>>,
}

impl MicroGuest {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `bytes` at `address`.
    #[must_use]
    pub fn code(mut self, address: u64, bytes: Vec<u8>) -> Self {
        self.code.push((address, bytes));
        self
    }

    /// Points `vector` at `handler`; other vectors end the guest.
    #[must_use]
    pub fn handler(mut self, vector: u8, handler: u64) -> Self {
        self.handlers.push((vector, handler));
        self
    }

    /// Sets LSTAR (SYSCALL's target), STAR and FMASK (clears TF and IF).
    #[must_use]
    pub fn lstar(mut self, handler: u64) -> Self {
        self.lstar = Some(handler);
        self
    }

    /// 16-bit code that an SMI leads to, where KVM has system management mode.
    #[must_use]
    pub fn smm(mut self, code: Vec<u8>) -> Self {
        self.smm = Some(code);
        self
    }

    /// Adds a vCPU.
    #[must_use]
    pub fn start(mut self, start: Start) -> Self {
        self.starts.push(start);
        self
    }

    /// Number of its vCPUs.
    pub(super) fn vcpus(&self) -> usize {
        self.starts.len()
    }

    /// Makes the VM and its vCPUs, registers set.
    ///
    /// # Errors
    /// [`MicroError`] names what failed.
    pub fn build(
        &self,
        host: &Host,
        options: &VmOptions,
    ) -> Result<(Arc<KvmVm>, Vec<KvmVcpu>), MicroError> {
        let memory = self.memory(options.trap.may_patch())?;
        let vm = Arc::new(KvmVm::new(host, memory, options)?);
        if let (Some(code), Some(smram)) = (&self.smm, vm.smram()) {
            smram
                .write_slice(code, GuestAddress(SMM_ENTRY))
                .map_err(|error| MicroError::Memory(error.to_string()))?;
        }
        let mut vcpus = Vec::new();
        let mut leaves = host.supported_cpuid()?;
        // Nothing is kept.
        let _ = hide_obstacles(&mut leaves, &[]);
        for (id, start) in (0..).zip(&self.starts) {
            let vcpu = vm.create_vcpu(VcpuId(id))?;
            vcpu.set_cpuid(&leaves)?;
            self.set_registers(&vcpu, start, options.irqchip)?;
            vcpus.push(vcpu);
        }
        Ok((vm, vcpus))
    }

    /// Memory and registers of its vCPUs, for processors in software.
    ///
    /// # Errors
    /// [`MicroError`] names what failed.
    pub(crate) fn emulated(&self) -> Result<(GuestMemoryMmap, Vec<State>), MicroError> {
        let memory = self.memory(false)?.for_vmm().clone();
        let reset = kvm_sregs {
            ldt: kvm_segment {
                unusable: 1,
                ..Default::default()
            },
            ..Default::default()
        };
        let states = (0..).zip(&self.starts).map(|(id, start)| {
            let (regs, sregs) = registers(start, id, &reset);
            let mut state = state_of(&regs, &sregs);
            if let Some(lstar) = self.lstar {
                state.msrs.star = STAR_SELECTORS;
                state.msrs.lstar = lstar;
                state.msrs.sfmask = SYSCALL_MASK;
            }
            state
        });
        Ok((memory, states.collect()))
    }

    fn memory(&self, twice: bool) -> Result<GuestRam, MicroError> {
        let ranges = [(GuestAddress(0), layout::MEMORY_SIZE)];
        let ram =
            GuestRam::new(&ranges, twice).map_err(|error| MicroError::Memory(error.to_string()))?;
        let memory = ram.for_vmm();
        let vcpus = u8::try_from(self.starts.len()).unwrap_or(u8::MAX);
        layout::write_tables(memory, vcpus);
        for vector in 0..=u8::MAX {
            let stub = layout::STUBS + u64::from(vector) * layout::STUB_SIZE;
            memory
                .write_slice(&unexpected(vector)?, GuestAddress(stub))
                .map_err(|error| MicroError::Memory(error.to_string()))?;
            layout::write_gate(memory, vector, stub);
        }
        for &(vector, handler) in &self.handlers {
            layout::write_gate(memory, vector, handler);
        }
        for (address, bytes) in &self.code {
            memory
                .write_slice(bytes, GuestAddress(*address))
                .map_err(|error| MicroError::Memory(error.to_string()))?;
        }
        Ok(ram)
    }

    fn set_registers(
        &self,
        vcpu: &KvmVcpu,
        start: &Start,
        irqchip: bool,
    ) -> Result<(), MicroError> {
        const STAR: u32 = 0xc000_0081;
        const LSTAR: u32 = 0xc000_0082;
        const FMASK: u32 = 0xc000_0084;
        let id = vcpu.id().0;
        let (regs, sregs) = registers(start, id, &vcpu.get_sregs()?);
        vcpu.set_sregs(&sregs)?;
        vcpu.set_regs(&regs)?;
        if let Some(lstar) = self.lstar {
            vcpu.write_msr(STAR, STAR_SELECTORS)?;
            vcpu.write_msr(LSTAR, lstar)?;
            vcpu.write_msr(FMASK, SYSCALL_MASK)?;
        }
        if irqchip && id > 0 {
            // Only the boot processor runs at once; here all do.
            vcpu.set_mp_state(kvm_mp_state {
                mp_state: KVM_MP_STATE_RUNNABLE,
            })?;
        }
        Ok(())
    }
}

/// STAR: SYSRET loads CS from bits 63:48 plus 16 and SS plus 8.
const STAR_SELECTORS: u64 =
    ((layout::KERNEL_SS | 3) as u64) << 48 | (layout::KERNEL_CS as u64) << 32;
/// FMASK: TF and IF.
const SYSCALL_MASK: u64 = 0x300;

/// Registers of vCPU `id` where it starts; the rest is as after a reset.
fn registers(start: &Start, id: u32, reset: &kvm_sregs) -> (kvm_regs, kvm_sregs) {
    const RFLAGS_FIXED: u64 = 2;
    let mut sregs = layout::special_registers(reset, id, start.cpl);
    sregs.cr4 |= start.cr4;
    let rsp = match start.cpl {
        3 => layout::user_stack(id),
        _ => layout::kernel_stack(id),
    };
    let regs = kvm_regs {
        rip: start.rip,
        rsp,
        rflags: start.rflags | RFLAGS_FIXED,
        rdi: start.rdi,
        ..Default::default()
    };
    (regs, sregs)
}

/// Reports `vector` and ends the guest.
fn unexpected(vector: u8) -> Result<Vec<u8>, CodeError> {
    use iced_x86::code_asm::{dx, eax};
    assemble(layout::STUBS + u64::from(vector) * layout::STUB_SIZE, |a| {
        a.mov(eax, u32::from(vector))?;
        a.mov(dx, u32::from(UNEXPECTED_VECTOR_PORT))?;
        a.out(dx, eax)?;
        a.hlt()
    })
}
