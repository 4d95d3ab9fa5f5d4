//! Files that hold what was seen of a guest: for their owner alone, whatever the umask.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::geteuid;

/// Read and written by the owner.
const MODE: u32 = 0o600;
/// How often somebody else may make a file of the same name in between.
const TRIES: u32 = 8;
/// Files of one process beside one of that name.
const MOST_BESIDE: u32 = 1000;

/// A file at `path` to write to, empty, with the rights 0600. A regular file that is there is
/// replaced: who may read that, or has it open, does not see what is written now. What is no
/// regular file, a pipe say, is opened as it is; a symbolic link is followed.
///
/// # Errors
/// It cannot be made, or is somebody else's, or a pipe that nobody reads.
pub(crate) fn create(path: &Path) -> io::Result<File> {
    let mut tries = 0;
    loop {
        let there = match fs::symlink_metadata(path) {
            Ok(there) => Some(there.file_type()),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        match there {
            Some(kind) if kind.is_file() => fs::remove_file(path)?,
            Some(_) => return follow(path),
            None => {}
        }
        match new_file(path, File::options().write(true)) {
            Ok(file) => return Ok(file),
            Err(error) if error.kind() == ErrorKind::AlreadyExists && tries < TRIES => tries += 1,
            Err(error) => return Err(error),
        }
    }
}

/// A file that was not there.
fn new_file(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let file = options.create_new(true).mode(MODE).open(path)?;
    // The umask may have taken rights away.
    file.set_permissions(Permissions::from_mode(MODE))?;
    Ok(file)
}

/// What is at `path`, or where a link there leads.
fn follow(path: &Path) -> io::Result<File> {
    // A pipe that nobody reads would make the tool wait, maybe for ever.
    let mut options = File::options();
    let options = options.write(true).create(true).mode(MODE);
    let file = options
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)?;
    fcntl_setfl(&file, OFlags::empty())?;
    let there = file.metadata()?;
    if there.is_file() {
        if there.uid() != geteuid().as_raw() {
            let what = "the link leads to a file of somebody else's, who could read it";
            return Err(io::Error::new(ErrorKind::PermissionDenied, what));
        }
        file.set_permissions(Permissions::from_mode(MODE))?;
        file.set_len(0)?;
    }
    Ok(file)
}

/// A new file with the rights 0600 and a name of its own beside `path`, to read and to write.
///
/// # Errors
/// It cannot be made.
pub(crate) fn create_beside(path: &Path) -> io::Result<(File, PathBuf)> {
    let mut number = 0u32;
    loop {
        let beside = behind(path, &format!(".{}.{number}", std::process::id()));
        match new_file(&beside, File::options().read(true).write(true)) {
            Ok(file) => return Ok((file, beside)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists && number < MOST_BESIDE => {
                number += 1;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Renames a file to `PATH.old`, which it replaces, as perf does: one that has something in it.
/// Of a symbolic link the link is renamed. What is no regular file stays, and so do the names
/// of devices: `/dev/stdout` is a link.
///
/// # Errors
/// It cannot be renamed; the text says both names.
pub(crate) fn keep_old(path: &Path) -> Result<(), String> {
    if !has_some(path) || names_device(path) {
        return Ok(());
    }
    let old = old_name(path);
    fs::rename(path, &old).map_err(|error| not_kept(path, &old, &error))
}

fn not_kept(path: &Path, old: &Path, error: &io::Error) -> String {
    format!(
        "{}: cannot be kept as {}: {error}; name another file with -o",
        path.display(),
        old.display()
    )
}

/// Whether [`keep_old`] could rename, as far as can be told before.
///
/// # Errors
/// It could not, as there.
pub(crate) fn check_old(path: &Path) -> Result<(), String> {
    let old = old_name(path);
    let is_folder = old.symlink_metadata().is_ok_and(|there| there.is_dir());
    if is_folder && has_some(path) && !names_device(path) {
        let error = ErrorKind::IsADirectory.into();
        return Err(not_kept(path, &old, &error));
    }
    Ok(())
}

/// Whether there is a regular file, or a link to one, that has something in it.
pub(crate) fn has_some(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|there| there.is_file() && there.len() > 0)
}

/// `PATH.old`.
pub(crate) fn old_name(path: &Path) -> PathBuf {
    behind(path, ".old")
}

/// `path` with something behind its name.
pub(crate) fn behind(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

/// Whether there is something at `path` that is no regular file: what is written there is not
/// kept.
pub(crate) fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|there| {
        let kind = there.file_type();
        kind.is_fifo() || kind.is_char_device() || kind.is_block_device() || kind.is_socket()
    }) || names_device(path)
}

fn names_device(path: &Path) -> bool {
    let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
    folder.is_some_and(|folder| folder == Path::new("/dev") || folder.starts_with("/proc"))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::fs::symlink;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("a file").mode() & 0o7777
    }

    fn write(path: &Path, text: &str) {
        let mut file = create(path).expect("a file");
        file.write_all(text.as_bytes()).expect("room");
    }

    fn wide(path: &Path, text: &str) {
        fs::write(path, text).expect("a file");
        fs::set_permissions(path, Permissions::from_mode(0o666)).expect("rights");
    }

    /// The umask belongs to the process, so another one tries this.
    #[test]
    fn files_are_private_whatever_the_umask() {
        const CHILD: &str = "UMPIRE_TEST_PRIVATE_FOLDER";
        if let Some(folder) = std::env::var_os(CHILD) {
            let folder = PathBuf::from(folder);
            for (number, mask) in [0u32, 0o022, 0o077, 0o377].into_iter().enumerate() {
                rustix::process::umask(rustix::fs::Mode::from_raw_mode(mask));
                let path = folder.join(format!("new{number}"));
                write(&path, "x");
                assert_eq!(mode(&path), 0o600, "umask {mask:o}");
                let link = folder.join(format!("link{number}"));
                let target = folder.join(format!("target{number}"));
                symlink(&target, &link).expect("a link");
                write(&link, "x");
                assert_eq!(mode(&target), 0o600, "umask {mask:o}");
            }
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let test = std::env::current_exe().expect("a program");
        let name = "private::tests::files_are_private_whatever_the_umask";
        let output = std::process::Command::new(test)
            .args([name, "--exact", "--test-threads=1"])
            .env(CHILD, folder.path())
            .output()
            .expect("a process");
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{told}");
        assert!(folder.path().join("target3").exists(), "{told}");
    }

    #[test]
    fn what_is_there_is_replaced_by_another_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.data");
        wide(&path, "before");
        let mut reader = File::open(&path).expect("a file");
        write(&path, "secret");
        let mut seen = String::new();
        reader.read_to_string(&mut seen).expect("text");
        assert_eq!((seen.as_str(), mode(&path)), ("before", 0o600));
        assert_eq!(fs::read_to_string(&path).expect("text"), "secret");
        // A link to a file is followed, and that one becomes private.
        let target = folder.path().join("target");
        let link = folder.path().join("link");
        wide(&target, "before");
        symlink(&target, &link).expect("a link");
        write(&link, "new");
        assert!(link.is_symlink());
        assert_eq!(fs::read_to_string(&target).expect("text"), "new");
        assert_eq!(mode(&target), 0o600);
        assert!(create(folder.path()).is_err(), "a folder");
        assert!(create(&folder.path().join("none/x")).is_err());
    }

    #[test]
    fn the_old_one_is_kept_as_perf_does() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.data");
        let old = folder.path().join("a.data.old");
        let record = |text: &str| {
            keep_old(&path).expect("renamed");
            write(&path, text);
        };
        let both = || {
            let text = |path: &Path| fs::read_to_string(path).unwrap_or_default();
            (text(&path), text(&old))
        };
        record("one");
        assert_eq!(both(), ("one".to_owned(), String::new()));
        record("two");
        assert_eq!(both(), ("two".to_owned(), "one".to_owned()));
        record("three");
        assert_eq!(both(), ("three".to_owned(), "two".to_owned()));
        // What is empty is nothing to keep.
        wide(&path, "");
        record("four");
        assert_eq!(both(), ("four".to_owned(), "two".to_owned()));
        assert_eq!(mode(&path), 0o600);
        // Of a link the link is renamed.
        let elsewhere = folder.path().join("elsewhere");
        fs::rename(&path, &elsewhere).expect("renamed");
        symlink(&elsewhere, &path).expect("a link");
        record("five");
        assert!(!path.is_symlink() && old.is_symlink());
        assert_eq!(both(), ("five".to_owned(), "four".to_owned()));
        // A folder of that name is not replaced.
        fs::remove_file(&old).expect("removed");
        fs::create_dir(&old).expect("a folder");
        let error = keep_old(&path).expect_err("a folder");
        assert!(
            error.contains("a.data.old") && error.contains("-o"),
            "{error}"
        );
    }

    #[test]
    fn devices_and_pipes_are_written_to() {
        let folder = tempfile::tempdir().expect("a folder");
        for path in ["/dev/null", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"] {
            assert!(is_special(Path::new(path)), "{path}");
            keep_old(Path::new(path)).expect("nothing to do");
            assert!(Path::new(path).symlink_metadata().is_ok(), "{path}");
        }
        write(Path::new("/dev/null"), "x");
        let fifo = folder.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status();
        assert!(made.is_ok_and(|status| status.success()));
        assert!(create(&fifo).is_err(), "nobody reads it");
        let reader = std::thread::spawn({
            let fifo = fifo.clone();
            move || fs::read_to_string(fifo).expect("text")
        });
        let mut file = loop {
            match create(&fifo) {
                Ok(file) => break file,
                Err(_) => std::thread::yield_now(),
            }
        };
        keep_old(&fifo).expect("nothing to do");
        file.write_all(b"through").expect("room");
        drop(file);
        assert_eq!(reader.join().expect("an end"), "through");
        assert!(is_special(&fifo) && !is_special(folder.path()));
    }
}
