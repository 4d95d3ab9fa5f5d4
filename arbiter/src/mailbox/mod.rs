//! The words of the mailbox: `docs/pcr.md`, "Mailbox".

mod answer;
#[cfg(feature = "alloc")]
mod letterbox;
mod notice;
mod request;

pub use answer::{Answer, Outcome};
#[cfg(feature = "alloc")]
pub(crate) use letterbox::{Letter, Letterbox};
pub use notice::{Notice, NoticeKind};
pub use request::{Reply, Request, Wanted};
