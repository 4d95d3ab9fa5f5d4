//! `KVM_SET_GUEST_DEBUG`: our breakpoints beside the guest's, our steps beside
//! the guest's TF, and the guest's #DBs handed back to it.

use guest_exit::DebugExit;
use kvm_bindings::{
    KVM_GUESTDBG_BLOCKIRQ, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_INJECT_DB, KVM_GUESTDBG_SINGLESTEP,
    KVM_GUESTDBG_USE_HW_BP, KVM_VCPUEVENT_VALID_SHADOW, kvm_guest_debug,
};
use pmu_virt::{Ticks, Tsc};

use crate::error::VcpuError;
use crate::gp_watch::Onward;
use crate::time;
use crate::trap::{
    DR6_BS, DR6_SLOTS, GuestBreakpoints, Placement, RFLAGS_RF, RFLAGS_TF, merge_dr6,
};
use crate::vcpu::KvmVcpu;

const DB_VECTOR: u32 = 1;

/// Looks that a quiet guest is spared, and one.
const QUIET_LOOKS: u64 = 10;

/// Looks, a millisecond apart, that find neither a counter enabled nor a debug register in
/// the guest's use, after which the guest is kicked for one as seldom as
/// [`DebugControl::deadline`] says. Counted in looks, for time goes by also where the host
/// does not run the guest.
const IDLE_LOOKS: u8 = 100;

/// What this host's KVM does otherwise than the manuals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DebugQuirks {
    /// RF set by `KVM_SET_REGS` does not suppress an instruction breakpoint.
    pub rf_ignored: bool,
    /// KVM can hold interrupts back during a step (`KVM_GUESTDBG_BLOCKIRQ`).
    pub block_irq: bool,
    /// KVM delivers the guest's own breakpoints on execution also while
    /// breakpoints of ours are in use.
    pub serves_execution: bool,
}

impl DebugQuirks {
    /// Of a host that nobody has asked: works everywhere, and costs an exit more at
    /// each #GP of the guest's own.
    pub const UNKNOWN: DebugQuirks = DebugQuirks {
        rf_ignored: true,
        block_irq: false,
        serves_execution: false,
    };
}

/// What a debug exit was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DebugEvent {
    /// One of our breakpoints, at this linear address.
    Breakpoint(u64),
    /// A step of ours ended.
    Stepped,
    /// A #DB of the guest's own, with these cause bits; it was handed back.
    Guest(u64),
    /// Nothing to do: the step past a breakpoint of ours ended.
    Passed,
}

/// Which breakpoints are out of the way for one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lift {
    None,
    /// Ours at this linear address.
    Ours(u64),
    /// All, the guest's too.
    All,
}

/// The debug state of one vCPU.
#[derive(Debug)]
pub(crate) struct DebugControl {
    quirks: DebugQuirks,
    wanted: Vec<u64>,
    guest: GuestBreakpoints,
    placement: Placement,
    /// A step past a breakpoint is under way.
    lift: Lift,
    /// The stepper wants a step.
    step: bool,
    hold_irqs: bool,
    inject: bool,
    applied: Option<([u64; 8], u32)>,
    /// When the guest's own debug registers were looked at last.
    seen: Tsc,
    /// For how long that look is good.
    fresh_for: Ticks,
    /// Looks since the guest had a counter on, or a debug register in use.
    idle_looks: u8,
}

impl DebugControl {
    /// No breakpoints, no steps. KVM has no exit for a guest's MOV to DR while
    /// its debug registers are in use by us, so they are looked at again when
    /// the last look is `fresh_for` old.
    #[must_use]
    pub(crate) fn new(quirks: DebugQuirks, fresh_for: Ticks) -> Self {
        let guest = GuestBreakpoints::default();
        Self {
            quirks,
            wanted: Vec::new(),
            guest,
            placement: Placement::new(guest, &[]),
            lift: Lift::None,
            step: false,
            hold_irqs: false,
            inject: false,
            applied: None,
            seen: Tsc::default(),
            fresh_for,
            idle_looks: 0,
        }
    }

    /// Asks for execution breakpoints at these linear addresses, instead of
    /// those asked for before.
    pub(crate) fn want(&mut self, addresses: &[u64]) {
        if self.wanted != addresses {
            self.wanted.clear();
            self.wanted.extend_from_slice(addresses);
            self.replace();
        }
        if let Lift::Ours(address) = self.lift
            && !addresses.contains(&address)
        {
            // Nothing is in the way any more.
            self.lift = Lift::None;
        }
    }

    /// The breakpoints asked for.
    #[must_use]
    pub(crate) fn wanted(&self) -> &[u64] {
        &self.wanted
    }

    /// How many of them found no debug register.
    #[must_use]
    pub(crate) fn unplaced(&self) -> usize {
        self.placement.unplaced()
    }

    /// Asks for a step at the next entry, with interrupts held back where KVM
    /// can do that.
    pub(crate) fn want_step(&mut self, step: bool, hold_irqs: bool) {
        self.step = step;
        self.hold_irqs = hold_irqs && self.quirks.block_irq;
    }

    /// Has the next [`DebugControl::apply`] set TF anew: KVM sets it only when
    /// it is asked to step, and the guest's POPF or IRET may have cleared it.
    pub(crate) fn renew_step(&mut self) {
        self.applied = None;
    }

    /// True if the guest's own debug registers matter now: KVM's copy of ours
    /// hides what the guest writes.
    #[must_use]
    pub(crate) fn is_active(&self) -> bool {
        !self.wanted.is_empty() || self.step
    }

    /// True if a #DB is queued for the guest.
    #[must_use]
    pub(crate) fn is_injecting(&self) -> bool {
        self.inject
    }

    /// Debug registers that the guest leaves to us.
    #[must_use]
    pub(crate) fn free_slots(&self) -> usize {
        self.guest.free()
    }

    /// Asks for execution breakpoints at these linear addresses, as [`DebugControl::want`]
    /// does, and takes in what the guest has done to its own debug registers: at once where
    /// ours change, or else if the last look is old.
    ///
    /// # Errors
    /// The error of `KVM_GET_DEBUGREGS`.
    pub(crate) fn watch(&mut self, vcpu: &KvmVcpu, addresses: &[u64]) -> Result<(), VcpuError> {
        let same = self.wanted == addresses;
        self.want(addresses);
        if !self.is_active() {
            return Ok(());
        }
        if same {
            self.refresh_stale(vcpu).map(|_| ())
        } else {
            self.refresh_guest(vcpu)
        }
    }

    /// A look was due, and found the guest with a counter `enabled` or without.
    pub(crate) fn note_look(&mut self, enabled: bool) {
        self.idle_looks = if enabled || self.guest.uses_some() {
            0
        } else {
            self.idle_looks.saturating_add(1)
        };
    }

    /// The guest sets a counter up.
    pub(crate) fn note_busy(&mut self) {
        self.idle_looks = 0;
    }

    /// Looks at the guest's own debug registers again.
    ///
    /// # Errors
    /// The error of `KVM_GET_DEBUGREGS`.
    pub(crate) fn refresh_guest(&mut self, vcpu: &KvmVcpu) -> Result<(), VcpuError> {
        self.seen = time::now();
        let mut guest = GuestBreakpoints::from(&vcpu.get_debug_regs()?);
        if self.quirks.serves_execution {
            guest = guest.without_execution();
        }
        if guest != self.guest {
            self.guest = guest;
            self.replace();
        }
        Ok(())
    }

    /// For how long a look at the guest's own state is good.
    #[must_use]
    pub(crate) fn fresh_for(&self) -> Ticks {
        self.fresh_for
    }

    /// When the guest has to be stopped for the next look: it sets breakpoints without
    /// an exit. One that has set none for long, counts nothing and is not `stepped` is
    /// stopped a tenth as often: it may read counters that are off for ever, and shall not
    /// pay for that.
    #[must_use]
    pub(crate) fn deadline(&self, stepped: bool) -> Option<Tsc> {
        let quiet = self.idle_looks >= IDLE_LOOKS && !stepped;
        let looks = if quiet { QUIET_LOOKS } else { 1 };
        let next = || self.seen + Ticks(self.fresh_for.0 * looks);
        self.is_active().then(next)
    }

    /// Looks at the guest's own debug registers again, unless the last look is
    /// recent; true if it was due. A breakpoint of ours that found no place has
    /// one looked for every time: the guest may just have given it back.
    ///
    /// # Errors
    /// The error of `KVM_GET_DEBUGREGS`.
    pub(crate) fn refresh_stale(&mut self, vcpu: &KvmVcpu) -> Result<bool, VcpuError> {
        let stale = time::now() - self.seen >= self.fresh_for;
        if stale || self.unplaced() > 0 {
            self.refresh_guest(vcpu)?;
        }
        Ok(stale)
    }

    fn replace(&mut self) {
        self.placement = Placement::new(self.guest, &self.wanted);
    }

    /// What the processor gets for the next entry.
    fn in_force(&self) -> Placement {
        match self.lift {
            Lift::None => self.placement,
            Lift::Ours(address) => {
                let others = self.wanted.iter().copied().filter(|&one| one != address);
                Placement::new(self.guest, &others.collect::<Vec<_>>())
            }
            Lift::All => Placement::new(GuestBreakpoints::default(), &[]),
        }
    }

    /// Nothing of ours is in force, and KVM knows it.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        let quiet = matches!(self.applied, Some((_, 0)));
        quiet && self.wanted.is_empty() && !self.step && !self.inject && self.lift == Lift::None
    }

    /// Hands KVM what changed since the last entry.
    ///
    /// # Errors
    /// The error of `KVM_SET_GUEST_DEBUG`.
    #[inline(never)]
    pub(crate) fn apply(&mut self, vcpu: &KvmVcpu) -> Result<(), VcpuError> {
        let lifted = self.lift != Lift::None;
        let placement = self.in_force();
        let stepping = self.step || lifted;
        let mut control = 0;
        let mut registers = [0; 8];
        if self.inject {
            control = KVM_GUESTDBG_ENABLE;
        }
        // Nothing of ours is armed otherwise: the debug registers are the guest's.
        if self.is_active() || stepping {
            control = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP;
            registers[..4].copy_from_slice(&placement.db);
            registers[7] = placement.dr7;
        }
        if stepping {
            control |= KVM_GUESTDBG_SINGLESTEP;
        }
        if stepping && (self.hold_irqs || (lifted && self.quirks.block_irq)) {
            control |= KVM_GUESTDBG_BLOCKIRQ;
        }
        if self.inject {
            control |= KVM_GUESTDBG_INJECT_DB;
        }
        if self.applied == Some((registers, control)) {
            return Ok(());
        }
        let mut request = kvm_guest_debug {
            control,
            ..Default::default()
        };
        request.arch.debugreg = registers;
        match vcpu.set_guest_debug(&request) {
            Err(error) if self.inject && error.is_busy() => {
                withdraw_fault(vcpu)?;
                request_again(vcpu, request)?;
            }
            result => result?,
        }
        // An injection is an act, not a state.
        self.applied = (!self.inject).then_some((registers, control));
        self.inject = false;
        Ok(())
    }

    /// Sorts out a debug exit; the guest's own #DB is queued for it.
    ///
    /// # Errors
    /// An ioctl on the debug or general registers failed.
    pub(crate) fn on_exit(
        &mut self,
        vcpu: &KvmVcpu,
        exit: &DebugExit,
    ) -> Result<DebugEvent, VcpuError> {
        if self.is_plainly_ours(exit) {
            return Ok(DebugEvent::Breakpoint(exit.pc));
        }
        let placement = self.in_force();
        self.refresh_guest(vcpu)?;
        let stepping = self.step || self.lift != Lift::None;
        let mut cause = placement.classify(exit.dr6, stepping);
        if exit.vector != DB_VECTOR {
            // KVM reports INT3 here only for software breakpoints, which we
            // never set; there is nothing of ours in it.
            return Ok(DebugEvent::Passed);
        }
        if vcpu.in_smm() {
            // An SMI disables the kernel's breakpoints, of which we learn only now.
            cause.guest_dr6 &= !DR6_SLOTS;
            cause.guest_execution = 0;
        }
        let stepped = stepping && exit.dr6 & DR6_BS != 0;
        let passed = std::mem::replace(&mut self.lift, Lift::None) != Lift::None;
        if passed {
            self.applied = None;
        }
        if cause.guest_dr6 & DR6_BS != 0 && is_nmi_window(vcpu)? {
            cause.guest_dr6 &= !DR6_BS;
        }
        if cause.guest_execution != 0 && vcpu.get_regs()?.rflags & RFLAGS_RF != 0 {
            // The guest lets this one instruction pass: a step that leads to it
            // reports the breakpoint all the same. Where RF is ignored, the guest
            // would meet it for ever.
            cause.guest_dr6 &= !cause.guest_execution;
            if self.quirks.rf_ignored {
                self.lift = Lift::All;
            }
        }
        if cause.guest_dr6 != 0 {
            self.hand_back(vcpu, cause.guest_dr6)?;
            return Ok(DebugEvent::Guest(cause.guest_dr6));
        }
        Ok(match (cause.ours, stepped && self.step) {
            // A stale bit must not make us act at another address.
            (Some(address), _) if exit.pc == address => DebugEvent::Breakpoint(address),
            (_, true) => DebugEvent::Stepped,
            _ => DebugEvent::Passed,
        })
    }

    /// The one common case, which needs no look at the guest's own registers:
    /// a breakpoint of ours, no step, and no other cause.
    fn is_plainly_ours(&self, exit: &DebugExit) -> bool {
        let cause = self.placement.classify(exit.dr6, false);
        exit.vector == DB_VECTOR
            && !self.step
            && self.lift == Lift::None
            && cause.ours == Some(exit.pc)
            && cause.guest_dr6 == 0
            && (exit.dr6 & DR6_SLOTS).is_power_of_two()
    }

    /// Queues a #DB with these DR6 cause bits for the guest, or adds them to the one
    /// that is queued.
    ///
    /// # Errors
    /// An ioctl on the debug registers failed.
    pub(crate) fn hand_back(&mut self, vcpu: &KvmVcpu, cause: u64) -> Result<(), VcpuError> {
        let mut regs = vcpu.get_debug_regs()?;
        let queued = if self.inject { regs.dr6 & DR6_SLOTS } else { 0 };
        regs.dr6 = merge_dr6(regs.dr6, cause | queued);
        vcpu.set_debug_regs(&regs)?;
        self.inject = true;
        Ok(())
    }

    /// What a stop at the #GP handler leads to.
    ///
    /// # Errors
    /// An ioctl on the debug or general registers failed.
    pub(crate) fn go_on(&mut self, vcpu: &KvmVcpu, onward: Onward) -> Result<(), VcpuError> {
        match onward {
            Onward::Run => Ok(()),
            Onward::Trap => self.hand_back(vcpu, DR6_BS),
            Onward::Handler(address) => self.pass(vcpu, address),
        }
    }

    /// Lets the guest execute the instruction at linear address `address`, on
    /// which one of our breakpoints just fired.
    ///
    /// # Errors
    /// An ioctl on the general registers failed.
    pub(crate) fn pass(&mut self, vcpu: &KvmVcpu, address: u64) -> Result<(), VcpuError> {
        if self.quirks.rf_ignored {
            self.lift = Lift::Ours(address);
            return Ok(());
        }
        let mut regs = vcpu.get_regs()?;
        regs.rflags |= RFLAGS_RF;
        vcpu.set_regs(&regs)
    }
}

/// Takes back an exception that waits for delivery, for which KVM refuses to
/// inject another. The #DB trap of the instruction before comes first (SDM vol.
/// 3A, table 7-2), and the fault comes again when its own is executed again.
fn withdraw_fault(vcpu: &KvmVcpu) -> Result<(), VcpuError> {
    let mut events = vcpu.get_vcpu_events()?;
    events.flags &= KVM_VCPUEVENT_VALID_SHADOW;
    events.exception = Default::default();
    vcpu.set_vcpu_events(&events)
}

/// A KVM that still will not inject drops the #DB; the breakpoints stand.
fn request_again(vcpu: &KvmVcpu, mut request: kvm_guest_debug) -> Result<(), VcpuError> {
    match vcpu.set_guest_debug(&request) {
        Err(error) if error.is_busy() => {
            log::debug!("{}: a #DB of the guest's was lost: {error}", vcpu.id());
            request.control &= !KVM_GUESTDBG_INJECT_DB;
            vcpu.set_guest_debug(&request)
        }
        result => result,
    }
}

/// True if a single-step trap was `kvm_amd`'s own: to find the end of an NMI
/// handler on processors without virtual NMIs it steps over the handler's IRET,
/// and while #DB is ours the trap comes to us. It has restored the guest's TF by
/// then, and the NMI that it waits to inject is still pending.
fn is_nmi_window(vcpu: &KvmVcpu) -> Result<bool, VcpuError> {
    if vcpu.get_regs()?.rflags & RFLAGS_TF != 0 {
        return Ok(false);
    }
    let nmi = vcpu.get_vcpu_events()?.nmi;
    Ok(nmi.pending != 0 || nmi.injected != 0)
}
