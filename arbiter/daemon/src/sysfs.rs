//! The CPUs of the host, as sysfs lists them.

use std::io;
use std::path::Path;

use arbiter_host::CpuSet;

fn cpus(root: &Path, file: &str) -> io::Result<CpuSet> {
    let path = root.join("sys/devices/system/cpu").join(file);
    let text = std::fs::read_to_string(path)?;
    text.trim().parse().map_err(io::Error::other)
}

/// Those that are online.
pub(crate) fn online(root: &Path) -> io::Result<CpuSet> {
    cpus(root, "online")
}

/// Those that there are, online or not.
pub(crate) fn present(root: &Path) -> io::Result<CpuSet> {
    cpus(root, "present")
}
