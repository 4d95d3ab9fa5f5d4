//! What a core reports of its work.

use std::fmt;
use std::time::Duration;

use pmu_virt::SwitchStats;

/// As many migrations' costs are kept.
const KEPT: usize = 4096;

/// What one core did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CoreReport {
    /// Entries of another vCPU than the one before.
    pub switches: u64,
    /// Timeslices that ended with a halted vCPU.
    pub halts: u64,
    /// Timeslices that ended with a vCPU that is kept off the core for guessing
    /// cookies.
    pub locked_out: u64,
    /// Idle vCPUs asked whether they had been woken.
    pub probes: u64,
    /// Of these, how many had been.
    pub wakes: u64,
    /// Time that the probes took, and the time that the core's thread existed.
    pub probing: Duration,
    /// From the thread's first vCPU to its end.
    pub alive: Duration,
    /// What the switches cost on the core's counters; zeros without a PMU.
    pub counters: SwitchStats,
    /// Migrations to this core.
    pub migrations: MigrationCost,
    /// How often no vCPU could leave, because the core that would have taken one has no
    /// room for the counters that are promised to it.
    pub stays: u64,
}

/// The first `KVM_RUN` of vCPUs that came from another core, without guest code.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MigrationCost {
    times: Vec<Duration>,
    count: u64,
}

impl MigrationCost {
    /// One more; of very many only the first are kept for [`MigrationCost::median`].
    pub fn add(&mut self, took: Duration) {
        self.count += 1;
        if self.times.len() < KEPT {
            self.times.push(took);
        }
    }

    /// Adds another core's.
    pub fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.times.extend(&other.times);
    }

    /// How many there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The median; `None` without any.
    #[must_use]
    pub fn median(&self) -> Option<Duration> {
        let mut times = self.times.clone();
        times.sort_unstable();
        times.get(times.len() / 2).copied()
    }

    /// The longest of those that were kept.
    #[must_use]
    pub fn max(&self) -> Option<Duration> {
        self.times.iter().max().copied()
    }
}

impl fmt::Display for MigrationCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.median(), self.max()) {
            (Some(median), Some(max)) => write!(
                f,
                "{} migrations (first KVM_RUN p50 {:.1} us, max {:.1} us)",
                self.count,
                micros(median),
                micros(max)
            ),
            _ => f.write_str("no migrations"),
        }
    }
}

impl fmt::Display for CoreReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = 100.0 * self.probing.as_secs_f64() / self.alive.as_secs_f64().max(1e-9);
        write!(
            f,
            "{} switches ({} counter operations), {} halts, {} probes ({} found a vCPU awake; {share:.2} % of the time), {}",
            self.switches,
            self.counters.operations,
            self.halts,
            self.probes,
            self.wakes,
            self.migrations
        )?;
        for (count, what) in [(self.locked_out, "penalties"), (self.stays, "stays")] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        Ok(())
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_of_migrations() {
        let mut cost = MigrationCost::default();
        assert_eq!(cost.to_string(), "no migrations");
        for us in [30, 10, 20] {
            cost.add(Duration::from_micros(us));
        }
        let mut all = MigrationCost::default();
        all.merge(&cost);
        assert_eq!(
            all.to_string(),
            "3 migrations (first KVM_RUN p50 20.0 us, max 30.0 us)"
        );
    }
}
