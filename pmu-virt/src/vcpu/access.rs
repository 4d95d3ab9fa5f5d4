//! RDMSR, WRMSR and RDPMC: decode, check, act.

use super::{ReadOutcome, VcpuPmu, WriteOutcome, index_of};
use crate::accounting;
use crate::ids::{MsrIndex, Vendor};
use crate::model::written_count;
use crate::register::{Register, WriteForm};
use arbiter::{Access, CounterId, CounterSet, Layer, Verdict};

impl VcpuPmu {
    /// RDMSR by `layer`. That the guest is at CPL 0 was checked before.
    pub fn rdmsr(&mut self, msr: MsrIndex, layer: Layer) -> ReadOutcome {
        let Some(register) = self.model.decode(msr) else {
            return self.read_page(msr, layer);
        };
        match self.verdict(register, layer, Access::Read) {
            Verdict::Permit => ReadOutcome::Value(self.read(register)),
            Verdict::Drop { read_as } => ReadOutcome::Value(read_as),
            Verdict::Fault => ReadOutcome::Gp,
        }
    }

    /// WRMSR by `layer`. That the guest is at CPL 0 was checked before.
    pub fn wrmsr(&mut self, msr: MsrIndex, value: u64, layer: Layer) -> WriteOutcome {
        let Some(register) = self.model.decode(msr) else {
            return match accounting::contains(msr) {
                true => WriteOutcome::Gp,
                false => WriteOutcome::NotHandled,
            };
        };
        match self.verdict(register, layer, Access::Write) {
            Verdict::Permit => self.write(register, value),
            Verdict::Drop { .. } => WriteOutcome::Done,
            Verdict::Fault => WriteOutcome::Gp,
        }
    }

    /// RDPMC by `layer`. CPL and CR4.PCE were checked before.
    pub fn rdpmc(&mut self, ecx: u32, layer: Layer) -> ReadOutcome {
        let Some(counter) = self.model.rdpmc_counter(ecx) else {
            return ReadOutcome::Gp;
        };
        match self.grant.check(layer, counter, Access::Read) {
            Verdict::Permit => ReadOutcome::Value(self.count(counter)),
            Verdict::Drop { read_as } => ReadOutcome::Value(read_as),
            Verdict::Fault => ReadOutcome::Gp,
        }
    }

    /// The grant speaks about counters and their selects; a register that
    /// belongs to all counters is open, and its bits for a counter that is
    /// not granted have no effect.
    #[inline]
    fn verdict(&self, register: Register, layer: Layer, access: Access) -> Verdict {
        match register {
            Register::Counter { counter, .. } => self.grant.check(layer, counter, access),
            Register::Select(n) => self.grant.check(layer, CounterId::Programmable(n), access),
            _ => Verdict::Permit,
        }
    }

    fn read(&mut self, register: Register) -> u64 {
        match register {
            Register::Counter { counter, .. } => self.count(counter),
            Register::Select(n) => self.select[usize::from(n)],
            Register::FixedControl => self.fixed_control,
            Register::GlobalControl => self.global_control,
            Register::GlobalStatus => {
                self.settle_all();
                self.global_status
            }
            Register::GlobalStatusClear | Register::GlobalStatusSet => 0,
            Register::PerfCapabilities => self.model.perf_capabilities().unwrap_or_default(),
        }
    }

    fn count(&mut self, counter: CounterId) -> u64 {
        self.settle(counter);
        self.counters[index_of(counter)].value
    }

    fn write(&mut self, register: Register, value: u64) -> WriteOutcome {
        let accepted = match self.model.write_rule(register) {
            Some(rule) => match rule.accept(value) {
                Some(accepted) => accepted,
                None => return WriteOutcome::Gp,
            },
            None => value,
        };
        match register {
            Register::Counter { counter, form } => return self.write_count(counter, form, value),
            Register::Select(n) => self.write_select(n, accepted),
            Register::FixedControl => self.write_fixed_control(accepted),
            Register::GlobalControl => self.write_global_control(accepted),
            Register::GlobalStatusClear => {
                self.settle_all();
                self.global_status &= !accepted;
            }
            Register::GlobalStatusSet => {
                self.settle_all();
                self.global_status |= accepted;
            }
            Register::GlobalStatus => {
                return match self.model.vendor() {
                    Vendor::Intel => WriteOutcome::Gp,
                    Vendor::Amd => WriteOutcome::Done,
                };
            }
            Register::PerfCapabilities => return WriteOutcome::Gp,
        }
        WriteOutcome::Done
    }

    fn write_count(&mut self, counter: CounterId, form: WriteForm, value: u64) -> WriteOutcome {
        let Some(count) = written_count(form, self.model.counter_mask(counter), value) else {
            return WriteOutcome::Gp;
        };
        self.settle(counter);
        let logical = &mut self.counters[index_of(counter)];
        logical.value = count;
        logical.times.start_over(self.ran);
        self.rearm(counter);
        WriteOutcome::Done
    }

    fn write_select(&mut self, n: u8, value: u64) {
        let counter = CounterId::Programmable(n);
        self.settle(counter);
        self.select[usize::from(n)] = value;
        self.take_control(counter);
        self.refresh_needs();
    }

    fn write_fixed_control(&mut self, value: u64) {
        for n in 0..self.model.fixed() {
            self.settle(CounterId::Fixed(n));
        }
        self.fixed_control = value;
        for n in 0..self.model.fixed() {
            self.take_control(CounterId::Fixed(n));
        }
        self.refresh_needs();
    }

    fn write_global_control(&mut self, value: u64) {
        if value == self.global_control {
            return;
        }
        // Settled under the old value, then brought in line with the new one.
        let changed = CounterSet::from_bits(value ^ self.global_control);
        let counters = self.model.counters();
        for counter in counters
            .clone()
            .filter(|counter| changed.contains(*counter))
        {
            self.settle(counter);
        }
        self.global_control = value;
        for counter in counters.filter(|counter| changed.contains(*counter)) {
            self.update(counter);
        }
        self.refresh_needs();
    }
}
