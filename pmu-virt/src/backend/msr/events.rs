//! Which counters can count an event on which processor.

use arbiter::CounterId;
use pmu_model::{
    Constraint, CountRequest, EventCode, EventFamily, FixedFunction, SlotIndex, SlotSet, Vendor,
};

use super::constrained::{family_15h_counters, intel_counters};
use super::layout::{HostCpuid, Layout};

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
pub(super) struct MsrPlan {
    pub(super) constraint: Constraint,
    /// Event select without enable and interrupt.
    pub(super) select: Option<u64>,
    /// Enable bits of a fixed counter: OS and USR.
    pub(super) fixed: u64,
}

/// `None` where this processor cannot count the event.
pub(super) fn plan(cpuid: &HostCpuid, layout: &Layout, request: &CountRequest) -> Option<MsrPlan> {
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
    // Another processor's code may be another event here.
    let event = match EventFamily::of_processor(vendor, cpuid.family(), cpuid.model()) {
        Some(host) => request.event.on_processor(host)?,
        None => request.event,
    };
    let (constraint, code) = match event {
        EventCode::Software(_) | EventCode::Meaning(_) => return None,
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
    (!constraint.slots.is_empty()).then_some(MsrPlan {
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
    let intel = layout.model.vendor() == Vendor::Intel;
    let few = match (intel, cpuid.family()) {
        (true, _) => intel_counters(cpuid, select, umask),
        (false, 0x15) => Some(family_15h_counters(select, umask)),
        (false, _) => None,
    };
    if let Some(few) = few {
        let allowed = (0..8u8).filter(|n| few & 1 << n != 0).map(SlotIndex);
        slots = slots.intersection(allowed.collect());
    } else if intel && !request.has_modifier() {
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
    let family = layout.model.events();
    family.vendor() == Vendor::Intel || family == EventFamily::AmdK7
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assign::{Demand, assign};
    use pmu_model::CpuidRegs;

    /// A processor by its signature, with `counters` where CPUID tells.
    fn cpuid(vendor: Vendor, signature: u32, counters: u32) -> HostCpuid {
        let regs = |eax, ecx, edx| CpuidRegs {
            eax,
            ebx: 0,
            ecx,
            edx,
        };
        let core = u32::from(counters > 4) << 23;
        HostCpuid {
            vendor: Some(vendor),
            leaf_1: regs(signature, 0, 0),
            leaf_0xa: regs(0x0730_0004 | counters << 8, 0, 0x603),
            leaf_80000001: regs(0, core, 0),
            ..HostCpuid::default()
        }
    }

    fn constraint_of(cpuid: &HostCpuid, select: u16, umask: u8) -> Option<Constraint> {
        let layout = Layout::of(cpuid.pmu(false).expect("a PMU"));
        let event = EventCode::Selected {
            family: layout.model.events(),
            select,
            umask,
        };
        let request = CountRequest::plain(event, true, true);
        Some(plan(cpuid, &layout, &request)?.constraint)
    }

    /// The programmable counters, one bit each.
    fn counters(cpuid: &HostCpuid, select: u16, umask: u8) -> u8 {
        constraint_of(cpuid, select, umask).map_or(0, |constraint| {
            let slots = constraint.slots.intersection(SlotSet::below(8));
            slots.iter().fold(0, |bits, slot| bits | 1 << slot.0)
        })
    }

    #[test]
    fn constrained_events_of_intel_processors() {
        let check = |signature, number, select, umask, expected| {
            let cpu = cpuid(Vendor::Intel, signature, number);
            let seen = counters(&cpu, select, umask) & (u8::MAX >> (8 - number));
            assert_eq!(seen, expected, "{signature:#x}: {select:#x}.{umask:#x}");
        };
        for (signature, select, umask, expected) in [
            (0x006f6, 0x12, 0x00, 0b10),   // Merom, MUL
            (0x106a5, 0x42, 0x01, 0b0011), // Nehalem, L1D_CACHE_LOCK
            (0x206c2, 0x42, 0x01, 0b1111), // Westmere has no such rule
            (0x206c2, 0xb3, 0x01, 0b0001), // SNOOPQ_REQUESTS_OUTSTANDING
            (0x206a7, 0x48, 0x02, 0b0100), // Sandy Bridge, L1D_PEND_MISS
            (0x306a9, 0x48, 0x02, 0b1111), // Ivy Bridge, another unit mask
            (0x306a9, 0xa3, 0x02, 0b1111), // its masks mean other events
            (0x306a9, 0xa3, 0x0c, 0b0100),
            (0x306c3, 0xcd, 0x01, 0b1000), // Haswell, MEM_TRANS_RETIRED
            (0x306d4, 0xcd, 0x01, 0b1111), // Broadwell
        ] {
            let number = if signature == 0x006f6 { 2 } else { 4 };
            check(signature, number, select, umask, expected);
        }
        for (signature, select, umask, expected) in [
            (0x506e3, 0xd2, 0x01, 0x0f), // Skylake without its other thread
            (0x506e3, 0xc2, 0x02, 0xff),
            (0x806f8, 0xa4, 0x08, 0x01), // Sapphire Rapids
            (0x806f8, 0x2e, 0x41, 0xff),
            (0x806f8, 0x24, 0xe1, 0x0f),
            (0x706e5, 0x51, 0x01, 0x0f), // Ice Lake is not listed
            (0x706e5, 0x2e, 0x41, 0xff), // architectural
        ] {
            // Eight programmable counters; the fixed ones come behind.
            check(signature, 8, select, umask, expected);
        }
    }

    #[test]
    fn units_of_family_15h_have_counters_of_their_own() {
        let cpu = cpuid(Vendor::Amd, 0x0060_0f20, 6);
        for (select, umask, expected) in [
            (0x076, 0x00, 0b00_0111), // cycles
            (0x0c0, 0x00, 0b11_1111), // instructions
            (0x000, 0x07, 0b11_1000), // FP pipes, one kind
            (0x000, 0x17, 0b00_1000), // and both
            (0x003, 0xff, 0b00_1000),
            (0x031, 0x01, 0b00_0111),
            (0x031, 0x03, 0),
            (0x188, 0x00, 0b00_0001),
            (0x1d8, 0x00, 0b11_1111),
            (0x0e9, 0x00, 0), // northbridge
        ] {
            assert_eq!(counters(&cpu, select, umask), expected, "{select:#x}");
        }
    }

    #[test]
    fn the_northbridge_of_family_10h_serves_one_at_a_time() {
        let cpu = cpuid(Vendor::Amd, 0x0010_0f42, 4);
        for (select, shared) in [
            (0x0e0, true),
            (0x0ff, true),
            (0x4e1, true), // L3 cache misses: bits 11:8 do not matter
            (0x1f0, true),
            (0x0df, false),
            (0x0c0, false),
            (0x1c0, false),
        ] {
            let constraint = constraint_of(&cpu, select, 0xff).expect("it can be counted");
            let expected = shared.then_some("northbridge");
            assert_eq!(constraint.exclusive, expected, "{select:#x}");
            assert_eq!(constraint.slots, SlotSet::below(4), "{select:#x}");
        }
        // Zen has no northbridge events among those of a core.
        let zen = cpuid(Vendor::Amd, 0x0083_0f10, 6);
        assert_eq!(constraint_of(&zen, 0x0e0, 0).unwrap().exclusive, None);
        let demand = |n, select| Demand {
            counter: CounterId::Programmable(n),
            constraint: constraint_of(&cpu, select, 0xff).expect("it can be counted"),
            held: None,
        };
        let free = SlotSet::below(4);
        assert!(assign(&[demand(0, 0x0e0), demand(1, 0x0c0)], free).is_ok());
        let conflict = assign(&[demand(0, 0x0e0), demand(1, 0x4e1)], free).unwrap_err();
        assert!(conflict.to_string().contains("northbridge"), "{conflict}");
    }
}
