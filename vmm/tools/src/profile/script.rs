//! `umpire script`: each sample as `perf script` prints it.

mod fields;
mod frames;
mod order;
#[cfg(test)]
mod reader_tests;
mod text;
mod words;

use std::io::{self, Write};

use clap::Args;
use serde::Serialize;

use super::command::{ran, tell, written};
use super::error::ReportError;
use super::facts::event_name;
use super::input::{Input, ProfileChoice};
use super::location::CodeLocation;
use super::names::Names;
use super::record::{Filter, Header, Loss, LossKind, Record, Ring, Sample, Sink};
use fields::Fields;
pub use fields::{Field, FieldChange, FieldChoice, FieldsError};
use frames::{FrameAt, SymbolOf};
use order::{InOrder, Times};

/// What `umpire script` prints of a profile.
#[derive(Clone, Debug, Args)]
pub struct ScriptOptions {
    /// The profile.
    #[command(flatten)]
    pub profile: ProfileChoice,
    /// What is printed: comm, pid, tid, cpu, time, period, event, ip, sym, symoff and dso, as
    /// perf names them; vm, vcpu, core, set, ring and cr3 in front of the CPU; callchain for the
    /// callers. hw: may be in front. +FIELD,-FIELD change what is printed without this option [default:
    /// comm,pid,tid,cpu,time,period,event,ip,sym,symoff,dso, and callchain where samples have
    /// callers; with -j vm, vcpu and core, too]
    #[arg(
        short = 'F',
        long,
        value_name = "FIELD[,...]",
        allow_hyphen_values = true
    )]
    pub fields: Vec<FieldChoice>,
    /// Print no callers
    #[arg(short = 'G', long)]
    pub hide_call_graph: bool,
    /// Print in front of which guest, when and how often the samples are
    #[arg(long)]
    pub header: bool,
    /// Print nanoseconds
    #[arg(long)]
    pub ns: bool,
    /// Print JSON: one object per line
    #[arg(short, long)]
    pub json: bool,
}

/// `umpire script` to `out`, with warnings to `notes`.
///
/// # Errors
/// The profile, the symbols or an option cannot be used, or `out` cannot be
/// written to. Whoever closes `out` early has seen enough: that is no error.
pub fn script(
    options: &ScriptOptions,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<(), ReportError> {
    let input = Input::open(&options.profile)?;
    let (looked, mut reader) = input.split();
    let usual = if options.json {
        Fields::usual_json(&looked.names)
    } else {
        Fields::usual(looked.has_chains)
    };
    for line in options.fields.iter().flat_map(|choice| &choice.ignored) {
        // Where nobody reads it there is nothing to be done.
        let _ = writeln!(notes, "umpire: {line}");
    }
    let mut fields = usual.changed(&options.fields, looked.has_chains && !options.json);
    if options.hide_call_graph {
        fields.remove(Field::Callchain);
    }
    if fields.is_empty() {
        return Err(ReportError::NoFields);
    }
    let mut times = Times::default();
    if !ran(&looked, looked.run(&mut reader, &mut [&mut times]))? {
        return Ok(());
    }
    let mut script = Script {
        header: &looked.header,
        filter: &looked.filter,
        names: &looked.names,
        fields,
        ns: options.ns,
        json: options.json,
        begun: false,
        early: Vec::new(),
        out,
    };
    if looked.header.virtual_time && script.fields.has(Field::Time) {
        let _ = writeln!(
            notes,
            "umpire: times are virtual, by the clock of the VM, and not the host's"
        );
    }
    if !options.json && (options.header || script.fields.has_own()) {
        written(script.header())?;
    }
    let mut reader = looked.again()?;
    let mut ordered = InOrder::new(times, &mut script);
    let run = looked.run(&mut reader, &mut [&mut ordered]);
    if !ran(&looked, run)? {
        return Ok(());
    }
    written(script.finish())?;
    tell(&looked, &looked.facts(&reader), notes)
}

/// Writes each record.
struct Script<'a> {
    header: &'a Header,
    filter: &'a Filter,
    names: &'a Names,
    fields: Fields,
    /// Times have nine digits behind the point.
    ns: bool,
    json: bool,
    /// A sample was written.
    begun: bool,
    /// Losses that come behind the first sample, by whose line readers tell what they read.
    early: Vec<Loss>,
    out: &'a mut dyn Write,
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
            Record::Sample(sample) => {
                self.sample_text(sample)?;
                self.begun = true;
                self.late()
            }
            Record::Loss(loss) if self.json => self.loss_json(loss),
            Record::Loss(loss) if self.begun => self.loss_text(loss),
            Record::Loss(loss) => {
                self.early.push(*loss);
                Ok(())
            }
            Record::Described(_) => Ok(()),
        }
    }
}

/// A sample for programs. Fields that were not chosen are left out; what was
/// not sampled is null.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("allOf" = [{"anyOf": [{"$ref": "#/$defs/SymbolOf"}, {}]}])))]
struct ScriptLine<'a> {
    /// `sample`, or what was lost: `lost`, `throttled`, `blind`.
    kind: &'a str,
    /// Name of the program (its `comm`).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(extend("x-null" = true)))]
    comm: Option<Option<&'a str>>,
    /// Process id in the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(extend("x-null" = true)))]
    pid: Option<Option<u32>>,
    /// Thread id in the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(extend("x-null" = true)))]
    tid: Option<Option<u32>>,
    /// The VM: process id of its VMM.
    #[serde(skip_serializing_if = "Option::is_none")]
    vm: Option<u32>,
    /// The vCPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    vcpu: Option<u32>,
    /// The core.
    #[serde(skip_serializing_if = "Option::is_none")]
    core: Option<u32>,
    /// When, in nanoseconds since the recording began.
    #[serde(skip_serializing_if = "Option::is_none")]
    time_ns: Option<u64>,
    /// Events that the sample stands for.
    #[serde(skip_serializing_if = "Option::is_none")]
    period: Option<u64>,
    /// The event's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    event: Option<String>,
    /// The event set.
    #[serde(skip_serializing_if = "Option::is_none")]
    set: Option<u16>,
    /// `kernel` (CPL 0) or `user` (CPL 1 to 3); null where it was not sampled.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(extend("x-null" = true)))]
    ring: Option<Option<Ring>>,
    /// CR3 in hexadecimal: whose address space; null where it was not sampled.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(extend("x-null" = true)))]
    cr3: Option<Option<String>>,
    /// Instruction pointer in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    ip: Option<String>,
    #[serde(flatten)]
    #[cfg_attr(test, schemars(skip))]
    symbol: Option<SymbolOf<'a>>,
    /// File, or part of the kernel, that has the address.
    #[serde(skip_serializing_if = "Option::is_none")]
    dso: Option<String>,
    /// Callers, the innermost first; left out where none were recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    callchain: Option<Vec<FrameLine<'a>>>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("allOf" = [{"$ref": "#/$defs/SymbolOf"}])))]
struct FrameLine<'a> {
    /// Null where callers are missing.
    ip: Option<String>,
    #[serde(flatten)]
    #[cfg_attr(test, schemars(skip))]
    symbol: SymbolOf<'a>,
    /// File, or part of the kernel, that has the address.
    dso: String,
}

/// A loss for programs.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct LossLine<'a> {
    /// `sample`, or what was lost: `lost`, `throttled`, `blind`.
    kind: &'a str,
    /// When, in nanoseconds since the recording began.
    time_ns: u64,
    /// The VM: process id of its VMM.
    vm: u32,
    /// The vCPU.
    vcpu: Option<u32>,
    /// Samples that were lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    samples: Option<u64>,
    /// How often sampling was held back.
    #[serde(skip_serializing_if = "Option::is_none")]
    times: Option<u64>,
    /// For how long nothing could be sampled, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    ns: Option<u64>,
}

impl Script<'_> {
    /// What waited for the first sample.
    fn late(&mut self) -> io::Result<()> {
        let early = std::mem::take(&mut self.early);
        early.iter().try_for_each(|loss| self.loss_text(loss))
    }

    fn finish(&mut self) -> io::Result<()> {
        self.late()?;
        self.out.flush()
    }

    fn sample_json(&mut self, sample: &Sample) -> io::Result<()> {
        let has = |field| self.fields.has(field);
        let (names, task) = (self.names, self.names.task_of(sample));
        let info = task.and_then(|task| names.programs.task_info(task));
        let frames = FrameAt::of(sample, self.names);
        let own = frames[0];
        let chain = has(Field::Callchain) && frames.len() > 1;
        let frame = |&frame: &FrameAt| FrameLine {
            ip: match frame.location {
                CodeLocation::Missing(_) => None,
                _ => Some(format!("{:#x}", frame.address)),
            },
            symbol: frame.symbol(names),
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
            vcpu: (has(Field::Vcpu) || has(Field::Cpu)).then_some(sample.vcpu),
            core: has(Field::Core).then_some(sample.core),
            time_ns: has(Field::Time).then_some(sample.time_ns),
            period: has(Field::Period).then_some(sample.period),
            event: has(Field::Event).then(|| event_name(self.header, sample.event)),
            set: has(Field::Set).then_some(sample.set),
            ring: has(Field::Ring).then_some(sample.ring),
            cr3: has(Field::Cr3).then(|| sample.cr3.map(|cr3| format!("{cr3:#x}"))),
            ip: has(Field::Ip).then(|| format!("{:#x}", sample.ip)),
            symbol: has(Field::Sym).then(|| own.symbol(names)),
            dso: has(Field::Dso).then(|| own.location.whole_object(names)),
            callchain: chain.then(|| frames.iter().map(frame).collect()),
        };
        let line = serde_json::to_string(&line)?;
        writeln!(self.out, "{line}")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_are_of_the_structures() {
        crate::schema::check::<ScriptLine<'_>>("script");
        crate::schema::check::<SymbolOf<'_>>("script");
        crate::schema::check::<LossLine<'_>>("script");
    }
}
