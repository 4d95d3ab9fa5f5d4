//! What one name or code stands for with each PMU model, and every other name of it.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use pmu_model::{CountRequest, EventCode, EventFamily, PmuModel, Vendor};

use super::code::raw_code;
use super::counting::{Backends, Use};
use super::entry::{CodeEntry, Entry, EventName, Meaning};
use super::error::EventError;
use super::explain::Name;
use super::families::{all_models, family_of, label, model_named, models_of, processors, reads};
use super::generic;
use super::list::{find, usable};
use super::perf_form;
use super::resolve::{is_plain, models_for, resolve, take};
use super::suggest::nearest;
use super::table::{AttributeKind, NameTable, NamedEvent, PmuTable};
use super::uncounted;

/// Whether `text` can only be meant as a code, or as a name with modifiers: no word of a
/// description is one.
#[must_use]
pub fn is_code(text: &str) -> bool {
    let name = Name::split(text);
    let has_modifiers = name.table.is_none() && text.contains(':') && is_plain(name.event);
    let has_digit = text.contains(|c: char| c.is_ascii_digit());
    has_modifiers || has_digit && can_be_code(text)
}

/// Whether it is written as a code: a number, or perf's fields.
fn can_be_code(text: &str) -> bool {
    let name = Name::split(text);
    let is_raw = name.table.is_none() && !matches!(raw_code(name.event), Ok(None));
    is_raw || perf_form::is_code(text)
}

/// The names of the code `text`, which is written as the register holds it, or in perf's words:
/// entries as of [`identify`], of models that know a name.
///
/// # Errors
/// It is no code, or no event that is known has it.
pub fn decode(
    text: &str,
    pmu: Option<&str>,
    names: &dyn NameTable,
    backends: Backends<'_>,
) -> Result<Vec<Entry>, EventError> {
    if !can_be_code(text) {
        return Err(EventError::NotACode(text.to_owned()));
    }
    let mut entries = identify(text, pmu, names, backends)?;
    entries.retain(|entry| match entry {
        Entry::Code(code) => !code.names.is_empty() || code.architectural.is_some(),
        _ => false,
    });
    if entries.is_empty() {
        return Err(EventError::NoName {
            code: text.to_owned(),
            pmu: pmu.unwrap_or("the PMU models").to_owned(),
            library: names.missing().cloned(),
        });
    }
    Ok(entries)
}

/// Whether an event is one whatever tables there are.
fn is_of_no_table(text: &str, name: &Name<'_>) -> bool {
    name.table.is_none()
        && (is_plain(name.event)
            || uncounted::traced(text).is_some()
            || perf_form::split(text).is_some())
}

/// What `text` stands for, in every form that [`resolve`] takes: an entry for each
/// group of models that agree. `pmu` is a model or a table, if only one is asked.
///
/// # Errors
/// It stands for nothing with any of these models, or there is no such table.
pub fn identify(
    text: &str,
    pmu: Option<&str>,
    names: &dyn NameTable,
    backends: Backends<'_>,
) -> Result<Vec<Entry>, EventError> {
    let only = pmu.and_then(model_named).transpose()?;
    let table = match (pmu, &only) {
        (Some(pmu), None) => Some(find(pmu, names)?),
        _ => None,
    };
    let name = Name::split(text);
    let is_plain = is_of_no_table(text, &name);
    let full = match table {
        Some(table) if name.table.is_none() && !is_plain => format!("{}::{text}", table.name),
        _ => text.to_owned(),
    };
    let models = match (only, table) {
        (Some(model), _) => vec![model],
        (None, Some(table)) => family_of(table).map(and_processor).unwrap_or_default(),
        (None, None) => models_that_may(text, names, is_plain)?,
    };
    let mut entries = Vec::new();
    let mut errors = Vec::new();
    let mut of_tables: Vec<(CountRequest, Vec<EventName>)> = Vec::new();
    for model in &models {
        let request = match resolve(&full, model, names) {
            Ok(named) => named.request,
            Err(error) => {
                errors.push((model, error));
                continue;
            }
        };
        let mut found = generic_names(&request, model);
        // Models of one vocabulary have the same tables.
        let known = of_tables.iter().find(|(known, _)| *known == request);
        let in_tables = match known {
            Some((_, names)) => names.clone(),
            None => {
                let tables = usable(names).filter(|one| match table {
                    Some(table) => one.name == table.name,
                    None => family_of(one).is_ok_and(|family| reads(model, one, family)),
                });
                let in_tables = table_names(&request, model, tables, names);
                of_tables.push((request, in_tables.clone()));
                in_tables
            }
        };
        found.extend(in_tables);
        let entry = CodeEntry {
            name: text.to_owned(),
            models: vec![label(model)],
            meaning: Meaning::Counted(Use::of_request(&request, backends)),
            select: fields(&request).map(|(select, _)| format!("{select:#x}")),
            umask: fields(&request).map(|(_, umask)| format!("{umask:#x}")),
            architectural: architectural(&request),
            modifiers: modifiers(&request),
            names: found,
        };
        join(&mut entries, entry, model);
    }
    if entries.is_empty() {
        return Err(most_telling(errors, &name, names));
    }
    let refused = errors.iter().filter(|(_, error)| !is_foreign(error));
    entries.extend(refused.map(|(model, error)| refused_by(text, model, error)));
    Ok(entries.into_iter().map(Entry::Code).collect())
}

/// The models that `text` may be meant for, if nothing says which.
fn models_that_may(
    text: &str,
    names: &dyn NameTable,
    is_plain: bool,
) -> Result<Vec<PmuModel>, EventError> {
    Ok(match models_for(text, names)? {
        Some(own) => own
            .last()
            .map(|own| and_processor(own.events()))
            .unwrap_or_default(),
        None if is_plain => [all_models(), processors()].concat(),
        None => all_models(),
    })
}

/// Adds what `text` stands for with one more model, which may be what it is with others.
fn join(entries: &mut Vec<CodeEntry>, entry: CodeEntry, model: &PmuModel) {
    // A processor that agrees with all its vendor's is not named.
    let agrees =
        |one: &CodeEntry| one.models.contains(&model.name()) && one.meaning == entry.meaning;
    if !model.has_usual_events() && entries.iter().any(agrees) {
        return;
    }
    let same = |one: &&mut CodeEntry| {
        let models = entry.models.clone();
        CodeEntry {
            models,
            ..(*one).clone()
        } == entry
    };
    match entries.iter_mut().find(same) {
        Some(other) => other.models.extend(entry.models),
        None => entries.push(entry),
    }
}

fn refused_by(text: &str, model: &PmuModel, error: &EventError) -> CodeEntry {
    CodeEntry {
        name: text.to_owned(),
        models: vec![label(model)],
        meaning: Meaning::Refused {
            problem: error.to_string(),
        },
        select: None,
        umask: None,
        architectural: None,
        modifiers: Vec::new(),
        names: Vec::new(),
    }
}

/// The models that have the codes of `family`, and the one that stands for its processor.
fn and_processor(family: EventFamily) -> Vec<PmuModel> {
    let own = processors().into_iter();
    let own = own.filter(|model| model.events() == family);
    models_of(family).into_iter().chain(own).collect()
}

/// Whether a model has nothing to do with the name.
fn is_foreign(error: &EventError) -> bool {
    matches!(
        error,
        EventError::UnknownEvent { .. }
            | EventError::OtherModel { .. }
            | EventError::NotInModel { .. }
    )
}

/// Why no model takes the name.
fn most_telling(
    errors: Vec<(&PmuModel, EventError)>,
    name: &Name<'_>,
    names: &dyn NameTable,
) -> EventError {
    let unknown = |error: &EventError| matches!(error, EventError::UnknownEvent { .. });
    let several = errors.len() > 1 && name.table.is_none();
    let mut errors: Vec<EventError> = errors.into_iter().map(|(_, error)| error).collect();
    if several && errors.iter().all(unknown) {
        let events = usable(names).flat_map(|table| names.events(&table.name));
        let candidates = events.map(|event| event.name);
        return EventError::UnknownEvent {
            event: name.event.to_owned(),
            place: "the list".to_owned(),
            near: nearest(
                name.event,
                candidates.chain(generic::all_names().map(str::to_owned)),
            ),
        };
    }
    let own = errors.iter().position(|error| !is_foreign(error));
    errors.swap_remove(own.unwrap_or(0))
}

/// Event select and unit mask; none for a fixed counter.
fn fields(request: &CountRequest) -> Option<(u16, u8)> {
    match request.event {
        EventCode::Selected { select, umask, .. } => Some((select, umask)),
        _ => None,
    }
}

/// Intel's name of an event that has the same code on every processor with an
/// architectural PMU (SDM volume 3, "Pre-defined Architectural Performance Events").
fn architectural(request: &CountRequest) -> Option<&'static str> {
    let EventCode::Selected {
        family,
        select,
        umask,
    } = request.event
    else {
        return None;
    };
    if family.vendor() != Vendor::Intel {
        return None;
    }
    match (select, umask) {
        (0x3c, 0x00) => Some("UnHalted Core Cycles"),
        (0xc0, 0x00) => Some("Instruction Retired"),
        (0x3c, 0x01) => Some("UnHalted Reference Cycles"),
        (0x2e, 0x4f) => Some("LLC Reference"),
        (0x2e, 0x41) => Some("LLC Misses"),
        (0xc4, 0x00) => Some("Branch Instruction Retired"),
        (0xc5, 0x00) => Some("Branch Misses Retired"),
        (0xa4, 0x01) => Some("Topdown Slots"),
        _ => None,
    }
}

/// The words of a request's modifiers, as perf names them.
fn modifiers(request: &CountRequest) -> Vec<String> {
    let flags = [
        (request.usr, "u"),
        (request.os, "k"),
        (request.edge, "edge"),
        (request.invert, "inv"),
        (request.pin, "pc"),
        (request.any_thread, "any"),
        (request.guest_only, "guest-only"),
        (request.host_only, "host-only"),
    ];
    let on = flags.into_iter().filter(|(on, _)| *on);
    let mut words: Vec<String> = on.map(|(_, word)| word.to_owned()).collect();
    if request.cmask != 0 {
        words.push(format!("cmask={}", request.cmask));
    }
    words
}

/// `:u` or `:k` where a request counts at some rings alone.
fn rings(request: &CountRequest) -> &'static str {
    match (request.os, request.usr) {
        (false, true) => ":u",
        (true, false) => ":k",
        _ => "",
    }
}

fn generic_names(request: &CountRequest, model: &PmuModel) -> Vec<EventName> {
    let plain = CountRequest::plain(request.event, request.os, request.usr);
    if plain != *request {
        // A generic name takes no further modifier.
        return Vec::new();
    }
    generic::names_of(request.event, model)
        .map(|name| EventName {
            name: format!("{name}{}", rings(request)),
            tables: Vec::new(),
        })
        .collect()
}

/// Names of `tables` that stand for `request` with `model`; one that several
/// tables have stands once.
fn table_names<'a>(
    request: &CountRequest,
    model: &PmuModel,
    tables: impl Iterator<Item = &'a PmuTable>,
    names: &dyn NameTable,
) -> Vec<EventName> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for table in tables {
        for event in names.events(&table.name) {
            let means = Means {
                request,
                model,
                table: &table.name,
                names,
            };
            for name in means.names_of(&event) {
                found.entry(name).or_default().push(table.name.clone());
            }
        }
    }
    let entry = |(name, tables)| EventName { name, tables };
    found.into_iter().map(entry).collect()
}

/// Finds the names of a table that mean a request.
struct Means<'a> {
    request: &'a CountRequest,
    model: &'a PmuModel,
    table: &'a str,
    names: &'a dyn NameTable,
}

impl Means<'_> {
    fn resolve(&self, rest: &str) -> Option<CountRequest> {
        let full = format!("{}::{rest}", self.table);
        // `resolve` would read the whole table to explain each failure.
        let encoding = self.names.encode(&full).ok()?;
        Some(
            take(&Name::split(&full), encoding, self.model)
                .ok()?
                .request,
        )
    }

    /// The event with each unit mask that alone makes the code; else with as few
    /// as make it together; else without any.
    fn names_of(&self, event: &NamedEvent) -> Vec<String> {
        let all = event.attributes.iter();
        let masks = all.filter(|one| one.kind == AttributeKind::UnitMask);
        let masks: Vec<(String, CountRequest)> = masks
            .map(|mask| format!(":{}", mask.name))
            .filter_map(|mask| Some((self.resolve(&format!("{}{mask}", event.name))?, mask)))
            .map(|(request, mask)| (mask, request))
            .collect();
        let wanted = self.request.event;
        let alone = masks.iter().filter(|(_, request)| request.event == wanted);
        let name = |(mask, request): &(String, CountRequest)| {
            self.complete(&format!("{}{mask}", event.name), request)
        };
        let alone: Vec<String> = alone.filter_map(name).collect();
        if !alone.is_empty() {
            return alone;
        }
        let together = self.together(event, masks);
        let plain = || self.complete(&event.name, &self.resolve(&event.name)?);
        together.or_else(plain).into_iter().collect()
    }

    /// Unit masks whose bits together are those of the code, the widest first.
    fn together(
        &self,
        event: &NamedEvent,
        mut masks: Vec<(String, CountRequest)>,
    ) -> Option<String> {
        let (wanted_select, wanted) = fields(self.request)?;
        let width = |request: &_| fields(request).map_or(0, |(_, umask)| umask.count_ones());
        masks.sort_by_key(|(_, request)| Reverse(width(request)));
        let mut name = event.name.clone();
        let mut made = 0;
        for (mask, request) in &masks {
            let Some((select, umask)) = fields(request) else {
                continue;
            };
            let is_part = select == wanted_select && umask & !wanted == 0;
            if is_part && umask & !made != 0 {
                made |= umask;
                name.push_str(mask);
            }
        }
        let request = self
            .resolve(&name)
            .filter(|_| made == wanted && made != 0)?;
        self.complete(&name, &request)
    }

    /// `name`, which means `has`, with the modifiers that are missing.
    fn complete(&self, name: &str, has: &CountRequest) -> Option<String> {
        let wanted = self.request;
        let mut name = name.to_owned();
        let flags = [
            (has.edge, wanted.edge, ":e"),
            (has.invert, wanted.invert, ":i"),
            (has.any_thread, wanted.any_thread, ":t"),
            (has.guest_only, wanted.guest_only, ":g"),
            (has.host_only, wanted.host_only, ":h"),
        ];
        for (has, wanted, modifier) in flags {
            if wanted && !has {
                name.push_str(modifier);
            }
        }
        if wanted.cmask != has.cmask {
            name.push_str(&format!(":c={}", wanted.cmask));
        }
        name.push_str(rings(wanted));
        (self.resolve(&name)? == *wanted).then_some(name)
    }
}
