//! Which counter sources a measurement takes.

use std::io::{self, Write};
use std::num::NonZeroU64;

use pmu_virt::{
    BackendError, CountRequest, CounterBackend, EventCode, KnownEvent, PmuModel, Progress,
    SlotIndex, Unavailable, backend, backend_names,
};
use serde::Serialize;

use crate::config::UserError;
use crate::doctor;
use crate::probe::ProbeReport;

/// USR, OS and enable of an event select.
pub(super) const USR_OS_ENABLE: u64 = 1 << 16 | 1 << 17 | 1 << 22;
/// INT of an event select.
pub(super) const INT: u64 = 1 << 20;

/// One counter source by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) name: &'static str,
}

/// A source that a measurement has no figures of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// Its name.
    pub source: &'static str,
    /// Why.
    pub reason: String,
}

impl LeftOut {
    /// One line for each of `all`.
    pub(super) fn text(all: &[Self], out: &mut dyn Write) -> io::Result<()> {
        all.iter()
            .try_for_each(|one| writeln!(out, "left out: {}: {}", one.source, one.reason))
    }
}

impl Source {
    /// Makes a backend of its own for one vCPU or core.
    pub(super) fn open(&self) -> Result<Box<dyn CounterBackend>, BackendError> {
        backend(self.name)
    }
}

/// The sources to be measured in turn: `wanted`, or all that this host has, and
/// those that it has not.
pub(super) fn choose(
    probe: &ProbeReport,
    wanted: Option<&str>,
) -> Result<(Vec<Source>, Vec<LeftOut>), UserError> {
    if let Some(name) = wanted.filter(|name| *name != "auto") {
        let source = by_name(name).map_err(UserError::bad_input)?;
        doctor::check_backend(probe, source.name).map_err(UserError::bad_input)?;
        return Ok((vec![source], Vec::new()));
    }
    let (mut usable, mut left_out) = (Vec::new(), Vec::new());
    let names = backend_names().iter().map(|backend| backend.name);
    for name in names.filter(|name| *name != "auto") {
        match doctor::check_backend(probe, name) {
            Ok(()) => usable.push(Source { name }),
            Err(refusal) => left_out.push(LeftOut {
                source: name,
                reason: refusal.to_string(),
            }),
        }
    }
    Ok((usable, left_out))
}

fn by_name(name: &str) -> Result<Source, BackendError> {
    backend(name).map(|backend| Source {
        name: backend.name(),
    })
}

/// An event that some source counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    /// Its code in an event select, without any flag.
    pub(super) code: u64,
    pub(super) known: KnownEvent,
}

/// What `backend` counts of the events that `model` can ask for, cycles first.
pub(super) fn countable(model: &PmuModel, backend: &dyn CounterBackend) -> Vec<Event> {
    let mut found: Vec<Event> = Vec::new();
    for code in 0..=0xffff {
        let request = CountRequest::decode(model.events(), code | USR_OS_ENABLE);
        let Some(known) = request.event.known() else {
            continue;
        };
        let again = found.iter().any(|event| event.known == known);
        let programmable = matches!(request.event, EventCode::Selected { .. });
        if programmable && !again && backend.can_count(&request).is_ok() {
            found.push(Event { code, known });
        }
    }
    found.sort_by_key(|event| match event.known {
        KnownEvent::CoreCycles => 0,
        KnownEvent::RefCycles => 1,
        KnownEvent::Instructions => 2,
        _ => 3,
    });
    found
}

/// The first of [`countable`], or that there is none.
pub(super) fn first_countable(
    model: &PmuModel,
    backend: &dyn CounterBackend,
) -> Result<Event, LeftOut> {
    let events = countable(model, backend);
    events.first().copied().ok_or_else(|| LeftOut {
        source: backend.name(),
        reason: format!("it counts no event of {} on this host", model.name()),
    })
}

/// Whether `backend` knows beforehand when a counter on `event` will overflow.
/// It is not to be used for anything else afterwards.
pub(super) fn tells_when(
    model: &PmuModel,
    event: Event,
    backend: &mut dyn CounterBackend,
) -> Result<bool, Unavailable> {
    let slot = SlotIndex(0);
    let request = CountRequest::decode(model.events(), event.code | USR_OS_ENABLE | INT);
    backend.program(slot, &request)?;
    backend.start(slot);
    backend.arm(slot, NonZeroU64::new(1_000));
    backend.observe(&Progress::Entered { tsc: 0 });
    Ok(backend.deadline().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pmu_virt::{ClockBackend, StepBackend};

    #[test]
    fn cycles_come_first() {
        fn check(model: &str, backend: &dyn CounterBackend, code: u64, known: KnownEvent) {
            let model = PmuModel::parse(model).unwrap();
            let event = first_countable(&model, backend).unwrap();
            assert_eq!(event, Event { code, known }, "{}", model.name());
        }
        let (clock, step) = (ClockBackend::new(), StepBackend::new());
        check("intel-v2", &clock, 0x3c, KnownEvent::CoreCycles);
        check("amd-perfmonv2", &clock, 0x76, KnownEvent::CoreCycles);
        check("amd-core", &step, 0xc0, KnownEvent::Instructions);
        check("intel-v1", &step, 0xc0, KnownEvent::Instructions);
    }

    #[test]
    fn the_tsc_tells_when_and_steps_do_not() {
        fn check(mut backend: impl CounterBackend, expected: bool) {
            let model = PmuModel::parse("intel-v2").unwrap();
            let event = first_countable(&model, &backend).unwrap();
            assert_eq!(tells_when(&model, event, &mut backend), Ok(expected));
        }
        check(ClockBackend::new(), true);
        check(StepBackend::new(), false);
    }

    #[test]
    fn an_unknown_name_is_bad_input() {
        assert!(by_name("clokc").is_err());
        assert_eq!(by_name("step").unwrap().name, "step");
    }
}
