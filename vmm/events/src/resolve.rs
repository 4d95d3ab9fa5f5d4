//! From the name of an event to what a counter of a PMU model is asked to do.

use pmu_model::{CountRequest, EventFamily, PmuModel, Vendor};

use super::code;
use super::error::EventError;
use super::explain::{Name, explain};
use super::families::{
    all_models, family_of, label, means_another, model_names, processors, processors_of, reads,
};
use super::generic::{self, Generic};
use super::perf_form::{self, Inside};
use super::suggest::nearest;
use super::table::{EncodeError, Encoding, NameTable, PmuTable};
use super::text::all_of;

/// The longest name in characters. libpfm's longest with every unit mask is
/// shorter.
const LONGEST: usize = 512;

/// An event that was found, for one PMU model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedRequest {
    /// As it was asked for.
    pub name: String,
    /// The name with every unit mask and modifier written out, where it is from
    /// a table.
    pub full_name: Option<String>,
    /// The code: as given, from the table, or as libpfm would print a generic
    /// event's. Not always what is to be written to a register.
    pub code: u64,
    /// What a counter is asked to do: enabled, without an interrupt.
    pub request: CountRequest,
}

/// The request that the event name `text` stands for in a guest with `model`.
///
/// Taken are generic names (`cycles`, `cycles:u`), raw codes (`r5300c0`, `0x5300c0`), codes in
/// perf's words (`cpu/event=0x3c,umask=0/u`), and
/// names from the tables of `names`: `skl::INST_RETIRED:ANY_P:u`, or without a
/// table where all tables of the model agree on the meaning.
///
/// # Errors
/// Why it stands for none, with what would be right.
pub fn resolve(
    text: &str,
    model: &PmuModel,
    names: &dyn NameTable,
) -> Result<NamedRequest, EventError> {
    let text = text.trim();
    let bad = |c: char| c.is_whitespace() || c.is_control();
    if text.is_empty() || text.chars().count() > LONGEST || text.contains(bad) {
        let shown: String = text.chars().take(40).collect();
        return Err(EventError::NotAName(shown));
    }
    if let Some(plain) = perf_form::without_modifiers(text)? {
        let found = resolve(&plain, model, names)?;
        return Ok(NamedRequest {
            name: text.to_owned(),
            ..found
        });
    }
    if let Some((inside, modifiers)) = perf_form::split(text, model)? {
        let name = Name {
            whole: text,
            table: None,
            event: text,
            attributes: Some(modifiers)
                .into_iter()
                .filter(|it| !it.is_empty())
                .collect(),
        };
        return match inside {
            Inside::Code(code) => from_raw(&name, code, model),
            Inside::Generic(generic) => from_generic(&name, generic, model),
        };
    }
    let name = Name::split(text);
    if name.table.is_none() {
        if let Some(code) = raw_code(name.event)? {
            return from_raw(&name, code, model);
        }
        if let Some(generic) = generic::find(name.event) {
            return from_generic(&name, generic, model);
        }
    }
    if let Some(library) = names.missing() {
        return Err(EventError::NoTables {
            name: text.to_owned(),
            near: nearest(name.event, generic::all_names()),
            library: library.clone(),
        });
    }
    match name.table {
        Some(table) => from_table(&name, find_table(table, names)?, model, names),
        None => from_any_table(&name, model, names),
    }
}

/// The models that can have the event, where the name says so, with the event codes of the
/// table's processor; none for generic names, raw codes and names without a table.
///
/// # Errors
/// The table that the name begins with is unknown or no model's.
pub fn models_for(text: &str, names: &dyn NameTable) -> Result<Option<Vec<PmuModel>>, EventError> {
    let name = Name::split(text.trim());
    let Some(table) = name.table else {
        return Ok(None);
    };
    if names.missing().is_some() {
        return Ok(None);
    }
    let family = usable(&name, find_table(table, names)?)?;
    Ok(Some(processors_of(family)))
}

/// `r` or `0x`, and hexadecimal digits; none if it is something else.
pub(super) fn raw_code(text: &str) -> Result<Option<u64>, EventError> {
    let Some(digits) = text.strip_prefix('r').or_else(|| text.strip_prefix("0x")) else {
        return Ok(None);
    };
    if digits.is_empty() || !digits.chars().all(|digit| digit.is_ascii_hexdigit()) {
        return Ok(None);
    }
    match u64::from_str_radix(digits, 16) {
        Ok(code) => Ok(Some(code)),
        Err(_) => Err(EventError::RawTooLong(text.to_owned())),
    }
}

fn from_raw(name: &Name<'_>, code: u64, model: &PmuModel) -> Result<NamedRequest, EventError> {
    let mut request = code::request(name.whole, code, model)?;
    set_rings(name, &mut request)?;
    Ok(NamedRequest {
        name: name.whole.to_owned(),
        full_name: None,
        code,
        request,
    })
}

fn from_generic(
    name: &Name<'_>,
    generic: &Generic,
    model: &PmuModel,
) -> Result<NamedRequest, EventError> {
    let Some(mut request) = generic.request(model) else {
        return Err(not_in_model(generic, model));
    };
    set_rings(name, &mut request)?;
    Ok(NamedRequest {
        name: name.whole.to_owned(),
        full_name: None,
        code: code::printed(&request),
        request,
    })
}

fn not_in_model(generic: &Generic, model: &PmuModel) -> EventError {
    let has = |other: &&PmuModel| generic.request(other).is_some();
    let (models, processors) = (all_models(), processors());
    let mut having: Vec<&str> = models.iter().filter(has).map(label).collect();
    // A code that every model of the vendor has needs no processor.
    if !having.contains(&PmuModel::default_for(Vendor::Intel).name()) {
        having.extend(processors.iter().filter(has).map(label));
    }
    EventError::NotInModel {
        event: generic.event.to_string(),
        model: label(model),
        having: match having.as_slice() {
            [] => "no model's event select means it".to_owned(),
            [only] => format!("{only} has it"),
            several => format!("{} have it", all_of(several)),
        },
    }
}

/// `:u`, `:k`, `:uk`: count in these rings alone.
fn set_rings(name: &Name<'_>, request: &mut CountRequest) -> Result<(), EventError> {
    if name.attributes.is_empty() {
        return Ok(());
    }
    (request.usr, request.os) = (false, false);
    for attribute in &name.attributes {
        if attribute.is_empty() || !attribute.chars().all(|letter| "uk".contains(letter)) {
            return Err(EventError::PlainAttribute {
                name: name.whole.to_owned(),
                attribute: (*attribute).to_owned(),
            });
        }
        request.usr |= attribute.contains('u');
        request.os |= attribute.contains('k');
    }
    Ok(())
}

fn find_table<'a>(name: &str, names: &'a dyn NameTable) -> Result<&'a PmuTable, EventError> {
    let tables = names.tables();
    let found = tables
        .iter()
        .find(|table| table.name.eq_ignore_ascii_case(name));
    found.ok_or_else(|| EventError::UnknownTable {
        table: name.to_owned(),
        near: nearest(
            name,
            tables
                .iter()
                .filter(|table| family_of(table).is_ok())
                .map(|table| &table.name),
        ),
    })
}

fn usable(name: &Name<'_>, table: &PmuTable) -> Result<EventFamily, EventError> {
    family_of(table).map_err(|why| EventError::UnusableTable {
        name: name.whole.to_owned(),
        table: table.name.clone(),
        why,
    })
}

fn from_table(
    name: &Name<'_>,
    table: &PmuTable,
    model: &PmuModel,
    names: &dyn NameTable,
) -> Result<NamedRequest, EventError> {
    let family = usable(name, table)?;
    let full = format!("{}::{}", table.name, name.rest());
    match names.encode(&full) {
        Ok(encoding) if reads(model, table, family) => take(name, encoding, model),
        Ok(_) => Err(EventError::OtherModel {
            name: full,
            models: model_names(family, model),
            model: label(model),
        }),
        Err(error) => Err(explain(name, table, &error, names)),
    }
}

/// A name without a table: every table of the model is asked.
fn from_any_table(
    name: &Name<'_>,
    model: &PmuModel,
    names: &dyn NameTable,
) -> Result<NamedRequest, EventError> {
    let (own, foreign): (Vec<_>, Vec<_>) = names
        .tables()
        .iter()
        .filter_map(|table| Some((table, family_of(table).ok()?)))
        .partition(|(table, family)| reads(model, table, *family));
    let ask = |table: &PmuTable| names.encode(&format!("{}::{}", table.name, name.rest()));
    let mut found: Option<(&PmuTable, Encoding)> = None;
    let mut failed = None;
    for (table, _) in own.iter().copied() {
        match (ask(table), &found) {
            (Ok(encoding), None) => found = Some((table, encoding)),
            (Ok(other), Some((first, one))) if other.codes != one.codes => {
                return Err(EventError::Ambiguous {
                    name: name.whole.to_owned(),
                    first: shown(first, name, one),
                    second: shown(table, name, &other),
                });
            }
            (Ok(_), Some(_)) | (Err(EncodeError::Unknown), _) => {}
            (Err(error), _) => failed = failed.or(Some((table, error))),
        }
    }
    if let Some((_, encoding)) = found {
        return take(name, encoding, model);
    }
    if let Some((table, error)) = failed {
        return Err(explain(name, table, &error, names));
    }
    if let Some((table, family)) = foreign.into_iter().find(|(table, _)| ask(table).is_ok()) {
        return Err(EventError::OtherModel {
            name: format!("{}::{}", table.name, name.rest()),
            models: model_names(family, model),
            model: label(model),
        });
    }
    let events = own.iter().flat_map(|(table, _)| names.events(&table.name));
    let candidates = events
        .map(|event| event.name)
        .chain(generic::all_names().map(str::to_owned));
    Err(EventError::UnknownEvent {
        event: name.event.to_owned(),
        place: format!("the PMU model {}", model.name()),
        near: nearest(name.event, candidates),
    })
}

fn shown(table: &PmuTable, name: &Name<'_>, encoding: &Encoding) -> String {
    let code = encoding.codes.first().copied().unwrap_or(0);
    format!("{}::{} (r{code:x})", table.name, name.rest())
}

/// The request for what a table says.
pub(super) fn take(
    name: &Name<'_>,
    encoding: Encoding,
    model: &PmuModel,
) -> Result<NamedRequest, EventError> {
    let full_name = encoding.full_name;
    let &[code] = encoding.codes.as_slice() else {
        return Err(EventError::FurtherRegister(name.whole.to_owned()));
    };
    if model.vendor() == Vendor::Intel && !selects(&full_name, code) {
        return Err(EventError::SelectsNothing {
            name: name.whole.to_owned(),
            code,
        });
    }
    let request = code::request(name.whole, code, model)?;
    let table = Name::split(&full_name).table.unwrap_or_default();
    if means_another(table, code) {
        return Err(EventError::OtherMeaning {
            name: name.whole.to_owned(),
            code,
            model: model.name(),
            means: request.event.to_string(),
        });
    }
    Ok(NamedRequest {
        name: name.whole.to_owned(),
        request,
        code,
        full_name: Some(full_name),
    })
}

/// Whether an Intel code selects an event, or stands for the fixed counter that
/// counts what the name says. Some entries of libpfm 4.13 have a code with event
/// select 0 by mistake (`glm::CPU_CLK_UNHALTED:REF`, `icl::TOPDOWN` but for
/// `SLOTS`); taken at its word, such a code would count something else.
fn selects(full_name: &str, code: u64) -> bool {
    const FIXED: [(u8, &str, &str); 7] = [
        (0, "INST_RETIRED", "ANY"),
        (0, "INST_RETIRED", "PREC_DIST"),
        (1, "CPU_CLK_UNHALTED", "CORE"),
        (1, "CPU_CLK_UNHALTED", "THREAD"),
        (2, "CPU_CLK_UNHALTED", "REF_TSC"),
        (2, "UNHALTED_REFERENCE_CYCLES", ""),
        (3, "TOPDOWN", "SLOTS"),
    ];
    if code.to_le_bytes()[0] != 0 {
        return true;
    }
    let name = Name::split(full_name);
    let unit_mask = name.attributes.iter().find(|word| !word.contains('='));
    let unit_mask = unit_mask.copied().unwrap_or_default();
    FIXED.iter().any(|(counter, event, mask)| {
        code::pseudo_fixed(code) == Some(*counter) && *event == name.event && *mask == unit_mask
    })
}
