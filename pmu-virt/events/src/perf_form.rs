//! What perf writes with slashes: `cpu/event=0x3c,umask=0,name=CYCLES/u`, `cycles/period=1000/`.
//!
//! Fields and their bits: `/sys/bus/event_source/devices/cpu/format` of Linux, for Intel and
//! AMD; other terms: perf-list(1) and `parse-events.l` of perf.

use pmu_model::{PmuModel, Vendor};

use super::code::raw_code;
use super::error::EventError;
use super::modifiers;

/// A field of a code, with its bits: a value's lower ones and, on AMD, the upper ones of an
/// event select.
struct Field {
    name: &'static str,
    shift: u32,
    bits: u32,
    /// It is 1 where nothing is said.
    flag: bool,
}

const FIELDS: [Field; 8] = [
    field("event", 0, 12, false),
    field("umask", 8, 8, false),
    field("edge", 18, 1, true),
    field("pc", 19, 1, true),
    field("any", 21, 1, true),
    field("inv", 23, 1, true),
    field("cmask", 24, 8, false),
    field("config", 0, 64, false),
];

const fn field(name: &'static str, shift: u32, bits: u32, flag: bool) -> Field {
    Field {
        name,
        shift,
        bits,
        flag,
    }
}

/// The PMU of the processor's cores, as perf calls it.
const CORES: [&str; 2] = ["cpu", "cpu_core"];

/// Those of what perf counts without one, by its name.
const SOFTWARE: [&str; 2] = ["software", "tool"];

/// A name with slashes in its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Form<'a> {
    /// What is before the first slash: a PMU or an event; none for the PMU of the cores.
    pub(super) head: Option<&'a str>,
    /// Between the slashes.
    terms: Vec<&'a str>,
    /// Letters behind them.
    pub(super) modifiers: &'a str,
}

/// What stands between the slashes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Inside<'a> {
    /// Bits of an event select.
    pub(super) code: Option<u64>,
    pub(super) event: Option<&'a str>,
    /// Why nobody counts it, where perf would.
    pub(super) elsewhere: Option<&'static str>,
}

/// What a name says beside what is to be counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extras {
    /// What to call it (`name=`).
    pub label: Option<String>,
    /// How far apart samples of it are (`period=`, `freq=`); a count has no use for it.
    pub sampling: Option<EventSampling>,
    /// How near to the event a sample has to be: the number of letters `p`.
    pub precise: u8,
    /// A sample is to have the counts of the event's group (`S`).
    pub reads: bool,
    /// The event's group may be broken up where it does not fit (`W`).
    pub weak: bool,
    /// The rings are named in which it counts (`u`, `k`), be it both.
    pub rings: bool,
}

/// How far apart samples of an event are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventSampling {
    /// So many events.
    Period(u64),
    /// So many samples a second.
    Frequency(u64),
}

/// What the event's name `text` says beside what is to be counted. What is wrong with it
/// `resolve` says.
#[must_use]
pub fn extras(text: &str) -> Extras {
    let text = text.trim();
    let mut found = Extras::default();
    let mut lists: Vec<&str> = match split(text) {
        Some(Ok(form)) => {
            for term in &form.terms {
                match term.split_once('=') {
                    Some(("name", label)) => found.label = Some(unquoted(label).to_owned()),
                    Some((name @ ("period" | "freq"), value)) => {
                        found.sampling = sampling(name, value).ok();
                    }
                    _ => {}
                }
            }
            vec![form.modifiers.trim_start_matches(':')]
        }
        Some(Err(_)) => Vec::new(),
        // Behind the event of a table are libpfm's words, where `S` may be a unit mask.
        None if text.contains("::") => {
            let last = text.rsplit(':').take(1);
            last.filter(|list| modifiers::are_of_tables(list)).collect()
        }
        None => text.split(':').skip(1).collect(),
    };
    lists.retain(|list| modifiers::are_letters(list));
    let named = match split(text) {
        Some(Ok(form)) => form.terms.iter().any(|term| names_rings(term)),
        Some(Err(_)) => false,
        None => names_rings(text),
    };
    let letters = modifiers::parse(text, &lists).unwrap_or_default();
    Extras {
        precise: letters.precise,
        reads: letters.reads,
        weak: letters.weak,
        rings: named || letters.user || letters.kernel,
        ..found
    }
}

/// Whether libpfm's own words for rings are behind an event.
fn names_rings(event: &str) -> bool {
    let ring = |word: &str| ["u", "k"].iter().any(|it| it.eq_ignore_ascii_case(word));
    !event.contains('=') && event.split([':', '.']).skip(1).any(ring)
}

/// The event in `text` without fields and letters: how it is called where no PMU counts it.
#[must_use]
pub fn bare_name(text: &str) -> &str {
    let text = text.trim();
    match split(text) {
        Some(Ok(form)) => form.head.unwrap_or(text),
        Some(Err(_)) => text,
        None if text.contains("::") => text,
        None => text.split(':').next().unwrap_or(text),
    }
}

/// Whether `text`, the name of what no PMU counts, wants one ring of it alone.
///
/// # Errors
/// What stands behind its [bare name](bare_name) is wrong.
pub fn wants_one_ring(text: &str, model: &PmuModel) -> Result<bool, EventError> {
    let text = text.trim();
    let lists: Vec<&str> = match split(text) {
        Some(form) => {
            let form = form?;
            let inside = form.inside(text, model)?;
            if inside.code.is_some() || inside.elsewhere.is_some() {
                let event = form.head.unwrap_or(text);
                let why = format!("'{event}' is no event of a counter, which has no fields");
                return Err(wrong(text, why));
            }
            let list = Some(form.modifiers).filter(|list| !list.is_empty());
            list.into_iter().collect()
        }
        None => text.split(':').skip(1).collect(),
    };
    let letters = modifiers::parse(text, &lists)?;
    Ok(letters.user != letters.kernel)
}

/// Whether `text` is a code in perf's words.
pub(super) fn is_code(text: &str) -> bool {
    matches!(split(text), Some(Ok(form)) if form.head.is_none())
        || CORES.iter().any(|it| {
            let behind = text.strip_prefix(it);
            behind.is_some_and(|behind| behind.starts_with('/'))
        })
}

/// The parts of `text`, and `None` if it has no slash that parts it: one of `mem:` is the
/// length of a breakpoint.
pub(super) fn split(text: &str) -> Option<Result<Form<'_>, EventError>> {
    if text.starts_with("mem:") {
        return None;
    }
    let (head, rest) = text.split_once('/')?;
    let Some(end) = end_of_terms(rest) else {
        return Some(Err(wrong(text, "there is no second '/'".to_owned())));
    };
    let (inside, behind) = rest.split_at(end);
    let modifiers = behind.strip_prefix('/').unwrap_or(behind);
    Some(Ok(Form {
        head: Some(head).filter(|head| !CORES.contains(head)),
        terms: terms(inside),
        modifiers: modifiers.strip_prefix(':').unwrap_or(modifiers),
    }))
}

/// Where the first `/` is that no quotes hold.
fn end_of_terms(text: &str) -> Option<usize> {
    let mut quoted = false;
    text.find(|letter| {
        quoted ^= letter == '\'';
        letter == '/' && !quoted
    })
}

/// What stands between commas that no quotes hold.
fn terms(inside: &str) -> Vec<&str> {
    if inside.is_empty() {
        return Vec::new();
    }
    let mut quoted = false;
    let apart = |letter| {
        quoted ^= letter == '\'';
        letter == ',' && !quoted
    };
    inside.split(apart).map(str::trim).collect()
}

fn unquoted(text: &str) -> &str {
    let inner = text.strip_prefix('\'').and_then(|it| it.strip_suffix('\''));
    inner.unwrap_or(text)
}

pub(super) fn wrong(name: &str, why: String) -> EventError {
    EventError::PerfForm {
        name: name.to_owned(),
        why,
    }
}

impl<'a> Form<'a> {
    /// An event is named between the slashes.
    pub(super) fn names_inside(&self) -> bool {
        self.head.is_none_or(|head| SOFTWARE.contains(&head))
    }

    /// What `model` is asked for; `whole` is all of the name.
    pub(super) fn inside(&self, whole: &str, model: &PmuModel) -> Result<Inside<'a>, EventError> {
        let mut found = Inside::default();
        let mut seen: Vec<&str> = Vec::new();
        for term in self.terms.iter().copied() {
            let (name, value) = match term.split_once('=') {
                Some((name, value)) => (name.trim_end(), Some(value.trim_start())),
                None => (term, None),
            };
            if seen.contains(&name) {
                return Err(wrong(whole, format!("{name} is there twice")));
            }
            seen.push(name);
            self.take(name, value, model, &mut found)
                .map_err(|why| wrong(whole, why))?;
        }
        Ok(found)
    }

    fn take(
        &self,
        name: &'a str,
        value: Option<&str>,
        model: &PmuModel,
        found: &mut Inside<'a>,
    ) -> Result<(), String> {
        if name.is_empty() {
            return Err("there is nothing before or behind a comma".to_owned());
        }
        if let Some(field) = FIELDS.iter().find(|it| it.name.eq_ignore_ascii_case(name)) {
            *found.code.get_or_insert(0) |= field.bits_of(value, model)?;
            return Ok(());
        }
        match (name, value) {
            ("name", Some(label)) if !unquoted(label).is_empty() => Ok(()),
            ("period" | "freq", Some(value)) => sampling(name, value).map(|_| ()),
            ("name" | "period" | "freq", _) => Err(format!("{name}= has no value")),
            _ => {
                if let Some(why) = elsewhere(name) {
                    found.elsewhere = Some(why);
                    return Ok(());
                }
                if is_of_perf_alone(name) {
                    return Err(format!(
                        "{name} is for perf alone; what umpire record and stat have of it are \
                         options"
                    ));
                }
                if let Ok(Some(code)) = raw_code(name)
                    && value.is_none()
                {
                    *found.code.get_or_insert(0) |= code;
                    return Ok(());
                }
                if value.is_none() && self.names_inside() && found.event.is_none() {
                    found.event = Some(name);
                    return Ok(());
                }
                Err(format!(
                    "'{name}' is no field: there are event, umask, edge, any, inv, cmask, pc and \
                     config, name, period and freq, and one name of an event"
                ))
            }
        }
    }
}

impl Field {
    /// The bits that `value` stands for.
    fn bits_of(&self, value: Option<&str>, model: &PmuModel) -> Result<u64, String> {
        let name = self.name;
        let value = match value {
            Some(value) => number(value)?,
            None if self.flag => 1,
            None => return Err(format!("{name} has no value, as in {name}=0x1")),
        };
        let bits = match (name, model.vendor()) {
            ("event", Vendor::Intel) => 8,
            _ => self.bits,
        };
        if value > u64::MAX >> (64 - bits) {
            return Err(format!("{name}={value:#x} has more than {bits} bits"));
        }
        Ok(match name {
            "event" => value & 0xff | (value >> 8) << 32,
            _ => value << self.shift,
        })
    }
}

/// A number as perf and others write it, in hexadecimal of any case or decimal.
fn number(text: &str) -> Result<u64, String> {
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    // What takes a sign is no number of a register.
    let parsed = match digits {
        _ if text.contains(['+', '-']) => None,
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    parsed.ok_or_else(|| format!("'{text}' is no number"))
}

fn sampling(name: &str, value: &str) -> Result<EventSampling, String> {
    match (number(value)?, name) {
        (0, _) => Err(format!("{name}=0 is none")),
        (value, "freq") => Ok(EventSampling::Frequency(value)),
        (value, _) => Ok(EventSampling::Period(value)),
    }
}

/// Why nobody counts an event with a term of perf's.
fn elsewhere(name: &str) -> Option<&'static str> {
    match name {
        "config1" | "config2" | "config3" | "offcore_rsp" | "ldlat" | "frontend" | "snoop_rsp" => {
            Some(
                "has a field of a register outside of the counters (config1, ldlat, offcore_rsp \
                 and their like), which no PMU model here has",
            )
        }
        "in_tx" | "in_tx_cp" => {
            Some("asks for transactions, which no event select here can ask for")
        }
        _ => None,
    }
}

/// Whether a term of perf's is about how perf samples, and not about the event.
fn is_of_perf_alone(name: &str) -> bool {
    const TERMS: [&str; 15] = [
        "branch_type",
        "time",
        "call-graph",
        "stack-size",
        "max-stack",
        "nr",
        "inherit",
        "no-inherit",
        "overwrite",
        "no-overwrite",
        "percore",
        "aux-output",
        "aux-action",
        "aux-sample-size",
        "metric-id",
    ];
    TERMS.contains(&name)
}
