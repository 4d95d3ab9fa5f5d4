//! The unwind tables of one ELF file.

#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use gimli::{
    BaseAddresses, CfaRule, CieOrFde, CommonInformationEntry, DebugFrame, EhFrame, Encoding,
    EndianSlice, EvaluationResult, LittleEndian, Location, Register, RegisterRule, UnwindContext,
    UnwindExpression, UnwindOffset, UnwindSection, Value, X86_64,
};
use object::{Architecture, Object, ObjectSection, ObjectSegment};
use perfmon_abi::compact::ProgramStack;
use thiserror::Error;

use crate::profile::programs::FileInfo;
use crate::profile::symbols::elf::ElfData;
use crate::profile::symfs::{Symfs, SymfsError};

/// How long the tables of one file may be read and searched.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long a search may take that is not counted: most take some microseconds.
const USUAL: Duration = Duration::from_micros(50);
/// Most parts of a file that a program has in memory; linkers make some ten.
const MOST_SEGMENTS: usize = 1 << 10;
/// Most bytes of an entry that is used: what says how to unwind one function. In a compiler
/// one has 20 KiB, the others less than 7.
const MOST_ENTRY: usize = 32 << 10;
/// Most steps of an expression.
const MOST_STEPS: u32 = 256;
/// General registers, by their DWARF numbers.
const GENERAL: usize = 16;
/// Bytes of a word.
const WORD: usize = 8;

/// Why the callers in a file are not known. Prints as one line without the file's name.
#[derive(Debug, Error)]
pub(super) enum NoCfi {
    /// It cannot be used.
    #[error("{0}")]
    Symfs(#[from] SymfsError),
    /// It is no ELF file.
    #[error("damaged ELF file: {0}")]
    Damaged(#[from] object::Error),
    /// It is for another kind of processor.
    #[error("it is not for x86-64: give the file that the guest has")]
    OtherProcessor,
    /// Nothing in it says how to unwind.
    #[error(
        "it has no unwind tables (.eh_frame, or .debug_frame that is not compressed): compile it \
         with -fasynchronous-unwind-tables, or record with -g"
    )]
    None,
    /// It has more parts than programs have.
    #[error("it has more than 1024 segments")]
    Segments,
    /// Too much does.
    #[error("its unwind tables are larger than is read, or take too long; record with -g")]
    TooLong,
}

/// What the tables of all files may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Bytes, with those of what finds places in them.
    pub(super) bytes: u64,
    /// For reading and searching them.
    pub(super) time: Duration,
}

impl Room {
    fn take_bytes(&mut self, bytes: u64) -> Result<(), NoCfi> {
        self.bytes = self.bytes.checked_sub(bytes).ok_or(NoCfi::TooLong)?;
        Ok(())
    }
}

/// Registers of a program, as far as they are known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Registers {
    pub(super) ip: u64,
    general: [Option<u64>; GENERAL],
}

impl Registers {
    pub(super) fn of_program(ip: u64, sp: u64, bp: Option<u64>) -> Self {
        let mut general = [None; GENERAL];
        general[usize::from(X86_64::RSP.0)] = Some(sp);
        general[usize::from(X86_64::RBP.0)] = bp;
        Self { ip, general }
    }

    fn get(&self, register: Register) -> Option<u64> {
        if register == X86_64::RA {
            return Some(self.ip);
        }
        self.general.get(usize::from(register.0)).copied().flatten()
    }
}

/// What became of a step to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unwound {
    /// The registers are the caller's.
    Called,
    /// They are those of what a signal has interrupted.
    Interrupted,
    /// There is none.
    Outermost,
    /// It is behind what there is of the stack.
    BehindStack,
    /// Nobody knows.
    Unknown,
}

/// Why a value is not known.
#[derive(Clone, Copy, Debug)]
enum NoValue {
    /// It is behind the copy of the stack.
    Behind,
    /// The tables do not say it, or it is where none is.
    Unknown,
}

type Bytes<'a> = EndianSlice<'a, LittleEndian>;

/// How to unwind from one place.
#[derive(Clone, Debug)]
pub(super) struct UnwindRow {
    table: usize,
    encoding: Encoding,
    cfa: CfaRule<usize>,
    rules: Box<[(Register, RegisterRule<usize>)]>,
    /// The caller was interrupted by a signal.
    is_signal: bool,
}

/// The tables of a file.
#[derive(Debug)]
pub(super) struct Cfi {
    segments: Vec<CfiSegment>,
    tables: Vec<CfiTable>,
    /// Of all of them, by address.
    places: Vec<CfiEntry>,
    /// For how long they may be searched.
    time: Duration,
}

#[derive(Debug)]
struct CfiSegment {
    offset: u64,
    size: u64,
    address: u64,
}

#[derive(Debug)]
struct CfiTable {
    is_eh: bool,
    bases: BaseAddresses,
    bytes: Vec<u8>,
}

/// What an entry of a table is about.
#[derive(Clone, Copy, Debug)]
struct CfiEntry {
    start: u64,
    end: u64,
    table: usize,
    /// Of the entry, in its table.
    offset: usize,
}

impl CfiTable {
    fn eh(&self) -> EhFrame<Bytes<'_>> {
        EhFrame::new(&self.bytes, LittleEndian)
    }

    fn debug(&self) -> DebugFrame<Bytes<'_>> {
        let mut table = DebugFrame::new(&self.bytes, LittleEndian);
        table.set_address_size(8);
        table
    }
}

impl Cfi {
    /// Of the program or library `info`, and others of its name, below `symfs`. `room` is what its tables may
    /// take, and becomes what they leave.
    pub(super) fn read(
        symfs: &Symfs,
        info: (&FileInfo, &[&FileInfo]),
        room: &mut Room,
    ) -> Result<Self, NoCfi> {
        let began = Instant::now();
        let patience = PATIENCE.min(room.time);
        let cfi = Self::read_until(symfs, info, room, began + patience);
        let took = began.elapsed();
        room.time = room.time.saturating_sub(took);
        let mut cfi = cfi?;
        cfi.time = patience.saturating_sub(took);
        Ok(cfi)
    }

    fn read_until(
        symfs: &Symfs,
        info: (&FileInfo, &[&FileInfo]),
        room: &mut Room,
        end: Instant,
    ) -> Result<Self, NoCfi> {
        let data = ElfData::new(symfs.of_build(info)?);
        let file = object::File::parse(&data)?;
        if file.architecture() != Architecture::X86_64 {
            return Err(NoCfi::OtherProcessor);
        }
        let segments = segments_of(&file)?;
        room.take_bytes(size_of_val(segments.as_slice()) as u64)?;
        let mut cfi = Self {
            segments,
            tables: Vec::new(),
            places: Vec::new(),
            time: Duration::ZERO,
        };
        let address = |name| {
            let section = file.section_by_name(name);
            section.map_or(0, |section| section.address())
        };
        let bases = BaseAddresses::default()
            .set_text(address(".text"))
            .set_got(address(".got"))
            .set_eh_frame(address(".eh_frame"));
        for name in [".eh_frame", ".debug_frame"] {
            let Some(section) = file.section_by_name(name) else {
                continue;
            };
            if section.compressed_file_range()?.format != object::CompressionFormat::None {
                continue;
            }
            room.take_bytes(section.size())?;
            cfi.tables.push(CfiTable {
                is_eh: name == ".eh_frame",
                bases: bases.clone(),
                bytes: section.data()?.to_vec(),
            });
        }
        let places = &mut cfi.places;
        let is_whole = cfi.tables.iter().enumerate().all(|(number, table)| {
            let found = if table.is_eh {
                find_places(&table.eh(), (number, table), end, places)
            } else {
                find_places(&table.debug(), (number, table), end, places)
            };
            found.is_some()
        });
        if !is_whole {
            return Err(NoCfi::TooLong);
        }
        if cfi.places.is_empty() {
            return Err(NoCfi::None);
        }
        room.take_bytes(size_of_val(cfi.places.as_slice()) as u64)?;
        cfi.sort();
        Ok(cfi)
    }

    /// Of several places that begin at one address the longest comes last, which is found.
    fn sort(&mut self) {
        self.places.sort_by_key(|place| (place.start, place.end));
    }

    /// The address that the file itself gives to what is at `offset` in it.
    pub(super) fn address(&self, offset: u64) -> Option<u64> {
        let at = |one: &CfiSegment| offset.checked_sub(one.offset).filter(|at| *at < one.size);
        let found = self.segments.iter().find_map(|one| Some((one, at(one)?)));
        found.map(|(segment, at)| segment.address.wrapping_add(at))
    }

    /// How to unwind from `address`, if a table says so. What that takes beyond the usual is
    /// `room`'s and the file's.
    ///
    /// # Errors
    /// Searches have taken too long.
    pub(super) fn row(
        &mut self,
        address: u64,
        context: &mut UnwindContext<usize>,
        room: &mut Room,
    ) -> Result<Option<UnwindRow>, NoCfi> {
        let mut took = Duration::MAX;
        let mut row = None;
        // The host may have been busy: what takes long twice does.
        for _ in 0..2 {
            let began = Instant::now();
            row = self.find_row(address, context);
            took = took.min(began.elapsed());
            if took <= USUAL {
                return Ok(row);
            }
        }
        self.time = self.time.saturating_sub(took);
        room.time = room.time.saturating_sub(took);
        if self.time.is_zero() || room.time.is_zero() {
            return Err(NoCfi::TooLong);
        }
        Ok(row)
    }

    fn find_row(&self, address: u64, context: &mut UnwindContext<usize>) -> Option<UnwindRow> {
        let behind = self.places.partition_point(|place| place.start <= address);
        let place = *self.places.get(behind.checked_sub(1)?)?;
        let table = self
            .tables
            .get(place.table)
            .filter(|_| address < place.end)?;
        let at = (place, address);
        if table.is_eh {
            row(&table.eh(), table, at, context)
        } else {
            row(&table.debug(), table, at, context)
        }
    }

    /// Goes to the caller of where `row` is about.
    pub(super) fn caller(
        &self,
        row: &UnwindRow,
        registers: &mut Registers,
        stack: &ProgramStack,
    ) -> Unwound {
        let Some(table) = self.tables.get(row.table) else {
            return Unwound::Unknown;
        };
        let step = Step {
            row,
            registers,
            stack,
        };
        let next = if table.is_eh {
            step.next(&table.eh())
        } else {
            step.next(&table.debug())
        };
        match next {
            Ok(Some(next)) if next.ip == 0 => Unwound::Outermost,
            Ok(Some(next)) => {
                let sp = |of: &Registers| of.get(X86_64::RSP);
                // Callers are above, but for one that a signal has interrupted.
                if sp(&next) <= sp(registers) && !row.is_signal {
                    return Unwound::Unknown;
                }
                *registers = next;
                if row.is_signal {
                    Unwound::Interrupted
                } else {
                    Unwound::Called
                }
            }
            Ok(None) => Unwound::Outermost,
            Err(NoValue::Behind) => Unwound::BehindStack,
            Err(NoValue::Unknown) => Unwound::Unknown,
        }
    }
}

/// Where the parts of a file lie in memory.
fn segments_of<'data>(file: &impl Object<'data>) -> Result<Vec<CfiSegment>, NoCfi> {
    let segments = file.segments().map(|segment| {
        let (offset, size) = segment.file_range();
        let address = segment.address();
        CfiSegment {
            offset,
            size,
            address,
        }
    });
    let segments: Vec<CfiSegment> = segments.take(MOST_SEGMENTS + 1).collect();
    if segments.len() > MOST_SEGMENTS {
        return Err(NoCfi::Segments);
    }
    Ok(segments)
}

/// Adds what the entries of a table are about, as far as it is not damaged; `None` where that
/// takes too long.
fn find_places<'a, S>(
    section: &S,
    (number, table): (usize, &CfiTable),
    end: Instant,
    places: &mut Vec<CfiEntry>,
) -> Option<()>
where
    S: UnwindSection<Bytes<'a>>,
    S::Offset: UnwindOffset<usize>,
{
    let mut entries = section.entries(&table.bases);
    let mut last: Option<CommonInformationEntry<Bytes<'a>>> = None;
    while let Ok(Some(entry)) = entries.next() {
        if Instant::now() >= end {
            return None;
        }
        let CieOrFde::Fde(entry) = entry else {
            continue;
        };
        // Many entries have one in common, each behind the other.
        let entry = entry.parse(|section, bases, offset| match &last {
            Some(known) if known.offset() == UnwindOffset::into(offset) => Ok(known.clone()),
            _ => section.cie_from_offset(bases, offset),
        });
        let Ok(entry) = entry else {
            continue;
        };
        last = Some(entry.cie().clone());
        // What a linker has thrown away has no length.
        let is_any = entry.initial_address() < entry.end_address();
        if is_any && entry.entry_len().max(entry.cie().entry_len()) <= MOST_ENTRY {
            places.push(CfiEntry {
                start: entry.initial_address(),
                end: entry.end_address(),
                table: number,
                offset: entry.offset(),
            });
        }
    }
    Some(())
}

fn row<'a, S>(
    section: &S,
    table: &CfiTable,
    (place, address): (CfiEntry, u64),
    context: &mut UnwindContext<usize>,
) -> Option<UnwindRow>
where
    S: UnwindSection<Bytes<'a>>,
    S::Offset: UnwindOffset<usize>,
{
    let entry = section
        .fde_from_offset(&table.bases, place.offset.into(), S::cie_from_offset)
        .ok()?;
    if entry.cie().return_address_register() != X86_64::RA {
        return None;
    }
    let row = entry
        .unwind_info_for_address(section, &table.bases, context, address)
        .ok()?;
    let is_general = |register: Register| usize::from(register.0) <= GENERAL;
    let rules = row
        .registers()
        .filter(|(register, _)| is_general(*register));
    Some(UnwindRow {
        table: place.table,
        encoding: entry.cie().encoding(),
        cfa: row.cfa().clone(),
        rules: rules.cloned().collect(),
        is_signal: entry.is_signal_trampoline(),
    })
}

/// A step to the caller.
struct Step<'a> {
    row: &'a UnwindRow,
    registers: &'a Registers,
    stack: &'a ProgramStack,
}

impl Step<'_> {
    /// The caller's registers; none where there is no caller.
    fn next<'b, S>(&self, section: &S) -> Result<Option<Registers>, NoValue>
    where
        S: UnwindSection<Bytes<'b>>,
    {
        let cfa = match &self.row.cfa {
            CfaRule::RegisterAndOffset { register, offset } => {
                let base = self.registers.get(*register).ok_or(NoValue::Unknown)?;
                base.wrapping_add_signed(*offset)
            }
            CfaRule::Expression(expression) => self.value(section, expression, None)?,
        };
        let mut next = Registers::of_program(0, cfa, None);
        // What a function leaves as it was, or saves (System V ABI, figure 3.4).
        for kept in [
            X86_64::RBX,
            X86_64::RBP,
            X86_64::R12,
            X86_64::R13,
            X86_64::R14,
            X86_64::R15,
        ] {
            next.general[usize::from(kept.0)] = self.registers.get(kept);
        }
        let mut back = Err(NoValue::Unknown);
        for (register, rule) in &self.row.rules {
            let value = match rule {
                RegisterRule::Undefined if *register == X86_64::RA => return Ok(None),
                RegisterRule::Undefined => Err(NoValue::Unknown),
                RegisterRule::SameValue => self.registers.get(*register).ok_or(NoValue::Unknown),
                RegisterRule::Offset(offset) => self.on_stack(cfa.wrapping_add_signed(*offset)),
                RegisterRule::ValOffset(offset) => Ok(cfa.wrapping_add_signed(*offset)),
                RegisterRule::Register(other) => self.registers.get(*other).ok_or(NoValue::Unknown),
                RegisterRule::Expression(expression) => self
                    .value(section, expression, Some(cfa))
                    .and_then(|at| self.on_stack(at)),
                RegisterRule::ValExpression(expression) => {
                    self.value(section, expression, Some(cfa))
                }
                _ => Err(NoValue::Unknown),
            };
            if *register == X86_64::RA {
                back = value;
            } else if let Some(place) = next.general.get_mut(usize::from(register.0)) {
                *place = value.ok();
            }
        }
        next.ip = back?;
        Ok(Some(next))
    }

    /// What an expression computes.
    fn value<'b, S>(
        &self,
        section: &S,
        expression: &UnwindExpression<usize>,
        first: Option<u64>,
    ) -> Result<u64, NoValue>
    where
        S: UnwindSection<Bytes<'b>>,
    {
        let expression = expression.get(section).map_err(|_| NoValue::Unknown)?;
        let mut evaluation = expression.evaluation(self.row.encoding);
        evaluation.set_max_iterations(MOST_STEPS);
        if let Some(first) = first {
            evaluation.set_initial_value(first);
        }
        let mut state = evaluation.evaluate();
        loop {
            state = match state.map_err(|_| NoValue::Unknown)? {
                EvaluationResult::Complete => break,
                EvaluationResult::RequiresMemory { address, size, .. } => {
                    if usize::from(size) != WORD {
                        return Err(NoValue::Unknown);
                    }
                    let word = Value::Generic(self.on_stack(address)?);
                    evaluation.resume_with_memory(word)
                }
                EvaluationResult::RequiresRegister { register, .. } => {
                    let value = self.registers.get(register).ok_or(NoValue::Unknown)?;
                    evaluation.resume_with_register(Value::Generic(value))
                }
                _ => return Err(NoValue::Unknown),
            };
        }
        match evaluation.as_result().last().map(|piece| &piece.location) {
            Some(Location::Address { address }) => Ok(*address),
            _ => Err(NoValue::Unknown),
        }
    }

    /// The word that the stack has at `address`.
    fn on_stack(&self, address: u64) -> Result<u64, NoValue> {
        let bytes = &self.stack.bytes;
        let at = address.checked_sub(self.stack.sp).ok_or(NoValue::Unknown)?;
        let at = usize::try_from(at).map_err(|_| NoValue::Unknown)?;
        let word = at.checked_add(WORD).and_then(|end| bytes.get(at..end));
        let word = word.and_then(|word| word.try_into().ok());
        word.map(u64::from_le_bytes).ok_or(NoValue::Behind)
    }
}
