//! Trapped accesses of a guest beside an arbiter that decides all the time, and without one.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use serde::Serialize;
use vmm::sys::{allowed_cpus, pin_this_thread};

use super::daemon::{Daemon, acquire, release, request};
use super::{ArbiterOptions, progress};
use crate::error::BenchError;
use crate::guest::BATCH;
use crate::harness::Harness;
use crate::perfmon::{self, Subject, TimesByAccess, TrapsRow};

/// Highest ratio of the medians that is wanted.
pub(super) const TARGET_P50: f64 = 1.02;
/// Between two requests with their releases: 1,000 decisions in a second.
const PACE: Duration = Duration::from_millis(2);
/// Batches of each kind of access in a turn.
const TURN: u32 = 10;

/// Accesses without an arbiter and beside one, in turns.
#[derive(Clone, Debug, Serialize)]
pub struct LoadedTraps {
    /// Host CPUs of the arbiter and its client, and of the guest.
    pub cpus: [usize; 2],
    /// Decisions in a second while the guest was measured beside the arbiter.
    pub decisions_per_second: f64,
    /// Accesses timed of each kind on each side.
    pub accesses: u32,
    /// One for each kind of access.
    pub rows: Vec<TrapsRow>,
    /// Half of the turns without the arbiter against the other half: what this host makes of
    /// a ratio where nothing is different.
    pub same: Vec<TrapsRow>,
}

pub(super) fn measure(
    harness: &Harness<'_>,
    options: &ArbiterOptions,
) -> Result<LoadedTraps, BenchError> {
    let cpus = match allowed_cpus().map_err(BenchError::Signal)?[..] {
        [.., server, guest] => [server, guest],
        _ => return Err(BenchError::OneCpu),
    };
    perfmon::alone(harness, cpus, |subject| run(subject, cpus, options))
}

fn run(
    subject: &Subject<'_>,
    cpus: [usize; 2],
    options: &ArbiterOptions,
) -> Result<LoadedTraps, BenchError> {
    // Both halves of the quiet turns are of one size.
    let turns = options.iterations.div_ceil(BATCH * TURN).max(2);
    let turns = turns + turns % 2;
    let [mut beside, mut even, mut odd] = std::array::from_fn(|_| TimesByAccess::default());
    let (mut decisions, mut time) = (0, Duration::ZERO);
    // The first accesses of a guest are slower.
    subject.take_batches(&mut TimesByAccess::default(), TURN)?;
    for turn in 0..turns {
        progress(&format!("turn {} of {turns}", turn + 1));
        let quiet = if turn % 2 == 0 { &mut even } else { &mut odd };
        let mut loaded = || {
            let begun = Instant::now();
            decisions += while_deciding(cpus[0], || subject.take_batches(&mut beside, TURN))?;
            time += begun.elapsed();
            Ok::<_, BenchError>(())
        };
        // Which comes first alternates, two turns each.
        if turn / 2 % 2 == 0 {
            subject.take_batches(quiet, TURN)?;
            loaded()?;
        } else {
            loaded()?;
            subject.take_batches(quiet, TURN)?;
        }
    }
    let same = subject.rows([even.clone(), odd.clone()])?;
    even.extend(odd);
    let rows = subject.rows([even, beside])?;
    Ok(LoadedTraps {
        cpus,
        decisions_per_second: f64::from(decisions) / time.as_secs_f64().max(f64::EPSILON),
        accesses: turns * TURN * BATCH,
        rows: judged(rows),
        same: judged(same),
    })
}

/// With the verdict of this measurement.
fn judged(mut rows: Vec<TrapsRow>) -> Vec<TrapsRow> {
    for row in &mut rows {
        row.ratios.met &= row.ratios.ratio_p50 <= TARGET_P50;
    }
    rows
}

/// Does `act` while an arbiter on the host CPU `cpu` decides 1,000 times a second. Returns
/// how many decisions there were.
fn while_deciding(
    cpu: usize,
    act: impl FnOnce() -> Result<(), BenchError>,
) -> Result<u32, BenchError> {
    let daemon = Daemon::start(Some(cpu))?;
    let (stop, decisions) = (AtomicBool::new(false), AtomicU32::new(0));
    let asking = || {
        pin_this_thread(cpu).map_err(BenchError::Signal)?;
        let mut arbiter = daemon.connect()?;
        let mut next = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            let lease = acquire(&mut arbiter, request(0))?;
            release(&mut arbiter, lease)?;
            decisions.fetch_add(2, Ordering::Relaxed);
            next += PACE;
            sleep(next.saturating_duration_since(Instant::now()));
        }
        Ok(())
    };
    scope(|scope| {
        let asker = scope.spawn(asking);
        let acted = act();
        let made = decisions.load(Ordering::Relaxed);
        stop.store(true, Ordering::Relaxed);
        let asked = asker.join();
        let asked = asked.map_err(|_| BenchError::Arbiter("a thread panicked".to_owned()))?;
        acted.and(asked).map(|()| made)
    })
}
