//! The options of host tools.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use pmu_virt::perfmon::HostPolicy;

use super::super::error::ConfigError;
use super::reserve::place;
use super::{Given, choice, number, or_default};
use vmm::config::PmuChoice;
use vmm::perfmon::ControlConfig;

/// The range of `--control-connections`.
const CONNECTIONS: RangeInclusive<u64> = 1..=4096;
/// The range of `--control-group`; the last number means "no group".
const GROUPS: RangeInclusive<u64> = 0..=u32::MAX as u64 - 1;
/// The range of `--sampling-rate-max`.
const RATES: RangeInclusive<u64> = 1..=10_000_000;

/// What was given of them.
pub(super) struct ControlGiven {
    pub(super) socket: Option<Given<PathBuf>>,
    pub(super) mode: Option<Given<String>>,
    pub(super) group: Option<Given<i64>>,
    pub(super) connections: Option<Given<i64>>,
    pub(super) policy: Option<Given<String>>,
    pub(super) rate: Option<Given<i64>>,
}

/// Nothing about tools means anything without a socket, nor a socket without a
/// PMU: tools count by the guest's model.
pub(super) fn control(
    given: ControlGiven,
    pmu: &PmuChoice,
) -> Result<Option<ControlConfig>, ConfigError> {
    let beside = [
        place(&given.mode),
        place(&given.group),
        place(&given.connections),
        place(&given.policy),
        place(&given.rate),
    ];
    let Some(socket) = given.socket else {
        return match beside.into_iter().flatten().next() {
            Some(place) => Err(ConfigError::NoControl {
                place: place.clone(),
            }),
            None => Ok(None),
        };
    };
    if matches!(pmu, PmuChoice::None) {
        return Err(ConfigError::ControlWithoutPmu {
            place: socket.place,
        });
    }
    let mut config = ControlConfig::at(socket.value);
    if let Some(mode) = or_default(given.mode, |g| choice(g, octal, OCTAL))? {
        config.access.mode = mode;
    }
    let group = or_default(given.group, |g| number(g, GROUPS, "(a group)"))?;
    config.access.group = group.and_then(|group| u32::try_from(group).ok());
    let unit = "connections";
    let connections = or_default(given.connections, |g| number(g, CONNECTIONS, unit))?;
    if let Some(most) = connections.and_then(|most| usize::try_from(most).ok()) {
        config.connections = most;
    }
    let policy = |text: &str| text.parse::<HostPolicy>().ok();
    if let Some(policy) = or_default(given.policy, |g| choice(g, policy, POLICIES))? {
        config.policy = policy;
    }
    let rate = or_default(given.rate, |g| number(g, RATES, "interrupts in a second"))?;
    if let Some(rate) = rate {
        config.rate = rate;
    }
    Ok(Some(config))
}

const OCTAL: &str = "permission bits in octal, as 600 or 660";
const POLICIES: &str = "guest-first, host-first, shares, or shares:host=N with N from 0 to 255";

/// Permission bits that let the owner in.
fn octal(text: &str) -> Option<u32> {
    let digits = (3..=4).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    let mode = u32::from_str_radix(text, 8).ok().filter(|_| digits)?;
    (mode <= 0o777 && mode & 0o600 == 0o600).then_some(mode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permission_bits() {
        fn check(text: &str, expected: Option<u32>) {
            assert_eq!(octal(text), expected, "{text}");
        }
        check("600", Some(0o600));
        check("0660", Some(0o660));
        check("777", Some(0o777));
        check("060", None);
        check("1777", None);
        check("888", None);
        check("+60", None);
        check("", None);
    }
}
