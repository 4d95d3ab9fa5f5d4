//! The vCPUs' threads.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use pmu_virt::{CorePmu, PmuState};
use thiserror::Error;
use vmm_control::JobQueue;
use vmm_sys_util::eventfd::EventFd;

use crate::audit::AuditTrail;
use crate::kvm::VcpuId;
use crate::sched::{CoreExchange, CorePlan, CoreReport, CoreThread, CpuList, pin};
use crate::sync::lock;
use crate::sys::KickTarget;
use crate::vcpu::{ThreadContext, Vcpu, VcpuControl, VcpuEnd, VcpuFailure, VcpuParts};

/// How often vCPUs that were asked to stop are kicked again.
const KICK_AGAIN: Duration = Duration::from_millis(5);

/// How long vCPUs may take to stop.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// The vCPUs cannot be started.
#[derive(Debug, Error)]
pub enum StartError {
    /// No thread for a vCPU.
    #[error("a vCPU's thread cannot be started: {0}")]
    Thread(std::io::Error),
    /// No event descriptor.
    #[error("no event descriptor: {0} (limit of open files: `ulimit -n`)")]
    Event(std::io::Error),
}

/// What is kept of the vCPUs that have ended.
#[derive(Debug, Clone)]
struct Remains {
    states: Arc<Mutex<Vec<(VcpuId, PmuState)>>>,
    audit: Arc<AuditTrail>,
}

pub(super) type Ended = (VcpuId, Result<VcpuEnd, VcpuFailure>);

/// Wakes the main thread when a vCPU's thread ends.
pub(super) struct WakeOnDrop(pub(super) EventFd);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.now();
    }
}

impl WakeOnDrop {
    fn now(&self) {
        // An event whose counter is full wakes its reader all the same.
        let _ = self.0.write(1);
    }
}

/// One thread for each vCPU, or for each core.
fn jobs(
    vcpus: Vec<VcpuParts>,
    cores: Option<SharedCores>,
) -> (Vec<Job>, Option<Arc<CoreExchange>>) {
    let Some(SharedCores { plan, pmus, queues }) = cores else {
        let alone = vcpus.into_iter().map(|parts| Job::Vcpu(Box::new(parts)));
        return (alone.collect(), None);
    };
    let hands = plan.deal(vcpus);
    let exchange = Arc::new(CoreExchange::new(hands.len()));
    let (mut pmus, mut queues) = (pmus.into_iter(), queues.into_iter());
    let core = |vcpus| {
        Job::Core(CoreParts {
            plan,
            vcpus,
            pmu: pmus.next().map(Box::new),
            exchange: exchange.clone(),
            queue: queues.next(),
        })
    };
    (hands.into_iter().map(core).collect(), Some(exchange))
}

/// Takes in the end of a vCPU, and the core that it had to itself.
type Tell<'a> = dyn Fn(&mut Vcpu, Option<&mut CorePmu>, Result<VcpuEnd, VcpuFailure>) + 'a;

fn run_alone(mut parts: VcpuParts, tell: &Tell<'_>) -> Result<(), VcpuFailure> {
    let thread = ThreadContext::new(parts.pmu.tsc_khz())?.of_core(parts.kvm.id().index());
    let mut thread = thread.with_counters(parts.own_core.take());
    let mut vcpu = Vcpu::new(parts);
    let end = vcpu.run(&mut thread);
    vcpu.close_endpoint(thread.counters_mut());
    tell(&mut vcpu, thread.counters_mut(), end);
    Ok(())
}

fn run_core(
    index: usize,
    parts: CoreParts,
    control: Arc<VcpuControl>,
    tell: &Tell<'_>,
) -> Result<CoreReport, VcpuFailure> {
    let CoreParts {
        plan,
        vcpus,
        pmu,
        exchange,
        queue,
    } = parts;
    let tsc_khz = vcpus.first().map_or(0, |parts| parts.pmu.tsc_khz());
    let core = CoreThread::new(index, &plan, tsc_khz, exchange, control, pmu)?.with_jobs(queue);
    let vcpus = vcpus.into_iter().map(Vcpu::new).collect();
    Ok(core.run(vcpus, |mut ended| tell(&mut ended.vcpu, None, ended.end)))
}

/// How vCPUs are spread over threads, and threads over host CPUs.
#[derive(Debug, Default)]
pub(super) struct Spread {
    /// `--cores`, and the counters of each; without it every vCPU has a thread
    /// of its own.
    pub(super) cores: Option<SharedCores>,
    /// `--pin`.
    pub(super) pin: Option<CpuList>,
}

/// Cores on which vCPUs take turns.
#[derive(Debug)]
pub(super) struct SharedCores {
    pub(super) plan: CorePlan,
    /// The counters of each.
    pub(super) pmus: Vec<CorePmu>,
    /// What the control socket wants done for each.
    pub(super) queues: Vec<JobQueue>,
}

/// What one thread does.
enum Job {
    /// One vCPU, alone.
    Vcpu(Box<VcpuParts>),
    /// A core with its first vCPUs.
    Core(CoreParts),
}

struct CoreParts {
    plan: CorePlan,
    vcpus: Vec<VcpuParts>,
    pmu: Option<Box<CorePmu>>,
    exchange: Arc<CoreExchange>,
    queue: Option<JobQueue>,
}

/// The running vCPUs.
#[derive(Debug)]
pub(super) struct Threads {
    handles: Vec<JoinHandle<()>>,
    targets: Arc<Mutex<Vec<KickTarget>>>,
    control: Arc<VcpuControl>,
    /// Where cores meet, with `--cores`.
    exchange: Option<Arc<CoreExchange>>,
    reports: Arc<Mutex<Vec<(usize, CoreReport)>>>,
    remains: Remains,
    ended: std::sync::mpsc::Receiver<Ended>,
    first: Option<Ended>,
}

impl Threads {
    /// Starts every vCPU; `wake` is written whenever a thread ends.
    pub(super) fn start(
        vcpus: Vec<VcpuParts>,
        control: Arc<VcpuControl>,
        audit: Arc<AuditTrail>,
        spread: Spread,
        wake: &EventFd,
    ) -> Result<Self, StartError> {
        let (send, ended) = channel();
        let (jobs, exchange) = jobs(vcpus, spread.cores);
        let mut threads = Self {
            handles: Vec::with_capacity(jobs.len()),
            targets: Arc::default(),
            control,
            exchange,
            reports: Arc::default(),
            remains: Remains {
                states: Arc::default(),
                audit,
            },
            ended,
            first: None,
        };
        for (index, job) in jobs.into_iter().enumerate() {
            let wake = wake.try_clone().map_err(StartError::Event)?;
            match threads.spawn(index, job, spread.pin.clone(), (send.clone(), wake)) {
                Ok(handle) => threads.handles.push(handle),
                Err(error) => {
                    threads.stop();
                    return Err(StartError::Thread(error));
                }
            }
        }
        Ok(threads)
    }

    fn spawn(
        &self,
        index: usize,
        job: Job,
        pinned: Option<CpuList>,
        (send, wake): (Sender<Ended>, EventFd),
    ) -> std::io::Result<JoinHandle<()>> {
        let name = match &job {
            Job::Vcpu(parts) => format!("vcpu{}", parts.kvm.id().0),
            Job::Core(..) => format!("core{index}"),
        };
        let (targets, reports) = (self.targets.clone(), self.reports.clone());
        let control = self.control.clone();
        let remains = self.remains.clone();
        Builder::new().name(name).spawn(move || {
            // Dropped last, also by a panic: the main thread always hears of it.
            let wake = WakeOnDrop(wake);
            lock(&targets).push(KickTarget::current());
            // The receiver lives until all threads were joined.
            let fail = |ended: Ended| {
                let _ = send.send(ended);
                wake.now();
            };
            let tell = |vcpu: &mut Vcpu, core: Option<&mut CorePmu>, end| {
                remains.keep(vcpu, core);
                fail((vcpu.id(), end));
            };
            match job {
                Job::Vcpu(parts) => {
                    let id = parts.kvm.id();
                    let ran = pin(pinned.as_ref(), index).and_then(|()| run_alone(*parts, &tell));
                    if let Err(failure) = ran {
                        fail((id, Err(failure)));
                    }
                }
                Job::Core(parts) => {
                    let first = parts.vcpus.first();
                    let first = first.map_or(VcpuId(0), |parts| parts.kvm.id());
                    let core = pin(pinned.as_ref(), index)
                        .and_then(|()| run_core(index, parts, control, &tell));
                    match core {
                        Ok(report) => lock(&reports).push((index, report)),
                        Err(failure) => fail((first, Err(failure))),
                    }
                }
            }
        })
    }

    /// The first vCPU that ended by itself, once one has.
    pub(super) fn first_end(&mut self) -> Option<&Ended> {
        if self.first.is_none() {
            self.first = self.ended.try_recv().ok();
        }
        self.first.as_ref()
    }

    /// Stops all vCPUs and waits for their threads.
    ///
    /// A kick ends whatever a guest does. What it cannot end is a write to a
    /// console that nobody reads: after [`PATIENCE`] such threads are left to
    /// the end of the process.
    pub(super) fn stop(&mut self) {
        self.control.stop();
        let since = Instant::now();
        while self.handles.iter().any(|handle| !handle.is_finished()) {
            if since.elapsed() > PATIENCE {
                log::error!("a vCPU does not stop: is anybody reading the console's output?");
                self.handles.retain(JoinHandle::is_finished);
                break;
            }
            // Again each time: a core may take its call back between its look at
            // `stopping` and its wait.
            if let Some(exchange) = &self.exchange {
                exchange.call_all();
            }
            for target in lock(&self.targets).iter() {
                target.kick();
            }
            std::thread::sleep(KICK_AGAIN);
        }
        for handle in self.handles.drain(..) {
            // A panic was reported by the panic hook; the run ends anyway.
            let _ = handle.join();
        }
        // On the way between two cores when these ended.
        for mut vcpu in self
            .exchange
            .iter()
            .flat_map(|exchange| exchange.leftovers())
        {
            vcpu.close_endpoint(None);
            self.remains.keep(&mut vcpu, None);
        }
        let mut reports = std::mem::take(&mut *lock(&self.reports));
        reports.sort_by_key(|(index, _)| *index);
        for (index, report) in reports {
            log::info!("core {index}: {report}");
        }
    }

    /// The PMU state of every vCPU that has stopped, after [`Threads::stop`].
    pub(super) fn take_states(&mut self) -> Vec<(VcpuId, PmuState)> {
        std::mem::take(&mut *lock(&self.remains.states))
    }

    /// How the machine ended, after [`Threads::stop`].
    pub(super) fn into_end(mut self) -> Option<Ended> {
        self.first_end();
        self.first.take()
    }
}

impl Remains {
    fn keep(&self, vcpu: &mut Vcpu, mut core: Option<&mut CorePmu>) {
        let holdings = vcpu.holdings(core.as_deref_mut());
        self.audit.keep(vcpu.id(), holdings);
        match vcpu.save_pmu(core) {
            Ok(Some(state)) => lock(&self.states).push((vcpu.id(), state)),
            Ok(None) => {}
            Err(error) => log::warn!("no state is kept: {error}"),
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop();
    }
}
