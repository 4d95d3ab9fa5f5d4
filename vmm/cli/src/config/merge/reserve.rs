//! The options of counter reservations.

use arbiter::Scheme;
use vmm::config::{FollowsGrants, HypervisorCounters, PcrChoice, PmuChoice};

use super::super::GRACE_MS;
use super::super::error::{ConfigError, Place};
use super::super::policy;
use super::{Given, choice, number, or_default};

/// Where something was given, if it was.
pub(super) fn place<T>(given: &Option<Given<T>>) -> Option<&Place> {
    given.as_ref().map(|given| &given.place)
}

/// Whether counters are reserved. What is `asked` for beside it means nothing
/// without.
pub(super) fn reserves(
    pmu: &PmuChoice,
    pcr: Option<Given<String>>,
    asked: [Option<&Place>; 7],
) -> Result<bool, ConfigError> {
    let on_or_off = |word: &str| match word {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    };
    let asked_on = place(&pcr).cloned();
    let on = or_default(pcr, |g| choice(g, on_or_off, "on or off"))?;
    let asked = asked.into_iter().flatten().next();
    let (why, asked) = match (pmu, on) {
        (PmuChoice::None, Some(true)) => ("--pmu none", asked.or(asked_on.as_ref())),
        (PmuChoice::None, _) => ("--pmu none", asked),
        (_, Some(false)) => ("--pcr off", asked),
        _ => return Ok(true),
    };
    match asked {
        Some(place) => Err(ConfigError::NoReservations {
            place: place.clone(),
            why,
        }),
        None => Ok(false),
    }
}

pub(super) fn reservations(
    (policy, grace): (Option<Given<Vec<String>>>, Option<Given<i64>>),
    scheme: Option<Given<String>>,
    hypervisor: Option<Given<String>>,
    follows: Option<Given<String>>,
) -> Result<PcrChoice, ConfigError> {
    let policy = or_default(policy, |given| {
        policy::parse(&given.value).map_err(|source| ConfigError::Policy {
            place: given.place,
            source,
        })
    })?;
    let mut policy = policy.unwrap_or_default();
    let grace = or_default(grace, |g| number(g, GRACE_MS, "milliseconds"))?;
    if let Some(grace) = grace.and_then(|ms| u32::try_from(ms).ok()) {
        policy.grace_ms = grace;
    }
    let default = PcrChoice::default();
    Ok(PcrChoice {
        policy,
        scheme: or_default(scheme, |g| {
            choice(g, Scheme::named, "single, independent or interacting")
        })?
        .unwrap_or_default(),
        hypervisor: or_default(hypervisor, |g| {
            choice(g, HypervisorCounters::parse, HypervisorCounters::ALLOWED)
        })?
        .unwrap_or(default.hypervisor),
        follows_grants: or_default(follows, |g| {
            choice(g, FollowsGrants::parse, FollowsGrants::ALLOWED)
        })?
        .unwrap_or_default(),
    })
}
