//! What contexts of tools record of a stopped vCPU.

use pmu_virt::Ring;
use pmu_virt::perfmon::{Moment, Quantities, VirtualPmd, Wish};

use super::StoppedVcpu;
use crate::error::VcpuError;
use crate::memory::OutOfReach;
use crate::observe::TrapObserver;
use crate::time;
use crate::trap::cpl;
use crate::vcpu::KvmVcpu;

/// Takes a sample.
pub(crate) type Take<'a> = dyn FnMut(&Moment, &dyn Quantities) + 'a;

/// Where the vCPU is, and who hears of it.
#[derive(Debug)]
pub(crate) struct Around<'a> {
    pub(crate) observer: &'a mut dyn TrapObserver,
    /// Number of the core.
    pub(crate) core: u16,
    /// Process of the VMM.
    pub(crate) process: i32,
}

impl Around<'_> {
    /// Lets a sample be taken.
    pub(super) fn tell(
        &mut self,
        vcpu: &KvmVcpu,
        wish: Wish,
        take: &mut Take<'_>,
    ) -> Result<(), VcpuError> {
        let (regs, sregs) = (vcpu.get_regs()?, vcpu.get_sregs()?);
        let smm = vcpu.in_smm();
        if !wish.is_empty() && !smm {
            let tsc = || vcpu.guest_tsc().ok();
            self.observer.look(vcpu.id(), wish, (&regs, &sregs), &tsc);
        }
        let moment = Moment {
            tsc: time::now().0,
            ip: regs.rip,
            ring: Ring::from_cpl(cpl(&sregs)),
            cr3: sregs.cr3,
            vm: self.process,
            vcpu: vcpu.id().0.cast_signed(),
            core: self.core,
        };
        let quantities = self.observer.quantities();
        if smm {
            take(&moment, &InSmm(quantities));
        } else {
            take(&moment, quantities);
        }
        Ok(())
    }
}

impl<'a> StoppedVcpu<'a> {
    /// One of which contexts of tools are told alone.
    pub(crate) fn for_tools(vcpu: &'a KvmVcpu, around: Around<'a>) -> Self {
        Self {
            around: Some(around),
            ..Self::new(vcpu, &OutOfReach, None)
        }
    }

    /// They are told of it too.
    pub(crate) fn tell_tools(&mut self, around: Around<'a>) {
        self.around = Some(around);
    }
}

/// What is counted of a vCPU in SMM. It is nowhere in the kernel that the guest runs, as the
/// memory there is another.
struct InSmm<'a>(&'a dyn Quantities);

impl Quantities for InSmm<'_> {
    fn read(&self, which: VirtualPmd) -> Option<u64> {
        self.0.read(which)
    }
}
