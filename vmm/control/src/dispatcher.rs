//! The way from the server to the threads that run vCPUs.
//!
//! The server never touches an attached context. It puts a job into a queue and
//! goes on. The thread that has the vCPU or core finds the job at its next exit,
//! does it, and sends it back. A job that nobody does any more, because its vCPU
//! has ended, comes back as well.

use std::fmt::Debug;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};

use pmu_virt::perfmon::{AttachedContext, ContextId};

use crate::job::{Job, Notifier, Outbox, Report, Target, Work};

/// A thread that runs vCPUs.
pub trait KickThread: Debug + Send + Sync {
    /// Has the thread leave the guest and look at its jobs. Never waits.
    fn kick(&self);
    /// The number of the thread, as the host's kernel counts threads.
    fn thread_id(&self) -> i32;
}

/// Cores that vCPUs share.
pub trait WakeCore: Debug + Send + Sync {
    /// Has `core` look at its jobs and at those of its vCPUs. Never waits. A
    /// `core` that does not exist is ignored.
    fn wake(&self, core: usize);
}

/// Tells a thread that there is a job.
#[derive(Debug)]
struct Flag {
    raised: AtomicBool,
    /// The thread, once there is one. Used where vCPUs share no cores.
    thread: OnceLock<Box<dyn KickThread>>,
    /// The core that has the vCPU, or the core itself.
    core: AtomicUsize,
}

/// The server's end of a [`JobQueue`].
#[derive(Debug)]
struct Line {
    jobs: Sender<Job>,
    flag: Arc<Flag>,
}

/// The ways to all vCPUs and cores.
#[derive(Debug)]
struct Lines {
    vcpus: Vec<Line>,
    /// `None`: vCPUs share no cores, and a core's jobs go to its vCPU's queue.
    cores: Option<Vec<Line>>,
    /// Set once the first core runs, where vCPUs share cores.
    exchange: Arc<OnceLock<Arc<dyn WakeCore>>>,
}

/// The sender's side: it sends jobs and takes reports.
#[derive(Debug)]
pub(crate) struct JobDispatcher {
    lines: Arc<Lines>,
    outbox: Outbox,
    reports: Receiver<Report>,
}

/// The thread's side: the jobs of a vCPU, or of a core.
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
pub(crate) struct JobQueues {
    /// One for each vCPU.
    pub(crate) vcpus: Vec<JobQueue>,
    /// One for each core that vCPUs share; none where they share none.
    pub(crate) cores: Vec<JobQueue>,
}

impl JobDispatcher {
    /// For `vcpus` vCPUs on `cores` cores; `None`: each has a thread of its own.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(crate) fn new(vcpus: usize, cores: Option<usize>) -> io::Result<(Self, JobQueues)> {
        let (outbox, received) = Outbox::new()?;
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
        // The scheduler deals vCPUs to cores in turn.
        let among = cores.unwrap_or(vcpus).max(1);
        let (vcpu_lines, vcpu_queues) =
            (0..vcpus).map(|n| open(Target::Vcpu(n), n % among)).unzip();
        let (core_lines, core_queues) = (0..cores.unwrap_or(0))
            .map(|n| open(Target::Core(n), n))
            .unzip();
        let lines = Lines {
            vcpus: vcpu_lines,
            cores: cores.map(|_| core_lines),
            exchange,
        };
        let dispatcher = JobDispatcher {
            lines: Arc::new(lines),
            outbox,
            reports: received,
        };
        let queues = JobQueues {
            vcpus: vcpu_queues,
            cores: core_queues,
        };
        Ok((dispatcher, queues))
    }

    /// Another sender to the same vCPUs and cores. What it sends comes back to it.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(crate) fn another(&self) -> io::Result<Self> {
        let (outbox, reports) = Outbox::new()?;
        let lines = self.lines.clone();
        Ok(Self {
            lines,
            outbox,
            reports,
        })
    }

    /// How many vCPUs there are.
    pub(crate) fn vcpus(&self) -> usize {
        self.lines.vcpus.len()
    }

    /// Whether vCPUs share cores.
    pub(crate) fn shares_cores(&self) -> bool {
        self.lines.cores.is_some()
    }

    /// How many cores there are.
    pub(crate) fn cores(&self) -> usize {
        let lines = self.lines.cores.as_ref();
        lines.unwrap_or(&self.lines.vcpus).len()
    }

    /// The core on which a vCPU is, or was last.
    pub(crate) fn core_of(&self, vcpu: usize) -> Option<usize> {
        let line = self.lines.vcpus.get(vcpu)?;
        Some(line.flag.core.load(Ordering::Relaxed))
    }

    /// The thread of a core, once it runs.
    pub(crate) fn thread_of(&self, core: usize) -> Option<i32> {
        let lines = self.lines.cores.as_ref().unwrap_or(&self.lines.vcpus);
        let line = lines.get(core)?;
        line.flag.thread.get().map(|thread| thread.thread_id())
    }

    /// The core whose thread has this number, once it runs.
    pub(crate) fn core_of_thread(&self, thread: i32) -> Option<usize> {
        (0..self.cores()).find(|&core| self.thread_of(core) == Some(thread))
    }

    /// The vCPU whose own thread has this number, once it runs.
    pub(crate) fn vcpu_of_thread(&self, thread: i32) -> Option<usize> {
        // Such a thread is a core of the same number.
        (!self.shares_cores()).then(|| self.core_of_thread(thread))?
    }

    /// Readable when there are reports.
    pub(crate) fn notifier(&self) -> &Arc<Notifier> {
        &self.outbox.notifier
    }

    /// Where reports go.
    pub(crate) fn outbox(&self) -> Outbox {
        self.outbox.clone()
    }

    /// The next report, if there is one.
    pub(crate) fn report(&self) -> Option<Report> {
        self.reports.try_recv().ok()
    }

    /// Sends a job. It comes back in a report, whatever happens.
    pub(crate) fn post(&self, context: ContextId, target: Target, work: Work) {
        self.forward(self.job(context, target, work));
    }

    /// A job that was not sent yet. It comes back as well.
    pub(crate) fn job(&self, context: ContextId, target: Target, work: Work) -> Job {
        Job {
            context,
            target,
            work: Some(work),
            outbox: self.outbox.clone(),
        }
    }

    /// Sends a job, which may be of another sender and comes back to that.
    pub(crate) fn forward(&self, job: Job) {
        let line = match (job.target, &self.lines.cores) {
            (Target::Vcpu(n), _) | (Target::Core(n), None) => self.lines.vcpus.get(n),
            (Target::Core(n), Some(cores)) => cores.get(n),
        };
        // If nobody takes the job, it is dropped and comes back.
        let Some(line) = line else { return };
        if line.jobs.send(job).is_err() {
            return;
        }
        line.flag.raised.store(true, Ordering::SeqCst);
        // Either the thread, or the core to which the vCPU comes, sees the flag,
        // or its number is seen here.
        fence(Ordering::SeqCst);
        match self.lines.exchange.get() {
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
    /// `thread` does the jobs from now on. A later call is ignored.
    pub fn bind_thread(&self, thread: Box<dyn KickThread>) {
        let _ = self.flag.thread.set(thread);
        fence(Ordering::SeqCst);
    }

    /// `core` has the vCPU from now on.
    pub(crate) fn moved_to(&self, core: usize) {
        self.flag.core.store(core, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Cores are woken by `exchange` from now on. One call serves all queues of
    /// the machine.
    pub fn set_exchange(&self, exchange: Arc<dyn WakeCore>) {
        let _ = self.exchange.set(exchange);
        fence(Ordering::SeqCst);
    }

    /// Whether there may be a job: one relaxed load.
    #[inline]
    #[must_use]
    pub fn has_jobs(&self) -> bool {
        self.flag.raised.load(Ordering::Relaxed)
    }

    /// The next job. Never waits.
    #[must_use]
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

    /// The vCPU or core has ended, and gives its contexts back. Jobs that were not
    /// taken come back undone.
    pub(crate) fn close(self, contexts: Vec<AttachedContext>) {
        self.outbox.send(Report::Ended(self.target, contexts));
    }

    /// The vCPU has ended, and with it the core that was its thread. Both give
    /// their contexts back.
    pub(crate) fn close_with_core(self, own: Vec<AttachedContext>, core: Vec<AttachedContext>) {
        self.outbox.send(Report::Ended(self.target, own));
        let thread = Target::Core(self.target.number());
        self.outbox.send(Report::Ended(thread, core));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Done;

    #[derive(Debug)]
    struct Cores;

    impl WakeCore for Cores {
        fn wake(&self, _: usize) {}
    }

    fn undone(dispatcher: &JobDispatcher) -> Option<ContextId> {
        match dispatcher.report()? {
            Report::Job(context, _, Done::Undone(Work::Unload)) => Some(context),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_job_comes_back() {
        let (dispatcher, queues) = JobDispatcher::new(2, None).unwrap();
        assert!(queues.cores.is_empty());
        assert_eq!((dispatcher.vcpus(), dispatcher.cores()), (2, 2));
        let queue = &queues.vcpus[1];
        assert!(queue.take().is_none());
        dispatcher.post(ContextId(1), Target::Vcpu(1), Work::Unload);
        dispatcher.post(ContextId(2), Target::Core(1), Work::Unload);
        assert!(queue.has_jobs() && !queues.vcpus[0].has_jobs());
        let first = queue.take().unwrap();
        assert_eq!(first.target(), Target::Vcpu(1));
        first.act(|_, _| Done::Unloaded(None));
        assert!(matches!(
            dispatcher.report(),
            Some(Report::Job(ContextId(1), _, Done::Unloaded(None)))
        ));
        dispatcher.notifier().drain();
        assert_eq!(queue.take().unwrap().target(), Target::Core(1));
        assert_eq!(undone(&dispatcher), Some(ContextId(2)), "it was dropped");
        assert!(queue.take().is_none() && !queue.has_jobs());
        assert!(dispatcher.report().is_none());
    }

    #[test]
    fn a_vcpu_that_no_core_has_yet_is_at_one_that_there_is() {
        let (dispatcher, queues) = JobDispatcher::new(8, Some(2)).unwrap();
        queues.cores[0].set_exchange(Arc::new(Cores));
        for vcpu in 0..8 {
            assert_eq!(dispatcher.core_of(vcpu), Some(vcpu % 2));
            dispatcher.post(ContextId(1), Target::Vcpu(vcpu), Work::Unload);
            assert!(queues.vcpus[vcpu].take().is_some());
        }
        assert_eq!(dispatcher.core_of(8), None);
    }

    #[test]
    fn jobs_of_one_who_has_ended_come_back() {
        let (dispatcher, mut queues) = JobDispatcher::new(1, Some(1)).unwrap();
        dispatcher.post(ContextId(1), Target::Vcpu(0), Work::Unload);
        queues.vcpus.remove(0).close(Vec::new());
        dispatcher.post(ContextId(2), Target::Vcpu(0), Work::Unload);
        dispatcher.post(ContextId(3), Target::Vcpu(9), Work::Unload);
        assert!(matches!(
            dispatcher.report(),
            Some(Report::Ended(Target::Vcpu(0), none)) if none.is_empty()
        ));
        for context in 1..=3 {
            assert_eq!(undone(&dispatcher), Some(ContextId(context)));
        }
        dispatcher.post(ContextId(4), Target::Core(0), Work::Unload);
        assert_eq!(queues.cores[0].take().unwrap().target(), Target::Core(0));
    }
}
