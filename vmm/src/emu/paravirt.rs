//! kvm-clock, of which a guest reads the frequency of the TSC and the time of day (Linux,
//! `Documentation/virt/kvm/x86/msr.rst`, and `pvclock-abi.h`).
//!
//! All is in virtual time, and the TSC ticks as it does: a page is right for as long as its
//! guest does not set its TSC ([`ClockPage::refresh`]).

use serde::{Deserialize, Serialize};

use super::TSC_HZ;

/// `MSR_KVM_WALL_CLOCK_NEW`.
pub(crate) const WALL_CLOCK: u32 = 0x4b56_4d00;
/// `MSR_KVM_SYSTEM_TIME_NEW`.
pub(crate) const SYSTEM_TIME: u32 = 0x4b56_4d01;

/// `PVCLOCK_TSC_STABLE_BIT`: times of all vCPUs can be compared.
const TSC_STABLE: u8 = 1;
/// `pvclock_vcpu_time_info`, in bytes.
const PAGE_BYTES: usize = 32;
/// `pvclock_wall_clock`, in bytes.
const WALL_BYTES: usize = 12;

const NANOSECONDS: u64 = 1_000_000_000;

// Nanoseconds are ticks, doubled and then times 2^31 by 2^32: any other frequency needs
// other numbers.
const _: () = assert!(TSC_HZ == NANOSECONDS);
const SHIFT: i8 = 1;
const MULTIPLIER: u32 = 1 << 31;

/// What is to be written to guest-physical memory. No vCPU of the machine may run meanwhile;
/// the version is even, since none is ever seen half written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GuestWrite {
    /// Guest-physical address.
    pub(crate) address: u64,
    bytes: [u8; PAGE_BYTES],
    len: usize,
}

impl GuestWrite {
    /// The bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

/// When something happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GuestTime {
    /// Virtual time: ticks since the machine started.
    pub(crate) ticks: u64,
    /// What the vCPU's RDTSC adds to it.
    pub(crate) tsc_offset: u64,
    /// Seconds since 1970 when virtual time began.
    pub(crate) began: u64,
}

/// A vCPU's page of kvm-clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct ClockPage {
    /// As the guest wrote it: bit 0 switches it on, the rest is the address, of 4 bytes.
    msr: u64,
    version: u32,
    /// The offset of the TSC that the page goes by.
    tsc_offset: u64,
}

impl ClockPage {
    /// What the guest reads of the MSR.
    pub(crate) fn msr(&self) -> u64 {
        self.msr
    }

    /// The guest sets the MSR: what the page is to hold, if it is on.
    pub(crate) fn set(&mut self, value: u64, time: GuestTime) -> Option<GuestWrite> {
        self.msr = value;
        self.fill(time)
    }

    /// What the page is to hold since the guest has set its TSC; none if it has not, or there
    /// is no page.
    #[inline]
    pub(crate) fn refresh(&mut self, time: GuestTime) -> Option<GuestWrite> {
        if self.msr & 1 == 0 || self.tsc_offset == time.tsc_offset {
            return None;
        }
        self.fill(time)
    }

    fn fill(&mut self, time: GuestTime) -> Option<GuestWrite> {
        if self.msr & 1 == 0 {
            return None;
        }
        self.version = self.version.wrapping_add(2);
        self.tsc_offset = time.tsc_offset;
        let mut bytes = [0; PAGE_BYTES];
        let mut put = |at: usize, part: &[u8]| {
            for (to, from) in bytes.iter_mut().skip(at).zip(part) {
                *to = *from;
            }
        };
        put(0, &self.version.to_le_bytes());
        put(8, &time.ticks.wrapping_add(time.tsc_offset).to_le_bytes());
        put(16, &time.ticks.to_le_bytes());
        put(24, &MULTIPLIER.to_le_bytes());
        put(28, &SHIFT.to_le_bytes());
        put(29, &[TSC_STABLE]);
        Some(GuestWrite {
            address: self.msr & !1,
            bytes,
            len: PAGE_BYTES,
        })
    }
}

/// The guest asks for the time of day at which its clock began, at `address`, with a version
/// that no one before had.
pub(crate) fn wall_clock(address: u64, version: u32, began: u64) -> GuestWrite {
    let mut bytes = [0; PAGE_BYTES];
    let seconds = u32::try_from(began).unwrap_or(u32::MAX);
    let fields = [version.wrapping_mul(2), seconds, 0];
    for (to, from) in bytes
        .iter_mut()
        .zip(fields.iter().flat_map(|it| it.to_le_bytes()))
    {
        *to = from;
    }
    GuestWrite {
        address,
        bytes,
        len: WALL_BYTES,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ticks: u64, tsc_offset: u64) -> GuestTime {
        GuestTime {
            ticks,
            tsc_offset,
            began: 1_700_000_000,
        }
    }

    /// What a guest makes of the page at a TSC, as Linux's `__pvclock_read_cycles` does.
    fn nanoseconds(page: &[u8], tsc: u64) -> u64 {
        let word = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().expect("8 bytes"));
        let (since, system) = (word(8), word(16));
        let multiplier = u32::from_le_bytes(page[24..28].try_into().expect("4 bytes"));
        let shift = i8::from_le_bytes([page[28]]);
        let delta = tsc.wrapping_sub(since) << shift;
        system + u64::try_from((u128::from(delta) * u128::from(multiplier)) >> 32).expect("a time")
    }

    #[test]
    fn a_guest_reads_virtual_time_in_nanoseconds() {
        let mut page = ClockPage::default();
        assert_eq!(page.set(0x1000, at(5, 0)), None, "bit 0 is clear");
        let first = page.set(0x1001, at(1000, 0)).expect("a page");
        assert_eq!((first.address, first.bytes().len()), (0x1000, 32));
        for later in [1000, 1001, 5_000_000_000, 1 << 40] {
            assert_eq!(nanoseconds(first.bytes(), later), later);
        }
        let khz = ((1_000_000_u64 << 32) / u64::from(MULTIPLIER)) >> SHIFT;
        assert_eq!(khz * 1000, TSC_HZ, "as Linux's pvclock_tsc_khz");
        assert_eq!(page.refresh(at(2000, 0)), None);
    }

    #[test]
    fn a_set_tsc_does_not_move_the_clock() {
        let mut page = ClockPage::default();
        assert_eq!(page.refresh(at(10, 7)), None, "there is no page");
        let before = page.set(0x2001, at(10, 7)).expect("a page");
        let offset = 0_u64.wrapping_sub(400);
        let after = page.refresh(at(500, offset)).expect("another page");
        assert_eq!(
            nanoseconds(after.bytes(), 600_u64.wrapping_add(offset)),
            600
        );
        let version =
            |write: &GuestWrite| u32::from_le_bytes(write.bytes()[..4].try_into().expect("4"));
        assert!(version(&after) > version(&before));
        assert_eq!(version(&after) % 2, 0);
        assert_eq!(page.refresh(at(501, offset)), None);
    }

    #[test]
    fn the_time_of_day_is_that_of_the_beginning() {
        let write = wall_clock(0x3000, 3, 1_700_000_000);
        assert_eq!(write.bytes().len(), 12);
        assert_eq!(write.bytes()[..4], 6_u32.to_le_bytes());
        assert_eq!(write.bytes()[4..8], 1_700_000_000_u32.to_le_bytes());
        assert_eq!(write.bytes()[8..], [0; 4]);
    }
}
