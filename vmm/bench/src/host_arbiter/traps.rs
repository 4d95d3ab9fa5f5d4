//! Trapped accesses of a guest beside an arbiter that decides all the time, and without one.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use serde::Serialize;
use vmm::sys::{allowed_cpus, pin_this_thread};

use super::daemon::{Daemon, acquire, at_once, release, request};
use super::{ArbiterOptions, progress, timed};
use crate::error::BenchError;
use crate::guest::BATCH;
use crate::harness::{Harness, ratio};
use crate::perfmon::{self, Subject, TimesByAccess, TrapsRow};

/// Highest ratio of the medians that is wanted.
pub(super) const TARGET_P50: f64 = 1.02;
/// Clients; one alone might wait for the disk for longer than its turn.
const CLIENTS: u32 = 4;
/// Between two requests of a client, with their releases: 1,000 decisions in a second.
const PACE: Duration = Duration::from_millis(8);
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

/// Two host CPUs both ways: one of them may be that of the disk's interrupts.
pub(super) fn measure(
    harness: &Harness<'_>,
    options: &ArbiterOptions,
) -> Result<Vec<LoadedTraps>, BenchError> {
    let [.., one, other] = allowed_cpus().map_err(BenchError::Signal)?[..] else {
        return Err(BenchError::OneCpu);
    };
    let both = [[one, other], [other, one]];
    let measured = both.map(|cpus| {
        progress(&format!("the guest on CPU {}", cpus[1]));
        perfmon::alone(harness, cpus, |subject| run(subject, cpus, options))
    });
    measured.into_iter().collect()
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
    let (mut decisions, mut time) = (0, 0);
    // The first accesses of a guest are slower.
    subject.take_batches(&mut TimesByAccess::default(), TURN)?;
    for turn in 0..turns {
        progress(&format!("turn {} of {turns}", turn + 1));
        let quiet = if turn % 2 == 0 { &mut even } else { &mut odd };
        let mut loaded = || {
            let act = || subject.take_batches(&mut beside, TURN);
            let (made, ns) = while_deciding(cpus[0], act)?;
            decisions += made;
            time += ns;
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
        decisions_per_second: ratio(u64::from(decisions) * 1_000_000_000, time),
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
/// how many decisions there were, and the nanoseconds that it took.
fn while_deciding(
    cpu: usize,
    act: impl FnOnce() -> Result<(), BenchError>,
) -> Result<(u32, u64), BenchError> {
    let daemon = Daemon::start(Some(cpu))?;
    let (stop, decisions) = (AtomicBool::new(false), AtomicU32::new(0));
    let asking = |client| {
        pin_this_thread(cpu).map_err(BenchError::Signal)?;
        let mut arbiter = daemon.connect()?;
        let mut next = Instant::now() + PACE * client / CLIENTS;
        while !stop.load(Ordering::Relaxed) {
            sleep(next.saturating_duration_since(Instant::now()));
            next += PACE;
            let lease = acquire(&mut arbiter, request(client))?;
            release(&mut arbiter, lease)?;
            decisions.fetch_add(2, Ordering::Relaxed);
        }
        Ok(())
    };
    scope(|scope| {
        let askers = scope.spawn(|| at_once(CLIENTS, asking));
        let before = decisions.load(Ordering::Relaxed);
        let acted = timed(act);
        let made = decisions.load(Ordering::Relaxed) - before;
        stop.store(true, Ordering::Relaxed);
        let asked = askers.join();
        let asked = asked.map_err(|_| BenchError::Arbiter("a thread panicked".to_owned()))?;
        asked.and(acted).map(|ns| (made, ns))
    })
}
