//! The registers of the block: reads and writes by a guest.

use super::{Caller, PcrUnit};
use crate::CounterId;
use crate::abi;
use crate::audit::{Ask, AskRecord, AskResult, Context, Event, Presented};
use crate::control::Control;
use crate::cookie::Cookie;
use crate::counter::PerKind;
use crate::message::{Notice, Reply, Request};
use crate::reason::Reason;
use crate::register::PcrRegister;
use crate::reservation::{Effects, Operation, Reservation};
use crate::time::{Clock, Tsc, earliest};

impl PcrUnit {
    /// Reads a register. `None` means #GP, as for the aliases of the PMU's registers,
    /// which the PMU serves itself.
    pub fn read(
        &mut self,
        register: PcrRegister,
        caller: Caller,
        cx: &mut Context<'_>,
    ) -> Option<u64> {
        let layer = caller.layer;
        match register {
            PcrRegister::Control(counter) => self.read_of(counter, |held| {
                held.map_or(Control::INITIAL, |held| held.control).bits()
            }),
            PcrRegister::DropValue(counter) => {
                self.read_of(counter, |held| held.map_or(0, |held| held.drop_value))
            }
            PcrRegister::Status(counter) => self.read_of(counter, |held| {
                held.map_or(0, |held| status(held, self.arbitration.clock(), cx.now))
            }),
            PcrRegister::LegacyMap(name) => {
                let behind = self.map().counter(name);
                let position = behind.filter(|counter| self.has(*counter));
                let position = position.and_then(CounterId::position);
                Some(position.map_or(abi::LEGACY_NONE, u64::from))
            }
            PcrRegister::Random => cx.entropy.bits(),
            PcrRegister::Phase => Some(u64::from(layer.code())),
            PcrRegister::NoticeVector => self.arbitration.mailboxes().vector(layer).map(u64::from),
            PcrRegister::Answer => Some(self.arbitration.mailboxes().answer(layer)?.word()),
            PcrRegister::Granted => {
                let answer = self.arbitration.mailboxes().answer(layer)?;
                Some(answer.granted().bits())
            }
            PcrRegister::Notice if self.arbitration.mailboxes().has(layer) => {
                let notice = self.next_notice(layer, cx.now);
                Some(notice.map_or(abi::NOTICE_NONE, Notice::word))
            }
            PcrRegister::Refusal => self.arbitration.mailboxes().refusal(layer),
            PcrRegister::Notice
            | PcrRegister::ManagementKey(_)
            | PcrRegister::AccessKey(_)
            | PcrRegister::Counter(_)
            | PcrRegister::Select(_)
            | PcrRegister::Overflow(_)
            | PcrRegister::Ibs(_)
            | PcrRegister::Request
            | PcrRegister::Reply => None,
        }
    }

    /// Writes a register. `None` means #GP, and nothing has changed then. The PMU
    /// itself serves the aliases of its registers.
    pub fn write(
        &mut self,
        register: PcrRegister,
        value: u64,
        caller: Caller,
        cx: &mut Context<'_>,
    ) -> Option<Effects> {
        let ask = self.ask_of(register, value, caller);
        let done = self.perform(register, value, caller, cx)?;
        if let Some((ask, presented)) = ask {
            cx.audit.asked(&AskRecord {
                layer: caller.layer.as_holder(),
                ask,
                presented,
                result: AskResult::of(&done),
            });
        }
        match done {
            Ok(effects) => Some(effects),
            Err(reason) => {
                self.refuse(register, reason, caller, cx);
                None
            }
        }
    }

    /// Does what a write asks for. `None`: the register is none that is written here.
    fn perform(
        &mut self,
        register: PcrRegister,
        value: u64,
        caller: Caller,
        cx: &mut Context<'_>,
    ) -> Option<Result<Effects, Reason>> {
        let layer = caller.layer;
        Some(match register {
            PcrRegister::ManagementKey(counter) => {
                let operation = Cookie::new(value).map(Operation::Manage);
                self.operate(counter, operation, caller, cx)
            }
            PcrRegister::AccessKey(counter) => {
                let operation = Cookie::new(value).map(Operation::SetAccess);
                self.operate(counter, operation, caller, cx)
            }
            PcrRegister::Control(counter) => {
                let operation = Control::new(value).map(Operation::SetControl);
                self.operate(counter, operation, caller, cx)
            }
            PcrRegister::DropValue(counter) => {
                let fits = value & !mask_of(counter, self.widths) == 0;
                let operation = fits.then_some(Operation::SetDropValue(value));
                self.operate(counter, operation, caller, cx)
            }
            PcrRegister::Phase => {
                let ended = self.arbitration.end_phase(value, layer, cx);
                ended.map(|()| self.arbitration.take_effects())
            }
            PcrRegister::NoticeVector => {
                let set = self.arbitration.mailboxes_mut().set_vector(layer, value);
                set.map(|()| Effects::NONE)
            }
            PcrRegister::Request => Request::decode(value, caller.presented)
                .and_then(|request| self.request(layer, request, cx))
                .map(|(_, effects)| effects),
            PcrRegister::Reply => {
                Reply::decode(value).and_then(|reply| self.reply_presenting(caller, reply, cx))
            }
            PcrRegister::Counter(_)
            | PcrRegister::Select(_)
            | PcrRegister::Overflow(_)
            | PcrRegister::Ibs(_)
            | PcrRegister::Status(_)
            | PcrRegister::LegacyMap(_)
            | PcrRegister::Random
            | PcrRegister::Answer
            | PcrRegister::Granted
            | PcrRegister::Notice
            | PcrRegister::Refusal => return None,
        })
    }

    /// A write raises #GP for this reason.
    fn refuse(
        &mut self,
        register: PcrRegister,
        reason: Reason,
        caller: Caller,
        cx: &mut Context<'_>,
    ) {
        let counter = match register {
            PcrRegister::ManagementKey(counter)
            | PcrRegister::AccessKey(counter)
            | PcrRegister::Control(counter)
            | PcrRegister::DropValue(counter) => self.has(counter).then_some(counter),
            _ => None,
        };
        cx.record(caller.layer, counter, Event::Refused(reason));
        self.arbitration
            .mailboxes_mut()
            .refuse(caller.layer, reason.as_shown());
        // A register that takes no cookie compares none.
        let is_default = !register.takes_cookie(true) || caller.presented == abi::DEFAULT_COOKIE;
        self.guessed(reason, caller.layer, is_default, cx);
    }

    /// What a write asks of the arbiter, unless it is malformed or decides nothing
    /// about who holds a counter. Request and reply are recorded where the hypervisor
    /// makes them too.
    fn ask_of(
        &self,
        register: PcrRegister,
        value: u64,
        caller: Caller,
    ) -> Option<(Ask, Presented)> {
        let of = |counter| {
            let cookie = Cookie::new(caller.presented)?;
            Some(self.presented(caller.layer, counter, cookie))
        };
        match register {
            PcrRegister::ManagementKey(counter) => {
                let gives_back = Cookie::new(value)?.is_default();
                let ask = Ask::Key {
                    counter,
                    gives_back,
                };
                Some((ask, of(counter)?))
            }
            PcrRegister::Control(counter) => {
                Some((Ask::Control(counter, Control::new(value)?), of(counter)?))
            }
            PcrRegister::Phase if self.arbitration.firmware().smram_of(value).is_ok() => {
                Some((Ask::EndPhase, Presented::Nothing))
            }
            _ => None,
        }
    }

    fn operate(
        &mut self,
        counter: CounterId,
        operation: Option<Operation>,
        caller: Caller,
        cx: &mut Context<'_>,
    ) -> Result<Effects, Reason> {
        let operation = operation.ok_or(Reason::Malformed)?;
        let layer = caller.layer.as_holder();
        let cookie = Cookie::new(caller.presented).ok_or(Reason::Malformed)?;
        let rules = self.arbitration.books().rules;
        let change = rules.plan(self.bank(), (layer, cookie), counter, operation)?;
        self.arbitration.books().admit(layer, &change)?;
        self.arbitration.carry_out(layer, change, cx);
        Ok(self.arbitration.take_effects())
    }

    /// Replies for a layer of the guest, which writes `REPLY`. That takes the
    /// counter's cookie, as giving it back does: a component of a layer must neither
    /// give away nor keep a counter of another component.
    fn reply_presenting(
        &mut self,
        caller: Caller,
        reply: Reply,
        cx: &mut Context<'_>,
    ) -> Result<Effects, Reason> {
        let layer = caller.layer.as_holder();
        let asked = self.arbitration.requests().asked_for(layer, reply.counter);
        asked.ok_or(Reason::Malformed)?;
        let cookie = Cookie::new(caller.presented).ok_or(Reason::Malformed)?;
        if let Err(reason) = self.check_cookie(layer, reply.counter, cookie) {
            let presented = self.presented(layer, reply.counter, cookie);
            cx.audit.asked(&AskRecord {
                layer,
                ask: Ask::Reply(reply),
                presented,
                result: AskResult::Faulted(reason),
            });
            return Err(reason);
        }
        self.reply(layer, reply, cx)
    }

    /// What a register of a counter that exists shows of its reservation.
    fn read_of(
        &self,
        counter: CounterId,
        shown: impl FnOnce(Option<&Reservation>) -> u64,
    ) -> Option<u64> {
        self.has(counter)
            .then(|| shown(self.bank().reservation(counter)))
    }
}

/// The bits that a counter of this width has.
fn mask_of(counter: CounterId, widths: PerKind) -> u64 {
    match widths.of(counter) {
        // A register of a sampler has up to 64 bits.
        _ if matches!(counter, CounterId::Ibs(_)) => u64::MAX,
        width @ 0..64 => (1 << width) - 1,
        _ => u64::MAX,
    }
}

/// `STATUS` of a counter that is held.
fn status(held: &Reservation, clock: Clock, now: Tsc) -> u64 {
    let flag = |on: bool, bit: u64| if on { bit } else { 0 };
    let revocation = held.revocation.map(|revocation| revocation.at);
    let ends = earliest(held.lease, revocation);
    let rest = ends.map_or(0, |ends| clock.to_ms(ends - now));
    abi::STATUS_RESERVED
        | u64::from(held.owner.code()) << abi::STATUS_OWNER_SHIFT
        | flag(held.is_private(), abi::STATUS_PRIVATE)
        | flag(held.lease.is_some(), abi::STATUS_LEASE)
        | flag(revocation.is_some(), abi::STATUS_REVOKING)
        | u64::from(rest) << abi::STATUS_REST_SHIFT
}
