//! What a VM needs before its vCPUs exist: exits for the PMU's registers, and no
//! PMU of KVM's own.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvm_bindings::{
    KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_FILTER,
    KVM_MSR_EXIT_REASON_INVAL, KVM_MSR_FILTER_DEFAULT_ALLOW, KVM_MSR_FILTER_DEFAULT_DENY,
    KVM_MSR_FILTER_MAX_BITMAP_SIZE, KVM_MSR_FILTER_MAX_RANGES, KVM_MSR_FILTER_READ,
    KVM_MSR_FILTER_WRITE, KVM_PMU_CAP_DISABLE, kvm_enable_cap, kvm_msi,
};
use pmu_virt::PmuModel;
use thiserror::Error;

use crate::error::{DescriptorError, Errno};
use crate::sys::ioctl::{self, FilterRange};

/// Most MSRs in one range of KVM's filter: one bit each.
const MAX_SPAN: u32 = 8 * KVM_MSR_FILTER_MAX_BITMAP_SIZE;

/// A VM of KVM, by a duplicate of its descriptor, which all clones share.
#[derive(Debug, Clone)]
pub struct KvmVm(Arc<OwnedFd>);

impl KvmVm {
    /// That of `vm`.
    ///
    /// # Errors
    /// [`DescriptorError`]: it is no VM's, or could not be duplicated.
    pub fn new(vm: impl AsFd) -> Result<Self, DescriptorError> {
        let vm = vm.as_fd();
        ioctl::call(vm, ioctl::CHECK_EXTENSION, 0).map_err(DescriptorError::NoVm)?;
        // `/dev/kvm` takes that as well, and has a version.
        if ioctl::call(vm, ioctl::API_VERSION, 0).is_ok() {
            return Err(DescriptorError::NoVm(Errno(libc::ENOTTY)));
        }
        let fd = vm.try_clone_to_owned().map_err(Errno::from);
        Ok(Self(Arc::new(fd.map_err(DescriptorError::Duplicate)?)))
    }

    /// What KVM says of a capability; 0 if it does not know it.
    pub(crate) fn check_extension(&self, cap: u32) -> i32 {
        ioctl::call(self.as_fd(), ioctl::CHECK_EXTENSION, cap.into()).unwrap_or(0)
    }

    /// How many vCPUs took the interrupt.
    pub(crate) fn signal_msi(&self, msi: &kvm_msi) -> Result<i32, Errno> {
        ioctl::write(self.as_fd(), ioctl::SIGNAL_MSI, msi)
    }

    fn enable_cap(&self, cap: u32, argument: u32) -> Result<(), Errno> {
        let mut request = kvm_enable_cap {
            cap,
            ..Default::default()
        };
        request.args[0] = argument.into();
        ioctl::write(self.as_fd(), ioctl::ENABLE_CAP, &request).map(drop)
    }
}

impl AsFd for KvmVm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A step before vCPUs exist failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SetupError {
    #[error("switch_off_vpmu: KVM_CAP_PMU_CAPABILITY failed: {0} (a vCPU may be there already)")]
    VpmuStays(Errno),
    #[error("MsrFilter::install: KVM_CAP_X86_USER_SPACE_MSR failed: {0} (Linux 5.10 has it)")]
    Exits(Errno),
    #[error("MsrFilter::install: KVM_X86_SET_MSR_FILTER failed: {0} (Linux 5.10 has it)")]
    Filter(Errno),
}

/// Switches KVM's own vPMU off, where there is one: it would answer RDPMC and the
/// PMU's registers itself. KVM takes that only before the first vCPU exists.
///
/// # Errors
/// [`SetupError::VpmuStays`], also where KVM does not say whether there is one: the VM is dead, or
/// another process's.
pub fn switch_off_vpmu(vm: &KvmVm) -> Result<(), SetupError> {
    let cap = KVM_CAP_PMU_CAPABILITY;
    let known = ioctl::call(vm.as_fd(), ioctl::CHECK_EXTENSION, cap.into());
    if known.map_err(SetupError::VpmuStays)? == 0 {
        return Ok(());
    }
    let off = vm.enable_cap(cap, KVM_PMU_CAP_DISABLE);
    off.map_err(SetupError::VpmuStays)
}

/// The MSRs that must exit, as inclusive ranges, ascending and apart: those of
/// every model, so that a guest does not find another one's, and what `model`
/// shares with the processor.
#[must_use]
pub fn msr_ranges(model: Option<&PmuModel>) -> Vec<(u32, u32)> {
    let mut ranges = pmu_virt::all_pmu_msr_ranges();
    let shared = model.map_or(&[][..], PmuModel::shared_msrs);
    ranges.extend(shared.iter().map(|msr| (msr.0, msr.0)));
    ranges.sort_unstable();
    ranges
}

/// KVM's filter cannot hold all ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "KVM's filter of MSRs takes {KVM_MSR_FILTER_MAX_RANGES} ranges, {0} are needed; give it fewer, \
     wider ones"
)]
pub struct MsrFilterError(pub usize);

/// What a filter does with MSRs that are in none of its ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MsrDefault {
    /// KVM answers them.
    Allow,
    /// They exit.
    Deny,
}

/// One range of KVM's filter (KVM API, `KVM_X86_SET_MSR_FILTER`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MsrRange {
    /// It is for RDMSR.
    pub reads: bool,
    /// It is for WRMSR.
    pub writes: bool,
    /// The first MSR.
    pub base: u32,
    /// How many.
    pub count: u32,
    /// A bit for each, the first one's the lowest of the first byte. A zero bit denies, and a
    /// denied access exits. What it is too short for is denied.
    pub bitmap: Vec<u8>,
}

impl MsrRange {
    /// All `count` MSRs from `base` on exit.
    #[must_use]
    pub fn denied(base: u32, count: u32) -> Self {
        Self {
            reads: true,
            writes: true,
            base,
            count,
            bitmap: vec![0; count.div_ceil(8) as usize],
        }
    }

    fn is_for(&self, access: Access) -> bool {
        match access {
            Access::Read => self.reads,
            Access::Write => self.writes,
        }
    }
}

/// RDMSR or WRMSR.
#[derive(Debug, Clone, Copy)]
enum Access {
    Read,
    Write,
}

/// A VM's one filter of MSRs: the PMU's ranges, and the VMM's own.
#[derive(Debug)]
pub struct MsrFilter {
    default: MsrDefault,
    ranges: Vec<MsrRange>,
    invalid: bool,
}

impl MsrFilter {
    /// With nothing but what [`msr_ranges`] gives; every other MSR stays KVM's.
    ///
    /// # Errors
    /// [`MsrFilterError`]: the ranges lie too far apart.
    pub fn new(pmu: &[(u32, u32)]) -> Result<Self, MsrFilterError> {
        Self::beside(pmu, MsrDefault::Allow, &[])
    }

    /// With what [`msr_ranges`] gives, beside a filter of the VMM's own: its
    /// ranges, and what it does with the rest. The PMU's registers exit for reads
    /// and writes; for all others the VMM's filter holds.
    ///
    /// # Errors
    /// [`MsrFilterError`]: together they are too many.
    pub fn beside(
        pmu: &[(u32, u32)],
        default: MsrDefault,
        own: &[MsrRange],
    ) -> Result<Self, MsrFilterError> {
        let mut ranges = Vec::new();
        for window in windows(pmu) {
            let of = |access| window_range(window, access, default, own);
            let (read, write) = (of(Access::Read), of(Access::Write));
            if read.bitmap == write.bitmap {
                ranges.push(MsrRange {
                    writes: true,
                    ..read
                });
            } else {
                ranges.extend([read, write]);
            }
        }
        // The first range that holds an MSR decides, and that is ours.
        ranges.extend(own.iter().cloned().map(|mut range| {
            let bytes = range.count.div_ceil(8) as usize;
            range.bitmap.resize(bytes.max(range.bitmap.len()), 0);
            range
        }));
        if ranges.len() > KVM_MSR_FILTER_MAX_RANGES as usize {
            return Err(MsrFilterError(ranges.len()));
        }
        Ok(Self {
            default,
            ranges,
            invalid: false,
        })
    }

    /// With exits for accesses that KVM refuses as well: what a model has of the x2APIC
    /// ([`PmuModel::ibs`]) lies where no filter reaches. A VMM answers those that are not
    /// the PMU's with #GP, as KVM would.
    #[must_use]
    pub fn with_invalid(mut self, wanted: bool) -> Self {
        self.invalid = wanted;
        self
    }

    /// Enables exits for denied accesses ([`MsrFilter::exits`]), and sets the filter.
    ///
    /// # Errors
    /// [`SetupError`] names the ioctl.
    pub fn install(&self, vm: &KvmVm) -> Result<(), SetupError> {
        let exits = vm.enable_cap(KVM_CAP_X86_USER_SPACE_MSR, self.exits());
        exits.map_err(SetupError::Exits)?;
        let ranges = self.ranges.iter();
        let ranges: Vec<_> = ranges
            .map(|range| FilterRange {
                flags: if range.reads { KVM_MSR_FILTER_READ } else { 0 }
                    | if range.writes {
                        KVM_MSR_FILTER_WRITE
                    } else {
                        0
                    },
                base: range.base,
                count: range.count,
                bitmap: &range.bitmap,
            })
            .collect();
        let flags = match self.default {
            MsrDefault::Allow => KVM_MSR_FILTER_DEFAULT_ALLOW,
            MsrDefault::Deny => KVM_MSR_FILTER_DEFAULT_DENY,
        };
        ioctl::set_msr_filter(vm.as_fd(), flags, &ranges).map_err(SetupError::Filter)
    }

    /// The reasons to give to `KVM_CAP_X86_USER_SPACE_MSR`, so that a denied access exits, for a
    /// VMM that adds its own. Other MSRs that KVM does not know raise #GP in the guest without a
    /// word from us, as on hardware.
    #[must_use]
    pub fn exits(&self) -> u32 {
        let invalid = if self.invalid {
            KVM_MSR_EXIT_REASON_INVAL
        } else {
            0
        };
        KVM_MSR_EXIT_REASON_FILTER | invalid
    }

    /// What becomes of MSRs in none of the ranges, for a VMM that sets the filter itself.
    #[must_use]
    pub fn default_action(&self) -> MsrDefault {
        self.default
    }

    /// The ranges, likewise.
    #[must_use]
    pub fn ranges(&self) -> &[MsrRange] {
        &self.ranges
    }
}

/// Neighbours among `ranges`, which one range of KVM's filter can hold.
fn windows(ranges: &[(u32, u32)]) -> impl Iterator<Item = &[(u32, u32)]> {
    let mut rest = ranges;
    std::iter::from_fn(move || {
        let &(base, _) = rest.first()?;
        let fits = |&&(_, last): &&(u32, u32)| last - base < MAX_SPAN;
        let (window, after) = rest.split_at(rest.iter().take_while(fits).count().max(1));
        rest = after;
        Some(window)
    })
}

/// A window for reads or for writes: what is the PMU's is denied, for the MSRs
/// between holds what the VMM's own filter says.
fn window_range(
    window: &[(u32, u32)],
    access: Access,
    default: MsrDefault,
    own: &[MsrRange],
) -> MsrRange {
    let base = window.first().map_or(0, |first| first.0);
    let last = window.last().map_or(0, |last| last.1);
    let count = last - base + 1;
    let mut bitmap = vec![0xff; count.div_ceil(8) as usize];
    for bit in 0..count {
        let msr = base + bit;
        let ours = window
            .iter()
            .any(|&(first, last)| (first..=last).contains(&msr));
        if ours || !allows(msr, access, default, own) {
            bitmap[(bit / 8) as usize] &= !(1 << (bit % 8));
        }
    }
    MsrRange {
        reads: matches!(access, Access::Read),
        writes: matches!(access, Access::Write),
        base,
        count,
        bitmap,
    }
}

/// What KVM does with an access, given a filter.
fn allows(msr: u32, access: Access, default: MsrDefault, ranges: &[MsrRange]) -> bool {
    let mut ranges = ranges.iter().filter(|range| range.is_for(access));
    let decides = ranges.find_map(|range| {
        let bit = msr.checked_sub(range.base)?;
        let byte = range.bitmap.get((bit / 8) as usize).unwrap_or(&0);
        (bit < range.count).then_some(byte >> (bit % 8) & 1 != 0)
    });
    decides.unwrap_or(default == MsrDefault::Allow)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(base: u32, count: u32, bitmap: &[u8]) -> MsrRange {
        MsrRange {
            bitmap: bitmap.to_vec(),
            ..MsrRange::denied(base, count)
        }
    }

    #[test]
    fn neighbours_share_a_window_and_leave_what_lies_between_to_kvm() {
        let filter = MsrFilter::new(&[(0x10, 0x11), (0x18, 0x18), (0xc000_0000, 0xc000_0000)]);
        let expected = [
            range(0x10, 9, &[0b1111_1100, 0b1111_1110]),
            range(0xc000_0000, 1, &[0b1111_1110]),
        ];
        assert_eq!(filter.unwrap().ranges, expected);
    }

    #[test]
    fn every_pmu_msr_fits_in_kvms_filter() {
        let model = PmuModel::parse("intel-v2,full-width=on").unwrap();
        let ours = msr_ranges(Some(&model));
        let filter = MsrFilter::new(&ours).unwrap();
        assert!(filter.ranges().len() <= 16);
        check(&filter, &ours, MsrDefault::Allow, &[]);
    }

    /// Ours exit, and for all others holds what `own` says.
    fn check(filter: &MsrFilter, ours: &[(u32, u32)], default: MsrDefault, own: &[MsrRange]) {
        let places: [std::ops::Range<u32>; 3] = [
            0..0x2000,
            0xc000_0000..0xc001_2000,
            0x554d_5000..0x554d_8000,
        ];
        for msr in places.into_iter().flatten() {
            let is_ours = ours
                .iter()
                .any(|&(first, last)| (first..=last).contains(&msr));
            for access in [Access::Read, Access::Write] {
                let found = allows(msr, access, filter.default_action(), filter.ranges());
                let wanted = !is_ours && allows(msr, access, default, own);
                assert_eq!(found, wanted, "MSR {msr:#x}, {access:?}");
            }
        }
    }

    #[test]
    fn a_filter_of_the_vmms_own_holds_beside_ours() {
        let ours = msr_ranges(None);
        let own = |(reads, writes), base| MsrRange {
            reads,
            writes,
            ..MsrRange::denied(base, 16)
        };
        let (read, write, both) = ((true, false), (false, true), (true, true));
        // Between ours, over ours, and far from them; for reads alone, too.
        let ranges = [own(read, 0x190), own(both, 0x300), own(write, 0x1a00)];
        for default in [MsrDefault::Allow, MsrDefault::Deny] {
            let filter = MsrFilter::beside(&ours, default, &ranges).unwrap();
            check(&filter, &ours, default, &ranges);
        }
        let many: Vec<_> = (0..16).map(|n| own(read, 0x4000 + 0x10 * n)).collect();
        let error = MsrFilter::beside(&ours, MsrDefault::Allow, &many).unwrap_err();
        assert!(error.0 > 16, "{error}");
    }
}
