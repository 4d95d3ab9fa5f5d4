//! The demo's report.

use std::io::{self, Write};

use pmu_virt::{
    CountRequest, CounterBackend, CounterReport, EmuBackend, EmuCycles, Reading, Unavailable,
    UnavailableReason,
};
use serde::Serialize;
use umpire_bench::{TrapReport, micros};
use umpire_tools::table::lines;
use vmm::config::Engine;

use super::plan::Planned;
use super::record::Row;

/// Everything that the demo shows. Its JSON form keeps these names.
#[derive(Clone, Debug, Serialize)]
pub struct DemoReport {
    /// Always true: a guest ran.
    pub shown: bool,
    /// What ran it: kvm or emu.
    pub engine: String,
    /// Why that, if nobody asked for it and KVM did not.
    pub because: Option<String>,
    /// The host's processor.
    pub processor: Option<String>,
    /// Guest CPL 0 runs in KVM's instruction emulator.
    pub slow_cpl0: bool,
    /// PMU model of the guest.
    pub model: &'static str,
    /// Where counts came from, as in `--counters`.
    pub backend: String,
    /// TSC frequency in kHz. Without KVM it is that of virtual time.
    pub tsc_khz: u32,
    /// What happened, in order.
    pub rows: Vec<Row>,
    /// The counters at the end.
    pub counters: Vec<CounterRow>,
    /// PMIs delivered.
    pub pmis: u64,
    /// Of these, late ones.
    pub late_pmis: u64,
    /// Round trips of each kind of access, from a second guest; none where the
    /// user's events are counted.
    pub round_trips: Option<TrapReport>,
}

/// One counter at the end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CounterRow {
    /// Its name.
    pub counter: String,
    /// What it was asked for.
    pub event: String,
    /// The backend can count this event, whether it did or not.
    pub supported: bool,
    /// Events that the backend counted since it was programmed; none if nobody
    /// counted.
    pub counted: Option<u64>,
    /// How they were counted, or `unavailable`.
    pub provenance: String,
    /// Why nobody counted, or why the count is not exact; none if there is
    /// nothing to say.
    pub reason: Option<String>,
    /// The engine emu counts this event, whatever counted here.
    #[serde(skip)]
    pub emu_counts: bool,
}

/// Whether a processor in software counts what `request` asks for, by itself.
fn emu_counts(request: &CountRequest) -> bool {
    EmuBackend::new(EmuCycles::Unavailable)
        .plan(request)
        .is_ok()
}

impl CounterRow {
    /// `report` in words.
    pub fn describe(report: &CounterReport) -> Self {
        let loss = report.loss.map(|loss| loss.to_string());
        Self {
            event: report.event.event.to_string(),
            emu_counts: emu_counts(&report.event),
            ..Self::of_reading(report.counter.to_string(), report.reading, loss)
        }
    }

    /// The outcome of `event`, by the `reports` of the counters.
    pub(super) fn of_event(
        event: &Planned,
        reports: &[CounterReport],
        backend: &dyn CounterBackend,
    ) -> Self {
        let Planned { named, counter } = event;
        let meaning = named.request.to_string();
        let event = if named.name == meaning {
            meaning
        } else {
            format!("{} ({meaning})", named.name)
        };
        let report = reports.iter().find(|report| report.counter == *counter);
        let row = match (report, backend.plan(&named.request)) {
            (Some(report), _) => Self::describe(report),
            // A counter that was stopped and never counted leaves no report.
            (None, Err(Unavailable { reason })) => {
                Self::of_reading(counter.to_string(), Reading::Unavailable(reason), None)
            }
            (None, Ok(_)) => Self {
                counter: counter.to_string(),
                event: String::new(),
                supported: true,
                counted: None,
                provenance: "unavailable".to_owned(),
                reason: Some("the guest never counted it".to_owned()),
                emu_counts: false,
            },
        };
        Self {
            event,
            emu_counts: emu_counts(&named.request),
            ..row
        }
    }

    fn of_reading(counter: String, reading: Reading, loss: Option<String>) -> Self {
        let (counted, provenance, reason) = match reading {
            Reading::Counted { value, provenance } => (Some(value), provenance.to_string(), loss),
            Reading::Unavailable(reason) => {
                (None, "unavailable".to_owned(), Some(reason.to_string()))
            }
        };
        let refused = matches!(
            reading,
            Reading::Unavailable(
                UnavailableReason::Event { .. }
                    | UnavailableReason::Modifier { .. }
                    | UnavailableReason::OneRing { .. }
                    | UnavailableReason::Unseen { .. }
            )
        );
        Self {
            counter,
            event: String::new(),
            supported: !refused,
            counted,
            provenance,
            reason,
            emu_counts: false,
        }
    }

    /// The count, or the words that stand for none.
    fn count(&self) -> String {
        match (self.counted, self.supported) {
            (Some(count), _) => count.to_string(),
            (None, true) => "<not counted>".to_owned(),
            (None, false) => "<not supported>".to_owned(),
        }
    }
}

/// Writes `report` to `out`.
///
/// # Errors
/// `out` cannot be written to.
pub fn write_report(report: &DemoReport, json: bool, out: &mut dyn Write) -> io::Result<()> {
    if json {
        serde_json::to_writer_pretty(&mut *out, report)?;
        writeln!(out)?;
    } else {
        text(report, out)?;
    }
    out.flush()
}

fn text(report: &DemoReport, out: &mut dyn Write) -> io::Result<()> {
    heading(report, out)?;
    rows(&report.rows, out)?;
    writeln!(out, "\nCounters at the end")?;
    counters(&report.counters, out)?;
    writeln!(
        out,
        "PMIs delivered: {}, of these late: {}",
        report.pmis, report.late_pmis
    )?;
    if report.engine == Engine::Kvm.to_string() {
        elsewhere(&report.counters, out)?;
    }
    match &report.round_trips {
        Some(measured) => round_trips(measured, out),
        None => Ok(()),
    }
}

/// Where the rest can be counted, if it can.
fn elsewhere(counters: &[CounterRow], out: &mut dyn Write) -> io::Result<()> {
    let lacking = || counters.iter().filter(|row| !row.supported);
    if !lacking().any(|row| row.emu_counts) {
        return Ok(());
    }
    let what = if lacking().all(|row| row.emu_counts) {
        "What is <not supported> here"
    } else {
        "Some of what is <not supported> here"
    };
    writeln!(
        out,
        "{what}, a processor in software counts exactly: umpire demo --engine emu"
    )
}

fn heading(report: &DemoReport, out: &mut dyn Write) -> io::Result<()> {
    write!(
        out,
        "A guest with the virtual PMU {}, counted by the {} backend, on ",
        report.model, report.backend
    )?;
    let mhz = report.tsc_khz / 1000;
    if report.engine == Engine::Kvm.to_string() {
        let processor = report.processor.as_deref();
        let processor = processor.unwrap_or("an unknown processor");
        return writeln!(
            out,
            "{processor} ({mhz} MHz TSC).\n\
             KVM's own PMU is off; each row is an exit of this run.\n"
        );
    }
    writeln!(out, "a processor in software ({mhz} MHz TSC).")?;
    if let Some(because) = &report.because {
        writeln!(out, "KVM cannot be used here: {because}.")?;
    }
    writeln!(
        out,
        "Times are virtual: an instruction takes a nanosecond. Each row is an exit of this run.\n"
    )
}

fn rows(rows: &[Row], out: &mut dyn Write) -> io::Result<()> {
    let cells = rows.iter().map(|row| {
        [
            row.time_us.to_string(),
            row.vcpu.to_string(),
            row.what.to_owned(),
            row.register.clone(),
            row.value.clone().unwrap_or_default(),
            row.outcome.clone(),
        ]
    });
    let titles = ["time [us]", "vCPU", "what", "register", "value", "outcome"];
    table(titles, cells, &[0, 1, 4], out)
}

fn counters(counters: &[CounterRow], out: &mut dyn Write) -> io::Result<()> {
    let cells = counters.iter().map(|row| {
        [
            row.counter.clone(),
            row.event.clone(),
            row.count(),
            match &row.reason {
                None => row.provenance.clone(),
                Some(reason) => format!("{}: {reason}", row.provenance),
            },
        ]
    });
    let titles = ["counter", "event", "counted", "provenance"];
    table(titles, cells, &[2], out)
}

fn round_trips(report: &TrapReport, out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "\nRound trips of exits, timed in a second guest ({} of each kind)",
        report.iterations
    )?;
    let cells = report.rows.iter().map(|row| {
        [
            row.access.name().to_owned(),
            micros(row.umpire.p50_ns),
            micros(row.umpire.p99_ns),
        ]
    });
    let titles = ["access", "p50 [us]", "p99 [us]"];
    table(titles, cells, &[1, 2], out)
}

/// Aligned columns; those in `right` are flush right.
pub(super) fn table<const N: usize>(
    titles: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
    right: &[usize],
    out: &mut dyn Write,
) -> io::Result<()> {
    let rows = [titles.map(str::to_owned)].into_iter().chain(rows);
    lines(rows.map(Vec::from).collect(), |column, _| {
        right.contains(&column)
    })
    .try_for_each(|line| writeln!(out, "  {line}"))
}
