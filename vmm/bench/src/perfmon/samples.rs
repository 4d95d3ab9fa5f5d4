//! Samples into the buffer: ever shorter periods, until no more come.

use std::time::{Duration, Instant};

use perfmon_abi::consts::{PFM_DOUBLE_HALF_FULL, PFM_MSG_THROTTLED};
use perfmon_abi::{DoubleHeader, PmdArg};
use serde::Serialize;
use umpire_perfmon::{Call, Client, ContextHandle, Event, Mapping, Wait};

use super::fixture::{Fixture, Program};
use super::guest::busy;
use super::served_guest::{ServedGuest, Setting};
use super::tool::{Format, call, end, header, start};
use super::{Bench, progress};
use crate::error::BenchError;
use crate::sources::{LeftOut, Source};

/// Samples a second that are asked for, in turn.
const RATES: [u64; 8] = [
    1_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000,
];
/// How long each is tried.
const TRIAL: Duration = Duration::from_secs(1);
/// Room for what a trial gives.
const LARGE: u64 = 24 << 20;
/// Small enough to be filled and given back many times.
const SMALL: u64 = 256 << 10;
/// Samples that may be missing at the ends of a trial.
const EDGE: u64 = 2;
/// A shorter period that does not give so many samples more is the last.
const GROWTH: f64 = 1.1;

/// One rate with one format.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SampleRow {
    /// Where the counts come from.
    pub backend: &'static str,
    /// Of the buffer.
    pub format: Format,
    /// Samples in a second of guest time that the period stands for.
    pub wanted: u64,
    /// Samples in a second of real time that are in the buffer.
    pub per_second: f64,
    /// Samples that came.
    pub samples: u64,
    /// Samples that the events counted beside them would have given.
    pub due: u64,
    /// Samples that the format reports as lost.
    pub dropped: u64,
    /// There were more overflows than a context may have in a second: monitoring
    /// was masked and started again.
    pub throttled: u64,
    /// Periods without a sample of their own: a reset starts the next period when
    /// an overflow is handled, not when it took place, and all periods that end
    /// while the guest's thread is off its CPU are one overflow.
    pub stretched: u64,
    /// Each overflow that was handled has its sample: none were dropped, and
    /// nothing was masked.
    pub lossless: bool,
}

/// Every format on `source`.
pub(super) fn measure(
    bench: &Bench<'_>,
    source: &Source,
) -> Result<Result<Vec<SampleRow>, LeftOut>, BenchError> {
    let fixture = match bench.fixture(source)? {
        Ok(fixture) => fixture,
        Err(none) => return Ok(Err(none)),
    };
    let setting = Setting::busy(bench, source);
    let rows = setting.play(bench.harness, &busy()?, |served| {
        served.calibrate(bench.tsc_khz)?;
        let client = served.client()?;
        let trial = Trial {
            served,
            client: &client,
            fixture: &fixture,
            backend: source.name,
            per_second: events_per_second(served, &client, &fixture)?,
        };
        let mut rows = Vec::new();
        for format in Format::ALL {
            let mut rate = 0.0;
            for wanted in RATES {
                progress(&format!(
                    "{}: {wanted} Hz, {} format",
                    source.name,
                    format.name()
                ));
                let row = trial.run(format, wanted)?;
                let before = std::mem::replace(&mut rate, row.per_second);
                rows.push(row);
                if row.throttled > 0 || row.per_second < before * GROWTH {
                    break;
                }
            }
        }
        Ok(rows)
    });
    Ok(match rows {
        // Not every source that counts can tell of an overflow.
        Err(BenchError::Refused { what, refusal }) => Err(LeftOut {
            source: source.name,
            reason: format!("{what}: {refusal}"),
        }),
        rows => Ok(rows?),
    })
}

/// How often the first event happens in the busy guest.
pub(super) fn events_per_second(
    served: &ServedGuest,
    client: &Client,
    fixture: &Fixture,
) -> Result<u64, BenchError> {
    let context = fixture.create(client, &Program::counting(1))?;
    start(client, &context, 0)?;
    let begun = Instant::now();
    served.fresh()?;
    std::thread::sleep(Duration::from_millis(100));
    let read = call(client, &context, fixture.reading(1))?;
    let nanoseconds = begun.elapsed().as_nanos().max(1);
    end(client, &context)?;
    let events = u128::from(value(&read, 0));
    let rate = u64::try_from(events * 1_000_000_000 / nanoseconds).unwrap_or(u64::MAX);
    match rate {
        0 => Err(BenchError::Guest(format!(
            "{} did not happen",
            fixture.names[0]
        ))),
        rate => Ok(rate),
    }
}

fn value(read: &Call, place: usize) -> u64 {
    match read {
        Call::ReadPmds(args) => args.get(place).map_or(0, |arg| arg.value),
        _ => 0,
    }
}

struct Trial<'a> {
    served: &'a ServedGuest,
    client: &'a Client,
    fixture: &'a Fixture,
    backend: &'static str,
    per_second: u64,
}

impl Trial<'_> {
    fn run(&self, format: Format, wanted: u64) -> Result<SampleRow, BenchError> {
        let period = (self.per_second / wanted).max(1);
        let size = if format == Format::Double {
            SMALL
        } else {
            LARGE
        };
        let program = Program {
            period: Some(period),
            format: Some((format, size)),
            ..Program::counting(1)
        };
        let context = self.fixture.create(self.client, &program)?;
        // Another counter on the same event counts what is to be sampled.
        let (num, pmd) = *self.fixture.counters.get(1).ok_or_else(no_counter)?;
        let beside = perfmon_abi::PmcArg {
            num,
            value: self.fixture.selects[0],
            ..perfmon_abi::PmcArg::default()
        };
        call(self.client, &context, Call::WritePmcs(vec![beside]))?;
        let buffer = context.map_buffer();
        let buffer = buffer.map_err(|refusal| BenchError::refused("the buffer", refusal))?;
        start(self.client, &context, 0)?;
        let begun = Instant::now();
        let mut tool = Reader {
            client: self.client,
            context: &context,
            buffer: &buffer,
            format,
            taken: 0,
            throttled: 0,
            masked: false,
        };
        while begun.elapsed() < TRIAL {
            tool.serve(Wait::For(TRIAL.saturating_sub(begun.elapsed())))?;
            self.served.check_time()?;
        }
        call(self.client, &context, Call::Stop)?;
        let seconds = begun.elapsed().as_secs_f64();
        let read = Call::ReadPmds(vec![PmdArg {
            num: pmd,
            ..PmdArg::default()
        }]);
        let due = value(&call(self.client, &context, read)?, 0) / period;
        // Messages that came until the end.
        while tool.serve(Wait::No)? {}
        let (left, dropped) = format.samples(&buffer).ok_or_else(no_header)?;
        let samples = tool.taken + left;
        end(self.client, &context)?;
        let stretched = due.saturating_sub(samples + EDGE);
        let held = tool.masked || tool.throttled > 0 || dropped > 0;
        Ok(SampleRow {
            backend: self.backend,
            format,
            wanted,
            per_second: precise(samples) / seconds,
            samples,
            due,
            dropped,
            throttled: tool.throttled,
            stretched,
            lossless: !held,
        })
    }
}

/// Counts of a second are far below 2^52.
#[allow(clippy::cast_precision_loss, reason = "see above")]
fn precise(count: u64) -> f64 {
    count as f64
}

fn no_counter() -> BenchError {
    BenchError::Guest("its PMU has one counter only".to_owned())
}

fn no_header() -> BenchError {
    BenchError::Guest("its buffer has no header".to_owned())
}

/// The tool that gives full buffers back.
struct Reader<'a> {
    client: &'a Client,
    context: &'a ContextHandle,
    buffer: &'a Mapping,
    format: Format,
    taken: u64,
    throttled: u64,
    /// The default format masks when its buffer is full.
    masked: bool,
}

impl Reader<'_> {
    /// Deals with one message; whether there was one.
    fn serve(&mut self, wait: Wait) -> Result<bool, BenchError> {
        let event = self.context.read_message(wait);
        let event = event.map_err(|refusal| BenchError::refused("a message", refusal))?;
        match event {
            Event::Message(message) if message.kind == PFM_MSG_THROTTLED => self.throttled += 1,
            Event::Message(_) | Event::Overflow => {
                self.taken += self.full()?;
                self.masked |= self.format == Format::Default;
            }
            Event::Nothing => return Ok(false),
            Event::Gone => return Err(BenchError::Guest("it ended".to_owned())),
        }
        call(self.client, self.context, Call::Restart)?;
        Ok(true)
    }

    /// Samples that PFM_RESTART gives back.
    fn full(&self) -> Result<u64, BenchError> {
        match self.format {
            Format::Double => {
                let header: DoubleHeader = header(self.buffer).ok_or_else(no_header)?;
                let halves = header.state.into_iter().zip(header.count);
                let full = halves.filter(|(state, _)| *state == PFM_DOUBLE_HALF_FULL);
                Ok(full.map(|(_, count)| count).sum())
            }
            Format::Default => Ok(self.format.samples(self.buffer).ok_or_else(no_header)?.0),
            // Nothing is given back: its number goes on.
            Format::Compact => Ok(0),
        }
    }
}
