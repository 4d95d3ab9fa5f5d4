//! The counter reservations of a vCPU, shown and administered on its thread.

use arbiter::{
    AdminAct, AdminError, Cookie, CounterId, Effects, Layer, PcrUnit, Policy, Scheme, Share, Tsc,
    Verdict,
};
use perfmon_abi::wire::pcr::{
    CounterRead, LayerInfo, PcrAct, PcrInfo, Presented, ReservationInfo, ShareChange,
};
use perfmon_abi::wire::{Errno, Refusal};
use pmu_virt::{CorePmu, CounterReport, VcpuPmu};

/// A day. Who is told so long before loses nothing in practice.
pub(crate) const LONGEST_GRACE_MS: u32 = 86_400_000;

/// Does `act` to the reservations of vCPU `vcpu`, which is on `core`, and tells what
/// there is then.
pub(crate) fn administer(
    vcpu: usize,
    pmu: &mut VcpuPmu,
    core: &mut CorePmu,
    act: &PcrAct,
) -> Result<Box<PcrInfo>, Refusal> {
    if let PcrAct::Read { counter, cookie } = act
        && pmu.claims().unit().is_some()
    {
        return read(vcpu, pmu, core, counter, *cookie);
    }
    let reports = pmu.report(Some(core));
    if let (PcrAct::Show, Some(unit)) = (act, pmu.claims().unit()) {
        // A look leaves no trace in the audit.
        return Ok(info(vcpu, unit, pmu.claims().time(), &reports));
    }
    let done = pmu.arbitrate(Some(core), |unit, cx| {
        let effects = match wanted(act, unit.policy()) {
            Ok(None) => Ok(Effects::NONE),
            Ok(Some(act)) => unit.administer(act, cx).map_err(refused),
            Err(refusal) => Err(refusal),
        };
        match effects {
            Ok(effects) => (Ok(info(vcpu, unit, cx.now, &reports)), effects),
            Err(refusal) => (Err(refusal), Effects::NONE),
        }
    });
    done.unwrap_or_else(|| {
        // What makes no sense makes none here either.
        wanted(act, &Policy::default())?;
        let reason = "the VM has no counter reservations: it runs with --pcr off";
        Err(Refusal::new(Errno::EOPNOTSUPP, reason))
    })
}

/// Reads a counter as the hypervisor, by the cookie that the tool's user has.
fn read(
    vcpu: usize,
    pmu: &mut VcpuPmu,
    core: &mut CorePmu,
    counter: &str,
    Presented(cookie): Presented,
) -> Result<Box<PcrInfo>, Refusal> {
    if Cookie::new(cookie).is_none() {
        return Err(invalid("a cookie has 48 bits".to_owned()));
    }
    let named = counter_named(counter)?;
    let read = pmu.read_as_hypervisor(Some(core), named, cookie);
    let read = read.ok_or_else(|| invalid(format!("there is no {counter}")))?;
    let read = read.map_or_else(
        |verdict| match verdict {
            Verdict::Fault => CounterRead::Faulted,
            Verdict::Drop { .. } | Verdict::Permit => CounterRead::Dropped,
        },
        CounterRead::Value,
    );
    let mut shown = administer(vcpu, pmu, core, &PcrAct::Show)?;
    shown.read = Some(read);
    Ok(shown)
}

fn refused(error: AdminError) -> Refusal {
    let errno = match error {
        AdminError::Unreserved(_) => Errno::ENOENT,
        AdminError::NoCounter(_) | AdminError::Layer(_) | AdminError::Policy(_) => Errno::EINVAL,
    };
    Refusal::new(errno, error.to_string())
}

fn invalid(reason: String) -> Refusal {
    Refusal::new(Errno::EINVAL, reason)
}

/// What is to be done, where `policy` is in force; `None` for nothing.
fn wanted(act: &PcrAct, policy: &Policy) -> Result<Option<AdminAct>, Refusal> {
    let bar = |name: &str, barred| {
        let layer = layer_named(name)?;
        Ok::<_, Refusal>(AdminAct::Bar { layer, barred })
    };
    Ok(Some(match act {
        PcrAct::Show | PcrAct::Read { .. } => return Ok(None),
        PcrAct::Revoke { counter, grace_ms } => AdminAct::Revoke {
            counter: counter_named(counter)?,
            grace_ms: (*grace_ms).min(LONGEST_GRACE_MS),
        },
        PcrAct::Bar { layer } => bar(layer, true)?,
        PcrAct::Unbar { layer } => bar(layer, false)?,
        PcrAct::Policy { shares } => {
            let mut policy = *policy;
            for change in shares {
                let share = match layer_named(&change.layer)? {
                    Layer::Firmware => &mut policy.firmware,
                    Layer::GuestKernel => &mut policy.kernel,
                    _ => &mut policy.hypervisor,
                };
                change_share(share, change);
            }
            AdminAct::SetPolicy(policy)
        }
        PcrAct::Scheme { scheme } => {
            let named = Scheme::named(scheme).ok_or_else(|| {
                invalid(format!(
                    "'{scheme}' is no scheme; give single, independent or interacting"
                ))
            })?;
            AdminAct::SetScheme(named)
        }
    }))
}

/// Makes a change of a layer's share.
pub fn change_share(share: &mut Share, change: &ShareChange) {
    let set = |value: &mut u8, new: Option<u8>| *value = new.unwrap_or(*value);
    set(&mut share.min.programmable, change.min);
    set(&mut share.max.programmable, change.max);
    set(&mut share.min.fixed, change.min_fixed);
    set(&mut share.max.fixed, change.max_fixed);
    set(&mut share.priority, change.priority);
    if let Some(ms) = change.lease_ms {
        share.lease_ms = (ms != 0).then_some(ms);
    }
}

/// The layers that can hold counters, by the words of options.
const LAYERS: [(&str, Layer); 3] = [
    ("firmware", Layer::Firmware),
    ("hypervisor", Layer::Hypervisor),
    ("kernel", Layer::GuestKernel),
];

fn layer_named(name: &str) -> Result<Layer, Refusal> {
    let layer = LAYERS.iter().find(|(word, _)| *word == name);
    layer.map(|(_, layer)| *layer).ok_or_else(|| {
        invalid(format!(
            "'{name}' is no layer that holds counters; give firmware, hypervisor or kernel"
        ))
    })
}

fn word_of(layer: Layer) -> String {
    let word = LAYERS.iter().find(|(_, one)| one.code() == layer.code());
    word.map_or("user", |(word, _)| *word).to_owned()
}

fn counter_named(name: &str) -> Result<CounterId, Refusal> {
    let all = (0..64).filter_map(CounterId::at_position);
    let counter = all.into_iter().find(|counter| counter.to_string() == name);
    counter.ok_or_else(|| {
        invalid(format!(
            "'{name}' is no counter; give PMC0, FIXED0 or IBSOP, say"
        ))
    })
}

fn info(vcpu: usize, unit: &PcrUnit, now: Tsc, reports: &[CounterReport]) -> Box<PcrInfo> {
    let reservation = |counter: CounterId| {
        let held = unit.bank().reservation(counter)?;
        let report = reports.iter().find(|report| report.counter == counter);
        Some(ReservationInfo {
            counter: counter.to_string(),
            layer: word_of(held.owner),
            private: held.is_private(),
            lease_left_ms: held.lease.map(|at| unit.ms_until(at, now)),
            revoked_in_ms: held.revocation.map(|one| unit.ms_until(one.at, now)),
            revoked_for: held.revocation.map(|one| one.reason.name().to_owned()),
            event: report.map(|report| report.event.to_string()),
        })
    };
    let layer = |(word, layer): &(&str, Layer)| {
        let share = unit.policy().share(*layer)?;
        let limit = |most: u8| (most != u8::MAX).then_some(most);
        Some(LayerInfo {
            layer: (*word).to_owned(),
            barred: unit.is_barred(*layer),
            min: share.min.programmable,
            max: limit(share.max.programmable),
            min_fixed: share.min.fixed,
            max_fixed: limit(share.max.fixed),
            priority: share.priority,
            lease_ms: share.lease_ms,
        })
    };
    Box::new(PcrInfo {
        vcpu: u32::try_from(vcpu).unwrap_or(u32::MAX),
        scheme: unit.scheme().name().to_owned(),
        grace_ms: unit.policy().grace_ms,
        layers: LAYERS.iter().filter_map(layer).collect(),
        reservations: unit.bank().held().iter().filter_map(reservation).collect(),
        read: None,
    })
}
