//! A naive model of `docs/reference/pcr.md`, written from that page: plain numbers and
//! lists, and none of `arbiter`'s own decisions. Numbers of the ABI stand here
//! as they stand on the page, so that a wrong constant shows.

use arbiter::{
    Access, Control, CounterId, CounterSet, Effects, Entropy, Event, IbsKind, Layer, PerKind,
    Reason, Record, Share, Verdict,
};

use super::mailbox::Mailbox;
use super::script::{Op, Setup};
use super::world::{Numbers, Outcome, Step};

const BASE: u32 = 0x554d_6000;
const INITIAL: u64 = 0x001f_00ff;
const CONTROL_BITS: u64 = 0x011f_03ff;

/// A counter. Unreserved, it has the same state as any other: the page says
/// which cookies, control word and drop value it has then.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) position: u8,
    pub(crate) owner: Option<Layer>,
    pub(crate) management: u64,
    pub(crate) access: u64,
    pub(crate) control: u64,
    pub(crate) drop: u64,
    pub(crate) lease: Option<u64>,
    pub(super) lease_ms: Option<u32>,
}

impl Slot {
    pub(super) fn unreserved(position: u8) -> Self {
        Slot {
            position,
            owner: None,
            management: 0,
            access: 0,
            control: INITIAL,
            drop: 0,
            lease: None,
            lease_ms: None,
        }
    }
}

/// Wrong cookies, and the penalty for them.
#[derive(Debug, Default)]
struct Account {
    /// Each wrong cookie is forgiven a while after the one before: when the
    /// last of them is.
    forgiven_at: u64,
    penalties: u32,
    /// When the last penalty ends.
    until: u64,
}

/// The whole of it.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) now: u64,
    pub(crate) wrong_cookies: u64,
    pub(super) setup: Setup,
    pub(super) slots: Vec<Slot>,
    pub(super) firmware_runs: bool,
    /// Positions by legacy name, once names are mapped.
    names: Option<[Option<u8>; 64]>,
    /// Of firmware and kernel, and of programs.
    accounts: [Account; 2],
    pub(super) mailboxes: [Mailbox; 3],
    entropy: Numbers,
    records: Vec<Record>,
}

/// Who holds what a host's tool takes.
pub(super) fn holder(layer: Layer) -> Layer {
    match layer {
        Layer::HostTool => Layer::Hypervisor,
        other => other,
    }
}

/// Hypervisor and host's tools are one to a guest.
pub(super) fn code(layer: Layer) -> u8 {
    match layer {
        Layer::Firmware => 0,
        Layer::Hypervisor | Layer::HostTool => 1,
        Layer::GuestKernel => 2,
        Layer::GuestUser => 3,
    }
}

pub(super) fn is_fixed(position: u8) -> bool {
    position >= 32
}

impl Model {
    pub(crate) fn new(setup: &Setup) -> Self {
        let positions =
            (0..setup.counters.programmable).chain((0..setup.counters.fixed).map(|n| 32 + n));
        let mut model = Model {
            now: 1,
            wrong_cookies: 0,
            setup: setup.clone(),
            slots: positions.map(Slot::unreserved).collect(),
            firmware_runs: setup.has_firmware,
            names: None,
            accounts: Default::default(),
            mailboxes: Default::default(),
            entropy: Numbers::default(),
            records: Vec::new(),
        };
        model.settle_names();
        model
    }

    pub(crate) fn step(&mut self, op: &Op) -> Step {
        let outcome = match *op {
            Op::Read { index, layer, .. } => self
                .read(index - BASE, layer)
                .map_or(Outcome::Fault, Outcome::Value),
            Op::Write {
                index,
                value,
                layer,
                presented,
            } => self
                .write(index - BASE, value, (layer, presented))
                .map_or(Outcome::Fault, Outcome::Done),
            Op::Access {
                position,
                layer,
                cookie,
                access,
            } => self.access(position, (layer, cookie), access),
            Op::Wait { ticks } => {
                self.now += ticks;
                Outcome::Done(self.expire())
            }
            Op::EndPhase => {
                self.firmware_runs = false;
                self.settle_names();
                Outcome::Nothing
            }
            Op::Reset => {
                self.firmware_runs = self.setup.has_firmware;
                for slot in &mut self.slots {
                    if slot.owner != Some(Layer::Hypervisor) {
                        *slot = Slot::unreserved(slot.position);
                    }
                }
                self.mailboxes = Default::default();
                self.names = None;
                self.settle_names();
                Outcome::Nothing
            }
            Op::Names { bits } => self.shared_bits(bits),
            Op::SetAside { position, cookie } => self
                .set_aside(position, cookie)
                .map_or(Outcome::Fault, Outcome::Done),
            Op::Reply { .. } => {
                let event = Event::Refused(Reason::Malformed);
                self.tell(Layer::GuestKernel, None, event);
                self.mailbox(Layer::GuestKernel)
                    .expect("it has one")
                    .refusal = 8;
                Outcome::Fault
            }
            Op::TakeNotice => {
                let layer = if self.firmware_runs {
                    Layer::Firmware
                } else {
                    Layer::GuestKernel
                };
                let mailbox = self.mailbox(layer).expect("it has one");
                Outcome::Vector(mailbox.take_vector())
            }
        };
        Step {
            outcome,
            records: std::mem::take(&mut self.records),
        }
    }

    fn read(&mut self, offset: u32, layer: Layer) -> Option<u64> {
        let position = u8::try_from(offset % 0x40).ok()?;
        match offset / 0x40 {
            2 => Some(self.at(position)?.control),
            3 => Some(self.at(position)?.drop),
            7 => self.status(position),
            8 => Some(match self.named(position) {
                Some(position) if self.at(position).is_some() => u64::from(position),
                _ => u64::MAX,
            }),
            _ if offset == 0x240 => self.entropy.bits(),
            _ if offset == 0x241 => Some(u64::from(code(layer))),
            _ if offset == 0x242 => Some(u64::from(self.mailbox(layer)?.vector)),
            _ if offset == 0x244 => Some(self.mailbox(layer)?.answer),
            _ if offset == 0x245 => Some(self.mailbox(layer)?.granted),
            _ if offset == 0x246 => Some(self.mailbox(layer)?.read()),
            _ if offset == 0x248 => Some(self.mailbox(layer)?.refusal),
            _ => None,
        }
    }

    fn status(&self, position: u8) -> Option<u64> {
        let slot = self.at(position)?;
        let Some(owner) = slot.owner else {
            return Some(0);
        };
        let rest = slot.lease.map_or(0, |end| end.saturating_sub(self.now));
        let per_ms = self.setup.ticks_per_ms;
        let ms = rest / per_ms + u64::from(rest % per_ms != 0);
        let mut word = 1 + u64::from(code(owner)) * 2;
        if slot.access != 0 {
            word += 16;
        }
        if slot.lease.is_some() {
            word += 32;
        }
        Some(word + ms * (1 << 32))
    }

    fn write(&mut self, offset: u32, value: u64, caller: (Layer, u64)) -> Option<Effects> {
        let len = self.trail_len();
        let done = self.write_register(offset, value, caller);
        let refused = self.records[len..]
            .iter()
            .find_map(|record| match record.event {
                // A right cookie in a wrong layer looks like a wrong one.
                Event::Refused(Reason::Layer) => Some(13),
                Event::Refused(reason) => Some(reason.code()),
                _ => None,
            });
        if let (None, Some(reason), Some(mailbox)) = (&done, refused, self.mailbox(caller.0)) {
            mailbox.refusal = reason;
        }
        done
    }

    fn write_register(&mut self, offset: u32, value: u64, caller: (Layer, u64)) -> Option<Effects> {
        match offset {
            0x241 => return self.write_phase(value, caller.0),
            0x242 | 0x243 | 0x247 => return self.write_mailbox(offset, value, caller),
            _ => {}
        }
        let row = offset / 0x40;
        if row > 3 {
            return None;
        }
        let position = u8::try_from(offset % 0x40).ok()?;
        let before = self.slots.clone();
        match self.manage(row, position, value, caller) {
            Ok(event) => {
                if let Some(event) = event {
                    self.tell(holder(caller.0), Some(position), event);
                }
                Some(self.effects_since(&before))
            }
            Err(reason) => {
                let known = self.at(position).map(|slot| slot.position);
                self.tell(caller.0, known, Event::Refused(reason));
                self.guessed(reason, caller);
                None
            }
        }
    }

    fn write_phase(&mut self, value: u64, layer: Layer) -> Option<Effects> {
        let event = match (value, self.firmware_runs) {
            (1, true) => Event::PhaseEnded,
            (1, false) => Event::Refused(Reason::Phase),
            _ => Event::Refused(Reason::Malformed),
        };
        self.tell(layer, None, event);
        if event != Event::PhaseEnded {
            return None;
        }
        self.firmware_runs = false;
        self.settle_names();
        Some(Effects::NONE)
    }

    /// The table under "Reserving", and what stands below it.
    fn manage(
        &mut self,
        row: u32,
        position: u8,
        value: u64,
        (layer, presented): (Layer, u64),
    ) -> Result<Option<Event>, Reason> {
        let width = if position >= 62 {
            64
        } else if is_fixed(position) {
            self.setup.widths.fixed
        } else {
            self.setup.widths.programmable
        };
        let too_much = match row {
            0 | 1 => u128::from(value) >= 1 << 48,
            2 => value & !CONTROL_BITS != 0,
            _ => u128::from(value) >= 1 << width,
        };
        if too_much || u128::from(presented) >= 1 << 48 {
            return Err(Reason::Malformed);
        }
        let slot = self.at(position).ok_or(Reason::NoCounter)?.clone();
        let layer = holder(layer);
        let lease = |owner: Layer, wish: Option<u32>| self.lease(owner, wish);
        let (next, event) = if slot.owner.is_none() {
            if presented != 0 || row != 0 {
                return Err(Reason::Unreserved);
            }
            if value == 0 {
                return Ok(None);
            }
            self.may_take(layer, position)?;
            let (lease, lease_ms) = lease(layer, None);
            let next = Slot {
                owner: Some(layer),
                management: value,
                lease,
                lease_ms,
                ..slot
            };
            (next, Event::Reserved { lease_ms })
        } else {
            if slot.control >> code(layer) & 1 == 0 {
                return Err(Reason::Layer);
            }
            if presented != slot.management {
                return Err(Reason::Cookie);
            }
            let owner = slot.owner.unwrap_or(layer);
            match (row, value) {
                (0, 0) => (Slot::unreserved(position), Event::Released),
                (0, same) if same == slot.management => {
                    let (lease, lease_ms) = lease(owner, slot.lease_ms);
                    let next = Slot {
                        lease,
                        lease_ms,
                        ..slot
                    };
                    (next, Event::Renewed)
                }
                (0, management) => {
                    if owner != layer {
                        self.may_take(layer, position)?;
                    }
                    // Its former owner's lease is not the new one's.
                    let wish = slot.lease_ms.filter(|_| owner == layer);
                    let (lease, lease_ms) = lease(layer, wish);
                    let next = Slot {
                        owner: Some(layer),
                        management,
                        lease,
                        lease_ms,
                        ..slot
                    };
                    (next, Event::HandedOver { from: owner })
                }
                (1, access) => {
                    let private = access != 0;
                    (Slot { access, ..slot }, Event::AccessSet { private })
                }
                (2, control) => {
                    let word = Control::new(control).ok_or(Reason::Malformed)?;
                    (Slot { control, ..slot }, Event::ControlSet(word))
                }
                (_, drop) => (Slot { drop, ..slot }, Event::DropValueSet(drop)),
            }
        };
        *self.at_mut(position) = next;
        Ok(Some(event))
    }

    /// Hands the free counters out to the layers that have less than their
    /// minimum: there must be enough of them once `layer` has this one.
    pub(super) fn may_take(&self, layer: Layer, position: u8) -> Result<(), Reason> {
        let share = self.share(layer).ok_or(Reason::Layer)?;
        let of = |number: PerKind| {
            if is_fixed(position) {
                number.fixed
            } else {
                number.programmable
            }
        };
        let owners = self
            .slots
            .iter()
            .filter(|slot| is_fixed(slot.position) == is_fixed(position));
        let mine = |owner: &Option<Layer>| owner.map(code) == Some(code(layer));
        let before: Vec<_> = owners.clone().map(|slot| slot.owner).collect();
        let mut after: Vec<_> = owners
            .map(|slot| {
                if slot.position == position {
                    Some(layer)
                } else {
                    slot.owner
                }
            })
            .collect();
        let held = before.iter().filter(|owner| mine(owner)).count();
        if held >= usize::from(of(share.max)) {
            return Err(Reason::Maximum);
        }
        for other in [Layer::Firmware, Layer::Hypervisor, Layer::GuestKernel] {
            let share = self.share(other).filter(|_| code(other) != code(layer));
            let min = share.map_or(0, |share| usize::from(of(share.min)));
            let its = |owner: &&Option<Layer>| owner.map(code) == Some(code(other));
            while after.iter().filter(its).count() < min {
                let free = after.iter_mut().find(|owner| owner.is_none());
                *free.ok_or(Reason::Minimum)? = Some(other);
            }
        }
        Ok(())
    }

    fn access(&mut self, position: u8, caller: (Layer, u64), access: Access) -> Outcome {
        let (layer, cookie) = caller;
        let slot = self.at(position).expect("the counter exists").clone();
        let bit = |bit: u8| slot.control >> bit & 1 == 1;
        // Programs that guess are not listened to for a while.
        let deaf = layer == Layer::GuestUser && cookie != 0 && self.now < self.accounts[1].until;
        if cookie == slot.access && bit(4 + code(layer)) && !deaf {
            return Outcome::Checked(Verdict::Permit);
        }
        let reason = match (slot.owner, cookie) {
            (None, _) => Reason::Unreserved,
            (Some(_), 0) if slot.access != 0 => Reason::Held,
            (Some(_), _) if !bit(4 + code(layer)) => Reason::Layer,
            (Some(_), _) => Reason::Cookie,
        };
        let at_cpl0 = matches!(layer, Layer::Firmware | Layer::GuestKernel);
        let faults = if access == Access::Rdpmc && at_cpl0 {
            bit(9)
        } else {
            bit(8)
        };
        let event = match (faults, access) {
            (true, _) => Event::Faulted(reason),
            (false, Access::Write) => Event::DroppedWrite(reason),
            (false, _) => Event::DroppedRead(reason),
        };
        self.tell(layer, Some(position), event);
        if !deaf {
            self.guessed(reason, caller);
        }
        Outcome::Checked(if faults {
            Verdict::Fault
        } else {
            Verdict::Drop { read_as: slot.drop }
        })
    }

    /// A wrong cookie is a guess, unless it is the default one, or no cookie
    /// would be right here.
    pub(super) fn guessed(&mut self, reason: Reason, (layer, presented): (Layer, u64)) {
        if presented == 0 || reason != Reason::Cookie {
            return;
        }
        let limits = self.setup.guard;
        self.wrong_cookies += 1;
        if !matches!(
            layer,
            Layer::Firmware | Layer::GuestKernel | Layer::GuestUser
        ) {
            // No guest pays for the host.
            return;
        }
        let now = self.now;
        let is_program = layer == Layer::GuestUser;
        let account = &mut self.accounts[usize::from(is_program)];
        if account.forgiven_at <= now {
            account.forgiven_at = now;
            account.penalties = 0;
        }
        account.forgiven_at += limits.forgive_after.0;
        if account.forgiven_at - now <= u64::from(limits.burst) * limits.forgive_after.0 {
            return;
        }
        let mut ticks = limits.first_penalty.0;
        for _ in 0..account.penalties {
            ticks = (ticks * 2).min(limits.longest_penalty.0);
        }
        account.penalties += 1;
        account.until = now + ticks;
        let ms = ticks.div_ceil(self.setup.ticks_per_ms);
        let ms = u32::try_from(ms).expect("a short penalty");
        let event = if is_program {
            Event::Deaf { ms }
        } else {
            Event::LockedOut { ms }
        };
        self.tell(layer, None, event);
    }

    fn expire(&mut self) -> Effects {
        let before = self.slots.clone();
        for slot in &before {
            if let (Some(owner), Some(end)) = (slot.owner, slot.lease)
                && end <= self.now
            {
                *self.at_mut(slot.position) = Slot::unreserved(slot.position);
                let event = Event::Revoked(Reason::Expired);
                self.tell(owner, Some(slot.position), event);
                // Kind 4, the position, the layer itself, the reason.
                let word = 4 | u64::from(slot.position) << 8 | u64::from(code(owner)) << 16;
                let mailbox = self.mailbox(owner).expect("it holds counters");
                mailbox.push(word | 12 << 24);
            }
        }
        self.effects_since(&before)
    }

    pub(super) fn effects_since(&self, before: &[Slot]) -> Effects {
        let mut effects = Effects::NONE;
        for (old, new) in before.iter().zip(&self.slots) {
            let counter = counter(old.position);
            if old.owner.is_some() && new.owner.is_none() {
                effects.cleared.insert(counter);
            }
            if (old.control ^ new.control) & 0x1f_0000 != 0 {
                effects.reach.insert(counter);
            }
        }
        effects
    }

    /// Names follow what firmware and hypervisor hold when the phase ends.
    fn settle_names(&mut self) {
        let (Some(legacy), false, None) = (self.setup.legacy, self.firmware_runs, self.names)
        else {
            return;
        };
        let mut names = [None; 64];
        let mut next = 0;
        for slot in &self.slots {
            let set_aside = slot.owner.is_some_and(|owner| code(owner) < 2);
            if is_fixed(slot.position) {
                let named = slot.position - 32 < legacy.fixed;
                names[usize::from(slot.position)] = named.then_some(slot.position);
            } else if !set_aside && next < legacy.programmable {
                names[usize::from(next)] = Some(slot.position);
                next += 1;
            }
        }
        self.names = Some(names);
    }

    fn named(&self, name: u8) -> Option<u8> {
        match self.names {
            Some(names) => names[usize::from(name)],
            None => Some(name),
        }
    }

    fn shared_bits(&self, bits: u64) -> Outcome {
        let Some(names) = self.names else {
            return Outcome::Names(bits, bits);
        };
        let mut counters = 0;
        for (name, position) in names.iter().enumerate() {
            if let Some(position) = position {
                counters |= (bits >> name & 1) << position;
            }
        }
        let mut back = 0;
        for (name, position) in names.iter().enumerate() {
            if let Some(position) = position {
                back |= (counters >> position & 1) << name;
            }
        }
        Outcome::Names(counters, back)
    }

    /// The end of a lease that starts now, and how long it is.
    pub(super) fn lease(&self, owner: Layer, wish: Option<u32>) -> (Option<u64>, Option<u32>) {
        let allowed = self.share(owner).and_then(|share| share.lease_ms);
        let ms = wish.into_iter().chain(allowed).min();
        let ticks = |ms| u64::from(ms) * self.setup.ticks_per_ms;
        (ms.map(|ms| self.now + ticks(ms)), ms)
    }

    pub(super) fn share(&self, layer: Layer) -> Option<Share> {
        let policy = &self.setup.policy;
        [
            Some(policy.firmware),
            Some(policy.hypervisor),
            Some(policy.kernel),
            None,
        ][usize::from(code(layer))]
    }

    pub(super) fn at(&self, position: u8) -> Option<&Slot> {
        self.slots.iter().find(|slot| slot.position == position)
    }

    pub(super) fn at_mut(&mut self, position: u8) -> &mut Slot {
        let mut slots = self.slots.iter_mut();
        let slot = slots.find(|slot| slot.position == position);
        slot.expect("the counter exists")
    }

    pub(super) fn tell(&mut self, layer: Layer, position: Option<u8>, event: Event) {
        self.records.push(Record {
            layer,
            counter: position.map(counter),
            event,
        });
    }

    pub(super) fn trail_len(&self) -> usize {
        self.records.len()
    }

    pub(super) fn forget_since(&mut self, len: usize) {
        self.records.truncate(len);
    }

    pub(super) fn sort_since(&mut self, len: usize) {
        self.records[len..].sort_by_key(|record| record.counter);
    }

    pub(super) fn set(&self, is_member: impl Fn(&Slot) -> bool) -> u64 {
        let members = self.slots.iter().filter(|slot| is_member(slot));
        members.map(|slot| 1 << slot.position).sum()
    }

    pub(crate) fn slot(&self, counter: CounterId) -> Option<&Slot> {
        self.at(counter.position()?)
    }

    pub(crate) fn all(&self) -> u64 {
        self.set(|_| true)
    }

    pub(crate) fn held(&self) -> u64 {
        self.set(|slot| slot.management != 0)
    }

    pub(crate) fn held_by(&self, layer: Layer) -> u64 {
        self.set(|slot| slot.owner.map(code) == Some(code(layer)))
    }

    pub(crate) fn reached_by(&self, control_bit: u32) -> u64 {
        self.set(|slot| slot.control >> control_bit & 1 == 1)
    }

    pub(crate) fn deadline(&self) -> Option<u64> {
        self.slots.iter().filter_map(|slot| slot.lease).min()
    }

    pub(crate) fn locked_out_until(&self) -> Option<u64> {
        let until = self.accounts[0].until;
        (self.now < until).then_some(until)
    }
}

pub(super) fn counter(position: u8) -> CounterId {
    let name = match position {
        62 => CounterId::Ibs(IbsKind::Fetch),
        63 => CounterId::Ibs(IbsKind::Op),
        _ if is_fixed(position) => CounterId::Fixed(position - 32),
        _ => CounterId::Programmable(position),
    };
    assert!(CounterSet::from_bits(1 << position).contains(name));
    name
}
