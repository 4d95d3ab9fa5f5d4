use std::path::Path;

use pmu_virt::{Grant, OwnerId, PmuModel, VcpuPmu};

use super::*;
use crate::KvmPmuParts;

/// A KVM that does all of it right.
fn faithful() -> ProbeReport {
    ProbeReport {
        cpl0_ps_per_instruction: 1000,
        cpl3_ps_per_instruction: 1000,
        rdpmc: RdpmcBehaviour::Faults,
        step_cpl0: true,
        step_cpl3: true,
        step_fence: true,
        breakpoint_cpl0: true,
        breakpoint_cpl3: true,
        rf_honoured: true,
        dr_access_trap: true,
        handler_out: HandlerOut::At,
        protected_store_cpl0: ProtectedStore::Fault,
        protected_store_cpl3: ProtectedStore::Fault,
        block_irq: true,
        smm: false,
        guest_step: GuestStep::ToGuest,
        guest_step_beside_ours: GuestStep::ToUs,
        guest_breakpoint_beside_ours: false,
    }
}

/// A KVM that answers RDPMC, or leaves no way to trap it, gets no PMU, and says which.
#[test]
fn a_host_that_cannot_serve_is_refused() {
    let check = |report: ProbeReport, expected: Result<(), HostRefusal>| {
        let model = PmuModel::parse("intel-v2").unwrap();
        let pmu = VcpuPmu::detached(OwnerId(0), model, Grant::everything());
        let made = KvmPmuParts::on(&report, pmu, 1_000_000);
        assert_eq!(made.map(drop), expected, "{report:?}");
        assert_eq!(report.check(), expected);
    };
    let faithful = faithful();
    check(faithful, Ok(()));
    for (rdpmc, refusal, told) in [
        (
            RdpmcBehaviour::Answered,
            HostRefusal::Answered,
            "RDPMC is answered by a vPMU of KVM ",
        ),
        (
            RdpmcBehaviour::SilentZero,
            HostRefusal::SilentZero,
            "RDPMC returns 0 without a fault ",
        ),
        (
            RdpmcBehaviour::Unknown,
            HostRefusal::Unknown,
            "the RDPMC probe guest ended ",
        ),
    ] {
        check(ProbeReport { rdpmc, ..faithful }, Err(refusal));
        assert!(refusal.to_string().starts_with(told), "{refusal}");
    }
    let blind = ProbeReport {
        breakpoint_cpl0: false,
        ..faithful
    };
    check(blind, Ok(()));
    let handler_out = HandlerOut::Unnoticed;
    check(
        ProbeReport {
            handler_out,
            ..blind
        },
        Err(HostRefusal::NoTrap),
    );
}

/// What was found is found again in what was saved; what somebody else saved is an error.
#[test]
fn a_report_is_saved_and_loaded() {
    let report = faithful();
    let saved = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<ProbeReport>(&saved).unwrap(), report);
    let other = saved.replace("\"block_irq\"", "\"block_irqs\"");
    let error = serde_json::from_str::<ProbeReport>(&other).unwrap_err();
    assert!(error.to_string().contains("block_irqs"), "{error}");
    let older = saved.replace("\"block_irq\":true,", "");
    let error = serde_json::from_str::<ProbeReport>(&older).unwrap_err();
    assert!(error.to_string().contains("block_irq"), "{error}");
}

/// Two probes of one host find the same, times apart, and it can have a PMU.
#[test]
fn a_host_is_asked() {
    if !Path::new("/dev/kvm").exists() {
        println!("skipped: a_host_is_asked: this machine has no /dev/kvm");
        return;
    }
    let untimed = || ProbeReport {
        cpl0_ps_per_instruction: 0,
        cpl3_ps_per_instruction: 0,
        ..probe().unwrap()
    };
    let report = untimed();
    println!("{report:?}");
    assert_eq!(report.check(), Ok(()));
    assert_eq!(report, untimed());
}
