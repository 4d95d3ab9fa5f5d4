//! vCPUs that are plugged in and out, a machine that is reset in place, and a process that forks.

use std::time::Duration;

use iced_x86::code_asm::{CodeAssembler, byte_ptr, ecx};
use kvm_pmu::{KvmPmu, KvmPmuParts, KvmVcpu, ThreadContext, TrapMode};
use pmu_virt::{ClockBackend, CorePmu};

use super::vmm::{
    COUNT, COUNTER, CYCLES, END, ENDBR64, GLOBAL, MAIN, PAUSE, SELECT, VALUE, Vcpu, Vmm, Written,
    enable, read, report, wrmsr,
};
use super::{can_run, sys};

/// Code of the vCPUs that come later, and a byte that ends the loop of the first.
const LATER: u64 = MAIN + 0x800;
const FLAG: u64 = 0x1_6000;

/// A PMU anew for a vCPU of KVM's that is there already: KVM has none that goes, so that VMMs
/// keep its descriptor.
fn plugged(vmm: &Vmm, kvm: KvmVcpu) -> Vcpu {
    let tsc_khz = kvm.get_tsc_khz().unwrap();
    let mut logical = vmm.pmu(kvm.id().0);
    let mut counters = Box::new(CorePmu::new(Box::new(ClockBackend::new())));
    logical.attach(&mut counters);
    let mut parts = KvmPmuParts::new(logical, tsc_khz);
    parts.traps = vmm.traps.clone();
    Vcpu {
        pmu: KvmPmu::new(&kvm, parts).unwrap(),
        kvm,
        thread: ThreadContext::new(tsc_khz)
            .unwrap()
            .with_counters(Some(counters)),
        seen: Default::default(),
        kicks: 0,
        device: |_| {},
    }
}

/// Reports `msr`, as RDMSR reads it.
fn tell(a: &mut CodeAssembler, msr: u32) -> Written {
    a.mov(ecx, msr)?;
    a.rdmsr()?;
    report(a, VALUE)
}

/// Reports what a PMU has of before, and programs and reads a counter.
fn begins_anew(a: &mut CodeAssembler) -> Written {
    tell(a, SELECT)?;
    tell(a, COUNTER)?;
    enable(a)?;
    read(a)?;
    report(a, PAUSE)
}

/// What [`begins_anew`] reports after a reset.
const ANEW: [(u8, u32); 4] = [(VALUE, 0), (VALUE, 0), (VALUE, COUNT), (PAUSE, COUNT)];

/// vCPUs with large and sparse numbers come and go, twice each and each time on a thread of its
/// own, beside one that counts: it loses nothing, and they have nothing of before.
#[test]
fn vcpus_are_plugged_in_and_out() {
    if !can_run("vcpus_are_plugged_in_and_out") {
        return;
    }
    for mode in [TrapMode::Auto, TrapMode::Breakpoint] {
        let vmm = Vmm::with_split_irqchip(mode).loaded(ENDBR64, |a| {
            wrmsr(a, SELECT, CYCLES)?;
            wrmsr(a, GLOBAL, 1)?;
            let mut again = a.create_label();
            a.set_label(&mut again)?;
            read(a)?;
            a.cmp(byte_ptr(FLAG), 0)?;
            a.je(again)?;
            report(a, END)
        });
        vmm.code(LATER, 64, begins_anew);
        let mut first = vmm.started(0, MAIN, None);
        assert_eq!(first.run(&vmm).unwrap().0, VALUE);
        let (mut taken, stays) = std::thread::scope(|scope| {
            let come_and_go = || {
                for id in [3, 0x105, 0xffe] {
                    let vcpu = vmm.started(id, LATER, None);
                    let (regs, sregs) = (vcpu.kvm.get_regs(), vcpu.kvm.get_sregs());
                    let (regs, sregs) = (regs.unwrap(), sregs.unwrap());
                    let mut parked = vcpu.kvm;
                    for round in 0..2 {
                        let once = || {
                            let mut vcpu = plugged(&vmm, parked);
                            vcpu.set(&regs, &sregs);
                            let reports = vcpu.reports(&vmm);
                            assert_eq!(reports, ANEW, "{mode:?}, vCPU {id:#x}, round {round}");
                            vcpu.leave();
                            vcpu.kvm
                        };
                        parked = std::thread::scope(|scope| scope.spawn(once).join().unwrap());
                    }
                }
                vmm.put(FLAG, &[1]);
            };
            let hands = scope.spawn(come_and_go);
            let reports = first.reports(&vmm);
            hands.join().unwrap();
            (reports, vmm.handler_byte())
        });
        assert_eq!(taken.pop().map(|(port, _)| port), Some(END));
        assert!(taken.len() > 2, "{}", taken.len());
        let values: Vec<_> = taken.iter().map(|(_, value)| *value).collect();
        // Where the host has run something else, that is taken from what the next stays in the
        // guest come to, down to nothing (`HaltClock`): a read may find what the one before did.
        assert!(values.is_sorted(), "{mode:?}: {values:?}");
        let stood = values.windows(2).filter(|two| two[0] == two[1]).count();
        assert!(stood < values.len() / 2, "{mode:?}: {values:?}");
        assert_eq!(stays != ENDBR64[0], mode == TrapMode::Auto, "{mode:?}");
    }
}

/// A machine of two is reset three times: each time no counter runs, and when both have been
/// entered the handler is the guest's own, until it programs one.
#[test]
fn a_machine_of_two_is_reset_in_place() {
    if !can_run("a_machine_of_two_is_reset_in_place") {
        return;
    }
    for mode in [TrapMode::Auto, TrapMode::Breakpoint] {
        let vmm = Vmm::with(mode, ENDBR64, begins_anew);
        let mut vcpus = [0, 9].map(|id| vmm.started(id, MAIN, None));
        let before = [0, 1].map(|n: usize| {
            let kvm = &vcpus[n].kvm;
            (kvm.get_regs().unwrap(), kvm.get_sregs().unwrap())
        });
        for round in 0..3 {
            for vcpu in &mut vcpus {
                assert_eq!(vcpu.reports(&vmm), ANEW, "{mode:?}, round {round}");
                vcpu.leave();
            }
            let is_patched = vmm.handler_byte() != ENDBR64[0];
            assert_eq!(is_patched, mode == TrapMode::Auto, "round {round}");
            for (vcpu, (regs, sregs)) in vcpus.iter_mut().zip(&before) {
                let pmu = vcpu.pmu.pmu_mut().unwrap();
                pmu.reset(vcpu.thread.counters_mut());
                assert!(!pmu.is_programmed());
                vcpu.set(regs, sregs);
            }
        }
        // The first keeps it until the second has been entered: what that could read it may read.
        for n in [0, 1, 0] {
            assert_eq!(vcpus[n].run(&vmm).unwrap(), (VALUE, 0));
        }
        assert_eq!(vmm.handler_byte(), ENDBR64[0], "{mode:?}");
    }
}

/// A process forks while one of its vCPUs is in the guest, and the child drops what it has of the
/// VM: the memory that both share is as it was, the child waits for nobody, and the guest counts
/// on.
#[test]
fn a_child_leaves_its_parents_guest_alone() {
    if !can_run("a_child_leaves_its_parents_guest_alone") {
        return;
    }
    let vmm = Vmm::with(TrapMode::Auto, ENDBR64, |a| {
        enable(a)?;
        for port in [PAUSE, PAUSE, END] {
            read(a)?;
            report(a, port)?;
        }
        Ok(())
    });
    vmm.code(LATER, 64, |a| {
        report(a, PAUSE)?;
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.cmp(byte_ptr(FLAG), 0)?;
        a.je(again)?;
        read(a)?;
        report(a, END)
    });
    let mut vcpu = Some(vmm.started(0, MAIN, None));
    let next = |vcpu: &mut Option<Vcpu>, port: u8| {
        let reports = vcpu.as_mut().unwrap().reports(&vmm);
        assert_eq!(reports, [(VALUE, COUNT), (port, COUNT)]);
        assert_ne!(vmm.handler_byte(), ENDBR64[0]);
    };
    next(&mut vcpu, PAUSE);
    // The only one that has the handler patched.
    let alone = sys::in_a_child(|| {
        drop(vcpu.take());
        true
    });
    assert!(alone, "the child did not end by itself");
    next(&mut vcpu, PAUSE);
    std::thread::scope(|scope| {
        let (tell, told) = std::sync::mpsc::channel();
        let shared = &vmm;
        let other = scope.spawn(move || {
            let mut busy = shared.started(1, LATER, None);
            assert!(matches!(busy.reports(shared).as_slice(), [(PAUSE, _)]));
            tell.send(()).unwrap();
            busy.reports(shared)
        });
        told.recv().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        let beside = sys::in_a_child(|| {
            vmm.traps.restore();
            drop(vcpu.take());
            true
        });
        assert!(beside, "the child waits for a vCPU of its parent's");
        next(&mut vcpu, END);
        vmm.put(FLAG, &[1]);
        assert_eq!(other.join().unwrap(), [(VALUE, 0), (END, 0)]);
    });
}
