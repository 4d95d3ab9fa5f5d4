//! Who hears of what: the connection of each lease, and those that watch all. Pure.

use std::collections::{BTreeMap, BTreeSet};

use arbiter_host::LeaseId;

use super::ConnectionId;

/// Who hears of a lease.
#[derive(Clone, Copy, Debug)]
pub(super) struct Listener {
    pub(super) connection: ConnectionId,
    /// It gets a reply with each event.
    pub(super) more: bool,
    /// It has no reply yet.
    pub(super) waits: bool,
}

/// What a listener is told of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tells {
    /// The event, and whether others follow.
    Event { goes_on: bool },
    /// The reply for which it has waited: it holds something.
    Granted,
    /// The reply for which it has waited: there is nothing for it any more.
    Ended,
}

#[derive(Debug, Default)]
pub(super) struct Listeners {
    of_lease: BTreeMap<LeaseId, Listener>,
    /// The leases of each connection that has any.
    leases_of: BTreeMap<ConnectionId, BTreeSet<LeaseId>>,
    /// Those of which a connection is yet to be told something: each call asks whether there is
    /// one, and a connection may have asked for the leases of thousands of control groups.
    untold: BTreeSet<(ConnectionId, LeaseId)>,
    watchers: BTreeSet<ConnectionId>,
}

impl Listeners {
    pub(super) fn get(&self, id: LeaseId) -> Option<&Listener> {
        self.of_lease.get(&id)
    }

    pub(super) fn add(&mut self, id: LeaseId, listener: Listener) {
        self.remove(id);
        self.leases_of
            .entry(listener.connection)
            .or_default()
            .insert(id);
        if listener.more || listener.waits {
            self.untold.insert((listener.connection, id));
        }
        self.of_lease.insert(id, listener);
    }

    pub(super) fn remove(&mut self, id: LeaseId) {
        let Some(Listener { connection, .. }) = self.of_lease.remove(&id) else {
            return;
        };
        self.untold.remove(&(connection, id));
        if let Some(leases) = self.leases_of.get_mut(&connection) {
            leases.remove(&id);
            if leases.is_empty() {
                self.leases_of.remove(&connection);
            }
        }
    }

    /// A connection hears of all leases.
    pub(super) fn watch(&mut self, connection: ConnectionId) {
        self.watchers.insert(connection);
    }

    pub(super) fn watchers(&self) -> impl Iterator<Item = ConnectionId> {
        self.watchers.iter().copied()
    }

    /// Forgets a connection. Returns the leases that it had.
    pub(super) fn gone(&mut self, connection: ConnectionId) -> BTreeSet<LeaseId> {
        self.watchers.remove(&connection);
        let had = self.leases_of.remove(&connection).unwrap_or_default();
        for id in &had {
            self.of_lease.remove(id);
            self.untold.remove(&(connection, *id));
        }
        had
    }

    /// Whether a connection waits for a reply, so that its next call has to wait, too.
    pub(super) fn is_busy(&self, connection: ConnectionId) -> bool {
        let mut from = self.untold.range((connection, LeaseId(0))..);
        let untold = from.next().is_some_and(|(next, _)| *next == connection);
        untold || self.watchers.contains(&connection)
    }

    /// What is to be told of an event of a lease, and to whom; it has been from then on.
    /// `ended`: there is no such lease any more. `holds`: it holds something.
    pub(super) fn tell(
        &mut self,
        id: LeaseId,
        ended: bool,
        holds: bool,
    ) -> Option<(ConnectionId, Tells)> {
        let listener = self.of_lease.get_mut(&id)?;
        let Listener {
            connection,
            more,
            waits,
        } = *listener;
        let tells = match (more, waits) {
            (true, _) => Some(Tells::Event { goes_on: !ended }),
            (false, true) if ended => Some(Tells::Ended),
            (false, true) if holds => Some(Tells::Granted),
            (false, _) => None,
        };
        if tells == Some(Tells::Granted) {
            listener.waits = false;
            self.untold.remove(&(connection, id));
        }
        if ended {
            self.remove(id);
        }
        tells.map(|tells| (connection, tells))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_busy_until_it_was_told() {
        let (one, other) = (ConnectionId(1), ConnectionId(2));
        let listener = |connection, more, waits| Listener {
            connection,
            more,
            waits,
        };
        let mut listeners = Listeners::default();
        listeners.add(LeaseId(7), listener(one, false, true));
        listeners.add(LeaseId(8), listener(other, false, false));
        assert!(listeners.is_busy(one) && !listeners.is_busy(other));
        assert!(listeners.tell(LeaseId(7), false, true).is_some());
        assert!(!listeners.is_busy(one));
        for id in [9, 10] {
            listeners.add(LeaseId(id), listener(one, true, false));
        }
        listeners.tell(LeaseId(9), true, false);
        assert!(listeners.is_busy(one));
        assert_eq!(listeners.gone(one).len(), 2);
        assert!(!listeners.is_busy(one));
        listeners.watch(one);
        assert!(listeners.is_busy(one));
    }
}
