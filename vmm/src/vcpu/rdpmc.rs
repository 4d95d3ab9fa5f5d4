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
    /// True if the guest has just taken the last debug register.
    pub(super) fn arm(
        &mut self,
        vcpu: &KvmVcpu,
        memory: &GuestMemoryMmap,
        debug: &mut DebugControl,
    ) -> Result<bool, VcpuError> {
        let sregs = vcpu.get_sregs()?;
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
        match self.is_wanted(debug) {
            // The guest's own debug registers are looked at often anyway.
            true => debug.refresh_stale(vcpu)?,
            false => {
                self.want(debug);
                debug.refresh_guest(vcpu)?;
            }
        }
        let full = debug.unplaced() > 0;
        let news = full && !self.told_full;
        self.told_full = full;
        Ok(news)
    }

    /// Asks for the one breakpoint of the watch.
    pub(super) fn want(&self, debug: &mut DebugControl) {
        match self.gate {
            Some(gate) => debug.want(&[gate.handler]),
            None => debug.want(&[]),
        }
    }

    fn is_wanted(&self, debug: &DebugControl) -> bool {
        let wanted = self.gate.map(|gate| gate.handler);
        debug.wanted() == wanted.as_slice()
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
        let (trap, handler) = self.gate.map_or((RdpmcTrap::Foreign, 0), |gate| {
            (inspect(&context, &gate), gate.handler)
        });
        let RdpmcTrap::Rdpmc(rdpmc) = trap else {
            debug.pass(vcpu, handler)?;
            return Ok(TrapEvent::ForeignGp);
        };
        let outcome = pmu.rdpmc(rdpmc.index, layer_of(rdpmc.ring));
        match completed(&context, &rdpmc, outcome) {
            Some(after) => finish(vcpu, debug, &after)?,
            // The index is wrong: the #GP is the right answer, and it has
            // already been raised.
            None => debug.pass(vcpu, handler)?,
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

fn finish(vcpu: &KvmVcpu, debug: &mut DebugControl, after: &Return) -> Result<(), VcpuError> {
    if let Some(sregs) = &after.sregs {
        vcpu.set_sregs(sregs)?;
    }
    vcpu.set_regs(&after.regs)?;
    if after.trap {
        debug.hand_back(vcpu, DR6_BS)?;
    }
    Ok(())
}
