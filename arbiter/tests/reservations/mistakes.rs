//! What a guest can do wrong, what it gets, and what is recorded: the unit as a
//! whole, register by register.

use arbiter::{CounterId, Event, Layer, PerKind, Reason, abi};

use super::fixture::{ACCESS, MANAGEMENT, OTHER};
use super::play::{Op, Outcome, Palette, Script, Setup, World};

const MANAGE: u32 = 0x000;
const KEY: u32 = 0x040;
const CONTROL: u32 = 0x080;
const DROP: u32 = 0x0c0;
const PHASE: u32 = 0x241;

/// 48 bits wide programmable counters, 40 bits wide fixed-function counters, two
/// of each, no limits, and a guard that lets much through.
fn setup() -> Setup {
    let mut setup = Script::new(&[], Palette::default()).setup();
    setup.counters = PerKind {
        programmable: 2,
        fixed: 2,
    };
    let free = arbiter::Share::FREE;
    (
        setup.policy.firmware,
        setup.policy.hypervisor,
        setup.policy.kernel,
    ) = (free, free, free);
    setup.guard.burst = 100;
    setup
}

/// A write of `value` with `presented` to the register at `offset`.
#[derive(Clone, Copy, Debug)]
struct Write {
    offset: u32,
    value: u64,
    presented: u64,
    layer: Layer,
}

const fn write(offset: u32, value: u64, presented: u64) -> Write {
    Write {
        offset,
        value,
        presented,
        layer: Layer::GuestKernel,
    }
}

impl Write {
    const fn by(self, layer: Layer) -> Write {
        Write { layer, ..self }
    }
}

fn play(world: &mut World, write: Write) -> (Outcome, Vec<arbiter::Record>) {
    let step = world.step(&Op::Write {
        index: abi::MSR_BASE + write.offset,
        value: write.value,
        layer: write.layer,
        presented: write.presented,
    });
    (step.outcome, step.records)
}

/// PMC0 is the kernel's, with an access cookie; all else is free.
fn reserved() -> World {
    let mut world = World::new(&setup());
    for step in [write(MANAGE, MANAGEMENT, 0), write(KEY, ACCESS, MANAGEMENT)] {
        assert!(matches!(play(&mut world, step).0, Outcome::Done(_)));
    }
    world
}

/// A #GP, one record with the reason, and nothing has changed.
fn check(last: Write, reason: Reason, guesses: u64) {
    let mut world = reserved();
    let before = format!("{:?}", world.unit.bank());
    let (outcome, records) = play(&mut world, last);
    assert_eq!(outcome, Outcome::Fault, "{last:?}");
    let [record] = records[..] else {
        panic!("{last:?}: {records:?}");
    };
    assert_eq!(record.event, Event::Refused(reason), "{last:?}");
    assert_eq!(record.layer, last.layer, "{last:?}");
    let position = u8::try_from(last.offset % 0x40).expect("below 64");
    let there = last.offset < 0x100 && position % 32 < 2;
    let counter = CounterId::at_position(position).filter(|_| there);
    assert_eq!(record.counter, counter, "{last:?}");
    assert_eq!(format!("{:?}", world.unit.bank()), before, "{last:?}");
    assert_eq!(world.unit.wrong_cookies(), guesses, "{last:?}");
}

#[test]
fn every_mistake_is_a_gp_with_a_reason() {
    const WIDE: u64 = 1 << 48;
    let rows: &[(Write, Reason, u64)] = &[
        // Reserving what is reserved, without and with another cookie.
        (write(MANAGE, OTHER, 0), Reason::Cookie, 0),
        (write(MANAGE, OTHER, OTHER), Reason::Cookie, 1),
        (write(MANAGE, MANAGEMENT, OTHER), Reason::Cookie, 1),
        // The access cookie is not the management cookie.
        (write(MANAGE, 0, ACCESS), Reason::Cookie, 1),
        (write(KEY, 0, ACCESS), Reason::Cookie, 1),
        (write(CONTROL, 0, 0), Reason::Cookie, 0),
        (write(DROP, 0, OTHER), Reason::Cookie, 1),
        // Releasing what is not reserved, and what is another's.
        (write(MANAGE + 1, 0, MANAGEMENT), Reason::Unreserved, 0),
        (write(MANAGE, 0, 0), Reason::Cookie, 0),
        // Setting one thing of an unreserved counter.
        (write(KEY + 1, ACCESS, 0), Reason::Unreserved, 0),
        (write(KEY + 1, 0, 0), Reason::Unreserved, 0),
        (write(CONTROL + 33, 0x001f_00ff, 0), Reason::Unreserved, 0),
        (write(DROP + 33, 1, 0), Reason::Unreserved, 0),
        (write(DROP + 33, 1, OTHER), Reason::Unreserved, 0),
        // More than 48 bits, written and presented; one is no guess.
        (write(MANAGE + 1, WIDE, 0), Reason::Malformed, 0),
        (
            write(MANAGE, WIDE | MANAGEMENT, MANAGEMENT),
            Reason::Malformed,
            0,
        ),
        (write(MANAGE, 0, WIDE | MANAGEMENT), Reason::Malformed, 0),
        (write(MANAGE + 1, OTHER, 1 << 63), Reason::Malformed, 0),
        (write(KEY, u64::MAX, MANAGEMENT), Reason::Malformed, 0),
        // Control bits that must be 0; values wider than the counter.
        (write(CONTROL, 1 << 21, MANAGEMENT), Reason::Malformed, 0),
        (write(CONTROL, 1 << 10, MANAGEMENT), Reason::Malformed, 0),
        (write(CONTROL, 1 << 63, MANAGEMENT), Reason::Malformed, 0),
        (write(DROP, 1 << 48, MANAGEMENT), Reason::Malformed, 0),
        (write(DROP + 32, 1 << 40, 0), Reason::Malformed, 0),
        // Counters that there are not.
        (write(MANAGE + 2, OTHER, 0), Reason::NoCounter, 0),
        (write(MANAGE + 31, OTHER, 0), Reason::NoCounter, 0),
        (write(MANAGE + 34, 0, 0), Reason::NoCounter, 0),
        (write(KEY + 63, ACCESS, OTHER), Reason::NoCounter, 0),
        // Nobody at CPL 3 can hold one, whatever brought such a write about.
        (
            write(MANAGE + 1, OTHER, 0).by(Layer::GuestUser),
            Reason::Layer,
            0,
        ),
        (
            write(MANAGE, OTHER, MANAGEMENT).by(Layer::GuestUser),
            Reason::Layer,
            0,
        ),
        // The phase.
        (write(PHASE, 0, 0), Reason::Malformed, 0),
        (write(PHASE, 2, 0), Reason::Malformed, 0),
        (write(PHASE, 1 << 32 | 1, 0), Reason::Malformed, 0),
    ];
    for (write, reason, guesses) in rows {
        check(*write, *reason, *guesses);
    }
}

#[test]
fn what_fits_exactly_is_taken() {
    let mut world = reserved();
    let widest = [
        write(DROP, (1 << 48) - 1, MANAGEMENT),
        write(MANAGE + 32, 0xffff_ffff_ffff, 0),
        write(DROP + 32, (1 << 40) - 1, 0xffff_ffff_ffff),
        write(KEY + 32, 0xffff_ffff_ffff, 0xffff_ffff_ffff),
        write(CONTROL + 32, 0x011f_03ff, 0xffff_ffff_ffff),
    ];
    for step in widest {
        let (outcome, records) = play(&mut world, step);
        assert!(matches!(outcome, Outcome::Done(_)), "{step:?}: {records:?}");
        assert_eq!(records.len(), 1, "{step:?}");
    }
}

#[test]
fn the_firmwares_phase_ends_once() {
    let mut world = World::new(&setup());
    let end = write(PHASE, 1, u64::MAX).by(Layer::Firmware);
    let (outcome, records) = play(&mut world, end);
    assert!(matches!(outcome, Outcome::Done(effects) if effects.is_empty()));
    let [record] = records[..] else {
        panic!("{records:?}")
    };
    assert_eq!(
        (record.event, record.counter, record.layer),
        (Event::PhaseEnded, None, Layer::Firmware)
    );
    assert!(world.phase.is_over());
    for layer in [Layer::Firmware, Layer::GuestKernel] {
        let (outcome, records) = play(&mut world, end.by(layer));
        assert_eq!(outcome, Outcome::Fault);
        assert_eq!(records[0].event, Event::Refused(Reason::Phase));
    }
    world.step(&Op::Reset);
    assert!(!world.phase.is_over());
    assert!(matches!(play(&mut world, end).0, Outcome::Done(_)));
}

#[test]
fn a_phase_is_of_its_machine() {
    use arbiter::Phase;
    for (has_firmware, smm, cpl0, over, expected) in [
        (true, false, true, false, Layer::Firmware),
        (true, false, false, false, Layer::GuestUser),
        (true, true, true, false, Layer::Firmware),
        (true, false, true, true, Layer::GuestKernel),
        (true, true, true, true, Layer::Firmware),
        (true, true, false, true, Layer::GuestUser),
        (true, false, false, true, Layer::GuestUser),
        (false, false, true, true, Layer::GuestKernel),
        (false, true, true, true, Layer::Firmware),
        (false, false, false, true, Layer::GuestUser),
    ] {
        let phase = Phase::new(has_firmware);
        assert_eq!(phase.has_firmware(), has_firmware);
        assert_eq!(phase.is_over(), !has_firmware);
        if over {
            assert_eq!(phase.end(), has_firmware, "it ends once");
            assert!(!phase.end());
        }
        assert_eq!(phase.layer(cpl0, smm), expected);
        phase.restart();
        assert_eq!(phase.is_over(), !has_firmware);
    }
}

/// What the firmware writes to `PHASE` to have code put into SMRAM, and what comes of it.
#[test]
fn the_end_of_the_phase_names_the_code_for_smm() {
    use arbiter::{Caller, Context, NoAudit, NoEntropy, PcrRegister, PcrUnit, Phase, SmramSource};
    fn check((has_firmware, smm): (bool, bool), value: u64, expected: Option<Option<(u64, u64)>>) {
        let phase = std::sync::Arc::new(Phase::new(has_firmware));
        let mut unit = PcrUnit::new(arbiter::PcrConfig {
            counters: PerKind {
                programmable: 1,
                fixed: 0,
            },
            widths: PerKind {
                programmable: 48,
                fixed: 48,
            },
            policy: Default::default(),
            scheme: Default::default(),
            guard: arbiter::GuardLimits::with_ticks_per_ms(1),
            ticks_per_ms: 1,
            phase: phase.clone(),
            legacy: None,
            smm,
        });
        let announced = unit.features() & abi::FEATURE_SMRAM != 0;
        assert_eq!(announced, has_firmware && smm);
        let mut cx = Context {
            now: arbiter::Tsc(0),
            entropy: &mut NoEntropy,
            audit: &mut NoAudit,
        };
        let caller = Caller::legacy(Layer::Firmware);
        let written = unit.write(PcrRegister::Phase, value, caller, &mut cx);
        let what = format!("{value:#x}, firmware {has_firmware}, SMM {smm}");
        assert_eq!(written.is_some(), expected.is_some(), "{what}");
        if has_firmware {
            assert_eq!(phase.is_over(), expected.is_some(), "{what}");
        }
        let source = expected.flatten();
        let source = source.map(|(address, len)| SmramSource { address, len });
        assert_eq!(unit.take_smram(), source, "{what}");
        assert_eq!(unit.take_smram(), None, "it is told once");
        assert!(!phase.is_in_smm(), "{what}: nobody has put it there yet");
        unit.smram_filled();
        assert!(phase.is_in_smm());
    }
    let both = (true, true);
    check(both, 1, Some(None));
    check(both, 0x8_3023, Some(Some((0x8_3000, 0x2000))));
    check(both, 0x13, Some(Some((0, 0x1000))));
    check(both, 0xffff_ffff_ffff_f083, Some(Some((!0xfff, 0x8000))));
    // No pages, too many, unknown bits, not the end of the phase.
    for wrong in [0x3, 0x93, 0xff3, 0x103, 0x17, 0x1b, 0x12, 0x2, 0x11, 0x1001] {
        check(both, wrong, None);
    }
    check((true, false), 1, Some(None));
    check((true, false), 0x13, None);
    check((false, true), 0x13, None);
}

/// A guest of two vCPUs ends the phase on one. The names on the other follow what
/// is held then, not what is held at the next look.
#[test]
fn names_are_those_of_the_moment_at_which_the_phase_ended() {
    let mut setup = setup();
    setup.legacy = Some(PerKind {
        programmable: 1,
        fixed: 0,
    });
    let mut world = World::new(&setup);
    play(&mut world, write(MANAGE, MANAGEMENT, 0).by(Layer::Firmware));
    world.step(&Op::EndPhase);
    // A kernel that knows the cookie gives the counter back.
    let (outcome, _) = play(&mut world, write(MANAGE, 0, MANAGEMENT));
    assert!(matches!(outcome, Outcome::Done(_)));
    let names = world.step(&Op::Names { bits: 1 });
    assert_eq!(names.outcome, Outcome::Names(2, 1));
}

/// Another layer that renews a lease gives it no other length.
#[test]
fn a_lease_stays_its_owners() {
    let mut setup = setup();
    setup.policy.firmware.lease_ms = Some(5);
    setup.ticks_per_ms = 10;
    let mut world = World::new(&setup);
    play(&mut world, write(MANAGE, MANAGEMENT, 0).by(Layer::Firmware));
    assert_eq!(world.deadline(), Some(world.now + 50));
    world.step(&Op::Wait { ticks: 49 });
    play(&mut world, write(MANAGE, MANAGEMENT, MANAGEMENT));
    assert_eq!(world.deadline(), Some(world.now + 50));
    let expired = world.step(&Op::Wait { ticks: 50 });
    assert_eq!(expired.records[0].event, Event::Revoked(Reason::Expired));
    assert_eq!(expired.records[0].layer, Layer::Firmware);
    assert_eq!(world.deadline(), None);
    // One that is handed over is the new owner's, who has no leases.
    play(&mut world, write(MANAGE, MANAGEMENT, 0).by(Layer::Firmware));
    play(&mut world, write(MANAGE, OTHER, MANAGEMENT));
    assert_eq!(world.deadline(), None);
}

/// The goal is 4 KiB for each vCPU. A unit has one allocation of its own: a slot
/// for each counter.
#[test]
fn a_unit_is_small() {
    let slot = size_of::<Option<arbiter::Reservation>>();
    let unit = size_of::<arbiter::PcrUnit>();
    let size = |counters: usize| unit + counters * slot;
    println!("unit {unit} bytes, {slot} for each counter");
    assert!(size(8 + 4) <= 4096, "{} bytes", size(12));
}

/// Notices have sixteen places. The oldest go first, and the next one that is
/// read says so.
#[test]
fn notices_that_nobody_reads_are_lost_and_told_of() {
    let mut setup = setup();
    setup.policy.firmware.lease_ms = Some(1);
    for expiries in [1_u64, 16, 17, 40] {
        let mut world = World::new(&setup);
        for n in 0..expiries {
            // By turns, so that it shows which ones are left.
            let offset = u32::from(n >= 16);
            let reserve = write(MANAGE + offset, MANAGEMENT, 0);
            play(&mut world, reserve.by(Layer::Firmware));
            world.step(&Op::Wait { ticks: 1000 });
        }
        let mut notices = Vec::new();
        let read = Op::Read {
            index: abi::MSR_BASE + abi::MSR_NOTICE,
            layer: Layer::Firmware,
            presented: 0,
        };
        while let Outcome::Value(word @ 1..) = world.step(&read).outcome {
            notices.push(word);
        }
        // Expired, its position, the firmware itself, the reason.
        let word = |n: u64| 4 | u64::from(n >= 16) << 8 | 12 << 24;
        let first = expiries.saturating_sub(16);
        let mut expected: Vec<u64> = (first..expiries).map(word).collect();
        expected[0] |= if expiries > 16 { 0x80 } else { 0 };
        assert_eq!(notices, expected, "{expiries}");
    }
}
