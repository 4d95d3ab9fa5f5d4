//! `umpire annotate`: at which instructions of a symbol the samples are.

mod listing;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::PathBuf;

use ahash::AHashMap;
use clap::builder::Resettable;
use clap::{Args, ValueEnum};

use self::listing::Listing;
use super::code::{self, Code, CodeError};
use super::command::{ran, tell, written};
use super::error::ReportError;
use super::facts::event_name;
use super::input::{Input, ProfileChoice};
use super::location::CodeLocation;
use super::names::Names;
use super::record::{Filter, Record, Sample, Sink};
use super::report::percent;
use super::symbols::{ElfError, SymbolFileError, SymbolIndex, SymbolTable, load, raw};
use super::tally::Sum;

/// The notation of instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Syntax {
    /// mov %rsp,%rbp
    #[default]
    Att,
    /// mov rbp,rsp
    Intel,
}

/// A kernel moves itself by a multiple of this (`CONFIG_PHYSICAL_ALIGN`).
const ALIGN: u64 = 2 << 20;

/// What `umpire annotate` shows.
#[derive(Clone, Debug, Args)]
// Here the vmlinux has code, which other commands take its names for alone.
#[command(mut_arg("symbols", |symbols| symbols.alias(Resettable::Reset)
              .visible_aliases(["kallsyms", "system-map"])
              .help("Names of the guest's kernel, in place of those in the profile: a copy of \
                     its /proc/kallsyms, or its System.map")),
          mut_arg("kaslr_offset", |offset| offset.requires(Resettable::Reset)
              .help("How far the kernel moved itself from the addresses in vmlinux or \
                     System.map, in hexadecimal [default: told from the symbols that vmlinux \
                     and the profile both have]")),
          mut_arg("event", |event| event
              .help("Only this event; needed where the profile has several")))]
pub struct AnnotateOptions {
    /// The symbol, as umpire report names it [default: those with most events]
    #[arg(value_name = "SYMBOL")]
    pub symbol: Option<String>,
    /// The profile.
    #[command(flatten)]
    pub profile: ProfileChoice,
    /// Code of the guest's kernel: an uncompressed ELF file
    #[arg(long, value_name = "FILE")]
    pub vmlinux: Option<PathBuf>,
    /// Without SYMBOL: leave out symbols with less than this part of the events, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0, value_parser = percent)]
    pub percent_limit: f64,
    /// How instructions are written
    #[arg(
        short = 'M',
        long = "disassembler-style",
        value_name = "SYNTAX",
        value_enum,
        default_value_t
    )]
    pub syntax: Syntax,
}

/// `umpire annotate` to `out`, with warnings to `notes`.
///
/// # Errors
/// The profile or a file cannot be used, the symbol has no sample or no code is known, or `out`
/// cannot be written to. Whoever closes `out` early has seen enough: that is no error.
pub fn annotate(
    options: &AnnotateOptions,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<(), ReportError> {
    let mut input = Input::open(&options.profile)?;
    let event = input.one_event("umpire annotate")?;
    let vmlinux = options.vmlinux.as_ref();
    let vmlinux =
        vmlinux.map(|path| Vmlinux::open(path.clone(), options.profile.kaslr_offset, &mut input));
    let vmlinux = vmlinux.transpose()?;
    let (looked, mut reader) = input.split();
    let mut places = Places::new(&looked.filter, &looked.names);
    ran(&looked, looked.run(&mut reader, &mut [&mut places]))?;
    let name = event_name(&looked.header, event);
    let shown = Shown {
        names: &looked.names,
        vmlinux: vmlinux.as_ref(),
        all: places.all,
        event: &name,
        syntax: options.syntax,
    };
    let end = match &options.symbol {
        Some(symbol) => shown.named(&places, symbol, out),
        None => shown.hottest(&places, options.percent_limit, out),
    };
    end?;
    written(out.flush())?;
    tell(&looked, &looked.facts(&reader), notes)
}

/// Samples by symbol, and by how far they are behind its beginning.
#[derive(Debug)]
struct Places<'a> {
    filter: &'a Filter,
    names: &'a Names,
    symbols: AHashMap<CodeLocation, BTreeMap<u64, Sum>>,
    all: Sum,
}

impl<'a> Places<'a> {
    fn new(filter: &'a Filter, names: &'a Names) -> Self {
        Self {
            filter,
            names,
            symbols: AHashMap::new(),
            all: Sum::default(),
        }
    }

    /// The symbols, those with most events first.
    fn sorted(&self) -> Vec<(CodeLocation, Sum)> {
        let sum = |samples: &BTreeMap<u64, Sum>| {
            let mut sum = Sum::default();
            samples.values().for_each(|one| sum.add(*one));
            sum
        };
        let sums = self.symbols.iter().map(|(at, samples)| (*at, sum(samples)));
        let mut sums: Vec<(CodeLocation, Sum)> = sums.collect();
        sums.sort_by_key(|(at, sum)| (std::cmp::Reverse(sum.events), *at));
        sums
    }
}

impl Sink for Places<'_> {
    fn take(&mut self, record: &Record) -> io::Result<()> {
        let Record::Sample(sample) = record else {
            return Ok(());
        };
        if !self.filter.takes(sample) {
            return Ok(());
        }
        let one = Sum::of(sample);
        self.all.add(one);
        let location = CodeLocation::of(sample, self.names);
        if let Some(offset) = offset(location, sample, self.names) {
            let symbol = self.symbols.entry(location).or_default();
            symbol.entry(offset).or_default().add(one);
        }
        Ok(())
    }
}

/// How far `sample` is behind the beginning of its symbol.
fn offset(location: CodeLocation, sample: &Sample, names: &Names) -> Option<u64> {
    match location {
        CodeLocation::Symbol(_) => Some(names.kernel.find(sample.ip)?.offset),
        CodeLocation::Program(_, Some(_)) => {
            let (_, found) =
                names.in_program_of(sample.guest.task, sample.guest.mapping, sample.ip)?;
            Some(found?.offset)
        }
        _ => None,
    }
}

/// The kernel's file, and how far above its addresses the kernel runs.
#[derive(Debug)]
struct Vmlinux {
    path: PathBuf,
    /// None if that cannot be told.
    moved: Option<u64>,
    /// Where which names are in it, if the kernel's are from elsewhere.
    places: BTreeSet<(u64, String)>,
}

impl Vmlinux {
    /// Its symbols are those of the kernel where nobody has others.
    fn open(path: PathBuf, given: Option<u64>, input: &mut Input) -> Result<Self, ReportError> {
        let own = &mut input.names.kernel;
        let mut places = BTreeSet::new();
        let moved = match (given, own.is_empty()) {
            (given, true) => {
                let offset = given.unwrap_or(0);
                *own = load(&path, offset)?;
                Some(offset)
            }
            (Some(given), false) => Some(given),
            (None, false) => match raw(&path) {
                Ok(found) => {
                    let code = found.into_iter().filter(|one| one.code);
                    places = code.map(|one| (one.address, one.name)).collect();
                    distance(&places, own).filter(|moved| moved.is_multiple_of(ALIGN))
                }
                Err(SymbolFileError::Elf {
                    error: ElfError::Stripped,
                    ..
                }) => None,
                Err(error) => return Err(error.into()),
            },
        };
        Ok(Self {
            path,
            moved,
            places,
        })
    }

    /// The code of a symbol of `kernel`, which is there by this name or another kernel's file.
    fn code(&self, kernel: &SymbolTable, symbol: SymbolIndex) -> Result<Code, CodeError> {
        let moved = self.moved.ok_or(CodeError::OtherKernel)?;
        let (start, end) = kernel.span(symbol).ok_or(CodeError::OtherKernel)?;
        let (start, end) = (start.wrapping_sub(moved), end.wrapping_sub(moved));
        let place = (start, kernel.name(symbol).to_owned());
        if !self.places.is_empty() && !self.places.contains(&place) {
            return Err(CodeError::OtherKernel);
        }
        code::of_file(&self.path, (start, end))
    }
}

/// How far above the `file` more than half of the kernel's symbols in `running` are that have one
/// place in each.
fn distance(file: &BTreeSet<(u64, String)>, running: &SymbolTable) -> Option<u64> {
    let file = once(file.iter().map(|(address, name)| (name.as_str(), *address)));
    let own = running
        .all()
        .filter(|(index, _)| running.module(*index).is_none());
    let running = once(own.map(|(index, address)| (running.name(index), address)));
    let mut votes: BTreeMap<u64, usize> = BTreeMap::new();
    for (name, address) in running {
        if let (Some(address), Some(Some(there))) = (address, file.get(name)) {
            *votes.entry(address.wrapping_sub(*there)).or_default() += 1;
        }
    }
    let all: usize = votes.values().sum();
    let most = votes.into_iter().find(|(_, votes)| *votes > all / 2);
    most.map(|(distance, _)| distance)
}

/// Where each name is, if it is in one place alone.
fn once<'a>(symbols: impl Iterator<Item = (&'a str, u64)>) -> AHashMap<&'a str, Option<u64>> {
    let mut places: AHashMap<&str, Option<u64>> = AHashMap::new();
    for (name, address) in symbols {
        let place = places.entry(name);
        place.and_modify(|one| *one = None).or_insert(Some(address));
    }
    places
}

/// What is printed, and of what.
struct Shown<'a> {
    names: &'a Names,
    vmlinux: Option<&'a Vmlinux>,
    all: Sum,
    event: &'a str,
    syntax: Syntax,
}

impl Shown<'_> {
    /// The symbols that are called `symbol`.
    fn named(
        &self,
        places: &Places<'_>,
        symbol: &str,
        out: &mut dyn Write,
    ) -> Result<(), ReportError> {
        let mut found = false;
        let mut without = None;
        for (location, sum) in places.sorted() {
            if location.symbol(self.names) != symbol && self.raw(location) != Some(symbol) {
                continue;
            }
            match self.code(location) {
                Ok(code) => {
                    written(self.write(places, (location, sum), &code, out))?;
                    found = true;
                }
                Err(error) => without = without.or_else(|| Some(self.no_code(location, error))),
            }
        }
        if found {
            return Ok(());
        }
        Err(without.unwrap_or_else(|| ReportError::NoSuchSymbol {
            symbol: symbol.to_owned(),
            event: self.event.to_owned(),
            hint: self.hint(),
        }))
    }

    /// What gives more symbols.
    fn hint(&self) -> &'static str {
        match (self.names.symfs.is_some(), self.names.kernel.is_empty()) {
            (true, false) => "",
            (false, false) => "; give --symfs DIR for symbols of programs",
            (true, true) => "; give --vmlinux FILE for symbols of the kernel",
            (false, true) => {
                "; give --symfs DIR for symbols of programs, --vmlinux FILE for those of the kernel"
            }
        }
    }

    /// What its file calls a symbol of a program.
    fn raw(&self, location: CodeLocation) -> Option<&str> {
        match location {
            CodeLocation::Program(file, Some(symbol)) => {
                Some(self.names.raw_program_symbol(file, symbol))
            }
            _ => None,
        }
    }

    /// All that have code and at least `least` percent of the events.
    fn hottest(
        &self,
        places: &Places<'_>,
        least: f64,
        out: &mut dyn Write,
    ) -> Result<(), ReportError> {
        let sorted = places.sorted();
        let enough = sorted.partition_point(|(_, sum)| sum.percent(self.all) >= least);
        let mut without = None;
        let mut left_out = 0;
        let mut found = false;
        for (location, sum) in &sorted[..enough] {
            match self.code(*location) {
                Ok(code) => {
                    found = true;
                    written(self.write(places, (*location, *sum), &code, out))?;
                }
                Err(error) => {
                    left_out += 1;
                    without = without.or_else(|| Some(self.no_code(*location, error)));
                }
            }
        }
        match without {
            Some(error) if !found => return Err(error),
            None if !found => {
                return Err(ReportError::NothingToAnnotate {
                    event: self.event.to_owned(),
                    least,
                    hint: self.hint(),
                });
            }
            Some(error) => {
                let line = format!("# {left_out} more symbols are without code: {error}");
                written(writeln!(out, "{line}"))?;
            }
            None => {}
        }
        match sorted.len() - enough {
            0 => Ok(()),
            more => written(writeln!(
                out,
                "# {more} more symbols have less than {least} % each"
            )),
        }
    }

    fn no_code(&self, location: CodeLocation, error: CodeError) -> ReportError {
        ReportError::NoCode {
            symbol: location.symbol(self.names),
            object: location.whole_object(self.names),
            error,
        }
    }

    fn code(&self, location: CodeLocation) -> Result<Code, CodeError> {
        let names = self.names;
        match location {
            CodeLocation::Program(file, Some(symbol)) => {
                if !names.file(file).is_file() {
                    return Err(CodeError::NoFile);
                }
                let table = names.program_file(file).map(|file| file.symbols());
                let span = table.and_then(|table| table.span(symbol));
                let span = span.ok_or(CodeError::NoSymfs)?;
                let (info, others) = names.programs.file_and_others(file);
                code::of_program(names.symfs.as_ref(), (info, &others), span)
            }
            CodeLocation::Symbol(symbol) if names.kernel.module(symbol).is_some() => {
                Err(CodeError::Module)
            }
            CodeLocation::Symbol(symbol) => {
                let vmlinux = self.vmlinux.ok_or(CodeError::NoVmlinux)?;
                vmlinux.code(&names.kernel, symbol)
            }
            _ => Err(CodeError::NoFile),
        }
    }

    fn write(
        &self,
        places: &Places<'_>,
        (location, sum): (CodeLocation, Sum),
        code: &Code,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let none = BTreeMap::new();
        let samples = places.symbols.get(&location).unwrap_or(&none);
        let lines = listing::lines(code, samples, self.syntax, |at| self.target(location, at));
        let listing = Listing {
            symbol: &location.symbol(self.names),
            object: &location.whole_object(self.names),
            event: self.event,
            sum,
            percent: sum.percent(self.all),
            lines: &lines,
        };
        listing.write(out)
    }

    /// What is at `address` in the file that has `from`: `main+0x1d`.
    fn target(&self, from: CodeLocation, address: u64) -> Option<String> {
        let names = self.names;
        let (found, name) = match from {
            CodeLocation::Program(file, _) => {
                let found = names.program_file(file)?.symbols().find(address)?;
                (found, CodeLocation::Program(file, Some(found.index)))
            }
            _ => {
                let moved = self.vmlinux?.moved?;
                let found = names.kernel.find(address.wrapping_add(moved))?;
                (found, CodeLocation::Symbol(found.index))
            }
        };
        let name = name.symbol(names);
        Some(match found.offset {
            0 => name,
            offset => format!("{name}+{offset:#x}"),
        })
    }
}
