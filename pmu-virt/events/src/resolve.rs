//! From the name of an event to what a counter of a PMU model is asked to do.

use pmu_model::{CountRequest, EventCode, EventFamily, PmuModel, Vendor};

use super::code::{self, RINGS, raw_code};
use super::error::EventError;
use super::explain::{Name, explain};
use super::families::{
    all_models, family_of, label, means_another, model_names, processors, processors_of, reads,
};
use super::generic::{self, Generic};
use super::modifiers;
use super::perf_form::{self, Form};
use super::perf_names::PerfName;
use super::suggest::{nearest, respelled};
use super::table::{EncodeError, Encoding, NameTable, NamedEvent, PmuTable};
use super::text::all_of;
use super::traced;
use super::uncounted::{self, Measured};

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
/// Taken are generic names (`cycles`, `cycles:u`), perf's names of cache events
/// (`L1-dcache-loads`), raw codes (`r5300c0`, `0x5300c0`), codes in perf's words
/// (`cpu/event=0x3c,umask=0/u`), and
/// names from the tables of `names`: `skl::INST_RETIRED:ANY_P:u`, or without a
/// table where all tables of the model agree on the meaning. What a name says beside that
/// is in its [`extras`](super::extras()).
///
/// # Errors
/// Why it stands for none, with what would be right. Of those that
/// [nobody counts](EventError::is_uncounted) perf says `<not supported>`.
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
    if let Some(form) = perf_form::split(text) {
        return from_form(text, &form?, model, names);
    }
    if let Some(why) = uncounted::traced(text) {
        return Err(uncounted_error(text, why, None));
    }
    let name = Name::split(text);
    if let Some(found) = from_plain(&name, model) {
        return found;
    }
    if let Some(plain) = without_modifiers(text)? {
        let found = resolve(&plain, model, names)?;
        return Ok(NamedRequest {
            name: text.to_owned(),
            ..found
        });
    }
    let found = from_tables(&name, model, names);
    if let Err(error) = &found
        && error.is_unknown()
        && let Some(why) = traced::may_be(text, !error.near().is_empty())
    {
        return Err(uncounted_error(text, why, None));
    }
    found
}

fn from_tables(
    name: &Name<'_>,
    model: &PmuModel,
    names: &dyn NameTable,
) -> Result<NamedRequest, EventError> {
    if let Some(library) = names.missing() {
        return Err(EventError::NoTables {
            name: name.whole.to_owned(),
            near: nearest(name.event, generic::all_names()),
            library: library.clone(),
        });
    }
    match name.table {
        Some(table) => from_table(name, find_table(table, names)?, model, names),
        None => from_any_table(name, model, names),
    }
}

/// The models that can have the event, where the name says so, with the event codes of the
/// table's processor; none for generic names, raw codes and names without a table.
///
/// # Errors
/// The table that the name begins with is unknown or no model's.
pub fn models_for(text: &str, names: &dyn NameTable) -> Result<Option<Vec<PmuModel>>, EventError> {
    let text = text.trim();
    let name = Name::split(text);
    let Some(table) = name.table.filter(|_| perf_form::split(text).is_none()) else {
        return Ok(None);
    };
    if names.missing().is_some() {
        return Ok(None);
    }
    let family = usable(&name, find_table(table, names)?)?;
    Ok(Some(processors_of(family)))
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
        modifiers::parse(name.whole, &name.attributes)?;
        let has = |other: &PmuModel| generic.request(other).is_some();
        return Err(not_in_model(generic.event.to_string(), model, &has));
    };
    set_rings(name, &mut request)?;
    Ok(NamedRequest {
        name: name.whole.to_owned(),
        full_name: None,
        code: code::printed(&request),
        request,
    })
}

/// What is said of an event of which `model` has no code: who `has` one.
fn not_in_model(event: String, model: &PmuModel, has: &dyn Fn(&PmuModel) -> bool) -> EventError {
    let (models, processors) = (all_models(), processors());
    let mut having: Vec<&str> = models.iter().filter(|it| has(it)).map(label).collect();
    // A code that every model of the vendor has needs no processor.
    if !having.contains(&PmuModel::default_for(Vendor::Intel).name()) {
        having.extend(processors.iter().filter(|it| has(it)).map(label));
    }
    EventError::NotInModel {
        event,
        model: label(model),
        having: match having.as_slice() {
            [] => "no model's event select means it".to_owned(),
            [only] => format!("{only} has it"),
            several => format!("{} have it", all_of(several)),
        },
    }
}

/// What the letters behind a name change: with rings among them, it is counted there alone.
fn set_rings(name: &Name<'_>, request: &mut CountRequest) -> Result<(), EventError> {
    let found = modifiers::parse(name.whole, &name.attributes)?;
    if found.user || found.kernel {
        (request.usr, request.os) = (found.user, found.kernel);
    }
    Ok(())
}

/// The name of a table without perf's modifiers that libpfm does not have, and `None` if it has
/// none of these. `e` and its like are libpfm's own there.
fn without_modifiers(text: &str) -> Result<Option<String>, EventError> {
    let Some((head, last)) = text.rsplit_once(':') else {
        return Ok(None);
    };
    if head.ends_with(':') || !modifiers::are_of_tables(last) {
        return Ok(None);
    }
    let found = modifiers::parse(text, &[last])?;
    let rings = [(found.user, ":u"), (found.kernel, ":k")];
    let rings = rings.iter().filter(|(on, _)| *on).map(|(_, word)| *word);
    Ok(Some(rings.fold(head.to_owned(), |name, ring| name + ring)))
}

fn uncounted_error(name: &str, why: &'static str, measured: Option<Measured>) -> EventError {
    EventError::Uncounted {
        name: name.to_owned(),
        why,
        measured,
    }
}

/// Whether `event`, without modifiers, means something without tables.
pub(super) fn is_plain(event: &str) -> bool {
    generic::find(event).is_some()
        || PerfName::find(event).is_some()
        || uncounted::find(event).is_some()
        || !matches!(raw_code(event), Ok(None))
}

/// What a name means that is in no table; none if it is none of these.
fn from_plain(name: &Name<'_>, model: &PmuModel) -> Option<Result<NamedRequest, EventError>> {
    if name.table.is_some() {
        return None;
    }
    let event = name.event;
    match raw_code(event) {
        Ok(None) => {}
        Ok(Some(code)) => return Some(from_raw(name, code, model)),
        Err(error) => return Some(Err(error)),
    }
    if let Some(generic) = generic::find(event) {
        return Some(from_generic(name, generic, model));
    }
    if let Some((why, measured)) = uncounted::find(event) {
        return Some(Err(refuse_uncounted(name, why, measured)));
    }
    Some(match PerfName::find(event)? {
        Ok(perfs) => from_perf_name(name, perfs, model),
        Err(why) => Err(EventError::CacheEvent {
            name: event.to_owned(),
            why,
        }),
    })
}

fn refuse_uncounted(name: &Name<'_>, why: &'static str, measured: Option<Measured>) -> EventError {
    match modifiers::parse(name.whole, &name.attributes) {
        Err(error) => error,
        Ok(found) if measured.is_some() && found.user != found.kernel => uncounted_error(
            name.whole,
            "a time, and the VMM does not measure that of one ring; leave u or k out",
            None,
        ),
        Ok(_) => uncounted_error(name.whole, why, measured),
    }
}

fn from_perf_name(
    name: &Name<'_>,
    perfs: PerfName,
    model: &PmuModel,
) -> Result<NamedRequest, EventError> {
    let Some(code) = perfs.code(model.events()) else {
        // A wrong letter is wrong with every model.
        modifiers::parse(name.whole, &name.attributes)?;
        let has = |other: &PmuModel| perfs.code(other.events()).is_some();
        return Err(not_in_model(perfs.name(), model, &has));
    };
    let named = from_raw(name, code, model)?;
    Ok(NamedRequest {
        code: code::printed(&named.request),
        ..named
    })
}

/// What a name with slashes stands for.
fn from_form(
    text: &str,
    form: &Form<'_>,
    model: &PmuModel,
    names: &dyn NameTable,
) -> Result<NamedRequest, EventError> {
    let head = form.head.filter(|_| !form.names_inside());
    if let Some(head) = head
        && !is_plain(head)
        && !head.contains("::")
    {
        return Err(match uncounted::foreign_pmu(head) {
            Some(why) => uncounted_error(text, why, None),
            None => perf_form::wrong(
                text,
                format!("'{head}' is neither an event nor a PMU that is known"),
            ),
        });
    }
    let inside = form.inside(text, model)?;
    let event = head.or(inside.event);
    let found = from_inside(text, form, event, inside.code, model, names)?;
    match inside.elsewhere {
        Some(why) => Err(uncounted_error(text, why, None)),
        None => Ok(found),
    }
}

/// What the event and the bits between slashes stand for together.
fn from_inside(
    text: &str,
    form: &Form<'_>,
    event: Option<&str>,
    code: Option<u64>,
    model: &PmuModel,
    names: &dyn NameTable,
) -> Result<NamedRequest, EventError> {
    let whole = |event| Name {
        whole: text,
        table: None,
        event,
        attributes: Some(form.modifiers)
            .into_iter()
            .filter(|it| !it.is_empty())
            .collect(),
    };
    match (event, code) {
        (None, None) => Err(perf_form::wrong(text, "it names no event".to_owned())),
        (None, Some(_)) if form.head.is_some() => Err(uncounted_error(
            text,
            "the kernel's that perf runs on: use perf in the guest",
            None,
        )),
        (None, Some(code)) => from_raw(&whole(text), code, model),
        (Some(event), None) => match from_plain(&whole(event), model) {
            Some(found) => found,
            None => {
                let rings = modifiers::parse(text, &whole(event).attributes)?;
                let found = resolve(event, model, names)?;
                let mut request = found.request;
                if rings.user || rings.kernel {
                    (request.usr, request.os) = (rings.user, rings.kernel);
                }
                Ok(NamedRequest {
                    name: text.to_owned(),
                    request,
                    ..found
                })
            }
        },
        (Some(event), Some(bits)) => {
            let code = programmable(event, model, names)?;
            from_raw(&whole(event), code | bits, model)
        }
    }
}

/// The event select of `event`, to which fields are added: a fixed counter has none.
fn programmable(event: &str, model: &PmuModel, names: &dyn NameTable) -> Result<u64, EventError> {
    let found = resolve(event, model, names)?.request;
    let selected = match found.event {
        EventCode::Fixed(_) => found
            .event
            .known()
            .and_then(|known| EventCode::of(model.events(), known)),
        _ => Some(found.event),
    };
    let plain = selected.map(|event| CountRequest { event, ..found });
    let code = plain.and_then(|request| request.encode());
    let code = code.ok_or_else(|| EventError::FixedModifier {
        name: event.to_owned(),
    })?;
    Ok(code & !RINGS)
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
    let events: Vec<NamedEvent> = events.collect();
    let near = match respelled(name.rest(), &events) {
        Some(same) => vec![same],
        None => {
            let candidates = events.into_iter().map(|event| event.name);
            let generic = generic::all_names().map(str::to_owned);
            nearest(name.event, candidates.chain(generic))
        }
    };
    Err(EventError::UnknownEvent {
        event: name.event.to_owned(),
        place: format!("the PMU model {}", model.name()),
        near,
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
