//! What has physical counters of its own: what the caller says of the guest's core, and what
//! is left of that for a request.

use crate::bank::Bank;
use crate::counter::PerKind;
use crate::message::{NamedEvent, Wanted};
use crate::policy::Policy;
use crate::{CounterId, CounterSet, Layer};

/// What the layers of a guest can hold so that each counter has a physical one of its
/// own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backing {
    /// Programmable counters that they can hold together.
    pub programmable: u8,
    /// Fixed-function counters that they can hold; each beside what they hold now.
    pub fixed: CounterSet,
    /// Programmable counters that they could hold together if the vCPU moved to another
    /// core; 0 if that is no more, or nobody moves it.
    pub elsewhere: u8,
    /// Room for what each layer asks for, by the layer's code, where that names an event
    /// or physical counters differ. `None`: they do not, whatever is asked for.
    pub rooms: Option<[Option<EventRoom>; Policy::LAYERS.len()]>,
}

/// Room for what one layer asks for, where not every physical counter can count it or
/// what is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventRoom {
    /// The event that its request names; `None`: any.
    pub event: Option<NamedEvent>,
    /// Programmable counters that can be held for it beside all that is held.
    pub more: u8,
    /// As many on a core without contexts of its own, to which the vCPU may go.
    pub elsewhere: u8,
    /// Held ones in whose place one more can be held for it.
    pub instead_of: CounterSet,
}

impl EventRoom {
    /// Whether one that is held can become one for this event.
    pub(crate) fn can_have(&self, counter: CounterId) -> bool {
        self.more > 0 || self.instead_of.contains(counter)
    }
}

impl Backing {
    /// Every counter has one.
    pub fn whole() -> Self {
        Backing {
            programmable: u8::MAX,
            fixed: CounterSet::first(0, crate::MAX_FIXED),
            elsewhere: 0,
            rooms: None,
        }
    }

    /// Whether what is said of rooms holds only until somebody holds something else.
    pub(crate) fn differs(&self) -> bool {
        self.rooms.iter().flatten().any(Option::is_some)
    }
}

/// What the caller said last of the guest's core, and whether it still holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    most: Backing,
    /// Something else is held than when that was said, and physical counters differ.
    is_old: bool,
}

impl Room {
    /// Every counter has a physical one.
    pub(crate) fn whole() -> Self {
        Room {
            most: Backing::whole(),
            is_old: false,
        }
    }

    pub(crate) fn most(&self) -> Backing {
        self.most
    }

    /// Whether the caller is to say it again before more is decided.
    #[inline]
    pub(crate) fn is_old(&self) -> bool {
        self.is_old
    }

    /// The caller says what is backed from now on.
    #[inline]
    pub(crate) fn tell(&mut self, most: Backing) -> Told {
        let told = Told {
            was_old: self.is_old,
            is_news: self.most != most,
        };
        self.is_old = false;
        self.most = most;
        told
    }

    /// What is held has changed.
    pub(crate) fn note_held(&mut self) {
        self.is_old |= self.most.differs();
    }

    /// Something is asked for of which nothing was said.
    pub(crate) fn expire(&mut self) {
        self.is_old = true;
    }
}

/// How what [`Room::tell`] was told compares with what was known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Told {
    /// It had to be said again.
    pub(crate) was_old: bool,
    /// It is something else than before.
    pub(crate) is_news: bool,
}

/// Nothing was said of a request: what was told is of another one.
pub(crate) struct Untold;

/// What is left of a [`Backing`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backed {
    pub(crate) most: Backing,
    /// Counters of the hypervisor's that one of them is about to get.
    pub(crate) coming: CounterSet,
}

impl Backed {
    /// The same on the other core.
    pub(crate) fn elsewhere(self) -> Backed {
        let programmable = self.most.programmable.max(self.most.elsewhere);
        let mut most = Backing {
            programmable,
            ..self.most
        };
        if self.most.elsewhere > self.most.programmable {
            for room in most.rooms.iter_mut().flatten().flatten() {
                room.more = room.elsewhere;
            }
        }
        Backed { most, ..self }
    }

    /// Room for what `layer` asks for, where physical counters differ.
    pub(crate) fn room_for(
        &self,
        layer: Layer,
        (wanted, event): (Wanted, Option<NamedEvent>),
    ) -> Option<EventRoom> {
        if matches!(wanted, Wanted::This(CounterId::Fixed(_))) {
            return None;
        }
        let nothing = EventRoom {
            event,
            more: 0,
            elsewhere: 0,
            instead_of: CounterSet::EMPTY,
        };
        self.told_of(layer, event).unwrap_or(Some(nothing))
    }

    /// What was told of the request of `layer` for `event`: `Ok(None)` is that counters do
    /// not differ, and an error that nothing was told of this one.
    pub(crate) fn told_of(
        &self,
        layer: Layer,
        event: Option<NamedEvent>,
    ) -> Result<Option<EventRoom>, Untold> {
        // What the hypervisor holds no guest counts.
        let (true, Some(rooms)) = (layer.is_guest(), &self.most.rooms) else {
            return Ok(None);
        };
        match rooms.get(usize::from(layer.code())).copied().flatten() {
            Some(room) if room.event == event => Ok(Some(room)),
            None if event.is_none() => Ok(None),
            _ => Err(Untold),
        }
    }

    /// How many counters of the kind of `of_kind` `layer` can have that no layer of
    /// the guest has; in `room`, where physical counters differ. Each of these keeps room
    /// for its minimum. The hypervisor's own counters are not counted by a guest.
    pub(crate) fn left(
        self,
        (bank, policy): (&Bank, &Policy),
        layer: Layer,
        of_kind: CounterId,
        room: Option<EventRoom>,
    ) -> u32 {
        if !layer.is_guest() {
            return u32::MAX;
        }
        if matches!(of_kind, CounterId::Fixed(_)) {
            return u32::from(self.most.fixed.contains(of_kind));
        }
        let of = |set: CounterSet| u32::from(PerKind::count(set).of(of_kind));
        let guests = Policy::LAYERS.into_iter().filter(|other| other.is_guest());
        let taken = guests.map(|other| {
            let held = bank.held_by(other);
            let (all, counters) = (of(held), of(held.counters()));
            let share = policy.share(other).filter(|_| other != layer);
            // No minimum is one of samplers.
            let owed = share.map_or(0, |share| u32::from(share.min.of(of_kind)));
            all + owed.saturating_sub(counters)
        });
        let taken = taken.sum::<u32>() + of(self.coming);
        let most = match room {
            Some(room) => of(bank.held_by_guest()) + u32::from(room.more),
            None => self.most.programmable.into(),
        };
        most.saturating_sub(taken)
    }
}
