//! The watch on the guest's #GP handler, through which RDPMC is emulated.

use arbiter::Caller;
use kvm_bindings::kvm_sregs;
use pmu_virt::{CorePmu, ReadOutcome, VcpuPmu};

use crate::debug::DebugControl;
use crate::error::VcpuError;
use crate::memory::GuestBytes;
use crate::observe::TrapEvent;
use crate::registers::VcpuAccess;
use crate::sys::rdtsc;
use crate::trap::{CpuContext, DR6_BS, GP_VECTOR, Gate, Rdpmc, RdpmcTrap, Return, inspect};

/// Where the #GP handler of one vCPU is.
#[derive(Debug, Default)]
pub(crate) struct GpWatch {
    gate: Option<Gate>,
    found: Option<Found>,
    reported_full: bool,
}

/// How the gate was found. A look at 16 bytes then shows whether it has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    /// IDTR, CR0, CR3, CR4 and EFER.
    through: (u64, u16, [u64; 4]),
    /// Guest-physical address of the descriptor.
    at: u64,
    /// The descriptor.
    descriptor: [u8; 16],
    /// TSC at that time: page tables may change without a trace.
    tsc: u64,
}

impl Found {
    fn new(context: &CpuContext<'_>) -> Option<Self> {
        let size: u64 = if context.long_mode() { 16 } else { 8 };
        let linear = context
            .sregs
            .idt
            .base
            .wrapping_add(size * u64::from(GP_VECTOR));
        let at = context.physical(linear)?;
        Some(Self {
            through: Self::through(context.sregs),
            at,
            descriptor: Self::descriptor(context, at)?,
            tsc: rdtsc(),
        })
    }

    fn through(sregs: &kvm_sregs) -> (u64, u16, [u64; 4]) {
        let roots = [sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer];
        (sregs.idt.base, sregs.idt.limit, roots)
    }

    fn descriptor(context: &CpuContext<'_>, at: u64) -> Option<[u8; 16]> {
        context.memory.array(at)
    }

    fn still_holds(&self, context: &CpuContext<'_>, fresh_for: u64) -> bool {
        rdtsc().wrapping_sub(self.tsc) < fresh_for
            && self.through == Self::through(context.sregs)
            && Self::descriptor(context, self.at) == Some(self.descriptor)
    }
}

impl GpWatch {
    /// Finds the #GP handler through IDTR and asks for a breakpoint on it.
    /// True if the guest has just taken the last debug register.
    pub(crate) fn arm(
        &mut self,
        vcpu: VcpuAccess<'_>,
        memory: &dyn GuestBytes,
        debug: &mut DebugControl,
    ) -> Result<bool, VcpuError> {
        let sregs = vcpu.get_sregs()?;
        let context = CpuContext {
            regs: &kvm_bindings::kvm_regs::default(),
            sregs: &sregs,
            memory,
        };
        let fresh_for = debug.fresh_for();
        if self
            .found
            .is_some_and(|found| found.still_holds(&context, fresh_for))
            && self.is_wanted(debug)
        {
            debug.refresh_stale(vcpu)?;
            return Ok(self.is_news(debug));
        }
        let gate = context.gate(GP_VECTOR);
        self.found = Found::new(&context);
        if gate != self.gate {
            log::debug!("{}: #GP handler at {gate:x?}", vcpu.id());
            self.gate = gate;
        }
        if self.is_wanted(debug) {
            debug.refresh_stale(vcpu)?;
        } else {
            self.want(debug);
            debug.refresh_guest(vcpu)?;
        }
        Ok(self.is_news(debug))
    }

    /// True if the guest has just taken the last debug register.
    pub(crate) fn is_news(&mut self, debug: &DebugControl) -> bool {
        let full = debug.unplaced() > 0;
        // Always replaced: a guest that gives one back and takes it again is news again.
        let reported = std::mem::replace(&mut self.reported_full, full);
        full && !reported
    }

    /// Asks for the one breakpoint of the watch.
    pub(crate) fn want(&self, debug: &mut DebugControl) {
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
    pub(crate) fn gate(&self) -> Option<Gate> {
        self.gate
    }

    /// Deals with a stop at the #GP handler: a legal RDPMC is emulated and the
    /// frame popped, anything else goes on to the handler.
    pub(crate) fn on_breakpoint(
        &self,
        vcpu: VcpuAccess<'_>,
        memory: &dyn GuestBytes,
        debug: &mut DebugControl,
        (pmu, core): (&mut VcpuPmu, &mut CorePmu),
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
        let caller = Caller {
            layer: pmu.layer(rdpmc.ring, vcpu.in_smm()),
            presented: rdpmc.presented.0,
        };
        let outcome = pmu.rdpmc(core, rdpmc.index, caller);
        match completed(&context, &rdpmc, outcome) {
            Some(after) if finish(vcpu, debug, &after)? => {}
            // The index is wrong, or there is nowhere to go back to: the #GP is
            // the right answer, and it has already been raised.
            _ => debug.pass(vcpu, handler)?,
        }
        Ok(TrapEvent::Rdpmc {
            index: rdpmc.index,
            ring: rdpmc.ring,
            outcome,
        })
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
fn finish(
    vcpu: VcpuAccess<'_>,
    debug: &mut DebugControl,
    after: &Return,
) -> Result<bool, VcpuError> {
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
