//! What sampling costs a guest that computes at CPL 3.

use perfmon_abi::DefaultHeader;
use serde::Serialize;
use umpire_perfmon::{Call, Client, ContextHandle, Mapping};

use super::fixture::{Fixture, Program};
use super::guest::busy;
use super::samples::events_per_second;
use super::served_guest::{ServedGuest, Setting};
use super::tool::{Format, call, end, header, start};
use super::{Bench, progress};
use crate::error::BenchError;
use crate::harness::ratio;
use crate::sources::{LeftOut, Source};
use crate::stats::median;

/// Turns of the guest's loop in each visit of a context.
const TURNS: usize = 5;
/// Larger than the samples of a visit.
const BUFFER: u64 = 4 << 20;

/// What is sampled: events, and how often each of them.
const WAYS: [(usize, u64); 4] = [(6, 1_000), (6, 10_000), (10, 1_000), (10, 10_000)];

/// One way to sample.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SlowRow {
    /// Where the counts come from.
    pub backend: &'static str,
    /// Events; each gives samples.
    pub events: usize,
    /// Event sets that they take.
    pub sets: usize,
    /// Samples of each event in a second in which it counts; 0: no context is
    /// loaded.
    pub hz: u64,
    /// Median time of the guest's loop.
    pub loop_ns: u64,
    /// How much longer that is than without a context, in percent.
    pub slowdown: f64,
    /// Samples in the buffer for each second of the guest's loops.
    pub samples_per_second: f64,
}

pub(super) fn measure(
    bench: &Bench<'_>,
    source: &Source,
) -> Result<Result<Vec<SlowRow>, LeftOut>, BenchError> {
    let fixture = match bench.fixture(source)? {
        Ok(fixture) => fixture,
        Err(none) => return Ok(Err(none)),
    };
    let setting = Setting::busy(bench, source);
    let rows = setting.play(bench.harness, &busy()?, |served| {
        rows(served, &fixture, source, bench)
    });
    Ok(match rows {
        Err(BenchError::Refused { what, refusal }) => Err(LeftOut {
            source: source.name,
            reason: format!("{what}: {refusal}"),
        }),
        rows => Ok(rows?),
    })
}

/// One way, and what it has given so far.
struct Contender {
    events: usize,
    sets: usize,
    hz: u64,
    context: Option<(ContextHandle, Mapping)>,
    ticks: Vec<u64>,
    samples: u64,
    /// Ticks of all turns in which the context was loaded.
    seen: u64,
}

fn rows(
    served: &ServedGuest,
    fixture: &Fixture,
    source: &Source,
    bench: &Bench<'_>,
) -> Result<Vec<SlowRow>, BenchError> {
    served.calibrate(bench.tsc_khz)?;
    let client = served.client()?;
    let rate = events_per_second(served, &client, fixture)?;
    let mut ways = vec![Contender::without()];
    for (events, hz) in WAYS {
        ways.push(Contender::new(fixture, &client, (events, hz), rate)?);
    }
    for round in 0..bench.rounds {
        progress(&format!(
            "{}: slow-down, round {} of {}",
            source.name,
            round + 1,
            bench.rounds
        ));
        let first = usize::try_from(round).unwrap_or(0);
        for place in 0..ways.len() {
            // Which comes first goes round.
            let at = (first + place) % ways.len();
            ways[at].visit(served, &client)?;
        }
    }
    let none = || BenchError::Guest("it ran no loop".to_owned());
    let unloaded = median(&mut ways[0].ticks).ok_or_else(none)?;
    let khz = u64::from(bench.tsc_khz.max(1));
    let row = |way: &mut Contender| {
        let ticks = median(&mut way.ticks).ok_or_else(none)?;
        let ns = u128::from(ticks) * 1_000_000 / u128::from(khz);
        Ok(SlowRow {
            backend: source.name,
            events: way.events,
            sets: way.sets,
            hz: way.hz,
            loop_ns: u64::try_from(ns).unwrap_or(u64::MAX),
            slowdown: (ratio(ticks, unloaded) - 1.0) * 100.0,
            samples_per_second: ratio(way.samples, way.seen) * 1000.0 * f64::from(bench.tsc_khz),
        })
    };
    ways.iter_mut().map(row).collect()
}

impl Contender {
    fn without() -> Self {
        Self {
            events: 0,
            sets: 0,
            hz: 0,
            context: None,
            ticks: Vec::new(),
            samples: 0,
            seen: 0,
        }
    }

    fn new(
        fixture: &Fixture,
        client: &Client,
        (events, hz): (usize, u64),
        rate: u64,
    ) -> Result<Self, BenchError> {
        let program = Program {
            period: Some((rate / hz).max(1)),
            format: Some((Format::Default, BUFFER)),
            ..Program::counting(events)
        };
        let context = fixture.create(client, &program)?;
        let buffer = context.map_buffer();
        let buffer = buffer.map_err(|refusal| BenchError::refused("the buffer", refusal))?;
        Ok(Self {
            events,
            sets: fixture.sets(events),
            hz,
            context: Some((context, buffer)),
            ..Self::without()
        })
    }

    /// Some turns of the guest, with the context loaded.
    fn visit(&mut self, served: &ServedGuest, client: &Client) -> Result<(), BenchError> {
        if let Some((context, _)) = &self.context {
            start(client, context, 0)?;
        }
        let before = self.count()?;
        // The one that the context came into does not count.
        let begun = served.fresh()?;
        let mut seen: u64 = begun.ticks.iter().sum();
        for _ in 0..TURNS {
            let turn = served.batch()?;
            seen += turn.ticks.iter().sum::<u64>();
            self.ticks.extend(turn.ticks);
        }
        self.samples += self.count()?.saturating_sub(before);
        self.seen += seen;
        if let Some((context, _)) = &self.context {
            // The buffer begins anew.
            call(client, context, Call::Restart)?;
            end(client, context)?;
        }
        Ok(())
    }

    fn count(&self) -> Result<u64, BenchError> {
        let Some((_, buffer)) = &self.context else {
            return Ok(0);
        };
        let header: Option<DefaultHeader> = header(buffer);
        let header =
            header.ok_or_else(|| BenchError::Guest("a buffer has no header".to_owned()))?;
        Ok(header.count)
    }
}
