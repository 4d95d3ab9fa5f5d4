//! The mailbox of one layer: the answer to its last request, the request that is
//! pending, and a bounded queue of notices.

use crate::broker::Pending;
use crate::message::{Answer, NoticeKind};
use crate::reason::Reason;
use crate::time::Tsc;
use crate::{CounterId, Layer};

/// Notices that a layer can leave unread. The oldest is lost first, because the
/// layer can still answer the newer ones.
const ROOM: usize = 16;

/// A notice that waits to be read. It has a point in time where the reader gets
/// the time that is left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueuedNotice {
    pub(crate) kind: NoticeKind,
    pub(crate) counter: Option<CounterId>,
    pub(crate) layer: Layer,
    pub(crate) reason: Option<Reason>,
    /// When the answer or the revocation is due, in the caller's ticks.
    pub(crate) due: Option<Tsc>,
}

/// A bounded queue of notices.
#[derive(Clone, Debug, Default)]
struct Queue {
    notices: [Option<QueuedNotice>; ROOM],
    first: usize,
    count: usize,
    lost: bool,
}

impl Queue {
    fn push(&mut self, notice: QueuedNotice) {
        if self.count == ROOM {
            self.first = (self.first + 1) % ROOM;
            self.count -= 1;
            self.lost = true;
        }
        self.notices[(self.first + self.count) % ROOM] = Some(notice);
        self.count += 1;
    }

    /// Takes the oldest notice, and whether notices before it were lost.
    fn pop(&mut self) -> Option<(QueuedNotice, bool)> {
        let notice = self.notices[self.first].take()?;
        self.first = (self.first + 1) % ROOM;
        self.count -= 1;
        Some((notice, core::mem::take(&mut self.lost)))
    }
}

/// The mailbox of one layer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mailbox {
    pub(crate) answer: Answer,
    pub(crate) pending: Option<Pending>,
    /// Why the layer's last write that raised #GP did.
    pub(crate) refusal: Option<Reason>,
    /// Vector of the interrupt for notices. 0 means none.
    vector: u8,
    /// Notices have come for which no interrupt was raised.
    due: bool,
    queue: Queue,
}

impl Mailbox {
    /// Numbers the next request. Number 0 is left out: it means that nothing was
    /// asked.
    pub(crate) fn number(&mut self) -> u16 {
        self.answer.number = match self.answer.number.wrapping_add(1) {
            0 => 1,
            number => number,
        };
        self.answer.number
    }

    pub(crate) fn vector(&self) -> u8 {
        self.vector
    }

    pub(crate) fn set_vector(&mut self, vector: u8) {
        self.vector = vector;
        self.due = self.queue.count != 0;
    }

    pub(crate) fn push(&mut self, notice: QueuedNotice) {
        self.queue.push(notice);
        self.due = true;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.count == 0
    }

    pub(crate) fn pop(&mut self) -> Option<(QueuedNotice, bool)> {
        let oldest = self.queue.pop();
        self.due &= self.queue.count != 0;
        oldest
    }

    /// Whether notices have come of which nobody was told.
    pub(crate) fn is_due(&self) -> bool {
        self.due
    }

    /// Somebody was told.
    pub(crate) fn announced(&mut self) {
        self.due = false;
    }

    /// The vector to raise now. One interrupt stands for all notices that have come.
    pub(crate) fn take_vector(&mut self) -> Option<u8> {
        let vector = (self.due && self.vector != 0).then_some(self.vector)?;
        self.due = false;
        Some(vector)
    }
}
