//! Reasons: why the arbiter refused, dropped or took something away.

use core::fmt;

use crate::abi;

/// A reason. The guest reads its code, the audit trail has its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Too few counters are free.
    NoneFree,
    /// The layer holds as many counters as it may.
    Maximum,
    /// Another layer's minimum would not be left.
    Minimum,
    /// The holder refused to yield.
    Refused,
    /// The holder did not answer in time.
    NoAnswer,
    /// The machine has no such counter.
    NoCounter,
    /// Another layer holds the counter.
    Held,
    /// The request makes no sense.
    Malformed,
    /// Only the master reserves.
    Master,
    /// The request was withdrawn.
    Withdrawn,
    /// A layer of higher priority needs the counter.
    Priority,
    /// The lease has ended.
    Expired,
    /// The cookie is wrong.
    Cookie,
    /// No cookie is valid in this layer. The arbiter compared none.
    Layer,
    /// The counter is not reserved.
    Unreserved,
    /// The owner had agreed to lend the counter.
    Lent,
    /// The firmware's phase is over.
    Phase,
    /// An earlier request is pending.
    Busy,
    /// No physical counter can be kept for the counter.
    Unbacked,
    /// The administrator of the host has revoked the counter, or barred the layer.
    Administrator,
    /// The host gives the guest fewer counters than before.
    Budget,
}

impl Reason {
    /// Every reason, by code.
    pub const ALL: [Reason; 21] = [
        Reason::NoneFree,
        Reason::Maximum,
        Reason::Minimum,
        Reason::Refused,
        Reason::NoAnswer,
        Reason::NoCounter,
        Reason::Held,
        Reason::Malformed,
        Reason::Master,
        Reason::Withdrawn,
        Reason::Priority,
        Reason::Expired,
        Reason::Cookie,
        Reason::Layer,
        Reason::Unreserved,
        Reason::Lent,
        Reason::Phase,
        Reason::Busy,
        Reason::Unbacked,
        Reason::Administrator,
        Reason::Budget,
    ];

    /// The reason's code in the ABI (`REASON_*`). It fits in 8 bits.
    pub const fn code(self) -> u64 {
        match self {
            Reason::NoneFree => abi::REASON_NONE_FREE,
            Reason::Maximum => abi::REASON_MAXIMUM,
            Reason::Minimum => abi::REASON_MINIMUM,
            Reason::Refused => abi::REASON_REFUSED,
            Reason::NoAnswer => abi::REASON_NO_ANSWER,
            Reason::NoCounter => abi::REASON_NO_COUNTER,
            Reason::Held => abi::REASON_HELD,
            Reason::Malformed => abi::REASON_MALFORMED,
            Reason::Master => abi::REASON_MASTER,
            Reason::Withdrawn => abi::REASON_WITHDRAWN,
            Reason::Priority => abi::REASON_PRIORITY,
            Reason::Expired => abi::REASON_EXPIRED,
            Reason::Cookie => abi::REASON_COOKIE,
            Reason::Layer => abi::REASON_LAYER,
            Reason::Unreserved => abi::REASON_UNRESERVED,
            Reason::Lent => abi::REASON_LENT,
            Reason::Phase => abi::REASON_PHASE,
            Reason::Busy => abi::REASON_BUSY,
            Reason::Unbacked => abi::REASON_UNBACKED,
            Reason::Administrator => abi::REASON_ADMINISTRATOR,
            Reason::Budget => abi::REASON_BUDGET,
        }
    }

    /// The reason that a guest is told: a right cookie in a wrong layer must look like
    /// a wrong one.
    #[cfg(feature = "alloc")]
    pub(crate) const fn as_shown(self) -> Reason {
        match self {
            Reason::Layer => Reason::Cookie,
            other => other,
        }
    }

    /// The reason's word in the audit trail.
    pub const fn name(self) -> &'static str {
        match self {
            Reason::NoneFree => "none-free",
            Reason::Maximum => "maximum",
            Reason::Minimum => "minimum",
            Reason::Refused => "refused",
            Reason::NoAnswer => "no-answer",
            Reason::NoCounter => "no-counter",
            Reason::Held => "held",
            Reason::Malformed => "malformed",
            Reason::Master => "master",
            Reason::Withdrawn => "withdrawn",
            Reason::Priority => "priority",
            Reason::Expired => "expired",
            Reason::Cookie => "cookie",
            Reason::Layer => "layer",
            Reason::Unreserved => "unreserved",
            Reason::Lent => "lent",
            Reason::Phase => "phase",
            Reason::Busy => "busy",
            Reason::Unbacked => "unbacked",
            Reason::Administrator => "administrator",
            Reason::Budget => "budget",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::NoneFree => "too few counters are free",
            Reason::Maximum => "the layer holds as many as it may",
            Reason::Minimum => "another layer's minimum would not be left",
            Reason::Refused => "the holder refused to yield",
            Reason::NoAnswer => "the holder did not answer in time",
            Reason::NoCounter => "there is no such counter",
            Reason::Held => "another layer holds it",
            Reason::Malformed => "the request makes no sense",
            Reason::Master => "only the master reserves",
            Reason::Withdrawn => "the request was withdrawn",
            Reason::Priority => "a layer of higher priority needs it",
            Reason::Expired => "the lease has ended",
            Reason::Cookie => "the cookie is wrong",
            Reason::Layer => "no cookie is valid in this layer",
            Reason::Unreserved => "the counter is not reserved",
            Reason::Lent => "the owner had agreed to lend it",
            Reason::Phase => "the firmware's phase is over",
            Reason::Busy => "an earlier request is pending",
            Reason::Unbacked => "no physical counter can be kept for it",
            Reason::Administrator => "the administrator of the host wants it so",
            Reason::Budget => "the host gives the guest fewer counters",
        })
    }
}
