//! What `umpire events` lists, gathered before anything is printed.

use std::collections::HashMap;

use pmu_model::PmuModel;
use pmu_model::VirtualPmd;

use super::counting::{Backends, Use};
use super::entry::{
    Entry, EventEntry, GenericEntry, Meaning, ModelsUse, QuantityEntry, TableEntry, UnitMask,
};
use super::error::EventError;
use super::families::{all_models, family_of, label, model_named, models_of, processors, usual_of};
use super::generic::{self, Generic};
use super::resolve::resolve;
use super::search::Pattern;
use super::suggest::nearest;
use super::table::{Attribute, AttributeKind, NameTable, NamedEvent, PmuTable};
use super::text::one_of;

/// What is to be listed.
#[derive(Clone, Debug, Default)]
pub struct Question {
    /// Only what this finds.
    pub pattern: Option<Pattern>,
    /// Only this table, or the generic names for this model.
    pub pmu: Option<String>,
}

/// The answer to `question`.
///
/// # Errors
/// There is no such table or model, or no tables at all.
pub fn list(
    question: &Question,
    names: &dyn NameTable,
    backends: Backends<'_>,
) -> Result<Vec<Entry>, EventError> {
    let pattern = question.pattern.as_ref();
    let Some(pmu) = &question.pmu else {
        let models = [all_models(), processors()].concat();
        let mut entries = generic_entries(&models, pattern, backends);
        entries.extend(quantities(pattern));
        match (names.missing(), pattern) {
            (Some(library), _) => entries.push(Entry::NoTables {
                reason: library.to_string(),
            }),
            (None, None) => entries.extend(table_entries(names)),
            (None, Some(_)) => {
                entries.extend(merged(events_of(usable(names), pattern, names, backends)));
            }
        }
        return Ok(entries);
    };
    if let Some(model) = model_named(pmu) {
        return Ok(generic_entries(&[model?], pattern, backends));
    }
    let table = find(pmu, names)?;
    Ok(events_of([table].into_iter(), pattern, names, backends))
}

/// What to say where nothing has `text` in its name or description.
#[must_use]
pub fn nothing_found(text: &str, names: &dyn NameTable) -> String {
    let near = match near(text, names) {
        near if near.is_empty() => String::new(),
        near => format!(" (did you mean {}?)", one_of(&near)),
    };
    let library = match names.missing() {
        Some(library) => format!("; {library}"),
        None => String::new(),
    };
    format!("no event name or description has '{text}'{near}{library}")
}

/// Everything that can be meant by a pattern that found nothing.
fn near(text: &str, names: &dyn NameTable) -> Vec<String> {
    let events = usable(names).flat_map(|table| names.events(&table.name));
    let all: Vec<String> = events
        .map(|event| event.name)
        .chain(generic::all_names().map(str::to_owned))
        .collect();
    // A word of a name may be meant as well as a name.
    let words = all.iter().flat_map(|name| name.split(['_', '-']));
    nearest(text, all.iter().map(String::as_str).chain(words))
}

/// The table `name`, which belongs to a model.
pub(super) fn find<'a>(name: &str, names: &'a dyn NameTable) -> Result<&'a PmuTable, EventError> {
    if let Some(library) = names.missing() {
        return Err(EventError::NoModelNorTables {
            name: name.to_owned(),
            near: nearest(name, all_models().iter().map(PmuModel::name)),
            library: library.clone(),
        });
    }
    let tables = names.tables();
    let found = tables
        .iter()
        .find(|table| table.name.eq_ignore_ascii_case(name));
    let table = found.ok_or_else(|| {
        let tables = usable(names).map(|table| table.name.clone());
        let models = all_models()
            .into_iter()
            .map(|model| model.name().to_owned());
        EventError::UnknownTable {
            table: name.to_owned(),
            near: nearest(name, tables.chain(models)),
        }
    })?;
    match family_of(table) {
        Ok(_) => Ok(table),
        Err(why) => Err(EventError::UnusableTable {
            name: name.to_owned(),
            table: table.name.clone(),
            why,
        }),
    }
}

/// The tables that belong to a model.
pub(super) fn usable(names: &dyn NameTable) -> impl Iterator<Item = &PmuTable> {
    let tables = names.tables().iter();
    tables.filter(|table| family_of(table).is_ok())
}

fn table_entries(names: &dyn NameTable) -> impl Iterator<Item = Entry> {
    let with_events = usable(names).filter(|table| table.events > 0);
    with_events.filter_map(|table| {
        let family = family_of(table).ok()?;
        Some(Entry::Table(TableEntry {
            name: table.name.clone(),
            description: table.description.clone(),
            events: table.events,
            models: models_of(family).iter().map(PmuModel::name).collect(),
            host: table.host,
        }))
    })
}

fn generic_entries(
    models: &[PmuModel],
    pattern: Option<&Pattern>,
    backends: Backends<'_>,
) -> Vec<Entry> {
    let asked = |generic: &&Generic| {
        pattern.is_none_or(|pattern| {
            generic.names.iter().any(|name| pattern.finds_name(name))
                || pattern.finds_text(&description(generic))
        })
    };
    let entry = |generic: &Generic| {
        let (name, aliases) = generic.names.split_first()?;
        let mut uses: Vec<ModelsUse> = Vec::new();
        for model in models {
            let Some(request) = generic.request(model) else {
                continue;
            };
            let way = Use::of_request(&request, backends);
            match uses.iter_mut().find(|other| other.way == way) {
                // A processor that has the code of all its vendor's is not named.
                Some(other) if !other.models.contains(&model.name()) => {
                    other.models.push(label(model));
                }
                Some(_) => {}
                None => uses.push(ModelsUse {
                    models: vec![label(model)],
                    way,
                }),
            }
        }
        if let Some(request) = generic.without_code() {
            uses.push(ModelsUse {
                models: Vec::new(),
                way: Use::without_code(&request, backends),
            });
        }
        (!uses.is_empty()).then(|| {
            Entry::Generic(GenericEntry {
                name,
                aliases,
                description: description(generic),
                models: uses,
            })
        })
    };
    let all: &'static [Generic] = &generic::GENERIC;
    all.iter().filter(asked).filter_map(entry).collect()
}

/// What the VMM measures of itself.
fn quantities(pattern: Option<&Pattern>) -> impl Iterator<Item = Entry> {
    let asked = move |which: &&VirtualPmd| {
        pattern.is_none_or(|it| it.finds_name(which.name()) || it.finds_text(which.text()))
    };
    VirtualPmd::ALL.iter().filter(asked).map(|which| {
        Entry::Quantity(QuantityEntry {
            name: which.name(),
            description: which.text(),
            samples_only: which.is_of_overflow(),
        })
    })
}

fn description(generic: &Generic) -> String {
    match generic.note {
        "" => generic.event.to_string(),
        note => format!("{} ({note})", generic.event),
    }
}

/// The events of `tables` that `pattern` finds.
fn events_of<'a>(
    tables: impl Iterator<Item = &'a PmuTable>,
    pattern: Option<&Pattern>,
    names: &dyn NameTable,
    backends: Backends<'_>,
) -> Vec<Entry> {
    let mut entries = Vec::new();
    for table in tables {
        let Some(model) = family_of(table).ok().and_then(usual_of) else {
            continue;
        };
        let events = names.events(&table.name).into_iter();
        let found = events.filter(|event| pattern.is_none_or(|one| finds(one, table, event)));
        entries.extend(
            found.map(|event| Entry::Event(describe(&event, table, &model, names, backends))),
        );
    }
    entries
}

fn finds(pattern: &Pattern, table: &PmuTable, event: &NamedEvent) -> bool {
    let full = format!("{}::{}", table.name, event.name);
    pattern.finds_name(&event.name)
        || pattern.finds_name(&full)
        || pattern.finds_text(&event.description)
        || unit_masks(event).any(|mask| {
            pattern.finds_name(&format!("{full}:{}", mask.name))
                || pattern.finds_name(&format!("{}:{}", event.name, mask.name))
                || pattern.finds_text(&mask.description)
        })
}

fn unit_masks(event: &NamedEvent) -> impl Iterator<Item = &Attribute> {
    let all = event.attributes.iter();
    all.filter(|attribute| attribute.kind == AttributeKind::UnitMask)
}

fn describe(
    event: &NamedEvent,
    table: &PmuTable,
    model: &PmuModel,
    names: &dyn NameTable,
    backends: Backends<'_>,
) -> EventEntry {
    let full = format!("{}::{}", table.name, event.name);
    let meaning = |name: &str| match resolve(name, model, names) {
        Ok(named) => Meaning::Counted(Use::of_named(&named, backends)),
        Err(error) => Meaning::Refused {
            problem: problem(error),
        },
    };
    EventEntry {
        tables: vec![table.name.clone()],
        name: event.name.clone(),
        description: event.description.clone(),
        alias_of: event.alias_of.clone(),
        meaning: meaning(&full),
        unit_masks: unit_masks(event)
            .map(|mask| UnitMask {
                name: mask.name.clone(),
                description: mask.description.clone(),
                default: mask.default,
                meaning: meaning(&format!("{full}:{}", mask.name)),
            })
            .collect(),
        modifiers: event
            .attributes
            .iter()
            .filter(|attribute| attribute.kind != AttributeKind::UnitMask)
            .map(Attribute::spelled)
            .collect(),
    }
}

/// Why an event is not counted, without its name, so that the same event of
/// several tables reads the same.
fn problem(error: EventError) -> String {
    match error {
        EventError::NeedsUnitMask { .. } => "needs a unit mask".to_owned(),
        EventError::FurtherRegister(_) => "needs a register outside of the counters".to_owned(),
        EventError::NoSuchBits { bits, model, .. } => format!("{model} has no {bits}"),
        EventError::NoFixedCounter { counter, model, .. } => {
            format!("needs fixed counter {counter}, which {model} does not have")
        }
        EventError::SelectsNothing { .. } => "libpfm4 has no usable code for it".to_owned(),
        other => other.to_string(),
    }
}

/// Events that differ in nothing but their table, as one entry.
fn merged(entries: Vec<Entry>) -> Vec<Entry> {
    let mut all: Vec<EventEntry> = Vec::new();
    let mut by_name: HashMap<String, Vec<usize>> = HashMap::new();
    for entry in entries {
        let Entry::Event(event) = entry else { continue };
        let namesakes = by_name.entry(event.name.clone()).or_default();
        match namesakes.iter().find(|twin| same(&all[**twin], &event)) {
            Some(twin) => all[*twin].tables.extend(event.tables),
            None => {
                namesakes.push(all.len());
                all.push(event);
            }
        }
    }
    all.into_iter().map(Entry::Event).collect()
}

fn same(one: &EventEntry, other: &EventEntry) -> bool {
    one.description == other.description
        && one.alias_of == other.alias_of
        && one.meaning == other.meaning
        && one.unit_masks == other.unit_masks
        && one.modifiers == other.modifiers
}
