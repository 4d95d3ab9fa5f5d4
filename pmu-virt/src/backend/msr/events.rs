//! Which counters can count an event on which processor.

use super::layout::{HostCpuid, Layout};
use crate::assign::Constraint;
use crate::event::{EventCode, EventFamily, FixedFunction};
use crate::ids::{SlotIndex, SlotSet, Vendor};
use crate::request::CountRequest;
use arbiter::CounterId;

/// An event that not every programmable counter can count.
struct Row {
    event: u8,
    /// `None`: whatever the unit mask.
    umask: Option<u8>,
    /// One bit for each programmable counter.
    counters: u8,
}

const fn any(event: u8, counters: u8) -> Row {
    Row {
        event,
        umask: None,
        counters,
    }
}

const fn exact(event: u8, umask: u8, counters: u8) -> Row {
    Row {
        event,
        umask: Some(umask),
        counters,
    }
}

/// SDM vol. 3B, performance events of the Core microarchitecture: "Counter 0
/// only" and "Counter 1 only" in their comments.
const CORE2: &[Row] = &[
    any(0x10, 0b01), // FP_COMP_OPS_EXE
    any(0x11, 0b10), // FP_ASSIST
    any(0x12, 0b10), // MUL
    any(0x13, 0b10), // DIV
    any(0x14, 0b01), // CYCLES_DIV_BUSY
    any(0x18, 0b01), // IDLE_DURING_DIV
    any(0x19, 0b10), // DELAYED_BYPASS
    any(0xa1, 0b01), // RS_UOPS_DISPATCHED.PORT
    any(0xcb, 0b01), // MEM_LOAD_RETIRED
];

/// SDM vol. 3B, performance events of Nehalem and Westmere: "Counter 0, 1 only".
const NEHALEM: &[Row] = &[
    any(0x40, 0b11), // L1D_CACHE_LD
    any(0x41, 0b11), // L1D_CACHE_ST
    any(0x42, 0b11), // L1D_CACHE_LOCK
    any(0x43, 0b11), // L1D_ALL_REF
    any(0x51, 0b11), // L1D
    any(0x63, 0b11), // CACHE_LOCK_CYCLES
];

/// SDM vol. 3B, performance events of Sandy and Ivy Bridge: the counters in
/// their comments.
const SANDY_BRIDGE: &[Row] = &[
    any(0x48, 0b0100),         // L1D_PEND_MISS
    exact(0xa3, 0x02, 0b0100), // CYCLE_ACTIVITY.CYCLES_L1D_PENDING
    exact(0xa3, 0x06, 0b0100), // CYCLE_ACTIVITY.STALLS_L1D_PENDING
    exact(0xc0, 0x01, 0b0010), // INST_RETIRED.PREC_DIST
    any(0xcd, 0b1000),         // MEM_TRANS_RETIRED
];

/// SDM vol. 3B, performance events of Haswell and Broadwell, likewise.
const HASWELL: &[Row] = &[
    exact(0x48, 0x01, 0b0100), // L1D_PEND_MISS.PENDING
    exact(0xa3, 0x08, 0b0100), // CYCLE_ACTIVITY.CYCLES_L1D_PENDING
    exact(0xa3, 0x0c, 0b0100), // CYCLE_ACTIVITY.STALLS_L1D_PENDING
    exact(0xc0, 0x01, 0b0010), // INST_RETIRED.PREC_DIST
    any(0xcd, 0b1000),         // MEM_TRANS_RETIRED
];

/// SDM vol. 3B, performance events of Skylake to Comet Lake.
const SKYLAKE: &[Row] = &[
    exact(0xc0, 0x01, 0b0010), // INST_RETIRED.PREC_DIST
];

fn rows(cpuid: &HostCpuid) -> &'static [Row] {
    match (cpuid.vendor, cpuid.family(), cpuid.model()) {
        (Some(Vendor::Intel), 6, model) => match model {
            0x0f | 0x16 | 0x17 | 0x1d => CORE2,
            0x1a | 0x1e | 0x1f | 0x2e | 0x25 | 0x2c | 0x2f => NEHALEM,
            0x2a | 0x2d | 0x3a | 0x3e => SANDY_BRIDGE,
            0x3c | 0x3f | 0x45 | 0x46 | 0x3d | 0x47 | 0x4f | 0x56 => HASWELL,
            0x4e | 0x5e | 0x55 | 0x8e | 0x9e | 0xa5 | 0xa6 => SKYLAKE,
            _ => &[],
        },
        _ => &[],
    }
}

/// The fixed counter that counts the same as an architectural event without
/// modifiers (SDM vol. 3B, "Fixed-function Performance Counters"). The
/// reference cycles of event 3CH count another clock than fixed counter 2.
const ARCHITECTURAL: [(u16, u8, FixedFunction); 2] = [
    (0xc0, 0x00, FixedFunction::Instructions),
    (0x3c, 0x00, FixedFunction::CoreCycles),
];

/// Merges an odd counter into the even one before it, for events that happen
/// more than 15 times a cycle (PPR for Family 17h, "Large Increment per Cycle
/// Events"): event select 0FFFh.
pub(super) const MERGE: u64 = 0xf_0000_00ff;

/// What a counter is to be programmed with, and where that is possible.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) constraint: Constraint,
    /// Event select without enable and interrupt.
    pub(super) select: Option<u64>,
    /// Enable bits of a fixed counter: OS and USR.
    pub(super) fixed: u64,
}

/// `None` where this processor cannot count the event.
pub(super) fn plan(cpuid: &HostCpuid, layout: &Layout, request: &CountRequest) -> Option<Plan> {
    // For the guest it is the host, and it has no guests (see `can_advance`).
    let alone = request.guest_only && !request.host_only;
    let bare = CountRequest {
        int: false,
        pin: false,
        enabled: false,
        guest_only: false,
        host_only: false,
        os: request.os && !alone,
        usr: request.usr && !alone,
        ..*request
    };
    let vendor = layout.model.vendor();
    let (constraint, code) = match request.event {
        EventCode::Software(_) => return None,
        EventCode::Fixed(_) if vendor != Vendor::Intel => return None,
        EventCode::Fixed(function) => {
            let code = ARCHITECTURAL.iter().find(|(.., known)| *known == function);
            let mut slots = fixed_slot(layout, function);
            if code.is_some() {
                slots = slots.union(programmable(layout));
            }
            let code = code.map(|(select, umask, _)| (*select, *umask));
            (Constraint::slots(slots), code)
        }
        EventCode::Selected { family, .. } if family.vendor() != vendor => return None,
        EventCode::Selected { select, .. } if select > 0xff && eight_bits(layout) => return None,
        EventCode::Selected { select, umask, .. } => (
            selected(cpuid, layout, &bare, (select, umask)),
            Some((select, umask)),
        ),
    };
    let select = code.and_then(|(select, umask)| {
        let family = layout.model.events();
        let event = EventCode::Selected {
            family,
            select,
            umask,
        };
        CountRequest { event, ..bare }.encode()
    });
    let fixed = u64::from(bare.os) | u64::from(bare.usr) << 1;
    (!constraint.slots.is_empty()).then_some(Plan {
        constraint,
        select,
        fixed,
    })
}

fn selected(
    cpuid: &HostCpuid,
    layout: &Layout,
    request: &CountRequest,
    (select, umask): (u16, u8),
) -> Constraint {
    let mut slots = programmable(layout);
    let row = rows(cpuid).iter().find(|row| {
        u16::from(row.event) == select && row.umask.is_none_or(|wanted| wanted == umask)
    });
    if let Some(row) = row {
        slots = (0..8u8)
            .filter(|n| row.counters & 1 << n != 0)
            .map(SlotIndex)
            .collect();
        slots = slots.intersection(programmable(layout));
    } else if layout.model.vendor() == Vendor::Intel && !request.has_modifier() {
        let twin = ARCHITECTURAL
            .iter()
            .find(|(s, u, _)| (*s, *u) == (select, umask));
        if let Some((.., function)) = twin {
            slots = slots.union(fixed_slot(layout, *function));
        }
    }
    let amd = layout.model.vendor() == Vendor::Amd;
    Constraint {
        // PPR for Family 17h and 19h: PMCx003, retired SSE and AVX FLOPs.
        paired: amd && select == 0x003 && matches!(cpuid.family(), 0x17 | 0x19),
        // BKDG for Family 10h, "Performance Monitor Events": events 0E0h to
        // 0FFh and those that differ from them in bits 11:8 belong to the
        // northbridge, which the cores of a node share.
        exclusive: (amd && cpuid.family() == 0x10 && select & 0xe0 == 0xe0)
            .then_some("northbridge"),
        slots,
    }
}

fn programmable(layout: &Layout) -> SlotSet {
    SlotSet::below(usize::from(layout.model.programmable()))
}

fn fixed_slot(layout: &Layout, function: FixedFunction) -> SlotSet {
    let wanted = CounterId::Fixed(function.index());
    let slots = (0u8..).map(SlotIndex).zip(&layout.counters);
    slots
        .filter(|(_, counter)| counter.id == wanted)
        .map(|(slot, _)| slot)
        .collect()
}

fn eight_bits(layout: &Layout) -> bool {
    matches!(
        layout.model.events(),
        EventFamily::Intel | EventFamily::AmdK7
    )
}
