//! The counter reservations of a machine's vCPUs: what all have in common, and
//! the unit of each.

mod plan;

pub use plan::{FollowsGrants, HypervisorCounters, PcrChoice, PcrPlan, PcrPlanError};

use std::sync::Arc;

use arbiter::{
    Auditor, Context, CounterId, Effects, GuardLimits, Layer, NoticeKind, PcrConfig, PcrUnit,
    Phase, Reason, Reply,
};
use pmu_virt::{CorePmu, Holdings, PmuModel, Reservations, Tsc, VcpuPmu};
use thiserror::Error;

use crate::audit::Holding;
use crate::entropy::Randomness;
use crate::firmware::Expected;

/// The hypervisor could not reserve its own counters.
#[derive(Debug, Error)]
pub enum ReservationError {
    /// The arbiter refused a counter.
    #[error("--hypervisor-counters: {counter} cannot be reserved: {reason}")]
    Refused { counter: CounterId, reason: Reason },
    /// There is no source of random cookies.
    #[error("--hypervisor-counters: the operating system has no random numbers for cookies")]
    NoRandom,
}

/// What the reservations of all vCPUs of a machine have in common.
#[derive(Debug, Clone)]
pub struct MachineReservations {
    /// Who may hold what, and what the hypervisor holds.
    pub plan: PcrPlan,
    /// The firmware's phase.
    pub phase: Arc<Phase>,
    /// This KVM has system management mode.
    pub smm: bool,
    /// What each vCPU holds.
    pub holdings: Holdings,
}

impl MachineReservations {
    /// What the firmware is expected to hold when its phase ends, if there is
    /// firmware.
    #[must_use]
    pub fn expected(&self) -> Option<Expected> {
        self.phase.has_firmware().then_some(Expected {
            held: self.plan.firmware,
            announced: self.plan.legacy,
        })
    }

    /// The unit of one vCPU. The hypervisor's own counters are reserved from
    /// the start, under a cookie that is forgotten at once: the hypervisor
    /// needs none to reach its own counters. `now` is the time by which the vCPU goes, which
    /// has `tsc_khz`.
    ///
    /// # Errors
    /// [`ReservationError`].
    pub fn of_vcpu(
        &self,
        model: &PmuModel,
        time: (u32, Tsc),
        audit: Box<dyn Auditor>,
    ) -> Result<Reservations, ReservationError> {
        self.of_vcpu_with(model, time, audit, Randomness::System)
    }

    /// The same for a vCPU whose cookies come from `random`.
    ///
    /// # Errors
    /// [`ReservationError`].
    pub fn of_vcpu_with(
        &self,
        model: &PmuModel,
        (tsc_khz, now): (u32, Tsc),
        mut audit: Box<dyn Auditor>,
        mut random: Randomness,
    ) -> Result<Reservations, ReservationError> {
        let ticks_per_ms = u64::from(tsc_khz.max(1));
        let mut unit = PcrUnit::new(PcrConfig {
            counters: model.counts(),
            widths: model.widths(),
            policy: self.plan.policy,
            scheme: self.plan.scheme,
            guard: GuardLimits::with_ticks_per_ms(ticks_per_ms),
            ticks_per_ms,
            phase: self.phase.clone(),
            legacy: self.plan.legacy,
            smm: self.smm,
        });
        if model.ibs() != 0 {
            unit = unit.with_samplers();
        }
        for counter in self.plan.hypervisor.iter() {
            let cookie = random.cookie().ok_or(ReservationError::NoRandom)?;
            let mut context = Context {
                now,
                entropy: &mut random,
                audit: &mut *audit,
            };
            // Nothing counts yet, so there is nothing to clear.
            let reserved = unit.reserve_for_hypervisor(counter, cookie, &mut context);
            let _ = reserved.map_err(|reason| ReservationError::Refused { counter, reason })?;
        }
        Ok(Reservations {
            unit,
            entropy: Box::new(random),
            audit,
            holdings: self.holdings.clone(),
        })
    }
}

/// Answers, for the hypervisor, all requests since the last call. It yields, unless a loaded host
/// context relies on the counter ([`VcpuPmu::hypervisor_can_yield`]). Nobody can ask for the
/// minimum of its share, so that stays. Of its other notices it only says that there
/// were some.
#[inline]
pub(crate) fn answer_questions(pmu: &mut VcpuPmu, mut core: Option<&mut CorePmu>) -> bool {
    let waiting = |pmu: &VcpuPmu| {
        let unit = pmu.claims().unit();
        unit.is_some_and(|unit| unit.has_notice(Layer::Hypervisor))
    };
    // An answer may cause the next request. Each counter is asked for at most
    // once, so this ends.
    let mut heard = false;
    while waiting(pmu) {
        heard = true;
        let yields = pmu.hypervisor_can_yield(core.as_deref());
        pmu.arbitrate(core.as_deref_mut(), |unit, cx| {
            ((), answer_one(unit, cx, yields))
        });
    }
    heard
}

#[cold]
fn answer_one(unit: &mut PcrUnit, cx: &mut Context<'_>, yields: bool) -> Effects {
    let notice = unit.next_notice(Layer::Hypervisor, cx.now);
    let asked = notice.filter(|notice| notice.kind == NoticeKind::Asked);
    let Some(counter) = asked.and_then(|notice| notice.counter) else {
        return Effects::NONE;
    };
    let reply = Reply { counter, yields };
    // A request that was withdrawn needs no answer.
    let replied = unit.reply(Layer::Hypervisor, reply, cx);
    replied.unwrap_or(Effects::NONE)
}

/// Who holds which counters of a PMU, and what they are programmed for.
#[must_use]
pub fn holdings(pmu: &VcpuPmu, core: Option<&CorePmu>) -> Vec<Holding> {
    let Some(unit) = pmu.claims().unit() else {
        return Vec::new();
    };
    let reports = pmu.report(core);
    let holding = |counter: CounterId| {
        let reservation = unit.bank().reservation(counter)?;
        let report = reports.iter().find(|report| report.counter == counter);
        Some(Holding {
            counter,
            owner: reservation.owner,
            private: reservation.is_private(),
            event: report.map(|report| report.event.to_string()),
        })
    };
    unit.bank().held().iter().filter_map(holding).collect()
}
