//! Names of what samples are in: symbols of the guest's kernel, its tasks, and the files and
//! symbols of its programs.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use ahash::AHashMap;

use super::demangle::demangled;
use super::programs::{FileId, FileInfo, Programs, TaskId};
use super::record::Sample;
use super::symbols::{Found, SymbolIndex, SymbolTable};
use super::symfs::{ProgramFile, Symfs};

/// Most symbols of all programs together; a browser has half a million.
const MOST_SYMBOLS: usize = 1 << 22;
/// Most files that warnings name.
const MOST_WARNINGS: usize = 8;

/// How long names of C++ and Rust may be read, in all; most take some microseconds. Those that
/// come later are shown as files have them.
const MOST_TIME: Duration = Duration::from_secs(10);

/// The name of a thread, process or object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WordId(u32);

/// The names that there are for a profile.
#[derive(Debug, Default)]
pub struct Names {
    /// Symbols of the kernel.
    pub kernel: SymbolTable,
    /// Tasks, mappings and files.
    pub programs: Programs,
    /// Where files of programs are looked for.
    pub symfs: Option<Symfs>,
    /// Symbols of programs are shown as their sources have them.
    pub demangle: bool,
    /// Those that were shown.
    shown: RefCell<AHashMap<(FileId, SymbolIndex), Box<str>>>,
    /// How long it took to read them.
    took: Cell<Duration>,
    files: HashMap<FileId, ProgramFile>,
    /// Names of threads, processes and objects, in their order.
    words: Vec<String>,
    warnings: Vec<String>,
}

impl Names {
    /// The names of `programs`, whose files are below `symfs`.
    #[must_use]
    pub fn new(kernel: SymbolTable, programs: Programs, symfs: Option<Symfs>) -> Self {
        let mut names = Self {
            kernel,
            programs,
            symfs,
            ..Self::default()
        };
        names.read_files();
        names.words = names.all_words();
        names
    }

    fn all_words(&self) -> Vec<String> {
        let tasks = self.programs.tasks().iter();
        let tasks = tasks.flat_map(|task| [task.comm.clone(), task.process.clone()]);
        let files = self.programs.files();
        let files = files.map(|(_, file)| file.short().to_owned());
        let modules = self.kernel.modules().iter();
        let modules = modules.map(|module| format!("[{module}]"));
        let others = ["[unknown]", "[kernel.kallsyms]"].map(str::to_owned);
        let words = tasks.chain(files).chain(modules).chain(others);
        let words: BTreeSet<String> = words.collect();
        words.into_iter().collect()
    }

    /// The number of a name; numbers are in the order of names.
    #[must_use]
    pub fn word(&self, text: &str) -> WordId {
        let found = self.words.binary_search_by(|word| word.as_str().cmp(text));
        let index = found.unwrap_or_else(|index| index);
        WordId(u32::try_from(index).unwrap_or(u32::MAX))
    }

    /// The name with a number.
    #[must_use]
    pub fn text(&self, word: WordId) -> &str {
        self.words.get(word.0 as usize).map_or("", String::as_str)
    }

    fn read_files(&mut self) {
        let Some(symfs) = &self.symfs else {
            return;
        };
        let (mut room, mut without) = (MOST_SYMBOLS, 0);
        for (id, info) in self.programs.files().filter(|(_, info)| info.is_file()) {
            let (_, others) = self.programs.file_and_others(id);
            match symfs.program((info, &others), room) {
                Ok(file) => {
                    room -= file.symbols().len().min(room);
                    self.files.insert(id, file);
                }
                Err(_) if self.warnings.len() >= MOST_WARNINGS => without += 1,
                Err(error) => self.warnings.push(format!(
                    "symbols of {} are not known: below {}: {error}",
                    info.whole_name(),
                    symfs.path(info).display()
                )),
            }
        }
        if without > 0 {
            self.warnings.push(format!(
                "symbols of {without} more files are not known for such reasons"
            ));
        }
    }

    /// What was wrong with files of programs; a line each.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The profile says of which tasks its samples are.
    #[must_use]
    pub fn has_tasks(&self) -> bool {
        !self.programs.has_no_tasks()
    }

    /// The task of a sample.
    #[must_use]
    pub fn task_of(&self, sample: &Sample) -> Option<TaskId> {
        self.programs.task(sample.guest.task)
    }

    /// The file of a mapping, and the symbol and its offset at `address` there.
    #[must_use]
    pub fn in_program(&self, mapping: u64, address: u64) -> Option<(FileId, Option<Found>)> {
        let (mapping, file) = self.programs.mapping(mapping)?;
        let offset = address
            .wrapping_sub(mapping.start)
            .wrapping_add(mapping.offset);
        let found = self.files.get(&file);
        Some((file, found.and_then(|file| file.find(offset))))
    }

    /// The name of a symbol of a program, as its file has it.
    #[must_use]
    pub fn raw_program_symbol(&self, file: FileId, symbol: SymbolIndex) -> &str {
        self.files.get(&file).map_or("", |file| file.name(symbol))
    }

    /// The same as reports show it.
    #[must_use]
    pub fn program_symbol(&self, file: FileId, symbol: SymbolIndex) -> String {
        let raw = self.raw_program_symbol(file, symbol);
        if !self.demangle {
            return raw.to_owned();
        }
        let mut shown = self.shown.borrow_mut();
        let name = shown
            .entry((file, symbol))
            .or_insert_with(|| self.demangled(raw).unwrap_or_else(|| raw.to_owned()).into());
        name.to_string()
    }

    fn demangled(&self, raw: &str) -> Option<String> {
        if self.took.get() >= MOST_TIME {
            return None;
        }
        let began = Instant::now();
        let name = demangled(raw);
        self.took.set(self.took.get() + began.elapsed());
        name
    }

    /// The symbols of a program's file, if they are known.
    #[must_use]
    pub fn program_file(&self, file: FileId) -> Option<&ProgramFile> {
        self.files.get(&file)
    }

    /// What is known of a program's file.
    #[must_use]
    pub fn file(&self, file: FileId) -> &FileInfo {
        self.programs.file(file)
    }

    /// The name of a thread; `[unknown]` where it is not known.
    #[must_use]
    pub fn comm(&self, task: Option<TaskId>) -> &str {
        let info = task.and_then(|task| self.programs.task_info(task));
        info.map_or("[unknown]", |info| info.comm.as_str())
    }

    /// Process and thread; 0 where they are not known.
    #[must_use]
    pub fn ids(&self, task: Option<TaskId>) -> (u32, u32) {
        let info = task.and_then(|task| self.programs.task_info(task));
        info.map_or((0, 0), |info| (info.pid, info.tid))
    }
}
