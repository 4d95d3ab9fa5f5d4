//! The list of events, for people and for programs.

use std::io::{self, Write};

use pmu_model::{PmuModel, Vendor};

use super::counting::Use;
use super::entry::{
    CodeEntry, Entry, EventEntry, GenericEntry, Meaning, QuantityEntry, TableEntry,
};
use super::families::{all_models, in_short};

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
            Entry::Code(code) => write_code(code, out)?,
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
        Entry::Code(_) => "What this stands for with each PMU model, and every name of it",
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
        writeln!(
            out,
            "      {:<28} {}",
            models(&one.models),
            way(&one.way, false)
        )?;
    }
    Ok(())
}

/// The models, or the vendor if it is all of one's.
fn models(names: &[&str]) -> String {
    if names.is_empty() {
        return "no model".to_owned();
    }
    let all = all_models();
    if all.iter().map(PmuModel::name).eq(names.iter().copied()) {
        return "every model".to_owned();
    }
    for (vendor, name) in [(Vendor::Intel, "Intel"), (Vendor::Amd, "AMD")] {
        let of_vendor = all.iter().filter(|model| model.vendor() == vendor);
        if of_vendor.map(PmuModel::name).eq(names.iter().copied()) {
            return name.to_owned();
        }
    }
    in_short(names).join(", ")
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
        in_short(&table.models).join(", "),
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

fn write_code(entry: &CodeEntry, out: &mut dyn Write) -> io::Result<()> {
    let (models, meaning) = (models(&entry.models), meaning(&entry.meaning));
    writeln!(out, "  {models:<32} {meaning}")?;
    if matches!(entry.meaning, Meaning::Refused { .. }) {
        return Ok(());
    }
    if let (Some(select), Some(umask)) = (&entry.select, &entry.umask) {
        write!(out, "      event select {select}, unit mask {umask}")?;
        match entry.architectural {
            Some(name) => writeln!(out, ", architectural {name}")?,
            None => writeln!(out)?,
        }
    }
    let inverted = entry.modifiers.iter().any(|word| word == "inv");
    let words = entry.modifiers.iter().map(|word| modifier(word, inverted));
    writeln!(out, "      {}", words.collect::<Vec<_>>().join(", "))?;
    let (in_tables, generic): (Vec<_>, Vec<_>) =
        entry.names.iter().partition(|name| !name.tables.is_empty());
    if !generic.is_empty() {
        let names: Vec<&str> = generic.iter().map(|name| name.name.as_str()).collect();
        writeln!(out, "      generic name {}", names.join(", "))?;
    }
    for name in in_tables {
        writeln!(out, "      {:<36} in {}", name.name, name.tables.join(" "))?;
    }
    if entry.names.is_empty() {
        writeln!(out, "      no name here means it")?;
    }
    Ok(())
}

/// A modifier in words; `inverted` if `inv` is beside it.
fn modifier(word: &str, inverted: bool) -> String {
    match word {
        "u" => "u: at CPL 1 to 3".to_owned(),
        "k" => "k: at CPL 0".to_owned(),
        "edge" => "edge: transitions".to_owned(),
        "pc" => "pc: pin control".to_owned(),
        "any" => "any: all threads of the core".to_owned(),
        "guest-only" => "guest-only: in a guest".to_owned(),
        "host-only" => "host-only: outside of guests".to_owned(),
        word => match word.strip_prefix("cmask=") {
            Some(count) if inverted => format!("{word}: cycles with fewer than {count}"),
            Some(count) => format!("{word}: cycles with {count} or more"),
            None => word.to_owned(),
        },
    }
}
