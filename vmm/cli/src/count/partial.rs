//! Files and folders that are there only until they are whole. Whoever makes one has locked it; one
//! that nobody has locked is of a process that was killed, and goes when the next one comes.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use tempfile::{Builder, NamedTempFile, TempDir};

/// Letters and digits that [`Builder`] puts behind a prefix.
const RANDOM: usize = 6;

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
                .rand_bytes(RANDOM)
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
            .rand_bytes(RANDOM)
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

/// Whether a name is `prefix` and what [`Builder`] puts behind it.
fn is_ours(name: &[u8], prefix: &str) -> bool {
    let rest = name.strip_prefix(prefix.as_bytes());
    rest.is_some_and(|rest| rest.len() == RANDOM && rest.iter().all(u8::is_ascii_alphanumeric))
}

/// Removes what is in `place`, is a folder or is a file, was named here, and is nobody's. Folders
/// go with all that is in them, so `place` has to be Umpire's own then: what a user has put beside
/// other files is locked by nobody either. What cannot be removed stays: nothing depends on it.
pub(super) fn sweep(place: &Path, prefix: &str, folders: bool) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        if !is_ours(entry.file_name().as_bytes(), prefix) {
            continue;
        }
        let path = entry.path();
        // A link, or a pipe, is none of ours, and would be waited for.
        let kind = entry.file_type();
        let is_folder = kind.as_ref().is_ok_and(|kind| kind.is_dir());
        if is_folder != folders || !(is_folder || kind.is_ok_and(|kind| kind.is_file())) {
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
    use std::path::PathBuf;

    use super::*;

    fn there(place: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(place).expect("a folder");
        let mut names: Vec<_> = entries.map(|entry| entry.expect("a name").path()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_nobodys_goes_and_what_is_made_stays() {
        let place = tempfile::tempdir().expect("a folder");
        let here = place.path();
        fs::create_dir_all(here.join("partial-oldOLD/within")).expect("room");
        fs::write(here.join("partial-file99"), "x").expect("room");
        fs::write(here.join("other"), "x").expect("room");
        let link = here.join("partial-aalink");
        std::os::unix::fs::symlink(here.join("other"), &link).expect("a link");
        let folder = PartialFolder::new(here, "partial-").expect("room");
        let made = file(here, "partial-", 0o600).expect("room");
        sweep(here, "partial-", false);
        assert!(here.join("partial-oldOLD/within").exists());
        sweep(here, "partial-", true);
        let mut expected = vec![
            here.join("other"),
            link,
            folder.path().to_owned(),
            made.path().to_owned(),
        ];
        expected.sort();
        assert_eq!(there(here), expected);
        // As when they are killed.
        let path = made.into_temp_path().keep().expect("it");
        sweep(here, "partial-", false);
        assert!(!path.exists() && folder.path().exists());
        drop(folder);
        sweep(here, "partial-", true);
        assert_eq!(there(here).len(), 2);
    }

    #[test]
    fn what_has_another_name_is_a_users() {
        let place = tempfile::tempdir().expect("a folder");
        let here = place.path();
        for name in ["partial-results", "partial-", "partial-my-one"] {
            fs::create_dir(here.join(name)).expect("room");
            fs::write(here.join(format!("{name}.txt")), "x").expect("room");
        }
        let before = there(here);
        sweep(here, "partial-", false);
        sweep(here, "partial-", true);
        assert_eq!(there(here), before);
    }
}
