//! `/dev/kvm` and what it can do.

use std::path::Path;

use kvm_bindings::{
    KVM_CAP_BINARY_STATS_FD, KVM_CAP_MULTI_ADDRESS_SPACE, KVM_CAP_PMU_CAPABILITY,
    KVM_CAP_SET_GUEST_DEBUG2, KVM_CAP_SYNC_REGS, KVM_GUESTDBG_BLOCKIRQ, KVM_MAX_CPUID_ENTRIES,
};
use kvm_ioctls::{Cap, Kvm};
use kvm_pmu::cpuid::from_kvm;
use pmu_virt::cpuid::Leaves;
use serde::Serialize;
use thiserror::Error;
use vmm_sys_util::errno;

use super::sys;
use crate::host::{CpuFacts, KvmAccess, KvmAccessError};

/// The API version that every KVM since Linux 2.6.22 has.
const API_VERSION: i32 = 12;

/// Why this host's KVM cannot be used.
#[derive(Debug, Error)]
pub enum HostError {
    /// The device cannot be opened.
    #[error(transparent)]
    Access(#[from] KvmAccessError),
    /// Not KVM, or a version that never was stable.
    #[error("KVM has API version {0}, not {API_VERSION}: this is not a KVM that Umpire can use")]
    ApiVersion(i32),
    /// Something that Umpire cannot do without.
    #[error("this KVM lacks {0}; `umpire doctor` lists what it has")]
    Lacks(&'static str),
    #[error("{0} failed: {1}")]
    Ioctl(&'static str, errno::Error),
}

/// The capabilities that Umpire asks about (KVM API, section 4.4 and 8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct KvmFeatures {
    /// `KVM_CAP_IRQCHIP`.
    pub irqchip: bool,
    /// `KVM_CAP_PIT2`.
    pub pit2: bool,
    /// `KVM_CAP_X86_USER_SPACE_MSR`.
    pub user_space_msr: bool,
    /// `KVM_CAP_X86_MSR_FILTER`.
    pub msr_filter: bool,
    /// `KVM_CAP_SET_GUEST_DEBUG`.
    pub guest_debug: bool,
    /// `KVM_GUESTDBG_BLOCKIRQ` in `KVM_CAP_SET_GUEST_DEBUG2`.
    pub guest_debug_blockirq: bool,
    /// `KVM_CAP_IMMEDIATE_EXIT`.
    pub immediate_exit: bool,
    /// `KVM_CAP_SIGNAL_MSI`.
    pub signal_msi: bool,
    /// `KVM_CAP_USER_NMI`.
    pub user_nmi: bool,
    /// Registers that `KVM_RUN` can leave in `kvm_run` (`KVM_CAP_SYNC_REGS`).
    pub sync_regs: u32,
    /// `KVM_CAP_BINARY_STATS_FD`.
    pub binary_stats: bool,
    /// `KVM_CAP_PMU_CAPABILITY`: KVM has a vPMU, which can be switched off.
    pub pmu_capability: bool,
    /// `KVM_CAP_GET_TSC_KHZ`.
    pub get_tsc_khz: bool,
    /// `KVM_CAP_X86_SMM`: system management mode, with memory of its own.
    pub smm: bool,
    /// `KVM_CAP_TSC_DEADLINE_TIMER`.
    pub tsc_deadline_timer: bool,
    /// Most vCPUs in one VM.
    pub max_vcpus: u32,
}

/// An open `/dev/kvm`.
#[derive(Debug)]
pub struct Host {
    kvm: Kvm,
    features: KvmFeatures,
}

impl Host {
    /// Opens `/dev/kvm`.
    ///
    /// # Errors
    /// [`HostError`] with the next step for the user.
    pub fn open() -> Result<Self, HostError> {
        Self::open_below(Path::new("/"))
    }

    /// Opens `dev/kvm` below another root folder.
    ///
    /// # Errors
    /// [`HostError`] with the next step for the user.
    pub fn open_below(root: &Path) -> Result<Self, HostError> {
        let file = KvmAccess::open(root, &CpuFacts::read(root))?;
        let kvm = sys::kvm_from(file);
        match kvm.get_api_version() {
            API_VERSION => {}
            other => return Err(HostError::ApiVersion(other)),
        }
        let features = features(&kvm);
        Ok(Self { kvm, features })
    }

    /// What this KVM has.
    #[must_use]
    pub fn features(&self) -> &KvmFeatures {
        &self.features
    }

    /// Checks for everything that a guest with a virtual PMU needs.
    ///
    /// # Errors
    /// [`HostError::Lacks`] names the first thing that is missing.
    pub fn require_all(&self) -> Result<(), HostError> {
        let needed = [
            (
                self.features.irqchip,
                "an in-kernel irqchip (KVM_CAP_IRQCHIP)",
            ),
            (
                self.features.user_space_msr,
                "MSR exits (KVM_CAP_X86_USER_SPACE_MSR, Linux 5.10)",
            ),
            (
                self.features.msr_filter,
                "the MSR filter (KVM_CAP_X86_MSR_FILTER, Linux 5.10)",
            ),
            (
                self.features.guest_debug,
                "guest debugging (KVM_CAP_SET_GUEST_DEBUG)",
            ),
            (
                self.features.immediate_exit,
                "immediate_exit (KVM_CAP_IMMEDIATE_EXIT)",
            ),
            (
                self.features.signal_msi,
                "KVM_SIGNAL_MSI (KVM_CAP_SIGNAL_MSI)",
            ),
            (self.features.user_nmi, "KVM_NMI (KVM_CAP_USER_NMI)"),
        ];
        match needed.iter().find(|(has, _)| !has) {
            Some((_, what)) => Err(HostError::Lacks(what)),
            None => Ok(()),
        }
    }

    /// `KVM_GET_SUPPORTED_CPUID`.
    ///
    /// # Errors
    /// The error of the ioctl.
    pub fn supported_cpuid(&self) -> Result<Leaves, HostError> {
        let supported = self.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        supported
            .map(|entries| from_kvm(entries.as_slice()))
            .map_err(|error| HostError::Ioctl("KVM_GET_SUPPORTED_CPUID", error))
    }

    pub(super) fn kvm(&self) -> &Kvm {
        &self.kvm
    }
}

fn features(kvm: &Kvm) -> KvmFeatures {
    let has = |cap| kvm.check_extension(cap);
    let raw = |cap: u32| kvm.check_extension_raw(cap.into());
    KvmFeatures {
        irqchip: has(Cap::Irqchip),
        pit2: has(Cap::Pit2),
        user_space_msr: has(Cap::X86UserSpaceMsr),
        msr_filter: has(Cap::X86MsrFilter),
        guest_debug: has(Cap::SetGuestDebug),
        guest_debug_blockirq: u32::try_from(raw(KVM_CAP_SET_GUEST_DEBUG2))
            .is_ok_and(|flags| flags & KVM_GUESTDBG_BLOCKIRQ != 0),
        immediate_exit: has(Cap::ImmediateExit),
        signal_msi: has(Cap::SignalMsi),
        user_nmi: has(Cap::UserNmi),
        sync_regs: u32::try_from(raw(KVM_CAP_SYNC_REGS)).unwrap_or(0),
        binary_stats: raw(KVM_CAP_BINARY_STATS_FD) > 0,
        pmu_capability: raw(KVM_CAP_PMU_CAPABILITY) > 0,
        get_tsc_khz: has(Cap::GetTscKhz),
        smm: has(Cap::X86Smm) && raw(KVM_CAP_MULTI_ADDRESS_SPACE) > 1,
        tsc_deadline_timer: has(Cap::TscDeadlineTimer),
        max_vcpus: u32::try_from(kvm.get_max_vcpus()).unwrap_or(u32::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_is_named_with_the_next_step() {
        let root = tempfile::tempdir().unwrap();
        let error = Host::open_below(root.path()).unwrap_err().to_string();
        assert!(error.contains("dev/kvm"), "{error}");
        assert!(error.contains("switch virtualisation on"), "{error}");
    }
}
