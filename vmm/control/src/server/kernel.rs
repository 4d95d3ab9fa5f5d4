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
use crate::document::Document;
use crate::job::{Outbox, Report};
use crate::kernel::{FoundKernel, GuestKernel};

/// What a search has found serves further requests for so long, and a refusal those with the
/// same CR3: whoever asks all the time has but a part of a host CPU searching.
const FRESH: Duration = Duration::from_secs(2);
/// A refusal serves other requests for so many times as long as its search took, and no longer
/// than [`FRESH`]: its page tables may be those of a program that has ended meanwhile.
const IN_VAIN: u32 = 3;

/// Tells the server what was found, whatever becomes of the search.
struct Sure {
    outbox: Outbox,
    found: FoundKernel,
}

impl Sure {
    fn new(outbox: Outbox) -> Self {
        let why = "the search failed; this is a bug in Umpire";
        let found = Err(unknown(why.to_owned()));
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

/// The answer to the request of a CR3, which took some time.
#[derive(Debug)]
struct Answered {
    cr3: u64,
    at: Instant,
    took: Duration,
    found: FoundKernel,
}

impl Answered {
    /// It also answers a request that comes `now`.
    fn serves(&self, now: Instant, cr3: u64) -> bool {
        let serves = match self.found {
            Err(_) if cr3 != self.cr3 => (self.took * IN_VAIN).min(FRESH),
            _ => FRESH,
        };
        now < self.at + serves
    }
}

/// Requests, and the last answer.
#[derive(Debug, Default)]
pub(super) struct KernelRequests {
    waiting: Vec<RequestId>,
    /// The CR3 of the search that is under way, and when it began.
    searching: Option<(u64, Instant)>,
    last: Option<Answered>,
    /// What was found before that. Clients may be reading its file; that of an earlier one is
    /// cut, whoever keeps it.
    before: Option<Document>,
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
        let now = Instant::now();
        if let Some(last) = self.last.as_ref().filter(|last| last.serves(now, cr3)) {
            return Ok(Some(answer_of(&last.found)));
        }
        if self.searching.is_none() {
            let guest = guest.ok_or_else(no_looks)?;
            let (guest, answer) = (guest.clone(), Sure::new(dispatcher.outbox()));
            // The document, too: it takes a while to write.
            let find = move || Document::of(&guest.find(cr3).map_err(unknown)?);
            let search = move || answer.tell(find());
            let started = Builder::new().name("guest-kernel".to_owned()).spawn(search);
            started.map_err(|error| Refusal::new(Errno::ENOMEM, error.to_string()))?;
            self.searching = Some((cr3, now));
        }
        self.waiting.push(id);
        Ok(None)
    }

    /// A search has ended: who waits for it, and the answer.
    pub(super) fn done(&mut self, found: FoundKernel) -> (Vec<RequestId>, Answer) {
        let answer = answer_of(&found);
        let at = Instant::now();
        let answered = self.searching.take().map(|(cr3, began)| Answered {
            cr3,
            at,
            took: at - began,
            found,
        });
        let last = std::mem::replace(&mut self.last, answered);
        if let Some(Ok(document)) = last.map(|last| last.found)
            && let Some(Document::Long(old)) = self.before.replace(document)
            && let Err(error) = old.cut()
        {
            log::warn!("the memory of an answer does not come back: {error}");
        }
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

fn answer_of(found: &FoundKernel) -> Answer {
    match found {
        Ok(kernel) => Answer::document(kernel),
        Err(refusal) => refusal.clone().into(),
    }
}

/// No kernel is known, and why.
fn unknown(why: String) -> Refusal {
    Refusal::new(Errno::ENOENT, why)
}

#[cfg(test)]
mod tests {
    use perfmon_abi::wire::kernel::KernelInfo;

    use super::*;

    #[test]
    fn what_an_answer_serves() {
        let kernel = KernelInfo {
            release: "6.1".to_owned(),
            kallsyms: String::new(),
        };
        let found: [FoundKernel; 2] = [Document::of(&kernel), Err(unknown("none".to_owned()))];
        let at = Instant::now();
        // Found; the search, the time since, and the CR3, of 1: whether it serves.
        for (which, took, since, cr3, serves) in [
            (0, 100, 1999, 2, true),
            (0, 100, 2001, 1, false),
            (1, 100, 1999, 1, true),
            (1, 100, 2001, 1, false),
            (1, 100, 299, 2, true),
            (1, 100, 301, 2, false),
            (1, 9000, 1999, 2, true),
            (1, 9000, 2001, 2, false),
        ] {
            let answered = Answered {
                cr3: 1,
                at,
                took: Duration::from_millis(took),
                found: found[which].clone(),
            };
            let now = at + Duration::from_millis(since);
            assert_eq!(
                answered.serves(now, cr3),
                serves,
                "{answered:?} {since} {cr3}"
            );
        }
    }

    /// All who ask get the same memory, and who keeps it keeps no more than the last two.
    #[test]
    fn one_file_serves_all() {
        let kernel = KernelInfo {
            release: "6.1".to_owned(),
            kallsyms: "symbol\n".repeat(100_000),
        };
        let mut requests = KernelRequests::default();
        let mut done = |found| {
            requests.searching = Some((1, Instant::now()));
            let (_, answer) = requests.done(found);
            let again = requests.last.as_ref().map(|last| answer_of(&last.found));
            (answer.file, again.and_then(|answer| answer.file))
        };
        let (first, again) = done(Document::of(&kernel));
        let (first, again) = (first.unwrap(), again.unwrap());
        assert!(Arc::ptr_eq(&first, &again));
        // A refusal has none.
        assert!(done(Err(unknown("none".to_owned()))).0.is_none());
        let (second, _) = done(Document::of(&kernel));
        assert!(first.left() > 700_000, "somebody may be reading it");
        let (third, _) = done(Document::of(&kernel));
        let left = [first, second.unwrap(), third.unwrap()].map(|file| file.left() > 0);
        assert_eq!(left, [false, true, true]);
    }
}
