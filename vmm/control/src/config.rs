//! `--control` and the options beside it, checked.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

use perfmon_abi::wire::MAX_PAYLOAD;
use pmu_virt::EventFilters;
use pmu_virt::perfmon::{DEFAULT_OVERFLOW_RATE, FormatRegistry, HostPolicy, MAX_CONTEXTS};

use umpire_service::Access;

use crate::sys::PAGE;

/// `--control-connections` without a word.
const DEFAULT_CONNECTIONS: usize = 64;

/// The range of `cf_arg_size_max`: a page, the default, to what fits into a packet.
pub const ARG_SIZES: RangeInclusive<usize> = PAGE..=MAX_PAYLOAD;
/// `cf_smpl_buf_size_max` without a word.
const DEFAULT_BUFFERS: u64 = 64 << 20;

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
    /// Most contexts of a vCPU, and of a core, up to
    /// [`MAX_CONTEXTS`](pmu_virt::perfmon::MAX_CONTEXTS).
    pub contexts_per_vcpu: usize,
    /// Who may create contexts for cores (`cf_sys_gid`), and for vCPUs
    /// (`cf_thread_gid`); `None`: whoever may connect.
    pub sys_gid: Option<u32>,
    /// See `sys_gid`.
    pub thread_gid: Option<u32>,
    /// Tools that run in this very process may do what members of both groups may.
    pub own_tools: bool,
    /// Most bytes of a vector argument (`cf_arg_size_max`).
    pub arg_size: usize,
    /// Bytes of all sampling buffers (`cf_smpl_buf_size_max`).
    pub buffers: u64,
    /// Which events whose tools may count.
    pub events: EventFilters,
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
            connections: DEFAULT_CONNECTIONS,
            policy: HostPolicy::default(),
            rate: DEFAULT_OVERFLOW_RATE,
            contexts_per_vcpu: MAX_CONTEXTS,
            sys_gid: None,
            thread_gid: None,
            own_tools: false,
            arg_size: *ARG_SIZES.start(),
            buffers: DEFAULT_BUFFERS,
            events: EventFilters::default(),
            formats: Arc::new(FormatRegistry::with_builtin()),
        }
    }
}
