//! What is said to a call: one enum of what there is to say, one of why a call is not done, and
//! the JSON of both.

use arbiter_host::{HostArbiter, LeaseId, Reason, Refusal};
use serde::Serialize;
use serde_json::{Value, json};
use umpire_lease::{self as wire, INTERFACE};
use varlink::Reply;

use super::shown::Viewer;
use crate::convert;

/// What a call comes to at once; `None`: its reply comes later.
pub(super) type Answered = Result<Option<Now>, Denial>;

/// The parameters of a reply.
#[derive(Debug)]
pub(super) enum Said {
    Nothing,
    Lease(Box<wire::AcquireOut>),
    Renewed(wire::RenewOut),
    Revoked(wire::RevokeOut),
    Leases(wire::ListOut),
    Groups(wire::GroupsOut),
    Who(wire::WhoOut),
    Explained(Box<wire::ExplainOut>),
    Watched(Box<wire::WatchOut>),
    /// Of the interface that every varlink service has.
    Service(Value),
}

/// A reply that is given at once, and what it rests on.
#[derive(Debug)]
pub(super) struct Now {
    pub(super) said: Said,
    /// Others follow it.
    pub(super) goes_on: bool,
    pub(super) rests_on: Option<LeaseId>,
    pub(super) audited: bool,
}

impl From<Said> for Now {
    fn from(said: Said) -> Self {
        Now {
            said,
            goes_on: false,
            rests_on: None,
            audited: false,
        }
    }
}

impl Said {
    /// The lease to whose holder it is said how much that holds.
    pub(super) fn holds(&self) -> Option<(LeaseId, usize)> {
        match self {
            Said::Lease(out) => {
                let holds = usize::try_from(out.lease.holds).unwrap_or(usize::MAX);
                Some((LeaseId(out.lease.id), holds))
            }
            _ => None,
        }
    }

    pub(super) fn reply(&self, goes_on: bool) -> Reply {
        let mut reply = Reply::parameters(Some(match self {
            Said::Nothing => json!({}),
            Said::Lease(out) => value(out),
            Said::Renewed(out) => value(out),
            Said::Revoked(out) => value(out),
            Said::Leases(out) => value(out),
            Said::Groups(out) => value(out),
            Said::Who(out) => value(out),
            Said::Explained(out) => value(out),
            Said::Watched(out) => value(out),
            Said::Service(out) => out.clone(),
        }));
        reply.continues = goes_on.then_some(true);
        reply
    }
}

/// Why a call is not done.
#[derive(Debug)]
pub(crate) enum Denial {
    /// The host's arbiter says no.
    Host(Refusal),
    Refused(wire::Refusal),
    JournalFailed(String),
    NoMethod(String),
    NoInterface(String),
    InvalidParameter(String),
}

impl From<Refusal> for Denial {
    fn from(refusal: Refusal) -> Self {
        Denial::Host(refusal)
    }
}

impl From<wire::Refusal> for Denial {
    fn from(refusal: wire::Refusal) -> Self {
        Denial::Refused(refusal)
    }
}

impl Denial {
    /// The request makes no sense.
    pub(crate) fn wrong(what: impl Into<String>) -> Self {
        Denial::Refused(wire::Refusal::of(Reason::WrongRequest, what))
    }

    /// The same in words, of which `viewer` may know all.
    pub(super) fn in_words(self, arbiter: &HostArbiter, viewer: Viewer) -> Self {
        match self {
            Denial::Host(refusal) => {
                Denial::Refused(viewer.refusal(convert::refusal(arbiter, &refusal)))
            }
            other => other,
        }
    }

    /// The refusal of an event, of which there is no other denial. As [`Denial::in_words`].
    pub(crate) fn refusal(self, arbiter: &HostArbiter, viewer: Viewer) -> wire::Refusal {
        match self.in_words(arbiter, viewer) {
            Denial::Refused(refusal) => refusal,
            _ => wire::Refusal::default(),
        }
    }

    /// The word for the metrics and the audit.
    pub(super) fn reason(&self) -> Reason {
        match self {
            Denial::Refused(refusal) => refusal.reason.clone(),
            Denial::Host(refusal) => refusal.reason(),
            Denial::JournalFailed(_) => Reason::JournalFailed,
            Denial::NoMethod(_) => Reason::MethodNotFound,
            Denial::NoInterface(_) | Denial::InvalidParameter(_) => Reason::InvalidParameter,
        }
    }

    /// The sentence for the audit.
    pub(super) fn message(&self) -> Option<&str> {
        match self {
            Denial::Refused(refusal) => Some(&refusal.message),
            _ => None,
        }
    }

    /// The reply, of a denial in words.
    pub(super) fn reply(&self) -> Reply {
        let service = |error: &str, parameters| {
            Reply::error(format!("org.varlink.service.{error}"), Some(parameters))
        };
        let own = |error: &str, parameters| {
            Reply::error(format!("{INTERFACE}.{error}"), Some(parameters))
        };
        match self {
            Denial::Refused(refusal) => own("Refused", json!({ "refusal": refusal })),
            Denial::Host(refusal) => {
                let reason = refusal.reason();
                own("Refused", json!({ "refusal": { "reason": reason } }))
            }
            Denial::JournalFailed(message) => own("JournalFailed", json!({ "message": message })),
            Denial::NoMethod(method) => service("MethodNotFound", json!({ "method": method })),
            Denial::NoInterface(interface) => {
                service("InterfaceNotFound", json!({ "interface": interface }))
            }
            Denial::InvalidParameter(parameter) => {
                service("InvalidParameter", json!({ "parameter": parameter }))
            }
        }
    }
}

/// JSON of a message, which cannot fail: it has no maps with other keys than strings.
fn value(message: &impl Serialize) -> Value {
    serde_json::to_value(message).unwrap_or(Value::Null)
}
