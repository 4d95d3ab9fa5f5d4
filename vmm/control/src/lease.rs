//! What the VM's lease on the host's counters holds, told to every vCPU.

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use arbiter::PerKind;
use perfmon_abi::wire::Refusal;

use crate::dispatcher::JobDispatcher;
use crate::job::{Administration, Done, INSPECTION, Report, Target, Work};

/// The longest wait for the vCPUs to answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// The way by which vCPUs hear of their VM's lease on the host's counters. Like a host
/// tool's jobs, each thread takes it up between two entries into the guest.
#[derive(Debug)]
pub struct LeaseLine {
    dispatcher: JobDispatcher,
    last: u64,
}

impl LeaseLine {
    pub(crate) fn new(dispatcher: JobDispatcher) -> Self {
        LeaseLine {
            dispatcher,
            last: 0,
        }
    }

    /// Guests use so many physical counters from now on, whatever their budgets are.
    /// Layers that have reserved more are told, and lose it after `grace_ms` milliseconds.
    /// Waits until all vCPUs that have not ended have done so, a second at most.
    ///
    /// # Errors
    /// The first vCPU that cannot: host contexts there rely on what its guest would get.
    pub fn holds(&mut self, lease: PerKind, grace_ms: u32) -> Result<(), Refusal> {
        self.last += 1;
        let vcpus = self.dispatcher.vcpus();
        for vcpu in 0..vcpus {
            let what = Box::new(Administration::Lease(lease, grace_ms));
            let work = Work::Administer(self.last, what);
            self.dispatcher.post(INSPECTION, Target::Vcpu(vcpu), work);
        }
        let until = Instant::now() + PATIENCE;
        let mut left = vcpus;
        let mut result = Ok(());
        while left > 0 {
            let patience = until.saturating_duration_since(Instant::now());
            let done = match self.dispatcher.wait_report(patience) {
                Ok(Report::Job(_, _, done)) => done,
                Ok(Report::Ended(..)) => continue,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            };
            match done {
                Done::Administered(number, answer) if number == self.last => {
                    left -= 1;
                    result = result.and(answer.map(|_| ()));
                }
                Done::Undone(Work::Administer(number, _)) if number == self.last => left -= 1,
                // Of a change that took too long, and is over by now.
                _ => {}
            }
        }
        result
    }
}
