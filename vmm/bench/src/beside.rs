//! Trapped accesses beside something that may slow them down, against the same
//! beside something quiet.

use std::io::{self, Write};

use serde::Serialize;

use super::guest::Access;
use super::harness::ratio;
use super::report::{pair, table, verdict};
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
    /// `ratio_p99` is no higher than 1.10; and beside the host's arbiter `ratio_p50` no higher
    /// than 1.02.
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
}

/// What one kind of access cost beside each of two conditions.
pub(super) struct Compared {
    pub(super) access: Access,
    pub(super) quiet: Percentiles,
    pub(super) loaded: Percentiles,
    pub(super) ratios: Ratios,
}

/// A row for each kind of access, below the names of the two conditions.
pub(super) fn write_compared(
    names: [&str; 2],
    rows: impl Iterator<Item = Compared>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let [quiet, loaded] = names.map(|name| format!("{name} p50 / p99 [us]"));
    let rows = rows.map(|row| {
        [
            row.access.name().to_owned(),
            pair(row.quiet),
            pair(row.loaded),
            format!("{:.3}", row.ratios.ratio_p50),
            format!("{:.3}", row.ratios.ratio_p99),
            verdict(Some(row.ratios.met)).to_owned(),
        ]
    });
    table(
        ["", &quiet, &loaded, "ratio p50", "ratio p99", ""],
        1..=4,
        rows,
        out,
    )
}
