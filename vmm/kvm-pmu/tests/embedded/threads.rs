//! Threads that end and start again, and two VMs in one process.

use iced_x86::code_asm::{CodeAssembler, ecx};
use kvm_pmu::{KvmPmu, KvmVcpu, ThreadContext, TrapMode};
use pmu_virt::CorePmu;

use super::can_run;
use super::vmm::{
    COUNT, CYCLES, END, ENDBR64, GLOBAL, MAIN, PAUSE, SELECT, VALUE, Vcpu, Vmm, Written, enable,
    read, report, spin_for, wrmsr,
};

const TURNS: u32 = 1 << 14;

/// As many turns, each of a core's cycle at least: on a busy machine, where a guest does not run
/// while time goes by, they still count.
fn turns(a: &mut CodeAssembler) -> Written {
    let mut again = a.create_label();
    a.mov(ecx, TURNS)?;
    a.set_label(&mut again)?;
    a.dec(ecx)?;
    a.jne(again)
}

/// What of a vCPU goes to another thread.
type Movable = (KvmVcpu, KvmPmu, Box<CorePmu>);

/// The thread's end: all counts are in the PMU, or stay with the counters.
fn parted(mut vcpu: Vcpu, with_counts: bool) -> Movable {
    vcpu.leave();
    let (kvm, mut pmu) = (vcpu.kvm, vcpu.pmu);
    let mut counters = vcpu.thread.into_counters().unwrap();
    if with_counts {
        let logical = pmu.pmu_mut().unwrap();
        logical.park(&mut counters);
        logical.leave(&mut counters);
        logical.attach(&mut counters);
    }
    (kvm, pmu, counters)
}

/// A vCPU that counts goes on on thread after thread, and its count goes on.
#[test]
fn a_vcpu_goes_on_on_another_thread() {
    if !can_run("a_vcpu_goes_on_on_another_thread") {
        return;
    }
    let vmm = Vmm::with(TrapMode::Auto, ENDBR64, |a| {
        wrmsr(a, SELECT, CYCLES)?;
        wrmsr(a, GLOBAL, 1)?;
        for _ in 0..4 {
            turns(a)?;
            read(a)?;
            report(a, PAUSE)?;
        }
        report(a, END)
    });
    let vcpu = vmm.started(0, MAIN, None);
    let (device, mut movable) = (vcpu.device, parted(vcpu, false));
    let mut before = 0;
    for round in 0..4 {
        let (read, next) = std::thread::scope(|scope| {
            let run = || {
                let (kvm, pmu, counters) = movable;
                let thread = ThreadContext::new(pmu.tsc_khz()).unwrap();
                let mut vcpu = Vcpu {
                    thread: thread.with_counters(Some(counters)),
                    kvm,
                    pmu,
                    seen: Default::default(),
                    kicks: 0,
                    device,
                };
                let reports = vcpu.reports(&vmm);
                let [(VALUE, read), (PAUSE, _)] = reports.as_slice() else {
                    panic!("{reports:x?}");
                };
                (*read, parted(vcpu, round % 2 == 0))
            };
            scope.spawn(run).join().unwrap()
        });
        movable = next;
        let more = read - before;
        // A core has less than four cycles in one of the TSC.
        assert!(
            (TURNS / 4..1 << 30).contains(&more),
            "round {round}: {more}"
        );
        before = read;
    }
}

/// Two VMs, whose traps know nothing of each other, on two threads: each counts, is kicked
/// and saved.
#[test]
fn two_vms_run_in_one_process() {
    if !can_run("two_vms_run_in_one_process") {
        return;
    }
    let one = |mode: TrapMode, count: u32| {
        let vmm = Vmm::with(mode, ENDBR64, |a| {
            enable(a)?;
            wrmsr(a, super::COUNTER, count)?;
            spin_for(a, 1 << 27)?;
            read(a)?;
            report(a, PAUSE)?;
            read(a)?;
            report(a, END)
        });
        let mut vcpu = vmm.started(0, MAIN, None);
        let first = vcpu.reports(&vmm);
        assert_eq!(first, [(VALUE, count), (PAUSE, count)]);
        vcpu.leave();
        vcpu.save();
        vmm.traps.restore();
        assert_eq!(vcpu.reports(&vmm), [(VALUE, count), (END, count)]);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| one(TrapMode::Auto, COUNT));
        scope.spawn(|| one(TrapMode::Breakpoint, COUNT + 1));
    });
}
