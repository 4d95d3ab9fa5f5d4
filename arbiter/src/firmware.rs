//! What the unit knows of its machine's firmware: whether it still runs, and the code
//! that it leaves in SMM.

use alloc::sync::Arc;

use crate::abi;
use crate::layer::{Layer, Phase};
use crate::reason::Reason;

/// Ordinary memory that the firmware has chosen to become the code of SMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmramSource {
    /// Guest-physical address of its first byte.
    pub address: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// The firmware of one vCPU's machine.
#[derive(Clone, Debug)]
pub(crate) struct Firmware {
    /// The machine's, which all its units share.
    phase: Arc<Phase>,
    /// The machine has SMM, which counts as firmware.
    smm: bool,
    smram: Option<SmramSource>,
}

impl Firmware {
    pub(crate) fn new(phase: Arc<Phase>, smm: bool) -> Self {
        Firmware {
            phase,
            smm,
            smram: None,
        }
    }

    /// As after power-on. Whoever resets the machine restarts its phase.
    pub(crate) fn reset(&mut self) {
        self.smram = None;
    }

    #[inline]
    pub(crate) fn phase(&self) -> &Phase {
        &self.phase
    }

    #[cfg(test)]
    pub(crate) fn has_smm(&self) -> bool {
        self.smm
    }

    /// Whether code of this layer can run now, and so can answer.
    pub(crate) fn is_alive(&self, layer: Layer) -> bool {
        match layer {
            Layer::Firmware => self.smm || !self.phase.is_over(),
            Layer::GuestKernel => self.phase.is_over(),
            Layer::Hypervisor | Layer::GuestUser | Layer::HostTool => true,
        }
    }

    /// What CPUID says of it.
    pub(crate) fn features(&self) -> u32 {
        let flag = |on: bool, feature: u32| if on { feature } else { 0 };
        flag(self.phase.has_firmware(), abi::FEATURE_FIRMWARE)
            | flag(self.smm, abi::FEATURE_SMM)
            | flag(self.has_smram(), abi::FEATURE_SMRAM)
    }

    /// Whether the firmware can put code into SMRAM.
    fn has_smram(&self) -> bool {
        self.smm && self.phase.has_firmware()
    }

    /// What a value of `PHASE` says to put into SMRAM.
    pub(crate) fn smram_of(&self, value: u64) -> Result<Option<SmramSource>, Reason> {
        const WORD: u64 = abi::PHASE_PAGE_SIZE - 1;
        const FLAGS: u64 = (1 << abi::PHASE_PAGES_SHIFT) - 1;
        if value == abi::PHASE_END {
            return Ok(None);
        }
        let pages = (value & WORD) >> abi::PHASE_PAGES_SHIFT;
        let is_valid = self.has_smram()
            && value & FLAGS == abi::PHASE_END | abi::PHASE_SMRAM
            && (1..=abi::PHASE_PAGES_MAX).contains(&pages);
        let source = SmramSource {
            address: value & !WORD,
            len: pages * abi::PHASE_PAGE_SIZE,
        };
        is_valid.then_some(Some(source)).ok_or(Reason::Malformed)
    }

    /// Ends the firmware's phase, and notes what it wants to have in SMRAM.
    ///
    /// # Errors
    /// The value is malformed, or the phase was over.
    pub(crate) fn end_phase(&mut self, value: u64) -> Result<(), Reason> {
        let smram = self.smram_of(value)?;
        if !self.phase.end() {
            return Err(Reason::Phase);
        }
        self.smram = smram;
        Ok(())
    }

    pub(crate) fn take_smram(&mut self) -> Option<SmramSource> {
        self.smram.take()
    }

    /// The code is in SMRAM.
    pub(crate) fn stay_in_smm(&self) {
        self.phase.stay_in_smm();
    }
}
