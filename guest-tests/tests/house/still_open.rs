//! What the walls of walls.rs do not hold for yet. Figures only go down; 0 is what every
//! type and every function may have. Who has its walls leaves the list.

use super::walls::{Measure, Size};

/// Types by crate and name: methods, files, files in a circle, fields that are not private,
/// uses of its fields elsewhere.
#[rustfmt::skip]
pub(crate) const TYPES: &[(&str, &str, Measure)] = &[
    ("arbiter/daemon", "ArbiterConfig", [0, 3, 0, 0, 0]),
    ("arbiter/daemon", "Connection", [0, 0, 0, 2, 0]),
    ("arbiter/daemon", "Output", [0, 0, 0, 4, 0]),
    ("arbiter/host", "Lease", [0, 0, 0, 12, 0]),
    ("vmm", "CoreThread", [0, 0, 2, 8, 0]),
    ("vmm", "RunState", [0, 5, 0, 9, 0]),
    ("vmm", "Vcpu", [0, 5, 0, 3, 0]),
    ("vmm/kvm-pmu", "DebugControl", [0, 4, 0, 0, 0]),
    ("vmm/kvm-pmu", "Lent", [0, 7, 0, 0, 0]),
    ("vmm/kvm-pmu", "ThreadContext", [0, 3, 0, 0, 0]),
    ("vmm/kvm-pmu", "Traps", [0, 6, 0, 0, 0]),
    ("firmware", "Pcr", [0, 0, 0, 0, 8]),
    ("firmware", "Report", [0, 0, 0, 1, 0]),
    ("pmu-virt", "CorePmu", [0, 5, 0, 0, 0]),
    ("pmu-virt", "SimSlot", [0, 0, 0, 4, 0]),
    ("pmu-virt", "SlotBank", [76, 5, 3, 0, 0]),
    ("pmu-virt", "SlotLease", [0, 0, 2, 0, 0]),
    ("pmu-virt/model", "PmuModel", [0, 3, 0, 0, 15]),
    ("pmu-virt/perfmon/capi", "State", [0, 3, 0, 5, 0]),
    ("vmm/tools", "Limit", [0, 3, 0, 0, 0]),
];

/// Functions by file and name: lines, arguments.
#[rustfmt::skip]
pub(crate) const FUNCTIONS: &[(&str, &str, Size)] = &[
    ("arbiter/daemon/src/broker/manager.rs", "name", [0, 7]),
    ("arbiter/daemon/src/event_loop/start.rs", "start_until", [0, 8]),
    ("vmm/src/boot.rs", "load_kernel", [73, 0]),
    ("vmm/src/micro/threads.rs", "on_core", [0, 8]),
    ("pmu-virt/perfmon/abi/src/compact/codec.rs", "encode", [0, 8]),
    ("pmu-virt/perfmon/capi/src/calls.rs", "after_the_end", [0, 7]),
    ("pmu-virt/perfmon/capi/src/calls.rs", "on_context", [0, 9]),
    ("pmu-virt/src/backend/sim/cycles.rs", "reaches", [0, 7]),
];

/// Names that several types of a crate have, with how many.
#[rustfmt::skip]
pub(crate) const SHARED_NAMES: &[(&str, &str, usize)] = &[
    ("vmm", "News", 2),
    ("vmm", "Pace", 2),
    ("firmware", "Place", 2),
];
