//! The state of a machine as data: what a snapshot keeps, beside memory and devices.

use emu::State;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::common::SavedCommon;
use super::vcpu::EmuVcpuState;

/// Registers, interrupt controllers, PMUs and virtual time. What only makes the engine fast,
/// translations and decoded code, is not in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoomState {
    pub(super) shared: SavedCommon,
    pub(super) vcpus: Vec<EmuVcpuState>,
    /// Who had the last turn.
    pub(super) last: usize,
}

impl RoomState {
    /// The registers of a vCPU.
    #[must_use]
    pub fn registers(&self, vcpu: usize) -> Option<&State> {
        self.vcpus.get(vcpu).map(EmuVcpuState::registers)
    }
}

/// The instruction in hand has ended the machine, so that there is nothing to go on from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the machine ends with the instruction that it executes")]
pub struct NotSaved;
