//! What a layer writes: `REQUEST` and `REPLY`.

use crate::abi;
use crate::cookie::Cookie;
use crate::reason::Reason;
use crate::{CounterId, CounterSet};

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
