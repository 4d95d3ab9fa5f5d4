//! A machine on KVM: its VM, its irqfds, and what each vCPU of KVM's starts with.

use std::sync::Arc;
use std::time::Duration;

use kvm_bindings::kvm_fpu;
use kvm_pmu::{KvmPmu, KvmPmuParts};
use pmu_virt::CorePmu;
use vmm_control::JobQueue;
use vmm_sys_util::eventfd::EventFd;

use super::{MachineError, Outfit, SharedParts, VcpuShare};
use crate::boot::InitialState;
use crate::config::DEFAULT_PMI_FLOOR_US;
use crate::devices::{ConsoleIrqError, InterruptLine};
use crate::kvm::{KvmVcpu, KvmVm, VcpuError, VcpuId, VmError};
use crate::probe::ProbeReport;
use crate::reservations::MachineReservations;
use crate::sched::CpuList;
use crate::vcpu::{VcpuControl, VcpuParts};

/// `IA32_MISC_ENABLE` and its fast-string bit: Linux switches REP MOVS off without it.
const MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
/// Its bit 7, "performance monitoring available" (SDM vol. 4, 0x1A0); KVM keeps it
/// clear while its own vPMU is off.
const MISC_ENABLE_PERFMON: u64 = 1 << 7;
/// `IA32_MTRR_DEF_TYPE`: MTRRs on, memory is write-back.
const MTRR_DEF_TYPE: u32 = 0x2ff;
const MTRR_ON_WRITE_BACK: u64 = 1 << 11 | 6;

/// The x87 control word and MXCSR after reset (SDM vol. 3A, table 11-1).
const RESET_FCW: u16 = 0x37f;
const RESET_MXCSR: u32 = 0x1f80;

/// The least time between two PMIs if nobody says another: a PMI costs the host some
/// microseconds.
const DEFAULT_PMI_FLOOR: Duration = Duration::from_micros(DEFAULT_PMI_FLOOR_US as u64);

/// KVM's part of a machine.
#[derive(Debug)]
pub(in crate::machine) struct KvmMachine {
    pub(in crate::machine) vcpus: Vec<VcpuParts>,
    /// The counters of each core that vCPUs share; none where each has its own.
    pub(in crate::machine) cores: Vec<CorePmu>,
    pub(in crate::machine) core_jobs: Vec<JobQueue>,
    /// Host CPUs for the threads that run vCPUs.
    pub(in crate::machine) pin: Option<CpuList>,
    pub(in crate::machine) control: Arc<VcpuControl>,
}

/// A VM with its vCPUs, which have no registers yet.
pub(super) struct KvmBase<'a> {
    vm: Arc<KvmVm>,
    probes: &'a ProbeReport,
    vcpus: Vec<KvmVcpu>,
}

impl<'a> KvmBase<'a> {
    pub(super) fn new(vm: Arc<KvmVm>, probes: &'a ProbeReport, cpus: u8) -> Result<Self, VmError> {
        let vcpus = (0..cpus.into()).map(|id| vm.create_vcpu(VcpuId(id)));
        Ok(Self {
            vcpus: vcpus.collect::<Result<_, _>>()?,
            vm,
            probes,
        })
    }

    pub(super) fn tsc_khz(&self) -> Result<u32, VcpuError> {
        self.vcpus.first().map_or(Ok(0), KvmVcpu::get_tsc_khz)
    }

    /// The line stays connected for as long as its event lives, which the device has.
    pub(super) fn line(&self, gsi: u32) -> Result<Box<dyn InterruptLine>, MachineError> {
        let event = EventFd::new(libc::EFD_NONBLOCK).map_err(ConsoleIrqError::from)?;
        self.vm.connect_irq(&event, gsi)?;
        Ok(Box::new(event))
    }

    pub(super) fn into_machine(
        mut self,
        outfit: &Outfit<'_>,
        shares: Vec<VcpuShare>,
        shared: SharedParts,
    ) -> Result<KvmMachine, MachineError> {
        let control = Arc::new(VcpuControl::default());
        let vcpus = std::mem::take(&mut self.vcpus).into_iter().zip(shares);
        let vcpus = vcpus.map(|(kvm, share)| self.vcpu(kvm, share, outfit, &control));
        Ok(KvmMachine {
            vcpus: vcpus.collect::<Result<_, _>>()?,
            cores: shared.cores,
            core_jobs: shared.jobs,
            pin: shared.pin,
            control,
        })
    }

    /// One vCPU at its first instruction.
    fn vcpu(
        &self,
        kvm: KvmVcpu,
        share: VcpuShare,
        outfit: &Outfit<'_>,
        control: &Arc<VcpuControl>,
    ) -> Result<VcpuParts, MachineError> {
        kvm.set_cpuid(&outfit.leaves(kvm.id())?)?;
        set_registers(&kvm, outfit.state)?;
        // AMD's processors have no such register to say it in.
        let perfmon = outfit.cpuid.is_some_and(|cpuid| cpuid.leaf_0xa.eax != 0);
        show_features(&kvm, perfmon)?;
        let pmu = KvmPmuParts {
            pmu: share.pmu,
            quirks: self.probes.quirks(),
            step: self.probes.step_support(),
            traps: self.vm.traps().clone(),
            pmi_floor: (outfit.order.config.pmi_floor).unwrap_or(DEFAULT_PMI_FLOOR),
            tsc_khz: outfit.tsc_khz,
        };
        let pcr = outfit.guest.pcr.as_ref();
        Ok(VcpuParts {
            pmu: KvmPmu::new(&kvm, pmu)?,
            kvm,
            vm: self.vm.clone(),
            platform: outfit.platform.clone(),
            control: control.clone(),
            observer: share.observer,
            own_core: share.own,
            firmware: pcr.and_then(MachineReservations::expected),
            host: share.endpoint,
            guest: outfit.kernel.cloned(),
        })
    }
}

/// Registers at the first instruction. The boot processor gets the loader's
/// state; the others keep KVM's reset state and wait for their start-up IPI.
fn set_registers(kvm: &KvmVcpu, state: &InitialState) -> Result<(), MachineError> {
    kvm.set_fpu(&kvm_fpu {
        fcw: RESET_FCW,
        mxcsr: RESET_MXCSR,
        ..Default::default()
    })?;
    if kvm.id() != VcpuId(0) {
        return Ok(());
    }
    kvm.set_sregs(&state.special(kvm.get_sregs()?))?;
    kvm.set_regs(&state.general())?;
    Ok(())
}

/// Comforts of real firmware; a KVM without these MSRs boots all the same.
fn show_features(kvm: &KvmVcpu, perfmon: bool) -> Result<(), MachineError> {
    if let Some(misc) = kvm.read_msr(MISC_ENABLE)? {
        let available = if perfmon { MISC_ENABLE_PERFMON } else { 0 };
        let misc = misc & !MISC_ENABLE_PERFMON | MISC_ENABLE_FAST_STRING | available;
        kvm.write_msr(MISC_ENABLE, misc)?;
    }
    kvm.write_msr(MTRR_DEF_TYPE, MTRR_ON_WRITE_BACK)?;
    Ok(())
}
