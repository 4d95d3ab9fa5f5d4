//! The system calls of a measurement, on the host's kernel.

use std::time::{Duration, Instant};

use perf_event_open_sys::{bindings as abi, perf_event_open};

use crate::{CpuSet, CpuidLeaf, Errno, EventFd, ProbeCalls, ProbeEvent, Target, Times};

/// The host's kernel.
#[derive(Debug)]
pub(crate) struct HostCalls {
    started: Instant,
}

impl Default for HostCalls {
    fn default() -> Self {
        HostCalls {
            started: Instant::now(),
        }
    }
}

const WORD_BITS: u32 = u64::BITS;
/// `cpu_set_t` of the C library ends at 1024 CPUs; the kernel takes a mask of any size.
const MASK_WORDS: usize = (CpuSet::LIMIT / WORD_BITS) as usize;

impl ProbeCalls for HostCalls {
    fn bind(&mut self, cpu: u32) -> Result<(), Errno> {
        let mut mask = [0u64; MASK_WORDS];
        let word = mask.get_mut((cpu / WORD_BITS) as usize);
        *word.ok_or(Errno(libc::EINVAL))? |= 1 << (cpu % WORD_BITS);
        // SAFETY: the kernel reads `size_of_val(&mask)` bytes at the pointer, which `mask` has.
        answer(unsafe { libc::sched_setaffinity(0, size_of_val(&mask), mask.as_ptr().cast()) })?;
        Ok(())
    }

    fn current_cpu(&mut self) -> Result<u32, Errno> {
        // SAFETY: sched_getcpu has no arguments and touches no memory of ours.
        let cpu = answer(unsafe { libc::sched_getcpu() })?;
        Ok(cpu.unsigned_abs())
    }

    fn open(&mut self, event: &ProbeEvent) -> Result<EventFd, Errno> {
        let mut attr = abi::perf_event_attr::default();
        attr.type_ = event.spec.perf_type;
        attr.config = event.spec.config;
        attr.read_format =
            u64::from(abi::PERF_FORMAT_TOTAL_TIME_ENABLED | abi::PERF_FORMAT_TOTAL_TIME_RUNNING);
        attr.size = u32::try_from(size_of_val(&attr)).unwrap_or(u32::MAX);
        attr.__bindgen_anon_3.config1 = event.spec.config1;
        attr.__bindgen_anon_4.config2 = event.spec.config2;
        attr.set_pinned(event.pinned.into());
        let (pid, cpu) = match event.target {
            Target::Thread => {
                attr.set_exclude_kernel(1);
                attr.set_exclude_hv(1);
                (0, -1)
            }
            // Uncore PMUs cannot leave anything out.
            Target::Cpu(cpu) => (-1, i32::try_from(cpu).map_err(|_| Errno(libc::EINVAL))?),
        };
        // SAFETY: `attr` is initialised in full, its `size` is its own, and it outlives the
        // call. Without a mapped buffer the kernel writes no memory of ours for the event.
        let fd = unsafe {
            perf_event_open(
                &raw mut attr,
                pid,
                cpu,
                -1,
                abi::PERF_FLAG_FD_CLOEXEC.into(),
            )
        };
        answer(fd).map(EventFd)
    }

    fn read(&mut self, event: EventFd) -> Result<Option<Times>, Errno> {
        // The count, and the two times that `read_format` asks for, in nanoseconds.
        let mut words = [0u64; 3];
        let size = size_of_val(&words);
        // SAFETY: the kernel writes at most `size` bytes into `words`, which has as many.
        let read = unsafe { libc::read(event.0, words.as_mut_ptr().cast(), size) };
        match usize::try_from(read) {
            Err(_) => Err(last_errno()),
            Ok(0) => Ok(None),
            Ok(read) if read < size => Err(Errno(libc::EIO)),
            Ok(_) => Ok(Some(Times {
                enabled: Duration::from_nanos(words[1]),
                running: Duration::from_nanos(words[2]),
            })),
        }
    }

    fn close(&mut self, event: EventFd) {
        // SAFETY: the descriptor came from `open`, and a session closes each once and uses it
        // no more.
        unsafe { libc::close(event.0) };
    }

    fn now(&mut self) -> Duration {
        self.started.elapsed()
    }

    #[cfg(target_arch = "x86_64")]
    fn cpuid(&mut self, leaf: u32) -> CpuidLeaf {
        // Newer compilers take it for safe.
        #[allow(unused_unsafe)]
        // SAFETY: each x86-64 processor has the instruction, which only writes registers.
        let found = unsafe { std::arch::x86_64::__cpuid(leaf) };
        CpuidLeaf {
            eax: found.eax,
            ebx: found.ebx,
            ecx: found.ecx,
            edx: found.edx,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn cpuid(&mut self, _leaf: u32) -> CpuidLeaf {
        CpuidLeaf::default()
    }
}

fn answer(returned: libc::c_int) -> Result<libc::c_int, Errno> {
    if returned < 0 {
        return Err(last_errno());
    }
    Ok(returned)
}

fn last_errno() -> Errno {
    let errno = std::io::Error::last_os_error().raw_os_error();
    Errno(errno.unwrap_or(libc::EIO))
}
