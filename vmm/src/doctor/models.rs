//! Which PMU models this KVM lets a guest see.

use pmu_virt::{ClockBackend, CounterBackend, PmuModel, Vendor};
use serde::Serialize;
use vm_memory::GuestAddress;

use crate::cpuid::{ApicFacts, CpuidPlan, guest_cpuid, host_vendor};
use crate::kvm::{GuestRam, Host, KvmVm, VcpuId, VmOptions};

/// One PMU model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelFinding {
    /// Its name, as in `--pmu`.
    pub name: &'static str,
    /// Whose architecture it follows: `amd` or `intel`, as in `--cpu-vendor`.
    pub vendor: &'static str,
    pub summary: &'static str,
    /// The guest sees the host's vendor with it, so `--cpu-vendor` is not needed.
    pub host_vendor: bool,
    /// `KVM_SET_CPUID2` takes its CPUID.
    pub accepted: bool,
    /// Why not; none if it is accepted.
    pub reason: Option<String>,
}

/// Offers each model's CPUID to a vCPU that never runs.
pub(super) fn find(host: &Host, slow_cpl0: bool) -> Vec<ModelFinding> {
    let own = host
        .supported_cpuid()
        .ok()
        .and_then(|cpuid| host_vendor(&cpuid).ok());
    PmuModel::names()
        .iter()
        .map(|summary| {
            let refused = offer(host, summary.name, summary.vendor, slow_cpl0).err();
            ModelFinding {
                name: summary.name,
                vendor: match summary.vendor {
                    Vendor::Amd => "amd",
                    Vendor::Intel => "intel",
                },
                summary: summary.summary,
                host_vendor: own == Some(summary.vendor),
                accepted: refused.is_none(),
                reason: refused.map(|error| error.to_string()),
            }
        })
        .collect()
}

fn offer(
    host: &Host,
    name: &str,
    vendor: Vendor,
    slow_cpl0: bool,
) -> Result<(), Box<dyn std::error::Error>> {
    const ONE_PAGE: usize = 0x1000;
    let model = PmuModel::parse(name)?;
    let clock = ClockBackend::new();
    let pmu = model.cpuid(|request| clock.plan(request).is_ok());
    let plan = CpuidPlan {
        cpus: 1,
        vendor,
        identity: None,
        pmu: Some(&pmu),
        apic: ApicFacts {
            x2apic: true,
            tsc_deadline: false,
        },
        async_page_faults: false,
        slow_cpl0,
        hidden: &[],
    };
    let leaves = guest_cpuid(&host.supported_cpuid()?, 0, &plan)?;
    let memory = GuestRam::new(&[(GuestAddress(0), ONE_PAGE)], false)?;
    let vm = KvmVm::new(host, memory, &VmOptions::default())?;
    let vcpu = vm.create_vcpu(VcpuId(0))?;
    vcpu.set_cpuid(&leaves)?;
    Ok(())
}
