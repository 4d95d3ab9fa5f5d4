//! Single-stepping a guest without losing sight of it.
//!
//! The processor clears TF when it delivers an event and, by SFMASK, at
//! SYSCALL: the handler would run unseen until it returns. So before each step
//! the instruction is decoded, and breakpoints are put on the first instruction
//! of every handler that it can reach. An interrupt is let in only when it is
//! known which one comes. Where four debug registers do not suffice, or the
//! guest turns up where it cannot have stepped to, the loss is reported.
//!
//! Everything here decides; entering the guest is the caller's.

use instruction_facts::{
    Decoded, InsnClass, InsnFacts, InstructionInfoFactory, StepKind, pushes_error_code,
};
use pmu_virt::{LossReason, Progress, Ring};

use super::RFLAGS_TF;
use super::context::{CpuContext, Gate};
use super::frame::ExceptionFrame;
use super::step_targets::{
    Entry, StepInputs, Watched, after, certain, fetch, loaded_tf, possible, return_target,
    shadowed, watch,
};

/// How to enter the guest for the next step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct StepPlan {
    /// Linear addresses to stop at.
    pub(crate) breakpoints: Vec<u64>,
    /// Keep interrupts out of this step.
    pub(crate) hold_irqs: bool,
    /// The breakpoints do not cover all that the step can reach.
    pub(crate) lost: Option<LossReason>,
    /// The instruction returns to CPL 3.
    pub(crate) enters_user: bool,
}

/// Why the guest stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepStop {
    /// The single-step trap.
    Trap,
    /// One of the plan's breakpoints, at this linear address.
    Breakpoint(u64),
    /// Another exit: the instruction may or may not be complete.
    Exit,
}

/// A change to the guest that hides our TF from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TfRepair {
    /// Clear TF in the flags image at this linear address.
    Memory(u64),
    /// Clear TF in R11, where SYSCALL saved the flags.
    R11,
}

/// An instruction that was executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Executed {
    /// Address of the instruction, without the segment's base.
    pub(crate) rip: u64,
    /// Where it led to, likewise.
    pub(crate) next: u64,
    /// The registers with which it began are those of the plan.
    pub(crate) planned: bool,
}

/// What a stop meant.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct StepResult {
    /// What to report to the PMU, in order.
    pub(crate) progress: Vec<Progress>,
    /// RSP and RFLAGS behind the last instruction, where an event was delivered since.
    pub(crate) interrupted: Option<(u64, u64)>,
    /// What to repair before the guest goes on.
    pub(crate) repair: Option<TfRepair>,
    /// The guest single-steps itself: it wants a #DB now.
    pub(crate) guest_trap: bool,
    /// The instruction behind each `Progress::Retired`, while they are sampled.
    pub(crate) executed: Vec<Executed>,
}

impl StepResult {
    fn lose(&mut self, reason: LossReason) {
        self.progress.push(Progress::Lost { reason });
    }
}

/// One instruction under way.
#[derive(Debug, Clone)]
struct Pending {
    rip: u64,
    /// `None` where the bytes are no instruction, or cannot be read.
    decoded: Option<Decoded>,
    /// The registers of the plan are those that it finds.
    planned: bool,
    /// What may be executed with it, in the shadow of a MOV SS.
    shadowed: Vec<Decoded>,
    ring: Ring,
    rflags: u64,
    rcx: u64,
    /// Where an IRET, SYSRET, SYSEXIT or far RET goes to.
    returns_to: Option<u64>,
    /// TF as a POPF, IRET or SYSRET will load it.
    loads_tf: Option<bool>,
    /// TF as a system call leaves it.
    tf_after_syscall: bool,
    /// An interrupt was let in: it must show.
    window: bool,
    watched: Vec<Watched>,
}

/// The stepper of one vCPU.
#[derive(Debug, Default)]
pub(crate) struct Stepper {
    pending: Option<Pending>,
    guest_tf: bool,
    active: bool,
    /// Address and first count of a repeated instruction that the last stop
    /// found unfinished.
    repeating: Option<(u64, u64)>,
    /// Address after the HLT that the guest is in.
    halted: Option<u64>,
    /// The guest may be in a handler that nobody saw it enter: the frame there holds
    /// our TF.
    astray: bool,
    /// Instructions are sampled: tell which were executed.
    sampling: bool,
}

impl Stepper {
    /// Begins to step a guest whose flags are its own. The instruction under
    /// way, if it was trapped half-way, is not counted.
    pub(crate) fn begin(&mut self, rflags: u64) {
        *self = Self {
            guest_tf: rflags & RFLAGS_TF != 0,
            active: true,
            ..Self::default()
        };
    }

    /// Ends; true if the guest's own TF has to be set again.
    pub(crate) fn end(&mut self) -> bool {
        std::mem::take(self).guest_tf
    }

    /// Tell which instructions were executed, from the next plan on.
    pub(crate) fn set_sampling(&mut self, sampling: bool) {
        self.sampling = sampling;
    }

    /// True between `begin` and `end`.
    #[must_use]
    pub(crate) fn is_active(&self) -> bool {
        self.active
    }

    /// True while the guest is in a HLT: a breakpoint on its next instruction
    /// says that it woke.
    #[must_use]
    pub(crate) fn is_halted(&self) -> bool {
        self.halted.is_some() && self.pending.is_none()
    }

    /// True while an instruction is under way whose end was not seen.
    #[must_use]
    pub(crate) fn is_under_way(&self) -> bool {
        self.pending.is_some()
    }

    /// The instruction under way did not come to its end by itself: the caller
    /// carried it out, or the guest's own breakpoint came before it.
    pub(crate) fn abandon(&mut self) {
        self.pending = None;
    }

    /// The instruction under way, if it is one.
    #[must_use]
    pub(crate) fn decoded(&self) -> Option<&Decoded> {
        self.pending.as_ref()?.decoded.as_ref()
    }

    /// TF as the guest has it.
    #[must_use]
    pub(crate) fn guest_tf(&self) -> bool {
        self.guest_tf
    }

    /// Plans the next step of a stopped guest.
    pub(crate) fn plan(
        &mut self,
        context: &CpuContext<'_>,
        inputs: &StepInputs,
        factory: &mut InstructionInfoFactory,
    ) -> StepPlan {
        let waits = inputs.deliverable.is_none() && !inputs.debug_queued;
        if waits && self.halted == Some(context.regs.rip) {
            // What wakes the guest comes before its next instruction: stop there,
            // with interrupts held back, and look which one it is.
            return StepPlan {
                breakpoints: vec![context.code_base().wrapping_add(context.regs.rip)],
                hold_irqs: true,
                ..StepPlan::default()
            };
        }
        self.halted = None;
        let decoded = fetch(context, context.regs.rip, factory);
        let facts = decoded.map(|decoded| decoded.facts);
        let shadowed = facts
            .as_ref()
            .map_or_else(Vec::new, |facts| shadowed(context, inputs, facts, factory));
        let window = inputs.deliverable.is_some() && !inputs.debug_queued;
        let mut watched = certain(context, inputs, facts.as_ref());
        let mut faults = possible(context, facts.as_ref());
        for one in &shadowed {
            faults |= possible(context, Some(&one.facts));
        }
        watch(context, faults.vectors(), &mut watched);
        let uncovered = watched.len() > inputs.slots;
        watched.truncate(inputs.slots);
        let breakpoints = watched.iter().map(|watched| watched.address).collect();
        let last = shadowed.last().map(|one| &one.facts).or(facts.as_ref());
        let returns_to = facts
            .as_ref()
            .and_then(|facts| return_target(context, facts));
        // Emulators stop once more after the last round, with a count of 0.
        let rcx = match self.repeating.take() {
            Some((rip, rcx)) if rip == context.regs.rip => rcx,
            _ => context.regs.rcx,
        };
        let mut loads_tf = last.and_then(|facts| loaded_tf(context, facts));
        if loads_tf == Some(true) && last.is_some_and(|facts| facts.kind == StepKind::Iret) {
            loads_tf = Some(!std::mem::take(&mut self.astray));
        }
        self.pending = Some(Pending {
            rip: context.regs.rip,
            loads_tf,
            decoded,
            planned: true,
            shadowed,
            ring: Ring::from_cpl(context.cpl()),
            rflags: context.regs.rflags,
            rcx,
            returns_to: returns_to.map(|target| target.rip),
            tf_after_syscall: self.guest_tf && inputs.syscall_mask & RFLAGS_TF == 0,
            window,
            watched,
        });
        StepPlan {
            breakpoints,
            hold_irqs: !window,
            lost: uncovered.then_some(LossReason::EventDelivery),
            enters_user: returns_to.is_some_and(|target| target.cpl == 3),
        }
    }

    /// Looks at a stopped guest.
    pub(crate) fn stopped(&mut self, context: &CpuContext<'_>, stop: StepStop) -> StepResult {
        let mut result = StepResult::default();
        let linear = context.code_base().wrapping_add(context.regs.rip);
        // Without one this is the first stop after `begin`.
        let Some(pending) = self.pending.take() else {
            if matches!(stop, StepStop::Breakpoint(_)) {
                self.halted = None;
            }
            return result;
        };
        let stop = match stop {
            // This exit was faster than the breakpoint.
            StepStop::Exit
                if context.regs.rip != pending.rip
                    && pending.watched.iter().any(|one| one.address == linear) =>
            {
                StepStop::Breakpoint(linear)
            }
            stop => stop,
        };
        match stop {
            StepStop::Exit if context.regs.rip == pending.rip => self.pending = Some(pending),
            StepStop::Exit | StepStop::Trap => {
                let seen = self.completed(context, &pending, context.regs.rip, &mut result);
                let repeating = context.regs.rip == pending.rip;
                self.astray |= !seen && !self.guest_tf;
                if !seen || (pending.window && !repeating) {
                    result.lose(LossReason::EventDelivery);
                }
            }
            StepStop::Breakpoint(address) => {
                let found = pending.watched.iter().find(|one| one.address == address);
                match found.map(|watched| watched.entry) {
                    Some(Entry::Event { vector, gate }) => {
                        self.delivered(context, vector, &gate, &pending, &mut result);
                    }
                    Some(Entry::SystemCall | Entry::Return) => {
                        self.completed(context, &pending, context.regs.rip, &mut result);
                    }
                    None => result.lose(LossReason::EventDelivery),
                }
            }
        }
        result
    }

    /// A #GP with this `frame` was delivered, which the caller answers if it is an RDPMC's.
    /// Whatever the step took along before an RDPMC has retired by then, and the RDPMC reads
    /// counters that have it: it is credited, and the RDPMC alone is under way from now on.
    pub(crate) fn before_rdpmc(
        &mut self,
        context: &CpuContext<'_>,
        frame: &ExceptionFrame,
    ) -> StepResult {
        let mut result = StepResult::default();
        let Some(pending) = self.pending.take() else {
            return result;
        };
        let mut shadowed = pending.shadowed.iter();
        let at_fault = |one: &&Decoded| {
            let facts = &one.facts;
            facts.rip == frame.ip && facts.kind == StepKind::Rdpmc
        };
        let Some(&rdpmc) = shadowed.find(at_fault) else {
            self.pending = Some(pending);
            return result;
        };
        if !self.completed(context, &pending, frame.ip, &mut result) {
            result.lose(LossReason::EventDelivery);
        }
        // Delivery cleared TF, and with it a single-step trap.
        result.guest_trap = false;
        let rsp = frame.stack_before(context.regs.rsp);
        result.interrupted = Some((rsp, frame.flags));
        self.pending = Some(Pending {
            rip: frame.ip,
            decoded: Some(rdpmc),
            planned: false,
            // An RDPMC casts no shadow.
            shadowed: Vec::new(),
            ..pending
        });
        result
    }

    /// The caller carried out an RDPMC, which led to `next`. `None` if it was not the
    /// instruction under way: nobody saw how the guest came to it.
    pub(crate) fn emulated_rdpmc(&mut self, next: u64) -> Option<Executed> {
        let pending = self.pending.take()?;
        let facts = pending.decoded.as_ref()?.facts;
        let was_under_way = facts.kind == StepKind::Rdpmc && leads_to(&facts, &pending, next);
        was_under_way.then_some(Executed {
            rip: pending.rip,
            next,
            planned: pending.planned,
        })
    }

    /// Credits `pending` for having led to `next`; false if it cannot have.
    fn completed(
        &mut self,
        context: &CpuContext<'_>,
        pending: &Pending,
        next: u64,
        result: &mut StepResult,
    ) -> bool {
        let Some(Decoded { facts, .. }) = &pending.decoded else {
            return false;
        };
        if !facts.completes(next) {
            self.repeating = Some((pending.rip, pending.rcx));
            return true;
        }
        let retired = |facts: &InsnFacts, next| Progress::Retired {
            ring: pending.ring,
            insn: facts.retire(next, pending.rflags, pending.rcx),
        };
        // The trap may have waited for them.
        let shadowed = pending.shadowed.iter().map(|one| &one.facts);
        let taken_along = shadowed.take_while(|one| one.rip != next);
        let mut last = facts;
        let mut before = Vec::new();
        let mut executed = Vec::new();
        let mut execute = |one: &InsnFacts, next| {
            if self.sampling {
                executed.push(Executed {
                    rip: one.rip,
                    next,
                    planned: pending.planned && one.rip == pending.rip,
                });
            }
        };
        for one in taken_along {
            before.push(retired(last, one.rip));
            execute(last, one.rip);
            last = one;
        }
        if !leads_to(last, pending, next) {
            return false;
        }
        execute(last, next);
        result.executed.append(&mut executed);
        result.progress.append(&mut before);
        result.progress.push(retired(last, next));
        self.took_last(context, pending, (last, next), result);
        true
    }

    /// What the last instruction of the step, which led to `next`, has left of halting and
    /// of TF.
    fn took_last(
        &mut self,
        context: &CpuContext<'_>,
        pending: &Pending,
        (last, next): (&InsnFacts, u64),
        result: &mut StepResult,
    ) {
        let is_last = pending
            .shadowed
            .last()
            .is_none_or(|one| one.facts.rip == last.rip);
        // SYSCALL and SYSRET look at TF as they leave it (SDM vol. 2, SYSRET).
        self.halted = (last.kind == StepKind::Hlt).then_some(next);
        result.guest_trap = match last.kind {
            StepKind::Syscall => pending.tf_after_syscall,
            StepKind::Sysret => pending.loads_tf.unwrap_or(self.guest_tf),
            _ => self.guest_tf,
        };
        result.repair = match last.kind {
            _ if self.guest_tf => None,
            StepKind::Pushf => {
                let stack = context.sregs.ss.base.wrapping_add(context.regs.rsp);
                Some(TfRepair::Memory(stack))
            }
            StepKind::Syscall => Some(TfRepair::R11),
            _ => None,
        };
        self.guest_tf = match last.kind {
            StepKind::Syscall => pending.tf_after_syscall,
            _ if !is_last => self.guest_tf,
            _ => pending.loads_tf.unwrap_or(self.guest_tf),
        };
    }

    /// An event was delivered through `gate`.
    fn delivered(
        &mut self,
        context: &CpuContext<'_>,
        vector: u8,
        gate: &Gate,
        pending: &Pending,
        result: &mut StepResult,
    ) {
        let frame = ExceptionFrame::read(context, gate, pushes_error_code(vector));
        let Some(frame) = frame else {
            result.lose(LossReason::EventDelivery);
            return;
        };
        // A fault, or an interrupt before the instruction, returns to it.
        let retired = frame.ip != pending.rip;
        if retired && !self.completed(context, pending, frame.ip, result) {
            result.lose(LossReason::EventDelivery);
        }
        result.repair = (!self.guest_tf).then_some(TfRepair::Memory(frame.flags_at));
        // Delivery cleared TF, and with it a single-step trap.
        result.guest_trap = false;
        self.guest_tf = false;
        let rsp = frame.stack_before(context.regs.rsp);
        result.interrupted = Some((rsp, frame.flags));
        let delivered = Progress::Delivered { ring: pending.ring };
        result.progress.push(delivered);
    }
}

/// True if `facts` can be followed by an instruction at `next`.
fn leads_to(facts: &InsnFacts, pending: &Pending, next: u64) -> bool {
    let onward = next == after(facts) || next & 0xffff_ffff == after(facts) & 0xffff_ffff;
    match (facts.class, facts.near_target) {
        (InsnClass::Plain, _) => onward,
        (InsnClass::ConditionalBranch, Some(target)) => onward || next == target,
        (InsnClass::Jump | InsnClass::Call, Some(target)) => next == target,
        // Indirect: the target was in a register or in memory.
        (InsnClass::Jump | InsnClass::Call | InsnClass::Return, None) => true,
        (InsnClass::Far, _) => match facts.kind {
            StepKind::Syscall | StepKind::Sysenter => {
                pending.watched.iter().any(|one| one.address == next)
            }
            _ => pending.returns_to.is_none_or(|target| next == target),
        },
        _ => onward,
    }
}

#[cfg(test)]
mod tests {
    use instruction_facts::Retirement;
    use kvm_bindings::{kvm_regs, kvm_sregs};
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::super::context::GateKind;
    use super::*;

    const CODE: u64 = 0x1000;
    const STACK: u64 = 0x2000;
    const GDT: u64 = 0x3000;
    const USER_CS: u16 = 0x0b;
    const NON_CANONICAL: u64 = 1 << 60;

    /// Hands `act` a vCPU in 64-bit mode at CPL 0 before `code`, with `words` on the stack.
    fn before<R>(
        code: &[u8],
        words: &[u64],
        change: impl FnOnce(&mut kvm_regs),
        act: impl FnOnce(&CpuContext<'_>, &StepInputs) -> R,
    ) -> R {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x10_0000)]).unwrap();
        memory.write_slice(code, GuestAddress(CODE)).unwrap();
        for (word, at) in words.iter().zip((STACK..).step_by(8)) {
            memory.write_obj(*word, GuestAddress(at)).unwrap();
        }
        // A 64-bit code segment for CPL 3 at selector 8.
        let descriptor: u64 = 0x0020_fb00_0000_0000;
        memory.write_obj(descriptor, GuestAddress(GDT + 8)).unwrap();
        // Interrupt gates for every vector, each handler at a multiple of 16.
        for vector in 0..32u64 {
            let handler = 0x8000 + 16 * vector;
            let gate = handler | 8 << 16 | 0x8e00 << 32;
            let at = GuestAddress(0x4000 + 16 * vector);
            memory.write_obj([gate, 0], at).unwrap();
        }
        // Paging is off to keep the test short; nothing here looks at it.
        let mut sregs = kvm_sregs {
            cr0: 1,
            efer: 1 << 10,
            ..Default::default()
        };
        sregs.cs.l = 1;
        (sregs.gdt.base, sregs.gdt.limit) = (GDT, 0xff);
        (sregs.idt.base, sregs.idt.limit) = (0x4000, 0x1ff);
        let mut regs = kvm_regs {
            rip: CODE,
            rsp: STACK,
            rbp: STACK,
            ..Default::default()
        };
        change(&mut regs);
        let context = CpuContext {
            regs: &regs,
            sregs: &sregs,
            memory: &memory,
        };
        let inputs = StepInputs {
            slots: 4,
            ..StepInputs::default()
        };
        act(&context, &inputs)
    }

    /// Plans the step of `code`.
    fn plan(code: &[u8], words: &[u64], change: impl FnOnce(&mut kvm_regs)) -> StepPlan {
        before(code, words, change, |context, inputs| {
            Stepper::default().plan(context, inputs, &mut InstructionInfoFactory::new())
        })
    }

    /// `code` was planned, and an RDPMC `at` bytes into it faults and is emulated: what is said
    /// to have been executed before it, and what is said of itself.
    fn rdpmc_in(code: &[u8], at: u64, loses_traps: bool) -> (Vec<Executed>, Option<Executed>) {
        let gate = Gate {
            handler: 0x8000 + 16 * 13,
            kind: GateKind::Bits64,
            selector: 8,
        };
        let rip = CODE + at;
        // Error code, RIP, CS, RFLAGS, RSP, SS.
        let frame = [0, rip, 8, 2, STACK + 0x100, 0x10];
        let (mut stepper, factory) = (Stepper::default(), &mut InstructionInfoFactory::new());
        stepper.begin(2);
        stepper.set_sampling(true);
        let act = |context: &CpuContext<'_>, inputs: &StepInputs| {
            let inputs = StepInputs {
                loses_traps,
                ..*inputs
            };
            stepper.plan(context, &inputs, factory);
            let frame = ExceptionFrame::read(context, &gate, true).unwrap();
            let result = stepper.before_rdpmc(context, &frame);
            let retired = Progress::Retired {
                ring: Ring::Kernel,
                insn: Retirement::default(),
            };
            assert_eq!(result.progress, vec![retired; result.executed.len()]);
            let behind = (STACK + 0x100, 2);
            let expected = (!result.executed.is_empty()).then_some(behind);
            assert_eq!(result.interrupted, expected);
            assert_eq!((result.repair, result.guest_trap), (None, false));
            (result.executed, stepper.emulated_rdpmc(rip + 2))
        };
        before(code, &frame, |_| {}, act)
    }

    #[test]
    fn what_a_step_took_along_comes_before_its_rdpmc() {
        const LFENCE: [u8; 3] = [0x0f, 0xae, 0xe8];
        const MOV_SS: [u8; 2] = [0x8e, 0xd0];
        const RDPMC: [u8; 2] = [0x0f, 0x33];
        let one = |from: u64, to: u64, planned: bool| Executed {
            rip: CODE + from,
            next: CODE + to,
            planned,
        };
        let check =
            |code: &[&[u8]], at, loses_traps, before: &[Executed], itself: Option<Executed>| {
                let found = rdpmc_in(&code.concat(), at, loses_traps);
                assert_eq!(found, (before.to_vec(), itself), "{code:x?}");
            };
        check(&[&RDPMC], 0, true, &[], Some(one(0, 2, true)));
        let fenced = [one(0, 3, true)];
        let itself = Some(one(3, 5, false));
        check(&[&LFENCE, &RDPMC], 3, true, &fenced, itself);
        let fenced = [one(0, 3, true), one(3, 6, false)];
        let itself = Some(one(6, 8, false));
        check(&[&LFENCE, &LFENCE, &RDPMC], 6, true, &fenced, itself);
        let shadowed = [one(0, 2, true)];
        let itself = Some(one(2, 4, false));
        check(&[&MOV_SS, &RDPMC], 2, false, &shadowed, itself);
        // Nobody saw how the guest came there: past an instruction whose trap comes, or whose
        // ring cannot be stepped.
        check(&[&LFENCE, &RDPMC], 3, false, &[], None);
        check(&[&[0x90], &RDPMC], 1, true, &[], None);
        check(&[&RDPMC, &RDPMC], 2, true, &[], None);
    }

    #[test]
    fn every_way_to_cpl_3_is_seen() {
        let user = [0x5000, USER_CS.into(), 2, 0x6000, 0x13];
        let kernel = [0x5000, 0x08, 2, 0x6000, 0x10];
        let check = |code: &[u8], words: &[u64], expected: bool| {
            assert_eq!(plan(code, words, |_| {}).enters_user, expected, "{code:x?}");
        };
        check(&[0x48, 0xcf], &user, true); // IRETQ
        check(&[0x48, 0xcf], &kernel, false);
        check(&[0x48, 0xcb], &user, true); // RETFQ
        check(&[0x48, 0xca, 8, 0], &user, true); // RETFQ 8
        check(&[0x48, 0xcb], &kernel, false);
        check(&[0x48, 0x0f, 0x07], &[], true); // SYSRETQ
        check(&[0x48, 0x0f, 0x35], &[], true); // SYSEXITQ
        check(&[0xc3], &user, false); // RET
    }

    #[test]
    fn a_stack_fault_is_watched_where_an_operand_can_raise_it() {
        let stack_fault = 0x8000 + 16 * 12;
        let check = |code: &[u8], rbp: u64, expected: bool| {
            let plan = plan(code, &[], |regs| regs.rbp = rbp);
            let watched = plan.breakpoints.contains(&stack_fault);
            assert_eq!(watched, expected, "{code:x?} with RBP {rbp:#x}");
            assert_eq!(plan.lost, None);
        };
        check(&[0x48, 0x8b, 0x45, 0x08], STACK, false); // MOV RAX,[RBP+8]
        check(&[0x48, 0x8b, 0x45, 0x08], NON_CANONICAL, true);
        check(&[0x48, 0x8b, 0x44, 0x0d, 0x08], STACK, true); // MOV RAX,[RBP+RCX+8]
        check(&[0x48, 0x8b, 0x44, 0x0c, 0x08], STACK, true); // MOV RAX,[RSP+RCX+8]
        check(&[0x48, 0x8b, 0x03], STACK, false); // MOV RAX,[RBX]
        check(&[0x50], STACK, false); // PUSH RAX
    }
}
