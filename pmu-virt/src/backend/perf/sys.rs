//! `perf_event_open(2)` on the host's kernel.

mod page;

use std::collections::HashMap;

use perf_event_open_sys::{bindings as abi, ioctls, perf_event_open};
use pmu_model::SoftwareEvent;

use super::{Errno, EventFd, EventSource, EventSpec, GenericEvent, PerfSyscalls};
use page::PerfPage;

/// The kernel, with the pages that it shares with us.
#[derive(Debug, Default)]
pub(crate) struct HostPerf {
    pages: HashMap<EventFd, PerfPage>,
    /// Hardware events count outside of guests as well.
    counts_host: bool,
}

impl HostPerf {
    /// The kernel of a machine that runs no guest: `exclude_host` is cleared.
    pub(super) fn without_guests() -> Self {
        HostPerf {
            counts_host: true,
            ..HostPerf::default()
        }
    }
}

/// `struct f_owner_ex` of `fcntl(2)`, which the C library's bindings lack.
#[repr(C)]
struct OwnerEx {
    kind: libc::c_int,
    pid: libc::pid_t,
}

const F_SETSIG: libc::c_int = 10;
const F_SETOWN_EX: libc::c_int = 15;
const F_OWNER_TID: libc::c_int = 0;

impl PerfSyscalls for HostPerf {
    fn open(&mut self, event: &EventSpec, group: Option<EventFd>) -> Result<EventFd, Errno> {
        let mut attr = attr(event);
        if self.counts_host {
            attr.set_exclude_host(0);
        }
        let leader = group.map_or(-1, |fd| fd.0);
        // SAFETY: `attr` is initialised in full, its `size` is its own, and it
        // outlives the call. Without a mapped data buffer the kernel writes no
        // memory of ours for the event.
        let fd = unsafe {
            perf_event_open(
                &raw mut attr,
                0,
                -1,
                leader,
                abi::PERF_FLAG_FD_CLOEXEC.into(),
            )
        };
        answer(fd).map(EventFd)
    }

    fn id(&mut self, event: EventFd) -> Result<u64, Errno> {
        let mut id = 0;
        // SAFETY: the kernel writes one u64 at the pointer, which is valid for it.
        answer(unsafe { ioctls::ID(event.0, &raw mut id) })?;
        Ok(id)
    }

    fn enable(&mut self, event: EventFd) -> Result<(), Errno> {
        // SAFETY: the ioctl takes a flag word and touches no memory of ours.
        answer(unsafe { ioctls::ENABLE(event.0, 0) }).map(drop)
    }

    fn disable(&mut self, event: EventFd) -> Result<(), Errno> {
        // SAFETY: the ioctl takes a flag word and touches no memory of ours.
        answer(unsafe { ioctls::DISABLE(event.0, 0) }).map(drop)
    }

    fn set_period(&mut self, event: EventFd, events: u64) -> Result<(), Errno> {
        // The crate's wrapper passes the value; the kernel wants its address.
        // SAFETY: the kernel reads one u64 at the pointer, which is valid for it.
        answer(unsafe { libc::ioctl(event.0, libc::c_ulong::from(abi::PERIOD), &raw const events) })
            .map(drop)
    }

    fn signal_on_overflow(&mut self, event: EventFd, signal: i32) -> Result<(), Errno> {
        let owner = OwnerEx {
            kind: F_OWNER_TID,
            // SAFETY: gettid has no arguments and cannot fail.
            pid: unsafe { libc::gettid() },
        };
        // SAFETY: the kernel reads a `struct f_owner_ex` at the pointer, of
        // which `OwnerEx` has the layout.
        answer(unsafe { libc::fcntl(event.0, F_SETOWN_EX, &raw const owner) })?;
        // SAFETY: these two take integers.
        answer(unsafe { libc::fcntl(event.0, F_SETSIG, signal) })?;
        // SAFETY: as above. O_ASYNC is the one flag wanted on this descriptor.
        answer(unsafe { libc::fcntl(event.0, libc::F_SETFL, libc::O_ASYNC) }).map(drop)
    }

    fn read(&mut self, leader: EventFd, words: &mut [u64]) -> Result<usize, Errno> {
        // SAFETY: the kernel writes at most the slice's size into the slice,
        // and every bit pattern is a u64.
        let read = unsafe { libc::read(leader.0, words.as_mut_ptr().cast(), size_of_val(words)) };
        usize::try_from(read).map_err(|_| last_errno())
    }

    fn map(&mut self, event: EventFd) -> Result<(), Errno> {
        let page = PerfPage::map(event.0).map_err(Errno)?;
        self.pages.insert(event, page);
        Ok(())
    }

    fn sample(&mut self, event: EventFd) -> Option<u64> {
        self.pages.get(&event)?.count()
    }

    fn is_on_counter(&mut self, event: EventFd) -> Option<bool> {
        self.pages.get(&event)?.is_on_counter()
    }

    fn close(&mut self, event: EventFd) {
        self.pages.remove(&event);
        // SAFETY: the descriptor came from `open`, and the backend closes each
        // once and uses it no more.
        unsafe { libc::close(event.0) };
    }
}

fn attr(event: &EventSpec) -> abi::perf_event_attr {
    let (kind, config) = match event.source {
        EventSource::Dummy => (abi::PERF_TYPE_SOFTWARE, u64::from(abi::PERF_COUNT_SW_DUMMY)),
        EventSource::Software(event) => (abi::PERF_TYPE_SOFTWARE, software(event).into()),
        EventSource::Generic(event) => (abi::PERF_TYPE_HARDWARE, generic(event).into()),
        EventSource::Raw(config) => (abi::PERF_TYPE_RAW, config),
    };
    let mut attr = abi::perf_event_attr::default();
    attr.type_ = kind;
    attr.config = config;
    attr.size = u32::try_from(size_of_val(&attr)).unwrap_or(u32::MAX);
    attr.read_format = u64::from(
        abi::PERF_FORMAT_GROUP
            | abi::PERF_FORMAT_ID
            | abi::PERF_FORMAT_TOTAL_TIME_ENABLED
            | abi::PERF_FORMAT_TOTAL_TIME_RUNNING,
    );
    attr.set_disabled(1);
    attr.set_pinned(event.pinned.into());
    attr.set_exclude_user(event.exclude_user.into());
    attr.set_exclude_kernel(event.exclude_kernel.into());
    attr.set_exclude_host(event.exclude_host.into());
    if let Some(period) = event.period {
        attr.__bindgen_anon_1.sample_period = period;
        attr.__bindgen_anon_2.wakeup_events = 1;
    }
    attr
}

fn software(event: SoftwareEvent) -> u32 {
    match event {
        SoftwareEvent::TaskClock => abi::PERF_COUNT_SW_TASK_CLOCK,
        SoftwareEvent::PageFaults => abi::PERF_COUNT_SW_PAGE_FAULTS,
        SoftwareEvent::ContextSwitches => abi::PERF_COUNT_SW_CONTEXT_SWITCHES,
        SoftwareEvent::CpuMigrations => abi::PERF_COUNT_SW_CPU_MIGRATIONS,
    }
}

fn generic(event: GenericEvent) -> u32 {
    match event {
        GenericEvent::Cycles => abi::PERF_COUNT_HW_CPU_CYCLES,
        GenericEvent::RefCycles => abi::PERF_COUNT_HW_REF_CPU_CYCLES,
        GenericEvent::Instructions => abi::PERF_COUNT_HW_INSTRUCTIONS,
        GenericEvent::Branches => abi::PERF_COUNT_HW_BRANCH_INSTRUCTIONS,
        GenericEvent::BranchMisses => abi::PERF_COUNT_HW_BRANCH_MISSES,
        GenericEvent::CacheReferences => abi::PERF_COUNT_HW_CACHE_REFERENCES,
        GenericEvent::CacheMisses => abi::PERF_COUNT_HW_CACHE_MISSES,
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
