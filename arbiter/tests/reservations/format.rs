//! The words that the guest reads and writes, bit by bit.

use arbiter::{Access, Control, Cookie, Layer, Reason, Shared, abi};
use proptest::prelude::{ProptestConfig, any, proptest};

use super::fixture::{ACCESS, MANAGEMENT};
use super::play::{Op, Outcome, Script, Setup, World};

/// Bits of a control word that may be set, as the page lists them.
const MEANT: [u32; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 18, 19, 20, 24];

fn check_control(bits: u64) {
    let allowed = (0..64).all(|bit| bits >> bit & 1 == 0 || MEANT.contains(&bit));
    let word = Control::new(bits);
    assert_eq!(word.is_some(), allowed, "{bits:#x}");
    let Some(word) = word else { return };
    let bit = |bit: u32| bits >> bit & 1 == 1;
    assert_eq!(word.bits(), bits);
    let layers = [
        (Layer::Firmware, 0),
        (Layer::Hypervisor, 1),
        (Layer::HostTool, 1),
        (Layer::GuestKernel, 2),
        (Layer::GuestUser, 3),
    ];
    for (layer, code) in layers {
        assert_eq!(word.manages(layer), bit(code), "{bits:#x} {layer}");
        assert_eq!(word.accesses(layer), bit(4 + code), "{bits:#x} {layer}");
        for access in [Access::Read, Access::Write, Access::Rdpmc] {
            let at_cpl0 = layer == Layer::Firmware || layer == Layer::GuestKernel;
            let which = if access == Access::Rdpmc && at_cpl0 {
                9
            } else {
                8
            };
            let faults = word.faults(layer, access);
            assert_eq!(faults, bit(which), "{bits:#x} {layer} {access:?}");
        }
    }
    for (shared, number) in Shared::ALL.into_iter().zip(16..) {
        assert_eq!(word.reached_by(shared), bit(number), "{bits:#x} {shared:?}");
    }
    assert_eq!(word.lends(), bit(24));
    assert_eq!(word.with_lend(true).bits(), bits | 1 << 24);
    assert_eq!(word.with_lend(false).bits(), bits & !(1 << 24));
}

#[test]
fn a_control_word_has_the_bits_of_the_page() {
    check_control(0);
    check_control(u64::MAX);
    check_control(0x001f_00ff);
    assert_eq!(Control::INITIAL.bits(), 0x001f_00ff);
    for bit in 0..64 {
        check_control(1 << bit);
        check_control(0x001f_00ff ^ 1 << bit);
    }
    // Every word that there is.
    for choice in 0..1_u64 << MEANT.len() {
        let bits = MEANT.iter().enumerate();
        check_control(bits.map(|(from, to)| (choice >> from & 1) << to).sum());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_word_with_any_other_bit_is_refused(bits in any::<u64>()) {
        check_control(bits);
    }

    #[test]
    fn a_cookie_has_48_bits(register in any::<u64>(), a in any::<u64>(), flip in 0..48) {
        assert_eq!(Cookie::new(register).is_some(), register < 1 << 48);
        let a = a >> 16;
        let cookie = |bits| Cookie::new(bits).expect("48 bits");
        assert!(cookie(a).matches(cookie(a)));
        assert!(!cookie(a).matches(cookie(a ^ 1_u64 << flip)));
        assert_eq!(cookie(a).is_default(), a == 0);
        let random = Cookie::from_random(register);
        assert!(!random.is_default());
        let low = register & 0xffff_ffff_ffff;
        assert!(random.matches(cookie(low.max(1))));
    }
}

#[test]
fn no_random_bits_make_the_default_cookie() {
    for bits in [0, 1 << 48, 0xffff << 48] {
        assert!(!Cookie::from_random(bits).is_default(), "{bits:#x}");
    }
}

#[test]
fn every_reason_has_its_code_and_a_name_of_its_own() {
    let codes = [
        (Reason::NoneFree, 1),
        (Reason::Maximum, 2),
        (Reason::Minimum, 3),
        (Reason::Refused, 4),
        (Reason::NoAnswer, 5),
        (Reason::NoCounter, 6),
        (Reason::Held, 7),
        (Reason::Malformed, 8),
        (Reason::Master, 9),
        (Reason::Withdrawn, 10),
        (Reason::Priority, 11),
        (Reason::Expired, 12),
        (Reason::Cookie, 13),
        (Reason::Layer, 14),
        (Reason::Unreserved, 15),
        (Reason::Lent, 16),
        (Reason::Phase, 17),
        (Reason::Busy, 18),
        (Reason::Unbacked, 19),
        (Reason::Administrator, 20),
        (Reason::Budget, 21),
    ];
    assert_eq!(Reason::ALL.to_vec(), codes.map(|(reason, _)| reason));
    let mut names: Vec<_> = Reason::ALL.iter().map(|reason| reason.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), codes.len());
    for (reason, code) in codes {
        assert_eq!(reason.code(), code, "{reason}");
    }
}

/// One counter of 48 bits, leases for the firmware only, 10 ticks a millisecond.
fn leasing(lease_ms: Option<u32>) -> World {
    let mut setup: Setup = Script::new(&[], Default::default()).setup();
    setup.policy.firmware.lease_ms = lease_ms;
    setup.ticks_per_ms = 10;
    World::new(&setup)
}

fn write(world: &mut World, row: u32, value: u64, layer: Layer, presented: u64) {
    let step = world.step(&Op::Write {
        index: abi::MSR_BASE + row,
        value,
        layer,
        presented,
    });
    assert!(matches!(step.outcome, Outcome::Done(_)), "{step:?}");
}

struct Status {
    owner: Layer,
    private: bool,
    lease_ms: Option<u32>,
    waited: u64,
}

fn check_status(case: &Status, expected: u64) {
    let mut world = leasing(case.lease_ms);
    write(&mut world, 0, MANAGEMENT, case.owner, 0);
    if case.private {
        write(&mut world, 0x40, ACCESS, case.owner, MANAGEMENT);
    }
    // The guest's exit comes first and the tick later: a read may be overdue.
    world.now += case.waited;
    let step = world.step(&Op::Read {
        index: abi::MSR_BASE + 0x1c0,
        layer: Layer::GuestUser,
        presented: OTHER_COOKIE,
    });
    assert_eq!(step.outcome, Outcome::Value(expected));
}

/// A cookie beside a read of STATUS, which presents none whatever the register holds.
const OTHER_COOKIE: u64 = u64::MAX;

#[test]
fn status_tells_who_holds_the_counter_and_for_how_long() {
    let plain = |owner, private| Status {
        owner,
        private,
        lease_ms: None,
        waited: 12,
    };
    check_status(&plain(Layer::Firmware, false), 0b00_0001);
    check_status(&plain(Layer::Firmware, true), 0b01_0001);
    check_status(&plain(Layer::Hypervisor, false), 0b00_0011);
    check_status(&plain(Layer::HostTool, false), 0b00_0011);
    check_status(&plain(Layer::GuestKernel, true), 0b01_0101);
    let leased = |lease_ms, waited| Status {
        owner: Layer::Firmware,
        private: false,
        lease_ms: Some(lease_ms),
        waited,
    };
    let lease = 0b10_0001;
    check_status(&leased(5, 0), lease | 5 << 32);
    // Rounded up.
    check_status(&leased(5, 1), lease | 5 << 32);
    check_status(&leased(5, 10), lease | 4 << 32);
    check_status(&leased(5, 49), lease | 1 << 32);
    check_status(&leased(5, 50), lease);
    check_status(&leased(5, 5000), lease);
    check_status(&leased(u32::MAX, 0), lease | u64::from(u32::MAX) << 32);
    check_status(&leased(u32::MAX, 11), lease | u64::from(u32::MAX - 1) << 32);
    // A lease of another layer does not show in the kernel's STATUS.
    let kernel = Status {
        owner: Layer::GuestKernel,
        ..leased(5, 0)
    };
    check_status(&kernel, 0b00_0101);
}
