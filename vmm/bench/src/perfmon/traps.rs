//! Trapped accesses of the guest under two conditions in one run.

use serde::Serialize;

use super::served_guest::ServedGuest;
use crate::beside::Ratios;
use crate::error::BenchError;
use crate::guest::Access;
use crate::stats::{Percentiles, percentiles};

/// Samples by the place of the access in [`Access::ALL`].
#[derive(Clone, Debug, Default)]
pub(crate) struct TimesByAccess([Vec<u64>; Access::ALL.len()]);

/// One kind of access.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TrapsRow {
    /// What the guest did.
    pub access: Access,
    /// Without what is asked about.
    pub quiet: Percentiles,
    /// With it.
    pub loaded: Percentiles,
    /// What it costs.
    #[serde(flatten)]
    pub ratios: Ratios,
}

impl TimesByAccess {
    /// Adds the samples of `other`.
    pub(crate) fn extend(&mut self, other: Self) {
        for (series, more) in self.0.iter_mut().zip(other.0) {
            series.extend(more);
        }
    }

    /// Takes `rounds` batches of every kind; those that had begun before are
    /// left out.
    pub(super) fn take(&mut self, served: &ServedGuest, rounds: u32) -> Result<(), BenchError> {
        served.fresh()?;
        let mut missing = [rounds; Access::ALL.len()];
        while missing.iter().any(|left| *left > 0) {
            let batch = served.batch()?;
            let place = usize::try_from(batch.number).unwrap_or(usize::MAX);
            let (Some(series), Some(left)) = (self.0.get_mut(place), missing.get_mut(place)) else {
                let what = format!("it finished batch {}", batch.number);
                return Err(BenchError::Guest(what));
            };
            if *left > 0 {
                *left -= 1;
                series.extend(batch.ticks);
            }
        }
        Ok(())
    }

    /// Both conditions side by side.
    pub(crate) fn against(self, quiet: Self, tsc_khz: u32) -> Result<Vec<TrapsRow>, BenchError> {
        let none = || BenchError::Guest("it took no samples".to_owned());
        let pairs = quiet.0.into_iter().zip(self.0);
        let row = |(access, (mut quiet, mut loaded)): (Access, (Vec<u64>, Vec<u64>))| {
            let quiet = percentiles(&mut quiet, tsc_khz).ok_or_else(none)?;
            let loaded = percentiles(&mut loaded, tsc_khz).ok_or_else(none)?;
            Ok(TrapsRow {
                access,
                quiet,
                loaded,
                ratios: Ratios::of(loaded, quiet),
            })
        };
        Access::ALL.into_iter().zip(pairs).map(row).collect()
    }
}
