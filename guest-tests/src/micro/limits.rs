//! Tests that some KVM cannot run, and why. There is no other reason to skip a
//! test of a micro-guest.

use vmm::probe::ProbeReport;

/// Tests that a kind of host cannot run.
#[derive(Debug, Clone, Copy)]
pub struct Limit {
    /// True on such a host.
    pub applies: fn(&ProbeReport) -> bool,
    /// Why.
    pub reason: &'static str,
    /// Names of the tests.
    pub tests: &'static [&'static str],
}

/// Every limit of the suite `micro`.
pub const LIMITS: &[Limit] = &[
    Limit {
        applies: |_| micro_guests::arbiters().is_none(),
        reason: "built without guest programs in Rust (rustup target add x86_64-unknown-none)",
        tests: &["arbiters::minimal", "arbiters::enforcing", "arbiters::full"],
    },
    Limit {
        applies: |probe| !probe.step_support().user,
        reason: "this KVM does not single-step CPL 3: the step backend serves CPL 0 only",
        tests: &[
            "step::instructions_at_cpl_3",
            "step::page_fault_at_cpl_3",
            "step::conditional_branches_at_cpl_3",
            "step::software_interrupt_at_cpl_3",
            "step::system_call",
            "step::guest_tf_at_cpl_3",
            "pebs::exact_at_cpl_3",
        ],
    },
    Limit {
        applies: ProbeReport::slow_cpl0,
        reason: "this KVM emulates CPL 0, and its emulator lacks INT n",
        tests: &["step::software_interrupt_at_cpl_0"],
    },
    Limit {
        applies: ProbeReport::slow_cpl0,
        reason: "this KVM emulates CPL 0, and its INT 13 leads to no handler",
        tests: &["patch::int_13_at_cpl_0", "patch::int_13_at_cpl_3"],
    },
    Limit {
        applies: ProbeReport::slow_cpl0,
        reason: "this KVM emulates CPL 0, and its emulator lacks x87, MMX and most of SSE",
        tests: &["step::x87_mmx_and_sse"],
    },
    Limit {
        applies: ProbeReport::slow_cpl0,
        reason: "this KVM emulates CPL 0, and a stepped guest never wakes from its HLT",
        tests: &["step::interrupt_that_ends_a_hlt"],
    },
    Limit {
        applies: ProbeReport::slow_cpl0,
        reason: "this KVM emulates CPL 0, and its emulator lacks INT3 and INT1",
        tests: &[
            "debug::int3_at_cpl_0",
            "debug::breakpoint_on_an_int3_at_cpl_0",
            "debug::int1_at_cpl_0",
        ],
    },
    Limit {
        applies: ProbeReport::slow_cpl0,
        reason: "this KVM delivers the #DB of an INT1 at CPL 3 as a fault: it is met again for ever",
        tests: &["debug::int1_at_cpl_3"],
    },
    Limit {
        applies: ProbeReport::slow_cpl0,
        reason: "this KVM emulates CPL 0, and its emulator knows no data breakpoints",
        tests: &[
            "debug::data_breakpoint_at_cpl_0",
            "debug::data_breakpoints_of_every_kind_at_cpl_0",
            "debug::data_breakpoint_in_a_string_instruction_at_cpl_0",
            "debug::four_data_breakpoints_at_cpl_0",
            "debug::dr6_between_hits_at_cpl_0",
            "debug::step_and_data_breakpoint_at_once_at_cpl_0",
            "debug::data_breakpoint_in_the_shadow_of_mov_ss_at_cpl_0",
        ],
    },
    Limit {
        applies: |probe| !probe.smm,
        reason: "this KVM has no system management mode",
        tests: &[
            "pcr::smm_counts_as_firmware",
            "pcr::each_vcpu_has_a_state_of_its_own_in_smm",
            "smm::no_pebs_record_has_its_registers",
            "smm::no_exact_pebs_record_has_its_registers",
            "smm::no_sample_of_ibs_is_there",
            "smm::no_exact_sample_of_ibs_is_there",
        ],
    },
    Limit {
        applies: |probe| !probe.breakpoint_cpl3,
        reason: "breakpoints never fire at CPL 3 on this KVM",
        tests: &[
            "debug::data_breakpoint_at_cpl_3",
            "debug::data_breakpoints_of_every_kind_at_cpl_3",
            "debug::data_breakpoint_in_a_string_instruction_at_cpl_3",
            "debug::four_data_breakpoints_at_cpl_3",
            "debug::execution_breakpoints_in_a_row_at_cpl_3",
            "debug::dr6_between_hits_at_cpl_3",
            "debug::step_onto_a_breakpoint_at_cpl_3",
            "debug::step_and_data_breakpoint_at_once_at_cpl_3",
            "debug::data_breakpoint_in_the_shadow_of_mov_ss_at_cpl_3",
            "debug::execution_breakpoint_in_the_shadow_of_mov_ss_at_cpl_3",
            "debug::breakpoint_on_an_int3_at_cpl_3",
            "debug::breakpoint_set_without_an_exit_at_cpl_3",
            "debug::breakpoint_set_when_nothing_counts_at_cpl_3",
            "patch::a_breakpoint_right_behind_rdpmc_at_cpl_3",
        ],
    },
    Limit {
        applies: |_| pmu_virt::perf::probe().refusal().is_some(),
        reason: "the host's kernel lets this user open no perf event (see `umpire doctor`)",
        tests: &[
            "perf::cycles_grow_with_the_time_in_the_guest",
            "perf::overflow_signals_become_pmis",
            "perf::an_overflow_interrupts_cpl_3",
        ],
    },
];
