//! All of a machine but its memory, in a file: what KVM has as bytes, the devices, the PMU.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use kvm_bindings::{kvm_clock_data, kvm_lapic_state, kvm_xcrs, kvm_xsave};
use kvm_ioctls::{Kvm, VmFd};
use kvm_pmu::KvmVcpu;
use pmu_virt::PmuState;
use serde::{Deserialize, Serialize};

use crate::devices::SavedSerial;
use crate::sys::{Plain, from_bytes, set_xsave, to_bytes, tsc_offset};
use crate::truth::Counted;
use crate::vcpu::BareVcpu;

const TSC: u32 = 0x10;
const TSC_DEADLINE: u32 = 0x6e0;

/// What is in the file.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Saved {
    pub(crate) vcpus: Vec<SavedVcpu>,
    pub(crate) clocks: SavedClocks,
    pub(crate) ioapic: Vec<u64>,
    pub(crate) serial: SavedSerial,
}

/// Of one vCPU.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedVcpu {
    pub(crate) kvm: SavedKvm,
    pub(crate) pmu: PmuState,
    /// Nothing of the machine's: what the guest must have counted until now.
    pub(crate) counted: Counted,
}

impl Saved {
    pub(crate) fn write(&self, file: &Path) -> Result<()> {
        let bytes = serde_json::to_vec(self)?;
        fs::write(file, bytes).with_context(|| format!("the snapshot, {}", file.display()))
    }

    pub(crate) fn read(file: &Path) -> Result<Self> {
        let said = || format!("the snapshot, {}", file.display());
        let bytes = fs::read(file).with_context(said)?;
        serde_json::from_slice(&bytes).with_context(said)
    }
}

/// The clocks of the machine: KVM's, and the TSC, which is one for all vCPUs.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedClocks {
    clock: Vec<u8>,
    tsc: u64,
}

impl SavedClocks {
    /// Of a machine that has these vCPUs.
    pub(crate) fn of(vm: &VmFd, vcpus: &[&BareVcpu]) -> Result<Self> {
        ensure_one_tsc(vcpus.iter().copied())?;
        let clock = to_bytes(&vm.get_clock()?);
        let tsc = vcpus[0].kvm.read_msr(TSC)?.context("KVM has no TSC")?;
        Ok(Self { clock, tsc })
    }

    /// Into all vCPUs of a machine, which have the rest of what was saved.
    pub(crate) fn restore(&self, vm: &VmFd, vcpus: &[BareVcpu]) -> Result<()> {
        // No flag is for the kernel to take: the pause is no time of the guest's.
        let clock = kvm_clock_data {
            flags: 0,
            ..taken(&self.clock)?
        };
        vm.set_clock(&clock)?;
        // KVM takes values that are written within a second for one TSC's, if they are about what
        // that has by then, and the vCPUs have no other between them.
        let mut written = vcpus.iter();
        written.try_for_each(|vcpu| set_msr(&vcpu.kvm, (TSC, self.tsc)))?;
        ensure_one_tsc(vcpus.iter())
    }
}

fn ensure_one_tsc<'a>(vcpus: impl Iterator<Item = &'a BareVcpu>) -> Result<()> {
    let offsets = vcpus.map(|vcpu| tsc_offset(&vcpu.fd));
    let offsets = offsets.collect::<Result<Vec<_>, _>>()?;
    let is_one = offsets.iter().all(|offset| *offset == offsets[0]);
    ensure!(
        is_one,
        "the vCPUs have several TSCs, from the host's by {offsets:x?}"
    );
    Ok(())
}

/// KVM's part of a vCPU.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedKvm {
    regs: Vec<u8>,
    sregs: Vec<u8>,
    xsave: Vec<u32>,
    xcrs: Vec<u8>,
    debug_registers: Vec<u8>,
    lapic: Vec<u8>,
    events: Vec<u8>,
    mp_state: Vec<u8>,
    msrs: Vec<(u32, u64)>,
}

impl SavedKvm {
    /// Of a vCPU whose thread was left.
    pub(crate) fn of(kvm: &Kvm, BareVcpu { fd, kvm: vcpu }: &BareVcpu) -> Result<Self> {
        // KVM first takes an INIT or SIPI that is pending, which changes all that follows.
        let mp_state = to_bytes(&vcpu.get_mp_state()?);
        let mut msrs = Vec::new();
        for &index in kvm.get_msr_index_list()?.as_slice() {
            if index != TSC
                && let Some(value) = vcpu.read_msr(index)?
            {
                msrs.push((index, value));
            }
        }
        Ok(Self {
            regs: to_bytes(&vcpu.get_regs()?),
            sregs: to_bytes(&vcpu.get_sregs()?),
            xsave: fd.get_xsave()?.region.to_vec(),
            xcrs: to_bytes(&fd.get_xcrs()?),
            debug_registers: to_bytes(&vcpu.get_debug_regs()?),
            lapic: to_bytes(&vcpu.get_lapic()?),
            events: to_bytes(&fd.get_vcpu_events()?),
            mp_state,
            msrs,
        })
    }

    /// Into a vCPU that has its CPUID, and has not run or is reset; but for the timer of its local
    /// APIC.
    pub(crate) fn restore(&self, BareVcpu { fd, kvm: vcpu }: &BareVcpu) -> Result<()> {
        vcpu.set_mp_state(taken(&self.mp_state)?)?;
        vcpu.set_regs(&taken(&self.regs)?)?;
        vcpu.set_sregs(&taken(&self.sregs)?)?;
        fd.set_xcrs(&taken::<kvm_xcrs>(&self.xcrs)?)?;
        let region: [u32; 1024] = self.xsave.as_slice().try_into()?;
        let xsave = kvm_xsave {
            region,
            ..Default::default()
        };
        set_xsave(fd, &xsave)?;
        vcpu.set_debug_regs(&taken(&self.debug_registers)?)?;
        fd.set_lapic(&taken::<kvm_lapic_state>(&self.lapic)?)?;
        fd.set_vcpu_events(&taken(&self.events)?)?;
        let mut others = self.msrs.iter().filter(|(index, _)| *index != TSC_DEADLINE);
        others.try_for_each(|msr| set_msr(vcpu, *msr))
    }

    /// A deadline is a time of the TSC, which is right by now.
    pub(crate) fn restore_timer(&self, vcpu: &BareVcpu) -> Result<()> {
        let mut msrs = self.msrs.iter();
        let deadline = msrs.find(|(index, _)| *index == TSC_DEADLINE);
        deadline.map_or(Ok(()), |msr| set_msr(&vcpu.kvm, *msr))
    }
}

fn set_msr(vcpu: &KvmVcpu, (index, value): (u32, u64)) -> Result<()> {
    let written = vcpu.write_msr(index, value)?;
    // What has the value anyway need not be taken.
    let taken = written || vcpu.read_msr(index)? == Some(value);
    ensure!(taken, "KVM does not take MSR {index:#x} back: {value:#x}");
    Ok(())
}

fn taken<T: Plain>(bytes: &[u8]) -> Result<T> {
    let name = std::any::type_name::<T>();
    from_bytes(bytes).with_context(|| format!("the snapshot's {name} has another length"))
}
