//! What can be wrong with the name of an event.

use thiserror::Error;

use super::uncounted::Measured;

/// libpfm4 cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LibraryError {
    /// It cannot be loaded.
    #[error("libpfm4 cannot be loaded ({0}): install it (Debian, Ubuntu: apt-get install libpfm4)")]
    Missing(String),
    /// It is of another version.
    #[error(
        "the installed libpfm has version {major}.{minor}, and Umpire reads version 4: install libpfm4"
    )]
    Version {
        /// Major version.
        major: u32,
        /// Minor version.
        minor: u32,
    },
    /// It does not start.
    #[error("libpfm4 does not start: {0}")]
    Start(String),
    /// The process has threads already, so its environment must not change.
    #[error("libpfm4 was asked for too late; set LIBPFM_ENCODE_INACTIVE=1 in the environment")]
    TooLate,
}

/// The name of an event that cannot be used. Every variant prints as one line
/// that names what was wrong, and says what would be right.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum EventError {
    /// No text, too much of it, or one with spaces or control characters.
    #[error(
        "'{0}' is no event name: give a name such as cycles or skl::INST_RETIRED:ANY_P, or a raw code such as r5300c0"
    )]
    NotAName(String),
    /// A raw code of more than 64 bits.
    #[error("'{0}' is no raw code: r or 0x takes 1 to 16 hexadecimal digits, as in r5300c0")]
    RawTooLong(String),
    /// No code where one is to be decoded.
    #[error(
        "'{0}' is no code: give one as r5300c0, 0x5300c0 or cpu/event=0xc0,umask=0/; without \
         --decode, umpire events says what a name stands for"
    )]
    NotACode(String),
    /// A code that no event has.
    #[error("'{code}': no event of {pmu} has this code{}", without_tables(library.as_ref()))]
    NoName {
        /// The code, as given.
        code: String,
        /// Where it was looked for.
        pmu: String,
        /// Why there are no tables, if there are none.
        library: Option<LibraryError>,
    },
    /// Neither a generic name nor a raw code, and there are no tables.
    #[error(
        "'{name}' is no generic event name{}; named events are in tables: {library}",
        did_you_mean(near)
    )]
    NoTables {
        name: String,
        /// Generic names that are near.
        near: Vec<String>,
        /// Why there are no tables.
        library: LibraryError,
    },
    /// No PMU model has the name, and there are no tables.
    #[error(
        "'{name}' is no PMU model{}; tables of named events: {library}",
        did_you_mean(near)
    )]
    NoModelNorTables {
        name: String,
        /// Models that are near.
        near: Vec<String>,
        /// Why there are no tables.
        library: LibraryError,
    },
    /// No table has the name.
    #[error(
        "there is no event table '{table}'{}; umpire events lists them",
        did_you_mean(near)
    )]
    UnknownTable {
        /// The name.
        table: String,
        /// Names that are near.
        near: Vec<String>,
    },
    /// A table that belongs to no model.
    #[error("'{name}': the table {table} {why}; umpire events lists the tables that can be used")]
    UnusableTable {
        /// The full name.
        name: String,
        table: String,
        /// Why not.
        why: &'static str,
    },
    /// The table has no such event, or no table of the model's has it.
    #[error(
        "{place} has no event '{event}'{}; search with: umpire events WORD",
        did_you_mean(near)
    )]
    UnknownEvent {
        event: String,
        /// Where it was looked for.
        place: String,
        /// Names that are near.
        near: Vec<String>,
    },
    /// Tables of the model disagree about what the name means.
    #[error("'{name}' is ambiguous: {first} and {second} differ; give one of these names")]
    Ambiguous {
        name: String,
        /// A full name with its code.
        first: String,
        /// Another with another code.
        second: String,
    },
    /// An event of another kind of processor.
    #[error("{name} is an event for {models}, and the guest's PMU model is {model}")]
    OtherModel {
        /// The full name, or an event's with its table.
        name: String,
        /// Models that have the event.
        models: String,
        /// The guest's.
        model: &'static str,
    },
    /// The code of the event means something else to the model.
    #[error(
        "{name} is code {code:#x}, which the guest's PMU model {model} reads as {means}; take an event of a processor like the model"
    )]
    OtherMeaning {
        name: String,
        code: u64,
        model: &'static str,
        /// What the code means there.
        means: String,
    },
    /// An attribute that the event does not have.
    #[error(
        "{event} has no unit mask or modifier '{attribute}'{}; it has {known}",
        did_you_mean(near)
    )]
    Attribute {
        event: String,
        attribute: String,
        /// Attributes that are near.
        near: Vec<String>,
        /// All of them.
        known: String,
    },
    /// Attributes that cannot stand together, or a value that is not possible.
    #[error(
        "'{name}': these unit masks and modifiers do not go together, or one has a value it cannot have; {event} has {known}"
    )]
    AttributeSet {
        /// The full name.
        name: String,
        event: String,
        /// All attributes.
        known: String,
    },
    /// An event that counts nothing without a unit mask.
    #[error("{event} needs a unit mask, as in {event}:{example}; it has {known}")]
    NeedsUnitMask {
        event: String,
        /// One of them.
        example: String,
        /// All of them.
        known: String,
    },
    /// libpfm refuses the name for another reason.
    #[error("'{name}': libpfm4 says: {reason}")]
    Library {
        /// The full name.
        name: String,
        /// Its words.
        reason: String,
    },
    /// `cpu/…/` that says nothing.
    #[error("'{name}': {why}; give one like cpu/event=0x3c,umask=0x0/u")]
    PerfForm {
        /// As given.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// A modifier of perf's that cannot be had.
    #[error("'{name}': {why}")]
    Modifier {
        /// As given.
        name: String,
        /// Why not.
        why: String,
    },
    /// A letter that is no modifier of perf's.
    #[error(
        "'{name}': '{letter}' is no modifier{}: there are :u and :k for the rings, and of perf's \
         others G, P, p, S and W",
        within(attribute)
    )]
    PlainAttribute {
        /// As given.
        name: String,
        /// The letters.
        attribute: String,
        /// The first of them that is none.
        letter: char,
    },
    /// A cache event with a part that perf does not have.
    #[error("'{name}': {why}")]
    CacheEvent {
        /// As given.
        name: String,
        /// Which part, and what there is.
        why: String,
    },
    /// What perf counts otherwise, and no counter of a guest.
    #[error("'{name}': {why}")]
    Uncounted {
        /// As given.
        name: String,
        /// Why nobody counts it.
        why: &'static str,
        /// What has its figure instead.
        measured: Option<Measured>,
    },
    /// What was given as a model is none.
    #[error(transparent)]
    Model(pmu_model::ModelError),
    /// The model has no such event.
    #[error("the PMU model {model} has no event for {event}; {having}")]
    NotInModel {
        /// What was asked for.
        event: String,
        model: &'static str,
        /// Which models have it.
        having: String,
    },
    /// The event needs more than its counter's registers.
    #[error(
        "{0} also needs a register outside of the counters (such as OFFCORE_RSP), which no PMU model here has"
    )]
    FurtherRegister(String),
    /// The code has bits that the model's register lacks.
    #[error("'{name}' is code {code:#x}, but an event select of {model} has no {bits}")]
    NoSuchBits {
        name: String,
        code: u64,
        /// What is missing, in words.
        bits: String,
        model: &'static str,
    },
    /// The event is counted by a fixed counter that the model lacks.
    #[error("{name} is counted by fixed counter {counter}, and {model} has {}", fixed_counters(*fixed))]
    NoFixedCounter {
        name: String,
        counter: u8,
        model: &'static str,
        /// Fixed counters that it has.
        fixed: u8,
    },
    /// Edge, invert or a counter mask on a fixed counter.
    #[error("{name} is counted by a fixed counter, which takes no edge, invert or counter mask")]
    FixedModifier { name: String },
    /// libpfm gives a code that selects no event.
    #[error(
        "{name} has code {code:#x} in libpfm4's table, which selects no event and stands for no fixed counter that counts it"
    )]
    SelectsNothing { name: String, code: u64 },
}

impl EventError {
    /// The name is right, and nobody counts what it names: perf says `<not supported>` of
    /// such, and goes on.
    #[must_use]
    pub fn is_uncounted(&self) -> bool {
        matches!(self, Self::Uncounted { .. } | Self::NotInModel { .. })
    }

    /// The name is none here, and nothing else is wrong with it.
    pub(super) fn is_unknown(&self) -> bool {
        matches!(self, Self::NoTables { .. } | Self::UnknownEvent { .. })
    }

    /// Names that are near, which it proposes.
    #[must_use]
    pub fn near(&self) -> &[String] {
        match self {
            Self::NoTables { near, .. }
            | Self::NoModelNorTables { near, .. }
            | Self::UnknownTable { near, .. }
            | Self::UnknownEvent { near, .. }
            | Self::Attribute { near, .. } => near,
            _ => &[],
        }
    }

    /// Why, without the name where that is apart: what names have in common.
    #[must_use]
    pub fn reason(&self) -> String {
        match self {
            Self::Uncounted { why, .. } => (*why).to_owned(),
            other => other.to_string(),
        }
    }
}

fn within(letters: &str) -> String {
    match letters.chars().count() {
        0 | 1 => String::new(),
        _ => format!(" (in ':{letters}')"),
    }
}

fn did_you_mean(near: &[String]) -> String {
    match near {
        [] => String::new(),
        near => format!(" (did you mean {}?)", super::text::one_of(near)),
    }
}

fn without_tables(library: Option<&LibraryError>) -> String {
    library.map_or_else(String::new, |library| {
        format!(" as far as generic names go; tables of named events: {library}")
    })
}

fn fixed_counters(number: u8) -> String {
    match number {
        0 => "no fixed counters".to_owned(),
        1 => "one fixed counter".to_owned(),
        number => format!("{number} fixed counters, 0 to {}", number - 1),
    }
}
