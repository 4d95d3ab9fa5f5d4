//! Drives the stepper on a KVM vCPU.

use instruction_facts::InstructionInfoFactory;
use kvm_bindings::{kvm_lapic_state, kvm_regs, kvm_sregs, kvm_vcpu_events};
use pmu_virt::{CorePmu, LossReason, Progress, Retirement, Ring, VcpuPmu};

use crate::debug::DebugControl;
use crate::error::VcpuError;
use crate::memory::GuestBytes;
use crate::moment::{Before, Stepped, StoppedVcpu};
use crate::trap::{
    CpuContext, Executed, RFLAGS_IF, RFLAGS_TF, StepInputs, StepResult, StepStop, Stepper,
    TfRepair, cpl,
};
use crate::vcpu::KvmVcpu;

const SYSENTER_EIP: u32 = 0x176;
const STAR: u32 = 0xc000_0081;
const LSTAR: u32 = 0xc000_0082;
const CSTAR: u32 = 0xc000_0083;
const SFMASK: u32 = 0xc000_0084;
const NMI_VECTOR: u8 = 2;

const APIC_PPR: usize = 0xa0;
const APIC_IRR: usize = 0x200;

/// What the host can step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepSupport {
    /// Steps and breakpoints work at CPL 3.
    pub user: bool,
    /// Interrupts can be held back during a step.
    pub hold_irqs: bool,
    /// The trap behind an instruction that KVM does not emulate is lost, such as a
    /// fence's: it comes behind the next instruction.
    pub loses_traps: bool,
}

impl StepSupport {
    /// Everything works.
    pub const FULL: StepSupport = StepSupport {
        user: true,
        hold_irqs: true,
        loses_traps: false,
    };
}

/// A stopped vCPU.
struct Stopped<'a> {
    regs: kvm_regs,
    sregs: kvm_sregs,
    memory: &'a dyn GuestBytes,
}

impl<'a> Stopped<'a> {
    fn read(kvm: &KvmVcpu, memory: &'a dyn GuestBytes) -> Result<Self, VcpuError> {
        Ok(Self {
            regs: kvm.get_regs()?,
            sregs: kvm.get_sregs()?,
            memory,
        })
    }

    fn context(&self) -> CpuContext<'_> {
        CpuContext {
            regs: &self.regs,
            sregs: &self.sregs,
            memory: self.memory,
        }
    }
}

/// The stepper of one vCPU, with KVM's side of it.
#[derive(Debug)]
pub(crate) struct StepDriver {
    stepper: Stepper,
    support: StepSupport,
    factory: InstructionInfoFactory,
    /// What the planned instruction found, while instructions are sampled.
    before: Option<Box<Before>>,
}

impl StepDriver {
    pub(crate) fn new(support: StepSupport) -> Self {
        Self {
            stepper: Stepper::default(),
            support,
            factory: InstructionInfoFactory::new(),
            before: None,
        }
    }

    pub(crate) fn is_active(&self) -> bool {
        self.stepper.is_active()
    }

    /// True while an instruction is under way whose end was not seen.
    pub(crate) fn is_under_way(&self) -> bool {
        self.stepper.is_under_way()
    }

    /// Prepares the next entry: begins, plans or ends, as `pmu` needs; true if
    /// it ended, which leaves no breakpoint of ours behind. `gp_handler` is where
    /// an RDPMC of code that cannot be stepped shows up.
    #[inline(never)]
    pub(crate) fn before_entry(
        &mut self,
        kvm: &KvmVcpu,
        memory: &dyn GuestBytes,
        debug: &mut DebugControl,
        (pmu, core): (&mut VcpuPmu, &mut CorePmu),
        gp_handler: Option<u64>,
    ) -> Result<bool, VcpuError> {
        match (pmu.needs().stepping, self.stepper.is_active()) {
            (false, false) => {}
            (false, true) => {
                self.end(kvm, debug)?;
                return Ok(true);
            }
            (true, false) => {
                self.stepper.begin(kvm.get_regs()?.rflags);
                debug.want_step(true, true);
            }
            (true, true) if self.stepper.is_under_way() => {}
            (true, true) => {
                let can_step = self.plan(kvm, memory, debug, (pmu, core))?;
                if let (false, Some(handler)) = (can_step, gp_handler) {
                    // The guest runs on past the planned instruction.
                    let planned = debug.wanted().iter().copied();
                    let others = planned.filter(|&address| address != handler);
                    let wanted: Vec<u64> = std::iter::once(handler).chain(others).collect();
                    debug.want(&wanted);
                }
            }
        }
        Ok(false)
    }

    fn end(&mut self, kvm: &KvmVcpu, debug: &mut DebugControl) -> Result<(), VcpuError> {
        debug.want_step(false, false);
        debug.want(&[]);
        if self.stepper.end() {
            // KVM clears TF with the last step; this one was the guest's.
            debug.apply(kvm)?;
            let mut regs = kvm.get_regs()?;
            regs.rflags |= RFLAGS_TF;
            kvm.set_regs(&regs)?;
        }
        Ok(())
    }

    /// False if the guest's present ring cannot be stepped.
    fn plan(
        &mut self,
        kvm: &KvmVcpu,
        memory: &dyn GuestBytes,
        debug: &mut DebugControl,
        (pmu, core): (&mut VcpuPmu, &mut CorePmu),
    ) -> Result<bool, VcpuError> {
        if kvm.in_smm() {
            // Step by step to its end, unseen: no exit would tell of that.
            self.lose(pmu, core);
            debug.want_step(true, true);
            debug.want(&[]);
            debug.renew_step();
            return Ok(true);
        }
        let stopped = Stopped::read(kvm, memory)?;
        let events = kvm.get_vcpu_events()?;
        let inputs = StepInputs {
            loses_traps: self.support.loses_traps,
            ..inputs(kvm, &stopped.context(), debug, &events)?
        };
        let sampling = pmu.ibs_runs() || pmu.has_pebs();
        self.stepper.set_sampling(sampling);
        let factory = &mut self.factory;
        let plan = self.stepper.plan(&stopped.context(), &inputs, factory);
        let planned = self.stepper.decoded().filter(|_| sampling);
        self.before = planned.map(|decoded| Box::new(Before::of(&stopped.context(), decoded)));
        let can_step = self.support.user || cpl(&stopped.sregs) != 3;
        let interrupts_escape = !self.support.hold_irqs && stopped.regs.rflags & RFLAGS_IF != 0;
        let escapes = plan.enters_user && !self.support.user;
        let lost = match (can_step && !escapes, interrupts_escape) {
            (false, _) => Some(LossReason::Unsupported),
            (true, true) => Some(LossReason::EventDelivery),
            (true, false) => plan.lost,
        };
        if let Some(reason) = lost {
            pmu.observe(core, Progress::Lost { reason });
        }
        // KVM would hold an SMI back as well, until the last step: the firmware waits for none.
        debug.want_step(can_step, plan.hold_irqs && events.smi.pending == 0);
        debug.want(&plan.breakpoints);
        debug.renew_step();
        Ok(can_step)
    }

    /// Instructions are executed that nobody may look at, and so cannot count.
    fn lose(&mut self, pmu: &mut VcpuPmu, core: &mut CorePmu) {
        self.stepper.abandon();
        self.before = None;
        let reason = LossReason::Undecodable;
        pmu.observe(core, Progress::Lost { reason });
    }

    /// Takes in a stop, and hides our TF from what the guest saved.
    pub(crate) fn stopped(
        &mut self,
        kvm: &KvmVcpu,
        memory: &dyn GuestBytes,
        debug: &mut DebugControl,
        (pmu, core): (&mut VcpuPmu, &mut CorePmu),
        stop: StepStop,
    ) -> Result<(), VcpuError> {
        if kvm.in_smm() {
            // Nothing there says what the instruction before the SMI did.
            self.lose(pmu, core);
            return Ok(());
        }
        let stopped = Stopped::read(kvm, memory)?;
        let tf_before = self.stepper.guest_tf();
        let result = self.stepper.stopped(&stopped.context(), stop);
        let (repair, guest_trap) = (result.repair, result.guest_trap);
        // Delivery clears TF, and our own is in the frame.
        let tf = match result.interrupted {
            Some(_) => tf_before,
            None => self.stepper.guest_tf(),
        };
        self.report(kvm, memory, (pmu, core), result, tf)?;
        if let Some(repair) = repair {
            hide_tf(kvm, &stopped, repair)?;
        }
        if guest_trap {
            debug.hand_back(kvm, crate::trap::DR6_BS)?;
        }
        Ok(())
    }

    /// Reports what a stop meant to the PMU, and samples what fell due with it; `tf` is the
    /// guest's own behind the instructions.
    fn report(
        &mut self,
        kvm: &KvmVcpu,
        memory: &dyn GuestBytes,
        (pmu, core): (&mut VcpuPmu, &mut CorePmu),
        result: StepResult,
        tf: bool,
    ) -> Result<(), VcpuError> {
        let interrupted = result.interrupted;
        let mut executed = result.executed.into_iter();
        for one in result.progress {
            pmu.observe(core, one);
            let Progress::Retired { insn, .. } = one else {
                continue;
            };
            let Some(executed) = executed.next() else {
                continue;
            };
            let seen = Seen {
                executed,
                did: insn,
                tf,
                interrupted,
            };
            self.sample(kvm, memory, (pmu, core), seen)?;
        }
        Ok(())
    }

    /// Takes the samples that fell due with an instruction.
    fn sample(
        &mut self,
        kvm: &KvmVcpu,
        memory: &dyn GuestBytes,
        (pmu, core): (&mut VcpuPmu, &mut CorePmu),
        seen: Seen,
    ) -> Result<(), VcpuError> {
        if !pmu.has_samples(Some(core)) {
            return Ok(());
        }
        let stepped = Stepped {
            executed: seen.executed,
            did: seen.did,
            before: self.before.as_deref(),
            factory: &mut self.factory,
            interrupted: seen.interrupted,
            tf: seen.tf,
        };
        let mut moment = StoppedVcpu::stepped(kvm, memory, stepped);
        pmu.take_samples(Some(core), &mut moment)
    }

    /// True while the stepped guest is in a HLT.
    pub(crate) fn is_halted(&self) -> bool {
        self.stepper.is_halted()
    }

    /// The guest's own instruction breakpoint came before the instruction under
    /// way: plan anew, with its #DB queued.
    pub(crate) fn abandon(&mut self) {
        self.stepper.abandon();
    }

    /// The guest stopped at its #GP handler: before anybody reads counters or the frame, takes
    /// in what was executed before an RDPMC, and clears our TF in the frame.
    pub(crate) fn at_gp_handler(
        &mut self,
        kvm: &KvmVcpu,
        memory: &dyn GuestBytes,
        pmu: (&mut VcpuPmu, &mut CorePmu),
        gate: &crate::trap::Gate,
    ) -> Result<(), VcpuError> {
        let stopped = Stopped::read(kvm, memory)?;
        let context = stopped.context();
        let Some(frame) = crate::trap::ExceptionFrame::read(&context, gate, true) else {
            return Ok(());
        };
        let tf = self.stepper.guest_tf();
        let result = self.stepper.before_rdpmc(&context, &frame);
        self.report(kvm, memory, pmu, result, tf)?;
        if tf {
            return Ok(());
        }
        hide_tf(kvm, &stopped, TfRepair::Memory(frame.flags_at))
    }

    /// An RDPMC was emulated, and the guest stands behind it.
    pub(crate) fn emulated_rdpmc(
        &mut self,
        kvm: &KvmVcpu,
        memory: &dyn GuestBytes,
        ring: Ring,
        (pmu, core): (&mut VcpuPmu, &mut CorePmu),
    ) -> Result<(), VcpuError> {
        let planned = self.stepper.is_under_way();
        let executed = self.stepper.emulated_rdpmc(kvm.get_regs()?.rip);
        if planned && executed.is_none() {
            let reason = LossReason::EventDelivery;
            pmu.observe(core, Progress::Lost { reason });
        }
        pmu.observe(
            core,
            Progress::Retired {
                ring,
                insn: Retirement::default(),
            },
        );
        let Some(executed) = executed else {
            // Samples are taken of a guest that stands there.
            return Ok(());
        };
        let seen = Seen {
            executed,
            did: Retirement::default(),
            tf: self.stepper.guest_tf(),
            interrupted: None,
        };
        self.sample(kvm, memory, (pmu, core), seen)
    }
}

/// What a stop says of an instruction that was stepped over.
struct Seen {
    executed: Executed,
    did: Retirement,
    /// TF as the guest has it behind the instruction.
    tf: bool,
    /// RSP and RFLAGS behind it, where an event that was delivered since has changed them.
    interrupted: Option<(u64, u64)>,
}

fn hide_tf(kvm: &KvmVcpu, stopped: &Stopped<'_>, repair: TfRepair) -> Result<(), VcpuError> {
    match repair {
        TfRepair::Memory(at) => {
            let context = stopped.context();
            if let Some(flags) = context.word::<2>(at) {
                let clean = u16::try_from(flags & !RFLAGS_TF).unwrap_or(0);
                // Mapped: it was just read.
                let _ = context.write_linear(at, &clean.to_le_bytes());
            }
            Ok(())
        }
        TfRepair::R11 => {
            let mut regs = stopped.regs;
            regs.r11 &= !RFLAGS_TF;
            kvm.set_regs(&regs)
        }
    }
}

fn inputs(
    kvm: &KvmVcpu,
    context: &CpuContext<'_>,
    debug: &DebugControl,
    events: &kvm_vcpu_events,
) -> Result<StepInputs, VcpuError> {
    let (msr, target_bits) = syscall_entry(context);
    Ok(StepInputs {
        syscall_target: kvm.read_msr(msr)?.unwrap_or(0) & target_bits,
        syscall_mask: kvm.read_msr(SFMASK)?.unwrap_or(0),
        sysenter_target: kvm.read_msr(SYSENTER_EIP)?.unwrap_or(0),
        deliverable: deliverable(kvm, context.regs, events)?,
        debug_queued: debug.is_injecting(),
        slots: debug.free_slots(),
        loses_traps: false,
    })
}

/// The MSR, and its bits, that say where SYSCALL leads to from the present code
/// segment (APM vol. 2, 6.1.1).
fn syscall_entry(context: &CpuContext<'_>) -> (u32, u64) {
    match (context.long_mode(), context.bitness()) {
        (true, 64) => (LSTAR, u64::MAX),
        (true, _) => (CSTAR, u64::MAX),
        (false, _) => (STAR, 0xffff_ffff),
    }
}

/// The vector that the guest would take at its next instruction boundary.
fn deliverable(
    kvm: &KvmVcpu,
    regs: &kvm_regs,
    events: &kvm_vcpu_events,
) -> Result<Option<u8>, VcpuError> {
    if events.interrupt.shadow != 0 {
        return Ok(None);
    }
    if events.nmi.masked == 0 && (events.nmi.pending != 0 || events.nmi.injected != 0) {
        return Ok(Some(NMI_VECTOR));
    }
    if regs.rflags & RFLAGS_IF == 0 {
        return Ok(None);
    }
    if events.interrupt.injected != 0 {
        return Ok(Some(events.interrupt.nr));
    }
    Ok(highest_irr(&kvm.get_lapic()?))
}

/// The highest requested vector whose class is above the processor's priority
/// (SDM vol. 3A, 12.8.3.1).
fn highest_irr(lapic: &kvm_lapic_state) -> Option<u8> {
    let ppr = lapic.regs[APIC_PPR].cast_unsigned();
    let requested = |vector: usize| {
        let byte = lapic.regs[APIC_IRR + vector / 32 * 16 + vector % 32 / 8];
        byte.cast_unsigned() >> (vector % 8) & 1 != 0
    };
    let vector = (16..256).rev().find(|&vector| requested(vector))?;
    let vector = u8::try_from(vector).ok()?;
    (vector >> 4 > ppr >> 4).then_some(vector)
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestMemoryMmap;

    use super::*;

    #[test]
    fn syscall_leads_where_its_mode_says() {
        let check = |efer: u64, l: u8, expected: u32| {
            let mut sregs = kvm_sregs {
                efer,
                ..Default::default()
            };
            (sregs.cs.l, sregs.cs.db) = (l, 1 - l);
            let memory =
                GuestMemoryMmap::<()>::from_ranges(&[(vm_memory::GuestAddress(0), 0x1000)]);
            let context = CpuContext {
                regs: &kvm_regs::default(),
                sregs: &sregs,
                memory: &memory.unwrap(),
            };
            assert_eq!(syscall_entry(&context).0, expected, "EFER {efer:#x}, L {l}");
        };
        const LMA: u64 = 1 << 10;
        check(LMA, 1, LSTAR);
        check(LMA, 0, CSTAR);
        check(0, 0, STAR);
    }

    #[test]
    fn the_highest_vector_above_the_priority_is_taken() {
        let check = |vectors: &[usize], ppr: i8, expected: Option<u8>| {
            let mut lapic = kvm_lapic_state::default();
            lapic.regs[APIC_PPR] = ppr;
            for vector in vectors {
                lapic.regs[APIC_IRR + vector / 32 * 16 + vector % 32 / 8] |=
                    (1u8 << (vector % 8)).cast_signed();
            }
            assert_eq!(highest_irr(&lapic), expected, "{vectors:?} above {ppr:#x}");
        };
        check(&[], 0, None);
        check(&[0x31], 0, Some(0x31));
        check(&[0x31, 0xef], 0, Some(0xef));
        check(&[0x31], 0x30, None);
        check(&[0x41], 0x3f, Some(0x41));
        check(&[0xff], 0, Some(0xff));
    }
}
