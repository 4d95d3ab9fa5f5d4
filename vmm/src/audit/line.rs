//! The lines of an audit file that the writer makes of a machine and of what its auditors
//! noted. The lines themselves are `umpire-audit`'s.

use pmu_virt::perfmon::{HostEvent, HostRecord, Standing};
use umpire_audit::{Arbitration, ContextLine, DecisionLine, FORMAT, Header, Repeated, VERSION};

use super::decisions::{AuditTime, Entry};
use crate::kvm::VcpuId;

/// The first line of the audit of a machine which starts now, with `vcpus` vCPUs that have a
/// PMU of `model`, and whose reservations are decided about as `arbitration` says.
#[must_use]
pub fn header_now(
    vcpus: u8,
    model: &pmu_virt::PmuModel,
    arbitration: Option<Arbitration>,
) -> Header {
    Header {
        format: FORMAT.into(),
        version: VERSION,
        umpire: env!("CARGO_PKG_VERSION").into(),
        started: jiff::Timestamp::now().to_string(),
        vcpus,
        pmu: model.to_string(),
        programmable: model.programmable(),
        fixed: model.fixed(),
        arbitration,
    }
}

/// A vCPU in a line; there are 64 at most.
pub(super) fn number(vcpu: VcpuId) -> u8 {
    u8::try_from(vcpu.0).unwrap_or(u8::MAX)
}

/// The line of an entry.
pub(super) fn decision(vcpu: VcpuId, entry: &Entry) -> DecisionLine {
    // An entry of different decisions has only what they have in common.
    let line = if entry.coarse {
        DecisionLine::coarse
    } else {
        DecisionLine::new
    };
    DecisionLine {
        repeated: (entry.count > 1).then_some(Repeated {
            count: entry.count,
            first_ns: entry.first.0,
        }),
        ..line(entry.last.0, number(vcpu), &entry.record)
    }
}

/// The line of a decision about a host context on `core`.
pub(super) fn context(time: AuditTime, core: u16, record: &HostRecord) -> ContextLine {
    let line = |event| ContextLine {
        core: Some(core),
        vcpu: record.vcpu.map(|vcpu| vcpu.0),
        context: Some(record.context.0),
        ..ContextLine::new(time.0, event)
    };
    match &record.event {
        HostEvent::Loaded { standing } => {
            let standing = match standing {
                Standing::Firm => "firm",
                Standing::Spare => "spare",
            };
            ContextLine {
                standing: Some(standing.into()),
                ..line("context-loaded")
            }
        }
        HostEvent::Refused { refusal } => ContextLine {
            errno: Some(refusal.errno.name().into()),
            why: Some(refusal.reason.to_string()),
            ..line("context-refused")
        },
        HostEvent::Unloaded => line("context-unloaded"),
        HostEvent::Preempted => line("context-preempted"),
        HostEvent::Restored { blind } => ContextLine {
            blind_ns: Some(blind.0),
            ..line("context-restored")
        },
        HostEvent::Overdrawn => line("context-overdrawn"),
    }
}

/// The line of decisions about host contexts that found no room to wait in.
pub(super) fn missed(now: AuditTime, missed: u64) -> ContextLine {
    ContextLine {
        count: Some(missed),
        ..ContextLine::new(now.0, "contexts-untold")
    }
}

#[cfg(test)]
mod tests {
    use arbiter::{Control, CounterId, Event, Layer, PerKind, Reason, Record, Scheme, Share};
    use perfmon_abi::wire::{Errno, Refusal};
    use pmu_virt::perfmon::ContextId;
    use pmu_virt::{Nanos, OwnerId};

    use super::super::decisions::DecisionTable;
    use super::*;

    #[test]
    fn lines() {
        fn check(event: Event, times: u64, expected: &str) {
            let mut table = DecisionTable::default();
            let record = Record {
                layer: Layer::GuestKernel,
                counter: Some(CounterId::Fixed(1)),
                event,
            };
            for at in 0..times {
                table.note(AuditTime(7 + at), at, &record);
            }
            let line = decision(VcpuId(2), &table.take(AuditTime(9), true)[0]);
            assert_eq!(serde_json::to_string(&line).unwrap(), expected);
        }
        check(
            Event::Reserved { lease_ms: None },
            1,
            r#"{"time_ns":7,"vcpu":2,"layer":"kernel","counter":"FIXED1","event":"reserved"}"#,
        );
        check(
            Event::Yielded {
                to: Layer::Hypervisor,
            },
            1,
            r#"{"time_ns":7,"vcpu":2,"layer":"kernel","counter":"FIXED1","event":"yielded","to":"hypervisor"}"#,
        );
        check(
            Event::DroppedRead(Reason::Held),
            3,
            r#"{"time_ns":9,"vcpu":2,"layer":"kernel","counter":"FIXED1","event":"dropped-read","reason":"held","count":3,"first_ns":7}"#,
        );
        check(
            Event::ControlSet(Control::INITIAL),
            1,
            r#"{"time_ns":7,"vcpu":2,"layer":"kernel","counter":"FIXED1","event":"control-set","control":"0x1f00ff"}"#,
        );
        check(
            Event::LayerBarred(Layer::Firmware),
            1,
            r#"{"time_ns":7,"vcpu":2,"layer":"kernel","counter":"FIXED1","event":"layer-barred","of":"firmware"}"#,
        );
        check(
            Event::PolicySet {
                of: Layer::GuestKernel,
                share: Share::FREE,
            },
            1,
            r#"{"time_ns":7,"vcpu":2,"layer":"kernel","counter":"FIXED1","event":"policy-set","of":"kernel","policy":"kernel:min=0,min-fixed=0,priority=0"}"#,
        );
        check(
            Event::SchemeSet(Scheme::SingleMaster),
            1,
            r#"{"time_ns":7,"vcpu":2,"layer":"kernel","counter":"FIXED1","event":"scheme-set","scheme":"single"}"#,
        );
        let most = PerKind {
            programmable: 2,
            ..PerKind::ALL
        };
        check(
            Event::BudgetSet(most),
            1,
            r#"{"time_ns":7,"vcpu":2,"layer":"kernel","counter":"FIXED1","event":"budget-set","budget":"programmable=2,fixed=all"}"#,
        );
        let coarse = Entry {
            record: Record {
                layer: Layer::Firmware,
                counter: Some(CounterId::Fixed(1)),
                event: Event::DropValueSet(5),
            },
            coarse: true,
            count: 2,
            first: AuditTime(1),
            last: AuditTime(2),
            order: 9,
        };
        assert_eq!(
            serde_json::to_string(&decision(VcpuId(0), &coarse)).unwrap(),
            r#"{"time_ns":2,"vcpu":0,"layer":"firmware","event":"drop-value-set","count":2,"first_ns":1}"#
        );
        check(
            Event::Revoking {
                wanted_by: Layer::Hypervisor,
                reason: Reason::Priority,
                in_ms: 100,
            },
            1,
            r#"{"time_ns":7,"vcpu":2,"layer":"kernel","counter":"FIXED1","event":"revoking","reason":"priority","wanted_by":"hypervisor","in_ms":100}"#,
        );
    }

    fn text(vcpu: Option<u32>, event: HostEvent) -> String {
        let record = HostRecord {
            context: ContextId(7),
            vcpu: vcpu.map(OwnerId),
            event,
        };
        let line = context(AuditTime(5), 1, &record);
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
                text(None, HostEvent::Restored { blind: Nanos(9) }),
                r#"{"time_ns":5,"layer":"tool","core":1,"context":7,"event":"context-restored","blind_ns":9}"#,
            ),
        ];
        for (found, expected) in table {
            assert_eq!(found, expected);
        }
    }
}
