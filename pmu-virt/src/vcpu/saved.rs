//! Whether a PMU can be in a state.

use arbiter::CounterId;
use instruction_facts::is_canonical;
use pmu_model::{Pebs, PmuModel, Register};

use super::registers::FREEZE_PERFMON_ON_PMI;
use super::samplers::saved_registers;
use crate::state::{Hex, PmuState, SavedCounter, SavedPebs, StateError};

/// Bits of a status word that have a meaning.
const STATUS_BITS: u64 = 0x00ff_ffff;

/// Whether the registers of a state show that its guest has set or started a counter.
pub(super) fn shows_use(model: &PmuModel, state: &PmuState) -> bool {
    let used = |saved: &SavedCounter| saved.programmed || saved.value.0 != 0;
    state.counters.iter().any(used) || state.global_control.0 != model.global_control_reset()
}

/// Whether a PMU of `model` can be in this state.
pub(super) fn check(model: &PmuModel, state: &PmuState) -> Result<(), StateError> {
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
