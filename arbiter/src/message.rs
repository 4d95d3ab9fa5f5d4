//! The messages of the mailbox: what a layer writes to `REQUEST` and `REPLY`, and
//! what it reads from `ANSWER`, `GRANTED` and `NOTICE`. `docs/reference/pcr.md` has the bits.

use core::num::NonZeroU32;

use crate::abi;
use crate::cookie::Cookie;
use crate::reason::Reason;
use crate::{CounterId, CounterSet, Layer};

/// Which counters a request is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wanted {
    /// This many programmable counters, whichever they are; at least 1.
    Any(u8),
    /// This many programmable counters of those that other layers have reserved; at
    /// least 1. Only the hypervisor asks so, for a host's tool: what nobody has reserved
    /// is not arbitrated, so it would not be the owner's answer.
    Held(u8),
    This(CounterId),
}

impl Wanted {
    /// The number of counters.
    pub const fn count(self) -> u8 {
        match self {
            Wanted::Any(count) | Wanted::Held(count) => count,
            Wanted::This(_) => 1,
        }
    }

    /// Every counter that would satisfy the request.
    pub fn candidates(self) -> CounterSet {
        match self {
            Wanted::Any(_) | Wanted::Held(_) => CounterSet::first(crate::MAX_PROGRAMMABLE, 0),
            Wanted::This(counter) => [counter].into_iter().collect(),
        }
    }
}

/// A request: what a layer writes to `REQUEST`.
#[derive(Clone, Copy, Debug)]
pub enum Request {
    /// Reserves counters, all of them or none.
    Reserve {
        /// Which counters.
        wanted: Wanted,
        /// The cookie that the counters get; not the default one.
        cookie: Cookie,
        /// The length of the lease in milliseconds. `None` means as long as policy
        /// allows.
        lease_ms: Option<u32>,
        /// The event that each of them is to count, in both rings. `None` means any.
        event: Option<NamedEvent>,
    },
    /// Gives a counter back.
    Release {
        counter: CounterId,
        /// The cookie of the counter.
        cookie: Cookie,
    },
    /// Withdraws the request that is pending.
    Withdraw {
        /// The cookie that the pending request presented.
        cookie: Cookie,
    },
}

/// An event that a request names, so that a physical counter is kept which can count it:
/// what an event select says of the event, without rings, interrupt and enable bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NamedEvent(
    /// Bits 63:32 of `REQUEST`.
    NonZeroU32,
);

/// Bits of an event select, and where `REQUEST` has them: event and unit mask, the event's
/// upper bits, edge, invert, counter mask.
const EVENT_FIELDS: [(u64, u32, u32); 5] = [
    (0xffff, 0, 0),
    (0xf, 32, 16),
    (1, 18, 20),
    (1, 23, 21),
    (0xff, 24, 22),
];

impl NamedEvent {
    /// The event that `select` selects. `None`: it has other bits than those of the event.
    pub fn of_select(select: u64) -> Option<Self> {
        let moved =
            EVENT_FIELDS.map(|(mask, of_select, bits)| (select >> of_select & mask) << bits);
        let bits = moved.into_iter().sum::<u64>() | abi::REQUEST_EVENT >> EVENT_SHIFT;
        let event = NamedEvent(NonZeroU32::new(u32::try_from(bits).ok()?)?);
        (event.select() == select).then_some(event)
    }

    /// Bits 15:0, 18, 23, 31:24 and 35:32 of its event select; the others are 0.
    pub fn select(self) -> u64 {
        let own = u64::from(self.0.get());
        let moved = EVENT_FIELDS.map(|(mask, select, bits)| (own >> bits & mask) << select);
        moved.into_iter().sum()
    }

    /// Bits 63:32 of `REQUEST`, shifted down.
    fn decode(bits: u64) -> Option<Self> {
        let event = NamedEvent(NonZeroU32::new(u32::try_from(bits).ok()?)?);
        let again = NamedEvent::of_select(event.select())?;
        (again == event).then_some(event)
    }

    /// What it adds to a value for `REQUEST`.
    pub fn request_bits(self) -> u64 {
        u64::from(self.0.get()) << EVENT_SHIFT
    }
}

/// Bits of `REQUEST` from here on name an event.
const EVENT_SHIFT: u64 = abi::REQUEST_SELECT_SHIFT;
/// The bits below.
const LOWER: u64 = (1 << EVENT_SHIFT) - 1;

const WHICH: u64 = 0xff << abi::REQUEST_WHICH_SHIFT;
const LEASE: u64 = 0xffff << abi::REQUEST_LEASE_SHIFT;

impl Request {
    /// Decodes a written value. `presented` is the register that carries the cookie.
    ///
    /// # Errors
    /// [`Reason::Malformed`]: a bit is set that must be 0, the operation does not
    /// exist or takes no such counters, or the cookie has more than 48 bits. A
    /// reservation with the default cookie is malformed as well.
    pub fn decode(value: u64, presented: u64) -> Result<Request, Reason> {
        let (which, lease) = (field(value, WHICH), field(value, LEASE));
        let by_position = value & abi::REQUEST_POSITION != 0;
        let event = match value >> EVENT_SHIFT {
            0 => None,
            bits => Some(NamedEvent::decode(bits).ok_or(Reason::Malformed)?),
        };
        let value = value & LOWER;
        let known = abi::REQUEST_OP_MASK | abi::REQUEST_POSITION | WHICH | LEASE;
        if value & !known != 0
            || event.is_some() && value & abi::REQUEST_OP_MASK != abi::REQUEST_RESERVE
        {
            return Err(Reason::Malformed);
        }
        let cookie = || Cookie::new(presented).ok_or(Reason::Malformed);
        let counter = || CounterId::at_position(which.to_le_bytes()[0]).ok_or(Reason::Malformed);
        match value & abi::REQUEST_OP_MASK {
            abi::REQUEST_RESERVE => {
                let wanted = match (by_position, which) {
                    (true, _) => Wanted::This(counter()?),
                    (false, 0) => return Err(Reason::Malformed),
                    (false, count) => Wanted::Any(count.to_le_bytes()[0]),
                };
                let cookie = cookie()?;
                let lease = u32::from(lease) * LEASE_UNIT_MS;
                // Fixed-function counters and samplers have their events.
                let has_own = match wanted {
                    Wanted::This(CounterId::Fixed(_) | CounterId::Ibs(_)) => true,
                    Wanted::This(CounterId::Programmable(_)) | Wanted::Any(_) | Wanted::Held(_) => {
                        false
                    }
                };
                let named = has_own && event.is_some();
                if cookie.is_default() || named {
                    Err(Reason::Malformed)
                } else {
                    Ok(Request::Reserve {
                        wanted,
                        cookie,
                        lease_ms: (lease != 0).then_some(lease),
                        event,
                    })
                }
            }
            abi::REQUEST_RELEASE if by_position && lease == 0 => Ok(Request::Release {
                counter: counter()?,
                cookie: cookie()?,
            }),
            abi::REQUEST_WITHDRAW if value == abi::REQUEST_WITHDRAW => {
                Ok(Request::Withdraw { cookie: cookie()? })
            }
            _ => Err(Reason::Malformed),
        }
    }
}

#[allow(clippy::cast_possible_truncation, reason = "the constant is 10")]
const LEASE_UNIT_MS: u32 = abi::REQUEST_LEASE_UNIT_MS as u32;

/// A field of at most 16 bits.
fn field(value: u64, mask: u64) -> u16 {
    let bytes = ((value & mask) >> mask.trailing_zeros()).to_le_bytes();
    u16::from_le_bytes([bytes[0], bytes[1]])
}

/// The answer of a holder that was asked for a counter: what it writes to `REPLY`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The counter that another layer asked for.
    pub counter: CounterId,
    /// Whether the holder gives the counter back.
    pub yields: bool,
}

impl Reply {
    /// Decodes a written value.
    ///
    /// # Errors
    /// [`Reason::Malformed`]: the value is neither of the two replies, or names no
    /// position.
    pub fn decode(value: u64) -> Result<Reply, Reason> {
        const POSITION: u64 = 0xff << abi::REPLY_POSITION_SHIFT;
        let counter = CounterId::at_position(field(value, POSITION).to_le_bytes()[0]);
        let counter = counter.ok_or(Reason::Malformed)?;
        let yields = match value & !POSITION {
            abi::REPLY_YIELD => true,
            abi::REPLY_REFUSE => false,
            _ => return Err(Reason::Malformed),
        };
        Ok(Reply { counter, yields })
    }
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The layer has asked nothing yet.
    #[default]
    Nothing,
    /// The request was granted, with these counters.
    Granted(CounterSet),
    /// The request was refused, for this reason.
    Refused(Reason),
    /// The request waits: another layer was asked for a counter, or a revocation was
    /// announced to it.
    Pending,
}

/// The answer to a layer's last request, as `ANSWER` and `GRANTED` show it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Answer {
    /// The request's number: 1 to 65535, then 1 again. It is 0 if nothing was asked.
    pub number: u16,
    /// The outcome of the request.
    pub outcome: Outcome,
}

impl Answer {
    /// The value of `ANSWER`.
    pub fn word(self) -> u64 {
        let state = match self.outcome {
            Outcome::Nothing => abi::ANSWER_NONE,
            Outcome::Granted(_) => abi::ANSWER_GRANTED,
            Outcome::Refused(reason) => {
                abi::ANSWER_REFUSED | reason.code() << abi::ANSWER_REASON_SHIFT
            }
            Outcome::Pending => abi::ANSWER_PENDING,
        };
        state | u64::from(self.number) << abi::ANSWER_NUMBER_SHIFT
    }

    /// The value of `GRANTED`.
    pub fn granted(self) -> CounterSet {
        match self.outcome {
            Outcome::Granted(counters) => counters,
            Outcome::Nothing | Outcome::Refused(_) | Outcome::Pending => CounterSet::EMPTY,
        }
    }
}

/// The kind of a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NoticeKind {
    /// Another layer asks whether the holder yields the counter.
    Asked,
    /// The counter will be revoked.
    Revoking,
    /// The counter has been revoked.
    Revoked,
    /// The lease of the counter has ended.
    Expired,
    /// The pending request was granted.
    Granted,
    /// The pending request was refused.
    Refused,
    /// A question or an announcement about the counter no longer stands.
    Cancelled,
    /// The host's kernel has taken the physical counter. The reservation stays.
    Taken,
    /// The counter has a physical one again.
    Back,
}

impl NoticeKind {
    /// Its code in the ABI (`NOTICE_*`).
    pub const fn code(self) -> u64 {
        match self {
            NoticeKind::Asked => abi::NOTICE_ASKED,
            NoticeKind::Revoking => abi::NOTICE_REVOKING,
            NoticeKind::Revoked => abi::NOTICE_REVOKED,
            NoticeKind::Expired => abi::NOTICE_EXPIRED,
            NoticeKind::Granted => abi::NOTICE_GRANTED,
            NoticeKind::Refused => abi::NOTICE_REFUSED,
            NoticeKind::Cancelled => abi::NOTICE_CANCELLED,
            NoticeKind::Taken => abi::NOTICE_TAKEN,
            NoticeKind::Back => abi::NOTICE_BACK,
        }
    }
}

/// A notice, as a layer reads it from `NOTICE`. A layer gets notices without having
/// asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Notice {
    /// The kind of the notice.
    pub kind: NoticeKind,
    /// The counter. `None` means that the notice is about a request.
    pub counter: Option<CounterId>,
    /// The layer that wants the counter, or the reader itself if no other does.
    pub layer: Layer,
    /// The reason, if there is one.
    pub reason: Option<Reason>,
    /// Milliseconds until the answer is due or the revocation takes place.
    pub rest_ms: u32,
    /// Whether notices before this one were lost.
    pub lost: bool,
}

impl Notice {
    /// The value of `NOTICE`.
    pub fn word(self) -> u64 {
        let position = self.counter.and_then(CounterId::position).unwrap_or(0);
        let lost = if self.lost { abi::NOTICE_LOST } else { 0 };
        self.kind.code()
            | lost
            | u64::from(position) << abi::NOTICE_POSITION_SHIFT
            | u64::from(self.layer.code()) << abi::NOTICE_LAYER_SHIFT
            | self.reason.map_or(abi::REASON_NONE, Reason::code) << abi::NOTICE_REASON_SHIFT
            | u64::from(self.rest_ms) << abi::NOTICE_MS_SHIFT
    }
}
