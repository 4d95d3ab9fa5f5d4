//! What can be wrong with a table of rates.

use thiserror::Error;

/// A table of rates that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{file}:{line}: {problem}")]
pub struct RateError {
    /// Name of the file, as given to the parser.
    pub file: String,
    /// Line, from 1.
    pub line: usize,
    /// What is wrong there.
    pub problem: RateProblem,
}

/// What is wrong with one line of a table of rates.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RateProblem {
    /// The text is not TOML.
    #[error("{0}")]
    Toml(String),
    /// A key that means nothing there.
    #[error("unknown key `{key}`; did you mean `{nearest}`?")]
    Key {
        key: String,
        /// The known key that looks most like it.
        nearest: &'static str,
    },
    /// An event that has no such name.
    #[error(
        "unknown event `{name}`; did you mean `{nearest}`? (or a raw code: r00c0, unit mask and \
         event select)"
    )]
    Event {
        name: String,
        /// The known name that looks most like it.
        nearest: &'static str,
    },
    /// A raw code with bits that are no event.
    #[error("`{name}` has bits beyond event select, unit mask, USR, OS, PC, INT and EN")]
    Raw {
        /// The code.
        name: String,
    },
    /// Two names of one event.
    #[error("`{name}` names the same event as another entry")]
    Twice {
        /// The second name.
        name: String,
    },
    /// A value of the wrong type.
    #[error("`{key}` has to be {wanted}")]
    Type {
        key: &'static str,
        /// What it has to be.
        wanted: &'static str,
    },
    /// A number out of its range.
    #[error("`{key}` has to be from {least} to {most}")]
    Range {
        key: &'static str,
        /// The smallest.
        least: u64,
        /// The largest.
        most: u64,
    },
    /// A number with more than six decimals, or with an exponent.
    #[error("`{key}` has to be a number with at most six decimals and no exponent")]
    Decimal { key: &'static str },
    /// A ring without a rate.
    #[error("no rate at {ring}: give `rate` for both rings, or `kernel` and `user` (0 for none)")]
    NoRate {
        /// Where it is missing.
        ring: &'static str,
    },
    /// A pair that the slots do not have.
    #[error("`paired` needs an even counter and the one after it among `slots`")]
    NoPair,
    /// A word that is none of a few.
    #[error("`{key}` cannot be `{word}`; did you mean `{nearest}`?")]
    Word {
        key: &'static str,
        word: String,
        /// The known word that looks most like it.
        nearest: &'static str,
    },
    /// No event at all.
    #[error("no event: add a table such as [event.instructions] with `rate = 1000`")]
    Empty,
}
