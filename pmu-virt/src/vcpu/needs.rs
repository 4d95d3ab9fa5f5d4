//! What counting needs of the VMM.

use super::{VcpuPmu, index_of};
use crate::attached::Hosted;
use crate::core_pmu::CorePmu;

/// What the VMM has to do for the counts; changes at writes and resets, and at
/// whatever is done to host contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Tell the ring in [`Progress::Left`](crate::Progress::Left), and keep
    /// [`VcpuPmu::deadline`].
    pub ring: bool,
    /// Step the guest and tell each instruction.
    pub stepping: bool,
    /// Some counter is running, or waits for its turn, or a host context is
    /// started.
    pub counting: bool,
}

impl VcpuPmu {
    /// What the VMM has to do while the guest runs.
    #[inline]
    pub fn needs(&self) -> Needs {
        self.needs
    }

    pub(super) fn refresh_needs(&mut self, core: Option<&CorePmu>) {
        let is_running = |counter| self.counters[index_of(counter)].is_running();
        let mut running = self.active.iter().any(is_running);
        let mut active = false;
        if self.hosting {
            running |= core.is_some_and(|core| core.bank.is_counting());
            active = self.hosts(core).any(Hosted::is_active);
        }
        self.needs = match core {
            Some(core) => Needs {
                ring: running && core.backend().needs_ring(),
                stepping: running && core.backend().needs_stepping(),
                // Turns go on where none of the first counters could be had.
                counting: running || active || self.multiplexer.is_active(),
            },
            None => Needs::default(),
        };
    }
}
