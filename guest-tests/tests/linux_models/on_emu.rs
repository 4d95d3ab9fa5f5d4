//! Debian's 6.12 on the engine emu, on processors whose models `clock` counts for its 6.1 on KVM in L1:
//! cycles are simulated, and instructions exact.

use vmm::config::Engine;

use super::identities::{self, FAM10H_QUIET, SKYLAKE_SERVER, ZEN3};
use super::{newer, watchdog};

#[test]
fn linux_6_12_takes_the_path_of_an_intel_processor() {
    identities::check_all(Engine::Emu, &[SKYLAKE_SERVER], newer);
}

#[test]
fn linux_6_12_takes_the_path_of_each_amd_processor() {
    identities::check_all(Engine::Emu, &[FAM10H_QUIET, ZEN3], newer);
}

#[test]
fn the_watchdog_of_linux_6_12_finds_a_hard_lockup_on_amd() {
    watchdog::linux_6_12_on_amd(Engine::Emu);
}
