//! Which host CPUs a thread runs on.

use std::mem::MaybeUninit;

use vmm_sys_util::errno;

/// The host CPUs that this thread may run on.
///
/// # Errors
/// The error of `sched_getaffinity`.
pub fn allowed_cpus() -> errno::Result<Vec<usize>> {
    // SAFETY: an all-zero CPU set is valid: it is an array of integers.
    let mut set: libc::cpu_set_t = unsafe { MaybeUninit::zeroed().assume_init() };
    // SAFETY: the set is valid for writes of the size given with it.
    let ret = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) };
    if ret != 0 {
        return errno::errno_result();
    }
    let limit = usize::try_from(libc::CPU_SETSIZE).unwrap_or(0);
    // SAFETY: CPU_ISSET only reads the set, at an index below its size.
    let allowed = |cpu: &usize| unsafe { libc::CPU_ISSET(*cpu, &set) };
    Ok((0..limit).filter(allowed).collect())
}

/// Keeps the calling thread, and the threads that it makes from now on, on host
/// CPU `cpu`.
///
/// # Errors
/// The error of `sched_setaffinity`; EINVAL for a CPU that is not allowed.
pub fn pin_this_thread(cpu: usize) -> errno::Result<()> {
    allow_cpus(&[cpu])
}

/// Does `work` with the calling thread kept on host CPU `cpu`, and then lets the
/// thread run where it could before.
///
/// # Errors
/// As those of [`pin_this_thread`]; `work` was done if only the way back failed.
pub fn while_on_cpu<T>(cpu: usize, work: impl FnOnce() -> T) -> errno::Result<T> {
    let before = allowed_cpus()?;
    allow_cpus(&[cpu])?;
    let result = work();
    allow_cpus(&before)?;
    Ok(result)
}

fn allow_cpus(cpus: &[usize]) -> errno::Result<()> {
    // SAFETY: an all-zero CPU set is valid: it is an array of integers.
    let mut set: libc::cpu_set_t = unsafe { MaybeUninit::zeroed().assume_init() };
    for &cpu in cpus {
        if cpu >= usize::try_from(libc::CPU_SETSIZE).unwrap_or(0) {
            return Err(errno::Error::new(libc::EINVAL));
        }
        // SAFETY: the index was just checked against the set's size.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: the set is valid for reads of the size given with it.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } {
        0 => Ok(()),
        _ => errno::errno_result(),
    }
}
