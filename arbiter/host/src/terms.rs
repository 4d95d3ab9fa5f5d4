//! What is asked for.

use std::sync::Arc;

use super::cpus::CpuSet;
use super::ids::{GroupId, PmuId, ThreadId};
use arbiter::{CounterSet, Nanos};

/// One counter that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    pub pmu: PmuId,
    /// Any of these: all programmable ones, one fixed-function counter, or those that
    /// can count a named event. They are of one kind.
    pub counters: CounterSet,
}

/// When a lease's counters are needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Whatever runs on the CPUs. Nobody else uses the counters at any time.
    Cpu,
    /// While one of these threads runs. Leases of threads that are not the same share a
    /// counter in time.
    Thread(Vec<ThreadId>),
    /// While something runs in this control group, or in one below it. Groups share a
    /// counter in time, as threads do; a lease of a group below one that has a lease is
    /// taken out of that one's.
    Group(Arc<Group>),
    /// A part of what a control group has, for somebody who runs in it.
    Part(Box<Part>),
}

impl Scope {
    /// The control group, if it is one.
    pub fn group(&self) -> Option<&Arc<Group>> {
        match self {
            Scope::Group(group) => Some(group),
            Scope::Cpu | Scope::Thread(_) | Scope::Part(_) => None,
        }
    }

    /// Whether control groups concern it. Each decision asks that, mostly of leases that have
    /// nothing to do with any.
    pub(crate) fn is_of_groups(&self) -> bool {
        matches!(self, Scope::Group(_) | Scope::Part(_))
    }

    /// The groups out of whose leases it is taken, as far as they have some, from the outermost
    /// on.
    pub fn above(&self) -> impl DoubleEndedIterator<Item = GroupId> + '_ {
        let (group, own) = match self {
            Scope::Cpu | Scope::Thread(_) => (None, None),
            Scope::Group(group) => (Some(group), None),
            Scope::Part(part) => (Some(&part.of), Some(part.of.id)),
        };
        let above = group.map_or(&[][..], |group| &group.above);
        above.iter().copied().chain(own)
    }

    /// The threads with which it ends.
    pub fn threads(&self) -> &[ThreadId] {
        match self {
            Scope::Cpu | Scope::Group(_) => &[],
            Scope::Thread(threads) => threads,
            Scope::Part(part) => &part.threads,
        }
    }

    pub(crate) fn threads_mut(&mut self) -> Option<&mut Vec<ThreadId>> {
        match self {
            Scope::Cpu | Scope::Group(_) => None,
            Scope::Thread(threads) => Some(threads),
            Scope::Part(part) => Some(&mut part.threads),
        }
    }

    /// Whether it is taken out of what the other one's control group has.
    pub fn is_below(&self, other: &Scope) -> bool {
        let of = other.group();
        of.is_some_and(|group| self.above().any(|id| id == group.id))
    }
}

/// A lease within that of a control group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The innermost group with a lease in which these run.
    pub of: Arc<Group>,
    /// While one of these runs; as in [`Scope::Thread`], those of different threads share a
    /// counter in time.
    pub threads: Vec<ThreadId>,
    /// It is for whatever the first of them, which is a process, has others run in the group,
    /// too: so it is needed beside all else that is taken out of the group's.
    pub with_others: bool,
}

/// A control group, and where it is in their tree. It cannot be moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    pub id: GroupId,
    /// Those that it is in, from the outermost on.
    pub above: Vec<GroupId>,
    /// Its path when it was asked for, for people: others may have had it since.
    pub path: String,
}

/// What becomes of a request that cannot be granted now, and of a lease that has lost
/// its counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// It is refused, or ends.
    No,
    /// It waits for its turn, so long at most.
    For(Nanos),
    /// It waits for its turn.
    Always,
}

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The counters, on each of the CPUs. The first are given first and taken last.
    pub demands: Vec<Demand>,
    /// The fewest of them that are of use, from 1; all, where the lease is a group.
    pub at_least: usize,
    /// The CPUs. Of a PMU that several CPUs share, one of these is enough.
    pub cpus: CpuSet,
    /// When the counters are needed.
    pub scope: Scope,
    /// Whether others have to wait for this lease to end, or may take its counters
    /// (best effort) when a guaranteed one needs them.
    pub guaranteed: bool,
    /// Who is served first, and who may take counters from whom: more is more.
    pub priority: u8,
    /// Whether leases of higher priority may take the counters. Best effort always is.
    pub preemptible: bool,
    /// For how long after the grant, and after each renewal.
    pub lasts: Option<Nanos>,
    /// What happens when the counters are not there.
    pub waits: Waits,
}

impl Terms {
    /// Whether a lease of higher priority, or a guaranteed one, may take its counters.
    pub fn can_be_preempted(&self) -> bool {
        self.preemptible || !self.guaranteed
    }

    /// Who gives way to whom: best effort to guaranteed, and among these by priority.
    pub(crate) fn rank(&self) -> (bool, u8) {
        (self.guaranteed, self.priority)
    }

    /// The number of counters that it has if at most `most` of them can be had.
    pub(crate) fn usable(&self, most: usize) -> usize {
        if most < self.at_least {
            0
        } else {
            most.min(self.demands.len())
        }
    }
}
