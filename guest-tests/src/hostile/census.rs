//! What this process holds, to find leaks.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

/// How long threads and descriptors of the kernel's own may linger after a VM.
const LINGER: Duration = Duration::from_secs(5);

/// What a process holds at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Census {
    /// Open file descriptors.
    pub descriptors: usize,
    /// Threads, the kernel's helpers for a VM included.
    pub threads: usize,
    /// Resident memory in KiB.
    pub resident_kib: u64,
}

impl Census {
    /// Counts now.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn take() -> io::Result<Self> {
        // Each listing holds one descriptor itself, so the counts compare.
        Ok(Self {
            descriptors: fs::read_dir("/proc/self/fd")?.count(),
            threads: fs::read_dir("/proc/self/task")?.count(),
            resident_kib: resident_kib()?,
        })
    }

    /// Counts until no more descriptors and threads are left than `self` had, for
    /// some seconds at most.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn settled(&self) -> io::Result<Self> {
        let start = Instant::now();
        loop {
            let now = Self::take()?;
            let settled = now.descriptors <= self.descriptors && now.threads <= self.threads;
            if settled || start.elapsed() > LINGER {
                return Ok(now);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn resident_kib() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    number.ok_or_else(|| io::Error::other("/proc/self/status has no VmRSS line"))
}
