//! The entries of the list of events.

use serde::Serialize;

use super::counting::Use;

/// One entry of the list; a line of its JSON form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Entry {
    /// A generic name.
    Generic(GenericEntry),
    /// A quantity of the VMM, for tools on the host.
    Quantity(QuantityEntry),
    /// A table of named events.
    Table(TableEntry),
    /// An event of tables.
    Event(EventEntry),
    /// What a name or a code stands for.
    Code(CodeEntry),
    /// Why there are no tables.
    NoTables {
        /// The reason, and what to do.
        reason: String,
    },
}

/// A generic name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GenericEntry {
    pub name: &'static str,
    /// Other words for it.
    pub aliases: &'static [&'static str],
    /// What it counts.
    pub description: String,
    /// What the models do for it; a model that is not here has no such event.
    pub models: Vec<ModelsUse>,
}

/// A quantity of the VMM, which `umpire stat` reads as a virtual PMD.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QuantityEntry {
    /// Its name as an event.
    pub name: &'static str,
    pub description: &'static str,
    /// It is known at the moment of a sample alone.
    pub samples_only: bool,
}

/// What some models have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelsUse {
    pub models: Vec<&'static str>,
    /// How they count it.
    #[serde(flatten)]
    pub way: Use,
}

/// A table of named events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TableEntry {
    /// Its name, as in `TABLE::EVENT`.
    pub name: String,
    /// The processor.
    pub description: String,
    /// How many events it has.
    pub events: usize,
    /// The models whose guests can count them.
    pub models: Vec<&'static str>,
    /// It is the host's own.
    pub host: bool,
}

/// An event that is the same in some tables.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EventEntry {
    pub tables: Vec<String>,
    pub name: String,
    /// What it counts.
    pub description: String,
    /// The name that it is another word for.
    pub alias_of: Option<String>,
    /// How it is counted without further words; none if it needs a unit mask.
    #[serde(flatten)]
    pub meaning: Meaning,
    pub unit_masks: Vec<UnitMask>,
    /// What else can be added to the name, as it is spelled.
    pub modifiers: Vec<String>,
}

/// A unit mask of an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnitMask {
    pub name: String,
    /// What it counts.
    pub description: String,
    /// It is taken where none is named.
    pub default: bool,
    /// How the event is counted with it alone.
    #[serde(flatten)]
    pub meaning: Meaning,
}

/// What a name or a code stands for with some models.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CodeEntry {
    /// As it was asked for.
    pub name: String,
    pub models: Vec<&'static str>,
    /// How they count it.
    #[serde(flatten)]
    pub meaning: Meaning,
    /// The event select in hexadecimal; none for a fixed counter.
    pub select: Option<String>,
    /// The unit mask in hexadecimal; none for a fixed counter.
    pub umask: Option<String>,
    /// The name that the code has as one of Intel's architectural events.
    pub architectural: Option<&'static str>,
    /// The rings that are counted and what else changes how, each in a word.
    pub modifiers: Vec<String>,
    /// Every name of it.
    pub names: Vec<EventName>,
}

/// A name of an event, its unit masks and modifiers included.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EventName {
    /// The name, without a table.
    pub name: String,
    /// The tables that have it; none for a generic name.
    pub tables: Vec<String>,
}

/// How a name is counted, or why it is not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Meaning {
    /// Like this.
    Counted(Use),
    /// Not at all.
    Refused { problem: String },
}
