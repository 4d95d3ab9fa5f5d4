//! The host's msr device, CPUID, and the CPU that this thread runs on.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;

use pmu_model::{CpuidRegs, MsrIndex, Vendor};

use super::{HostCpuid, MsrDevice};

/// `/dev/cpu/N/msr`: each register is 8 bytes at the offset of its index
/// (`msr(4)`).
#[derive(Debug)]
pub(crate) struct HostMsr {
    file: File,
    cpu: u32,
}

impl HostMsr {
    /// Opens the device of a CPU for this process alone, as far as other
    /// processes ask for the lock.
    ///
    /// # Errors
    /// That of the open; `WouldBlock` where another process has the lock.
    pub(crate) fn open(cpu: u32) -> io::Result<Self> {
        let path = format!("/dev/cpu/{cpu}/msr");
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(HostMsr { file, cpu }),
            Err(TryLockError::WouldBlock) => Err(io::ErrorKind::WouldBlock.into()),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

impl MsrDevice for HostMsr {
    fn read(&self, msr: MsrIndex) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, u64::from(msr.0))?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn write(&mut self, msr: MsrIndex, value: u64) -> io::Result<()> {
        self.file
            .write_all_at(&value.to_le_bytes(), u64::from(msr.0))
    }

    fn on_cpu(&self) -> bool {
        // SAFETY: sched_getcpu has no arguments and touches no memory of ours.
        let cpu = unsafe { libc::sched_getcpu() };
        u32::try_from(cpu) == Ok(self.cpu)
    }
}

/// Whether the kernel's NMI watchdog counts cycles; `None` where it has none.
pub(crate) fn nmi_watchdog() -> Option<bool> {
    let text = std::fs::read_to_string("/proc/sys/kernel/nmi_watchdog").ok()?;
    Some(text.trim() != "0")
}

/// What CPUID says about this CPU's counters.
pub(crate) fn host_cpuid() -> HostCpuid {
    let leaf = |leaf: u32, highest: u32| {
        if leaf > highest {
            return CpuidRegs::default();
        }
        let regs = std::arch::x86_64::__cpuid_count(leaf, 0);
        CpuidRegs {
            eax: regs.eax,
            ebx: regs.ebx,
            ecx: regs.ecx,
            edx: regs.edx,
        }
    };
    let first = leaf(0, 0);
    let extended = leaf(0x8000_0000, 0x8000_0000).eax;
    HostCpuid {
        vendor: match &first.ebx.to_le_bytes() {
            b"Genu" => Some(Vendor::Intel),
            b"Auth" | b"Hygo" => Some(Vendor::Amd),
            _ => None,
        },
        leaf_1: leaf(1, first.eax),
        leaf_0xa: leaf(0xa, first.eax),
        leaf_80000001: leaf(0x8000_0001, extended),
        leaf_80000022: leaf(0x8000_0022, extended),
    }
}
