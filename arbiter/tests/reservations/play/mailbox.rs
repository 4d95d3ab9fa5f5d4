//! The naive model's mailbox, as far as layers do not ask each other: under
//! independent arbiters every request has its answer at once.

use std::collections::VecDeque;

use arbiter::{Effects, Event, Layer, Reason};

use super::model::{Model, Slot, code, holder, is_fixed};

/// What a layer reads: words as the page has them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mailbox {
    pub(super) answer: u64,
    pub(super) granted: u64,
    pub(super) vector: u8,
    pub(super) refusal: u64,
    number: u64,
    notices: VecDeque<u64>,
    lost: bool,
    due: bool,
}

impl Mailbox {
    pub(super) fn push(&mut self, word: u64) {
        if self.notices.len() == 16 {
            self.notices.pop_front();
            self.lost = true;
        }
        self.notices.push_back(word);
        self.due = true;
    }

    pub(super) fn read(&mut self) -> u64 {
        let Some(word) = self.notices.pop_front() else {
            return 0;
        };
        let lost = u64::from(std::mem::take(&mut self.lost)) << 7;
        if self.notices.is_empty() {
            self.due = false;
        }
        word | lost
    }

    pub(super) fn take_vector(&mut self) -> Option<u8> {
        if !self.due || self.vector == 0 {
            return None;
        }
        self.due = false;
        Some(self.vector)
    }

    fn settle(&mut self, answer: Result<u64, Reason>) {
        self.number = self.number % 0xffff + 1;
        let (state, granted) = match answer {
            Ok(counters) => (1, counters),
            Err(reason) => (2 | reason.code() << 8, 0),
        };
        self.answer = state | self.number << 16;
        self.granted = granted;
    }
}

/// What `REQUEST` says.
enum Asked {
    Any(u8),
    This(u8),
    Release(u8),
    Withdraw,
}

fn decode(value: u64, presented: u64) -> Option<Asked> {
    let bytes = value.to_le_bytes();
    let which = bytes[1];
    let lease = u16::from_le_bytes([bytes[2], bytes[3]]);
    let is_cookie = presented >> 48 == 0;
    if value >> 32 != 0 {
        return None;
    }
    match bytes[0] {
        0x01 if is_cookie && presented != 0 && which != 0 => Some(Asked::Any(which)),
        0x11 if is_cookie && presented != 0 && which < 64 => Some(Asked::This(which)),
        0x12 if is_cookie && lease == 0 && which < 64 => Some(Asked::Release(which)),
        0x03 if is_cookie && value == 3 => Some(Asked::Withdraw),
        _ => None,
    }
}

impl Model {
    pub(super) fn mailbox(&mut self, layer: Layer) -> Option<&mut Mailbox> {
        self.mailboxes.get_mut(usize::from(code(layer)))
    }

    pub(super) fn write_mailbox(
        &mut self,
        offset: u32,
        value: u64,
        (layer, presented): (Layer, u64),
    ) -> Option<Effects> {
        let before = self.slots.clone();
        let done = match offset {
            0x242 => self.set_vector(value, layer),
            0x243 => match decode(value, presented) {
                None => Err(Reason::Malformed),
                Some(_) if layer == Layer::GuestUser => Err(Reason::Layer),
                Some(Asked::Withdraw) => Ok(()),
                Some(asked) => {
                    let lease = u32::from(value.to_le_bytes()[2]) * 10;
                    let wish = (lease != 0).then_some(lease);
                    self.ask((holder(layer), presented), asked, wish);
                    Ok(())
                }
            },
            // Nobody is ever asked.
            _ => Err(Reason::Malformed),
        };
        if let Err(reason) = done {
            self.tell(layer, None, Event::Refused(reason));
            if offset == 0x243 {
                self.guessed(reason, (layer, presented));
            }
            return None;
        }
        let mut effects = self.effects_since(&before);
        // What is granted is cleared: legacy software may have used it.
        for (old, new) in before.iter().zip(&self.slots) {
            if old.owner.is_none() && new.owner.is_some() {
                effects.cleared.insert(super::model::counter(old.position));
            }
        }
        Some(effects)
    }

    fn set_vector(&mut self, value: u64, layer: Layer) -> Result<(), Reason> {
        let mailbox = self.mailbox(layer).ok_or(Reason::Layer)?;
        mailbox.vector = match value {
            0 => 0,
            16..=255 => value.to_le_bytes()[0],
            _ => return Err(Reason::Malformed),
        };
        mailbox.due = !mailbox.notices.is_empty();
        Ok(())
    }

    fn ask(&mut self, caller: (Layer, u64), asked: Asked, wish: Option<u32>) {
        let (layer, presented) = caller;
        let answer = match asked {
            Asked::Any(count) => self.grant_any(caller, count, wish),
            Asked::This(n) => match self.at(n).and_then(|slot| slot.owner) {
                Some(owner) if owner == layer => {
                    let renewed = self.dispose(layer, n, presented);
                    let renewed = renewed.map(|()| {
                        let (lease, lease_ms) = self.lease(layer, wish);
                        let slot = self.at_mut(n);
                        (slot.lease, slot.lease_ms) = (lease, lease_ms);
                        self.tell(layer, Some(n), Event::Renewed);
                        1 << n
                    });
                    self.report(caller, n, renewed)
                }
                _ => self.grant_this(caller, n, wish),
            },
            Asked::Release(n) => {
                let released = self.may_release(layer, n, presented).map(|()| {
                    *self.at_mut(n) = Slot::unreserved(n);
                    self.tell(layer, Some(n), Event::Released);
                    1 << n
                });
                self.report(caller, n, released)
            }
            Asked::Withdraw => return,
        };
        let mailbox = self.mailbox(layer).expect("it has one");
        mailbox.settle(answer);
    }

    /// Records a refusal about one counter, and counts a wrong cookie.
    fn report(
        &mut self,
        (layer, presented): (Layer, u64),
        n: u8,
        done: Result<u64, Reason>,
    ) -> Result<u64, Reason> {
        if let Err(reason) = done {
            let known = self.at(n).map(|slot| slot.position);
            self.tell(layer, known, Event::Refused(reason));
            // Whoever gives a counter back knows that it has a cookie.
            self.guessed(reason, (layer, presented.max(1)));
        }
        // A guest is not told a right cookie in a wrong layer from a wrong one.
        done.map_err(|reason| match reason {
            Reason::Layer => Reason::Cookie,
            other => other,
        })
    }

    fn may_release(&self, layer: Layer, n: u8, presented: u64) -> Result<(), Reason> {
        match self.at(n).ok_or(Reason::NoCounter)?.owner {
            None => Err(Reason::Unreserved),
            Some(owner) if owner != layer => Err(Reason::Held),
            Some(_) => self.dispose(layer, n, presented),
        }
    }

    /// Whether the management cookie was presented where it is valid.
    fn dispose(&self, layer: Layer, n: u8, presented: u64) -> Result<(), Reason> {
        let slot = self.at(n).ok_or(Reason::NoCounter)?;
        match (
            presented == slot.management,
            slot.control >> code(layer) & 1,
        ) {
            (_, 0) => Err(Reason::Layer),
            (false, _) => Err(Reason::Cookie),
            (true, _) => Ok(()),
        }
    }

    fn grant_this(
        &mut self,
        caller: (Layer, u64),
        n: u8,
        wish: Option<u32>,
    ) -> Result<u64, Reason> {
        let layer = caller.0;
        let Some(slot) = self.at(n) else {
            self.tell(layer, None, Event::Refused(Reason::NoCounter));
            return Err(Reason::NoCounter);
        };
        let taken = slot.owner.is_some();
        let admitted = match self.may_take(layer, n) {
            _ if !self.runs(layer) => Err(Reason::Phase),
            Err(Reason::Maximum) => Err(Reason::Maximum),
            _ if taken => Err(Reason::Held),
            admitted => admitted,
        };
        if let Err(reason) = admitted {
            self.tell(layer, Some(n), Event::Refused(reason));
            return Err(reason);
        }
        self.grant(caller, n, wish);
        Ok(1 << n)
    }

    /// All or none: the highest free ones, one after the other.
    fn grant_any(
        &mut self,
        caller: (Layer, u64),
        count: u8,
        wish: Option<u32>,
    ) -> Result<u64, Reason> {
        let layer = caller.0;
        let (slots, told) = (self.slots.clone(), self.trail_len());
        let there = slots.iter().filter(|slot| !is_fixed(slot.position));
        let refusal = if there.count() < usize::from(count) {
            Reason::NoCounter
        } else if !self.runs(layer) {
            Reason::Phase
        } else if (0..count).all(|_| self.grant_one(caller, wish)) {
            // Grants are told of by position.
            self.sort_since(told);
            return Ok(self.set(|slot| {
                let was = slots.iter().find(|old| old.position == slot.position);
                slot.owner.is_some() && was.is_some_and(|old| old.owner.is_none())
            }));
        } else {
            self.forget_since(told);
            self.slots.clone_from(&slots);
            self.why_not(layer, count, &slots)
        };
        self.tell(layer, None, Event::Refused(refusal));
        Err(refusal)
    }

    /// The highest programmable counter that is free, if policy lets it.
    fn grant_one(&mut self, caller: (Layer, u64), wish: Option<u32>) -> bool {
        let free = self.slots.iter().rev();
        let free = free
            .filter(|slot| !is_fixed(slot.position) && slot.owner.is_none())
            .map(|slot| slot.position)
            .next();
        let admitted = free.filter(|n| self.may_take(caller.0, *n).is_ok());
        if let Some(n) = admitted {
            self.grant(caller, n, wish);
        }
        admitted.is_some()
    }

    /// Why a layer does not get so many: its maximum, then others' minima, if
    /// so many are free at all.
    fn why_not(&self, layer: Layer, count: u8, slots: &[Slot]) -> Reason {
        let programmable = || slots.iter().filter(|slot| !is_fixed(slot.position));
        let held = programmable().filter(|slot| slot.owner == Some(layer));
        let max = self.share(layer).map_or(0, |share| share.max.programmable);
        if held.count() + usize::from(count) > usize::from(max) {
            return Reason::Maximum;
        }
        let free = programmable().filter(|slot| slot.owner.is_none());
        if free.count() >= usize::from(count) {
            Reason::Minimum
        } else {
            Reason::NoneFree
        }
    }

    fn grant(&mut self, (layer, cookie): (Layer, u64), n: u8, wish: Option<u32>) {
        let (lease, lease_ms) = self.lease(layer, wish);
        *self.at_mut(n) = Slot {
            owner: Some(layer),
            management: cookie,
            access: cookie,
            lease,
            lease_ms,
            ..Slot::unreserved(n)
        };
        self.tell(layer, Some(n), Event::Reserved { lease_ms });
    }

    /// Whether code of the layer can still run.
    fn runs(&self, layer: Layer) -> bool {
        match layer {
            Layer::Firmware => self.firmware_runs,
            Layer::GuestKernel => !self.firmware_runs,
            _ => true,
        }
    }

    /// Out of everybody's reach but the hypervisor's, by its own decision.
    pub(super) fn set_aside(&mut self, n: u8, cookie: u64) -> Option<Effects> {
        let layer = Layer::Hypervisor;
        let before = self.slots.clone();
        let checked = match self.at(n) {
            None => Err(Reason::NoCounter),
            Some(_) if cookie == 0 => Err(Reason::Malformed),
            Some(slot) if slot.owner.is_some() => Err(Reason::Held),
            Some(_) => self.may_take(layer, n),
        };
        if let Err(reason) = checked {
            self.tell(layer, Some(n), Event::Refused(reason));
            return None;
        }
        *self.at_mut(n) = Slot {
            owner: Some(layer),
            management: cookie,
            access: cookie,
            control: 0x22,
            ..Slot::unreserved(n)
        };
        let lease_ms = None;
        self.tell(layer, Some(n), Event::Reserved { lease_ms });
        let mut effects = self.effects_since(&before);
        effects.cleared.insert(super::model::counter(n));
        Some(effects)
    }
}
