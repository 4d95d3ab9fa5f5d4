//! Memory as the processor reaches it by itself, by linear address: at CPL 0 whatever
//! ring runs (SDM vol. 3A, 5.6 "Access Rights": implicit supervisor-mode accesses).

use std::cell::Cell;

use kvm_bindings::kvm_sregs;

use super::paging::{Mapped, PAGE, Paging, map, paging_of};
use crate::memory::GuestBytes;

const CR0_WP: u64 = 1 << 16;
const CR4_SMAP: u64 = 1 << 21;

/// Guest memory through the page tables in force. Nothing raises a fault, no accessed or
/// dirty bit is set; a mapping is looked up once for as long as this exists.
pub(crate) struct Implicit<'a> {
    memory: &'a dyn GuestBytes,
    paging: Paging,
    /// Pages that are mapped read-only can be written.
    writes_anywhere: bool,
    /// Pages of CPL 3 can be reached.
    reaches_user: bool,
    /// The last two pages that were looked up: the area's and the buffer's.
    known: Cell<[Option<(u64, Mapped)>; 2]>,
}

impl<'a> Implicit<'a> {
    pub(crate) fn new(memory: &'a dyn GuestBytes, sregs: &kvm_sregs) -> Self {
        Self {
            memory,
            paging: paging_of(sregs),
            writes_anywhere: sregs.cr0 & CR0_WP == 0,
            // An implicit access heeds SMAP whatever EFLAGS.AC says.
            reaches_user: sregs.cr4 & CR4_SMAP == 0,
            known: Cell::new([None; 2]),
        }
    }

    /// Fills `bytes` from `linear`; false if some of it is not mapped.
    pub(crate) fn read_all(&self, linear: u64, bytes: &mut [u8]) -> bool {
        let mut at = linear;
        let mut rest = bytes;
        while !rest.is_empty() {
            let (part, more) = rest.split_at_mut(in_page(at).min(rest.len()));
            let Some(physical) = self.physical(at, false) else {
                return false;
            };
            if !self.memory.read(physical, part) {
                return false;
            }
            at = at.wrapping_add(part.len() as u64);
            rest = more;
        }
        true
    }

    /// Writes `bytes` at `linear`; false if some of it cannot be, and nothing was then.
    pub(crate) fn write_all(&self, linear: u64, bytes: &[u8]) -> bool {
        let mut places = Vec::new();
        let (mut at, mut rest) = (linear, bytes);
        while !rest.is_empty() {
            let (part, more) = rest.split_at(in_page(at).min(rest.len()));
            let Some(physical) = self.physical(at, true) else {
                return false;
            };
            if more.is_empty() && places.is_empty() {
                return self.memory.write(physical, part);
            }
            // All of it is memory, before any of it changes.
            if !self.memory.read(physical, &mut vec![0; part.len()]) {
                return false;
            }
            places.push((physical, part));
            at = at.wrapping_add(part.len() as u64);
            rest = more;
        }
        let mut places = places.into_iter();
        places.all(|(physical, part)| self.memory.write(physical, part))
    }

    /// Where `linear` leads to, and the base-2 logarithm of its page's size; rights are not
    /// looked at.
    pub(crate) fn located(&self, linear: u64) -> Option<(u64, u32)> {
        let mapped = map(self.memory, &self.paging, linear)?;
        Some((mapped.physical, mapped.page))
    }

    fn physical(&self, linear: u64, write: bool) -> Option<u64> {
        let page = linear & !(PAGE - 1);
        let [last, before] = self.known.get();
        let is_it = |known: &Option<(u64, Mapped)>| known.is_some_and(|(at, _)| at == page);
        let mapped = match [last, before].into_iter().find(is_it).flatten() {
            Some((_, mapped)) => mapped,
            None => {
                let mapped = map(self.memory, &self.paging, page)?;
                self.known.set([Some((page, mapped)), last]);
                mapped
            }
        };
        let reached = !mapped.user || self.reaches_user;
        let allowed = !write || mapped.writable || self.writes_anywhere;
        (reached && allowed).then_some(mapped.physical | linear & (PAGE - 1))
    }
}

/// Bytes from `linear` to the end of its page.
fn in_page(linear: u64) -> usize {
    usize::try_from(PAGE - (linear & (PAGE - 1))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::*;

    const SIZE: u64 = 1 << 20;
    const P: u64 = 1;
    const W: u64 = 2;
    const U: u64 = 4;

    /// Long mode, tables at 0x1000 to 0x4fff; pages 0x10 to 0x13 of the last table lead
    /// to frames of the same number with these bits, page 0x14 to nothing, page 0x15 to a
    /// hole behind the memory.
    fn memory(bits: [u64; 4]) -> GuestMemoryMmap {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let put = |at: u64, word: u64| memory.write_obj(word, GuestAddress(at)).unwrap();
        put(0x1000, 0x2000 | P | W | U);
        put(0x2000, 0x3000 | P | W | U);
        put(0x3000, 0x4000 | P | W | U);
        for (page, bits) in (0x10..).zip(bits) {
            put(0x4000 + 8 * page, page << 12 | bits);
        }
        put(0x4000 + 8 * 0x15, SIZE | P | W);
        memory
    }

    fn sregs(cr0: u64, cr4: u64) -> kvm_sregs {
        kvm_sregs {
            cr0: 1 << 31 | 1 | cr0,
            cr3: 0x1000,
            cr4: 1 << 5 | cr4,
            efer: 1 << 10,
            ..Default::default()
        }
    }

    #[test]
    fn rights_are_those_of_the_supervisor() {
        let check = |bits: u64, cr0: u64, cr4: u64, read: bool, write: bool| {
            let memory = memory([bits; 4]);
            let sregs = sregs(cr0, cr4);
            let linear = Implicit::new(&memory, &sregs);
            let found = (
                linear.read_all(0x10_800, &mut [0; 8]),
                linear.write_all(0x10_800, &[1; 8]),
            );
            assert_eq!(found, (read, write), "{bits:#x} {cr0:#x} {cr4:#x}");
        };
        check(0, 0, 0, false, false);
        check(P, CR0_WP, 0, true, false);
        check(P, 0, 0, true, true);
        check(P | W, CR0_WP, 0, true, true);
        check(P | W | U, CR0_WP, 0, true, true);
        check(P | W | U, CR0_WP, CR4_SMAP, false, false);
        check(P | W, CR0_WP, CR4_SMAP, true, true);
    }

    #[test]
    fn a_write_across_pages_is_whole_or_nothing() {
        let memory = memory([P | W, P, P | W, P | W]);
        let sregs = sregs(CR0_WP, 0);
        let linear = Implicit::new(&memory, &sregs);
        assert!(
            !linear.write_all(0x10_ffc, &[7; 8]),
            "the second is read-only"
        );
        assert!(linear.write_all(0x12_ffc, &[7; 8]));
        assert!(
            !linear.write_all(0x13_ffc, &[7; 8]),
            "the next is not mapped"
        );
        assert!(!linear.write_all(0x15_000, &[7; 8]), "it leads to a hole");
        let byte = |at: u64| memory.read_obj::<u8>(GuestAddress(at)).unwrap();
        assert_eq!([byte(0x10_fff), byte(0x12_fff), byte(0x13_003)], [0, 7, 7]);
        assert_eq!(byte(0x13_fff), 0);
    }

    proptest! {
        #[test]
        fn no_tables_and_no_address_lead_outside(
            words in proptest::collection::vec(any::<u64>(), 512),
            cr3 in any::<u64>(),
            cr0 in any::<u64>(),
            cr4 in any::<u64>(),
            lma in any::<bool>(),
            linear in any::<u64>(),
            length in 0usize..10_000,
        ) {
            let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 16)]).unwrap();
            for (word, at) in words.iter().zip((0..).step_by(128)) {
                // Entries that stay in memory more often than chance would have it.
                memory.write_obj(word & 0xffff | P | W, GuestAddress(at)).unwrap();
            }
            let sregs = kvm_sregs {
                cr0,
                cr3: cr3 & 0x1_ffff,
                cr4,
                efer: u64::from(lma) << 10,
                ..Default::default()
            };
            let linear_memory = Implicit::new(&memory, &sregs);
            let mut bytes = vec![0; length];
            linear_memory.read_all(linear, &mut bytes);
            linear_memory.write_all(linear, &bytes);
        }
    }
}
