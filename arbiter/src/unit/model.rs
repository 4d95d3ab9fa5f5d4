//! A walk through every state that two counters and three layers can get into, by
//! every order of moves of layers and of time. Each state is checked for what must
//! hold.

mod invariants;

use alloc::collections::{BTreeSet, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::{AdminAct, Caller, Context, PcrConfig, PcrUnit};
use crate::guard::Guard;
use crate::message::{Reply, Request, Wanted};
use crate::time::{Ticks, Tsc};
use crate::{
    Backing, Control, Cookie, CounterId, CounterSet, GuardLimits, Layer, NoEntropy, PcrRegister,
    PerKind, Phase, Policy, Reason, Record, Scheme, Share,
};

const GRACE: u32 = 2;

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
        let mut unit = PcrUnit::new(PcrConfig {
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
        unit.backed = Backing {
            programmable: backed,
            ..Backing::whole()
        };
        State {
            unit,
            now: Tsc(0),
            path: Vec::new(),
        }
    }

    fn fork(&self) -> State {
        let unit = &self.unit;
        let phase = Phase::new(true);
        if unit.phase.is_over() {
            phase.end();
        }
        let phase = Arc::new(phase);
        let unit = PcrUnit {
            bank: unit.bank.clone(),
            policy: unit.policy,
            // There is but one cookie, so none is wrong.
            guard: Guard::of_vcpu(GuardLimits::with_ticks_per_ms(1), phase.clone()),
            widths: unit.widths,
            ticks_per_ms: unit.ticks_per_ms,
            phase,
            map: unit.map,
            unmapped: unit.unmapped,
            legacy: unit.legacy,
            smm: unit.smm,
            smram: unit.smram,
            scheme: unit.scheme,
            backed: unit.backed,
            held_anew: unit.held_anew,
            budget: unit.budget,
            barred: unit.barred,
            mailboxes: unit.mailboxes.clone(),
            sequence: unit.sequence,
            deadline: unit.deadline,
        };
        State {
            unit,
            now: self.now,
            path: self.path.clone(),
        }
    }

    /// The code of the state. Two states have the same code if no move can distinguish
    /// them: times count from now, requests count by their order, and notices are left
    /// out.
    fn code(&self) -> Vec<u8> {
        let mut code = Vec::with_capacity(64);
        let rest = |at: Tsc| u8::try_from((at - self.now).0).unwrap();
        code.push(u8::from(self.unit.phase.is_over()));
        code.extend(self.unit.barred.map(u8::from));
        code.extend(self.unit.scheme.name().bytes().take(2));
        code.extend([self.unit.backed.programmable, self.unit.budget.programmable]);
        for counter in self.unit.bank.counters().iter() {
            let Some(held) = self.unit.bank.reservation(counter) else {
                code.push(0xff);
                continue;
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
        for mailbox in &self.unit.mailboxes {
            let Some(pending) = &mailbox.pending else {
                code.push(0xff);
                continue;
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
            let earlier = self.unit.mailboxes.iter().filter(|other| {
                let other = other.pending.as_ref();
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
        code
    }

    /// Makes a move, and returns the records of it.
    fn perform(&mut self, step: Move) -> Vec<Record> {
        self.path.push(step);
        let mut records = Vec::new();
        let mut entropy = NoEntropy;
        if matches!(step, Move::Tick) {
            self.now = self.now + Ticks(1);
        }
        let cx = &mut Context {
            now: self.now,
            entropy: &mut entropy,
            audit: &mut records,
        };
        let unit = &mut self.unit;
        let cookie = Cookie::new(COOKIE).unwrap();
        let caller = |layer| Caller {
            layer,
            presented: COOKIE,
        };
        // Other tests check the effects on the PMU, and the next state shows whether
        // the move was possible.
        let _ = match step {
            Move::Ask(layer, wanted) => {
                let request = Request::Reserve {
                    wanted,
                    cookie,
                    lease_ms: None,
                    event: None,
                };
                unit.request(layer, request, cx).map(drop).ok()
            }
            Move::Release(layer, counter) => {
                let request = Request::Release { counter, cookie };
                unit.request(layer, request, cx).map(drop).ok()
            }
            Move::Withdraw(layer) => unit
                .request(layer, Request::Withdraw { cookie }, cx)
                .map(drop)
                .ok(),
            Move::Reply(layer, counter, yields) => unit
                .reply(layer, Reply { counter, yields }, cx)
                .map(drop)
                .ok(),
            Move::Claim(layer, counter) => {
                let register = PcrRegister::ManagementKey(counter);
                match unit.bank.reservation(counter).map(|held| held.owner) {
                    None => unit.write(register, COOKIE, Caller::legacy(layer), cx),
                    Some(owner) if owner != layer => {
                        // To another cookie and back again: the owner changes.
                        let taken = unit.write(register, COOKIE + 1, caller(layer), cx);
                        let presented = COOKIE + 1;
                        taken.and_then(|_| {
                            unit.write(register, COOKIE, Caller { layer, presented }, cx)
                        })
                    }
                    Some(_) => None,
                }
                .map(drop)
            }
            Move::Lend(layer, counter, lends) => {
                let control = Control::INITIAL.with_lend(lends).bits();
                let owner = unit.bank.reservation(counter).map(|held| held.owner);
                let register = PcrRegister::Control(counter);
                (owner == Some(layer))
                    .then(|| unit.write(register, control, caller(layer), cx).map(drop))
                    .flatten()
            }
            Move::EndPhase => {
                let caller = Caller::legacy(Layer::Firmware);
                unit.write(PcrRegister::Phase, 1, caller, cx).map(drop)
            }
            Move::Tick => {
                let _ = unit.tick(cx);
                Some(())
            }
            Move::Arrive(programmable) => {
                let _ = unit.back(
                    Backing {
                        programmable,
                        elsewhere: 0,
                        ..unit.backed
                    },
                    cx,
                );
                Some(())
            }
            Move::Stay => {
                let _ = unit.stay(cx);
                Some(())
            }
            Move::Admin(act) => {
                if let AdminAct::SetBudget { most, .. } = act {
                    let programmable = most.programmable;
                    let _ = unit.back(
                        Backing {
                            programmable,
                            ..unit.backed
                        },
                        cx,
                    );
                }
                let done = unit.administer(act, cx).map(drop).ok();
                if let AdminAct::SetBudget { most, grace_ms } = act {
                    let (staying, leaving) =
                        unit.held_by_guest(CounterId::Programmable(0), Tsc(u64::MAX));
                    assert!(staying.len() <= u32::from(most.programmable));
                    assert!(leaving.is_empty() || grace_ms > 0);
                }
                done
            }
        };
        records
    }

    fn is_possible(&self, step: Move) -> bool {
        let over = self.unit.phase.is_over();
        let runs = |layer| match layer {
            Layer::Firmware => !over || self.unit.smm,
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
            first.unit.backed.elsewhere = 2;
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
    let (scheme, policy) = (first.unit.scheme, first.unit.policy);
    let mut seen = BTreeSet::from([first.code()]);
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
