//! Percentiles of round trips.

use serde::Serialize;

/// Frequency of a clock whose ticks are nanoseconds, in kHz.
pub(super) const NANOSECONDS: u32 = 1_000_000;

/// Two percentiles of one series, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Percentiles {
    /// Half of the samples are no longer than this.
    pub p50_ns: u64,
    /// 99 of 100 samples are no longer than this.
    pub p99_ns: u64,
}

/// The percentiles (nearest rank) of `ticks`, which is sorted by this; none of an
/// empty series. `tsc_khz` must not be 0.
pub fn percentiles<T: Copy + Ord + Into<u64>>(
    ticks: &mut [T],
    tsc_khz: u32,
) -> Option<Percentiles> {
    ticks.sort_unstable();
    let at = |percent: usize| {
        let rank = (ticks.len() * percent).div_ceil(100).max(1);
        let ticks: u64 = (*ticks.get(rank - 1)?).into();
        let ns = u128::from(ticks) * 1_000_000 / u128::from(tsc_khz.max(1));
        Some(u64::try_from(ns).unwrap_or(u64::MAX))
    };
    Some(Percentiles {
        p50_ns: at(50)?,
        p99_ns: at(99)?,
    })
}

/// The middle of `values`, which is sorted by this; the lower one of two.
pub(super) fn median(values: &mut [u64]) -> Option<u64> {
    values.sort_unstable();
    values.get(values.len().saturating_sub(1) / 2).copied()
}

/// The mean of `values`, which is sorted by this, without the longest hundredth:
/// what the host did in between is not theirs.
pub(super) fn trimmed_mean(values: &mut [u64]) -> Option<u64> {
    values.sort_unstable();
    let kept = &values[..values.len() - values.len() / 100];
    let count = u128::try_from(kept.len()).ok().filter(|&count| count > 0)?;
    let sum: u128 = kept.iter().map(|&value| u128::from(value)).sum();
    u64::try_from(sum / count).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(mut ticks: Vec<u32>, tsc_khz: u32, expected: Option<(u64, u64)>) {
        let expected = expected.map(|(p50_ns, p99_ns)| Percentiles { p50_ns, p99_ns });
        assert_eq!(percentiles(&mut ticks, tsc_khz), expected, "{ticks:?}");
    }

    #[test]
    fn nearest_rank() {
        check(vec![], 1_000_000, None);
        check(vec![7], 1_000_000, Some((7, 7)));
        check(vec![3, 1, 2], 1_000_000, Some((2, 3)));
        check((1..=100).rev().collect(), 1_000_000, Some((50, 99)));
        check((1..=1000).collect(), 1_000_000, Some((500, 990)));
    }

    #[test]
    fn the_middle() {
        assert_eq!(median(&mut []), None);
        assert_eq!(median(&mut [5]), Some(5));
        assert_eq!(median(&mut [9, 1]), Some(1));
        assert_eq!(median(&mut [9, 1, 5]), Some(5));
    }

    #[test]
    fn the_longest_hundredth_is_left_out() {
        assert_eq!(trimmed_mean(&mut []), None);
        assert_eq!(trimmed_mean(&mut [4, 8]), Some(6));
        let mut values = vec![7; 99];
        values.insert(50, u64::MAX);
        assert_eq!(trimmed_mean(&mut values), Some(7));
    }

    #[test]
    fn ticks_become_nanoseconds() {
        check(vec![2_500], 2_500_000, Some((1_000, 1_000)));
        check(
            vec![u32::MAX],
            1,
            Some((
                u64::from(u32::MAX) * 1_000_000,
                u64::from(u32::MAX) * 1_000_000,
            )),
        );
    }
}
