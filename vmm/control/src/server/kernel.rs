//! Requests for KERNEL: the guest's memory is searched on a thread of its own, one search at
//! a time, and all who have asked meanwhile get what it finds.

use std::sync::Arc;
use std::thread::Builder;
use std::time::{Duration, Instant};

use perfmon_abi::wire::kernel::KernelRequest;
use perfmon_abi::wire::programs::ProgramsRequest;
use perfmon_abi::wire::{Errno, Refusal, Request};

use super::administration::decode;
use super::answer::{Answer, ConnectionId, RequestId};
use crate::dispatcher::JobDispatcher;
use crate::job::{Outbox, Report};
use crate::kernel::{FoundKernel, GuestKernel};

/// What a search has found serves further requests for so long: whoever asks all the time
/// does not keep a host CPU busy.
const FRESH: Duration = Duration::from_secs(2);
/// A search in vain serves them for so many times as long as it took, since the page tables that
/// it was asked with may be those of a program that has ended meanwhile.
const IN_VAIN: u32 = 3;

/// Tells the server what was found, whatever becomes of the search.
struct Sure {
    outbox: Outbox,
    found: FoundKernel,
}

impl Sure {
    fn new(outbox: Outbox) -> Self {
        let found = Err("the search failed; this is a bug in Umpire".to_owned());
        Self { outbox, found }
    }

    fn tell(mut self, found: FoundKernel) {
        self.found = found;
    }
}

impl Drop for Sure {
    fn drop(&mut self) {
        self.outbox.send(Report::Kernel(self.found.clone()));
    }
}

/// Requests, and the last answer.
#[derive(Debug, Default)]
pub(super) struct KernelRequests {
    waiting: Vec<RequestId>,
    /// When the search began that is under way.
    searching: Option<Instant>,
    /// The last answer, and until when it serves.
    last: Option<(Instant, FoundKernel)>,
}

impl KernelRequests {
    /// The answer, if the last one is fresh. Else a search is under way from now on.
    pub(super) fn request(
        &mut self,
        id: RequestId,
        request: &Request<'_>,
        guest: Option<&Arc<dyn GuestKernel>>,
        dispatcher: &JobDispatcher,
    ) -> Result<Option<Answer>, Refusal> {
        let KernelRequest { cr3 } = decode(request)?;
        if let Some((until, found)) = &self.last
            && Instant::now() < *until
        {
            return Ok(Some(answer(found)));
        }
        if self.searching.is_none() {
            let guest = guest.ok_or_else(no_looks)?;
            let (guest, answer) = (guest.clone(), Sure::new(dispatcher.outbox()));
            let search = move || answer.tell(guest.find(cr3).map(Arc::new));
            let started = Builder::new().name("guest-kernel".to_owned()).spawn(search);
            started.map_err(|error| Refusal::new(Errno::ENOMEM, error.to_string()))?;
            self.searching = Some(Instant::now());
        }
        self.waiting.push(id);
        Ok(None)
    }

    /// A search has ended: who waits for it, and the answer.
    pub(super) fn done(&mut self, found: FoundKernel) -> (Vec<RequestId>, Answer) {
        let took = self.searching.take().map_or(FRESH, |began| began.elapsed());
        let serves = match found {
            Ok(_) => FRESH,
            Err(_) => (took * IN_VAIN).min(FRESH),
        };
        let answer = answer(&found);
        self.last = Some((Instant::now() + serves, found));
        (std::mem::take(&mut self.waiting), answer)
    }

    /// A connection has ended.
    pub(super) fn forget(&mut self, connection: ConnectionId) {
        self.waiting
            .retain(|request| request.connection != connection);
    }
}

/// The descriptions that `request` asks for.
pub(super) fn programs(
    request: &Request<'_>,
    guest: Option<&Arc<dyn GuestKernel>>,
) -> Result<Answer, Refusal> {
    let ProgramsRequest { since } = decode(request)?;
    let guest = guest.ok_or_else(no_looks)?;
    Ok(Answer::json(&guest.programs(since)))
}

fn no_looks() -> Refusal {
    Refusal::new(Errno::EOPNOTSUPP, "this VMM does not look into its guest")
}

fn answer(found: &FoundKernel) -> Answer {
    match found {
        Ok(kernel) => Answer::json(&**kernel),
        Err(why) => Refusal::new(Errno::ENOENT, why.clone()).into(),
    }
}
