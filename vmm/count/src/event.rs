//! The events that are counted, and how they are chosen by name.

use std::fmt;
use std::str::FromStr;

use attribution::{Counts, Events, Program};
use umpire_events::nearest;

/// An event that instructions cause. The names are those of `umpire events`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Event {
    Instructions,
    Branches,
    TakenBranches,
    ConditionalBranches,
    FarBranches,
    Loads,
    Stores,
    Calls,
    Returns,
    FpInstructions,
    X87Instructions,
    MmxInstructions,
    SseInstructions,
    StringInstructions,
}

/// An event, its name, how many there were of it, and what it is.
type Row = (Event, &'static str, fn(&Events) -> u64, &'static str);

const TABLE: [Row; 14] = [
    (
        Event::Instructions,
        "instructions",
        |of| of.instructions,
        "instructions that retired; a repeated string instruction once",
    ),
    (
        Event::Branches,
        "branches",
        |of| of.branches,
        "near and far ones, taken or not",
    ),
    (
        Event::TakenBranches,
        "taken-branches",
        |of| of.taken_branches,
        "near and far ones that were taken",
    ),
    (
        Event::ConditionalBranches,
        "conditional-branches",
        |of| of.conditional_branches,
        "Jcc, LOOP and JCXZ, taken or not",
    ),
    (
        Event::FarBranches,
        "far-branches",
        |of| of.far_branches,
        "far calls, jumps and returns, IRET, SYSCALL and SYSRET",
    ),
    (
        Event::Loads,
        "loads",
        |of| of.loads,
        "operands in memory that were read",
    ),
    (
        Event::Stores,
        "stores",
        |of| of.stores,
        "operands in memory that were written",
    ),
    (Event::Calls, "calls", |of| of.calls, "near calls"),
    (Event::Returns, "returns", |of| of.returns, "near returns"),
    (
        Event::FpInstructions,
        "fp-instructions",
        |of| of.floating_point,
        "x87, MMX and SSE",
    ),
    (
        Event::X87Instructions,
        "x87-instructions",
        |of| of.x87,
        "of the x87 stack",
    ),
    (
        Event::MmxInstructions,
        "mmx-instructions",
        |of| of.mmx,
        "of the MMX registers",
    ),
    (
        Event::SseInstructions,
        "sse-instructions",
        |of| of.sse,
        "of the vector registers, scalar and packed",
    ),
    (
        Event::StringInstructions,
        "string-instructions",
        |of| of.strings,
        "MOVS, STOS and their like, a repeated one once",
    ),
];

impl Event {
    /// Each of them, in the order in which they are listed.
    pub fn all() -> impl Iterator<Item = Event> {
        TABLE.iter().map(|(event, ..)| *event)
    }

    fn row(self) -> &'static Row {
        // The test `every_event_has_its_row` holds the order.
        &TABLE[self as usize]
    }

    /// Its name, as it is typed.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// How many there were of it.
    #[must_use]
    pub fn of(self, events: &Events) -> u64 {
        (self.row().2)(events)
    }

    /// What it is, in some words.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        self.row().3
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whose instructions: the program's own (CPL 3), or what the kernel did meanwhile (CPL 0).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    User,
    Kernel,
}

/// An event as it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Chosen {
    pub event: Event,
    /// One side, or both together.
    pub side: Option<Side>,
}

impl Chosen {
    /// What is printed where nobody asked for events: each side apart.
    pub const DEFAULT: [Chosen; 8] = [
        Chosen::new(Event::Instructions, Side::User),
        Chosen::new(Event::Instructions, Side::Kernel),
        Chosen::new(Event::Branches, Side::User),
        Chosen::new(Event::Branches, Side::Kernel),
        Chosen::new(Event::Loads, Side::User),
        Chosen::new(Event::Loads, Side::Kernel),
        Chosen::new(Event::Stores, Side::User),
        Chosen::new(Event::Stores, Side::Kernel),
    ];

    /// An event on one side.
    #[must_use]
    pub const fn new(event: Event, side: Side) -> Self {
        Chosen {
            event,
            side: Some(side),
        }
    }

    /// How many there were of it in all programs.
    #[must_use]
    pub fn of(self, counts: &Counts) -> u64 {
        counts.programs.iter().map(|one| self.of_program(one)).sum()
    }

    /// How many there were of it in one program.
    #[must_use]
    pub fn of_program(self, program: &Program) -> u64 {
        self.event.of(&self.side_of(program))
    }

    /// How many there were of it among these.
    #[must_use]
    pub fn among(self, user: Events, kernel: Events) -> u64 {
        self.event.of(&self.side(user, kernel))
    }

    /// The virtual time in which they were counted, in nanoseconds.
    #[must_use]
    pub fn virtual_ns(self, program: &Program) -> u64 {
        self.side_of(program).ticks
    }

    fn side_of(self, program: &Program) -> Events {
        self.side(program.user(), program.kernel())
    }

    pub(crate) fn side(self, user: Events, kernel: Events) -> Events {
        match self.side {
            Some(Side::User) => user,
            Some(Side::Kernel) => kernel,
            None => [user, kernel].into_iter().sum(),
        }
    }

    /// The events of a list with commas, in its order, each once.
    ///
    /// # Errors
    /// One is not counted here; the text lists those that are.
    pub fn list(text: &str) -> Result<Vec<Chosen>, EventError> {
        let mut found: Vec<Chosen> = Vec::new();
        for word in text.split(',') {
            let chosen = word.trim().parse()?;
            if !found.contains(&chosen) {
                found.push(chosen);
            }
        }
        Ok(found)
    }
}

/// As perf writes it: `instructions:u`.
impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = match self.side {
            None => "",
            Some(Side::User) => ":u",
            Some(Side::Kernel) => ":k",
        };
        write!(f, "{}{side}", self.event)
    }
}

impl FromStr for Chosen {
    type Err = EventError;

    fn from_str(text: &str) -> Result<Self, EventError> {
        let (name, letters) = text.split_once(':').unwrap_or((text, ""));
        let side = match letters {
            "" if text.ends_with(':') => return Err(EventError::modifier(text, letters)),
            "" | "uk" | "ku" => None,
            "u" => Some(Side::User),
            "k" => Some(Side::Kernel),
            _ => return Err(EventError::modifier(text, letters)),
        };
        // perf's other name for them.
        let name = if name == "branch-instructions" {
            Event::Branches.name()
        } else {
            name
        };
        let event = Event::all().find(|event| event.name() == name);
        match event {
            Some(event) => Ok(Chosen { event, side }),
            None => Err(EventError::unknown(name)),
        }
    }
}

/// An event that cannot be counted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    /// There is none of this name.
    #[error("there is no event '{name}' to count{near}; there are {}", names())]
    Unknown {
        name: String,
        /// Which are meant, maybe.
        near: String,
    },
    /// Something behind the name that is neither `u` nor `k`.
    #[error(
        "'{event}': ':{letters}' is not counted apart; write :u (the program) or :k (the kernel)"
    )]
    Modifier { event: String, letters: String },
}

impl EventError {
    fn modifier(event: &str, letters: &str) -> Self {
        EventError::Modifier {
            event: event.to_owned(),
            letters: letters.to_owned(),
        }
    }

    fn unknown(name: &str) -> Self {
        let names: Vec<&str> = Event::all().map(Event::name).collect();
        let near = nearest(name, names);
        let near = match near.first() {
            Some(first) => format!("; did you mean {first}?"),
            None => String::new(),
        };
        EventError::Unknown {
            name: name.to_owned(),
            near,
        }
    }
}

fn names() -> String {
    let names: Vec<&str> = Event::all().map(Event::name).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_has_its_row() {
        for (place, event) in Event::all().enumerate() {
            assert_eq!(event as usize, place);
        }
        let events = Events {
            instructions: 1,
            branches: 2,
            taken_branches: 3,
            conditional_branches: 4,
            far_branches: 5,
            loads: 6,
            stores: 7,
            calls: 8,
            returns: 9,
            floating_point: 10,
            x87: 11,
            mmx: 12,
            sse: 13,
            strings: 14,
            deliveries: 15,
            ticks: 16,
        };
        let found: Vec<u64> = Event::all().map(|event| event.of(&events)).collect();
        assert_eq!(found, Vec::from_iter(1..=14));
    }

    #[test]
    fn names_are_those_of_umpire_events() {
        let known: Vec<&str> = umpire_events::generic_names().collect();
        for event in Event::all() {
            assert!(known.contains(&event.name()), "{event}");
        }
    }

    #[test]
    fn lists() {
        fn check(text: &str, expected: Result<&[&str], &str>) {
            match (Chosen::list(text), expected) {
                (Ok(found), Ok(expected)) => {
                    let found: Vec<String> = found.iter().map(Chosen::to_string).collect();
                    assert_eq!(found, expected, "{text}");
                }
                (Err(error), Err(part)) => {
                    assert!(error.to_string().contains(part), "{text}: {error}");
                }
                (found, _) => panic!("{text}: {found:?}"),
            }
        }
        check("instructions", Ok(&["instructions"]));
        check(
            "loads:k, branch-instructions:u,loads:k",
            Ok(&["loads:k", "branches:u"]),
        );
        check("stores:uk", Ok(&["stores"]));
        check("cycles", Err("there is no event 'cycles' to count"));
        check("instruction", Err("did you mean instructions?"));
        check("", Err("there are instructions, branches"));
        check("loads:", Err("':'"));
        check("loads:pp", Err("':pp' is not counted apart"));
    }
}
