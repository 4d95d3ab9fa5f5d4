//! What the demo's guest counts, decided before any guest exists.

use pmu_virt::{
    BackendError, CounterId, EventCode, FixedFunction, ModelError, PmuModel, Sources, Vendor,
};
use thiserror::Error;
use umpire_events::{EventError, NameTable, NamedRequest, models_for, resolve};
use vmm::counters::auto_names;
use vmm::doctor;
use vmm::probe::ProbeReport;

use crate::flags::DemoFlags;

/// What the guest does.
#[derive(Clone, Debug)]
pub struct Plan {
    pub model: PmuModel,
    /// Where counts come from, if the user said so.
    pub sources: Option<Sources>,
    /// Events to count, each with its counter. Without any, the guest shows
    /// what a PMU does.
    pub events: Vec<Planned>,
}

/// An event and the counter that counts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The event.
    pub named: NamedRequest,
    pub counter: CounterId,
}

/// The flags ask for what no guest can count.
#[derive(Debug, Error)]
pub enum PlanError {
    /// An event cannot be used.
    #[error("--event: {0}")]
    Event(#[from] EventError),
    /// A PMU model that does not exist or cannot have these properties.
    #[error("--pmu: {0}")]
    Model(#[from] ModelError),
    /// A counter backend that does not exist.
    #[error("--counters: {0}")]
    Backend(#[from] BackendError),
    /// More events than programmable counters.
    #[error(
        "--event: {events} events for programmable counters, and {model} has {counters}; give fewer"
    )]
    TooMany {
        /// How many events need one.
        events: usize,
        model: &'static str,
        /// How many it has.
        counters: u8,
    },
    /// Two events that only one counter can count.
    #[error(
        "--event: {first} and {second} are both counted by fixed counter {counter} alone; give one of them"
    )]
    SameFixed {
        /// The first event.
        first: String,
        second: String,
        counter: u8,
    },
}

impl Plan {
    /// The guest that shows what a PMU does, with the simplest model of
    /// `vendor` that has an overflow status register.
    ///
    /// # Errors
    /// The model or the backend is gone.
    pub fn tour(vendor: Vendor) -> Result<Self, PlanError> {
        Ok(Self {
            model: model_for(vendor)?,
            sources: Some(Sources::parse("clock")?),
            events: Vec::new(),
        })
    }

    /// The guest for `flags` on a host whose processor is `vendor`'s.
    ///
    /// # Errors
    /// What is wrong with the flags.
    pub fn new(
        flags: &DemoFlags,
        vendor: Vendor,
        names: &dyn NameTable,
    ) -> Result<Self, PlanError> {
        if flags.events.is_empty() {
            return Self::tour(vendor);
        }
        let (model, named) = match &flags.pmu {
            Some(spec) => {
                let model = PmuModel::parse(spec)?;
                let named = find(&flags.events, &model, names)?;
                (model, named)
            }
            None => model_with(&flags.events, vendor, names)?,
        };
        Ok(Self {
            sources: flags.counters.as_deref().map(Sources::parse).transpose()?,
            events: place(named, &model)?,
            model,
        })
    }

    /// Where counts come from on a host with these findings: as the user said,
    /// else from all that count truly and can be used. The guest is short, so
    /// that stepping it costs little.
    pub fn sources_on(&self, probe: &ProbeReport) -> Sources {
        if let Some(sources) = &self.sources {
            return sources.clone();
        }
        let usable = auto_names().into_iter().chain(["step"]).filter(|name| {
            let one = Sources::parse(name);
            one.is_ok_and(|one| doctor::check_backends(probe, &one).is_ok())
        });
        let list = usable.collect::<Vec<_>>().join(",");
        Sources::parse(&list).unwrap_or_else(|_| Sources::auto())
    }
}

/// The simplest model of the vendor that has an overflow status register.
pub(super) fn model_for(vendor: Vendor) -> Result<PmuModel, ModelError> {
    PmuModel::parse(match vendor {
        Vendor::Intel => "intel-v2",
        Vendor::Amd => "amd-perfmonv2",
    })
}

fn find(
    events: &[String],
    model: &PmuModel,
    names: &dyn NameTable,
) -> Result<Vec<NamedRequest>, EventError> {
    let one = |event: &String| resolve(event, model, names);
    events.iter().map(one).collect()
}

/// A model that has all the events, and the events: the first table's, else the
/// host vendor's, else any.
fn model_with(
    events: &[String],
    vendor: Vendor,
    names: &dyn NameTable,
) -> Result<(PmuModel, Vec<NamedRequest>), PlanError> {
    let mut first = model_for(vendor)?;
    for event in events {
        // The last one has the most counters.
        if let Some(model) = models_for(event, names)?.and_then(|mut models| models.pop()) {
            first = model;
            break;
        }
    }
    let mut problem = match find(events, &first, names) {
        Ok(named) => return Ok((first, named)),
        Err(problem) => problem,
    };
    for summary in PmuModel::names().iter().rev() {
        let model = PmuModel::parse(summary.name)?;
        match find(events, &model, names) {
            Ok(named) => return Ok((model, named)),
            // The model is right, and the name is not: that says more.
            Err(ambiguous @ EventError::Ambiguous { .. }) => problem = ambiguous,
            Err(_) => {}
        }
    }
    Err(problem.into())
}

/// A counter for each event: the fixed one that it stands for, else the next
/// programmable one.
fn place(events: Vec<NamedRequest>, model: &PmuModel) -> Result<Vec<Planned>, PlanError> {
    let fixed = |named: &NamedRequest| match named.request.event {
        EventCode::Fixed(function) => Some(function.index()),
        _ => None,
    };
    for index in (0..model.fixed()).filter(|index| FixedFunction::of(*index).is_some()) {
        let mut same = events.iter().filter(|named| fixed(named) == Some(index));
        if let (Some(first), Some(second)) = (same.next(), same.next()) {
            return Err(PlanError::SameFixed {
                first: first.name.clone(),
                second: second.name.clone(),
                counter: index,
            });
        }
    }
    let programmable = events.iter().filter(|named| fixed(named).is_none()).count();
    if programmable > usize::from(model.programmable()) {
        return Err(PlanError::TooMany {
            events: programmable,
            model: model.name(),
            counters: model.programmable(),
        });
    }
    let mut free = 0..model.programmable();
    let counter = |named: &NamedRequest| match fixed(named) {
        Some(index) => Some(CounterId::Fixed(index)),
        None => free.next().map(CounterId::Programmable),
    };
    let counters: Vec<_> = events.iter().map(counter).collect();
    let pairs = events.into_iter().zip(counters);
    Ok(pairs
        .filter_map(|(named, counter)| {
            Some(Planned {
                named,
                counter: counter?,
            })
        })
        .collect())
}
