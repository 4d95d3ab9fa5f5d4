//! What a world switch takes in L1, on the machine of today.

use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;

use crate::l1::{Machine, Run};
use crate::micro::exit_time;
use crate::umpire;

/// Where the probe's loop at CPL 3 is in what `doctor -j` prints.
const LOOP: &str = "/kvm/probe/cpl3_ps_per_instruction";

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
        let picoseconds = report.pointer(LOOP).and_then(Value::as_u64);
        let cost = exit_time(picoseconds.expect("doctor's loop at CPL 3"));
        println!("an exit takes {cost:.0?} in L1");
        cost
    });
    cost.as_secs_f64() * 1e3
}

/// Whether exits are so dear that a guest has not the time, or its programs not the share of it,
/// that a test takes for granted; that is said of this test, which is skipped then.
#[must_use]
pub fn are_dear(test: &str) -> bool {
    const MOST_MS: f64 = 0.08;
    let cost = exit_ms();
    if cost > MOST_MS {
        println!(
            "skipped: {test}: an exit takes {:.0} µs in L1 on this machine, and with more than \
             {:.0} a guest has not the time that it is to have",
            cost * 1e3,
            MOST_MS * 1e3
        );
    }
    cost > MOST_MS
}
