//! What one VM says of itself at one moment, and what it has done since the moment before.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::PathBuf;

use perfmon_abi::wire::budget::BudgetInfo;
use perfmon_abi::wire::info::{ContextInfo, CoreInfo, Holder, MachineInfo, ModelInfo, VcpuInfo};
use perfmon_abi::wire::pcr::{PcrInfo, ReservationInfo};
use serde::Serialize;
use umpire_events::one_line;

use crate::ls::vcpu_state;
use crate::profile::Totals;
use crate::stat::{Row, Value};
use crate::targets::Target;

/// The events that rates are shown of, where the VM has them.
pub(super) const RUN_TIME: &str = "vm-run-ns";
pub(super) const CYCLES: &str = "cycles";
pub(super) const INSTRUCTIONS: &str = "instructions";
pub(super) const CACHE_MISSES: &str = "cache-misses";
pub(super) const EXITS: &str = "vm-exits";

/// A VM at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct VmReading {
    /// Its control socket.
    pub(super) socket: PathBuf,
    /// Process id of its VMM.
    pub(super) pid: u32,
    /// The guest: the name of its image.
    pub(super) guest: String,
    /// The PMU model.
    pub(super) model: String,
    /// Where counts come from.
    pub(super) counters: String,
    /// Who comes first: `guest-first`, `host-first` or `shares`.
    pub(super) policy: String,
    /// The seconds in which rates and samples came about; none before the first ones.
    pub(super) seconds: Option<f64>,
    /// Its vCPUs.
    pub(super) vcpus: Vec<VcpuReading>,
    /// Who holds counters.
    pub(super) holders: Vec<HolderRow>,
    /// None if nothing is to be sampled.
    pub(super) samples: Option<SampleReading>,
    /// What is not counted or sampled, and why.
    pub(super) notes: Vec<String>,
}

/// A vCPU at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct VcpuReading {
    /// The vCPU.
    pub(super) vcpu: u32,
    /// What it does, as `umpire ls` says.
    pub(super) state: String,
    /// The core that it is on.
    pub(super) core: Option<u32>,
    /// In the order in which they are shown.
    pub(super) rates: Vec<Rate>,
}

impl VcpuReading {
    /// The rate of an event, if it was counted.
    pub(super) fn per_second(&self, event: &str) -> Option<f64> {
        let rate = self.rates.iter().find(|rate| rate.event == event)?;
        rate.per_second
    }

    /// Instructions a cycle, if both were counted.
    pub(super) fn ipc(&self) -> Option<f64> {
        let (instructions, cycles) = (self.per_second(INSTRUCTIONS)?, self.per_second(CYCLES)?);
        (cycles > 0.0).then(|| instructions / cycles)
    }

    /// The part of a CPU's time that it ran, in percent.
    pub(super) fn cpu_percent(&self) -> Option<f64> {
        self.per_second(RUN_TIME).map(|ns| ns / 1e7)
    }
}

/// How often an event took place.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Rate {
    /// The event.
    pub(super) event: String,
    /// Events in a second; none if there is no count.
    pub(super) per_second: Option<f64>,
    /// Why there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) missing: Option<Missing>,
    /// How the count came about.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(extend("enum" = crate::schema::PROVENANCE)))]
    pub(super) provenance: Option<String>,
}

/// Why there is no count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) enum Missing {
    /// The event could be counted, and found no counter.
    #[serde(rename = "not counted")]
    NotCounted,
    /// Nothing counts it here.
    #[serde(rename = "not supported")]
    NotSupported,
    /// The vCPU did not run, so there was nothing to count.
    #[serde(rename = "did not run")]
    Idle,
}

/// Who holds counters of a core, or of a vCPU's PMU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct HolderRow {
    /// `core 0`, `vCPU 1`.
    pub(super) place: String,
    /// Who holds them: the guest, or a context.
    pub(super) holder: String,
    /// The counters, each with what is known of it.
    pub(super) counters: Vec<String>,
}

/// Where samples were taken since the moment before.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("allOf" = [{"$ref": "#/$defs/Totals"}])))]
pub(super) struct SampleReading {
    /// The event.
    pub(super) event: String,
    /// Samples a second of a vCPU's time that are wanted.
    pub(super) hz: u64,
    #[serde(flatten)]
    #[cfg_attr(test, schemars(skip))]
    pub(super) totals: Totals,
    /// Places by name, in no order.
    pub(super) rows: Vec<HotRow>,
}

/// Where samples are, in the words of `umpire report`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct HotPlace {
    /// The thread, and the file or part of the kernel; none where the VM knows no tasks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) program: Option<Program>,
    /// The symbol, or what else is known.
    pub(super) symbol: String,
}

/// What of a guest a sample is of.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Program {
    /// The thread's name.
    pub(super) comm: String,
    /// The file, or part of the kernel.
    pub(super) dso: String,
}

/// Samples in one place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("allOf" = [{"$ref": "#/$defs/HotPlace"}])))]
pub(super) struct HotRow {
    #[serde(flatten)]
    #[cfg_attr(test, schemars(skip))]
    pub(super) place: HotPlace,
    /// Samples in this place.
    pub(super) samples: u64,
    /// How many events they stand for.
    pub(super) events: u64,
}

/// What a VM answers at one moment.
#[derive(Clone, Debug)]
pub(super) struct Answers<'a> {
    pub(super) socket: PathBuf,
    pub(super) model: &'a ModelInfo,
    pub(super) machine: MachineInfo,
    /// Of the vCPUs whose counters layers have reserved.
    pub(super) reservations: Vec<PcrInfo>,
    pub(super) budgets: Vec<BudgetInfo>,
    /// The counts of all vCPUs, and the seconds in which they came about.
    pub(super) counted: Option<(Vec<Row>, f64)>,
    /// The process that looks, as the VM knows it.
    pub(super) observer: u32,
}

impl Answers<'_> {
    /// All of it without samples and notes.
    pub(super) fn reading(&self) -> VmReading {
        let machine = &self.machine;
        VmReading {
            socket: self.socket.clone(),
            pid: machine.pid,
            guest: one_line(&machine.guest),
            model: one_line(&self.model.model),
            counters: one_line(&machine.counters),
            policy: one_line(&machine.policy),
            seconds: self.counted.as_ref().map(|(_, seconds)| *seconds),
            vcpus: machine.vcpus.iter().map(|info| self.vcpu(info)).collect(),
            holders: self.holders(),
            samples: None,
            notes: Vec::new(),
        }
    }

    fn vcpu(&self, info: &VcpuInfo) -> VcpuReading {
        let counted = self.counted.as_ref();
        let rates = counted.map(|(rows, seconds)| {
            let of = |row: &&Row| row.whose == Some(Target::Vcpu(info.vcpu));
            let rows: Vec<&Row> = rows.iter().filter(of).collect();
            let stood = |row: &&Row| row.event == RUN_TIME && row.value == Value::Counted(0);
            let idle = rows.iter().any(stood);
            rows.iter().map(|row| rate(row, *seconds, idle)).collect()
        });
        VcpuReading {
            vcpu: info.vcpu,
            state: vcpu_state(info).to_owned(),
            core: info.core,
            rates: rates.unwrap_or_default(),
        }
    }

    fn holders(&self) -> Vec<HolderRow> {
        let mut rows: Vec<HolderRow> = Vec::new();
        for core in &self.machine.cores {
            self.holders_of(core, &mut rows);
        }
        for info in &self.reservations {
            for held in &info.reservations {
                let access = if held.private {
                    "by cookie only"
                } else {
                    "shared"
                };
                let holder = format!("{}, {access}", one_line(&held.layer));
                add(&mut rows, vcpu_name(info.vcpu), holder, reserved(held));
            }
        }
        for info in &self.budgets {
            for kind in [&info.programmable, &info.fixed] {
                for lacking in &kind.lacking {
                    let why = format!(
                        "{}: {}",
                        one_line(&lacking.counter),
                        one_line(&lacking.reason)
                    );
                    let holder = "guest, does not count".to_owned();
                    add(&mut rows, vcpu_name(info.vcpu), holder, why);
                }
            }
        }
        rows
    }

    fn holders_of(&self, core: &CoreInfo, rows: &mut Vec<HolderRow>) {
        let place = format!("core {}", core.core);
        // Others first, then this program.
        let mut held: Vec<(bool, String, String)> = core
            .counters
            .iter()
            .map(|held| {
                let (own, holder) = self.holder(held.holder);
                let event = held.event.map_or(String::new(), |it| format!(" ({it:#x})"));
                (own, holder, format!("{}{event}", one_line(&held.counter)))
            })
            .collect();
        held.sort_by_key(|(own, ..)| *own);
        for (_, holder, counter) in held {
            add(rows, place.clone(), holder, counter);
        }
        if let Some(free) = core.free {
            add(rows, place, "nobody".to_owned(), format!("{free} free"));
        }
    }

    /// Who holds a counter, and whether that is this program.
    fn holder(&self, holder: Holder) -> (bool, String) {
        match holder {
            Holder::Free => (false, "nobody".to_owned()),
            Holder::Guest(vcpu) => (false, format!("vCPU {vcpu}'s guest")),
            Holder::Reserved => (false, "reserved below".to_owned()),
            Holder::Context(id) => {
                let is_it = |context: &&ContextInfo| context.id == id;
                match self.machine.contexts.iter().find(is_it) {
                    Some(context) if context.pid == self.observer => {
                        (true, "this umpire top".to_owned())
                    }
                    Some(context) => (false, format!("context {id} of process {}", context.pid)),
                    None => (false, format!("context {id}")),
                }
            }
        }
    }
}

fn vcpu_name(vcpu: u32) -> String {
    format!("vCPU {vcpu}")
}

/// `PMC5, its lease ends in 300 ms`.
fn reserved(held: &ReservationInfo) -> String {
    let mut text = one_line(&held.counter);
    if let Some(ms) = held.lease_left_ms {
        text.push_str(&format!(", its lease ends in {ms} ms"));
    }
    if let (Some(ms), Some(why)) = (held.revoked_in_ms, &held.revoked_for) {
        text.push_str(&format!(", revoked in {ms} ms: {}", one_line(why)));
    }
    text
}

/// Adds a counter to its holder's row.
fn add(rows: &mut Vec<HolderRow>, place: String, holder: String, counter: String) {
    let same = |row: &&mut HolderRow| row.place == place && row.holder == holder;
    match rows.iter_mut().find(same) {
        Some(row) => row.counters.push(counter),
        None => rows.push(HolderRow {
            place,
            holder,
            counters: vec![counter],
        }),
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a rate is shown with four digits"
)]
fn rate(row: &Row, seconds: f64, idle: bool) -> Rate {
    let missing = match row.value {
        Value::Counted(_) => None,
        Value::NotCounted if idle => Some(Missing::Idle),
        Value::NotCounted => Some(Missing::NotCounted),
        Value::NotSupported => Some(Missing::NotSupported),
    };
    let per_second = match row.value {
        Value::Counted(count) if seconds > 0.0 => Some(count as f64 / seconds),
        _ => None,
    };
    let provenance = row.provenance.filter(|_| per_second.is_some());
    Rate {
        event: row.event.clone(),
        per_second,
        missing,
        provenance: provenance.map(|it| it.to_string()),
    }
}

/// Samples of the last while: as many readings as it takes for [`WINDOW`] seconds.
#[derive(Clone, Debug, Default)]
pub(super) struct Window {
    readings: Vec<(f64, SampleReading)>,
}

/// For how many seconds samples are shown.
pub(super) const WINDOW: f64 = 10.0;

impl Window {
    /// Takes in the samples of the last so many seconds.
    pub(super) fn push(&mut self, seconds: f64, samples: SampleReading) {
        self.readings.push((seconds, samples));
        while self.seconds() - self.readings[0].0 >= WINDOW {
            self.readings.remove(0);
        }
    }

    /// The seconds that are in it.
    pub(super) fn seconds(&self) -> f64 {
        self.readings.iter().map(|(seconds, _)| seconds).sum()
    }

    /// All of it in one, the place with most events first; none if nothing is sampled.
    pub(super) fn sum(&self) -> Option<SampleReading> {
        let (_, last) = self.readings.last()?;
        let mut rows: BTreeMap<&HotPlace, (u64, u64)> = BTreeMap::new();
        let mut totals = Totals::default();
        for (_, reading) in &self.readings {
            let more = reading.totals;
            totals.samples += more.samples;
            totals.lost += more.lost;
            totals.throttled += more.throttled;
            totals.blind_ns += more.blind_ns;
            for row in &reading.rows {
                let sum = rows.entry(&row.place).or_default();
                sum.0 = sum.0.saturating_add(row.samples);
                sum.1 = sum.1.saturating_add(row.events);
            }
        }
        let row = |(place, (samples, events)): (&HotPlace, (u64, u64))| HotRow {
            place: place.clone(),
            samples,
            events,
        };
        let mut rows: Vec<HotRow> = rows.into_iter().map(row).collect();
        rows.sort_by_key(|row| Reverse((row.events, row.samples)));
        Some(SampleReading {
            event: last.event.clone(),
            hz: last.hz,
            totals,
            rows,
        })
    }
}

#[cfg(test)]
mod tests;
