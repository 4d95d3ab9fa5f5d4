//! What the VM's lease on the host's counters holds, told to every vCPU.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use arbiter::PerKind;
use perfmon_abi::wire::{Errno, Refusal};
use pmu_virt::perfmon::{ContextId, NotLoaded};
use umpire_service::Peer;

use crate::dispatcher::JobDispatcher;
use crate::job::{
    Administered, Administration, Done, INSPECTION, Job, Notifier, Report, Target, VcpuFigures,
    Work,
};

/// A host tool's context on its way to a vCPU or core. It has to have counters of the host
/// before it gets there.
#[derive(Debug)]
pub struct ContextLoad {
    pub context: ContextId,
    /// Where it is to be.
    pub target: Target,
    /// Counters of its largest event set.
    pub counters: usize,
    /// The process that created it; 0: of another PID namespace.
    pub pid: u32,
    pub uid: u32,
    job: Job,
}

/// What there is to know of contexts of host tools.
#[derive(Debug)]
pub enum ContextNews {
    /// One is to be loaded. Whoever hears this [lets it](ContextLine::let_load), or
    /// [refuses](ContextLine::refuse_load).
    Loads(ContextLoad),
    /// One is attached to nothing any more. It may be one that was refused.
    Left(ContextId),
}

/// The server's side: contexts that need counters of the host go by it.
#[derive(Debug)]
pub(crate) struct LeaseDesk {
    news: Sender<ContextNews>,
    notifier: Arc<Notifier>,
    within: Arc<Within>,
}

impl LeaseDesk {
    /// Sends a context on its way. It comes back undone if nobody looks after leases.
    pub(crate) fn load(&self, job: Job, counters: usize, tool: &Peer) {
        self.send(ContextNews::Loads(ContextLoad {
            context: job.context,
            target: job.target,
            counters,
            pid: tool.pid,
            uid: tool.uid,
            job,
        }));
    }

    /// The lease out of which those for contexts are taken, if there is one: as it was with the
    /// last of them, or else with the guest's.
    pub(crate) fn within(&self) -> Option<u64> {
        let each = [&self.within.tools, &self.within.guest];
        let each = each.map(|lease| lease.load(Ordering::Relaxed));
        each.into_iter().find(|lease| *lease > 0)
    }

    /// A context is attached to nothing any more.
    pub(crate) fn left(&self, context: ContextId) {
        self.send(ContextNews::Left(context));
    }

    fn send(&self, news: ContextNews) {
        if self.news.send(news).is_ok() {
            self.notifier.notify();
        }
    }
}

/// The way by which vCPUs hear of their VM's lease on the host's counters. Like a host
/// tool's jobs, each thread takes it up between two entries into the guest. Nothing here
/// waits.
#[derive(Debug)]
pub struct LeaseLine {
    dispatcher: JobDispatcher,
    /// What they were told last, and so many milliseconds for what is reserved.
    told: (PerKind, u32),
    requests: u64,
    vcpus: Vec<Known>,
}

/// The way by which contexts of host tools come to have counters of the host.
#[derive(Debug)]
pub struct ContextLine {
    dispatcher: JobDispatcher,
    contexts: Receiver<ContextNews>,
    within: Arc<Within>,
}

/// Leases out of which a VM's are taken: numbers, 0 for none.
#[derive(Debug, Default)]
struct Within {
    guest: AtomicU64,
    tools: AtomicU64,
}

/// The way by which tools hear out of which lease the guest's is taken.
#[derive(Debug)]
pub struct WithinLine(Arc<Within>);

impl WithinLine {
    /// The guest's lease is taken out of this one from now on, of the control group in which the
    /// VM runs; `None`: out of none, or there is no lease.
    pub fn tell(&self, lease: Option<u64>) {
        self.0.guest.store(lease.unwrap_or(0), Ordering::Relaxed);
    }
}

impl ContextLine {
    pub(crate) fn new(dispatcher: JobDispatcher) -> (Self, LeaseDesk) {
        let (news, contexts) = channel();
        let within = Arc::<Within>::default();
        let desk = LeaseDesk {
            news,
            within: within.clone(),
            notifier: dispatcher.notifier().clone(),
        };
        let line = ContextLine {
            dispatcher,
            contexts,
            within,
        };
        (line, desk)
    }

    /// What has happened to a context since; `None`: nothing more, until the line is readable
    /// again.
    pub fn hear(&mut self) -> Option<ContextNews> {
        let news = self.contexts.try_recv().ok();
        if news.is_none() {
            self.dispatcher.notifier().drain();
            while self.dispatcher.report().is_some() {}
            // It may have come before that.
            return self.contexts.try_recv().ok();
        }
        news
    }

    /// For whoever looks after the guest's lease.
    #[must_use]
    pub fn within_line(&self) -> WithinLine {
        WithinLine(self.within.clone())
    }

    /// The leases for contexts are taken out of this one from now on, of the control group in which
    /// the VM runs; `None`: out of none, or there are no leases.
    pub fn tell_within(&self, lease: Option<u64>) {
        self.within
            .tools
            .store(lease.unwrap_or(0), Ordering::Relaxed);
    }

    /// The context may use as many counters as it wants.
    pub fn let_load(&self, load: ContextLoad) {
        let mut job = load.job;
        if let Some(Work::Load(hosted, _)) = &mut job.work {
            hosted.set_lease(load.counters);
        }
        self.dispatcher.forward(job);
    }

    /// The context is not loaded (EBUSY).
    pub fn refuse_load(&self, load: ContextLoad, reason: String) {
        load.job.act(|_, work| match work {
            Work::Load(hosted, _) => {
                let refusal = Refusal::new(Errno::EBUSY, reason);
                Done::Loaded(Err(NotLoaded::new(hosted, refusal)))
            }
            other => Done::Undone(other),
        });
    }

    /// The context that was let to this vCPU or core may use so many counters from now on.
    /// It is preempted while it wants more.
    pub fn lease_context(&self, context: ContextId, target: Target, counters: usize) {
        let work = Work::Lease(counters);
        self.dispatcher.post(context, target, work);
    }
}

/// Readable when there is something to [hear](ContextLine::hear).
impl AsFd for ContextLine {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dispatcher.notifier().as_fd()
    }
}

/// What is known of a vCPU.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// The request by which it was told.
    request: u64,
    /// It could not do so.
    refuses: bool,
    figures: VcpuFigures,
}

impl LeaseLine {
    pub(crate) fn new(dispatcher: JobDispatcher) -> Self {
        LeaseLine {
            told: (PerKind::ALL, 0),
            requests: 0,
            vcpus: vec![Known::default(); dispatcher.vcpus()],
            dispatcher,
        }
    }

    /// Guests are to use so many physical counters, whatever their budgets are. Layers that
    /// have reserved more are told, and lose it after `grace_ms` milliseconds.
    pub fn tell(&mut self, lease: PerKind, grace_ms: u32) {
        self.told = (lease, grace_ms);
        for vcpu in 0..self.vcpus.len() {
            self.tell_one(vcpu);
        }
    }

    /// Tells those again that refused.
    pub fn tell_again(&mut self) {
        for vcpu in 0..self.vcpus.len() {
            if self.vcpus[vcpu].refuses {
                self.tell_one(vcpu);
            }
        }
    }

    fn tell_one(&mut self, vcpu: usize) {
        let (lease, grace_ms) = self.told;
        self.vcpus[vcpu].request = self.post(vcpu, Administration::Lease(lease, grace_ms));
        self.vcpus[vcpu].refuses = false;
    }

    /// Asks all vCPUs what they did.
    pub fn ask_figures(&mut self) {
        for vcpu in 0..self.vcpus.len() {
            self.post(vcpu, Administration::Figures);
        }
    }

    fn post(&mut self, vcpu: usize, what: Administration) -> u64 {
        self.requests += 1;
        let work = Work::Administer(self.requests, Box::new(what));
        self.dispatcher.post(INSPECTION, Target::Vcpu(vcpu), work);
        self.requests
    }

    /// Takes in what vCPUs have answered. Returns why one cannot let its guest use what it
    /// was told last: host contexts there rely on it.
    pub fn hear(&mut self) -> Option<Refusal> {
        self.dispatcher.notifier().drain();
        let mut refusal = None;
        while let Some(report) = self.dispatcher.report() {
            let Report::Job(_, target, Done::Administered(request, answer)) = report else {
                continue;
            };
            let Some(known) = self.vcpus.get_mut(target.number()) else {
                continue;
            };
            match answer {
                Ok(Administered::Figures(figures)) => known.figures = figures,
                // An older one was followed by another since.
                Err(why) if request == known.request => {
                    known.refuses = true;
                    refusal = Some(why);
                }
                _ => {}
            }
        }
        refusal
    }

    /// Whether a vCPU refuses what it was told last.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        self.vcpus.iter().any(|vcpu| vcpu.refuses)
    }

    /// What all vCPUs did, as they told last.
    #[must_use]
    pub fn figures(&self) -> VcpuFigures {
        let all = self.vcpus.iter().map(|vcpu| vcpu.figures);
        all.fold(VcpuFigures::default(), VcpuFigures::plus)
    }
}

/// Readable when there is something to [hear](LeaseLine::hear).
impl AsFd for LeaseLine {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dispatcher.notifier().as_fd()
    }
}
