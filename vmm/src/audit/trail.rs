//! The trails of a machine's vCPUs, and the end of them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

use arbiter::{Auditor, Record};

use super::line::Header;
use super::summary::{Holding, Summary};
use super::tally::Tally;
use super::writer::{AuditError, Bell, Writer};
use crate::kvm::VcpuId;

/// Where one vCPU's decisions wait for the writer.
pub(super) type Trail = Mutex<Tally>;

/// The audit of one machine.
#[derive(Debug)]
pub struct AuditTrail {
    start: Instant,
    trails: Vec<Arc<Trail>>,
    writer: Mutex<Option<Writer>>,
    bell: Option<Bell>,
    holdings: Mutex<BTreeMap<VcpuId, Vec<Holding>>>,
}

impl AuditTrail {
    /// One that only adds up.
    #[must_use]
    pub fn new(vcpus: u8) -> Self {
        let tally = |_| Arc::new(Mutex::new(Tally::totals_only()));
        Self {
            start: Instant::now(),
            trails: (0..vcpus).map(tally).collect(),
            writer: Mutex::new(None),
            bell: None,
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
        let trails: Vec<_> = (0..vcpus).map(|_| Arc::<Trail>::default()).collect();
        let writer = Writer::start(path, header, start, trails.clone())?;
        Ok(Self {
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
            beside: None,
        })
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
        let totals = self.trails.iter().map(|trail| lock(trail).totals().clone());
        (Summary::new(totals.collect(), holdings), written)
    }
}

/// Notes one vCPU's decisions. It waits for nothing: while the writer looks at the
/// table, decisions are noted beside it and taken in with the next one.
#[derive(Debug)]
pub struct VcpuAuditor {
    start: Instant,
    trail: Arc<Trail>,
    bell: Option<Bell>,
    beside: Option<Box<Tally>>,
}

impl Auditor for VcpuAuditor {
    fn record(&mut self, record: &Record) {
        let now = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let due = match self.trail.try_lock() {
            Ok(mut tally) => note(&mut tally, &mut self.beside, now, record),
            Err(TryLockError::Poisoned(tally)) => {
                note(&mut tally.into_inner(), &mut self.beside, now, record)
            }
            Err(TryLockError::WouldBlock) => {
                self.beside.get_or_insert_default().note(now, record);
                false
            }
        };
        if let (true, Some(bell)) = (due, &self.bell) {
            bell.ring();
        }
    }
}

fn note(tally: &mut Tally, beside: &mut Option<Box<Tally>>, now: u64, record: &Record) -> bool {
    let late = beside.take().map(|beside| tally.merge(*beside)).is_some();
    tally.note(now, record) || late
}

impl Drop for VcpuAuditor {
    fn drop(&mut self) {
        if let Some(beside) = self.beside.take() {
            lock(&self.trail).merge(*beside);
        }
    }
}

/// What is behind these locks is whole after every step.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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
    fn a_writer_at_work_does_not_hold_up_a_vcpu() {
        let audit = AuditTrail::new(1);
        let mut auditor = audit.auditors().next().unwrap();
        let held = lock(&audit.trails[0]);
        auditor.record(&record(0, Event::Renewed));
        auditor.record(&record(0, Event::Released));
        drop(held);
        assert_eq!(lock(&audit.trails[0]).totals().decisions(), 0);
        auditor.record(&record(0, Event::Renewed));
        assert_eq!(lock(&audit.trails[0]).totals().decisions(), 3);
        let held = lock(&audit.trails[0]);
        auditor.record(&record(0, Event::Renewed));
        drop(held);
        drop(auditor);
        assert_eq!(audit.finish().0.decisions(), 4);
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
