//! Turns specifications into the firmware's configuration, for one PMU model.

use arbiter::{Control, CounterId, CounterSet, abi};
use firmware::config::{CounterRequest, MAX_COUNTERS, Position};
use pmu_virt::{CountRequest, EventCode, FixedFunction, PmuModel};
use thiserror::Error;
use umpire_events::{EventError, NameTable, resolve};

use super::spec::{CounterSpec, ErrorMode, WantedCounter};

/// The mode bits of all layers but the firmware's.
const OTHER_LAYERS: u64 = abi::CONTROL_MANAGE_HYPERVISOR
    | abi::CONTROL_MANAGE_KERNEL
    | abi::CONTROL_MANAGE_USER
    | abi::CONTROL_ACCESS_HYPERVISOR
    | abi::CONTROL_ACCESS_KERNEL
    | abi::CONTROL_ACCESS_USER;

/// Counters that this guest's PMU cannot give to its firmware.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PlanError {
    /// The guest has no PMU.
    #[error("'{spec}': under --pmu none there are no counters; leave one of them out")]
    NoPmu {
        /// As it was given.
        spec: String,
    },
    /// The event's name.
    #[error("'{spec}': {source}")]
    Event {
        /// As it was given.
        spec: String,
        source: Box<EventError>,
    },
    /// The model has no such counter.
    #[error("'{spec}': the PMU model {model} has no {counter}; it has {has}")]
    NoCounter {
        /// As it was given.
        spec: String,
        model: &'static str,
        counter: CounterId,
        /// The counters that there are.
        has: String,
    },
    /// The counter counts something else.
    #[error("'{spec}': {counter} does not count '{event}'; {advice}")]
    WrongCounter {
        /// As it was given.
        spec: String,
        counter: CounterId,
        event: String,
        /// What would.
        advice: String,
    },
    /// A counter that is asked for twice.
    #[error("'{spec}': {counter} is asked for twice; give another one or on=any")]
    Twice {
        /// As it was given.
        spec: String,
        counter: CounterId,
    },
    /// More counters than there are.
    #[error(
        "'{spec}': the PMU model {model} has {limit} programmable counters, and all are asked \
         for already; leave this one out"
    )]
    TooMany {
        /// As it was given.
        spec: String,
        model: &'static str,
        /// How many there are.
        limit: u8,
    },
    /// A drop value that the counter cannot hold.
    #[error("'{spec}': read={value:#x} is wider than the counter, which has {width} bits")]
    ReadValue {
        /// As it was given.
        spec: String,
        value: u64,
        /// Bits of the counter.
        width: u8,
    },
}

/// Counters that the firmware will ask for on every vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAside {
    /// Those that were named.
    pub named: CounterSet,
    /// How many programmable ones it takes beside them, wherever they are free.
    pub any: u8,
}

impl SetAside {
    /// Whether it asks for nothing.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.named.is_empty() && self.any == 0
    }

    /// How many programmable counters are set aside.
    #[must_use]
    pub fn programmable(self) -> u8 {
        let named = self.named.iter();
        let named = named.filter(|counter| matches!(counter, CounterId::Programmable(_)));
        u8::try_from(named.count())
            .unwrap_or(u8::MAX)
            .saturating_add(self.any)
    }
}

/// The firmware's configuration, and the counters that it sets aside.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FirmwarePlan {
    counters: Vec<CounterRequest>,
    set_aside: SetAside,
}

impl FirmwarePlan {
    /// The plan for `specs` in a guest with `model`. Specifications that name a
    /// counter come first: firmware takes them in this order, and *any* must
    /// not take one that is named later.
    ///
    /// # Errors
    /// The first that cannot be had, and what would be right.
    pub fn resolve(
        specs: &[CounterSpec],
        model: Option<&PmuModel>,
        names: &dyn NameTable,
    ) -> Result<Self, PlanError> {
        let mut plan = Self::default();
        for spec in specs {
            let model = model.ok_or_else(|| PlanError::NoPmu {
                spec: spec.text.clone(),
            })?;
            let found = resolve(&spec.event, model, names).map_err(|source| PlanError::Event {
                spec: spec.text.clone(),
                source: Box::new(source),
            })?;
            plan.add(spec, &found.request, model)?;
        }
        // Stable: otherwise in the order given.
        let counters = &mut plan.counters;
        counters.sort_by_key(|counter| counter.position == Position::Any);
        Ok(plan)
    }

    /// The counters, as the firmware's configuration has them.
    #[must_use]
    pub fn counters(&self) -> &[CounterRequest] {
        &self.counters
    }

    /// The counters that the kernel does not get.
    #[must_use]
    pub fn set_aside(&self) -> SetAside {
        self.set_aside
    }

    fn add(
        &mut self,
        spec: &CounterSpec,
        request: &CountRequest,
        model: &PmuModel,
    ) -> Result<(), PlanError> {
        let text = || spec.text.clone();
        let (position, select) = match (spec.place, request.event) {
            (WantedCounter::At(CounterId::Fixed(index)), _) => {
                on_fixed(spec, request, index, model)?
            }
            // The event is tied to its counter.
            (WantedCounter::Any, EventCode::Fixed(function)) => {
                on_fixed(spec, request, function.index(), model)?
            }
            // The firmware's words name no sampler.
            (WantedCounter::At(counter @ (CounterId::Programmable(_) | CounterId::Ibs(_))), _) => {
                exists(spec, counter, model)?;
                let select = programmable(spec, Some(counter), request, model)?;
                (Some(counter), select)
            }
            (WantedCounter::Any, _) => (None, programmable(spec, None, request, model)?),
        };
        let width = match position {
            Some(CounterId::Fixed(_)) => model.fixed_width(),
            _ => model.width(),
        };
        if width < 64 && spec.read >> width != 0 {
            return Err(PlanError::ReadValue {
                spec: text(),
                value: spec.read,
                width,
            });
        }
        self.take(spec, position, model)?;
        let position = position.and_then(CounterId::position);
        self.counters.push(CounterRequest {
            position: position.map_or(Position::Any, Position::At),
            private: spec.private,
            keep: spec.keep,
            yields: spec.yields,
            control: control(spec),
            drop_value: spec.read,
            select,
        });
        Ok(())
    }

    /// Sets a counter aside.
    fn take(
        &mut self,
        spec: &CounterSpec,
        counter: Option<CounterId>,
        model: &PmuModel,
    ) -> Result<(), PlanError> {
        let spec = || spec.text.clone();
        match counter {
            Some(counter) if self.set_aside.named.contains(counter) => {
                return Err(PlanError::Twice {
                    spec: spec(),
                    counter,
                });
            }
            Some(counter) => {
                self.set_aside.named.insert(counter);
            }
            None => self.set_aside.any += 1,
        }
        let full = self.counters.len() >= MAX_COUNTERS;
        if full || self.set_aside.programmable() > model.programmable() {
            return Err(PlanError::TooMany {
                spec: spec(),
                model: model.name(),
                limit: model.programmable(),
            });
        }
        Ok(())
    }
}

/// The control word. Cookies are valid in every layer unless the specification says
/// otherwise, because they protect by themselves.
fn control(spec: &CounterSpec) -> Control {
    let error = match spec.error {
        ErrorMode::Drop => 0,
        ErrorMode::Fault => abi::CONTROL_FAULT,
        ErrorMode::FaultRdpmc => abi::CONTROL_FAULT | abi::CONTROL_FAULT_RDPMC,
    };
    let lend = if spec.lend { abi::CONTROL_LEND } else { 0 };
    let mut kept = if spec.isolate {
        !abi::CONTROL_SHARED
    } else {
        !0
    };
    if spec.firmware_only {
        kept &= !OTHER_LAYERS;
    }
    // Only bits with a meaning are put together here.
    Control::new(abi::CONTROL_INITIAL & kept | error | lend).unwrap_or(Control::INITIAL)
}

/// Checks that the model has the counter.
fn exists(spec: &CounterSpec, counter: CounterId, model: &PmuModel) -> Result<(), PlanError> {
    if model.counters().any(|other| other == counter) {
        return Ok(());
    }
    let range = |name: &str, count: u8| match count.checked_sub(1) {
        None => format!("no {name}n"),
        Some(last) => format!("{name}0 to {name}{last}"),
    };
    let (pmc, fixed) = (model.programmable(), model.fixed());
    Err(PlanError::NoCounter {
        spec: spec.text.clone(),
        model: model.name(),
        counter,
        has: format!("{}, {}", range("PMC", pmc), range("FIXED", fixed)),
    })
}

/// The four bits with which fixed-function counter `index` counts the event.
fn on_fixed(
    spec: &CounterSpec,
    request: &CountRequest,
    index: u8,
    model: &PmuModel,
) -> Result<(Option<CounterId>, u64), PlanError> {
    let counter = CounterId::Fixed(index);
    exists(spec, counter, model)?;
    let event = FixedFunction::of(index).map(EventCode::Fixed);
    let known = event.and_then(|event| event.known());
    let same = known.is_some() && known == request.event.known() && !request.has_modifier();
    let field = event
        .filter(|_| same)
        .and_then(|event| CountRequest { event, ..*request }.encode_fixed())
        .map(|bits| bits >> (4 * u32::from(index)));
    match field {
        Some(field) => Ok((Some(counter), field)),
        None => Err(PlanError::WrongCounter {
            spec: spec.text.clone(),
            counter,
            event: spec.event.clone(),
            advice: match event {
                Some(event) => format!("it counts {event} without modifiers; give on=any"),
                None => "give on=any".to_owned(),
            },
        }),
    }
}

/// The event select with which a programmable counter counts the event.
fn programmable(
    spec: &CounterSpec,
    counter: Option<CounterId>,
    request: &CountRequest,
    model: &PmuModel,
) -> Result<u64, PlanError> {
    let event = match request.event {
        EventCode::Fixed(_) => request
            .event
            .known()
            .and_then(|known| EventCode::of(model.events(), known)),
        event => Some(event),
    };
    event
        .and_then(|event| CountRequest { event, ..*request }.encode())
        .ok_or_else(|| PlanError::WrongCounter {
            spec: spec.text.clone(),
            counter: counter.unwrap_or(CounterId::Programmable(0)),
            event: spec.event.clone(),
            advice: match request.event {
                EventCode::Fixed(function) => format!("give on=FIXED{}", function.index()),
                _ => "no event select means it".to_owned(),
            },
        })
}
