//! Sampling formats: what is recorded at an overflow, and where (§3.5).

mod common;
mod compact;
mod default;
mod double;
mod registry;
#[cfg(test)]
mod tests;

pub use compact::CompactFormat;
pub use default::DefaultFormat;
pub use double::DoubleFormat;
pub use registry::FormatRegistry;

use std::fmt::Debug;
use std::sync::Arc;

use perfmon_abi::compact::GuestPlace;
use perfmon_abi::wire::{Errno, Refusal};

use super::bits::PmdBits;
use super::moment::{Moment, SampleBuffer};

/// What a format is told of the context that is made.
#[derive(Clone, Copy, Debug)]
pub struct Setup<'a> {
    /// `PFM_FL_*` of the context.
    pub ctx_flags: u32,
    /// PMDs that there are.
    pub num_pmds: u16,
    /// The format's own argument, [`SamplingFormat::arg_size`] bytes.
    pub arg: &'a [u8],
}

/// What becomes of an overflow or a restart (`pfm_ovfl_ctrl_t`, §3.5.14).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// Send a message, if the counter's PMC asks for notification.
    pub notify_user: bool,
    /// Reset the overflowed PMD, and those in its `reg_reset_pmds`.
    pub reset_ovfl_pmds: bool,
    /// Take the vCPU off its core until PFM_RESTART, where the context's flags
    /// allow it.
    pub block_thread: bool,
    /// Count nothing until PFM_RESTART.
    pub mask_monitoring: bool,
}

/// An overflow (`pfm_ovfl_arg_t`, §3.5.14).
#[derive(Clone, Debug)]
pub struct OverflowArg<'a> {
    /// The PMD that overflowed.
    pub ovfl_pmd: u16,
    /// The set that was active.
    pub active_set: u16,
    /// What was loaded into the PMD last.
    pub last_reset: u64,
    /// Its value now.
    pub value: u64,
    /// `reg_smpl_eventid` of its PMC.
    pub eventid: u64,
    /// Its PMC asks for notification.
    pub notify: bool,
    /// PMDs to record, as its PMC says, and their values by ascending index.
    pub smpl_pmds: PmdBits,
    pub values: &'a [u64],
    /// Where in its guest the vCPU is; none where nobody has looked.
    pub guest: Option<&'a GuestPlace>,
    /// PMDs that there are.
    pub num_pmds: u16,
    /// To be set by the handler.
    pub control: Control,
}

/// What a format records of the guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// Task and mapping.
    pub task: bool,
    /// Callers.
    pub chain: bool,
    /// So many bytes of a program's stack, and what its words lead to.
    pub stack: usize,
}

impl Wish {
    /// There is nothing to look for.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// What either asks for.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            task: self.task || other.task,
            chain: self.chain || other.chain,
            stack: self.stack.max(other.stack),
        }
    }
}

/// A sampling format. One serves many contexts; what it has to remember of one
/// is in that one's buffer.
pub trait SamplingFormat: Send + Sync + Debug {
    /// Its name, for people.
    fn name(&self) -> &str;

    /// Its UUID.
    fn uuid(&self) -> [u8; 16];

    /// Bytes of the argument that follows `pfarg_ctx_t`.
    fn arg_size(&self) -> usize {
        0
    }

    /// Messages that its contexts' queues hold, at least 1.
    fn queue_depth(&self) -> usize {
        1
    }

    /// It cannot work with more than set 0 (`PFM_FMTFL_NOSET`).
    fn only_set_0(&self) -> bool {
        false
    }

    /// Checks argument and context.
    ///
    /// # Errors
    /// What is wrong with them.
    fn validate(&self, setup: &Setup<'_>) -> Result<(), Refusal> {
        let _ = setup;
        Ok(())
    }

    /// Size of the buffer in bytes; 0: it has none.
    ///
    /// # Errors
    /// There can be no such buffer.
    fn size(&self, setup: &Setup<'_>) -> Result<usize, Refusal> {
        let _ = setup;
        Ok(0)
    }

    /// Prepares a buffer, which is all 0.
    ///
    /// # Errors
    /// It cannot be used.
    fn init(&self, setup: &Setup<'_>, buffer: &mut [u8]) -> Result<(), Refusal> {
        let _ = (setup, buffer);
        Ok(())
    }

    /// What it records of the guest, of which it is told in [`OverflowArg::guest`].
    fn wish(&self, setup: &Setup<'_>) -> Wish {
        let _ = setup;
        Wish::default()
    }

    /// Records one overflow. `moment.tsc` is the same for all overflows of one
    /// interrupt.
    ///
    /// # Errors
    /// Ends the handling of this interrupt's further overflows.
    fn handler(
        &self,
        buffer: &mut [u8],
        arg: &mut OverflowArg<'_>,
        moment: &Moment,
    ) -> Result<(), Refusal>;

    /// PFM_RESTART came. `active`: monitoring is not masked. A format without
    /// this call-back is restarted as a context without a format: what has
    /// overflowed is reset, and there is no active restart.
    ///
    /// # Errors
    /// The command fails with it. EBUSY: there is no active restart.
    fn restart(
        &self,
        buffer: &mut [u8],
        active: bool,
        control: &mut Control,
    ) -> Result<(), Refusal> {
        let _ = buffer;
        if active {
            let reason = "monitoring is not masked, and this sampling format has no active restart";
            return Err(Refusal::new(Errno::EBUSY, reason));
        }
        control.reset_ovfl_pmds = true;
        Ok(())
    }

    /// The context is destroyed.
    fn exit(&self, buffer: &mut [u8]) {
        let _ = buffer;
    }
}

/// A format with the buffer of one context.
#[derive(Debug)]
pub struct Sampler {
    format: Arc<dyn SamplingFormat>,
    buffer: Box<dyn SampleBuffer>,
    wish: Wish,
}

impl Sampler {
    /// Prepares `buffer`, of the size that the format has asked for.
    ///
    /// # Errors
    /// The format's.
    pub fn new(
        format: Arc<dyn SamplingFormat>,
        setup: &Setup<'_>,
        mut buffer: Box<dyn SampleBuffer>,
    ) -> Result<Self, Refusal> {
        format.init(setup, buffer.bytes())?;
        let wish = format.wish(setup);
        Ok(Sampler {
            format,
            buffer,
            wish,
        })
    }

    /// The format.
    #[must_use]
    pub fn format(&self) -> &dyn SamplingFormat {
        &*self.format
    }

    pub(super) fn wish(&self) -> Wish {
        self.wish
    }

    pub(super) fn queue_depth(&self) -> usize {
        self.format.queue_depth().max(1)
    }

    /// Records one overflow. An error ends the handling of further ones.
    pub(super) fn record(
        &mut self,
        arg: &mut OverflowArg<'_>,
        moment: &Moment,
    ) -> Result<(), Refusal> {
        self.format.handler(self.buffer.bytes(), arg, moment)
    }

    /// PFM_RESTART came; `active`: monitoring is not masked.
    pub(super) fn restart(&mut self, active: bool) -> Result<Control, Refusal> {
        let mut control = Control::default();
        self.format
            .restart(self.buffer.bytes(), active, &mut control)?;
        Ok(control)
    }
}

/// Tests read what was recorded.
#[cfg(test)]
impl Sampler {
    pub(super) fn recorded(&mut self) -> &[u8] {
        self.buffer.bytes()
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.format.exit(self.buffer.bytes());
    }
}
