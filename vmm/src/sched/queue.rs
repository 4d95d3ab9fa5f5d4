//! The run queue of one core: who runs next, for how long, and who is asked
//! whether it is still halted. Pure: time comes in, decisions go out.
//!
//! A vCPU has a budget of one slice a round. It runs until the budget is used
//! up and then goes to the end of the queue with a new one. A vCPU that halts
//! keeps the rest and, once found awake, spends it ahead of the queue: it is
//! served soon, and nobody waits longer for it than it was entitled to anyway.
//! So no runnable vCPU waits longer than one slice for each other vCPU of its
//! core, and the time of their probes.
//!
//! A vCPU that is locked out (it has guessed cookies) is neither run nor asked until
//! its time is over, and one that a tool's context blocks until that lets it go.
//! Then it goes to the end of the queue.

use std::collections::VecDeque;

use pmu_virt::{Ticks, Tsc};

use super::pace::Pace;
use crate::kvm::VcpuId;
use crate::vcpu::Runnability;

/// What a core does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Enter this vCPU and leave it at `until`; `None`: nobody else needs the
    /// core.
    Run {
        vcpu: VcpuId,
        /// When to come back at the latest.
        until: Option<Tsc>,
    },
    /// Ask this idle vCPU whether something has woken it.
    Probe(VcpuId),
    /// Nobody can be run or asked; `None`: there is no vCPU.
    Wait {
        /// When somebody may run again.
        until: Option<Tsc>,
    },
}

/// One vCPU of the core.
#[derive(Debug)]
struct Member {
    id: VcpuId,
    /// What is left of its slice.
    left: Ticks,
    /// No other core takes it before.
    stays_until: Tsc,
    idle: Option<Idle>,
    /// It may not run. Neither idle nor queued meanwhile.
    held: Option<Held>,
}

/// Until when a vCPU may not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    Until(Tsc),
    /// Until [`RunQueue::unblock`].
    Blocked,
}

impl Held {
    fn of(runnability: Runnability) -> Option<Self> {
        match runnability {
            Runnability::LockedOut { until } => Some(Held::Until(until)),
            Runnability::Blocked => Some(Held::Blocked),
            Runnability::Runnable | Runnability::Idle => None,
        }
    }
}

impl Member {
    /// It may run, with a slice of its own.
    fn set_free(&mut self, pace: Pace) {
        self.held = None;
        if self.left < pace.shortest {
            self.left = pace.slice;
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Idle {
    since: Tsc,
    /// When it was last known to be idle.
    seen: Tsc,
    /// When its timer will wake it, if that is known.
    due: Option<Tsc>,
}

impl Idle {
    fn new(now: Tsc) -> Self {
        Self {
            since: now,
            seen: now,
            due: None,
        }
    }
}

/// The vCPU inside `KVM_RUN`.
#[derive(Debug, Clone, Copy)]
struct Running {
    id: VcpuId,
    since: Tsc,
}

/// The vCPUs of one core.
#[derive(Debug)]
pub struct RunQueue {
    pace: Pace,
    members: Vec<Member>,
    /// Runnable ones that halted before their slice was over; ahead of `ready`.
    woken: VecDeque<VcpuId>,
    ready: VecDeque<VcpuId>,
    /// Idle ones that are still to be asked in this round of probes.
    round: VecDeque<VcpuId>,
    round_began: Tsc,
    /// No round of probes begins before.
    quiet_until: Tsc,
    running: Option<Running>,
    /// Who ran last, and how far the next look at it is away.
    last: Option<(VcpuId, Ticks)>,
    crowded_since: Option<Tsc>,
}

impl RunQueue {
    /// A core without vCPUs.
    #[must_use]
    pub fn new(pace: Pace) -> Self {
        Self {
            pace,
            members: Vec::new(),
            woken: VecDeque::new(),
            ready: VecDeque::new(),
            round: VecDeque::new(),
            round_began: Tsc(0),
            quiet_until: Tsc(0),
            running: None,
            last: None,
            crowded_since: None,
        }
    }

    /// A vCPU comes to this core, which has cost `cost`.
    pub fn admit(&mut self, now: Tsc, id: VcpuId, runnability: Runnability, cost: Ticks) {
        let idle = Idle::new(now);
        self.members.push(Member {
            id,
            left: self.pace.slice,
            stays_until: now + self.pace.stay(cost),
            idle: (runnability == Runnability::Idle).then_some(idle),
            held: Held::of(runnability),
        });
        if runnability == Runnability::Runnable {
            self.ready.push_back(id);
        }
    }

    /// A vCPU leaves this core for good.
    pub fn remove(&mut self, id: VcpuId) {
        self.members.retain(|member| member.id != id);
        for queue in [&mut self.woken, &mut self.ready, &mut self.round] {
            queue.retain(|&queued| queued != id);
        }
        if self.running.is_some_and(|running| running.id == id) {
            self.running = None;
        }
        if self.last.is_some_and(|(last, _)| last == id) {
            self.last = None;
        }
        self.crowded_since = None;
    }

    /// What to do at `now`. After a [`Action::Run`] call [`RunQueue::left`],
    /// after a [`Action::Probe`] call [`RunQueue::probed`].
    pub fn next(&mut self, now: Tsc) -> Action {
        self.release(now);
        // Nobody is locked out whose time is over, so what is due is a round.
        if self.round.is_empty() && self.due_at(None).is_some_and(|at| at <= now) {
            self.begin_round(now);
        }
        if let Some(id) = self.round.pop_front() {
            return Action::Probe(id);
        }
        let crowded = self.runnable() >= 2;
        self.crowded_since = crowded.then(|| self.crowded_since.unwrap_or(now));
        let runnable = self.woken.pop_front().or_else(|| self.ready.pop_front());
        if let Some(id) = runnable {
            return self.run(now, id);
        }
        self.sleep(now)
    }

    /// The vCPU that was run has come back; true if its timer may be told by
    /// [`RunQueue::expect_wake`].
    pub fn left(&mut self, now: Tsc, runnability: Runnability) -> bool {
        let Some(Running { id, since }) = self.running.take() else {
            return false;
        };
        // Ahead of this one, if its slice is over.
        self.release(now);
        let Pace {
            slice, shortest, ..
        } = self.pace;
        let Some(member) = self.members.iter_mut().find(|member| member.id == id) else {
            return false;
        };
        match (&mut member.idle, runnability) {
            (Some(idle), Runnability::Idle) => {
                // It may have run meanwhile.
                idle.seen = now;
                idle.due = None;
                return true;
            }
            (Some(_), Runnability::Runnable) => self.wake(now, id),
            (idle @ Some(_), Runnability::LockedOut { .. } | Runnability::Blocked) => {
                *idle = None;
                member.held = Held::of(runnability);
            }
            (none, runnability) => {
                member.left = member.left - (now - since);
                match runnability {
                    Runnability::Idle => {
                        *none = Some(Idle::new(now));
                        return true;
                    }
                    Runnability::LockedOut { .. } | Runnability::Blocked => {
                        member.held = Held::of(runnability);
                    }
                    Runnability::Runnable if member.left < shortest => {
                        member.left = slice;
                        self.ready.push_back(id);
                    }
                    Runnability::Runnable => self.ready.push_front(id),
                }
            }
        }
        false
    }

    /// An idle vCPU's timer will wake it at `at`.
    pub fn expect_wake(&mut self, id: VcpuId, at: Tsc) {
        if let Some(idle) = self.idle_mut(id) {
            idle.due = Some(at);
        }
    }

    /// Whether an idle vCPU's timer should have woken it by now.
    #[must_use]
    pub fn is_due(&self, now: Tsc, id: VcpuId) -> bool {
        let member = self.members.iter().find(|member| member.id == id);
        let idle = member.and_then(|member| member.idle);
        idle.and_then(|idle| idle.due).is_some_and(|at| at <= now)
    }

    /// True if a vCPU's going idle concerns nobody else.
    #[must_use]
    pub fn is_single(&self) -> bool {
        self.members.len() < 2
    }

    /// What the probe of an idle vCPU has found.
    pub fn probed(&mut self, now: Tsc, id: VcpuId, runnability: Runnability) {
        match runnability {
            Runnability::Runnable => self.wake(now, id),
            Runnability::LockedOut { .. } | Runnability::Blocked => {
                let member = self.members.iter_mut().find(|member| member.id == id);
                if let Some(member) = member {
                    member.idle = None;
                    member.held = Held::of(runnability);
                }
            }
            Runnability::Idle => {
                if let Some(idle) = self.idle_mut(id) {
                    idle.seen = now;
                    idle.due = idle.due.filter(|&at| at > now);
                }
            }
        }
        if self.round.is_empty() {
            self.quiet_until = now + self.pace.quiet(now - self.round_began);
        }
    }

    /// A vCPU that was blocked may run again; any other one goes on as it was.
    pub fn unblock(&mut self, id: VcpuId) {
        let member = self.members.iter_mut().find(|member| member.id == id);
        if let Some(member) = member.filter(|member| member.held == Some(Held::Blocked)) {
            member.set_free(self.pace);
            self.ready.push_back(id);
        }
    }

    /// A vCPU that another core may take, if runnable ones have been waiting
    /// here for long: the one that waits longest among those that have been
    /// here for some time and that `may_go`.
    #[must_use]
    pub fn surplus(&self, now: Tsc, may_go: impl Fn(VcpuId) -> bool) -> Option<VcpuId> {
        let crowded = self.crowded_since?;
        if now - crowded < self.pace.patience {
            return None;
        }
        let settled = |id: &&VcpuId| {
            let member = self.members.iter().find(|member| member.id == **id);
            self.last.is_none_or(|(last, _)| last != **id)
                && member.is_some_and(|member| member.stays_until <= now)
        };
        let mut settled = self.ready.iter().filter(settled).copied();
        settled.find(|id| may_go(*id))
    }

    /// How many vCPUs here could run, as far as is known, while none does.
    #[must_use]
    pub fn runnable(&self) -> usize {
        self.woken.len() + self.ready.len()
    }

    fn idle_mut(&mut self, id: VcpuId) -> Option<&mut Idle> {
        let member = self.members.iter_mut().find(|member| member.id == id)?;
        member.idle.as_mut()
    }

    fn run(&mut self, now: Tsc, id: VcpuId) -> Action {
        self.running = Some(Running { id, since: now });
        let distance = match self.last {
            Some((last, distance)) if last == id => distance,
            _ => self.pace.first_look,
        };
        let mut until = self.due_at(None);
        if !self.woken.is_empty() || !self.ready.is_empty() {
            let member = self.members.iter().find(|member| member.id == id);
            let left = member.map_or(self.pace.slice, |member| member.left);
            let look = now + left.min(distance);
            until = Some(until.map_or(look, |until| until.min(look)));
            self.last = Some((id, distance * 2));
        } else {
            self.last = Some((id, self.pace.first_look));
        }
        Action::Run { vcpu: id, until }
    }

    /// Nobody can run: wait inside the vCPU that halted last, as it is the
    /// likeliest to go on, until the others have to be asked, or one that is
    /// locked out may run.
    fn sleep(&mut self, now: Tsc) -> Action {
        let idle = self.members.iter().filter_map(|m| Some((m.idle?, m.id)));
        let Some((_, id)) = idle.max_by_key(|(idle, _)| idle.since) else {
            return Action::Wait {
                until: self.due_at(None),
            };
        };
        self.running = Some(Running { id, since: now });
        self.last = None;
        Action::Run {
            vcpu: id,
            until: self.due_at(Some(id)),
        }
    }

    /// Lets those run whose time is over.
    fn release(&mut self, now: Tsc) {
        let over = |held: Held| matches!(held, Held::Until(until) if until <= now);
        for member in &mut self.members {
            if member.held.is_some_and(over) {
                member.set_free(self.pace);
                self.ready.push_back(member.id);
            }
        }
    }

    /// When the next round of probes is due, in which `asleep` is not asked, or the
    /// first of those that are locked out may run.
    fn due_at(&self, asleep: Option<VcpuId>) -> Option<Tsc> {
        let release = self.members.iter().filter_map(|member| match member.held {
            Some(Held::Until(until)) => Some(until),
            Some(Held::Blocked) | None => None,
        });
        let asked = |member: &&Member| Some(member.id) != asleep;
        let idle = self.members.iter().filter(asked).filter_map(|m| m.idle);
        let due = idle.map(|idle| {
            let probe = idle.seen + self.pace.probe_every;
            idle.due.map_or(probe, |at| probe.min(at))
        });
        let round = due.min().map(|at| at.max(self.quiet_until));
        release.chain(round).min()
    }

    /// Asks all whose turn would come soon, as interrupting the core is the
    /// larger part of asking one.
    fn begin_round(&mut self, now: Tsc) {
        let soon = Ticks(self.pace.probe_every.0 / 2);
        let due = |member: &&Member| {
            member
                .idle
                .is_some_and(|idle| now - idle.seen >= soon || idle.due.is_some_and(|at| at <= now))
        };
        let due = self.members.iter().filter(due).map(|member| member.id);
        self.round = due.collect();
        self.round_began = now;
    }

    fn wake(&mut self, now: Tsc, id: VcpuId) {
        let round = self.pace.slice * self.members.len() as u64;
        let Some(member) = self.members.iter_mut().find(|member| member.id == id) else {
            return;
        };
        let Some(idle) = member.idle.take() else {
            return;
        };
        // It has let a whole round go by.
        if now - idle.since >= round {
            member.left = self.pace.slice;
        }
        if member.left >= self.pace.shortest {
            self.woken.push_back(id);
        } else {
            member.left = self.pace.slice;
            self.ready.push_back(id);
        }
    }
}

#[cfg(test)]
mod tests;
