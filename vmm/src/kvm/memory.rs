//! Guest memory as KVM sees it, and the memory of system management mode.
//!
//! KVM gives SMM an address space of its own (`KVM_CAP_MULTI_ADDRESS_SPACE`). It
//! shows the guest's memory there as well, but for 64 KiB at the reset value of
//! SMBASE: these are SMRAM, which no code outside of SMM reaches, as on a machine
//! whose firmware has locked it. Otherwise any kernel could put code there, send
//! itself an SMI, and be the firmware. Only the end of the firmware's phase fills it
//! ([`fill_smram`]).
//!
//! A vCPU saves its state near its SMBASE, so that each has one of its own: that of the
//! first is the reset value, and the others' are in SMRAM above ([`smbase`]). A jump at the
//! entry of each leads to the code of the first, so all run the same.

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
/// What the first vCPU has of SMRAM, and then entries and saved states of the others.
const SMRAM_SIZE: u64 = 0x2_8000;
/// Where an SMI leads, in 16-bit code with CS.base = SMBASE.
pub const SMM_ENTRY: u64 = SMBASE + ENTRY;
const ENTRY: u64 = 0x8000;
/// Room for code there. The state is saved in the last 512 bytes of it.
const SMM_CODE: u64 = 0x8000;
/// From one vCPU's entry to the next one's, with the saved state of another in between.
const SMBASE_STEP: u64 = 0x400;
/// JMP FAR to [`SMM_ENTRY`] by the first vCPU's CS.
const JUMP: [u8; 5] = [0xea, 0x00, 0x80, 0x00, 0x30];
/// vCPUs of a VM, at most.
const VCPUS: u32 = 64;
/// RSM: an SMI that nobody has a handler for does nothing.
const RSM: [u8; 2] = [0x0f, 0xaa];
/// Bits 31:16 of a slot number name its address space (KVM API,
/// `KVM_SET_USER_MEMORY_REGION`).
const SMM_SLOTS: u32 = 1 << 16;

/// KVM cannot be shown the guest's memory.
#[derive(Debug, Error)]
pub enum MapError {
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

/// SMBASE of a vCPU.
pub(super) fn smbase(vcpu: u32) -> u64 {
    match vcpu {
        0 => SMBASE,
        n => SMBASE + ENTRY + u64::from(n) * SMBASE_STEP,
    }
}

/// Makes SMRAM, and shows it and the rest of `memory` in SMM.
pub(super) fn map_smram(fd: &VmFd, memory: &GuestMemoryMmap) -> Result<GuestMemoryMmap, MapError> {
    let size = usize::try_from(SMRAM_SIZE).unwrap_or(0);
    let smram = GuestMemoryMmap::from_ranges(&[(GuestAddress(SMBASE), size)])
        .map_err(|_| MapError::Unmapped(SMBASE))?;
    smram
        .write_slice(&RSM, GuestAddress(SMM_ENTRY))
        .map_err(|_| MapError::Unmapped(SMM_ENTRY))?;
    for vcpu in 1..VCPUS {
        let entry = smbase(vcpu) + ENTRY;
        smram
            .write_slice(&JUMP, GuestAddress(entry))
            .map_err(|_| MapError::Unmapped(entry))?;
    }
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
    if !memory.check_range(GuestAddress(address), len) || len as u64 > SMM_CODE {
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
            let (ram, smram) = (memory(0, 0x9_0000), memory(SMBASE, 0x2_8000));
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
        check((0, 0x8_0000), &[(0, 0x3_0000), (0x5_8000, 0x2_8000)]);
        check((0, 0x1000), &[(0, 0x1000)]);
        check((0x10_0000, 0x1000), &[(0x10_0000, 0x1000)]);
        check((0x3_0000, 0x1_0000), &[]);
        check((0x3_8000, 0x3_0000), &[(0x5_8000, 0x1_0000)]);
    }

    #[test]
    fn no_vcpus_state_is_where_another_ones_state_or_entry_is() {
        let mut taken = std::collections::BTreeMap::new();
        let mut take = |start: u64, len: u64, what: String| {
            assert!((SMBASE..SMBASE + SMRAM_SIZE).contains(&start), "{what}");
            assert!(start + len <= SMBASE + SMRAM_SIZE, "{what}");
            for at in start..start + len {
                if let Some(other) = taken.insert(at, what.clone()) {
                    panic!("{what} and {other} at {at:#x}");
                }
            }
        };
        take(SMM_ENTRY, SMM_CODE - 0x200, "the code".to_owned());
        for vcpu in 0..VCPUS {
            // SDM vol. 3C, 34.4.1: the state is saved up to SMBASE + 0xffff.
            take(smbase(vcpu) + 0xfe00, 0x200, format!("state {vcpu}"));
            if vcpu > 0 {
                take(smbase(vcpu) + ENTRY, 5, format!("entry {vcpu}"));
            }
        }
    }
}
