//! The minimal enforcing master: the paper's section III.B.2.

use super::error::Result;
use super::pool::KERNEL;
use super::{Discovery, Key, Master, MinimalMaster, Part, PcrPort};
use crate::{CounterId, CounterSet, abi};

/// What somebody meets who touches a counter without having it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denial {
    /// Reads yield 0, writes vanish: safe for software that expects no fault.
    Drop,
    /// #GP, and so a trace of who it was; RDPMC at CPL 0 is dropped all the same.
    Fault,
}

/// Also holds users in the kernel to what they have reserved: legacy registers
/// reach a counter while both its registers are reserved, not before or after.
#[derive(Debug)]
pub struct EnforcingMaster<P> {
    /// What keeps count.
    pub(super) base: MinimalMaster<P>,
    /// Control word of an open counter.
    pub(super) control: u64,
}

impl<P: PcrPort> EnforcingMaster<P> {
    /// As [`MinimalMaster::claim`]; then nobody has access.
    ///
    /// # Errors
    /// As there.
    pub fn claim(port: P, machine: Discovery, denial: Denial) -> Result<Self> {
        let mut master = EnforcingMaster {
            base: MinimalMaster::claim(port, machine)?,
            control: match denial {
                Denial::Drop => KERNEL,
                Denial::Fault => KERNEL | abi::CONTROL_FAULT,
            },
        };
        for counter in master.counters().iter() {
            // What is lost meanwhile is no longer among its counters.
            let _ = master.update_lock(counter);
        }
        Ok(master)
    }

    /// `pcr_update_lock` of the paper's figure 2, on every CPU.
    pub(super) fn update_lock(&mut self, counter: CounterId) -> Result {
        let (access, control) = match self.base.reserved(counter) {
            2 => (Key::DEFAULT, self.control),
            // FIXED_CTR_CTRL asks for no cookie: it would start a locked one.
            _ => (
                self.base.pool.secret,
                self.control & !abi::CONTROL_FIXED_CTRL,
            ),
        };
        self.base.pool.set(counter, access, control)
    }
}

impl<P: PcrPort> Master for EnforcingMaster<P> {
    fn counters(&self) -> CounterSet {
        self.base.counters()
    }

    fn reserve(&mut self, part: Part, counter: CounterId) -> Result {
        self.base.reserve(part, counter)?;
        self.update_lock(counter)
    }

    fn release(&mut self, part: Part, counter: CounterId) {
        self.base.release(part, counter);
        if self.counters().contains(counter) {
            // A release succeeds; a counter that is lost needs no lock.
            let _ = self.update_lock(counter);
        }
    }

    fn renew(&mut self, counter: CounterId) -> Result {
        self.base.renew(counter)
    }

    fn finish(&mut self) {
        self.base.finish();
    }
}
