//! In a Linux with a PMU, a guest of ours for instance: an LWP is a thread of this process. A
//! bound event is a pinned group of perf events.

mod kernel;
#[allow(unsafe_code)]
mod sys;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use libc::{EACCES, EAGAIN, EBUSY, EINVAL, ENOENT, ENOSYS, ENOTSUP, EPERM};
use pmu_model::PmuModel;

use super::clock::now;
use super::event::{Event, MAX_PIC};
use super::failure::{Failure, Subcode, fail};
use super::lwp::{Bed, invalid};
use super::signals::signal_on;
use super::spec::OS;
use kernel::{Kind, kind};

/// What is kept of a thread.
#[derive(Debug, Default)]
struct Thread {
    /// Its events; the first one leads.
    group: [Option<OwnedFd>; MAX_PIC],
    /// Which counter each is.
    pics: [usize; MAX_PIC],
    /// What counters were preset to.
    from: [u64; MAX_PIC],
    began: Ticks,
}

/// The time stamp counter and the monotonic clock at one instant.
#[derive(Clone, Copy, Debug, Default)]
struct Ticks {
    tsc: u64,
    ns: i64,
}

impl Ticks {
    fn now() -> Self {
        Ticks {
            tsc: sys::tsc(),
            ns: now(),
        }
    }

    /// Ticks in so many nanoseconds, as the counter has gone since.
    fn of(self, ns: u64) -> u64 {
        let now = Ticks::now();
        let passed = u128::try_from(now.ns - self.ns).unwrap_or(0).max(1);
        let ticks = u128::from(now.tsc.wrapping_sub(self.tsc)) * u128::from(ns) / passed;
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }
}

/// The kernel's perf events.
#[derive(Debug)]
pub(crate) struct Linux {
    model: PmuModel,
    threads: Vec<Thread>,
}

impl Linux {
    /// The PMU of this processor.
    ///
    /// # Errors
    /// ENOSYS: it has none that is known.
    pub(crate) fn find() -> Result<Self, Failure> {
        let model = kernel::model(&sys::processor()).ok_or_else(|| {
            let reason = format_args!("this processor has no performance counters that are known");
            fail(ENOSYS, Subcode::BindFailed, reason)
        })?;
        Ok(Linux {
            model,
            threads: Vec::new(),
        })
    }

    fn open(&self, thread: &mut Thread, event: &Event, signals: bool) -> Result<(), Failure> {
        let intel = self.model.vendor() == pmu_model::Vendor::Intel;
        for (index, pic) in event.used().enumerate() {
            // Overflows in fewer events than this, if ever.
            let left = event.pic[pic].wrapping_neg();
            let period =
                (signals && i64::try_from(left).is_ok_and(|left| left > 0)).then_some(left);
            let select = event.pes[pic];
            let leader = thread.group[0].as_ref().map(AsFd::as_fd);
            let fd = sys::open(kind(select, intel), select, period, leader);
            let fd = fd.map_err(|errno| not_opened(pic, errno))?;
            if period.is_some() {
                signal_on(fd.as_fd())?;
            }
            thread.pics[index] = pic;
            thread.from[index] = event.pic[pic];
            let event = thread.group[index].insert(fd);
            if index > 0 && period.is_some() {
                sys::once(event.as_fd()).map_err(|errno| not_opened(pic, errno))?;
            }
            if index == 0 {
                thread.began = Ticks::now();
            }
        }
        let Some(leader) = &thread.group[0] else {
            return Ok(());
        };
        let first = event.pic[thread.pics[0]].wrapping_neg();
        let sampling = signals && i64::try_from(first).is_ok_and(|left| left > 0);
        let started = if sampling {
            sys::once(leader.as_fd())
        } else {
            sys::enable(leader.as_fd())
        };
        started.map_err(|errno| not_opened(thread.pics[0], errno))
    }
}

impl Thread {
    /// Values and times of the group.
    fn read(&self, event: &mut Event) -> Result<(), Failure> {
        let Some(leader) = &self.group[0] else {
            event.hrt = now();
            return Ok(());
        };
        let used = self.group.iter().flatten().count();
        // Number, time enabled, time on counters, values.
        let mut words = [0; 3 + MAX_PIC];
        let bytes = sys::read(leader.as_fd(), &mut words).map_err(|errno| {
            fail(
                errno,
                Subcode::BindFailed,
                format_args!("the counters cannot be read"),
            )
        })?;
        // A pinned group that has lost its counters reads as its end.
        if bytes < (3 + used) * size_of::<u64>() {
            return Err(invalid());
        }
        for (index, value) in words[3..][..used].iter().enumerate() {
            event.pic[self.pics[index]] = self.from[index].wrapping_add(*value);
        }
        event.tsc = self.began.of(words[2]);
        event.hrt = now();
        Ok(())
    }
}

impl Thread {
    /// Whether one of its counters has come to its end since it began.
    fn has_overflowed(&self) -> bool {
        let mut event = Event::default();
        let used = self.group.iter().flatten().count();
        let mut each = self.pics.iter().zip(&self.from).take(used);
        self.read(&mut event).is_ok() && each.any(|(pic, from)| event.pic[*pic] < *from)
    }
}

impl Bed for Linux {
    fn model(&self) -> &PmuModel {
        &self.model
    }

    fn access(&mut self) -> Result<(), Failure> {
        let probe = sys::open(Kind::CYCLES, 0, None, None);
        probe.map(drop).map_err(|errno| match errno {
            ENOENT | ENOTSUP | ENOSYS | libc::ENODEV => {
                let reason = format_args!("this kernel has no hardware events");
                fail(ENOSYS, Subcode::BindFailed, reason)
            }
            errno => not_opened(0, errno),
        })
    }

    fn start(&mut self, lwp: usize, event: &Event, signals: bool) -> Result<(), Failure> {
        if signals && event.pes.iter().any(|select| select & OS != 0) {
            let reason = format_args!("overflows of system events are not signalled here");
            return Err(fail(ENOTSUP, Subcode::ConflictingRequests, reason));
        }
        if self.threads.len() <= lwp {
            self.threads.resize_with(lwp + 1, Thread::default);
        }
        let mut thread = Thread::default();
        self.open(&mut thread, event, signals)?;
        // Whether it has its counters.
        let mut first = *event;
        thread.read(&mut first)?;
        self.threads[lwp] = thread;
        Ok(())
    }

    fn read(&mut self, lwp: usize, event: &mut Event) -> Result<(), Failure> {
        self.threads[lwp].read(event)
    }

    fn stop(&mut self, lwp: usize) {
        if let Some(thread) = self.threads.get_mut(lwp) {
            *thread = Thread::default();
        }
    }

    fn overflow(&mut self, descriptor: i32) -> Option<(usize, Option<u64>)> {
        let has = |fd: &OwnedFd| fd.as_raw_fd() == descriptor;
        let mut threads = self.threads.iter().enumerate();
        let (lwp, thread) = threads.find(|(_, it)| it.group.iter().flatten().any(has))?;
        // A signal may be on its way of what had this descriptor's number before.
        if !thread.has_overflowed() {
            return None;
        }
        // The kernel has stopped this one event.
        let leader = thread.group[0].as_ref()?;
        sys::disable_all(leader.as_fd());
        Some((lwp, None))
    }

    fn later(&mut self) -> Result<Vec<usize>, Failure> {
        // `pthread_create` tells of those that start.
        Ok(Vec::new())
    }

    fn signals_of_kernel(&self) -> bool {
        false
    }
}

/// What an error of `perf_event_open` is to a program for `libcpc`.
fn not_opened(pic: usize, errno: i32) -> Failure {
    let (number, subcode, reason) = match errno {
        ENOENT | ENOTSUP | ENOSYS | libc::ENODEV => (
            ENOTSUP,
            Subcode::PicNotCapable,
            "this kernel has no such hardware event, or none that signals",
        ),
        EACCES | EPERM => (
            EACCES,
            Subcode::RequiresPrivilege,
            "not allowed; /proc/sys/kernel/perf_event_paranoid and CAP_PERFMON decide",
        ),
        EBUSY => (
            EAGAIN,
            Subcode::ResourceUnavailable,
            "somebody has the counters",
        ),
        EINVAL => (
            ENOTSUP,
            Subcode::ResourceUnavailable,
            "the processor cannot count this, or not beside the others",
        ),
        errno => (errno, Subcode::BindFailed, "the kernel refused it"),
    };
    fail(
        number,
        subcode,
        format_args!("pic{pic}: {reason} (error {errno})"),
    )
}
