//! Guest memory as KVM sees it, and the memory of system management mode.
//!
//! KVM gives SMM an address space of its own (`KVM_CAP_MULTI_ADDRESS_SPACE`). It
//! shows the guest's memory there as well, but for 64 KiB at the reset value of
//! SMBASE: these are SMRAM, which no code outside of SMM reaches, as on a machine
//! whose firmware has locked it. Otherwise any kernel could put code there, send
//! itself an SMI, and be the firmware. Only the end of the firmware's phase fills it
//! ([`fill_smram`]).
//!
//! All vCPUs have the same SMBASE, and so one state save area. Two that are in SMM
//! at once spoil each other's state, which is the guest's own loss.

use std::io;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use kvm_pmu::{GuestBytes, PatchRefusal, ProtectPages, TwiceMapped};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::errno;

use super::sys;

/// SMBASE after reset (SDM vol. 3C, 34.4 "SMRAM").
const SMBASE: u64 = 0x3_0000;
const SMRAM_SIZE: u64 = 0x1_0000;
/// Where an SMI leads, in 16-bit code with CS.base = SMBASE.
pub const SMM_ENTRY: u64 = SMBASE + 0x8000;
/// RSM: an SMI that nobody has a handler for does nothing.
const RSM: [u8; 2] = [0x0f, 0xaa];
/// Bits 31:16 of a slot number name its address space (KVM API,
/// `KVM_SET_USER_MEMORY_REGION`).
const SMM_SLOTS: u32 = 1 << 16;

/// KVM cannot be shown the guest's memory.
#[derive(Debug, Error)]
pub enum MapError {
    /// The ioctl failed.
    #[error("KVM_SET_USER_MEMORY_REGION failed: {0}")]
    Ioctl(errno::Error),
    /// The guest memory has a region without a host mapping.
    #[error("guest memory at {0:#x} has no host mapping")]
    Unmapped(u64),
}

/// The guest's memory.
#[derive(Debug, Clone)]
pub enum GuestRam {
    /// Mapped once: KVM and the VMM write to the same mapping.
    Once(GuestMemoryMmap),
    /// Mapped twice, so that the guest alone can be kept from writing to a page.
    Twice(TwiceMapped),
}

impl GuestRam {
    /// Memory of these ranges, which consist of whole pages; mapped `twice`, it is
    /// memory of the host's that has no huge pages unless the host is set up so.
    ///
    /// # Errors
    /// The host has no memory for it.
    pub fn new(ranges: &[(GuestAddress, usize)], twice: bool) -> io::Result<Self> {
        if twice {
            return TwiceMapped::new(ranges).map(Self::Twice);
        }
        let memory = GuestMemoryMmap::from_ranges(ranges);
        memory
            .map(Self::Once)
            .map_err(|error| io::Error::other(error.to_string()))
    }

    /// The mapping for all accesses of the VMM's own.
    #[must_use]
    pub fn for_vmm(&self) -> &GuestMemoryMmap {
        match self {
            Self::Once(memory) => memory,
            Self::Twice(memory) => memory.for_vmm(),
        }
    }

    /// The mapping for KVM's slots.
    pub(super) fn for_kvm(&self) -> &GuestMemoryMmap {
        match self {
            Self::Once(memory) => memory,
            Self::Twice(memory) => memory.for_kvm(),
        }
    }
}

/// Memory whose pages can be protected, but for those that are other memory in
/// system management mode.
#[derive(Debug)]
pub(super) struct PlainPages {
    pub(super) memory: TwiceMapped,
    pub(super) smram: bool,
}

impl ProtectPages for PlainPages {
    fn protect(&self, page: u64, writable: bool) -> Result<(), PatchRefusal> {
        if self.smram && (SMBASE..SMBASE + SMRAM_SIZE).contains(&page) {
            return Err(PatchRefusal::TwoSlots);
        }
        self.memory.protect(page, writable)
    }

    fn bytes(&self) -> &dyn GuestBytes {
        self.memory.bytes()
    }
}

/// Shows the guest all of `memory`.
pub(super) fn map_memory(fd: &VmFd, memory: &GuestMemoryMmap) -> Result<(), MapError> {
    for (slot, region) in (0u32..).zip(memory.iter()) {
        map_piece(fd, slot, memory, (region.start_addr().0, region.len()))?;
    }
    Ok(())
}

/// Shows the guest `len` bytes of `memory` from `start` on, in KVM's slot `slot`.
fn map_piece(
    fd: &VmFd,
    slot: u32,
    memory: &GuestMemoryMmap,
    (start, len): (u64, u64),
) -> Result<(), MapError> {
    let host_address = memory
        .get_host_address(GuestAddress(start))
        .map_err(|_| MapError::Unmapped(start))?;
    let entry = kvm_userspace_memory_region {
        slot,
        flags: 0,
        guest_phys_addr: start,
        memory_size: len,
        userspace_addr: host_address as u64,
    };
    sys::set_memory_region(fd, entry).map_err(MapError::Ioctl)
}

/// Makes SMRAM, and shows it and the rest of `memory` in SMM.
pub(super) fn map_smram(fd: &VmFd, memory: &GuestMemoryMmap) -> Result<GuestMemoryMmap, MapError> {
    let size = usize::try_from(SMRAM_SIZE).unwrap_or(0);
    let smram = GuestMemoryMmap::from_ranges(&[(GuestAddress(SMBASE), size)])
        .map_err(|_| MapError::Unmapped(SMBASE))?;
    smram
        .write_slice(&RSM, GuestAddress(SMM_ENTRY))
        .map_err(|_| MapError::Unmapped(SMM_ENTRY))?;
    let ram = memory
        .iter()
        .map(|region| (region.start_addr().0, region.len()));
    let mut slots = SMM_SLOTS..;
    for (piece, slot) in ram.flat_map(without_smram).zip(&mut slots) {
        map_piece(fd, slot, memory, piece)?;
    }
    let slot = slots.next().unwrap_or(SMM_SLOTS);
    map_piece(fd, slot, &smram, (SMBASE, SMRAM_SIZE))?;
    Ok(smram)
}

/// Moves bytes of ordinary memory into SMRAM, from [`SMM_ENTRY`] on. False, and nothing
/// has changed, if not all of them are memory or they do not fit.
pub(super) fn fill_smram(
    memory: &GuestMemoryMmap,
    smram: &GuestMemoryMmap,
    address: u64,
    len: u64,
) -> bool {
    let Ok(len) = usize::try_from(len) else {
        return false;
    };
    if !memory.check_range(GuestAddress(address), len)
        || !smram.check_range(GuestAddress(SMM_ENTRY), len)
    {
        return false;
    }
    let mut code = vec![0; len];
    let moved = memory
        .read_slice(&mut code, GuestAddress(address))
        .and_then(|()| smram.write_slice(&code, GuestAddress(SMM_ENTRY)))
        .and_then(|()| memory.write_slice(&vec![0; len], GuestAddress(address)));
    moved.is_ok()
}

/// What SMRAM leaves of a region: start and length of each piece.
fn without_smram((start, len): (u64, u64)) -> impl Iterator<Item = (u64, u64)> {
    let end = start.saturating_add(len);
    let below = (start, end.min(SMBASE));
    let above = (start.max(SMBASE + SMRAM_SIZE), end);
    [below, above]
        .into_iter()
        .filter(|(start, end)| start < end)
        .map(|(start, end)| (start, end - start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_into_smram_is_gone_elsewhere() {
        let memory = |start, len| {
            let ranges = [(GuestAddress(start), len)];
            GuestMemoryMmap::<()>::from_ranges(&ranges).expect("memory")
        };
        let byte = |memory: &GuestMemoryMmap, at| {
            let byte: u8 = memory.read_obj(GuestAddress(at)).expect("inside");
            byte
        };
        let check = |address: u64, len: u64, fills: bool| {
            let (ram, smram) = (memory(0, 0x9_0000), memory(SMBASE, 0x1_0000));
            smram
                .write_obj(0xf0_u8, GuestAddress(SMM_ENTRY))
                .expect("inside");
            for at in [0x1000, 0x1fff, 0x2000, 0x8_f000] {
                ram.write_obj(7_u8, GuestAddress(at)).expect("inside");
            }
            let what = format!("{len:#x} at {address:#x}");
            assert_eq!(fill_smram(&ram, &smram, address, len), fills, "{what}");
            let there = byte(&smram, SMM_ENTRY);
            assert_eq!(there, if fills { 7 } else { 0xf0 }, "{what}");
            let rest = [0x1000, 0x1fff, 0x2000, 0x8_f000].map(|at| {
                let moved = fills && (address..address + len).contains(&at);
                byte(&ram, at) == if moved { 0 } else { 7 }
            });
            assert_eq!(rest, [true; 4], "{what}");
        };
        check(0x1000, 0x1000, true);
        check(0x1000, 0x8000, true);
        check(0x8_f000, 0x1000, true);
        check(0x8_f000, 0x2000, false);
        check(0x1000, 0x9000, false);
        check(u64::MAX - 0xfff, 0x1000, false);
    }

    #[test]
    fn what_is_left_beside_smram() {
        fn check(region: (u64, u64), expected: &[(u64, u64)]) {
            assert_eq!(without_smram(region).collect::<Vec<_>>(), expected);
        }
        check((0, 0x8_0000), &[(0, 0x3_0000), (0x4_0000, 0x4_0000)]);
        check((0, 0x1000), &[(0, 0x1000)]);
        check((0x10_0000, 0x1000), &[(0x10_0000, 0x1000)]);
        check((0x3_0000, 0x1_0000), &[]);
        check((0x3_8000, 0x1_0000), &[(0x4_0000, 0x8000)]);
    }
}
