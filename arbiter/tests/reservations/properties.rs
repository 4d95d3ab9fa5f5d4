//! What holds after every operation of every sequence, told without the model.

use crate::bed::{Seen, cookie, look, sets_agree};
use crate::play::{Op, Outcome, Palette, Script, Setup, World};
use arbiter::{Access, Cookie, CounterId, Event, Layer, PerKind, Policy, Record, Verdict, abi};
use proptest::prelude::{ProptestConfig, any, prop, proptest};

/// Every cookie that can be set.
fn cookies() -> Vec<u64> {
    let Palette { secrets, guess } = Palette::default();
    [&[0, guess][..], &secrets].concat()
}

fn view(world: &World) -> Vec<(CounterId, Option<Seen>)> {
    let bank = world.unit.bank();
    let counters = bank.counters().iter();
    counters
        .map(|counter| (counter, look(bank, counter, &cookies())))
        .collect()
}

/// Plays a sequence and looks at the state before and after each operation.
fn each_step(
    bytes: &[u8],
    mut look: impl FnMut(&Setup, &Op, (&World, &World), (Outcome, &[Record])),
) {
    let mut script = Script::new(bytes, Palette::default());
    let setup = script.setup();
    let mut world = World::new(&setup);
    // Units cannot be copied: the same operations lead another one there.
    let mut behind = World::new(&setup);
    for op in script {
        let step = world.step(&op);
        look(
            &setup,
            &op,
            (&behind, &world),
            (step.outcome, &step.records),
        );
        behind.step(&op);
    }
}

/// The cookie that an operation presents, if it can change a reservation.
fn presented(op: &Op) -> Option<(CounterId, Cookie)> {
    let Op::Write {
        index, presented, ..
    } = op
    else {
        return None;
    };
    let offset = index - abi::MSR_BASE;
    let position = u8::try_from(offset % 0x40).ok()?;
    let counter = CounterId::at_position(position).filter(|_| offset < 0x100)?;
    Some((counter, Cookie::new(*presented)?))
}

fn is_ownership(event: &Event) -> bool {
    matches!(
        event,
        Event::Reserved { .. } | Event::HandedOver { .. } | Event::Released | Event::Revoked(_)
    )
}

fn numbers(setup: &Setup, layer: Layer) -> Option<(PerKind, PerKind)> {
    let share = setup.policy.share(layer)?;
    Some((share.min, share.max))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    /// "No sequence of operations without the management cookie changes a
    /// reservation, except the arbiter's own audited decisions."
    #[test]
    fn without_the_management_cookie_nothing_changes(
        bytes in prop::collection::vec(any::<u8>(), 0..900)
    ) {
        each_step(&bytes, |_, op, (before, after), (_, records)| {
            if matches!(op, Op::Reset) {
                return;
            }
            for ((counter, was), (_, is)) in view(before).into_iter().zip(view(after)) {
                if was == is {
                    continue;
                }
                let revoked = records.iter().any(|record| {
                    record.counter == Some(counter) && matches!(record.event, Event::Revoked(_))
                });
                let held = before.unit.bank().reservation(counter);
                let shown = presented(op).filter(|(named, _)| *named == counter);
                let managed = shown.is_some_and(|(_, cookie)| match held {
                    Some(held) => held.is_management(cookie),
                    None => cookie.is_default(),
                });
                assert!(revoked != managed, "{op:?}: {was:?} became {is:?}, {records:?}");
                assert!(!revoked || is.is_none(), "{op:?}: {is:?}");
            }
        });
    }

    /// Each counter that has another owner than before is told of once, and
    /// nothing is told of one that has not.
    #[test]
    fn a_change_of_owner_has_one_record(
        bytes in prop::collection::vec(any::<u8>(), 0..900)
    ) {
        each_step(&bytes, |_, op, (before, after), (_, records)| {
            if matches!(op, Op::Reset) {
                return;
            }
            for ((counter, was), (_, is)) in view(before).into_iter().zip(view(after)) {
                let told: Vec<_> = records
                    .iter()
                    .filter(|record| record.counter == Some(counter))
                    .filter(|record| is_ownership(&record.event))
                    .collect();
                let key = |seen: Option<Seen>| seen.map(|seen| (seen.owner, seen.management));
                assert_eq!(told.len(), usize::from(key(was) != key(is)), "{op:?}: {records:?}");
                let Some(record) = told.first() else { continue };
                match record.event {
                    Event::Reserved { .. } => {
                        assert!(was.is_none());
                        assert_eq!(is.map(|is| is.owner), Some(record.layer));
                    }
                    Event::HandedOver { from } => {
                        assert_eq!(was.map(|was| was.owner), Some(from));
                        assert_eq!(is.map(|is| is.owner), Some(record.layer));
                    }
                    Event::Revoked(_) => assert_eq!(was.map(|was| was.owner), Some(record.layer)),
                    _ => assert!(is.is_none()),
                }
            }
        });
    }

    /// Refusals, drops and faults leave everything as it was, and yield nothing.
    #[test]
    fn what_is_denied_changes_nothing(
        bytes in prop::collection::vec(any::<u8>(), 0..900)
    ) {
        each_step(&bytes, |_, op, (before, after), (outcome, records)| {
            let denied = matches!(
                outcome,
                Outcome::Fault | Outcome::Checked(Verdict::Fault | Verdict::Drop { .. })
            );
            if !denied {
                return;
            }
            assert_eq!(view(before), view(after), "{op:?}");
            assert_eq!(before.unit.deadline(), after.unit.deadline(), "{op:?}");
            assert_eq!(before.phase.is_over(), after.phase.is_over(), "{op:?}");
            assert!(!records.iter().any(|record| is_ownership(&record.event)), "{op:?}");
            if let (Op::Access { position, .. }, Outcome::Checked(Verdict::Drop { read_as })) =
                (op, outcome)
            {
                let counter = CounterId::at_position(*position).expect("a counter");
                let held = before.unit.bank().reservation(counter);
                assert_eq!(read_as, held.map_or(0, |held| held.drop_value), "{op:?}");
                assert!((1..=2).contains(&records.len()), "{op:?}: {records:?}");
            }
        });
    }

    /// No layer has more than its maximum, and none is kept from its minimum.
    #[test]
    fn quotas_hold(bytes in prop::collection::vec(any::<u8>(), 0..900)) {
        each_step(&bytes, |setup, op, (_, after), _| {
            let bank = after.unit.bank();
            sets_agree(bank);
            let fits = setup.policy.fits(setup.counters.programmable, setup.counters.fixed);
            let free = PerKind::count(bank.free());
            for counter in [CounterId::Programmable(0), CounterId::Fixed(0)] {
                let mut owed = 0;
                for layer in Policy::LAYERS {
                    let held = PerKind::count(bank.held_by(layer)).of(counter);
                    let (min, max) = numbers(setup, layer).expect("a layer that can hold");
                    assert!(held <= max.of(counter), "{op:?}: {layer} has {held}");
                    owed += min.of(counter).saturating_sub(held);
                }
                let kept = owed <= free.of(counter);
                assert!(kept || fits.is_err(), "{op:?}: {owed} owed of {free:?}");
            }
            assert!(bank.held_by(Layer::GuestUser).is_empty(), "{op:?}");
        });
    }

    /// A counter that was given back, or taken away, is as if nobody had ever
    /// held it; and what nobody holds is open to everybody who presents nothing.
    #[test]
    fn what_nobody_holds_is_pristine(bytes in prop::collection::vec(any::<u8>(), 0..900)) {
        each_step(&bytes, |_, op, (before, after), (outcome, _)| {
            let bank = after.unit.bank();
            let lost = before.unit.bank().held() & bank.free();
            if !lost.is_empty() && !matches!(op, Op::Reset) {
                let Outcome::Done(effects) = outcome else {
                    panic!("{op:?} takes a counter away and is {outcome:?}");
                };
                assert_eq!(effects.cleared, lost, "{op:?}");
            }
            for counter in bank.free().iter() {
                for layer in Layer::ALL {
                    for access in [Access::Read, Access::Write, Access::Rdpmc] {
                        let check = |bits| bank.check(layer, cookie(bits), counter, access);
                        assert_eq!(check(0), Verdict::Permit, "{op:?}: {layer} {counter}");
                        for bits in &cookies()[1..] {
                            assert_eq!(check(*bits), Verdict::Drop { read_as: 0 }, "{op:?}");
                        }
                    }
                }
            }
        });
    }

    /// A tick at the deadline ends something, and the next deadline is later.
    #[test]
    fn a_deadline_makes_progress(bytes in prop::collection::vec(any::<u8>(), 0..900)) {
        let mut script = Script::new(&bytes, Palette::default());
        let mut world = World::new(&script.setup());
        for op in script {
            world.step(&op);
        }
        world.step(&Op::Wait { ticks: 0 });
        let mut ticks = 0;
        while let Some(deadline) = world.unit.deadline() {
            assert!(deadline > world.now);
            let early = world.step(&Op::Wait { ticks: deadline - world.now - 1 });
            assert_eq!(early.records, []);
            let held = world.unit.bank().held().len();
            let step = world.step(&Op::Wait { ticks: 1 });
            assert!(!step.records.is_empty());
            assert!(world.unit.bank().held().len() < held);
            ticks += 1;
            assert!(ticks <= 8, "no more often than there are counters");
        }
        let leases = view(&world).into_iter().filter_map(|(_, seen)| seen?.lease);
        assert_eq!(leases.count(), 0);
    }
}
