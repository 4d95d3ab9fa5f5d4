//! The floor of a PMI: a timer's signal ends `KVM_RUN`, an NMI is queued, the
//! guest is entered again, and nothing else happens.

use std::time::{Duration, Instant};

use vmm::kvm::{Answer, KvmVcpu, VmExit};
use vmm::sys::{KickTimer, install_kick_handler, rdtsc};

use crate::error::BenchError;
use crate::harness::DONE;

/// A vCPU without a PMU behind it, whose overflows are times.
#[derive(Debug)]
pub(super) struct BareLoop {
    kvm: KvmVcpu,
    timer: KickTimer,
    /// The register whose write begins a period.
    counter: u32,
    period: Duration,
    /// The period in TSC ticks.
    ticks: u64,
}

/// One NMI, in TSC values.
#[derive(Clone, Copy, Debug)]
pub(super) struct BareNmi {
    /// When the timer was to fire.
    pub(super) due: u64,
    /// `KVM_RUN` had returned.
    pub(super) left: u64,
    /// The NMI was queued.
    pub(super) sent: u64,
}

impl BareLoop {
    /// A loop around `kvm`, on the calling thread.
    pub(super) fn new(
        kvm: KvmVcpu,
        counter: u32,
        period: Duration,
        ticks: u64,
    ) -> Result<Self, BenchError> {
        install_kick_handler().map_err(|error| BenchError::Signal(error.into()))?;
        Ok(Self {
            kvm,
            timer: KickTimer::for_this_thread()
                .map_err(|error| BenchError::Signal(error.into()))?,
            counter,
            period,
            ticks,
        })
    }

    /// Runs to the end of a batch.
    pub(super) fn batch(&mut self, patience: Duration) -> Result<Vec<BareNmi>, BenchError> {
        let Self {
            kvm,
            timer,
            counter,
            period,
            ticks,
        } = self;
        let end = Instant::now() + patience;
        let (mut sent, mut due) = (Vec::new(), None);
        kvm.with_kicks(|kvm| {
            loop {
                match kvm.run()? {
                    VmExit::Interrupted => {
                        let left = rdtsc();
                        kvm.set_immediate_exit(false);
                        match due {
                            Some(at) if at <= left => {
                                kvm.nmi()?;
                                let nmi = BareNmi {
                                    due: at,
                                    left,
                                    sent: rdtsc(),
                                };
                                sent.push(nmi);
                                due = None;
                                // A guest that does not take it must not run for ever.
                                timer.arm(patience);
                            }
                            _ if Instant::now() < end => {}
                            _ => return Err(BenchError::TimedOut(patience)),
                        }
                    }
                    VmExit::Wrmsr { index, .. } => {
                        kvm.answer(Answer::Done);
                        if index == *counter {
                            due = Some(rdtsc() + *ticks);
                            timer.arm(*period);
                        }
                    }
                    VmExit::IoOut { port: DONE, .. } => {
                        timer.disarm();
                        return Ok(sent);
                    }
                    other => return Err(BenchError::Guest(format!("{other:?}"))),
                }
            }
        })
    }
}
