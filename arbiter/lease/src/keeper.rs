//! A lease that is kept for as long as its holder needs it: renewed in time, and claimed
//! when the arbiter was started anew.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::client::{Arbiter, CallError, Held, Next};
use crate::wire::{Event, Lease, RenewIn, RenewOut, Request};

/// Between two looks for an arbiter that has gone away.
const LOOKS: Duration = Duration::from_millis(100);
/// Between two tries to renew.
const TRIES: Duration = Duration::from_secs(1);

/// A lease whose holder has other things to do. Nothing here waits for longer than an
/// answer takes.
#[derive(Debug)]
pub struct Keeper {
    path: PathBuf,
    /// Whether it is renewed.
    renews: bool,
    /// How long an arbiter that has gone away is looked for; without a time until it is back.
    patience: Option<Duration>,
    /// As it was last heard of, then.
    lease: Lease,
    heard: Instant,
    state: State,
    /// When there is something to do.
    due: Option<Instant>,
}

#[derive(Debug)]
enum State {
    Held(Box<Held>),
    /// The arbiter has gone away at this time.
    Away(Instant),
    Ended,
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

impl Keeper {
    /// Asks the arbiter at `path` for a lease. It may wait for its turn, and hold nothing
    /// yet. `renews`: it is renewed in time, if it has one. `patience`: how long the arbiter
    /// is looked for after it has gone away; until it is back without one.
    ///
    /// # Errors
    /// Why the lease cannot be had.
    pub fn acquire(
        path: &Path,
        request: &Request,
        renews: bool,
        patience: Option<Duration>,
    ) -> Result<Self, CallError> {
        let held = Arbiter::connect(path)?.acquire(request)?;
        let mut keeper = Keeper {
            path: path.to_owned(),
            renews,
            patience,
            lease: held.lease().clone(),
            heard: Instant::now(),
            state: State::Held(Box::new(held)),
            due: None,
        };
        keeper.plan_renewal();
        Ok(keeper)
    }

    /// The lease as it was last heard of.
    #[must_use]
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// When the lease will lose counters, and how many are left then, if it was told so.
    #[must_use]
    pub fn leaves(&self) -> Option<(Instant, u32)> {
        let leaving = self.lease.leaving.as_ref()?;
        Some((
            self.heard + Duration::from_millis(leaving.in_ms),
            leaving.to,
        ))
    }

    /// Whether the lease has ended, or is lost.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    /// Readable when [`Keeper::hear`] has news. [`News::Back`] brings another one; while the
    /// arbiter is away, and after the end, there is none.
    #[must_use]
    pub fn connection(&self) -> Option<BorrowedFd<'_>> {
        match &self.state {
            State::Held(held) => Some(held.as_fd()),
            State::Away(_) | State::Ended => None,
        }
    }

    /// When [`Keeper::hear`] is to be called, whether there is something to read or not.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// What has happened since; `None`: nothing more.
    pub fn hear(&mut self) -> Option<News> {
        let now = Instant::now();
        match &mut self.state {
            State::Ended => None,
            State::Away(since) => {
                let since = *since;
                if self.due.is_some_and(|due| now < due) {
                    return None;
                }
                self.due = Some(now + LOOKS);
                self.look(now - since)
            }
            State::Held(held) => {
                let heard = held.next(Some(Duration::ZERO));
                if !matches!(heard, Ok(Next::Nothing)) {
                    self.lease = held.lease().clone();
                    self.heard = now;
                }
                match heard {
                    Ok(Next::Event(event)) => {
                        match event.what.as_str() {
                            "ended" => self.end(),
                            // Its time begins anew with a grant.
                            "holds" | "spared" | "mended" => self.plan_renewal(),
                            _ => {}
                        }
                        Some(News::Event(event))
                    }
                    Ok(Next::Nothing) => self.due.is_some_and(|due| due <= now).then(|| {
                        let renewed = self.renew(now);
                        renewed
                            .err()
                            .map(|error| News::NotRenewed(error.to_string()))
                    })?,
                    Err(CallError::Ended | CallError::Io(_)) => {
                        self.state = State::Away(now);
                        self.due = Some(now + LOOKS);
                        Some(News::Away)
                    }
                    Err(other) => Some(self.lost(other.to_string())),
                }
            }
        }
    }

    /// Looks whether the arbiter, which was `away` for so long, is back.
    fn look(&mut self, away: Duration) -> Option<News> {
        let arbiter = Arbiter::connect(&self.path);
        match arbiter.and_then(|arbiter| arbiter.claim(self.lease.id, None)) {
            Ok(held) => {
                self.lease = held.lease().clone();
                self.heard = Instant::now();
                self.state = State::Held(Box::new(held));
                self.plan_renewal();
                Some(News::Back)
            }
            Err(CallError::Refused(why)) => Some(self.lost(why.message)),
            Err(_) if self.patience.is_some_and(|patience| patience <= away) => {
                Some(self.lost("the arbiter did not come back".to_owned()))
            }
            Err(_) => None,
        }
    }

    fn renew(&mut self, now: Instant) -> Result<(), CallError> {
        // It may be possible again before the time is over.
        self.due = Some(now + TRIES);
        let (lease, generation) = (self.lease.id, Some(self.lease.generation));
        let RenewOut { left_ms } =
            Arbiter::connect(&self.path)?.call("Renew", &RenewIn { lease, generation })?;
        self.lease.left_ms = left_ms;
        self.plan_renewal();
        Ok(())
    }

    fn plan_renewal(&mut self) {
        let left = self.lease.left_ms.filter(|_| self.renews);
        self.due = left.map(|ms| Instant::now() + Duration::from_millis(ms / 2));
    }

    fn lost(&mut self, why: String) -> News {
        self.end();
        News::Lost(why)
    }

    fn end(&mut self) {
        self.state = State::Ended;
        self.due = None;
    }
}
