//! What to ask the kernel for, so that a request gets counted. Pure.

use pmu_model::{CountRequest, EventCode, KnownEvent, SoftwareEvent, UnavailableReason};

use super::NAME;
use super::syscalls::{EventSource, EventSpec, GenericEvent};
use crate::backend::BackendEnv;

/// A period that no event reaches: an event is opened with it, because only
/// one that has a period can be given another.
pub(super) const NEVER: u64 = 1 << 62;

/// The events that serve `request`, the best first; never an empty list.
pub(super) fn events(
    request: &CountRequest,
    env: &BackendEnv,
) -> Result<Vec<EventSpec>, UnavailableReason> {
    // Counting for the sibling thread would tell one guest of another.
    if request.any_thread {
        return Err(UnavailableReason::Modifier { backend: NAME });
    }
    match request.event {
        EventCode::Software(event) => software(request, event),
        _ => Ok(vec![hardware(request, env)?]),
    }
}

fn software(
    request: &CountRequest,
    event: SoftwareEvent,
) -> Result<Vec<EventSpec>, UnavailableReason> {
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
    let source = EventSource::Software(event);
    let counting = EventSpec {
        source,
        exclude_user: false,
        exclude_kernel: false,
        exclude_host: false,
        pinned: false,
        period: Some(NEVER),
    };
    // What a user may open under `perf_event_paranoid` 2. The clock runs on in
    // the kernel all the same, but gives no overflow; the VMM's timer has to.
    let unprivileged = EventSpec {
        exclude_kernel: true,
        period: None,
        ..counting
    };
    Ok(if source.is_time() {
        vec![counting, unprivileged]
    } else {
        vec![counting]
    })
}

fn hardware(request: &CountRequest, env: &BackendEnv) -> Result<EventSpec, UnavailableReason> {
    let source = match raw(request, env) {
        Some(config) => EventSource::Raw(config),
        None if request.has_modifier() => {
            return Err(UnavailableReason::Modifier { backend: NAME });
        }
        None => EventSource::Generic(generic(request)?),
    };
    Ok(EventSpec {
        source,
        exclude_user: !request.usr,
        exclude_kernel: !request.os,
        exclude_host: true,
        pinned: false,
        period: Some(NEVER),
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
    let event = match env.host_events {
        Some(host) => request.event.on_processor(host)?,
        None => request.event,
    };
    Some(CountRequest { event, ..*request }.encode()? & TAKEN)
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
    use pmu_model::{EventFamily, FixedFunction, Provenance, Vendor};

    const ENV: BackendEnv = BackendEnv {
        tsc_khz: 2_000_000,
        host_vendor: Some(Vendor::Intel),
        host_events: None,
        overflow_signal: 34,
        steps_cpl3: true,
    };

    fn of(family: EventFamily, raw: u64) -> CountRequest {
        CountRequest::decode(family, raw)
    }

    /// The first event's source and its label, and how many events there are.
    fn check(request: CountRequest, expected: Result<(EventSource, Provenance, usize), &str>) {
        let found = events(&request, &ENV)
            .map(|events| (events[0].source, events.len()))
            .map(|(source, ways)| (source, source.provenance(), ways))
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
        let hardware = |source| Ok((source, Provenance::Hardware, 1));
        let generic = |event| hardware(EventSource::Generic(event));
        let intel = |raw| of(EventFamily::Intel, raw);
        let amd = |raw| of(EventFamily::AmdZen, raw);
        // The host's own codes go through as they are, whatever they mean.
        check(intel(0x53_01c2), hardware(EventSource::Raw(0x01c2)));
        // Another processor's words, and this host is not known to be that one.
        let skylake = |raw| of(EventFamily::IntelSkylake, raw);
        let ice_lake = BackendEnv {
            host_events: Some(EventFamily::IntelIceLake),
            ..ENV
        };
        let on_ice_lake = |raw| events(&skylake(raw), &ice_lake).map(|all| all[0].source);
        assert_eq!(on_ice_lake(0x53_01c4), Ok(EventSource::Raw(0x11c4)));
        assert_eq!(on_ice_lake(0x53_00c4), Ok(EventSource::Raw(0x00c4)));
        assert!(on_ice_lake(0x53_08a2).is_err());
        check(intel(0x0ad7_05a3), hardware(EventSource::Raw(0x0a84_05a3)));
        check(intel(0x53_013c), hardware(EventSource::Raw(0x013c)));
        // Foreign ones by their meaning.
        check(amd(0x53_00c0), generic(GenericEvent::Instructions));
        check(amd(0x53_0076), generic(GenericEvent::Cycles));
        check(amd(0x51_0076), generic(GenericEvent::Cycles));
        check(amd(0x0053_00c6), Err("cannot count"));
        check(amd(0x0157_00c0), Err("edge, invert"));
        check(intel(0x73_00c0), Err("any-thread"));
        let fixed = CountRequest::plain(EventCode::Fixed(FixedFunction::RefCycles), true, true);
        check(fixed, generic(GenericEvent::RefCycles));
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
        // The clock alone can be had without the right to count the kernel.
        let clock = SoftwareEvent::TaskClock;
        let plain = CountRequest::plain(EventCode::Software(clock), true, true);
        let source = EventSource::Software(clock);
        check(plain, Ok((source, Provenance::Exact, 2)));
    }

    #[test]
    fn rings_become_exclusions() {
        let request = of(EventFamily::Intel, 0x51_00c0);
        let spec = events(&request, &ENV).expect("planned")[0];
        assert!(spec.exclude_kernel && !spec.exclude_user && spec.exclude_host);
    }

    #[test]
    fn amd_event_selects_keep_their_high_bits() {
        let env = BackendEnv {
            host_vendor: Some(Vendor::Amd),
            host_events: None,
            ..ENV
        };
        let request = of(EventFamily::AmdZen4, 0x3_0053_0120 | 1 << 40);
        let spec = events(&request, &env).expect("planned")[0];
        assert_eq!(spec.source, EventSource::Raw(0x3_0000_0120));
    }
}
