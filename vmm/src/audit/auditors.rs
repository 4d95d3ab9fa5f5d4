//! Where decisions are noted, and wait for the writer of the audit file.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::Instant;

use arbiter::{Auditor, Record};
use pmu_virt::perfmon::{HostAudit, HostRecord};

use super::decisions::{DecisionTable, Entry, Totals};
use super::line::HostLine;
use crate::sync::lock;

/// Calls the writer, without waiting for it.
#[derive(Debug, Clone)]
pub(super) struct Notifier(SyncSender<()>);

impl Notifier {
    /// With the writer's end.
    pub(super) fn new() -> (Self, Receiver<()>) {
        let (send, receive) = sync_channel(1);
        (Self(send), receive)
    }

    pub(super) fn notify(&self) {
        // One that has rung already, and one that nobody hears, are both fine.
        let _ = self.0.try_send(());
    }
}

/// Decisions that may wait for the writer, of all cores together. Tools make
/// them, one by one through the socket; what is beyond is only counted.
const MOST_WAITING: usize = 1024;

/// A decision with its time.
#[derive(Debug)]
pub(super) struct Note {
    time_ns: u64,
    core: u16,
    record: HostRecord,
}

/// Where the decisions of all cores come from.
#[derive(Debug)]
pub(super) struct Inbox {
    notes: Receiver<Note>,
    missed: Arc<AtomicU64>,
}

/// Where they are put.
#[derive(Debug, Clone)]
pub(super) struct Outbox {
    notes: SyncSender<Note>,
    missed: Arc<AtomicU64>,
}

/// Both ends.
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
    /// What has come since the last time, as lines, each with the decisions that
    /// it stands for.
    pub(super) fn take(&self, now: u64) -> Vec<(HostLine, u64)> {
        let notes = self.notes.try_iter().take(MOST_WAITING);
        let mut lines: Vec<_> = notes
            .map(|note| (HostLine::new(note.time_ns, note.core, &note.record), 1))
            .collect();
        let missed = self.missed.swap(0, Ordering::Relaxed);
        if missed > 0 {
            lines.push((HostLine::missed(now, missed), missed));
        }
        lines
    }
}

/// Notes decisions of one core. It waits for nothing.
#[derive(Debug, Clone)]
pub struct HostAuditor {
    pub(super) start: Instant,
    pub(super) core: u16,
    /// None without a file.
    pub(super) file: Option<(Outbox, Notifier)>,
}

impl HostAudit for HostAuditor {
    fn record(&mut self, record: &HostRecord) {
        let Some((outbox, notifier)) = &self.file else {
            return;
        };
        let note = Note {
            time_ns: u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX),
            core: self.core,
            record: record.clone(),
        };
        if outbox.notes.try_send(note).is_err() {
            outbox.missed.fetch_add(1, Ordering::Relaxed);
        }
        notifier.notify();
    }
}

/// Where one vCPU's decisions wait for the writer: two tables, of which the writer
/// looks at one at a time, so that the vCPU finds the other one free.
#[derive(Debug)]
pub(super) struct Trail(pub(super) [Mutex<DecisionTable>; 2]);

impl Trail {
    pub(super) fn new(tally: impl Fn() -> DecisionTable) -> Self {
        Self([Mutex::new(tally()), Mutex::new(tally())])
    }

    /// Notes the `order`th decision of the vCPU; true if the writer is to look.
    fn note(&self, now: u64, order: u64, record: &Record) -> bool {
        loop {
            for table in &self.0 {
                match table.try_lock() {
                    Ok(mut tally) => return tally.note(now, order, record),
                    Err(TryLockError::Poisoned(tally)) => {
                        return tally.into_inner().note(now, order, record);
                    }
                    Err(TryLockError::WouldBlock) => {}
                }
            }
            // The writer has just gone from one to the other.
            std::hint::spin_loop();
        }
    }

    /// What is due at `now`, or everything at the end. The second table has what
    /// was noted while the first one was looked at, so it comes after it.
    pub(super) fn take(&self, now: u64, all: bool) -> Vec<Entry> {
        let taken = self.0.iter().map(|table| lock(table).take(now, all));
        let mut entries: Vec<Entry> = taken.flatten().collect();
        entries.sort_by_key(|entry| entry.order);
        entries
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

/// Notes one vCPU's decisions. It waits for nothing: while the writer looks at one
/// table, decisions are noted in the other.
#[derive(Debug)]
pub struct VcpuAuditor {
    start: Instant,
    trail: Arc<Trail>,
    notifier: Option<Notifier>,
    order: u64,
}

impl VcpuAuditor {
    pub(super) fn new(start: Instant, trail: Arc<Trail>, notifier: Option<Notifier>) -> Self {
        Self {
            start,
            trail,
            notifier,
            order: 0,
        }
    }
}

impl Auditor for VcpuAuditor {
    fn record(&mut self, record: &Record) {
        let now = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.order += 1;
        let due = self.trail.note(now, self.order, record);
        if let (true, Some(notifier)) = (due, &self.notifier) {
            notifier.notify();
        }
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
        let lines = inbox.take(9);
        assert_eq!(lines.len(), MOST_WAITING + 1);
        assert_eq!(
            lines.iter().map(|(_, decisions)| decisions).sum::<u64>(),
            1027
        );
        assert!(inbox.take(10).is_empty());
    }
}
