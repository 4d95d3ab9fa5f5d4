//! Samples that have something in common, added up.

use std::str::FromStr;

use ahash::AHashMap;
use thiserror::Error;

use super::location::{CodeLocation, process};
use super::names::{Names, WordId};
use super::paths::{Callers, LocationIndex, PathId, Paths};
use super::programs::{FileId, TaskId};
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
    Symbol,
    /// The vCPU and its VM.
    Vcpu,
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

    /// The key that is called `word`, or is by perf.
    #[must_use]
    pub fn named(word: &str) -> Option<Self> {
        match word {
            "sym" => Some(Self::Symbol),
            // A guest's CPUs are its vCPUs.
            "cpu" => Some(Self::Vcpu),
            _ => Self::ALL.into_iter().find(|key| key.name() == word),
        }
    }
}

/// A word that is no sort key.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SortKeyError {
    /// It is a column of numbers.
    #[error("'{0}' is a column and no key: give it to --fields")]
    Number(String),
    /// It is none.
    #[error(
        "'{0}' cannot be sorted by; give comm, pid, tid, dso, symbol (sym), vcpu (cpu), core, \
         ring, cr3, or some of them with commas between"
    )]
    Unknown(String),
}

/// The keys of `--sort`, each once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SortKeys {
    keys: Vec<SortKey>,
    /// They come behind those of who gives none: `+vcpu`.
    more: bool,
}

impl From<Vec<SortKey>> for SortKeys {
    fn from(keys: Vec<SortKey>) -> Self {
        Self { keys, more: false }
    }
}

impl SortKeys {
    /// Those of who gives none: perf's where the tasks of samples are known.
    #[must_use]
    pub fn usual(names: &Names) -> Self {
        Self::from(if names.has_tasks() {
            vec![SortKey::Comm, SortKey::Dso, SortKey::Symbol]
        } else {
            vec![SortKey::Symbol]
        })
    }

    /// Those of a comparison: as perf has them.
    #[must_use]
    pub fn of_diff(names: &Names) -> Self {
        Self::from(if names.has_tasks() {
            vec![SortKey::Dso, SortKey::Symbol]
        } else {
            vec![SortKey::Symbol]
        })
    }

    /// These where `given` says nothing, and those of `given` behind them where it only adds.
    #[must_use]
    pub fn or(self, given: Option<&Self>) -> Self {
        match given {
            None => self,
            Some(given) if given.more => self.and(&given.keys),
            Some(given) => given.clone(),
        }
    }

    /// These, and behind them those of `more` that are not among them.
    #[must_use]
    pub fn and(mut self, more: &[SortKey]) -> Self {
        for key in more {
            if !self.keys.contains(key) {
                self.keys.push(*key);
            }
        }
        self
    }

    /// The keys, in the order of the columns.
    #[must_use]
    pub fn keys(&self) -> &[SortKey] {
        &self.keys
    }

    /// `key` is among them.
    #[must_use]
    pub fn has(&self, key: SortKey) -> bool {
        self.keys.contains(&key)
    }
}

impl FromStr for SortKeys {
    type Err = SortKeyError;

    fn from_str(text: &str) -> Result<Self, SortKeyError> {
        let (more, words) = match text.strip_prefix('+') {
            Some(words) => (true, words),
            None => (false, text),
        };
        let mut keys = Self::from(Vec::new());
        for word in words.split(',') {
            let word = word.trim();
            let key = SortKey::named(word).ok_or_else(|| {
                let word = word.to_owned();
                match word.as_str() {
                    "overhead" | "overhead_children" | "sample" | "period" => {
                        SortKeyError::Number(word)
                    }
                    _ => SortKeyError::Unknown(word),
                }
            })?;
            keys = keys.and(&[key]);
        }
        Ok(Self { more, ..keys })
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
    /// How many events they stand for: more than 64 bits are enough for, if a profile says so.
    pub events: u128,
}

impl Sum {
    /// What `sample` amounts to.
    #[must_use]
    pub fn of(sample: &Sample) -> Self {
        Self {
            samples: 1,
            events: u128::from(sample.period),
        }
    }

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
    /// Which of the tally's sums.
    leaf: Leaf,
    /// How many locations from the end of the path the row's own is: 0 where the samples were
    /// taken there.
    pub inside: u32,
}

/// A place on top of a stem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Leaf {
    stem: u32,
    place: LocationIndex,
}

/// What samples of one group with the same callers have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Stem {
    group: u32,
    callers: PathId,
}

/// A [`Sum`] up to 64 bits of events: there may be as many as samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SmallSum {
    samples: u64,
    events: u64,
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
///
/// There are few groups and stems, whose maps stay in caches, and as many leaves as samples
/// at worst: a sample looks for one of these once.
#[derive(Clone, Debug, Default)]
pub struct SampleTally {
    groups: Vec<Group>,
    numbers: AHashMap<Group, u32>,
    latest: Option<(Group, u32)>,
    stems: Vec<Stem>,
    stem_numbers: AHashMap<Stem, u32>,
    leaves: AHashMap<Leaf, SmallSum>,
    /// What the events of some are beyond 64 bits.
    carried: AHashMap<Leaf, u128>,
    all: Sum,
    /// With those that are not shown.
    whole: Sum,
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
        let (callers, place) = paths.parts_of(sample, callers);
        if let Some(location) = paths.location(place) {
            self.unknown.count(location);
        }
        let group = Group::of(sample, keys, paths.names());
        let group = self.group(group);
        let stem = Stem { group, callers };
        let stems = &mut self.stems;
        let stem = *self.stem_numbers.entry(stem).or_insert_with(|| {
            stems.push(stem);
            number(stems.len() - 1)
        });
        let one = Sum::of(sample);
        let leaf = Leaf { stem, place };
        let small = self.leaves.entry(leaf).or_default();
        small.samples = small.samples.saturating_add(1);
        let (events, carried) = small.events.overflowing_add(sample.period);
        small.events = events;
        if carried {
            *self.carried.entry(leaf).or_default() += 1 << 64;
        }
        self.all.add(one);
        self.whole.add(one);
    }

    /// Counts `sample` in the whole alone.
    pub fn pass(&mut self, sample: &Sample) {
        self.whole.add(Sum::of(sample));
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

    /// What they amount to with those that were passed over.
    #[must_use]
    pub fn whole(&self) -> Sum {
        self.whole
    }

    /// How many samples have no symbol.
    #[must_use]
    pub fn without_symbol(&self) -> Unknown {
        self.unknown
    }

    /// What the samples in files of programs amount to that are in no symbol.
    #[must_use]
    pub fn unnamed(&self, paths: &Paths<'_>) -> AHashMap<FileId, Sum> {
        let mut unnamed: AHashMap<FileId, Sum> = AHashMap::new();
        for leaf in self.leaves.keys() {
            if let Some(CodeLocation::Program(file, None)) = paths.location(leaf.place) {
                unnamed.entry(file).or_default().add(self.of_leaf(*leaf));
            }
        }
        unnamed
    }

    /// What the samples of one path of a row amount to.
    #[must_use]
    pub fn sum(&self, path: RowPath) -> Sum {
        self.of_leaf(path.leaf)
    }

    fn of_leaf(&self, leaf: Leaf) -> Sum {
        let small = self.leaves.get(&leaf).copied().unwrap_or_default();
        self.whole_of(leaf, small)
    }

    fn whole_of(&self, leaf: Leaf, small: SmallSum) -> Sum {
        let carried = self.carried.get(&leaf).copied().unwrap_or_default();
        Sum {
            samples: small.samples,
            events: carried.saturating_add(u128::from(small.events)),
        }
    }

    /// The locations of a path of a row, from where its samples were taken outwards.
    pub fn outwards(&self, path: RowPath, paths: &Paths<'_>) -> impl Iterator<Item = CodeLocation> {
        let Leaf { stem, place } = path.leaf;
        let stem = self.stems.get(stem as usize);
        let callers = stem.map_or_else(PathId::default, |stem| stem.callers);
        let place = paths.location(place);
        place.into_iter().chain(paths.outwards(callers))
    }

    /// The rows, those with most events first.
    #[must_use]
    pub fn rows(&self, keys: &SortKeys, paths: &Paths<'_>, wanted: Rows) -> Vec<SampleRow> {
        let mut rows = RowMaker::new(self, keys, paths);
        let leaves = self.leaves.iter();
        let leaves = leaves.map(|(leaf, sum)| (*leaf, self.whole_of(*leaf, *sum)));
        let mut leaves: Vec<(Leaf, Sum)> = leaves.collect();
        leaves.sort_unstable_by_key(|(leaf, _)| *leaf);
        // The rows of a stem's callers, and how far inside the stem they are.
        let mut above: Vec<(usize, u32)> = Vec::new();
        // By row, the last stem whose callers have it.
        let mut met: Vec<u32> = Vec::new();
        for leaves in leaves.chunk_by(|(one, _), (other, _)| one.stem == other.stem) {
            let number = leaves[0].0.stem;
            let stem = self.stems[number as usize];
            above.clear();
            let callers = paths.steps(stem.callers).filter(|_| wanted.children);
            for (inside, step) in (1u32..).zip(callers) {
                let Some(row) = rows.of(stem.group, step) else {
                    continue;
                };
                met.resize(rows.rows.len(), u32::MAX);
                // A function that calls itself has these samples once.
                if std::mem::replace(&mut met[row], number) != number {
                    above.push((row, inside));
                }
            }
            let mut whole = Sum::default();
            for &(leaf, sum) in leaves {
                whole.add(sum);
                let own = rows.of(stem.group, leaf.place);
                if let Some(row) = own {
                    rows.rows[row].own.add(sum);
                    // Where it is among its callers, it is in `whole`.
                    if met.get(row) != Some(&number) {
                        rows.rows[row].total.add(sum);
                    }
                }
                if wanted.paths {
                    let above = above.iter().filter(|(row, _)| own != Some(*row));
                    for (row, inside) in own.map(|row| (row, 0)).into_iter().chain(above.copied()) {
                        rows.rows[row].paths.push(RowPath { leaf, inside });
                    }
                }
            }
            for &(row, _) in &above {
                rows.rows[row].total.add(whole);
            }
        }
        drop(leaves);
        let mut rows = rows.rows;
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

/// Makes rows as they are met.
struct RowMaker<'a> {
    tally: &'a SampleTally,
    keys: &'a SortKeys,
    paths: &'a Paths<'a>,
    rows: Vec<SampleRow>,
    numbers: AHashMap<Key, usize>,
    /// The same by what is small and met often.
    known: AHashMap<(u32, LocationIndex), usize>,
}

impl<'a> RowMaker<'a> {
    fn new(tally: &'a SampleTally, keys: &'a SortKeys, paths: &'a Paths<'a>) -> Self {
        Self {
            tally,
            keys,
            paths,
            rows: Vec::new(),
            numbers: AHashMap::new(),
            known: AHashMap::new(),
        }
    }

    /// The row of a location in a group; none of what has none.
    fn of(&mut self, group: u32, step: LocationIndex) -> Option<usize> {
        if let Some(number) = self.known.get(&(group, step)) {
            return Some(*number);
        }
        let location = self.paths.location(step);
        if location.is_some_and(|one| !one.is_layer()) {
            return None;
        }
        let names = self.paths.names();
        let mut key = self.tally.groups[group as usize].key(self.keys, names);
        key.location = location.filter(|_| self.keys.has(SortKey::Symbol));
        let object = |location: CodeLocation| names.word(&location.object(names));
        let with_dso = self.keys.has(SortKey::Dso);
        key.dso = location.filter(|_| with_dso).map(object);
        let rows = &mut self.rows;
        let number = *self.numbers.entry(key).or_insert_with(|| {
            rows.push(SampleRow {
                key,
                ..SampleRow::default()
            });
            rows.len() - 1
        });
        self.known.insert((group, step), number);
        Some(number)
    }
}

/// No tally has more than 2^32 stems in memory.
fn number(position: usize) -> u32 {
    u32::try_from(position).unwrap_or(u32::MAX)
}

/// `part` of `all` in percent.
pub(super) fn percent(part: u128, all: u128) -> f64 {
    match all {
        0 => 0.0,
        // A percentage needs no more than the 53 bits of a double.
        #[expect(clippy::cast_precision_loss, reason = "rounded to 0.01 %")]
        _ => part as f64 / all as f64 * 100.0,
    }
}

#[cfg(test)]
mod tests;
