//! Discovery: finding the reservations by CPUID.

use super::{DiscoveryError, PcrPort};
use crate::{CounterId, CounterSet, MAX_FIXED, MAX_PROGRAMMABLE, abi};

/// EBX, ECX and EDX of the first leaf of Umpire's block.
const SIGNATURE: [u32; 3] = [
    u32::from_le_bytes(*b"Umpi"),
    u32::from_le_bytes(*b"reUm"),
    u32::from_le_bytes(*b"pire"),
];
/// ECX of leaf 1: a hypervisor is present.
const HYPERVISOR: u32 = 1 << 31;

/// What CPUID says about the reservations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Discovery {
    /// The first MSR of their block.
    pub base: u32,
    /// The features that exist: the constants `FEATURE_*` of [`abi`].
    pub features: u32,
    /// Programmable counters that can be reserved, at most 32.
    pub programmable: u8,
    /// Fixed-function counters that can be reserved, at most 30.
    pub fixed: u8,
}

impl Discovery {
    /// Looks for the reservations. `cpuid` returns EAX, EBX, ECX and EDX of a leaf,
    /// with 0 in ECX.
    ///
    /// # Errors
    /// The machine has no reservations that this code knows.
    pub fn find(mut cpuid: impl FnMut(u32) -> [u32; 4]) -> Result<Self, DiscoveryError> {
        let [_, _, leaf_1_ecx, _] = cpuid(1);
        if leaf_1_ecx & HYPERVISOR == 0 {
            return Err(DiscoveryError::NoHypervisor);
        }
        // Every hypervisor interface has a block of 0x100 leaves.
        let mut blocks = (0x4000_0000..0x4001_0000).step_by(0x100);
        let block = blocks.find(|block| cpuid(*block)[1..] == SIGNATURE);
        let block = block.ok_or(DiscoveryError::NotUmpire)?;
        let mut leaf = |leaf: u32| cpuid(block + (leaf - abi::CPUID_BLOCK));
        let [last, ..] = leaf(abi::CPUID_BLOCK);
        let [_, _, parts, _] = leaf(abi::CPUID_FEATURES);
        if last < block + 2 || parts & abi::CPUID_FEATURES_ECX_PCR == 0 {
            return Err(DiscoveryError::NoReservations);
        }
        let [version, base, features, sizes] = leaf(abi::CPUID_LEAF);
        if version != abi::VERSION {
            return Err(DiscoveryError::Version(version));
        }
        let [programmable, fixed, ..] = sizes.to_le_bytes();
        Ok(Discovery {
            base,
            features,
            programmable: programmable.min(MAX_PROGRAMMABLE),
            fixed: fixed.min(MAX_FIXED),
        })
    }

    /// Whether the machine has `feature`, one of the constants `FEATURE_*`.
    pub const fn has(&self, feature: u32) -> bool {
        self.features & feature != 0
    }

    /// The counters that can be reserved.
    pub fn counters(&self) -> CounterSet {
        let counters = CounterSet::first(self.programmable, self.fixed);
        if self.has(abi::FEATURE_IBS) {
            counters | CounterSet::SAMPLERS
        } else {
            counters
        }
    }

    /// The position of the counter that legacy registers reach on `cpu` by the name
    /// `counter`. `None` means that they reach none.
    ///
    /// Fixed-function counters and samplers keep their positions, even without a name,
    /// because their names never stand for another counter.
    pub fn position(&self, port: &mut impl PcrPort, cpu: u32, counter: CounterId) -> Option<u32> {
        let own = counter.global_bit()?;
        let keeps_its_own = !matches!(counter, CounterId::Programmable(_));
        if !self.has(abi::FEATURE_LEGACY_MAP) || keeps_its_own {
            return Some(own);
        }
        let behind = port.rdmsr(cpu, self.msr(abi::MSR_LEGACY_MAP, own)).ok()?;
        u32::try_from(behind).ok()
    }

    /// The MSR of row `row`, one of the constants `MSR_*`, at `position`.
    pub const fn msr(&self, row: u32, position: u32) -> u32 {
        self.base.wrapping_add(row).wrapping_add(position)
    }
}
