//! What every arbiter offers: the classic four calls of Linux.

use super::error::Result;
use crate::{CounterId, CounterSet};

/// The two registers of a counter that are reserved apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The counter.
    Perfctr,
    /// Its event select; of a fixed-function counter its part of the control
    /// that all of them share.
    Evntsel,
}

/// An arbiter of the kernel's counters. They are named as legacy registers name
/// them.
pub trait Master {
    /// The counters that it holds on every CPU.
    fn counters(&self) -> CounterSet;

    /// Reserves one register, unless it has been already.
    ///
    /// # Errors
    /// `InUse`, `Unavailable` or `Lost` of [`ArbiterError`](super::ArbiterError).
    fn reserve(&mut self, part: Part, counter: CounterId) -> Result;

    /// Releases one register; always succeeds, and does nothing where it is not
    /// reserved.
    fn release(&mut self, part: Part, counter: CounterId);

    /// Starts the lease of a counter anew, where the host gives leases.
    ///
    /// # Errors
    /// `Unavailable` or `Lost` of [`ArbiterError`](super::ArbiterError).
    fn renew(&mut self, counter: CounterId) -> Result;

    /// Gives every counter back, whoever uses it; the arbiter holds none then.
    fn finish(&mut self);

    /// Linux's `reserve_perfctr_nmi`.
    ///
    /// # Errors
    /// As [`Master::reserve`].
    fn reserve_perfctr(&mut self, counter: CounterId) -> Result {
        self.reserve(Part::Perfctr, counter)
    }

    /// Linux's `release_perfctr_nmi`; always succeeds.
    fn release_perfctr(&mut self, counter: CounterId) {
        self.release(Part::Perfctr, counter);
    }

    /// Linux's `reserve_evntsel_nmi`.
    ///
    /// # Errors
    /// As [`Master::reserve`].
    fn reserve_evntsel(&mut self, counter: CounterId) -> Result {
        self.reserve(Part::Evntsel, counter)
    }

    /// Linux's `release_evntsel_nmi`; always succeeds.
    fn release_evntsel(&mut self, counter: CounterId) {
        self.release(Part::Evntsel, counter);
    }
}
