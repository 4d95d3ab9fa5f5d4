//! The figures of an experiment: as a table, as CSV, and as JSON.

use std::io::{self, Write};
use std::num::NonZero;
use std::time::Duration;

use arbiter_lab::{Cell, Estimate, GuessPlan, Kind, Metric, Who, estimate, guess_cookies};
use serde::Serialize;
use umpire_tools::table::lines;

use super::file::Experiment;

/// What came of an experiment.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) cells: Vec<Cell>,
    pub(super) guesses: Vec<Guess>,
    pub(super) elapsed: Duration,
    pub(super) threads: NonZero<usize>,
    /// The machine has fixed-function counters too.
    pub(super) has_fixed: bool,
}

impl Report {
    /// Whom the figures are about: all and each class, and the same by kind where there
    /// are two.
    fn every(&self) -> impl Iterator<Item = Who> {
        let kinds = Kind::ALL.into_iter().filter(|_| self.has_fixed);
        Who::every().flat_map(move |who| {
            let of_kinds = kinds.clone().map(move |kind| who.of(kind));
            [who].into_iter().chain(of_kinds)
        })
    }

    /// Whom people are shown first. The rest is for programs.
    pub(super) fn summed(&self) -> impl Iterator<Item = Who> {
        self.every()
            .filter(|who| who.class.is_none() || who.kind.is_none())
    }
}

/// How long a cookie of some width holds against a guesser.
#[derive(Debug)]
pub(super) struct Guess {
    pub(super) bits: u8,
    pub(super) guesser: &'static str,
    /// Virtual time until the cookie was found, in seconds. Widths above
    /// [`MOST_MEASURED`] are computed, and have no interval.
    pub(super) seconds: Option<Estimate>,
    pub(super) per_second: Option<Estimate>,
    pub(super) penalty_share: Option<Estimate>,
    pub(super) is_computed: bool,
}

/// The widest cookie that is guessed. For wider ones the time is computed from the
/// rate of as many guesses.
const MOST_MEASURED: u8 = 20;

/// Has programs and kernels guess cookies of all widths of the experiment. `progress`
/// hears which part of them is done.
pub(super) fn guesses(experiment: &Experiment, progress: &dyn Fn(f64)) -> Vec<Guess> {
    let cookies = &experiment.cookies;
    let widths = cookies.bits.iter();
    let widths = widths.flat_map(|bits| [("program", *bits), ("kernel", *bits)]);
    let all = 2.0 * cookies.bits.len() as f64 * f64::from(experiment.seeds.get());
    let mut done = 0.0;
    let guess = |(guesser, bits): (&'static str, u8)| {
        let plan = GuessPlan {
            bits,
            program: guesser == "program",
            guess_us: cookies.guess_us,
            most: 1 << MOST_MEASURED,
        };
        let seeds = (0..experiment.seeds.get()).map(u64::from);
        let seeds = seeds.map(|seed| experiment.first_seed.wrapping_add(seed));
        let runs = seeds.map(|seed| {
            let run = guess_cookies(&plan, seed);
            done += 1.0;
            progress(done / all);
            run
        });
        let runs: Vec<_> = runs.collect();
        let rate = estimate(
            runs.iter()
                .map(|run| Some(run.guesses as f64 / run.seconds)),
        );
        let is_computed = bits > MOST_MEASURED;
        let seconds = if is_computed {
            // On average half of all cookies have to be tried.
            rate.map(|rate| Estimate {
                mean: f64::from(bits - 1).exp2() / rate.mean,
                half: None,
                seeds: rate.seeds,
            })
        } else {
            estimate(runs.iter().map(|run| run.found.then_some(run.seconds)))
        };
        Guess {
            bits,
            guesser,
            seconds,
            per_second: rate,
            penalty_share: estimate(runs.iter().map(|run| Some(run.penalty_share))),
            is_computed,
        }
    };
    widths.map(guess).collect()
}

/// One figure.
#[derive(Debug, Serialize)]
struct FigureRow<'a> {
    scheme: &'a str,
    policy: &'a str,
    who: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    cookie_bits: Option<u8>,
    metric: &'a str,
    /// `null` where nobody measured it.
    mean: Option<f64>,
    low: Option<f64>,
    high: Option<f64>,
    seeds: u32,
    origin: &'static str,
}

impl<'a> FigureRow<'a> {
    fn new(metric: &'a str, who: String, estimate: Option<Estimate>) -> Self {
        let half = estimate.and_then(|one| one.half);
        let mean = estimate.map(|one| one.mean);
        FigureRow {
            scheme: "-",
            policy: "-",
            who,
            cookie_bits: None,
            metric,
            mean,
            low: mean.zip(half).map(|(mean, half)| mean - half),
            high: mean.zip(half).map(|(mean, half)| mean + half),
            seeds: estimate.map_or(0, |one| one.seeds),
            origin: "simulated",
        }
    }
}

/// Whether a metric is one of all together only, and `who` is not.
fn has(metric: Metric, who: Who) -> bool {
    match metric {
        Metric::Fairness => who.class.is_none(),
        Metric::FairnessVcpus => who == Who::ALL,
        _ => true,
    }
}

fn rows(report: &Report) -> Vec<FigureRow<'_>> {
    let mut rows = Vec::new();
    for cell in &report.cells {
        for metric in Metric::ALL {
            for who in report.every().filter(|who| has(metric, *who)) {
                let estimate = cell.estimate(metric, who);
                rows.push(FigureRow {
                    scheme: cell.variant.scheme.name(),
                    policy: &cell.variant.name,
                    ..FigureRow::new(metric.name(), who.to_string(), estimate)
                });
            }
        }
    }
    for guess in &report.guesses {
        let figures = [
            ("guess-s", guess.seconds),
            ("guesses-per-s", guess.per_second),
            ("penalty-share", guess.penalty_share),
        ];
        for (metric, estimate) in figures {
            let is_computed = guess.is_computed && metric == "guess-s";
            rows.push(FigureRow {
                cookie_bits: Some(guess.bits),
                origin: if is_computed { "computed" } else { "simulated" },
                ..FigureRow::new(metric, guess.guesser.to_owned(), estimate)
            });
        }
    }
    rows
}

/// Writes one JSON object for each figure.
pub(super) fn json(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    for row in rows(report) {
        serde_json::to_writer(&mut *out, &row)?;
        writeln!(out)?;
    }
    Ok(())
}

/// Writes the figures as CSV. A figure that nobody measured is `-`.
pub(super) fn csv(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "scheme,policy,who,cookie-bits,metric,mean,low,high,seeds,origin"
    )?;
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| value.to_string());
    for row in rows(report) {
        let policy = row.policy.replace('"', "\"\"");
        let bits = row
            .cookie_bits
            .map_or("-".to_owned(), |bits| bits.to_string());
        writeln!(
            out,
            "{},\"{policy}\",{},{bits},{},{},{},{},{},{}",
            row.scheme,
            row.who,
            row.metric,
            number(row.mean),
            number(row.low),
            number(row.high),
            row.seeds,
            row.origin,
        )?;
    }
    Ok(())
}

/// A figure with its interval, as `12.3 ±0.4`.
pub(super) fn figure(estimate: Option<Estimate>) -> String {
    let Some(Estimate { mean, half, .. }) = estimate else {
        return "-".to_owned();
    };
    let digits = match mean.abs() {
        1000.0.. => 0,
        10.0.. => 1,
        _ => 3,
    };
    match half {
        _ if mean.abs() >= 1e9 => format!("{mean:.1e}"),
        Some(half) => format!("{mean:.digits$} ±{half:.digits$}"),
        None => format!("{mean:.digits$}"),
    }
}

/// The cells of the table of one variant, with a heading.
pub(super) fn cells(report: &Report, cell: &Cell) -> Vec<Vec<String>> {
    let heading = Metric::ALL.iter().map(|metric| metric.name().to_owned());
    let mut rows = vec![
        ["".to_owned()]
            .into_iter()
            .chain(heading)
            .collect::<Vec<_>>(),
    ];
    for who in report.summed() {
        let figures = Metric::ALL.map(|metric| {
            if has(metric, who) {
                figure(cell.estimate(metric, who))
            } else {
                String::new()
            }
        });
        rows.push([who.to_string()].into_iter().chain(figures).collect());
    }
    rows
}

/// The cells of the table of guesses, with a heading.
pub(super) fn guess_cells(report: &Report) -> Vec<Vec<String>> {
    let heading = [
        "cookie-bits",
        "guesser",
        "guess-s",
        "guesses-per-s",
        "penalty-share",
        "origin",
    ];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    for guess in &report.guesses {
        rows.push(vec![
            guess.bits.to_string(),
            guess.guesser.to_owned(),
            figure(guess.seconds),
            figure(guess.per_second),
            figure(guess.penalty_share),
            if guess.is_computed {
                "computed"
            } else {
                "simulated"
            }
            .to_owned(),
        ]);
    }
    rows
}

/// What was simulated, in one line.
pub(super) fn summary(experiment: &Experiment, report: &Report) -> String {
    let machine = &experiment.machine;
    let runs = report.cells.iter().flat_map(|cell| &cell.runs);
    let requests: u64 = runs.clone().map(|run| run.requests).sum();
    let demands: u64 = runs.clone().map(|run| run.demands(Who::ALL).0).sum();
    let fixed = match machine.fixed {
        0 => String::new(),
        fixed => format!(" and {fixed} fixed-function counters"),
    };
    format!(
        "{} vCPUs on {} cores, {} counters{fixed}, {} s of virtual time, {} seeds; {} runs with {demands} \
         demands and {requests} requests took {:.1} s on {} threads",
        machine.vcpus,
        machine.cores,
        machine.counters,
        experiment.workload.seconds,
        experiment.seeds,
        runs.count(),
        report.elapsed.as_secs_f64(),
        report.threads,
    )
}

/// Writes the figures as tables for people.
pub(super) fn table(
    experiment: &Experiment,
    report: &Report,
    out: &mut dyn Write,
) -> io::Result<()> {
    writeln!(out, "{}", summary(experiment, report))?;
    writeln!(
        out,
        "mean ±95 % interval by Student's t; - is what no run has"
    )?;
    for cell in &report.cells {
        let (scheme, policy) = (cell.variant.scheme, &cell.variant.name);
        writeln!(out, "\nscheme {scheme}, policy {policy}")?;
        for line in lines(cells(report, cell), |column, _| column > 0) {
            writeln!(out, "{line}")?;
        }
    }
    if !report.guesses.is_empty() {
        writeln!(out, "\nguessing a cookie of which so many bits are unknown")?;
        for line in lines(guess_cells(report), |_, text| {
            text.starts_with(|first: char| first.is_ascii_digit())
        }) {
            writeln!(out, "{line}")?;
        }
    }
    Ok(())
}
