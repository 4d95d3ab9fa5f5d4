//! What the host's `perf_event_open(2)` allows, for `umpire doctor`.

use std::fs;

use pmu_model::{Nanos, SoftwareEvent};

use super::sys::HostPerf;
use super::syscalls::{Errno, EventSource, EventSpec, GenericEvent, PerfSyscalls, uninterrupted};

const PARANOID: &str = "/proc/sys/kernel/perf_event_paranoid";
const SAMPLE_RATE: &str = "/proc/sys/kernel/perf_event_max_sample_rate";

/// What `perf` can count here, and why not more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PerfSupport {
    /// Hardware events of a guest; the error is why not.
    pub hardware: Result<(), Errno>,
    /// Software events with overflows; the error is why not.
    pub software: Result<(), Errno>,
    /// A thread's own CPU time, which needs the least rights of all events; the error
    /// is why there is none.
    pub clock: Result<(), Errno>,
    /// `kernel.perf_event_paranoid`, if it can be read.
    pub paranoid: Option<i32>,
}

/// Tries what `perf` would open on the calling thread.
pub fn probe() -> PerfSupport {
    probe_with(&mut HostPerf::default(), paranoid())
}

fn probe_with(kernel: &mut dyn PerfSyscalls, paranoid: Option<i32>) -> PerfSupport {
    let mut try_open = |spec: &EventSpec| {
        uninterrupted(|| kernel.open(spec, None)).map(|event| kernel.close(event))
    };
    let event = |source, exclude_kernel| EventSpec {
        source,
        exclude_kernel,
        exclude_host: source.is_hardware(),
        pinned: false,
        ..EventSpec::LEADER
    };
    let clock = EventSource::Software(SoftwareEvent::TaskClock);
    PerfSupport {
        hardware: try_open(&event(EventSource::Generic(GenericEvent::Cycles), false)),
        software: try_open(&event(clock, false)),
        clock: try_open(&event(clock, true)),
        paranoid,
    }
}

impl PerfSupport {
    /// Why no event can be opened, with a next step; `None` if one can.
    pub fn refusal(&self) -> Option<String> {
        self.clock.err().map(|errno| refusal(errno, self.paranoid))
    }

    /// What is missing although some events can be opened, a line each.
    pub fn limits(&self) -> Vec<String> {
        let mut limits = Vec::new();
        if self.clock.is_err() {
            return limits;
        }
        if let Err(errno) = self.hardware {
            limits.push(format!(
                "no hardware events ({}); --counters perf stands for perf,clock here",
                refusal(errno, self.paranoid)
            ));
        }
        if let Err(errno) = self.software {
            limits.push(format!(
                "no software events but task-clock, and no overflow signals ({}); the VMM's \
                 timer stands in for them",
                refusal(errno, self.paranoid)
            ));
        }
        limits
    }
}

/// Why the kernel refused an event, and what a user can do.
pub(super) fn refusal(errno: Errno, paranoid: Option<i32>) -> String {
    let step = match errno.0 {
        libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP => {
            "this machine shows the kernel no such counters; a virtual machine needs a vPMU"
                .to_owned()
        }
        libc::EACCES | libc::EPERM => match paranoid {
            Some(level) if level > 1 => format!(
                "kernel.perf_event_paranoid is {level}: `sysctl kernel.perf_event_paranoid=1`, or \
                 give umpire CAP_PERFMON"
            ),
            _ => "a seccomp filter or a security module forbids perf_event_open; containers need \
                  it allowed, with CAP_PERFMON"
                .to_owned(),
        },
        libc::ENOSYS => "this kernel lacks perf events (CONFIG_PERF_EVENTS)".to_owned(),
        libc::EMFILE | libc::ENFILE => "no file descriptor is left: raise `ulimit -n`".to_owned(),
        libc::EBUSY => "another tool holds the counters".to_owned(),
        _ => return errno.to_string(),
    };
    format!("{errno}: {step}")
}

/// `kernel.perf_event_paranoid`.
pub(super) fn paranoid() -> Option<i32> {
    number(PARANOID)
}

/// Time between two overflows at half the rate that the kernel allows;
/// an event that exceeds the rate is stopped for the rest of the tick.
pub(super) fn sample_floor() -> Option<Nanos> {
    const NS_PER_S: u64 = 1_000_000_000;
    let rate: u64 = number(SAMPLE_RATE)?;
    (2 * NS_PER_S).checked_div(rate).map(Nanos)
}

fn number<T: std::str::FromStr>(path: &str) -> Option<T> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(errno: i32, paranoid: Option<i32>, part: &str) {
        let text = refusal(Errno(errno), paranoid);
        assert!(text.contains(part), "{text}");
        assert!(!text.contains('\n'));
    }

    #[test]
    fn a_refusal_names_the_next_step() {
        check(libc::EACCES, Some(2), "perf_event_paranoid is 2");
        check(libc::EACCES, Some(1), "seccomp");
        check(libc::EPERM, None, "seccomp");
        check(libc::ENOENT, Some(2), "vPMU");
        check(libc::EMFILE, Some(2), "ulimit -n");
        check(libc::ENOSYS, None, "CONFIG_PERF_EVENTS");
        check(libc::E2BIG, None, "os error");
    }

    #[test]
    fn limits_say_what_is_missing() {
        let support = |hardware, software, clock| PerfSupport {
            hardware,
            software,
            clock,
            paranoid: Some(2),
        };
        let none = Err(Errno(libc::ENOENT));
        let denied = Err(Errno(libc::EACCES));
        assert_eq!(support(Ok(()), Ok(()), Ok(())).limits().len(), 0);
        assert_eq!(support(none, Ok(()), Ok(())).limits().len(), 1);
        assert_eq!(support(none, denied, Ok(())).limits().len(), 2);
        let closed = support(denied, denied, denied);
        assert!(closed.limits().is_empty() && closed.refusal().is_some());
    }
}
