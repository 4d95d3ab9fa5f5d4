//! Files and folders that are there only until they are whole. Whoever makes one has locked it; one
//! that nobody has locked is of a process that was killed, and goes when the next one comes.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use tempfile::{Builder, NamedTempFile, TempDir};

/// A folder that is removed at the end.
#[derive(Debug)]
pub(super) struct PartialFolder {
    folder: TempDir,
    /// Locked as long as it is open.
    _lock: File,
}

impl PartialFolder {
    /// A new one in `place`, the user's own, whose name begins with `prefix`.
    pub(super) fn new(place: &Path, prefix: &str) -> io::Result<Self> {
        loop {
            let mut builder = Builder::new();
            let builder = builder
                .prefix(prefix)
                .permissions(Permissions::from_mode(0o700));
            let folder = builder.tempdir_in(place)?;
            let lock = File::open(folder.path())?;
            if is_kept(&lock, folder.path())? {
                return Ok(PartialFolder {
                    folder,
                    _lock: lock,
                });
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// A new file of this mode, less the umask, in `place`.
pub(super) fn file(place: &Path, prefix: &str, mode: u32) -> io::Result<NamedTempFile> {
    loop {
        let mut builder = Builder::new();
        let builder = builder
            .prefix(prefix)
            .permissions(Permissions::from_mode(mode));
        let file = builder.tempfile_in(place)?;
        if is_kept(file.as_file(), file.path())? {
            return Ok(file);
        }
    }
}

/// Locks what was just made, unless [`sweep`] has come in between and removed it.
fn is_kept(made: &File, path: &Path) -> io::Result<bool> {
    made.lock()?;
    let own = made.metadata()?;
    Ok(fs::symlink_metadata(path).is_ok_and(|there| there.ino() == own.ino()))
}

/// Removes what is in `place`, begins with `prefix`, and is nobody's. What cannot be removed stays:
/// nothing depends on it.
pub(super) fn sweep(place: &Path, prefix: &str) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        if !entry.file_name().as_bytes().starts_with(prefix.as_bytes()) {
            continue;
        }
        let path = entry.path();
        // A link, or a pipe, is none of ours, and would be waited for.
        let kind = entry.file_type();
        let is_folder = kind.as_ref().is_ok_and(|kind| kind.is_dir());
        if !is_folder && !kind.is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let Ok(one) = File::open(&path) else { continue };
        if one.try_lock().is_err() {
            continue;
        }
        let _ = if is_folder {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_nobodys_goes_and_what_is_made_stays() {
        let place = tempfile::tempdir().expect("a folder");
        let here = place.path();
        fs::create_dir_all(here.join("partial-old/within")).expect("room");
        fs::write(here.join("partial-file"), "x").expect("room");
        fs::write(here.join("other"), "x").expect("room");
        std::os::unix::fs::symlink(here.join("other"), here.join("partial-link")).expect("a link");
        let folder = PartialFolder::new(here, "partial-").expect("room");
        let made = file(here, "partial-", 0o600).expect("room");
        sweep(here, "partial-");
        let mut left: Vec<_> = fs::read_dir(here)
            .expect("a folder")
            .map(|entry| entry.expect("a name").path())
            .collect();
        left.sort();
        let mut expected = vec![
            here.join("other"),
            here.join("partial-link"),
            folder.path().to_owned(),
            made.path().to_owned(),
        ];
        expected.sort();
        assert_eq!(left, expected);
        // As when they are killed.
        let path = made.into_temp_path().keep().expect("it");
        sweep(here, "partial-");
        assert!(!path.exists() && folder.path().exists());
        drop(folder);
        sweep(here, "partial-");
        assert_eq!(fs::read_dir(here).expect("a folder").count(), 2);
    }
}
