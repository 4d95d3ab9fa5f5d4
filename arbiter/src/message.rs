//! The messages of the mailbox: what a layer writes to `REQUEST` and `REPLY`, and
//! what it reads from `ANSWER`, `GRANTED` and `NOTICE`. `docs/pcr.md` has the bits.

use crate::abi;
use crate::cookie::Cookie;
use crate::reason::Reason;
use crate::{CounterId, CounterSet, Layer};

/// Which counters a request is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wanted {
    /// So many programmable counters, whichever; at least 1.
    Any(u8),
    /// This one.
    This(CounterId),
}

impl Wanted {
    /// How many counters it is about.
    pub const fn count(self) -> u8 {
        match self {
            Wanted::Any(count) => count,
            Wanted::This(_) => 1,
        }
    }

    /// Every counter that would do.
    pub fn candidates(self) -> CounterSet {
        match self {
            Wanted::Any(_) => CounterSet::first(crate::MAX_PROGRAMMABLE, 0),
            Wanted::This(counter) => [counter].into_iter().collect(),
        }
    }
}

/// What `REQUEST` asks for.
#[derive(Clone, Copy, Debug)]
pub enum Request {
    /// Counters, all of them or none.
    Reserve {
        /// Which ones.
        wanted: Wanted,
        /// The cookie that they are to have; not the default one.
        cookie: Cookie,
        /// How long for, in milliseconds; `None`: as long as policy allows.
        lease_ms: Option<u32>,
    },
    /// To give a counter back.
    Release {
        /// Which one.
        counter: CounterId,
        /// The cookie that it has.
        cookie: Cookie,
    },
    /// To forget the request that is pending.
    Withdraw {
        /// The cookie that the request presented.
        cookie: Cookie,
    },
}

const WHICH: u64 = 0xff << abi::REQUEST_WHICH_SHIFT;
const LEASE: u64 = 0xffff << abi::REQUEST_LEASE_SHIFT;

impl Request {
    /// The request in a value that is written, and the register that carries
    /// the cookie.
    ///
    /// # Errors
    /// [`Reason::Malformed`]: a bit is set that must be 0, the operation does
    /// not exist or takes no such counters, or the cookie has more than 48 bits
    /// or is the default one where it sets one.
    pub fn decode(value: u64, presented: u64) -> Result<Request, Reason> {
        let (which, lease) = (field(value, WHICH), field(value, LEASE));
        let by_position = value & abi::REQUEST_POSITION != 0;
        let known = abi::REQUEST_OP_MASK | abi::REQUEST_POSITION | WHICH | LEASE;
        if value & !known != 0 {
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
                match cookie.is_default() {
                    true => Err(Reason::Malformed),
                    false => Ok(Request::Reserve {
                        wanted,
                        cookie,
                        lease_ms: (lease != 0).then_some(lease),
                    }),
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

/// What `REPLY` answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The counter that was asked for.
    pub counter: CounterId,
    /// Whether it is given back.
    pub yields: bool,
}

impl Reply {
    /// The reply in a value that is written.
    ///
    /// # Errors
    /// [`Reason::Malformed`]: it is neither of the two, or names no position.
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

/// What became of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Nothing was asked yet.
    #[default]
    Nothing,
    /// It was done, with these counters.
    Granted(CounterSet),
    /// It was not.
    Refused(Reason),
    /// Another layer is asked, or told that it will lose a counter.
    Pending,
}

/// The answer to a layer's last request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Answer {
    /// The request's number: 1 to 65535, then 1 again; 0 if nothing was asked.
    pub number: u16,
    /// What became of it.
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

/// What a notice tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NoticeKind {
    /// Will you yield this counter?
    Asked,
    /// It will be revoked.
    Revoking,
    /// It has been revoked.
    Revoked,
    /// Its lease has ended.
    Expired,
    /// The request that was pending was granted.
    Granted,
    /// It was refused.
    Refused,
    /// What was asked or announced about the counter is off.
    Cancelled,
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
        }
    }

    /// One word for machines.
    pub const fn name(self) -> &'static str {
        match self {
            NoticeKind::Asked => "asked",
            NoticeKind::Revoking => "revoking",
            NoticeKind::Revoked => "revoked",
            NoticeKind::Expired => "expired",
            NoticeKind::Granted => "granted",
            NoticeKind::Refused => "refused",
            NoticeKind::Cancelled => "cancelled",
        }
    }
}

/// A notice as it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Notice {
    /// What it tells.
    pub kind: NoticeKind,
    /// The counter; `None` where it is about a request.
    pub counter: Option<CounterId>,
    /// Who wants the counter; the reader itself if nobody else does.
    pub layer: Layer,
    /// Why, where there is a reason.
    pub reason: Option<Reason>,
    /// Milliseconds until the answer is due or the revocation takes place.
    pub rest_ms: u32,
    /// Notices before this one were lost.
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
