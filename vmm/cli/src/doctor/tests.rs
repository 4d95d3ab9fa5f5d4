//! The report on made-up findings.

use vmm::doctor::{Diagnosis, Kvm, check_backends};
use vmm::host::{CounterHolders, CpuFacts, HardwarePmu, HostFacts, KvmAccess};
use vmm::kvm::KvmFeatures;
use vmm::probe::{GuestStep, HandlerOut, ProbeReport, ProtectedStore, RdpmcBehaviour};

use super::report;
use crate::exit::ExitStatus;

fn facts() -> HostFacts {
    HostFacts {
        cpu: CpuFacts::default(),
        pmu: HardwarePmu::Absent {
            reason: "the kernel drives no hardware PMU".to_owned(),
        },
        perf_event_paranoid: Some(2),
        nmi_watchdog: None,
        counter_holders: CounterHolders::default(),
        kvm_modules: Vec::new(),
        kvm: KvmAccess::Usable,
    }
}

fn faithful() -> ProbeReport {
    ProbeReport {
        cpl0_ps_per_instruction: 400,
        cpl3_ps_per_instruction: 400,
        rdpmc: RdpmcBehaviour::Faults,
        step_cpl0: true,
        step_cpl3: true,
        step_fence: true,
        breakpoint_cpl0: true,
        breakpoint_cpl3: true,
        rf_honoured: true,
        dr_access_trap: false,
        handler_out: HandlerOut::At,
        protected_store_cpl0: ProtectedStore::Fault,
        protected_store_cpl3: ProtectedStore::Fault,
        block_irq: true,
        smm: true,
        guest_step: GuestStep::ToGuest,
        guest_step_beside_ours: GuestStep::ToUs,
        guest_breakpoint_beside_ours: false,
    }
}

fn features() -> KvmFeatures {
    KvmFeatures {
        irqchip: true,
        pit2: true,
        user_space_msr: true,
        msr_filter: true,
        guest_debug: true,
        guest_debug_blockirq: true,
        immediate_exit: true,
        signal_msi: true,
        user_nmi: true,
        sync_regs: 7,
        binary_stats: true,
        pmu_capability: false,
        get_tsc_khz: true,
        smm: false,
        tsc_deadline_timer: true,
        max_vcpus: 64,
    }
}

/// The text of the report on a host with this probe, which must end with `status`
/// and hold every one of `parts`.
fn check(probe: ProbeReport, status: ExitStatus, parts: &[&str]) {
    let kvm = Kvm {
        features: features(),
        probe: Some(probe),
        slow_cpl0: Some(probe.slow_cpl0()),
        models: Vec::new(),
    };
    let verdict = probe.check().map_err(|refusal| refusal.to_string());
    let diagnosis = Diagnosis::assemble(facts(), Some(kvm), verdict);
    let mut text = Vec::new();
    report(&diagnosis, false, &mut text).unwrap();
    assert_eq!(super::status(&diagnosis), status);
    let text = String::from_utf8(text).unwrap();
    for part in parts {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
    let mut json = Vec::new();
    report(&diagnosis, true, &mut json).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["verdict"]["can_run"], status == ExitStatus::SUCCESS);
    let on_kvm = status == ExitStatus::SUCCESS;
    let auto = if on_kvm {
        vmm::counters::auto_names()
    } else {
        vec!["emu"]
    };
    assert_eq!(json["auto_counters"], serde_json::json!(auto));
    let line = format!("note  auto   {} on this host", auto.join(","));
    assert!(text.contains(&line), "{text}");
    let engines = |at: usize| (&json["engines"][at]["name"], &json["engines"][at]["usable"]);
    assert_eq!(engines(0), (&"kvm".into(), &on_kvm.into()));
    assert_eq!(engines(1), (&"emu".into(), &true.into()));
    // What the engine emu has needs no KVM.
    for usable in ["ok    emu", "ok    sim", "Next: umpire demo"] {
        assert!(text.contains(usable), "{text}");
    }
    let said = diagnosis.verdict.reason.as_deref();
    assert!(
        said.is_none_or(|reason| text.matches(reason).count() == 1),
        "{text}"
    );
    let names: Vec<_> = pmu_virt::backend_names().iter().skip(1).collect();
    for (index, one) in names.into_iter().enumerate() {
        assert_eq!(json["backends"][index]["name"], one.name);
    }
}

#[test]
fn a_faithful_kvm() {
    let parts = [
        "A guest with a virtual PMU can run here",
        "runs natively",
        "RDPMC                  raises #GP",
        "ok    step",
    ];
    check(faithful(), ExitStatus::SUCCESS, &parts);
}

#[test]
fn an_emulating_kvm_limits_the_stepper() {
    let probe = ProbeReport {
        cpl0_ps_per_instruction: 600_000,
        step_cpl3: false,
        breakpoint_cpl3: false,
        rf_honoured: false,
        block_irq: false,
        ..faithful()
    };
    let parts = [
        "runs in KVM's instruction emulator",
        "note  step   CPL 0 only",
        "KVM_GUESTDBG_BLOCKIRQ, Linux",
    ];
    check(probe, ExitStatus::SUCCESS, &parts);
}

fn sources(text: &str) -> pmu_virt::Sources {
    pmu_virt::Sources::parse(text).unwrap()
}

#[test]
fn without_steps_the_step_backend_is_refused_alone() {
    let probe = ProbeReport {
        step_cpl0: false,
        ..faithful()
    };
    let parts = ["no    step   cannot be used: single steps", "ok    clock"];
    check(probe, ExitStatus::SUCCESS, &parts);
    let refusal = check_backends(&probe, &sources("step"))
        .unwrap_err()
        .to_string();
    assert!(refusal.contains("single steps do not stop"), "{refusal}");
    assert!(check_backends(&probe, &sources("clock")).is_ok());
    assert!(check_backends(&probe, &sources("auto")).is_ok());
    assert!(check_backends(&faithful(), &sources("clock,step")).is_ok());
}

#[test]
fn without_kvm_there_are_the_models_of_emu() {
    let refusal = vmm::doctor::Refusal::Obstacle(vmm::probe::HostRefusal::Unknown);
    let diagnosis = Diagnosis::without_kvm(facts(), &refusal);
    let mut text = Vec::new();
    report(&diagnosis, false, &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    for part in [
        "with --engine emu",
        "ok    amd-perfmonv2",
        "note  auto   emu on this host",
        "ok    sim",
        "no    clock  cannot be used: it needs KVM",
        "on KVM here: the RDPMC",
    ] {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

#[test]
fn refusals() {
    for (rdpmc, breakpoint_cpl0, reason) in [
        (
            RdpmcBehaviour::SilentZero,
            true,
            "returns 0 without a fault",
        ),
        (RdpmcBehaviour::Answered, true, "could not be switched off"),
        (RdpmcBehaviour::Unknown, true, "in an unknown way"),
        (
            RdpmcBehaviour::Faults,
            false,
            "neither a patch nor a hardware breakpoint at CPL 0",
        ),
    ] {
        let probe = ProbeReport {
            rdpmc,
            breakpoint_cpl0,
            handler_out: if breakpoint_cpl0 {
                HandlerOut::At
            } else {
                HandlerOut::Unnoticed
            },
            ..faithful()
        };
        let verdict = "No guest with a virtual PMU can run on KVM here: ";
        let parts = [verdict, reason, "no    clock"];
        check(probe, ExitStatus::BAD_INPUT, &parts);
    }
}
