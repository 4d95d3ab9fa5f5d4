//! The list of events, for people and for programs.

use std::io::{self, Write};

use pmu_model::{PmuModel, Vendor};

use super::counting::Use;
use super::entry::{
    Entry, EventEntry, GenericEntry, Meaning, ModelsUse, QuantityEntry, TableEntry,
};
use super::families::all_models;

/// Writes `entries` to `out`: text, or one JSON object a line.
///
/// # Errors
/// `out` cannot be written to.
pub fn write_list(entries: &[Entry], json: bool, out: &mut dyn Write) -> io::Result<()> {
    let mut heading = None;
    for entry in entries {
        if json {
            serde_json::to_writer(&mut *out, entry)?;
            writeln!(out)?;
            continue;
        }
        let under = heading_of(entry);
        match heading.replace(under) {
            Some(last) if last == under => {}
            Some(_) => writeln!(out, "\n{under}")?,
            None => writeln!(out, "{under}")?,
        }
        match entry {
            Entry::Generic(generic) => write_generic(generic, out)?,
            Entry::Quantity(quantity) => {
                let QuantityEntry {
                    name, description, ..
                } = quantity;
                writeln!(out, "  {name:<18} {description}")?;
            }
            Entry::Table(table) => write_table(table, out)?,
            Entry::Event(event) => write_event(event, out)?,
            Entry::NoTables { reason } => writeln!(out, "  {reason}")?,
        }
    }
    out.flush()
}

fn heading_of(entry: &Entry) -> &'static str {
    match entry {
        Entry::Generic(_) => {
            "Generic names, with the raw code of each model and the backends that can count it\n\
             (add :u or :k to count at CPL 1 to 3 or at CPL 0 alone)"
        }
        Entry::Quantity(_) => "Quantities of the VMM, for umpire stat alone",
        Entry::Table(_) | Entry::NoTables { .. } => {
            "Tables of named events, as in TABLE::EVENT; umpire events --pmu TABLE lists one"
        }
        Entry::Event(_) => "Named events, as in TABLE::EVENT:UNIT_MASK:MODIFIER",
    }
}

fn write_generic(entry: &GenericEntry, out: &mut dyn Write) -> io::Result<()> {
    let mut names = entry.name.to_owned();
    for alias in entry.aliases {
        names.push_str(", ");
        names.push_str(alias);
    }
    writeln!(out, "  {names:<32} {}", entry.description)?;
    for one in &entry.models {
        writeln!(out, "      {:<28} {}", models(one), way(&one.way, false))?;
    }
    Ok(())
}

/// The models, or the vendor if it is all of one's.
fn models(one: &ModelsUse) -> String {
    if one.models.is_empty() {
        return "no model".to_owned();
    }
    let all = all_models();
    if all
        .iter()
        .map(PmuModel::name)
        .eq(one.models.iter().copied())
    {
        return "every model".to_owned();
    }
    for (vendor, name) in [(Vendor::Intel, "Intel"), (Vendor::Amd, "AMD")] {
        let of_vendor = all.iter().filter(|model| model.vendor() == vendor);
        if of_vendor.map(PmuModel::name).eq(one.models.iter().copied()) {
            return name.to_owned();
        }
    }
    one.models.join(", ")
}

/// `r530300       fixed counter 2, reference cycles: clock exact`; the meaning
/// only if `explain`.
fn way(way: &Use, explain: bool) -> String {
    let mut text = format!("{:<14}", way.code.as_deref().unwrap_or("no code"));
    if let Some(counter) = way.fixed {
        text.push_str(&format!("fixed counter {counter}, "));
    }
    if let Some(event) = way.event.as_ref().filter(|_| explain) {
        text.push_str(&format!("{event}: "));
    }
    let backends: Vec<String> = way
        .backends
        .iter()
        .map(|one| format!("{} {}", one.backend, one.provenance))
        .collect();
    if backends.is_empty() {
        text.push_str("no backend");
    } else {
        text.push_str(&backends.join(", "));
    }
    text
}

fn meaning(meaning: &Meaning) -> String {
    match meaning {
        Meaning::Counted(one) => way(one, true),
        Meaning::Refused { problem } => problem.clone(),
    }
}

fn write_table(table: &TableEntry, out: &mut dyn Write) -> io::Result<()> {
    let host = if table.host { ", this host" } else { "" };
    writeln!(
        out,
        "  {:<26} {:>4} events for {}: {}{host}",
        table.name,
        table.events,
        table.models.join(", "),
        table.description
    )
}

fn write_event(event: &EventEntry, out: &mut dyn Write) -> io::Result<()> {
    let name = match event.tables.as_slice() {
        [table] => format!("{table}::{}", event.name),
        _ => event.name.clone(),
    };
    writeln!(out, "  {name:<44} {}", meaning(&event.meaning))?;
    writeln!(out, "      {}", event.description)?;
    if let Some(other) = &event.alias_of {
        writeln!(out, "      another name of {other}")?;
    }
    if event.tables.len() > 1 {
        writeln!(out, "      in the tables {}", event.tables.join(" "))?;
    }
    for mask in &event.unit_masks {
        let default = if mask.default { " (default)" } else { "" };
        let name = format!(":{}{default}", mask.name);
        writeln!(out, "      {name:<40} {}", meaning(&mask.meaning))?;
        writeln!(out, "          {}", mask.description)?;
    }
    if event.modifiers.is_empty() {
        Ok(())
    } else {
        writeln!(out, "      modifiers {}", event.modifiers.join(" "))
    }
}
