//! Opening a profile, and running through it.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use super::error::ReportError;
use super::facts::Facts;
use super::reader::{Ending, ProfileError, ProfileReader, symbols};
use super::record::{Filter, Header, Sink};
use super::symbols::{SymbolTable, load, parse};
use crate::numbers::Numbers;

/// A profile, and the part of it that is asked about.
#[derive(Clone, Debug)]
pub struct ProfileChoice {
    /// The file; `-` is standard input.
    pub input: PathBuf,
    /// Names of the guest's kernel.
    pub symbols: Option<PathBuf>,
    /// How far the kernel moved itself from the addresses in this file.
    pub kaslr_offset: u64,
    /// Only this event.
    pub event: Option<String>,
    /// Only samples of these vCPUs.
    pub vcpus: Option<Numbers>,
    /// Only samples taken on these cores.
    pub cores: Option<Numbers>,
}

/// The names that the profile itself has. A pipe cannot be looked at from its end, and what
/// is wrong with the file is said when it is read.
fn own_symbols(path: &Path) -> SymbolTable {
    let is_file = path.metadata().is_ok_and(|found| found.is_file());
    let file = File::open(path).ok().filter(|_| is_file);
    let text = file.and_then(|mut file| symbols(&mut file).ok());
    let raw = text.and_then(|text| parse(&text).ok());
    raw.map_or_else(SymbolTable::default, |raw| SymbolTable::new(raw, 0))
}

/// A profile that is open, with what is needed to look at it.
pub(super) struct Input {
    /// For messages.
    pub(super) name: String,
    pub(super) header: Header,
    pub(super) filter: Filter,
    pub(super) symbols: SymbolTable,
    reader: ProfileReader<Box<dyn Read>>,
}

impl Input {
    /// Opens the profile and the file of symbols.
    pub(super) fn open(choice: &ProfileChoice) -> Result<Self, ReportError> {
        let symbols = match &choice.symbols {
            Some(path) => load(path, choice.kaslr_offset)?,
            None => own_symbols(&choice.input),
        };
        let (name, input) = bytes(&choice.input)?;
        let reader = ProfileReader::open(input).map_err(|error| ReportError::Open {
            name: name.clone(),
            error,
        })?;
        let header = reader.header().clone();
        let mut filter = Filter {
            vcpus: choice.vcpus.clone(),
            cores: choice.cores.clone(),
            event: None,
        };
        if let Some(event) = &choice.event {
            filter.event = Some(number_of(event, &header)?);
        }
        Ok(Self {
            name,
            header,
            filter,
            symbols,
            reader,
        })
    }

    /// The one event that the filter lets through, for `option`, which cannot
    /// tell events apart.
    pub(super) fn one_event(&self, option: &'static str) -> Result<u16, ReportError> {
        match (self.filter.event, self.header.events.as_slice()) {
            (Some(event), _) => Ok(event),
            (None, [_]) => Ok(0),
            (None, []) => Err(ReportError::NoEvents {
                name: self.name.clone(),
            }),
            (None, _) => Err(ReportError::SeveralEvents {
                option,
                known: known(&self.header),
            }),
        }
    }

    /// Takes the reader out, to run through it while the rest is borrowed.
    pub(super) fn split(self) -> (Looked, ProfileReader<Box<dyn Read>>) {
        let looked = Looked {
            name: self.name,
            header: self.header,
            filter: self.filter,
            symbols: self.symbols,
        };
        (looked, self.reader)
    }
}

/// What is known of a profile beside its records.
pub(super) struct Looked {
    /// For messages.
    pub(super) name: String,
    pub(super) header: Header,
    pub(super) filter: Filter,
    pub(super) symbols: SymbolTable,
}

impl Looked {
    /// Gives every record to every sink. An error says whether the file could not
    /// be read or a sink could not write.
    pub(super) fn run(
        &self,
        reader: &mut ProfileReader<Box<dyn Read>>,
        sinks: &mut [&mut dyn Sink],
    ) -> Result<(), RunError> {
        while let Some(record) = reader.next_record().map_err(RunError::Read)? {
            for sink in sinks.iter_mut() {
                sink.take(&record).map_err(RunError::Write)?;
            }
        }
        Ok(())
    }

    /// What a report says of the file, which was read to its end.
    pub(super) fn facts(&self, reader: &ProfileReader<Box<dyn Read>>) -> Facts<'_> {
        Facts {
            header: &self.header,
            totals: reader.totals(),
            ending: reader.ending().unwrap_or(Ending::CutOff),
            unknown_records: reader.unknown_records(),
            filter: &self.filter,
            symbols: &self.symbols,
        }
    }

    /// The file cannot be read to its end.
    pub(super) fn failed(&self, error: io::Error) -> ReportError {
        ReportError::Unreadable {
            name: self.name.clone(),
            error,
        }
    }
}

/// What ended a run through a profile.
pub(super) enum RunError {
    /// The file cannot be read.
    Read(io::Error),
    /// A sink's output takes no more.
    Write(io::Error),
}

/// The bytes of a file or of standard input, and what to call it.
fn bytes(path: &Path) -> Result<(String, Box<dyn Read>), ReportError> {
    if path == Path::new("-") {
        return Ok(("standard input".to_owned(), Box::new(io::stdin().lock())));
    }
    let name = path.display().to_string();
    match File::open(path) {
        Ok(file) => Ok((name, Box::new(BufReader::with_capacity(1 << 16, file)))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(ReportError::Missing(path.to_owned()))
        }
        Err(error) => Err(ReportError::Open {
            name,
            error: ProfileError::Read(error),
        }),
    }
}

fn number_of(event: &str, header: &Header) -> Result<u16, ReportError> {
    let mut names = (0u16..).zip(&header.events);
    let found = names.find(|(_, one)| one.name == event);
    found
        .map(|(number, _)| number)
        .ok_or_else(|| ReportError::Event {
            event: event.to_owned(),
            known: known(header),
        })
}

fn known(header: &Header) -> String {
    let names: Vec<&str> = header.events.iter().map(|one| one.name.as_str()).collect();
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    }
}
