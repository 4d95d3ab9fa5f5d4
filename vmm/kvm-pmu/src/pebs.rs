//! PEBS on KVM: registers of the stopped vCPU, and the guest memory that records go to.

use kvm_bindings::kvm_regs;
use pmu_virt::{CorePmu, LinearMemory, PebsMoment, PebsNeeds, VcpuPmu};

use crate::error::VcpuError;
use crate::memory::GuestBytes;
use crate::trap::{Implicit, RFLAGS_TF};
use crate::vcpu::VcpuAccess;

/// The instruction that a record is of, and what it left.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sampled {
    /// Where it is.
    pub(crate) rip: u64,
    /// Where it led.
    pub(crate) next: u64,
    /// RSP and RFLAGS behind it, where an event that was delivered since has changed them.
    pub(crate) interrupted: Option<(u64, u64)>,
    /// TF as the guest has it.
    pub(crate) tf: bool,
    /// Where it accessed memory, if it did and that is known.
    pub(crate) data_address: Option<u64>,
}

/// Writes the record that is due: of `sampled`, or where the instruction was not seen, of
/// the place where the guest stands. In SMM that is the firmware's, and the record waits.
#[cold]
pub(crate) fn write(
    vcpu: VcpuAccess<'_>,
    memory: &dyn GuestBytes,
    (pmu, core): (&mut VcpuPmu, &mut CorePmu),
    needs: PebsNeeds,
    sampled: Option<Sampled>,
) -> Result<(), VcpuError> {
    if vcpu.in_smm() {
        return Ok(());
    }
    let (regs, sregs) = (vcpu.get_regs()?, vcpu.get_sregs()?);
    let mut moment = PebsMoment {
        eventing_ip: regs.rip,
        flags: regs.rflags,
        ip: regs.rip,
        registers: general(&regs),
        tsc: vcpu.guest_tsc()?,
        ..PebsMoment::default()
    };
    if let Some(sampled) = sampled {
        (moment.eventing_ip, moment.ip) = (sampled.rip, sampled.next);
        moment.data_address = sampled.data_address.unwrap_or(0);
        if let Some((rsp, rflags)) = sampled.interrupted {
            moment.registers[4] = rsp;
            moment.flags = rflags;
        }
        moment.flags = moment.flags & !RFLAGS_TF | if sampled.tf { RFLAGS_TF } else { 0 };
    }
    if needs.xmm {
        moment.xmm = vcpu.get_fpu()?.xmm;
    }
    let linear = Implicit::new(memory, &sregs);
    pmu.write_pebs(core, &linear, &moment);
    Ok(())
}

/// In the processor's order.
pub(crate) fn general(regs: &kvm_regs) -> [u64; 16] {
    [
        regs.rax, regs.rcx, regs.rdx, regs.rbx, regs.rsp, regs.rbp, regs.rsi, regs.rdi, regs.r8,
        regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
    ]
}

impl LinearMemory for Implicit<'_> {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.read_all(address, bytes)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        self.write_all(address, bytes)
    }
}
