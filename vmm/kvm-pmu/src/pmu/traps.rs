//! The state behind a vCPU's traps, and how counts are settled around an entry.

use std::time::Duration;

use kvm_ioctls::VcpuFd;
use pmu_virt::perfmon::Moment;
use pmu_virt::{PmiThrottle, Progress, Ring, VcpuPmu};

use super::{KvmPmuParts, Lent};
use crate::debug::DebugControl;
use crate::error::KvmPmuError;
use crate::gp_watch::GpWatch;
use crate::halt::HaltClock;
use crate::observe::TrapObserver;
use crate::pmi::PendingPmi;
use crate::registers::VcpuAccess;
use crate::step_driver::StepDriver;
use crate::sys::rdtsc;
use crate::thread::{ThreadContext, earliest};
use crate::time::{Tsc, ticks};
use crate::trap::cpl;

/// How often the guest's own debug registers are looked at while ours are in
/// use: KVM has no exit for MOV to DR then.
const DEBUG_REFRESH: Duration = Duration::from_millis(1);

/// Exits after one that wanted registers during which KVM hands them over at
/// once: drivers write selects and read counters in runs. Each costs an exit
/// about a twentieth more, fetching them by ioctl half as much again.
pub(super) const SYNCED_EXITS: u8 = 16;

/// What a PMU does with a stopped vCPU. The register cache is apart, so that both
/// can be borrowed at once.
#[derive(Debug)]
pub(super) struct Traps {
    pub(super) tsc_khz: u32,
    pub(super) pmu: Option<VcpuPmu>,
    /// MSRs that are a PMU's, whoever's model.
    pub(super) ranges: Vec<(u32, u32)>,
    pub(super) debug: DebugControl,
    pub(super) gp: GpWatch,
    pub(super) stepping: StepDriver,
    pub(super) throttle: PmiThrottle,
    pub(super) pending_pmi: Option<PendingPmi>,
    pub(super) halt: HaltClock,
    pub(super) counting: bool,
    pub(super) warned_full: bool,
    /// Exits yet to come at which registers are likely to be wanted.
    pub(super) registers_wanted: u8,
    /// TSC at the last entry; `None` if the guest was not entered.
    pub(super) entered: Option<u64>,
    /// The PMU's deadline as of the last entry.
    pub(super) due: Option<Tsc>,
}

impl Traps {
    pub(super) fn new(fd: &VcpuFd, parts: KvmPmuParts) -> Self {
        let tsc_khz = parts.tsc_khz.max(1);
        let floor = ticks(parts.pmi_floor, tsc_khz);
        let refresh = ticks(DEBUG_REFRESH, tsc_khz);
        Self {
            tsc_khz,
            pmu: parts.pmu,
            ranges: pmu_virt::all_pmu_msr_ranges(),
            debug: DebugControl::new(parts.quirks, refresh),
            gp: GpWatch::default(),
            stepping: StepDriver::new(parts.step),
            throttle: PmiThrottle::new(floor),
            pending_pmi: None,
            halt: HaltClock::new(fd, parts.id, tsc_khz),
            counting: false,
            warned_full: false,
            registers_wanted: 0,
            entered: None,
            due: None,
        }
    }

    pub(super) fn locked_out_until(&self) -> Option<Tsc> {
        let until = Tsc(self.pmu.as_ref()?.barred_until()?);
        (Tsc::now() < until).then_some(until)
    }

    /// Everything that needs the stopped vCPU.
    pub(super) fn prepare(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
    ) -> Result<(), KvmPmuError> {
        if let Some(pmu) = &mut self.pmu {
            let gp_handler = self.gp.gate().map(|gate| gate.handler);
            let debug = &mut self.debug;
            let stepping = &mut self.stepping;
            if stepping.before_entry(vcpu, lent.memory, debug, pmu, gp_handler)? {
                self.gp.want(debug);
            }
        }
        self.forward_pmi(vcpu, lent, rdtsc())?;
        self.forward_notices(vcpu, lent)?;
        Ok(self.debug.apply(vcpu)?)
    }

    /// Whether the guest is to be left at once, and whether registers are likely
    /// to be wanted at its exit.
    pub(super) fn next_entry(&mut self) -> (bool, bool) {
        let Some(pmu) = &mut self.pmu else {
            return (false, false);
        };
        let needs = pmu.needs();
        if needs.counting {
            self.halt.entering(rdtsc(), !self.counting);
        }
        self.counting = needs.counting;
        let soon = self.registers_wanted > 0;
        self.registers_wanted = self.registers_wanted.saturating_sub(1);
        // An answer may have taken a slot away: it is sampled where the guest
        // stands now.
        (pmu.has_host_overflow(), soon || needs.ring)
    }

    /// The guest is entered now.
    pub(super) fn enter(&mut self, thread: &mut ThreadContext) {
        let now = rdtsc();
        self.entered = Some(now);
        let mut deadline = None;
        if let Some(pmu) = &mut self.pmu {
            pmu.observe(Progress::Entered { tsc: now });
            let due = pmu.deadline();
            self.due = due.map(Tsc);
            deadline = earliest(due, self.throttle.deadline());
        }
        thread.set_deadline(now, deadline);
    }

    /// Tells the PMU that the guest has stopped, and samples what overflowed.
    pub(super) fn settle(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        tsc: u64,
    ) -> Result<(), KvmPmuError> {
        let (Some(pmu), Some(entered)) = (&mut self.pmu, self.entered) else {
            return Ok(());
        };
        let needs = pmu.needs();
        let halted = self.halt.passed(entered, tsc, needs.counting);
        let ring = if needs.ring {
            Some(Ring::from_cpl(cpl(&vcpu.get_sregs()?)))
        } else {
            None
        };
        pmu.observe(Progress::Left { tsc, halted, ring });
        self.sample_pending(vcpu, lent.thread.core(), lent.observer)?;
        // A guest that sets breakpoints while ours are in use is noticed here.
        if self.debug.is_active() {
            self.debug.refresh_stale(vcpu)?;
        }
        Ok(())
    }

    #[inline]
    pub(super) fn sample_pending(
        &mut self,
        vcpu: VcpuAccess<'_>,
        core: u16,
        observer: &mut dyn TrapObserver,
    ) -> Result<(), KvmPmuError> {
        match &mut self.pmu {
            Some(pmu) if pmu.has_host_overflow() => sample(pmu, vcpu, core, observer),
            _ => Ok(()),
        }
    }
}

fn sample(
    pmu: &mut VcpuPmu,
    vcpu: VcpuAccess<'_>,
    core: u16,
    observer: &mut dyn TrapObserver,
) -> Result<(), KvmPmuError> {
    let (regs, sregs) = (vcpu.get_regs()?, vcpu.get_sregs()?);
    let moment = Moment {
        tsc: rdtsc(),
        ip: regs.rip,
        ring: Ring::from_cpl(cpl(&sregs)),
        cr3: sregs.cr3,
        vm: std::process::id().cast_signed(),
        vcpu: vcpu.id().0.into(),
        core,
    };
    pmu.sample_hosts(&moment, observer.quantities());
    Ok(())
}
