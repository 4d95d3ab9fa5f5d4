//! What the end of the firmware's phase brings: its code goes into SMRAM, and is what it
//! holds what it was to hold?

use arbiter::{Layer, SmramSource};
use kvm_pmu::VcpuId;
use pmu_virt::VcpuPmu;

use crate::firmware::Expected;
use crate::kvm::KvmVm;

/// Whether the firmware of a vCPU still runs, as far as it has been seen.
#[derive(Debug)]
pub(super) enum FirmwarePhase {
    /// It does, and is expected to hold this at its end.
    Running(Option<Expected>),
    /// It does not, or there is none.
    Over,
}

impl FirmwarePhase {
    /// Of a vCPU with `pmu`.
    pub(super) fn of(pmu: Option<&VcpuPmu>, expected: Option<Expected>) -> Self {
        let unit = pmu.and_then(|pmu| pmu.claims().unit());
        match unit {
            Some(unit) if !unit.phase().is_over() => Self::Running(expected),
            _ => Self::Over,
        }
    }

    /// Looks whether the phase is over; the guest has not run on since.
    #[inline]
    pub(super) fn look(&mut self, vcpu: VcpuId, pmu: Option<&mut VcpuPmu>, vm: &KvmVm) {
        if let (Self::Running(expected), Some(pmu)) = (&mut *self, pmu)
            && ends(vcpu, pmu, vm, expected)
        {
            *self = Self::Over;
        }
    }
}

fn ends(vcpu: VcpuId, pmu: &mut VcpuPmu, vm: &KvmVm, expected: &mut Option<Expected>) -> bool {
    let Some(unit) = pmu.claims().unit().filter(|unit| unit.phase().is_over()) else {
        return false;
    };
    let held = unit.bank().held_by(Layer::Firmware);
    if let Some(SmramSource { address, len }) = pmu.claims_mut().take_smram() {
        if vm.fill_smram(address, len) {
            pmu.claims_mut().smram_filled();
        } else {
            log::warn!("{vcpu}: SMRAM stays as it is: at {address:#x} there are no {len:#x} bytes");
        }
    }
    let expected = expected.take();
    if let Some(difference) = expected.and_then(|expected| expected.compare(held)) {
        log::warn!("{vcpu}: {difference}");
    }
    true
}
