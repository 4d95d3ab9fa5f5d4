//! The lease of a VM on the host's counters: what it asks of an arbiter, how much of that it
//! starts with, and what its guest and its tools may use of it while it runs.
//!
//! It is here since what is asked follows from the machine: its guest's counters, the CPUs of
//! its vCPUs, and the contexts of its tools. Which arbiter is asked is its caller's choice
//! ([`Leases`](umpire_lease::Leases)). No vCPU's thread ever waits for one: two threads of the VM
//! ask, and tell the vCPUs what came of it.

mod follow;
mod plan;
mod tools;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use arbiter::PerKind;
use umpire_lease::{CallError, Kept, News, What};

use crate::config::{BudgetChoice, RunConfig};
pub use plan::LeasePlan;
use plan::{Wanted, there};

/// How long a VM that is not to wait is given until who has to make room for it has left.
const NOTICES: Duration = Duration::from_secs(2);

/// What a VM does at its start about counters that it does not get at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Nothing: nobody makes room for it.
    None,
    /// It waits for as long as notices to others may take.
    Notices,
    /// It waits for its turn.
    Turn,
}

/// How many of its guest's counters a VM starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enough {
    /// All.
    All,
    /// As many as there are, one at least.
    Some,
}

/// A VM has not got the lease that it asked for.
#[derive(Debug)]
pub enum NoLease {
    /// Others have all of the counters, and why.
    Nothing(CallError),
    /// There are some, but not enough, or they were refused, or nobody was there to ask.
    NotEnough(CallError),
}

impl From<CallError> for NoLease {
    fn from(why: CallError) -> Self {
        NoLease::NotEnough(why)
    }
}

/// A lease that the VM has got.
#[derive(Debug)]
pub struct VmLease {
    plan: LeasePlan,
    kept: Box<dyn Kept>,
    /// Its number, for the VM's audit.
    number: Arc<AtomicU64>,
    wanted: Wanted,
    /// Fewer than the guest's PMU has are there for good.
    fewer: Option<PerKind>,
}

impl VmLease {
    /// Gets the lease of `plan`, if as much of it can be had as is enough.
    ///
    /// # Errors
    /// Why not.
    pub fn take(mut plan: LeasePlan, enough: Enough, patience: Patience) -> Result<Self, NoLease> {
        let fewer = enough == Enough::Some;
        let places = plan.leases.places()?;
        let (mut wanted, request) = plan.request(&places, fewer);
        let mut kept = plan.leases.acquire(&request)?;
        wait_for(&mut *kept, enough, patience)?;
        let (held, all) = (kept.lease().holds, kept.lease().wants);
        if held == 0 || held < all && !fewer {
            // What it holds itself is not in its way.
            drop(kept);
            let why = plan.explain(request);
            return Err(match held {
                0 => NoLease::Nothing(why),
                _ => NoLease::NotEnough(why),
            });
        }
        let holds = wanted.lets(held);
        let fewer = (holds != plan.guest).then_some(holds);
        if fewer.is_some() {
            // CPUID announces what there is now for good: more would be of no use.
            kept.keep(held)?;
            plan.guest = holds;
            wanted = Wanted::of(holds, there(&places, &plan.cpus).1, true);
        }
        let id = kept.lease().id;
        match kept.lease().within {
            None => log::info!("lease {id} on the host's counters: {held} of {all}"),
            // Whoever began the VM asked for no group.
            Some(above) => log::warn!(
                "lease {id} on the host's counters: {held} of {all}, out of lease {above}, of the \
                 control group that the VM is in"
            ),
        }
        Ok(VmLease {
            plan,
            kept,
            number: Arc::new(AtomicU64::new(id)),
            wanted,
            fewer,
        })
    }

    /// The number of the lease. It may become another one.
    #[must_use]
    pub fn number(&self) -> Arc<AtomicU64> {
        self.number.clone()
    }

    /// Lets the guest of `config` use no more than the lease holds.
    pub fn bound(&self, config: &mut RunConfig) {
        if let Some(holds) = self.fewer {
            config.budget = Some(BudgetChoice {
                programmable: Some(holds.programmable),
                fixed: Some(holds.fixed),
                round: true,
            });
        }
        config.lease = Some(self.plan.guest);
    }
}

/// Waits until the lease holds all of it, or something, if that is enough and it waits for its
/// turn.
fn wait_for(kept: &mut dyn Kept, enough: Enough, patience: Patience) -> Result<(), CallError> {
    let waits = patience == Patience::Turn;
    let until = match patience {
        Patience::None => return Ok(()),
        Patience::Notices => Some(Instant::now() + NOTICES),
        Patience::Turn => None,
    };
    loop {
        while let Some(news) = kept.hear() {
            match news {
                News::Lost(why) => return Err(CallError::Other(why)),
                News::Event(event) if event.what == What::Ended => {
                    return Err(CallError::Other(event.message));
                }
                News::Event(event) if waits => {
                    log::warn!("lease {} {}", event.lease.id, event.message);
                }
                News::Event(_) | News::Away | News::Back | News::NotRenewed(_) => {}
            }
        }
        let lease = kept.lease();
        let enough = match enough {
            Enough::Some if waits => 1,
            Enough::Some | Enough::All => lease.wants,
        };
        if lease.holds >= enough || until.is_some_and(|until| until <= Instant::now()) {
            return Ok(());
        }
        wait(kept.connection(), [kept.due(), until]);
    }
}

/// Waits until one of these can be read, or one of these moments.
fn wait<'a>(
    what: impl IntoIterator<Item = BorrowedFd<'a>>,
    moments: impl IntoIterator<Item = Option<Instant>>,
) {
    let what: Vec<BorrowedFd<'_>> = what.into_iter().collect();
    let first = moments.into_iter().flatten().min();
    let left = first.map(|first| first.saturating_duration_since(Instant::now()));
    umpire_lease::wait_readable(&what, left);
}
