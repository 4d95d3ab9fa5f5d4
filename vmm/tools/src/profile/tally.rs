//! Samples that have something in common, added up.

use std::str::FromStr;

use ahash::AHashMap;
use thiserror::Error;

use super::location::{CodeLocation, process};
use super::names::{Names, WordId};
use super::paths::{Callers, LocationIndex, PathId, Paths};
use super::programs::TaskId;
use super::record::{Ring, Sample};

/// What samples are grouped by; a column of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SortKey {
    /// The name of the guest's thread.
    Comm,
    /// The guest's process.
    Pid,
    /// The guest's thread.
    Tid,
    /// The kernel, its module, or the file of a program.
    Dso,
    /// The symbol.
    Symbol,
    /// The vCPU and its VM.
    Vcpu,
    /// The core.
    Core,
    /// Kernel or user.
    Ring,
    /// The address of the page tables, of kernel and user samples alike.
    Cr3,
}

impl SortKey {
    /// All of them, in the order of the help.
    pub const ALL: [Self; 9] = [
        Self::Comm,
        Self::Pid,
        Self::Tid,
        Self::Dso,
        Self::Symbol,
        Self::Vcpu,
        Self::Core,
        Self::Ring,
        Self::Cr3,
    ];

    /// Its name in `--sort`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Comm => "comm",
            Self::Pid => "pid",
            Self::Tid => "tid",
            Self::Dso => "dso",
            Self::Symbol => "symbol",
            Self::Vcpu => "vcpu",
            Self::Core => "core",
            Self::Ring => "ring",
            Self::Cr3 => "cr3",
        }
    }
}

/// A word that is no sort key.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "'{0}' cannot be sorted by; give comm, pid, tid, dso, symbol, vcpu, core, ring, cr3, or some \
     of them with commas between"
)]
pub struct SortKeyError(String);

/// The keys of `--sort`, each once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SortKeys(Vec<SortKey>);

impl SortKeys {
    /// Those of who gives none: perf's where the tasks of samples are known.
    #[must_use]
    pub fn usual(names: &Names) -> Self {
        if names.has_tasks() {
            Self(vec![SortKey::Comm, SortKey::Dso, SortKey::Symbol])
        } else {
            Self(vec![SortKey::Symbol])
        }
    }

    /// Those of a comparison: as perf has them.
    #[must_use]
    pub fn of_diff(names: &Names) -> Self {
        if names.has_tasks() {
            Self(vec![SortKey::Dso, SortKey::Symbol])
        } else {
            Self(vec![SortKey::Symbol])
        }
    }

    /// The keys, in the order of the columns.
    #[must_use]
    pub fn keys(&self) -> &[SortKey] {
        &self.0
    }

    /// `key` is among them.
    #[must_use]
    pub fn has(&self, key: SortKey) -> bool {
        self.0.contains(&key)
    }
}

impl FromStr for SortKeys {
    type Err = SortKeyError;

    fn from_str(text: &str) -> Result<Self, SortKeyError> {
        let mut keys = Vec::new();
        for word in text.split(',') {
            let word = word.trim();
            let named = SortKey::ALL.into_iter().find(|key| key.name() == word);
            let key = named
                // As perf abbreviates it.
                .or((word == "sym").then_some(SortKey::Symbol))
                .ok_or_else(|| SortKeyError(word.to_owned()))?;
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        Ok(Self(keys))
    }
}

/// What the samples of a row have in common. Fields that are not sorted by are
/// none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The name of the thread.
    pub comm: Option<WordId>,
    /// The process and its name; the inner none is one that is not known.
    pub pid: Option<Option<(u32, WordId)>>,
    /// The thread and its name; the inner none is one that is not known.
    pub tid: Option<Option<(u32, WordId)>>,
    /// What they were taken in.
    pub dso: Option<WordId>,
    /// Where they were taken.
    pub location: Option<CodeLocation>,
    /// VM and vCPU.
    pub vcpu: Option<(u32, u32)>,
    /// The core.
    pub core: Option<u32>,
    /// The ring; the inner none is one that was not sampled.
    pub ring: Option<Option<Ring>>,
    /// The page tables; the inner none is a CR3 that was not sampled.
    pub cr3: Option<Option<u64>>,
}

/// What a sample itself gives to the key of its row: all but its place in code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Group {
    task: Option<TaskId>,
    vcpu: Option<(u32, u32)>,
    core: Option<u32>,
    ring: Option<Option<Ring>>,
    cr3: Option<Option<u64>>,
}

impl Group {
    fn of(sample: &Sample, keys: &SortKeys, names: &Names) -> Self {
        let mut group = Self::default();
        for key in keys.keys() {
            match key {
                SortKey::Comm | SortKey::Pid | SortKey::Tid => group.task = names.task_of(sample),
                SortKey::Vcpu => group.vcpu = Some((sample.vm, sample.vcpu)),
                SortKey::Core => group.core = Some(sample.core),
                SortKey::Ring => group.ring = Some(sample.ring),
                SortKey::Cr3 => group.cr3 = Some(process(sample.cr3)),
                SortKey::Dso | SortKey::Symbol => {}
            }
        }
        group
    }

    /// The key of its samples, without their places.
    fn key(&self, keys: &SortKeys, names: &Names) -> Key {
        let info = self.task.and_then(|task| names.programs.task_info(task));
        let comm = || names.word(names.comm(self.task));
        Key {
            comm: keys.has(SortKey::Comm).then(comm),
            pid: keys
                .has(SortKey::Pid)
                .then(|| info.map(|info| (info.pid, names.word(&info.process)))),
            tid: keys
                .has(SortKey::Tid)
                .then(|| info.map(|info| (info.tid, names.word(&info.comm)))),
            dso: None,
            location: None,
            vcpu: self.vcpu,
            core: self.core,
            ring: self.ring,
            cr3: self.cr3,
        }
    }
}

/// What samples amount to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    /// How many they are.
    pub samples: u64,
    /// How many events they stand for.
    pub events: u64,
}

impl Sum {
    pub(super) fn add(&mut self, more: Self) {
        self.samples = self.samples.saturating_add(more.samples);
        self.events = self.events.saturating_add(more.events);
    }

    /// Its part of `all` events, in percent.
    #[must_use]
    pub fn percent(self, all: Self) -> f64 {
        percent(self.events, all.events)
    }
}

/// A row of the report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SampleRow {
    /// What its samples have in common.
    pub key: Key,
    /// What those amount to that were taken there.
    pub own: Sum,
    /// The same, and those that were taken in what is called from there; equal to `own`
    /// without callers.
    pub total: Sum,
    /// The paths of these samples, and how many locations of each are within the row's own;
    /// none without callers.
    pub paths: Vec<RowPath>,
}

/// A path of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPath {
    /// The path.
    pub path: PathId,
    /// How many locations from the end of the path the row's own is: 0 where the samples were
    /// taken there.
    pub inside: u32,
    /// Which of the tally's sums.
    sum: u32,
}

/// What rows are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Callers have rows, too.
    pub children: bool,
    /// Rows know their paths.
    pub paths: bool,
}

/// The samples of one event, added up by [`SortKeys`].
#[derive(Clone, Debug, Default)]
pub struct SampleTally {
    groups: Vec<Group>,
    numbers: AHashMap<Group, u32>,
    latest: Option<(Group, u32)>,
    sums: AHashMap<(u32, PathId), u32>,
    amounts: Vec<Sum>,
    all: Sum,
    unknown: Unknown,
}

/// How many samples there are of each half, and how many of these have no symbol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unknown {
    /// Outside of programs.
    pub kernel: u64,
    /// Of these, those without a symbol.
    pub kernel_unknown: u64,
    /// In files of programs.
    pub program: u64,
    /// Of these, those without a symbol.
    pub program_unknown: u64,
}

impl Unknown {
    fn count(&mut self, location: CodeLocation) {
        match location {
            CodeLocation::User(_) | CodeLocation::Missing(_) | CodeLocation::BrokenProgram => {}
            CodeLocation::Symbol(_) => self.kernel += 1,
            CodeLocation::Unknown(_) => {
                self.kernel += 1;
                self.kernel_unknown += 1;
            }
            CodeLocation::Program(_, symbol) => {
                self.program += 1;
                self.program_unknown += u64::from(symbol.is_none());
            }
        }
    }
}

impl SampleTally {
    /// Takes `sample` in.
    pub fn add(
        &mut self,
        sample: &Sample,
        keys: &SortKeys,
        callers: Callers,
        paths: &mut Paths<'_>,
    ) {
        let path = paths.of(sample, callers);
        if let Some(location) = paths.outwards(path).next() {
            self.unknown.count(location);
        }
        let group = Group::of(sample, keys, paths.names());
        let group = self.group(group);
        let amounts = &mut self.amounts;
        let sum = *self.sums.entry((group, path)).or_insert_with(|| {
            amounts.push(Sum::default());
            number(amounts.len() - 1)
        });
        let one = Sum {
            samples: 1,
            events: sample.period,
        };
        self.amounts[sum as usize].add(one);
        self.all.add(one);
    }

    /// The number of a group. Samples of a group come together, all but always.
    fn group(&mut self, group: Group) -> u32 {
        if let Some((latest, index)) = self.latest
            && latest == group
        {
            return index;
        }
        let groups = &mut self.groups;
        let index = *self.numbers.entry(group).or_insert_with(|| {
            groups.push(group);
            number(groups.len() - 1)
        });
        self.latest = Some((group, index));
        index
    }

    /// What all samples amount to.
    #[must_use]
    pub fn all(&self) -> Sum {
        self.all
    }

    /// How many samples have no symbol.
    #[must_use]
    pub fn without_symbol(&self) -> Unknown {
        self.unknown
    }

    /// What the samples of one path of a row amount to.
    #[must_use]
    pub fn sum(&self, path: RowPath) -> Sum {
        self.amounts
            .get(path.sum as usize)
            .copied()
            .unwrap_or_default()
    }

    /// The rows, those with most events first.
    #[must_use]
    pub fn rows(&self, keys: &SortKeys, paths: &Paths<'_>, wanted: Rows) -> Vec<SampleRow> {
        let names = paths.names();
        let (with_dso, with_symbol) = (keys.has(SortKey::Dso), keys.has(SortKey::Symbol));
        let mut numbers: AHashMap<Key, usize> = AHashMap::new();
        // The same by what is small and met often.
        let mut known: AHashMap<(u32, LocationIndex), usize> = AHashMap::new();
        let mut rows: Vec<SampleRow> = Vec::new();
        let mut met: Vec<usize> = Vec::new();
        for (&(group, path), &sum) in &self.sums {
            let amount = self.amounts[sum as usize];
            met.clear();
            let depth = if wanted.children { usize::MAX } else { 1 };
            for (inside, step) in (0u32..).zip(paths.steps(path).take(depth)) {
                if paths.location(step).is_some_and(|one| !one.is_layer()) {
                    continue;
                }
                let number = *known.entry((group, step)).or_insert_with(|| {
                    let mut key = self.groups[group as usize].key(keys, names);
                    let location = paths.location(step);
                    key.location = location.filter(|_| with_symbol);
                    let object = |location: CodeLocation| names.word(&location.object(names));
                    key.dso = location.filter(|_| with_dso).map(object);
                    *numbers.entry(key).or_insert_with(|| {
                        rows.push(SampleRow {
                            key,
                            ..SampleRow::default()
                        });
                        rows.len() - 1
                    })
                });
                // A function that calls itself has these samples once.
                if met.contains(&number) {
                    continue;
                }
                met.push(number);
                let row = &mut rows[number];
                row.total.add(amount);
                if inside == 0 {
                    row.own.add(amount);
                }
                if wanted.paths {
                    row.paths.push(RowPath { path, inside, sum });
                }
            }
        }
        rows.sort_by(|a, b| {
            let order = |row: &SampleRow| {
                let (total, own) = (row.total, row.own);
                (total.events, own.events, total.samples)
            };
            order(b).cmp(&order(a)).then_with(|| a.key.cmp(&b.key))
        });
        rows
    }
}

/// No tally has more than 2^32 sums in memory.
fn number(position: usize) -> u32 {
    u32::try_from(position).unwrap_or(u32::MAX)
}

/// `part` of `all` in percent.
pub(super) fn percent(part: u64, all: u64) -> f64 {
    match all {
        0 => 0.0,
        // A percentage needs no more than the 53 bits of a double.
        #[expect(clippy::cast_precision_loss, reason = "rounded to 0.01 %")]
        _ => part as f64 / all as f64 * 100.0,
    }
}
