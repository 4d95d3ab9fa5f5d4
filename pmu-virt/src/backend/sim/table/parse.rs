//! Reads a table of rates; every complaint names its line.

use std::ops::Range;

use pmu_model::{Constraint, SlotIndex, SlotSet};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{Entry, RateTable};
use crate::backend::sim::curve::{Curve, Phase, mix};
use crate::backend::sim::error::{RateError, RateProblem};
use crate::backend::sim::names::{EventKey, nearest};

/// Counters where the table does not say: enough for several vCPUs.
const DEFAULT_COUNTERS: u64 = 64;
/// Events per microsecond, at most: far above what hardware does.
const MOST_RATE: u64 = 1_000_000;
/// Longest phase: 1000 seconds.
const MOST_US: u64 = 1_000_000_000;
const MOST_PHASES: usize = 1024;
const MILLION: u64 = 1_000_000;

const TOP_KEYS: [&str; 3] = ["counters", "seed", "event"];
const EVENT_KEYS: [&str; 8] = [
    "rate",
    "kernel",
    "user",
    "phases",
    "noise",
    "slots",
    "paired",
    "exclusive",
];
const PHASE_KEYS: [&str; 4] = ["us", "rate", "kernel", "user"];
/// What several counters may have to share.
const EXCLUSIVE: [&str; 3] = ["northbridge", "offcore", "shared-cache"];

type TextSpan = Range<usize>;
type Located<T> = Result<T, (TextSpan, RateProblem)>;
type Value<'a> = Spanned<DeValue<'a>>;

/// Rates given for one ring or both.
#[derive(Clone, Copy, Default)]
struct Rates {
    kernel: Option<u64>,
    user: Option<u64>,
}

pub(super) fn parse(text: &str, file: &str) -> Result<RateTable, RateError> {
    let located = match DeTable::parse(text) {
        Ok(table) => read(table.get_ref()),
        Err(error) => {
            let message = error.message().lines().collect::<Vec<_>>().join("; ");
            Err((error.span().unwrap_or_default(), RateProblem::Toml(message)))
        }
    };
    located.map_err(|(place, problem)| RateError {
        file: file.to_owned(),
        line: text
            .bytes()
            .take(place.start)
            .filter(|b| *b == b'\n')
            .count()
            + 1,
        problem,
    })
}

fn read(top: &DeTable<'_>) -> Located<RateTable> {
    only(top, TOP_KEYS)?;
    let most = u64::from(SlotSet::CAPACITY);
    let counters = match top.get("counters") {
        Some(value) => whole(value, "counters", 1..=most)?,
        None => DEFAULT_COUNTERS,
    };
    let capacity = usize::try_from(counters).unwrap_or(1);
    let seed = match top.get("seed") {
        Some(value) => whole(value, "seed", 0..=u64::MAX)?,
        None => 0,
    };
    let events = match top.get("event") {
        Some(value) => table(value, "event")?,
        None => return Err((0..0, RateProblem::Empty)),
    };
    let mut entries: Vec<Entry> = Vec::with_capacity(events.len());
    // In the order of the file, so that a complaint is about the later line.
    let mut events: Vec<_> = events.iter().collect();
    events.sort_by_key(|(name, _)| name.span().start);
    for (name, value) in events {
        let at = |problem| (name.span(), problem);
        let key = EventKey::parse(name.get_ref()).map_err(at)?;
        if entries.iter().any(|entry| entry.key == key) {
            let name = name.get_ref().to_string();
            return Err(at(RateProblem::Twice { name }));
        }
        let keys = table(value, "event")?;
        only(keys, EVENT_KEYS)?;
        entries.push(Entry {
            key,
            curve: curve(keys, &name.span(), seed ^ hash(name.get_ref()))?,
            constraint: constraint(keys, capacity)?,
        });
    }
    if entries.is_empty() {
        return Err((0..0, RateProblem::Empty));
    }
    Ok(RateTable { capacity, entries })
}

fn curve(keys: &DeTable<'_>, place: &TextSpan, seed: u64) -> Located<Curve> {
    let defaults = rates(keys, Rates::default())?;
    let phases = match keys.get("phases") {
        None => vec![phase(1, defaults, place)?],
        Some(value) => {
            let wrong = |wanted| {
                (
                    value.span(),
                    RateProblem::Type {
                        key: "phases",
                        wanted,
                    },
                )
            };
            let list = value.get_ref().as_array();
            let list = list.filter(|list| !list.is_empty() && list.len() <= MOST_PHASES);
            let list = list.ok_or_else(|| wrong("a list of 1 to 1024 tables"))?;
            let mut phases = Vec::with_capacity(list.len());
            for value in list.iter() {
                let keys = table(value, "phases")?;
                only(keys, PHASE_KEYS)?;
                let us = keys
                    .get("us")
                    .ok_or_else(|| wrong("a list of tables with `us`"))?;
                let us = whole(us, "us", 1..=MOST_US)?;
                phases.push(phase(us, rates(keys, defaults)?, &value.span())?);
            }
            phases
        }
    };
    let noise = match keys.get("noise") {
        Some(value) => millionths(value, "noise")?,
        None => 0,
    };
    // Time must not stand still or run backwards.
    let noise_ppm = u32::try_from(noise).ok().filter(|ppm| *ppm < 1_000_000);
    let place = keys.get("noise").map_or(0..0, Spanned::span);
    Ok(Curve {
        phases,
        noise_ppm: noise_ppm.ok_or((
            place,
            RateProblem::Type {
                key: "noise",
                wanted: "below 1: 0.05 varies the rate by up to 5 % either way",
            },
        ))?,
        seed,
    })
}

fn phase(us: u64, rates: Rates, place: &TextSpan) -> Located<Phase> {
    let missing = |ring| (place.clone(), RateProblem::NoRate { ring });
    Ok(Phase {
        us,
        kernel: rates.kernel.ok_or_else(|| missing("CPL 0"))?,
        user: rates.user.ok_or_else(|| missing("CPL 3"))?,
    })
}

fn rates(keys: &DeTable<'_>, defaults: Rates) -> Located<Rates> {
    let get = |key: &'static str| -> Located<Option<u64>> {
        let Some(value) = keys.get(key) else {
            return Ok(None);
        };
        let rate = millionths(value, key)?;
        if rate > MOST_RATE * MILLION {
            return Err((value.span(), range(key, 0, MOST_RATE)));
        }
        Ok(Some(rate))
    };
    let both = get("rate")?;
    Ok(Rates {
        kernel: get("kernel")?.or(both).or(defaults.kernel),
        user: get("user")?.or(both).or(defaults.user),
    })
}

fn constraint(keys: &DeTable<'_>, capacity: usize) -> Located<Constraint> {
    let mut constraint = Constraint::any(capacity);
    if let Some(value) = keys.get("slots") {
        let wanted = "a list of counter numbers, such as [0, 2]";
        let wrong = || {
            (
                value.span(),
                RateProblem::Type {
                    key: "slots",
                    wanted,
                },
            )
        };
        let list = value.get_ref().as_array().filter(|list| !list.is_empty());
        let last = u64::try_from(capacity - 1).unwrap_or(0);
        constraint.slots = SlotSet::EMPTY;
        for value in list.ok_or_else(wrong)?.iter() {
            let slot = whole(value, "slots", 0..=last)?;
            constraint
                .slots
                .insert(SlotIndex(u8::try_from(slot).unwrap_or(u8::MAX)));
        }
    }
    if let Some(value) = keys.get("paired") {
        let wanted = "true or false";
        constraint.paired = value.get_ref().as_bool().ok_or_else(|| {
            (
                value.span(),
                RateProblem::Type {
                    key: "paired",
                    wanted,
                },
            )
        })?;
        let free = constraint.slots;
        if constraint.paired && !free.iter().any(|slot| constraint.allows(slot, free)) {
            return Err((value.span(), RateProblem::NoPair));
        }
    }
    if let Some(value) = keys.get("exclusive") {
        let key = "exclusive";
        let wanted = "a word such as \"northbridge\"";
        let word = value.get_ref().as_str();
        let word = word.ok_or_else(|| (value.span(), RateProblem::Type { key, wanted }))?;
        let known = EXCLUSIVE.into_iter().find(|known| *known == word);
        constraint.exclusive = Some(known.ok_or_else(|| {
            let (word, nearest) = (word.to_owned(), nearest(word, EXCLUSIVE));
            (value.span(), RateProblem::Word { key, word, nearest })
        })?);
    }
    Ok(constraint)
}

/// Refuses keys that are none of `known`.
fn only<const N: usize>(keys: &DeTable<'_>, known: [&'static str; N]) -> Located<()> {
    match keys
        .keys()
        .find(|key| !known.contains(&key.get_ref().as_ref()))
    {
        None => Ok(()),
        Some(key) => Err((
            key.span(),
            RateProblem::Key {
                key: key.get_ref().to_string(),
                nearest: nearest(key.get_ref(), known),
            },
        )),
    }
}

fn table<'a, 'b>(value: &'b Value<'a>, key: &'static str) -> Located<&'b DeTable<'a>> {
    value.get_ref().as_table().ok_or_else(|| {
        let wanted = "a table";
        (value.span(), RateProblem::Type { key, wanted })
    })
}

fn range(key: &'static str, least: u64, most: u64) -> RateProblem {
    RateProblem::Range { key, least, most }
}

fn whole(
    value: &Value<'_>,
    key: &'static str,
    allowed: std::ops::RangeInclusive<u64>,
) -> Located<u64> {
    let wanted = "a whole number";
    let number = value.get_ref().as_integer();
    let number = number.ok_or_else(|| (value.span(), RateProblem::Type { key, wanted }))?;
    u64::from_str_radix(number.as_str(), number.radix())
        .ok()
        .filter(|number| allowed.contains(number))
        .ok_or_else(|| (value.span(), range(key, *allowed.start(), *allowed.end())))
}

/// A number of at least 0 in millionths, exact.
fn millionths(value: &Value<'_>, key: &'static str) -> Located<u64> {
    let wrong = |problem| (value.span(), problem);
    let text = match value.get_ref() {
        DeValue::Integer(number) if number.radix() == 10 => number.as_str(),
        DeValue::Float(number) => number.as_str(),
        _ => {
            let wanted = "a number";
            return Err(wrong(RateProblem::Type { key, wanted }));
        }
    };
    let text = text.replace('_', "");
    let text = text.strip_prefix('+').unwrap_or(&text);
    if text.starts_with('-') {
        return Err(wrong(range(key, 0, MOST_RATE)));
    }
    let (before, after) = text.split_once('.').unwrap_or((text, ""));
    let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(before) || !digits(after) || after.len() > 6 {
        return Err(wrong(RateProblem::Decimal { key }));
    }
    let fraction: u64 = format!("{after:0<6}").parse().unwrap_or(0);
    let number = before.parse::<u64>().ok();
    number
        .and_then(|number| number.checked_mul(MILLION)?.checked_add(fraction))
        .ok_or_else(|| wrong(range(key, 0, MOST_RATE)))
}

/// Tells the noise of one event from another's.
fn hash(name: &str) -> u64 {
    name.bytes()
        .fold(0, |hash, byte| mix(hash ^ u64::from(byte)))
}
