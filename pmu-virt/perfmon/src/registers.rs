//! Which value in which register makes a counter count an event.

use pmu_model::{CountRequest, CounterId, EventCode, FixedFunction, KnownEvent};

use crate::{LogicalPmu, PmcDescription};

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
