//! PAUSE: keeps a vCPU out of its guest, and lets it go on. Argument and answer are
//! documents (JSON).

use serde::{Deserialize, Serialize};

/// The number of the command. It has one argument (`nargs` 1): a [`PauseRequest`]. It
/// answers with a [`PauseInfo`] when the vCPU has left the guest, or may enter it.
pub const PAUSE: u16 = 0x116;

/// What is asked of one vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PauseRequest {
    pub vcpu: u32,
    /// Whether it is to stand from now on; `None`: nothing but the answer.
    pub paused: Option<bool>,
}

/// Whether a vCPU stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseInfo {
    /// The vCPU's number.
    pub vcpu: u32,
    /// It does not enter its guest until somebody lets it go on.
    pub paused: bool,
}
