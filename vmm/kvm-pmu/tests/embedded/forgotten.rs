//! What a VMM may forget, or do to the kick signal: each is an error that names the step.

use kvm_pmu::{
    KickTarget, KvmPmu, KvmPmuParts, ThreadContext, TrapMode, install_kick_handler,
    install_kick_handler_of, kick_signal, own_kick_handler,
};
use pmu_virt::{ClockBackend, CorePmu};
use vmm_sys_util::signal::SIGRTMIN;

use super::vmm::{COUNT, END, ENDBR64, MAIN, Vcpu, Vmm, enable, read, report, spin_for};
use super::{can_run, sys};

fn refused(vcpu: &mut Vcpu, vmm: &Vmm) -> String {
    vcpu.enter(vmm).map(drop).unwrap_err().to_string()
}

#[test]
fn counters_that_are_forgotten_are_an_error() {
    if !can_run("counters_that_are_forgotten_are_an_error") {
        return;
    }
    let vmm = Vmm::with(TrapMode::Auto, ENDBR64, |a| {
        enable(a)?;
        read(a)?;
        report(a, END)
    });
    let mut vcpu = vmm.started(0, MAIN, None);
    let khz = vcpu.pmu.tsc_khz();
    let none = ThreadContext::new(khz).unwrap();
    let thread = std::mem::replace(&mut vcpu.thread, none);
    assert_eq!(
        refused(&mut vcpu, &vmm),
        "vCPU 0: enter: its thread has no counters, and nothing would count \
         (ThreadContext::with_counters)"
    );
    let not_attached = "vCPU 0: enter: its PMU is not on the counters of its thread \
                        (VcpuPmu::attach)";
    let counters = Box::new(CorePmu::new(Box::new(ClockBackend::new())));
    let other = ThreadContext::new(khz).unwrap();
    vcpu.thread = other.with_counters(Some(counters));
    assert_eq!(refused(&mut vcpu, &vmm), not_attached);
    vcpu.thread = thread;
    let parked = vcpu.pmu.pmu_mut().unwrap();
    parked.park(vcpu.thread.counters_mut().unwrap());
    assert_eq!(refused(&mut vcpu, &vmm), not_attached);
    let back = vcpu.pmu.pmu_mut().unwrap();
    back.attach(vcpu.thread.counters_mut().unwrap());
    let reports = vcpu.reports(&vmm);
    assert_eq!(reports.last(), Some(&(END, COUNT)), "{reports:x?}");
}

/// The first words of what making a thread's context comes to.
fn made() -> Result<(), String> {
    let made = ThreadContext::new(1_000_000);
    made.map(drop).map_err(|error| error.to_string())
}

fn is_refused(beginning: &str) -> bool {
    let made = made();
    println!("{made:?}");
    made.is_err_and(|told| told.starts_with(&format!("ThreadContext::new: {beginning}")))
}

/// The handler that kicks need is gone, somebody else's, not called, or kept out.
#[test]
fn a_kick_that_would_be_lost_is_an_error() {
    let signal = kick_signal();
    let no_handler = || {
        sys::ignore(signal, libc::SIG_DFL);
        is_refused(&format!("signal {signal} has no handler: "))
    };
    assert!(sys::in_a_child(no_handler));
    let ignored = || {
        sys::ignore(signal, libc::SIG_IGN);
        is_refused(&format!("signal {signal} has no handler: "))
    };
    assert!(sys::in_a_child(ignored));
    let others = || {
        install_kick_handler().unwrap();
        sys::handle(signal, sys::deaf);
        is_refused(&format!("signal {signal} has another handler "))
            && install_kick_handler().is_ok()
            && made().is_ok()
    };
    assert!(sys::in_a_child(others));
    let blocked = || {
        install_kick_handler().unwrap();
        sys::block(signal);
        is_refused(&format!("this thread blocks signal {signal}: "))
    };
    assert!(sys::in_a_child(blocked));
    let not_called = || {
        own_kick_handler(signal).unwrap();
        sys::handle(signal, sys::deaf);
        is_refused("the VMM's own handler of signal ")
    };
    assert!(sys::in_a_child(not_called));
    let chosen_twice = || {
        install_kick_handler_of(signal + 1).unwrap();
        let again = install_kick_handler_of(signal + 2).map_err(|error| error.errno());
        again == Err(libc::EBUSY) && kick_signal() == signal + 1 && made().is_ok()
    };
    assert!(sys::in_a_child(chosen_twice));
}

/// Whether a kick gets a guest out that spins for ten seconds.
fn is_kicked() -> bool {
    let vmm = Vmm::new(TrapMode::Auto);
    let ticks = 10_000 * u64::from(vmm.vcpu(0, None).pmu.tsc_khz());
    let vmm = Vmm::with(TrapMode::Auto, ENDBR64, |a| {
        spin_for(a, ticks)?;
        report(a, END)
    });
    let mut vcpu = vmm.started(0, MAIN, None);
    let target = KickTarget::current();
    std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(50));
        target.kick();
    });
    let began = std::time::Instant::now();
    let entered = vcpu.enter(&vmm).unwrap();
    let exited = entered.run();
    println!("{exited:?} after {:?}", began.elapsed());
    began.elapsed().as_secs() < 5
}

/// A VMM that uses SIGRTMIN itself takes another signal, or handles that one for both.
#[test]
fn a_vmm_has_a_signal_of_its_own() {
    if !can_run("a_vmm_has_a_signal_of_its_own") {
        return;
    }
    let chosen = || {
        sys::handle(SIGRTMIN(), sys::deaf);
        install_kick_handler_of(SIGRTMIN() + 3).unwrap();
        is_kicked() && sys::is_handled_by(SIGRTMIN(), sys::deaf)
    };
    assert!(sys::in_a_child(chosen));
    let own = || {
        sys::handle(SIGRTMIN(), sys::passes_on);
        own_kick_handler(SIGRTMIN()).unwrap();
        is_kicked() && sys::is_handled_by(SIGRTMIN(), sys::passes_on)
    };
    assert!(sys::in_a_child(own));
}

/// This build's decoder has no XOP, as another's may have no AVX.
#[test]
fn what_the_decoder_lacks_is_not_announced() {
    const XOP: u32 = 1 << 11;
    if !can_run("what_the_decoder_lacks_is_not_announced") {
        return;
    }
    let vmm = Vmm::new(TrapMode::Auto);
    let made = |ecx: u32| {
        let vcpu = vmm.vcpu(u32::from(ecx != 0), None);
        let mut leaves = vcpu.kvm.fd().get_cpuid2(80).unwrap();
        for leaf in leaves.as_mut_slice() {
            if leaf.function == 0x8000_0001 {
                leaf.ecx = leaf.ecx & !(XOP | 1 << 21) | ecx;
            }
        }
        vcpu.kvm.fd().set_cpuid2(&leaves).unwrap();
        let parts = KvmPmuParts::new(vmm.pmu(0), vcpu.pmu.tsc_khz());
        KvmPmu::new(&vcpu.kvm, parts)
            .map(drop)
            .map_err(|error| error.to_string())
    };
    assert_eq!(made(0), Ok(()));
    let told = made(XOP).unwrap_err();
    assert!(
        told.starts_with("vCPU 1: KvmPmu::new: ") && told.ends_with("feature no_xop"),
        "{told}"
    );
}
