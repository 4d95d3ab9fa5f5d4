//! A walk through every state that two counters and three layers can get into, by
//! every order of moves of layers and of time. Each state is checked for what must
//! hold.

mod invariants;

extern crate std;

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;
use std::collections::HashSet;

use super::{AdminAct, Caller, Context, PcrConfig, PcrUnit};
use crate::guard::Guard;
use crate::message::{Reply, Request, Wanted};
use crate::requests::Pending;
use crate::time::{Ticks, Tsc};
use crate::{
    Backing, Control, Cookie, CounterId, CounterSet, GuardLimits, Layer, NoAudit, NoEntropy,
    PcrRegister, PerKind, Phase, Policy, Reason, Record, Scheme, Share,
};

const GRACE: u32 = 2;

fn presenting(layer: Layer, presented: u64) -> Caller {
    Caller { layer, presented }
}

fn claim(unit: &mut PcrUnit, layer: Layer, counter: CounterId, cx: &mut Context<'_>) {
    let register = PcrRegister::ManagementKey(counter);
    match unit.bank().owner(counter) {
        None => {
            let _ = unit.write(register, COOKIE, Caller::legacy(layer), cx);
        }
        Some(owner) if owner != layer => {
            // To another cookie and back again: the owner changes.
            let taken = unit.write(register, COOKIE + 1, presenting(layer, COOKIE), cx);
            if taken.is_some() {
                let _ = unit.write(register, COOKIE, presenting(layer, COOKIE + 1), cx);
            }
        }
        Some(_) => {}
    }
}

fn lend(unit: &mut PcrUnit, layer: Layer, counter: CounterId, lends: bool, cx: &mut Context<'_>) {
    if unit.bank().owner(counter) == Some(layer) {
        let control = Control::INITIAL.with_lend(lends).bits();
        let register = PcrRegister::Control(counter);
        let _ = unit.write(register, control, presenting(layer, COOKIE), cx);
    }
}

fn administer(unit: &mut PcrUnit, act: AdminAct, cx: &mut Context<'_>) {
    let AdminAct::SetBudget { most, grace_ms } = act else {
        let _ = unit.administer(act, cx);
        return;
    };
    let backed = Backing {
        programmable: most.programmable,
        ..unit.backed()
    };
    let _ = unit.back(backed, cx);
    let _ = unit.administer(act, cx);
    let (staying, leaving) = unit
        .bank()
        .staying_and_leaving(CounterId::Programmable(0), Tsc(u64::MAX));
    assert!(staying.len() <= u32::from(most.programmable));
    assert!(leaving.is_empty() || grace_ms > 0);
}

#[derive(Clone, Copy, Debug)]
enum Move {
    Ask(Layer, Wanted),
    Release(Layer, CounterId),
    Withdraw(Layer),
    Reply(Layer, CounterId, bool),
    /// By `MANAGEMENT_KEY`: reserve, or take over from another layer whose
    /// cookie is known.
    Claim(Layer, CounterId),
    Lend(Layer, CounterId, bool),
    EndPhase,
    Tick,
    /// By the administrator of the host.
    Admin(AdminAct),
    /// The vCPU comes to a core that backs so many, or stays where it is.
    Arrive(u8),
    Stay,
}

fn moves(counters: u8) -> Vec<Move> {
    let mut moves = alloc::vec![Move::EndPhase, Move::Tick];
    for layer in Policy::LAYERS {
        moves.extend((1..=counters).map(|count| Move::Ask(layer, Wanted::Any(count))));
        if layer == Layer::Hypervisor {
            moves.extend((1..=counters).map(|count| Move::Ask(layer, Wanted::Held(count))));
        }
        moves.push(Move::Withdraw(layer));
        for counter in (0..counters).map(CounterId::Programmable) {
            moves.push(Move::Ask(layer, Wanted::This(counter)));
            moves.push(Move::Release(layer, counter));
            moves.push(Move::Claim(layer, counter));
            for yes in [false, true] {
                moves.push(Move::Reply(layer, counter, yes));
                moves.push(Move::Lend(layer, counter, yes));
            }
        }
    }
    moves
}

/// The one cookie of all layers. Other tests check whom a cookie locks out, and with
/// one cookie hand-overs happen too.
const COOKIE: u64 = 7;

#[derive(Debug)]
struct State {
    unit: PcrUnit,
    now: Tsc,
    /// The moves that led to it.
    path: Vec<Move>,
}

impl State {
    fn first(scheme: Scheme, policy: Policy, counters: u8, backed: u8, smm: bool) -> State {
        let counters = PerKind {
            programmable: counters,
            fixed: 0,
        };
        policy.fits(counters.programmable, 0).unwrap();
        let unit = PcrUnit::new(PcrConfig {
            counters,
            widths: PerKind::ALL,
            policy,
            scheme,
            guard: GuardLimits::with_ticks_per_ms(1),
            ticks_per_ms: 1,
            phase: Arc::new(Phase::new(true)),
            legacy: None,
            smm,
        });
        let mut first = State {
            unit,
            now: Tsc(0),
            path: Vec::new(),
        };
        first.back(Backing {
            programmable: backed,
            ..Backing::whole()
        });
        first
    }

    fn back(&mut self, most: Backing) {
        let cx = &mut Context {
            now: self.now,
            entropy: &mut NoEntropy,
            audit: &mut NoAudit,
        };
        let _ = self.unit.back(most, cx);
    }

    fn fork(&self) -> State {
        let phase = Phase::new(true);
        if self.unit.phase().is_over() {
            phase.end();
        }
        let phase = Arc::new(phase);
        let unit = PcrUnit {
            arbitration: self.unit.arbitration.fork(phase.clone()),
            // There is but one cookie, so none is wrong.
            guard: Guard::of_vcpu(GuardLimits::with_ticks_per_ms(1), phase),
            widths: self.unit.widths,
        };
        State {
            unit,
            now: self.now,
            path: self.path.clone(),
        }
    }

    fn pending(&self, layer: Layer) -> Option<&Pending> {
        self.unit.arbitration.requests().of(layer)
    }

    /// The code of the state. Two states have the same code if no move can distinguish
    /// them: times count from now, requests count by their order, and notices are left
    /// out.
    fn code(&self) -> Vec<u8> {
        let mut code = Vec::with_capacity(64);
        let unit = &self.unit;
        code.push(u8::from(unit.phase().is_over()));
        code.extend(Policy::LAYERS.map(|layer| u8::from(unit.is_barred(layer))));
        code.extend(unit.scheme().name().bytes().take(2));
        let budget = unit.arbitration.books().rules.budget();
        code.extend([unit.backed().programmable, budget.programmable]);
        for counter in unit.bank().counters().iter() {
            self.code_counter(counter, &mut code);
        }
        for layer in Policy::LAYERS {
            self.code_request(layer, &mut code);
        }
        code
    }

    fn rest(&self, at: Tsc) -> u8 {
        u8::try_from((at - self.now).0).unwrap()
    }

    fn code_counter(&self, counter: CounterId, code: &mut Vec<u8>) {
        let rest = |at: Tsc| self.rest(at);
        let Some(held) = self.unit.bank().reservation(counter) else {
            code.push(0xff);
            return;
        };
        code.extend([held.owner.code(), u8::from(held.control.lends())]);
        code.push(held.lease.map_or(0xff, rest));
        match held.revocation {
            Some(revocation) => {
                let by = revocation.wanted_by.map_or(0xff, Layer::code);
                let budget = revocation.reason == Reason::Budget;
                code.extend([rest(revocation.at), by, u8::from(budget)]);
            }
            None => code.push(0xff),
        }
    }

    fn code_request(&self, layer: Layer, code: &mut Vec<u8>) {
        let rest = |at: Tsc| self.rest(at);
        let Some(pending) = self.pending(layer) else {
            code.push(0xff);
            return;
        };
        let theirs = match pending.wanted {
            Wanted::Held(_) => pending.theirs,
            // It does not matter to others.
            _ => CounterSet::EMPTY,
        };
        let sets = [pending.got, pending.declined, pending.spared, theirs];
        code.extend(sets.map(|set| set.bits().to_le_bytes()[0]));
        code.extend(pending.silent.map(u8::from));
        code.extend([pending.move_by.map_or(0xff, rest), u8::from(pending.stays)]);
        code.push(match pending.wanted {
            Wanted::Any(count) => count,
            Wanted::Held(count) => 0x20 | count,
            Wanted::This(counter) => 0x40 | counter.position().unwrap(),
        });
        let reason = pending.refusal.map_or(0, |reason| reason.code());
        code.push(reason.to_le_bytes()[0]);
        let earlier = Policy::LAYERS.into_iter().filter(|other| {
            let other = self.pending(*other);
            other.is_some_and(|other| other.sequence < pending.sequence)
        });
        code.push(u8::try_from(earlier.count()).unwrap());
        match pending.question {
            Some(question) => {
                let position = question.counter.position().unwrap();
                code.extend([position, question.holder.code(), rest(question.due)]);
            }
            None => code.push(0xff),
        }
    }

    /// Makes a move, and returns the records of it.
    fn perform(&mut self, step: Move) -> Vec<Record> {
        self.path.push(step);
        let mut records = Vec::new();
        if matches!(step, Move::Tick) {
            self.now = self.now + Ticks(1);
        }
        let cx = &mut Context {
            now: self.now,
            entropy: &mut NoEntropy,
            audit: &mut records,
        };
        let unit = &mut self.unit;
        let cookie = Cookie::new(COOKIE).unwrap();
        // Other tests check the effects on the PMU, and the next state shows whether
        // the move was possible.
        match step {
            Move::Ask(layer, wanted) => {
                let request = Request::Reserve {
                    wanted,
                    cookie,
                    lease_ms: None,
                    event: None,
                };
                let _ = unit.request(layer, request, cx);
            }
            Move::Release(layer, counter) => {
                let _ = unit.request(layer, Request::Release { counter, cookie }, cx);
            }
            Move::Withdraw(layer) => {
                let _ = unit.request(layer, Request::Withdraw { cookie }, cx);
            }
            Move::Reply(layer, counter, yields) => {
                let _ = unit.reply(layer, Reply { counter, yields }, cx);
            }
            Move::Claim(layer, counter) => claim(unit, layer, counter, cx),
            Move::Lend(layer, counter, lends) => lend(unit, layer, counter, lends, cx),
            Move::EndPhase => {
                let _ = unit.write(PcrRegister::Phase, 1, Caller::legacy(Layer::Firmware), cx);
            }
            Move::Tick => {
                let _ = unit.tick(cx);
            }
            Move::Arrive(programmable) => {
                let there = Backing {
                    programmable,
                    elsewhere: 0,
                    ..unit.backed()
                };
                let _ = unit.back(there, cx);
            }
            Move::Stay => {
                let _ = unit.stay(cx);
            }
            Move::Admin(act) => administer(unit, act, cx),
        }
        records
    }

    fn is_possible(&self, step: Move) -> bool {
        let over = self.unit.phase().is_over();
        let runs = |layer| match layer {
            Layer::Firmware => !over || self.unit.arbitration.firmware().has_smm(),
            Layer::GuestKernel => over,
            _ => true,
        };
        match step {
            Move::Ask(layer, _)
            | Move::Release(layer, _)
            | Move::Withdraw(layer)
            | Move::Reply(layer, ..)
            | Move::Claim(layer, _)
            | Move::Lend(layer, ..) => runs(layer),
            Move::EndPhase => !over,
            Move::Tick | Move::Admin(_) | Move::Stay => true,
            // Nobody moves it to a core that cannot back what is held.
            Move::Arrive(_) => self.unit.waits_for_move(),
        }
    }
}

/// Walks through all states, and returns their number.
fn explore(scheme: Scheme, policy: Policy, counters: u8, backed: u8, smm: bool) -> usize {
    let first = State::first(scheme, policy, counters, backed, smm);
    walk(first, &moves(counters))
}

#[test]
fn a_request_waits_for_a_core_that_backs_it() {
    for scheme in Scheme::ALL {
        for policy in policies() {
            let mut first = State::first(scheme, policy, 2, 1, false);
            first.back(Backing {
                elsewhere: 2,
                ..first.unit.backed()
            });
            let more = [Move::Arrive(2), Move::Stay];
            let states = walk(first, &[&moves(2)[..], &more].concat());
            let before = explore(scheme, policy, 2, 1, false);
            assert!(
                states > before || policy.kernel.max.programmable < 2,
                "{states}, {before}"
            );
        }
    }
}

/// Walks through all states that these moves lead to, and returns their number.
fn walk(first: State, moves: &[Move]) -> usize {
    let (scheme, policy) = (first.unit.scheme(), *first.unit.policy());
    let mut seen = HashSet::from([first.code()]);
    let mut queue = VecDeque::from([first]);
    while let Some(state) = queue.pop_front() {
        if let Err(what) = state.check_answers_come() {
            panic!("{what}: {scheme}, {policy:?}: {:?}", state.path);
        }
        for step in moves.iter().filter(|step| state.is_possible(**step)) {
            let mut next = state.fork();
            let records = next.perform(*step);
            let checked = next
                .check_step(&state, &records)
                .and_then(|()| next.check());
            if let Err(what) = checked {
                panic!("{what}: {scheme}, {policy:?}: {:?}\n{records:?}", next.path);
            }
            if seen.insert(next.code()) {
                queue.push_back(next);
            }
        }
    }
    seen.len()
}

fn share(min: u8, max: u8, priority: u8, lease_ms: Option<u32>) -> Share {
    let kind = |programmable| PerKind {
        programmable,
        fixed: 0,
    };
    Share {
        min: kind(min),
        max: kind(max),
        priority,
        lease_ms,
    }
}

fn policies() -> [Policy; 5] {
    let policy = |firmware, hypervisor, kernel| Policy {
        firmware,
        hypervisor,
        kernel,
        grace_ms: GRACE,
    };
    [
        // Priorities that rise, fall and are equal; minima, maxima and leases.
        policy(
            share(0, 3, 0, None),
            share(0, 3, 1, None),
            share(0, 3, 2, None),
        ),
        policy(
            share(0, 3, 2, None),
            share(0, 3, 1, None),
            share(0, 3, 0, None),
        ),
        policy(
            share(0, 3, 1, None),
            share(0, 3, 1, None),
            share(0, 3, 1, None),
        ),
        policy(
            share(0, 1, 0, Some(3)),
            share(0, 2, 2, None),
            share(1, 2, 1, Some(5)),
        ),
        policy(
            share(1, 2, 0, None),
            share(0, 1, 1, None),
            share(0, 2, 2, None),
        ),
    ]
}

/// Walks under all policies. A walk that stops early would prove nothing.
fn explore_all(scheme: Scheme, least: usize) {
    for policy in policies() {
        for smm in [false, true] {
            let states = explore(scheme, policy, 2, 2, smm);
            assert!(states > least, "{states}: {policy:?}");
            // One physical counter for the guest's layers, and none.
            assert!(explore(scheme, policy, 2, 1, smm) > least / 5, "{policy:?}");
            explore(scheme, policy, 2, 0, smm);
        }
    }
}

#[test]
fn every_state_of_the_interacting_scheme_is_sound() {
    explore_all(Scheme::Interacting, 150);
}

#[test]
fn every_state_of_the_single_master_scheme_is_sound() {
    explore_all(Scheme::SingleMaster, 30);
}

#[test]
fn every_state_of_the_independent_scheme_is_sound() {
    explore_all(Scheme::Independent, 30);
}

#[test]
fn minima_of_two_layers_are_kept_among_three_counters() {
    let policy = Policy {
        firmware: share(1, 2, 0, None),
        hypervisor: share(0, 1, 1, None),
        kernel: share(1, 2, 2, None),
        grace_ms: GRACE,
    };
    let states = explore(Scheme::Interacting, policy, 3, 3, false);
    assert!(states > 1_000, "{states}");
}

/// The administrator acts at any moment.
#[test]
fn every_state_under_an_administrator_is_sound() {
    let mut all = moves(2);
    for counter in (0..2).map(CounterId::Programmable) {
        for grace_ms in [0, GRACE] {
            all.push(Move::Admin(AdminAct::Revoke { counter, grace_ms }));
        }
    }
    for barred in [false, true] {
        let layer = Layer::GuestKernel;
        all.push(Move::Admin(AdminAct::Bar { layer, barred }));
    }
    for (most, grace_ms) in [(0, 0), (1, GRACE), (2, 0)] {
        let most = PerKind {
            programmable: most,
            fixed: 0,
        };
        all.push(Move::Admin(AdminAct::SetBudget { most, grace_ms }));
    }
    let set = |scheme| Move::Admin(AdminAct::SetScheme(scheme));
    all.extend(Scheme::ALL.map(set));
    for policy in policies() {
        let first = State::first(Scheme::Interacting, policy, 2, 2, false);
        let states = walk(first, &all);
        assert!(states > 1_000, "{states}: {policy:?}");
    }
}
