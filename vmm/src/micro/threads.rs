//! The threads of a micro-guest's vCPUs.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pmu_virt::CorePmu;

use super::error::MicroRunError;
use crate::perfmon::Tray;
use crate::sched::{Board, CoreEnd, CorePlan, CoreReport, CoreThread};
use crate::sys::KickTarget;
use crate::vcpu::{ThreadContext, Vcpu, VcpuControl, VcpuEnd, VcpuFailure};

/// How often vCPUs that were asked to stop are kicked again.
const KICK_AGAIN: Duration = Duration::from_millis(1);

/// Cores on which vCPUs take turns.
#[derive(Debug)]
pub(super) struct Cores {
    pub(super) plan: CorePlan,
    /// The counters of each.
    pub(super) pmus: Vec<CorePmu>,
    /// Where the server of host tools lays down what it has for each.
    pub(super) trays: Vec<Tray>,
}

/// vCPUs that have run until the first of them ended.
#[derive(Debug)]
pub(super) struct Ran {
    /// All of them, by their numbers.
    pub(super) ends: Vec<CoreEnd>,
    /// None had ended when the time was over.
    pub(super) timed_out: bool,
    /// How long they took to stop.
    pub(super) stopping: Duration,
    /// What the cores did.
    pub(super) cores: Vec<CoreReport>,
}

impl Ran {
    /// Runs `vcpus`, each on a thread of its own or on the cores of `plan`.
    pub(super) fn new(
        vcpus: Vec<Vcpu>,
        cores: Option<Cores>,
        control: &Arc<VcpuControl>,
        timeout: Duration,
    ) -> Result<Self, MicroRunError> {
        let (plan, pmus, trays) = match cores {
            Some(Cores { plan, pmus, trays }) => (Some(plan), pmus, trays),
            None => (None, Vec::new(), Vec::new()),
        };
        let hands = match plan {
            Some(plan) => plan.deal(vcpus),
            None => vcpus.into_iter().map(|vcpu| vec![vcpu]).collect(),
        };
        let (mut pmus, mut trays) = (pmus.into_iter(), trays.into_iter());
        let board = Arc::new(Board::new(hands.len()));
        let targets = Mutex::new(Vec::new());
        let (ended, ends) = channel();
        let mut ran = Self {
            ends: Vec::new(),
            timed_out: false,
            stopping: Duration::ZERO,
            cores: Vec::new(),
        };
        let results = std::thread::scope(|scope| {
            let start = |(index, hand)| {
                let (board, control) = (board.clone(), control.clone());
                let (targets, ended, pmu) = (&targets, ended.clone(), pmus.next());
                let tray = trays.next();
                let pmu = pmu.map(Box::new);
                scope.spawn(move || {
                    lock(targets).push(KickTarget::current());
                    let result = match plan {
                        Some(plan) => {
                            on_core((index, plan, pmu, tray), hand, (board, control), &ended)
                        }
                        None => alone(hand).map(|ends| (ends, None)),
                    };
                    let _ = ended.send(());
                    result
                })
            };
            let threads: Vec<_> = hands.into_iter().enumerate().map(start).collect();
            ran.timed_out = wait(&ends, timeout);
            let asked = Instant::now();
            control.stop();
            board.call_all();
            while threads.iter().any(|thread| !thread.is_finished()) {
                lock(&targets)
                    .iter()
                    .for_each(|target: &KickTarget| target.kick());
                std::thread::sleep(KICK_AGAIN);
            }
            ran.stopping = asked.elapsed();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined.collect::<Vec<_>>()
        });
        for result in results {
            let (ends, report) = result.map_err(|_| MicroRunError::Panicked)??;
            ran.ends.extend(ends);
            ran.cores.extend(report);
        }
        let stopped = |mut vcpu: Vcpu| {
            vcpu.leave_desk();
            let end = Ok(VcpuEnd::Stopped);
            CoreEnd { vcpu, end }
        };
        ran.ends.extend(board.leftovers().into_iter().map(stopped));
        ran.ends.sort_by_key(|end| end.vcpu.id());
        Ok(ran)
    }
}

type Ends = (Vec<CoreEnd>, Option<CoreReport>);

fn on_core(
    (index, plan, pmu, tray): (usize, CorePlan, Option<Box<CorePmu>>, Option<Tray>),
    vcpus: Vec<Vcpu>,
    (board, control): (Arc<Board>, Arc<VcpuControl>),
    ended: &Sender<()>,
) -> Result<Ends, VcpuFailure> {
    let tsc_khz = vcpus.first().map_or(0, Vcpu::tsc_khz);
    let core = CoreThread::new(index, &plan, tsc_khz, board, control, pmu)?.with_tray(tray);
    let mut ends = Vec::new();
    let report = core.run(vcpus, |end| {
        ends.push(end);
        let _ = ended.send(());
    });
    Ok((ends, Some(report)))
}

fn alone(vcpus: Vec<Vcpu>) -> Result<Vec<CoreEnd>, VcpuFailure> {
    let run = |mut vcpu: Vcpu| {
        let thread = ThreadContext::new(vcpu.tsc_khz())?.of_core(vcpu.id().0.into());
        let end = vcpu.run(&mut { thread });
        vcpu.leave_desk();
        Ok(CoreEnd { vcpu, end })
    };
    vcpus.into_iter().map(run).collect()
}

/// Waits for the first vCPU to end, which ends the guest; true on time-out.
fn wait(ends: &Receiver<()>, timeout: Duration) -> bool {
    ends.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
