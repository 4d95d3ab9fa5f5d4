//! The trails of a machine's vCPUs, and the end of them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

use arbiter::{Auditor, Record};

use super::hosts::{HostAuditor, Outbox, mailbox};
use super::line::Header;
use super::summary::{Holding, Summary};
use super::tally::{Entry, Tally, Totals};
use super::writer::{AuditError, Bell, Writer};
use crate::kvm::VcpuId;

/// Where one vCPU's decisions wait for the writer: two tables, of which the writer
/// looks at one at a time, so that the vCPU finds the other one free.
#[derive(Debug)]
pub(super) struct Trail([Mutex<Tally>; 2]);

impl Trail {
    fn new(tally: impl Fn() -> Tally) -> Self {
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

/// The audit of one machine.
#[derive(Debug)]
pub struct AuditTrail {
    start: Instant,
    trails: Vec<Arc<Trail>>,
    writer: Mutex<Option<Writer>>,
    bell: Option<Bell>,
    hosts: Option<Outbox>,
    holdings: Mutex<BTreeMap<VcpuId, Vec<Holding>>>,
}

impl AuditTrail {
    /// One that only adds up.
    #[must_use]
    pub fn new(vcpus: u8) -> Self {
        let trail = |_| Arc::new(Trail::new(Tally::totals_only));
        Self {
            start: Instant::now(),
            trails: (0..vcpus).map(trail).collect(),
            writer: Mutex::new(None),
            bell: None,
            hosts: None,
            holdings: Mutex::default(),
        }
    }

    /// One that is written to the file at `path`, whose first line is `header`.
    /// A file that is there is replaced.
    ///
    /// # Errors
    /// [`AuditError`]: the file cannot be made, or there is no thread for it.
    pub fn to_file(vcpus: u8, path: &Path, header: &Header) -> Result<Self, AuditError> {
        let start = Instant::now();
        let trail = |_| Arc::new(Trail::new(Tally::default));
        let trails: Vec<_> = (0..vcpus).map(trail).collect();
        let (hosts, inbox) = mailbox();
        let writer = Writer::start(path, header, start, (trails.clone(), inbox))?;
        Ok(Self {
            hosts: Some(hosts),
            bell: Some(writer.bell()),
            writer: Mutex::new(Some(writer)),
            start,
            trails,
            holdings: Mutex::default(),
        })
    }

    /// What each vCPU's reservations report to, from vCPU 0 on.
    pub fn auditors(&self) -> impl Iterator<Item = VcpuAuditor> {
        self.trails.iter().map(|trail| VcpuAuditor {
            start: self.start,
            trail: trail.clone(),
            bell: self.bell.clone(),
            order: 0,
        })
    }

    /// What decisions about host contexts on `core` are reported to.
    #[must_use]
    pub fn host_auditor(&self, core: u16) -> HostAuditor {
        HostAuditor {
            start: self.start,
            core,
            file: self.hosts.clone().zip(self.bell.clone()),
        }
    }

    /// Who held what on `vcpu` when it ended.
    pub fn keep(&self, vcpu: VcpuId, holdings: Vec<Holding>) {
        lock(&self.holdings).insert(vcpu, holdings);
    }

    /// Writes what is left, once all vCPUs have ended, and sums up.
    ///
    /// # Errors
    /// The file is not complete.
    pub fn finish(&self) -> (Summary, Result<(), AuditError>) {
        let writer = lock(&self.writer).take();
        let written = writer.map_or(Ok(()), Writer::finish);
        let holdings = std::mem::take(&mut *lock(&self.holdings));
        let totals = self.trails.iter().map(|trail| trail.totals());
        (Summary::new(totals.collect(), holdings), written)
    }
}

/// Notes one vCPU's decisions. It waits for nothing: while the writer looks at one
/// table, decisions are noted in the other.
#[derive(Debug)]
pub struct VcpuAuditor {
    start: Instant,
    trail: Arc<Trail>,
    bell: Option<Bell>,
    order: u64,
}

impl Auditor for VcpuAuditor {
    fn record(&mut self, record: &Record) {
        let now = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.order += 1;
        let due = self.trail.note(now, self.order, record);
        if let (true, Some(bell)) = (due, &self.bell) {
            bell.ring();
        }
    }
}

/// What is behind these locks is whole after every step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use arbiter::{CounterId, Event, Layer, Reason};
    use pmu_virt::PmuModel;
    use serde_json::Value;

    use super::*;

    fn record(position: u8, event: Event) -> Record {
        Record {
            layer: Layer::GuestKernel,
            counter: CounterId::at_position(position),
            event,
        }
    }

    fn lines(path: &Path) -> Vec<Value> {
        let text = fs::read_to_string(path).unwrap();
        let lines = text.lines().map(serde_json::from_str);
        lines.collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn all_that_was_noted_is_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit");
        let header = Header::now(2, &PmuModel::parse("intel-v2").unwrap());
        let audit = AuditTrail::to_file(2, &path, &header).unwrap();
        std::thread::scope(|scope| {
            for mut auditor in audit.auditors() {
                scope.spawn(move || {
                    for round in 0..50_000_u32 {
                        let event = Event::DroppedWrite(Reason::Held);
                        let position = u8::try_from(round % 4).unwrap();
                        auditor.record(&record(position, event));
                    }
                    auditor.record(&record(0, Event::Released));
                });
            }
        });
        let (summary, written) = audit.finish();
        written.unwrap();
        assert_eq!(summary.decisions(), 100_002);
        let lines = lines(&path);
        assert_eq!(lines[0]["format"], "umpire-audit");
        assert_eq!(lines[0]["vcpus"], 2);
        let last = lines.last().unwrap();
        assert_eq!(
            (&last["end"], &last["decisions"]),
            (&true.into(), &100_002.into())
        );
        let decisions = &lines[1..lines.len() - 1];
        assert_eq!(last["lines"], decisions.len());
        let sum: u64 = decisions
            .iter()
            .map(|line| line.get("count").map_or(1, |n| n.as_u64().unwrap()))
            .sum();
        assert_eq!(sum, 100_002);
        // Some kinds, some seconds: not a line for each.
        assert!(decisions.len() < 200, "{}", decisions.len());
    }

    #[test]
    fn a_writer_at_work_neither_holds_up_a_vcpu_nor_misses_its_last_decision() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let header = Header::now(1, &PmuModel::parse("intel-v2").unwrap());
        let audit = AuditTrail::to_file(1, path.path(), &header).unwrap();
        let mut auditor = audit.auditors().next().unwrap();
        for held in [0, 1] {
            let held = lock(&audit.trails[0].0[held]);
            auditor.record(&record(0, Event::Renewed));
            auditor.record(&record(0, Event::Released));
            drop(held);
        }
        // Without a further decision, and before the end.
        let since = Instant::now();
        while lines(path.path()).len() < 5 {
            assert!(since.elapsed().as_secs() < 20, "not in the file");
            std::thread::yield_now();
        }
        let events: Vec<Value> = lines(path.path())[1..]
            .iter()
            .map(|l| l["event"].clone())
            .collect();
        assert_eq!(events, ["renewed", "released", "renewed", "released"]);
        drop(auditor);
        assert_eq!(audit.finish().0.decisions(), 4);
    }

    #[test]
    fn who_held_a_counter_when_can_be_told_from_the_file() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let header = Header::now(1, &PmuModel::parse("intel-v2").unwrap());
        let audit = AuditTrail::to_file(1, path.path(), &header).unwrap();
        let mut auditor = audit.auditors().next().unwrap();
        for _ in 0..100 {
            auditor.record(&record(2, Event::Reserved { lease_ms: None }));
            auditor.record(&record(2, Event::Released));
        }
        audit.finish().1.unwrap();
        let lines = lines(path.path());
        assert_eq!(lines.len(), 1 + 200 + 1);
        let changes = &lines[1..201];
        assert!(changes.iter().all(|line| line.get("count").is_none()));
        let words = changes.chunks(2);
        for pair in words {
            assert_eq!(pair[0]["event"], "reserved");
            assert_eq!(pair[1]["event"], "released");
            assert!(pair[0]["time_ns"].as_u64() <= pair[1]["time_ns"].as_u64());
        }
    }

    #[test]
    fn a_full_disk_is_told_with_what_is_missing() {
        let header = Header::now(1, &PmuModel::parse("intel-v2").unwrap());
        let audit = AuditTrail::to_file(1, Path::new("/dev/full"), &header);
        let error = match audit {
            Err(error) => error,
            Ok(audit) => {
                audit
                    .auditors()
                    .next()
                    .unwrap()
                    .record(&record(0, Event::Released));
                audit.finish().1.unwrap_err()
            }
        };
        let text = error.to_string();
        assert!(text.contains("--audit: cannot write /dev/full"), "{text}");
    }
}
