//! A counter's control registers for a request: what is to be written to them.

use arbiter::CounterId;
use pmu_model::{CountRequest, SlotIndex, UnavailableReason};

use super::NAME;
use super::events::{MsrPlan, plan};
use super::layout::{HostCpuid, Layout};
use super::registers::ENABLE;
use super::slot::Control;

pub(super) fn lay_out(
    cpuid: &HostCpuid,
    layout: &Layout,
    request: &CountRequest,
) -> Result<MsrPlan, UnavailableReason> {
    // Any-thread ends with architectural version 5 and never was AMD's.
    if request.any_thread {
        return Err(UnavailableReason::Modifier { backend: NAME });
    }
    plan(cpuid, layout, request).ok_or(UnavailableReason::Event {
        backend: NAME,
        event: request.event,
    })
}

/// The other counter of a pair.
pub(super) fn partner_of(slot: SlotIndex) -> SlotIndex {
    SlotIndex(slot.0 ^ 1)
}

/// How the counter of `slot` is controlled to count by `plan`; `None` if it cannot.
pub(super) fn control(layout: &Layout, slot: SlotIndex, plan: &MsrPlan) -> Option<Control> {
    let counter = |slot: SlotIndex| layout.counters.get(usize::from(slot.0));
    let here = counter(slot)?;
    let Some(msr) = here.select else {
        let CounterId::Fixed(n) = here.id else {
            return None;
        };
        return Some(Control::Fixed {
            field: 0b1111 << (4 * n),
            bits: plan.fixed << (4 * n),
        });
    };
    let select = plan.select?;
    let global = layout.global_control.is_some();
    let merge = counter(partner_of(slot)).and_then(|counter| counter.select);
    Some(Control::Select {
        msr,
        outside: select | if global { ENABLE } else { 0 },
        inside: select | ENABLE,
        merge: merge.filter(|_| plan.constraint.paired),
    })
}

/// The global control register's bits of counters, each with whether its neighbour is
/// merged into it.
pub(super) fn global_bits(layout: &Layout, slots: impl Iterator<Item = (SlotIndex, bool)>) -> u64 {
    let bit = |slot: u8| {
        let counter = layout.counters.get(usize::from(slot));
        let bit = counter.and_then(|counter| counter.id.global_bit());
        bit.map_or(0, |bit| 1 << bit)
    };
    slots.fold(0, |all, (slot, paired)| {
        let merged = if paired { bit(slot.0 + 1) } else { 0 };
        all | bit(slot.0) | merged
    })
}
