//! What a VM needs before its vCPUs exist: exits for the PMU's registers, and no
//! PMU of KVM's own.

use kvm_bindings::{
    KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_FILTER_MAX_BITMAP_SIZE,
    KVM_MSR_FILTER_MAX_RANGES, KVM_PMU_CAP_DISABLE, kvm_enable_cap,
};
use kvm_ioctls::{
    MsrExitReason, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VmFd,
};
use pmu_virt::PmuModel;
use thiserror::Error;
use vmm_sys_util::errno;

/// Most MSRs in one range of KVM's filter: one bit each.
const MAX_SPAN: u32 = 8 * KVM_MSR_FILTER_MAX_BITMAP_SIZE;

/// Switches KVM's own vPMU off, where there is one: it would answer RDPMC and the
/// PMU's registers itself. KVM takes that only before the first vCPU exists.
///
/// # Errors
/// The error of `KVM_ENABLE_CAP`.
pub fn switch_off_vpmu(vm: &VmFd) -> Result<(), errno::Error> {
    if vm.check_extension_raw(KVM_CAP_PMU_CAPABILITY.into()) <= 0 {
        return Ok(());
    }
    let mut request = kvm_enable_cap {
        cap: KVM_CAP_PMU_CAPABILITY,
        ..Default::default()
    };
    request.args[0] = KVM_PMU_CAP_DISABLE.into();
    vm.enable_cap(&request)
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

/// A VM's one filter of MSRs: the PMU's ranges, and the VMM's own.
#[derive(Debug)]
pub struct MsrFilter {
    default: MsrFilterDefaultAction,
    ranges: Vec<OwnedRange>,
    invalid: bool,
}

/// One range of KVM's filter: a zero bit denies, and a denied access exits.
#[derive(Debug, Clone, PartialEq, Eq)]
struct OwnedRange {
    flags: MsrFilterRangeFlags,
    base: u32,
    count: u32,
    bitmap: Vec<u8>,
}

impl MsrFilter {
    /// With nothing but what [`msr_ranges`] gives; every other MSR stays KVM's.
    ///
    /// # Errors
    /// [`MsrFilterError`]: the ranges lie too far apart.
    pub fn new(pmu: &[(u32, u32)]) -> Result<Self, MsrFilterError> {
        Self::beside(pmu, MsrFilterDefaultAction::ALLOW, &[])
    }

    /// With what [`msr_ranges`] gives, beside a filter of the VMM's own: its
    /// ranges, and what it does with the rest. The PMU's registers exit for reads
    /// and writes; for all others the VMM's filter holds.
    ///
    /// # Errors
    /// [`MsrFilterError`]: together they are too many.
    pub fn beside(
        pmu: &[(u32, u32)],
        default: MsrFilterDefaultAction,
        own: &[MsrFilterRange<'_>],
    ) -> Result<Self, MsrFilterError> {
        let mut ranges = Vec::new();
        for window in windows(pmu) {
            let of = |flags| window_range(window, flags, default, own);
            let read = of(MsrFilterRangeFlags::READ);
            let write = of(MsrFilterRangeFlags::WRITE);
            if read.bitmap == write.bitmap {
                let flags = MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE;
                ranges.push(OwnedRange { flags, ..read });
            } else {
                ranges.extend([read, write]);
            }
        }
        // The first range that holds an MSR decides, and that is ours.
        ranges.extend(own.iter().map(|range| OwnedRange {
            flags: range.flags,
            base: range.base,
            count: range.msr_count,
            bitmap: range.bitmap.to_vec(),
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

    /// What to enable with `VmFd::enable_cap`, so that a denied access exits. Other
    /// MSRs that KVM does not know raise #GP in the guest without a word from us, as
    /// on hardware; a VMM that wants those as well adds its reasons.
    #[must_use]
    pub fn exits(&self) -> kvm_enable_cap {
        let mut request = kvm_enable_cap {
            cap: KVM_CAP_X86_USER_SPACE_MSR,
            ..Default::default()
        };
        let mut reasons = MsrExitReason::Filter;
        if self.invalid {
            reasons |= MsrExitReason::Inval;
        }
        request.args[0] = reasons.bits().into();
        request
    }

    /// The default action for `VmFd::set_msr_filter`.
    #[must_use]
    pub fn default_action(&self) -> MsrFilterDefaultAction {
        self.default
    }

    /// The ranges for `VmFd::set_msr_filter`.
    #[must_use]
    pub fn ranges(&self) -> Vec<MsrFilterRange<'_>> {
        let ranges = self.ranges.iter();
        ranges
            .map(|range| MsrFilterRange {
                flags: range.flags,
                base: range.base,
                msr_count: range.count,
                bitmap: &range.bitmap,
            })
            .collect()
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
    flags: MsrFilterRangeFlags,
    default: MsrFilterDefaultAction,
    own: &[MsrFilterRange<'_>],
) -> OwnedRange {
    let base = window.first().map_or(0, |first| first.0);
    let last = window.last().map_or(0, |last| last.1);
    let count = last - base + 1;
    let mut bitmap = vec![0xff; count.div_ceil(8) as usize];
    for bit in 0..count {
        let msr = base + bit;
        let ours = window
            .iter()
            .any(|&(first, last)| (first..=last).contains(&msr));
        if ours || !allows(msr, flags, default, own) {
            bitmap[(bit / 8) as usize] &= !(1 << (bit % 8));
        }
    }
    OwnedRange {
        flags,
        base,
        count,
        bitmap,
    }
}

/// What KVM does with an access, given a filter.
fn allows(
    msr: u32,
    flags: MsrFilterRangeFlags,
    default: MsrFilterDefaultAction,
    ranges: &[MsrFilterRange<'_>],
) -> bool {
    let mut ranges = ranges.iter().filter(|range| range.flags.contains(flags));
    let decides = ranges.find_map(|range| {
        let bit = msr.checked_sub(range.base)?;
        let byte = range.bitmap.get((bit / 8) as usize)?;
        (bit < range.msr_count).then_some(byte >> (bit % 8) & 1 != 0)
    });
    decides.unwrap_or(default == MsrFilterDefaultAction::ALLOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: MsrFilterRangeFlags = MsrFilterRangeFlags::READ;
    const WRITE: MsrFilterRangeFlags = MsrFilterRangeFlags::WRITE;

    fn range(base: u32, count: u32, bitmap: &[u8]) -> OwnedRange {
        OwnedRange {
            flags: READ | WRITE,
            base,
            count,
            bitmap: bitmap.to_vec(),
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
        check(&filter, &ours, MsrFilterDefaultAction::ALLOW, &[]);
    }

    /// Ours exit, and for all others holds what `own` says.
    fn check(
        filter: &MsrFilter,
        ours: &[(u32, u32)],
        default: MsrFilterDefaultAction,
        own: &[MsrFilterRange<'_>],
    ) {
        let places: [std::ops::Range<u32>; 3] = [
            0..0x2000,
            0xc000_0000..0xc001_2000,
            0x554d_5000..0x554d_8000,
        ];
        for msr in places.into_iter().flatten() {
            let is_ours = ours
                .iter()
                .any(|&(first, last)| (first..=last).contains(&msr));
            for flags in [READ, WRITE] {
                let found = allows(msr, flags, filter.default_action(), &filter.ranges());
                let wanted = !is_ours && allows(msr, flags, default, own);
                assert_eq!(found, wanted, "MSR {msr:#x}, {flags:?}");
            }
        }
    }

    #[test]
    fn a_filter_of_the_vmms_own_holds_beside_ours() {
        let ours = msr_ranges(None);
        let bitmap = [0; 2];
        let own = |flags, base| MsrFilterRange {
            flags,
            base,
            msr_count: 16,
            bitmap: &bitmap,
        };
        // Between ours, over ours, and far from them; for reads alone, too.
        let ranges = [
            own(READ, 0x190),
            own(READ | WRITE, 0x300),
            own(WRITE, 0x1a00),
        ];
        for default in [MsrFilterDefaultAction::ALLOW, MsrFilterDefaultAction::DENY] {
            let filter = MsrFilter::beside(&ours, default, &ranges).unwrap();
            check(&filter, &ours, default, &ranges);
        }
        let many: Vec<_> = (0..16).map(|n| own(READ, 0x4000 + 0x10 * n)).collect();
        let error = MsrFilter::beside(&ours, MsrFilterDefaultAction::ALLOW, &many).unwrap_err();
        assert!(error.0 > 16, "{error}");
    }
}
