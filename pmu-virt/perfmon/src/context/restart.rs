//! PFM_RESTART: the tool has dealt with a notification (§3.1.9, §3.5.15).

use perfmon_abi::wire::{Errno, Refusal};

use super::reset::Period;
use super::{Context, Phase};
use crate::format::Control;
use crate::moment::MessageQueue;

impl Context {
    /// PMDs that overflowed and were not reset are, with their long reset value;
    /// the vCPU goes on; a switch of sets that was put off takes place;
    /// monitoring resumes. A format decides on the first and the last of these.
    ///
    /// # Errors
    /// EBUSY: the context is not loaded, or not masked and without a format that
    /// can be restarted then. Others: the format's. Without a format nothing
    /// masks but what the tool was told of, so that there is always something to
    /// finish.
    pub(super) fn restart(&mut self, queue: &mut dyn MessageQueue) -> Result<(), Refusal> {
        let _ = queue;
        let active = match self.phase {
            Phase::Unloaded => {
                let reason = "the context is not loaded, so there is nothing to restart";
                return Err(Refusal::new(Errno::EBUSY, reason));
            }
            Phase::Loaded => true,
            Phase::Masked => false,
        };
        let control = self.ask_format(active)?;
        if control.reset_ovfl_pmds {
            self.reset_overflowed();
        }
        self.blocked = false;
        if control.mask_monitoring {
            self.phase = Phase::Masked;
            return Ok(());
        }
        self.phase = Phase::Loaded;
        if std::mem::take(&mut self.switch_pending) {
            self.switch(Period::Long);
        }
        Ok(())
    }

    fn ask_format(&mut self, active: bool) -> Result<Control, Refusal> {
        let mut control = Control::default();
        if let Some(sampler) = &mut self.sampler {
            let buffer = sampler.buffer.bytes();
            sampler.format.restart(buffer, active, &mut control)?;
            return Ok(control);
        }
        if active {
            let reason = "monitoring is not masked: there is no notification to finish";
            return Err(Refusal::new(Errno::EBUSY, reason));
        }
        control.reset_ovfl_pmds = true;
        Ok(control)
    }

    fn reset_overflowed(&mut self) {
        if let Some(set) = self.sets.get(&self.active) {
            let overflowed = set.overflowed;
            self.reset(self.active, overflowed, Period::Long);
        }
    }
}
