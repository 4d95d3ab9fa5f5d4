//! What host tools ask of the run loop: jobs from the desk, samples at
//! overflows, and a vCPU that waits for its tool.

use pmu_virt::perfmon::Moment;
use pmu_virt::{CorePmu, Ring, VcpuPmu};

use super::kick::Seat;
use super::run::{Core, Vcpu, VcpuFailure};
use crate::kvm::KvmVcpu;
use crate::perfmon::{Job, Rested, Snapshot, close_vcpu, serve_vcpu};
use crate::sched::Rest;
use crate::sys::rdtsc;
use crate::trap::cpl;

impl Core {
    /// Whether a tool's context keeps the vCPU off its core.
    pub(super) fn is_blocked(&self) -> bool {
        self.pmu.as_ref().is_some_and(VcpuPmu::is_blocked)
    }

    /// Whether something may lie on the desk: one load, where there is a desk.
    #[inline]
    pub(super) fn has_jobs(&self) -> bool {
        self.host.as_ref().is_some_and(|host| host.tray.has_jobs())
    }

    /// The thread of `seat` runs the vCPU from now on.
    pub(super) fn comes_to(&self, seat: &Seat) {
        if let Some(host) = &self.host {
            if !host.is_shared() {
                host.tray.sit_down();
            }
            host.tray.moved_to(seat.core().into());
            self.tally.comes();
        }
    }

    /// No thread runs the vCPU from now on, or it has woken meanwhile.
    pub(super) fn note_rest(&self, rest: Rest) {
        if self.host.is_some() {
            self.tally.goes(match rest {
                Rest::Runnable => Rested::Runnable,
                Rest::Idle => Rested::Idle,
                Rest::Barred { .. } | Rest::Blocked => Rested::Held,
            });
        }
    }

    /// Does what lies on the desk, while the guest does not run.
    #[inline]
    pub(super) fn do_jobs(&mut self, kvm: &KvmVcpu, seat: &mut Seat) -> Result<(), VcpuFailure> {
        match self.has_jobs() {
            true => self.do_waiting_jobs(kvm, seat),
            false => Ok(()),
        }
    }

    fn do_waiting_jobs(&mut self, kvm: &KvmVcpu, seat: &mut Seat) -> Result<(), VcpuFailure> {
        let (Some(host), Some(pmu), Some(core)) = (&self.host, &mut self.pmu, &mut seat.pmu) else {
            return Ok(());
        };
        while let Some(job) = host.tray.take() {
            serve_vcpu(job, (pmu, core), &self.tally);
        }
        self.sample_pending(kvm, seat)
    }

    /// Counters of tools that have overflowed get their samples and notices,
    /// before the guest runs on.
    #[inline]
    pub(super) fn sample_pending(
        &mut self,
        kvm: &KvmVcpu,
        seat: &mut Seat,
    ) -> Result<(), VcpuFailure> {
        match (&self.pmu, &seat.pmu) {
            (Some(pmu), Some(core)) if pmu.has_host_overflow(core) => self.sample(kvm, seat),
            _ => Ok(()),
        }
    }

    fn sample(&mut self, kvm: &KvmVcpu, seat: &mut Seat) -> Result<(), VcpuFailure> {
        let number = seat.core();
        let (Some(pmu), Some(core)) = (&mut self.pmu, &mut seat.pmu) else {
            return Ok(());
        };
        let (regs, sregs) = (kvm.get_regs()?, kvm.get_sregs()?);
        let moment = Moment {
            tsc: rdtsc(),
            ip: regs.rip,
            ring: Ring::from_cpl(cpl(&sregs)),
            cr3: sregs.cr3,
            vm: std::process::id().cast_signed(),
            vcpu: kvm.id().0.into(),
            core: number,
        };
        pmu.sample_hosts(core, &moment, &self.tally);
        Ok(())
    }
}

impl Vcpu {
    /// Whether something may lie on its desk.
    pub(crate) fn has_jobs(&self) -> bool {
        self.core.has_jobs()
    }

    /// Does what lies there, on the core that has it, while it is not run.
    pub(crate) fn do_jobs(&mut self, seat: &mut Seat) -> Result<(), VcpuFailure> {
        self.core.do_jobs(&self.kvm, seat)
    }

    /// Does a job for the core that it is on, that of `seat`. `values` are the
    /// core's.
    pub(crate) fn do_core_job(
        &mut self,
        job: Job,
        seat: &mut Seat,
        values: &Snapshot,
    ) -> Result<(), VcpuFailure> {
        if let (Some(pmu), Some(core)) = (&mut self.core.pmu, &mut seat.pmu) {
            serve_vcpu(job, (pmu, core), values);
        }
        // What the job has found overflowed is this vCPU's, not of who comes next.
        self.core.sample_pending(&self.kvm, seat)
    }

    /// Its quantities now; asked on the thread that has it.
    pub(crate) fn quantities(&self) -> Snapshot {
        Snapshot::of(&self.core.tally)
    }

    /// `core` has it from now on.
    pub(crate) fn moves_to(&self, core: usize) {
        if let Some(host) = &self.core.host {
            host.tray.moved_to(core);
        }
    }

    /// Whether a tool's context keeps it off its core.
    pub(crate) fn is_blocked(&self) -> bool {
        self.core.is_blocked()
    }

    /// Nothing ran on `core`, on which it is, for so long.
    pub(crate) fn pass_idle(&mut self, core: &mut CorePmu, ns: u64) {
        if let Some(pmu) = &mut self.core.pmu {
            pmu.with_core(core, |core| core.pass_idle(ns));
        }
    }

    /// It has ended: tools get their contexts back. `core` is the one that it was
    /// on, if it was on one.
    pub(crate) fn leave_desk(&mut self, core: Option<&mut CorePmu>) {
        if let Some(host) = self.core.host.take() {
            let alone = !host.is_shared();
            let pmu = self.core.pmu.as_mut();
            close_vcpu(host.tray, (pmu, core), alone, &self.core.tally);
        }
    }
}
