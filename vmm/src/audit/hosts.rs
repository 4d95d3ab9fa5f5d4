//! Decisions about host contexts, on their way to the audit file.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

use pmu_virt::perfmon::{HostAudit, HostEvent, HostRecord, Standing};
use serde::Serialize;

use super::writer::Bell;

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
        let mut lines: Vec<_> = notes.map(|note| (HostLine::new(&note), 1)).collect();
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
    pub(super) file: Option<(Outbox, Bell)>,
}

impl HostAudit for HostAuditor {
    fn record(&mut self, record: &HostRecord) {
        let Some((outbox, bell)) = &self.file else {
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
        bell.ring();
    }
}

/// A line of the file.
#[derive(Debug, Serialize)]
pub(super) struct HostLine {
    time_ns: u64,
    layer: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    core: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vcpu: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<u32>,
    event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    standing: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    errno: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    blind_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    count: Option<u64>,
}

impl HostLine {
    fn new(note: &Note) -> Self {
        let record = &note.record;
        let line = HostLine {
            core: Some(note.core),
            vcpu: record.vcpu.map(|vcpu| vcpu.0),
            context: Some(record.context.0),
            ..HostLine::of(note.time_ns, "context-unloaded")
        };
        match &record.event {
            HostEvent::Loaded { standing } => HostLine {
                event: "context-loaded",
                standing: Some(match standing {
                    Standing::Firm => "firm",
                    Standing::Spare => "spare",
                }),
                ..line
            },
            HostEvent::Refused { refusal } => HostLine {
                event: "context-refused",
                errno: Some(refusal.errno.name()),
                why: Some(refusal.reason.to_string()),
                ..line
            },
            HostEvent::Unloaded => line,
            HostEvent::Preempted => HostLine {
                event: "context-preempted",
                ..line
            },
            HostEvent::Restored { blind_ns } => HostLine {
                event: "context-restored",
                blind_ns: Some(*blind_ns),
                ..line
            },
            HostEvent::Overdrawn => HostLine {
                event: "context-overdrawn",
                ..line
            },
        }
    }

    /// Decisions that found no room to wait in.
    fn missed(now: u64, missed: u64) -> Self {
        HostLine {
            count: Some(missed),
            ..HostLine::of(now, "contexts-untold")
        }
    }

    fn of(time_ns: u64, event: &'static str) -> Self {
        HostLine {
            time_ns,
            layer: "tool",
            core: None,
            vcpu: None,
            context: None,
            event,
            standing: None,
            errno: None,
            why: None,
            blind_ns: None,
            count: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perfmon_abi::wire::{Errno, Refusal};
    use pmu_virt::OwnerId;
    use pmu_virt::perfmon::ContextId;

    fn text(vcpu: Option<u32>, event: HostEvent) -> String {
        let line = HostLine::new(&Note {
            time_ns: 5,
            core: 1,
            record: HostRecord {
                context: ContextId(7),
                vcpu: vcpu.map(OwnerId),
                event,
            },
        });
        serde_json::to_string(&line).unwrap()
    }

    #[test]
    fn lines_tell_what_was_decided() {
        let refusal = Refusal::new(Errno::EBUSY, "no room");
        let table = [
            (
                text(
                    Some(2),
                    HostEvent::Loaded {
                        standing: Standing::Spare,
                    },
                ),
                r#"{"time_ns":5,"layer":"tool","core":1,"vcpu":2,"context":7,"event":"context-loaded","standing":"spare"}"#,
            ),
            (
                text(None, HostEvent::Refused { refusal }),
                r#"{"time_ns":5,"layer":"tool","core":1,"context":7,"event":"context-refused","errno":"EBUSY","why":"no room"}"#,
            ),
            (
                text(None, HostEvent::Restored { blind_ns: 9 }),
                r#"{"time_ns":5,"layer":"tool","core":1,"context":7,"event":"context-restored","blind_ns":9}"#,
            ),
        ];
        for (found, expected) in table {
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_tool_that_is_faster_than_the_writer_is_counted() {
        let (outbox, inbox) = mailbox();
        let bell = Bell::silent();
        let mut auditor = HostAuditor {
            start: Instant::now(),
            core: 0,
            file: Some((outbox, bell)),
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
