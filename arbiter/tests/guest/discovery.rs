//! What CPUID may say, and what discovery makes of it.

use arbiter::guest::{Discovery, DiscoveryError};
use arbiter::{CounterSet, abi};

/// CPUID of a machine with Umpire's block at `block`.
struct Cpuid {
    hypervisor: bool,
    block: u32,
    last: u32,
    parts: u32,
    version: u32,
    sizes: u32,
}

const GOOD: Cpuid = Cpuid {
    hypervisor: true,
    block: abi::CPUID_BLOCK,
    last: 2,
    parts: abi::CPUID_FEATURES_ECX_PCR | 1,
    version: abi::VERSION,
    sizes: 48 << 16 | 3 << 8 | 6,
};

fn word(bytes: &[u8; 4]) -> u32 {
    u32::from_le_bytes(*bytes)
}

fn check(cpuid: &Cpuid, expected: Result<Discovery, DiscoveryError>) {
    let found = Discovery::find(|leaf| match leaf {
        1 => [0, 0, u32::from(cpuid.hypervisor) << 31, 0],
        0x4000_0000 if cpuid.block != 0x4000_0000 => {
            [0x4000_0001, word(b"KVMK"), word(b"VMKV"), word(b"M\0\0\0")]
        }
        _ => match leaf.wrapping_sub(cpuid.block) {
            0 => {
                let last = cpuid.block + cpuid.last;
                [last, word(b"Umpi"), word(b"reUm"), word(b"pire")]
            }
            1 => [1, 0, cpuid.parts, 0],
            2 => [cpuid.version, 0x1234_0000, 0b1001, cpuid.sizes],
            _ => [0; 4],
        },
    });
    assert_eq!(found, expected);
}

const FOUND: Discovery = Discovery {
    base: 0x1234_0000,
    features: 0b1001,
    programmable: 6,
    fixed: 3,
};

#[test]
fn finds_what_there_is() {
    check(&GOOD, Ok(FOUND));
    for block in [0x4000_0000, 0x4000_0200, 0x4000_ff00] {
        check(&Cpuid { block, ..GOOD }, Ok(FOUND));
    }
    assert_eq!(FOUND.counters(), CounterSet::first(6, 3));
    assert_eq!(FOUND.msr(abi::MSR_CONTROL, 33), 0x1234_00a1);
    assert!(FOUND.has(abi::FEATURE_LEGACY_MAP) && !FOUND.has(abi::FEATURE_MAILBOX));
}

#[test]
fn sizes_that_no_machine_has_are_cut() {
    let expected = Discovery {
        programmable: 32,
        fixed: 30,
        ..FOUND
    };
    check(&Cpuid { sizes: !0, ..GOOD }, Ok(expected));
}

#[test]
fn says_what_is_missing() {
    let bare = Cpuid {
        hypervisor: false,
        ..GOOD
    };
    check(&bare, Err(DiscoveryError::NoHypervisor));
    for block in [0x4001_0000, 0x4000_0180] {
        check(&Cpuid { block, ..GOOD }, Err(DiscoveryError::NotUmpire));
    }
    let off = [Cpuid { last: 1, ..GOOD }, Cpuid { parts: 1, ..GOOD }];
    for cpuid in &off {
        check(cpuid, Err(DiscoveryError::NoReservations));
    }
    for version in [0, abi::VERSION + 1] {
        let expected = Err(DiscoveryError::Version(version));
        check(&Cpuid { version, ..GOOD }, expected);
    }
}
