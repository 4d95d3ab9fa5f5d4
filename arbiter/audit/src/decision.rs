//! The lines about decisions on reservations.

use arbiter::{Event, Layer, Record};
use serde::{Deserialize, Serialize};

use super::Word;
use super::header::share_words;

/// One decision about a reservation, or several alike.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionLine {
    /// Nanoseconds since the run began; of several, the time of the last.
    pub time_ns: u64,
    /// The number of the vCPU.
    pub vcpu: u8,
    /// The layer that asked, or that loses: [`Layer::word`].
    pub layer: Word,
    /// The counter, if it is about one and the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counter: Option<String>,
    /// What was decided: [`Event::name`].
    pub event: Word,
    /// Why, if there is a reason: [`Reason::name`](arbiter::Reason::name).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<Word>,
    /// What the event has to say beside.
    #[serde(flatten)]
    pub details: Details,
    /// Of several decisions.
    #[serde(flatten)]
    pub repeated: Option<Repeated>,
}

/// Members that only some events have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Details {
    /// The length of the lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u32>,
    /// The layer that held the counter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<Word>,
    /// The layer that has it now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<Word>,
    /// Legacy accesses are locked out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub private: Option<bool>,
    /// The control word, in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control: Option<String>,
    /// The drop value, in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drop_value: Option<String>,
    /// The layer that wants the counter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wanted_by: Option<Word>,
    /// Milliseconds until the revocation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_ms: Option<u32>,
    /// For how many milliseconds the vCPU is locked out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub barred_ms: Option<u32>,
    /// For how many milliseconds cookies of programs are not compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deaf_ms: Option<u32>,
    /// The layer that an administrator acted on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub of: Option<Word>,
    /// Its share from now on, as `--policy` takes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// The scheme from now on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheme: Option<Word>,
    /// The budget from now on, as `--budget` takes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<String>,
}

/// Of decisions that one line stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Repeated {
    /// How many there were.
    pub count: u64,
    /// Time of the first of them.
    pub first_ns: u64,
}

impl DecisionLine {
    /// A decision of the arbiter of `vcpu`.
    #[must_use]
    pub fn new(time_ns: u64, vcpu: u8, record: &Record) -> Self {
        Self {
            counter: record.counter.map(|counter| counter.to_string()),
            reason: record.event.reason().map(|reason| reason.name().into()),
            details: Details::of(&record.event),
            ..Self::coarse(time_ns, vcpu, record)
        }
    }

    /// Of decisions that have only layer and event in common.
    #[must_use]
    pub fn coarse(time_ns: u64, vcpu: u8, record: &Record) -> Self {
        Self {
            time_ns,
            vcpu,
            layer: record.layer.word().into(),
            counter: None,
            event: record.event.name().into(),
            reason: None,
            details: Details::default(),
            repeated: None,
        }
    }
}

impl Details {
    fn of(event: &Event) -> Self {
        let none = Self::default();
        let word = |layer: Layer| Some(layer.word().into());
        match *event {
            Event::Reserved { lease_ms } => Self { lease_ms, ..none },
            Event::HandedOver { from } => Self {
                from: word(from),
                ..none
            },
            Event::Yielded { to } => Self {
                to: word(to),
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
                wanted_by: word(wanted_by),
                ..none
            },
            Event::Revoking {
                wanted_by, in_ms, ..
            } => Self {
                wanted_by: word(wanted_by),
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
                of: Some(of.word().into()),
                ..none
            },
            Event::PolicySet { of, share } => Self {
                of: Some(of.word().into()),
                policy: Some(share_words(of, &share)),
                ..none
            },
            Event::SchemeSet(scheme) => Self {
                scheme: Some(scheme.name().into()),
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
