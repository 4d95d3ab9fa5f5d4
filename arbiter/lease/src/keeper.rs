//! A lease of the host's arbiter that is kept for as long as its holder needs it: renewed in
//! time, and claimed when the arbiter was started anew.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use arbiter_host::What;

use crate::client::{Arbiter, CallError, Held, Next};
use crate::leases::{Kept, Leases, News};
use crate::wire::{
    ExplainIn, ExplainOut, Figure, Lease, NoReply, Place, ReleaseIn, RenewIn, RenewOut, ReportIn,
    Request, WhoIn, WhoOut,
};

/// Between two looks for an arbiter that has gone away.
const LOOKS: Duration = Duration::from_millis(100);
/// Between two tries to renew.
const TRIES: Duration = Duration::from_secs(1);

/// The arbiter at a socket. Its leases are renewed in time, and claimed when it was started
/// anew, however long that takes.
#[derive(Clone, Debug)]
pub struct AtSocket(pub PathBuf);

impl Leases for AtSocket {
    fn places(&self) -> Result<Vec<Place>, CallError> {
        let who: WhoOut = Arbiter::connect(&self.0)?.call("Who", &WhoIn { cpu: None })?;
        Ok(who.places)
    }

    fn acquire(&self, request: &Request) -> Result<Box<dyn Kept>, CallError> {
        let keeper = Keeper::acquire(&self.0, request, true, None)?;
        Ok(Box::new(keeper))
    }

    fn explain(&self, request: &Request) -> Result<ExplainOut, CallError> {
        let request = request.clone();
        Arbiter::connect(&self.0)?.call("Explain", &ExplainIn { request })
    }
}

/// A lease by a connection to the arbiter.
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
    /// Takes reports.
    reports: Option<Arbiter>,
}

#[derive(Debug)]
enum State {
    Held(Box<Held>),
    /// The arbiter has gone away at this time.
    Away(Instant),
    Ended,
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
            reports: None,
        };
        keeper.plan_renewal();
        Ok(keeper)
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

impl Kept for Keeper {
    fn lease(&self) -> &Lease {
        &self.lease
    }

    fn heard(&self) -> Instant {
        self.heard
    }

    fn has_ended(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    fn connection(&self) -> Option<BorrowedFd<'_>> {
        match &self.state {
            State::Held(held) => Some(held.as_fd()),
            State::Away(_) | State::Ended => None,
        }
    }

    fn due(&self) -> Option<Instant> {
        self.due
    }

    fn hear(&mut self) -> Option<News> {
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
                        match event.what {
                            What::Ended => self.end(),
                            // Its time begins anew with a grant.
                            What::Holds | What::Spared | What::Mended => self.plan_renewal(),
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

    fn keep(&mut self, counters: u32) -> Result<(), CallError> {
        let release = ReleaseIn {
            lease: self.lease.id,
            generation: None,
            keep: Some(counters),
        };
        let _: NoReply = Arbiter::connect(&self.path)?.call("Release", &release)?;
        Ok(())
    }

    fn report(&mut self, figures: Vec<Figure>) -> Result<(), CallError> {
        let report = ReportIn {
            lease: self.lease.id,
            figures,
        };
        // One that does not read is connected to anew.
        let connected = self.reports.take();
        let mut arbiter = connected.map_or_else(|| Arbiter::connect(&self.path), Ok)?;
        arbiter.tell("Report", &report)?;
        self.reports = Some(arbiter);
        Ok(())
    }
}
