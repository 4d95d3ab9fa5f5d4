//! KVM's ioctls, by descriptors of whatever crate: each request knows the type of its argument,
//! of which its number has the size (Linux `uapi/linux/kvm.h`, `uapi/asm-generic/ioctl.h`).

use std::fs::File;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use kvm_bindings::{
    kvm_cpuid_entry2, kvm_debugregs, kvm_enable_cap, kvm_fpu, kvm_guest_debug, kvm_lapic_state,
    kvm_mp_state, kvm_msi, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_userspace_memory_region,
    kvm_vcpu_events,
};

use crate::error::Errno;

/// The type of KVM's requests.
const KVMIO: libc::c_ulong = 0xae;

const fn number(direction: libc::c_ulong, size: usize, nr: libc::c_ulong) -> libc::c_ulong {
    direction << 30 | (size as libc::c_ulong) << 16 | KVMIO << 8 | nr
}

/// A request with a number for its argument, or none.
#[derive(Clone, Copy)]
pub(crate) struct Plain(libc::c_ulong);

/// A request that fills a `T`.
#[derive(Clone, Copy)]
pub(crate) struct Get<T>(libc::c_ulong, PhantomData<T>);

/// A request that reads a `T`.
#[derive(Clone, Copy)]
pub(crate) struct Set<T>(libc::c_ulong, PhantomData<T>);

const fn plain(nr: libc::c_ulong) -> Plain {
    Plain(number(0, 0, nr))
}

const fn get<T>(nr: libc::c_ulong) -> Get<T> {
    Get(number(2, size_of::<T>(), nr), PhantomData)
}

const fn set<T>(nr: libc::c_ulong) -> Set<T> {
    Set(number(1, size_of::<T>(), nr), PhantomData)
}

pub(crate) const API_VERSION: Plain = plain(0x00);
pub(crate) const CHECK_EXTENSION: Plain = plain(0x03);
pub(crate) const RUN: Plain = plain(0x80);
pub(crate) const NMI: Plain = plain(0x9a);
pub(crate) const GET_TSC_KHZ: Plain = plain(0xa3);
pub(crate) const CLOCK_CTRL: Plain = plain(0xad);
pub(crate) const SMI: Plain = plain(0xb7);
pub(crate) const GET_REGS: Get<kvm_regs> = get(0x81);
pub(crate) const SET_REGS: Set<kvm_regs> = set(0x82);
pub(crate) const GET_SREGS: Get<kvm_sregs> = get(0x83);
pub(crate) const SET_SREGS: Set<kvm_sregs> = set(0x84);
pub(crate) const GET_FPU: Get<kvm_fpu> = get(0x8c);
pub(crate) const SET_FPU: Set<kvm_fpu> = set(0x8d);
pub(crate) const GET_LAPIC: Get<kvm_lapic_state> = get(0x8e);
pub(crate) const GET_MP_STATE: Get<kvm_mp_state> = get(0x98);
pub(crate) const SET_MP_STATE: Set<kvm_mp_state> = set(0x99);
pub(crate) const SET_GUEST_DEBUG: Set<kvm_guest_debug> = set(0x9b);
pub(crate) const GET_VCPU_EVENTS: Get<kvm_vcpu_events> = get(0x9f);
pub(crate) const SET_VCPU_EVENTS: Set<kvm_vcpu_events> = set(0xa0);
pub(crate) const GET_DEBUGREGS: Get<kvm_debugregs> = get(0xa1);
pub(crate) const SET_DEBUGREGS: Set<kvm_debugregs> = set(0xa2);
pub(crate) const ENABLE_CAP: Set<kvm_enable_cap> = set(0xa3);
pub(crate) const SIGNAL_MSI: Set<kvm_msi> = set(0xa5);

const CREATE_VM: Plain = plain(0x01);
const CREATE_VCPU: Plain = plain(0x41);
const SET_TSS_ADDR: Plain = plain(0x47);
const STATS_FD: Plain = plain(0xce);
const SET_IDENTITY_MAP_ADDR: Set<u64> = set(0x48);
const SET_USER_MEMORY_REGION: Set<kvm_userspace_memory_region> = set(0x46);
const GET_MSRS: libc::c_ulong = number(3, size_of::<Header>(), 0x88);
const SET_MSRS: libc::c_ulong = number(1, size_of::<Header>(), 0x89);
const SUPPORTED_CPUID: libc::c_ulong = number(3, size_of::<Header>(), 0x05);
const SET_CPUID2: libc::c_ulong = number(1, size_of::<Header>(), 0x90);
const GET_CPUID2: libc::c_ulong = number(3, size_of::<Header>(), 0x91);
const X86_SET_MSR_FILTER: Set<RawFilter> = set(0xc6);

/// Such requests have a header with a number of entries, behind which these are; the request's own
/// number has the size of the header alone.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Header {
    entries: u32,
    _pad: u32,
}

/// `struct kvm_msrs` with one entry.
#[repr(C)]
struct OneMsr {
    header: Header,
    entry: kvm_msr_entry,
}

/// Leaves of CPUID that KVM takes (`KVM_MAX_CPUID_ENTRIES`, `arch/x86/include/asm/kvm_host.h`).
pub(crate) const MOST_LEAVES: usize = 256;

/// `struct kvm_cpuid2` with room for all that KVM takes.
#[repr(C)]
struct Cpuid2 {
    header: Header,
    entries: [kvm_cpuid_entry2; MOST_LEAVES],
}

/// `struct kvm_msr_filter_range`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawRange {
    flags: u32,
    nmsrs: u32,
    base: u32,
    bitmap: *const u8,
}

/// Ranges of `struct kvm_msr_filter` (`KVM_MSR_FILTER_MAX_RANGES`).
pub(crate) const MOST_RANGES: usize = 16;

/// `struct kvm_msr_filter`.
#[repr(C)]
struct RawFilter {
    flags: u32,
    ranges: [RawRange; MOST_RANGES],
}

/// One range for [`set_msr_filter`].
pub(crate) struct FilterRange<'a> {
    /// `KVM_MSR_FILTER_READ`, `KVM_MSR_FILTER_WRITE`.
    pub(crate) flags: u32,
    pub(crate) base: u32,
    pub(crate) count: u32,
    /// A bit for each.
    pub(crate) bitmap: &'a [u8],
}

fn result(returned: libc::c_int) -> Result<libc::c_int, Errno> {
    if returned < 0 {
        return Err(Errno::last());
    }
    Ok(returned)
}

/// A request with the number `argument`.
#[inline]
pub(crate) fn call(
    fd: BorrowedFd<'_>,
    Plain(request): Plain,
    argument: libc::c_ulong,
) -> Result<libc::c_int, Errno> {
    // SAFETY: the request's argument is a number, and KVM knows no memory of this process by it.
    // KVM_RUN touches guest memory and the mapping of `kvm_run` alone.
    result(unsafe { libc::ioctl(fd.as_raw_fd(), request, argument) })
}

/// What `request` fills in.
#[inline]
pub(crate) fn read<T>(fd: BorrowedFd<'_>, Get(request, _): Get<T>) -> Result<T, Errno> {
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: the request's number, which `get` made, has the size of `T`: KVM writes no more.
    result(unsafe { libc::ioctl(fd.as_raw_fd(), request, value.as_mut_ptr()) })?;
    // SAFETY: every `T` of the constants above is a structure of integers, for which all zeros and
    // what the kernel wrote are valid.
    Ok(unsafe { value.assume_init() })
}

/// Hands `value` over.
#[inline]
pub(crate) fn write<T>(
    fd: BorrowedFd<'_>,
    Set(request, _): Set<T>,
    value: &T,
) -> Result<libc::c_int, Errno> {
    // SAFETY: the request's number, which `set` made, has the size of `T`: KVM reads no more. The
    // one `T` with pointers is `RawFilter`, and with an address of guest memory
    // `kvm_userspace_memory_region`; both are made in this module's own functions.
    result(unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_ref(value)) })
}

/// One MSR of a vCPU; `None` if KVM refuses.
pub(crate) fn get_msr(vcpu: BorrowedFd<'_>, index: u32) -> Result<Option<u64>, Errno> {
    let mut msr = OneMsr::new(index, 0);
    // SAFETY: the header says that one entry is behind it, and there is.
    let read = unsafe { libc::ioctl(vcpu.as_raw_fd(), GET_MSRS, &raw mut msr) };
    Ok((result(read)? == 1).then_some(msr.entry.data))
}

/// Sets one MSR of a vCPU; false if KVM refuses.
pub(crate) fn set_msr(vcpu: BorrowedFd<'_>, index: u32, value: u64) -> Result<bool, Errno> {
    let msr = OneMsr::new(index, value);
    // SAFETY: as above, and it is only read.
    let written = unsafe { libc::ioctl(vcpu.as_raw_fd(), SET_MSRS, &raw const msr) };
    Ok(result(written)? == 1)
}

impl OneMsr {
    fn new(index: u32, data: u64) -> Self {
        let header = Header {
            entries: 1,
            _pad: 0,
        };
        let entry = kvm_msr_entry {
            index,
            data,
            ..Default::default()
        };
        Self { header, entry }
    }
}

impl Cpuid2 {
    fn with_room() -> Box<Self> {
        let entries = u32::try_from(MOST_LEAVES).unwrap_or(0);
        Box::new(Self {
            header: Header { entries, _pad: 0 },
            entries: [kvm_cpuid_entry2::default(); MOST_LEAVES],
        })
    }

    /// Asks for as many as there is room for.
    fn ask(fd: BorrowedFd<'_>, request: libc::c_ulong) -> Result<Vec<kvm_cpuid_entry2>, Errno> {
        let mut leaves = Self::with_room();
        // SAFETY: the header says for how many entries there is room behind it, and there is.
        result(unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut *leaves) })?;
        let found = usize::try_from(leaves.header.entries).unwrap_or(0);
        Ok(leaves.entries[..found.min(MOST_LEAVES)].to_vec())
    }
}

/// What CPUID answers on a vCPU.
pub(crate) fn get_cpuid(vcpu: BorrowedFd<'_>) -> Result<Vec<kvm_cpuid_entry2>, Errno> {
    Cpuid2::ask(vcpu, GET_CPUID2)
}

/// What KVM can let CPUID answer.
pub(crate) fn supported_cpuid(kvm: BorrowedFd<'_>) -> Result<Vec<kvm_cpuid_entry2>, Errno> {
    Cpuid2::ask(kvm, SUPPORTED_CPUID)
}

/// Sets what CPUID answers; E2BIG for more leaves than KVM takes.
pub(crate) fn set_cpuid(vcpu: BorrowedFd<'_>, entries: &[kvm_cpuid_entry2]) -> Result<(), Errno> {
    let mut leaves = Cpuid2::with_room();
    let places = leaves.entries.get_mut(..entries.len());
    places.ok_or(Errno(libc::E2BIG))?.copy_from_slice(entries);
    leaves.header.entries = u32::try_from(entries.len()).unwrap_or(u32::MAX);
    // SAFETY: as many entries as the header says are behind it; they are only read.
    result(unsafe { libc::ioctl(vcpu.as_raw_fd(), SET_CPUID2, &raw const *leaves) })?;
    Ok(())
}

/// Sets a VM's one filter of MSRs; E2BIG for more ranges than it has, EINVAL for one whose bitmap
/// is too short.
pub(crate) fn set_msr_filter(
    vm: BorrowedFd<'_>,
    flags: u32,
    ranges: &[FilterRange<'_>],
) -> Result<(), Errno> {
    let none = RawRange {
        flags: 0,
        nmsrs: 0,
        base: 0,
        bitmap: std::ptr::null(),
    };
    let mut filter = RawFilter {
        flags,
        ranges: [none; MOST_RANGES],
    };
    let places = filter.ranges.get_mut(..ranges.len());
    for (place, range) in places.ok_or(Errno(libc::E2BIG))?.iter_mut().zip(ranges) {
        // KVM reads a bit for each MSR.
        if range.bitmap.len() < range.count.div_ceil(8) as usize {
            return Err(Errno(libc::EINVAL));
        }
        *place = RawRange {
            flags: range.flags,
            nmsrs: range.count,
            base: range.base,
            bitmap: range.bitmap.as_ptr(),
        };
    }
    write(vm, X86_SET_MSR_FILTER, &filter).map(drop)
}

fn owned(fd: libc::c_int) -> OwnedFd {
    // SAFETY: a descriptor that KVM has just made, which nobody else owns.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// KVM itself.
pub(crate) fn open_kvm() -> Result<OwnedFd, Errno> {
    let file = File::options().read(true).write(true).open("/dev/kvm");
    Ok(file?.into())
}

/// A VM of its own; again when a signal interrupted it.
pub(crate) fn create_vm(kvm: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    loop {
        match call(kvm, CREATE_VM, 0) {
            Err(Errno(libc::EINTR)) => {}
            made => return made.map(owned),
        }
    }
}

/// A VM's vCPU `id`.
pub(crate) fn create_vcpu(vm: BorrowedFd<'_>, id: u32) -> Result<OwnedFd, Errno> {
    call(vm, CREATE_VCPU, id.into()).map(owned)
}

/// Where KVM has pages of its own in a guest on some Intel processors. Others may refuse.
pub(crate) fn place_for_intel(vm: BorrowedFd<'_>, tss: u64, identity_map: u64) {
    let _ = write(vm, SET_IDENTITY_MAP_ADDR, &identity_map);
    let _ = call(vm, SET_TSS_ADDR, tss);
}

/// A vCPU's statistics.
pub(crate) fn stats_fd(vcpu: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    call(vcpu, STATS_FD, 0).map(owned)
}

/// Gives a VM memory at guest-physical address 0, as slot `slot`.
///
/// # Safety
/// The `len` bytes at `address` are memory to which no Rust reference exists, and stay mapped as
/// long as the VM lives.
pub(crate) unsafe fn give_memory(
    vm: BorrowedFd<'_>,
    slot: u32,
    (address, len): (u64, u64),
) -> Result<(), Errno> {
    let region = kvm_userspace_memory_region {
        slot,
        memory_size: len,
        userspace_addr: address,
        ..Default::default()
    };
    write(vm, SET_USER_MEMORY_REGION, &region).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `uapi/linux/kvm.h` comes to, for x86-64.
    #[test]
    fn numbers_are_the_kernels() {
        let Plain(run) = RUN;
        assert_eq!(run, 0xae80);
        assert_eq!(GET_REGS.0, 0x8090_ae81);
        assert_eq!(SET_SREGS.0, 0x4138_ae84);
        assert_eq!(GET_MSRS, 0xc008_ae88);
        assert_eq!(SET_CPUID2, 0x4008_ae90);
        assert_eq!(GET_LAPIC.0, 0x8400_ae8e);
        assert_eq!(SET_GUEST_DEBUG.0, 0x4048_ae9b);
        assert_eq!(GET_VCPU_EVENTS.0, 0x8040_ae9f);
        assert_eq!(ENABLE_CAP.0, 0x4068_aea3);
        assert_eq!(SIGNAL_MSI.0, 0x4020_aea5);
        assert_eq!(X86_SET_MSR_FILTER.0, 0x4188_aec6);
        assert_eq!(SET_USER_MEMORY_REGION.0, 0x4020_ae46);
    }
}
