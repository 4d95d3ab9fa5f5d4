//! When what was decided is written, and what becomes of it if it cannot be.

use std::io;

use arbiter_host::BootTime;

use crate::journal::Entry;
use crate::service::{Output, Service};

/// Between two tries to write a journal that could not be written, in nanoseconds.
const TRIES: u64 = 100_000_000;

/// Where entries are kept.
pub(crate) trait Journal {
    /// Writes records: once it returns they survive this process. If it fails, none of them
    /// is in the journal.
    fn append(&mut self, entries: &[Entry]) -> io::Result<()>;

    /// Writes the journal anew with just these records.
    fn compact(&mut self, entries: &[Entry]) -> io::Result<()>;

    /// Whether the journal is much longer than what it says.
    fn is_long(&self) -> bool;

    /// Has what was written put on the disk, without a wait for it. Fails if the disk did not
    /// take what was written before, once for each time.
    fn sync(&mut self) -> io::Result<()>;
}

/// A journal, and when it is tried again.
#[derive(Debug)]
pub(crate) struct Committer<J> {
    journal: J,
    tries_again: u64,
    /// The disk did not take what was written, and it was not written anew since.
    lost: bool,
}

impl<J: Journal> Committer<J> {
    pub(crate) fn new(journal: J) -> Self {
        Committer {
            journal,
            tries_again: 0,
            lost: false,
        }
    }

    #[cfg(test)]
    pub(crate) fn journal_mut(&mut self) -> &mut J {
        &mut self.journal
    }

    /// When a journal that could not be written is tried again.
    pub(crate) fn due(&self, service: &Service) -> Option<u64> {
        let lost = self.lost.then_some(0);
        lost.or(service.stuck().map(|_| self.tries_again))
    }

    /// Has what was written put on the disk in the background. What the disk did not take
    /// is written anew by the next [`Committer::commit`], which is due at once.
    pub(crate) fn sync(&mut self, service: &Service) {
        if let Err(error) = self.journal.sync() {
            log::error!("the journal does not get to the disk: {error}; it is written anew");
            service.metrics().journal_failed();
            self.lost = true;
        }
    }

    /// Writes what `output` rests on, or takes it back. Returns what may be told then.
    pub(crate) fn commit(
        &mut self,
        service: &mut Service,
        mut output: Output,
        now: BootTime,
    ) -> Output {
        let lost = std::mem::take(&mut self.lost);
        if lost || service.stuck().is_some() && now.0 >= self.tries_again {
            // What was not written is in none of the batches: all that there is, is.
            let all = service.all();
            match self.journal.compact(&all) {
                Ok(()) => {
                    log::info!("the journal is written again");
                    service.writable(&all, now);
                    output.forget_entries();
                    output.add(service.take());
                }
                Err(error) => {
                    log::debug!("the journal still cannot be written: {error}");
                    self.tries_again = now.0.saturating_add(TRIES);
                    if service.stuck().is_none() {
                        return service.unwritten(output, &error.to_string(), now);
                    }
                }
            }
        }
        if let Some(why) = service.stuck().map(str::to_owned) {
            return service.unwritten(output, &why, now);
        }
        match self.journal.append(output.entries()) {
            Ok(()) => service.written(output.entries()),
            Err(error) => {
                log::error!(
                    "the journal cannot be written: {error}; nothing is granted until it can"
                );
                self.tries_again = now.0.saturating_add(TRIES);
                return service.unwritten(output, &error.to_string(), now);
            }
        }
        if self.journal.is_long()
            && let Err(error) = self.journal.compact(&service.all())
        {
            log::warn!("the journal cannot be written anew: {error}; it grows");
        }
        output
    }
}
