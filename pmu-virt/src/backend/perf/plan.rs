//! What to ask the kernel for, so that a request gets counted. Pure.

use pmu_model::{
    CountRequest, EventCode, KnownEvent, Provenance, SoftwareEvent, UnavailableReason,
};

use super::NAME;
use super::syscalls::{EventSource, EventSpec, GenericEvent};
use crate::backend::BackendEnv;

/// A period that no event reaches: an event is opened with it, because only
/// one that has a period can be given another.
pub(super) const NEVER: u64 = 1 << 62;

/// One way to serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EventPlan {
    /// The event to open.
    pub(super) spec: EventSpec,
    /// What its count is in.
    pub(super) unit: Unit,
    /// Label of the count while nothing is lost.
    pub(super) provenance: Provenance,
}

/// From the kernel's count to the one that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// The same.
    Events,
    /// Nanoseconds of a clock, told as nanoseconds.
    Nanoseconds,
    /// Nanoseconds, told as ticks of a TSC of so many kHz.
    Ticks {
        /// TSC frequency.
        khz: u32,
    },
}

const NS_PER_MS: u128 = 1_000_000;

impl Unit {
    /// The count to tell for a kernel's count.
    pub(super) fn reported(self, native: u64) -> u64 {
        match self {
            Unit::Events | Unit::Nanoseconds => native,
            Unit::Ticks { khz } => narrow(u128::from(native) * u128::from(khz) / NS_PER_MS),
        }
    }

    /// The least kernel's count that is told as `count` or more.
    pub(super) fn native(self, count: u64) -> u64 {
        match self {
            Unit::Events | Unit::Nanoseconds => count,
            Unit::Ticks { khz } => {
                narrow((u128::from(count) * NS_PER_MS).div_ceil(u128::from(khz.max(1))))
            }
        }
    }

    /// Whether the kernel counts time, by a timer of its own.
    pub(super) fn is_time(self) -> bool {
        self != Unit::Events
    }
}

fn narrow(value: u128) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

/// The ways to serve `request`, the best first; never an empty list.
pub(super) fn plans(
    request: &CountRequest,
    env: &BackendEnv,
) -> Result<Vec<EventPlan>, UnavailableReason> {
    // Counting for the sibling thread would tell one guest of another.
    if request.any_thread {
        return Err(UnavailableReason::Modifier { backend: NAME });
    }
    if let EventCode::Software(event) = request.event {
        return software(request, event);
    }
    let hardware = hardware(request, env);
    let derived = derived(request, env);
    match hardware {
        Ok(plan) => Ok(std::iter::once(plan).chain(derived).collect()),
        Err(reason) if derived.is_empty() => Err(reason),
        Err(_) => Ok(derived),
    }
}

fn software(
    request: &CountRequest,
    event: SoftwareEvent,
) -> Result<Vec<EventPlan>, UnavailableReason> {
    if request.has_modifier() {
        return Err(UnavailableReason::Modifier { backend: NAME });
    }
    // The kernel ignores the ring for some of these and takes the host's ring
    // for the others.
    if request.is_ring_filtered() {
        return Err(UnavailableReason::OneRing {
            backend: NAME,
            event: request.event,
        });
    }
    let unit = match event {
        SoftwareEvent::TaskClock => Unit::Nanoseconds,
        _ => Unit::Events,
    };
    let plan = |spec| EventPlan {
        spec,
        unit,
        provenance: Provenance::Exact,
    };
    let mut plans = vec![plan(counting(event))];
    if unit.is_time() {
        plans.push(plan(unprivileged(event)));
    }
    Ok(plans)
}

/// A software event with overflows.
fn counting(event: SoftwareEvent) -> EventSpec {
    EventSpec {
        source: EventSource::Software(event),
        exclude_user: false,
        exclude_kernel: false,
        exclude_host: false,
        pinned: false,
        period: Some(NEVER),
    }
}

/// What a user may open under `perf_event_paranoid` 2. The clock runs on in
/// the kernel all the same, but gives no overflow; the VMM's timer has to.
fn unprivileged(event: SoftwareEvent) -> EventSpec {
    EventSpec {
        exclude_kernel: true,
        period: None,
        ..counting(event)
    }
}

/// Cycles from the time that the thread spent in the guest.
fn derived(request: &CountRequest, env: &BackendEnv) -> Vec<EventPlan> {
    let is_clock = matches!(
        request.event.known(),
        Some(KnownEvent::RefCycles | KnownEvent::CoreCycles)
    );
    if !is_clock || request.has_modifier() || request.is_ring_filtered() || env.tsc_khz == 0 {
        return Vec::new();
    }
    let plan = |spec| EventPlan {
        spec,
        unit: Unit::Ticks { khz: env.tsc_khz },
        provenance: Provenance::Derived,
    };
    let clock = SoftwareEvent::TaskClock;
    vec![plan(counting(clock)), plan(unprivileged(clock))]
}

fn hardware(request: &CountRequest, env: &BackendEnv) -> Result<EventPlan, UnavailableReason> {
    let source = match raw(request, env) {
        Some(config) => EventSource::Raw(config),
        None if request.has_modifier() => {
            return Err(UnavailableReason::Modifier { backend: NAME });
        }
        None => EventSource::Generic(generic(request)?),
    };
    Ok(EventPlan {
        spec: EventSpec {
            source,
            exclude_user: !request.usr,
            exclude_kernel: !request.os,
            exclude_host: true,
            pinned: false,
            period: Some(NEVER),
        },
        unit: Unit::Events,
        provenance: Provenance::Hardware,
    })
}

/// `config` of a raw event: the control register without the bits that the
/// kernel sets itself. `None` where the code is not one of the host's.
fn raw(request: &CountRequest, env: &BackendEnv) -> Option<u64> {
    /// Event select, unit mask, edge, invert, counter mask, and bits 11 to 8
    /// of AMD's event select: what the kernel's x86 drivers take.
    const TAKEN: u64 = 0xf_ff84_ffff;
    let EventCode::Selected { .. } = request.event else {
        return None;
    };
    if request.event.vendor() != env.host_vendor {
        return None;
    }
    Some(request.encode()? & TAKEN)
}

fn generic(request: &CountRequest) -> Result<GenericEvent, UnavailableReason> {
    match request.event.known() {
        Some(KnownEvent::CoreCycles) => Ok(GenericEvent::Cycles),
        Some(KnownEvent::RefCycles) => Ok(GenericEvent::RefCycles),
        Some(KnownEvent::Instructions) => Ok(GenericEvent::Instructions),
        Some(KnownEvent::Branches) => Ok(GenericEvent::Branches),
        Some(KnownEvent::MispredictedBranches) => Ok(GenericEvent::BranchMisses),
        Some(KnownEvent::LlcReferences) => Ok(GenericEvent::CacheReferences),
        Some(KnownEvent::LlcMisses) => Ok(GenericEvent::CacheMisses),
        _ => Err(UnavailableReason::Event {
            backend: NAME,
            event: request.event,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pmu_model::Vendor;
    use pmu_model::{EventFamily, FixedFunction};

    const ENV: BackendEnv = BackendEnv {
        tsc_khz: 2_000_000,
        host_vendor: Some(Vendor::Intel),
        overflow_signal: 34,
        steps_cpl3: true,
    };

    fn of(family: EventFamily, raw: u64) -> CountRequest {
        CountRequest::decode(family, raw)
    }

    /// The first plan's source and provenance, and how many plans there are.
    fn check(request: CountRequest, expected: Result<(EventSource, Provenance, usize), &str>) {
        let found = plans(&request, &ENV)
            .map(|plans| (plans[0].spec.source, plans[0].provenance, plans.len()))
            .map_err(|reason| reason.to_string());
        match expected {
            Ok(expected) => assert_eq!(found, Ok(expected), "{request}"),
            Err(part) => {
                let text = found.expect_err("refused");
                assert!(text.contains(part), "{request}: {text}");
            }
        }
    }

    #[test]
    fn requests_become_events() {
        let hardware = |source, ways| Ok((source, Provenance::Hardware, ways));
        let intel = |raw| of(EventFamily::Intel, raw);
        let amd = |raw| of(EventFamily::AmdZen, raw);
        // The host's own codes go through as they are, whatever they mean.
        check(intel(0x53_01c2), hardware(EventSource::Raw(0x01c2), 1));
        check(
            intel(0x0ad7_05a3),
            hardware(EventSource::Raw(0x0a84_05a3), 1),
        );
        check(intel(0x53_013c), hardware(EventSource::Raw(0x013c), 3));
        // Foreign ones by their meaning.
        let instructions = EventSource::Generic(GenericEvent::Instructions);
        check(amd(0x53_00c0), hardware(instructions, 1));
        check(
            amd(0x53_0076),
            hardware(EventSource::Generic(GenericEvent::Cycles), 3),
        );
        check(amd(0x0053_00c6), Err("cannot count"));
        check(amd(0x0157_00c0), Err("edge, invert"));
        check(intel(0x73_00c0), Err("any-thread"));
        // Without a ring the clock has no say.
        check(
            amd(0x51_0076),
            hardware(EventSource::Generic(GenericEvent::Cycles), 1),
        );
        let fixed = CountRequest::plain(EventCode::Fixed(FixedFunction::RefCycles), true, true);
        check(
            fixed,
            hardware(EventSource::Generic(GenericEvent::RefCycles), 3),
        );
    }

    #[test]
    fn software_events_are_exact_and_of_both_rings() {
        let faults = EventCode::Software(SoftwareEvent::PageFaults);
        let plain = CountRequest::plain(faults, true, true);
        let source = EventSource::Software(SoftwareEvent::PageFaults);
        check(plain, Ok((source, Provenance::Exact, 1)));
        check(
            CountRequest {
                usr: false,
                ..plain
            },
            Err("one ring"),
        );
        check(
            CountRequest {
                edge: true,
                ..plain
            },
            Err("edge"),
        );
    }

    #[test]
    fn rings_become_exclusions() {
        let request = of(EventFamily::Intel, 0x51_00c0);
        let spec = plans(&request, &ENV).expect("planned")[0].spec;
        assert!(spec.exclude_kernel && !spec.exclude_user && spec.exclude_host);
    }

    #[test]
    fn amd_event_selects_keep_their_high_bits() {
        let env = BackendEnv {
            host_vendor: Some(Vendor::Amd),
            ..ENV
        };
        let request = of(EventFamily::AmdZen4, 0x3_0053_0120 | 1 << 40);
        let plan = plans(&request, &env).expect("planned")[0];
        assert_eq!(plan.spec.source, EventSource::Raw(0x3_0000_0120));
    }

    #[test]
    fn ticks_and_nanoseconds_meet() {
        let unit = Unit::Ticks { khz: 2_450_000 };
        assert_eq!(unit.reported(1_000_000), 2_450_000);
        for count in [0, 1, 2, 3, 999, 2_450_001, 1 << 47] {
            let native = unit.native(count);
            assert!(unit.reported(native) >= count, "{count}");
            assert!(native == 0 || unit.reported(native - 1) < count, "{count}");
        }
        assert_eq!(unit.reported(u64::MAX), u64::MAX, "saturates");
    }
}
