//! `umpire script`: one line for each record.

use std::borrow::Cow;
use std::io::{self, Write};
use std::str::FromStr;

use perfmon_abi::compact::ChainEnd;
use serde::Serialize;
use thiserror::Error;

use super::facts::event_name;
use super::location::CodeLocation;
use super::names::Names;
use super::record::{Filter, Header, Loss, LossKind, Record, Ring, Sample, Sink};

/// Part of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// The name of the guest's thread.
    Comm,
    /// The guest's process.
    Pid,
    /// The guest's thread.
    Tid,
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
    /// Symbol and offset, and whose it is.
    Sym,
    /// The file of the symbol, by its whole name.
    Dso,
    /// The callers, a line each.
    Callchain,
}

impl Field {
    const ALL: [(Self, &'static str); 16] = [
        (Self::Comm, "comm"),
        (Self::Pid, "pid"),
        (Self::Tid, "tid"),
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
        (Self::Dso, "dso"),
        (Self::Callchain, "callchain"),
    ];
}

/// The parts of a line; they come in one order, whatever the order here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fields(Vec<Field>);

/// A word that is no field.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "'{0}' is no field; give some of comm,pid,tid,vm,vcpu,core,time,period,event,set,ring,cr3,ip,\
     sym,dso,callchain with commas between"
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
    /// Those of who gives none; more of them where tasks are known.
    #[must_use]
    pub fn usual(names: &Names) -> Self {
        let task = [Field::Comm, Field::Pid, Field::Tid];
        let all = [
            Field::Vm,
            Field::Vcpu,
            Field::Core,
            Field::Time,
            Field::Period,
            Field::Event,
            Field::Ip,
            Field::Sym,
        ];
        let more = [Field::Dso, Field::Callchain];
        if names.has_tasks() {
            Self(task.into_iter().chain(all).chain(more).collect())
        } else {
            Self(all.into_iter().chain([Field::Callchain]).collect())
        }
    }

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
    /// Names of what samples are in.
    pub names: &'a Names,
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
    comm: Option<Option<&'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<Option<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tid: Option<Option<u32>>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    dso: Option<String>,
    /// Callers, the innermost first; left out where none were recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    callchain: Option<Vec<FrameLine<'a>>>,
}

#[derive(Serialize)]
struct FrameLine<'a> {
    /// Null where callers are missing.
    ip: Option<String>,
    #[serde(flatten)]
    symbol: SymbolOf<'a>,
    dso: String,
}

#[derive(Serialize)]
struct SymbolOf<'a> {
    /// Null for an address that no symbol covers.
    symbol: Option<Cow<'a, str>>,
    symbol_offset: Option<u64>,
    module: Option<&'a str>,
}

/// A line of a chain.
#[derive(Clone, Copy, Debug)]
struct FrameAt {
    location: CodeLocation,
    address: u64,
    mapping: u64,
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
        let task = self.names.task_of(sample);
        let (pid, tid) = self.names.ids(task);
        if has(Field::Comm) {
            put(format!("{:>16}", self.names.comm(task)));
        }
        match (has(Field::Pid), has(Field::Tid)) {
            (true, true) => put(format!("{pid}/{tid}")),
            (true, false) => put(pid.to_string()),
            (false, true) => put(tid.to_string()),
            (false, false) => {}
        }
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
        let frames = self.frames(sample);
        if has(Field::Callchain) && frames.len() > 1 {
            writeln!(self.out, "{}", line.trim_end())?;
            for frame in frames {
                writeln!(self.out, "\t{}", self.place(sample, frame).trim_end())?;
            }
            return writeln!(self.out);
        }
        if let Some(own) = frames.first() {
            put(self.place(sample, *own));
        }
        writeln!(self.out, "{}", line.trim_end())
    }

    /// Where the sample was taken, and its callers.
    fn frames(&self, sample: &Sample) -> Vec<FrameAt> {
        let names = self.names;
        let mut frames = vec![FrameAt {
            location: CodeLocation::of(sample, names),
            address: sample.ip,
            mapping: sample.guest.mapping,
        }];
        let chain = &sample.guest.chain;
        let missing = |end: Option<ChainEnd>| match end? {
            end @ (ChainEnd::Depth | ChainEnd::Broken | ChainEnd::NoProgram) => Some(FrameAt {
                location: CodeLocation::Missing(end),
                address: 0,
                mapping: 0,
            }),
            ChainEnd::Outermost | ChainEnd::Entry => None,
        };
        // The first frame is the sample's own.
        let own = usize::from(chain.kernel_end.is_none());
        frames.extend(chain.kernel.iter().skip(1).map(|&address| FrameAt {
            location: CodeLocation::kernel(address, names),
            address,
            mapping: 0,
        }));
        frames.extend(missing(chain.kernel_end));
        frames.extend(chain.program.iter().skip(own).map(|frame| FrameAt {
            location: CodeLocation::program(sample, frame.address, frame.mapping, names),
            address: frame.address,
            mapping: frame.mapping,
        }));
        frames.extend(missing(chain.program_end));
        frames
    }

    /// `ffffffff81000010 clear_page+0x1d ([kernel])`, as perf writes address, symbol and
    /// object, as far as they were chosen.
    fn place(&self, sample: &Sample, frame: FrameAt) -> String {
        let has = |field| self.fields.has(field);
        let location = frame.location;
        if let CodeLocation::Missing(_) = location {
            return format!("{:>16} {}", "", location.symbol(self.names));
        }
        let mut parts = Vec::new();
        if has(Field::Ip) {
            parts.push(format!("{:>16x}", frame.address));
        }
        let found = self.symbol(frame);
        let object = |usual: String| {
            if has(Field::Dso) {
                location.whole_object(self.names)
            } else {
                usual
            }
        };
        let object = match (location, sample.ring) {
            (CodeLocation::Symbol(_), _) => {
                object(format!("[{}]", found.module.unwrap_or("kernel")))
            }
            (CodeLocation::Program(..), _) => location.whole_object(self.names),
            (CodeLocation::User(cr3), _) => match cr3 {
                Some(cr3) => format!("[user cr3={cr3:#x}]"),
                None => "[user]".to_owned(),
            },
            (_, Some(Ring::Kernel)) => object("[kernel]".to_owned()),
            (_, Some(Ring::User)) => object("[user]".to_owned()),
            (_, None) => String::new(),
        };
        if has(Field::Sym) {
            parts.push(match found.symbol {
                Some(name) => format!("{name}+{:#x}", found.symbol_offset.unwrap_or(0)),
                None => "[unknown]".to_owned(),
            });
        }
        if (has(Field::Sym) || has(Field::Dso)) && !object.is_empty() {
            parts.push(format!("({object})"));
        }
        parts.join(" ")
    }

    fn symbol(&self, frame: FrameAt) -> SymbolOf<'_> {
        let names = self.names;
        match frame.location {
            CodeLocation::Symbol(index) => SymbolOf {
                symbol: Some(names.kernel.name(index).into()),
                symbol_offset: names.kernel.find(frame.address).map(|found| found.offset),
                module: names.kernel.module(index),
            },
            CodeLocation::Program(file, _) => {
                let found = names.found(file, frame.mapping, frame.address);
                let found = found.map(|found| (file, found));
                SymbolOf {
                    symbol: found
                        .map(|(file, found)| names.program_symbol(file, found.index).into()),
                    symbol_offset: found.map(|(_, found)| found.offset),
                    module: None,
                }
            }
            _ => SymbolOf {
                symbol: None,
                symbol_offset: None,
                module: None,
            },
        }
    }

    fn sample_json(&mut self, sample: &Sample) -> io::Result<()> {
        let has = |field| self.fields.has(field);
        let (names, task) = (self.names, self.names.task_of(sample));
        let info = task.and_then(|task| names.programs.task_info(task));
        let frames = self.frames(sample);
        let own = frames[0];
        let chain = has(Field::Callchain) && frames.len() > 1;
        let frame = |&frame: &FrameAt| FrameLine {
            ip: match frame.location {
                CodeLocation::Missing(_) => None,
                _ => Some(format!("{:#x}", frame.address)),
            },
            symbol: self.symbol(frame),
            dso: match frame.location {
                CodeLocation::Missing(_) => frame.location.symbol(names),
                location => location.whole_object(names),
            },
        };
        let line = ScriptLine {
            kind: "sample",
            comm: has(Field::Comm).then(|| info.map(|info| info.comm.as_str())),
            pid: has(Field::Pid).then(|| info.map(|info| info.pid)),
            tid: has(Field::Tid).then(|| info.map(|info| info.tid)),
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
            symbol: has(Field::Sym).then(|| self.symbol(own)),
            dso: has(Field::Dso).then(|| own.location.whole_object(names)),
            callchain: chain.then(|| frames.iter().map(frame).collect()),
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
