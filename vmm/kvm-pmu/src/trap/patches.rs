//! Which handlers of one VM are patched, for how many vCPUs. Plain data: whoever
//! changes it writes the bytes.

use super::displaced::{Displaced, OUT};
use super::paging::page_of;
use crate::error::VcpuId;

/// Handlers that are patched at a time. Kernels have one for all vCPUs.
const MOST: usize = 8;

/// One patched handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Patch {
    /// Guest-physical address of its first byte.
    pub(crate) at: u64,
    /// What stood there.
    pub(crate) displaced: Displaced,
    /// vCPUs that have it for their #GP handler.
    users: Vec<VcpuId>,
}

impl Patch {
    pub(crate) fn page(&self) -> u64 {
        page_of(self.at)
    }

    pub(crate) fn is_unused(&self) -> bool {
        self.users.is_empty()
    }
}

/// All of a VM.
#[derive(Debug, Default)]
pub(crate) struct Patches {
    patches: Vec<Patch>,
}

impl Patches {
    /// `vcpu` has the handler at `at`; false if it is not patched.
    pub(crate) fn join(&mut self, at: u64, vcpu: VcpuId) -> bool {
        let Some(patch) = self.patches.iter_mut().find(|patch| patch.at == at) else {
            return false;
        };
        if !patch.users.contains(&vcpu) {
            patch.users.push(vcpu);
        }
        true
    }

    /// Another handler, which `vcpu` has.
    pub(crate) fn add(&mut self, at: u64, displaced: Displaced, vcpu: VcpuId) {
        self.patches.push(Patch {
            at,
            displaced,
            users: vec![vcpu],
        });
    }

    /// Whether there is room for another one.
    pub(crate) fn is_full(&self) -> bool {
        self.patches.len() >= MOST
    }

    /// `vcpu` has no handler, or only the one at `but`. Says whether a patch is left
    /// that no vCPU has, to be taken.
    pub(crate) fn leave(&mut self, vcpu: VcpuId, but: Option<u64>) -> bool {
        for patch in &mut self.patches {
            if Some(patch.at) != but {
                patch.users.retain(|user| *user != vcpu);
            }
        }
        self.patches.iter().any(Patch::is_unused)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.patches.is_empty()
    }

    /// Whether the handler at `at` is patched.
    pub(crate) fn has(&self, at: u64) -> bool {
        self.patches.iter().any(|patch| patch.at == at)
    }

    /// Those that `wanted` picks, which are patches no more.
    pub(crate) fn take(&mut self, wanted: impl Fn(&Patch) -> bool) -> Vec<Patch> {
        self.patches.extract_if(.., |patch| wanted(patch)).collect()
    }

    /// Whether one lies on `page`, which is read-only then.
    pub(crate) fn on_page(&self, page: u64) -> bool {
        self.patches.iter().any(|patch| patch.page() == page)
    }

    /// Has `buffer`, which was read from `address`, show what the guest wrote.
    pub(crate) fn hide(&self, address: u64, buffer: &mut [u8]) {
        for patch in &self.patches {
            let offset = patch.at.wrapping_sub(address);
            let byte = usize::try_from(offset).ok();
            if let Some(byte) = byte.and_then(|offset| buffer.get_mut(offset))
                && *byte == OUT
            {
                *byte = patch.displaced.first;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::trap::paging::PAGE;

    fn endbr() -> Displaced {
        Displaced::of([0xf3, 0x0f, 0x1e, 0xfa]).unwrap()
    }

    #[test]
    fn the_last_vcpu_takes_the_patch_with_it() {
        let mut patches = Patches::default();
        assert!(!patches.join(0x1010, VcpuId(0)));
        patches.add(0x1010, endbr(), VcpuId(0));
        // Twice is once.
        for _ in 0..2 {
            assert!(patches.join(0x1010, VcpuId(1)));
        }
        assert!(patches.on_page(0x1000) && !patches.on_page(0x2000));
        assert!(!patches.leave(VcpuId(1), Some(0x1010)));
        assert!(!patches.leave(VcpuId(1), None));
        assert!(patches.leave(VcpuId(0), Some(0x2010)));
        assert_eq!(patches.take(Patch::is_unused).len(), 1);
        assert!(patches.is_empty() && !patches.on_page(0x1000));
    }

    #[test]
    fn eight_at_most() {
        let mut patches = Patches::default();
        for at in 0..8 {
            assert!(!patches.is_full());
            patches.add(at * PAGE, endbr(), VcpuId(0));
        }
        assert!(patches.is_full());
        assert_eq!(patches.take(|patch| patch.page() == PAGE).len(), 1);
        assert!(!patches.is_full());
    }

    proptest! {
        /// A reader sees the guest's own bytes, wherever it begins.
        #[test]
        fn readers_see_the_original(at in 0u64..64, from in 0u64..64, len in 0usize..64) {
            let mut patches = Patches::default();
            patches.add(at, endbr(), VcpuId(0));
            let byte = |address| if address == at { OUT } else { 0x90 };
            let mut buffer: Vec<u8> = (from..).take(len).map(byte).collect();
            patches.hide(from, &mut buffer);
            for (address, seen) in (from..).zip(buffer) {
                prop_assert_eq!(seen, if address == at { 0xf3 } else { 0x90 });
            }
        }
    }
}
