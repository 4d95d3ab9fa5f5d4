//! What outlives the service: what is in the journal, what becomes of decisions that could
//! not be written, and what was held before a restart.

use arbiter_host::{BootTime, LeaseId};
use serde_json::json;
use varlink::Reply;

use super::{Answer, Output, Service, error, refusal};
use crate::config::WATCHDOG;
use crate::convert;
use crate::journal::Entry;

impl Service {
    /// All that a journal has to say.
    pub(crate) fn all(&self) -> Vec<Entry> {
        let leases = self
            .arbiter
            .leases()
            .map(|lease| Entry::Lease(Box::new(convert::stored(&self.arbiter, lease))));
        let next = Entry::Next(self.arbiter.next_id());
        std::iter::once(next)
            .chain(leases)
            .chain(self.bars())
            .collect()
    }

    /// Takes over what was held before a restart.
    pub(crate) fn restore(
        &mut self,
        leases: Vec<crate::journal::Stored>,
        next: u64,
        now: BootTime,
    ) {
        let mut recalled = Vec::new();
        for stored in leases {
            if stored.tenant == WATCHDOG {
                // It asks anew: it may be off by now.
                self.output.entries.push(Entry::Ended(stored.id));
                continue;
            }
            match convert::recalled(&self.arbiter, &stored) {
                Some(lease) => recalled.push(lease),
                None => {
                    let (id, label) = (stored.id, &stored.label);
                    log::error!("lease {id} of '{label}' has ended: the host's PMUs have changed");
                    self.output.entries.push(Entry::Ended(id));
                }
            }
        }
        let window = self.config.claim_window;
        let lost = self
            .arbiter
            .restore(recalled, next, window, now, &mut self.changes);
        for id in lost {
            log::error!(
                "lease {} has ended: the host's counters are not those of before",
                id.0
            );
            self.output.entries.push(Entry::Ended(id.0));
        }
        let held = self.arbiter.leases().map(|lease| (lease.id, lease.holds));
        self.written = held.collect();
        for (id, holds) in &self.written {
            self.metrics.restored(*id, *holds);
        }
        self.settle();
        self.end_barred(now);
    }

    /// There may be holders of before a restart, and no journal says what they hold: nothing
    /// is granted for as long as they may take to find out.
    pub(crate) fn wait_for_holders(&mut self, now: BootTime) {
        self.waits_until = now.after(self.config.claim_window);
        let ms = self.config.claim_window.0 / 1_000_000;
        log::warn!(
            "an arbiter was here before, and there is no journal of what it gave (--state): \
             nothing is granted for {ms} ms, in which its holders find out"
        );
    }

    /// Whether that time is over.
    pub(super) fn grants_from(&self, now: BootTime) -> Result<(), Reply> {
        if now >= self.waits_until {
            return Ok(());
        }
        let ms = self.waits_until.since(now).0.div_ceil(1_000_000);
        let why = format!(
            "the arbiter was started anew and has no journal (--state), so holders of before may \
             still count; ask again in {ms} ms"
        );
        Err(refusal("starting".to_owned(), why))
    }

    /// Whether somebody holds something, but for the watchdog.
    pub(crate) fn has_holders(&self) -> bool {
        let mut leases = self.arbiter.leases();
        leases.any(|lease| lease.holds > 0 && !self.is_watchdog(lease.id))
    }

    /// The entries are in the journal.
    pub(crate) fn written(&mut self, entries: &[Entry]) {
        for entry in entries {
            match entry {
                Entry::Lease(lease) => {
                    self.written.insert(LeaseId(lease.id), lease.holds);
                }
                Entry::Ended(id) => {
                    self.written.remove(&LeaseId(*id));
                }
                Entry::Next(_) | Entry::Barred(_) | Entry::Pardoned(_) => {}
            }
        }
    }

    /// The journal could not be written. What would hold more than the journal says is taken
    /// back, and nothing is granted until [`Service::writable`]. What has ended meanwhile is
    /// in the journal still, but nobody else has got it.
    pub(crate) fn unwritten(&mut self, output: &mut Output, why: &str, now: BootTime) {
        self.stuck = Some(why.to_owned());
        self.metrics.journal_errors.inc();
        self.arbiter.freeze();
        let taken_back: Vec<(LeaseId, usize)> = self
            .arbiter
            .leases()
            .filter_map(|lease| match self.written.get(&lease.id) {
                None => Some((lease.id, 0)),
                Some(&written) => (lease.holds > written).then_some((lease.id, written)),
            })
            .collect();
        for (id, written) in taken_back {
            if written == 0 {
                if let Some(listener) = self.listeners.get(&id).filter(|listener| listener.waits) {
                    let to = listener.connection;
                    let reply = stuck(why);
                    output.answers.push(Answer {
                        to,
                        reply,
                        rests_on: None,
                        audited: false,
                    });
                }
                self.remove_listener(id);
                self.arbiter.holder_gone(id, now, &mut self.changes);
            } else {
                self.arbiter.take_back(id, written, now, &mut self.changes);
            }
        }
        // Whoever asked is told; an event that is not true is not told.
        output.answers.retain_mut(|answer| {
            let Some(id) = answer.rests_on else {
                return true;
            };
            let listener = self.listeners.get(&id);
            let is_event = listener.is_some_and(|listener| listener.connection == answer.to)
                && answer.reply.continues == Some(true);
            answer.reply = stuck(why);
            !is_event
        });
        self.settle();
        // The journal is written anew as a whole, so these are not needed.
        self.output.entries.clear();
    }

    /// Why the journal cannot be written.
    pub(crate) fn stuck(&self) -> Option<&str> {
        self.stuck.as_deref()
    }

    /// The journal was written anew, with all that there is.
    pub(crate) fn writable(&mut self, entries: &[Entry], now: BootTime) {
        self.stuck = None;
        self.written.clear();
        self.written(entries);
        // The watchdog is on, whether its lease was lost meanwhile or not: it comes first.
        self.follow_watchdog(now);
        self.arbiter.thaw(now, &mut self.changes);
        self.settle();
    }
}

/// The answer while the journal cannot be written.
pub(super) fn stuck(why: &str) -> Reply {
    let message = format!(
        "the arbiter cannot write its journal ({why}): what would rest on it is not given; see \
         that its disk has room"
    );
    error("JournalFailed", &json!({ "message": message }))
}
