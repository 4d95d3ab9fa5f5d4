//! Auditors note decisions. The decisions wait here for the writer of the audit file.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::Instant;

use arbiter::{AskRecord, Auditor, Record};
use pmu_virt::perfmon::{HostAudit, HostRecord};
use umpire_audit::ContextLine;

use super::decisions::{AskEntry, AuditTime, DecisionTable, Entry, Totals};
use super::line;
use crate::sync::lock;

/// Wakes the writer. Never waits.
#[derive(Debug, Clone)]
pub(super) struct Notifier(SyncSender<()>);

impl Notifier {
    /// A notifier, and the writer's end of it.
    pub(super) fn new() -> (Self, Receiver<()>) {
        let (send, receive) = sync_channel(1);
        (Self(send), receive)
    }

    pub(super) fn notify(&self) {
        // The writer may have been woken already, or may have ended.
        let _ = self.0.try_send(());
    }
}

/// Most decisions about host contexts that wait for the writer, of all cores together.
/// Tools cause them one by one through the socket. Further ones are only counted.
const MOST_WAITING: usize = 1024;

/// A decision about a host context, with its time.
#[derive(Debug)]
pub(super) struct Note {
    time: AuditTime,
    core: u16,
    record: HostRecord,
}

/// The writer's end of the way that decisions of all cores take.
#[derive(Debug)]
pub(super) struct Inbox {
    notes: Receiver<Note>,
    missed: Arc<AtomicU64>,
}

/// A core's end of that way.
#[derive(Debug, Clone)]
pub(super) struct Outbox {
    notes: SyncSender<Note>,
    missed: Arc<AtomicU64>,
}

/// Both ends of a new way.
pub(super) fn mailbox() -> (Outbox, Inbox) {
    let (send, receive) = sync_channel(MOST_WAITING);
    let missed = Arc::new(AtomicU64::new(0));
    let outbox = Outbox {
        notes: send,
        missed: missed.clone(),
    };
    let inbox = Inbox {
        notes: receive,
        missed,
    };
    (outbox, inbox)
}

impl Inbox {
    /// The decisions since the last call as lines. Beside each line is the number of
    /// decisions that it stands for.
    pub(super) fn take(&self, now: AuditTime) -> Vec<(ContextLine, u64)> {
        let notes = self.notes.try_iter().take(MOST_WAITING);
        let mut lines: Vec<_> = notes
            .map(|note| (line::context(note.time, note.core, &note.record), 1))
            .collect();
        let missed = self.missed.swap(0, Ordering::Relaxed);
        if missed > 0 {
            lines.push((line::missed(now, missed), missed));
        }
        lines
    }
}

/// Notes decisions about host contexts on one core. Never waits.
#[derive(Debug, Clone)]
pub struct HostAuditor {
    pub(super) start: Instant,
    pub(super) core: u16,
    /// `None`: there is no audit file.
    pub(super) file: Option<(Outbox, Notifier)>,
}

impl HostAudit for HostAuditor {
    fn record(&mut self, record: &HostRecord) {
        let Some((outbox, notifier)) = &self.file else {
            return;
        };
        let note = Note {
            time: AuditTime::now(self.start),
            core: self.core,
            record: record.clone(),
        };
        if outbox.notes.try_send(note).is_err() {
            outbox.missed.fetch_add(1, Ordering::Relaxed);
        }
        notifier.notify();
    }
}

/// One vCPU's decisions that wait for the writer. There are two tables. The writer
/// locks one at a time, so the vCPU finds the other one free.
#[derive(Debug)]
pub(super) struct Trail(pub(super) [Mutex<DecisionTable>; 2]);

impl Trail {
    pub(super) fn new(table: impl Fn() -> DecisionTable) -> Self {
        Self([Mutex::new(table()), Mutex::new(table())])
    }

    /// Has `note` note something in the table that is free. Returns what it returns.
    fn note(&self, note: impl Fn(&mut DecisionTable) -> bool) -> bool {
        loop {
            for table in &self.0 {
                match table.try_lock() {
                    Ok(mut free) => return note(&mut free),
                    Err(TryLockError::Poisoned(free)) => return note(&mut free.into_inner()),
                    Err(TryLockError::WouldBlock) => {}
                }
            }
            // The writer has just gone from one table to the other.
            std::hint::spin_loop();
        }
    }

    /// The entries that are due at `now`, or all of them at the end. What is noted
    /// while the first table is locked goes into the second one, so that one is read
    /// last.
    pub(super) fn take(&self, now: AuditTime, all: bool) -> Vec<Entry> {
        let taken = self.0.iter().map(|table| lock(table).take(now, all));
        let mut entries: Vec<Entry> = taken.flatten().collect();
        entries.sort_by_key(|entry| entry.order);
        entries
    }

    /// What layers asked for since the last call.
    pub(super) fn take_asks(&self) -> Vec<AskEntry> {
        let taken = self.0.iter().map(|table| lock(table).take_asks());
        let mut asks: Vec<AskEntry> = taken.flatten().collect();
        asks.sort_by_key(|entry| entry.number);
        asks
    }

    /// All decisions so far.
    pub(super) fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for table in &self.0 {
            totals.add(lock(table).totals());
        }
        totals
    }
}

/// Notes one vCPU's decisions. Never waits: while the writer has one table, decisions
/// go into the other.
#[derive(Debug)]
pub struct VcpuAuditor {
    start: Instant,
    trail: Arc<Trail>,
    notifier: Option<Notifier>,
    order: u64,
    asks: u64,
}

impl VcpuAuditor {
    pub(super) fn new(start: Instant, trail: Arc<Trail>, notifier: Option<Notifier>) -> Self {
        Self {
            start,
            trail,
            notifier,
            order: 0,
            asks: 0,
        }
    }

    /// Wakes the writer if something is due.
    fn notify(&self, due: bool) {
        if let (true, Some(notifier)) = (due, &self.notifier) {
            notifier.notify();
        }
    }
}

impl Auditor for VcpuAuditor {
    fn record(&mut self, record: &Record) {
        let now = AuditTime::now(self.start);
        self.order += 1;
        let order = self.order;
        let due = self.trail.note(|table| table.note(now, order, record));
        self.notify(due);
    }

    fn asked(&mut self, ask: &AskRecord) {
        self.asks += 1;
        let entry = AskEntry {
            time: AuditTime::now(self.start),
            number: self.asks,
            ask: *ask,
        };
        let due = self.trail.note(|table| table.note_ask(entry));
        self.notify(due);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pmu_virt::perfmon::{ContextId, HostEvent};

    #[test]
    fn a_tool_that_is_faster_than_the_writer_is_counted() {
        let (outbox, inbox) = mailbox();
        let notifier = Notifier::new().0;
        let mut auditor = HostAuditor {
            start: Instant::now(),
            core: 0,
            file: Some((outbox, notifier)),
        };
        let record = HostRecord {
            context: ContextId(1),
            vcpu: None,
            event: HostEvent::Unloaded,
        };
        for _ in 0..MOST_WAITING + 3 {
            auditor.record(&record);
        }
        let lines = inbox.take(AuditTime(9));
        assert_eq!(lines.len(), MOST_WAITING + 1);
        assert_eq!(
            lines.iter().map(|(_, decisions)| decisions).sum::<u64>(),
            1027
        );
        assert!(inbox.take(AuditTime(10)).is_empty());
    }
}
