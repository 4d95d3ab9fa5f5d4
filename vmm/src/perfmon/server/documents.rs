//! FORMATS, LIST and MODEL.

use perfmon_abi::consts::PFM_FL_SYSTEM_WIDE;
use perfmon_abi::wire::info::{
    ContextInfo, ContextState, CoreInfo, FormatInfo, MachineInfo, ModelInfo, Scope, VcpuInfo,
    VcpuState, VirtualPmdInfo,
};
use pmu_virt::perfmon::{ContextId, VirtualPmd};

use super::State;
use super::contexts::{Entry, Place};
use crate::perfmon::desk::Target;

impl State {
    pub(super) fn formats(&self) -> Vec<FormatInfo> {
        let formats = self.machine.formats.all();
        let info = |format: &std::sync::Arc<dyn pmu_virt::perfmon::SamplingFormat>| FormatInfo {
            uuid: uuid(format.uuid()),
            name: format.name().to_owned(),
            flags: 0,
            arg_size: format.arg_size() as u64,
            queue_depth: number(format.queue_depth()),
            description: String::new(),
        };
        formats.iter().map(info).collect()
    }

    pub(super) fn model(&self) -> ModelInfo {
        let machine = &self.machine;
        let model = machine.pmu.model();
        let counts = model.counts();
        let virtual_pmd = |which: &VirtualPmd| VirtualPmdInfo {
            pmd: which.pmd(),
            name: which.name().to_owned(),
            unit: unit(*which).to_owned(),
            description: which.text().to_owned(),
        };
        ModelInfo {
            model: model.name().to_owned(),
            event_family: model.name().to_owned(),
            counters: machine.counters.clone(),
            programmable: counts.programmable.into(),
            fixed: counts.fixed.into(),
            counter_width: model.width().into(),
            tsc_khz: machine.tsc_khz.into(),
            vcpus: number(machine.desk.vcpus()),
            cores: number(machine.desk.cores()),
            virtual_pmds: VirtualPmd::ALL.iter().map(virtual_pmd).collect(),
        }
    }

    pub(super) fn list(&self) -> MachineInfo {
        let desk = &self.machine.desk;
        let vcpu = |vcpu: usize| VcpuInfo {
            vcpu: number(vcpu),
            state: VcpuState::Running,
            core: desk.core_of(vcpu).map(number),
            context: self.attached(Target::Vcpu(vcpu)),
        };
        let core = |core: usize| CoreInfo {
            core: number(core),
            tid: desk
                .thread_of(core)
                .map_or(0, |thread| thread.unsigned_abs()),
            vcpu: None,
            context: self.attached(Target::Core(core)),
            counters: Vec::new(),
        };
        MachineInfo {
            pid: std::process::id(),
            guest: self.machine.guest.clone(),
            counters: self.machine.counters.clone(),
            policy: self.policy.clone(),
            vcpus: (0..desk.vcpus()).map(vcpu).collect(),
            cores: (0..desk.cores()).map(core).collect(),
            contexts: self
                .contexts
                .iter()
                .map(|(id, entry)| info(id, entry))
                .collect(),
        }
    }

    fn attached(&self, target: Target) -> Option<u64> {
        self.contexts.at(target).map(|id| id.0.into())
    }
}

fn info(id: ContextId, entry: &Entry) -> ContextInfo {
    let core = entry.flags & PFM_FL_SYSTEM_WIDE != 0;
    let target = match entry.place {
        Place::Away(Target::Vcpu(n) | Target::Core(n)) => Some(number(n)),
        Place::Home { .. } => None,
    };
    let (state, unread) = match &entry.place {
        _ if entry.zombie => (ContextState::Zombie, 0),
        Place::Home { queue, .. } => (ContextState::Unloaded, queue.waiting()),
        Place::Away(_) => (ContextState::Loaded, 0),
    };
    let (sets, active_set) = match &entry.place {
        Place::Home { context, .. } => (number(context.set_count()), context.active_set()),
        Place::Away(_) => (0, 0),
    };
    ContextInfo {
        id: id.0.into(),
        scope: if core { Scope::Core } else { Scope::Vcpu },
        target,
        state,
        started: false,
        flags: entry.flags,
        pid: entry.creator.pid,
        uid: entry.creator.uid,
        sets,
        active_set,
        format: entry.format.clone(),
        buffer_size: entry.buffer.as_ref().map_or(0, |(_, size)| *size),
        unread: number(unread),
        dropped: 0,
    }
}

fn unit(which: VirtualPmd) -> &'static str {
    match which {
        VirtualPmd::RunTime | VirtualPmd::StealTime | VirtualPmd::HaltTime => "ns",
        VirtualPmd::GuestMemory => "bytes",
        VirtualPmd::Ring | VirtualPmd::Cr3 => "",
        _ => "count",
    }
}

/// As RFC 9562 writes it.
fn uuid(bytes: [u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
