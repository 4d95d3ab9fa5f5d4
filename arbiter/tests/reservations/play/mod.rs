//! Plays sequences of operations on a [`PcrUnit`](arbiter::PcrUnit) and on a
//! naive model of `docs/reference/pcr.md`, and compares everything that can be seen.
//!
//! The fuzz target in `arbiter/fuzz` is made of this module as well.

mod invariants;
mod mailbox;
mod model;
mod script;
mod world;

use arbiter::{Cookie, Event, Layer, Scheme, Shared};
pub(crate) use invariants::hold as invariants_hold;
pub(crate) use model::Model;
pub(crate) use script::{Op, Palette, Script, Setup};
pub(crate) use world::{Outcome, Step, World, registers};

/// Plays what `bytes` say, and returns the events that were recorded.
///
/// # Panics
/// The unit does something else than the model.
pub(crate) fn run(bytes: &[u8]) -> Vec<Event> {
    let mut script = Script::new(bytes, Palette::default());
    let setup = script.setup();
    let (mut world, mut model) = (World::new(&setup), Model::new(&setup));
    // The model knows nothing of layers that ask each other.
    let is_modelled = setup.scheme == Scheme::Independent;
    let mut told = Vec::new();
    for op in script {
        let step = world.step(&op);
        invariants::hold(&setup, &world);
        if is_modelled {
            let expected = model.step(&op);
            assert_eq!(step.outcome, expected.outcome, "{op:?} of {setup:?}");
            assert_eq!(step.records, expected.records, "{op:?} of {setup:?}");
            compare(&mut world, &mut model);
        }
        told.extend(step.records.iter().map(|record| record.event));
    }
    settle(&mut world);
    told
}

/// From deadline to deadline until there is none: each has something to do, and
/// in the end every request has its answer.
pub(crate) fn settle(world: &mut World) {
    world.step(&Op::Wait { ticks: 0 });
    let mut rounds = 0;
    while let Some(deadline) = world.deadline() {
        assert!(deadline > world.now);
        let ticks = deadline - world.now;
        let early = world.step(&Op::Wait { ticks: ticks - 1 });
        assert!(early.records.is_empty(), "{early:?}");
        let step = world.step(&Op::Wait { ticks: 1 });
        assert!(!step.records.is_empty());
        rounds += 1;
        assert!(rounds < 64, "there are not as many things to wait for");
    }
    for layer in Layer::ALL {
        let outcome = world.unit.answer(layer).outcome;
        assert_ne!(outcome, arbiter::Outcome::Pending, "{layer}");
    }
}

/// All that can be seen of the unit, against the model.
fn compare(world: &mut World, model: &mut Model) {
    let now = world.now;
    assert_eq!(now, model.now, "time");
    let bank = world.unit.bank().clone();
    let counters = bank.counters();
    assert_eq!(counters.bits(), model.all(), "counters");
    assert_eq!(bank.held().bits(), model.held(), "held");
    assert_eq!(bank.free().bits(), model.all() & !model.held(), "free");
    for layer in Layer::ALL {
        assert_eq!(bank.held_by(layer).bits(), model.held_by(layer), "{layer}");
    }
    for (shared, bit) in Shared::ALL.into_iter().zip(16..) {
        let expected = model.reached_by(bit);
        assert_eq!(world.unit.reached_by(shared).bits(), expected, "{shared:?}");
    }
    assert_eq!(world.deadline(), model.deadline(), "deadline");
    assert_eq!(world.unit.wrong_cookies(), model.wrong_cookies, "wrong");
    assert_eq!(world.locked_out_until(), model.locked_out_until(), "barred");
    for counter in counters.iter() {
        let slot = model.slot(counter).expect("the counter exists");
        let reservation = bank.reservation(counter);
        assert_eq!(reservation.is_some(), slot.owner.is_some(), "{counter}");
        let Some(reservation) = reservation else {
            continue;
        };
        let cookie = |bits| Cookie::new(bits).expect("48 bits");
        assert_eq!(Some(reservation.owner), slot.owner, "{counter}");
        assert_eq!(
            reservation.lease.map(|ends| ends.0),
            slot.lease,
            "{counter}"
        );
        assert_eq!(reservation.revocation, None, "{counter}");
        assert!(
            reservation.is_management(cookie(slot.management)),
            "{counter}"
        );
        assert!(reservation.is_access(cookie(slot.access)), "{counter}");
    }
    for index in registers() {
        let op = Op::Read {
            index,
            layer: Layer::GuestKernel,
            presented: 0,
        };
        let (seen, expected) = (world.step(&op), model.step(&op));
        assert_eq!(seen.outcome, expected.outcome, "{op:?}");
        assert!(seen.records.is_empty(), "a read is not recorded");
    }
}
