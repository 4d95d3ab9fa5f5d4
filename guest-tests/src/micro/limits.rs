//! Tests that some KVM cannot run, and why. There is no other reason to skip a
//! test of a micro-guest.

use super::lab::Lab;

/// Tests that a kind of host cannot run.
#[derive(Debug, Clone, Copy)]
pub struct Limit {
    /// True on such a host.
    pub applies: fn(&Lab) -> bool,
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
        applies: |lab| !lab.probe.step_support().user,
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
        applies: |lab| lab.probe.slow_cpl0(),
        reason: "this KVM emulates CPL 0, and its emulator lacks INT n",
        tests: &["step::software_interrupt_at_cpl_0"],
    },
    Limit {
        applies: |lab| lab.probe.slow_cpl0(),
        reason: "this KVM emulates CPL 0, and its INT 13 leads to no handler",
        tests: &["patch::int_13_at_cpl_0", "patch::int_13_at_cpl_3"],
    },
    Limit {
        applies: |lab| lab.probe.slow_cpl0(),
        reason: "this KVM emulates CPL 0, and its emulator lacks x87, MMX and most of SSE",
        tests: &["step::x87_mmx_and_sse"],
    },
    Limit {
        applies: |lab| lab.probe.slow_cpl0(),
        reason: "this KVM emulates CPL 0, and a stepped guest never wakes from its HLT",
        tests: &["step::interrupt_that_ends_a_hlt"],
    },
    Limit {
        applies: |lab| lab.probe.slow_cpl0(),
        reason: "this KVM emulates CPL 0, and its emulator lacks INT3 and INT1",
        tests: &[
            "debug::int3_at_cpl_0",
            "debug::breakpoint_on_an_int3_at_cpl_0",
            "debug::int1_at_cpl_0",
        ],
    },
    Limit {
        applies: |lab| lab.probe.slow_cpl0(),
        reason: "this KVM delivers the #DB of an INT1 at CPL 3 as a fault: it is met again for ever",
        tests: &["debug::int1_at_cpl_3"],
    },
    Limit {
        applies: |lab| lab.probe.slow_cpl0(),
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
        applies: |lab| !lab.probe.smm,
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
        applies: |lab| !lab.probe.breakpoint_cpl3,
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
        applies: Lab::is_emulated,
        reason: "it is what KVM is the oracle for",
        tests: &[
            "oracle::counts_of_random_code",
            "oracle::rights_of_pages",
            "oracle::every_permutation_of_rights",
            "oracle::system_instructions",
        ],
    },
    Limit {
        applies: |lab| lab.probe.slow_cpl0(),
        reason: "this KVM emulates CPL 0, and lacks much of it: it is no oracle",
        tests: &[
            "oracle::counts_of_random_code",
            "oracle::rights_of_pages",
            "oracle::every_permutation_of_rights",
            "oracle::system_instructions",
        ],
    },
    Limit {
        applies: Lab::is_emulated,
        reason: "vCPUs of processors in software take turns on one thread, and share no cores",
        tests: &[
            "cores::an_ipi_wakes_a_halted_vcpu",
            "cores::a_timer_wakes_a_halted_vcpu",
            "cores::all_halted_ones_go_on",
            "cores::halted_for_ever_can_be_stopped",
            "cores::counts_are_those_of_each_vcpu",
            "cores::an_idle_core_takes_a_waiting_vcpu",
            "cores::three_against_one_become_two_and_two",
            "cores::idle_vcpus_cost_little",
            "vcpus::no_ipi_is_lost_among_pmis_on_one_core",
            "patch::another_vcpu_of_the_core_writes_to_the_page",
            "pcr::a_lease_ends_while_its_vcpu_is_halted_on_a_core",
            "pcr::a_revocation_takes_place_while_its_vcpu_is_halted_on_a_core",
            "pcr::a_guesser_leaves_its_core_to_others",
            "pcr::two_guessers_leave_their_core_empty",
            "pcr::a_lease_that_ends_is_announced_on_a_core",
            "standing::another_vcpu_of_the_core_reads",
        ],
    },
    Limit {
        applies: Lab::is_emulated,
        reason: "a processor in software executes RDPMC itself: no handler is patched, and no \
                 debug register is taken",
        tests: &[
            "patch::every_instruction_at_cpl_0",
            "patch::every_instruction_at_cpl_3",
            "patch::each_mode",
            "patch::stores_at_cpl_0",
            "patch::stores_at_cpl_3",
            "patch::a_step_over_it_traps",
            "patch::not_beside_what_the_processor_writes",
            "patch::an_old_patch_works",
            "patch::a_gate_that_never_rests",
            "patch::stays_when_no_counter_was_enabled_for_long",
            "patch::nmis_in_the_handler",
            "patch::on_a_stack_of_its_own",
            "patch::under_other_page_tables",
            "patch::the_handler_serves_another_vector",
            "patch::int_13_at_cpl_0",
            "patch::int_13_at_cpl_3",
            "patch::the_debug_registers_are_the_guests",
            "patch::a_guest_that_is_stepped",
            "standing::reads_at_cpl_0_after_a_while",
            "standing::reads_at_cpl_3_after_a_while",
            "standing::cr4_decides_at_cpl_3",
            "standing::nothing_before_the_first_write",
            "standing::a_guest_that_takes_all_four_and_gives_one_back",
            "standing::a_patch_that_was_given_up_meanwhile",
            "debug::execution_breakpoint_of_the_guest",
            "debug::a_guest_that_takes_all_four_is_told",
            "debug::a_guest_that_takes_all_four_later_is_told",
        ],
    },
    Limit {
        applies: Lab::is_emulated,
        reason: "samplers have no horizon on processors in software: their samples are of a place \
                 nearby",
        tests: &[
            "ibs::ops_are_those_that_were_executed",
            "ibs::every_sixteenth_op",
            "ibs::an_emulated_op_is_one_that_was_executed",
            "ibs::an_emulated_op_of_a_ring_that_is_not_stepped_is_near_by",
            "ibs::a_stepped_op_of_cycles",
            "ibs::fetches_are_those_that_were_executed",
        ],
    },
    Limit {
        applies: Lab::is_emulated,
        reason: "what a stepper may lose, a processor in software sees",
        tests: &[
            "step::four_breakpoints_of_the_guest_cost_the_label",
            "step::a_handler_that_nobody_saw_hands_our_tf_back",
            "step::a_ring_that_is_not_stepped_costs_the_label",
            "step::rdpmc_in_a_ring_that_is_not_stepped",
        ],
    },
    Limit {
        applies: Lab::is_emulated,
        reason: "its time is virtual, and idle time is skipped: nothing there takes the host's time",
        tests: &[
            "time::clock_does_not_count_what_the_host_ran_instead",
            "time::clock_does_not_count_a_halt",
            "pcr::a_barred_vcpu_can_be_stopped",
        ],
    },
    Limit {
        applies: Lab::is_emulated,
        reason: "perf counts what the host's processor does, which executes none of the guest",
        tests: &[
            "perf::cycles_grow_with_the_time_in_the_guest",
            "perf::overflow_signals_become_pmis",
            "perf::an_overflow_interrupts_cpl_3",
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
