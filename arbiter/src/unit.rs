//! The reservations of one vCPU with all that stands around them: policy,
//! leases, the scheme and its mailbox, the guard against guessing, and the
//! registers through which a guest reaches them.
//!
//! What is decided about another layer's counters, `broker` decides; `serve`
//! carries it out.

mod access;
#[cfg(test)]
mod model;
mod registers;
mod requests;
mod serve;
mod time;
mod transfer;

use crate::abi;
use crate::audit::{Auditor, Entropy, Event, Record};
use crate::bank::{Bank, Change, ChangeKind, Effects, Reservation};
use crate::broker::LAYERS;
use crate::control::{Control, Shared};
use crate::cookie::Cookie;
use crate::guard::{Guard, GuardLimits};
use crate::layer::Phase;
use crate::mailbox::Mailbox;
use crate::map::LegacyMap;
use crate::policy::{PerKind, Policy, Scheme};
use crate::reason::Reason;
use crate::{CounterId, CounterSet, Layer};
use alloc::sync::Arc;
use core::fmt;

/// What a unit is made of.
#[derive(Clone, Debug)]
pub struct PcrConfig {
    /// Counters that there are.
    pub counters: PerKind,
    /// Bits of the counters.
    pub widths: PerKind,
    /// Who may hold how many; one that the counters can keep ([`Policy::fits`]).
    pub policy: Policy,
    /// Who reserves, and how layers come by each other's counters.
    pub scheme: Scheme,
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
#[derive(Clone, Copy)]
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

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller")
            .field("layer", &self.layer)
            // Its own `Debug` tells nothing of a cookie.
            .field("presented", &Cookie::new(self.presented))
            .finish()
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
    scheme: Scheme,
    /// By the layer's code.
    mailboxes: [Mailbox; LAYERS],
    /// Of the last request that had to be arbitrated.
    sequence: u64,
    /// The earliest end of a lease, a question or the time before a revocation.
    deadline: Option<u64>,
}

/// How the hypervisor sets a counter aside: nobody else can use it, and no
/// legacy control reaches it.
const SET_ASIDE: Control =
    match Control::new(abi::CONTROL_MANAGE_HYPERVISOR | abi::CONTROL_ACCESS_HYPERVISOR) {
        Some(control) => control,
        None => panic!("these bits exist"),
    };

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
            scheme: config.scheme,
            mailboxes: Default::default(),
            sequence: 0,
            deadline: None,
        }
    }

    /// Everything of the guest's as after power-on. What the hypervisor holds it
    /// keeps, and wrong cookies stay counted.
    pub fn reset(&mut self) {
        let before = self.bank.clone();
        let unanswered = self.pending(Layer::Hypervisor);
        let unanswered = unanswered.map_or(CounterSet::EMPTY, |pending| pending.got);
        self.bank.reset();
        for counter in (before.held_by(Layer::Hypervisor) & !unanswered).iter() {
            if let Some(reservation) = before.reservation(counter) {
                let mut kept = *reservation;
                kept.revocation = None;
                let kind = ChangeKind::Reserve(kept);
                // What a reset means for the PMU, its own reset knows.
                let _ = self.bank.apply(Change { counter, kind });
            }
        }
        self.mailboxes = Default::default();
        self.map = LegacyMap::identity();
        self.unmapped = self.legacy;
        self.find_deadline();
    }

    /// Sets a counter aside for the hypervisor, before the guest starts or
    /// later: out of reach for every other layer and every legacy control, and
    /// without a lease, whatever policy says of the hypervisor's.
    ///
    /// # Errors
    /// It cannot be had: there is no such counter, somebody holds it, or policy
    /// leaves it to another layer.
    pub fn reserve_for_hypervisor(
        &mut self,
        counter: CounterId,
        cookie: Cookie,
        cx: &mut Context<'_>,
    ) -> Result<Effects, Reason> {
        let layer = Layer::Hypervisor;
        let checked = match self.bank.reservation(counter) {
            _ if !self.has(counter) => Err(Reason::NoCounter),
            _ if cookie.is_default() => Err(Reason::Malformed),
            Some(_) => Err(Reason::Held),
            None => self.policy.admit(&self.bank, layer, counter),
        };
        if let Err(reason) = checked {
            record(cx, layer, Some(counter), Event::Refused(reason));
            return Err(reason);
        }
        let mut reservation = Reservation::new(layer, cookie, cookie);
        reservation.control = SET_ASIDE;
        let kind = ChangeKind::Reserve(reservation);
        let mut effects = self.apply(Change { counter, kind });
        effects.cleared.insert(counter);
        // Nobody would renew a lease of the hypervisor's own.
        let lease_ms = None;
        record(cx, layer, Some(counter), Event::Reserved { lease_ms });
        self.find_deadline();
        Ok(effects)
    }

    /// Who holds what.
    pub fn bank(&self) -> &Bank {
        &self.bank
    }

    /// Who may hold how many.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// How layers arbitrate.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The machine's phase.
    pub fn phase(&self) -> &Phase {
        &self.phase
    }

    /// ECX of CPUID leaf `CPUID_LEAF`.
    pub fn features(&self) -> u32 {
        let mut features = abi::FEATURE_RANDOM | abi::FEATURE_RDPMC | abi::FEATURE_MAILBOX;
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
            // What a firmware that runs no more was still gathering is not its own:
            // the request is refused, here at the next tick at the latest.
            let lost = match self.is_alive(Layer::Firmware) {
                true => None,
                false => self.pending(Layer::Firmware).map(|pending| pending.got),
            };
            self.map = LegacyMap::around(&self.bank, lost.unwrap_or_default(), names);
            self.find_deadline();
        }
    }

    /// Every change of the bank: names follow what was held when the phase ended,
    /// not what is held later, so they are settled before.
    fn apply(&mut self, change: Change) -> Effects {
        let _ = self.map();
        self.bank.apply(change)
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

    /// Milliseconds in ticks.
    fn to_ticks(&self, ms: u32) -> u64 {
        u64::from(ms).saturating_mul(self.ticks_per_ms)
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
