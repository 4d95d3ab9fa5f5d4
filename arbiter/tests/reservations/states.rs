//! Every state that a small machine can reach, and every operation in each.

use std::collections::HashSet;

use arbiter::{
    Access, Bank, Control, Cookie, CounterId, Event, Layer, Operation, PerKind, Policy, Share,
    Verdict, abi,
};

use super::fixture::{PMC0, Seen, cookie, look, sets_agree};
use super::play::{Model, Op, Palette, Script, Setup, Step, World};

/// None, and two of different owners.
const COOKIES: [u64; 3] = [0, 0xa, 0xb];
const INITIAL: u64 = 0x001f_00ff;

/// One counter, or two that must not get into each other's way.
fn operations(words: &[u64]) -> Vec<Operation> {
    let keys = COOKIES.map(cookie);
    let manage = keys.map(Operation::Manage);
    let access = keys.map(Operation::SetAccess);
    let words = words.iter().filter_map(|bits| Control::new(*bits));
    manage
        .into_iter()
        .chain(access)
        .chain(words.map(Operation::SetControl))
        .chain([0, 1].map(Operation::SetDropValue))
        .collect()
}

/// What must be true of one operation on a bank.
fn step(
    before: &Bank,
    layer: Layer,
    presented: Cookie,
    at: CounterId,
    operation: Operation,
) -> Bank {
    let mut after = before.clone();
    let held = before.reservation(at);
    let entitled = match held {
        Some(held) => held.is_management(presented) && held.control.manages(layer),
        None => presented.is_default() && matches!(operation, Operation::Manage(_)),
    };
    let planned = before.plan(layer, presented, at, operation);
    assert_eq!(planned.is_ok(), entitled, "{layer} {operation:?} {held:?}");
    let Ok(change) = planned else { return after };
    let effects = after.apply(change);
    sets_agree(&after);
    let given_back = held.is_some() && after.reservation(at).is_none();
    assert_eq!(effects.cleared.contains(at), given_back, "{operation:?}");
    for counter in before.counters().iter().filter(|counter| *counter != at) {
        let seen = |bank| look(bank, counter, &COOKIES);
        assert_eq!(seen(before), seen(&after), "{operation:?} at {at}");
    }
    after
}

/// All states of a bank, by all operations. Returns how many there are.
fn explore(programmable: u8, words: &[u64]) -> usize {
    let key = |bank: &Bank| -> Vec<Option<Seen>> {
        let counters = bank.counters().iter();
        counters
            .map(|counter| look(bank, counter, &COOKIES))
            .collect()
    };
    let start = Bank::new(programmable, 0);
    let mut known = HashSet::from([key(&start)]);
    let mut todo = vec![start];
    while let Some(bank) = todo.pop() {
        for counter in bank.counters().iter() {
            // A right cookie opens a counter that is private to nobody else.
            let open = Layer::ALL.map(|layer| {
                COOKIES.map(|bits| bank.check(layer, cookie(bits), counter, Access::Read))
            });
            for verdicts in open {
                let through = verdicts
                    .iter()
                    .filter(|verdict| **verdict == Verdict::Permit);
                assert!(
                    through.count() <= 1,
                    "two cookies open {counter} of {bank:?}"
                );
            }
            for layer in Layer::ALL {
                for presented in COOKIES.map(cookie) {
                    for operation in operations(words) {
                        let next = step(&bank, layer, presented, counter, operation);
                        if known.insert(key(&next)) {
                            todo.push(next);
                        }
                    }
                }
            }
        }
    }
    known.len()
}

/// Unreserved, or: an owner, a management cookie, an access cookie, a control
/// word, a drop value, each with each.
fn states_of_a_counter(words: usize) -> usize {
    let management = COOKIES.len() - 1;
    1 + Layer::ALL.len() * management * COOKIES.len() * words * 2
}

#[test]
fn every_state_of_one_counter() {
    // Every choice of layers that manage, with both errors.
    let words: Vec<u64> = (0..32)
        .map(|choice| INITIAL & !0xf | choice & 0xf | (choice & 16) << 4)
        .collect();
    assert_eq!(explore(1, &words), states_of_a_counter(32));
}

#[test]
fn every_state_of_two_counters() {
    let words = [INITIAL, 0x0102_0021];
    let each = states_of_a_counter(2);
    // The first word is the initial one, and nothing couples the counters.
    assert_eq!(explore(2, &words[..1]), states_of_a_counter(1).pow(2));
    assert_eq!(explore(1, &words), each);
}

/// Leases of two ticks for the firmware, which may have one counter; one is left
/// to the kernel.
fn setup(programmable: u8) -> Setup {
    let mut setup = Script::new(&[], Palette::default()).setup();
    let number = |programmable| PerKind {
        programmable,
        fixed: 0,
    };
    setup.counters = number(programmable);
    setup.policy = Policy {
        firmware: Share {
            max: number(1),
            lease_ms: Some(2),
            ..Share::FREE
        },
        hypervisor: Share::FREE,
        kernel: Share {
            min: number(programmable - 1),
            ..Share::FREE
        },
        grace_ms: 0,
    };
    setup.legacy = Some(number(1));
    setup.has_firmware = true;
    setup
}

/// Everything that can be done to a unit, and the passing of a tick.
fn all_ops(programmable: u8, access: &[u64], words: &[u64]) -> Vec<Op> {
    let mut ops = vec![Op::Wait { ticks: 1 }, Op::EndPhase];
    let rows = [(0, &COOKIES[..]), (0x40, access), (0x80, words)];
    for (row, values) in rows {
        for n in 0..u32::from(programmable) {
            for layer in Layer::ALL {
                for presented in COOKIES {
                    ops.extend(values.iter().map(|value| Op::Write {
                        index: abi::MSR_BASE + row + n,
                        value: *value,
                        layer,
                        presented,
                    }));
                }
            }
        }
    }
    ops
}

/// A state by what matters for what comes next.
type Key = (bool, u64, Vec<Option<Seen>>);

/// Time does not matter, but for how long a lease still lasts.
fn key(world: &mut World) -> Key {
    let now = world.now;
    let bank = world.unit.bank();
    let counters = bank.counters().iter();
    let slots = counters.map(|counter| {
        let seen = look(bank, counter, &COOKIES)?;
        let lease = seen.lease.map(|end| end - now);
        Some(Seen { lease, ..seen })
    });
    let slots = slots.collect();
    let over = world.phase.is_over();
    (over, world.unit.map().to_counters(1), slots)
}

/// What must be true of one operation on a unit, beside what the model says.
fn check_step(op: &Op, step: &Step, before: &Key, after: &Key) {
    let told = |event: &Event| {
        matches!(
            event,
            Event::Reserved { .. } | Event::HandedOver { .. } | Event::Released | Event::Revoked(_)
        )
    };
    let owner = |seen: &Option<Seen>| seen.map(|seen| (seen.owner, seen.management));
    let changed = before.2.iter().zip(&after.2);
    let changed = changed.filter(|(was, is)| owner(was) != owner(is)).count();
    let told = step.records.iter().filter(|record| told(&record.event));
    assert_eq!(told.count(), changed, "{op:?}: {step:?}");
    assert!(
        before.0 <= after.0,
        "the firmware's phase does not come back"
    );
    assert!(
        !before.0 || before.1 == after.1,
        "{op:?}: names stay what they are once the phase is over"
    );
    let held = |layer: Layer| {
        let is_its = |seen: &&Option<Seen>| seen.is_some_and(|seen| seen.owner == layer);
        after.2.iter().filter(is_its).count()
    };
    assert!(held(Layer::Firmware) <= 1, "{op:?}: {after:?}");
    let others = held(Layer::Firmware) + held(Layer::Hypervisor) + held(Layer::HostTool);
    assert!(
        others <= 1,
        "{op:?}: the kernel's minimum is gone: {after:?}"
    );
}

/// All states of a unit, each reached by the shortest way to it; in each, every
/// operation does what the model says. Returns how many there are.
fn explore_unit(programmable: u8, ops: &[Op]) -> usize {
    let setup = setup(programmable);
    let start = key(&mut World::new(&setup));
    let mut known = HashSet::from([start.clone()]);
    let mut paths = vec![(Vec::new(), start)];
    let mut next = 0;
    while let Some((path, before)) = paths.get(next).cloned() {
        next += 1;
        for op in ops {
            let (mut world, mut model) = (World::new(&setup), Model::new(&setup));
            for earlier in &path {
                world.step(earlier);
                model.step(earlier);
            }
            let step = world.step(op);
            assert_eq!(step, model.step(op), "{op:?} after {path:?}");
            let after = key(&mut world);
            check_step(op, &step, &before, &after);
            if known.insert(after.clone()) {
                paths.push(([&path[..], std::slice::from_ref(op)].concat(), after));
            }
        }
    }
    known.len()
}

#[test]
fn every_state_of_a_unit_with_one_counter() {
    let words = [INITIAL, INITIAL & !0x4, INITIAL | 0x100];
    let states = explore_unit(1, &all_ops(1, &COOKIES, &words));
    println!("one counter: {states} states");
    assert!(states > 1);
}

#[test]
fn every_state_of_a_unit_with_two_counters() {
    let states = explore_unit(2, &all_ops(2, &COOKIES[..2], &[]));
    println!("two counters: {states} states");
    assert!(states > 1);
}

#[test]
fn the_smallest_bank_has_nothing_in_it() {
    let bank = Bank::new(0, 0);
    assert!(bank.counters().is_empty() && bank.free().is_empty());
    let verdict = bank.check(Layer::GuestKernel, cookie(0), PMC0, Access::Read);
    assert_eq!(verdict, Verdict::Fault);
}
