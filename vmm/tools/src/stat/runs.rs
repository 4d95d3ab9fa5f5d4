//! Mean and error of several runs.

/// Values of one quantity in several runs: mean and spread, as `perf stat -r`
/// has them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Runs {
    count: u32,
    mean: f64,
    /// Sum of squared distances from the mean (Welford).
    squares: f64,
}

impl Runs {
    /// Takes the value of a run in.
    pub fn add(&mut self, value: f64) {
        self.count += 1;
        let distance = value - self.mean;
        self.mean += distance / f64::from(self.count);
        self.squares += distance * (value - self.mean);
    }

    /// How many runs there were.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count
    }

    /// The mean; none without a run.
    #[must_use]
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then_some(self.mean)
    }

    /// The standard error of the mean; none with less than two runs.
    #[must_use]
    pub fn error(&self) -> Option<f64> {
        let count = f64::from(self.count);
        (self.count > 1).then(|| (self.squares / (count - 1.0) / count).sqrt())
    }

    /// The standard error in percent of the mean; none with less than two runs.
    /// It is 0 where the mean is.
    #[must_use]
    pub fn percent(&self) -> Option<f64> {
        let error = self.error()?;
        Some(if self.mean == 0.0 {
            0.0
        } else {
            error / self.mean * 100.0
        })
    }
}
