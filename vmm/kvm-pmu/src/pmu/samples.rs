//! Where the guest stands when a sample is due: one of IBS, or of a context's counter.
//!
//! KVM's local APIC has no extended vector table. Its registers are the PMU's, as far as
//! the guest gets at them: in x2APIC mode, where KVM refuses them and a VM that wants to
//! know ([`MsrFilter::with_invalid`](crate::MsrFilter::with_invalid)) gets an exit.

use pmu_virt::ibs::OpSample;
use pmu_virt::perfmon::{Moment, Quantities, VirtualPmd};
use pmu_virt::{IbsKind, IbsSample, Ring};

use super::OnCore;
use super::traps::Guest;
use crate::error::VcpuError;
use crate::observe::TrapObserver;
use crate::step_samples::fetched;
use crate::time;
use crate::trap::{CpuContext, cpl};
use crate::vcpu::KvmVcpu;

/// Takes the samples of IBS that are due, of a guest that stands where it was found: an op
/// was executed somewhere before, and the fetch is that of the instruction to come.
#[cold]
pub(super) fn take_ibs(
    Guest { vcpu, memory }: Guest<'_>,
    (pmu, core): OnCore<'_>,
) -> Result<(), VcpuError> {
    let (regs, sregs) = (vcpu.get_regs()?, vcpu.get_sregs()?);
    let context = CpuContext {
        regs: &regs,
        sregs: &sregs,
        memory,
    };
    let rip = context.code_at(regs.rip);
    while let Some(kind) = pmu.ibs_due() {
        let sample = match kind {
            IbsKind::Op => IbsSample::Op(OpSample::Near { rip }),
            IbsKind::Fetch => IbsSample::Fetch(fetched(&context, rip)),
        };
        pmu.ibs_sampled(Some(&mut *core), sample);
    }
    Ok(())
}

/// Samples counters of attached contexts that have overflowed. `place` is the number of
/// the core and that of the process.
#[cold]
pub(super) fn sample_hosts(
    vcpu: &KvmVcpu,
    (pmu, core): OnCore<'_>,
    (number, process): (u16, i32),
    observer: &mut dyn TrapObserver,
) -> Result<(), VcpuError> {
    let (regs, sregs) = (vcpu.get_regs()?, vcpu.get_sregs()?);
    let wish = pmu.hosts().wish(core);
    let smm = vcpu.in_smm();
    if !wish.is_empty() && !smm {
        let tsc = || vcpu.guest_tsc().ok();
        observer.look(vcpu.id(), wish, (&regs, &sregs), &tsc);
    }
    let moment = Moment {
        tsc: time::now().0,
        ip: regs.rip,
        ring: Ring::from_cpl(cpl(&sregs)),
        cr3: sregs.cr3,
        vm: process,
        vcpu: vcpu.id().0.into(),
        core: number,
    };
    let quantities = observer.quantities();
    let in_smm = InSmm(quantities);
    pmu.sample_hosts(core, &moment, if smm { &in_smm } else { quantities });
    Ok(())
}

/// What is counted of a vCPU in SMM. It is nowhere in the kernel that the guest runs, as the
/// memory there is another.
struct InSmm<'a>(&'a dyn Quantities);

impl Quantities for InSmm<'_> {
    fn read(&self, which: VirtualPmd) -> Option<u64> {
        self.0.read(which)
    }
}
