//! The lines of an audit file. `docs/reference/audit.md` describes every field.

mod asks;

use arbiter::{Event, Layer, Policy, Reason, Scheme, Share};
use pmu_virt::perfmon::{HostEvent, HostRecord, Standing};
use serde::Serialize;

use super::decisions::{AuditTime, Entry};
use crate::kvm::VcpuId;
pub(super) use asks::AskLine;

/// What the file calls itself.
const FORMAT: &str = "umpire-audit";
/// Version of the lines that this Umpire writes.
const VERSION: u64 = 1;

/// The first line.
#[derive(Debug, Clone, Serialize)]
pub struct AuditHeader {
    format: &'static str,
    version: u64,
    umpire: &'static str,
    /// Wall-clock time from which all others are counted.
    started: String,
    vcpus: u8,
    /// The PMU model with its properties.
    pmu: String,
    programmable: u8,
    fixed: u8,
    /// Who arbitrates, and how. Absent if the guest has no reservations.
    #[serde(flatten)]
    arbiter: Option<ArbiterHeader>,
}

/// What decides about requests.
#[derive(Debug, Clone, Copy)]
pub struct AuditArbiter {
    /// The scheme.
    pub scheme: Scheme,
    /// The policy.
    pub policy: Policy,
    /// The machine starts in the firmware's phase.
    pub firmware: bool,
    /// The machine has SMM.
    pub smm: bool,
}

/// The same as options take it.
#[derive(Debug, Clone, Serialize)]
struct ArbiterHeader {
    scheme: &'static str,
    policy: Vec<String>,
    grace_ms: u32,
    firmware: bool,
    smm: bool,
}

impl ArbiterHeader {
    fn of(arbiter: &AuditArbiter) -> Self {
        let policy = &arbiter.policy;
        let words = |layer: Layer| {
            let share = policy.share(layer)?;
            Some(policy_words(layer, share))
        };
        Self {
            scheme: arbiter.scheme.name(),
            policy: Policy::LAYERS.into_iter().filter_map(words).collect(),
            grace_ms: policy.grace_ms,
            firmware: arbiter.firmware,
            smm: arbiter.smm,
        }
    }
}

/// The share of a layer as `--policy` takes it.
fn policy_words(layer: Layer, share: &Share) -> String {
    format!("{}:{}", layer_word(layer), share_words(share))
}

/// A share as `--policy` takes it. What has no limit is left out.
fn share_words(share: &Share) -> String {
    let mut words = vec![
        format!("min={}", share.min.programmable),
        format!("min-fixed={}", share.min.fixed),
        format!("priority={}", share.priority),
    ];
    let limits = [
        ("max", share.max.programmable),
        ("max-fixed", share.max.fixed),
    ];
    for (key, limit) in limits {
        if limit != u8::MAX {
            words.push(format!("{key}={limit}"));
        }
    }
    words.extend(share.lease_ms.map(|ms| format!("lease={ms}")));
    words.join(",")
}

impl AuditHeader {
    /// The first line of a machine which starts now, with `vcpus` vCPUs that have a PMU
    /// of `model`, and whose reservations `arbiter` decides about.
    #[must_use]
    pub fn now(vcpus: u8, model: &pmu_virt::PmuModel, arbiter: Option<&AuditArbiter>) -> Self {
        Self {
            format: FORMAT,
            version: VERSION,
            umpire: env!("CARGO_PKG_VERSION"),
            started: jiff::Timestamp::now().to_string(),
            vcpus,
            pmu: model.to_string(),
            programmable: model.programmable(),
            fixed: model.fixed(),
            arbiter: arbiter.map(ArbiterHeader::of),
        }
    }
}

/// One decision about a reservation, or several alike.
#[derive(Debug, Serialize)]
pub(super) struct Line {
    time_ns: AuditTime,
    vcpu: u8,
    layer: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    counter: Option<String>,
    event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    #[serde(flatten)]
    details: Details,
    #[serde(flatten)]
    repeated: Option<Repeated>,
}

/// Fields that only some events have.
#[derive(Debug, Default, PartialEq, Serialize)]
struct Details {
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_ms: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    to: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    private: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    control: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    drop_value: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    wanted_by: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    in_ms: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    barred_ms: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    deaf_ms: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    of: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scheme: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    budget: Option<String>,
}

#[derive(Debug, Serialize)]
struct Repeated {
    count: u64,
    first_ns: AuditTime,
}

/// The last line.
#[derive(Debug, Serialize)]
pub(super) struct Footer {
    /// Always true. Tells this line from others.
    pub(super) end: bool,
    pub(super) time_ns: AuditTime,
    pub(super) decisions: u64,
    pub(super) lines: u64,
    /// How often layers asked for something.
    pub(super) requests: u64,
}

impl Line {
    pub(super) fn new(vcpu: VcpuId, entry: &Entry) -> Self {
        let record = &entry.record;
        // An entry of different decisions has only what they have in common.
        let (counter, reason, details) = if entry.coarse {
            (None, None, Details::default())
        } else {
            let details = Details::of(&record.event);
            (record.counter, record.event.reason(), details)
        };
        Self {
            time_ns: entry.last,
            vcpu: vcpu.0,
            layer: layer_word(record.layer),
            counter: counter.map(|counter| counter.to_string()),
            event: record.event.name(),
            reason: reason.map(Reason::name),
            details,
            repeated: (entry.count > 1).then_some(Repeated {
                count: entry.count,
                first_ns: entry.first,
            }),
        }
    }
}

impl Details {
    fn of(event: &Event) -> Self {
        let none = Self::default();
        match *event {
            Event::Reserved { lease_ms } => Self { lease_ms, ..none },
            Event::HandedOver { from } => Self {
                from: Some(layer_word(from)),
                ..none
            },
            Event::Yielded { to } => Self {
                to: Some(layer_word(to)),
                ..none
            },
            Event::AccessSet { private } => Self {
                private: Some(private),
                ..none
            },
            Event::ControlSet(control) => Self {
                control: Some(format!("{:#x}", control.bits())),
                ..none
            },
            Event::DropValueSet(value) => Self {
                drop_value: Some(format!("{value:#x}")),
                ..none
            },
            Event::Asked { wanted_by } | Event::Declined { wanted_by, .. } => Self {
                wanted_by: Some(layer_word(wanted_by)),
                ..none
            },
            Event::Revoking {
                wanted_by, in_ms, ..
            } => Self {
                wanted_by: Some(layer_word(wanted_by)),
                in_ms: Some(in_ms),
                ..none
            },
            Event::Deaf { ms } => Self {
                deaf_ms: Some(ms),
                ..none
            },
            Event::LockedOut { ms } => Self {
                barred_ms: Some(ms),
                ..none
            },
            Event::LayerBarred(_)
            | Event::LayerUnbarred(_)
            | Event::PolicySet { .. }
            | Event::SchemeSet(_)
            | Event::BudgetSet(_) => Self::of_administrator(event),
            Event::Renewed
            | Event::Released
            | Event::Gathered
            | Event::Returned
            | Event::Refused(_)
            | Event::DroppedRead(_)
            | Event::DroppedWrite(_)
            | Event::Faulted(_)
            | Event::Spared
            | Event::Revoked(_)
            | Event::Taken
            | Event::Back
            | Event::PhaseEnded => none,
        }
    }

    /// What an act of the administrator has, and nothing of other decisions.
    fn of_administrator(event: &Event) -> Self {
        let none = Self::default();
        match *event {
            Event::LayerBarred(of) | Event::LayerUnbarred(of) => Self {
                of: Some(layer_word(of)),
                ..none
            },
            Event::PolicySet { of, share } => Self {
                of: Some(layer_word(of)),
                policy: Some(policy_words(of, &share)),
                ..none
            },
            Event::SchemeSet(scheme) => Self {
                scheme: Some(scheme.name()),
                ..none
            },
            Event::BudgetSet(most) => Self {
                budget: Some(most.to_string()),
                ..none
            },
            _ => none,
        }
    }
}

/// A decision about a host context.
#[derive(Debug, Serialize)]
pub(super) struct HostLine {
    time_ns: AuditTime,
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
    pub(super) fn new(time_ns: AuditTime, core: u16, record: &HostRecord) -> Self {
        let line = HostLine {
            core: Some(core),
            vcpu: record.vcpu.map(|vcpu| vcpu.0),
            context: Some(record.context.0),
            ..HostLine::of(time_ns, "context-unloaded")
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
            HostEvent::Restored { blind } => HostLine {
                event: "context-restored",
                blind_ns: Some(blind.0),
                ..line
            },
            HostEvent::Overdrawn => HostLine {
                event: "context-overdrawn",
                ..line
            },
        }
    }

    /// Decisions that found no room to wait in.
    pub(super) fn missed(now: AuditTime, missed: u64) -> Self {
        HostLine {
            count: Some(missed),
            ..HostLine::of(now, "contexts-untold")
        }
    }

    fn of(time_ns: AuditTime, event: &'static str) -> Self {
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

/// The word for a layer, as in options.
pub(super) fn layer_word(layer: Layer) -> &'static str {
    match layer {
        Layer::Firmware => "firmware",
        Layer::Hypervisor => "hypervisor",
        Layer::GuestKernel => "kernel",
        Layer::GuestUser => "user",
        Layer::HostTool => "tool",
    }
}

#[cfg(test)]
mod tests {
    use arbiter::{Control, CounterId, Record};
    use perfmon_abi::wire::{Errno, Refusal};
    use pmu_virt::perfmon::ContextId;
    use pmu_virt::{Nanos, OwnerId};

    use super::super::decisions::DecisionTable;
    use super::*;
    use arbiter::PerKind;

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
            let line = Line::new(VcpuId(2), &table.take(AuditTime(9), true)[0]);
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
            serde_json::to_string(&Line::new(VcpuId(0), &coarse)).unwrap(),
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
        let line = HostLine::new(AuditTime(5), 1, &record);
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
