//! The threads of a micro-guest's vCPUs.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pmu_virt::CorePmu;
use vmm_control::JobQueue;

use super::error::MicroRunError;
use crate::cores::CorePlan;
use crate::sched::{CoreEnd, CoreExchange, CoreReport, CoreThread};
use crate::sync::lock;
use crate::sys::KickTarget;
use crate::vcpu::{ThreadContext, Vcpu, VcpuControl, VcpuEnd, VcpuFailure};

/// How often vCPUs that were asked to stop are kicked again.
const KICK_AGAIN: Duration = Duration::from_millis(1);

/// Cores on which vCPUs take turns.
#[derive(Debug)]
pub(super) struct Cores {
    /// None: each vCPU has one to itself.
    pub(super) plan: Option<CorePlan>,
    /// The counters of each; none where vCPUs have no PMU.
    pub(super) pmus: Vec<CorePmu>,
    /// What the control socket wants done for each.
    pub(super) jobs: Vec<JobQueue>,
}

/// vCPUs that have run until the first of them ended.
#[derive(Debug, Default)]
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
    /// Runs `vcpus`, each on a thread of its own or on the cores of a plan.
    pub(super) fn new(
        vcpus: Vec<Vcpu>,
        cores: Cores,
        control: &Arc<VcpuControl>,
        timeout: Duration,
    ) -> Result<Self, MicroRunError> {
        let Cores { plan, pmus, jobs } = cores;
        let hands = match plan {
            Some(plan) => plan.deal(vcpus),
            None => vcpus.into_iter().map(|vcpu| vec![vcpu]).collect(),
        };
        let (mut pmus, mut jobs) = (pmus.into_iter(), jobs.into_iter());
        let exchange = Arc::new(CoreExchange::new(hands.len()));
        let targets = Mutex::new(Vec::new());
        let (ended, ends) = channel();
        let mut ran = Self::default();
        let results = std::thread::scope(|scope| {
            let start = |(index, hand)| {
                let (exchange, control) = (exchange.clone(), control.clone());
                let (targets, ended, pmu) = (&targets, ended.clone(), pmus.next());
                let jobs = jobs.next();
                let pmu = pmu.map(Box::new);
                scope.spawn(move || {
                    lock(targets).push(KickTarget::current());
                    let result = match plan {
                        Some(plan) => {
                            let shared = SharedCore {
                                plan,
                                pmu,
                                jobs,
                                exchange,
                                control,
                            };
                            shared.run(index, hand, &ended)
                        }
                        None => {
                            let alone = |(vcpu, pmu)| alone(vcpu, pmu);
                            let ends = hand.into_iter().zip([pmu]).map(alone);
                            ends.collect::<Result<_, _>>().map(|ends| (ends, None))
                        }
                    };
                    let _ = ended.send(());
                    result
                })
            };
            let threads: Vec<_> = hands.into_iter().enumerate().map(start).collect();
            ran.timed_out = wait(&ends, timeout);
            let asked = Instant::now();
            control.stop();
            exchange.call_all();
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
        ran.ends
            .extend(exchange.leftovers().into_iter().map(never_run));
        ran.ends.sort_by_key(|end| end.vcpu.id());
        Ok(ran)
    }
}

/// The end of a vCPU that no core had when all stopped.
fn never_run(mut vcpu: Vcpu) -> CoreEnd {
    vcpu.close_endpoint(None);
    CoreEnd {
        vcpu,
        end: Ok(VcpuEnd::Stopped),
        own_core: None,
    }
}

type Ends = (Vec<CoreEnd>, Option<CoreReport>);

/// A core on which vCPUs take turns.
struct SharedCore {
    plan: CorePlan,
    pmu: Option<Box<CorePmu>>,
    jobs: Option<JobQueue>,
    exchange: Arc<CoreExchange>,
    control: Arc<VcpuControl>,
}

impl SharedCore {
    /// Runs `vcpus` on the calling thread, which is core `index`; each that ends is
    /// reported to `ended`.
    fn run(self, index: usize, vcpus: Vec<Vcpu>, ended: &Sender<()>) -> Result<Ends, VcpuFailure> {
        let tsc_khz = vcpus.first().map_or(0, Vcpu::tsc_khz);
        let (exchange, control) = (self.exchange, self.control);
        let core = CoreThread::new(index, &self.plan, tsc_khz, exchange, control, self.pmu)?;
        let mut ends = Vec::new();
        let report = core.with_jobs(self.jobs).run(vcpus, |end| {
            ends.push(end);
            let _ = ended.send(());
        });
        Ok((ends, Some(report)))
    }
}

/// Runs a vCPU on a core of its own.
fn alone(mut vcpu: Vcpu, pmu: Option<Box<CorePmu>>) -> Result<CoreEnd, VcpuFailure> {
    let thread = ThreadContext::new(vcpu.tsc_khz())?.of_core(vcpu.id().index());
    let mut thread = thread.with_counters(pmu);
    let end = vcpu.run(&mut thread);
    vcpu.close_endpoint(thread.counters_mut());
    Ok(CoreEnd {
        vcpu,
        end,
        own_core: thread.into_counters(),
    })
}

/// Waits for the first vCPU to end, which ends the guest; true on time-out.
fn wait(ends: &Receiver<()>, timeout: Duration) -> bool {
    ends.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout)
}
