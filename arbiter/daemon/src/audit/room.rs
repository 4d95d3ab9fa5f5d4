//! Whose records make room when all files of the audit are full. Each tenant has its share
//! of the bytes, the users without one have one together, and so has the arbiter itself. A
//! tenant that has more than its share loses its own oldest records once it is the one which
//! has written most since: whatever it writes, no record of another's is lost by it, unless
//! that is older than the audit's age. Where the older files have nothing else, the newest
//! file loses the older half of what the one has that has most of it. An audit without an
//! age has all lose what is above their share.
//!
//! It is done on a thread of its own, file by file from the oldest on, until there is room
//! for one file more. A file that has become short is joined with its neighbour. Whenever
//! the arbiter ends, each record is there; some may be there twice, which is mended when the
//! files are opened ([`tidy`]).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::{Record, older};

/// Whose share a record counts for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    /// What the arbiter says of itself.
    Arbiter,
    /// Users without a tenant, all together.
    Strangers,
    Tenant(String),
}

impl Class {
    /// Of a record: who is charged for it, or who has asked for the lease that it is about, for
    /// somebody else, or whose that is.
    pub(super) fn of(record: &Record) -> Self {
        let named = |key| record.get(key).and_then(Value::as_str);
        let name = named("charged").or(named("asked_by")).or(named("tenant"));
        match name {
            Some(name) => Class::Tenant(name.to_owned()),
            None if record.contains_key("tenant") => Class::Strangers,
            None => Class::Arbiter,
        }
    }

    /// Who is charged for a record of somebody's lease that another one has caused: of the
    /// two the one that has had more written lately by its own doing. Neither fills the
    /// other's share.
    pub(super) fn charge(record: &mut Record, own: &BTreeMap<Class, u64>) {
        let Some(Value::String(by)) = record.get("by") else {
            return;
        };
        let by = Class::Tenant(by.clone());
        let of = |class: &Class| own.get(class).copied().unwrap_or(0);
        if let Class::Tenant(name) = &by
            && of(&by) >= of(&Class::of(record))
        {
            record.insert("charged".to_owned(), name.as_str().into());
        }
    }

    /// The same, of a line of a file.
    fn of_line(line: &Line<'_>) -> Self {
        match (
            line.charged.as_ref().or(line.asked_by.as_ref()),
            &line.tenant,
        ) {
            (Some(name), _) | (None, Some(Some(name))) => Class::Tenant(name.to_string()),
            (None, Some(None)) => Class::Strangers,
            (None, None) => Class::Arbiter,
        }
    }

    /// Two words for people: what it is, and its name.
    pub(super) fn words(&self) -> (&'static str, Option<&str>) {
        match self {
            Class::Arbiter => ("arbiter", None),
            Class::Strangers => ("users without a tenant", None),
            Class::Tenant(name) => ("tenant", Some(name)),
        }
    }
}

/// What is looked at of a line.
#[derive(Debug, Default, Deserialize)]
struct Line<'a> {
    #[serde(default)]
    time_ms: u64,
    #[serde(default, borrow)]
    charged: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    asked_by: Option<Cow<'a, str>>,
    /// Absent, `null`, or a name.
    #[serde(default, borrow, deserialize_with = "there")]
    tenant: Option<Option<Cow<'a, str>>>,
}

fn there<'de: 'a, 'a, D: serde::Deserializer<'de>>(
    value: D,
) -> Result<Option<Option<Cow<'a, str>>>, D::Error> {
    Option::<Cow<'a, str>>::deserialize(value).map(Some)
}

impl<'a> Line<'a> {
    fn parse(bytes: &'a [u8]) -> Self {
        // What is no record of ours counts as the arbiter's, and as old.
        serde_json::from_slice(bytes).unwrap_or_default()
    }
}

/// What a file has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Shelf {
    pub(super) bytes: BTreeMap<Class, u64>,
    pub(super) length: u64,
    /// When its last record was written.
    pub(super) ends: u64,
}

impl Shelf {
    pub(super) fn add(&mut self, class: Class, length: u64, time_ms: u64) {
        *self.bytes.entry(class).or_default() += length;
        self.length += length;
        self.ends = self.ends.max(time_ms);
    }

    /// Who has most of it.
    pub(super) fn most(&self) -> Option<&Class> {
        let most = self.bytes.iter().max_by_key(|(_, bytes)| **bytes);
        most.map(|(class, _)| class)
    }

    fn join(&mut self, other: &Shelf) {
        for (class, bytes) in &other.bytes {
            *self.bytes.entry(class.clone()).or_default() += bytes;
        }
        self.length += other.length;
        self.ends = self.ends.max(other.ends);
    }

    fn scan(path: &Path, upto: u64) -> io::Result<Self> {
        let mut shelf = Shelf::default();
        each_line(path, upto, |bytes| {
            let line = Line::parse(bytes);
            shelf.add(Class::of_line(&line), bytes.len() as u64, line.time_ms);
            Ok(())
        })?;
        Ok(shelf)
    }
}

/// The lines of the first so many bytes.
fn each_line(
    path: &Path,
    upto: u64,
    mut each: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut file = BufReader::new(File::open(path)?.take(upto));
    let mut bytes = Vec::new();
    while file.read_until(b'\n', &mut bytes)? > 0 {
        each(&bytes)?;
        bytes.clear();
    }
    Ok(())
}

/// What is to be done.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) path: PathBuf,
    /// A file has no more bytes, or hardly.
    pub(super) size: u64,
    /// What all classes together may have of the older files, when they are full.
    pub(super) shared: u64,
    /// So many classes there are by the policy.
    pub(super) classes: usize,
    /// Records of before make room first, whoever's they are.
    pub(super) old: u64,
    /// Younger ones make room for nobody but their own class.
    pub(super) keeps_young: bool,
    /// If the older files have nothing to give, the newest one has to, of so many bytes.
    pub(super) newest: Option<u64>,
    /// Who has written most since the last time.
    pub(super) first: Option<Class>,
    /// The older files, from the newest on; `None`: not known.
    pub(super) shelves: Vec<Option<Shelf>>,
}

/// What was done: the older files that are left, and how many records of whom are gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Made {
    pub(super) shelves: Vec<Shelf>,
    pub(super) gone: BTreeMap<Class, u64>,
    /// There is no room for a file more.
    pub(super) is_tight: bool,
    /// What is to stand for the newest file.
    pub(super) shortened: Option<Shortened>,
}

/// The first bytes of the newest file without some of its records, [`beside`] it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shortened {
    /// It stands for so many bytes.
    pub(super) upto: u64,
    pub(super) left: Shelf,
    pub(super) class: Class,
    pub(super) records: u64,
}

impl Plan {
    /// Makes room for one file more.
    ///
    /// # Errors
    /// A file cannot be read or written. Then no record is gone that need not be.
    pub(super) fn make_room(self) -> io::Result<Made> {
        let mut made = Made::default();
        for (number, shelf) in (1..).zip(&self.shelves) {
            let scan = || Shelf::scan(&older(&self.path, number), u64::MAX);
            let shelf = shelf.clone().map_or_else(scan, Ok)?;
            made.shelves.push(shelf);
        }
        // First who has written most lately, then all that have more than their share.
        let others = (!self.keeps_young).then_some(None);
        let all = [self.first.clone().map(Some), others];
        for only in all.into_iter().flatten() {
            for at in (0..made.shelves.len()).rev() {
                self.thin(&mut made, at, only.as_ref())?;
                if self.is_freed(&mut made, at)? {
                    return Ok(made);
                }
            }
        }
        if !self.keeps_young {
            return Err(io::Error::other("no records can make room for others"));
        }
        made.is_tight = true;
        made.shortened = self.newest.map(|upto| self.shorten(upto)).transpose()?;
        Ok(made)
    }

    /// Writes the newest file anew, without the older half of what the class has that has most.
    fn shorten(&self, upto: u64) -> io::Result<Shortened> {
        let whole = Shelf::scan(&self.path, upto)?;
        let class = whole.most().cloned().unwrap_or(Class::Arbiter);
        let mut over = whole.bytes.get(&class).map_or(0, |bytes| bytes.div_ceil(2));
        let (mut left, mut records) = (Shelf::default(), 0);
        let mut out = BufWriter::new(File::create(beside(&self.path))?);
        each_line(&self.path, upto, |bytes| {
            let line = Line::parse(bytes);
            let (of, length) = (Class::of_line(&line), bytes.len() as u64);
            if over > 0 && of == class {
                over = over.saturating_sub(length);
                records += 1;
                return Ok(());
            }
            left.add(of, length, line.time_ms);
            out.write_all(bytes)
        })?;
        let out = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        set_mode(&out)?;
        out.sync_all()?;
        Ok(Shortened {
            upto,
            left,
            class,
            records,
        })
    }

    /// Removes from a file what may make room.
    fn thin(&self, made: &mut Made, at: usize, only: Option<&Class>) -> io::Result<()> {
        let mut over: BTreeMap<Class, u64> = BTreeMap::new();
        for (class, bytes) in made.shelves.iter().flat_map(|shelf| &shelf.bytes) {
            *over.entry(class.clone()).or_default() += bytes;
        }
        // Tenants that the policy does not name any more have a share, too.
        let share = self.shared / over.len().max(self.classes).max(1) as u64;
        over.values_mut()
            .for_each(|bytes| *bytes = bytes.saturating_sub(share));
        over.retain(|class, bytes| *bytes > 0 && only.is_none_or(|only| only == class));
        let shelf = &made.shelves[at];
        let may = over.keys().any(|class| shelf.bytes.contains_key(class));
        let path = older(&self.path, number(at));
        if !may && self.old == 0 || shelf.length == 0 {
            return Ok(());
        }
        let mut left = Shelf::default();
        let mut gone: BTreeMap<Class, u64> = BTreeMap::new();
        let beside = beside(&self.path);
        let mut out = BufWriter::new(File::create(&beside)?);
        each_line(&path, u64::MAX, |bytes| {
            let line = Line::parse(bytes);
            let (class, length) = (Class::of_line(&line), bytes.len() as u64);
            let more = over.get_mut(&class).filter(|over| **over > 0);
            let is_over = more.map(|over| *over = over.saturating_sub(length));
            if is_over.is_some() || line.time_ms < self.old {
                *gone.entry(class).or_default() += 1;
                return Ok(());
            }
            left.add(class, length, line.time_ms);
            out.write_all(bytes)
        })?;
        let out = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        if gone.is_empty() {
            return fs::remove_file(&beside);
        }
        set_mode(&out)?;
        out.sync_all()?;
        fs::rename(&beside, &path)?;
        made.shelves[at] = left;
        for (class, records) in gone {
            *made.gone.entry(class).or_default() += records;
        }
        Ok(())
    }

    /// Whether a file is empty, or can be joined with the next older one.
    fn is_freed(&self, made: &mut Made, at: usize) -> io::Result<bool> {
        let path = |at| older(&self.path, number(at));
        if made.shelves[at].length == 0 {
            fs::remove_file(path(at))?;
            made.shelves.remove(at);
            close_gap(&self.path, at, made.shelves.len())?;
            return Ok(true);
        }
        let Some(before) = made.shelves.get(at + 1).cloned() else {
            return Ok(false);
        };
        if made.shelves[at].length + before.length > self.size {
            return Ok(false);
        }
        let beside = beside(&self.path);
        let mut out = File::create(&beside)?;
        for part in [at + 1, at] {
            io::copy(&mut File::open(path(part))?, &mut out)?;
        }
        set_mode(&out)?;
        out.sync_all()?;
        fs::rename(&beside, path(at))?;
        fs::remove_file(path(at + 1))?;
        made.shelves[at].join(&before);
        made.shelves.remove(at + 1);
        close_gap(&self.path, at + 1, made.shelves.len())?;
        Ok(true)
    }
}

fn number(at: usize) -> u32 {
    u32::try_from(at + 1).unwrap_or(u32::MAX)
}

pub(super) fn beside(path: &Path) -> PathBuf {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".room");
    beside.into()
}

/// As the file that it stands for was made.
fn set_mode(file: &File) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(fs::Permissions::from_mode(0o640))
}

/// The file at `gap` is gone; those behind it, of which `left` is the number of all that are
/// left, follow.
fn close_gap(path: &Path, gap: usize, left: usize) -> io::Result<()> {
    for at in gap..left {
        fs::rename(older(path, number(at + 1)), older(path, number(at)))?;
    }
    Ok(())
}

/// The first record of a file.
fn first(path: &Path) -> Option<Vec<u8>> {
    let mut line = Vec::new();
    let mut file = BufReader::new(File::open(path).ok()?);
    file.read_until(b'\n', &mut line).ok()?;
    Some(line)
}

/// Mends what an end in the middle has left: a file that was joined with another one is there
/// twice, or a number is missing. Returns how many older files there are.
pub(super) fn tidy(path: &Path, most: u32) -> io::Result<usize> {
    let _ = fs::remove_file(beside(path));
    let mut kept = 0;
    let mut newer = None;
    for number in 1..=most.saturating_add(1) {
        let this = older(path, number);
        let Some(first) = first(&this) else {
            continue;
        };
        if newer.as_ref() == Some(&first) && !first.is_empty() {
            // The newer one has all of it.
            fs::remove_file(&this)?;
            continue;
        }
        newer = Some(first);
        kept += 1;
        if number != kept {
            fs::rename(&this, older(path, kept))?;
        }
    }
    Ok(usize::try_from(kept).unwrap_or(0))
}

#[cfg(test)]
#[path = "room_tests.rs"]
mod tests;
