//! Why a profile cannot be reported on.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::code::CodeError;
use super::reader::{Ending, ProfileError};
use super::symbols::SymbolFileError;
use super::symfs::NoSymfs;

/// Why there is no report of a profile; one line, with what to do about it.
#[derive(Debug, Error)]
pub enum ReportError {
    /// There is no profile.
    #[error("{}: there is no such file; name another, or record one: umpire record -e cycles -c 100000", .0.display())]
    Missing(PathBuf),
    /// It is none, or cannot be opened.
    #[error("{name}: {error}")]
    Open {
        /// What it is called.
        name: String,
        /// Why not.
        error: ProfileError,
    },
    /// It is damaged, and was used up to there.
    #[error("{name}: {ending}")]
    Damaged {
        /// What it is called.
        name: String,
        /// Where, and how.
        ending: Ending,
    },
    /// The file of symbols cannot be used.
    #[error(transparent)]
    Symbols(#[from] SymbolFileError),
    /// A folder of the guest's files cannot be used.
    #[error(transparent)]
    Symfs(#[from] NoSymfs),
    /// It has no such event.
    #[error("--event: the profile has no event '{event}'; it has {known}")]
    Event {
        /// What was asked for.
        event: String,
        /// What there is.
        known: String,
    },
    /// The output cannot tell events apart.
    #[error("{option} takes the samples of one event; choose with --event one of {known}")]
    SeveralEvents {
        /// The output.
        option: &'static str,
        /// What there is.
        known: String,
    },
    /// It has no events.
    #[error("{name}: it has no events, so there is nothing to draw")]
    NoEvents {
        /// What it is called.
        name: String,
    },
    /// Two profiles have no event that both have.
    #[error("the profiles have no event in common: the first has {old}, the second {new}")]
    NothingInCommon {
        /// What the first has.
        old: String,
        /// What the second has.
        new: String,
    },
    /// It has no samples to draw.
    #[error("{name}: no sample of '{event}' is left to draw, so {} is not written", file.display())]
    NothingToDraw {
        /// What it is called.
        name: String,
        event: String,
        /// The file that is not written.
        file: PathBuf,
    },
    /// Its samples weigh nothing.
    #[error(
        "{name}: the samples of '{event}' stand for no events, so {} is not written; give \
         --weight samples", file.display()
    )]
    NothingWeighs {
        /// What it is called.
        name: String,
        event: String,
        /// The file that is not written.
        file: PathBuf,
    },
    /// Its samples weigh more than the output has numbers for.
    #[error(
        "{name}: its samples stand for more events together than {option} has numbers for, which \
         end at {most}; choose fewer with --vcpu or --core{hint}"
    )]
    TooManyEvents {
        /// What it is called.
        name: String,
        /// The output.
        option: &'static str,
        /// The greatest number.
        most: u64,
        /// What else may help.
        hint: &'static str,
    },
    /// No sample is in such a symbol.
    #[error(
        "no sample of '{event}' is in a symbol '{symbol}'; umpire report --sort symbol lists \
         those that have some{hint}"
    )]
    NoSuchSymbol {
        /// What was asked for.
        symbol: String,
        event: String,
        /// What else may help.
        hint: &'static str,
    },
    /// No symbol has enough samples.
    #[error("no symbol has {least} % of the samples of '{event}'{hint}")]
    NothingToAnnotate {
        event: String,
        /// How much is enough, in percent.
        least: f64,
        /// What else may help.
        hint: &'static str,
    },
    /// The code of a symbol is not known.
    #[error("no code of '{symbol}' of {object}: {error}")]
    NoCode {
        symbol: String,
        /// What it is in.
        object: String,
        /// Why not, and what gives it.
        error: CodeError,
    },
    /// Nothing of a sample is to be printed.
    #[error("-F: no field is left to print")]
    NoFields,
    /// An output would replace it.
    #[error("{}: it is the profile itself; name another file", .0.display())]
    ItselfAsOutput(PathBuf),
    /// A file for output cannot be made.
    #[error("{}: cannot be written: {error}", file.display())]
    Create {
        file: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// A file for output takes no more.
    #[error("{}: cannot be written: {error}", file.display())]
    Write {
        file: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// The host cannot read it to its end.
    #[error("{name}: cannot be read to its end: {error}")]
    Unreadable {
        /// What it is called.
        name: String,
        /// Why not.
        error: io::Error,
    },
    /// Standard output takes no more.
    #[error("cannot write to standard output: {0}")]
    Output(io::Error),
}
