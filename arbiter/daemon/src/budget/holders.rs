//! Who holds counters and is not ours, as far as the kernel lets us see it.

use std::fs;
use std::io;
use std::path::Path;

use crate::budget::CpuSet;
use crate::budget::file::{self, FileError};
use crate::task::is_none;
use crate::unseen::is_unseen;

/// Somebody who holds counters, or may.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    /// The kernel's detector of hard lockups: one counter for cycles on each of these CPUs
    /// while they are online (kernel, Documentation/admin-guide/lockup-watchdogs.rst). A kernel
    /// whose CPUs watch each other ("buddy", since 6.5) says the same and holds none.
    NmiWatchdog {
        /// `watchdog_cpumask`.
        cpus: CpuSet,
    },
    /// A process with perf events open, or the msr device.
    Process {
        pid: u32,
        /// The process that started it, and so on; those that have ended are left out.
        ancestors: Vec<u32>,
        /// Its real user.
        uid: u32,
        /// Its name; characters that are not seen are replaced.
        comm: String,
        /// Descriptors of perf events. The kernel says no more of them: an event may be of
        /// software, wait, or count on each CPU.
        events: u32,
        /// CPUs whose msr device it has open, and whose counters it may program.
        msr_cpus: CpuSet,
    },
}

/// What [`holders`] saw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    /// The watchdog first, then processes by number.
    pub found: Vec<Holder>,
    /// Processes that could not be looked at, mostly for want of rights (CAP_SYS_PTRACE and
    /// CAP_DAC_READ_SEARCH). Threads of the kernel are not among them.
    pub hidden: u32,
}

/// Holders by `root/proc`, without the processes `ours`.
///
/// It reads all descriptors of all processes (`/proc/PID/fd`, proc(5)), which takes
/// milliseconds to seconds: nothing for a loop that decides. A process that ends meanwhile is
/// left out. Where the watchdog's files are damaged, it is left out and the log says so.
///
/// # Errors
/// `root/proc` cannot be read.
pub fn holders(root: &Path, ours: &[u32]) -> Result<Holders, FileError> {
    let proc = root.join("proc");
    let mut seen = Holders::default();
    match watchdog(&proc) {
        Ok(holder) => seen.found.extend(holder),
        Err(error) => log::warn!("the NMI watchdog is left out: {error}"),
    }
    let entries = fs::read_dir(&proc).map_err(FileError::of(&proc, "read"))?;
    let pid = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    let mut pids: Vec<u32> = entries.filter_map(pid).collect();
    pids.sort_unstable();
    for pid in pids.into_iter().filter(|pid| !ours.contains(pid)) {
        let folder = proc.join(pid.to_string());
        match process(&folder, pid) {
            Ok(holder) => seen.found.extend(holder),
            // It has ended meanwhile.
            Err(error) if is_none(&error) => {}
            Err(_) => seen.hidden += u32::from(!is_kernel_thread(&folder)),
        }
    }
    Ok(seen)
}

fn watchdog(proc: &Path) -> Result<Option<Holder>, FileError> {
    let kernel = proc.join("sys/kernel");
    let on = file::optional(file::value::<u32>(&kernel.join("nmi_watchdog")))?;
    if on.is_none_or(|on| on == 0) {
        return Ok(None);
    }
    let cpus = file::value(&kernel.join("watchdog_cpumask"))?;
    Ok(Some(Holder::NmiWatchdog { cpus }))
}

/// A process that has something open; an error if it cannot be looked at, or is gone.
fn process(folder: &Path, pid: u32) -> io::Result<Option<Holder>> {
    let (mut events, mut msr_cpus) = (0, Vec::new());
    for entry in fs::read_dir(folder.join("fd"))? {
        let target = match fs::read_link(entry?.path()) {
            // It was closed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        };
        let target = target.to_string_lossy();
        if target == "anon_inode:[perf_event]" {
            events += 1;
        }
        let msr = target.strip_prefix("/dev/cpu/");
        let msr = msr.and_then(|rest| rest.strip_suffix("/msr"));
        msr_cpus.extend(msr.and_then(|cpu| cpu.parse::<u32>().ok()));
    }
    if events == 0 && msr_cpus.is_empty() {
        return Ok(None);
    }
    let text = |file: &str| {
        let bytes = fs::read(folder.join(file))?;
        Ok::<_, io::Error>(String::from_utf8_lossy(&bytes).into_owned())
    };
    let status = text("status")?;
    let ancestors = folder
        .parent()
        .map_or_else(Vec::new, |proc| ancestors(proc, &status));
    let uid = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let uid = uid.and_then(|uid| uid.split_whitespace().next()?.parse().ok());
    Ok(Some(Holder::Process {
        pid,
        ancestors,
        uid: uid.ok_or(io::ErrorKind::InvalidData)?,
        comm: text("comm")?
            .trim_end_matches('\n')
            .replace(is_unseen, "\u{fffd}"),
        events,
        msr_cpus: msr_cpus.into_iter().collect(),
    }))
}

/// From the parent on, by the `status` of each (proc(5), `PPid`).
fn ancestors(proc: &Path, status: &str) -> Vec<u32> {
    /// No chain is longer, but one that changes while it is read may have a circle.
    const MOST: usize = 64;
    let parent = |status: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        line?.trim().parse().ok().filter(|pid| *pid > 1)
    };
    let mut found = Vec::new();
    let mut next: Option<u32> = parent(status);
    while let Some(pid) = next.filter(|_| found.len() < MOST) {
        found.push(pid);
        let status = fs::read(proc.join(pid.to_string()).join("status")).unwrap_or_default();
        next = parent(&String::from_utf8_lossy(&status));
    }
    found
}

/// By its flags in `stat` (proc(5), field 9). It has no descriptors.
fn is_kernel_thread(folder: &Path) -> bool {
    const PF_KTHREAD: u32 = 0x0020_0000;
    let stat = fs::read(folder.join("stat")).unwrap_or_default();
    let stat = String::from_utf8_lossy(&stat);
    // The name before may hold anything.
    let rest = stat.rsplit(')').next().unwrap_or_default();
    let flags = rest
        .split_whitespace()
        .nth(6)
        .and_then(|flags| flags.parse().ok());
    flags.is_some_and(|flags: u32| flags & PF_KTHREAD != 0)
}

/// What a holder is called whom nobody can see.
pub const UNEXPLAINED: &str = "firmware or unknown";

/// Counters that cannot be had and that no lease of ours uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deficit {
    /// Of known holders, such as the NMI watchdog.
    pub explained: u32,
    /// Of [`UNEXPLAINED`].
    pub unexplained: u32,
}

/// Splits the counters of a pool of `capacity` that are neither `free` nor in use by leases of
/// ours, when known holders have up to `explained`. What leases use must be in place while
/// `free` is measured.
///
/// Numbers that contradict each other (more free and leased than there are) are no deficit.
pub fn unexplained(capacity: u32, free: u32, leased_in_use: u32, explained: u32) -> Deficit {
    let missing = capacity.saturating_sub(free).saturating_sub(leased_in_use);
    let explained = missing.min(explained);
    Deficit {
        explained,
        unexplained: missing - explained,
    }
}

#[cfg(test)]
#[path = "holders_tests.rs"]
mod tests;
