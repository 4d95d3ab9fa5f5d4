//! The system calls of the vCPU's thread: what a VMM needs at all, and what `kvm-pmu` needs.

use std::collections::BTreeMap;
use std::mem::size_of;

use anyhow::Result;
use kvm_bindings::{
    kvm_debugregs, kvm_fpu, kvm_guest_debug, kvm_lapic_state, kvm_mp_state, kvm_msi, kvm_msrs,
    kvm_regs, kvm_sregs, kvm_vcpu_events,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// A thread of Rust's that prints and ends.
const ANY_THREAD: [i64; 14] = [
    libc::SYS_brk,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getrandom,
    libc::SYS_madvise,
    libc::SYS_mmap,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_write,
];

/// Kicks at deadlines and whether they come, kicks of other vCPUs, and what KVM says of halts.
const OF_THE_PMU: [i64; 11] = [
    libc::SYS_clock_gettime,
    libc::SYS_getpid,
    libc::SYS_gettid,
    // A page of the guest's #GP handler.
    libc::SYS_mprotect,
    libc::SYS_pread64,
    libc::SYS_rt_sigaction,
    libc::SYS_sched_yield,
    libc::SYS_tgkill,
    libc::SYS_timer_create,
    libc::SYS_timer_delete,
    libc::SYS_timer_settime,
];

const fn ioctl(direction: u64, size: usize, number: u64) -> u64 {
    direction << 30 | (size as u64) << 16 | 0xae << 8 | number
}

const fn reads<T>(number: u64) -> u64 {
    ioctl(2, size_of::<T>(), number)
}

const fn writes<T>(number: u64) -> u64 {
    ioctl(1, size_of::<T>(), number)
}

/// The VMM's own: to enter the guest, and to send interrupts of its devices.
const OF_ANY_VMM: [u64; 2] = [ioctl(0, 0, 0x80), writes::<kvm_msi>(0xa5)];

/// Registers, events and the local APIC of a stopped vCPU; NMIs; the breakpoint on the handler.
const IOCTLS_OF_THE_PMU: [u64; 15] = [
    reads::<kvm_regs>(0x81),
    writes::<kvm_regs>(0x82),
    reads::<kvm_sregs>(0x83),
    writes::<kvm_sregs>(0x84),
    ioctl(3, size_of::<kvm_msrs>(), 0x88),
    writes::<kvm_msrs>(0x89),
    reads::<kvm_fpu>(0x8c),
    reads::<kvm_lapic_state>(0x8e),
    reads::<kvm_mp_state>(0x98),
    ioctl(0, 0, 0x9a),
    writes::<kvm_guest_debug>(0x9b),
    reads::<kvm_vcpu_events>(0x9f),
    writes::<kvm_vcpu_events>(0xa0),
    reads::<kvm_debugregs>(0xa1),
    writes::<kvm_debugregs>(0xa2),
];

/// From now on any other call ends the process.
pub(crate) fn apply() -> Result<()> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for call in ANY_THREAD.into_iter().chain(OF_THE_PMU) {
        rules.insert(call, Vec::new());
    }
    for request in OF_ANY_VMM.into_iter().chain(IOCTLS_OF_THE_PMU) {
        let (len, is) = (SeccompCmpArgLen::Dword, SeccompCmpOp::Eq);
        let condition = SeccompCondition::new(1, len, is, request)?;
        let rule = SeccompRule::new(vec![condition])?;
        rules.entry(libc::SYS_ioctl).or_default().push(rule);
    }
    let (others, these) = (SeccompAction::KillProcess, SeccompAction::Allow);
    let filter = SeccompFilter::new(rules, others, these, std::env::consts::ARCH.try_into()?)?;
    Ok(seccompiler::apply_filter(&BpfProgram::try_from(filter)?)?)
}
