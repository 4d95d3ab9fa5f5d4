//! What a world switch takes in L1, on the machine of today.

use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;

use super::{Machine, Run};
use crate::umpire;

/// Instructions of the loop that the probe of `umpire doctor` times, for which it enters the guest
/// once and leaves it once.
const PROBED: u64 = 8000;
const KVM_PS: &str = "/kvm/probe/cpl3_ps_per_instruction";

/// From entering a guest to its exit, as the probe's loop has found it at CPL 3, which no KVM
/// emulates: `picoseconds` for each instruction.
pub(crate) fn exit_time(picoseconds: u64) -> Duration {
    Duration::from_nanos(picoseconds * PROBED / 1000)
}

/// Milliseconds from entering a guest in L1 to the VMM again, asked of `umpire doctor` there and
/// once in a process. 0.04 on a machine with quick caches; where a miss takes ten times as long, so
/// does an exit, since QEMU looks up each piece of code again behind it.
///
/// # Panics
/// If L1 or `doctor` fails.
#[must_use]
pub fn exit_ms() -> f64 {
    static COST: OnceLock<Duration> = OnceLock::new();
    let cost = COST.get_or_init(|| {
        let run = Run::new(umpire::path()).args(["doctor", "-j"]);
        let output = Machine::new().smp(1).output(&run).expect("L1 works");
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON of doctor");
        let picoseconds = report.pointer(KVM_PS).and_then(Value::as_u64);
        let cost = exit_time(picoseconds.expect("doctor's loop at CPL 3"));
        println!("an exit takes {cost:.0?} in L1");
        cost
    });
    cost.as_secs_f64() * 1e3
}
