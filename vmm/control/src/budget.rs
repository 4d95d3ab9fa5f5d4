//! What the guest of a vCPU may use, shown and set on its thread.

use arbiter::{CounterId, CounterSet, Layer, PcrUnit, PerKind, Reason};
use perfmon_abi::wire::budget::{
    ALL, BudgetChange, BudgetInfo, KindBudget, LackingCounter, LeavingCounter,
};
use perfmon_abi::wire::{Errno, Refusal};
use pmu_virt::{CorePmu, Ticks, Tsc, UnavailableReason, VcpuPmu};

use crate::pcr::LONGEST_GRACE_MS;

/// A century.
const LONGEST_MS: u64 = 100 * 365 * 86_400_000;

/// Makes a change to the budget of vCPU `vcpu`, which is on `core`, if there is one, and
/// tells what there is then.
pub(crate) fn administer(
    vcpu: usize,
    pmu: &mut VcpuPmu,
    core: &mut CorePmu,
    change: Option<BudgetChange>,
) -> Result<Box<BudgetInfo>, Refusal> {
    let khz = core.tsc_khz();
    if let Some(change) = change {
        let budget = pmu.claims().budget();
        // What is not named lasts as it did, or is as it is for a time.
        let lasting = budget.until.filter(|_| change.for_ms.is_none());
        let before = lasting.map_or(budget.asked, |end| end.most);
        check(&change, pmu.there())?;
        let most = PerKind {
            programmable: change.programmable.unwrap_or(before.programmable),
            fixed: change.fixed.unwrap_or(before.fixed),
        };
        let ticks = |ms: u64| Ticks(ms.min(LONGEST_MS).saturating_mul(khz));
        let until = change.for_ms.map(|ms| pmu.claims().time() + ticks(ms));
        let grace_ms = change.grace_ms.min(LONGEST_GRACE_MS);
        pmu.set_budget(Some(core), most, grace_ms, until)?;
    }
    Ok(info(vcpu, pmu, core, khz))
}

/// A number that is more than there are counters is none that somebody meant.
fn check(change: &BudgetChange, there: PerKind) -> Result<(), Refusal> {
    let kinds = [
        ("programmable", change.programmable, there.programmable),
        ("fixed", change.fixed, there.fixed),
    ];
    for (kind, asked, there) in kinds {
        if let Some(asked) = asked.filter(|asked| *asked != ALL && *asked > there) {
            let reason = format!("{kind}={asked}: the PMU has {there}; give at most that, or all");
            return Err(Refusal::new(Errno::EINVAL, reason));
        }
    }
    Ok(())
}

fn info(vcpu: usize, pmu: &VcpuPmu, core: &CorePmu, khz: u64) -> Box<BudgetInfo> {
    let budget = *pmu.claims().budget();
    let now = pmu.claims().time();
    let ms = |at: Tsc| (at - now).0.div_ceil(khz);
    Box::new(BudgetInfo {
        vcpu: u32::try_from(vcpu).unwrap_or(u32::MAX),
        generation: budget.generation,
        programmable: kind(pmu, core, CounterId::Programmable(0)),
        fixed: kind(pmu, core, CounterId::Fixed(0)),
        ends_in_ms: budget.until.map(|end| ms(end.at)),
    })
}

fn kind(pmu: &VcpuPmu, core: &CorePmu, of_kind: CounterId) -> KindBudget {
    let limit = |most: PerKind| Some(most.of(of_kind)).filter(|most| *most != ALL);
    let count = |set: CounterSet| PerKind::count(set).of(of_kind);
    let budget = pmu.claims().budget();
    let report = pmu.report(Some(core));
    let running = report.iter().filter(|one| one.running);
    let sampling = pmu.sampling();
    let sampling = sampling.iter().filter(|counter| counter.is_like(of_kind));
    let lacking = pmu.lacking().into_iter();
    let lacking = lacking.filter(|(counter, _)| counter.is_like(of_kind));
    let unit = pmu.claims().unit();
    let held = |unit: &PcrUnit| {
        let bank = unit.bank();
        bank.held_by(Layer::Firmware) | bank.held_by(Layer::GuestKernel)
    };
    let held = unit.map_or(CounterSet::EMPTY, held);
    let leaving = held.iter().filter(|counter| counter.is_like(of_kind));
    let leaving = leaving.filter_map(|counter| {
        let unit = unit?;
        let revocation = unit.bank().reservation(counter)?.revocation?;
        (revocation.reason == Reason::Budget).then(|| LeavingCounter {
            counter: counter.to_string(),
            in_ms: unit.ms_until(revocation.at, pmu.claims().time()),
        })
    });
    KindBudget {
        most: limit(budget.most()),
        leased: limit(budget.lease),
        later: budget.until.and_then(|_| limit(budget.later())),
        there: pmu.there().of(of_kind),
        counting: count(running.map(|one| one.counter).chain(sampling).collect()),
        reserved: count(held),
        lacking: lacking
            .map(|(counter, reason)| LackingCounter {
                counter: counter.to_string(),
                reason: match (reason, limit(budget.most())) {
                    (UnavailableReason::Waiting, Some(most)) => {
                        let leased = budget.lease.of(of_kind) < budget.asked.of(of_kind);
                        let whose = if leased { "lease" } else { "budget" };
                        format!("{reason}; the VM's {whose} allows {most} such counters at a time")
                    }
                    _ => reason.to_string(),
                },
            })
            .collect(),
        leaving: leaving.collect(),
    }
}
