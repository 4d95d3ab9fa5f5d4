//! What a VMM of somebody else's may do with the PMU of a vCPU: snapshots, vCPUs that come
//! and go, resets, a `KVM_RUN` that fails, and guests of 32 bits.

mod bits32;
mod descriptors;
mod forgotten;
mod machines;
mod seccomp;
#[allow(unsafe_code, reason = "a memory slot, and signals")]
mod sys;
mod threads;
mod vmm;

use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvm_pmu::{Armed, Errno, Exited, SharedMemory, ThreadContext, TrapMode, VmExit};

use vmm::{
    COUNT, COUNTER, CYCLES, DEVICE, END, ENDBR64, GLOBAL, GP_TAKEN, HANDLER, IDT, MAIN, MMIO,
    PAUSE, PUSH, SELECT, VALUE, Vcpu, Vmm, Written, enable, read, report, spin_for, stopped, wrmsr,
};

use iced_x86::code_asm::{CodeAssembler, al, byte_ptr};

/// How RDPMC is trapped, and what the guest's #GP handler begins with.
const WAYS: [(TrapMode, &[u8]); 3] = [
    (TrapMode::Auto, ENDBR64),
    (TrapMode::Auto, PUSH),
    (TrapMode::Breakpoint, ENDBR64),
];

/// Whether `test` can run; says why not.
fn can_run(test: &str) -> bool {
    let kvm = Path::new("/dev/kvm").exists();
    if !kvm {
        println!("skipped: {test}: this machine has no /dev/kvm");
    }
    kvm
}

/// A guest that is to be saved after `before`, and then reads at once.
fn saved(way: (TrapMode, &[u8]), before: fn(&mut CodeAssembler) -> Written) -> (Vmm, Vcpu) {
    let vmm = Vmm::with(way.0, way.1, |a| {
        before(a)?;
        report(a, PAUSE)?;
        read(a)?;
        read(a)?;
        report(a, END)
    });
    let mut vcpu = vmm.started(0, MAIN, None);
    let reports = vcpu.reports(&vmm);
    assert!(matches!(reports.as_slice(), [(PAUSE, _)]), "{reports:x?}");
    vcpu.leave();
    (vmm, vcpu)
}

/// The same guest in a new VM, whose PMU takes the state in before it is handed over, or
/// afterwards.
fn restored(way: (TrapMode, &[u8]), (vmm, vcpu): (&Vmm, &mut Vcpu), late: bool) -> (Vmm, Vcpu) {
    let state = vcpu.save();
    vmm.traps.restore();
    let other = Vmm::new(way.0);
    let mut memory = vec![0; 2 << 20];
    assert!(
        vmm.traps
            .read(vmm.memory.for_vmm(), 0, memory.as_mut_slice())
    );
    other.put(0, &memory);
    let mut copy = other.vcpu(0, (!late).then_some(&state));
    copy.set(
        &vcpu.kvm.get_regs().unwrap(),
        &vcpu.kvm.get_sregs().unwrap(),
    );
    if late {
        let counters = copy.thread.counters_mut();
        let pmu = copy.pmu.pmu_mut().unwrap();
        pmu.restore(counters, &state).unwrap();
    }
    (other, copy)
}

/// Whatever the saved guest could read it can read at its first instruction, and its
/// handler is left alone if it could read nothing.
#[test]
fn a_restored_guest_may_read_at_once() {
    if !can_run("a_restored_guest_may_read_at_once") {
        return;
    }
    let values = [(VALUE, COUNT), (VALUE, COUNT), (END, COUNT)];
    let check = |name: &str, before: fn(&mut CodeAssembler) -> Written, reads: bool| {
        for (way, late) in WAYS.iter().flat_map(|way| [(*way, false), (*way, true)]) {
            let (vmm, mut vcpu) = saved(way, before);
            let (other, mut copy) = restored(way, (&vmm, &mut vcpu), late);
            let reports = copy.reports(&other);
            let told = format!(
                "{name}, {way:x?}, late {late}: {reports:x?} {:?}",
                copy.seen
            );
            let watched = copy.seen.0.len() == 1;
            let right = if reads {
                reports == values && watched
            } else {
                matches!(reports.as_slice(), [(GP_TAKEN, _)]) && copy.seen.0.is_empty()
            };
            assert!(right, "{told}");
        }
    };
    check("a counter is on", enable, true);
    check("all counters were stopped", stopped, true);
    check(
        "a counter was set and none was on",
        |a| wrmsr(a, COUNTER, COUNT),
        true,
    );
    check("nothing was programmed", |_| Ok(()), false);
}

/// The guest that was saved goes on as well.
#[test]
fn a_saved_guest_goes_on() {
    if !can_run("a_saved_guest_goes_on") {
        return;
    }
    for way in WAYS {
        let (vmm, mut vcpu) = saved(way, stopped);
        vcpu.save();
        vmm.traps.restore();
        let reports = vcpu.reports(&vmm);
        let values = [(VALUE, COUNT), (VALUE, COUNT), (END, COUNT)];
        assert_eq!(reports, values, "{way:x?}");
    }
}

/// The PMU of a vCPU that has left its thread has every count, and is saved on any thread.
/// One that has not left would be saved without the last of them, and is refused.
#[test]
fn a_pmu_is_saved_on_any_thread_once_its_vcpu_has_left() {
    if !can_run("a_pmu_is_saved_on_any_thread_once_its_vcpu_has_left") {
        return;
    }
    let counting = |a: &mut CodeAssembler| {
        wrmsr(a, SELECT, CYCLES)?;
        wrmsr(a, GLOBAL, 1)?;
        read(a)?;
        spin_for(a, 1 << 22)?;
        report(a, PAUSE)
    };
    let vmm = Vmm::with(TrapMode::Auto, ENDBR64, counting);
    let mut vcpu = vmm.started(0, MAIN, None);
    let reports = vcpu.reports(&vmm);
    let [(VALUE, read), (PAUSE, _)] = reports.as_slice() else {
        panic!("{reports:x?}");
    };
    let refused = vcpu.pmu.pmu().unwrap().save().unwrap_err().to_string();
    assert!(refused.starts_with("vCPU 0 cannot be saved: "), "{refused}");
    // Another thread's counters have nothing of it.
    let khz = vcpu.pmu.tsc_khz();
    let mut other = ThreadContext::new(khz).unwrap();
    let left = vcpu.pmu.leave_thread(&mut vcpu.kvm, &mut other);
    let told = left.unwrap_err().to_string();
    assert!(told.starts_with("leave_thread: vCPU 0 "), "{told}");
    vcpu.leave();
    let pmu = vcpu.pmu;
    let state = std::thread::spawn(move || pmu.pmu().unwrap().save());
    let state = state.join().unwrap().unwrap();
    let mut copy = vmm.pmu(0);
    copy.restore(None, &state).unwrap();
    let saved = copy.report(None)[0].value;
    assert!(saved > u64::from(*read) + (1 << 20), "{saved} after {read}");
}

/// A machine that was reset has no counter to be read: its handler is its own, until it
/// programs one.
#[test]
fn a_reset_ends_the_watch() {
    if !can_run("a_reset_ends_the_watch") {
        return;
    }
    for way in WAYS {
        let (vmm, mut vcpu) = saved(way, enable);
        let pmu = vcpu.pmu.pmu_mut().unwrap();
        pmu.reset(vcpu.thread.counters_mut());
        let reports = vcpu.reports(&vmm);
        assert!(
            matches!(reports.as_slice(), [(GP_TAKEN, _)]),
            "{way:x?}: {reports:x?}"
        );
        assert_eq!(vcpu.seen.0.last(), Some(&Armed::Nothing), "{way:x?}");
        assert_eq!(vmm.handler_byte(), way.1[0], "{way:x?}");
    }
}

/// A vCPU that is plugged in when all counters are off, and never programs one, reads; also
/// when the one that had programmed them is gone.
#[test]
fn a_vcpu_that_comes_later_reads() {
    const SECOND: u64 = MAIN + 0x800;
    if !can_run("a_vcpu_that_comes_later_reads") {
        return;
    }
    for way in WAYS {
        let (vmm, vcpu) = saved(way, stopped);
        vmm.code(SECOND, 64, |a| {
            read(a)?;
            report(a, PAUSE)?;
            read(a)?;
            report(a, END)
        });
        let mut second = vmm.started(1, SECOND, None);
        let reports = second.reports(&vmm);
        assert_eq!(reports, [(VALUE, 0), (PAUSE, 0)], "{way:x?}");
        drop(vcpu);
        let reports = second.reports(&vmm);
        assert_eq!(reports, [(VALUE, 0), (END, 0)], "{way:x?}");
        let mut third = vmm.started(2, SECOND, None);
        let reports = third.reports(&vmm);
        assert_eq!(reports, [(VALUE, 0), (PAUSE, 0)], "{way:x?}");
    }
}

/// A guest whose counters are off for good is kicked for a look at its debug registers, or
/// at its gate, and seldom.
#[test]
fn a_quiet_guest_is_left_alone() {
    if !can_run("a_quiet_guest_is_left_alone") {
        return;
    }
    for (way, most) in WAYS.into_iter().zip([30, 400, 400]) {
        let tsc_khz = Vmm::new(way.0).vcpu(0, None).pmu.tsc_khz();
        let vmm = Vmm::with(way.0, way.1, |a| {
            stopped(a)?;
            spin_for(a, u64::from(tsc_khz) * 2_000)?;
            read(a)?;
            report(a, END)
        });
        let mut vcpu = vmm.started(0, MAIN, None);
        let reports = vcpu.reports(&vmm);
        assert_eq!(reports, [(VALUE, COUNT), (END, COUNT)], "{way:x?}");
        // Two seconds: 100 looks a millisecond apart, then each 10 ms; or each 100 ms.
        let kicks = vcpu.kicks;
        println!("{way:x?}: {kicks} kicks in 2 s");
        assert!(0 < kicks && kicks <= most, "{way:x?}: {kicks} kicks");
    }
}

/// Only EINTR and EAGAIN are kicks. EFAULT is the VMM's, if no patched handler explains it;
/// any other errno ends the loop with an error that names the call.
#[test]
fn a_failed_run_is_no_kick() {
    if !can_run("a_failed_run_is_no_kick") {
        return;
    }
    let (vmm, mut vcpu) = saved((TrapMode::Auto, PUSH), enable);
    // As a VMM does that enters the guest by its own means.
    let fd = vcpu.kvm.as_fd().try_clone_to_owned().unwrap();
    let mut outcome = |failed: Option<i32>| {
        vcpu.kvm.set_immediate_exit(true);
        let entered = vcpu.enter(&vmm).unwrap();
        let really = sys::kvm_run(&fd);
        let ran = failed.map_or(really, |errno| Err(Errno(errno)));
        let exited = entered.after_exit(ran);
        vcpu.kvm.set_immediate_exit(false);
        (ran.map_err(|Errno(number)| number), exited)
    };
    let kicked = Exited::Pmu(VmExit::Interrupted);
    let (ran, exited) = outcome(None);
    assert_eq!((ran, exited.unwrap()), (Err(libc::EINTR), kicked));
    let fault = VmExit::MemoryFault { address: None };
    for (errno, expected) in [
        (libc::EINTR, kicked),
        (libc::EAGAIN, kicked),
        (libc::EFAULT, Exited::Vmm(fault)),
    ] {
        assert_eq!(outcome(Some(errno)).1.unwrap(), expected, "{errno}");
    }
    for errno in [
        libc::EIO,
        libc::EINVAL,
        libc::ENOMEM,
        libc::EBADF,
        libc::EPERM,
    ] {
        let error = outcome(Some(errno)).1.unwrap_err();
        let told = error.to_string();
        assert!(told.starts_with("vCPU 0: KVM_RUN failed: "), "{told}");
        assert_eq!(error.is_dead(), errno == libc::EIO, "{told}");
    }
    // Nobody waits for a vCPU whose KVM_RUN has failed, and it can be left.
    vmm.traps.restore();
    vcpu.leave();
    let reports = vcpu.pmu.pmu().unwrap().report(vcpu.thread.counters());
    assert_eq!(reports[0].value, u64::from(COUNT));
}

/// An error of KVM's own.
#[test]
fn a_vm_of_another_process_is_dead() {
    if !can_run("a_vm_of_another_process_is_dead") {
        return;
    }
    let (vmm, mut vcpu) = saved((TrapMode::Auto, PUSH), enable);
    let entered = vcpu.enter(&vmm).unwrap();
    let held = sys::in_a_child(|| {
        let exited = entered.run();
        println!("{exited:?}");
        exited.is_err_and(|error| {
            error.is_dead() && error.to_string().starts_with("vCPU 0: KVM_RUN failed: ")
        })
    });
    assert!(held);
}

/// What a device takes to answer is not the guest's time, and nobody waits for the vCPU
/// meanwhile: a handler is restored while the device works.
#[test]
fn devices_are_not_the_guests_time() {
    if !can_run("devices_are_not_the_guests_time") {
        return;
    }
    let vmm = Vmm::with(TrapMode::Auto, ENDBR64, |a| {
        wrmsr(a, SELECT, CYCLES)?;
        wrmsr(a, GLOBAL, 1)?;
        read(a)?;
        a.in_(al, u32::from(DEVICE))?;
        read(a)?;
        a.mov(al, byte_ptr(MMIO))?;
        read(a)?;
        report(a, END)
    });
    let mut vcpu = vmm.started(0, MAIN, None);
    vcpu.device = |vmm| {
        let (done, restored) = std::sync::mpsc::channel();
        let traps = vmm.traps.clone();
        std::thread::spawn(move || {
            traps.restore();
            done.send(())
        });
        let restored = restored.recv_timeout(Duration::from_secs(5));
        assert_eq!(restored, Ok(()), "it waits for a vCPU that is at a device");
        std::thread::sleep(Duration::from_millis(20));
    };
    let reports = vcpu.reports(&vmm);
    let [(VALUE, before), (VALUE, between), (VALUE, after), (END, _)] = reports.as_slice() else {
        panic!("{reports:x?}");
    };
    let worked = 20 * vcpu.pmu.tsc_khz();
    println!("{reports:?}, a device works for {worked}");
    for took in [between - before, after - between] {
        assert!(took < worked / 4, "{took} of {worked}");
    }
}

/// Who is dropped between its entry and its exit keeps nobody waiting, and goes on.
#[test]
fn an_entry_that_is_dropped_is_over() {
    if !can_run("an_entry_that_is_dropped_is_over") {
        return;
    }
    let (vmm, mut vcpu) = saved((TrapMode::Auto, ENDBR64), enable);
    drop(vcpu.enter(&vmm).unwrap());
    vmm.traps.restore();
    let values = [(VALUE, COUNT), (VALUE, COUNT), (END, COUNT)];
    assert_eq!(vcpu.reports(&vmm), values);
}

/// The registers that answer an RDPMC are the guest's, whatever becomes of the entry that was to
/// take them; what is set after that is.
#[test]
fn an_answer_outlives_an_entry_that_is_dropped() {
    const ELSEWHERE: u64 = MAIN + 0x800;
    if !can_run("an_answer_outlives_an_entry_that_is_dropped") {
        return;
    }
    for (way, leaves, sets) in WAYS
        .into_iter()
        .flat_map(|way| [(way, true, false), (way, true, true), (way, false, true)])
    {
        let told = format!("{way:x?}, leaves {leaves}, sets {sets}");
        let (vmm, mut vcpu) = saved(way, enable);
        vmm.code(ELSEWHERE, 64, |a| report(a, END));
        loop {
            match vcpu.enter(&vmm).unwrap().run().unwrap() {
                Exited::Pmu(VmExit::Interrupted) => {}
                Exited::Pmu(_) => break,
                Exited::Vmm(other) => panic!("{told}: {other:?}"),
            }
        }
        drop(vcpu.enter(&vmm).unwrap());
        if leaves {
            let thread = &mut vcpu.thread;
            vcpu.pmu.leave_thread(&mut vcpu.kvm, thread).unwrap();
        }
        let mut regs = vcpu.kvm.get_regs().unwrap();
        assert_eq!(regs.rax, u64::from(COUNT), "{told}");
        assert_eq!(regs.rip & !0x7ff, MAIN, "{told}: {:#x}", regs.rip);
        if !sets {
            let values = [(VALUE, COUNT), (VALUE, COUNT), (END, COUNT)];
            assert_eq!(vcpu.reports(&vmm), values, "{told}");
            continue;
        }
        (regs.rip, regs.rax) = (ELSEWHERE, 9);
        vcpu.kvm.set_regs(&regs).unwrap();
        assert_eq!(vcpu.reports(&vmm), [(END, 9)], "{told}");
    }
}

/// The handler of a guest in memory that the VMM has mapped itself is patched, and the VMM is
/// told what was written.
#[test]
fn a_vmm_has_its_own_memory() {
    if !can_run("a_vmm_has_its_own_memory") {
        return;
    }
    let wrote = Arc::new(Mutex::new(Vec::new()));
    let told = wrote.clone();
    let shared = SharedMemory::new(move |at, len| told.lock().unwrap().push((at, len)));
    let vmm = Vmm::with(TrapMode::Auto, ENDBR64, |a| {
        enable(a)?;
        read(a)?;
        report(a, PAUSE)?;
        read(a)?;
        report(a, END)
    });
    let vmm = vmm.in_shared(Arc::new(shared));
    let mut vcpu = vmm.started(0, MAIN, None);
    let reports = vcpu.reports(&vmm);
    assert_eq!(reports, [(VALUE, COUNT), (PAUSE, COUNT)]);
    assert_eq!(vcpu.seen.0, [Armed::Patch]);
    assert_ne!(vmm.handler_byte(), ENDBR64[0]);
    vcpu.leave();
    vmm.traps.restore();
    assert_eq!(vmm.handler_byte(), ENDBR64[0]);
    assert_eq!(*wrote.lock().unwrap(), [(HANDLER, 1), (HANDLER, 1)]);
    assert_eq!(vcpu.reports(&vmm), [(VALUE, COUNT), (END, COUNT)]);
}

/// With a split irqchip the local APICs are KVM's, and PMIs reach one whose ID has more than
/// eight bits, as a vector and as an NMI.
#[test]
fn pmis_come_to_a_vcpu_of_a_large_number_with_a_split_irqchip() {
    const ID: u32 = 0x105;
    const VECTOR: u32 = 0x40;
    const PMI: u8 = 0x17;
    const INTERRUPT: u64 = MAIN + 0x1000;
    /// With a PMI.
    const CYCLES_INT: u32 = CYCLES | 1 << 20;
    if !can_run("pmis_come_to_a_vcpu_of_a_large_number_with_a_split_irqchip") {
        return;
    }
    for (lvtpc, vector) in [(VECTOR, VECTOR), (0x400, 2)] {
        let vmm = Vmm::with_split_irqchip(TrapMode::Auto);
        let vmm = vmm.loaded(ENDBR64, |a| {
            // SVR and LVTPC in x2APIC mode.
            wrmsr(a, 0x80f, 0x1ff)?;
            wrmsr(a, 0x834, lvtpc)?;
            wrmsr(a, COUNTER, 0xfff0_0000)?;
            wrmsr(a, SELECT, CYCLES_INT)?;
            wrmsr(a, GLOBAL, 1)?;
            a.sti()?;
            let mut again = a.create_label();
            a.set_label(&mut again)?;
            a.jmp(again)
        });
        let gate = INTERRUPT & 0xffff | 8 << 16 | 0x8e00 << 32 | (INTERRUPT >> 16) << 48;
        vmm.put(IDT + 16 * u64::from(vector), &gate.to_le_bytes());
        vmm.code(INTERRUPT, 64, |a| report(a, PMI));
        let other = vmm.started(5, MAIN, None);
        let mut vcpu = vmm.started(ID, MAIN, None);
        let mut sregs = vcpu.kvm.get_sregs().unwrap();
        sregs.apic_base |= 1 << 10;
        vcpu.kvm.set_sregs(&sregs).unwrap();
        assert_eq!(vcpu.run(&vmm).unwrap().0, PMI, "LVTPC {lvtpc:#x}");
        drop(other);
    }
}
