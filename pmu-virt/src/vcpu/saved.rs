//! A PMU's state, out and in again.

use arbiter::{CounterId, CounterSet};
use pmu_model::{Pebs, PmuModel, Register, Ticks};

use super::access::{fields, is_canonical};
use super::ibs::saved_registers;
use super::pmi::FREEZE_PERFMON_ON_PMI;
use super::times::Times;
use super::{VcpuPmu, index_of};
use crate::core_pmu::CorePmu;
use crate::state::{
    CounterName, Hex, PmuState, SavedCounter, SavedPebs, SavedSnapshot, StateError,
};

/// Bits of a status word that have a meaning.
const STATUS_BITS: u64 = 0x00ff_ffff;

impl VcpuPmu {
    /// The whole state, counts settled. To be called on a core or after
    /// [`VcpuPmu::depart`]: counts that stay on a core it was parked on are
    /// not seen.
    ///
    /// Reservations are no part of it: the guest will boot anew, and nobody
    /// will have the cookies. A counter that is reserved is saved as one that
    /// was given back, with nothing of its owner's in it. Host contexts are no
    /// part of it either: they are the host's.
    pub fn save(&mut self, core: Option<&mut CorePmu>) -> PmuState {
        let here = &mut self.here(core);
        self.settle_freeze(here);
        let held = self.held();
        let fields = fields(held);
        let counters = self.model.counters();
        let mut state = PmuState {
            model: self.model.to_string(),
            selects: (0..self.model.programmable())
                .filter_map(|n| Some((n, self.select.get(usize::from(n))?)))
                .map(|(n, select)| {
                    if held.contains(CounterId::Programmable(n)) {
                        Hex(0)
                    } else {
                        Hex(*select)
                    }
                })
                .collect(),
            fixed_control: Hex(self.fixed_control & !fields),
            global_control: Hex(self.global_control),
            global_status: Hex(self.global_status & !held.bits()),
            debug_control: self.freeze.on.then_some(Hex(FREEZE_PERFMON_ON_PMI)),
            pebs: self.model.pebs().map(|_| SavedPebs {
                enable: Hex((self.pebs.enabled & !held).bits()),
                data_config: Hex(self.pebs.data_config),
                ds_area: Hex(self.pebs.ds_area),
                armed: (self.pebs.waiting() & !held)
                    .iter()
                    .map(CounterName)
                    .collect(),
            }),
            counters: counters
                .clone()
                .map(|counter| {
                    if held.contains(counter) {
                        SavedCounter::unused(counter)
                    } else {
                        self.save_counter(here.as_deref(), counter)
                    }
                })
                .collect(),
            pending_pmi: (self.pmi.counters() & !held)
                .iter()
                .map(CounterName)
                .collect(),
            snapshot: SavedSnapshot {
                sequence: self.snapshot.sequence,
                counters: counters
                    .map(|counter| {
                        if held.contains(counter) {
                            Default::default()
                        } else {
                            self.snapshot.counters[index_of(counter)].map(Hex)
                        }
                    })
                    .collect(),
            },
            was_programmed: false,
            ibs: self.save_ibs(here, held),
            reservations: None,
        };
        // Said only where nothing else shows it, so that older versions read the others.
        state.was_programmed = self.programmed && !shows_use(&self.model, &state);
        state
    }

    fn save_counter(&self, core: Option<&CorePmu>, counter: CounterId) -> SavedCounter {
        let logical = &self.counters[index_of(counter)];
        SavedCounter {
            counter: CounterName(counter),
            value: Hex(logical.value),
            programmed: logical.request.is_some(),
            events: logical.counted,
            time_enabled: logical.times.time_enabled(self.ran).0,
            time_running: logical.times.time_running(self.ran).0,
            time_unaccounted: logical.times.unaccounted(self.ran).0,
            provenance: logical.provenance,
            loss: self.report_of(core, counter).and_then(|report| report.loss),
        }
    }

    /// Takes a state in. Every register then reads as it did; what is enabled
    /// counts on, as far as this core can count it; pending PMIs are taken by
    /// [`VcpuPmu::pmi_due`]. Counters that are reserved here stay so, and take
    /// nothing in.
    ///
    /// # Errors
    /// The state is not one of this model; nothing was changed then.
    pub fn restore(
        &mut self,
        core: Option<&mut CorePmu>,
        state: &PmuState,
    ) -> Result<(), StateError> {
        let here = &mut self.here(core);
        check(&self.model, state)?;
        let kept = self.global_control & self.held().bits();
        self.reset_registers(here);
        for (select, saved) in self.select.iter_mut().zip(&state.selects) {
            *select = saved.0;
        }
        self.fixed_control = state.fixed_control.0;
        // A counter that is reserved is enabled or not as its owner has it.
        self.global_control = state.global_control.0 & !self.held().bits() | kept;
        self.global_status = state.global_status.0;
        self.take_freeze(here);
        self.freeze.on = state.debug_control.is_some_and(|control| control.0 != 0);
        if let Some(saved) = &state.pebs {
            self.pebs.enabled = CounterSet::from_bits(saved.enable.0);
            self.pebs.data_config = saved.data_config.0;
            self.pebs.ds_area = saved.ds_area.0;
            self.pebs.armed = saved.armed.iter().map(|name| name.0).collect();
        }
        self.snapshot.sequence = state.snapshot.sequence;
        for (counter, words) in self.model.counters().zip(&state.snapshot.counters) {
            self.snapshot.counters[index_of(counter)] = words.map(|word| word.0);
        }
        for saved in &state.counters {
            let request = if saved.programmed {
                self.decode_request(saved.counter.0)
            } else {
                None
            };
            let logical = &mut self.counters[index_of(saved.counter.0)];
            logical.request = request;
            logical.value = saved.value.0;
            logical.counted = saved.events;
            logical.times = Times::restored(
                Ticks(saved.time_enabled),
                Ticks(saved.time_running),
                Ticks(saved.time_unaccounted),
            );
            logical.provenance = saved.provenance;
            logical.loss = saved.loss;
        }
        self.programmed = state.was_programmed || shows_use(&self.model, state);
        for saved in &state.counters {
            self.update(here, saved.counter.0);
        }
        self.restore_ibs(here, state.ibs.as_ref());
        let pending = state.pending_pmi.iter().map(|name| name.0);
        self.pmi.restore(pending.collect());
        for counter in self.held().iter() {
            self.clear(here, counter);
        }
        self.refresh_needs(here.as_deref());
        Ok(())
    }
}

/// Whether the registers of a state show that its guest has set or started a counter.
fn shows_use(model: &PmuModel, state: &PmuState) -> bool {
    let used = |saved: &SavedCounter| saved.programmed || saved.value.0 != 0;
    state.counters.iter().any(used) || state.global_control.0 != model.global_control_reset()
}

/// Whether a PMU of `model` can be in this state.
fn check(model: &PmuModel, state: &PmuState) -> Result<(), StateError> {
    if state.reservations.is_some() {
        return Err(StateError::Reservations);
    }
    let here = model.to_string();
    if !PmuModel::parse(&state.model).is_ok_and(|saved| saved.to_string() == here) {
        return Err(StateError::Model {
            saved: state.model.clone(),
            here,
        });
    }
    let counters = model.counters().count();
    length("selects", state.selects.len(), model.programmable().into())?;
    length("counters", state.counters.len(), counters)?;
    let words = &state.snapshot.counters;
    length("counters in its snapshot", words.len(), counters)?;

    for (n, select) in (0..).zip(&state.selects) {
        control(
            model,
            Register::Select(n),
            || format!("select {n}"),
            *select,
        )?;
    }
    let name = |name: &'static str| move || name.to_owned();
    let (fixed, global) = (state.fixed_control, state.global_control);
    control(model, Register::FixedControl, name("fixed control"), fixed)?;
    control(
        model,
        Register::GlobalControl,
        name("global control"),
        global,
    )?;
    let status = model.status_bits();
    bits(name("global status"), state.global_status, status)?;
    if let Some(control) = state.debug_control {
        let there = if model.can_freeze() {
            FREEZE_PERFMON_ON_PMI
        } else {
            0
        };
        bits(name("debug control"), control, there)?;
    }

    if let Some(saved) = &state.pebs {
        check_pebs(model, saved)?;
    }
    for (expected, saved) in model.counters().zip(&state.counters) {
        check_counter(model, expected, saved, state)?;
    }
    for (counter, [status, _, _, count]) in model.counters().zip(words) {
        let named = |what| move || format!("the snapshot's {what} of {counter}");
        bits(named("status"), *status, STATUS_BITS)?;
        bits(named("count"), *count, model.counter_mask(counter))?;
    }
    if let Some(ibs) = &state.ibs {
        if model.ibs() == 0 {
            return Err(StateError::Ibs);
        }
        for (name, value, there) in saved_registers(model, ibs) {
            bits(|| name.to_owned(), Hex(value), there)?;
        }
    }
    match state.pending_pmi.iter().find(|name| !model.has(name.0)) {
        Some(name) => Err(StateError::NoSuchCounter(name.0)),
        None => Ok(()),
    }
}

fn check_pebs(model: &PmuModel, saved: &SavedPebs) -> Result<(), StateError> {
    let rule = |register| {
        let there = model
            .write_rule(register)
            .filter(|_| model.pebs().is_some());
        there.map_or(0, |rule| rule.implemented)
    };
    let name = |name: &'static str| move || name.to_owned();
    let groups = if model.pebs().is_some_and(Pebs::is_baseline) {
        rule(Register::PebsDataConfig)
    } else {
        0
    };
    bits(
        name("PEBS enable"),
        saved.enable,
        rule(Register::PebsEnable),
    )?;
    bits(name("PEBS data configuration"), saved.data_config, groups)?;
    if !is_canonical(saved.ds_area.0) || model.pebs().is_none() && saved.ds_area.0 != 0 {
        return Err(StateError::Address {
            register: "the debug store area",
            value: saved.ds_area.0,
        });
    }
    match saved.armed.iter().find(|name| !model.has(name.0)) {
        Some(name) => Err(StateError::NoSuchCounter(name.0)),
        None => Ok(()),
    }
}

fn check_counter(
    model: &PmuModel,
    expected: CounterId,
    saved: &SavedCounter,
    state: &PmuState,
) -> Result<(), StateError> {
    let found = saved.counter.0;
    if found != expected {
        return Err(StateError::Order { found, expected });
    }
    let named = || format!("counter {found}");
    bits(named, saved.value, model.counter_mask(found))?;
    let time = saved.time_running.max(saved.time_unaccounted);
    if time > saved.time_enabled {
        return Err(StateError::Times(found));
    }
    let control = match found {
        CounterId::Programmable(n) => state.selects.get(usize::from(n)).map_or(0, |s| s.0),
        CounterId::Fixed(n) => state.fixed_control.0 >> (4 * u32::from(n)) & 0xf,
        CounterId::Ibs(_) => 0,
    };
    let used = control != 0 || saved.events != 0 || saved.time_enabled != 0;
    let labelled = saved.provenance.is_some() || saved.loss.is_some();
    if !saved.programmed && (used || labelled) {
        return Err(StateError::Unprogrammed(found));
    }
    Ok(())
}

fn length(what: &'static str, found: usize, expected: usize) -> Result<(), StateError> {
    if found != expected {
        return Err(StateError::Length {
            what,
            found,
            expected,
        });
    }
    Ok(())
}

fn control(
    model: &PmuModel,
    register: Register,
    name: impl FnOnce() -> String,
    value: Hex,
) -> Result<(), StateError> {
    let exists = register != Register::GlobalControl || model.has_global_control();
    let rule = model.write_rule(register).filter(|_| exists);
    bits(name, value, rule.map_or(0, |rule| rule.implemented))
}

fn bits(name: impl FnOnce() -> String, value: Hex, allowed: u64) -> Result<(), StateError> {
    let surplus = value.0 & !allowed;
    if surplus != 0 {
        return Err(StateError::Bits {
            register: name(),
            value: value.0,
            surplus,
        });
    }
    Ok(())
}
