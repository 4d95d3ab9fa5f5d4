//! What holds after every operation of every sequence, told without the model.

use crate::bed::{Seen, cookie, look, sets_agree};
use crate::play::{Op, Outcome, Palette, Script, Setup, World, invariants_hold, settle};
use arbiter::Outcome::Pending;
use arbiter::{Access, Cookie, CounterId, Event, Layer, Record, Reservation, Scheme, Verdict, abi};
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

/// Whether whoever performs an operation proves to be entitled to change a
/// reservation, or takes what nobody holds.
fn is_entitled(op: &Op, counter: CounterId, held: Option<&Reservation>) -> bool {
    let shows = |register: u64| match (Cookie::new(register), held) {
        (Some(cookie), Some(held)) => held.is_management(cookie),
        (Some(_), None) => true,
        (None, _) => false,
    };
    match op {
        Op::Write {
            index, presented, ..
        } => match index - abi::MSR_BASE {
            // Nobody has a management cookie of what nobody holds.
            offset @ 0..0x100 => {
                let position = u8::try_from(offset % 0x40).ok();
                let is_it = position.and_then(CounterId::at_position) == Some(counter);
                is_it && shows(*presented) && (held.is_some() || *presented == 0)
            }
            abi::MSR_REQUEST => shows(*presented),
            _ => false,
        },
        // The hypervisor needs no cookie for what nobody holds.
        Op::SetAside { .. } => held.is_none(),
        _ => false,
    }
}

/// Whether a layer waits for others, before or after an operation: it then holds
/// what it has come by so far, without a record.
fn waits(worlds: (&World, &World), layer: Option<Layer>) -> bool {
    let pending = |world: &World, layer| world.unit.answer(layer).outcome == Pending;
    layer.is_some_and(|layer| pending(worlds.0, layer) || pending(worlds.1, layer))
}

fn is_ownership(event: &Event) -> bool {
    matches!(
        event,
        Event::Reserved { .. } | Event::HandedOver { .. } | Event::Released | Event::Revoked(_)
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    /// "No sequence of operations without the management cookie changes a
    /// reservation, except the arbiter's own audited decisions."
    #[test]
    fn without_the_management_cookie_nothing_changes(
        bytes in prop::collection::vec(any::<u8>(), 0..900)
    ) {
        each_step(&bytes, |setup, op, (before, after), (_, records)| {
            if matches!(op, Op::Reset) {
                return;
            }
            for ((counter, was), (_, is)) in view(before).into_iter().zip(view(after)) {
                if was == is {
                    continue;
                }
                let told = |which: fn(&Event) -> bool| {
                    let records = records.iter();
                    let mut about = records.filter(|record| record.counter == Some(counter));
                    about.any(|record| which(&record.event))
                };
                let revoked = told(|event| matches!(event, Event::Revoked(_)));
                let held = before.unit.bank().reservation(counter);
                let entitled = is_entitled(op, counter, held);
                match setup.scheme {
                    Scheme::Independent => {
                        assert!(revoked != entitled, "{op:?}: {was:?} became {is:?}, {records:?}");
                        assert!(!revoked || is.is_none(), "{op:?}: {is:?}");
                    }
                    Scheme::Interacting | Scheme::SingleMaster => {
                        let owner = was.or(is).map(|seen| seen.owner);
                        let yielded = told(|event| matches!(event, Event::Released));
                        let shown = match op {
                            Op::Write { presented, .. } => was.is_some_and(|was| was.access == *presented),
                            _ => false,
                        };
                        assert!(
                            revoked
                                || entitled
                                || yielded
                                || waits((before, after), owner)
                                || waits((before, after), is.map(|is| is.owner))
                                || (setup.scheme == Scheme::SingleMaster && shown)
                                || was.is_none() && told(is_ownership),
                            "{op:?}: {was:?} became {is:?}, {records:?}"
                        );
                    }
                }
            }
        });
    }

    /// Each counter that has another owner than before is told of once, and
    /// nothing is told of one that has not.
    #[test]
    fn a_change_of_owner_has_one_record(
        bytes in prop::collection::vec(any::<u8>(), 0..900)
    ) {
        each_step(&bytes, |setup, op, (before, after), (_, records)| {
            if matches!(op, Op::Reset) || setup.scheme != Scheme::Independent {
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

    /// Quotas, and what else holds under every scheme.
    #[test]
    fn quotas_hold(bytes in prop::collection::vec(any::<u8>(), 0..900)) {
        each_step(&bytes, |setup, _, (_, after), _| {
            sets_agree(after.unit.bank());
            invariants_hold(setup, after);
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
                assert_eq!(effects.cleared & lost, lost, "{op:?}");
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

    /// A tick at the deadline has something to do, the next deadline is later,
    /// and in the end nobody waits and no lease is left.
    #[test]
    fn a_deadline_makes_progress(bytes in prop::collection::vec(any::<u8>(), 0..900)) {
        let mut script = Script::new(&bytes, Palette::default());
        let mut world = World::new(&script.setup());
        for op in script {
            world.step(&op);
        }
        settle(&mut world);
        let leases = view(&world).into_iter().filter_map(|(_, seen)| seen?.lease);
        assert_eq!(leases.count(), 0);
    }
}
