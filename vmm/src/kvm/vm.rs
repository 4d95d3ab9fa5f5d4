//! One VM: memory, irqchip, and the MSRs that exit.

use std::sync::Arc;

use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::VmFd;
use kvm_pmu::{
    DescriptorError, KvmVcpu, KvmVm as PmuVm, MsrFilter, MsrFilterError, ProtectPages, SetupError,
    TrapPlan, VcpuError, VcpuId, VmTraps, msr_ranges, switch_off_vpmu, vcpu_fd, vm_fd,
};
use pmu_virt::PmuModel;
use thiserror::Error;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::errno;
use vmm_sys_util::eventfd::EventFd;

use super::host::Host;
use super::memory::{self, GuestRam, MapError, PlainPages};

/// Three pages below 4 GiB that KVM needs on some Intel hosts
/// (`KVM_SET_TSS_ADDR`), and the identity map page before them.
const TSS_ADDRESS: usize = 0xfffb_d000;
const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;

/// Why a VM could not be made.
#[derive(Debug, Error)]
pub enum VmError {
    #[error("{0} failed: {1}")]
    Ioctl(&'static str, errno::Error),
    /// The guest's memory.
    #[error(transparent)]
    Memory(#[from] MapError),
    /// KVM's filter of MSRs cannot hold all that must exit.
    #[error(transparent)]
    Filter(#[from] MsrFilterError),
    /// KVM's own vPMU stays, or MSRs do not exit.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The process has no more descriptors or mappings.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// A vCPU could not be made.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
}

/// What a VM is made of.
#[derive(Debug, Clone, Default)]
pub struct VmOptions {
    /// In-kernel PIC, IOAPIC, local APICs and PIT.
    pub irqchip: bool,
    /// Inclusive MSR ranges that exit to us, sorted and apart.
    pub trapped_msrs: Vec<(u32, u32)>,
    /// Accesses that KVM refuses exit too: registers of a PMU in the x2APIC.
    pub invalid_msrs: bool,
    /// Memory for system management mode, where KVM has that mode. Without it an
    /// SMI ends the VM.
    pub smm: bool,
    /// How RDPMC is trapped.
    pub trap: TrapPlan,
}

impl VmOptions {
    /// With an irqchip, and exits for the PMU's registers: those of every model,
    /// and what `model` shares with the processor.
    #[must_use]
    pub fn with_pmu(model: Option<&PmuModel>) -> Self {
        Self {
            irqchip: true,
            trapped_msrs: msr_ranges(model),
            invalid_msrs: model.is_some_and(|model| model.ibs() != 0),
            smm: true,
            trap: TrapPlan::default(),
        }
    }

    /// With RDPMC trapped as `plan` says.
    #[must_use]
    pub fn trapping(mut self, plan: TrapPlan) -> Self {
        self.trap = plan;
        self
    }
}

/// SDM vol. 4, table 2-2. Only KVM's host side writes it.
const IA32_SMBASE: u32 = 0x9e;

/// One VM.
#[derive(Debug)]
pub struct KvmVm {
    fd: VmFd,
    for_pmus: PmuVm,
    // Keeps the memory mapped for as long as KVM may use it.
    memory: GuestRam,
    smram: Option<GuestMemoryMmap>,
    traps: Arc<VmTraps>,
}

impl KvmVm {
    /// Makes a VM with `memory`.
    ///
    /// KVM's own vPMU, where there is one, is switched off: it would answer
    /// RDPMC and the PMU's MSRs itself.
    ///
    /// # Errors
    /// [`VmError`] names the ioctl that failed.
    pub fn new(host: &Host, memory: GuestRam, options: &VmOptions) -> Result<Self, VmError> {
        let fd = create(host)?;
        let for_pmus = PmuVm::new(vm_fd(&fd))?;
        switch_off_vpmu(&for_pmus)?;
        memory::map_memory(&fd, memory.for_kvm())?;
        let smram = if options.smm && host.features().smm {
            Some(memory::map_smram(&fd, memory.for_kvm())?)
        } else {
            None
        };
        // Both are for old Intel hosts; AMD's KVM and software KVMs may refuse.
        let _ = fd.set_identity_map_address(IDENTITY_MAP_ADDRESS);
        let _ = fd.set_tss_address(TSS_ADDRESS);
        if options.irqchip {
            fd.create_irq_chip()
                .map_err(|error| VmError::Ioctl("KVM_CREATE_IRQCHIP", error))?;
            let pit = kvm_pit_config {
                flags: KVM_PIT_SPEAKER_DUMMY,
                ..Default::default()
            };
            fd.create_pit2(pit)
                .map_err(|error| VmError::Ioctl("KVM_CREATE_PIT2", error))?;
        }
        let filter = MsrFilter::new(&options.trapped_msrs)?;
        filter
            .with_invalid(options.invalid_msrs)
            .install(&for_pmus)?;
        let pages = match &memory {
            GuestRam::Once(_) => None,
            GuestRam::Twice(memory) => Some(Arc::new(PlainPages {
                memory: memory.clone(),
                smram: smram.is_some(),
            }) as Arc<dyn ProtectPages>),
        };
        Ok(Self {
            traps: VmTraps::new(options.trap, pages),
            fd,
            for_pmus,
            memory,
            smram,
        })
    }

    /// Its descriptor.
    #[must_use]
    pub fn fd(&self) -> &VmFd {
        &self.fd
    }

    /// Guest memory, for accesses of the VMM's own.
    #[must_use]
    pub fn memory(&self) -> &GuestMemoryMmap {
        self.memory.for_vmm()
    }

    /// How RDPMC is trapped in it.
    #[must_use]
    pub fn traps(&self) -> &Arc<VmTraps> {
        &self.traps
    }

    /// The memory that only code in system management mode sees, if there is such
    /// a mode.
    #[must_use]
    pub fn smram(&self) -> Option<&GuestMemoryMmap> {
        self.smram.as_ref()
    }

    /// Moves `len` bytes of ordinary memory into SMRAM, from the entry of SMM on; what was
    /// there before is gone. False, and nothing has changed, if there are no such bytes or
    /// there is no SMRAM.
    pub(crate) fn fill_smram(&self, address: u64, len: u64) -> bool {
        let smram = self.smram.as_ref();
        smram.is_some_and(|smram| memory::fill_smram(self.memory(), smram, address, len))
    }

    /// Makes vCPU `id`.
    ///
    /// # Errors
    /// The error of `KVM_CREATE_VCPU`.
    pub fn create_vcpu(&self, id: VcpuId) -> Result<KvmVcpu, VmError> {
        let fd = self
            .fd
            .create_vcpu(id.0.into())
            .map_err(|error| VmError::Ioctl("KVM_CREATE_VCPU", error))?;
        let vcpu = KvmVcpu::new(vcpu_fd(&fd), &self.for_pmus, id)?;
        let smbase = self.smram.as_ref().map(|_| memory::smbase(id.0));
        if let Some(smbase) = smbase
            && !vcpu.write_msr(IA32_SMBASE, smbase)?
        {
            let refused = errno::Error::new(libc::EINVAL);
            return Err(VmError::Ioctl("KVM_SET_MSRS of IA32_SMBASE", refused));
        }
        Ok(vcpu)
    }

    /// Raises interrupt line `gsi` whenever `event` is written.
    ///
    /// # Errors
    /// The error of `KVM_IRQFD`.
    pub fn connect_irq(&self, event: &EventFd, gsi: u32) -> Result<(), VmError> {
        self.fd
            .register_irqfd(event, gsi)
            .map_err(|error| VmError::Ioctl("KVM_IRQFD", error))
    }
}

/// `KVM_CREATE_VM`, again when a signal interrupted it.
fn create(host: &Host) -> Result<VmFd, VmError> {
    loop {
        match host.kvm().create_vm() {
            Ok(fd) => return Ok(fd),
            Err(error) if error.errno() == libc::EINTR => {}
            Err(error) => return Err(VmError::Ioctl("KVM_CREATE_VM", error)),
        }
    }
}
