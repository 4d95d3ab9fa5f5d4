//! LIST: what there is, as those know it who have it.

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
use crate::perfmon::desk::{Done, LOOK, Target, Work};
use crate::perfmon::queue::unread;
use crate::perfmon::view::{ContextView, View};

/// A look at every thread that is under way.
#[derive(Debug, Default)]
pub(super) struct Looks {
    /// Who waits for it.
    asked: Vec<Asked>,
    /// Threads that have not answered yet.
    left: usize,
    seen: View,
}

impl State {
    /// Asks every thread; the answer comes when all have looked up.
    pub(super) fn look(&mut self, asked: Asked) {
        self.looks.asked.push(asked);
        if self.looks.left > 0 {
            return;
        }
        // Without shared cores the vCPUs' threads are the cores.
        let desk = &self.machine.desk;
        self.looks.left = desk.cores();
        for core in 0..desk.cores() {
            desk.post(LOOK, Target::Core(core), Work::Look);
        }
    }

    /// A thread has answered, or has ended.
    pub(super) fn looked(&mut self, done: Done) {
        if let Done::Seen(view) = done {
            self.looks.seen.cores.extend(view.cores);
            self.looks.seen.vcpus.extend(view.vcpus);
        }
        self.looks.left = self.looks.left.saturating_sub(1);
        if self.looks.left > 0 {
            return;
        }
        let looks = std::mem::take(&mut self.looks);
        let answer = Answer::json(&self.machine_info(&looks.seen));
        for asked in looks.asked {
            self.late_reply(asked, &answer);
        }
    }

    fn machine_info(&self, seen: &View) -> MachineInfo {
        let desk = &self.machine.desk;
        let vcpu = |vcpu: usize| {
            let view = seen.vcpus.iter().find(|view| view.vcpu == vcpu);
            VcpuInfo {
                vcpu: number(vcpu),
                // One that nobody has is on its way between two cores, or has
                // ended.
                state: view.map_or(VcpuState::Ended, |view| view.state),
                core: view.and_then(|_| desk.core_of(vcpu)).map(number),
                context: self.attached(Target::Vcpu(vcpu)),
            }
        };
        let core = |core: usize| {
            let view = seen.cores.iter().find(|view| view.core == core);
            let holders = view.map(|view| view.holders.iter().map(holder).collect());
            CoreInfo {
                core: number(core),
                tid: desk.thread_of(core).map_or(0, i32::unsigned_abs),
                vcpu: view.and_then(|view| view.vcpu).map(number),
                context: self.attached(Target::Core(core)),
                counters: holders.unwrap_or_default(),
            }
        };
        let views = seen.vcpus.iter().filter_map(|view| view.context);
        let views: Vec<ContextView> = views
            .chain(seen.cores.iter().filter_map(|view| view.context))
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
            pmu_virt::Holder::Guest { vcpu, .. } => Holder::Guest(vcpu.0),
            pmu_virt::Holder::Context { context, .. } => Holder::Context(context.0.into()),
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
