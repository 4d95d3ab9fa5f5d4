//! The parts of an event's name, and what is wrong with them.

use super::error::EventError;
use super::suggest::{nearest, respelled};
use super::table::{Attribute, AttributeKind, EncodeError, NameTable, NamedEvent, PmuTable};
use super::text::all_of;

/// A name in its parts.
pub(super) struct Name<'a> {
    pub(super) whole: &'a str,
    pub(super) table: Option<&'a str>,
    pub(super) event: &'a str,
    /// What follows the event, without the separators.
    pub(super) attributes: Vec<&'a str>,
}

impl<'a> Name<'a> {
    pub(super) fn split(whole: &'a str) -> Self {
        let (table, rest) = match whole.split_once("::") {
            Some((table, rest)) => (Some(table), rest),
            None => (None, whole),
        };
        // libpfm takes a dot as well.
        let mut parts = rest.split([':', '.']);
        Self {
            whole,
            table,
            event: parts.next().unwrap_or_default(),
            attributes: parts.collect(),
        }
    }

    /// The part behind the table.
    pub(super) fn rest(&self) -> &'a str {
        self.whole
            .split_once("::")
            .map_or(self.whole, |(_, rest)| rest)
    }
}

/// Why `table` has no code for the name.
pub(super) fn explain(
    name: &Name<'_>,
    table: &PmuTable,
    error: &EncodeError,
    names: &dyn NameTable,
) -> EventError {
    let events = names.events(&table.name);
    let event = events
        .iter()
        .find(|event| event.name.eq_ignore_ascii_case(name.event));
    match (error, event) {
        (EncodeError::Other(reason), _) => EventError::Library {
            name: name.whole.to_owned(),
            reason: reason.clone(),
        },
        (_, None) => EventError::UnknownEvent {
            event: name.event.to_owned(),
            place: format!("the table {}", table.name),
            near: match respelled(name.rest(), &events) {
                Some(same) => vec![same],
                None => nearest(name.event, events.iter().map(|event| &event.name)),
            },
        },
        (EncodeError::UnitMask, Some(event)) if !names_unit_mask(name, event) => {
            let unit_masks = event.attributes.iter();
            let mut unit_masks = unit_masks.filter(|one| one.kind == AttributeKind::UnitMask);
            EventError::NeedsUnitMask {
                event: format!("{}::{}", table.name, event.name),
                example: unit_masks
                    .next()
                    .map(|one| one.name.clone())
                    .unwrap_or_default(),
                known: known(event),
            }
        }
        (_, Some(event)) => attribute_error(name, table, event),
    }
}

fn attribute_error(name: &Name<'_>, table: &PmuTable, event: &NamedEvent) -> EventError {
    let full = format!("{}::{}", table.name, event.name);
    match name.attributes.iter().find(|word| !is_known(word, event)) {
        Some(wrong) => EventError::Attribute {
            event: full,
            attribute: (*wrong).to_owned(),
            near: nearest(wrong, event.attributes.iter().map(|one| &one.name)),
            known: known(event),
        },
        None => EventError::AttributeSet {
            name: name.whole.to_owned(),
            event: full,
            known: known(event),
        },
    }
}

/// Whether the event has the attribute, whatever its value; a number is a unit
/// mask in figures.
fn is_known(word: &str, event: &NamedEvent) -> bool {
    let word = word.split('=').next().unwrap_or_default();
    let is = |name: &str| name.eq_ignore_ascii_case(word);
    word.starts_with(|c: char| c.is_ascii_digit()) && word.parse::<f64>().is_ok()
        || word.starts_with("0x")
        || word.starts_with("0X")
        || event.attributes.iter().any(|one| is(&one.name))
}

fn names_unit_mask(name: &Name<'_>, event: &NamedEvent) -> bool {
    name.attributes.iter().any(|word| {
        event
            .attributes
            .iter()
            .any(|one| one.kind == AttributeKind::UnitMask && one.name.eq_ignore_ascii_case(word))
            || !is_known(word, event)
    })
}

/// The attributes of an event, for messages.
fn known(event: &NamedEvent) -> String {
    const MOST: usize = 12;
    let mut words: Vec<String> = event.attributes.iter().map(Attribute::spelled).collect();
    if words.len() > MOST + 1 {
        let more = words.len() - MOST;
        words.truncate(MOST);
        words.push(format!("{more} more"));
    }
    match words.as_slice() {
        [] => "none".to_owned(),
        words => all_of(words),
    }
}
