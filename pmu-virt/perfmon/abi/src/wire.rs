//! What goes over the control socket.
//!
//! The socket is `SOCK_SEQPACKET`: one packet is one request, and each request
//! has one reply, in order. [`frame`] has the headers, [`Call`] the commands of
//! the specification, [`Extension`] those that only a socket needs, [`info`]
//! the documents (JSON) that some of these return, [`pcr`] and [`budget`] the
//! commands with such an argument. Numbers are little-endian.
//! Whatever a peer sends, decoding it ends in a value or a typed error.

pub mod bell;
pub mod budget;
mod call;
mod errno;
mod extension;
pub mod frame;
pub mod info;
pub mod kernel;
pub mod last;
pub mod pause;
pub mod pcr;
pub mod programs;
mod subcode;

pub use call::Call;
pub use errno::{Errno, Refusal};
pub use extension::{Bound, Buffer, Extension, Hello, SystemWide};
pub use frame::{FrameError, Reply, Request};
pub use subcode::Subcode;

/// Version of this protocol. Peers of different versions do not talk.
pub const VERSION: u16 = 1;
/// Most bytes of a packet, its header included.
pub const MAX_PACKET: usize = 64 << 10;
/// Most bytes of a reply's reason; a longer one is cut.
pub const MAX_REASON: usize = 1 << 10;
/// Most bytes of a payload: one that fits into request and reply alike.
pub const MAX_PAYLOAD: usize = MAX_PACKET - Reply::HEADER - MAX_REASON;
/// The handle that names no context.
pub const NO_CONTEXT: u32 = 0;
