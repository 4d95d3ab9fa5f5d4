//! What the guest has written to its registers, and FREEZE_PERFMON_ON_PMI: a PMI stops
//! the counters.
//!
//! A counter is settled before a register changes, under the old controls, and that may
//! overflow and freeze. So a write has two phases: a plan names the counters to be settled,
//! and a commit changes the registers and says what is to be brought in line.
//!
//! What a PMI does depends on the version (SDM vol. 3B, "Freezing LBR and Performance
//! Counters on PMI"). Versions 2 and 3: when a counter overflows that asks for a PMI, the
//! enable bits of the global control register are cleared, and software sets them again.
//! From version 4 on: the status bit CTR_FRZ is set, and while it is, counters stand,
//! whatever the global control register says; software clears it. The control bit lies in
//! IA32_DEBUGCTL, whose other bits are the processor's.

use arbiter::{CounterId, CounterSet, Shared};
use instruction_facts::is_canonical;
use pmu_model::{
    CTR_FRZ, CountRequest, DEBUGCTL, FixedFunction, MAX_FIXED, MAX_PROGRAMMABLE, MISC_ENABLE,
    MsrIndex, OVF_BUFFER, PMI_IN_USE, PmuModel, Register, Vendor, WriteRule,
};

use super::terms::Reach;
use super::{MsrWrite, ReadOutcome, WriteOutcome};
use crate::state::{Hex, PmuState, SavedPebs};

/// `IA32_DEBUGCTL.FREEZE_PERFMON_ON_PMI`.
pub(super) const FREEZE_PERFMON_ON_PMI: u64 = 1 << 12;
/// Bits of `IA32_MISC_ENABLE` (SDM vol. 4, 1A0H), all read-only: there is a PMU, no
/// branch trace storage, no PEBS.
const PERFMON: u64 = 1 << 7;
const BTS_UNAVAILABLE: u64 = 1 << 11;
const PEBS_UNAVAILABLE: u64 = 1 << 12;

/// `Adaptive_Record` of an event select, and of FIXED0 in `IA32_FIXED_CTR_CTRL`.
const SELECT_ADAPTIVE: u64 = 1 << 34;
const FIXED_ADAPTIVE: u64 = 1 << 32;

/// One counter's field of `IA32_FIXED_CTR_CTRL`, at bit 0.
const FIELD: u64 = 0xf;

/// The lowest bit of a counter's field of `IA32_FIXED_CTR_CTRL`.
const fn field_of(n: u8) -> u32 {
    4 * n as u32
}

/// The fields of `IA32_FIXED_CTR_CTRL` that belong to the fixed-function
/// counters of a set, `Adaptive_Record` of PEBS included.
pub(super) fn fields(counters: CounterSet) -> u64 {
    const ONE: u64 = 0x1_0000_000f;
    (0..MAX_FIXED)
        .filter(|n| counters.contains(CounterId::Fixed(*n)))
        .map(|n| ONE << field_of(n))
        .sum()
}

/// Counters whose bits differ.
fn differing(one: CounterSet, other: CounterSet) -> CounterSet {
    CounterSet::from_bits(one.bits() ^ other.bits())
}

fn every_counter(model: &PmuModel) -> CounterSet {
    CounterSet::from_bits(model.global_mask())
}

/// A write that was checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    /// What is to be settled before it takes place.
    pub(super) settles: CounterSet,
    write: Write,
}

#[derive(Clone, Copy, Debug)]
enum Write {
    Nothing,
    Select(u8, u64),
    /// Some fields of the register of fixed-function counters.
    Fixed(CounterSet, u64),
    GlobalControl(u64),
    ClearStatus(u64),
    SetStatus(u64),
    /// Counters that stand because of CTR_FRZ.
    Frozen(CounterSet),
    PebsEnable(CounterSet),
    DataConfig(u64),
    DsArea(u64),
}

impl Plan {
    const NOTHING: Plan = Plan::of(CounterSet::EMPTY, Write::Nothing);
    const EVERY: CounterSet = CounterSet::from_bits(u64::MAX);

    const fn of(settles: CounterSet, write: Write) -> Self {
        Plan { settles, write }
    }
}

/// What follows from a write.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    /// Counters whose control was written.
    pub(super) controls: CounterSet,
    /// Counters that may start or stop.
    pub(super) updates: CounterSet,
    /// Other counters than before have PEBS.
    pub(super) pebs: bool,
    /// Counters whose next overflow is another one for that.
    pub(super) rearms: CounterSet,
    /// CTR_FRZ is set now, or no longer.
    pub(super) freezes: bool,
}

/// The registers that one vCPU's guest has written.
#[derive(Debug)]
pub(super) struct Registers {
    select: [u64; MAX_PROGRAMMABLE as usize],
    fixed_control: u64,
    global_control: u64,
    global_status: u64,
    /// Counters that have PEBS enabled.
    pebs_enable: CounterSet,
    /// `MSR_PEBS_DATA_CFG`.
    data_config: u64,
    /// `IA32_DS_AREA`.
    ds_area: u64,
    /// The guest wants PMIs to stop the counters.
    freezing: bool,
    /// There was a PMI that did not stop them yet.
    freeze_due: bool,
    /// Counters that stand because of CTR_FRZ.
    frozen: CounterSet,
}

impl Registers {
    pub(super) fn after_reset(model: &PmuModel) -> Self {
        Registers {
            select: [0; MAX_PROGRAMMABLE as usize],
            fixed_control: 0,
            global_control: model.global_control_reset(),
            global_status: 0,
            pebs_enable: CounterSet::EMPTY,
            data_config: 0,
            ds_area: 0,
            freezing: false,
            freeze_due: false,
            frozen: CounterSet::EMPTY,
        }
    }

    /// Decodes the control of a counter that is no sampler. The guest's cores have one
    /// thread each, so that any-thread means this one.
    pub(super) fn request(&self, model: &PmuModel, counter: CounterId) -> Option<CountRequest> {
        let request = match counter {
            CounterId::Ibs(_) => return None,
            CounterId::Programmable(n) => {
                let select = self.select.get(usize::from(n))?;
                CountRequest::decode(model.events(), *select)
            }
            CounterId::Fixed(n) => {
                CountRequest::decode_fixed(FixedFunction::of(n)?, self.fixed_control)
            }
        };
        Some(CountRequest {
            any_thread: false,
            ..request
        })
    }

    /// Whether the global controls let a counter count. Instruction-based sampling has no
    /// bit in them, and goes on.
    pub(super) fn let_count(&self, model: &PmuModel, reach: &Reach, counter: CounterId) -> bool {
        if matches!(counter, CounterId::Ibs(_)) {
            return true;
        }
        let enabled = !model.has_global_control()
            || !reach.reached_by(Shared::GlobalControl).contains(counter)
            || self.enable_bit(counter);
        enabled && !self.frozen.contains(counter)
    }

    fn enable_bit(&self, counter: CounterId) -> bool {
        let bit = counter.global_bit();
        bit.is_some_and(|bit| self.global_control & (1 << bit) != 0)
    }

    #[inline]
    pub(super) fn pebs_enable(&self) -> CounterSet {
        self.pebs_enable
    }

    pub(super) fn ds_area(&self) -> u64 {
        self.ds_area
    }

    /// Groups of a record of these counters: those of `MSR_PEBS_DATA_CFG`, if one of them
    /// asks for them.
    pub(super) fn pebs_groups(&self, counters: CounterSet) -> u64 {
        let adaptive = |counter| match counter {
            CounterId::Programmable(n) => self.select[usize::from(n)] & SELECT_ADAPTIVE != 0,
            CounterId::Fixed(n) => self.fixed_control & FIXED_ADAPTIVE << field_of(n) != 0,
            CounterId::Ibs(_) => false,
        };
        if counters.iter().any(adaptive) {
            self.data_config
        } else {
            0
        }
    }

    /// The event select, or the counter's field of `IA32_FIXED_CTR_CTRL`.
    pub(super) fn control(&self, counter: CounterId) -> Option<u64> {
        match counter {
            CounterId::Programmable(n) => Some(self.select[usize::from(n)]),
            CounterId::Fixed(n) => Some(self.fixed_control >> field_of(n) & FIELD),
            // Its registers have names of their own.
            CounterId::Ibs(_) => None,
        }
    }

    /// The counter's bit of the status, at bit 0. It was settled before.
    pub(super) fn overflow(&self, counter: CounterId) -> u64 {
        let bit = counter.global_bit().unwrap_or_default();
        self.global_status >> bit & 1
    }

    /// A write of that.
    pub(super) fn plan_overflow(&self, counter: CounterId, value: u64) -> Option<Plan> {
        let bit = counter.global_bit().unwrap_or_default();
        match value {
            0 => Some(Plan::NOTHING),
            arbiter::abi::OVERFLOW_CLEAR => {
                let settles = std::iter::once(counter).collect();
                Some(Plan::of(settles, Write::ClearStatus(1 << bit)))
            }
            _ => None,
        }
    }

    /// A write of an event select, or of one counter's field of
    /// `IA32_FIXED_CTR_CTRL`, given at bit 0.
    pub(super) fn plan_control(
        &self,
        model: &PmuModel,
        counter: CounterId,
        value: u64,
    ) -> Option<Plan> {
        let one = std::iter::once(counter).collect();
        match counter {
            CounterId::Programmable(n) => {
                let accepted = model.write_rule(Register::Select(n))?.accept(value)?;
                Some(Plan::of(one, Write::Select(n, accepted)))
            }
            CounterId::Fixed(n) => {
                let mut rule = model.write_rule(Register::FixedControl)?;
                rule.implemented = rule.implemented >> field_of(n) & FIELD;
                // All of the counter's field: without `Adaptive_Record`.
                let accepted = rule.accept(value)? << field_of(n);
                Some(Plan::of(one, Write::Fixed(one, accepted)))
            }
            CounterId::Ibs(_) => None,
        }
    }

    /// The bits of a register of several counters that a legacy read yields. Where it is
    /// the status, all counters were settled before.
    pub(super) fn read(&self, model: &PmuModel, reach: &Reach, register: Register) -> u64 {
        match register {
            Register::FixedControl => {
                self.fixed_control & fields(reach.touchable(Shared::FixedControl))
            }
            Register::GlobalControl => reach.shown(Shared::GlobalControl, self.global_control),
            Register::GlobalStatus => {
                let counters = reach.shown(Shared::GlobalStatus, self.global_status);
                // Those that belong to no counter.
                counters | self.global_status & !model.global_mask()
            }
            Register::GlobalInUse => self.in_use(model, reach),
            Register::PerfCapabilities => model.perf_capabilities().unwrap_or_default(),
            Register::PebsEnable => {
                let touched = reach.touchable(Shared::PebsEnable) & every_counter(model);
                reach.names_of(self.pebs_enable & touched).bits()
            }
            Register::PebsDataConfig => self.data_config,
            Register::DsArea => self.ds_area,
            // The manuals give the others no content to be read.
            Register::GlobalStatusClear
            | Register::GlobalStatusSet
            | Register::Ibs(_)
            | Register::Counter { .. }
            | Register::Select(_) => 0,
        }
    }

    /// A legacy write of such a register; `None` for #GP.
    pub(super) fn plan(
        &self,
        model: &PmuModel,
        reach: &Reach,
        register: Register,
        value: u64,
    ) -> Option<Plan> {
        let accepted = match visible_rule(model, reach, register) {
            Some(rule) => rule.accept(value)?,
            None => value,
        };
        let plan = match register {
            Register::FixedControl => {
                let touched = reach.touchable(Shared::FixedControl);
                let touched = touched & every_counter(model);
                let touched = touched & CounterSet::first(0, MAX_FIXED);
                let accepted = accepted & fields(touched);
                Plan::of(touched, Write::Fixed(touched, accepted))
            }
            Register::GlobalControl => {
                let touched = reach.touchable(Shared::GlobalControl).bits();
                let wanted = reach.behind(accepted) & touched;
                self.plan_global_control(model, self.global_control & !touched | wanted)
            }
            Register::GlobalStatusClear => {
                let cleared = status_behind(model, reach, accepted);
                Plan::of(Plan::EVERY, Write::ClearStatus(cleared))
            }
            Register::GlobalStatusSet => {
                let set = status_behind(model, reach, accepted);
                Plan::of(Plan::EVERY, Write::SetStatus(set))
            }
            Register::GlobalStatus => match model.vendor() {
                Vendor::Intel => return None,
                Vendor::Amd => Plan::NOTHING,
            },
            Register::PebsEnable => {
                let touched = reach.touchable(Shared::PebsEnable) & every_counter(model);
                let wanted = CounterSet::from_bits(reach.behind(accepted)) & touched;
                self.plan_pebs(self.pebs_enable & !touched | wanted)
            }
            Register::PebsDataConfig => Plan::of(CounterSet::EMPTY, Write::DataConfig(accepted)),
            Register::DsArea if is_canonical(accepted) => {
                Plan::of(CounterSet::EMPTY, Write::DsArea(accepted))
            }
            Register::DsArea
            | Register::GlobalInUse
            | Register::PerfCapabilities
            | Register::Ibs(_)
            | Register::Counter { .. }
            | Register::Select(_) => return None,
        };
        Some(plan)
    }

    /// Settled under the old value, then brought in line with the new one.
    fn plan_global_control(&self, model: &PmuModel, value: u64) -> Plan {
        let changed = CounterSet::from_bits(value ^ self.global_control);
        Plan::of(changed & every_counter(model), Write::GlobalControl(value))
    }

    fn plan_pebs(&self, enable: CounterSet) -> Plan {
        let changed = differing(self.pebs_enable, enable);
        Plan::of(changed, Write::PebsEnable(enable))
    }

    /// Counters that `IA32_PEBS_ENABLE` no longer reaches have no PEBS.
    pub(super) fn plan_pebs_reach(&self, reach: &Reach) -> Plan {
        self.plan_pebs(self.pebs_enable & reach.reached_by(Shared::PebsEnable))
    }

    /// Lets a PMI that was noted stop the counters. Where the enable bits are cleared,
    /// it is those that the guest can set again: of counters that have a legacy name, and
    /// whose owners let both freezing and the global control register reach them.
    pub(super) fn plan_pmi(&self, model: &PmuModel, reach: &Reach) -> Plan {
        if model.has_frozen_status() {
            return Plan::of(CounterSet::EMPTY, Write::SetStatus(CTR_FRZ));
        }
        let stopped = reach.touchable(Shared::GlobalControl) & reach.touchable(Shared::Freeze);
        self.plan_global_control(model, self.global_control & !stopped.bits())
    }

    /// Stops what CTR_FRZ reaches and starts what it no longer does: counters whose owners
    /// let freezing reach them, and that have a legacy name, so that nobody's are stopped
    /// who has no say in it.
    pub(super) fn plan_freeze(&self, model: &PmuModel, reach: &Reach) -> Plan {
        let frozen = if self.is_frozen() {
            reach.touchable(Shared::Freeze)
        } else {
            CounterSet::EMPTY
        };
        let changed = differing(self.frozen, frozen) & every_counter(model);
        Plan::of(changed, Write::Frozen(frozen))
    }

    /// Whether CTR_FRZ is set.
    #[inline]
    pub(super) fn is_frozen(&self) -> bool {
        self.global_status & CTR_FRZ != 0
    }

    /// Makes a write take place whose counters were settled.
    pub(super) fn commit(&mut self, plan: Plan) -> Change {
        let mut change = Change {
            controls: CounterSet::EMPTY,
            updates: CounterSet::EMPTY,
            pebs: false,
            rearms: CounterSet::EMPTY,
            freezes: false,
        };
        let was_frozen = self.is_frozen();
        match plan.write {
            Write::Nothing => {}
            Write::Select(n, value) => {
                self.select[usize::from(n)] = value;
                change.controls = plan.settles;
            }
            Write::Fixed(touched, value) => {
                self.fixed_control = self.fixed_control & !fields(touched) | value;
                change.controls = plan.settles;
            }
            Write::GlobalControl(value) => {
                self.global_control = value;
                change.updates = plan.settles;
            }
            Write::ClearStatus(bits) => self.global_status &= !bits,
            Write::SetStatus(bits) => self.global_status |= bits,
            Write::Frozen(frozen) => {
                self.frozen = frozen;
                change.updates = plan.settles;
            }
            Write::PebsEnable(enable) => {
                self.pebs_enable = enable;
                change.pebs = true;
                change.rearms = plan.settles;
            }
            Write::DataConfig(value) => self.data_config = value,
            Write::DsArea(value) => self.ds_area = value,
        }
        change.freezes = self.is_frozen() != was_frozen;
        change
    }

    /// A counter has overflowed. With `int` its control asks for a PMI, which stops the
    /// counters that freezing reaches; one that it does not reach stops no others: its
    /// owner keeps out of it.
    pub(super) fn overflowed(
        &mut self,
        model: &PmuModel,
        reach: &Reach,
        counter: CounterId,
        int: bool,
    ) {
        if model.has_status()
            && let Some(bit) = counter.global_bit()
        {
            self.global_status |= 1 << bit;
        }
        if int {
            let reached = reach.reached_by(Shared::Freeze);
            self.freeze_due |= self.freezing && reached.contains(counter);
        }
    }

    /// The buffer of PEBS is as full as the guest wants it, by records of these counters.
    pub(super) fn buffer_full(&mut self, reach: &Reach, counters: CounterSet) {
        self.global_status |= OVF_BUFFER;
        let reached = reach.reached_by(Shared::Freeze);
        self.freeze_due |= self.freezing && !(reached & counters).is_empty();
    }

    /// Whether PMIs stop the counters.
    #[inline]
    pub(super) fn is_freezing(&self) -> bool {
        self.freezing
    }

    /// Whether there was a PMI that did not stop them yet.
    #[inline]
    pub(super) fn is_freeze_due(&self) -> bool {
        self.freeze_due
    }

    /// Counters that were settled for it may have overflowed as well; all that can be
    /// stopped has been.
    pub(super) fn freeze_done(&mut self) {
        self.freeze_due = false;
    }

    /// RDMSR of an MSR that the model shares with the processor.
    pub(super) fn read_merged(&self, model: &PmuModel, msr: MsrIndex) -> Option<ReadOutcome> {
        let (ours, value) = match msr {
            MISC_ENABLE => (
                PERFMON | BTS_UNAVAILABLE | PEBS_UNAVAILABLE,
                PERFMON | BTS_UNAVAILABLE,
            ),
            _ => {
                let freeze = u64::from(self.freezing) * FREEZE_PERFMON_ON_PMI;
                (FREEZE_PERFMON_ON_PMI, freeze)
            }
        };
        let shares = model.shared_msrs().contains(&msr);
        shares.then_some(ReadOutcome::Merge { ours, value })
    }

    /// WRMSR of an index that the model does not have: one that it shares with the
    /// processor, or none of ours.
    pub(super) fn write_merged(model: &PmuModel, msr: MsrIndex, value: u64) -> MsrWrite {
        if !model.shared_msrs().contains(&msr) {
            return WriteOutcome::NotHandled.into();
        }
        let rest = match msr {
            // Read-only here; the processor's own say that it has neither.
            MISC_ENABLE => value | PERFMON | BTS_UNAVAILABLE | PEBS_UNAVAILABLE,
            _ => value & !FREEZE_PERFMON_ON_PMI,
        };
        MsrWrite {
            rest: Some(rest),
            ..WriteOutcome::Done.into()
        }
    }

    /// The processor has taken its bits of such a write.
    pub(super) fn rest_taken(&mut self, model: &PmuModel, msr: MsrIndex, value: u64) {
        if msr == DEBUGCTL && model.shared_msrs().contains(&msr) {
            self.freezing = value & FREEZE_PERFMON_ON_PMI != 0;
        }
    }

    /// What `IA32_PERF_GLOBAL_INUSE` shows: counters whose control selects something, and
    /// whether one of them asks for PMIs (SDM vol. 3B, "IA32_PERF_GLOBAL_INUSE MSR").
    fn in_use(&self, model: &PmuModel, reach: &Reach) -> u64 {
        const EVENT: u64 = 0xff;
        const RINGS: u64 = 0b11;
        const SELECT_INT: u64 = 1 << 20;
        const FIELD_INT: u64 = 1 << 3;
        let (mut used, mut with_pmi) = (CounterSet::EMPTY, CounterSet::EMPTY);
        for counter in model.counters() {
            let control = self.control(counter).unwrap_or_default();
            let (selects, int) = match counter {
                CounterId::Programmable(_) => (control & EVENT, control & SELECT_INT),
                CounterId::Fixed(_) => (control & RINGS, control & FIELD_INT),
                CounterId::Ibs(_) => (0, 0),
            };
            if selects != 0 {
                used.insert(counter);
            }
            if int != 0 {
                with_pmi.insert(counter);
            }
        }
        let any_pmi = reach.shown(Shared::GlobalStatus, with_pmi.bits()) != 0;
        let used = reach.shown(Shared::GlobalStatus, used.bits());
        used | if any_pmi { PMI_IN_USE } else { 0 }
    }

    /// Leaves nothing of a counter's former owner.
    pub(super) fn clear(&mut self, counter: CounterId) {
        match counter {
            CounterId::Programmable(n) => self.select[usize::from(n)] = 0,
            CounterId::Fixed(_) => {
                self.fixed_control &= !fields(std::iter::once(counter).collect());
            }
            CounterId::Ibs(_) => {}
        }
        if let Some(bit) = counter.global_bit() {
            self.global_status &= !(1 << bit);
        }
        self.pebs_enable.remove(counter);
    }

    /// Writes them to a state, without those of `held`, which somebody has reserved.
    pub(super) fn save(&self, model: &PmuModel, held: CounterSet, state: &mut PmuState) {
        let selects = (0..model.programmable()).filter_map(|n| {
            let select = *self.select.get(usize::from(n))?;
            let is_held = held.contains(CounterId::Programmable(n));
            Some(Hex(if is_held { 0 } else { select }))
        });
        state.selects = selects.collect();
        state.fixed_control = Hex(self.fixed_control & !fields(held));
        state.global_control = Hex(self.global_control);
        state.global_status = Hex(self.global_status & !held.bits());
        state.debug_control = self.freezing.then_some(Hex(FREEZE_PERFMON_ON_PMI));
        state.pebs = model.pebs().map(|_| SavedPebs {
            enable: Hex((self.pebs_enable & !held).bits()),
            data_config: Hex(self.data_config),
            ds_area: Hex(self.ds_area),
            armed: Vec::new(),
        });
    }

    /// Takes a state in after a reset. A counter that is reserved is enabled or not as its
    /// owner has it in `global_control`, of before.
    pub(super) fn restore(&mut self, held: CounterSet, global_control: u64, state: &PmuState) {
        for (select, saved) in self.select.iter_mut().zip(&state.selects) {
            *select = saved.0;
        }
        self.fixed_control = state.fixed_control.0;
        let held = held.bits();
        self.global_control = state.global_control.0 & !held | global_control & held;
        self.global_status = state.global_status.0;
        self.freezing = state.debug_control.is_some_and(|control| control.0 != 0);
        if let Some(saved) = &state.pebs {
            self.pebs_enable = CounterSet::from_bits(saved.enable.0);
            self.data_config = saved.data_config.0;
            self.ds_area = saved.ds_area.0;
        }
    }

    pub(super) fn global_control(&self) -> u64 {
        self.global_control
    }
}

/// The bits that the register has for a guest which sees the counters that
/// have a legacy name, and no others.
fn visible_rule(model: &PmuModel, reach: &Reach, register: Register) -> Option<WriteRule> {
    let mut rule = model.write_rule(register)?;
    let hidden = model.global_mask() & !reach.visible().bits();
    rule.implemented &= !match register {
        Register::FixedControl => fields(CounterSet::from_bits(hidden)),
        Register::PebsDataConfig => 0,
        _ => hidden,
    };
    Some(rule)
}

/// Bits that are written to a status register, as bits of the status: those of
/// counters that it reaches, and those that belong to none.
fn status_behind(model: &PmuModel, reach: &Reach, bits: u64) -> u64 {
    let counters = model.global_mask();
    let touched = reach.touchable(Shared::GlobalStatus).bits();
    reach.behind(bits & counters) & touched | bits & !counters
}
