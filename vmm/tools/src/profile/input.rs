//! Opening a profile, and running through it.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, Write};
use std::path::{Path, PathBuf};

use clap::Args;

use super::choice::SampleChoice;
use super::chosen::{Choice, Chosen};
use super::error::ReportError;
use super::facts::Facts;
use super::names::Names;
use super::programs::Programs;
use super::reader::{Ending, ProfileError, ProfileReader, descriptions, symbols};
use super::record::{Filter, Header, Record, Sink};
use super::symbols::{SymbolTable, load, offset, parse};
use super::symfs::Symfs;
use super::wire::MAGIC;

/// A profile, and the part of it that is asked about.
#[derive(Clone, Debug, Args)]
pub struct ProfileChoice {
    /// The profile, or - for standard input
    #[arg(short, long, value_name = "FILE", default_value = "umpire.data")]
    pub input: PathBuf,
    /// Names of the guest's kernel: its vmlinux, its System.map, or a copy of its
    /// /proc/kallsyms
    #[arg(long, value_name = "FILE", visible_aliases = ["vmlinux", "kallsyms", "system-map"])]
    pub symbols: Option<PathBuf>,
    /// How far the kernel moved itself from the addresses in vmlinux or System.map, in
    /// hexadecimal
    #[arg(long, value_name = "HEX", requires = "symbols", allow_hyphen_values = true,
          value_parser = offset)]
    pub kaslr_offset: Option<u64>,
    /// Names of the guest's programs: a folder of this host that is the guest's root, or has
    /// copies of its programs and libraries. PATH=DIR is for what begins with PATH there: a
    /// container's root, or the number of its device, 0:53
    #[arg(long, value_name = "DIR")]
    pub symfs: Vec<PathBuf>,
    /// Show names of C++ and Rust as the files have them
    #[arg(long)]
    pub no_demangle: bool,
    /// The part of it that is asked about.
    #[command(flatten)]
    pub samples: SampleChoice,
}

/// Reads a profile that can be read again.
pub(super) type Reader = ProfileReader<BufReader<File>>;

/// The names of the kernel that the profile itself has. What is wrong with the file is said
/// when it is read.
fn own_symbols(file: &mut File) -> SymbolTable {
    let text = symbols(file).ok();
    let raw = text.and_then(|text| parse(&text).ok());
    raw.map_or_else(SymbolTable::default, |raw| SymbolTable::new(raw, 0))
}

/// A profile that is open, with what is needed to look at it.
pub(super) struct Input {
    /// For messages.
    pub(super) name: String,
    pub(super) header: Header,
    pub(super) filter: Filter,
    pub(super) names: Names,
    pub(super) has_chains: bool,
    chosen: Chosen,
    file: File,
    reader: Reader,
}

impl Input {
    /// Opens the profile and the file of symbols.
    pub(super) fn open(choice: &ProfileChoice) -> Result<Self, ReportError> {
        let symfs = Symfs::open(&choice.symfs)?;
        let given = choice.symbols.as_ref();
        let given = given.map(|path| load(path, choice.kaslr_offset.unwrap_or(0)));
        let given = given.transpose()?;
        let (name, mut file) = seekable(&choice.input)?;
        let unreadable = |error| ReportError::Open {
            name: name.clone(),
            error: ProfileError::Read(error),
        };
        let kernel = given.unwrap_or_else(|| own_symbols(&mut file));
        file.rewind().map_err(unreadable)?;
        let mut programs = Programs::default();
        let survey = descriptions(&file, |one| programs.add(one)).map_err(unreadable)?;
        file.rewind().map_err(unreadable)?;
        let mut names = Names::new(kernel, programs, symfs);
        names.demangle = !choice.no_demangle;
        let header = open(&file, &name)?.header().clone();
        let mut filter = Filter {
            vcpus: choice.samples.vcpus.clone(),
            cores: choice.samples.cores.clone(),
            event: None,
        };
        if let Some(event) = &choice.samples.event {
            filter.event = Some(number_of(event, &header)?);
        }
        let span = match &choice.samples.time {
            Some(time) if time.is_relative() => span(&file, &name)?,
            _ => (0, 0),
        };
        let reader = open(&file, &name)?;
        Ok(Self {
            name,
            header,
            filter,
            names,
            has_chains: survey.chains,
            chosen: Chosen::new(&choice.samples, span),
            file,
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
    pub(super) fn split(self) -> (Looked, Reader) {
        let looked = Looked {
            name: self.name,
            header: self.header,
            filter: self.filter,
            names: self.names,
            has_chains: self.has_chains,
            chosen: self.chosen,
            file: self.file,
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
    pub(super) names: Names,
    pub(super) has_chains: bool,
    chosen: Chosen,
    file: File,
}

impl Looked {
    /// Gives every record to every sink, but for samples that were not asked for. An error says
    /// whether the file could not be read or a sink could not write.
    pub(super) fn run(
        &self,
        reader: &mut Reader,
        sinks: &mut [&mut dyn Sink],
    ) -> Result<(), RunError> {
        while let Some(record) = reader.next_record().map_err(RunError::Read)? {
            if let Record::Sample(sample) = record {
                self.names.programs.settle(&mut sample.guest);
                match self.chosen.of(sample, &self.names) {
                    Choice::Shown => {}
                    Choice::Hidden => {
                        sinks.iter_mut().for_each(|sink| sink.pass(sample));
                        continue;
                    }
                    Choice::Absent => continue,
                }
            }
            for sink in sinks.iter_mut() {
                sink.take(record).map_err(RunError::Write)?;
            }
        }
        Ok(())
    }

    /// Reads the profile from its beginning once more.
    pub(super) fn again(&self) -> Result<Reader, ReportError> {
        open(&self.file, &self.name)
    }

    /// What a report says of the file, which was read to its end.
    pub(super) fn facts(&self, reader: &Reader) -> Facts<'_> {
        Facts {
            header: &self.header,
            totals: reader.totals(),
            ending: reader.ending().unwrap_or(Ending::CutOff),
            unknown_records: reader.unknown_records(),
            filter: &self.filter,
            chosen: &self.chosen,
            names: &self.names,
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

/// A reader of `file` from its beginning. There is one at a time.
fn open(file: &File, name: &str) -> Result<Reader, ReportError> {
    let failed = |error| ReportError::Open {
        name: name.to_owned(),
        error,
    };
    let mut file = file
        .try_clone()
        .map_err(|error| failed(ProfileError::Read(error)))?;
    file.rewind()
        .map_err(|error| failed(ProfileError::Read(error)))?;
    ProfileReader::open(BufReader::with_capacity(1 << 16, file)).map_err(failed)
}

/// When the first and the last sample of `file` were taken, in nanoseconds since sampling began;
/// 0 where it has none. What cannot be read is said when it is read again.
fn span(file: &File, name: &str) -> Result<(u64, u64), ReportError> {
    let mut reader = open(file, name)?;
    let mut span: Option<(u64, u64)> = None;
    while let Ok(Some(record)) = reader.next_record() {
        if let Record::Sample(sample) = record {
            let time = sample.time_ns;
            let (first, last) = span.unwrap_or((time, time));
            span = Some((first.min(time), last.max(time)));
        }
    }
    Ok(span.unwrap_or_default())
}

/// The file, and what to call it. What comes through a pipe goes to a file without a name:
/// it is read twice.
fn seekable(path: &Path) -> Result<(String, File), ReportError> {
    let (name, mut input): (String, Box<dyn Read>) = if path == Path::new("-") {
        ("standard input".to_owned(), Box::new(io::stdin().lock()))
    } else {
        let name = path.display().to_string();
        match File::open(path) {
            Ok(file) if file.metadata().is_ok_and(|found| found.is_file()) => {
                return Ok((name, file));
            }
            Ok(file) => (name, Box::new(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(ReportError::Missing(path.to_owned()));
            }
            Err(error) => {
                let error = ProfileError::Read(error);
                return Err(ReportError::Open { name, error });
            }
        }
    };
    let failed = |error| ReportError::Open {
        name: name.clone(),
        error: ProfileError::Read(error),
    };
    let mut file = tempfile::tempfile().map_err(failed)?;
    let mut start = Vec::new();
    let mut first = input.by_ref().take(MAGIC.len() as u64);
    first.read_to_end(&mut start).map_err(failed)?;
    file.write_all(&start).map_err(failed)?;
    // Of something else, which may never end, no more is needed.
    if start == MAGIC {
        io::copy(&mut input, &mut file).map_err(failed)?;
    }
    file.rewind().map_err(failed)?;
    Ok((name, file))
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
