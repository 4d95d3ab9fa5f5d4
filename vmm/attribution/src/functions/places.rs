//! From an address of a program to the function there.

use std::collections::BTreeMap;
use std::sync::Arc;

use ahash::AHashMap;
use emu::{Sight, State};
use guest_view::{File, KernelView, Look, Mapping, Mode, ProgramMemory, Registers};

use super::Objects;
use super::contexts::FunctionId;
use super::object::Symbols;
use crate::kernel::Physical;

/// Functions, and memories of programs, that are told apart: a guest that has more of them has the
/// rest as one.
const MOST: usize = 1 << 20;
const MEMORIES: usize = 1 << 10;
/// Addresses whose functions are at hand, of each memory.
const AT_HAND: usize = 1024;
/// Bytes of the kernel's code for programs at most.
const VDSO: u64 = 1 << 16;

/// What is mapped from no file, and where nothing is known.
const ANONYMOUS: &str = "[anon]";
const UNKNOWN: &str = "[unknown]";
const KERNELS: &str = "[vdso]";
/// Behind the path of a file that is not this machine's.
const OTHER: &str = "[made in the guest]";

/// A function where a program has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) function: FunctionId,
    /// Linear address, and bytes.
    pub(crate) start: u64,
    pub(crate) len: u64,
}

/// Where a part of a file is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// The place of the beginning in the file.
    pub(crate) offset: u64,
}

/// By the number of the file, where code of it was executed first.
pub(crate) type Mapped = Arc<BTreeMap<usize, Range>>;

/// The code of one memory.
#[derive(Debug, Clone, Default)]
struct Code {
    mapped: Mapped,
    /// What was met, by the beginning. A forked process has the same as long as it meets nothing.
    met: Arc<BTreeMap<u64, Place>>,
    /// By some bits of an address, the address and its function.
    at_hand: Vec<(u64, Place)>,
}

impl Code {
    fn at(&mut self, address: u64) -> Option<Place> {
        if self.at_hand.is_empty() {
            self.at_hand = vec![(0, Place::default()); AT_HAND];
        }
        let slot = slot(address);
        let (of, place) = self.at_hand[slot];
        if of == address && place.len > 0 {
            return Some(place);
        }
        let (_, found) = self.met.range(..=address).next_back()?;
        let found = *found;
        if address - found.start >= found.len {
            return None;
        }
        self.at_hand[slot] = (address, found);
        Some(found)
    }

    fn forget(&mut self, start: u64, end: u64) {
        let met = self.met.range(..end);
        let gone: Vec<u64> = met
            .filter(|(_, place)| place.start.saturating_add(place.len) > start)
            .map(|(start, _)| *start)
            .collect();
        if !gone.is_empty() {
            self.at_hand.clear();
        }
        for start in gone {
            Arc::make_mut(&mut self.met).remove(&start);
        }
    }
}

fn slot(address: u64) -> usize {
    let mixed = address ^ address >> 10 ^ address >> 20;
    usize::try_from(mixed & (AT_HAND as u64 - 1)).unwrap_or(0)
}

/// The functions of all programs.
#[derive(Debug)]
pub(crate) struct Places {
    view: KernelView,
    objects: Box<dyn Objects>,
    /// Paths, and the functions of these files.
    files: Vec<(String, Symbols)>,
    by_path: BTreeMap<String, usize>,
    by_file: AHashMap<File, usize>,
    /// By number: the file, the offset in it, and the name.
    functions: Vec<(usize, u64, String)>,
    /// By file and offset in it.
    numbers: AHashMap<(usize, u64), FunctionId>,
    memories: AHashMap<u64, Code>,
    /// Patterns of names, and the functions that have one of these.
    patterns: Vec<String>,
    chosen: Vec<FunctionId>,
}

impl Places {
    pub(crate) fn new(view: KernelView, objects: Box<dyn Objects>) -> Self {
        Self {
            view,
            objects,
            files: Vec::new(),
            by_path: BTreeMap::new(),
            by_file: AHashMap::new(),
            functions: Vec::new(),
            numbers: AHashMap::new(),
            memories: AHashMap::new(),
            patterns: Vec::new(),
            chosen: Vec::new(),
        }
    }

    /// From now on it knows which functions have a name of these patterns.
    pub(crate) fn choose(&mut self, patterns: Vec<String>) {
        self.patterns = patterns;
    }

    pub(crate) fn chosen(&self) -> &[FunctionId] {
        &self.chosen
    }

    /// The name of the function at an address of the task that runs, and its file.
    pub(crate) fn who(
        &mut self,
        processor: usize,
        address: u64,
        sight: &Sight<'_>,
    ) -> Option<(String, String)> {
        let (place, ..) = self.mapped(processor, address, sight)?;
        let (object, name) = self.name(place.function);
        Some((name.to_owned(), object.to_owned()))
    }

    /// The file and the name of a function.
    pub(crate) fn name(&self, function: FunctionId) -> (&str, &str) {
        match self.functions.get(function as usize) {
            Some((file, _, name)) => (&self.files[*file].0, name),
            None => (UNKNOWN, UNKNOWN),
        }
    }

    /// The place of a function in its file.
    pub(crate) fn offset(&self, function: FunctionId) -> u64 {
        let function = self.functions.get(function as usize);
        function.map_or(0, |(_, offset, _)| *offset)
    }

    /// The files whose code was executed in a memory.
    pub(crate) fn mapped_in(&self, memory: u64) -> Mapped {
        let code = self.memories.get(&memory);
        code.map(|code| code.mapped.clone()).unwrap_or_default()
    }

    /// The path of a file, and its build id in hexadecimal digits; empty without one.
    pub(crate) fn mapped_object(&self, file: usize) -> (&str, String) {
        let (path, symbols) = &self.files[file];
        let digits = symbols.build_id().iter().map(|byte| format!("{byte:02x}"));
        (path, digits.collect())
    }

    /// A process was forked: its memory is a copy of another's.
    pub(crate) fn copy(&mut self, from: u64, to: u64) {
        let from = self.memories.get(&from);
        let copy = from.map(|code| (code.mapped.clone(), code.met.clone()));
        let (mapped, met) = copy.unwrap_or_default();
        let code = Code {
            mapped,
            met,
            at_hand: Vec::new(),
        };
        self.keep(to, code);
    }

    /// What is known of a memory is that of another one's, which has ended.
    pub(crate) fn forget(&mut self, memory: u64) {
        self.memories.remove(&memory);
    }

    /// A part of a memory may be something else now.
    pub(crate) fn unmapped(&mut self, memory: u64, start: u64, len: u64) {
        if let Some(code) = self.memories.get_mut(&memory) {
            code.forget(start, start.saturating_add(len));
        }
    }

    /// The function at an address of the program that runs, on this processor with this memory.
    #[inline]
    pub(crate) fn at(
        &mut self,
        (memory, processor): (u64, usize),
        address: u64,
        sight: &Sight<'_>,
    ) -> Place {
        let known = self.memories.get_mut(&memory);
        match known.and_then(|code| code.at(address)) {
            Some(place) => place,
            None => self.find((memory, processor), address, sight),
        }
    }

    fn keep(&mut self, memory: u64, code: Code) {
        if self.memories.len() >= MEMORIES {
            // Most of them are of processes that have ended.
            self.memories.clear();
        }
        self.memories.insert(memory, code);
    }

    #[cold]
    fn find(&mut self, of: (u64, usize), address: u64, sight: &Sight<'_>) -> Place {
        let (memory, processor) = of;
        let found = self.mapped(processor, address, sight);
        let (place, mapped) = match found {
            Some((place, file, range)) => (place, Some((file, range))),
            None => (self.unknown(address), None),
        };
        if !self.memories.contains_key(&memory) {
            self.keep(memory, Code::default());
        }
        if let Some(code) = self.memories.get_mut(&memory) {
            // What it overlaps was found before something else was mapped there.
            code.forget(place.start, place.start.saturating_add(place.len));
            Arc::make_mut(&mut code.met).insert(place.start, place);
            if let Some((file, range)) = mapped.filter(|(file, _)| !code.mapped.contains_key(file))
            {
                Arc::make_mut(&mut code.mapped).insert(file, range);
            }
        }
        place
    }

    /// Nothing is known of the page.
    fn unknown(&mut self, address: u64) -> Place {
        let file = self.file(UNKNOWN, |_| Symbols::default());
        Place {
            function: self.number(file, 0, UNKNOWN.to_owned()),
            start: address & !0xfff,
            len: 0x1000,
        }
    }

    /// The bytes at an address as the mapped file has them, up to the end of the mapping: those of a
    /// page that the program has not touched are in the file alone.
    pub(crate) fn of_file(
        &mut self,
        processor: usize,
        address: u64,
        sight: &Sight<'_>,
    ) -> Option<Vec<u8>> {
        let view = self.view.clone();
        let ram = Physical(sight.ram());
        let look = Look::at(&view, &ram);
        let (_, mapping) = mapping_at(&look, (&view, &ram), (processor, address), sight)?;
        let path = look.path(&mapping.file?).ok()?.name;
        let offset = mapping.offset.checked_add(address - mapping.start)?;
        let mut bytes = self.objects.read(&path)?;
        let start = usize::try_from(offset)
            .ok()
            .filter(|at| *at < bytes.len())?;
        let len = usize::try_from(mapping.end - address).ok()?;
        bytes.drain(..start);
        bytes.truncate(len);
        Some(bytes)
    }

    /// By what is mapped there: the number of the file, and where it is, too.
    fn mapped(
        &mut self,
        processor: usize,
        address: u64,
        sight: &Sight<'_>,
    ) -> Option<(Place, usize, Range)> {
        let view = self.view.clone();
        let ram = Physical(sight.ram());
        let look = Look::at(&view, &ram);
        let (memory, mapping) = mapping_at(&look, (&view, &ram), (processor, address), sight)?;
        let file = if mapping.is_vdso {
            self.file(KERNELS, |_| kernels(&mapping, sight))
        } else if let Some(file) = mapping.file {
            self.mapped_file(&look, (memory, &mapping), file)
        } else {
            self.file(ANONYMOUS, |_| Symbols::default())
        };
        let range = Range {
            start: mapping.start,
            end: mapping.end,
            offset: mapping.offset,
        };
        let inside = address - mapping.start;
        let covers = self.files[file].1.at(mapping.offset + inside);
        let Some(covers) = covers else {
            let place = Place {
                function: self.number(file, 0, UNKNOWN.to_owned()),
                start: mapping.start,
                len: mapping.end - mapping.start,
            };
            return Some((place, file, range));
        };
        let start = address.saturating_sub(covers.before).max(mapping.start);
        let end = address
            .saturating_sub(covers.before)
            .saturating_add(covers.len);
        let name = covers.name;
        let name = name.unwrap_or_else(|| format!("[{:#x}]", covers.offset));
        let place = Place {
            function: self.number(file, covers.offset, name),
            start,
            len: end.min(mapping.end).checked_sub(start)?,
        };
        Some((place, file, range))
    }

    /// The guest may have another file at the path than this machine: one that it has made itself.
    /// Of that the functions are not known.
    fn mapped_file(
        &mut self,
        look: &Look<'_>,
        (memory, mapping): (ProgramMemory, &Mapping),
        file: File,
    ) -> usize {
        if let Some(known) = self.by_file.get(&file) {
            return *known;
        }
        let path = match look.path(&file) {
            Ok(path) => path.name,
            Err(_) => UNKNOWN.to_owned(),
        };
        let number = self.file(&path, |objects| {
            let bytes = objects.read(&path);
            bytes.map_or_else(Symbols::default, |bytes| Symbols::of(&bytes))
        });
        let own = look.build_id(memory, mapping);
        let other = own.is_some_and(|own| !self.files[number].1.is(own.bytes()));
        let number = if other {
            self.file(&format!("{path} {OTHER}"), |_| Symbols::default())
        } else {
            number
        };
        self.by_file.insert(file, number);
        number
    }

    /// The number of the file at `path`, which is read the first time.
    fn file(&mut self, path: &str, read: impl FnOnce(&mut dyn Objects) -> Symbols) -> usize {
        if let Some(known) = self.by_path.get(path) {
            return *known;
        }
        let number = self.files.len();
        let symbols = read(&mut *self.objects);
        self.files.push((path.to_owned(), symbols));
        self.by_path.insert(path.to_owned(), number);
        number
    }

    fn number(&mut self, file: usize, offset: u64, name: String) -> FunctionId {
        if let Some(known) = self.numbers.get(&(file, offset)) {
            return *known;
        }
        let number = self.functions.len();
        if number >= MOST {
            return FunctionId::try_from(MOST).unwrap_or(FunctionId::MAX);
        }
        let number = FunctionId::try_from(number).unwrap_or(FunctionId::MAX);
        if self.patterns.iter().any(|pattern| is_like(pattern, &name)) {
            self.chosen.push(number);
        }
        self.functions.push((file, offset, name));
        self.numbers.insert((file, offset), number);
        number
    }
}

/// Whether a name is one of a pattern, in which `*` is any text and `?` any letter.
fn is_like(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    let (mut at, mut of) = (0, 0);
    // The last `*`, and where what it stands for ends.
    let mut star = None;
    while at < name.len() {
        match pattern.get(of) {
            Some('*') => {
                star = Some((of, at));
                of += 1;
            }
            Some(letter) if *letter == '?' || *letter == name[at] => {
                at += 1;
                of += 1;
            }
            _ => {
                let Some((place, end)) = star else {
                    return false;
                };
                star = Some((place, end + 1));
                at = end + 1;
                of = place + 1;
            }
        }
    }
    pattern[of..].iter().all(|letter| *letter == '*')
}

/// The kernel's code for programs, as it is in memory.
fn kernels(mapping: &Mapping, sight: &Sight<'_>) -> Symbols {
    let len = (mapping.end - mapping.start).min(VDSO);
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    if sight.read(mapping.start, &mut bytes) {
        Symbols::of(&bytes)
    } else {
        Symbols::default()
    }
}

/// What is mapped at an address of the program that a processor runs, and that program's memory.
fn mapping_at(
    look: &Look<'_>,
    (view, ram): (&KernelView, &Physical<'_>),
    (processor, address): (usize, u64),
    sight: &Sight<'_>,
) -> Option<(ProgramMemory, Mapping)> {
    let number = view.processor(ram, u32::try_from(processor).ok()?)?;
    let task = look.task(number, &registers(sight.state())).ok()?;
    let memory = task.memory?;
    Some((memory, look.mapping(memory, address).ok()?))
}

/// As a look wants them.
fn registers(state: &State) -> Registers {
    Registers {
        rip: state.rip,
        rsp: state.r[4],
        rbp: state.r[5],
        rdx: state.r[2],
        rdi: state.r[7],
        r10: state.r[10],
        r13: state.r[13],
        cr3: state.cr3,
        mode: Mode::of_cs(state.segment(emu::Seg::Cs).selector),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_like_its_names() {
        let check = |pattern, name, expected| {
            assert_eq!(is_like(pattern, name), expected, "{pattern} {name}");
        };
        check("main", "main", true);
        check("main", "main2", false);
        check("*", "", true);
        check("*::bench_*", "crate::bench_one::run", true);
        check("*::bench_*", "crate::bench", false);
        check("a*b*c", "a__b__b__c", true);
        check("a*b?c", "a__b__bxc", true);
        check("a?", "a", false);
    }

    #[test]
    fn what_was_unmapped_is_looked_for_anew() {
        let mut code = Code::default();
        let place = |function, start, len| Place {
            function,
            start,
            len,
        };
        for one in [place(1, 0x1000, 0x100), place(2, 0x2000, 0x800)] {
            Arc::make_mut(&mut code.met).insert(one.start, one);
        }
        assert_eq!(code.at(0x10ff), Some(place(1, 0x1000, 0x100)));
        assert_eq!(code.at(0x10ff), Some(place(1, 0x1000, 0x100)));
        assert_eq!(code.at(0x1100), None);
        code.forget(0x10f0, 0x2000);
        assert_eq!((code.at(0x10ff), code.at(0x1000)), (None, None));
        assert_eq!(code.at(0x2400).map(|place| place.function), Some(2));
    }
}
