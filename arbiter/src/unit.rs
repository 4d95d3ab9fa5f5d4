//! The reservations of one vCPU with all that stands around them: policy,
//! leases, the guard against guessing, and the registers through which a guest
//! reaches them.

use crate::abi;
use crate::audit::{Auditor, Entropy, Event, Record};
use crate::bank::{Bank, Change, ChangeKind, Effects, Operation};
use crate::control::{Control, Shared};
use crate::cookie::Cookie;
use crate::guard::{Guard, GuardLimits};
use crate::map::LegacyMap;
use crate::phase::Phase;
use crate::policy::{PerKind, Policy};
use crate::reason::Reason;
use crate::register::PcrRegister;
use crate::{Access, CounterId, CounterSet, Layer, Verdict};
use alloc::sync::Arc;

/// What a unit is made of.
#[derive(Clone, Debug)]
pub struct PcrConfig {
    /// Counters that there are.
    pub counters: PerKind,
    /// Bits of the counters.
    pub widths: PerKind,
    /// Who may hold how many.
    pub policy: Policy,
    /// What too many wrong cookies cost.
    pub guard: GuardLimits,
    /// Ticks of the caller's clock in a millisecond; at least 1.
    pub ticks_per_ms: u64,
    /// The machine's phase.
    pub phase: Arc<Phase>,
    /// Counters that legacy names reach once the firmware's phase is over;
    /// `None`: each has its own name.
    pub legacy: Option<PerKind>,
    /// SMM exists and counts as firmware.
    pub smm: bool,
}

/// What an operation can ask for and report to.
#[derive(Debug)]
pub struct Context<'a> {
    /// The caller's clock, in ticks.
    pub now: u64,
    /// Random bits.
    pub entropy: &'a mut dyn Entropy,
    /// Receives decisions.
    pub audit: &'a mut dyn Auditor,
}

/// Who performs an access, and with which cookie.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// The layer.
    pub layer: Layer,
    /// The register that carries the cookie, as it is. Registers that take no
    /// cookie do not look at it.
    pub presented: u64,
}

impl Caller {
    /// One that presents `PCR_DEFAULT_COOKIE`.
    pub const fn legacy(layer: Layer) -> Self {
        Caller {
            layer,
            presented: abi::DEFAULT_COOKIE,
        }
    }
}

/// The reservations of one vCPU.
#[derive(Debug)]
pub struct PcrUnit {
    bank: Bank,
    policy: Policy,
    guard: Guard,
    widths: PerKind,
    ticks_per_ms: u64,
    phase: Arc<Phase>,
    map: LegacyMap,
    /// Counters to be mapped at the end of the firmware's phase, until then.
    unmapped: Option<PerKind>,
    legacy: Option<PerKind>,
    smm: bool,
    /// The earliest end of a lease or revocation.
    deadline: Option<u64>,
}

impl PcrUnit {
    /// A unit in which nothing is reserved.
    pub fn new(config: PcrConfig) -> Self {
        let PerKind {
            programmable,
            fixed,
        } = config.counters;
        PcrUnit {
            bank: Bank::new(programmable, fixed),
            policy: config.policy,
            guard: Guard::new(config.guard),
            widths: config.widths,
            ticks_per_ms: config.ticks_per_ms.max(1),
            phase: config.phase,
            map: LegacyMap::identity(),
            unmapped: config.legacy,
            legacy: config.legacy,
            smm: config.smm,
            deadline: None,
        }
    }

    /// Everything as after power-on; wrong cookies stay counted.
    pub fn reset(&mut self) {
        self.bank.reset();
        self.map = LegacyMap::identity();
        self.unmapped = self.legacy;
        self.deadline = None;
    }

    /// Who holds what.
    pub fn bank(&self) -> &Bank {
        &self.bank
    }

    /// The machine's phase.
    pub fn phase(&self) -> &Phase {
        &self.phase
    }

    /// ECX of CPUID leaf `CPUID_LEAF`.
    pub fn features(&self) -> u32 {
        let mut features = abi::FEATURE_RANDOM | abi::FEATURE_RDPMC;
        if self.legacy.is_some() {
            features |= abi::FEATURE_LEGACY_MAP;
        }
        if self.phase.has_firmware() {
            features |= abi::FEATURE_FIRMWARE;
        }
        if self.smm {
            features |= abi::FEATURE_SMM;
        }
        features
    }

    /// Counters that a shared control reaches.
    #[inline]
    pub fn reached_by(&self, shared: Shared) -> CounterSet {
        self.bank.reached_by(shared)
    }

    /// Legacy names as of now: they change once, when the firmware's phase ends.
    #[inline]
    pub fn map(&mut self) -> &LegacyMap {
        if self.unmapped.is_some() && self.phase.is_over() {
            self.rename();
        }
        &self.map
    }

    #[cold]
    fn rename(&mut self) {
        if let Some(names) = self.unmapped.take() {
            self.map = LegacyMap::around(&self.bank, names.programmable, names.fixed);
        }
    }

    /// What an access to a counter, or to its control, comes to.
    #[inline]
    pub fn check(
        &self,
        layer: Layer,
        cookie: Cookie,
        counter: CounterId,
        access: Access,
    ) -> Verdict {
        self.bank.check(layer, cookie, counter, access)
    }

    /// Takes note of an access that [`PcrUnit::check`] did not permit.
    #[cold]
    pub fn denied(
        &mut self,
        caller: (Layer, Cookie),
        counter: CounterId,
        access: Access,
        verdict: Verdict,
        cx: &mut Context<'_>,
    ) {
        let (layer, cookie) = caller;
        let reason = match self.bank.reservation(counter) {
            Some(reservation) if reservation.is_access(cookie) => Reason::Layer,
            Some(_) if cookie.is_default() => Reason::Held,
            Some(_) => Reason::Cookie,
            None => Reason::Unreserved,
        };
        let event = match (verdict, access) {
            (Verdict::Permit, _) => return,
            (Verdict::Fault, _) => Event::Faulted(reason),
            (Verdict::Drop { .. }, Access::Write) => Event::DroppedWrite(reason),
            (Verdict::Drop { .. }, Access::Read | Access::Rdpmc) => Event::DroppedRead(reason),
        };
        record(cx, layer, Some(counter), event);
        if reason == Reason::Cookie {
            self.wrong_cookie(layer, cx);
        }
    }

    /// A cookie was presented that is not the one.
    fn wrong_cookie(&mut self, layer: Layer, cx: &mut Context<'_>) {
        if let Some(penalty) = self.guard.wrong(cx.now) {
            let ms = self.to_ms(penalty);
            record(cx, layer, None, Event::Barred { ms });
        }
    }

    /// Until when the vCPU is kept off its core; `None` if it may run.
    #[inline]
    pub fn barred_until(&self, now: u64) -> Option<u64> {
        self.guard.barred_until(now)
    }

    /// Wrong cookies so far.
    pub fn wrong_cookies(&self) -> u64 {
        self.guard.total()
    }

    /// RDMSR of a register that is not an alias of the PMU's. `None` is #GP.
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
            PcrRegister::ManagementKey(_)
            | PcrRegister::AccessKey(_)
            | PcrRegister::Counter(_)
            | PcrRegister::Select(_)
            | PcrRegister::Overflow(_)
            | PcrRegister::NoticeVector
            | PcrRegister::Request
            | PcrRegister::Answer
            | PcrRegister::Granted
            | PcrRegister::Notice
            | PcrRegister::Reply => None,
        }
    }

    /// WRMSR of a register that is not an alias of the PMU's. `None` is #GP, and
    /// nothing has changed then.
    pub fn write(
        &mut self,
        register: PcrRegister,
        value: u64,
        caller: Caller,
        cx: &mut Context<'_>,
    ) -> Option<Effects> {
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
            PcrRegister::Phase => return self.end_phase(value, caller, cx),
            PcrRegister::Counter(_)
            | PcrRegister::Select(_)
            | PcrRegister::Overflow(_)
            | PcrRegister::Status(_)
            | PcrRegister::LegacyMap(_)
            | PcrRegister::Random
            | PcrRegister::NoticeVector
            | PcrRegister::Request
            | PcrRegister::Answer
            | PcrRegister::Granted
            | PcrRegister::Notice
            | PcrRegister::Reply => return None,
        };
        let (PcrRegister::ManagementKey(counter)
        | PcrRegister::AccessKey(counter)
        | PcrRegister::Control(counter)
        | PcrRegister::DropValue(counter)) = register
        else {
            return None;
        };
        match done {
            Ok(effects) => Some(effects),
            Err(reason) => {
                let counter = self.has(counter).then_some(counter);
                record(cx, caller.layer, counter, Event::Refused(reason));
                // The default cookie is what one has before one guesses.
                if reason == Reason::Cookie && caller.presented != abi::DEFAULT_COOKIE {
                    self.wrong_cookie(caller.layer, cx);
                }
                None
            }
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
        let cookie = Cookie::new(caller.presented).ok_or(Reason::Malformed)?;
        let change = self.bank.plan(caller.layer, cookie, counter, operation)?;
        self.admit(caller.layer, &change)?;
        Ok(self.carry_out(caller.layer, change, cx))
    }

    /// Whether policy lets a change happen.
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
        match takes {
            true => self.policy.admit(&self.bank, layer, change.counter),
            false => Ok(()),
        }
    }

    /// Carries a change out, starts its lease, and tells of it.
    fn carry_out(&mut self, layer: Layer, change: Change, cx: &mut Context<'_>) -> Effects {
        let counter = change.counter;
        let before = self.bank.reservation(counter).map(|held| held.owner);
        let effects = self.bank.apply(change);
        let lease_ms = self.policy.share(layer).and_then(|share| share.lease_ms);
        let event = match change.kind {
            ChangeKind::Nothing => return effects,
            ChangeKind::Reserve(_) => Event::Reserved { lease_ms },
            ChangeKind::Renew => Event::Renewed,
            ChangeKind::HandOver { .. } => Event::HandedOver {
                from: before.unwrap_or(layer),
            },
            ChangeKind::Release => Event::Released,
            ChangeKind::SetAccess(cookie) => Event::AccessSet {
                private: !cookie.is_default(),
            },
            ChangeKind::SetControl(control) => Event::ControlSet(control),
            ChangeKind::SetDropValue(value) => Event::DropValueSet(value),
        };
        let starts = matches!(
            change.kind,
            ChangeKind::Reserve(_) | ChangeKind::Renew | ChangeKind::HandOver { .. }
        );
        if starts && let Some(reservation) = self.bank.reservation_mut(counter) {
            let ticks = |ms: u32| u64::from(ms).saturating_mul(self.ticks_per_ms);
            reservation.lease = lease_ms.map(|ms| cx.now.saturating_add(ticks(ms)));
        }
        self.find_deadline();
        record(cx, layer, Some(counter), event);
        effects
    }

    fn end_phase(&mut self, value: u64, caller: Caller, cx: &mut Context<'_>) -> Option<Effects> {
        let reason = match value == abi::PHASE_END {
            true if self.phase.end() => {
                record(cx, caller.layer, None, Event::PhaseEnded);
                return Some(Effects::NONE);
            }
            true => Reason::Phase,
            false => Reason::Malformed,
        };
        record(cx, caller.layer, None, Event::Refused(reason));
        None
    }

    fn status(&self, counter: CounterId, now: u64) -> u64 {
        let Some(reservation) = self.bank.reservation(counter) else {
            return 0;
        };
        let flag = |on: bool, bit: u64| if on { bit } else { 0 };
        let revocation = reservation.revocation.map(|revocation| revocation.at);
        let ends = earliest(reservation.lease, revocation);
        let rest = ends.map_or(0, |ends| self.to_ms(ends.saturating_sub(now)));
        abi::STATUS_RESERVED
            | u64::from(reservation.owner.code()) << abi::STATUS_OWNER_SHIFT
            | flag(reservation.is_private(), abi::STATUS_PRIVATE)
            | flag(reservation.lease.is_some(), abi::STATUS_LEASE)
            | flag(revocation.is_some(), abi::STATUS_REVOKING)
            | u64::from(rest) << abi::STATUS_REST_SHIFT
    }

    /// Lets leases and revocations end that are due.
    pub fn tick(&mut self, cx: &mut Context<'_>) -> Effects {
        let mut effects = Effects::NONE;
        if self.deadline.is_none_or(|deadline| cx.now < deadline) {
            return effects;
        }
        for counter in self.bank.held().iter() {
            let Some(reservation) = self.bank.reservation(counter) else {
                continue;
            };
            let owner = reservation.owner;
            let is_due = |at: u64| at <= cx.now;
            let reason = match (reservation.revocation, reservation.lease) {
                (Some(revocation), _) if is_due(revocation.at) => revocation.reason,
                (_, Some(lease)) if is_due(lease) => Reason::Expired,
                _ => continue,
            };
            effects = effects.and(self.revoke(owner, counter, reason, cx));
        }
        self.find_deadline();
        effects
    }

    /// Takes a counter away, which is the arbiter's own decision.
    fn revoke(
        &mut self,
        owner: Layer,
        counter: CounterId,
        reason: Reason,
        cx: &mut Context<'_>,
    ) -> Effects {
        let effects = self.bank.apply(Change {
            counter,
            kind: ChangeKind::Release,
        });
        record(cx, owner, Some(counter), Event::Revoked(reason));
        effects
    }

    /// When [`PcrUnit::tick`] has something to do.
    #[inline]
    pub fn deadline(&self) -> Option<u64> {
        self.deadline
    }

    fn find_deadline(&mut self) {
        let ends = self.bank.held().iter().filter_map(|counter| {
            let reservation = self.bank.reservation(counter)?;
            let revocation = reservation.revocation.map(|revocation| revocation.at);
            earliest(reservation.lease, revocation)
        });
        self.deadline = ends.min();
    }

    fn has(&self, counter: CounterId) -> bool {
        self.bank.counters().contains(counter)
    }

    fn width_mask(&self, counter: CounterId) -> u64 {
        match self.widths.of(counter) {
            width @ 0..64 => (1 << width) - 1,
            _ => u64::MAX,
        }
    }

    /// Ticks in milliseconds, rounded up.
    fn to_ms(&self, ticks: u64) -> u32 {
        u32::try_from(ticks.div_ceil(self.ticks_per_ms)).unwrap_or(u32::MAX)
    }
}

fn record(cx: &mut Context<'_>, layer: Layer, counter: Option<CounterId>, event: Event) {
    cx.audit.record(&Record {
        layer,
        counter,
        event,
    });
}

fn earliest(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}
