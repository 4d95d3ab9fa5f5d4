//! The watch on the guest's #GP handler, through which RDPMC is emulated.

use arbiter::Layer;
use pmu_virt::{ReadOutcome, Ring, VcpuPmu};
use vm_memory::GuestMemoryMmap;

use super::debug::DebugControl;
use super::observe::TrapEvent;
use crate::kvm::{KvmVcpu, VcpuError};
use crate::trap::{CpuContext, DR6_BS, GP_VECTOR, Gate, Rdpmc, RdpmcTrap, Return, inspect};

/// Where the #GP handler of one vCPU is.
#[derive(Debug, Default)]
pub(super) struct GpWatch {
    gate: Option<Gate>,
    told_full: bool,
}

impl GpWatch {
    /// Finds the #GP handler through IDTR and asks for a breakpoint on it.
    /// True the first time that it finds the guest using all debug registers.
    pub(super) fn arm(
        &mut self,
        vcpu: &mut KvmVcpu,
        memory: &GuestMemoryMmap,
        debug: &mut DebugControl,
    ) -> Result<bool, VcpuError> {
        let sregs = vcpu.sregs_at_exit()?;
        let context = CpuContext {
            regs: &kvm_bindings::kvm_regs::default(),
            sregs: &sregs,
            memory,
        };
        let gate = context.gate(GP_VECTOR);
        if gate != self.gate {
            log::debug!("{}: #GP handler at {gate:x?}", vcpu.id());
            self.gate = gate;
        }
        self.want(debug);
        debug.refresh_guest(vcpu)?;
        let full = debug.unplaced() > 0;
        // Once: a guest that takes and leaves the last one in turn must not fill
        // the host's log.
        let news = full && !self.told_full;
        self.told_full |= full;
        Ok(news)
    }

    /// Asks for the one breakpoint of the watch.
    pub(super) fn want(&self, debug: &mut DebugControl) {
        match self.gate {
            Some(gate) => debug.want(&[gate.handler]),
            None => debug.want(&[]),
        }
    }

    /// The watched handler's gate.
    pub(super) fn gate(&self) -> Option<Gate> {
        self.gate
    }

    /// Deals with a stop at the #GP handler: a legal RDPMC is emulated and the
    /// frame popped, anything else goes on to the handler.
    pub(super) fn on_breakpoint(
        &self,
        vcpu: &KvmVcpu,
        memory: &GuestMemoryMmap,
        debug: &mut DebugControl,
        pmu: &mut VcpuPmu,
    ) -> Result<TrapEvent, VcpuError> {
        let (regs, sregs) = (vcpu.get_regs()?, vcpu.get_sregs()?);
        let context = CpuContext {
            regs: &regs,
            sregs: &sregs,
            memory,
        };
        let trap = self
            .gate
            .map_or(RdpmcTrap::Foreign, |gate| inspect(&context, &gate));
        let RdpmcTrap::Rdpmc(rdpmc) = trap else {
            debug.pass(vcpu)?;
            return Ok(TrapEvent::ForeignGp);
        };
        let outcome = pmu.rdpmc(rdpmc.index, layer_of(rdpmc.ring));
        match completed(&context, &rdpmc, outcome) {
            Some(after) if finish(vcpu, debug, &after)? => {}
            // The index is wrong, or there is nowhere to go back to: the #GP is
            // the right answer, and it has already been raised.
            _ => debug.pass(vcpu)?,
        }
        Ok(TrapEvent::Rdpmc {
            index: rdpmc.index,
            ring: rdpmc.ring,
            outcome,
        })
    }
}

/// The layer that a guest's ring is.
pub(super) fn layer_of(ring: Ring) -> Layer {
    match ring {
        Ring::Kernel => Layer::GuestKernel,
        Ring::User => Layer::GuestUser,
    }
}

/// The registers after an RDPMC that read a value: EDX:EAX is set, the upper
/// halves of RDX and RAX are cleared (SDM vol. 2, RDPMC).
fn completed(context: &CpuContext<'_>, rdpmc: &Rdpmc, outcome: ReadOutcome) -> Option<Return> {
    let ReadOutcome::Value(value) = outcome else {
        return None;
    };
    let mut after = rdpmc.frame.resume_at(context, rdpmc.next)?;
    after.regs.rax = value & 0xffff_ffff;
    after.regs.rdx = value >> 32;
    Some(after)
}

/// False if the guest has prepared segments that KVM does not take.
fn finish(vcpu: &KvmVcpu, debug: &mut DebugControl, after: &Return) -> Result<bool, VcpuError> {
    match after.sregs.as_ref().map(|sregs| vcpu.set_sregs(sregs)) {
        Some(Err(error)) if error.is_invalid() => return Ok(false),
        Some(result) => result?,
        None => {}
    }
    vcpu.set_regs(&after.regs)?;
    if after.trap {
        debug.hand_back(vcpu, DR6_BS)?;
    }
    Ok(true)
}
