//! Which host CPUs a thread runs on.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use vmm_sys_util::errno;

/// The host CPUs that this thread may run on.
///
/// # Errors
/// The error of `sched_getaffinity`.
pub fn allowed_cpus() -> errno::Result<Vec<usize>> {
    let set = sched_getaffinity(None).map_err(error)?;
    let all = 0..CpuSet::MAX_CPU;
    Ok(all.filter(|&cpu| set.is_set(cpu)).collect())
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
/// The error of `sched_setaffinity`; `work` was done if only the way back failed.
pub fn while_on_cpu<T>(cpu: usize, work: impl FnOnce() -> T) -> errno::Result<T> {
    let before = allowed_cpus()?;
    allow_cpus(&[cpu])?;
    let result = work();
    allow_cpus(&before)?;
    Ok(result)
}

fn allow_cpus(cpus: &[usize]) -> errno::Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        if cpu >= CpuSet::MAX_CPU {
            return Err(errno::Error::new(libc::EINVAL));
        }
        set.set(cpu);
    }
    sched_setaffinity(None, &set).map_err(error)
}

fn error(error: rustix::io::Errno) -> errno::Error {
    errno::Error::new(error.raw_os_error())
}
