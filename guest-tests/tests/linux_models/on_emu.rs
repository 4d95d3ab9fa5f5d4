//! Debian's 6.12 on the engine emu, on models and processors that `clock` counts for its 6.1 on KVM
//! in L1: cycles are simulated, and instructions exact.

use vmm::config::Engine;

use super::identities::{self, FAM10H_QUIET, ICE_LAKE_PEBS, SKYLAKE_SERVER, ZEN3};
use super::{AMD, INTEL, check_all, newer, watchdog};

/// Versions 4 and 5 that kernel has with the processors of [`identities`].
#[test]
fn linux_6_12_takes_intels_first_versions() {
    check_all(Engine::Emu, &INTEL[..3], newer);
}

/// The other models that kernel has with those processors.
#[test]
fn linux_6_12_takes_amds_first_and_last_model() {
    check_all(Engine::Emu, &AMD[..1], newer);
    check_all(Engine::Emu, &AMD[3..], newer);
}

#[test]
fn linux_6_12_takes_the_path_of_an_intel_processor() {
    identities::check_all(Engine::Emu, &[SKYLAKE_SERVER], newer);
}

#[test]
fn linux_6_12_takes_the_path_and_the_records_of_ice_lake() {
    identities::check_all(Engine::Emu, &[ICE_LAKE_PEBS], newer);
}

#[test]
fn linux_6_12_takes_the_path_of_each_amd_processor() {
    identities::check_all(Engine::Emu, &[FAM10H_QUIET, ZEN3], newer);
}

#[test]
fn the_watchdog_of_linux_6_12_finds_a_hard_lockup_on_amd() {
    watchdog::linux_6_12_on_amd(Engine::Emu);
}
