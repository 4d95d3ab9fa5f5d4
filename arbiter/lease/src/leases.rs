//! Where a holder gets leases: of the host's arbiter, or of one in its own process. Who asks
//! does not see which.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use crate::client::CallError;
use crate::wire::{Event, ExplainOut, Figure, Lease, Place, Request};

/// An arbiter, as one asks it who needs leases for as long as it runs: a VM for its guest and
/// for the tools that look at it.
pub trait Leases: Debug + Send + Sync {
    /// The counters that there are, and where.
    ///
    /// # Errors
    /// The arbiter does not answer.
    fn places(&self) -> Result<Vec<Place>, CallError>;

    /// Asks for a lease. It may wait for its turn, and hold nothing yet.
    ///
    /// # Errors
    /// Why it cannot be had.
    fn acquire(&self, request: &Request) -> Result<Box<dyn Kept>, CallError>;

    /// What would become of a request, and what would follow for others. Nothing changes.
    ///
    /// # Errors
    /// The request makes no sense, or the arbiter does not answer.
    fn explain(&self, request: &Request) -> Result<ExplainOut, CallError>;
}

/// A lease that is kept while its holder has other things to do: nothing here waits for longer
/// than an answer takes. It is given back when this is dropped.
pub trait Kept: Debug + Send {
    /// The lease as it was last heard of.
    fn lease(&self) -> &Lease;

    /// When that was.
    fn heard(&self) -> Instant;

    /// When the lease will lose counters, and how many are left then, if it was told so.
    fn leaves(&self) -> Option<(Instant, u32)> {
        let leaving = self.lease().leaving.as_ref()?;
        let at = self.heard() + Duration::from_millis(leaving.in_ms);
        Some((at, leaving.to))
    }

    /// Whether the lease has ended, or is lost.
    fn has_ended(&self) -> bool;

    /// Readable when [`Kept::hear`] has news. [`News::Back`] brings another one; while the
    /// arbiter is away, and after the end, there is none.
    fn connection(&self) -> Option<BorrowedFd<'_>>;

    /// When [`Kept::hear`] is to be called, whether there is something to read or not.
    fn due(&self) -> Option<Instant>;

    /// What has happened since; `None`: nothing more. A lease that ends without a renewal is
    /// renewed here when it is due, if it is to be.
    fn hear(&mut self) -> Option<News>;

    /// Gives the counters back but for the first `counters`.
    ///
    /// # Errors
    /// The lease has ended, or the arbiter does not answer.
    fn keep(&mut self, counters: u32) -> Result<(), CallError>;

    /// Tells the arbiter what was done with the lease, for its metrics. Nobody waits for an
    /// answer.
    ///
    /// # Errors
    /// The arbiter does not take it.
    fn report(&mut self, figures: Vec<Figure>) -> Result<(), CallError>;
}

/// What has happened to a lease that is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// The arbiter says so.
    Event(Box<Event>),
    /// The arbiter has gone away. Its successor knows the lease.
    Away,
    /// The lease is held again, by a new connection.
    Back,
    /// The lease is no more, and why.
    Lost(String),
    /// It could not be renewed now, and why. That is tried again.
    NotRenewed(String),
}
