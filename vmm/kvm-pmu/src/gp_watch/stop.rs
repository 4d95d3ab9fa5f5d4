//! Stops at the #GP handler: an RDPMC is emulated, anything else goes on to the handler.

use arbiter::Caller;
use kvm_bindings::{kvm_regs, kvm_sregs};
use pmu_virt::{CorePmu, ReadOutcome, VcpuPmu};

use super::GpWatch;
use crate::error::VcpuError;
use crate::memory::GuestBytes;
use crate::observe::TrapEvent;
use crate::trap::{
    CpuContext, Displaced, GP_VECTOR, Gate, GateKind, LONGEST, OUT_SIZE, RFLAGS_TF, Rdpmc,
    RdpmcTrap, Return, inspect,
};
use crate::vcpu::KvmVcpu;

/// How a vCPU goes on that stopped at its #GP handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Onward {
    /// With the registers that it has now.
    Run,
    /// Likewise, with a #DB for its own single step.
    Trap,
    /// Into the handler, on whose first instruction at this linear address a breakpoint
    /// of ours stands.
    Handler(u64),
}

/// A vCPU that stopped at the OUT in its #GP handler.
#[derive(Debug)]
pub(crate) struct OutStop {
    regs: kvm_regs,
    sregs: kvm_sregs,
    gate: Gate,
    displaced: Displaced,
    /// RIP of the OUT.
    ip: u64,
}

impl GpWatch {
    /// Deals with a stop at the #GP handler: a legal RDPMC is emulated and the
    /// frame popped, anything else goes on to the handler.
    pub(crate) fn on_breakpoint(
        &self,
        vcpu: &KvmVcpu,
        memory: &dyn GuestBytes,
        pmu: (&mut VcpuPmu, &mut CorePmu),
    ) -> Result<(TrapEvent, Onward), VcpuError> {
        let (regs, sregs) = (vcpu.get_regs()?, vcpu.get_sregs()?);
        let context = CpuContext {
            regs: &regs,
            sregs: &sregs,
            memory,
        };
        let Some(gate) = self.gate else {
            return Ok((TrapEvent::ForeignGp, Onward::Run));
        };
        let (event, after) = emulate(&context, &gate, vcpu.in_smm(), pmu);
        let resumed = after.map(|after| resume(vcpu, &after)).transpose()?;
        // Else the index is wrong, or there is nowhere to go back to: the #GP is
        // the right answer, and it has already been raised.
        let onward = resumed.flatten().unwrap_or(Onward::Handler(gate.handler));
        Ok((event, onward))
    }

    /// Whether an OUT to `port` was the one that stands in the vCPU's #GP handler.
    ///
    /// It is known by its linear address, and whether RIP stands at it or behind it
    /// depends on the KVM. A patch that this VM knows nothing of, as from a
    /// hibernation image, is known by the bytes that remain; so is one that was taken
    /// back after the guest met it.
    #[inline(never)]
    pub(crate) fn at_out(
        &self,
        vcpu: &KvmVcpu,
        memory: &dyn GuestBytes,
        port: u16,
    ) -> Result<Option<OutStop>, VcpuError> {
        if !Displaced::is_port(port) || vcpu.in_smm() {
            return Ok(None);
        }
        let (regs, sregs) = (vcpu.get_regs()?, vcpu.get_sregs()?);
        let context = CpuContext {
            regs: &regs,
            sregs: &sregs,
            memory,
        };
        if context.cpl() != 0 {
            return Ok(None);
        }
        let places = [regs.rip, regs.rip.wrapping_sub(OUT_SIZE)];
        let stop_at = |gate: Gate| {
            let at_handler = |&ip: &u64| context.code_at(ip) == gate.handler;
            places.into_iter().find(at_handler).map(|ip| (gate, ip))
        };
        let known = self.gate.and_then(stop_at);
        let found = known.or_else(|| context.gate(GP_VECTOR).and_then(stop_at));
        // In other code the bytes behind an OUT are instructions of their own.
        let found = found.filter(|(gate, _)| gate.kind == GateKind::Bits64);
        let Some((gate, ip)) = found else {
            return Ok(None);
        };
        let displaced = self.displaced.filter(|_| known.is_some()).or_else(|| {
            let mut bytes = [0; LONGEST];
            context.read_linear(gate.handler, &mut bytes);
            Displaced::behind_out(bytes).or(Displaced::of(bytes))
        });
        let displaced = displaced.filter(|displaced| u16::from(displaced.port) == port);
        Ok(displaced.map(|displaced| OutStop {
            regs,
            sregs,
            gate,
            displaced,
            ip,
        }))
    }

    /// Deals with a stop at the OUT: a legal RDPMC is emulated and the frame popped,
    /// otherwise, and for a vCPU without a PMU, the handler goes on behind the
    /// instruction that the OUT stands in for. A KVM that stops at the OUT moves RIP
    /// behind it at the next entry if RIP is there still, so it never is.
    pub(crate) fn on_out(
        vcpu: &KvmVcpu,
        memory: &dyn GuestBytes,
        stop: OutStop,
        pmu: Option<(&mut VcpuPmu, &mut CorePmu)>,
    ) -> Result<(TrapEvent, Onward), VcpuError> {
        let context = CpuContext {
            regs: &stop.regs,
            sregs: &stop.sregs,
            memory,
        };
        let (event, after) = match pmu {
            Some(pmu) => emulate(&context, &stop.gate, false, pmu),
            None => (TrapEvent::ForeignGp, None),
        };
        // An RDPMC right before the handler goes on into it.
        let after = after.map(|mut after| {
            if after.regs.rip == stop.ip {
                stop.displaced.execute(&mut after.regs, stop.ip);
            }
            after
        });
        let resumed = after.map(|after| resume(vcpu, &after)).transpose()?;
        if let Some(onward) = resumed.flatten() {
            return Ok((event, onward));
        }
        let mut regs = stop.regs;
        stop.displaced.execute(&mut regs, stop.ip);
        vcpu.set_regs(&regs)?;
        let stepped = regs.rflags & RFLAGS_TF != 0;
        let onward = if stepped { Onward::Trap } else { Onward::Run };
        Ok((event, onward))
    }
}

/// What a stop at the #GP handler behind `gate` is, and the registers after an RDPMC
/// that read a value.
fn emulate(
    context: &CpuContext<'_>,
    gate: &Gate,
    smm: bool,
    (pmu, core): (&mut VcpuPmu, &mut CorePmu),
) -> (TrapEvent, Option<Return>) {
    let RdpmcTrap::Rdpmc(rdpmc) = inspect(context, gate) else {
        return (TrapEvent::ForeignGp, None);
    };
    let caller = Caller {
        layer: pmu.claims().layer(rdpmc.ring, smm),
        presented: rdpmc.presented.0,
    };
    let outcome = pmu.rdpmc(core, rdpmc.index, caller);
    let event = TrapEvent::Rdpmc {
        index: rdpmc.index,
        ring: rdpmc.ring,
        outcome,
    };
    (event, completed(context, &rdpmc, outcome))
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

/// Has the vCPU go on behind the RDPMC; `None` if the guest has prepared segments that KVM
/// does not take.
fn resume(vcpu: &KvmVcpu, after: &Return) -> Result<Option<Onward>, VcpuError> {
    match after.sregs.as_ref().map(|sregs| vcpu.set_sregs(sregs)) {
        Some(Err(error)) if error.is_invalid() => return Ok(None),
        Some(result) => result?,
        None => {}
    }
    vcpu.set_regs(&after.regs)?;
    Ok(Some(if after.trap {
        Onward::Trap
    } else {
        Onward::Run
    }))
}
