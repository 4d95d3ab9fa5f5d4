//! `--control` and the options beside it, checked.

use std::path::PathBuf;
use std::sync::Arc;

use pmu_virt::perfmon::{DEFAULT_OVERFLOW_RATE, FormatRegistry, HostPolicy};

use super::socket::Access;

/// `--control-connections` without a word.
pub const DEFAULT_CONNECTIONS: u64 = 64;

/// How host tools are served.
#[derive(Clone, Debug)]
pub struct ControlConfig {
    /// The socket.
    pub socket: PathBuf,
    /// Who may connect.
    pub access: Access,
    /// Most connections at a time.
    pub connections: usize,
    /// Who gets counters that guest and tools both want.
    pub policy: HostPolicy,
    /// Most overflows of one context in a second.
    pub rate: u64,
    /// The sampling formats. Whoever links this crate and keeps a reference can
    /// add some at any time, also while the machine runs (3.5.8).
    pub formats: Arc<FormatRegistry>,
}

impl ControlConfig {
    /// The defaults, at this socket.
    #[must_use]
    pub fn at(socket: PathBuf) -> Self {
        Self {
            socket,
            access: Access {
                mode: 0o600,
                group: None,
            },
            connections: usize::try_from(DEFAULT_CONNECTIONS).unwrap_or(usize::MAX),
            policy: HostPolicy::default(),
            rate: DEFAULT_OVERFLOW_RATE,
            formats: Arc::new(FormatRegistry::with_builtin()),
        }
    }
}
