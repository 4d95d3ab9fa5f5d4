//! Trapped accesses beside something that may slow them down, against the same
//! beside something quiet.

use std::io::{self, Write};

use serde::Serialize;

use super::guest::Access;
use super::report::micros;
use super::rig::ratio;
use super::stats::Percentiles;

/// Highest ratio of the 99th percentiles that is wanted.
pub(super) const TARGET: f64 = 1.10;

/// What it costs one kind of access.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Ratios {
    /// Ratio of the medians.
    pub ratio_p50: f64,
    /// Ratio of the 99th percentiles.
    pub ratio_p99: f64,
    /// `ratio_p99` is no higher than 1.10.
    pub met: bool,
}

impl Ratios {
    pub(super) fn of(loaded: Percentiles, quiet: Percentiles) -> Self {
        let ratio_p99 = ratio(loaded.p99_ns, quiet.p99_ns);
        Self {
            ratio_p50: ratio(loaded.p50_ns, quiet.p50_ns),
            ratio_p99,
            met: ratio_p99 <= TARGET,
        }
    }

    /// The row of a table that [`heading`] begins.
    pub(super) fn write(
        self,
        out: &mut dyn Write,
        access: Access,
        times: [Percentiles; 2],
        width: usize,
    ) -> io::Result<()> {
        let [quiet, loaded] = times.map(pair);
        writeln!(
            out,
            "{:<20} {quiet:>width$} {loaded:>width$} {:>9.3} {:>9.3}  {}",
            access.name(),
            self.ratio_p50,
            self.ratio_p99,
            if self.met { "met" } else { "missed" }
        )
    }
}

/// The heading, with names of the two conditions.
pub(super) fn heading(out: &mut dyn Write, names: [&str; 2], width: usize) -> io::Result<()> {
    let [quiet, loaded] = names.map(|name| format!("{name} p50 / p99 [us]"));
    writeln!(
        out,
        "{:<20} {quiet:>width$} {loaded:>width$} {:>9} {:>9}",
        "", "ratio p50", "ratio p99"
    )
}

/// Both percentiles in microseconds.
pub(super) fn pair(times: Percentiles) -> String {
    format!("{} / {}", micros(times.p50_ns), micros(times.p99_ns))
}
