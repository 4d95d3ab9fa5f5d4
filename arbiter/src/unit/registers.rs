//! The registers of the block: reads and writes by a guest.

use super::{Caller, Context, PcrUnit, SmramSource, record};
use crate::abi;
use crate::audit::{Ask, AskRecord, AskResult, Event, Presented};
use crate::bank::Bank;
use crate::control::Control;
use crate::cookie::Cookie;
use crate::message::{Notice, Reply, Request};
use crate::policy::Scheme;
use crate::reason::Reason;
use crate::register::PcrRegister;
use crate::reservation::{Change, ChangeKind, Effects, Operation, Reservation};
use crate::time::Tsc;
use crate::{CounterId, Layer};

impl PcrUnit {
    /// Reads a register. `None` means #GP, as for the aliases of the PMU's registers,
    /// which the PMU serves itself.
    pub fn read(
        &mut self,
        register: PcrRegister,
        caller: Caller,
        cx: &mut Context<'_>,
    ) -> Option<u64> {
        match register {
            PcrRegister::Control(counter) => {
                let control = |bank: &Bank| match bank.reservation(counter) {
                    Some(reservation) => reservation.control.bits(),
                    None => Control::INITIAL.bits(),
                };
                self.has(counter).then(|| control(&self.bank))
            }
            PcrRegister::DropValue(counter) => {
                let reservation = self.bank.reservation(counter);
                let value = reservation.map_or(0, |reservation| reservation.drop_value);
                self.has(counter).then_some(value)
            }
            PcrRegister::Status(counter) => self.has(counter).then(|| self.status(counter, cx.now)),
            PcrRegister::LegacyMap(name) => {
                let bank = self.bank.counters();
                let behind = self.map().counter(name);
                let position = behind.filter(|counter| bank.contains(*counter));
                Some(match position.and_then(CounterId::position) {
                    Some(position) => u64::from(position),
                    None => abi::LEGACY_NONE,
                })
            }
            PcrRegister::Random => cx.entropy.bits(),
            PcrRegister::Phase => Some(u64::from(caller.layer.code())),
            PcrRegister::NoticeVector => Some(u64::from(self.mailbox(caller.layer)?.vector())),
            PcrRegister::Answer => Some(self.mailbox(caller.layer)?.answer.word()),
            PcrRegister::Granted => Some(self.mailbox(caller.layer)?.answer.granted().bits()),
            PcrRegister::Notice => {
                self.mailbox(caller.layer)?;
                let notice = self.next_notice(caller.layer, cx.now);
                Some(notice.map_or(abi::NOTICE_NONE, Notice::word))
            }
            PcrRegister::Refusal => {
                let refusal = self.mailbox(caller.layer)?.refusal;
                Some(refusal.map_or(abi::REASON_NONE, Reason::code))
            }
            PcrRegister::ManagementKey(_)
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
        let done = match register {
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
                let fits = value & !self.width_mask(counter) == 0;
                let operation = fits.then_some(Operation::SetDropValue(value));
                self.operate(counter, operation, caller, cx)
            }
            PcrRegister::Phase => self.end_phase(value, caller, cx),
            PcrRegister::NoticeVector => self.set_notice_vector(value, caller.layer),
            PcrRegister::Request => Request::decode(value, caller.presented)
                .and_then(|request| self.request(caller.layer, request, cx))
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
        };
        if let Some((ask, presented)) = ask {
            cx.audit.asked(&AskRecord {
                layer: caller.layer.as_holder(),
                ask,
                presented,
                result: match &done {
                    Ok(_) => AskResult::Done,
                    Err(reason) => AskResult::Faulted(*reason),
                },
            });
        }
        match done {
            Ok(effects) => Some(effects),
            Err(reason) => {
                let counter = match register {
                    PcrRegister::ManagementKey(counter)
                    | PcrRegister::AccessKey(counter)
                    | PcrRegister::Control(counter)
                    | PcrRegister::DropValue(counter) => self.has(counter).then_some(counter),
                    _ => None,
                };
                record(cx, caller.layer, counter, Event::Refused(reason));
                if let Some(mailbox) = self.mailbox_mut(caller.layer) {
                    mailbox.refusal = Some(reason.as_shown());
                }
                // A register that takes no cookie compares none.
                let is_default =
                    !register.takes_cookie(true) || caller.presented == abi::DEFAULT_COOKIE;
                self.guessed(reason, caller.layer, is_default, cx);
                None
            }
        }
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
            PcrRegister::Phase if self.smram_of(value).is_ok() => {
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
        let is_masters = self.scheme == Scheme::SingleMaster
            && (layer.is_guest()
                || self
                    .bank
                    .reservation(counter)
                    .is_some_and(Reservation::is_masters));
        let change = if is_masters {
            self.plan_for_master(layer, cookie, counter, operation)?
        } else {
            self.bank.plan(layer, cookie, counter, operation)?
        };
        self.admit(layer, &change)?;
        Ok(self.carry_out(layer, change, cx))
    }

    /// Plans an operation under a single master. Only the master reserves and takes
    /// back. The layer that was granted a counter renews it, and sets its cookies,
    /// control word and drop value, with the cookie of its request.
    fn plan_for_master(
        &self,
        layer: Layer,
        cookie: Cookie,
        counter: CounterId,
        operation: Operation,
    ) -> Result<Change, Reason> {
        let is_key = matches!(operation, Operation::Manage(_) | Operation::SetAccess(_));
        let reservation = match self.bank.reservation(counter) {
            Some(reservation) if reservation.owner == layer && !cookie.is_default() => reservation,
            _ if is_key => return Err(Reason::Master),
            _ if !self.has(counter) => return Err(Reason::NoCounter),
            Some(reservation) if reservation.owner == layer => return Err(Reason::Cookie),
            Some(_) => return Err(Reason::Layer),
            None => return Err(Reason::Unreserved),
        };
        if !reservation.is_management(cookie) {
            return Err(Reason::Cookie);
        }
        let kind = match operation {
            Operation::Manage(new) if new.is_default() => return Err(Reason::Master),
            Operation::Manage(new) if reservation.is_management(new) => ChangeKind::Renew,
            Operation::Manage(management) => ChangeKind::HandOver {
                to: layer,
                management,
            },
            Operation::SetAccess(new) => ChangeKind::SetAccess(new),
            Operation::SetControl(control) => ChangeKind::SetControl(control),
            Operation::SetDropValue(value) => ChangeKind::SetDropValue(value),
        };
        Ok(Change { counter, kind })
    }

    /// Checks that policy admits a change.
    fn admit(&self, layer: Layer, change: &Change) -> Result<(), Reason> {
        let takes = match change.kind {
            ChangeKind::Reserve(_) => true,
            ChangeKind::HandOver { to, .. } => {
                let holder = self.bank.reservation(change.counter);
                holder.is_some_and(|reservation| reservation.owner != to)
            }
            ChangeKind::Nothing
            | ChangeKind::Renew
            | ChangeKind::Release
            | ChangeKind::SetAccess(_)
            | ChangeKind::SetControl(_)
            | ChangeKind::SetDropValue(_) => false,
        };
        if !takes {
            return Ok(());
        }
        if self.is_barred(layer) {
            return Err(Reason::Administrator);
        }
        self.policy.admit(&self.bank, layer, change.counter)?;
        let owner = self.bank.reservation(change.counter).map(|held| held.owner);
        // From one layer of the guest's to another nothing more is needed.
        if owner.is_some_and(Layer::is_guest) {
            return Ok(());
        }
        let rules = (&self.bank, &self.policy);
        match self.backing().left(rules, layer, change.counter, None) {
            0 => Err(Reason::Unbacked),
            _ => Ok(()),
        }
    }

    /// Makes a change, starts its lease, and records it.
    fn carry_out(&mut self, layer: Layer, change: Change, cx: &mut Context<'_>) -> Effects {
        let counter = change.counter;
        let before = self.bank.reservation(counter).copied();
        let effects = self.apply(change);
        let lease_ms = match (change.kind, before) {
            (ChangeKind::Reserve(_), _) => self.start_lease(counter, None, cx.now),
            (ChangeKind::Renew, Some(before)) => self.start_lease(counter, before.lease_ms, cx.now),
            (ChangeKind::HandOver { to, .. }, Some(before)) => {
                // A new owner does not inherit the lease of the former one.
                let lease_ms = before.lease_ms.filter(|_| before.owner == to);
                self.start_lease(counter, lease_ms, cx.now)
            }
            _ => None,
        };
        let event = match change.kind {
            ChangeKind::Nothing => return effects,
            ChangeKind::Reserve(_) => Event::Reserved { lease_ms },
            ChangeKind::Renew => Event::Renewed,
            ChangeKind::HandOver { .. } => Event::HandedOver {
                from: before.map_or(layer, |before| before.owner),
            },
            ChangeKind::Release => Event::Released,
            ChangeKind::SetAccess(cookie) => Event::AccessSet {
                private: !cookie.is_default(),
            },
            ChangeKind::SetControl(control) => Event::ControlSet(control),
            ChangeKind::SetDropValue(value) => Event::DropValueSet(value),
        };
        record(cx, layer, Some(counter), event);
        let effects = effects.and(self.note_change(counter, cx));
        self.find_deadline();
        effects
    }

    fn end_phase(
        &mut self,
        value: u64,
        caller: Caller,
        cx: &mut Context<'_>,
    ) -> Result<Effects, Reason> {
        let smram = self.smram_of(value)?;
        if !self.phase.end() {
            return Err(Reason::Phase);
        }
        self.smram = smram;
        record(cx, caller.layer, None, Event::PhaseEnded);
        let effects = self.serve(cx);
        self.find_deadline();
        Ok(effects)
    }

    /// What a value of `PHASE` says to put into SMRAM.
    fn smram_of(&self, value: u64) -> Result<Option<SmramSource>, Reason> {
        const WORD: u64 = abi::PHASE_PAGE_SIZE - 1;
        const FLAGS: u64 = (1 << abi::PHASE_PAGES_SHIFT) - 1;
        if value == abi::PHASE_END {
            return Ok(None);
        }
        let pages = (value & WORD) >> abi::PHASE_PAGES_SHIFT;
        let is_valid = self.has_smram()
            && value & FLAGS == abi::PHASE_END | abi::PHASE_SMRAM
            && (1..=abi::PHASE_PAGES_MAX).contains(&pages);
        let source = SmramSource {
            address: value & !WORD,
            len: pages * abi::PHASE_PAGE_SIZE,
        };
        is_valid.then_some(Some(source)).ok_or(Reason::Malformed)
    }

    pub(super) fn status(&self, counter: CounterId, now: Tsc) -> u64 {
        let Some(reservation) = self.bank.reservation(counter) else {
            return 0;
        };
        let flag = |on: bool, bit: u64| if on { bit } else { 0 };
        let revocation = reservation.revocation.map(|revocation| revocation.at);
        let ends = super::time::earliest(reservation.lease, revocation);
        let rest = ends.map_or(0, |ends| self.to_ms(ends - now));
        abi::STATUS_RESERVED
            | u64::from(reservation.owner.code()) << abi::STATUS_OWNER_SHIFT
            | flag(reservation.is_private(), abi::STATUS_PRIVATE)
            | flag(reservation.lease.is_some(), abi::STATUS_LEASE)
            | flag(revocation.is_some(), abi::STATUS_REVOKING)
            | u64::from(rest) << abi::STATUS_REST_SHIFT
    }
}
