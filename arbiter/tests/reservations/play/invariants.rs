//! What holds after every operation under every scheme. The model has no part in it.

use arbiter::{Control, CounterId, CounterSet, Layer, PerKind, Policy, Shared};

use super::script::Setup;
use super::world::World;

/// All of them.
pub(crate) fn hold(setup: &Setup, world: &World) {
    sets_agree(world);
    quotas_hold(setup, world);
    // What was due when the unit last looked is done.
    let ends = world.deadline();
    assert!(
        ends.is_none_or(|deadline| deadline >= world.ticked),
        "{ends:?}"
    );
}

/// What the bank keeps beside the reservations agrees with them.
fn sets_agree(world: &World) {
    let bank = world.unit.bank();
    let collect = |is_member: &dyn Fn(CounterId) -> bool| -> CounterSet {
        let counters = bank.counters().iter();
        counters.filter(|counter| is_member(*counter)).collect()
    };
    let held = collect(&|counter| bank.reservation(counter).is_some());
    assert_eq!(bank.held(), held);
    assert_eq!(bank.free() | held, bank.counters());
    assert!((bank.free() & held).is_empty());
    for shared in Shared::ALL {
        let reached = collect(&|counter| {
            let word = bank.reservation(counter).map(|held| held.control);
            word.unwrap_or(Control::INITIAL).reached_by(shared)
        });
        assert_eq!(bank.reached_by(shared), reached, "{shared:?}");
    }
}

/// No layer has more than its maximum, and none is kept from its minimum.
fn quotas_hold(setup: &Setup, world: &World) {
    let bank = world.unit.bank();
    let PerKind {
        programmable,
        fixed,
    } = setup.counters;
    let fits = setup.policy.fits(programmable, fixed);
    let free = PerKind::count(bank.free());
    for of_kind in [CounterId::Programmable(0), CounterId::Fixed(0)] {
        let mut owed = 0;
        for layer in Policy::LAYERS {
            let held = PerKind::count(bank.held_by(layer)).of(of_kind);
            let share = setup.policy.share(layer).expect("a layer that can hold");
            assert!(held <= share.max.of(of_kind), "{layer} has {held}");
            owed += share.min.of(of_kind).saturating_sub(held);
        }
        let kept = owed <= free.of(of_kind);
        assert!(kept || fits.is_err(), "{owed} owed of {free:?}");
    }
    assert!(bank.held_by(Layer::GuestUser).is_empty());
}
