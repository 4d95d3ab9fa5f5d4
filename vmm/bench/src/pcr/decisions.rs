//! What the arbiter's own part of a request costs, without a guest: several vCPUs in turn,
//! with counters that the hypervisor holds already.

use std::sync::Arc;
use std::time::Instant;

use arbiter::{Cookie, Effects, Layer, Outcome, Phase, Reply, Request, Wanted};
use pmu_virt::{ClockBackend, CorePmu, Grant, Holdings, OwnerId, PmuModel, Tsc, VcpuPmu};
use serde::Serialize;
use vmm::audit::AuditTrail;
use vmm::config::{HypervisorCounters, PcrChoice};
use vmm::firmware::SetAside;
use vmm::reservations::MachineReservations;

use super::PcrOptions;
use crate::error::BenchError;
use crate::stats::{Percentiles, percentiles};

/// A clock of nanoseconds.
const NS_PER_MS: u32 = 1_000_000;

/// The kernel of each vCPU asks for a counter and gives it back.
#[derive(Clone, Debug, Serialize)]
pub struct DecisionRow {
    /// vCPUs that do so in turn.
    pub vcpus: u8,
    /// Counters of each that the hypervisor holds.
    pub held: u8,
    /// Counters of each.
    pub there: u8,
    /// How the counter was come by, or why it was not.
    pub outcome: String,
    /// The arbiter's time, all steps together. Grace is not waited for.
    pub time: Percentiles,
}

/// A vCPU whose kernel asks.
struct Asker {
    pmu: VcpuPmu,
    core: CorePmu,
    now: Tsc,
}

pub(super) fn measure(
    options: &PcrOptions,
    model: &PmuModel,
    tsc_khz: u32,
) -> Result<DecisionRow, BenchError> {
    let guest = |error: &dyn std::fmt::Display| BenchError::Guest(error.to_string());
    let choice = PcrChoice {
        policy: options.policy,
        scheme: options.scheme,
        hypervisor: HypervisorCounters::Last(options.contention),
        ..PcrChoice::default()
    };
    let plan = choice.plan(model, SetAside::default());
    let machine = MachineReservations {
        plan: plan?,
        phase: Arc::new(Phase::new(false)),
        smm: false,
        holdings: Holdings::default(),
    };
    let trail = AuditTrail::new(options.vcpus);
    let mut askers = Vec::new();
    for (owner, auditor) in (0..).zip(trail.auditors()) {
        let reservations = machine.of_vcpu(model, (tsc_khz, vmm::vcpu::now()), Box::new(auditor));
        let pmu = VcpuPmu::detached(OwnerId(owner), model.clone(), Grant::everything());
        let mut asker = Asker {
            pmu: pmu.with_reservations(reservations.map_err(|error| guest(&error))?),
            core: CorePmu::new(Box::new(ClockBackend::new())),
            now: Tsc(0),
        };
        asker.pmu.attach(&mut asker.core);
        askers.push(asker);
    }
    let mut ns: Vec<u64> = Vec::new();
    let mut outcome = None;
    // The first time of each is for the caches.
    for turn in 0..options.iterations.div_ceil(options.vcpus.into()) + 1 {
        for asker in &mut askers {
            let began = Instant::now();
            let found = asker.ask_and_give_back();
            if turn > 0 {
                ns.push(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
            }
            if outcome.as_ref().is_some_and(|known| *known != found) {
                let reason = format!("one request was {found}, another one was not");
                return Err(BenchError::Guest(reason));
            }
            outcome = Some(found);
            asker.restore(options.contention);
        }
    }
    let time = percentiles(&mut ns, NS_PER_MS);
    Ok(DecisionRow {
        vcpus: options.vcpus,
        held: options.contention,
        there: model.programmable(),
        outcome: outcome.unwrap_or_default(),
        time: time.ok_or_else(|| BenchError::Guest("no request was made".to_owned()))?,
    })
}

impl Asker {
    /// A request and all that follows from it.
    fn ask_and_give_back(&mut self) -> String {
        let cookie = Cookie::from_random(7);
        let request = Request::Reserve {
            wanted: Wanted::Any(1),
            cookie,
            lease_ms: None,
            event: None,
        };
        let mut how = "granted".to_owned();
        let mut outcome = self.request(request);
        while outcome == Outcome::Pending {
            // The hypervisor yields what it is asked for; else the grace ends.
            let asked = self.pmu.arbitrate(Some(&mut self.core), |unit, cx| {
                let notice = unit.next_notice(Layer::Hypervisor, cx.now);
                let counter = notice.and_then(|notice| notice.counter);
                let reply = counter.map(|counter| Reply {
                    counter,
                    yields: true,
                });
                let effects = reply.and_then(|reply| unit.reply(Layer::Hypervisor, reply, cx).ok());
                (effects.is_some(), effects.unwrap_or(Effects::NONE))
            });
            if asked == Some(true) {
                how = "granted, by the hypervisor's reply".to_owned();
            } else {
                how = "granted, by revocation".to_owned();
                self.now = self.pmu.claims().due().unwrap_or(self.now);
                self.pmu.tick(Some(&mut self.core), self.now);
            }
            let answer = self.pmu.claims().unit();
            outcome = answer.map_or(Outcome::Nothing, |unit| {
                unit.answer(Layer::GuestKernel).outcome
            });
        }
        match outcome {
            Outcome::Granted(counters) => {
                for counter in counters.iter() {
                    let _ = self.request(Request::Release { counter, cookie });
                }
                how
            }
            Outcome::Refused(reason) => format!("refused: {reason}"),
            other => format!("{other:?}"),
        }
    }

    fn request(&mut self, request: Request) -> Outcome {
        let asked = self.pmu.arbitrate(Some(&mut self.core), |unit, cx| {
            match unit.request(Layer::GuestKernel, request, cx) {
                Ok((answer, effects)) => (answer.outcome, effects),
                Err(reason) => (Outcome::Refused(reason), Effects::NONE),
            }
        });
        asked.unwrap_or(Outcome::Nothing)
    }

    /// What the hypervisor has yielded or lost it takes back, up to `held`, and nobody has
    /// a notice left.
    fn restore(&mut self, held: u8) {
        let _ = self.pmu.arbitrate(Some(&mut self.core), |unit, cx| {
            while unit.next_notice(Layer::Hypervisor, cx.now).is_some() {}
            while unit.next_notice(Layer::GuestKernel, cx.now).is_some() {}
            let free: Vec<_> = unit.bank().free().iter().collect();
            let missing = u32::from(held).saturating_sub(unit.bank().held().len());
            let last = free
                .iter()
                .rev()
                .take(usize::try_from(missing).unwrap_or(0));
            for counter in last {
                // If policy is against it, the next outcome is another one, which is told.
                let _ = unit.reserve_for_hypervisor(*counter, Cookie::from_random(9), cx);
            }
            ((), Effects::NONE)
        });
    }
}
