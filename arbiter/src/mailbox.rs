//! The mailboxes: what each layer is answered, and a bounded queue of its notices.
//! Nothing is decided from what stands in them.

use crate::abi;
use crate::message::{Answer, NoticeKind, Outcome};
use crate::policy::LAYERS;
use crate::reason::Reason;
use crate::time::Tsc;
use crate::{CounterId, Layer};

/// The lowest vector that an interrupt can have.
const LEAST_VECTOR: u64 = 16;

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

impl QueuedNotice {
    /// A notice about a counter, to a reader who learns that `layer` has to do with it.
    pub(crate) fn about(kind: NoticeKind, counter: CounterId, layer: Layer) -> Self {
        QueuedNotice {
            kind,
            counter: Some(counter),
            layer,
            reason: None,
            due: None,
        }
    }

    /// A notice about the reader's own request.
    pub(crate) fn about_request(kind: NoticeKind, layer: Layer, reason: Option<Reason>) -> Self {
        QueuedNotice {
            kind,
            counter: None,
            layer,
            reason,
            due: None,
        }
    }

    pub(crate) fn because(self, reason: impl Into<Option<Reason>>) -> Self {
        QueuedNotice {
            reason: reason.into(),
            ..self
        }
    }

    pub(crate) fn due(self, at: Tsc) -> Self {
        QueuedNotice {
            due: Some(at),
            ..self
        }
    }
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
struct Mailbox {
    answer: Answer,
    /// Why the layer's last write that raised #GP did.
    refusal: Option<Reason>,
    /// Vector of the interrupt for notices. 0 means none.
    vector: u8,
    /// Notices have come for which no interrupt was raised.
    due: bool,
    queue: Queue,
}

/// The mailboxes of a vCPU's layers. A layer that cannot hold counters has none.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mailboxes {
    /// By the layer's code.
    of: [Mailbox; LAYERS],
}

impl Mailboxes {
    fn get(&self, layer: Layer) -> Option<&Mailbox> {
        self.of.get(usize::from(layer.code()))
    }

    fn get_mut(&mut self, layer: Layer) -> Option<&mut Mailbox> {
        self.of.get_mut(usize::from(layer.code()))
    }

    pub(crate) fn has(&self, layer: Layer) -> bool {
        self.get(layer).is_some()
    }

    /// Numbers the next request of a layer. Number 0 is left out: it means that nothing
    /// was asked.
    pub(crate) fn number(&mut self, layer: Layer) {
        if let Some(mailbox) = self.get_mut(layer) {
            let next = mailbox.answer.number.wrapping_add(1);
            mailbox.answer.number = next.max(1);
        }
    }

    /// The answer to the last request of a layer.
    pub(crate) fn answer(&self, layer: Layer) -> Option<Answer> {
        Some(self.get(layer)?.answer)
    }

    pub(crate) fn set_outcome(&mut self, layer: Layer, outcome: Outcome) {
        if let Some(mailbox) = self.get_mut(layer) {
            mailbox.answer.outcome = outcome;
        }
    }

    /// `REFUSAL`: the reason of the layer's last write that raised #GP for it.
    pub(crate) fn refusal(&self, layer: Layer) -> Option<u64> {
        let refusal = self.get(layer)?.refusal;
        Some(refusal.map_or(abi::REASON_NONE, Reason::code))
    }

    pub(crate) fn refuse(&mut self, layer: Layer, reason: Reason) {
        if let Some(mailbox) = self.get_mut(layer) {
            mailbox.refusal = Some(reason);
        }
    }

    pub(crate) fn vector(&self, layer: Layer) -> Option<u8> {
        Some(self.get(layer)?.vector)
    }

    /// Sets the vector of the interrupt for notices, which stands at once for those that
    /// wait.
    ///
    /// # Errors
    /// The layer has no mailbox, or no interrupt has this vector.
    pub(crate) fn set_vector(&mut self, layer: Layer, value: u64) -> Result<(), Reason> {
        let mailbox = self.get_mut(layer).ok_or(Reason::Layer)?;
        let vector = u8::try_from(value).ok();
        let vector = vector.filter(|_| value == 0 || value >= LEAST_VECTOR);
        mailbox.vector = vector.ok_or(Reason::Malformed)?;
        mailbox.due = mailbox.queue.count != 0;
        Ok(())
    }

    pub(crate) fn push(&mut self, layer: Layer, notice: QueuedNotice) {
        if let Some(mailbox) = self.get_mut(layer) {
            mailbox.queue.push(notice);
            mailbox.due = true;
        }
    }

    #[inline]
    pub(crate) fn has_notice(&self, layer: Layer) -> bool {
        self.get(layer).is_some_and(|one| one.queue.count != 0)
    }

    /// Takes the oldest notice of a layer, and whether notices before it were lost.
    pub(crate) fn pop(&mut self, layer: Layer) -> Option<(QueuedNotice, bool)> {
        let mailbox = self.get_mut(layer)?;
        let oldest = mailbox.queue.pop();
        mailbox.due &= mailbox.queue.count != 0;
        oldest
    }

    /// Whether notices have come of which the layer was not told.
    #[inline]
    pub(crate) fn is_due(&self, layer: Layer) -> bool {
        self.get(layer).is_some_and(|mailbox| mailbox.due)
    }

    /// The layer was told.
    pub(crate) fn announced(&mut self, layer: Layer) {
        if let Some(mailbox) = self.get_mut(layer) {
            mailbox.due = false;
        }
    }

    /// The vector to raise now. One interrupt stands for all notices that have come.
    pub(crate) fn take_vector(&mut self, layer: Layer) -> Option<u8> {
        let mailbox = self.get_mut(layer)?;
        let vector = (mailbox.due && mailbox.vector != 0).then_some(mailbox.vector)?;
        mailbox.due = false;
        Some(vector)
    }
}
