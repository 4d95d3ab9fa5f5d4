//! The audit of a machine: it gives out auditors, and sums up at the end.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use umpire_audit::Header;

use super::auditors::{HostAuditor, Notifier, Outbox, Trail, VcpuAuditor, mailbox};
use super::decisions::DecisionTable;
use super::summary::{Holding, Summary};
use super::writer::{AuditError, AuditOut, Writer};
use crate::kvm::VcpuId;
use crate::sync::lock;

/// The audit of one machine.
#[derive(Debug)]
pub struct AuditTrail {
    start: Instant,
    trails: Vec<Arc<Trail>>,
    writer: Mutex<Option<Writer>>,
    notifier: Option<Notifier>,
    hosts: Option<Outbox>,
    holdings: Mutex<BTreeMap<VcpuId, Vec<Holding>>>,
}

impl AuditTrail {
    /// An audit without a file: it only adds up.
    #[must_use]
    pub fn new(vcpus: u8) -> Self {
        let trail = |_| Arc::new(Trail::new(DecisionTable::totals_only));
        Self {
            start: Instant::now(),
            trails: (0..vcpus).map(trail).collect(),
            writer: Mutex::new(None),
            notifier: None,
            hosts: None,
            holdings: Mutex::default(),
        }
    }

    /// An audit that is written to the file at `path`, whose first line is `header`.
    /// An existing file is replaced.
    ///
    /// # Errors
    /// [`AuditError`]: the file cannot be made, or there is no thread for it.
    pub fn to_file(vcpus: u8, path: &Path, header: &Header) -> Result<Self, AuditError> {
        Self::to(vcpus, path, None, header)
    }

    /// The same into `out`, if there is one, which messages call `path`.
    ///
    /// # Errors
    /// [`AuditError`]: the file cannot be made, or there is no thread for it.
    pub fn to(
        vcpus: u8,
        path: &Path,
        out: Option<AuditOut>,
        header: &Header,
    ) -> Result<Self, AuditError> {
        let start = Instant::now();
        let trail = |_| Arc::new(Trail::new(DecisionTable::default));
        let trails: Vec<_> = (0..vcpus).map(trail).collect();
        let (hosts, inbox) = mailbox();
        let writer = Writer::start(path, out, header, start, (trails.clone(), inbox))?;
        Ok(Self {
            hosts: Some(hosts),
            notifier: Some(writer.notifier()),
            writer: Mutex::new(Some(writer)),
            start,
            trails,
            holdings: Mutex::default(),
        })
    }

    /// The auditors of all vCPUs' reservations, from vCPU 0 on.
    pub fn auditors(&self) -> impl Iterator<Item = VcpuAuditor> {
        let auditor =
            |trail: &Arc<Trail>| VcpuAuditor::new(self.start, trail.clone(), self.notifier.clone());
        self.trails.iter().map(auditor)
    }

    /// The auditor of host contexts on `core`.
    #[must_use]
    pub fn host_auditor(&self, core: u16) -> HostAuditor {
        HostAuditor {
            start: self.start,
            core,
            file: self.hosts.clone().zip(self.notifier.clone()),
        }
    }

    /// Notes who held which counter of `vcpu` when the vCPU ended.
    pub fn keep(&self, vcpu: VcpuId, holdings: Vec<Holding>) {
        lock(&self.holdings).insert(vcpu, holdings);
    }

    /// Has the rest written, once all vCPUs have ended, and sums up.
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

#[cfg(test)]
mod tests {
    use std::fs;

    use arbiter::{
        Answer, Ask, AskRecord, AskResult, Auditor, CounterId, Event, Layer, NamedEvent, Outcome,
        Policy, Presented, Reason, Record, Scheme, Wanted,
    };
    use pmu_virt::PmuModel;
    use serde_json::Value;

    use umpire_audit::Arbitration;

    use super::super::line::header_now;
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
        let header = header_now(2, &PmuModel::parse("intel-v2").unwrap(), None);
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
        // There are some kinds and some seconds, so there are few lines.
        assert!(decisions.len() < 200, "{}", decisions.len());
    }

    #[test]
    fn a_writer_at_work_neither_holds_up_a_vcpu_nor_misses_its_last_decision() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let header = header_now(1, &PmuModel::parse("intel-v2").unwrap(), None);
        let audit = AuditTrail::to_file(1, path.path(), &header).unwrap();
        let mut auditor = audit.auditors().next().unwrap();
        for held in [0, 1] {
            let held = lock(&audit.trails[0].0[held]);
            auditor.record(&record(0, Event::Renewed));
            auditor.record(&record(0, Event::Released));
            drop(held);
        }
        // No further decision wakes the writer, and the audit has not ended.
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
        let header = header_now(1, &PmuModel::parse("intel-v2").unwrap(), None);
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

    fn ask(layer: Layer, ask: Ask, presented: Presented) -> AskRecord {
        let counters = CounterId::at_position(3).into_iter().collect();
        let outcome = Outcome::Granted(counters);
        AskRecord {
            layer,
            ask,
            presented,
            result: AskResult::Answered(Answer { number: 9, outcome }),
        }
    }

    #[test]
    fn what_layers_ask_for_is_numbered_and_summed_up() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let mut policy = Policy::default();
        policy.firmware.lease_ms = Some(70);
        policy.kernel.max.programmable = 3;
        let arbitration = Arbitration {
            firmware: true,
            ..Arbitration::of(Scheme::Interacting, &policy)
        };
        let model = PmuModel::parse("intel-v2").unwrap();
        let header = header_now(1, &model, Some(arbitration));
        let audit = AuditTrail::to_file(1, path.path(), &header).unwrap();
        let mut auditor = audit.auditors().next().unwrap();
        let wanted = Wanted::Any(1);
        let lease_ms = Some(50);
        let event = NamedEvent::of_select(0x1_0000_00c0);
        let reserve = Ask::Reserve {
            wanted,
            lease_ms,
            event,
        };
        let kernel = Layer::GuestKernel;
        auditor.asked(&ask(kernel, reserve, Presented::Of(kernel)));
        // More than a writer should have to write in a second: the rest is a gap.
        for _ in 0..5000 {
            auditor.asked(&ask(kernel, Ask::Answer, Presented::Wrong));
        }
        audit.finish().1.unwrap();
        let lines = lines(path.path());
        assert_eq!(lines[0]["scheme"], "interacting");
        let words = [
            "firmware:min=0,min-fixed=0,priority=0,lease=70",
            "hypervisor:min=0,min-fixed=0,priority=0",
            "kernel:min=1,min-fixed=0,priority=0,max=3",
        ];
        assert_eq!(lines[0]["policy"], serde_json::json!(words));
        let first = serde_json::json!({
            "time_ns": lines[1]["time_ns"], "vcpu": 0, "layer": "kernel", "event": "requested",
            "request": 1, "what": "reserve", "any": 1, "lease_ms": 50,
            "select": "0x1000000c0", "cookie": "kernel",
            "result": "granted", "counters": ["PMC3"], "number": 9,
        });
        assert_eq!(lines[1], first);
        let last = &lines[lines.len() - 1];
        assert_eq!(
            (&last["requests"], &last["decisions"]),
            (&5001.into(), &0.into())
        );
        assert!(lines.len() < 5001, "{}", lines.len());
        let longest = lines
            .iter()
            .skip(1)
            .map(|line| line.to_string().len())
            .max();
        assert!(longest < Some(300), "{longest:?}");
    }

    #[test]
    fn a_full_disk_is_told_with_what_is_missing() {
        let header = header_now(1, &PmuModel::parse("intel-v2").unwrap(), None);
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
