//! FORMATS and MODEL.

use perfmon_abi::consts::PFM_FMTFL_NOSET;
use perfmon_abi::wire::info::{FormatInfo, ModelInfo, VirtualPmdInfo};
use pmu_virt::perfmon::VirtualPmd;

use super::State;

impl State {
    pub(super) fn formats(&self) -> Vec<FormatInfo> {
        let formats = self.machine.formats.all();
        let info = |format: &std::sync::Arc<dyn pmu_virt::perfmon::SamplingFormat>| FormatInfo {
            uuid: uuid(format.uuid()),
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

pub(super) fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
