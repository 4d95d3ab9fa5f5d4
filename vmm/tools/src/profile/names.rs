//! Names of what samples are in: symbols of the guest's kernel, its tasks, and the files and
//! symbols of its programs.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ahash::AHashMap;
use perfmon_abi::wire::programs::TaskInfo;
use symbol_names::demangled;

use super::jit::{CodeMap, CodeMaps, Made};
use super::programs::{FileId, FileInfo, Programs, TaskId};
use super::record::Sample;
use super::symbols::{Found, SymbolIndex, SymbolTable};
use super::symfs::{ProgramFile, Symfs, SymfsError};

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
    /// Files that have no symbols, since these were taken out.
    stripped: HashSet<FileId>,
    /// What processes made while they ran, by their numbers.
    made: HashMap<u32, FileId>,
    code_maps: HashMap<FileId, Arc<CodeMap>>,
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
        let room = names.read_files();
        names.read_code_maps(room);
        names.words = names.all_words();
        names
    }

    fn all_words(&self) -> Vec<String> {
        let tasks = self.programs.tasks().iter();
        let tasks = tasks.flat_map(|task| [task.comm.clone(), task.process.clone()]);
        let files = self.programs.files();
        let files = files.map(|(_, file)| file.short().into_owned());
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

    /// How many more symbols there may be.
    fn read_files(&mut self) -> usize {
        let Some(symfs) = &self.symfs else {
            return 0;
        };
        let (mut room, mut without) = (MOST_SYMBOLS, 0);
        for (id, info) in self.programs.files().filter(|(_, info)| info.is_file()) {
            let (_, others) = self.programs.file_and_others(id);
            match symfs.program((info, &others), room) {
                Ok(file) => {
                    room -= file.symbols().len().min(room);
                    self.files.insert(id, file);
                    continue;
                }
                // No folder has it, and what was made there may have names.
                Err(_) if info.is_anonymous() => continue,
                Err(error) => {
                    if matches!(error, SymfsError::Stripped) {
                        self.stripped.insert(id);
                    }
                    if self.warnings.len() >= MOST_WARNINGS {
                        without += 1;
                        continue;
                    }
                    self.warnings.push(format!(
                        "symbols of {} are not known: below {}: {error}",
                        info.whole_name(),
                        symfs.path(info).display()
                    ));
                }
            }
        }
        if without > 0 {
            self.warnings.push(format!(
                "symbols of {without} more files are not known for such reasons"
            ));
        }
        room
    }

    /// Reads the names of what programs made while they ran.
    fn read_code_maps(&mut self, room: usize) {
        let anonymous = self.programs.files().any(|(_, info)| info.is_anonymous());
        let Some(symfs) = self.symfs.as_ref().filter(|_| anonymous) else {
            return;
        };
        let tasks = self.programs.tasks().iter().filter(|task| !task.kernel);
        // Of several descriptions the last one counts: a container's first process begins
        // outside of it.
        let place = |task: &TaskInfo| (task.pid, (task.inner_pid, task.root.clone()));
        let processes: BTreeMap<u32, (u32, String)> = tasks.map(place).collect();
        let mut maps = CodeMaps::new(room);
        for (pid, (inner_pid, root)) in processes {
            // It wrote what it calls itself, into what is /tmp for it.
            let number = if inner_pid == 0 { pid } else { inner_pid };
            let file = FileInfo {
                name: format!("/tmp/perf-{number}.map"),
                root,
                made_by: Some(pid),
                ..FileInfo::default()
            };
            let name = file.name.clone();
            let Some((found, place)) = symfs.code_map(&file) else {
                continue;
            };
            let mut tell = |what: String| {
                if self.warnings.len() < MOST_WARNINGS {
                    self.warnings
                        .push(format!("{}{name}: {what}", place.display()));
                }
            };
            let found = found.map_err(|error| error.to_string());
            let Made { map, again } = match found.and_then(|file| maps.read(&file)) {
                Ok(made) => made,
                Err(error) => {
                    tell(format!("{error}; what process {pid} made has no names"));
                    continue;
                }
            };
            if map.bad_lines > 0 && !again {
                let bad = map.bad_lines;
                tell(format!(
                    "{bad} of its lines are not START SIZE NAME, and were passed over"
                ));
            }
            if map.is_cut && !again {
                tell("it has more lines than are read; the first ones are used".to_owned());
            }
            let id = self.programs.add_made(file);
            self.made.insert(pid, id);
            self.code_maps.insert(id, map);
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
        let (_, file) = self.programs.mapping(mapping)?;
        Some((file, self.found(file, mapping, address)))
    }

    /// The symbol and its offset at `address` of `file`, which is mapped there.
    #[must_use]
    pub fn found(&self, file: FileId, mapping: u64, address: u64) -> Option<Found> {
        if let Some(map) = self.code_maps.get(&file) {
            return map.find(address);
        }
        let (mapping, _) = self.programs.mapping(mapping)?;
        let offset = address
            .wrapping_sub(mapping.start)
            .wrapping_add(mapping.offset);
        self.files.get(&file)?.find(offset)
    }

    /// The same of the task with the number `task` in samples, which may have made what it runs.
    #[must_use]
    pub fn in_program_of(
        &self,
        task: u64,
        mapping: u64,
        address: u64,
    ) -> Option<(FileId, Option<Found>)> {
        let (_, file) = self.programs.mapping(mapping)?;
        let made = self.made_by(task, file, address);
        Some(made.unwrap_or_else(|| (file, self.found(file, mapping, address))))
    }

    /// The same of what a program made while it ran, in the memory `file`.
    fn made_by(&self, task: u64, file: FileId, address: u64) -> Option<(FileId, Option<Found>)> {
        if self.made.is_empty() || !self.file(file).is_anonymous() {
            return None;
        }
        let process = self.programs.task_info(self.programs.task(task)?)?.pid;
        let made = *self.made.get(&process)?;
        Some((made, self.code_maps.get(&made)?.find(address)))
    }

    /// There are names of what a program made while it ran.
    #[must_use]
    pub fn has_made(&self) -> bool {
        !self.made.is_empty()
    }

    /// What is at an address of `file` is not the same for all processes that have it there.
    #[must_use]
    pub fn is_made(&self, file: FileId) -> bool {
        let info = self.file(file);
        info.made_by.is_some() || !self.made.is_empty() && info.is_anonymous()
    }

    /// The file has symbols no more, or only the names that it exports: it was stripped.
    #[must_use]
    pub fn is_stripped(&self, file: FileId) -> bool {
        let read = self.files.get(&file);
        self.stripped.contains(&file) || read.is_some_and(ProgramFile::is_stripped)
    }

    /// Some file was.
    #[must_use]
    pub fn has_stripped(&self) -> bool {
        !self.stripped.is_empty() || self.files.values().any(ProgramFile::is_stripped)
    }

    /// The name of a symbol of a program, as its file has it.
    #[must_use]
    pub fn raw_program_symbol(&self, file: FileId, symbol: SymbolIndex) -> &str {
        match self.files.get(&file) {
            Some(file) => file.name(symbol),
            None => self.code_maps.get(&file).map_or("", |map| map.name(symbol)),
        }
    }

    /// The same as reports show it.
    #[must_use]
    pub fn program_symbol(&self, file: FileId, symbol: SymbolIndex) -> String {
        let raw = self.raw_program_symbol(file, symbol);
        // A compiler at run time writes names as its sources have them.
        if !self.demangle || !self.files.contains_key(&file) {
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
