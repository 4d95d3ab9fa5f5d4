//! From the state to lines of text, whatever the size of the screen.

use umpire_events::one_line;

use super::reading::{
    CYCLES, EXITS, HotRow, INSTRUCTIONS, Missing, RUN_TIME, VcpuReading, VmReading,
};
use super::state::{Standing, State, VmLine};
use crate::table::lines;

/// Symbols that a frame has at most.
const SYMBOLS: usize = 100;

/// What is shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) head: String,
    pub(super) sections: Vec<Section>,
    pub(super) foot: String,
}

/// A table with a title.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Section {
    pub(super) title: String,
    /// The heads of the columns; empty if there are none.
    pub(super) head: String,
    pub(super) rows: Vec<String>,
    /// The row that the user has chosen.
    pub(super) marked: Option<usize>,
}

impl Section {
    fn table(title: String, heads: Vec<String>, rows: Vec<Vec<String>>, left: &[usize]) -> Self {
        let all = [heads].into_iter().chain(rows).collect();
        let mut text = lines(all, |column, _| !left.contains(&column));
        Self {
            title,
            head: text.next().unwrap_or_default(),
            rows: text.collect(),
            marked: None,
        }
    }
}

impl Frame {
    /// What a screen shows: all VMs, and the details of the one that is chosen. `clock` is
    /// the time of day.
    pub(super) fn of_screen(state: &State, clock: &str) -> Self {
        let chosen = state.selected();
        let mut vms = vm_table(state);
        vms.marked = (vms.rows.len() > 1).then_some(chosen);
        let mut sections = vec![vms];
        if state.help() {
            sections = vec![help()];
        } else if let Some(line) = state.vms().get(chosen) {
            sections.extend(details(state, line));
        }
        Self {
            head: head(state, clock),
            sections,
            foot: foot(state),
        }
    }

    /// All VMs with all their details.
    pub(super) fn whole(state: &State, clock: &str) -> Self {
        let details = state
            .vms()
            .into_iter()
            .flat_map(|line| details(state, line));
        Self {
            head: head(state, clock),
            sections: [vm_table(state)].into_iter().chain(details).collect(),
            foot: String::new(),
        }
    }
}

fn head(state: &State, clock: &str) -> String {
    let count = state.vms().len();
    let vms = if count == 1 { "VM" } else { "VMs" };
    let paused = if state.paused() { ", paused" } else { "" };
    format!("umpire top - {clock}, {count} {vms}{paused}")
}

fn foot(state: &State) -> String {
    if let Some(typed) = state.typed() {
        return format!("Seconds between frames (0.1 to 3600): {typed}_");
    }
    let pause = if state.paused() { "go on" } else { "pause" };
    format!(
        "q quit  h help  Tab next VM  p {pause}  s sort: {}  d delay: {} s",
        state.sort().word(),
        state.interval().as_secs_f64()
    )
}

fn help() -> Section {
    let rows = [
        "q, Ctrl-C        end",
        "h, ?             this page, and back",
        "Tab, down, j     the next VM; Shift-Tab, up, k: the one before",
        "p, space         let the display stand still, and go on",
        "s                sort by name, CPU, cycles, exits",
        "d                type the seconds between frames, then Enter",
        "Ctrl-L, Ctrl-Z   draw anew; suspend",
        "",
        "Rates are events a second of the clock on the wall, of the time since the last frame;",
        "IPC is instructions a cycle, %CPU the part of a CPU that a vCPU ran. not counted: the",
        "event found no counter, or lost it to others; a dash: the vCPU did not run, or nothing",
        "is known yet. This program's contexts are preemptible: guests and other tools take the",
        "counters when they need them. Symbols are those of the last 10 s.",
    ];
    Section {
        title: "Keys".to_owned(),
        rows: rows.map(str::to_owned).to_vec(),
        ..Section::default()
    }
}

fn vm_table(state: &State) -> Section {
    let heads = [
        "NAME", "PID", "GUEST", "VCPUS", "%CPU", "CYCLES/s", "IPC", "EXITS/s",
    ];
    let rows = state.vms().into_iter().map(vm_row).collect();
    let heads = heads.map(str::to_owned).to_vec();
    Section::table("VMs".to_owned(), heads, rows, &[0, 2])
}

fn vm_row(line: &VmLine) -> Vec<String> {
    let reading = &line.reading;
    let pid = match reading.pid {
        0 => "-".to_owned(),
        pid => pid.to_string(),
    };
    let mut row = vec![one_line(&line.name), pid];
    let told = match &line.standing {
        Standing::Live => None,
        Standing::Silent(seconds) => Some(format!("has not answered for {seconds} s")),
        Standing::Ended => Some("has ended".to_owned()),
        Standing::Failed(why) => Some(one_line(why)),
    };
    if let Some(told) = told {
        row.push(told);
        row.resize(8, String::new());
        return row;
    }
    let missing = |event: &str| {
        let rates = reading.vcpus.iter().flat_map(|vcpu| &vcpu.rates);
        let missing = rates.filter(|rate| rate.event == event);
        missing
            .filter_map(|rate| rate.missing)
            .find(|it| *it != Missing::Idle)
    };
    let sum = |event: &str| match line.per_second(event) {
        Some(rate) => short(rate),
        None => none(missing(event)),
    };
    let percent = line
        .per_second(RUN_TIME)
        .filter(|_| reading.seconds.is_some());
    let ipc = line.per_second(INSTRUCTIONS).zip(line.per_second(CYCLES));
    let ipc = ipc.filter(|(_, cycles)| *cycles > 0.0);
    row.extend([
        reading.guest.clone(),
        reading.vcpus.len().to_string(),
        percent.map_or("-".to_owned(), |ns| format!("{:.1}", ns / 1e7)),
        sum(CYCLES),
        ipc.map_or("-".to_owned(), |(instructions, cycles)| {
            format!("{:.2}", instructions / cycles)
        }),
        sum(EXITS),
    ]);
    row
}

/// The sections of one VM.
fn details(state: &State, line: &VmLine) -> Vec<Section> {
    if !matches!(line.standing, Standing::Live | Standing::Silent(_)) {
        return Vec::new();
    }
    let reading = &line.reading;
    let mut sections = vec![vcpu_table(state, line)];
    let holders = reading.holders.iter().map(|row| {
        let counters = row.counters.join(", ");
        vec![row.place.clone(), row.holder.clone(), counters]
    });
    let heads = ["WHERE", "HOLDER", "COUNTERS"].map(str::to_owned).to_vec();
    let title = format!("Counters of {}", one_line(&line.name));
    sections.push(Section::table(title, heads, holders.collect(), &[0, 1, 2]));
    let notes = notes(reading);
    if !notes.is_empty() {
        sections.push(Section {
            title: format!("Notes on {}", one_line(&line.name)),
            rows: notes,
            ..Section::default()
        });
    }
    sections.extend(symbols(line));
    sections
}

/// The events that have a column, of all that are counted: what nothing counts on any vCPU
/// has none, and what the others are computed from neither.
fn columns(reading: &VmReading) -> Vec<&str> {
    let first = reading.vcpus.iter().find(|vcpu| !vcpu.rates.is_empty());
    let events = first.into_iter().flat_map(|vcpu| &vcpu.rates);
    let supported = events.filter(|rate| rate.missing != Some(Missing::NotSupported));
    let names = supported.map(|rate| rate.event.as_str());
    names.filter(|event| *event != RUN_TIME).collect()
}

fn vcpu_table(state: &State, line: &VmLine) -> Section {
    let reading = &line.reading;
    let events = columns(reading);
    let mut heads = ["VCPU", "STATE", "CORE", "%CPU", "IPC"]
        .map(str::to_owned)
        .to_vec();
    heads.extend(events.iter().map(|event| head_of(event)));
    let row = |vcpu: &&VcpuReading| {
        let core = vcpu.core.map_or("-".to_owned(), |core| core.to_string());
        let percent = vcpu.cpu_percent();
        let ipc = vcpu.ipc();
        let mut row = vec![
            vcpu.vcpu.to_string(),
            vcpu.state.clone(),
            core,
            percent.map_or("-".to_owned(), |percent| format!("{percent:.1}")),
            ipc.map_or("-".to_owned(), |ipc| format!("{ipc:.2}")),
        ];
        row.extend(events.iter().map(|event| rate(reading, vcpu, event)));
        row
    };
    let rows = state.vcpus(reading).iter().map(row).collect();
    let title = format!(
        "vCPUs of {}: {}, counts from {}, {}",
        one_line(&line.name),
        reading.model,
        reading.counters,
        reading.policy
    );
    Section::table(title, heads, rows, &[1])
}

/// `CYCLES/s`, `EXITS/s`.
fn head_of(event: &str) -> String {
    let name = event.strip_prefix("vm-").unwrap_or(event);
    format!("{}/s", one_line(name).to_uppercase())
}

fn rate(reading: &VmReading, vcpu: &VcpuReading, event: &str) -> String {
    let rate = vcpu.rates.iter().find(|rate| rate.event == event);
    match rate {
        Some(rate) => rate.per_second.map_or_else(|| none(rate.missing), short),
        // Its context was refused, while others have counts; or there are none yet.
        None if reading.seconds.is_some() => none(Some(Missing::NotCounted)),
        None => none(None),
    }
}

fn none(missing: Option<Missing>) -> String {
    match missing {
        Some(Missing::NotCounted) => "not counted",
        Some(Missing::NotSupported) => "not supported",
        Some(Missing::Idle) | None => "-",
    }
    .to_owned()
}

/// What is not counted, and how the rest is.
fn notes(reading: &VmReading) -> Vec<String> {
    let rates = || reading.vcpus.iter().flat_map(|vcpu| &vcpu.rates);
    let mut unsupported: Vec<&str> = Vec::new();
    let mut provenances: Vec<(&str, Vec<&str>)> = Vec::new();
    for rate in rates() {
        let event = rate.event.as_str();
        if rate.missing == Some(Missing::NotSupported) && !unsupported.contains(&event) {
            unsupported.push(event);
        }
        if let Some(provenance) = rate.provenance.as_deref() {
            match provenances.iter_mut().find(|(it, _)| *it == provenance) {
                Some((_, events)) if events.contains(&event) => {}
                Some((_, events)) => events.push(event),
                None => provenances.push((provenance, vec![event])),
            }
        }
    }
    let mut notes = Vec::new();
    if !unsupported.is_empty() {
        notes.push(format!("not supported: {}", unsupported.join(", ")));
    }
    notes.extend(reading.notes.iter().map(|note| one_line(note)));
    let how =
        |(provenance, events): &(&str, Vec<&str>)| format!("{}: {provenance}", events.join(", "));
    if !provenances.is_empty() {
        let how: Vec<String> = provenances.iter().map(how).collect();
        notes.push(format!("counts: {}", how.join("; ")));
    }
    notes
}

fn symbols(line: &VmLine) -> Option<Section> {
    let samples = line.samples.sum()?;
    let totals = samples.totals;
    let mut title = format!(
        "Symbols of {}: {} samples of {} in {:.0} s, at most {} a second",
        one_line(&line.name),
        totals.samples,
        one_line(&samples.event),
        line.samples.seconds(),
        samples.hz
    );
    if totals.lost > 0 {
        title.push_str(&format!(", {} lost", totals.lost));
    }
    if totals.throttled > 0 {
        title.push_str(&format!(", throttled {} times", totals.throttled));
    }
    if totals.blind_ns > 0 {
        let ms = totals.blind_ns / 1_000_000;
        title.push_str(&format!(", {ms} ms without a counter"));
    }
    let all = samples.rows.iter().map(|row| row.events);
    let all = all.fold(0, u64::saturating_add);
    let programs = samples.rows.iter().any(|row| row.place.program.is_some());
    let row = |row: &HotRow| {
        let place = &row.place;
        let mut cells = vec![
            format!("{:.2}%", percent(row.events, all)),
            row.samples.to_string(),
        ];
        if programs {
            let program = place.program.clone().unwrap_or_default();
            cells.extend([one_line(&program.comm), one_line(&program.dso)]);
        }
        cells.push(one_line(&place.symbol));
        cells
    };
    let mut heads = vec!["OVERHEAD", "SAMPLES"];
    if programs {
        heads.extend(["COMMAND", "OBJECT"]);
    }
    heads.push("SYMBOL");
    let heads = heads.into_iter().map(str::to_owned).collect();
    let rows = samples.rows.iter().take(SYMBOLS).map(row).collect();
    Some(Section::table(title, heads, rows, &[2, 3, 4]))
}

#[expect(clippy::cast_precision_loss, reason = "rounded to 0.01 %")]
fn percent(part: u64, all: u64) -> f64 {
    match all {
        0 => 0.0,
        _ => part as f64 / all as f64 * 100.0,
    }
}

/// Four digits and a unit: `664`, `1.874G`.
fn short(rate: f64) -> String {
    let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")];
    // What would be rounded up to the next unit belongs to it.
    let unit = units
        .into_iter()
        .find(|(factor, _)| rate >= factor * 0.9995);
    match unit {
        Some((factor, unit)) => {
            let rate = rate / factor;
            let digits = match rate {
                rate if rate >= 99.95 => 1,
                rate if rate >= 9.995 => 2,
                _ => 3,
            };
            format!("{rate:.digits$}{unit}")
        }
        None if rate >= 9.95 || rate == 0.0 => format!("{rate:.0}"),
        None => format!("{rate:.1}"),
    }
}

#[cfg(test)]
pub(super) mod tests;
