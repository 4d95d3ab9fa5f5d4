//! The scenario as it was played, for people and for machines.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Value;
use umpire_lease::Lease;
use umpire_tools::table::indented;

/// Everything that the demo shows. Its JSON form keeps these names.
#[derive(Clone, Debug, Serialize)]
pub(in crate::demo) struct HostReport {
    /// Always true: the VMs ran.
    pub shown: bool,
    /// Programmable counters of each CPU.
    pub counters: u32,
    /// What happened, in order.
    pub lines: Vec<Line>,
    /// What the tool counted.
    pub tool: Tool,
    /// What the VMs counted.
    pub holders: Vec<Holder>,
}

/// Something that happened.
#[derive(Clone, Debug, Serialize)]
pub(in crate::demo) struct Line {
    /// Milliseconds since the arbiter was there.
    pub ms: f64,
    /// To whom.
    pub who: String,
    pub tenant: String,
    /// In words.
    pub what: String,
}

/// The counts of the tool, at the same time on two counters.
#[derive(Clone, Copy, Debug, Serialize)]
pub(in crate::demo) struct Tool {
    /// One event a tick.
    pub cycles: Option<f64>,
    /// One event a tick, too.
    pub instructions: Option<f64>,
}

/// A VM at its end.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(in crate::demo) struct Holder {
    pub name: String,
    pub tenant: String,
    pub counters: Vec<Counted>,
    /// Counters times milliseconds that it lacked, by the arbiter's books.
    pub blind_ms: u64,
}

/// A counter of a VM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(in crate::demo) struct Counted {
    /// Its name.
    pub counter: String,
    /// What it has counted.
    pub events: u64,
    /// Ticks of guest time, an event each, in which it held a physical counter.
    pub truth: u64,
    /// Ticks of guest time in which it was enabled and held none.
    pub blind: u64,
}

impl Holder {
    /// The VM of a lease that has ended, by the file of its PMU's state.
    pub(super) fn of(name: &str, last: &Lease, state: &[u8]) -> Option<Self> {
        let state: Value = serde_json::from_slice(state).ok()?;
        let counters = state["vcpus"][0]["pmu"]["counters"].as_array()?;
        let used = counters.iter().filter(|one| one["programmed"] == true);
        let counted = used.map(|one| {
            let number = |key: &str| one[key].as_u64();
            let (enabled, running) = (number("time-enabled")?, number("time-running")?);
            Some(Counted {
                counter: one["counter"].as_str()?.to_owned(),
                events: number("events")?,
                truth: running,
                blind: enabled.checked_sub(running)?,
            })
        });
        Some(Holder {
            name: name.to_owned(),
            tenant: last.tenant.clone(),
            counters: counted.collect::<Option<_>>()?,
            blind_ms: last.blind_ms,
        })
    }
}

impl HostReport {
    /// Whether every count is the truth, to the last event.
    pub(in crate::demo) fn is_true(&self) -> bool {
        let mut counters = self.holders.iter().flat_map(|holder| &holder.counters);
        let tool = self.tool.cycles.is_some() && self.tool.cycles == self.tool.instructions;
        tool && !self.holders.is_empty()
            && counters.all(|one| one.events == one.truth && one.events > 0)
    }
}

/// Writes the report.
pub(in crate::demo) fn write_report(
    report: &HostReport,
    json: bool,
    out: &mut dyn Write,
) -> io::Result<()> {
    if json {
        serde_json::to_writer_pretty(&mut *out, report)?;
        writeln!(out)?;
        return out.flush();
    }
    writeln!(
        out,
        "An arbiter gives the {} counters of each CPU (simulated, one event a tick) to three VMs \
         of two\ntenants and to the operator's tools. Lines are the arbiter's decisions, as it \
         told them.\n",
        report.counters
    )?;
    let rows = report.lines.iter().map(|line| {
        let (who, tenant) = (line.who.clone(), line.tenant.clone());
        vec![format!("{:.1}", line.ms), who, tenant, line.what.clone()]
    });
    indented(&["TIME [ms]", "WHO", "TENANT", "WHAT"], rows.collect(), out)?;
    writeln!(out, "\nCounts of the VMs at their ends")?;
    let rows = report.holders.iter().flat_map(|holder| {
        holder.counters.iter().map(|one| {
            vec![
                holder.name.clone(),
                one.counter.clone(),
                one.events.to_string(),
                one.truth.to_string(),
                if one.events == one.truth { "yes" } else { "NO" }.to_owned(),
                one.blind.to_string(),
            ]
        })
    });
    let heads = [
        "VM",
        "COUNTER",
        "COUNTED",
        "TICKS HELD",
        "EQUAL",
        "TICKS BLIND",
    ];
    indented(&heads, rows.collect(), out)?;
    for holder in &report.holders {
        let (name, blind) = (&holder.name, holder.blind_ms);
        writeln!(
            out,
            "  {name} lacked {blind} ms of counters, by the arbiter's books"
        )?;
    }
    let count =
        |count: Option<f64>| count.map_or("<not counted>".to_owned(), |n| format!("{n:.0}"));
    let (cycles, instructions) = (count(report.tool.cycles), count(report.tool.instructions));
    writeln!(
        out,
        "The tool counted {cycles} cycles and {instructions} instructions of blue-1 at the same \
         time, one of\neach a tick."
    )?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(events: u64, instructions: f64) -> HostReport {
        let counted = Counted {
            counter: "PMC0".to_owned(),
            events,
            truth: 70,
            blind: 3,
        };
        let holder = Holder {
            name: "blue-1".to_owned(),
            tenant: "blue".to_owned(),
            counters: vec![counted],
            blind_ms: 0,
        };
        HostReport {
            shown: true,
            counters: 4,
            lines: Vec::new(),
            tool: Tool {
                cycles: Some(9.0),
                instructions: Some(instructions),
            },
            holders: vec![holder],
        }
    }

    #[test]
    fn one_event_less_is_seen() {
        assert!(report(70, 9.0).is_true());
        assert!(!report(69, 9.0).is_true());
        assert!(!report(70, 8.0).is_true());
        let mut out = Vec::new();
        write_report(&report(69, 9.0), false, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("69       70          NO"), "{text}");
    }

    #[test]
    fn a_state_without_counts_is_none() {
        let last = Lease::default();
        assert_eq!(Holder::of("a", &last, b"{}"), None);
        assert_eq!(Holder::of("a", &last, b"no"), None);
        let text = br#"{"vcpus":[{"pmu":{"counters":[{"counter":"PMC0","events":5,
            "programmed":true,"time-enabled":9,"time-running":5},
            {"counter":"PMC1","events":0,"programmed":false}]}}]}"#;
        let holder = Holder::of("a", &last, text).expect("counts");
        assert_eq!(
            (holder.counters[0].events, holder.counters[0].blind),
            (5, 4)
        );
        assert_eq!(holder.counters.len(), 1);
    }
}
