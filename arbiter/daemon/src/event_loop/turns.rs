//! Whose turn it is: connections that have said something, those that are not listened to, and
//! those that do not take in their replies. Pure.

use std::collections::{BTreeMap, BTreeSet};

use rustix::event::epoll::EventFlags;

use crate::service::ConnectionId;

#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Those that have something to be read, or calls left from the last turn.
    ready: BTreeSet<ConnectionId>,
    /// Those that are not listened to until then: their user has made too many calls, or they
    /// wait for a reply.
    paused: BTreeMap<ConnectionId, u64>,
    /// Those that do not take in their replies.
    blocked: BTreeSet<ConnectionId>,
}

impl Turns {
    /// It is looked at when others have had their turn.
    pub(super) fn add(&mut self, id: ConnectionId) {
        self.ready.insert(id);
    }

    /// It has its turn.
    pub(super) fn begin(&mut self, id: ConnectionId) {
        self.ready.remove(&id);
    }

    pub(super) fn ready(&self) -> impl Iterator<Item = ConnectionId> {
        self.ready.iter().copied()
    }

    /// It is not listened to until then.
    pub(super) fn pause(&mut self, id: ConnectionId, until: u64) {
        self.paused.insert(id, until);
    }

    pub(super) fn is_paused(&self, id: ConnectionId) -> bool {
        self.paused.contains_key(&id)
    }

    /// It goes on. Whether it was paused.
    pub(super) fn resume(&mut self, id: ConnectionId) -> bool {
        self.paused.remove(&id).is_some()
    }

    /// Those whose pause is over go on.
    pub(super) fn resume_due(&mut self, now: u64) -> Vec<ConnectionId> {
        let due = self.paused.iter().filter(|(_, until)| **until <= now);
        let due: Vec<ConnectionId> = due.map(|(id, _)| *id).collect();
        for id in &due {
            self.paused.remove(id);
            self.ready.insert(*id);
        }
        due
    }

    /// When the first pause is over.
    pub(super) fn due(&self) -> Option<u64> {
        self.paused.values().copied().min()
    }

    /// It takes in its replies, or does not. Whether it was otherwise.
    pub(super) fn set_blocked(&mut self, id: ConnectionId, blocked: bool) -> bool {
        if blocked {
            self.blocked.insert(id)
        } else {
            self.blocked.remove(&id)
        }
    }

    pub(super) fn forget(&mut self, id: ConnectionId) {
        self.ready.remove(&id);
        self.paused.remove(&id);
        self.blocked.remove(&id);
    }

    /// What of a connection is reported; its end always is. `on`: what it sends.
    pub(super) fn reported(&self, id: ConnectionId, on: bool) -> EventFlags {
        if self.blocked.contains(&id) {
            EventFlags::OUT
        } else if on {
            EventFlags::IN
        } else {
            EventFlags::empty()
        }
    }
}
