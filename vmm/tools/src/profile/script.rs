//! `umpire script`: one line for each record.

use std::io::{self, Write};
use std::str::FromStr;

use serde::Serialize;
use thiserror::Error;

use super::facts::event_name;
use super::location::process;
use super::record::{Filter, Header, Loss, LossKind, Record, Ring, Sample, Sink};
use super::symbols::SymbolTable;

/// Part of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// The VM.
    Vm,
    /// The vCPU.
    Vcpu,
    /// The core.
    Core,
    /// Seconds since sampling began.
    Time,
    /// How many events the sample stands for.
    Period,
    /// The event.
    Event,
    /// The event set.
    Set,
    /// Kernel or user.
    Ring,
    /// CR3 as it was.
    Cr3,
    /// The instruction pointer.
    Ip,
    /// SymbolOf and offset, and whose it is.
    Sym,
}

impl Field {
    const ALL: [(Self, &'static str); 11] = [
        (Self::Vm, "vm"),
        (Self::Vcpu, "vcpu"),
        (Self::Core, "core"),
        (Self::Time, "time"),
        (Self::Period, "period"),
        (Self::Event, "event"),
        (Self::Set, "set"),
        (Self::Ring, "ring"),
        (Self::Cr3, "cr3"),
        (Self::Ip, "ip"),
        (Self::Sym, "sym"),
    ];
}

/// The parts of a line; they come in one order, whatever the order here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fields(Vec<Field>);

/// A word that is no field.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "'{0}' is no field; give some of vm,vcpu,core,time,period,event,set,ring,cr3,ip,sym with commas between"
)]
pub struct FieldsError(String);

impl FromStr for Fields {
    type Err = FieldsError;

    fn from_str(text: &str) -> Result<Self, FieldsError> {
        let field = |word: &str| {
            let named = Field::ALL
                .into_iter()
                .find(|(_, name)| *name == word.trim());
            named
                .map(|(field, _)| field)
                .ok_or_else(|| FieldsError(word.trim().to_owned()))
        };
        text.split(',')
            .map(field)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl Fields {
    fn has(&self, field: Field) -> bool {
        self.0.contains(&field)
    }
}

/// Writes each record as a line.
pub struct Script<'a> {
    /// Of the file.
    pub header: &'a Header,
    /// Which samples are written.
    pub filter: &'a Filter,
    /// Names of the guest's kernel.
    pub symbols: &'a SymbolTable,
    /// The parts of a line.
    pub fields: Fields,
    /// One JSON object a line instead of text.
    pub json: bool,
    /// What is written to.
    pub out: &'a mut dyn Write,
}

impl std::fmt::Debug for Script<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Script")
            .field("fields", &self.fields)
            .field("json", &self.json)
            .finish_non_exhaustive()
    }
}

impl Sink for Script<'_> {
    fn take(&mut self, record: &Record) -> io::Result<()> {
        match record {
            Record::Sample(sample) if !self.filter.takes(sample) => Ok(()),
            Record::Sample(sample) if self.json => self.sample_json(sample),
            Record::Sample(sample) => self.sample_text(sample),
            Record::Loss(loss) if self.json => self.loss_json(loss),
            Record::Loss(loss) => self.loss_text(loss),
            Record::Described(_) => Ok(()),
        }
    }
}

/// A sample for programs. Fields that were not chosen are left out; what was
/// not sampled is null.
#[derive(Serialize)]
struct ScriptLine<'a> {
    kind: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    vm: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vcpu: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    core: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    period: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    event: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    set: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ring: Option<Option<Ring>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cr3: Option<Option<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ip: Option<String>,
    #[serde(flatten)]
    symbol: Option<SymbolOf<'a>>,
}

#[derive(Serialize)]
struct SymbolOf<'a> {
    /// Null for an address that no symbol covers.
    symbol: Option<&'a str>,
    symbol_offset: Option<u64>,
    module: Option<&'a str>,
}

/// A loss for programs.
#[derive(Serialize)]
struct LossLine<'a> {
    kind: &'a str,
    time_ns: u64,
    vm: u32,
    vcpu: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    samples: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    times: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ns: Option<u64>,
}

impl Script<'_> {
    fn sample_text(&mut self, sample: &Sample) -> io::Result<()> {
        let has = |field| self.fields.has(field);
        let mut line = String::new();
        let mut put = |text: String| {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(&text);
        };
        match (has(Field::Vm), has(Field::Vcpu)) {
            (true, true) => put(format!("{}/{}", sample.vm, sample.vcpu)),
            (true, false) => put(sample.vm.to_string()),
            (false, true) => put(sample.vcpu.to_string()),
            (false, false) => {}
        }
        if has(Field::Core) {
            put(format!("[{:03}]", sample.core));
        }
        if has(Field::Time) {
            put(format!("{}:", seconds(sample.time_ns)));
        }
        if has(Field::Period) {
            put(format!("{:>10}", sample.period));
        }
        if has(Field::Event) {
            put(format!("{}:", event_name(self.header, sample.event)));
        }
        if has(Field::Set) {
            put(format!("set {}", sample.set));
        }
        if has(Field::Ring) {
            put(format!("{:<6}", sample.ring.map_or("ring?", Ring::name)));
        }
        if has(Field::Cr3) {
            let cr3 = sample.cr3.map(|cr3| format!("{cr3:#x}"));
            put(format!("cr3={}", cr3.as_deref().unwrap_or("?")));
        }
        if has(Field::Ip) {
            put(format!("{:>16x}", sample.ip));
        }
        if has(Field::Sym) {
            put(self.place(sample));
        }
        writeln!(self.out, "{}", line.trim_end())
    }

    /// `clear_page+0x1d ([kernel])`, as perf writes symbol and object.
    fn place(&self, sample: &Sample) -> String {
        match self.symbol(sample) {
            SymbolOf {
                symbol: Some(name),
                symbol_offset,
                module,
            } => format!(
                "{name}+{:#x} ([{}])",
                symbol_offset.unwrap_or(0),
                module.unwrap_or("kernel")
            ),
            _ => match (sample.ring, process(sample.cr3)) {
                (Some(Ring::User), Some(cr3)) => format!("[unknown] ([user cr3={cr3:#x}])"),
                (Some(Ring::User), None) => "[unknown] ([user])".to_owned(),
                (Some(Ring::Kernel), _) => "[unknown] ([kernel])".to_owned(),
                (None, _) => "[unknown]".to_owned(),
            },
        }
    }

    fn symbol(&self, sample: &Sample) -> SymbolOf<'_> {
        let found = match sample.ring {
            Some(Ring::User) => None,
            _ => self.symbols.find(sample.ip),
        };
        SymbolOf {
            symbol: found.map(|found| self.symbols.name(found.index)),
            symbol_offset: found.map(|found| found.offset),
            module: found.and_then(|found| self.symbols.module(found.index)),
        }
    }

    fn sample_json(&mut self, sample: &Sample) -> io::Result<()> {
        let has = |field| self.fields.has(field);
        let line = ScriptLine {
            kind: "sample",
            vm: has(Field::Vm).then_some(sample.vm),
            vcpu: has(Field::Vcpu).then_some(sample.vcpu),
            core: has(Field::Core).then_some(sample.core),
            time_ns: has(Field::Time).then_some(sample.time_ns),
            period: has(Field::Period).then_some(sample.period),
            event: has(Field::Event).then(|| event_name(self.header, sample.event)),
            set: has(Field::Set).then_some(sample.set),
            ring: has(Field::Ring).then_some(sample.ring),
            cr3: has(Field::Cr3).then(|| sample.cr3.map(|cr3| format!("{cr3:#x}"))),
            ip: has(Field::Ip).then(|| format!("{:#x}", sample.ip)),
            symbol: has(Field::Sym).then(|| self.symbol(sample)),
        };
        let line = serde_json::to_string(&line)?;
        writeln!(self.out, "{line}")
    }

    fn loss_text(&mut self, loss: &Loss) -> io::Result<()> {
        let vcpu = loss.vcpu.map_or("-".to_owned(), |vcpu| vcpu.to_string());
        let what = match loss.kind {
            LossKind::Full(samples) => format!("LOST {samples} samples: the buffer was full"),
            LossKind::Throttled(times) => format!("THROTTLED {times} times"),
            LossKind::Blind(ns) => format!("BLIND for {ns} ns: the counter was taken away"),
        };
        let time = seconds(loss.time_ns);
        writeln!(self.out, "{}/{vcpu} {time}: {what}", loss.vm)
    }

    fn loss_json(&mut self, loss: &Loss) -> io::Result<()> {
        let mut line = LossLine {
            kind: "lost",
            time_ns: loss.time_ns,
            vm: loss.vm,
            vcpu: loss.vcpu,
            samples: None,
            times: None,
            ns: None,
        };
        match loss.kind {
            LossKind::Full(samples) => line.samples = Some(samples),
            LossKind::Throttled(times) => {
                line.kind = "throttled";
                line.times = Some(times);
            }
            LossKind::Blind(ns) => {
                line.kind = "blind";
                line.ns = Some(ns);
            }
        }
        let line = serde_json::to_string(&line)?;
        writeln!(self.out, "{line}")
    }
}

/// Seconds and microseconds, as perf writes time.
fn seconds(ns: u64) -> String {
    let us = ns / 1000;
    format!("{:>5}.{:06}", us / 1_000_000, us % 1_000_000)
}
