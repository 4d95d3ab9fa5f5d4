//! What a world switch takes in L1, on the machine of today.

use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;

use crate::l1::{Machine, Run};
use crate::micro::exit_time;
use crate::umpire;

/// Where the probe's loop at CPL 3 is in what `doctor -j` prints.
const LOOP: &str = "/kvm/probe/cpl3_ps_per_instruction";

/// From entering a guest in L1 to the VMM again, asked of `umpire doctor` there and once in a
/// process. 40 µs on a machine with quick caches; where a miss takes ten times as long, so does an
/// exit, since QEMU looks up each piece of code again behind it.
///
/// # Panics
/// If L1 or `doctor` fails.
pub(super) fn exit_in_l1() -> Duration {
    static COST: OnceLock<Duration> = OnceLock::new();
    *COST.get_or_init(|| {
        let run = Run::new(umpire::path()).args(["doctor", "-j"]);
        let output = Machine::new().smp(1).output(&run).expect("L1 works");
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON of doctor");
        let picoseconds = report.pointer(LOOP).and_then(Value::as_u64);
        let cost = exit_time(picoseconds.expect("doctor's loop at CPL 3"));
        println!("an exit takes {cost:.0?} in L1");
        cost
    })
}

/// Whether exits are so dear that a guest has not the time, or its programs not the share of it,
/// that a test takes for granted; that is said of this test, which is skipped then.
#[must_use]
pub fn are_dear(test: &str) -> bool {
    const MOST: Duration = Duration::from_micros(80);
    let cost = exit_in_l1();
    if cost > MOST {
        println!(
            "skipped: {test}: an exit takes {cost:.0?} in L1 on this machine, and with more than \
             {MOST:.0?} a guest has not the time that it is to have"
        );
    }
    cost > MOST
}
