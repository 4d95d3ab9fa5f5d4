//! The audit's file: one JSON object a line, numbered without gaps, so that what is
//! missing is seen.
//!
//! A file that is long or old enough becomes `PATH.1`, that one `PATH.2`, and so on. The
//! last record of a file and the first of the next say so. What cannot be written is lost,
//! counted, and said as soon as something can be written again. When all files are full,
//! records make room by the shares of tenants ([`room`]).

mod room;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use crate::sync::Syncer;
use room::{Class, Made, Plan, Shelf, Shortened};

/// What a record says, without its number and time.
pub(crate) type Record = Map<String, Value>;

/// No record is longer, but for what it repeats of a lease.
const MOST_TAIL: u64 = 1 << 20;
/// Two have a share beside the tenants: users without one, and the arbiter.
const OTHERS: usize = 2;
/// Fewer older files are not kept.
const LEAST_KEPT: u32 = 2;
/// Between two tries to rotate a file, in milliseconds.
const TRIES: u64 = 1_000;

/// Where the audit goes, and when a file is full.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditConfig {
    pub path: PathBuf,
    /// It is rotated when it would have more bytes.
    pub size: u64,
    /// So many older files are kept, from 1.
    pub keep: u32,
    /// It is rotated when its first record is so old, in milliseconds.
    pub age_ms: Option<u64>,
}

impl AuditConfig {
    /// The path of an older file: 1 is the newest of them.
    #[must_use]
    pub fn older(&self, number: u32) -> PathBuf {
        older(&self.path, number)
    }
}

/// The file, open.
#[derive(Debug)]
pub(crate) struct Trail {
    config: AuditConfig,
    file: Arc<File>,
    length: u64,
    /// When its first record was written, in milliseconds since 1970.
    begun: u64,
    /// The number of the next record.
    next: u64,
    /// Records that could not be written since the last that could.
    lost: u64,
    syncer: Syncer,
    /// Something was written since the last sync.
    dirty: bool,
    /// Files that were rotated, and the folder, which are not on the disk yet.
    unsynced: Vec<Arc<File>>,
    /// No rotation is tried before.
    rotates_from: u64,
    /// What this file has; `None`: it has records of before, too.
    shelf: Option<Shelf>,
    /// Who has written what since this arbiter has begun, or since the last file.
    written: Shelf,
    /// Lately, of that what each has caused itself.
    own: BTreeMap<Class, u64>,
    /// The older files, from the newest on.
    shelves: Vec<Option<Shelf>>,
    /// Between how many the bytes are shared.
    classes: usize,
    /// There was no room for a file more; while the newest one is not too long, that is not
    /// tried again before.
    tight: Option<u64>,
    /// Records are making room.
    making: Option<JoinHandle<io::Result<Made>>>,
}

/// What became of some records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Appended {
    pub(crate) written: u64,
    pub(crate) lost: u64,
}

/// Milliseconds since 1970.
#[must_use]
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let ms = since.map(|since| since.as_millis()).unwrap_or(0);
    u64::try_from(ms).unwrap_or(u64::MAX)
}

fn older(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number}"));
    name.into()
}

/// The number after that of the last whole record, and how long the file is up to there.
fn last(file: &mut File) -> io::Result<(Option<u64>, u64)> {
    let length = file.seek(SeekFrom::End(0))?;
    let from = length.saturating_sub(MOST_TAIL);
    file.seek(SeekFrom::Start(from))?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail)?;
    let Some(end) = tail.iter().rposition(|byte| *byte == b'\n') else {
        return Ok((None, from));
    };
    let whole = &tail[..end];
    let line = whole.rsplit(|byte| *byte == b'\n').next().unwrap_or(whole);
    let seq = serde_json::from_slice::<Value>(line).ok();
    let seq = seq.and_then(|record| record.get("seq")?.as_u64());
    Ok((seq.map(|seq| seq + 1), from + end as u64 + 1))
}

/// When the first record of a file was written.
fn begun(path: &Path) -> Option<u64> {
    let mut start = [0; 256];
    let length = File::open(path).ok()?.read(&mut start).ok()?;
    let text = String::from_utf8_lossy(&start[..length]).into_owned();
    let (_, rest) = text.split_once("\"time_ms\":")?;
    let digits = rest.find(|one: char| !one.is_ascii_digit())?;
    rest[..digits].parse().ok()
}

impl Trail {
    /// Opens the file, and goes on where it ends.
    ///
    /// # Errors
    /// It cannot be opened, read or written.
    pub(crate) fn open(mut config: AuditConfig, now_ms: u64) -> io::Result<Self> {
        if config.keep < LEAST_KEPT {
            // Records that stay are joined with others, for which it takes two.
            config.size /= u64::from(LEAST_KEPT);
            config.keep = LEAST_KEPT;
        }
        let mut file = open(&config.path, false)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("this is no regular file"));
        }
        let older_files = room::tidy(&config.path, config.keep)?;
        let (next, length) = last(&mut file)?;
        let whole = file.metadata()?.len();
        // What a crash has left of a record was never whole.
        file.set_len(length)?;
        let before = || {
            let mut file = File::open(older(&config.path, 1)).ok()?;
            last(&mut file).ok()?.0
        };
        let mut trail = Trail {
            begun: begun(&config.path).filter(|_| length > 0).unwrap_or(now_ms),
            file: Arc::new(file),
            length,
            next: next.or_else(before).unwrap_or(1),
            lost: 0,
            syncer: Syncer::new()?,
            dirty: false,
            unsynced: Vec::new(),
            rotates_from: 0,
            shelf: (length == 0).then(Shelf::default),
            written: Shelf::default(),
            own: BTreeMap::new(),
            shelves: vec![None; older_files],
            classes: OTHERS,
            tight: None,
            making: None,
            config,
        };
        let begins = json!({ "event": "begins", "cut_bytes": whole - length });
        let begins = begins.as_object().cloned().unwrap_or_default();
        // On a full disk it is told as lost when there is room.
        if trail.append(vec![begins], now_ms).lost > 0 {
            let path = trail.config.path.display();
            log::error!("{path}: the audit cannot be written now; lost records are counted");
        }
        Ok(trail)
    }

    /// The bytes are shared among so many tenants.
    pub(crate) fn share_among(&mut self, tenants: usize) {
        self.classes = OTHERS + tenants;
    }

    fn line(&mut self, mut record: Record, now_ms: u64) -> Vec<u8> {
        Class::charge(&mut record, &self.own);
        let class = Class::of(&record);
        let by = record.get("by").and_then(Value::as_str);
        let is_own = by.is_none_or(|by| class == Class::Tenant(by.to_owned()));
        let mut whole = Map::new();
        whole.insert("seq".to_owned(), self.next.into());
        whole.insert("time_ms".to_owned(), now_ms.into());
        whole.append(&mut record);
        self.next += 1;
        let mut line = serde_json::to_vec(&whole).unwrap_or_default();
        line.push(b'\n');
        let shelves = self.shelf.iter_mut().chain([&mut self.written]);
        shelves.for_each(|shelf| shelf.add(class.clone(), line.len() as u64, now_ms));
        if is_own {
            *self.own.entry(class).or_default() += line.len() as u64;
        }
        line
    }

    fn marker(&mut self, event: &str, now_ms: u64) -> Vec<u8> {
        let record = json!({ "event": event });
        self.line(record.as_object().cloned().unwrap_or_default(), now_ms)
    }

    /// Writes records at the end of the file: all, or none of them.
    pub(crate) fn append(&mut self, records: Vec<Record>, now_ms: u64) -> Appended {
        let count = records.len() as u64;
        if count == 0 {
            return Appended::default();
        }
        let displaced = self.made_room(now_ms);
        self.rotate_if_due(now_ms);
        let mut bytes = Vec::new();
        for record in displaced {
            bytes.extend(self.line(record, now_ms));
        }
        let lost = self.lost;
        if lost > 0 {
            let record = json!({ "event": "lost", "records": lost });
            bytes.extend(self.line(record.as_object().cloned().unwrap_or_default(), now_ms));
        }
        for record in records {
            bytes.extend(self.line(record, now_ms));
        }
        if let Err(error) = self.write(&bytes) {
            if lost == 0 {
                let path = self.config.path.display();
                log::error!(
                    "{path}: {error}; records of the audit are lost until it can be written"
                );
            }
            self.lost += count;
            return Appended {
                written: 0,
                lost: count,
            };
        }
        if lost > 0 {
            log::warn!("the audit is written again; {lost} records were lost");
            self.lost = 0;
        }
        Appended {
            written: count,
            lost: 0,
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.dirty = true;
        if let Err(error) = (&*self.file).write_all(bytes) {
            // What it has is counted anew when that is needed.
            self.shelf = None;
            // Half a record would spoil the next one.
            let _ = self.file.set_len(self.length);
            return Err(error);
        }
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Takes over what a thread has made of the files. The records say what is gone.
    fn made_room(&mut self, now_ms: u64) -> Vec<Record> {
        if !self.making.as_ref().is_some_and(JoinHandle::is_finished) {
            return Vec::new();
        }
        let made = self.making.take().map(JoinHandle::join);
        let why = match made {
            Some(Ok(Ok(made))) => {
                self.shelves = made.shelves.into_iter().map(Some).collect();
                self.tight = made.is_tight.then_some(now_ms.saturating_add(TRIES));
                let mut gone = made.gone;
                let shortened = made.shortened.map(|short| self.shorten(short, &mut gone));
                if let Some(Err(error)) = shortened {
                    self.no_room(&error.to_string());
                }
                let gone = gone.into_iter().map(|(class, records)| {
                    let (whose, of) = class.words();
                    let gone = json!({ "event": "displaced", "whose": whose, "of": of, "records": records });
                    gone.as_object().cloned().unwrap_or_default()
                });
                return gone.collect();
            }
            Some(Ok(Err(error))) => error.to_string(),
            _ => "its thread has ended".to_owned(),
        };
        self.no_room(&why);
        self.shelves = vec![None; self.older_files()];
        Vec::new()
    }

    fn no_room(&mut self, why: &str) {
        let path = self.config.path.display();
        log::error!("{path}: no room for a file more: {why}; it grows, and is tried again");
        self.rotates_from = unix_ms().saturating_add(TRIES);
    }

    /// Goes on in the file that stands for the newest one, with what came since.
    fn shorten(&mut self, short: Shortened, gone: &mut BTreeMap<Class, u64>) -> io::Result<()> {
        let path = &self.config.path;
        let beside = room::beside(path);
        let mut since = Vec::new();
        let mut whole = File::open(path)?;
        whole.seek(SeekFrom::Start(short.upto))?;
        whole.read_to_end(&mut since)?;
        let mut file = open(&beside, false)?;
        file.write_all(&since)?;
        std::fs::rename(&beside, path)?;
        self.unsynced.push(folder_of(path)?);
        self.file = Arc::new(file);
        self.length = short.left.length + since.len() as u64;
        self.dirty = true;
        // What it has is counted anew when that is needed.
        (self.shelf, self.written) = (None, short.left);
        *gone.entry(short.class).or_default() += short.records;
        Ok(())
    }

    fn older_files(&self) -> usize {
        let there = |number: &u32| older(&self.config.path, *number).exists();
        (1..=self.config.keep).take_while(there).count()
    }

    fn is_full(&self) -> bool {
        self.shelves.len() >= usize::try_from(self.config.keep).unwrap_or(usize::MAX)
    }

    /// Has records make room, in time before a file more is needed.
    fn make_room(&mut self, now_ms: u64) {
        if !self.is_full() || self.making.is_some() || now_ms < self.rotates_from {
            return;
        }
        let is_long = self.length >= self.config.size;
        if self.tight.is_some_and(|until| !is_long && now_ms < until) {
            return;
        }
        // Any two of the files that are left fit into one, once no class has more than this.
        let whole = u64::from(self.config.keep / 2) * self.config.size;
        let plan = Plan {
            path: self.config.path.clone(),
            size: self.config.size,
            shared: whole,
            classes: self.classes,
            old: self
                .config
                .age_ms
                .map_or(0, |age| now_ms.saturating_sub(age)),
            keeps_young: self.config.age_ms.is_some(),
            newest: is_long.then_some(self.length),
            first: self.written.most().cloned(),
            shelves: self.shelves.clone(),
        };
        let thread = Builder::new().name("audit-room".to_owned());
        match thread.spawn(move || plan.make_room()) {
            Ok(making) => self.making = Some(making),
            Err(error) => {
                log::error!("no room for a file more of the audit: {error}; it is tried again");
                self.rotates_from = now_ms.saturating_add(TRIES);
            }
        }
    }

    fn rotate_if_due(&mut self, now_ms: u64) {
        let old = self
            .config
            .age_ms
            .is_some_and(|age| now_ms.saturating_sub(self.begun) >= age);
        if self.length >= self.config.size / 2 || old {
            self.make_room(now_ms);
        }
        if (self.length < self.config.size && !old)
            || self.length == 0
            || self.is_full()
            || self.making.is_some()
            || now_ms < self.rotates_from
        {
            return;
        }
        if let Err(error) = self.rotate(now_ms) {
            let path = self.config.path.display();
            log::error!("{path}: it cannot be rotated: {error}; it grows, and is tried again");
            self.rotates_from = now_ms.saturating_add(TRIES);
            self.shelves = vec![None; self.older_files()];
        }
    }

    fn rotate(&mut self, now_ms: u64) -> io::Result<()> {
        let path = self.config.path.clone();
        // Without it, an earlier try got so far.
        if path.exists() {
            let rotated = self.marker("rotated", now_ms);
            self.write(&rotated)?;
            self.unsynced.push(self.file.clone());
            // Behind a gap, which an earlier try has left, nothing has to make room.
            let there = |number: &u32| older(&path, *number).exists();
            let last = (1..self.config.keep).take_while(there).last().unwrap_or(0);
            for number in (1..=last).rev() {
                std::fs::rename(older(&path, number), older(&path, number + 1))?;
            }
            std::fs::rename(&path, older(&path, 1))?;
            self.shelves.insert(0, self.shelf.take());
        }
        self.file = Arc::new(open(&path, true)?);
        self.length = 0;
        self.begun = now_ms;
        (self.shelf, self.written) = (Some(Shelf::default()), Shelf::default());
        self.own.values_mut().for_each(|bytes| *bytes /= 2);
        let follows = self.marker("follows", now_ms);
        self.write(&follows)?;
        self.unsynced.push(folder_of(&path)?);
        Ok(())
    }

    /// Has what was written put on the disk, without a wait for it.
    ///
    /// # Errors
    /// The disk did not take what was written before: the end of the host would lose it.
    pub(crate) fn sync(&mut self) -> io::Result<()> {
        if let Some(error) = self.syncer.failure() {
            return Err(error);
        }
        while let Some(file) = self.unsynced.first() {
            if !self.syncer.sync(file)? {
                return Ok(());
            }
            self.unsynced.remove(0);
        }
        if self.dirty && self.syncer.sync(&self.file)? {
            self.dirty = false;
        }
        Ok(())
    }

    /// The same, and waits for the disk: nothing is written after this.
    ///
    /// # Errors
    /// The disk did not take it.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        if let Some(Err(_)) = self.making.take().map(JoinHandle::join) {
            log::error!("the thread that makes room in the audit has ended");
        }
        let mut files = self.unsynced.iter().chain([&self.file]);
        files.try_for_each(|file| file.sync_data())
    }
}

/// The folder that has a file.
fn folder_of(path: &Path) -> io::Result<Arc<File>> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    Ok(Arc::new(File::open(folder.unwrap_or(Path::new(".")))?))
}

fn open(path: &Path, new: bool) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = OpenOptions::new();
    options.read(true).append(true).mode(0o640);
    if new {
        options.create_new(true);
    } else {
        options.create(true);
    }
    options.open(path)
}

#[cfg(test)]
#[path = "audit_tests.rs"]
mod tests;
