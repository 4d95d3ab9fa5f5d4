//! `perf_event_open(2)` for the calling thread, and what the processor says of itself.

use std::arch::x86_64::{__cpuid, __cpuid_count, _rdtsc};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use perf_event_open_sys::{bindings as abi, ioctls, perf_event_open};

use super::kernel::{Kind, Processor};
use crate::spec::{OS, USR};

/// An event of the calling thread, in the rings of `select`. The leader of a group is pinned
/// and stands still; the others count when it does. With `period` the kernel stops it, and
/// says so, after so many events.
///
/// # Errors
/// The kernel's error number.
pub(super) fn open(
    kind: Kind,
    select: u64,
    period: Option<u64>,
    leader: Option<BorrowedFd<'_>>,
) -> Result<OwnedFd, i32> {
    let mut attr = abi::perf_event_attr::default();
    (attr.type_, attr.config) = match kind {
        Kind::Raw(config) => (abi::PERF_TYPE_RAW, config),
        Kind::Generic(config) => (abi::PERF_TYPE_HARDWARE, config),
    };
    attr.size = u32::try_from(size_of_val(&attr)).unwrap_or(u32::MAX);
    attr.read_format = u64::from(
        abi::PERF_FORMAT_GROUP
            | abi::PERF_FORMAT_TOTAL_TIME_ENABLED
            | abi::PERF_FORMAT_TOTAL_TIME_RUNNING,
    );
    let leads = leader.is_none();
    attr.set_disabled(leads.into());
    attr.set_pinned(leads.into());
    attr.set_exclude_user(u64::from(select & USR == 0 && select != 0));
    attr.set_exclude_kernel(u64::from(select & OS == 0));
    attr.set_exclude_hv(1);
    if let Some(period) = period {
        attr.__bindgen_anon_1.sample_period = period;
        attr.__bindgen_anon_2.wakeup_events = 1;
    }
    let group = leader.map_or(-1, |leader| leader.as_raw_fd());
    let flags = abi::PERF_FLAG_FD_CLOEXEC.into();
    // SAFETY: `attr` is initialised in full, its `size` is its own, and it outlives the call.
    let fd = unsafe { perf_event_open(&raw mut attr, 0, -1, group, flags) };
    let fd = answer(fd)?;
    // SAFETY: the kernel has just made the descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Starts a leader, and with it its group.
///
/// # Errors
/// The kernel's error number.
pub(super) fn enable(event: BorrowedFd<'_>) -> Result<(), i32> {
    // SAFETY: the ioctl takes a flag word and touches no memory of ours.
    answer(unsafe { ioctls::ENABLE(event.as_raw_fd(), 0) }).map(drop)
}

/// Starts an event that has a period, until its first overflow.
///
/// # Errors
/// The kernel's error number.
pub(super) fn once(event: BorrowedFd<'_>) -> Result<(), i32> {
    // SAFETY: the ioctl takes a number and touches no memory of ours.
    answer(unsafe { ioctls::REFRESH(event.as_raw_fd(), 1) }).map(drop)
}

/// Stops a leader and its group.
pub(super) fn disable_all(leader: BorrowedFd<'_>) {
    const GROUP: libc::c_uint = 1;
    // SAFETY: the ioctl takes a flag word and touches no memory of ours; with a descriptor of
    // an event it does not fail.
    unsafe { ioctls::DISABLE(leader.as_raw_fd(), GROUP) };
}

/// Reads a leader's group into `words`; how many bytes there were.
///
/// # Errors
/// The kernel's error number.
pub(super) fn read(leader: BorrowedFd<'_>, words: &mut [u64]) -> Result<usize, i32> {
    let size = size_of_val(words);
    // SAFETY: the kernel writes at most the slice's size into the slice, and every bit
    // pattern is a u64.
    let read = unsafe { libc::read(leader.as_raw_fd(), words.as_mut_ptr().cast(), size) };
    usize::try_from(read).map_err(|_| last_errno())
}

fn answer(returned: libc::c_int) -> Result<libc::c_int, i32> {
    if returned < 0 {
        return Err(last_errno());
    }
    Ok(returned)
}

fn last_errno() -> i32 {
    let errno = std::io::Error::last_os_error().raw_os_error();
    errno.unwrap_or(libc::EIO)
}

/// The time stamp counter.
pub(super) fn tsc() -> u64 {
    // SAFETY: every x86-64 processor has the instruction; Linux lets programs use it.
    unsafe { _rdtsc() }
}

/// What CPUID says.
pub(super) fn processor() -> Processor {
    const EXTENDED: u32 = 0x8000_0000;
    let leaf = |leaf: u32| {
        let of = if leaf >= EXTENDED { EXTENDED } else { 0 };
        let highest = __cpuid(of).eax;
        (leaf <= highest).then(|| __cpuid_count(leaf, 0))
    };
    let first = __cpuid(0);
    let mut vendor = [0; 12];
    for (place, word) in vendor.chunks_mut(4).zip([first.ebx, first.edx, first.ecx]) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    let (family, model) = Processor::signature(leaf(1).map_or(0, |it| it.eax));
    // SDM vol. 2A, CPUID: leaf 0AH; the vendor AMD has none.
    let monitoring = leaf(0xa);
    let [version, programmable, ..] = monitoring.map_or([0; 4], |it| it.eax.to_le_bytes());
    let version2 = leaf(0x8000_0022).filter(|it| it.eax & 1 != 0);
    Processor {
        vendor,
        family,
        model,
        version,
        programmable: version2.map_or(programmable, |it| it.ebx.to_le_bytes()[0] & 0xf),
        // Models have the first three.
        fixed: monitoring
            .map_or(0, |it| it.edx.to_le_bytes()[0] & 0x1f)
            .min(3),
        // APM vol. 3, E.4: Fn8000_0001_ECX[PerfCtrExtCore], Fn8000_0022_EAX[PerfMonV2].
        core_extension: leaf(0x8000_0001).is_some_and(|it| it.ecx & 1 << 23 != 0),
        version2: version2.is_some(),
    }
}
