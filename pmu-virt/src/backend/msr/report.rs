//! What is found at a CPU's counters, and whether they can be used at all.

use std::{fmt, io};

use super::error::{MsrRefusal, errno};
use super::layout::Layout;
use super::registers::{check_unused, look};
use super::sys;

/// What was found at the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsrReport {
    /// The host CPU.
    pub cpu: u32,
    /// Name of the model whose registers it has.
    pub model: &'static str,
    /// Programmable counters.
    pub programmable: u8,
    /// Fixed counters.
    pub fixed: u8,
    /// Whether one register starts and stops all of them.
    pub global: bool,
    /// Cycles that every entry adds, beside those of the guest: counted from
    /// the write that starts counters to the write that stops them. `None`
    /// where it was not measured, or nothing was counted.
    pub residue_cycles: Option<u64>,
    /// Instructions, likewise.
    pub residue_instructions: Option<u64>,
}

impl fmt::Display for MsrReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "CPU {}: {} with {} programmable and {} fixed counters, started {}",
            self.cpu,
            self.model,
            self.programmable,
            self.fixed,
            if self.global {
                "by one write"
            } else {
                "one by one"
            }
        )?;
        let residues = [
            (self.residue_cycles, "cycles"),
            (self.residue_instructions, "instructions"),
        ];
        for (residue, what) in residues {
            match residue {
                Some(events) => write!(f, "; each entry adds {events} {what} of the host's")?,
                None => write!(f, "; the host's own {what} are not known")?,
            }
        }
        Ok(())
    }
}

/// Finds out whether the counters of a CPU can be used, without a change to
/// any register.
///
/// # Errors
/// Why they cannot.
pub fn probe(cpu: u32) -> Result<MsrReport, MsrRefusal> {
    let device = open_device(cpu)?;
    let (layout, saved) = look(&device, &sys::host_cpuid())?;
    check_unused(&layout, &saved, sys::nmi_watchdog() == Some(true))?;
    Ok(report(cpu, &layout))
}

pub(super) fn open_device(cpu: u32) -> Result<sys::HostMsr, MsrRefusal> {
    sys::HostMsr::open(cpu).map_err(|error| match error.kind() {
        // ENXIO: the CPU's device node is there, the CPU is not.
        _ if error.raw_os_error() == Some(libc::ENXIO) => MsrRefusal::NoDevice { cpu },
        io::ErrorKind::NotFound => MsrRefusal::NoDevice { cpu },
        io::ErrorKind::WouldBlock => MsrRefusal::Locked { cpu },
        _ => MsrRefusal::Open {
            cpu,
            errno: errno(&error),
        },
    })
}

pub(super) fn report(cpu: u32, layout: &Layout) -> MsrReport {
    MsrReport {
        cpu,
        model: layout.model.name(),
        programmable: layout.model.programmable(),
        fixed: layout.model.fixed(),
        global: layout.global_control.is_some(),
        residue_cycles: None,
        residue_instructions: None,
    }
}
