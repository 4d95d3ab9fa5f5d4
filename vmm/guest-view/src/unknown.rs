//! Why something about the guest is not known.

use thiserror::Error;

/// Why it is not known what runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Unknown {
    /// The kernel's types do not say where that is.
    #[error("this kernel's types do not say")]
    Types,
    /// The guest has no processor of that number.
    #[error("the guest has no such processor")]
    Processor,
    /// Memory that has to be there is not.
    #[error("nothing is mapped at {0:#x}")]
    Unmapped(u64),
    /// What was read cannot be so: the guest switches tasks, or is not what it was.
    #[error("the guest's {0} do not fit each other")]
    Inconsistent(&'static str),
    /// More of something than there can be.
    #[error("the guest has too many {0}")]
    TooMany(&'static str),
    /// Nothing is mapped there for the program.
    #[error("the program has nothing at that address")]
    NoMapping,
}
