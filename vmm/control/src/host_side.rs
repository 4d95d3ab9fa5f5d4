//! What a vCPU has of the server.

use std::sync::Arc;

use super::desk::{Target, Tray};
use super::gauge::MemoryGauge;

/// A vCPU's way to the server.
#[derive(Debug)]
pub struct HostSide {
    /// Where its jobs lie.
    pub tray: Tray,
    pub(crate) gauge: Arc<MemoryGauge>,
    shared: bool,
}

impl HostSide {
    /// `shared`: vCPUs share cores, and the core looks after the tray.
    pub(crate) fn new(tray: Tray, gauge: Arc<MemoryGauge>, shared: bool) -> Self {
        debug_assert!(matches!(tray.target(), Target::Vcpu(_)));
        Self {
            tray,
            gauge,
            shared,
        }
    }

    /// vCPUs share cores.
    pub fn is_shared(&self) -> bool {
        self.shared
    }
}
