//! `--control` and the options beside it, checked.

use std::path::PathBuf;
use std::sync::Arc;

use pmu_virt::perfmon::{DEFAULT_OVERFLOW_RATE, FormatRegistry, HostPolicy};

/// Who may connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// Permission bits of the socket.
    pub mode: u32,
    /// Its group; `None`: that of the VMM.
    pub group: Option<u32>,
}

/// `--control-connections` without a word.
pub const DEFAULT_CONNECTIONS: u64 = 64;

/// How host tools are served.
#[derive(Clone, Debug)]
pub struct ControlConfig {
    /// Path of the socket.
    pub socket: PathBuf,
    /// Who may connect.
    pub access: Access,
    /// Most connections at a time.
    pub connections: usize,
    /// Who gets counters that guest and tools both want.
    pub policy: HostPolicy,
    /// Most overflows of one context in a second.
    pub rate: u64,
    /// The sampling formats. Whoever keeps a reference can add formats at any
    /// time, also while the machine runs (3.5.8).
    pub formats: Arc<FormatRegistry>,
}

impl ControlConfig {
    /// The defaults, at this path.
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
