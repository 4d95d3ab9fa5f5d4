//! Why the physical counters cannot be used.

use std::io;

use pmu_model::MsrIndex;
use thiserror::Error;

/// Why the physical counters of a CPU cannot be used, with what to do.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MsrRefusal {
    /// There is no msr device.
    #[error("/dev/cpu/{cpu}/msr does not exist: `modprobe msr`, and check that CPU {cpu} exists")]
    NoDevice { cpu: u32 },
    /// The msr device cannot be opened.
    #[error(
        "/dev/cpu/{cpu}/msr cannot be opened: {}; it takes root with CAP_SYS_RAWIO",
        text(*errno)
    )]
    Open {
        cpu: u32,
        /// The error.
        errno: i32,
    },
    /// Another process of ours has it.
    #[error("another process has locked /dev/cpu/{cpu}/msr: end it, or use another CPU")]
    Locked { cpu: u32 },
    /// A processor of neither vendor.
    #[error("this processor is neither Intel's nor AMD's")]
    UnknownCpu,
    /// CPUID has no counters.
    #[error("CPUID says that this processor has no performance counters")]
    NoPmu,
    /// CPUID describes counters that no model fits.
    #[error("CPUID describes counters that are not understood: {problem}")]
    OddPmu {
        /// What does not fit.
        problem: String,
    },
    /// A register cannot be read.
    #[error("{msr} cannot be read: {}; a hypervisor may hide the counters", text(*errno))]
    Read {
        msr: MsrIndex,
        /// The error.
        errno: i32,
    },
    /// A register cannot be written.
    #[error(
        "{msr} cannot be written: {}; the kernel may forbid it (lockdown, or `msr.allow_writes=off`)",
        text(*errno)
    )]
    Write {
        msr: MsrIndex,
        /// The error.
        errno: i32,
    },
    /// A register does not keep what is written.
    #[error("{msr} does not keep what is written to it: a hypervisor seems to drop the writes")]
    Dropped { msr: MsrIndex },
    /// The kernel's watchdog counts.
    #[error(
        "the kernel's NMI watchdog uses a counter: `sysctl kernel.nmi_watchdog=0`, or take it away \
         with `:force`"
    )]
    Watchdog,
    /// A counter is enabled.
    #[error(
        "{msr} is {value:#x}, which enables counters: `perf` or another tool uses them; stop it, \
         or take them away with `:force`"
    )]
    InUse {
        /// The control register.
        msr: MsrIndex,
        value: u64,
    },
    /// The thread is not on the CPU.
    #[error("this thread does not run on CPU {cpu}: pin it there")]
    NotPinned { cpu: u32 },
}

/// The error of `operation` as a number; EIO where it has none.
pub(super) fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

fn text(errno: i32) -> String {
    io::Error::from_raw_os_error(errno).to_string()
}
