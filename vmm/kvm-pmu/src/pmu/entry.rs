//! What every entry prepares and every exit settles, before it is looked at.

use kvm_bindings::{KVM_MP_STATE_INIT_RECEIVED, KVM_MP_STATE_UNINITIALIZED};
use pmu_virt::perfmon::{Moment, Quantities, VirtualPmd};
use pmu_virt::{CorePmu, Progress, Ring, Tsc, VcpuPmu};

use super::{Lent, Traps};
use crate::error::KvmPmuError;
use crate::observe::TrapObserver;
use crate::pebs;
use crate::thread::{ThreadContext, earliest};
use crate::time;
use crate::trap::cpl;
use crate::vcpu::VcpuAccess;

impl Traps {
    #[inline]
    pub(super) fn locked_out_until(&self) -> Option<Tsc> {
        let until = self.pmu.as_ref()?.claims().locked_out_until()?;
        (time::now() < until).then_some(until)
    }

    /// Everything that needs the stopped vCPU.
    pub(super) fn prepare(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
    ) -> Result<(), KvmPmuError> {
        self.write_pebs(vcpu, lent)?;
        if let (Some(pmu), Some(core)) = (&mut self.pmu, lent.thread.counters_mut())
            && (pmu.needs().stepping || self.stepping.is_active())
        {
            let gp_handler = self.gp.gate().map(|gate| gate.handler);
            let debug = &mut self.debug;
            let stepping = &mut self.stepping;
            if stepping.before_entry(vcpu, lent.memory, debug, (pmu, core), gp_handler)? {
                self.gp.want(debug);
            }
        }
        if self.pmu.as_ref().is_some_and(VcpuPmu::has_interrupt) {
            self.forward_pmi(vcpu, lent, time::now())?;
            self.forward_samples(vcpu, lent)?;
            self.forward_notices(vcpu, lent)?;
        }
        let stepped = self.pmu.as_ref().is_some_and(|pmu| pmu.needs().stepping);
        if let Some(pmu) = &self.pmu {
            // One that was restored, or reset, has had no write.
            self.gp.programmed(pmu.is_programmed());
        }
        if self.gp.is_over() {
            self.end_watch(vcpu, lent);
        }
        if self.gp.is_due(stepped) {
            self.watch_gp_handler(vcpu, lent, self.gp.walk_holds())?;
        }
        if !self.debug.is_idle() {
            self.debug.apply(vcpu)?;
        }
        Ok(())
    }

    /// Whether the guest is to be left at once, and whether registers are likely
    /// to be wanted at its exit.
    pub(super) fn next_entry(&mut self, thread: &ThreadContext) -> (bool, bool) {
        let (Some(pmu), Some(core)) = (&mut self.pmu, thread.counters()) else {
            return (false, false);
        };
        let needs = pmu.needs();
        if needs.counting {
            self.halt.entering(time::now(), !self.counting);
        }
        self.counting = needs.counting;
        let soon = self.registers_wanted > 0;
        self.registers_wanted = self.registers_wanted.saturating_sub(1);
        // An answer may have taken a slot away: it is sampled where the guest
        // stands now.
        (pmu.hosts().has_overflow(core), soon || needs.ring)
    }

    /// The guest is entered now, in SMM or not. True if an overflow is near: its PMI wants
    /// registers, and must not wait until they are fetched.
    pub(super) fn enter(&mut self, thread: &mut ThreadContext, smm: bool) -> bool {
        let now = time::now();
        self.entered = Some(now);
        let mut deadline = self.debug.deadline(self.is_quiet());
        if let (Some(pmu), Some(core)) = (&mut self.pmu, thread.counters_mut()) {
            pmu.observe(core, Progress::Entered { tsc: now });
            let due = pmu.deadline(core);
            self.due = due;
            let due = earliest(due, pmu.interrupt_due());
            deadline = earliest(deadline, due);
            deadline = earliest(deadline, self.gp.deadline());
            if smm && (pmu.pebs_due().is_some() || pmu.ibs_due().is_some()) {
                // KVM has no exit for the end of SMM.
                deadline = earliest(deadline, Some(now + self.debug.fresh_for()));
            }
        }
        thread.set_deadline(now, deadline);
        self.due.is_some_and(|due| due - now < self.near)
    }

    /// Reports to the PMU that the guest has stopped, and samples what overflowed.
    pub(super) fn settle(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        tsc: Tsc,
    ) -> Result<(), KvmPmuError> {
        let pmu = (&mut self.pmu, lent.thread.counters_mut());
        let ((Some(pmu), Some(core)), Some(entered)) = (pmu, self.entered) else {
            return Ok(());
        };
        let needs = pmu.needs();
        let mut halted = self.halt.passed(entered, tsc, needs.counting);
        if needs.counting && !self.started {
            // Until its start-up IPI a processor executes nothing, however long its
            // thread was awake for kicks.
            self.started = !matches!(
                vcpu.get_mp_state()?.mp_state,
                KVM_MP_STATE_UNINITIALIZED | KVM_MP_STATE_INIT_RECEIVED
            );
            if !self.started {
                halted = tsc - entered;
            }
        }
        let ring = if needs.ring {
            Some(Ring::from_cpl(cpl(&vcpu.get_sregs()?)))
        } else {
            None
        };
        let left = Progress::Left { tsc, halted, ring };
        pmu.observe(core, left);
        self.write_pebs(vcpu, lent)?;
        // What is recorded with an overflow may be a sample of IBS.
        self.sample_ibs(vcpu, lent)?;
        self.sample_pending(vcpu, lent.thread, lent.observer)?;
        if self.debug.is_active() {
            self.share_debug_registers(vcpu, lent)?;
        }
        Ok(())
    }

    /// Writes a PEBS record that is due, of the place where the guest stands.
    #[inline]
    pub(super) fn write_pebs(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
    ) -> Result<(), KvmPmuError> {
        let Some(needs) = self.pmu.as_ref().and_then(VcpuPmu::pebs_due) else {
            return Ok(());
        };
        if let (Some(pmu), Some(core)) = (&mut self.pmu, lent.thread.counters_mut()) {
            pebs::write(vcpu, lent.memory, (pmu, core), needs, None)?;
        }
        Ok(())
    }

    #[inline]
    pub(super) fn sample_pending(
        &mut self,
        vcpu: VcpuAccess<'_>,
        thread: &mut ThreadContext,
        observer: &mut dyn TrapObserver,
    ) -> Result<(), KvmPmuError> {
        let place = (thread.core(), self.process);
        match (&mut self.pmu, thread.counters_mut()) {
            (Some(pmu), Some(core)) if pmu.hosts().has_overflow(core) => {
                sample((pmu, core), vcpu, place, observer)
            }
            _ => Ok(()),
        }
    }
}

#[cold]
fn sample(
    (pmu, core): (&mut VcpuPmu, &mut CorePmu),
    vcpu: VcpuAccess<'_>,
    (number, process): (u16, i32),
    observer: &mut dyn TrapObserver,
) -> Result<(), KvmPmuError> {
    let (regs, sregs) = (vcpu.get_regs()?, vcpu.get_sregs()?);
    let wish = pmu.hosts().wish(core);
    let smm = vcpu.in_smm();
    if !wish.is_empty() && !smm {
        let tsc = || vcpu.guest_tsc().ok();
        observer.look(vcpu.id(), wish, (&regs, &sregs), &tsc);
    }
    let moment = Moment {
        tsc: time::now().0,
        ip: regs.rip,
        ring: Ring::from_cpl(cpl(&sregs)),
        cr3: sregs.cr3,
        vm: process,
        vcpu: vcpu.id().0.into(),
        core: number,
    };
    let quantities = observer.quantities();
    let in_smm = InSmm(quantities);
    pmu.sample_hosts(core, &moment, if smm { &in_smm } else { quantities });
    Ok(())
}

/// What is counted of a vCPU in SMM. It is nowhere in the kernel that the guest runs, as the
/// memory there is another.
struct InSmm<'a>(&'a dyn Quantities);

impl Quantities for InSmm<'_> {
    fn read(&self, which: VirtualPmd) -> Option<u64> {
        self.0.read(which)
    }
}
