//! The system calls of a measurement, on the host's kernel.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use perf_event_open_sys::{bindings as abi, ioctls, perf_event_open};

use crate::budget::{
    CpuSet, CpuidLeaf, Errno, EventFd, EventSpec, Follows, HandedEvent, ProbeCalls, ProbeEvent,
    Rings, Target, Times,
};

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
        let mut attr = attributes(&event.spec);
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
        open(&mut attr, pid, cpu, 0).map(EventFd)
    }

    fn read(&mut self, event: EventFd) -> Result<Option<Times>, Errno> {
        times(event.0)
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

/// The attributes of an event that is counted, and whose times are told.
fn attributes(spec: &EventSpec) -> abi::perf_event_attr {
    let mut attr = abi::perf_event_attr::default();
    attr.type_ = spec.perf_type;
    attr.config = spec.config;
    attr.read_format =
        u64::from(abi::PERF_FORMAT_TOTAL_TIME_ENABLED | abi::PERF_FORMAT_TOTAL_TIME_RUNNING);
    attr.size = u32::try_from(size_of_val(&attr)).unwrap_or(u32::MAX);
    attr.__bindgen_anon_3.config1 = spec.config1;
    attr.__bindgen_anon_4.config2 = spec.config2;
    attr
}

fn open(
    attr: &mut abi::perf_event_attr,
    pid: i32,
    cpu: i32,
    flags: u32,
) -> Result<libc::c_int, Errno> {
    let flags = libc::c_ulong::from(flags | abi::PERF_FLAG_FD_CLOEXEC);
    // SAFETY: `attr` is initialised in full, its `size` is its own, and it outlives the
    // call. Without a mapped buffer the kernel writes no memory of ours for the event.
    let fd = unsafe { perf_event_open(attr, pid, cpu, -1, flags) };
    answer(fd)
}

/// An event's times; `None` at the end of the file.
fn times(event: libc::c_int) -> Result<Option<Times>, Errno> {
    // The count, and the two times that `read_format` asks for, in nanoseconds.
    let mut words = [0u64; 3];
    let size = size_of_val(&words);
    // SAFETY: the kernel writes at most `size` bytes into `words`, which has as many.
    let read = unsafe { libc::read(event, words.as_mut_ptr().cast(), size) };
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

/// Opens an event for somebody else: pinned, and not enabled yet. With the folder of a control
/// group it counts what runs in that and below it on the event's CPU, and its thread says nothing.
pub(crate) fn open_handed(
    event: &HandedEvent,
    group: Option<BorrowedFd<'_>>,
) -> Result<OwnedFd, Errno> {
    let mut attr = attributes(&event.spec);
    attr.set_pinned(1);
    attr.set_disabled(1);
    match event.rings {
        Rings::User => {
            attr.set_exclude_kernel(1);
            attr.set_exclude_hv(1);
        }
        Rings::Guest => {
            attr.set_exclude_host(1);
            attr.set_exclude_hv(1);
        }
        Rings::All => {}
    }
    if let Some(period) = event.period {
        // An overflow tells that it came, and nothing else: `sample_type` is 0.
        attr.__bindgen_anon_1.sample_period = period;
        attr.__bindgen_anon_2.wakeup_events = 1;
    }
    inherit(&mut attr, event.follows);
    let number = |number: Option<u32>| match number {
        None => Ok(-1),
        Some(number) => i32::try_from(number).map_err(|_| Errno(libc::EINVAL)),
    };
    let (whose, flags) = match group {
        Some(folder) => (folder.as_raw_fd(), abi::PERF_FLAG_PID_CGROUP),
        None => (number(event.thread)?, 0),
    };
    let fd = open(&mut attr, whose, number(event.cpu)?, flags)?;
    // SAFETY: the kernel has just made the descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn inherit(attr: &mut abi::perf_event_attr, follows: Follows) {
    match follows {
        Follows::Nothing => {}
        Follows::Threads => {
            attr.set_inherit(1);
            attr.set_inherit_thread(1);
        }
        Follows::Children => attr.set_inherit(1),
    }
}

/// Opens an event that counts nothing for a thread, on the first CPU; 0: the caller's.
pub(crate) fn open_dummy(thread: u32, follows: Follows) -> Result<OwnedFd, Errno> {
    let mut attr = attributes(&EventSpec {
        perf_type: abi::PERF_TYPE_SOFTWARE,
        config: u64::from(abi::PERF_COUNT_SW_DUMMY),
        config1: 0,
        config2: 0,
    });
    attr.set_disabled(1);
    attr.set_exclude_kernel(1);
    attr.set_exclude_hv(1);
    inherit(&mut attr, follows);
    let thread = i32::try_from(thread).map_err(|_| Errno(libc::EINVAL))?;
    let fd = open(&mut attr, thread, 0, 0)?;
    // SAFETY: the kernel has just made the descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Has an event write to the buffer of another one of its CPU.
pub(crate) fn write_to(event: BorrowedFd<'_>, other: RawFd) -> Result<(), Errno> {
    // SAFETY: this request takes a number, and touches no memory of ours.
    answer(unsafe { ioctls::SET_OUTPUT(event.as_raw_fd(), other) })?;
    Ok(())
}

/// The smallest buffer of an event: a page that says how much is in it, and no room for anything.
/// Nobody reads it.
#[derive(Debug)]
pub(crate) struct MappedPage {
    at: usize,
}

impl MappedPage {
    /// The kernel takes as much more as its pages are larger.
    const LENGTH: usize = 4096;

    pub(crate) fn of(event: BorrowedFd<'_>) -> Result<Self, Errno> {
        let (null, fd) = (std::ptr::null_mut(), event.as_raw_fd());
        let (read, shared) = (libc::PROT_READ, libc::MAP_SHARED);
        // SAFETY: the kernel chooses where it maps the page: nothing of ours is there.
        let at = unsafe { libc::mmap(null, Self::LENGTH, read, shared, fd, 0) };
        if at == libc::MAP_FAILED {
            return Err(last_errno());
        }
        let at = at.expose_provenance();
        Ok(MappedPage { at })
    }
}

impl Drop for MappedPage {
    fn drop(&mut self) {
        let at = std::ptr::with_exposed_provenance_mut(self.at);
        // SAFETY: the kernel has mapped so much there for this value, which nobody has a
        // reference to.
        unsafe { libc::munmap(at, Self::LENGTH) };
    }
}

/// A perf event of a service manager.
pub(crate) fn given_event(descriptor: RawFd) -> io::Result<OwnedFd> {
    let what = std::fs::read_link(format!("/proc/self/fd/{descriptor}"))?;
    if what.as_os_str() != "anon_inode:[perf_event]" {
        let what = what.display();
        return Err(io::Error::other(format!(
            "descriptor {descriptor} is no perf event, but {what}"
        )));
    }
    // SAFETY: fcntl with F_SETFD takes a number, and touches no memory of ours.
    answer(unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) })
        .map_err(|Errno(errno)| io::Error::from_raw_os_error(errno))?;
    // SAFETY: the descriptor is open, as its link in /proc has just shown, and the service
    // manager gave it to this process, where only the caller knows the number.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Starts an event.
pub(crate) fn enable(event: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: this request takes a number, and touches no memory of ours.
    answer(unsafe { ioctls::ENABLE(event.as_raw_fd(), 0) })?;
    Ok(())
}

/// Stops an event, whoever else has a descriptor of it.
pub(crate) fn disable(event: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: this request takes a number, and touches no memory of ours.
    answer(unsafe { ioctls::DISABLE(event.as_raw_fd(), 0) })?;
    Ok(())
}

/// The times of an event that was handed over.
pub(crate) fn times_of(event: BorrowedFd<'_>) -> Result<Option<Times>, Errno> {
    times(event.as_raw_fd())
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
