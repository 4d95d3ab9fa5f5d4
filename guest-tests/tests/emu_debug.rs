//! What uses debug registers in Debian's kernel, as in `linux_debug`, on the engine emu: nobody else
//! uses them there, and no handler of the guest's is touched.

use crate::linux_debug::{UNTOUCHED, check_on, check_without_pmu, guest};

const SIMULATED: [&str; 2] = ["--cycles", "simulated"];

#[test]
fn debuggers_work_without_a_pmu() {
    check_without_pmu(&guest(&["--pmu", "none"]).emulated());
}

#[test]
fn debuggers_work_with_each_vendors_model() {
    for model in ["amd-perfmonv2", "intel-v2"] {
        let flags = [&SIMULATED[..], &["--pmu", model]].concat();
        check_on(&guest(&flags).emulated(), UNTOUCHED);
    }
}
