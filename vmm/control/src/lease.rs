//! What the VM's lease on the host's counters holds, told to every vCPU.

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use arbiter::PerKind;
use perfmon_abi::wire::Refusal;

use crate::dispatcher::JobDispatcher;
use crate::job::{
    Administered, Administration, Done, INSPECTION, Report, Target, VcpuFigures, Work,
};

/// The longest wait for the vCPUs to answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// The way by which vCPUs hear of their VM's lease on the host's counters. Like a host
/// tool's jobs, each thread takes it up between two entries into the guest.
#[derive(Debug)]
pub struct LeaseLine {
    dispatcher: JobDispatcher,
    last: u64,
    /// By vCPU.
    told: Vec<VcpuFigures>,
}

impl LeaseLine {
    pub(crate) fn new(dispatcher: JobDispatcher) -> Self {
        LeaseLine {
            dispatcher,
            last: 0,
            told: Vec::new(),
        }
    }

    /// Guests use so many physical counters from now on, whatever their budgets are.
    /// Layers that have reserved more are told, and lose it after `grace_ms` milliseconds.
    /// Waits until all vCPUs that have not ended have done so, a second at most.
    ///
    /// # Errors
    /// The first vCPU that cannot: host contexts there rely on what its guest would get.
    pub fn holds(&mut self, lease: PerKind, grace_ms: u32) -> Result<(), Refusal> {
        let mut result = Ok(());
        self.ask(&Administration::Lease(lease, grace_ms), |_, answer| {
            if let (Ok(()), Err(refusal)) = (&result, answer) {
                result = Err(refusal);
            }
        });
        result
    }

    /// What all vCPUs did so far, as far as they tell within a second. Of one that has ended
    /// it is what was told last.
    pub fn figures(&mut self) -> VcpuFigures {
        let mut told = std::mem::take(&mut self.told);
        told.resize(self.dispatcher.vcpus(), VcpuFigures::default());
        self.ask(&Administration::Figures, |vcpu, answer| {
            if let (Some(known), Ok(Administered::Figures(now))) = (told.get_mut(vcpu), answer) {
                *known = now;
            }
        });
        self.told = told;
        let all = self.told.iter().copied();
        all.fold(VcpuFigures::default(), VcpuFigures::plus)
    }

    /// Asks every vCPU, and waits for what they answer, a second at most.
    fn ask(
        &mut self,
        what: &Administration,
        mut heard: impl FnMut(usize, Result<Administered, Refusal>),
    ) {
        self.last += 1;
        let mut left = self.dispatcher.vcpus();
        for vcpu in 0..left {
            let work = Work::Administer(self.last, Box::new(what.clone()));
            self.dispatcher.post(INSPECTION, Target::Vcpu(vcpu), work);
        }
        let until = Instant::now() + PATIENCE;
        while left > 0 {
            let patience = until.saturating_duration_since(Instant::now());
            let (target, done) = match self.dispatcher.wait_report(patience) {
                Ok(Report::Job(_, target, done)) => (target, done),
                Ok(Report::Ended(..)) => continue,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            };
            match done {
                Done::Administered(number, answer) if number == self.last => {
                    left -= 1;
                    heard(target.number(), answer);
                }
                Done::Undone(Work::Administer(number, _)) if number == self.last => left -= 1,
                // Of a question that took too long, and is over by now.
                _ => {}
            }
        }
    }
}
