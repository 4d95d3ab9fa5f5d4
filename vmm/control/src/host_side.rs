//! What a vCPU has of the server.

use std::sync::Arc;

use super::dispatcher::{JobQueue, Target};
use super::quantities::memory::MemoryGauge;

/// A vCPU's way to the server.
#[derive(Debug)]
pub struct ControlEndpoint {
    /// Where its jobs lie.
    pub jobs: JobQueue,
    pub(crate) gauge: Arc<MemoryGauge>,
    shared: bool,
}

impl ControlEndpoint {
    /// `shared`: vCPUs share cores, and the core looks after the queue.
    pub(crate) fn new(jobs: JobQueue, gauge: Arc<MemoryGauge>, shared: bool) -> Self {
        debug_assert!(matches!(jobs.target(), Target::Vcpu(_)));
        Self {
            jobs,
            gauge,
            shared,
        }
    }

    /// vCPUs share cores.
    pub fn is_shared(&self) -> bool {
        self.shared
    }
}
