//! RDMSR, WRMSR and RDPMC: decode, check, act.

use arbiter::{Access, Caller, Cookie, CounterId, Layer, PcrRegister, Verdict};
use pmu_model::{MsrIndex, Register, WriteForm, accounting, written_count};

use super::{Here, MsrRead, MsrWrite, ReadOutcome, VcpuPmu, WriteOutcome, index_of};
use crate::core_pmu::CorePmu;

/// What belongs to one counter.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    /// The count, and how a written value becomes one.
    Count(WriteForm),
    /// The event select, or the counter's field of `IA32_FIXED_CTR_CTRL`.
    Control,
    /// Its bit of global status, at bit 0.
    Overflow,
}

impl VcpuPmu {
    /// RDMSR. That the guest is at CPL 0 was checked before.
    pub fn rdmsr(&mut self, core: &mut CorePmu, msr: MsrIndex, caller: Caller) -> MsrRead {
        let here = &mut self.here(Some(core));
        self.settle_freeze(here);
        // No model has registers where the block is.
        if PcrRegister::contains(msr.0) {
            return self.read_block(here, msr, caller);
        }
        MsrRead {
            outcome: self.read_model(here, msr, caller.layer),
            secret: false,
        }
    }

    fn read_model(&mut self, here: &mut Here<'_>, msr: MsrIndex, layer: Layer) -> ReadOutcome {
        let Some(register) = self.model.decode(msr) else {
            return self
                .read_shared_msr(msr)
                .unwrap_or_else(|| self.read_page(here, msr, layer));
        };
        match part_of(register) {
            Some((name, part)) => match self.named(name) {
                Some(counter) => {
                    self.read_as(here, (layer, Cookie::DEFAULT), counter, part, Access::Read)
                }
                None => ReadOutcome::NotHandled,
            },
            None => ReadOutcome::Value(self.read_shared(here, register)),
        }
    }

    /// WRMSR. That the guest is at CPL 0 was checked before.
    pub fn wrmsr(
        &mut self,
        core: &mut CorePmu,
        msr: MsrIndex,
        value: u64,
        caller: Caller,
    ) -> MsrWrite {
        let here = &mut self.here(Some(core));
        self.settle_freeze(here);
        if PcrRegister::contains(msr.0) {
            return self.write_block(here, msr, value, caller);
        }
        let Some(register) = self.model.decode(msr) else {
            return match accounting::contains(msr) {
                true => WriteOutcome::Gp.into(),
                false => self.write_shared_msr(msr, value),
            };
        };
        let outcome = match part_of(register) {
            Some((name, part)) => match self.named(name) {
                Some(counter) => {
                    let caller = (caller.layer, Cookie::DEFAULT);
                    self.write_as(here, caller, counter, part, value)
                }
                None => WriteOutcome::NotHandled,
            },
            None => self.write_shared(here, register, value),
        };
        MsrWrite {
            starts_counting: outcome == WriteOutcome::Done && starts_counting(register),
            ..outcome.into()
        }
    }

    /// RDPMC. CPL and CR4.PCE were checked before. What `caller` presents is
    /// looked at only if `ecx` is one that takes a cookie.
    pub fn rdpmc(&mut self, core: &mut CorePmu, ecx: u32, caller: Caller) -> ReadOutcome {
        let here = &mut self.here(Some(core));
        self.settle_freeze(here);
        let part = Part::Count(WriteForm::FullWidth);
        let Some(name) = self.model.rdpmc_counter(ecx) else {
            return match PcrRegister::rdpmc(ecx) {
                Some(counter) => self.read_alias(here, counter, part, caller, Access::Rdpmc),
                None => ReadOutcome::Gp,
            };
        };
        match self.named(name) {
            Some(counter) => self.read_as(
                here,
                (caller.layer, Cookie::DEFAULT),
                counter,
                part,
                Access::Rdpmc,
            ),
            None => ReadOutcome::Gp,
        }
    }

    /// A read of what belongs to one counter, if the caller may.
    #[inline]
    pub(super) fn read_as(
        &mut self,
        here: &mut Here<'_>,
        caller: (Layer, Cookie),
        counter: CounterId,
        part: Part,
        access: Access,
    ) -> ReadOutcome {
        match self.verdict(caller, counter, access) {
            Verdict::Permit => ReadOutcome::Value(self.read_part(here, counter, part)),
            Verdict::Drop { read_as } => ReadOutcome::Value(read_as),
            Verdict::Fault => ReadOutcome::Gp,
        }
    }

    /// A write of what belongs to one counter, if the caller may.
    #[inline]
    pub(super) fn write_as(
        &mut self,
        here: &mut Here<'_>,
        caller: (Layer, Cookie),
        counter: CounterId,
        part: Part,
        value: u64,
    ) -> WriteOutcome {
        match self.verdict(caller, counter, Access::Write) {
            Verdict::Permit => self.write_part(here, counter, part, value),
            Verdict::Drop { .. } => WriteOutcome::Done,
            Verdict::Fault => WriteOutcome::Gp,
        }
    }

    fn read_part(&mut self, here: &mut Here<'_>, counter: CounterId, part: Part) -> u64 {
        match (part, counter) {
            (Part::Count(_), _) => {
                self.settle(here, counter);
                self.counters[index_of(counter)].value
            }
            (Part::Control, CounterId::Programmable(n)) => self.select[usize::from(n)],
            (Part::Control, CounterId::Fixed(n)) => self.fixed_control >> field_of(n) & FIELD,
            (Part::Overflow, _) => {
                self.settle(here, counter);
                let bit = counter.global_bit().unwrap_or_default();
                self.global_status >> bit & 1
            }
        }
    }

    fn write_part(
        &mut self,
        here: &mut Here<'_>,
        counter: CounterId,
        part: Part,
        value: u64,
    ) -> WriteOutcome {
        match (part, counter) {
            (Part::Count(form), _) => self.write_count(here, counter, form, value),
            (Part::Control, CounterId::Programmable(n)) => {
                let rule = self.model.write_rule(Register::Select(n));
                match rule.map_or(Some(value), |rule| rule.accept(value)) {
                    Some(accepted) => self.write_select(here, n, accepted),
                    None => WriteOutcome::Gp,
                }
            }
            (Part::Control, CounterId::Fixed(n)) => self.write_fixed_field(here, n, value),
            (Part::Overflow, _) => self.write_overflow(here, counter, value),
        }
    }

    fn write_count(
        &mut self,
        here: &mut Here<'_>,
        counter: CounterId,
        form: WriteForm,
        value: u64,
    ) -> WriteOutcome {
        let Some(count) = written_count(form, self.model.counter_mask(counter), value) else {
            return WriteOutcome::Gp;
        };
        self.settle(here, counter);
        let logical = &mut self.counters[index_of(counter)];
        logical.value = count;
        logical.times.start_over(self.ran);
        self.rearm(here, counter);
        WriteOutcome::Done
    }

    fn write_select(&mut self, here: &mut Here<'_>, n: u8, value: u64) -> WriteOutcome {
        let counter = CounterId::Programmable(n);
        self.settle(here, counter);
        self.select[usize::from(n)] = value;
        self.take_control(here, counter);
        self.refresh_needs(here.as_deref());
        WriteOutcome::Done
    }

    /// One counter's field of `IA32_FIXED_CTR_CTRL`, given at bit 0.
    fn write_fixed_field(&mut self, here: &mut Here<'_>, n: u8, value: u64) -> WriteOutcome {
        let field = field_of(n);
        let Some(mut rule) = self.model.write_rule(Register::FixedControl) else {
            return WriteOutcome::Gp;
        };
        rule.implemented = rule.implemented >> field & FIELD;
        let Some(accepted) = rule.accept(value) else {
            return WriteOutcome::Gp;
        };
        let counter = CounterId::Fixed(n);
        self.settle(here, counter);
        self.fixed_control = self.fixed_control & !(FIELD << field) | accepted << field;
        self.take_control(here, counter);
        self.refresh_needs(here.as_deref());
        WriteOutcome::Done
    }

    fn write_overflow(
        &mut self,
        here: &mut Here<'_>,
        counter: CounterId,
        value: u64,
    ) -> WriteOutcome {
        let bit = counter.global_bit().unwrap_or_default();
        match value {
            0 => {}
            arbiter::abi::OVERFLOW_CLEAR => {
                self.settle(here, counter);
                self.global_status &= !(1 << bit);
            }
            _ => return WriteOutcome::Gp,
        }
        WriteOutcome::Done
    }
}

/// Whether a guest writes the register before it reads counts.
fn starts_counting(register: Register) -> bool {
    matches!(
        register,
        Register::Select(_) | Register::FixedControl | Register::GlobalControl
    )
}

/// The counter by its legacy name, and what of it, if the register belongs to
/// one.
#[inline]
fn part_of(register: Register) -> Option<(CounterId, Part)> {
    match register {
        Register::Counter { counter, form } => Some((counter, Part::Count(form))),
        Register::Select(n) => Some((CounterId::Programmable(n), Part::Control)),
        Register::FixedControl
        | Register::GlobalStatus
        | Register::GlobalControl
        | Register::GlobalStatusClear
        | Register::GlobalStatusSet
        | Register::PerfCapabilities => None,
    }
}

/// One counter's field of `IA32_FIXED_CTR_CTRL`, at bit 0.
const FIELD: u64 = 0xf;

/// The lowest bit of a counter's field of `IA32_FIXED_CTR_CTRL`.
const fn field_of(n: u8) -> u32 {
    4 * n as u32
}
