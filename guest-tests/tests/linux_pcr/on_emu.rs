//! The same on the engine emu: no firmware before the kernels, cycles that are simulated, and no L1.

use vmm::config::Engine;

use super::{arbiters, budget, interacting};

#[test]
fn amd_perfmonv2_arbiters_under_a_master() {
    arbiters::check(Engine::Emu, &arbiters::AMD_PERFMONV2);
}

#[test]
fn linux_6_1_never_counts_wrong_where_a_module_looks_after_its_counters() {
    interacting::linux_6_1(Engine::Emu);
}

#[test]
fn linux_6_12_never_counts_wrong_either() {
    interacting::linux_6_12(Engine::Emu);
}

#[test]
fn intel_v2_arbiters() {
    arbiters::check(Engine::Emu, &arbiters::INTEL_V2);
}

#[test]
fn perf_counts_on_whatever_the_budget() {
    budget::check(Engine::Emu);
}
