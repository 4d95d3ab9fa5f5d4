//! What the journal has, and what is not given meanwhile: it cannot be written, or holders of
//! before a restart may still count. Pure.

use std::collections::BTreeMap;

use arbiter_host::{BootTime, Lease, LeaseId, Reason};
use umpire_lease as wire;

use super::said::Denial;
use crate::journal::Entry;

#[derive(Debug, Default)]
pub(super) struct Kept {
    /// What each lease holds by the journal.
    holds: BTreeMap<LeaseId, usize>,
    /// Why the journal cannot be written.
    stuck: Option<String>,
    /// Until then nothing is granted: holders of before count on, and there is no journal.
    waits_until: BootTime,
}

impl Kept {
    /// The entries are in the journal.
    pub(super) fn written(&mut self, entries: &[Entry]) {
        for entry in entries {
            match entry {
                Entry::Lease(lease) => {
                    self.holds.insert(LeaseId(lease.id), lease.holds);
                }
                Entry::Ended(id) => {
                    self.holds.remove(&LeaseId(*id));
                }
                Entry::Next(_) | Entry::Barred(_) | Entry::Pardoned(_) => {}
            }
        }
    }

    /// The journal was written anew, with all that there is.
    pub(super) fn written_anew(&mut self, entries: &[Entry]) {
        self.stuck = None;
        self.holds.clear();
        self.written(entries);
    }

    /// It has these leases, of before a restart.
    pub(super) fn restore<'a>(&mut self, leases: impl Iterator<Item = &'a Lease>) {
        self.holds = leases.map(|lease| (lease.id, lease.holds)).collect();
    }

    /// What a lease holds by the journal.
    pub(super) fn holds(&self, id: LeaseId) -> usize {
        self.holds.get(&id).copied().unwrap_or(0)
    }

    /// What holds more than the journal says, or is not in it; and what it says.
    pub(super) fn unwritten<'a>(
        &self,
        leases: impl Iterator<Item = &'a Lease>,
    ) -> Vec<(LeaseId, usize)> {
        let more = leases.filter_map(|lease| match self.holds.get(&lease.id) {
            None => Some((lease.id, 0)),
            Some(&written) => (lease.holds > written).then_some((lease.id, written)),
        });
        more.collect()
    }

    /// Why the journal cannot be written.
    pub(super) fn stuck(&self) -> Option<&str> {
        self.stuck.as_deref()
    }

    /// The journal cannot be written.
    pub(super) fn set_stuck(&mut self, why: &str) {
        self.stuck = Some(why.to_owned());
    }

    /// Nothing is granted until then.
    pub(super) fn wait_until(&mut self, until: BootTime) {
        self.waits_until = until;
    }

    /// # Errors
    /// Holders of before a restart may still count.
    pub(super) fn grants_from(&self, now: BootTime) -> Result<(), Denial> {
        if now >= self.waits_until {
            return Ok(());
        }
        let ms = self.waits_until.since(now).0.div_ceil(1_000_000);
        let why = format!(
            "the arbiter was started anew and has no journal (--state), so holders of before may \
             still count; ask again in {ms} ms"
        );
        Err(wire::Refusal::of(Reason::Starting, why).into())
    }
}

/// The answer while the journal cannot be written.
pub(super) fn stuck(why: &str) -> Denial {
    Denial::JournalFailed(format!(
        "the arbiter cannot write its journal ({why}): what would rest on it is not given; see \
         that its disk has room"
    ))
}
