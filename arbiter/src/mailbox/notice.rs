//! What a layer is told without having asked: `NOTICE`.

use crate::abi;
use crate::reason::Reason;
use crate::{CounterId, Layer};

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
