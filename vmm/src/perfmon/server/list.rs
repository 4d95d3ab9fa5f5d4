//! LIST: what there is, as those know it who have it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use perfmon_abi::consts::PFM_FL_SYSTEM_WIDE;
use perfmon_abi::wire::info::{
    ContextInfo, ContextState, CoreInfo, Holder, HolderInfo, MachineInfo, Scope, VcpuInfo,
    VcpuState,
};
use pmu_virt::HolderReport;
use pmu_virt::perfmon::{ContextId, Phase};

use super::State;
use super::answer::{Answer, Asked};
use super::contexts::{Entry, Place};
use super::documents::number;
use crate::perfmon::desk::{LOOK, Target, Work};
use crate::perfmon::queue::unread;
use crate::perfmon::view::{ContextView, View};

/// A thread that has not looked up by then is left out of the answer.
const PATIENCE: Duration = Duration::from_millis(200);
/// The next answer is of the same look until then. Whoever asks all the time does
/// not have all threads look up all the time.
const FRESH: Duration = Duration::from_millis(20);

/// Looks at every thread.
#[derive(Debug, Default)]
pub(super) struct Looks {
    /// Who waits for the one that is under way: a connection at most once.
    asked: Vec<Asked>,
    /// When it ends at the latest; `None`: none is under way.
    due: Option<Instant>,
    /// The cores that have not answered yet, to this look or an earlier one. They
    /// are not asked again until they have.
    out: BTreeSet<Target>,
    seen: BTreeMap<Target, View>,
    /// What was seen can be told until then.
    fresh: Option<Instant>,
}

impl Looks {
    /// When something is to be done, if nothing happens.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Something has changed that a look would show.
    pub(super) fn outdated(&mut self) {
        self.fresh = None;
    }

    /// A connection has ended.
    pub(super) fn forget(&mut self, connection: u64) {
        self.asked.retain(|asked| asked.connection != connection);
    }
}

impl State {
    /// The answer, if the last look was just now. Else every thread is asked, and
    /// the answer comes when all have looked up, or some have for too long not.
    pub(super) fn look(&mut self, asked: Asked) -> Option<Answer> {
        let now = Instant::now();
        if self.looks.due.is_none() {
            if self.looks.fresh.is_some_and(|until| now < until) {
                return Some(Answer::json(&self.machine_info()));
            }
            self.looks.seen.clear();
            self.looks.due = Some(now + PATIENCE);
            self.looks.fresh = Some(now + FRESH);
            // Without shared cores the vCPUs' threads are the cores.
            let desk = &self.machine.desk;
            for target in (0..desk.cores()).map(Target::Core) {
                if self.looks.out.insert(target) {
                    desk.post(LOOK, target, Work::Look);
                }
            }
        }
        self.looks.asked.push(asked);
        None
    }

    /// A thread has answered, or has ended.
    pub(super) fn looked(&mut self, target: Target, view: Option<Box<View>>) {
        self.looks.out.remove(&target);
        if let Some(view) = view {
            self.looks.seen.insert(target, *view);
        }
        if self.looks.out.is_empty() {
            self.tell_what_was_seen();
        }
    }

    /// Somebody takes too long.
    pub(super) fn end_look(&mut self, now: Instant) {
        if self.looks.due.is_some_and(|due| due <= now) {
            self.tell_what_was_seen();
        }
    }

    fn tell_what_was_seen(&mut self) {
        if self.looks.due.take().is_none() {
            return;
        }
        let answer = Answer::json(&self.machine_info());
        for asked in std::mem::take(&mut self.looks.asked) {
            self.late_reply(asked, &answer);
        }
    }

    fn machine_info(&self) -> MachineInfo {
        let desk = &self.machine.desk;
        let seen = &self.looks.seen;
        let vcpu = |vcpu: usize| {
            let mut views = seen.values().flat_map(|view| &view.vcpus);
            let view = views.find(|view| view.vcpu == vcpu);
            let core = desk.core_of(vcpu);
            // Its thread, or its core's, is busy with something.
            let busy = core.is_some_and(|core| self.looks.out.contains(&Target::Core(core)));
            VcpuInfo {
                vcpu: number(vcpu),
                state: match view {
                    Some(view) => view.state,
                    None if busy => VcpuState::Running,
                    // One that nobody has is on its way between two cores, or has
                    // ended.
                    None => VcpuState::Ended,
                },
                core: core.filter(|_| view.is_some() || busy).map(number),
                context: self.attached(Target::Vcpu(vcpu)),
            }
        };
        let core = |core: usize| {
            let mut views = seen.values().flat_map(|view| &view.cores);
            let view = views.find(|view| view.core == core);
            let holders = view.map(|view| view.holders.iter().map(holder).collect());
            CoreInfo {
                core: number(core),
                tid: desk.thread_of(core).map_or(0, i32::unsigned_abs),
                vcpu: view.and_then(|view| view.vcpu).map(number),
                context: self.attached(Target::Core(core)),
                counters: holders.unwrap_or_default(),
            }
        };
        let of_vcpus = seen.values().flat_map(|view| &view.vcpus);
        let of_cores = seen.values().flat_map(|view| &view.cores);
        let views: Vec<ContextView> = of_vcpus
            .filter_map(|view| view.context)
            .chain(of_cores.filter_map(|view| view.context))
            .collect();
        let context = |(id, entry): (ContextId, &Entry)| {
            info(id, entry, views.iter().find(|view| view.id == id))
        };
        MachineInfo {
            pid: std::process::id(),
            guest: self.machine.guest.clone(),
            counters: self.machine.counters.clone(),
            policy: self.policy.clone(),
            vcpus: (0..desk.vcpus()).map(vcpu).collect(),
            cores: (0..desk.cores()).map(core).collect(),
            contexts: self.contexts.iter().map(context).collect(),
        }
    }

    fn attached(&self, target: Target) -> Option<u64> {
        self.contexts.at(target).map(|id| id.0.into())
    }
}

fn holder(report: &HolderReport) -> HolderInfo {
    let request = &report.request;
    HolderInfo {
        counter: format!("{}{}", report.source, report.slot.0),
        holder: match report.holder {
            pmu_virt::Claimant::Guest { vcpu, .. } => Holder::Guest(vcpu.0),
            pmu_virt::Claimant::Context { context, .. } => Holder::Context(context.0.into()),
        },
        event: request.encode().or_else(|| request.encode_fixed()),
    }
}

fn info(id: ContextId, entry: &Entry, view: Option<&ContextView>) -> ContextInfo {
    let core = entry.flags & PFM_FL_SYSTEM_WIDE != 0;
    let target = match entry.place {
        Place::Away(Target::Vcpu(n) | Target::Core(n)) => Some(number(n)),
        Place::Home { .. } => None,
    };
    let (sets, active_set, dropped) = match (&entry.place, view) {
        (Place::Home { context, .. }, _) => (
            context.set_count(),
            context.active_set(),
            context.account().dropped,
        ),
        (Place::Away(_), Some(view)) => (view.sets, view.active_set, view.dropped),
        // On its way.
        (Place::Away(_), None) => (0, 0, 0),
    };
    let state = match (&entry.place, view) {
        _ if entry.zombie => ContextState::Zombie,
        (Place::Home { .. }, _) => ContextState::Unloaded,
        (_, Some(view)) if view.preempted => ContextState::Preempted,
        (_, Some(view)) if view.phase == Phase::Masked => ContextState::Masked,
        _ => ContextState::Loaded,
    };
    ContextInfo {
        id: id.0.into(),
        scope: if core { Scope::Core } else { Scope::Vcpu },
        target,
        state,
        started: view.is_some_and(|view| view.started),
        flags: entry.flags,
        pid: entry.creator.pid,
        uid: entry.creator.uid,
        sets: number(sets),
        active_set,
        format: entry.format.clone(),
        buffer_size: entry.buffer.as_ref().map_or(0, |(_, size)| *size),
        unread: number(unread(&entry.socket)),
        dropped,
    }
}
