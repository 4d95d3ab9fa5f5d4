//! Callers of programs, by the unwind tables of their files (DWARF CFI), registers and a copy
//! of the top of the stack.
//!
//! Neither files nor stacks are trusted. A caller is one only where the tables of a file that
//! the program has mapped there say so: nothing is guessed by frame pointers.

mod cfi;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::Duration;

use gimli::UnwindContext;
use perfmon_abi::compact::{ChainEnd, GuestPlace, MOST_FRAMES, ProgramFrame, ProgramStack};
use perfmon_abi::wire::programs::Described;

use self::cfi::{Cfi, NoCfi, Registers, Room, UnwindRow, Unwound};
use super::programs::{FileId, Programs};
use super::symfs::Symfs;

/// What the unwind tables of all files may take.
const MOST_TABLES: Room = Room {
    bytes: 512 << 20,
    time: Duration::from_secs(20),
};
/// Places in files whose rows are remembered.
const MOST_ROWS: usize = 1 << 16;
/// Most files that warnings name.
const MOST_WARNINGS: usize = 8;

/// Finds the callers of programs whose files are below a folder.
#[derive(Debug)]
pub struct ProgramUnwinder {
    symfs: Symfs,
    /// Bytes of a stack's copy that is whole.
    stack: usize,
    programs: Programs,
    /// What was read already; none where it cannot be.
    files: HashMap<FileId, Option<Cfi>>,
    /// What further tables may take.
    room: Room,
    rows: HashMap<(FileId, u64), Option<UnwindRow>>,
    context: UnwindContext<usize>,
    warnings: Vec<String>,
    /// Files that no warning names.
    unnamed: u64,
    /// Samples of programs that came without a stack.
    stackless: u64,
}

impl ProgramUnwinder {
    /// For the programs whose files are below `symfs`. Of their stacks `stack` bytes are
    /// recorded.
    #[must_use]
    pub fn new(symfs: Symfs, stack: usize) -> Self {
        Self {
            symfs,
            stack,
            programs: Programs::default(),
            files: HashMap::new(),
            room: MOST_TABLES,
            rows: HashMap::new(),
            context: UnwindContext::new(),
            warnings: Vec::new(),
            unnamed: 0,
            stackless: 0,
        }
    }

    /// Takes a description in.
    pub fn add(&mut self, described: Described) {
        if matches!(described, Described::Mapping(_)) {
            self.programs.add(described);
        }
    }

    /// Everything is described that the callers of `guest` need: nothing without a stack.
    #[must_use]
    pub fn knows(&self, guest: &GuestPlace) -> bool {
        let mut numbers = numbers(guest);
        guest.stack.is_empty()
            || numbers.all(|number| number == 0 || self.programs.mapping(number).is_some())
    }

    /// Why callers are missing: what was wrong with files of programs, and samples without a
    /// stack; a line each.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = self.warnings.clone();
        if self.stackless > 0 {
            warnings.push(format!(
                "{} samples of programs have no callers there, since they came without a stack: \
                 of programs of 32 bits, or of a guest that only its agent knows; record with -g",
                self.stackless
            ));
        }
        if self.unnamed > 0 {
            warnings.push(format!(
                "callers in {} more files are not known for such reasons",
                self.unnamed
            ));
        }
        warnings
    }

    /// Puts the program's callers into `guest` in place of those that it has, and takes its
    /// stack away. Without a stack, or where the tables do not go on, the chain is broken.
    /// Where it reaches over the end of the stack's copy, there are more callers.
    pub fn unwind(&mut self, guest: &mut GuestPlace) {
        let known: Vec<MappedRange> = numbers(guest)
            .filter_map(|number| self.mapped(number))
            .collect();
        let stack = std::mem::take(&mut guest.stack);
        let chain = &mut guest.chain;
        let first = chain.program.first().copied();
        let (Some(first), false) = (first, chain.program_end == Some(ChainEnd::NoProgram)) else {
            return;
        };
        self.stackless += u64::from(stack.is_empty());
        chain.program.clear();
        let mut registers = Registers::of_program(first.address, stack.sp, stack.bp);
        let mut is_interrupted = true;
        let end = loop {
            let place = registers.ip.wrapping_sub(u64::from(!is_interrupted));
            let is_there = |one: &&MappedRange| (one.start..one.end).contains(&place);
            let mapped = known.iter().find(is_there);
            // A return address leads to code; where the program was is known anyway, and
            // what the number of its mapping stands for may be said later.
            if mapped.is_some() || chain.program.is_empty() {
                chain.program.push(ProgramFrame {
                    address: place,
                    mapping: mapped.map_or(first.mapping, |mapped| mapped.number),
                });
            }
            let Some(mapped) = mapped.filter(|_| !stack.is_empty()) else {
                break ChainEnd::Broken;
            };
            if chain.program.len() >= MOST_FRAMES {
                break ChainEnd::Depth;
            }
            match self.caller(mapped, place, &mut registers, &stack) {
                Unwound::Called => is_interrupted = false,
                Unwound::Interrupted => is_interrupted = true,
                Unwound::Outermost => break ChainEnd::Outermost,
                // It is in what was not copied, if there is more.
                Unwound::BehindStack if stack.bytes.len() >= self.stack => break ChainEnd::Depth,
                Unwound::BehindStack | Unwound::Unknown => break ChainEnd::Broken,
            }
        };
        chain.program_end = Some(end);
    }

    fn mapped(&self, number: u64) -> Option<MappedRange> {
        let (info, file) = self.programs.mapping(number)?;
        Some(MappedRange {
            number,
            start: info.start,
            end: info.end,
            offset: info.offset,
            file,
        })
    }

    /// Goes from `place`, which is in `mapped`, to its caller's registers.
    fn caller(
        &mut self,
        mapped: &MappedRange,
        place: u64,
        registers: &mut Registers,
        stack: &ProgramStack,
    ) -> Unwound {
        self.read(mapped.file);
        let Some(Some(cfi)) = self.files.get_mut(&mapped.file) else {
            return Unwound::Unknown;
        };
        let offset = (place - mapped.start).wrapping_add(mapped.offset);
        let Some(address) = cfi.address(offset) else {
            return Unwound::Unknown;
        };
        if self.rows.len() >= MOST_ROWS {
            self.rows.clear();
        }
        let row = match self.rows.entry((mapped.file, address)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => match cfi.row(address, &mut self.context, &mut self.room) {
                Ok(row) => place.insert(row),
                Err(error) => {
                    self.files.insert(mapped.file, None);
                    self.warn(mapped.file, &error);
                    return Unwound::Unknown;
                }
            },
        };
        row.as_ref()
            .map_or(Unwound::Unknown, |row| cfi.caller(row, registers, stack))
    }

    /// Reads the tables of `file`, if nobody has.
    fn read(&mut self, file: FileId) {
        if self.files.contains_key(&file) {
            return;
        }
        let (info, others) = self.programs.file_and_others(file);
        let cfi = info
            .is_file()
            .then(|| Cfi::read(&self.symfs, (info, &others), &mut self.room))
            .transpose();
        let cfi = cfi.unwrap_or_else(|error| {
            self.warn(file, &error);
            None
        });
        self.files.insert(file, cfi);
    }

    fn warn(&mut self, file: FileId, error: &NoCfi) {
        if self.warnings.len() >= MOST_WARNINGS {
            self.unnamed += 1;
            return;
        }
        let info = self.programs.file(file);
        self.warnings.push(format!(
            "callers in {} are not known: below {}: {error}",
            info.whole_name(),
            self.symfs.path(info).display()
        ));
    }
}

/// What a program has mapped somewhere.
#[derive(Clone, Copy, Debug)]
struct MappedRange {
    number: u64,
    start: u64,
    end: u64,
    offset: u64,
    file: FileId,
}

/// Numbers of the mappings that callers of `guest` can be in: what its stack leads to, and
/// where it is.
fn numbers(guest: &GuestPlace) -> impl Iterator<Item = u64> + '_ {
    let first = guest.chain.program.first().map(|frame| frame.mapping);
    first
        .into_iter()
        .chain(guest.stack.mappings.iter().copied())
}
