//! The host's own PMU, and who uses its counters.

use std::fs;
use std::io;
use std::path::Path;

use serde::Serialize;

use super::sys;

/// Tries what only the kernel can answer.
pub trait PerfProbe {
    /// Opens a counter of hardware cycles in user mode for this thread, and closes
    /// it again.
    ///
    /// # Errors The kernel's error.
    fn open_hardware_cycles(&self) -> io::Result<()>;
}

/// The running kernel.
#[derive(Clone, Copy, Debug)]
pub struct HostPerf;

impl PerfProbe for HostPerf {
    fn open_hardware_cycles(&self) -> io::Result<()> {
        sys::open_hardware_cycles().map(drop)
    }
}

/// Whether there is a hardware PMU that this process can use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum HardwarePmu {
    /// A counter of cycles could be opened.
    Usable,
    /// The kernel drives a PMU, but not for this process or not now.
    Refused {
        /// Why, and what to do.
        reason: String,
    },
    /// There is none.
    Absent {
        /// The evidence.
        reason: String,
    },
    /// It could not be found out.
    Unknown { reason: String },
}

impl HardwarePmu {
    /// Whether the kernel drives one, usable or not.
    pub fn exists(&self) -> bool {
        matches!(self, Self::Usable | Self::Refused { .. })
    }

    pub(super) fn find(root: &Path, perf: &dyn PerfProbe) -> Self {
        let sources = root.join("sys/bus/event_source/devices");
        // Hybrid processors have one device per kind of core instead of "cpu".
        let driven = ["cpu", "cpu_core", "cpu_atom"]
            .iter()
            .any(|name| sources.join(name).exists());
        let Err(error) = perf.open_hardware_cycles() else {
            return Self::Usable;
        };
        match (error.raw_os_error(), driven) {
            (Some(libc::ENOSYS), _) => Self::Absent {
                reason: "the kernel has no perf_event_open".to_owned(),
            },
            (Some(libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP), false) => Self::Absent {
                reason: "the kernel drives no hardware PMU".to_owned(),
            },
            // A kernel without PMU still has the device and refuses its events.
            (Some(libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP), true) => Self::Absent {
                reason: "the kernel's PMU device counts no hardware cycles".to_owned(),
            },
            (Some(libc::EACCES | libc::EPERM), true) => Self::Refused {
                reason: "not permitted: lower kernel.perf_event_paranoid to 2 or less, or use \
                         CAP_PERFMON"
                    .to_owned(),
            },
            (Some(libc::EBUSY), _) => Self::Refused {
                reason: "all counters are held by others".to_owned(),
            },
            (Some(libc::EACCES | libc::EPERM), false) => Self::Unknown {
                reason: "perf_event_open is not permitted here".to_owned(),
            },
            _ => Self::Unknown {
                reason: format!("perf_event_open failed: {error}"),
            },
        }
    }
}

/// Somebody who holds hardware counters, or may.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "holder", rename_all = "kebab-case")]
pub enum CounterHolder {
    /// The kernel's NMI watchdog: one counter of cycles on every CPU.
    NmiWatchdog,
    /// A process with perf events open; hardware and software ones look alike.
    Process {
        /// Its process id.
        pid: u32,
        name: String,
        /// How many events it has open.
        events: usize,
    },
}

/// Everybody who can be seen to hold counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CounterHolders {
    /// Those who can be seen.
    pub seen: Vec<CounterHolder>,
    /// Processes that could not be looked into; 0 for root.
    pub unreadable_processes: usize,
}

impl CounterHolders {
    pub(super) fn find(root: &Path, pmu: &HardwarePmu, watchdog: Option<bool>) -> Self {
        let mut found = Self::default();
        // Without a PMU the kernel's switch may be on while no watchdog runs.
        if watchdog == Some(true) && pmu.exists() {
            found.seen.push(CounterHolder::NmiWatchdog);
        }
        let mut pids: Vec<u32> = fs::read_dir(root.join("proc"))
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect();
        pids.sort_unstable();
        for pid in pids {
            let process = root.join("proc").join(pid.to_string());
            match count_events(&process) {
                Ok(0) => {}
                Ok(events) => found.seen.push(CounterHolder::Process {
                    pid,
                    name: name_of(&process),
                    events,
                }),
                // It ended in between.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(_) => found.unreadable_processes += 1,
            }
        }
        found
    }
}

fn count_events(process: &Path) -> io::Result<usize> {
    let mut events = 0;
    for entry in fs::read_dir(process.join("fd"))? {
        match fs::read_link(entry?.path()) {
            Ok(target) => events += usize::from(target.as_os_str() == "anon_inode:[perf_event]"),
            // It was closed in between.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // Of one's own process with more rights the list can be read, and not what is in it.
            Err(error) => return Err(error),
        }
    }
    Ok(events)
}

fn name_of(process: &Path) -> String {
    fs::read(process.join("comm")).map_or_else(
        |_| "unknown".to_owned(),
        |name| umpire_events::one_line(&String::from_utf8_lossy(&name)),
    )
}
