//! What tools ask of the owners of a vCPU's counters, on the vCPU's thread.

use arbiter::{Cookie, CounterId, Effects, Outcome, PcrUnit, Policy, Reason, Scheme};
use pmu_virt::perfmon::GuestLimit;
use pmu_virt::{CorePmu, VcpuPmu};

use crate::job::{Ask, Done, GivenUp, Job, Work};

/// The owners of one vCPU's counters, and what they were asked and have not answered.
#[derive(Debug, Default)]
pub(crate) struct Owners {
    /// Dropped with its thread it comes back to the server, as every job does.
    waiting: Option<(Job, Cookie)>,
}

impl Owners {
    /// Does a job that asks them something. One that waits for their answer is done in
    /// [`Owners::hear`].
    pub(crate) fn serve(&mut self, job: Job, pmu: &mut VcpuPmu, core: &mut CorePmu) {
        match job.work {
            Some(Work::Ask(Ask::KeepTo { limit, is_there })) => {
                self.ask(job, pmu, core, (limit, is_there));
            }
            Some(Work::Ask(Ask::NoMore)) => {
                if let Some((asked, cookie)) = self.waiting.take() {
                    pmu.host_side(Some(&mut *core)).ask_no_more(cookie);
                    // They may have answered just before.
                    let outcome = pmu
                        .host_side(Some(core))
                        .owners_answer()
                        .unwrap_or_default();
                    finish(asked, pmu, outcome, cookie);
                }
                job.act(|_, _| Done::Settled);
            }
            Some(Work::Ask(Ask::GiveBack(GivenUp { counters, cookie }))) => {
                pmu.host_side(Some(core)).give_back(counters, cookie);
                job.act(|_, _| Done::Settled);
            }
            // It comes back undone.
            _ => drop(job),
        }
    }

    fn ask(&mut self, job: Job, pmu: &mut VcpuPmu, core: &mut CorePmu, what: (GuestLimit, bool)) {
        let drawn = pmu.arbitrate(Some(&mut *core), |_, cx| (cx.entropy.bits(), Effects::NONE));
        let Some(bits) = drawn else {
            // Without reservations there are no owners.
            return job.act(|_, _| Done::Asked(Ok(None)));
        };
        let Some(cookie) = bits.map(Cookie::from_random) else {
            let why = "the operating system has no random numbers for a cookie".to_owned();
            return job.act(|_, _| Done::Asked(Err(why)));
        };
        let (limit, is_there) = what;
        let mut tools = pmu.host_side(Some(core));
        match tools.ask_owners(limit, is_there, cookie) {
            Some(Ok(Outcome::Pending)) => self.waiting = Some((job, cookie)),
            Some(Ok(outcome)) => finish(job, pmu, outcome, cookie),
            Some(Err(reason)) => {
                let why = why_not(pmu, job.target().number(), reason);
                job.act(|_, _| Done::Asked(Err(why)));
            }
            None => job.act(|_, _| Done::Asked(Ok(None))),
        }
    }

    /// A notice came for the hypervisor: the owners may have answered.
    pub(crate) fn hear(&mut self, pmu: &mut VcpuPmu, core: Option<&mut CorePmu>) {
        if self.waiting.is_none() {
            return;
        }
        if let Some(outcome) = pmu.host_side(core).owners_answer()
            && let Some((job, cookie)) = self.waiting.take()
        {
            finish(job, pmu, outcome, cookie);
        }
    }
}

/// The owners have answered.
fn finish(job: Job, pmu: &VcpuPmu, outcome: Outcome, cookie: Cookie) {
    let number = job.target().number();
    let asked = match outcome {
        Outcome::Granted(counters) => Ok(Some(GivenUp { counters, cookie })),
        Outcome::Nothing => Ok(None),
        Outcome::Refused(reason) => Err(why_not(pmu, number, reason)),
        Outcome::Pending => Err(why_not(pmu, number, Reason::Withdrawn)),
    };
    job.act(|_, _| Done::Asked(asked));
}

/// Who has the counters of a vCPU, and why they keep them.
fn why_not(pmu: &VcpuPmu, vcpu: usize, reason: Reason) -> String {
    let Some(unit) = pmu.claims().unit() else {
        return format!("vCPU {vcpu}: {reason}");
    };
    let who = holders(unit);
    if unit.scheme() == Scheme::Independent {
        return format!(
            "vCPU {vcpu}: {who}, and --scheme independent asks nobody; umpire pcr --scheme \
             interacting does"
        );
    }
    format!("vCPU {vcpu}: {who}: {reason}")
}

fn holders(unit: &PcrUnit) -> String {
    let of_guest = Policy::LAYERS.into_iter().filter(|layer| layer.is_guest());
    let each = of_guest.filter_map(|layer| {
        let held = unit.bank().held_by(layer);
        let held = held
            .iter()
            .filter(|one| matches!(one, CounterId::Programmable(_)));
        let names: Vec<String> = held.map(|counter| counter.to_string()).collect();
        (!names.is_empty()).then(|| format!("the {layer} holds {}", names.join(" ")))
    });
    let each: Vec<String> = each.collect();
    if each.is_empty() {
        return "nobody in the guest has reserved a counter there".to_owned();
    }
    each.join(", ")
}
