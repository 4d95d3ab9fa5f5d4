//! The lines of `umpire count -j`: those of `perf stat -j`, and what perf does not have.

use std::io::{self, Write};

use attribution::{Counts, Program};
use serde::Serialize;

use crate::compare::{Comparison, RegionChange};
use crate::diff::FunctionChange;
use crate::event::Chosen;
use crate::inputs::InputChange;
use crate::record::{Outcome, Record};
use crate::regions;

/// An object of a line. What does not apply is left out.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(untagged)]
enum Line<'a> {
    Count(CountLine<'a>),
    Syscall(SyscallLine<'a>),
    Function(FunctionLine<'a>),
    Change(ChangeLine<'a>),
    RegionChange(RegionChangeLine<'a>),
    FunctionChange(FunctionChangeLine<'a>),
    Input(InputLine<'a>),
    Run(RunLine<'a>),
}

/// A count, with perf's keys.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct CountLine<'a> {
    /// The region that the count is of: its name, or `#` and its number among those of its
    /// process that have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    region: Option<&'a str>,
    /// The program that the count is of, with `--per-program` and of a region.
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<&'a str>,
    /// Its process in the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    /// A number with six digits behind the point.
    counter_value: String,
    /// Empty: a number of events.
    unit: &'a str,
    /// The event, as it was named.
    event: String,
    /// The virtual time in which it was counted, in nanoseconds.
    event_runtime: u64,
    /// 100: nothing takes turns.
    pcnt_running: f64,
    /// How the count came about: `exact`.
    provenance: &'a str,
}

/// What became of one system call, with `--syscalls`.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct SyscallLine<'a> {
    /// Its name; its number where it has none.
    syscall: &'a str,
    /// How often it was called.
    calls: u64,
    /// Instructions that the kernel executed in it.
    instructions: u64,
}

/// What a function cost, with `--functions`.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct FunctionLine<'a> {
    /// Its name.
    function: &'a str,
    /// The file that it is in.
    object: &'a str,
    /// Its own instructions.
    own: u64,
    /// These, and those of what it called.
    inclusive: u64,
    /// How often it was called.
    calls: u64,
}

/// A count beside the one before, with `--compare` and of `umpire count diff`.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct ChangeLine<'a> {
    /// The event.
    event: String,
    /// The count before.
    before: u64,
    /// The count now.
    now: u64,
    /// What becomes of it: `within` the threshold, `over` it, or `shown` alone.
    verdict: &'a str,
}

/// A count of a region beside the one before; one of both is missing where only one run has the
/// region.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct RegionChangeLine<'a> {
    /// The region's name, or `#` and its number.
    region: &'a str,
    /// The last part of its program's path.
    program: &'a str,
    /// How often it was ended before: what is counted of one name is added.
    times_before: u64,
    /// And now.
    times_now: u64,
    /// The event.
    event: String,
    /// The count before.
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<u64>,
    /// The count now.
    #[serde(skip_serializing_if = "Option::is_none")]
    now: Option<u64>,
    /// What becomes of it: `within` the threshold, `over` it, or `shown` alone.
    verdict: &'a str,
}

/// A function that does not cost what it cost before.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct FunctionChangeLine<'a> {
    /// Its name.
    function: &'a str,
    /// The file that it is in.
    object: &'a str,
    /// Its own instructions before.
    own_before: u64,
    /// And now.
    own_now: u64,
    /// These, and those of what it called, before.
    inclusive_before: u64,
    /// And now.
    inclusive_now: u64,
}

/// An input that is not what it was; one of both values is missing where it is only in one run.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct InputLine<'a> {
    /// Its name.
    input: &'a str,
    /// Its value before.
    #[serde(skip_serializing_if = "Option::is_none")]
    value_before: Option<&'a str>,
    /// Its value now.
    #[serde(skip_serializing_if = "Option::is_none")]
    value_now: Option<&'a str>,
}

/// The last line of a run: of what it was, and how it ended.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct RunLine<'a> {
    /// The program and its arguments, as they were typed.
    command: &'a str,
    /// The digest of all inputs.
    digest: &'a str,
    /// The program's status, if it ended by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u8>,
    /// The signal that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    signal: Option<u8>,
}

/// What of a record is written.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// What was run, as it was typed.
    pub title: &'a str,
    pub events: &'a [Chosen],
    /// Lines for each program besides.
    pub per_program: bool,
    pub syscalls: bool,
}

/// Writes an object a line: counts, and at the end the digest of what they are of.
///
/// # Errors
/// `out` cannot be written to.
pub fn write(record: &Record, wanted: &Wanted<'_>, out: &mut dyn Write) -> io::Result<()> {
    let counts = &record.counts;
    for chosen in wanted.events {
        put(&Line::Count(whole(counts, *chosen)), out)?;
    }
    if wanted.per_program {
        for program in &counts.programs {
            for chosen in wanted.events {
                put(&Line::Count(of_program(program, *chosen)), out)?;
            }
        }
    }
    for (name, region) in regions::named(counts) {
        for chosen in wanted.events {
            let ticks = chosen.side(region.user, region.kernel).ticks;
            let line = CountLine {
                region: Some(&name),
                program: Some(&region.program),
                pid: Some(region.pid),
                ..line(chosen.among(region.user, region.kernel), ticks, *chosen)
            };
            put(&Line::Count(line), out)?;
        }
    }
    for one in counts.syscalls.iter().filter(|_| wanted.syscalls) {
        let line = SyscallLine {
            syscall: &one.name,
            calls: one.calls,
            instructions: one.instructions,
        };
        put(&Line::Syscall(line), out)?;
    }
    for one in counts.functions.iter().flatten() {
        let line = FunctionLine {
            function: &one.name,
            object: &one.object,
            own: one.own,
            inclusive: one.inclusive,
            calls: one.calls,
        };
        put(&Line::Function(line), out)?;
    }
    let (status, signal) = match record.outcome {
        Outcome::Exited(status) => (Some(status), None),
        Outcome::Signalled(signal) => (None, Some(signal)),
    };
    let line = RunLine {
        command: wanted.title,
        digest: &record.digest,
        status,
        signal,
    };
    put(&Line::Run(line), out)
}

/// Writes what differs, an object a line: inputs, then counts, those of regions, then functions.
///
/// # Errors
/// `out` cannot be written to.
pub fn write_comparison(comparison: &Comparison<'_>, out: &mut dyn Write) -> io::Result<()> {
    for change in &comparison.inputs {
        let InputChange { name, before, now } = *change;
        let line = InputLine {
            input: name,
            value_before: before,
            value_now: now,
        };
        put(&Line::Input(line), out)?;
    }
    for change in &comparison.counts {
        let line = ChangeLine {
            event: change.chosen.to_string(),
            before: change.before,
            now: change.now,
            verdict: change.verdict.word(),
        };
        put(&Line::Change(line), out)?;
    }
    for region in &comparison.regions {
        write_region(region, out)?;
    }
    for change in &comparison.functions {
        let FunctionChange {
            object,
            name,
            own,
            inclusive,
            ..
        } = *change;
        let line = FunctionChangeLine {
            function: name,
            object,
            own_before: own[0],
            own_now: own[1],
            inclusive_before: inclusive[0],
            inclusive_now: inclusive[1],
        };
        put(&Line::FunctionChange(line), out)?;
    }
    Ok(())
}

fn write_region(region: &RegionChange<'_>, out: &mut dyn Write) -> io::Result<()> {
    let [before, now] = region.pair.sums;
    for change in &region.counts {
        let line = RegionChangeLine {
            region: &region.pair.name,
            program: region.pair.program,
            times_before: before.map_or(0, |sum| sum.times),
            times_now: now.map_or(0, |sum| sum.times),
            event: change.chosen.to_string(),
            before: before.map(|_| change.before),
            now: now.map(|_| change.now),
            verdict: change.verdict.word(),
        };
        put(&Line::RegionChange(line), out)?;
    }
    Ok(())
}

fn whole(counts: &Counts, chosen: Chosen) -> CountLine<'static> {
    let programs = counts.programs.iter();
    let virtual_ns = programs.map(|one| chosen.virtual_ns(one)).sum();
    line(chosen.of(counts), virtual_ns, chosen)
}

fn of_program(program: &Program, chosen: Chosen) -> CountLine<'_> {
    let (count, virtual_ns) = (chosen.of_program(program), chosen.virtual_ns(program));
    CountLine {
        program: Some(&program.name),
        pid: Some(program.pid),
        ..line(count, virtual_ns, chosen)
    }
}

fn line(count: u64, virtual_ns: u64, chosen: Chosen) -> CountLine<'static> {
    CountLine {
        region: None,
        program: None,
        pid: None,
        // Not by way of a double, which cannot hold all of them.
        counter_value: format!("{count}.000000"),
        unit: "",
        event: chosen.to_string(),
        event_runtime: virtual_ns,
        pcnt_running: 100.0,
        provenance: "exact",
    }
}

fn put(line: &Line<'_>, out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer(&mut *out, line)?;
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use schemars::generate::SchemaSettings;
    use serde_json::{Value, json};

    use super::*;
    use crate::compare::{Gate, Threshold};
    use crate::record::tests::{function, record, region, tally};

    /// `docs/schemas/count.json` says what these structures are, word by word.
    #[test]
    fn the_schema_is_of_the_structures() {
        let generator = SchemaSettings::draft2020_12()
            .for_serialize()
            .into_generator();
        let mut expected = Value::from(generator.into_root_schema_for::<Line<'_>>());
        expected["title"] = json!("A line of umpire count -j, and of umpire count diff -j");
        one_line(&mut expected);
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schemas/count.json");
        let text = std::fs::read_to_string(path).expect("a schema");
        let found: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(found, expected, "the file is to be {expected:#}");
    }

    /// Descriptions without the line breaks of comments.
    fn one_line(value: &mut Value) {
        match value {
            Value::Object(members) => {
                if let Some(Value::String(text)) = members.get_mut("description") {
                    *text = text.replace('\n', " ");
                }
                members.values_mut().for_each(one_line);
            }
            Value::Array(items) => items.iter_mut().for_each(one_line),
            _ => {}
        }
    }

    #[test]
    fn lines_of_a_run() {
        let mut record = record();
        record.counts.programs.truncate(1);
        record.counts.syscalls.truncate(1);
        record.counts.functions = Some(vec![function("main", 3, 9)]);
        record.counts.regions = vec![region("/bin/x", "", 40)];
        record.outcome = Outcome::Signalled(9);
        let events = Chosen::list("instructions:u,loads").expect("events");
        let wanted = Wanted {
            title: "sh x",
            events: &events,
            per_program: true,
            syscalls: true,
        };
        let mut out = Vec::new();
        write(&record, &wanted, &mut out).expect("room");
        let whole = r#""counter-value":"200000.000000","unit":"","event":"instructions:u","event-runtime":200007,"pcnt-running":100.0,"provenance":"exact"}"#;
        let other = r#""counter-value":"72500.000000","unit":"","event":"loads","event-runtime":290014,"pcnt-running":100.0,"provenance":"exact"}"#;
        let program = r#""program":"/bin/sh","pid":100,"#;
        let region = r##""region":"#1","program":"/bin/x","pid":101,"counter-value":"40.000000","unit":"","event":"instructions:u","event-runtime":47,"pcnt-running":100.0,"provenance":"exact"}
{"region":"#1","program":"/bin/x","pid":101,"counter-value":"11.000000","unit":"","event":"loads","event-runtime":58,"pcnt-running":100.0,"provenance":"exact"}"##;
        let digest = &record.digest;
        let expected = format!(
            "{{{whole}\n{{{other}\n{{{program}{whole}\n{{{program}{other}\n{{{region}\n\
             {{\"syscall\":\"read\",\"calls\":12,\"instructions\":34000}}\n\
             {{\"function\":\"main\",\"object\":\"/usr/bin/gzip\",\"own\":3,\"inclusive\":9,\"calls\":1}}\n\
             {{\"command\":\"sh x\",\"digest\":\"{digest}\",\"signal\":9}}\n"
        );
        assert_eq!(String::from_utf8(out).expect("text"), expected);
    }

    #[test]
    fn lines_of_a_comparison() {
        let (mut before, mut now) = (record(), record());
        before.counts.regions = vec![region("/bin/x", "", 40), region("/bin/x", "old", 3)];
        now.counts.regions = vec![region("/bin/y/x", "", 42)];
        now.inputs.add("extra", "1");
        now.counts.programs[1].threads[0].user = tally(1_000_001);
        now.counts.functions = Some(vec![
            function("deflate", 900_001, 980_001),
            function("longest_match", 80_000, 80_000),
        ]);
        let gate = Gate {
            events: &Gate::DEFAULT,
            threshold: Some(Threshold::NONE),
            kernel: false,
            regions_alone: false,
        };
        let comparison = Comparison::of(&before, &now, &gate);
        let mut out = Vec::new();
        write_comparison(&comparison, &mut out).expect("room");
        let expected = r##"{"input":"extra","value-now":"1"}
{"event":"instructions:u","before":1200000,"now":1200001,"verdict":"over"}
{"event":"instructions:k","before":124567,"now":124567,"verdict":"shown"}
{"region":"#1","program":"x","times-before":1,"times-now":1,"event":"instructions:u","before":40,"now":42,"verdict":"over"}
{"region":"#1","program":"x","times-before":1,"times-now":1,"event":"instructions:k","before":4,"now":4,"verdict":"shown"}
{"region":"old","program":"x","times-before":1,"times-now":0,"event":"instructions:u","before":3,"verdict":"shown"}
{"region":"old","program":"x","times-before":1,"times-now":0,"event":"instructions:k","before":0,"verdict":"shown"}
{"function":"deflate","object":"/usr/bin/gzip","own-before":900000,"own-now":900001,"inclusive-before":980000,"inclusive-now":980001}
"##;
        assert_eq!(String::from_utf8(out).expect("text"), expected);
    }
}
