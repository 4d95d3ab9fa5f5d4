//! What the tables share: banks in a wanted state, and ways to look at them.

use arbiter::{
    Bank, Change, ChangeKind, Control, Cookie, CounterId, CounterSet, Layer, Operation,
    Reservation, Shared,
};

/// The management cookie of whoever reserves in a table.
pub(crate) const MANAGEMENT: u64 = 0xaaaa_0000_0001;
/// The access cookie of whoever reserves in a table.
pub(crate) const ACCESS: u64 = 0x5555_0000_0002;
/// A cookie that is not set anywhere.
pub(crate) const OTHER: u64 = 0xaaaa_0000_0003;

pub(crate) const PMC0: CounterId = CounterId::Programmable(0);

pub(crate) fn cookie(bits: u64) -> Cookie {
    Cookie::new(bits).expect("48 bits")
}

pub(crate) fn control(bits: u64) -> Control {
    Control::new(bits).expect("a control word")
}

/// Reserves a counter as its owner would, step by step.
pub(crate) fn reserve(
    bank: &mut Bank,
    counter: CounterId,
    owner: Layer,
    access: u64,
    word: Control,
) {
    let steps = [
        (0, Operation::Manage(cookie(MANAGEMENT))),
        (MANAGEMENT, Operation::SetAccess(cookie(access))),
        // Last, as it may shut out the owner's own layer.
        (MANAGEMENT, Operation::SetControl(word)),
    ];
    for (presented, operation) in steps {
        let plan = bank.plan(owner, cookie(presented), counter, operation);
        let _ = bank.apply(plan.expect("the owner may"));
    }
}

/// Makes `owner` the holder, whatever policy thinks of it.
pub(crate) fn hold(bank: &mut Bank, counter: CounterId, owner: Layer) {
    let reservation = Reservation::new(owner, cookie(MANAGEMENT), Cookie::DEFAULT);
    let effects = bank.apply(Change {
        counter,
        kind: ChangeKind::Reserve(reservation),
    });
    assert!(effects.is_empty());
}

/// A reservation as values that can be compared. Trying every possible cookie shows
/// which one is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Seen {
    pub(crate) owner: Layer,
    pub(crate) management: u64,
    pub(crate) access: u64,
    pub(crate) control: u64,
    pub(crate) drop_value: u64,
    pub(crate) lease: Option<u64>,
}

/// Looks at a counter; `None` if it is unreserved.
pub(crate) fn look(bank: &Bank, counter: CounterId, cookies: &[u64]) -> Option<Seen> {
    let reservation = bank.reservation(counter)?;
    let which = |is_it: &dyn Fn(Cookie) -> bool| {
        let mut found = cookies.iter().filter(|bits| is_it(cookie(**bits)));
        // The master's management cookies are nobody's.
        let one = found.next().copied().unwrap_or(u64::MAX);
        assert_eq!(found.next(), None, "a counter has one cookie of each kind");
        one
    };
    Some(Seen {
        owner: reservation.owner,
        management: which(&|cookie| reservation.is_management(cookie)),
        access: which(&|cookie| reservation.is_access(cookie)),
        control: reservation.control.bits(),
        drop_value: reservation.drop_value,
        lease: reservation.lease.map(|ends| ends.0),
    })
}

/// What the bank keeps beside the reservations agrees with them.
pub(crate) fn sets_agree(bank: &Bank) {
    let collect = |is_member: &dyn Fn(CounterId) -> bool| -> CounterSet {
        let counters = bank.counters().iter();
        counters.filter(|counter| is_member(*counter)).collect()
    };
    let held = collect(&|counter| bank.reservation(counter).is_some());
    assert_eq!(bank.held(), held);
    assert_eq!(bank.free() & held, CounterSet::EMPTY);
    assert_eq!(bank.free() | held, bank.counters());
    for shared in Shared::ALL {
        let reached = collect(&|counter| {
            let word = bank.reservation(counter).map(|held| held.control);
            word.unwrap_or(Control::INITIAL).reached_by(shared)
        });
        assert_eq!(bank.reached_by(shared), reached, "{shared:?}");
    }
    let by_layer = [Layer::Firmware, Layer::HostTool, Layer::GuestKernel]
        .into_iter()
        .chain([Layer::GuestUser])
        .fold(CounterSet::EMPTY, |sum, layer| {
            assert_eq!(sum & bank.held_by(layer), CounterSet::EMPTY, "{layer}");
            sum | bank.held_by(layer)
        });
    assert_eq!(by_layer, held);
}
