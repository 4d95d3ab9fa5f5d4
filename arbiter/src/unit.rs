//! The unit: the reservations of one vCPU with policy, leases, scheme, mailboxes,
//! the guard against guessing, and the registers that guests see.
//!
//! The broker decides about counters of other layers. `serve` carries its decisions
//! out, and `transfer` moves the counters.

mod access;
mod admin;
#[cfg(test)]
mod model;
mod registers;
mod requests;
mod serve;
mod time;
mod transfer;

pub use admin::{AdminAct, AdminError};

use alloc::sync::Arc;
use core::fmt;

use crate::abi;
use crate::account::GuardLimits;
use crate::audit::{Ask, AskRecord, AskResult, Auditor, Entropy, Event, Presented, Record};
use crate::backing::Backing;
use crate::bank::Bank;
use crate::broker::{self, LAYERS};
use crate::control::{Control, Shared};
use crate::cookie::Cookie;
use crate::counter::PerKind;
use crate::guard::Guard;
use crate::layer::Phase;
use crate::mailbox::{Mailbox, QueuedNotice};
use crate::map::LegacyMap;
use crate::message::{NamedEvent, NoticeKind};
use crate::policy::{Policy, Scheme};
use crate::reason::Reason;
use crate::reservation::{Change, ChangeKind, Effects, Reservation};
use crate::time::{Ticks, Tsc};
use crate::{CounterId, CounterSet, Layer};

/// The configuration of a [`PcrUnit`].
#[derive(Clone, Debug)]
pub struct PcrConfig {
    /// The number of counters.
    pub counters: PerKind,
    /// The width of the counters in bits.
    pub widths: PerKind,
    /// How many counters each layer may hold. The counters must suffice for it
    /// ([`Policy::fits`]).
    pub policy: Policy,
    /// Who reserves, and how layers get each other's counters.
    pub scheme: Scheme,
    /// The penalties for wrong cookies, which are counted for all units of a phase.
    pub guard: GuardLimits,
    /// Ticks of the caller's clock in a millisecond. 0 counts as 1.
    pub ticks_per_ms: u64,
    /// The machine's phase, which all its units share.
    pub phase: Arc<Phase>,
    /// How many counters get a legacy name when the firmware's phase ends. `None`
    /// means that each counter keeps its own name.
    pub legacy: Option<PerKind>,
    /// Whether the machine has SMM, which counts as firmware. Who has firmware as well
    /// fills SMRAM when its phase ends ([`PcrUnit::take_smram`]).
    pub smm: bool,
}

/// The event that each layer's request is about, by the layer's code. The inner `None`
/// means any, the outer one that nothing is asked for.
pub type AskedEvents = [Option<Option<NamedEvent>>; LAYERS];

/// Ordinary memory that the firmware has chosen to become the code of SMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmramSource {
    /// Guest-physical address of its first byte.
    pub address: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// What an operation needs from its caller.
#[derive(Debug)]
pub struct Context<'a> {
    /// The caller's time.
    pub now: Tsc,
    /// The source of random bits.
    pub entropy: &'a mut dyn Entropy,
    /// The receiver of decisions.
    pub audit: &'a mut dyn Auditor,
}

/// The layer that performs an access, and the cookie that it presents.
#[derive(Clone, Copy)]
pub struct Caller {
    /// The layer.
    pub layer: Layer,
    /// The raw value of the register that carries the cookie. An access to a
    /// register that takes no cookie ignores it.
    pub presented: u64,
}

impl Caller {
    /// A caller that presents `PCR_DEFAULT_COOKIE`.
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
            // The `Debug` of a cookie prints no bit of it.
            .field("presented", &Cookie::new(self.presented))
            .finish()
    }
}

/// The reservations of one vCPU, and everything that decides about them.
///
/// A caller asks [`PcrUnit::check`] at each access to a counter, passes reads and
/// writes of the registers of the block to [`PcrUnit::read`] and [`PcrUnit::write`],
/// and calls [`PcrUnit::tick`] when [`PcrUnit::deadline`] has come.
#[derive(Debug)]
pub struct PcrUnit {
    bank: Bank,
    policy: Policy,
    guard: Guard,
    widths: PerKind,
    ticks_per_ms: u64,
    phase: Arc<Phase>,
    map: LegacyMap,
    /// The counters to map when the firmware's phase ends. `None` once that is done.
    unmapped: Option<PerKind>,
    legacy: Option<PerKind>,
    smm: bool,
    /// [`PcrUnit::take_smram`].
    smram: Option<SmramSource>,
    scheme: Scheme,
    /// [`PcrUnit::back`].
    backed: Backing,
    /// Something else is held than when that was said, and physical counters differ.
    held_anew: bool,
    /// What the administrator leaves to the layers of the guest.
    budget: PerKind,
    /// Layers, by code, that the administrator has barred.
    barred: [bool; LAYERS],
    /// The mailbox of each layer that has one, by the layer's code.
    mailboxes: [Mailbox; LAYERS],
    /// The number of the last request that had to be arbitrated.
    sequence: u64,
    /// The earliest end of a lease, of a question, or of the time before a
    /// revocation.
    deadline: Option<Tsc>,
}

/// The control word of a counter that the hypervisor sets aside: no other layer can
/// use it, and no shared control reaches it.
const SET_ASIDE: Control =
    match Control::new(abi::CONTROL_MANAGE_HYPERVISOR | abi::CONTROL_ACCESS_HYPERVISOR) {
        Some(control) => control,
        None => panic!("these bits exist"),
    };

impl PcrUnit {
    /// A unit in which no counter is reserved.
    pub fn new(config: PcrConfig) -> Self {
        let PerKind {
            programmable,
            fixed,
        } = config.counters;
        PcrUnit {
            bank: Bank::new(programmable, fixed),
            policy: config.policy,
            guard: Guard::of_vcpu(config.guard, config.phase.clone()),
            widths: config.widths,
            ticks_per_ms: config.ticks_per_ms.max(1),
            phase: config.phase,
            map: LegacyMap::identity(),
            unmapped: config.legacy,
            legacy: config.legacy,
            smm: config.smm,
            smram: None,
            scheme: config.scheme,
            backed: Backing::whole(),
            held_anew: false,
            budget: PerKind::ALL,
            barred: [false; LAYERS],
            mailboxes: Default::default(),
            sequence: 0,
            deadline: None,
        }
    }

    /// The same unit with a position for each sampler of instruction-based sampling.
    #[must_use]
    pub fn with_samplers(mut self) -> Self {
        self.bank = self.bank.with_samplers();
        self
    }

    /// Brings everything of the guest into its state after power-on. The hypervisor
    /// keeps what it holds, and wrong cookies stay counted.
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
                // The PMU has a reset of its own, which covers the effects.
                let _ = self.bank.apply(Change { counter, kind });
            }
        }
        let waited = self.pending(Layer::Hypervisor).is_some();
        self.mailboxes = Default::default();
        if waited {
            self.notify(
                Layer::Hypervisor,
                QueuedNotice {
                    kind: NoticeKind::Refused,
                    counter: None,
                    layer: Layer::Hypervisor,
                    reason: Some(Reason::Withdrawn),
                    due: None,
                },
            );
        }
        self.map = LegacyMap::identity();
        self.unmapped = self.legacy;
        self.smram = None;
        self.find_deadline();
    }

    /// Sets a counter aside for the hypervisor, before the guest starts or later. No
    /// other layer and no shared control reaches it. It has no lease, whatever policy
    /// says of leases of the hypervisor.
    ///
    /// # Errors
    /// There is no such counter, a layer holds it, policy leaves it to another layer,
    /// or the cookie is the default one.
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
            None if self.is_barred(layer) => Err(Reason::Administrator),
            None => self.policy.admit(&self.bank, layer, counter),
        };
        cx.audit.asked(&AskRecord {
            layer,
            ask: Ask::SetAside(counter),
            presented: Presented::Nothing,
            result: checked.map_or_else(AskResult::Faulted, |()| AskResult::Done),
        });
        if let Err(reason) = checked {
            record(cx, layer, Some(counter), Event::Refused(reason));
            return Err(reason);
        }
        let mut reservation = Reservation::new(layer, cookie, cookie);
        reservation.control = SET_ASIDE;
        let kind = ChangeKind::Reserve(reservation);
        let mut effects = self.apply(Change { counter, kind });
        effects.cleared.insert(counter);
        // Nobody would renew a lease for the hypervisor.
        let lease_ms = None;
        record(cx, layer, Some(counter), Event::Reserved { lease_ms });
        self.find_deadline();
        Ok(effects)
    }

    /// Whose cookie this is, which `layer` presents for a counter. For a counter that
    /// nobody holds any cookie is the layer's own.
    fn presented(&self, layer: Layer, counter: CounterId, cookie: Cookie) -> Presented {
        let right = self.bank.reservation(counter).map(|reservation| {
            let is_right = reservation.is_management(cookie);
            is_right.then_some(reservation.owner)
        });
        match right {
            _ if cookie.is_default() => Presented::Nothing,
            None => Presented::Of(layer),
            Some(Some(owner)) => Presented::Of(owner),
            Some(None) => Presented::Wrong,
        }
    }

    /// Says what the layers of the guest can hold so that each counter has a physical
    /// one of its own. From now on what goes beyond is refused
    /// ([`Reason::Unbacked`]); what is held stays. Counters of the hypervisor's that a
    /// layer of the guest is about to get stay where they are if nothing backs them any
    /// more.
    #[inline]
    pub fn back(&mut self, most: Backing, cx: &mut Context<'_>) -> Effects {
        let held_anew = core::mem::take(&mut self.held_anew);
        let is_news = self.backed != most;
        if is_news {
            self.backed = most;
            let fixed = most.fixed & self.bank.counters();
            cx.audit.asked(&AskRecord {
                layer: Layer::Hypervisor,
                ask: Ask::Backed(Backing { fixed, ..most }),
                presented: Presented::Nothing,
                result: AskResult::Done,
            });
            self.stop_what_comes(cx);
        }
        if held_anew || is_news && self.waits_for_move() {
            let effects = self.serve(cx);
            self.find_deadline();
            return effects;
        }
        Effects::NONE
    }

    /// What it was told last by [`PcrUnit::back`].
    pub fn backed(&self) -> Backing {
        self.backed
    }

    /// Whether requests wait to be told again by [`PcrUnit::back`] what can be backed:
    /// something else is held than when that was said, and physical counters differ.
    #[inline]
    pub fn looks_for_room(&self) -> bool {
        self.held_anew && self.mailboxes.iter().any(|one| one.pending.is_some())
    }

    /// What is held has changed.
    fn note_held(&mut self) {
        self.held_anew |= self.backed.differs();
    }

    /// The events that pending requests of the guest's layers are about.
    pub fn asked_events(&self) -> AskedEvents {
        Policy::LAYERS.map(|layer| {
            let pending = self.pending(layer).filter(|_| layer.is_guest());
            pending.map(|pending| pending.event)
        })
    }

    /// Whether a request waits until the vCPU moves to a core that backs it.
    #[inline]
    pub fn waits_for_move(&self) -> bool {
        let mut mailboxes = self.mailboxes.iter();
        mailboxes.any(|mailbox| {
            let pending = mailbox.pending.as_ref();
            pending.is_some_and(|pending| pending.move_by.is_some())
        })
    }

    /// How many programmable counters a core has to back for the layers of the guest, so
    /// that a request which waits for a move goes on there. `None`: none does.
    pub fn move_needs(&self) -> Option<u8> {
        let waiting = Policy::LAYERS.into_iter().filter_map(|layer| {
            let pending = self.pending(layer)?;
            pending.move_by?;
            broker::needs(&self.view(layer), layer, pending)
        });
        waiting.min()
    }

    /// The vCPU moves nowhere: requests that wait for it are refused.
    pub fn stay(&mut self, cx: &mut Context<'_>) -> Effects {
        self.end_moves(None);
        let effects = self.serve(cx);
        self.find_deadline();
        effects
    }

    /// The reservations.
    pub fn bank(&self) -> &Bank {
        &self.bank
    }

    /// How many counters each layer may hold.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The machine's phase.
    pub fn phase(&self) -> &Phase {
        &self.phase
    }

    /// The features of this unit: ECX of CPUID leaf `CPUID_LEAF`.
    pub fn features(&self) -> u32 {
        let mut features = abi::FEATURE_RANDOM
            | abi::FEATURE_RDPMC
            | abi::FEATURE_MAILBOX
            | abi::FEATURE_REFUSAL
            | abi::FEATURE_GRANTEE
            | abi::FEATURE_EVENT;
        if self.legacy.is_some() {
            features |= abi::FEATURE_LEGACY_MAP;
        }
        if self.phase.has_firmware() {
            features |= abi::FEATURE_FIRMWARE;
        }
        if self.smm {
            features |= abi::FEATURE_SMM;
        }
        if self.has_smram() {
            features |= abi::FEATURE_SMRAM;
        }
        if self.bank.has_samplers() {
            features |= abi::FEATURE_IBS;
        }
        features
    }

    /// Whether the firmware can put code into SMRAM.
    fn has_smram(&self) -> bool {
        self.smm && self.phase.has_firmware()
    }

    /// What the firmware that ended its phase on this vCPU wants to have in SMRAM, once:
    /// the caller copies it there, from the entry of SMM on, and wipes it from ordinary
    /// memory, before the guest runs on.
    pub fn take_smram(&mut self) -> Option<SmramSource> {
        self.smram.take()
    }

    /// That is done: from now on SMIs call what is there ([`PcrUnit::wants_smi`]).
    pub fn smram_filled(&mut self) {
        self.phase.stay_in_smm();
    }

    /// Counters that a shared control reaches.
    #[inline]
    pub fn reached_by(&self, shared: Shared) -> CounterSet {
        self.bank.reached_by(shared)
    }

    /// The legacy names. They change once, when the firmware's phase ends.
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
            // Counters that a firmware was gathering when its phase ended are not its
            // own: the request is refused at the next tick at the latest.
            let lost = if self.is_alive(Layer::Firmware) {
                None
            } else {
                self.pending(Layer::Firmware).map(|pending| pending.got)
            };
            self.map = LegacyMap::around(&self.bank, lost.unwrap_or_default(), names);
            self.find_deadline();
        }
    }

    /// Makes a change of the bank; every change passes here. Legacy names follow what
    /// was held when the phase ended, so they are settled before.
    fn apply(&mut self, change: Change) -> Effects {
        let _ = self.map();
        self.note_held();
        self.bank.apply(change)
    }

    fn has(&self, counter: CounterId) -> bool {
        self.bank.counters().contains(counter)
    }

    fn width_mask(&self, counter: CounterId) -> u64 {
        match self.widths.of(counter) {
            // A register of a sampler has up to 64 bits.
            _ if matches!(counter, CounterId::Ibs(_)) => u64::MAX,
            width @ 0..64 => (1 << width) - 1,
            _ => u64::MAX,
        }
    }

    /// Converts milliseconds to ticks.
    pub fn to_ticks(&self, ms: u32) -> Ticks {
        Ticks(u64::from(ms).saturating_mul(self.ticks_per_ms))
    }

    /// Converts ticks to milliseconds, rounded up.
    fn to_ms(&self, ticks: Ticks) -> u32 {
        u32::try_from(ticks.0.div_ceil(self.ticks_per_ms)).unwrap_or(u32::MAX)
    }
}

fn record(cx: &mut Context<'_>, layer: Layer, counter: Option<CounterId>, event: Event) {
    cx.audit.record(&Record {
        layer,
        counter,
        event,
    });
}
