//! RDMSR, WRMSR and RDPMC: decode, check, act.
//!
//! Registers that belong to several counters are never denied as a whole. They
//! reach the counters whose owners let them, under the names that legacy
//! registers have for these; all other bits stay as they are, and read as 0.

use arbiter::{Access, Caller, CounterId, CounterSet, Layer, PcrRegister, Shared, Verdict};
use pmu_model::{
    CTR_FRZ, IbsRegister, MAX_FIXED, MsrIndex, PMI_IN_USE, Register, Vendor, WriteForm, WriteRule,
    accounting, written_count,
};

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
    /// A register of a sampler.
    Sampler(IbsRegister),
}

impl VcpuPmu {
    /// RDMSR. That the guest is at CPL 0 was checked before.
    pub fn rdmsr(&mut self, core: &mut CorePmu, msr: MsrIndex, caller: Caller) -> MsrRead {
        let here = &mut self.here(Some(core));
        if self.freeze.on {
            self.settle_freeze(here);
        }
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
            Some((name, part)) => match self.check_legacy(layer, name, Access::Read) {
                Some((counter, verdict)) => self.read_part(here, verdict, counter, part),
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
        let written = self.write(core, msr, value, caller);
        self.programmed |= written.starts_counting || written.sets_count;
        written
    }

    fn write(&mut self, core: &mut CorePmu, msr: MsrIndex, value: u64, caller: Caller) -> MsrWrite {
        let here = &mut self.here(Some(core));
        if self.freeze.on {
            self.settle_freeze(here);
        }
        if PcrRegister::contains(msr.0) {
            return self.write_block(here, msr, value, caller);
        }
        let Some(register) = self.model.decode(msr) else {
            return if accounting::contains(msr) {
                WriteOutcome::Gp.into()
            } else {
                self.write_shared_msr(msr, value)
            };
        };
        let outcome = match part_of(register) {
            Some((name, part)) => match self.check_legacy(caller.layer, name, Access::Write) {
                Some((counter, verdict)) => self.write_part(here, verdict, counter, part, value),
                None => WriteOutcome::NotHandled,
            },
            None => self.write_shared(here, register, value),
        };
        let is_start = matches!(
            register,
            Register::Select(_) | Register::FixedControl | Register::GlobalControl
        );
        let is_count = matches!(register, Register::Counter { .. });
        MsrWrite {
            outcome,
            rest: None,
            starts_counting: is_start && outcome == WriteOutcome::Done,
            sets_count: is_count && outcome == WriteOutcome::Done,
            secret: false,
        }
    }

    /// RDPMC. CPL and CR4.PCE were checked before. What `caller` presents is
    /// looked at only if `ecx` is one that takes a cookie.
    pub fn rdpmc(&mut self, core: &mut CorePmu, ecx: u32, caller: Caller) -> ReadOutcome {
        let here = &mut self.here(Some(core));
        if self.freeze.on {
            self.settle_freeze(here);
        }
        let part = Part::Count(WriteForm::FullWidth);
        let Some(name) = self.model.rdpmc_counter(ecx) else {
            return match PcrRegister::rdpmc(ecx) {
                Some(counter) => self.read_alias(here, counter, part, caller, Access::Rdpmc),
                None => ReadOutcome::Gp,
            };
        };
        match self.check_legacy(caller.layer, name, Access::Rdpmc) {
            Some((counter, verdict)) => self.read_part(here, verdict, counter, part),
            None => ReadOutcome::Gp,
        }
    }

    /// A read of what belongs to one counter, by the `verdict` on it.
    #[inline]
    pub(super) fn read_part(
        &mut self,
        here: &mut Here<'_>,
        verdict: Verdict,
        counter: CounterId,
        part: Part,
    ) -> ReadOutcome {
        match verdict {
            Verdict::Permit => {}
            Verdict::Drop { read_as } => return ReadOutcome::Value(read_as),
            Verdict::Fault => return ReadOutcome::Gp,
        }
        ReadOutcome::Value(match (part, counter) {
            (Part::Count(_), _) => {
                self.settle(here, counter);
                self.counters[index_of(counter)].value
            }
            (Part::Control, CounterId::Programmable(n)) => self.select[usize::from(n)],
            (Part::Control, CounterId::Fixed(n)) => self.fixed_control >> field_of(n) & FIELD,
            // Its registers have names of their own.
            (Part::Control, CounterId::Ibs(_)) => return ReadOutcome::Gp,
            (Part::Overflow, _) => {
                self.settle(here, counter);
                let bit = counter.global_bit().unwrap_or_default();
                self.global_status >> bit & 1
            }
            (Part::Sampler(register), _) => self.read_ibs(here, register),
        })
    }

    /// A write of what belongs to one counter, by the `verdict` on it.
    #[inline]
    pub(super) fn write_part(
        &mut self,
        here: &mut Here<'_>,
        verdict: Verdict,
        counter: CounterId,
        part: Part,
        value: u64,
    ) -> WriteOutcome {
        match (verdict, part) {
            (Verdict::Drop { .. }, _) => WriteOutcome::Done,
            (Verdict::Fault, _) => WriteOutcome::Gp,
            (Verdict::Permit, Part::Count(form)) => self.write_count(here, counter, form, value),
            (Verdict::Permit, Part::Control) => self.write_control(here, counter, value),
            (Verdict::Permit, Part::Overflow) => self.write_overflow(here, counter, value),
            (Verdict::Permit, Part::Sampler(register)) => self.write_ibs(here, register, value),
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
        self.pebs.disarm(counter);
        self.rearm(here, counter);
        WriteOutcome::Done
    }

    /// A write of an event select, or of one counter's field of
    /// `IA32_FIXED_CTR_CTRL`, given at bit 0.
    fn write_control(
        &mut self,
        here: &mut Here<'_>,
        counter: CounterId,
        value: u64,
    ) -> WriteOutcome {
        let (register, field) = match counter {
            CounterId::Programmable(n) => (Register::Select(n), 0),
            CounterId::Fixed(n) => (Register::FixedControl, field_of(n)),
            CounterId::Ibs(_) => return WriteOutcome::Gp,
        };
        let Some(mut rule) = self.model.write_rule(register) else {
            return WriteOutcome::Gp;
        };
        if register == Register::FixedControl {
            rule.implemented = rule.implemented >> field & FIELD;
        }
        let Some(accepted) = rule.accept(value) else {
            return WriteOutcome::Gp;
        };
        self.settle(here, counter);
        match counter {
            CounterId::Programmable(n) => self.select[usize::from(n)] = accepted,
            // All of the counter's field: without `Adaptive_Record`.
            CounterId::Fixed(_) => {
                let all = fields(std::iter::once(counter).collect());
                self.fixed_control = self.fixed_control & !all | accepted << field;
            }
            CounterId::Ibs(_) => {}
        }
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

/// The counter by its legacy name, and what of it, if the register belongs to
/// one.
#[inline]
pub(super) fn part_of(register: Register) -> Option<(CounterId, Part)> {
    match register {
        Register::Counter { counter, form } => Some((counter, Part::Count(form))),
        Register::Select(n) => Some((CounterId::Programmable(n), Part::Control)),
        Register::Ibs(register) => {
            let sampler = CounterId::Ibs(register.sampler()?);
            Some((sampler, Part::Sampler(register)))
        }
        Register::FixedControl
        | Register::GlobalStatus
        | Register::GlobalControl
        | Register::GlobalStatusClear
        | Register::GlobalStatusSet
        | Register::GlobalInUse
        | Register::PerfCapabilities
        | Register::PebsEnable
        | Register::PebsDataConfig
        | Register::DsArea => None,
    }
}

/// One counter's field of `IA32_FIXED_CTR_CTRL`, at bit 0.
const FIELD: u64 = 0xf;

/// The lowest bit of a counter's field of `IA32_FIXED_CTR_CTRL`.
const fn field_of(n: u8) -> u32 {
    4 * n as u32
}

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
                let counters = self.shown(Shared::GlobalStatus, self.global_status);
                counters | self.indicators()
            }
            Register::GlobalInUse => self.in_use(),
            Register::PerfCapabilities => self.model.perf_capabilities().unwrap_or_default(),
            Register::Ibs(register) => self.read_ibs(here, register),
            Register::PebsEnable => self.read_pebs_enable(),
            Register::PebsDataConfig => self.pebs.data_config,
            Register::DsArea => self.pebs.ds_area,
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
        if let Register::Ibs(register) = register {
            return self.write_ibs(here, register, value);
        }
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
                let cleared = self.status_behind(accepted);
                self.write_status(here, self.global_status & !cleared);
            }
            Register::GlobalStatusSet => {
                self.settle_all(here);
                let set = self.status_behind(accepted);
                self.write_status(here, self.global_status | set);
            }
            Register::GlobalStatus => {
                return match self.model.vendor() {
                    Vendor::Intel => WriteOutcome::Gp,
                    Vendor::Amd => WriteOutcome::Done,
                };
            }
            Register::PebsEnable => self.write_pebs_enable(here, accepted),
            Register::PebsDataConfig => self.pebs.data_config = accepted,
            Register::DsArea if is_canonical(accepted) => self.pebs.ds_area = accepted,
            Register::DsArea
            | Register::GlobalInUse
            | Register::PerfCapabilities
            | Register::Ibs(_)
            | Register::Counter { .. }
            | Register::Select(_) => return WriteOutcome::Gp,
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
                Register::PebsDataConfig => 0,
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
    pub(super) fn behind(&mut self, bits: u64) -> u64 {
        match &mut self.reservations {
            None => bits,
            Some(reservations) => reservations.unit.map().to_counters(bits),
        }
    }

    /// Bits of the status that belong to no counter.
    #[inline]
    fn indicators(&self) -> u64 {
        self.global_status & !self.model.global_mask()
    }

    /// Bits that are written to a status register, as bits of the status: those of
    /// counters that it reaches, and those that belong to none.
    fn status_behind(&mut self, bits: u64) -> u64 {
        let counters = self.model.global_mask();
        let touched = self.touchable(Shared::GlobalStatus).bits();
        self.behind(bits & counters) & touched | bits & !counters
    }

    /// Replaces the status, by which counters may start or stop.
    fn write_status(&mut self, here: &mut Here<'_>, value: u64) {
        let changed = value ^ self.global_status;
        self.global_status = value;
        if changed & CTR_FRZ != 0 {
            self.take_freeze(here);
        }
    }

    /// What `IA32_PERF_GLOBAL_INUSE` shows: counters whose control selects something, and
    /// whether one of them asks for PMIs (SDM vol. 3B, "IA32_PERF_GLOBAL_INUSE MSR").
    fn in_use(&mut self) -> u64 {
        const EVENT: u64 = 0xff;
        const RINGS: u64 = 0b11;
        const SELECT_INT: u64 = 1 << 20;
        const FIELD_INT: u64 = 1 << 3;
        let (mut used, mut with_pmi) = (CounterSet::EMPTY, CounterSet::EMPTY);
        for counter in self.model.counters() {
            let (selects, int) = match counter {
                CounterId::Programmable(n) => {
                    let select = self.select[usize::from(n)];
                    (select & EVENT, select & SELECT_INT)
                }
                CounterId::Fixed(n) => {
                    let field = self.fixed_control >> field_of(n);
                    (field & RINGS, field & FIELD_INT)
                }
                CounterId::Ibs(_) => (0, 0),
            };
            if selects != 0 {
                used.insert(counter);
            }
            if int != 0 {
                with_pmi.insert(counter);
            }
        }
        let any_pmi = self.shown(Shared::GlobalStatus, with_pmi.bits()) != 0;
        let used = self.shown(Shared::GlobalStatus, used.bits());
        used | if any_pmi { PMI_IN_USE } else { 0 }
    }

    fn write_fixed_control(&mut self, here: &mut Here<'_>, value: u64) {
        let touched = self.touchable(Shared::FixedControl);
        let counters = self.model.fixed_counters();
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
/// counters of a set, `Adaptive_Record` of PEBS included.
pub(super) fn fields(counters: CounterSet) -> u64 {
    const ONE: u64 = 0x1_0000_000f;
    (0..MAX_FIXED)
        .filter(|n| counters.contains(CounterId::Fixed(*n)))
        .map(|n| ONE << (4 * u32::from(n)))
        .sum()
}

/// Whether an address has 48 bits and their sign.
pub(super) const fn is_canonical(address: u64) -> bool {
    let sign = address.cast_signed() >> 47;
    sign == 0 || sign == -1
}
