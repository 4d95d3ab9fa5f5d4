//! Means over seeds, with 95 % intervals by Student's t.

/// The mean of a figure over seeds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    pub mean: f64,
    /// Half the length of the 95 % interval around the mean. `None` if there is only
    /// one value: nothing is known of its spread.
    pub half: Option<f64>,
    /// Number of seeds that have a value.
    pub seeds: u32,
}

/// The mean of the values with its interval. A seed without a value, such as the time
/// to grant where nothing was granted, does not count. `None` means that no seed has one.
pub fn estimate(values: impl IntoIterator<Item = Option<f64>>) -> Option<Estimate> {
    let values: Vec<f64> = values.into_iter().flatten().collect();
    let seeds = u32::try_from(values.len())
        .ok()
        .filter(|count| *count > 0)?;
    let count = f64::from(seeds);
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    let half = (seeds > 1).then(|| {
        let variance = squares / (count - 1.0);
        student_t(seeds - 1) * (variance / count).sqrt()
    });
    Some(Estimate { mean, half, seeds })
}

/// The 97.5 % quantile of Student's t.
fn student_t(freedom: u32) -> f64 {
    const TABLE: [f64; 30] = [
        12.706_205, 4.302_653, 3.182_446, 2.776_445, 2.570_582, 2.446_912, 2.364_624, 2.306_004,
        2.262_157, 2.228_139, 2.200_985, 2.178_813, 2.160_369, 2.144_787, 2.131_450, 2.119_905,
        2.109_816, 2.100_922, 2.093_024, 2.085_963, 2.079_614, 2.073_873, 2.068_658, 2.063_899,
        2.059_539, 2.055_529, 2.051_831, 2.048_407, 2.045_230, 2.042_272,
    ];
    let index = usize::try_from(freedom)
        .unwrap_or(usize::MAX)
        .wrapping_sub(1);
    if let Some(value) = TABLE.get(index) {
        return *value;
    }
    // The expansion of Cornish and Fisher; from 31 degrees on its error is below 1e-5.
    let (z, n) = (1.959_964_f64, f64::from(freedom));
    let first = (z.powi(3) + z) / 4.0;
    let second = (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0;
    let third = (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0;
    z + first / n + second / n.powi(2) + third / n.powi(3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals() {
        assert_eq!(estimate([None, None]), None);
        let one = estimate([Some(3.0)]).unwrap();
        assert_eq!((one.mean, one.half, one.seeds), (3.0, None, 1));
        // By hand: mean 2, standard deviation 1, t = 4.302653.
        let three = estimate([Some(1.0), Some(2.0), None, Some(3.0)]).unwrap();
        assert_eq!((three.mean, three.seeds), (2.0, 3));
        assert!((three.half.unwrap() - 4.302_653 / 3_f64.sqrt()).abs() < 1e-9);
    }

    #[test]
    fn quantiles_of_many_degrees_continue_the_table() {
        for (freedom, expected) in [(31, 2.039_513), (40, 2.021_075), (120, 1.979_930)] {
            assert!((student_t(freedom) - expected).abs() < 2e-5, "{freedom}");
        }
    }
}
