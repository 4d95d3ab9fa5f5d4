//! CPUID as a guest sees it: named steps turn the list of leaves that the engine supports
//! into the list of one vCPU.
//!
//! [`guest_cpuid`] reads as the list of what is changed and why. Each step
//! works on a plain table of leaves, can be repeated without further effect, and
//! is tested on made-up tables. Hiding comes last, so `--hide-feature` wins over
//! everything that an earlier step switched on.

mod features;
mod identity;
mod platform;
mod topology;
mod vendor;
mod xstate;

#[cfg(test)]
mod tests;

pub use features::{Feature, SLOW_CPL0_HIDDEN, UnknownFeature};
pub use identity::Identity;
pub use vendor::{INTEL_SIGNATURE, host_vendor};

use pmu_virt::cpuid::{self as pmu, Leaves};
use pmu_virt::{PmuCpuid, Vendor};
use thiserror::Error;

/// CPUID cannot be made for a guest.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CpuidError {
    /// KVM's list lacks a leaf that every x86 processor has.
    #[error("KVM reports no CPUID leaf {0:#x}: this KVM cannot run an x86 guest")]
    MissingLeaf(u32),
    /// The host's processor is neither Intel's nor AMD's.
    #[error(
        "the host's CPU vendor is {0:?}, which Umpire has no PMU model for; \
         choose one with --cpu-vendor amd or --cpu-vendor intel"
    )]
    UnknownHostVendor(String),
    /// More vCPUs than the topology leaves can describe here.
    #[error("{0} vCPUs: 1 to {MAX_CPUS} are possible")]
    Cpus(u8),
    /// A vCPU number that does not exist.
    #[error("vCPU {vcpu} of {cpus}: numbers start at 0")]
    NoSuchVcpu {
        /// The number asked for.
        vcpu: u8,
        /// How many vCPUs there are.
        cpus: u8,
    },
}

/// The most vCPUs of one guest: leaf 4 has 6 bits for the cores of a package.
pub const MAX_CPUS: u8 = 64;

/// What the in-kernel interrupt controller offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApicFacts {
    /// x2APIC mode (every in-kernel irqchip has it).
    pub x2apic: bool,
    /// `KVM_CAP_TSC_DEADLINE_TIMER`; KVM's own list never carries the bit.
    pub tsc_deadline: bool,
}

/// Everything about a guest that its CPUID depends on.
#[derive(Clone, Debug)]
pub struct CpuidPlan<'a> {
    /// How many vCPUs there are, 1 to [`MAX_CPUS`].
    pub cpus: u8,
    /// The vendor that the guest shall see.
    pub vendor: Vendor,
    /// The processor that it shall see, one of that vendor; none: the host's, or one that
    /// stands for the vendor where the host's is another's.
    pub identity: Option<Identity>,
    /// The virtual PMU, or none: then no trace of one may remain.
    pub pmu: Option<&'a PmuCpuid>,
    /// What the interrupt controller offers.
    pub apic: ApicFacts,
    /// Offer KVM's asynchronous page faults, as far as KVM supports them.
    pub async_page_faults: bool,
    /// Guest CPL 0 runs in KVM's instruction emulator, which lacks the
    /// instructions of [`SLOW_CPL0_HIDDEN`].
    pub slow_cpl0: bool,
    /// Features that the user wants to hide.
    pub hidden: &'a [Feature],
}

/// The CPUID list of vCPU `vcpu`, whose APIC id is `vcpu`. `supported` is what the engine
/// can show a guest: of KVM, what `KVM_GET_SUPPORTED_CPUID` returned.
///
/// # Errors
/// The plan asks for more vCPUs than possible, or the list is not one of an
/// x86 processor.
pub fn guest_cpuid(
    supported: &Leaves,
    vcpu: u8,
    plan: &CpuidPlan<'_>,
) -> Result<Leaves, CpuidError> {
    if !(1..=MAX_CPUS).contains(&plan.cpus) {
        return Err(CpuidError::Cpus(plan.cpus));
    }
    if vcpu >= plan.cpus {
        return Err(CpuidError::NoSuchVcpu {
            vcpu,
            cpus: plan.cpus,
        });
    }
    let mut leaves = supported.clone();
    for leaf in [0, 1, 0x8000_0000, 0x8000_0001] {
        if !leaves.has(leaf, 0) {
            return Err(CpuidError::MissingLeaf(leaf));
        }
    }

    vendor::rewrite(&mut leaves, plan.vendor);
    if let Some(identity) = plan.identity {
        identity::show(&mut leaves, identity);
    }
    topology::describe_one_socket(&mut leaves, plan.vendor, vcpu, plan.cpus);
    platform::show_hypervisor(&mut leaves);
    platform::show_apic_features(&mut leaves, plan.apic);
    // Nothing is kept.
    let _ = pmu::hide_obstacles(&mut leaves, &[]);
    if !plan.async_page_faults {
        platform::hide_async_page_faults(&mut leaves);
    }
    pmu::hide_everything(&mut leaves);
    if let Some(pmu) = plan.pmu {
        pmu::show(&mut leaves, pmu);
    }
    if plan.slow_cpl0 {
        for name in SLOW_CPL0_HIDDEN {
            features::hide_by_name(&mut leaves, name);
        }
    }
    for feature in plan.hidden {
        features::hide(&mut leaves, *feature);
    }
    xstate::drop_orphaned_components(&mut leaves);
    Ok(leaves)
}

/// KVM's own list with Umpire's leaves, for micro-guests, which know their
/// processor.
#[must_use]
pub fn bare_cpuid(mut leaves: Leaves, pmu: &PmuCpuid) -> Leaves {
    platform::show_hypervisor(&mut leaves);
    pmu::show_own_leaves(&mut leaves, pmu);
    leaves
}
