//! What the VM's lease on the host's counters holds, told to every vCPU.

use std::os::fd::{AsFd, BorrowedFd};

use arbiter::PerKind;
use perfmon_abi::wire::Refusal;

use crate::dispatcher::JobDispatcher;
use crate::job::{
    Administered, Administration, Done, INSPECTION, Report, Target, VcpuFigures, Work,
};

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
