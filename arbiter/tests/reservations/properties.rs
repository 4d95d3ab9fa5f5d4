//! What holds after every operation of every sequence. The model has no part in it.

use std::collections::BTreeMap;

use arbiter::{Access, Cookie, CounterId, Event, Layer, Record, Reservation, Scheme, Verdict, abi};
use proptest::prelude::{ProptestConfig, any, prop, proptest};

use super::fixture::{Seen, cookie, look, sets_agree};
use super::play::{Op, Outcome, Palette, Script, Setup, World, invariants_hold, settle};

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

/// Whether an operation proves that it may change a reservation, or takes a free
/// counter.
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
            // Whoever is asked may give away what it can prove to be its own.
            abi::MSR_REPLY => held.is_some() && shows(*presented),
            _ => false,
        },
        // The hypervisor needs no cookie for what nobody holds.
        Op::SetAside { .. } => held.is_none(),
        Op::Reply { presented, .. } => held.is_some() && shows(*presented),
        _ => false,
    }
}

/// The cookie of each layer's last request, by the layer's code: it alone
/// withdraws that.
#[derive(Default)]
struct Asked([Option<u64>; 4]);

impl Asked {
    /// Whether an operation may make a layer lose what its request has gathered. The
    /// layer's own withdrawal may only with the cookie of the request. Everything
    /// else is the arbiter's decision.
    fn may_end(&self, op: &Op, layer: Layer) -> bool {
        match op {
            Op::Write {
                index,
                value: abi::REQUEST_WITHDRAW,
                layer: by,
                presented,
            } if *index == abi::MSR_BASE + abi::MSR_REQUEST && by.code() == layer.code() => {
                self.0[usize::from(layer.code())] == Some(*presented)
            }
            _ => true,
        }
    }

    fn note(&mut self, op: &Op, outcome: Outcome) {
        match op {
            Op::Write {
                index,
                value,
                layer,
                presented,
            } if *index == abi::MSR_BASE + abi::MSR_REQUEST
                && *value & abi::REQUEST_OP_MASK == abi::REQUEST_RESERVE
                && outcome != Outcome::Fault =>
            {
                self.0[usize::from(layer.code())] = Some(*presented);
            }
            _ => (),
        }
    }
}

fn is_ownership(event: &Event) -> bool {
    matches!(
        event,
        Event::Reserved { .. }
            | Event::HandedOver { .. }
            | Event::Released
            | Event::Yielded { .. }
            | Event::Gathered
            | Event::Returned
            | Event::Revoked(_)
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
        let mut asked = Asked::default();
        each_step(&bytes, |setup, op, (before, after), (outcome, records)| {
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
                        let shown = match op {
                            Op::Write { presented, .. } => was.is_some_and(|was| was.access == *presented),
                            _ => false,
                        };
                        let returned = told(|event| matches!(event, Event::Returned))
                            && was.is_some_and(|was| asked.may_end(op, was.owner));
                        // The lease of what a request had gathered starts with its answer.
                        let granted = told(|event| matches!(event, Event::Reserved { .. }))
                            && was.map(|was| Seen { lease: None, ..was })
                                == is.map(|is| Seen { lease: None, ..is });
                        assert!(
                            revoked
                                || entitled
                                || returned
                                || granted
                                || (setup.scheme == Scheme::SingleMaster && shown)
                                || was.is_none() && told(is_ownership),
                            "{op:?}: {was:?} became {is:?}, {records:?}"
                        );
                    }
                }
            }
            asked.note(op, outcome);
        });
    }

    /// Each change of a counter's owner has exactly one record, and no other counter
    /// has one.
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

    /// The records alone show who holds what, under every scheme: each of them fits
    /// those before it, and none is missing.
    #[test]
    fn the_records_tell_who_holds_what(
        bytes in prop::collection::vec(any::<u8>(), 0..900)
    ) {
        // The owner, and whether it holds the counter for a request that waits.
        let mut told: BTreeMap<CounterId, (Layer, bool)> = BTreeMap::new();
        each_step(&bytes, |_, op, (_, after), (_, records)| {
            for record in records.iter().filter(|record| is_ownership(&record.event)) {
                let counter = record.counter.expect("it is about a counter");
                let before = told.remove(&counter);
                let (mine, owner) = ((record.layer, false), before.map(|(owner, _)| owner));
                let (fits, holder) = match record.event {
                    Event::Reserved { .. } => {
                        (before.is_none() || before == Some((record.layer, true)), Some(mine))
                    }
                    Event::HandedOver { from } => {
                        let waits = from == record.layer && before == Some((from, true));
                        (owner == Some(from), Some((record.layer, waits)))
                    }
                    Event::Gathered => (before.is_none(), Some((record.layer, true))),
                    Event::Returned => (before == Some((record.layer, true)), None),
                    // By whoever knows its management cookie.
                    Event::Released => (before.is_some(), None),
                    _ => (owner == Some(record.layer), None),
                };
                assert!(fits, "{op:?}: {before:?}, {records:?}");
                told.extend(holder.map(|holder| (counter, holder)));
            }
            let bank = after.unit.bank();
            if matches!(op, Op::Reset) {
                told.retain(|counter, _| bank.held().contains(*counter));
            }
            let held = bank.held().iter().filter_map(|counter| {
                Some((counter, bank.reservation(counter)?.owner))
            });
            let told = told.iter().map(|(counter, (owner, _))| (*counter, *owner));
            assert!(told.eq(held), "{op:?}: {records:?}");
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

    /// Whatever programs do, their kernel runs; and of their cookies only so many
    /// are compared in any time.
    #[test]
    fn no_program_takes_the_core_from_its_kernel(
        bytes in prop::collection::vec(any::<u8>(), 0..900)
    ) {
        let mut script = Script::new(&bytes, Palette::default());
        let setup = script.setup();
        let mut world = World::new(&setup);
        let (mut compared, start) = (0, world.now);
        for mut op in script {
            // What is played is the guest's set-up, and then programs guess.
            if let Op::Access { layer, .. } = &mut op {
                *layer = Layer::GuestUser;
            }
            let is_program = matches!(op, Op::Access { .. });
            let before = (world.unit.wrong_cookies(), world.locked_out_until());
            let records = world.step(&op).records;
            if is_program {
                compared += world.unit.wrong_cookies() - before.0;
                assert_eq!(world.locked_out_until(), before.1, "{op:?}");
                let barred = |record: &Record| matches!(record.event, Event::LockedOut { .. });
                assert!(!records.iter().any(barred), "{op:?}");
            }
        }
        let (time, limits) = (world.now - start, setup.guard);
        let free = u64::from(limits.burst) + time / limits.forgive_after.0 + 1;
        assert!(compared <= free + time / limits.first_penalty.0 + 1, "{compared} in {time}");
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
