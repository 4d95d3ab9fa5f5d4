//! Sharing the four debug registers between Umpire and the guest.
//!
//! `KVM_GUESTDBG_USE_HW_BP` takes over all of them: the processor runs with
//! what we pass, and every #DB comes to us. So the guest's own breakpoints are
//! kept in the slots that the guest put them in, and ours go to slots that the
//! guest does not use (SDM vol. 3B, chapter 18 "Debug").

use kvm_bindings::kvm_debugregs;

const SLOTS: usize = 4;
/// DR7 bit 10 reads as 1.
const DR7_FIXED: u64 = 1 << 10;
/// DR7.GD: #DB on access to a debug register.
pub(super) const DR7_GD: u64 = 1 << 13;
/// DR6: the breakpoints that were met.
pub(crate) const DR6_SLOTS: u64 = 0xf;
pub(super) const DR6_BD: u64 = 1 << 13;
/// DR6: a single step.
pub(crate) const DR6_BS: u64 = 1 << 14;
pub(super) const DR6_BT: u64 = 1 << 15;

/// The guest's own DR0 to DR3 and DR7.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct GuestBreakpoints {
    db: [u64; SLOTS],
    dr7: u64,
}

impl From<&kvm_debugregs> for GuestBreakpoints {
    fn from(regs: &kvm_debugregs) -> Self {
        Self {
            db: regs.db,
            dr7: regs.dr7,
        }
    }
}

impl GuestBreakpoints {
    /// True if the guest enabled slot `slot`, locally or globally.
    fn uses(&self, slot: usize) -> bool {
        self.dr7 >> (2 * slot) & 3 != 0
    }

    /// True if the guest enabled any slot.
    #[must_use]
    pub(crate) fn uses_some(&self) -> bool {
        self.free() < SLOTS
    }

    /// How many slots the guest leaves free.
    #[must_use]
    pub(crate) fn free(&self) -> usize {
        (0..SLOTS).filter(|&slot| !self.uses(slot)).count()
    }

    /// Without its breakpoints on execution, whose slots are free then.
    #[must_use]
    pub(crate) fn without_execution(mut self) -> Self {
        for slot in 0..SLOTS {
            if self.executes(slot) {
                self.dr7 &= !(3 << (2 * slot));
            }
        }
        self
    }

    /// True if slot `slot` breaks on execution (RW = 0).
    fn executes(&self, slot: usize) -> bool {
        self.dr7 >> (16 + 4 * slot) & 3 == 0
    }
}

/// Debug registers that serve both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placement {
    /// DR0 to DR3.
    pub(crate) db: [u64; SLOTS],
    pub(crate) dr7: u64,
    /// Linear address of our breakpoint in each slot.
    ours: [Option<u64>; SLOTS],
    guest: GuestBreakpoints,
    unplaced: usize,
}

/// Why a #DB was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct DebugCause {
    /// One of our breakpoints was reached, at this linear address.
    pub(crate) ours: Option<u64>,
    /// DR6 bits that the guest must see: its own breakpoints, single step,
    /// debug register access, task switch. 0 if nothing was the guest's.
    pub(crate) guest_dr6: u64,
    /// Those of them that are breakpoints on execution.
    pub(crate) guest_execution: u64,
}

impl Placement {
    /// Puts execution breakpoints at `wanted` into slots that `guest` leaves
    /// free; those that find no slot are counted in [`Placement::unplaced`].
    #[must_use]
    pub(crate) fn new(guest: GuestBreakpoints, wanted: &[u64]) -> Self {
        let mut placement = Self {
            db: guest.db,
            dr7: guest.dr7 | DR7_FIXED,
            ours: [None; SLOTS],
            guest,
            unplaced: 0,
        };
        let mut free = (0..SLOTS).filter(|&slot| !guest.uses(slot));
        for &address in wanted {
            let Some(slot) = free.next() else {
                placement.unplaced += 1;
                continue;
            };
            placement.db[slot] = address;
            placement.ours[slot] = Some(address);
            // Condition "execution", length 1 (both 0), enabled globally.
            placement.dr7 &= !(0xf << (16 + 4 * slot));
            placement.dr7 |= 2 << (2 * slot);
        }
        placement
    }

    /// How many of our breakpoints found no slot.
    #[must_use]
    pub(crate) fn unplaced(&self) -> usize {
        self.unplaced
    }

    /// Sorts out a #DB. `stepping`: a single step of ours was on, so BS is ours.
    #[must_use]
    pub(crate) fn classify(&self, dr6: u64, stepping: bool) -> DebugCause {
        let mut cause = DebugCause::default();
        for slot in (0..SLOTS).filter(|slot| dr6 >> slot & 1 != 0) {
            if let Some(address) = self.ours[slot] {
                cause.ours = Some(address);
            } else if self.guest.uses(slot) {
                // The processor also sets bits of slots that match but are
                // disabled; only enabled ones are causes.
                cause.guest_dr6 |= 1 << slot;
                cause.guest_execution |= u64::from(self.guest.executes(slot)) << slot;
            }
        }
        let mut other = dr6 & (DR6_BS | DR6_BT);
        if stepping {
            other &= !DR6_BS;
        }
        if self.guest.dr7 & DR7_GD != 0 {
            other |= dr6 & DR6_BD;
        }
        cause.guest_dr6 |= other;
        cause
    }
}

/// The guest's DR6 after a #DB with cause `bits`: BS, BT, BD and the slots that
/// are causes are set, the slots that are not are cleared, nothing else moves
/// (SDM vol. 3B, 18.2.3: the processor never clears BS and BT).
#[must_use]
pub(crate) fn merge_dr6(dr6: u64, bits: u64) -> u64 {
    (dr6 & !DR6_SLOTS) | bits
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: u64 = 0xffff_ffff_8100_0000;

    fn guest(db: [u64; 4], dr7: u64) -> GuestBreakpoints {
        GuestBreakpoints { db, dr7 }
    }

    #[test]
    fn ours_goes_where_the_guest_has_nothing() {
        // The guest watches slot 0 (write, 8 bytes), locally enabled.
        let guest = guest([0x5000, 0, 0, 0], 0x9_0001);
        let placed = Placement::new(guest, &[OURS]);
        assert_eq!(placed.db, [0x5000, OURS, 0, 0]);
        assert_eq!(placed.dr7, 0x9_0001 | 2 << 2 | DR7_FIXED);
        assert_eq!(placed.unplaced(), 0);
    }

    #[test]
    fn a_disabled_slot_of_the_guest_is_lent_with_its_condition_cleared() {
        let guest = guest([1, 2, 3, 4], 0x1111_0000);
        let placed = Placement::new(guest, &[OURS]);
        assert_eq!(placed.db, [OURS, 2, 3, 4]);
        assert_eq!(placed.dr7, 0x1110_0000 | 2 | DR7_FIXED);
    }

    #[test]
    fn a_guest_that_uses_all_four_leaves_none() {
        let placed = Placement::new(guest([1, 2, 3, 4], 0x55), &[OURS]);
        assert_eq!(placed.unplaced(), 1);
        assert_eq!(placed.db, [1, 2, 3, 4]);
    }

    #[test]
    fn breakpoints_on_execution_can_be_left_to_kvm() {
        // Slots 0 and 2 on execution, slot 1 on writes of 8 bytes.
        let guest = guest([1, 2, 3, 4], 0x90_0415).without_execution();
        assert_eq!((guest.dr7, guest.free()), (0x90_0404, 3));
    }

    fn check(dr6: u64, stepping: bool, expected: DebugCause) {
        let placed = Placement::new(guest([0x5000, 0, 0x6000, 0], 0x1_0001), &[OURS]);
        assert_eq!(placed.classify(dr6, stepping), expected, "DR6 {dr6:#x}");
    }

    #[test]
    fn causes() {
        let none = DebugCause::default();
        let ours = DebugCause {
            ours: Some(OURS),
            ..none
        };
        let theirs = |guest_dr6| DebugCause { guest_dr6, ..none };
        check(0xffff_0ff0, false, none);
        check(0xffff_0ff2, false, ours);
        check(0xffff_0ff1, false, theirs(1));
        check(0xffff_4ff0, false, theirs(DR6_BS));
        check(0xffff_4ff0, true, none);
        // Slot 2 matches, but the guest has not enabled it.
        check(0xffff_0ff4, false, none);
        let both = DebugCause {
            guest_dr6: 1,
            ..ours
        };
        check(0xffff_0ff3, true, both);
        // BD only counts where the guest asked for it.
        check(0xffff_2ff0, false, none);
    }

    #[test]
    fn dr6_keeps_what_the_processor_never_clears() {
        assert_eq!(merge_dr6(0xffff_4ff1, 2), 0xffff_4ff2);
    }
}
