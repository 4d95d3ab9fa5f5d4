//! `step`: every instruction, seen one by one.

use super::BackendEnv;
use super::instructions::{InstructionBackend, Watcher};

/// Counts what stepped instructions did.
///
/// On a host that cannot step CPL 3, nothing is counted for CPL 3 alone.
pub type StepBackend = InstructionBackend<Stepper>;

/// A KVM that steps.
#[derive(Debug)]
pub struct Stepper {
    sees_cpl3: bool,
}

impl Watcher for Stepper {
    const NAME: &'static str = "step";
    const STEPS: bool = true;

    fn is_blind_to_users(&self) -> bool {
        !self.sees_cpl3
    }

    fn lends_ticks(&self) -> bool {
        false
    }
}

impl StepBackend {
    /// A backend with all counters free, on a host that steps every ring.
    pub fn new() -> Self {
        InstructionBackend::of(Stepper { sees_cpl3: true })
    }

    /// Likewise, on a host that is as `env` says.
    pub fn on(env: &BackendEnv) -> Self {
        InstructionBackend::of(Stepper {
            sees_cpl3: env.steps_cpl3,
        })
    }
}

impl Default for StepBackend {
    fn default() -> Self {
        StepBackend::new()
    }
}
