//! The folder of kernel and booted machines.

use std::env;
use std::fs::{self, DirBuilder, File, FileTimes};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use debian_packages::user_cache;
use rustix::fs::OFlags;
use rustix::process::geteuid;
use serde::Serialize;
use serde::de::DeserializeOwned;
use umpire_count::inputs::{digest, short};

use super::ended::failed;
use super::partial::{self, PartialFolder};
use crate::exit::UserError;
use crate::flags::StoreFlags;

/// The ends of names: a booted machine, what is known of its kernel, and whose turn it is.
const IMAGE: &str = "image";
const KNOWN: &str = "known";
const LOCK: &str = "image.lock";
/// The end of what `Image::boot` writes before it is whole.
const HALF: &str = ".partial";
/// How the names of folders begin that somebody works in.
const PARTIAL: &str = "partial-";
/// Longer than what is known of any.
const LONGEST_KNOWN: u64 = 1 << 20;

/// Where kernel and booted machines are kept.
#[derive(Debug)]
pub(super) struct Store {
    folder: PathBuf,
    /// Bytes of booted machines.
    most: u64,
}

/// A booted machine in the store.
#[derive(Debug)]
pub(super) struct StoredMachine {
    folder: PathBuf,
    /// `ENGINE-KEY`.
    name: String,
}

impl Store {
    /// The one that the options name. Its folder is made where it is missing.
    pub(super) fn of(flags: &StoreFlags) -> Result<Self, UserError> {
        let named = flags.cache.clone();
        let of_user = || user_cache(&|name| env::var_os(name)).map(|caches| caches.join("count"));
        let folder = named.or_else(of_user);
        let folder = folder
            .ok_or_else(|| failed("HOME is not set: say where the cache is to be with --cache"))?;
        let store = Store {
            folder,
            most: flags.cache_size.saturating_mul(1 << 20),
        };
        for folder in [store.kernels(), store.images(), store.work()] {
            make(&folder).map_err(|error| {
                let folder = folder.display();
                failed(format!(
                    "cannot make {folder}: {error}; name another one with --cache"
                ))
            })?;
        }
        partial::sweep(&store.work(), PARTIAL, true);
        store.sweep_images();
        Ok(store)
    }

    /// A folder of its own for something that takes a while.
    pub(super) fn partial(&self) -> io::Result<PartialFolder> {
        PartialFolder::new(&self.work(), PARTIAL)
    }

    /// Removes machines that were written halfway, each of which lies beside the lock that whoever
    /// writes it has.
    fn sweep_images(&self) {
        for entry in fs::read_dir(self.images()).into_iter().flatten().flatten() {
            let path = entry.path();
            let Some(whole) = path.to_str().and_then(|path| path.strip_suffix(HALF)) else {
                continue;
            };
            if !is_machines(Path::new(whole)) {
                continue;
            }
            // Without its lock nobody writes it.
            let lock = File::open(format!("{whole}.lock"));
            if lock.map_or(true, |lock| lock.try_lock().is_ok()) {
                let _ = fs::remove_file(&path);
            }
        }
    }

    /// The folder of kernels.
    pub(super) fn kernels(&self) -> PathBuf {
        self.folder.join("kernel")
    }

    fn images(&self) -> PathBuf {
        self.folder.join("images")
    }

    /// The folder of folders that somebody works in. It is apart: what lies beside it may be the
    /// user's, who has named the folder of all these.
    fn work(&self) -> PathBuf {
        self.folder.join("work")
    }

    /// Where the machine of an engine goes that differs from others of it by `parts`.
    pub(super) fn place(&self, engine: &str, parts: &str) -> StoredMachine {
        let digits = short(&digest(parts.as_bytes()));
        StoredMachine {
            folder: self.images(),
            name: format!("{engine}-{digits}"),
        }
    }

    /// Removes what other engines left, and then what was used longest ago, until the rest fits. The
    /// machine at `kept` stays: it is about to be used. Whoever runs another one goes on with it,
    /// since a file that is mapped stays as long as it is.
    pub(super) fn tidy(&self, engine: &str, kept: &StoredMachine) -> io::Result<()> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.images())? {
            let path = entry?.path();
            if !is_machines(&path) {
                continue;
            }
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
                continue;
            };
            let (stem, end) = name.split_once('.').unwrap_or((name, ""));
            let place = StoredMachine {
                folder: self.images(),
                name: stem.to_owned(),
            };
            if !stem.starts_with(&format!("{engine}-")) {
                // All of it: a boot that failed has left its lock.
                place.remove()?;
                continue;
            }
            if end != IMAGE || place.name == kept.name {
                continue;
            }
            let metadata = fs::metadata(&path)?;
            // Memory that is 0 has no room on the disk.
            found.push((metadata.modified()?, metadata.blocks() * 512, place));
        }
        found.sort_by_key(|(used, ..)| std::cmp::Reverse(*used));
        let mut left = self.most.saturating_sub(kept.size());
        for (_, size, place) in found {
            match left.checked_sub(size) {
                Some(rest) => left = rest,
                None => {
                    left = 0;
                    place.remove()?;
                }
            }
        }
        Ok(())
    }
}

impl StoredMachine {
    /// The file of the machine.
    pub(super) fn image(&self) -> PathBuf {
        self.file(IMAGE)
    }

    fn file(&self, end: &str) -> PathBuf {
        self.folder.join(format!("{}.{end}", self.name))
    }

    /// Bytes that it has on the disk; 0 where it is not there.
    fn size(&self) -> u64 {
        fs::metadata(self.image()).map_or(0, |metadata| metadata.blocks() * 512)
    }

    /// What is known of it, if it is there and whole, and nobody else could write it.
    pub(super) fn known<T: DeserializeOwned>(&self) -> Option<T> {
        let mut options = File::options();
        let no_link = OFlags::NOFOLLOW.bits().cast_signed();
        let file = options.read(true).custom_flags(no_link);
        let file = file.open(self.file(KNOWN)).ok()?;
        let metadata = file.metadata().ok()?;
        let is_own = metadata.uid() == geteuid().as_raw() && metadata.mode() & 0o022 == 0;
        let mut bytes = Vec::new();
        file.take(LONGEST_KNOWN).read_to_end(&mut bytes).ok()?;
        let end = bytes.iter().position(|byte| *byte == b'\n')?;
        let (sum, rest) = (bytes.get(..end)?, bytes.get(end + 1..)?);
        let is_whole = digest(rest).as_bytes() == sum;
        (is_own && is_whole).then(|| serde_json::from_slice(rest).ok())?
    }

    /// Keeps what is known of it, whole or not at all.
    pub(super) fn know<T: Serialize>(&self, known: &T) -> io::Result<()> {
        // Of the owner's alone, as the machine itself.
        let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
        let text = serde_json::to_vec(known)?;
        writeln!(file, "{}", digest(&text))?;
        file.write_all(&text)?;
        file.persist(self.file(KNOWN))?;
        Ok(())
    }

    /// It is used now. Where that cannot be written down it goes sooner, and no run depends on it.
    pub(super) fn used(&self) {
        let now = FileTimes::new().set_modified(SystemTime::now());
        let _ = File::open(self.image()).and_then(|file| file.set_times(now));
    }

    /// Removes it, and what belongs to it.
    pub(super) fn remove(&self) -> io::Result<()> {
        for end in [KNOWN, IMAGE, LOCK] {
            match fs::remove_file(self.file(end)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Whether a file is called as those of a machine are, `ENGINE-KEY` and an end: others are the
/// user's, who may have a folder `images`.
fn is_machines(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let stem = name.and_then(|name| {
        let ends = [KNOWN, IMAGE, LOCK].into_iter();
        let mut stems = ends.filter_map(|end| name.strip_suffix(end)?.strip_suffix('.'));
        stems.next()
    });
    let is_digits =
        |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    stem.and_then(|stem| stem.split_once('-'))
        .is_some_and(|(engine, key)| is_digits(engine) && is_digits(key))
}

/// Makes a folder of the user's own. Whoever else could write in one would say what is counted.
fn make(folder: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    let metadata = fs::metadata(folder)?;
    if metadata.uid() != geteuid().as_raw() || metadata.mode() & 0o022 != 0 {
        let what = "it is somebody else's, or others may write in it";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_folder_that_is_not_ones_own_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("kernel");
        make(&path).expect("a folder");
        assert_eq!(fs::metadata(&path).expect("it").mode() & 0o777, 0o700);
        let rights = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        fs::set_permissions(&path, rights).expect("rights");
        let error = make(&path).expect_err("others may write");
        assert!(
            error.to_string().contains("others may write in it"),
            "{error}"
        );
    }

    fn store(folder: &Path, mib: u64) -> Store {
        let flags = StoreFlags {
            cache: Some(folder.to_owned()),
            cache_size: mib,
            ..StoreFlags::default()
        };
        Store::of(&flags).expect("a folder")
    }

    /// A machine of so many MiB that was used so many seconds ago.
    fn put(store: &Store, engine: &str, parts: &str, mib: usize, ago: u64) -> StoredMachine {
        let place = store.place(engine, parts);
        fs::write(place.image(), vec![1; mib << 20]).expect("room");
        fs::write(place.file(LOCK), "").expect("room");
        place.know(&parts).expect("room");
        let used = SystemTime::now() - Duration::from_secs(ago);
        let times = FileTimes::new().set_modified(used);
        let file = File::open(place.image()).expect("a file");
        file.set_times(times).expect("times");
        place
    }

    #[test]
    fn old_machines_go_and_those_of_old_engines() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = store(folder.path(), 4);
        let kept = put(&store, "4e1", "kept", 1, 900);
        let recent = put(&store, "4e1", "recent", 1, 10);
        let older = put(&store, "4e1", "older", 2, 20);
        let oldest = put(&store, "4e1", "oldest", 1, 30);
        let other = put(&store, "01d", "recent", 1, 0);
        let failed = store.place("01d", "failed");
        fs::write(failed.file(LOCK), "").expect("room");
        store.tidy("4e1", &kept).expect("removed");
        let there =
            |place: &StoredMachine| [IMAGE, KNOWN, LOCK].map(|end| place.file(end).exists());
        for place in [&kept, &recent, &older] {
            assert_eq!(there(place), [true; 3], "{place:?}");
        }
        for place in [&oldest, &other, &failed] {
            assert_eq!(there(place), [false; 3], "{place:?}");
        }
        oldest.remove().expect("nothing to remove");
        // What is used is the last to go.
        older.used();
        let smaller = Store {
            most: 3 << 20,
            ..store
        };
        smaller.tidy("4e1", &kept).expect("removed");
        assert!(there(&older)[0] && !there(&recent)[0]);
    }

    #[test]
    fn what_was_killed_leaves_nothing_behind_the_next_run() {
        let folder = tempfile::tempdir().expect("a folder");
        let work = store(folder.path(), 4).partial().expect("room");
        fs::create_dir(folder.path().join("work/partial-killed")).expect("room");
        let images = folder.path().join("images");
        for name in ["e-1.image.partial", "e-2.image.partial", "e-2.image.lock"] {
            fs::write(images.join(name), "x").expect("room");
        }
        let lock = File::open(images.join("e-2.image.lock")).expect("a file");
        lock.lock().expect("a lock");
        store(folder.path(), 4);
        assert!(work.path().exists() && !folder.path().join("work/partial-killed").exists());
        let is_there = |name: &str| images.join(name).exists();
        assert!(!is_there("e-1.image.partial") && is_there("e-2.image.partial"));
        drop(lock);
        store(folder.path(), 4);
        assert!(!is_there("e-2.image.partial") && is_there("e-2.image.lock"));
    }

    #[test]
    fn what_a_user_has_beside_it_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let here = folder.path();
        store(here, 1);
        fs::create_dir_all(here.join("partial-results/deep")).expect("room");
        fs::create_dir_all(here.join("partial-killed/deep")).expect("room");
        fs::create_dir_all(here.join("work/partial-results")).expect("room");
        let files = [
            "partial-notes.txt",
            "partial-notess",
            "images/disk.image",
            "images/my-disk.image",
            "images/photo.partial",
            "images/my-photo.image.partial",
        ];
        for file in files {
            fs::write(here.join(file), "x").expect("room");
        }
        let store = store(here, 1);
        store
            .tidy("4e1", &store.place("4e1", "kept"))
            .expect("removed");
        let folders = [
            "partial-results/deep",
            "partial-killed/deep",
            "work/partial-results",
        ];
        for name in folders.iter().chain(&files) {
            assert!(here.join(name).exists(), "{name}");
        }
    }

    #[test]
    fn what_is_known_is_read_or_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = store(folder.path(), 1).place("e", "p");
        assert_eq!(place.known::<String>(), None);
        place.know(&"it").expect("room");
        assert_eq!(place.known::<String>().as_deref(), Some("it"));
        assert_eq!(
            fs::metadata(place.file(KNOWN)).expect("a file").mode() & 0o777,
            0o600
        );
        let whole = fs::read(place.file(KNOWN)).expect("a file");
        for bytes in [
            &b"{"[..],
            b"",
            b"\n",
            &whole[1..],
            &whole[..whole.len() - 1],
        ] {
            fs::write(place.file(KNOWN), bytes).expect("room");
            assert_eq!(place.known::<String>(), None, "{bytes:?}");
        }
        fs::write(place.file(KNOWN), &whole).expect("room");
        assert_eq!(place.known::<String>().as_deref(), Some("it"));
        // Others may have written it.
        let rights = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        fs::set_permissions(place.file(KNOWN), rights).expect("rights");
        assert_eq!(place.known::<String>(), None);
    }
}
