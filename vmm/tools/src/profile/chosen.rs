//! Which samples of a profile are looked at.

use std::cell::RefCell;

use ahash::AHashMap;
use umpire_events::likeness;

use super::choice::{SampleChoice, WordList};
use super::location::CodeLocation;
use super::names::Names;
use super::programs::{FileId, TaskId};
use super::record::Sample;

/// Those samples that [`SampleChoice`] names by task, code and time, and which of its words no
/// sample had. Events, vCPUs and cores are [`Filter`](super::record::Filter)'s.
#[derive(Debug, Default)]
pub(super) struct Chosen {
    choice: SampleChoice,
    /// First and last nanosecond of each; none for all times.
    windows: Option<Vec<(u64, u64)>>,
    state: RefCell<Seen>,
}

/// What becomes of a sample; perf's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// It is asked about.
    Shown,
    /// It is of another task or place: nothing of it is shown, but it counts in the whole that
    /// parts are of.
    Hidden,
    /// It was taken at another time, and counts nowhere.
    Absent,
}

/// What was seen so far. Tasks and places are looked at once each.
#[derive(Debug, Default)]
struct Seen {
    tasks: AHashMap<Option<TaskId>, bool>,
    places: AHashMap<CodeLocation, bool>,
    comms: Vec<bool>,
    dsos: Vec<bool>,
    symbols: Vec<bool>,
    part: bool,
    pid: bool,
    tid: bool,
    time: bool,
    span: Option<(u64, u64)>,
}

impl Chosen {
    /// Those of `choice`, of a profile whose samples are from and to these times.
    pub(super) fn new(choice: &SampleChoice, (first, last): (u64, u64)) -> Self {
        let none = |words: &Option<WordList>| {
            let count = words.as_ref().map_or(0, |list| list.words().len());
            vec![false; count]
        };
        Self {
            windows: choice.time.as_ref().map(|time| time.windows(first, last)),
            state: RefCell::new(Seen {
                comms: none(&choice.comms),
                dsos: none(&choice.dsos),
                symbols: none(&choice.symbols),
                ..Seen::default()
            }),
            choice: choice.clone(),
        }
    }

    fn by_task(&self) -> bool {
        self.choice.comms.is_some() || self.choice.pids.is_some() || self.choice.tids.is_some()
    }

    fn by_place(&self) -> bool {
        let choice = &self.choice;
        choice.dsos.is_some() || choice.symbols.is_some() || choice.symbol_filter.is_some()
    }

    /// It leaves samples out that count in the whole.
    pub(super) fn hides(&self) -> bool {
        self.by_task() || self.by_place()
    }

    /// It leaves samples out.
    pub(super) fn is_part(&self) -> bool {
        self.hides() || self.windows.is_some()
    }

    /// What becomes of `sample`.
    pub(super) fn of(&self, sample: &Sample, names: &Names) -> Choice {
        if !self.is_part() {
            return Choice::Shown;
        }
        let seen = &mut *self.state.borrow_mut();
        // Nothing is left out early: each word is looked for in all samples.
        let task = !self.by_task() || self.has_task(seen, names.task_of(sample), names);
        let place = !self.by_place() || self.has_place(seen, sample, names);
        match (self.has_time(seen, sample.time_ns), task && place) {
            (false, _) => Choice::Absent,
            (true, false) => Choice::Hidden,
            (true, true) => Choice::Shown,
        }
    }

    fn has_time(&self, seen: &mut Seen, time: u64) -> bool {
        let (first, last) = seen.span.unwrap_or((time, time));
        seen.span = Some((first.min(time), last.max(time)));
        let within = |windows: &Vec<(u64, u64)>| {
            let mut windows = windows.iter();
            windows.any(|&(start, stop)| (start..=stop).contains(&time))
        };
        let has = self.windows.as_ref().is_none_or(within);
        seen.time |= has;
        has
    }

    fn has_task(&self, seen: &mut Seen, task: Option<TaskId>, names: &Names) -> bool {
        if let Some(known) = seen.tasks.get(&task) {
            return *known;
        }
        let choice = &self.choice;
        let info = task.and_then(|task| names.programs.task_info(task));
        let comm = mark(&choice.comms, &mut seen.comms, |word| {
            word == names.comm(task)
        });
        let of = |list: &Option<crate::numbers::Numbers>, number: Option<u32>| {
            let has = |list: &crate::numbers::Numbers| number.is_some_and(|one| list.has(one));
            list.as_ref().is_none_or(has)
        };
        let pid = of(&choice.pids, info.map(|info| info.pid));
        let tid = of(&choice.tids, info.map(|info| info.tid));
        seen.pid |= pid;
        seen.tid |= tid;
        seen.tasks.insert(task, comm && pid && tid);
        comm && pid && tid
    }

    fn has_place(&self, seen: &mut Seen, sample: &Sample, names: &Names) -> bool {
        let location = CodeLocation::of(sample, names);
        let by_address = |word: &String| address(word).is_some();
        let choice = &self.choice;
        let symbols = choice.symbols.as_ref();
        let addresses = symbols.is_some_and(|list| list.words().iter().any(by_address));
        if let Some(known) = seen.places.get(&location) {
            return *known;
        }
        let dso = mark(&choice.dsos, &mut seen.dsos, |word| {
            is_object(location, word, names)
        });
        let symbol = mark(&choice.symbols, &mut seen.symbols, |word| {
            is_symbol(location, word, names)
                || address(word).is_some_and(|at| is_at(sample, location, at, names))
        });
        let part = choice.symbol_filter.as_ref().is_none_or(|part| {
            let symbol = has_symbol(location).then(|| location.symbol(names));
            symbol.is_some_and(|symbol| symbol.contains(part.as_str()))
        });
        seen.part |= part;
        let all = dso && symbol && part;
        // An address without a symbol is a place of its own, of which there may be many, and
        // one in a symbol may be asked for itself.
        if !addresses && !matches!(location, CodeLocation::Unknown(_)) {
            seen.places.insert(location, all);
        }
        all
    }

    /// What no sample was, a line each, with what may have been meant. This is said of whole
    /// profiles.
    pub(super) fn missed(&self, names: &Names) -> Vec<String> {
        let seen = &*self.state.borrow();
        let choice = &self.choice;
        let mut lines = Vec::new();
        let Some((first, last)) = seen.span else {
            return lines;
        };
        let tasks = || -> Vec<String> {
            let tasks = names.programs.tasks().iter();
            tasks.map(|task| task.comm.clone()).collect()
        };
        let mut tell = |option: &str, what: &str, list: &Option<WordList>, hits: &[bool], all| {
            let words = list.iter().flat_map(|list| list.words());
            let missed = words.zip(hits).filter(|(_, hit)| !**hit);
            lines.extend(missed.map(|(word, _)| {
                let near = nearest(word, all);
                format!("{option}: no sample is {what} '{word}'{near}")
            }));
        };
        tell(
            "--comms",
            "of a thread",
            &choice.comms,
            &seen.comms,
            &tasks as _,
        );
        let objects = || objects(names);
        tell("--dsos", "in", &choice.dsos, &seen.dsos, &objects);
        let places = || symbols(seen, names);
        tell(
            "--symbol",
            "in a symbol",
            &choice.symbols,
            &seen.symbols,
            &places,
        );
        let nobody = |option: &str, key: &str, chosen: bool, seen: bool| {
            let line = format!("{option}: no sample is of such a {key}");
            (chosen && !seen).then_some(line)
        };
        lines.extend(nobody("--pid", "process", choice.pids.is_some(), seen.pid));
        lines.extend(nobody("--tid", "thread", choice.tids.is_some(), seen.tid));
        if let Some(part) = choice.symbol_filter.as_ref().filter(|_| !seen.part) {
            lines.push(format!(
                "--symbol-filter: no sample is in a symbol with '{part}'"
            ));
        }
        if self.windows.is_some() && !seen.time {
            lines.push(format!(
                "--time: no sample was taken then; they are from {} to {} seconds",
                decimals(first),
                decimals(last)
            ));
        }
        lines
    }
}

/// One of the words is meant; those are marked. All is meant without words.
fn mark(list: &Option<WordList>, hits: &mut [bool], meant: impl Fn(&str) -> bool) -> bool {
    let Some(list) = list else {
        return true;
    };
    let mut any = false;
    for (word, hit) in list.words().iter().zip(hits) {
        let has = meant(word);
        *hit |= has;
        any |= has;
    }
    any
}

/// `word` is what `location` is in: a file's whole name or its last part, or a module's name.
fn is_object(location: CodeLocation, word: &str, names: &Names) -> bool {
    let bare = |object: &str| {
        let inner = object
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'));
        inner == Some(word)
    };
    let whole = location.whole_object(names);
    let kernel = location.is_kernel() && whole == "[kernel.kallsyms]" && word == "[kernel]";
    let module = matches!(location, CodeLocation::Symbol(_)) && bare(&whole);
    whole == word || location.object(names) == word || kernel || module
}

fn has_symbol(location: CodeLocation) -> bool {
    matches!(
        location,
        CodeLocation::Symbol(_) | CodeLocation::Program(_, Some(_))
    )
}

/// `word` is the symbol, as it is shown or as its file has it.
fn is_symbol(location: CodeLocation, word: &str, names: &Names) -> bool {
    let raw = match location {
        CodeLocation::Program(file, Some(symbol)) => names.raw_program_symbol(file, symbol),
        _ => "",
    };
    match location {
        CodeLocation::Unknown(_) => word == "[unknown]",
        _ => location.symbol(names) == word || location.name(names) == word || raw == word,
    }
}

/// The address that a word with `0x` is.
fn address(word: &str) -> Option<u64> {
    u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()
}

/// The sample is at this address, or in the symbol that begins there.
fn is_at(sample: &Sample, location: CodeLocation, address: u64, names: &Names) -> bool {
    let offset = match location {
        CodeLocation::Symbol(_) => names.kernel.find(sample.ip).map(|found| found.offset),
        CodeLocation::Program(..) => names
            .in_program(sample.guest.mapping, sample.ip)
            .and_then(|(_, found)| Some(found?.offset)),
        _ => None,
    };
    let start = offset.map(|offset| sample.ip.wrapping_sub(offset));
    sample.ip == address || start == Some(address)
}

/// Names of all that code may be in.
fn objects(names: &Names) -> Vec<String> {
    let files = names.programs.files();
    let files = files.filter(|(id, _)| *id != FileId::UNKNOWN);
    let files = files.flat_map(|(_, file)| [file.short().into_owned(), file.shown().to_owned()]);
    let modules = names.kernel.modules().iter();
    let modules = modules.map(|module| format!("[{module}]"));
    files
        .chain(modules)
        .chain(["[kernel.kallsyms]".to_owned()])
        .collect()
}

/// Names of the symbols that samples were in.
fn symbols(seen: &Seen, names: &Names) -> Vec<String> {
    let places = seen.places.keys().filter(|place| has_symbol(**place));
    places.map(|place| place.symbol(names)).collect()
}

/// `; the nearest is 'name'`, or nothing.
fn nearest(word: &str, all: &dyn Fn() -> Vec<String>) -> String {
    let near = all().into_iter().filter_map(|name| {
        let like = likeness(word, &name);
        (like.few_differ || like.is_part).then_some((like.distance, name))
    });
    let best = near.min();
    best.map_or_else(String::new, |(_, name)| {
        format!("; the nearest is '{name}'")
    })
}

/// Seconds with all digits that count.
fn decimals(ns: u64) -> String {
    format!("{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000)
}
