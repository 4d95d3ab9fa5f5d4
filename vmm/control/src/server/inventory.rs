//! What there is: the answers to LIST, FORMATS and MODEL.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use perfmon_abi::consts::{PFM_FL_SYSTEM_WIDE, PFM_FMTFL_NOSET};
use perfmon_abi::wire::info::{
    ContextInfo, ContextState, CoreInfo, FormatInfo, Holder, HolderInfo, MachineInfo, ModelInfo,
    Scope, VcpuInfo, VcpuState, VirtualPmdInfo, uuid_text,
};
use pmu_virt::perfmon::{ContextId, FormatRegistry, Phase, SamplingFormat, VirtualPmd};
use pmu_virt::{EventFilter, HolderReport};

use super::answer::{Answer, ConnectionId, RequestId};
use super::contexts::Contexts;
use super::contexts::table::{Attachment, ContextEntry};
use super::{Countable, ServedVm};
use crate::document::Document;
use crate::job::{ContextView, INSPECTION, Target, View, Work};
use crate::lease::LeaseDesk;
use crate::message_queue::unread;

/// A thread that has not answered by then is left out of the answer.
const PATIENCE: Duration = Duration::from_millis(200);
/// An answer serves all requests until then. Whoever asks all the time does not
/// disturb all threads all the time.
const FRESH: Duration = Duration::from_millis(20);

/// Requests for LIST. All threads are asked what they have, and all requests that
/// come meanwhile get one answer.
#[derive(Debug, Default)]
pub(super) struct ListRequests {
    /// `--host-policy`.
    policy: String,
    /// Who waits for the inspection that is under way: a connection at most once.
    waiting: Vec<RequestId>,
    /// When the inspection ends at the latest; `None`: none is under way.
    due: Option<Instant>,
    /// The cores that have not answered yet, this time or an earlier one. They are
    /// not asked again until they have.
    out: BTreeSet<Target>,
    seen: BTreeMap<Target, View>,
    /// Until then, the last answer serves a further request.
    fresh: Option<Instant>,
    /// It is written once for all: there may be thousands of contexts in it.
    last: Option<Document>,
}

/// An answer, and the requests that it is for.
pub(super) type ListAnswer = (Vec<RequestId>, Answer);

impl ListRequests {
    pub(super) fn new(policy: String) -> Self {
        Self {
            policy,
            ..Self::default()
        }
    }

    /// When something is to be done, if nothing happens.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Something has changed that an inspection would show.
    pub(super) fn outdated(&mut self) {
        self.fresh = None;
    }

    /// A connection has ended.
    pub(super) fn forget(&mut self, connection: ConnectionId) {
        self.waiting
            .retain(|request| request.connection != connection);
    }

    /// The answer, if the last inspection is fresh. Otherwise every thread is asked.
    /// The answer comes when all have answered, or some have taken too long.
    pub(super) fn request(&mut self, request: RequestId, contexts: &Contexts) -> Option<Answer> {
        let now = Instant::now();
        if self.due.is_none() {
            let is_fresh = self.fresh.is_some_and(|until| now < until);
            if let Some(last) = self
                .last
                .as_ref()
                .filter(|last| is_fresh && last.is_whole())
            {
                return Some(Answer::last_of(last));
            }
            self.seen.clear();
            self.due = Some(now + PATIENCE);
            self.fresh = Some(now + FRESH);
            // Without shared cores the vCPUs' threads are the cores.
            let dispatcher = &contexts.vm().dispatcher;
            for target in (0..dispatcher.cores()).map(Target::Core) {
                if self.out.insert(target) {
                    dispatcher.post(INSPECTION, target, Work::Inspect);
                }
            }
        }
        self.waiting.push(request);
        None
    }

    /// A thread has answered, or has ended. The answer, if it was the last one.
    pub(super) fn inspected(
        &mut self,
        target: Target,
        view: Option<Box<View>>,
        contexts: &Contexts,
    ) -> Option<ListAnswer> {
        self.out.remove(&target);
        if let Some(view) = view {
            self.seen.insert(target, *view);
        }
        if self.out.is_empty() {
            self.answer(contexts)
        } else {
            None
        }
    }

    /// The answer, if some thread has taken too long.
    pub(super) fn end_overdue(&mut self, now: Instant, contexts: &Contexts) -> Option<ListAnswer> {
        if self.due.is_some_and(|due| due <= now) {
            self.answer(contexts)
        } else {
            None
        }
    }

    fn answer(&mut self, contexts: &Contexts) -> Option<ListAnswer> {
        self.due.take()?;
        let written = Document::of(&self.machine_info(contexts));
        let answer = match &written {
            Ok(document) => Answer::last_of(document),
            Err(refusal) => refusal.clone().into(),
        };
        self.last = written.ok();
        Some((std::mem::take(&mut self.waiting), answer))
    }

    fn machine_info(&self, contexts: &Contexts) -> MachineInfo {
        let vm = contexts.vm();
        let dispatcher = &vm.dispatcher;
        let attached = |target| -> Vec<u64> {
            let ids = contexts.table().at(target).iter();
            ids.map(|id| id.0.into()).collect()
        };
        let vcpu = |vcpu: usize| {
            let mut views = self.seen.values().flat_map(|view| &view.vcpus);
            let view = views.find(|view| view.vcpu == vcpu);
            let core = dispatcher.core_of(vcpu);
            // Its thread, or its core's, is busy with something.
            let busy = core.is_some_and(|core| self.out.contains(&Target::Core(core)));
            let there = attached(Target::Vcpu(vcpu));
            VcpuInfo {
                vcpu: number(vcpu),
                state: match view {
                    Some(view) => view.state,
                    None if busy => VcpuState::Running,
                    // A vCPU that nobody has is on its way between two cores, or
                    // has ended.
                    None => VcpuState::Ended,
                },
                core: core.filter(|_| view.is_some() || busy).map(number),
                context: there.first().copied(),
                contexts: there,
                halted: view.and_then(|view| view.halted),
                reserved: view.map_or_else(Vec::new, |view| view.reserved.clone()),
            }
        };
        let core = |core: usize| {
            let mut views = self.seen.values().flat_map(|view| &view.cores);
            let view = views.find(|view| view.core == core);
            let holders = view.map(|view| view.holders.iter().map(holder).collect());
            let there = attached(Target::Core(core));
            CoreInfo {
                core: number(core),
                tid: dispatcher.thread_of(core).map_or(0, i32::unsigned_abs),
                vcpu: view.and_then(|view| view.vcpu).map(number),
                context: there.first().copied(),
                contexts: there,
                counters: holders.unwrap_or_default(),
                free: view.and_then(|view| view.free),
            }
        };
        let of_vcpus = self.seen.values().flat_map(|view| &view.vcpus);
        let of_cores = self.seen.values().flat_map(|view| &view.cores);
        let views: HashMap<ContextId, &ContextView> = of_vcpus
            .flat_map(|view| &view.contexts)
            .chain(of_cores.flat_map(|view| &view.contexts))
            .map(|view| (view.id, view))
            .collect();
        let context = |(id, entry): (ContextId, &ContextEntry)| {
            context_info(id, entry, views.get(&id).copied())
        };
        MachineInfo {
            pid: std::process::id(),
            guest: vm.guest.clone(),
            counters: vm.counters.clone(),
            policy: self.policy.clone(),
            vcpus: (0..dispatcher.vcpus()).map(vcpu).collect(),
            cores: (0..dispatcher.cores()).map(core).collect(),
            contexts: contexts.table().iter().map(context).collect(),
        }
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

fn context_info(id: ContextId, entry: &ContextEntry, view: Option<&ContextView>) -> ContextInfo {
    let core = entry.flags & PFM_FL_SYSTEM_WIDE != 0;
    let target = match entry.attachment {
        Attachment::Attached(target) => Some(number(target.number())),
        Attachment::Detached { .. } => None,
    };
    let (sets, active_set, dropped) = match (&entry.attachment, view) {
        (Attachment::Detached { context, .. }, _) => (
            context.set_count(),
            context.active_set(),
            context.account().dropped,
        ),
        (Attachment::Attached(_), Some(view)) => (view.sets, view.active_set, view.dropped),
        // On its way.
        (Attachment::Attached(_), None) => (0, 0, 0),
    };
    let state = match (&entry.attachment, view) {
        _ if entry.zombie => ContextState::Zombie,
        (Attachment::Detached { .. }, _) => ContextState::Unloaded,
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

/// The answer to FORMATS.
pub(super) fn formats(registry: &FormatRegistry) -> Vec<FormatInfo> {
    let info = |format: &Arc<dyn SamplingFormat>| FormatInfo {
        uuid: uuid_text(format.uuid()),
        name: format.name().to_owned(),
        flags: if format.only_set_0() {
            PFM_FMTFL_NOSET
        } else {
            0
        },
        arg_size: format.arg_size() as u64,
        queue_depth: number(format.queue_depth()),
        description: String::new(),
    };
    registry.all().iter().map(info).collect()
}

/// The answer to MODEL for a tool that may count what `filter` allows.
pub(super) fn model(vm: &ServedVm, filter: &EventFilter) -> ModelInfo {
    let model = vm.pmu.model();
    let allowed = |(request, _): &&Countable| filter.check(request).is_ok();
    let countable = vm.countable.iter().filter(allowed);
    let virtual_pmd = |which: &VirtualPmd| VirtualPmdInfo {
        pmd: which.pmd(),
        name: which.name().to_owned(),
        unit: unit(*which).to_owned(),
        description: which.text().to_owned(),
    };
    ModelInfo {
        model: model.name().to_owned(),
        event_family: if model.has_usual_events() {
            model.name().to_owned()
        } else {
            model.events().name().to_owned()
        },
        counters: vm.counters.clone(),
        programmable: model.programmable().into(),
        // Without those that nobody counts: on some models they leave gaps.
        fixed: model.fixed_map().count_ones(),
        fixed_map: Some(model.fixed_map()),
        counter_width: model.width().into(),
        tsc_khz: vm.tsc_khz.into(),
        virtual_time: vm.virtual_time,
        lease_within: vm.lease_desk.as_ref().and_then(LeaseDesk::within),
        vcpus: number(vm.dispatcher.vcpus()),
        cores: number(vm.dispatcher.cores()),
        core_cpus: vm.core_cpus.clone(),
        virtual_pmds: VirtualPmd::ALL.iter().map(virtual_pmd).collect(),
        countable: countable.map(|(_, info)| info.clone()).collect(),
    }
}

fn unit(which: VirtualPmd) -> &'static str {
    match which {
        VirtualPmd::RunTime | VirtualPmd::StealTime | VirtualPmd::HaltTime | VirtualPmd::Clock => {
            "ns"
        }
        VirtualPmd::GuestMemory => "bytes",
        which if which.is_of_overflow() => "",
        _ => "count",
    }
}

pub(super) fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
