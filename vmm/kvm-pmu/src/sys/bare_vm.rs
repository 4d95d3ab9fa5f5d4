//! A VM that is made to be asked something, and thrown away.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::ioctl;
use super::memory::unnamed_file;
use super::shared::{SharedError, SharedMemory};
use crate::error::Errno;

/// Bits 31:16 of a slot's number name its address space (KVM API, `KVM_SET_USER_MEMORY_REGION`):
/// this one is of system management mode.
const SMM_SLOT: u32 = 1 << 16;
/// Three pages below 4 GiB that KVM needs on some Intel hosts, and the page before them.
const TSS: u64 = 0xfffb_d000;
const IDENTITY_MAP: u64 = 0xfffb_c000;

/// A VM with memory from address 0 on. Who duplicates its descriptor drops that first.
#[derive(Debug)]
pub(crate) struct BareVm {
    // Goes before the memory.
    vm: OwnedFd,
    memory: SharedMemory,
}

/// Why there is none.
#[derive(Debug)]
pub(crate) enum BareVmError {
    Ioctl(&'static str, Errno),
    File(Errno),
    Slot(SharedError),
}

impl BareVm {
    /// With `size` bytes of memory, in system management mode too if it has that (`smm`).
    pub(crate) fn new(kvm: BorrowedFd<'_>, size: usize, smm: bool) -> Result<Self, BareVmError> {
        let failed = |call| move |error| BareVmError::Ioctl(call, error);
        let vm = ioctl::create_vm(kvm).map_err(failed("KVM_CREATE_VM"))?;
        let file = unnamed_file(size as u64);
        let file = file.map_err(|error| BareVmError::File(error.into()))?;
        let memory = SharedMemory::new(|_, _| ());
        let address = memory.add((0, size), (file.as_fd(), 0));
        let address = address.map_err(BareVmError::Slot)?;
        for slot in if smm { &[0, SMM_SLOT][..] } else { &[0] } {
            // SAFETY: the mapping has `size` bytes, to which `SharedMemory` makes no references.
            // It is this value's, whose descriptor goes before it, as duplicates of that do.
            let given = unsafe { ioctl::give_memory(vm.as_fd(), *slot, (address, size as u64)) };
            given.map_err(failed("KVM_SET_USER_MEMORY_REGION"))?;
        }
        // For old Intel hosts; AMD's KVM and software KVMs may refuse.
        ioctl::place_for_intel(vm.as_fd(), TSS, IDENTITY_MAP);
        Ok(Self { vm, memory })
    }

    pub(crate) fn memory(&self) -> &SharedMemory {
        &self.memory
    }
}

impl AsFd for BareVm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.vm.as_fd()
    }
}
