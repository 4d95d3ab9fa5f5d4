//! What a VMM may forget, or do to the kick signal: each is an error that names the step.

use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvm_pmu::{
    Errno, KickError, KickTarget, KvmPmu, KvmPmuParts, ProbeError, ThreadContext, TrapMode, cpuid,
    install_kick_handler, install_kick_handler_of, kick_signal, own_kick_handler, probe,
};
use pmu_virt::{ClockBackend, CorePmu};

use super::vmm::{COUNT, END, ENDBR64, MAIN, VALUE, Vcpu, Vmm, enable, read, report, spin_for};
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

/// Two vCPUs whose PMUs were mixed up.
#[test]
fn a_pmu_serves_its_own_vcpu_alone() {
    if !can_run("a_pmu_serves_its_own_vcpu_alone") {
        return;
    }
    let vmm = Vmm::with(TrapMode::Auto, ENDBR64, |a| report(a, END));
    let (mut one, mut other) = (vmm.started(0, MAIN, None), vmm.started(1, MAIN, None));
    std::mem::swap(&mut one.kvm, &mut other.kvm);
    assert_eq!(
        refused(&mut one, &vmm),
        "vCPU 1: enter: the PMU is that of vCPU 0 (KvmPmu::new)"
    );
    std::mem::swap(&mut one.kvm, &mut other.kvm);
    assert_eq!(one.run(&vmm).unwrap().0, END);
}

/// The first words of what making a thread's context comes to.
fn made() -> Result<(), String> {
    let made = ThreadContext::new(1_000_000);
    made.map(drop).map_err(|error| error.to_string())
}

fn is_refused(beginning: &str) -> bool {
    let made = made();
    println!("{made:?}");
    made.is_err_and(|told| told.starts_with(&format!("this thread cannot run vCPUs: {beginning}")))
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
    let overflows = || {
        install_kick_handler().unwrap();
        sys::handle(libc::SIGIO, sys::deaf);
        is_refused("SIGIO, which the kernel sends in place of signal ")
    };
    assert!(sys::in_a_child(overflows));
    let blocked = || {
        install_kick_handler().unwrap();
        sys::block(signal);
        is_refused(&format!("this thread blocks signal {signal}: "))
    };
    assert!(sys::in_a_child(blocked));
}

/// The probe's guests could not be ended, and are not begun.
#[test]
fn a_probe_without_kicks_is_an_error() {
    if !can_run("a_probe_without_kicks_is_an_error") {
        return;
    }
    // On a thread of its own, which no other test has.
    let blocked = std::thread::spawn(|| {
        sys::block(kick_signal());
        probe().unwrap_err()
    });
    let error = blocked.join().unwrap();
    assert!(
        matches!(error, ProbeError::Kick(KickError::Blocked(_))),
        "{error:?}"
    );
    let told = error.to_string();
    let beginning = "probe: a guest that hangs would never be left: this thread blocks signal ";
    assert!(told.starts_with(beginning), "{told}");
    assert_eq!(probe().unwrap().check(), Ok(()));
}

/// What a process chooses once is tried in one of its own, which runs `test` alone: true there.
fn is_alone(test: &str) -> bool {
    const ALONE: &str = "KVM_PMU_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let name = format!("embedded::forgotten::{test}");
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &name, "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&run.stdout);
    assert!(
        told.contains("1 passed"),
        "{told}{}",
        String::from_utf8_lossy(&run.stderr)
    );
    false
}

fn errno(chosen: Result<(), Errno>) -> Result<(), i32> {
    chosen.map_err(|Errno(number)| number)
}

#[test]
fn a_handler_of_the_vmms_that_does_not_call_is_an_error() {
    if is_alone("a_handler_of_the_vmms_that_does_not_call_is_an_error") {
        let signal = libc::SIGRTMIN();
        own_kick_handler(signal).unwrap();
        sys::handle(signal, sys::deaf);
        sys::handle(libc::SIGIO, sys::passes_on);
        assert!(is_refused("the VMM's own handler of signal "));
    }
}

#[test]
fn a_signal_is_chosen_once() {
    if is_alone("a_signal_is_chosen_once") {
        let signal = libc::SIGRTMIN();
        install_kick_handler().unwrap();
        let busy = Err(libc::EBUSY);
        assert_eq!(errno(install_kick_handler_of(signal + 1)), busy);
        assert_eq!(errno(own_kick_handler(signal)), busy);
        assert_eq!(errno(install_kick_handler_of(signal)), Ok(()));
        assert_eq!((kick_signal(), made()), (signal, Ok(())));
    }
}

/// A signal that cannot be one is an error, and another one can be chosen.
#[test]
fn a_signal_that_cannot_be_is_not_chosen() {
    if is_alone("a_signal_that_cannot_be_is_not_chosen") {
        // 32 is the C library's own.
        for signal in [i32::MIN, -1, 0, 32, libc::SIGKILL, libc::SIGSTOP, 1000] {
            let told = errno(install_kick_handler_of(signal));
            assert_eq!(told, Err(libc::EINVAL), "{signal}");
        }
        for signal in [i32::MIN, -libc::SIGRTMIN(), 0, libc::SIGKILL, 1000] {
            assert_eq!(
                errno(own_kick_handler(signal)),
                Err(libc::EINVAL),
                "{signal}"
            );
        }
        let signal = libc::SIGRTMIN() + 1;
        assert_eq!(errno(install_kick_handler_of(signal)), Ok(()));
        assert_eq!((kick_signal(), made()), (signal, Ok(())));
    }
}

/// Whoever handles kicks himself handles SIGIO, too: by default it ends the process.
#[test]
fn a_handler_of_the_vmms_without_sigio_is_an_error() {
    if is_alone("a_handler_of_the_vmms_without_sigio_is_an_error") {
        sys::handle(libc::SIGRTMIN(), sys::passes_on);
        own_kick_handler(libc::SIGRTMIN()).unwrap();
        assert!(is_refused(
            "SIGIO, which the kernel sends in place of signal "
        ));
        sys::handle(libc::SIGIO, sys::passes_on);
        assert_eq!(made(), Ok(()));
    }
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

/// A VMM that uses SIGRTMIN itself takes another signal.
#[test]
fn a_vmm_has_a_signal_of_its_own() {
    let test = "a_vmm_has_a_signal_of_its_own";
    if can_run(test) && is_alone(test) {
        sys::handle(libc::SIGRTMIN(), sys::deaf);
        install_kick_handler_of(libc::SIGRTMIN() + 3).unwrap();
        assert!(is_kicked() && sys::is_handled_by(libc::SIGRTMIN(), sys::deaf));
    }
}

/// Or it handles that one for both.
#[test]
fn a_vmm_has_a_handler_of_its_own() {
    let test = "a_vmm_has_a_handler_of_its_own";
    if can_run(test) && is_alone(test) {
        sys::handle(libc::SIGRTMIN(), sys::passes_on);
        sys::handle(libc::SIGIO, sys::passes_on);
        own_kick_handler(libc::SIGRTMIN()).unwrap();
        assert!(is_kicked() && sys::is_handled_by(libc::SIGRTMIN(), sys::passes_on));
    }
}

/// A handler of the VMM's that was there first goes on being called, and one that comes later and
/// calls this crate's is none that takes it away; also where each calls the other.
#[test]
fn handlers_call_each_other() {
    let test = "handlers_call_each_other";
    if !can_run(test) || !is_alone(test) {
        return;
    }
    let counted = || sys::COUNTED.swap(0, Ordering::Relaxed);
    let signal = libc::SIGRTMIN();
    sys::handle(signal, sys::counts);
    install_kick_handler().unwrap();
    KickTarget::current().kick();
    assert_eq!(counted(), 1);
    assert_eq!((made(), counted()), (Ok(()), 0));
    sys::handle_before(signal);
    // The look whether it calls is a signal.
    assert_eq!((made(), counted()), (Ok(()), 2));
    install_kick_handler().unwrap();
    assert!(sys::is_handled_by(signal, sys::counts));
    counted();
    assert!(is_kicked() && counted() > 0);
    // A thread that does not take the signal itself finds it, too.
    std::thread::spawn(move || {
        sys::block(signal);
        install_kick_handler().unwrap();
        KickTarget::current().kick();
    })
    .join()
    .unwrap();
    assert!(sys::is_handled_by(signal, sys::counts));
}

/// A VMM installs its handler with each vCPU, also when others run.
#[test]
fn a_handler_that_is_taken_away_is_found() {
    let test = "a_handler_that_is_taken_away_is_found";
    if !can_run(test) || !is_alone(test) {
        return;
    }
    let vmm = Vmm::with(TrapMode::Auto, ENDBR64, |a| {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        report(a, VALUE)?;
        a.jmp(again)
    });
    let mut vcpu = vmm.started(0, MAIN, None);
    vcpu.run(&vmm).unwrap();
    sys::handle(kick_signal(), sys::deaf);
    let began = Instant::now();
    let error = loop {
        if let Err(error) = vcpu.run(&vmm) {
            break error.to_string();
        }
        assert!(began.elapsed().as_secs() < 5, "nobody has looked");
    };
    assert!(error.contains("has another handler"), "{error}");
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
        let mut leaves = cpuid::to_kvm(&vcpu.kvm.get_cpuid().unwrap());
        for leaf in &mut leaves {
            if leaf.function == 0x8000_0001 {
                leaf.ecx = leaf.ecx & !(XOP | 1 << 21) | ecx;
            }
        }
        vcpu.kvm.set_cpuid(&cpuid::from_kvm(&leaves)).unwrap();
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
