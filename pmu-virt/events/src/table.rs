//! What a source of event names gives, and the source that has none.

use std::fmt::Debug;

use super::error::LibraryError;

/// Event names of processors, each in a table of its own.
///
/// A full name is `TABLE::EVENT`, followed by any number of `:ATTRIBUTE` or
/// `:ATTRIBUTE=VALUE`, as libpfm4 writes it.
pub trait NameTable: Debug {
    /// Why there are no tables, where there are none.
    fn missing(&self) -> Option<&LibraryError>;

    /// Every table.
    fn tables(&self) -> &[PmuTable];

    /// The events of the table called `table`; none if there is no such table.
    fn events(&self, table: &str) -> Vec<NamedEvent>;

    /// The codes that a full name stands for. Where it names no ring, both are
    /// meant.
    ///
    /// # Errors
    /// Why it stands for none.
    fn encode(&self, full_name: &str) -> Result<Encoding, EncodeError>;
}

/// The events of one PMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PmuTable {
    /// Its name, as in `TABLE::EVENT`.
    pub name: String,
    /// The processor, in words.
    pub description: String,
    /// Whose PMU it is.
    pub kind: TableKind,
    /// How many events it has, unit masks not counted.
    pub events: usize,
    /// It is a PMU of the processor that this program runs on.
    pub host: bool,
}

/// Whose PMU a table describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableKind {
    /// A processor core's.
    Core,
    /// A socket's, outside of the cores.
    Uncore,
    /// The operating system's.
    Software,
    /// None of these.
    Other,
}

/// An event of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedEvent {
    /// Its name in the table.
    pub name: String,
    /// What it counts.
    pub description: String,
    /// The name that it is another word for.
    pub alias_of: Option<String>,
    /// Unit masks and modifiers.
    pub attributes: Vec<Attribute>,
}

/// What can be added to an event's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attribute {
    pub name: String,
    /// What it does.
    pub description: String,
    /// How it is written.
    pub kind: AttributeKind,
    /// A unit mask that is taken where none is named.
    pub default: bool,
}

impl Attribute {
    /// As it is written behind an event's name.
    pub(super) fn spelled(&self) -> String {
        match self.kind {
            AttributeKind::Number => format!(":{}=N", self.name),
            _ => format!(":{}", self.name),
        }
    }
}

/// How an attribute is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttributeKind {
    /// `:NAME`, chooses which sub-events are counted.
    UnitMask,
    /// `:NAME`, changes how it is counted.
    Flag,
    /// `:NAME=NUMBER`, changes how it is counted.
    Number,
}

/// What a full name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoding {
    /// The event select, then the values of further registers.
    pub codes: Vec<u64>,
    /// The name with every unit mask and modifier written out.
    pub full_name: String,
}

/// Why a full name stands for no code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EncodeError {
    /// There is no such table or event.
    Unknown,
    /// The event needs a unit mask, or not this one.
    UnitMask,
    /// An attribute is none of the event's, or has a value that it cannot have.
    Attribute,
    /// Something else, in the words of the source.
    Other(String),
}

/// No table at all.
#[derive(Clone, Debug)]
pub struct NoTables(pub LibraryError);

impl NameTable for NoTables {
    fn missing(&self) -> Option<&LibraryError> {
        Some(&self.0)
    }

    fn tables(&self) -> &[PmuTable] {
        &[]
    }

    fn events(&self, _: &str) -> Vec<NamedEvent> {
        Vec::new()
    }

    fn encode(&self, _: &str) -> Result<Encoding, EncodeError> {
        Err(EncodeError::Unknown)
    }
}
