//! Which counter sources a measurement takes.

use std::fmt::Display;
use std::io::{self, Write};
use std::num::NonZeroU64;

use pmu_virt::{
    BackendEnv, CountRequest, CounterBackend, EventCode, KnownEvent, PmuModel, Progress, SlotIndex,
    Sources, Tsc, Unavailable, backend_names,
};
use serde::Serialize;
use vmm::counters::{CounterError, CounterPlan};
use vmm::doctor;
use vmm::probe::ProbeReport;

use super::error::BenchError;

/// USR, OS and enable of an event select.
pub(super) const USR_OS_ENABLE: u64 = 1 << 16 | 1 << 17 | 1 << 22;
/// INT of an event select.
pub(super) const INT: u64 = 1 << 20;

/// One counter source, ready to be opened.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub(super) name: &'static str,
    plan: CounterPlan,
}

/// A source that a measurement has no figures of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// Its name.
    pub source: &'static str,
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
    /// A source as in `--counters`.
    pub(super) fn new(source: &pmu_virt::Source, env: BackendEnv) -> Result<Self, CounterError> {
        let alone = Sources::parse(&source.to_string())?;
        // Measurements run on one thread.
        let plan = CounterPlan::prepare(&alone, env, 1, None)?;
        Ok(Self {
            name: source.name(),
            plan,
        })
    }

    /// Makes a backend for one vCPU or core of the calling thread, with nothing
    /// in common with others.
    pub(super) fn open(&self) -> Result<Box<dyn CounterBackend>, CounterError> {
        self.plan.anew().open()
    }

    /// Makes the backends of the cores of one machine, for the calling thread.
    pub(super) fn open_cores(
        &self,
        cores: usize,
    ) -> Result<Vec<Box<dyn CounterBackend>>, CounterError> {
        let machine = self.plan.anew();
        (0..cores).map(|_| machine.open()).collect()
    }

    /// Whether two of them count the same made-up guest time, however it is cut
    /// in pieces: `perf` and `msr` count real time.
    pub(super) fn is_repeatable(&self) -> bool {
        matches!(self.name, "clock" | "step" | "sim")
    }
}

/// The sources to be measured in turn, each by itself: those of the list
/// `wanted`, or all that this host has, and those that it has not.
pub(super) fn choose(
    probe: &ProbeReport,
    env: BackendEnv,
    wanted: Option<&str>,
) -> Result<(Vec<Source>, Vec<LeftOut>), BenchError> {
    match wanted.filter(|list| *list != "auto") {
        Some(list) => Ok((named(probe, env, list)?, Vec::new())),
        None => Ok(usable(probe, env)),
    }
}

fn named(probe: &ProbeReport, env: BackendEnv, list: &str) -> Result<Vec<Source>, BenchError> {
    let sources = Sources::parse(list).map_err(unusable)?;
    doctor::check_backends(probe, &sources).map_err(unusable)?;
    let one = |source| {
        let source = Source::new(source, env).map_err(unusable)?;
        // What the host refuses shows when it is opened.
        source.open().map_err(unusable)?;
        Ok(source)
    };
    sources.iter().map(one).collect()
}

fn unusable(error: impl Display) -> BenchError {
    BenchError::Sources(error.to_string())
}

/// What needs options has to be asked for.
fn usable(probe: &ProbeReport, env: BackendEnv) -> (Vec<Source>, Vec<LeftOut>) {
    let (mut usable, mut left_out) = (Vec::new(), Vec::new());
    for name in backend_names().iter().map(|backend| backend.name) {
        if name == "auto" {
            continue;
        }
        let opened = open_by_name(probe, env, name);
        match opened {
            Ok(source) => usable.push(source),
            Err(reason) => left_out.push(LeftOut {
                source: name,
                reason,
            }),
        }
    }
    (usable, left_out)
}

fn open_by_name(probe: &ProbeReport, env: BackendEnv, name: &str) -> Result<Source, String> {
    let one = Sources::parse(name).map_err(|error| error.to_string())?;
    doctor::check_backends(probe, &one).map_err(|error| error.to_string())?;
    let first = one.iter().next().ok_or("it has no source")?;
    let source = Source::new(first, env).map_err(|error| error.to_string())?;
    source.open().map_err(|error| error.to_string())?;
    Ok(source)
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
        if programmable && !again && backend.plan(&request).is_ok() {
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
    let request = CountRequest::decode(model.events(), event.code | USR_OS_ENABLE | INT);
    let slot = slot_for(backend, &request, 0);
    backend.program(slot, &request)?;
    backend.start(slot);
    backend.arm(slot, NonZeroU64::new(1_000));
    backend.observe(&Progress::Entered { tsc: Tsc(0) });
    Ok(backend.deadline().is_some())
}

/// The slot for the counter `n` of those on `request`: a source in a combination
/// counts on a part of the slots.
pub(super) fn slot_for(backend: &dyn CounterBackend, request: &CountRequest, n: u8) -> SlotIndex {
    let plan = backend.plan(request).ok();
    let slot = plan.and_then(|plan| plan.constraint.slots.iter().nth(n.into()));
    slot.unwrap_or(SlotIndex(n))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pmu_virt::{ClockBackend, CombinedBackend, StepBackend};

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
        // Cycles are counted on the second part of the slots.
        let [step, clock]: [Box<dyn CounterBackend>; 2] =
            [Box::new(StepBackend::new()), Box::new(ClockBackend::new())];
        check(CombinedBackend::new(vec![step, clock]), true);
    }

    #[test]
    fn a_list_is_measured_one_by_one() {
        let env = BackendEnv::default();
        let sources = Sources::parse("step,clock").unwrap();
        let opened = sources.iter().map(|source| {
            let backend = Source::new(source, env).unwrap().open().unwrap();
            backend.name()
        });
        assert_eq!(opened.collect::<Vec<_>>(), ["step", "clock"]);
    }
}
