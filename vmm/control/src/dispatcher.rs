//! Between the server and the threads that run vCPUs.
//!
//! The server never touches a loaded context: it lays a job down and goes on.
//! Whoever has the vCPU, or the core, finds it there at its next exit, does it,
//! and sends it back. A job is never lost: one that nobody does any more, as its
//! vCPU has ended, comes back as well.

use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};

use perfmon_abi::wire::{Call, Refusal};
use pmu_virt::perfmon::{ContextId, Hosted, NotLoaded};

use super::notifier::Notifier;
use super::view::View;

/// A thread that runs vCPUs.
pub trait KickThread: Debug + Send + Sync {
    /// Has it look at what lies in its queue. Never waits.
    fn kick(&self);
    /// Its number among the host's threads.
    fn thread_id(&self) -> i32;
}

/// Cores that vCPUs share.
pub trait WakeCore: Debug + Send + Sync {
    /// Has `core` look at what lies in the queues that it looks after. Never waits.
    fn wake(&self, core: usize);
}

/// What a context is, or is to be, attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    /// The vCPU of this number.
    Vcpu(usize),
    /// The core of this number: with `--cores` one of these, else the thread of
    /// the vCPU of this number.
    Core(usize),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Vcpu(number) => write!(f, "vCPU {number}"),
            Target::Core(number) => write!(f, "core {number}"),
        }
    }
}

/// What is to be done for a context.
#[derive(Debug)]
pub enum Work {
    /// Attach it, with this set first.
    Load(Box<Hosted>, u16),
    /// A command.
    Call(Call),
    /// Detach it.
    Unload,
    /// Not for a context: say what there is (`LOOK`).
    Inspect,
}

/// Stands for a context where a job is for none.
pub(super) const LOOK: ContextId = ContextId(0);

/// What became of a job.
#[derive(Debug)]
pub enum Done {
    /// It is attached, or comes back.
    Loaded(Result<(), NotLoaded>),
    /// The command with its argument as it is now.
    Called(Call, Result<(), Refusal>),
    /// It is detached; `None` if it was not attached.
    Unloaded(Option<Box<Hosted>>),
    /// What there is.
    Inspected(Box<View>),
    /// Nobody does it: the vCPU or core has ended.
    Undone(Work),
}

/// What the server hears.
#[derive(Debug)]
pub enum Report {
    /// A job of this context came back.
    Job(ContextId, Done),
    /// The thread of this core has looked up; `None`: it has ended instead.
    Inspect(Target, Option<Box<View>>),
    /// This vCPU or core has ended, and gives the context back that it had.
    Ended(Target, Option<Box<Hosted>>),
}

/// Where reports go.
#[derive(Clone, Debug)]
struct Outbox {
    reports: Sender<Report>,
    notifier: Arc<Notifier>,
}

impl Outbox {
    fn send(&self, report: Report) {
        // Without a server nobody cares, and what was sent is dropped.
        if self.reports.send(report).is_ok() {
            self.notifier.notify();
        }
    }
}

/// A job, until it is done.
#[derive(Debug)]
pub struct Job {
    context: ContextId,
    target: Target,
    work: Option<Work>,
    outbox: Outbox,
}

impl Job {
    /// What it is about.
    pub fn target(&self) -> Target {
        self.target
    }

    /// It only asks what there is.
    pub fn is_inspection(&self) -> bool {
        matches!(self.work, Some(Work::Inspect))
    }

    fn report(&self, done: Done) {
        self.outbox.send(match done {
            Done::Inspected(view) => Report::Inspect(self.target, Some(view)),
            Done::Undone(Work::Inspect) => Report::Inspect(self.target, None),
            done => Report::Job(self.context, done),
        });
    }

    /// Does it: `act` gets the work and says what came of it.
    pub fn act(mut self, act: impl FnOnce(ContextId, Work) -> Done) {
        if let Some(work) = self.work.take() {
            let done = act(self.context, work);
            self.report(done);
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            self.report(Done::Undone(work));
        }
    }
}

/// Tells a thread that there is a job.
#[derive(Debug)]
struct Flag {
    raised: AtomicBool,
    /// The thread, once there is one; without a exchange.
    thread: OnceLock<Box<dyn KickThread>>,
    /// The core that has the vCPU, or that it is.
    core: AtomicUsize,
}

/// The server's end of a [`JobQueue`].
#[derive(Debug)]
struct Line {
    jobs: Sender<Job>,
    flag: Arc<Flag>,
}

/// The server's side: where jobs are laid down.
#[derive(Debug)]
pub struct JobDispatcher {
    vcpus: Vec<Line>,
    /// Without `--cores` a core's jobs lie with its vCPU's.
    cores: Option<Vec<Line>>,
    /// With `--cores`, once the cores meet there.
    exchange: Arc<OnceLock<Arc<dyn WakeCore>>>,
    outbox: Outbox,
    reports: Receiver<Report>,
}

/// The thread's side: a vCPU's, or a core's.
#[derive(Debug)]
pub struct JobQueue {
    target: Target,
    jobs: Receiver<Job>,
    flag: Arc<Flag>,
    outbox: Outbox,
    exchange: Arc<OnceLock<Arc<dyn WakeCore>>>,
}

/// The queues of a machine.
#[derive(Debug)]
pub struct JobQueues {
    /// One for each vCPU.
    pub vcpus: Vec<JobQueue>,
    /// One for each core; none without `--cores`.
    pub cores: Vec<JobQueue>,
}

impl JobDispatcher {
    /// For `vcpus` vCPUs on `cores` cores; `None`: each has a thread of its own.
    ///
    /// # Errors
    /// There is no event descriptor left.
    pub fn new(vcpus: usize, cores: Option<usize>) -> std::io::Result<(Self, JobQueues)> {
        let (reports, received) = channel();
        let notifier = Arc::new(Notifier::new()?);
        let outbox = Outbox { reports, notifier };
        let exchange = Arc::new(OnceLock::new());
        let open = |target, core| {
            let (jobs, taken) = channel();
            let flag = Arc::new(Flag {
                raised: AtomicBool::new(false),
                thread: OnceLock::new(),
                core: AtomicUsize::new(core),
            });
            let queue = JobQueue {
                target,
                jobs: taken,
                flag: flag.clone(),
                outbox: outbox.clone(),
                exchange: exchange.clone(),
            };
            (Line { jobs, flag }, queue)
        };
        // The core that a vCPU comes to first, as they are dealt.
        let among = cores.unwrap_or(vcpus).max(1);
        let (lines, queues) = (0..vcpus).map(|n| open(Target::Vcpu(n), n % among)).unzip();
        let (core_lines, core_jobs) = (0..cores.unwrap_or(0))
            .map(|n| open(Target::Core(n), n))
            .unzip();
        let desk = JobDispatcher {
            vcpus: lines,
            cores: cores.map(|_| core_lines),
            exchange,
            outbox,
            reports: received,
        };
        let queues = JobQueues {
            vcpus: queues,
            cores: core_jobs,
        };
        Ok((desk, queues))
    }

    /// How many vCPUs there are.
    #[must_use]
    pub fn vcpus(&self) -> usize {
        self.vcpus.len()
    }

    /// How many cores there are.
    #[must_use]
    pub fn cores(&self) -> usize {
        self.cores.as_ref().map_or(self.vcpus.len(), Vec::len)
    }

    /// The core on which a vCPU is, or was last.
    #[must_use]
    pub fn core_of(&self, vcpu: usize) -> Option<usize> {
        let line = self.vcpus.get(vcpu)?;
        Some(line.flag.core.load(Ordering::Relaxed))
    }

    /// The thread of a core, once it runs.
    #[must_use]
    pub fn thread_of(&self, core: usize) -> Option<i32> {
        let line = self.cores.as_ref().unwrap_or(&self.vcpus).get(core)?;
        line.flag.thread.get().map(|thread| thread.thread_id())
    }

    /// Readable when there are reports.
    pub(super) fn notifier(&self) -> &Notifier {
        &self.outbox.notifier
    }

    /// The next report, if there is one.
    pub fn report(&self) -> Option<Report> {
        self.reports.try_recv().ok()
    }

    /// Lays a job down. It comes back in a report, whatever happens.
    pub fn post(&self, context: ContextId, target: Target, work: Work) {
        let job = Job {
            context,
            target,
            work: Some(work),
            outbox: self.outbox.clone(),
        };
        let line = match (target, &self.cores) {
            (Target::Vcpu(n), _) | (Target::Core(n), None) => self.vcpus.get(n),
            (Target::Core(n), Some(cores)) => cores.get(n),
        };
        // If nobody takes it, it is dropped and comes back.
        let Some(line) = line else { return };
        if line.jobs.send(job).is_err() {
            return;
        }
        line.flag.raised.store(true, Ordering::SeqCst);
        // Either the thread, or the core to which the vCPU comes, sees the flag,
        // or its number is seen here.
        fence(Ordering::SeqCst);
        match self.exchange.get() {
            Some(exchange) => exchange.wake(line.flag.core.load(Ordering::SeqCst)),
            None => {
                if let Some(thread) = line.flag.thread.get() {
                    thread.kick();
                }
            }
        }
    }
}

impl JobQueue {
    /// Whose it is.
    pub fn target(&self) -> Target {
        self.target
    }

    /// The calling thread looks after this queue from now on.
    pub fn bind_thread(&self, thread: Box<dyn KickThread>) {
        let _ = self.flag.thread.set(thread);
        fence(Ordering::SeqCst);
    }

    /// `core` has the vCPU from now on.
    pub fn moved_to(&self, core: usize) {
        self.flag.core.store(core, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Where cores meet.
    pub fn set_exchange(&self, exchange: Arc<dyn WakeCore>) {
        let _ = self.exchange.set(exchange);
        fence(Ordering::SeqCst);
    }

    /// Whether there may be a job: one load.
    #[inline]
    pub fn has_jobs(&self) -> bool {
        self.flag.raised.load(Ordering::Relaxed)
    }

    /// The next job. Never waits.
    pub fn take(&self) -> Option<Job> {
        if !self.has_jobs() {
            return None;
        }
        // A job that comes now raises the flag again.
        self.flag.raised.store(false, Ordering::SeqCst);
        let job = self.jobs.try_recv().ok()?;
        self.flag.raised.store(true, Ordering::SeqCst);
        Some(job)
    }

    /// The vCPU or core has ended, with `own`; and so has its thread's core with
    /// `core`, where it had one of its own. What still lies here comes back.
    pub fn close(self, own: Option<Box<Hosted>>, core: Option<Box<Hosted>>, alone: bool) {
        let number = match self.target {
            Target::Vcpu(number) | Target::Core(number) => number,
        };
        self.outbox.send(Report::Ended(self.target, own));
        if alone {
            self.outbox.send(Report::Ended(Target::Core(number), core));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Cores;

    impl WakeCore for Cores {
        fn wake(&self, _: usize) {}
    }

    fn undone(desk: &JobDispatcher) -> Option<ContextId> {
        match desk.report()? {
            Report::Job(context, Done::Undone(Work::Unload)) => Some(context),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_job_comes_back() {
        let (desk, queues) = JobDispatcher::new(2, None).unwrap();
        assert!(queues.cores.is_empty());
        assert_eq!((desk.vcpus(), desk.cores()), (2, 2));
        let queue = &queues.vcpus[1];
        assert!(queue.take().is_none());
        desk.post(ContextId(1), Target::Vcpu(1), Work::Unload);
        desk.post(ContextId(2), Target::Core(1), Work::Unload);
        assert!(queue.has_jobs() && !queues.vcpus[0].has_jobs());
        let first = queue.take().unwrap();
        assert_eq!(first.target(), Target::Vcpu(1));
        first.act(|_, _| Done::Unloaded(None));
        assert!(matches!(
            desk.report(),
            Some(Report::Job(ContextId(1), Done::Unloaded(None)))
        ));
        desk.notifier().drain();
        assert_eq!(queue.take().unwrap().target(), Target::Core(1));
        assert_eq!(undone(&desk), Some(ContextId(2)), "it was dropped");
        assert!(queue.take().is_none() && !queue.has_jobs());
        assert!(desk.report().is_none());
    }

    #[test]
    fn a_vcpu_that_no_core_has_yet_is_at_one_that_there_is() {
        let (desk, queues) = JobDispatcher::new(8, Some(2)).unwrap();
        queues.cores[0].set_exchange(Arc::new(Cores));
        for vcpu in 0..8 {
            assert_eq!(desk.core_of(vcpu), Some(vcpu % 2));
            desk.post(ContextId(1), Target::Vcpu(vcpu), Work::Unload);
            assert!(queues.vcpus[vcpu].take().is_some());
        }
        assert_eq!(desk.core_of(8), None);
    }

    #[test]
    fn jobs_of_one_who_has_ended_come_back() {
        let (desk, mut queues) = JobDispatcher::new(1, Some(1)).unwrap();
        desk.post(ContextId(1), Target::Vcpu(0), Work::Unload);
        queues.vcpus.remove(0).close(None, None, false);
        desk.post(ContextId(2), Target::Vcpu(0), Work::Unload);
        desk.post(ContextId(3), Target::Vcpu(9), Work::Unload);
        assert!(matches!(
            desk.report(),
            Some(Report::Ended(Target::Vcpu(0), None))
        ));
        for context in 1..=3 {
            assert_eq!(undone(&desk), Some(ContextId(context)));
        }
        desk.post(ContextId(4), Target::Core(0), Work::Unload);
        assert_eq!(queues.cores[0].take().unwrap().target(), Target::Core(0));
    }
}
