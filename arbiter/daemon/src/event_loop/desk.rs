//! The desk: the service, and what follows outside from what it has decided. The journal comes
//! first, so that nothing is told that is not kept; then the watchdog's switch, so that a counter
//! is free before somebody is told that it is; then the audit.

use std::os::fd::BorrowedFd;

use arbiter_host::BootTime;

use crate::audit::{Record, Trail, unix_ms};
use crate::commit::Committer;
use crate::group_watch::Groups;
use crate::host::HostFiles;
use crate::journal::{Recalled, Stored};
use crate::service::{Output, Service};
use crate::store::Store;
use crate::threads::{self, Threads};
use crate::watchdog::Switched;

#[derive(Debug)]
pub(super) struct Desk {
    service: Service,
    journal: Option<Committer<Store>>,
    host: HostFiles,
    threads: Threads,
    groups: Groups,
    trail: Option<Trail>,
}

impl Desk {
    pub(super) fn new(
        service: Service,
        store: Option<Store>,
        host: HostFiles,
        threads: Threads,
        groups: Groups,
    ) -> Self {
        Desk {
            service,
            journal: store.map(Committer::new),
            host,
            threads,
            groups,
            trail: None,
        }
    }

    /// What is decided from now on goes to the audit.
    pub(super) fn set_trail(&mut self, trail: Option<Trail>) {
        self.trail = trail;
    }

    pub(super) fn service(&self) -> &Service {
        &self.service
    }

    pub(super) fn service_mut(&mut self) -> &mut Service {
        &mut self.service
    }

    /// Whether leases are in a journal.
    pub(super) fn keeps_journal(&self) -> bool {
        self.journal.is_some()
    }

    /// Can be read from when a thread has ended.
    pub(super) fn threads_fd(&self) -> BorrowedFd<'_> {
        self.threads.as_fd()
    }

    pub(super) fn hear_threads(&mut self) {
        self.threads.hear();
    }

    /// Can be read from when something has changed in a control group.
    pub(super) fn groups_fd(&self) -> BorrowedFd<'_> {
        self.groups.as_fd()
    }

    pub(super) fn hear_groups(&mut self, now: BootTime) {
        self.groups.hear(now);
    }

    /// Takes over what was held before a restart.
    pub(super) fn restore(&mut self, recalled: Recalled, now: BootTime) {
        self.service.restore_bars(recalled.barred);
        let mut leases: Vec<Stored> = recalled.leases.into_values().collect();
        leases.iter_mut().for_each(threads::learn);
        self.service.restore(leases, recalled.next, now);
        self.threads.follow_all(&self.service);
        self.groups.follow_all(&self.service, now);
    }

    /// When the host is looked at next.
    pub(super) fn due(&self) -> u64 {
        self.host.due()
    }

    /// When the journal is tried again, if it could not be written.
    pub(super) fn tries_again(&self) -> Option<u64> {
        self.journal.as_ref()?.due(&self.service)
    }

    /// Looks which CPUs are online.
    pub(super) fn follow_cpus(&mut self, now: BootTime) {
        if let Some(online) = self.host.online(self.service.arbiter().pmus()) {
            self.service.set_online(&online, now);
        }
    }

    /// Looks which CPUs are online, and whether the watchdog is wanted: that only after the
    /// leases of before a restart are known.
    pub(super) fn look_at_host(&mut self, now: BootTime) {
        self.host.begin_look(now);
        self.follow_cpus(now);
        if self.host.watches() {
            let cpus = self.host.look_at_watchdog();
            self.service.set_watchdog(cpus, now);
            self.switch_watchdog(now);
        }
    }

    /// What is done now and then: looks at the host and at threads, and what was written goes to
    /// the disk.
    pub(super) fn look(&mut self, now: BootTime) {
        self.look_at_host(now);
        self.threads.look();
        self.groups.look(&self.service, now);
        if let Some(journal) = &mut self.journal {
            journal.sync(&self.service);
        }
        self.sync_audit(false);
    }

    /// Turns the watchdog on or off as its lease says.
    fn switch_watchdog(&mut self, now: BootTime) {
        let Some(on) = self.service.watchdog_on() else {
            return;
        };
        match self.host.switch_watchdog(on) {
            Switched::AsItWas => {}
            Switched::To { on } => {
                self.service.watchdog_switched(on);
                if !on {
                    self.service.set_watchdog_stuck(false, now);
                }
            }
            Switched::Failed(_) => self.service.set_watchdog_stuck(!on, now),
        }
    }

    /// Another configuration is in force: the watchdog has a lease by it, or has none.
    pub(super) fn follow_config(&mut self, now: BootTime) {
        if self.host.follow_config(self.service.config()) {
            self.service.set_watchdog(None, now);
        }
        if self.host.watches() {
            self.look_at_host(now);
        }
    }

    /// Has done what follows from decisions since the last time, up to the audit. Returns what is
    /// to be told of them then; `None`: there were none. `is_due`: something has to be decided
    /// before threads have ended, since somebody may have renewed in time.
    pub(super) fn settle(&mut self, is_due: bool, now: BootTime) -> Option<Output> {
        if !is_due && let Some(ended) = self.threads.take() {
            self.service.threads_ended(&ended, now);
        }
        if !is_due && let Some(ended) = self.groups.take() {
            self.service.groups_ended(&ended, now);
        }
        let mut output = self.service.take();
        let tries = self.tries_again().is_some_and(|at| at <= now.0);
        if output.is_empty() && !tries {
            return None;
        }
        self.threads.follow(&self.service, output.entries());
        self.groups.follow(&self.service, output.entries(), now);
        if let Some(journal) = &mut self.journal {
            output = journal.commit(&mut self.service, output, now);
            if self.service.stuck().is_some() {
                self.threads.follow_all(&self.service);
                self.groups.follow_all(&self.service, now);
            }
            self.threads.follow(&self.service, output.entries());
            self.groups.follow(&self.service, output.entries(), now);
        }
        self.switch_watchdog(now);
        Some(output)
    }

    /// Writes what was decided to the audit. Whether that is there, if it is to be anywhere.
    pub(super) fn audit(&mut self, records: Vec<Record>) -> bool {
        let Some(trail) = &mut self.trail else {
            return true;
        };
        trail.share_among(self.service.config().members.len());
        let kept = trail.append(records, unix_ms());
        self.service.metrics().audited(kept.written, kept.lost);
        kept.lost == 0
    }

    /// Has the audit put on the disk: at the end of the service with a wait for it, else
    /// without.
    fn sync_audit(&mut self, ends: bool) {
        let Some(trail) = &mut self.trail else {
            return;
        };
        let synced = if ends { trail.finish() } else { trail.sync() };
        if let Err(error) = synced {
            log::error!(
                "the audit does not get to the disk: {error}; its last records are lost if the \
                 host ends; see to the disk"
            );
            self.service.metrics().audit_not_synced();
        }
    }

    /// The service ends. Whether somebody counts on, of whom no journal tells.
    pub(super) fn end(&mut self) -> bool {
        self.host.end(self.service.needs_watchdogs_counter());
        self.sync_audit(true);
        self.journal.is_none() && self.service.has_holders()
    }
}
