//! Legacy registers of Intel's architectural version 2, as software without
//! knowledge of reservations uses them (SDM vol. 4, table 2-2).

use arbiter::guest::PcrPort;

use super::findings::{done, note, seen};
use super::port::Cpus;
use super::sys;

/// `IA32_PMC0`.
pub(crate) const COUNTER: u32 = 0xc1;
/// `IA32_PERFEVTSEL0`.
pub(crate) const SELECT: u32 = 0x186;
/// `IA32_FIXED_CTR_CTRL`.
pub(crate) const FIXED_CONTROL: u32 = 0x38d;
/// `IA32_PERF_GLOBAL_CTRL`.
pub(crate) const GLOBAL_CONTROL: u32 = 0x38f;
/// Core cycles at every ring, enabled.
pub(crate) const CYCLES: u64 = 0x43_003c;
/// What the rogue writes.
const CLOBBER: u64 = 0x99;

/// A kernel component and a program that use programmable counter `n` because it
/// is there.
pub(crate) fn rogue(n: u32) {
    note("rogue writes", done(Cpus.wrmsr(0, COUNTER + n, CLOBBER)));
    note("rogue reads", seen(Cpus.rdmsr(0, COUNTER + n)));
    note("rogue reads, vCPU 1", seen(Cpus.rdmsr(1, SELECT + n)));
    note("rogue's RDPMC", seen(sys::rdpmc(n, 0)));
    note("program's RDPMC", seen(sys::user_rdpmc(n, 0)));
}

/// Some time.
pub(crate) fn linger() {
    (0..100).for_each(|_| core::hint::spin_loop());
}
