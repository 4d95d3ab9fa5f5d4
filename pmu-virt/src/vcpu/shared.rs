//! Registers that belong to several counters.
//!
//! They are never denied as a whole. They reach the counters whose owners let
//! them, under the names that legacy registers have for these; all other bits
//! stay as they are, and read as 0.

use arbiter::{CounterId, CounterSet, Shared};
use pmu_model::{Register, Vendor, WriteRule};

use super::{Here, VcpuPmu, WriteOutcome};

impl VcpuPmu {
    /// The bits of such a register that a legacy read yields.
    pub(super) fn read_shared(&mut self, here: &mut Here<'_>, register: Register) -> u64 {
        match register {
            Register::FixedControl => {
                self.fixed_control & fields(self.touchable(Shared::FixedControl))
            }
            Register::GlobalControl => self.shown(Shared::GlobalControl, self.global_control),
            Register::GlobalStatus => {
                self.settle_all(here);
                self.shown(Shared::GlobalStatus, self.global_status)
            }
            Register::PerfCapabilities => self.model.perf_capabilities().unwrap_or_default(),
            // The manuals give the others no content to be read.
            Register::GlobalStatusClear
            | Register::GlobalStatusSet
            | Register::Counter { .. }
            | Register::Select(_) => 0,
        }
    }

    /// A legacy write of such a register.
    pub(super) fn write_shared(
        &mut self,
        here: &mut Here<'_>,
        register: Register,
        value: u64,
    ) -> WriteOutcome {
        let accepted = match self.visible_rule(register) {
            Some(rule) => match rule.accept(value) {
                Some(accepted) => accepted,
                None => return WriteOutcome::Gp,
            },
            None => value,
        };
        match register {
            Register::FixedControl => self.write_fixed_control(here, accepted),
            Register::GlobalControl => {
                let touched = self.touchable(Shared::GlobalControl).bits();
                let wanted = self.behind(accepted) & touched;
                self.write_global_control(here, self.global_control & !touched | wanted);
            }
            Register::GlobalStatusClear => {
                self.settle_all(here);
                let touched = self.touchable(Shared::GlobalStatus).bits();
                self.global_status &= !(self.behind(accepted) & touched);
            }
            Register::GlobalStatusSet => {
                self.settle_all(here);
                let touched = self.touchable(Shared::GlobalStatus).bits();
                self.global_status |= self.behind(accepted) & touched;
            }
            Register::GlobalStatus => {
                return match self.model.vendor() {
                    Vendor::Intel => WriteOutcome::Gp,
                    Vendor::Amd => WriteOutcome::Done,
                };
            }
            Register::PerfCapabilities | Register::Counter { .. } | Register::Select(_) => {
                return WriteOutcome::Gp;
            }
        }
        WriteOutcome::Done
    }

    /// The bits that the register has for a guest which sees the counters that
    /// have a legacy name, and no others.
    fn visible_rule(&mut self, register: Register) -> Option<WriteRule> {
        let mut rule = self.model.write_rule(register)?;
        if let Some(reservations) = &mut self.reservations {
            let all = self.model.global_mask();
            let visible = reservations.unit.map().names().bits();
            let hidden = match register {
                Register::FixedControl => fields(CounterSet::from_bits(all & !visible)),
                _ => all & !visible,
            };
            rule.implemented &= !hidden;
        }
        Some(rule)
    }

    /// Counters that a shared control reaches.
    #[inline]
    pub(super) fn reached_by(&self, shared: Shared) -> CounterSet {
        match &self.reservations {
            None => CounterSet::from_bits(u64::MAX),
            Some(reservations) => reservations.unit.reached_by(shared),
        }
    }

    /// Those of them that have a legacy name, through which it does.
    #[inline]
    pub(super) fn touchable(&mut self, shared: Shared) -> CounterSet {
        match &mut self.reservations {
            None => CounterSet::from_bits(u64::MAX),
            Some(reservations) => {
                let named = reservations.unit.map().named();
                reservations.unit.reached_by(shared) & named
            }
        }
    }

    /// The bits of counters as a legacy register shows them.
    fn shown(&mut self, shared: Shared, bits: u64) -> u64 {
        match &mut self.reservations {
            None => bits,
            Some(reservations) => {
                let reached = reservations.unit.reached_by(shared).bits();
                reservations.unit.map().to_names(bits & reached)
            }
        }
    }

    /// Bits of a legacy register as bits of the counters behind the names.
    fn behind(&mut self, bits: u64) -> u64 {
        match &mut self.reservations {
            None => bits,
            Some(reservations) => reservations.unit.map().to_counters(bits),
        }
    }

    fn write_fixed_control(&mut self, here: &mut Here<'_>, value: u64) {
        let touched = self.touchable(Shared::FixedControl);
        let counters = (0..self.model.fixed()).map(CounterId::Fixed);
        let counters = counters.filter(|counter| touched.contains(*counter));
        for counter in counters.clone() {
            self.settle(here, counter);
        }
        let fields = fields(touched);
        self.fixed_control = self.fixed_control & !fields | value & fields;
        for counter in counters {
            self.take_control(here, counter);
        }
        self.refresh_needs(here.as_deref());
    }

    pub(super) fn write_global_control(&mut self, here: &mut Here<'_>, value: u64) {
        if value == self.global_control {
            return;
        }
        // Settled under the old value, then brought in line with the new one.
        let changed = CounterSet::from_bits(value ^ self.global_control);
        let counters = self.model.counters();
        let changed = counters.filter(|counter| changed.contains(*counter));
        for counter in changed.clone() {
            self.settle(here, counter);
        }
        self.global_control = value;
        for counter in changed {
            self.update(here, counter);
        }
        self.refresh_needs(here.as_deref());
    }
}

/// The fields of `IA32_FIXED_CTR_CTRL` that belong to the fixed-function
/// counters of a set.
pub(super) fn fields(counters: CounterSet) -> u64 {
    const MANY: u8 = 16;
    (0..MANY)
        .filter(|n| counters.contains(CounterId::Fixed(*n)))
        .map(|n| 0xf << (4 * u32::from(n)))
        .sum()
}
