//! The unit: the reservations of one vCPU as layers and the host see them.
//!
//! It says who may do what: it compares cookies, counts the wrong ones, and leaves a record
//! of everything that is asked. What an act leads to is the arbitration's.

use alloc::sync::Arc;
use core::fmt;

use crate::abi;
use crate::account::GuardLimits;
use crate::admin::{AdminAct, AdminError};
use crate::arbitration::{Arbitration, Context};
use crate::audit::{Ask, AskRecord, AskResult, Event, Presented};
use crate::backing::Backing;
use crate::bank::Bank;
use crate::control::Control;
use crate::cookie::Cookie;
use crate::counter::PerKind;
use crate::firmware::{Firmware, SmramSource};
use crate::guard::{Guard, Penalty};
use crate::layer::Phase;
use crate::map::{LegacyMap, Names};
use crate::message::{Answer, Notice, NoticeKind, Outcome, Reply, Request, Wanted};
use crate::policy::{Policy, Scheme};
use crate::reason::Reason;
use crate::register::PcrRegister;
use crate::requests::{AskedEvents, Pending};
use crate::reservation::{Effects, Operation, Reservation};
use crate::rules::Rules;
use crate::time::{Clock, Ticks, Tsc, earliest};
use crate::{Access, CounterId, CounterSet, Layer, Shared, Verdict};

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

/// The layer that performs an access, and the cookie that it presents.
#[derive(Clone, Copy)]
pub struct Caller {
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
    arbitration: Arbitration,
    guard: Guard,
    widths: PerKind,
}

impl PcrUnit {
    /// A unit in which no counter is reserved.
    pub fn new(config: PcrConfig) -> Self {
        let PerKind {
            programmable,
            fixed,
        } = config.counters;
        PcrUnit {
            guard: Guard::of_vcpu(config.guard, config.phase.clone()),
            widths: config.widths,
            arbitration: Arbitration::new(
                Bank::new(programmable, fixed),
                Rules::new(config.policy, config.scheme),
                Names::new(config.legacy),
                Firmware::new(config.phase, config.smm),
                Clock::new(config.ticks_per_ms),
            ),
        }
    }

    /// The same unit with a position for each sampler of instruction-based sampling.
    #[must_use]
    pub fn with_samplers(mut self) -> Self {
        self.arbitration = self.arbitration.with_samplers();
        self
    }

    /// Brings everything of the guest into its state after power-on. The hypervisor
    /// keeps what it holds, and wrong cookies stay counted.
    pub fn reset(&mut self) {
        self.arbitration.reset();
    }

    /// The reservations.
    #[inline]
    pub fn bank(&self) -> &Bank {
        self.arbitration.bank()
    }

    /// How many counters each layer may hold.
    pub fn policy(&self) -> &Policy {
        self.arbitration.books().rules.policy()
    }

    /// Who reserves, and how layers get each other's counters.
    pub fn scheme(&self) -> Scheme {
        self.arbitration.books().rules.scheme()
    }

    /// Whether the administrator has barred a layer from reserving.
    pub fn is_barred(&self, layer: Layer) -> bool {
        self.arbitration.books().rules.is_barred(layer)
    }

    /// The machine's phase.
    #[inline]
    pub fn phase(&self) -> &Phase {
        self.arbitration.firmware().phase()
    }

    /// The features of this unit: ECX of CPUID leaf `CPUID_LEAF`.
    pub fn features(&self) -> u32 {
        let mut features = abi::FEATURE_RANDOM
            | abi::FEATURE_RDPMC
            | abi::FEATURE_MAILBOX
            | abi::FEATURE_REFUSAL
            | abi::FEATURE_GRANTEE
            | abi::FEATURE_EVENT
            | self.arbitration.firmware().features();
        if self.arbitration.gives_names() {
            features |= abi::FEATURE_LEGACY_MAP;
        }
        if self.bank().has_samplers() {
            features |= abi::FEATURE_IBS;
        }
        features
    }

    /// What the firmware that ended its phase on this vCPU wants to have in SMRAM, once:
    /// the caller copies it there, from the entry of SMM on, and wipes it from ordinary
    /// memory, before the guest runs on.
    pub fn take_smram(&mut self) -> Option<SmramSource> {
        self.arbitration.firmware_mut().take_smram()
    }

    /// That is done: from now on SMIs call what is there ([`PcrUnit::wants_smi`]).
    pub fn smram_filled(&mut self) {
        self.arbitration.firmware().stay_in_smm();
    }

    /// Counters that a shared control reaches.
    #[inline]
    pub fn reached_by(&self, shared: Shared) -> CounterSet {
        self.bank().reached_by(shared)
    }

    /// The legacy names. They change once, when the firmware's phase ends.
    #[inline]
    pub fn map(&mut self) -> &LegacyMap {
        self.arbitration.names()
    }

    /// Converts milliseconds to ticks.
    pub fn to_ticks(&self, ms: u32) -> Ticks {
        self.arbitration.clock().to_ticks(ms)
    }

    /// Milliseconds until a lease ends or a revocation takes place, rounded up.
    pub fn ms_until(&self, at: Tsc, now: Tsc) -> u32 {
        self.arbitration.clock().to_ms(at - now)
    }

    /// The time at which [`PcrUnit::tick`] next has something to do.
    #[inline]
    pub fn deadline(&self) -> Option<Tsc> {
        self.arbitration.deadline()
    }

    /// Ends what is due: leases, questions, and the time before a revocation.
    pub fn tick(&mut self, cx: &mut Context<'_>) -> Effects {
        self.arbitration.tick(cx);
        self.arbitration.take_effects()
    }

    /// The verdict on an access to a counter or to its control at the time `now`.
    #[inline]
    pub fn check(
        &self,
        (layer, cookie): (Layer, Cookie),
        counter: CounterId,
        access: Access,
        now: Tsc,
    ) -> Verdict {
        if layer == Layer::GuestUser && self.is_deaf_to(cookie, now) {
            return self.bank().deny(layer, counter, access);
        }
        self.bank().check(layer, cookie, counter, access)
    }

    /// Whether a program's cookie counts as a wrong one without being compared.
    fn is_deaf_to(&self, cookie: Cookie, now: Tsc) -> bool {
        !cookie.is_default() && self.guard.is_deaf(now)
    }

    /// Records an access that [`PcrUnit::check`] did not permit, and counts its cookie
    /// if it was compared.
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
        let reason = match self.bank().reservation(counter) {
            None => Reason::Unreserved,
            Some(reservation) if cookie.is_default() && reservation.is_private() => Reason::Held,
            Some(reservation) if !reservation.control.accesses(layer) => Reason::Layer,
            Some(_) => Reason::Cookie,
        };
        let event = match (verdict, access) {
            (Verdict::Permit, _) => return,
            (Verdict::Fault, _) => Event::Faulted(reason),
            (Verdict::Drop { .. }, Access::Write) => Event::DroppedWrite(reason),
            (Verdict::Drop { .. }, Access::Read | Access::Rdpmc) => Event::DroppedRead(reason),
        };
        cx.record(layer, Some(counter), event);
        // A cookie that was not compared is no guess.
        let was_compared = layer != Layer::GuestUser || !self.is_deaf_to(cookie, cx.now);
        if was_compared {
            self.guessed(reason, layer, cookie.is_default(), cx);
        }
    }

    /// Counts the cookie of something that was denied for `reason`, if it was compared
    /// and found wrong. Where the mode bits make every cookie of the layer wrong, none
    /// is compared and none counted, so a penalty never reveals that a cookie is
    /// right. The default cookie is no guess.
    fn guessed(&mut self, reason: Reason, layer: Layer, is_default: bool, cx: &mut Context<'_>) {
        if is_default || reason != Reason::Cookie {
            return;
        }
        let clock = self.arbitration.clock();
        let event = match self.guard.wrong(layer, cx.now) {
            None => return,
            Some(Penalty::LockedOut(ticks)) => Event::LockedOut {
                ms: clock.to_ms(ticks),
            },
            Some(Penalty::Deaf(ticks)) => Event::Deaf {
                ms: clock.to_ms(ticks),
            },
        };
        cx.record(layer, None, event);
    }

    /// The end of the lock-out of the vCPU. `None` means that it may run at `now`.
    #[inline]
    pub fn locked_out_until(&self, now: Tsc) -> Option<Tsc> {
        self.guard.locked_out_until(now)
    }

    /// The number of wrong cookies so far.
    pub fn wrong_cookies(&self) -> u64 {
        self.guard.total()
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
        let checked = match self.bank().reservation(counter) {
            _ if !self.has(counter) => Err(Reason::NoCounter),
            _ if cookie.is_default() => Err(Reason::Malformed),
            Some(_) => Err(Reason::Held),
            None if self.is_barred(layer) => Err(Reason::Administrator),
            None => self.policy().admit(self.bank(), layer, counter),
        };
        cx.audit.asked(&AskRecord {
            layer,
            ask: Ask::SetAside(counter),
            presented: Presented::Nothing,
            result: AskResult::of(&checked),
        });
        if let Err(reason) = checked {
            cx.record(layer, Some(counter), Event::Refused(reason));
            return Err(reason);
        }
        self.arbitration.set_aside(counter, cookie, cx);
        Ok(self.arbitration.take_effects())
    }

    /// Says what the layers of the guest can hold so that each counter has a physical
    /// one of its own. From now on what goes beyond is refused
    /// ([`Reason::Unbacked`]); what is held stays. Counters of the hypervisor's that a
    /// layer of the guest is about to get stay where they are if nothing backs them any
    /// more.
    #[inline]
    pub fn back(&mut self, most: Backing, cx: &mut Context<'_>) -> Effects {
        self.arbitration.back(most, cx);
        self.arbitration.take_effects()
    }

    /// What it was told last by [`PcrUnit::back`].
    pub fn backed(&self) -> Backing {
        self.arbitration.room().most()
    }

    /// Whether requests wait to be told again by [`PcrUnit::back`] what can be backed:
    /// something else is held than when that was said, and physical counters differ.
    #[inline]
    pub fn looks_for_room(&self) -> bool {
        self.arbitration.room().is_old() && self.arbitration.requests().are_any()
    }

    /// The events that pending requests of the guest's layers are about.
    pub fn asked_events(&self) -> AskedEvents {
        self.arbitration.requests().events()
    }

    /// Whether a request waits until the vCPU moves to a core that backs it.
    #[inline]
    pub fn waits_for_move(&self) -> bool {
        self.arbitration.requests().wait_for_move()
    }

    /// How many programmable counters a core has to back for the layers of the guest, so
    /// that a request which waits for a move goes on there. `None`: none does.
    pub fn move_needs(&self) -> Option<u8> {
        self.arbitration.books().move_needs()
    }

    /// The vCPU moves nowhere: requests that wait for it are refused.
    pub fn stay(&mut self, cx: &mut Context<'_>) -> Effects {
        self.arbitration.stay(cx);
        self.arbitration.take_effects()
    }

    /// Carries out an act of the administrator. Requests that are pending are decided
    /// anew after it.
    ///
    /// # Errors
    /// The act makes no sense, for this reason.
    pub fn administer(
        &mut self,
        act: AdminAct,
        cx: &mut Context<'_>,
    ) -> Result<Effects, AdminError> {
        self.arbitration.administer(act, cx)?;
        cx.audit.asked(&AskRecord {
            layer: Layer::Hypervisor,
            ask: Ask::Administered,
            presented: Presented::Nothing,
            result: AskResult::Done,
        });
        Ok(self.arbitration.take_effects())
    }

    /// The host's kernel has taken the physical counter of one that a layer holds, or it
    /// `is_back`. Its owner gets a notice; what it holds stays.
    pub fn note_taken(&mut self, counter: CounterId, is_back: bool, cx: &mut Context<'_>) {
        let (event, kind) = if is_back {
            (Event::Back, NoticeKind::Back)
        } else {
            (Event::Taken, NoticeKind::Taken)
        };
        self.arbitration.tell_owner(counter, event, kind, cx);
    }

    /// What its owner selects in a counter cannot be counted beside what is held: the owner
    /// gets a notice, and keeps what it holds.
    pub fn note_unbacked(&mut self, counter: CounterId, cx: &mut Context<'_>) {
        let event = Event::Refused(Reason::Unbacked);
        self.arbitration
            .tell_owner(counter, event, NoticeKind::Taken, cx);
    }

    /// Makes a request for a layer. A guest's layer writes `REQUEST` for it, and the
    /// hypervisor calls this. If the answer is [`Outcome::Pending`],
    /// [`PcrUnit::answer`] returns the later one.
    ///
    /// # Errors
    /// An earlier request is pending ([`Reason::Busy`]), this cookie cannot withdraw
    /// it ([`Reason::Cookie`]), or the layer cannot hold counters
    /// ([`Reason::Layer`]). A guest gets #GP. Nothing has changed then, the answer to
    /// the last request included.
    pub fn request(
        &mut self,
        layer: Layer,
        request: Request,
        cx: &mut Context<'_>,
    ) -> Result<(Answer, Effects), Reason> {
        let holder = layer.as_holder();
        let (ask, presented) = self.describe(holder, &request);
        let done = self.make_request(holder, request, cx).map(|()| {
            self.arbitration.find_deadline();
            (self.answer(holder), self.arbitration.take_effects())
        });
        // The trail tells a host's tool from the hypervisor, which holds for it.
        let asker = if layer.is_guest() { holder } else { layer };
        cx.audit.asked(&AskRecord {
            layer: asker,
            ask,
            presented,
            result: match (&done, ask) {
                (Ok(_), Ask::Withdraw) => AskResult::Done,
                (Ok((answer, _)), _) => AskResult::Answered(*answer),
                (Err(reason), _) => AskResult::Faulted(*reason),
            },
        });
        done
    }

    /// A request without its cookie.
    fn describe(&self, layer: Layer, request: &Request) -> (Ask, Presented) {
        match *request {
            Request::Reserve {
                wanted,
                cookie,
                lease_ms,
                event,
            } => {
                let own = match wanted {
                    Wanted::This(counter) => self.bank().held_by(layer).contains(counter),
                    Wanted::Any(_) | Wanted::Held(_) => false,
                };
                let presented = match wanted {
                    Wanted::This(counter) if own => self.presented(layer, counter, cookie),
                    _ => Presented::Of(layer),
                };
                let ask = Ask::Reserve {
                    wanted,
                    lease_ms,
                    event,
                };
                (ask, presented)
            }
            Request::Release { counter, cookie } => (
                Ask::Release(counter),
                self.presented(layer, counter, cookie),
            ),
            Request::Withdraw { cookie } => {
                let right = self.arbitration.requests().of(layer);
                let right = right.map(|one| one.cookie.matches(cookie));
                let presented = match right {
                    Some(true) => Presented::Of(layer),
                    Some(false) => Presented::Wrong,
                    None => Presented::Of(layer),
                };
                (Ask::Withdraw, presented)
            }
        }
    }

    fn make_request(
        &mut self,
        layer: Layer,
        request: Request,
        cx: &mut Context<'_>,
    ) -> Result<(), Reason> {
        if !self.arbitration.mailboxes().has(layer) {
            return Err(Reason::Layer);
        }
        let pending = self.arbitration.requests().of(layer);
        match request {
            Request::Withdraw { cookie } => {
                // Otherwise one component of a layer could withdraw the request of
                // another.
                if pending.is_some_and(|pending| !pending.cookie.matches(cookie)) {
                    return Err(Reason::Cookie);
                }
                self.arbitration.withdraw(layer, cx);
            }
            _ if pending.is_some() => return Err(Reason::Busy),
            Request::Release { counter, cookie } => {
                self.arbitration.mailboxes_mut().number(layer);
                let released = self.release(layer, counter, cookie, cx);
                self.answer_at_once(layer, counter, released, cx);
            }
            Request::Reserve {
                wanted,
                cookie,
                lease_ms,
                event,
            } => {
                self.arbitration.mailboxes_mut().number(layer);
                let asked = Pending::new(wanted, cookie, lease_ms, event);
                match wanted {
                    Wanted::This(counter) if self.bank().owner(counter) == Some(layer) => {
                        let renewed = self.check_cookie(layer, counter, cookie);
                        let renewed = renewed
                            .and_then(|()| self.arbitration.renew(layer, counter, &asked, cx));
                        self.answer_at_once(layer, counter, renewed, cx);
                    }
                    _ => self.arbitration.reserve(layer, asked, cx),
                }
            }
        }
        Ok(())
    }

    /// Gives a counter back that the hypervisor holds for a host's tool, with the cookie
    /// of its request. A request of the hypervisor that is pending is not in the way, and
    /// its answer stays. What is somebody else's by now stays theirs.
    pub fn give_back(
        &mut self,
        counter: CounterId,
        cookie: Cookie,
        cx: &mut Context<'_>,
    ) -> Effects {
        let presented = self.presented(Layer::Hypervisor, counter, cookie);
        let released = self.release(Layer::Hypervisor, counter, cookie, cx);
        cx.audit.asked(&AskRecord {
            layer: Layer::HostTool,
            ask: Ask::Release(counter),
            presented,
            result: AskResult::of(&released),
        });
        self.arbitration.find_deadline();
        self.arbitration.take_effects()
    }

    fn release(
        &mut self,
        layer: Layer,
        counter: CounterId,
        cookie: Cookie,
        cx: &mut Context<'_>,
    ) -> Result<(), Reason> {
        match self.bank().owner(counter) {
            _ if !self.has(counter) => return Err(Reason::NoCounter),
            None => return Err(Reason::Unreserved),
            Some(holder) if holder != layer => return Err(Reason::Held),
            Some(_) => self.check_cookie(layer, counter, cookie)?,
        }
        self.arbitration.release(counter, cx);
        Ok(())
    }

    /// Checks that `layer` may dispose of its counter with `cookie`.
    fn check_cookie(&self, layer: Layer, counter: CounterId, cookie: Cookie) -> Result<(), Reason> {
        let rules = self.arbitration.books().rules;
        rules.check_cookie(self.bank(), layer, counter, cookie)
    }

    /// Answers a request that is about one counter, now that it is `done` or refused.
    fn answer_at_once(
        &mut self,
        layer: Layer,
        counter: CounterId,
        done: Result<(), Reason>,
        cx: &mut Context<'_>,
    ) {
        let outcome = match done {
            Ok(()) => Outcome::Granted([counter].into_iter().collect()),
            Err(reason) => {
                let counter = self.has(counter).then_some(counter);
                cx.record(layer, counter, Event::Refused(reason));
                // A layer that gives a counter back knows that the counter has a
                // cookie, so even the default one is a guess.
                self.guessed(reason, layer, false, cx);
                Outcome::Refused(reason.as_shown())
            }
        };
        self.arbitration.mailboxes_mut().set_outcome(layer, outcome);
    }

    /// The answer to the last request of a layer.
    pub fn answer(&self, layer: Layer) -> Answer {
        let answer = self.arbitration.mailboxes().answer(layer);
        answer.unwrap_or_default()
    }

    /// Replies for a holder that was asked for a counter. A guest's layer writes
    /// `REPLY` for it. The hypervisor calls this, and needs no cookie.
    ///
    /// # Errors
    /// [`Reason::Malformed`]: the layer was not asked, or the question no longer
    /// stands. Nothing has changed, and a guest gets #GP.
    pub fn reply(
        &mut self,
        layer: Layer,
        reply: Reply,
        cx: &mut Context<'_>,
    ) -> Result<Effects, Reason> {
        let layer = layer.as_holder();
        let done = self.arbitration.reply(layer, reply, cx);
        cx.audit.asked(&AskRecord {
            layer,
            ask: Ask::Reply(reply),
            presented: Presented::Of(layer),
            result: AskResult::of(&done),
        });
        done.map(|()| self.arbitration.take_effects())
    }

    /// Whether [`PcrUnit::next_notice`] has a notice for the layer.
    #[inline]
    pub fn has_notice(&self, layer: Layer) -> bool {
        self.arbitration.mailboxes().has_notice(layer)
    }

    /// Takes the oldest notice out of a layer's queue.
    pub fn next_notice(&mut self, layer: Layer, now: Tsc) -> Option<Notice> {
        let (notice, lost) = self.arbitration.mailboxes_mut().pop(layer)?;
        let rest = notice.due.map(|due| self.ms_until(due, now));
        Some(Notice {
            kind: notice.kind,
            counter: notice.counter,
            layer: notice.layer,
            reason: notice.reason,
            rest_ms: rest.unwrap_or(0),
            lost,
        })
    }

    /// The vector of an interrupt to raise on this vCPU, because notices have come for
    /// the layer that runs at CPL 0. It is returned once for all that have come.
    pub fn take_notice(&mut self) -> Option<u8> {
        let layer = self.phase().layer(true, false);
        self.arbitration.mailboxes_mut().take_vector(layer)
    }

    /// Whether to raise an SMI on this vCPU, because notices have come for the firmware,
    /// which has left code in SMM.
    #[inline]
    pub fn wants_smi(&self) -> bool {
        self.phase().is_in_smm() && self.arbitration.mailboxes().is_due(Layer::Firmware)
    }

    /// An SMI was raised for all that have come.
    pub fn smi_sent(&mut self) {
        self.arbitration.mailboxes_mut().announced(Layer::Firmware);
    }

    /// Whose cookie this is, which `layer` presents for a counter. For a counter that
    /// nobody holds any cookie is the layer's own.
    fn presented(&self, layer: Layer, counter: CounterId, cookie: Cookie) -> Presented {
        let right = self.bank().reservation(counter).map(|reservation| {
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

    fn has(&self, counter: CounterId) -> bool {
        self.bank().counters().contains(counter)
    }

    // The registers of the block: reads and writes by a guest.

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

#[cfg(test)]
mod model;
