//! What of a vCPU's reservations has physical counters, and what could have: a pure
//! function of what is held and asked for, of the core and of the grant.

use std::fmt;

use arbiter::{AskedEvents, Backing, CounterId, CounterSet, EventRoom, NamedEvent, PerKind};
use pmu_model::{Constraint, CountRequest};

use super::placer::Ground;
use crate::core_pmu::FirmDemands;

/// The other cores of a VM, as its scheduler knows them.
pub trait OtherCores: fmt::Debug + Send + Sync {
    /// For how many promised counters the one with the most room has room
    /// ([`CorePmu::room`](crate::CorePmu::room)). It is asked at each request of a guest's
    /// layer.
    fn most_room(&self) -> usize;
}

/// What the layers of the guest can hold so that each counter has a slot of its own
/// on the core, beside what contexts rely on there.
/// `counted`: what reserved counters that have a place select now. `there`: counters of
/// the model. `asked`: what each layer asks for. `others`: the room of the other core with
/// the most of it.
pub(super) fn backing(
    ground: Ground<'_>,
    counted: impl Fn(CounterId) -> Option<CountRequest>,
    there: PerKind,
    asked: AskedEvents,
    others: usize,
) -> Backing {
    let (model, planner) = (ground.model, ground.core.planner());
    let any = ground.terms.any_event(model, ground.core);
    let held = ground.terms.held_by_guest;
    let kept = Kept::of(ground, counted, any);
    let fixed = model.counters().filter(|counter| {
        let more = planner.promise(*counter, None, any);
        let more = more.filter(|_| !held.contains(*counter));
        matches!(counter, CounterId::Fixed(_))
            && more.map_or(held.contains(*counter), |more| {
                kept.leaves_room_for(&[more])
            })
    });
    let fixed = fixed.collect();
    let most_there = there.programmable;
    let of_held = PerKind::count(held).programmable;
    let more = any.map_or(0, |any| {
        kept.room_for(any, most_there.saturating_sub(of_held))
    });
    let programmable = of_held + more;
    let elsewhere = backed_elsewhere(ground, any, most_there, others);
    let most = ground.terms.grant.budget.most();
    let rooms = asked.map(|asked| {
        let event = asked?;
        if event.is_none() && !kept.differs(any) {
            return None;
        }
        let named = event.map(|event| (model.events(), event));
        let constraint = planner.promise(CounterId::Programmable(0), named, any);
        let more = most.programmable.min(most_there);
        Some(kept.room(event, constraint, more.saturating_sub(of_held)))
    });
    let spare = PerKind::count(held).fixed < most.fixed;
    Backing {
        programmable: programmable.min(most.programmable),
        fixed: if spare { fixed } else { fixed & held },
        elsewhere: if elsewhere > programmable {
            elsewhere.min(most.programmable)
        } else {
            0
        },
        rooms: Some(rooms),
    }
}

/// How many programmable counters the layers of the guest could hold together on the
/// other core with the most room, to which its contexts would go with the vCPU.
fn backed_elsewhere(ground: Ground<'_>, any: Option<Constraint>, most: u8, room: usize) -> u8 {
    let (Some(any), true) = (any, room > 0) else {
        return 0;
    };
    // The cores of a VM have the same slots.
    let (core, owner) = (ground.core, ground.owner);
    let firm = core.book().firm_of(core.planner(), owner);
    let fit = |count: &u8| {
        let counters = usize::from(*count);
        firm.leave_room_for(&vec![any; counters])
            && counters + core.book().relied_on(owner, CounterSet::EMPTY) <= room
    };
    (1..=most).take_while(fit).last().unwrap_or(0)
}

/// What is kept for the reserved counters of a vCPU.
struct Kept {
    /// What each of them was promised.
    promised: Vec<(CounterId, Constraint)>,
    /// What each of them selects now, if that is counted.
    now: Vec<(CounterId, Constraint)>,
    /// What the contexts beside it rely on.
    firm: FirmDemands,
    /// Those of them that go with the vCPU.
    own: FirmDemands,
}

impl Kept {
    fn of(
        ground: Ground<'_>,
        counted: impl Fn(CounterId) -> Option<CountRequest>,
        any: Option<Constraint>,
    ) -> Self {
        let core = ground.core;
        let promised = ground.terms.promised(ground.model, core.planner(), any);
        let now = promised.iter().map(|(counter, promise)| {
            // What has no place is judged when it wants one.
            let plan = counted(*counter).and_then(|request| core.backend().plan(&request).ok());
            (*counter, plan.map_or(*promise, |plan| plan.constraint))
        });
        Kept {
            now: now.collect(),
            promised,
            firm: core.book().firm_beside(core.planner(), ground.owner),
            own: core.book().firm_of(core.planner(), ground.owner),
        }
    }

    /// Whether all that was promised has room together with `more`, and all that counts now.
    fn leaves_room_for(&self, more: &[Constraint]) -> bool {
        self.leaves_room_without(None, more)
    }

    fn leaves_room_without(&self, without: Option<CounterId>, more: &[Constraint]) -> bool {
        [&self.promised, &self.now].into_iter().all(|kept| {
            let kept = kept.iter().filter(|(counter, _)| Some(*counter) != without);
            let wanted = kept.map(|(_, constraint)| *constraint);
            let wanted: Vec<Constraint> = wanted.chain(more.iter().copied()).collect();
            self.firm.leave_room_for(&wanted)
        })
    }

    /// For how many counters more, up to `most`, there is room.
    fn room_for(&self, constraint: Constraint, most: u8) -> u8 {
        let fit = |count: &u8| self.leaves_room_for(&vec![constraint; usize::from(*count)]);
        (1..=most).take_while(fit).last().unwrap_or(0)
    }

    /// Whether a programmable counter is kept something else than `any`.
    fn differs(&self, any: Option<Constraint>) -> bool {
        let kept = self.promised.iter().chain(&self.now);
        let mut kept = kept.filter(|(counter, _)| !matches!(counter, CounterId::Fixed(_)));
        kept.any(|(_, constraint)| Some(*constraint) != any)
    }

    /// Room for counters of `event`, which `constraint` says what can count.
    fn room(
        &self,
        event: Option<NamedEvent>,
        constraint: Option<Constraint>,
        most: u8,
    ) -> EventRoom {
        let more = constraint.map_or(0, |constraint| self.room_for(constraint, most));
        let there = |count: &u8| {
            let promised = self.promised.iter().map(|(_, promise)| *promise);
            let wanted = constraint
                .into_iter()
                .flat_map(|one| vec![one; (*count).into()]);
            self.own
                .leave_room_for(&promised.chain(wanted).collect::<Vec<_>>())
        };
        let elsewhere = constraint.and_then(|_| (1..=most).take_while(there).last());
        let held = self.promised.iter().map(|(counter, _)| *counter);
        let instead_of = held.filter(|counter| {
            let fits = |one| self.leaves_room_without(Some(*counter), &[one]);
            matches!(counter, CounterId::Programmable(_)) && constraint.is_some_and(fits)
        });
        EventRoom {
            event,
            more,
            elsewhere: elsewhere.unwrap_or(0),
            instead_of: instead_of.collect(),
        }
    }
}
