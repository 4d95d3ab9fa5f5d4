//! Which value in which register makes a counter count an event.

use arbiter::CounterId;
use perfmon::{LogicalPmu, PmcDescription};
use pmu_model::{CountRequest, EventCode, FixedFunction, KnownEvent};

/// The counters that can count an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// A fixed counter that does.
    pub fixed: Option<u8>,
    /// Any programmable one does.
    pub programmable: bool,
}

/// Where `request` can be counted: on a fixed counter that is made for the
/// event, on any programmable one, or on both. Reference cycles are not taken
/// to a fixed counter unless it was asked for: it may tick at another rate.
#[must_use]
pub fn need(pmu: &LogicalPmu, request: &CountRequest) -> Need {
    let model = pmu.model();
    let fixed = (0..model.fixed()).find(|&counter| {
        model.has(CounterId::Fixed(counter))
            && FixedFunction::of(counter).is_some_and(|function| serves(function, request))
    });
    Need {
        fixed,
        programmable: request.encode().is_some(),
    }
}

fn serves(function: FixedFunction, request: &CountRequest) -> bool {
    let fixed = EventCode::Fixed(function);
    let same = fixed.known().is_some() && fixed.known() == request.event.known();
    let as_fast = fixed.known() != Some(KnownEvent::RefCycles);
    let plain = !request.has_modifier() && !request.pin;
    request.event == fixed || same && as_fast && plain
}

/// The PMC of a counter, with the value that makes it count `request`.
#[must_use]
pub fn program<'a>(
    pmu: &'a LogicalPmu,
    counter: CounterId,
    request: &CountRequest,
) -> Option<(&'a PmcDescription, u64)> {
    let pmc = pmu.pmcs().iter().find(|pmc| pmc.counter == counter)?;
    let value = match counter {
        CounterId::Programmable(_) => request.encode()?,
        CounterId::Fixed(number) => {
            let function = FixedFunction::of(number).filter(|it| serves(*it, request))?;
            let event = EventCode::Fixed(function);
            CountRequest { event, ..*request }.encode_fixed()?
        }
        CounterId::Ibs(_) => return None,
    };
    Some((pmc, value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pmu_model::PmuModel;
    use umpire_events::{LibraryError, NoTables, resolve};

    /// What `name` needs, and what decodes from the register it is put into.
    fn check(model: &str, name: &str, fixed: Option<u8>, programmable: bool) {
        let model = PmuModel::parse(model).unwrap();
        let pmu = LogicalPmu::new(model);
        let request = resolve(name, pmu.model(), &NoTables(LibraryError::TooLate))
            .unwrap()
            .request;
        let wanted = Need {
            fixed,
            programmable,
        };
        assert_eq!(need(&pmu, &request), wanted, "{name}");
        for pmc in pmu.pmcs() {
            let Some((found, value)) = program(&pmu, pmc.counter, &request) else {
                continue;
            };
            let counted = pmu.request(found, value).unwrap();
            assert_eq!(counted.event.known(), request.event.known(), "{name}");
            assert_eq!((counted.usr, counted.os), (request.usr, request.os));
            assert!(counted.can_advance());
        }
    }

    #[test]
    fn events_find_their_counters() {
        check("intel-v2", "cycles", Some(1), true);
        check("intel-v2", "instructions:u", Some(0), true);
        check("intel-v2", "ref-cycles", Some(2), false);
        check("intel-v2", "r100013c", None, true);
        check("intel-v5,fixed=0x6", "cycles", Some(1), true);
        check("intel-v5,fixed=0x6", "instructions", None, true);
        check("intel-v2", "branches", None, true);
        check("intel-v1", "cycles", None, true);
        check("amd-core", "cycles:k", None, true);
        check("amd-fam10h", "rc0", None, true);
    }
}
