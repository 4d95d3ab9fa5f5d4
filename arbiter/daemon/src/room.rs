//! What connections may have in this process's memory: calls that are not whole or not answered
//! yet, and replies that are not read; and how many connections those have whose user has no
//! tenant, since the kernel has memory for each, too. Whoever has most of what is short is left. Pure.

use std::collections::BTreeMap;

use crate::service::ConnectionId;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// Most of one connection. A call is no longer, and a reply that is longer has to be the only
/// one that waits.
pub(crate) const OF_CONNECTION: usize = 256 * KIB;

/// Most connections of users without a tenant, all together.
pub(crate) const OF_STRANGERS: usize = 512;

/// Most of all connections of one user, of those together whose user has no tenant, and of all.
#[derive(Clone, Copy, Debug)]
struct MostMemory {
    of_user: usize,
    of_strangers: usize,
    of_all: usize,
}

const MOST: MostMemory = MostMemory {
    of_user: 8 * MIB,
    of_strangers: 4 * MIB,
    of_all: 64 * MIB,
};

/// What one connection has.
#[derive(Clone, Copy, Debug)]
struct Part {
    user: u32,
    /// Its user has no tenant.
    stranger: bool,
    bytes: usize,
}

/// What all of them have.
#[derive(Debug)]
pub(crate) struct Room {
    most: MostMemory,
    parts: BTreeMap<ConnectionId, Part>,
    users: BTreeMap<u32, usize>,
    strangers: usize,
    all: usize,
}

impl Room {
    pub(crate) fn new() -> Self {
        Room {
            most: MOST,
            parts: BTreeMap::new(),
            users: BTreeMap::new(),
            strangers: 0,
            all: 0,
        }
    }

    /// Knows a connection from now on, or another word on whether its user has a tenant.
    pub(crate) fn add(&mut self, id: ConnectionId, user: u32, stranger: bool) {
        let before = self.remove(id);
        let part = Part {
            user,
            stranger,
            bytes: 0,
        };
        self.parts.insert(id, part);
        self.set(id, before);
    }

    /// Forgets a connection. What it had.
    pub(crate) fn remove(&mut self, id: ConnectionId) -> usize {
        let had = self.parts.get(&id).map_or(0, |part| part.bytes);
        self.set(id, 0);
        self.parts.remove(&id);
        had
    }

    fn set(&mut self, id: ConnectionId, bytes: usize) {
        let Some(part) = self.parts.get_mut(&id) else {
            return;
        };
        let before = std::mem::replace(&mut part.bytes, bytes);
        let change = |sum: &mut usize| *sum = *sum + bytes - before;
        change(&mut self.all);
        if part.stranger {
            change(&mut self.strangers);
        }
        let user = self.users.entry(part.user).or_default();
        change(user);
        if *user == 0 {
            self.users.remove(&part.user);
        }
    }

    /// A connection has so many bytes now. The connection that has to go, if that is too much:
    /// the largest of the user that has most of what is short.
    pub(crate) fn weigh(&mut self, id: ConnectionId, bytes: usize) -> Option<ConnectionId> {
        self.set(id, bytes);
        let part = *self.parts.get(&id)?;
        let of_user = self.users.get(&part.user).copied().unwrap_or(0);
        let MostMemory {
            of_user: most,
            of_strangers,
            of_all,
        } = self.most;
        if of_user > most {
            self.largest(|other| other.user == part.user)
        } else if self.strangers > of_strangers {
            self.largest(|other| other.stranger)
        } else if self.all > of_all {
            self.largest(|_| true)
        } else {
            None
        }
    }

    /// The connection that has to go for one more of a user without a tenant, if one has to: the
    /// oldest of the one of them that has most. `Err`: nobody has more than this one would have.
    pub(crate) fn place_of_stranger(&self, user: u32) -> Result<Option<ConnectionId>, ()> {
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        let strangers = || self.parts.iter().filter(|(_, part)| part.stranger);
        for (_, part) in strangers() {
            *counts.entry(part.user).or_default() += 1;
        }
        if counts.values().sum::<usize>() < OF_STRANGERS {
            return Ok(None);
        }
        let own = counts.get(&user).copied().unwrap_or(0);
        let most = counts.into_iter().max_by_key(|(_, count)| *count);
        let (most, _) = most.filter(|(_, count)| *count > own + 1).ok_or(())?;
        let oldest = strangers().find(|(_, part)| part.user == most);
        Ok(oldest.map(|(id, _)| *id))
    }

    fn largest(&self, is_meant: impl Fn(&Part) -> bool) -> Option<ConnectionId> {
        let meant = || self.parts.iter().filter(|(_, part)| is_meant(part));
        let mut users: BTreeMap<u32, usize> = BTreeMap::new();
        for (_, part) in meant() {
            *users.entry(part.user).or_default() += part.bytes;
        }
        let (user, _) = users.into_iter().max_by_key(|(_, bytes)| *bytes)?;
        let own = meant().filter(|(_, part)| part.user == user);
        own.max_by_key(|(_, part)| part.bytes).map(|(id, _)| *id)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn room(of_user: usize, of_strangers: usize, of_all: usize) -> Room {
        Room {
            most: MostMemory {
                of_user,
                of_strangers,
                of_all,
            },
            ..Room::new()
        }
    }

    #[test]
    fn whoever_has_most_of_what_is_short_goes() {
        let mut room = room(10, 6, 20);
        let id = ConnectionId;
        for (connection, user, stranger) in [
            (1, 1, false),
            (2, 1, false),
            (3, 2, false),
            (4, 8, true),
            (5, 9, true),
            (6, 9, true),
        ] {
            room.add(id(connection), user, stranger);
        }
        assert_eq!(room.weigh(id(1), 6), None);
        // A user's own room: the largest of its connections.
        assert_eq!(room.weigh(id(2), 5), Some(id(1)));
        assert_eq!(room.remove(id(1)), 6);
        assert_eq!(room.weigh(id(2), 5), None);
        // That of strangers: user 9 has more, and that on its larger connection.
        assert_eq!(room.weigh(id(5), 2), None);
        assert_eq!(room.weigh(id(6), 1), None);
        assert_eq!(room.weigh(id(4), 4), Some(id(4)));
        assert_eq!(room.weigh(id(4), 2), None);
        assert_eq!(room.weigh(id(5), 4), Some(id(5)));
        room.remove(id(5));
        // Of all: strangers have 3, user 1 has 5.
        assert_eq!(room.weigh(id(3), 10), None);
        room.add(id(7), 3, false);
        assert_eq!(room.weigh(id(7), 3), Some(id(3)));
        // It has a tenant now, and what it has is counted as before.
        room.add(id(4), 8, false);
        assert_eq!((room.strangers, room.all), (1, 21));
    }

    proptest! {
        /// The sums are those of the parts, and nothing is above its limit once those who have
        /// to go have gone.
        #[test]
        fn what_is_counted_is_what_there_is(
            steps in proptest::collection::vec((0u64..20, 0u32..4, any::<bool>(), 0usize..8), 0..200)
        ) {
            let mut room = room(12, 9, 30);
            for (connection, user, stranger, bytes) in steps {
                let id = ConnectionId(connection);
                if bytes == 7 {
                    room.remove(id);
                } else {
                    if !room.parts.contains_key(&id) {
                        room.add(id, user, stranger);
                    }
                    while let Some(goes) = room.weigh(id, bytes) {
                        room.remove(goes);
                    }
                }
                let sum = |is_meant: &dyn Fn(&Part) -> bool| -> usize {
                    room.parts.values().filter(|part| is_meant(part)).map(|part| part.bytes).sum()
                };
                prop_assert_eq!(room.all, sum(&|_| true));
                prop_assert_eq!(room.strangers, sum(&|part| part.stranger));
                for user in 0..4 {
                    let of_user = sum(&|part| part.user == user);
                    prop_assert_eq!(room.users.get(&user).copied().unwrap_or(0), of_user);
                    prop_assert!(of_user <= 12);
                }
                prop_assert!(room.strangers <= 9 && room.all <= 30);
            }
        }
    }
}
