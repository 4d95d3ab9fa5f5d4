//! A core in virtual time: guests that run, sleep, are woken and are locked out.

use std::collections::BTreeMap;

use pmu_virt::Tsc;
use proptest::prelude::{Just, Strategy, prop_assert, prop_oneof};
use proptest::test_runner::TestCaseError;

use super::super::{Action, RunQueue, Runnability};
use super::queue;
use crate::kvm::VcpuId;

/// One vCPU's life: how long it runs, then how long it sleeps, again and again.
#[derive(Debug, Clone, Copy)]
pub(super) struct Life {
    pub(super) runs: u64,
    pub(super) sleeps: u64,
    pub(super) wake: Wake,
}

/// What wakes a vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wake {
    /// Another vCPU, or a device.
    Interrupt,
    /// A timer of which nobody knows, which takes two probes to be seen.
    HiddenTimer,
    /// A timer that the queue is told of.
    Timer,
    /// Time: it does not sleep, it is locked out for guessing.
    Penalty,
}

#[derive(Debug)]
pub(super) struct Guest {
    life: Life,
    /// What is left of its run.
    work: u64,
    /// Asleep until then.
    wakes: Option<u64>,
    /// The expired timer has been made an interrupt.
    pending: bool,
    /// Since when it is in the queue, as far as the queue knows.
    queued: Option<u64>,
    pub(super) ran: u64,
}

/// A core in virtual time.
pub(super) struct World {
    queue: RunQueue,
    pub(super) guests: BTreeMap<VcpuId, Guest>,
    pub(super) now: u64,
    probe_cost: u64,
    pub(super) probing: u64,
    /// The longest time from being runnable, as known to the queue, to the core.
    pub(super) waited: u64,
    /// The longest time from a wake-up to its being known, halved for those that
    /// take two probes,
    pub(super) unnoticed: u64,
    /// and from a timer's that was announced.
    pub(super) overslept: u64,
    /// One that is locked out was asked.
    pub(super) asked_barred: bool,
}

impl World {
    pub(super) fn new(lives: &[Life], probe_cost: u64) -> Self {
        let guests = (0..).map(VcpuId).zip(lives.iter().map(|life| Guest {
            life: *life,
            work: life.runs,
            wakes: None,
            pending: false,
            queued: Some(0),
            ran: 0,
        }));
        Self {
            queue: queue(&vec![Runnability::Runnable; lives.len()]),
            guests: guests.collect(),
            now: 0,
            probe_cost,
            probing: 0,
            waited: 0,
            unnoticed: 0,
            overslept: 0,
            asked_barred: false,
        }
    }

    pub(super) fn step(&mut self, end: u64) -> Result<(), TestCaseError> {
        match self.queue.next(Tsc(self.now)) {
            Action::Probe(id) => self.probe(id),
            Action::Run { vcpu, until } => self.run(vcpu, until.map(|at| at.0), end)?,
            Action::Wait { until } => {
                let until = until.map_or(0, |at| at.0);
                prop_assert!(until > self.now, "there are vCPUs");
                let all_barred = self.guests.values().all(|g| g.life.wake == Wake::Penalty);
                prop_assert!(all_barred, "a core waits that could probe");
                self.now = until.min(end);
            }
        }
        Ok(())
    }

    fn probe(&mut self, id: VcpuId) {
        self.now += self.probe_cost;
        self.probing += self.probe_cost;
        let guest = self.guests.get_mut(&id).expect("it exists");
        let expired = guest.wakes.is_none_or(|at| at <= self.now);
        let twice = guest.life.wake == Wake::HiddenTimer;
        let seen = expired && (!twice || guest.pending);
        guest.pending = expired;
        if seen {
            let took = self.now - guest.wakes.unwrap_or(self.now);
            match guest.life.wake {
                Wake::Timer => self.overslept = self.overslept.max(took),
                Wake::Interrupt => self.unnoticed = self.unnoticed.max(took),
                Wake::HiddenTimer => self.unnoticed = self.unnoticed.max(took / 2),
                Wake::Penalty => self.asked_barred = true,
            }
            guest.wakes = None;
            guest.work = guest.life.runs;
            guest.queued = Some(self.now);
        }
        let runnability = if seen {
            Runnability::Runnable
        } else {
            Runnability::Idle
        };
        self.queue.probed(Tsc(self.now), id, runnability);
    }

    /// The guest runs, or sleeps inside KVM_RUN, until `until`.
    fn run(&mut self, id: VcpuId, until: Option<u64>, end: u64) -> Result<(), TestCaseError> {
        let others = self.guests.iter().filter(|(other, _)| **other != id);
        let now = self.now;
        let is_queued = |other: &Guest| other.queued.is_some_and(|since| since <= now);
        let queued = others.filter(|(_, other)| is_queued(other)).count();
        let asleep = self.guests[&id].queued.is_none();
        prop_assert!(!(asleep && queued > 0), "the core sleeps while others wait");
        prop_assert!(until.is_some(), "the others are never looked at");
        let until = until.unwrap_or(end);
        prop_assert!(until > self.now, "an entry for no time");
        // The story ends there, and somebody may be locked out for ages.
        let until = until.min(end);
        let guest = self.guests.get_mut(&id).expect("it exists");
        if guest.life.wake == Wake::Penalty {
            prop_assert!(guest.wakes.is_none_or(|at| at <= self.now), "let in early");
        }
        if let Some(since) = guest.queued {
            self.waited = self.waited.max(self.now - since);
        }
        while self.now < until {
            match guest.wakes {
                Some(at) if at > self.now => self.now = at.min(until),
                Some(_) => {
                    guest.wakes = None;
                    guest.work = guest.life.runs;
                }
                None => {
                    let ran = guest.work.min(until - self.now);
                    guest.work -= ran;
                    guest.ran += ran;
                    self.now += ran;
                    if guest.work == 0 {
                        guest.pending = false;
                        guest.wakes = Some(self.now + guest.life.sleeps);
                        if guest.life.wake == Wake::Penalty {
                            break;
                        }
                    }
                }
            }
        }
        let runnability = match guest.wakes {
            Some(until) if guest.life.wake == Wake::Penalty => {
                Runnability::LockedOut { until: Tsc(until) }
            }
            Some(_) => Runnability::Idle,
            None => Runnability::Runnable,
        };
        guest.queued = match runnability {
            Runnability::Runnable => Some(self.now),
            Runnability::LockedOut { until } => Some(until.0),
            Runnability::Idle | Runnability::Blocked => None,
        };
        let announced = guest.wakes.filter(|_| guest.life.wake == Wake::Timer);
        if self.queue.left(Tsc(self.now), runnability)
            && let Some(at) = announced
        {
            self.queue.expect_wake(id, Tsc(at));
        }
        Ok(())
    }
}

pub(super) fn life() -> impl Strategy<Value = Life> {
    let runs = prop_oneof![Just(u64::MAX), 1..200u64, 1..20_000u64];
    let sleeps = prop_oneof![1..500u64, 1..100_000u64, Just(u64::MAX / 2)];
    let wake = prop_oneof![
        Just(Wake::Interrupt),
        Just(Wake::HiddenTimer),
        Just(Wake::Timer),
        Just(Wake::Penalty)
    ];
    (runs, sleeps, wake).prop_map(|(runs, sleeps, wake)| Life { runs, sleeps, wake })
}
