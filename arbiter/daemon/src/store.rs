//! The journal's file.
//!
//! What is written is the kernel's at once, and survives this process, however it ends. It
//! is put on the disk later, by a thread of its own: only the end of the host could lose it
//! before, and that ends all leases (the boot id in the header).

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FlockOperation, flock};
use thiserror::Error;

use crate::commit::Journal;
use crate::journal::{Entry, FIRST, HEADER, Recalled, Unusable, VERSION, header, recall, write};
use crate::sync::Syncer;

const FILE: &str = "leases.journal";
/// A journal is written anew when it is so long, and several times what it comes to.
const LONG: u64 = 1 << 20;
const TIMES: u64 = 4;

/// The journal cannot be kept.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The folder or the file cannot be used.
    #[error("{}: {what} failed: {error}", .path.display())]
    Io {
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        error: io::Error,
    },
    /// Another arbiter has it.
    #[error("{}: another arbiter keeps its journal there; stop it, or give another folder", .0.display())]
    Taken(PathBuf),
    /// It is of another version of Umpire.
    #[error(
        "{}: this is version {version} of the journal, and this Umpire reads those from {FIRST} to {VERSION}; \
         use the Umpire that wrote it, or remove the file if no lease is held", .path.display()
    )]
    Version { path: PathBuf, version: u32 },
}

/// The journal's file, open.
#[derive(Debug)]
pub(crate) struct Store {
    folder: PathBuf,
    boot_id: String,
    file: Arc<File>,
    /// Its length as of the last record that is whole.
    length: u64,
    /// Something may be written behind that.
    dirty: bool,
    /// Its length when it was written anew.
    compact: u64,
    syncer: Syncer,
    /// Something is not on the disk.
    unsynced: bool,
    /// The disk did not take what was written.
    lost: bool,
    /// The file is of before, and its disk has had no room for another: nothing is added to it.
    stale: bool,
}

fn failed(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |error| StoreError::Io { path, what, error }
}

/// The file, which nobody else has.
fn locked(path: &Path) -> Result<File, StoreError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    loop {
        let file = options.open(path).map_err(failed(path, "open"))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(StoreError::Taken(path.to_owned())),
            Err(error) => return Err(failed(path, "flock")(error.into())),
        }
        // Whoever had it may have written another one anew meanwhile, under its name.
        let (ours, named) = (file.metadata(), std::fs::metadata(path));
        let ours = ours.map_err(failed(path, "fstat"))?.ino();
        if named.is_ok_and(|named| named.ino() == ours) {
            return Ok(file);
        }
    }
}

/// What the bytes of the file say; nothing, where they are of another boot or damaged.
fn recalled(path: &Path, bytes: &[u8], boot_id: &str) -> Result<Recalled, StoreError> {
    let recalled = match recall(bytes, boot_id) {
        Ok(recalled) => recalled,
        Err(Unusable::Version(version)) => {
            let path = path.to_owned();
            return Err(StoreError::Version { path, version });
        }
        Err(Unusable::OtherBoot(barred)) => Recalled {
            next: 1,
            barred,
            ..Recalled::default()
        },
        Err(Unusable::NoJournal) => {
            if !bytes.is_empty() {
                let kept = path.with_file_name("leases.journal.damaged");
                let written = std::fs::write(&kept, bytes);
                written.map_err(failed(path, "keeping what is damaged"))?;
                log::error!(
                    "{}: it is damaged, and begins anew; {} has what was there",
                    path.display(),
                    kept.display()
                );
            }
            Recalled {
                next: 1,
                ..Recalled::default()
            }
        }
    };
    if recalled.cut {
        let at = recalled.length;
        log::warn!(
            "{}: what comes after byte {at} is not whole, and is cut off",
            path.display()
        );
    }
    Ok(recalled)
}

impl Store {
    /// Opens the journal in `folder`, and recalls what it says of this boot of the host.
    pub(crate) fn open(folder: &Path, boot_id: &str) -> Result<(Self, Recalled), StoreError> {
        let path = folder.join(FILE);
        std::fs::create_dir_all(folder).map_err(failed(&path, "mkdir"))?;
        let mut file = locked(&path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)
            .map_err(failed(&path, "read"))?;
        let recalled = recalled(&path, &bytes, boot_id)?;
        let mut store = Store {
            folder: folder.to_owned(),
            boot_id: boot_id.to_owned(),
            file: Arc::new(file),
            length: recalled.length as u64,
            dirty: true,
            // Not known: a long journal is written anew at once.
            compact: HEADER as u64,
            syncer: Syncer::new().map_err(failed(&path, "making a thread for syncs"))?,
            unsynced: false,
            lost: false,
            stale: false,
        };
        if recalled.old || store.length < HEADER as u64 {
            store.begin(&recalled).map_err(failed(&path, "write"))?;
        }
        Ok((store, recalled))
    }

    /// Writes another beside one of before: whatever happens, nobody loses a lease or is pardoned
    /// by it. A disk without room does not keep an arbiter from its work.
    fn begin(&mut self, recalled: &Recalled) -> io::Result<()> {
        match self.compact(&recalled.entries()) {
            Err(error) if is_full(&error) => {
                log::error!(
                    "the journal cannot be begun: {error}; nothing is granted until it can"
                );
                self.stale = true;
                Ok(())
            }
            begun => begun.and_then(|()| File::open(&self.folder)?.sync_all()),
        }
    }
}

fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded)
}

impl Journal for Store {
    fn append(&mut self, entries: &[Entry]) -> io::Result<()> {
        if entries.is_empty() {
            return Ok(());
        }
        if self.stale {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if self.dirty {
            self.file.set_len(self.length)?;
            (&*self.file).seek(SeekFrom::Start(self.length))?;
        }
        let mut bytes = Vec::new();
        write(entries, &mut bytes);
        self.dirty = true;
        (&*self.file).write_all(&bytes)?;
        self.dirty = false;
        self.unsynced = true;
        self.length += bytes.len() as u64;
        Ok(())
    }

    fn is_long(&self) -> bool {
        self.length > LONG && self.length > TIMES * self.compact
    }

    fn compact(&mut self, entries: &[Entry]) -> io::Result<()> {
        let path = self.folder.join(FILE);
        let beside = self.folder.join("leases.journal.new");
        let mut bytes = header(&self.boot_id);
        write(entries, &mut bytes);
        // A disk that has failed is believed when it has taken all.
        let is_barred = |entry: &Entry| matches!(entry, Entry::Barred(_));
        // Who is barred is so over a power loss, too, after which a file that was renamed before
        // the disk had it may be torn: it is one record, and nothing of it would be left.
        let synced = self.lost || self.dirty || entries.iter().any(is_barred);
        let written = write_anew(&beside, &bytes, synced).and_then(|file| {
            // Whoever ends before this leaves the old journal, and after it the new one, both
            // of them whole.
            std::fs::rename(&beside, &path)?;
            Ok(file)
        });
        // What is left of it would take the room that the next record needs.
        let file = written.inspect_err(|_| drop(std::fs::remove_file(&beside)))?;
        self.file = Arc::new(file);
        self.length = bytes.len() as u64;
        self.compact = self.length;
        self.dirty = false;
        self.lost = false;
        self.stale = false;
        self.unsynced = true;
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        if let Some(error) = self.syncer.failure() {
            self.lost = true;
            return Err(error);
        }
        if self.unsynced && self.syncer.sync(&self.file)? {
            self.unsynced = false;
        }
        Ok(())
    }
}

/// A locked file with these bytes.
fn write_anew(path: &Path, bytes: &[u8], synced: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true);
    let mut file = options.open(path)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    file.write_all(bytes)?;
    if synced {
        file.sync_all()?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::Barred;
    use crate::journal::tests::of_version_1;
    use crate::sync::tests::{failing, until};

    const BOOT: &str = "0b5c6c3e-6f0b-4f6a-a5ae-3e6f5a1d2c3b";

    const BARRED: Entry = Entry::Barred(Barred {
        uid: 7,
        pid: 70,
        lease: 3,
    });

    fn next(folder: &Path) -> u64 {
        let bytes = std::fs::read(folder.join(FILE)).expect("a journal");
        recall(&bytes, BOOT).expect("a header").next
    }

    #[test]
    fn what_was_written_is_there_without_a_sync() {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut store, _) = Store::open(folder.path(), BOOT).expect("a journal");
        store.append(&[Entry::Next(7)]).expect("written");
        assert_eq!(next(folder.path()), 7);
        store.compact(&[Entry::Next(9)]).expect("written anew");
        assert_eq!(next(folder.path()), 9);
        store.append(&[Entry::Next(11)]).expect("written");
        assert_eq!(next(folder.path()), 11);
        until(|| {
            store.sync().expect("a disk");
            (!store.unsynced).then_some(())
        });
    }

    #[test]
    fn wherever_it_ends_while_it_writes_anew_a_whole_journal_is_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut store, _) = Store::open(folder.path(), BOOT).expect("a journal");
        store.append(&[Entry::Next(7)]).expect("written");
        drop(store);
        let mut new = header(BOOT);
        write(&[Entry::Next(9)], &mut new);
        for written in 0..=new.len() {
            // It ended before the rename.
            let beside = folder.path().join("leases.journal.new");
            std::fs::write(&beside, &new[..written]).expect("a disk");
            let (_, recalled) = Store::open(folder.path(), BOOT).expect("a journal");
            assert_eq!((recalled.next, recalled.cut), (7, false));
        }
        // And after it.
        let beside = folder.path().join("leases.journal.new");
        std::fs::rename(beside, folder.path().join(FILE)).expect("a disk");
        let (mut store, recalled) = Store::open(folder.path(), BOOT).expect("a journal");
        assert_eq!((recalled.next, recalled.cut), (9, false));
        store.append(&[Entry::Next(10)]).expect("written");
        assert_eq!(next(folder.path()), 10);
    }

    #[test]
    fn a_full_disk_keeps_no_arbiter_from_its_work() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(FILE);
        let mut other_boot = header("11111111-6f0b-4f6a-a5ae-3e6f5a1d2c3b");
        write(&[BARRED], &mut other_boot);
        let version_1 = of_version_1(BOOT, &[serde_json::json!({ "n": 9 })]);
        for (old, next) in [(other_boot, 1), (version_1, 9), (Vec::new(), 1)] {
            std::fs::write(&path, &old).expect("a disk");
            let beside = folder.path().join("leases.journal.new");
            std::os::unix::fs::symlink("/dev/full", beside).expect("a link");
            let (mut store, recalled) = Store::open(folder.path(), BOOT).expect("it begins");
            assert_eq!(recalled.next, next);
            let failed = store.append(&[Entry::Next(20)]).expect_err("a full disk");
            assert!(is_full(&failed));
            assert_eq!(std::fs::read(&path).expect("a journal"), old);
            // The link is gone, so there is room.
            let all = [Entry::Next(20), BARRED];
            store.compact(&all).expect("written anew");
            store.append(&[Entry::Next(21)]).expect("written");
            drop(store);
            let (_, recalled) = Store::open(folder.path(), BOOT).expect("a journal");
            assert_eq!((recalled.next, recalled.old), (21, false));
            assert_eq!(recalled.barred.len(), 1);
        }
    }

    #[test]
    fn a_disk_that_did_not_take_it_is_told_and_believed_after_a_sync() {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut store, _) = Store::open(folder.path(), BOOT).expect("a journal");
        store.syncer = failing();
        store.append(&[Entry::Next(7)]).expect("written");
        let why = until(|| store.sync().err());
        assert_eq!(why.to_string(), "the disk is broken");
        assert!(store.lost);
        store.compact(&[Entry::Next(7)]).expect("this disk works");
        assert!(!store.lost);
        assert_eq!(next(folder.path()), 7);
    }
}
