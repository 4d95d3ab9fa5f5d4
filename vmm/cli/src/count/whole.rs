//! Files that are written whole or not at all.

use std::fs::{self, File};
use std::io::{self, Seek};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;
use vmm::files::folder_of;

use super::ended::{failed, with_advice};
use super::partial;
use crate::exit::UserError;

/// Links that are followed at most.
const LINKS: usize = 40;

/// Where the file of an option goes.
#[derive(Debug)]
enum Target {
    /// To an open file of this process's, to which others write as well: what they have written
    /// would be lost where another file took its place.
    Open(File),
    /// It is no regular file, a pipe say.
    Stream,
    /// In place of what is there. No link: one leads to the file that is to be kept.
    File(PathBuf),
}

impl Target {
    fn of(path: &Path) -> io::Result<Self> {
        if let Ok(there) = fs::metadata(path) {
            // Where it is written to on stays theirs: their descriptors are taken.
            let outputs = [io::stdout().as_fd(), io::stderr().as_fd()].map(|one| {
                let own = File::from(one.try_clone_to_owned()?);
                Ok::<_, io::Error>((own.metadata()?, own))
            });
            for (own, file) in outputs.into_iter().flatten() {
                if (own.dev(), own.ino()) == (there.dev(), there.ino()) {
                    return Ok(Target::Open(file));
                }
            }
            if !there.is_file() {
                return Ok(Target::Stream);
            }
            if is_descriptor(path) {
                return Ok(Target::Open(File::options().append(true).open(path)?));
            }
        }
        let whole = fs::canonicalize(path);
        Ok(Target::File(whole.unwrap_or_else(|_| path.to_owned())))
    }
}

/// Whether a path leads through `/proc/PID/fd`, as `/dev/fd/3` does.
fn is_descriptor(path: &Path) -> bool {
    let mut path = path.to_owned();
    for _ in 0..LINKS {
        let folder = fs::canonicalize(folder_of(&path)).unwrap_or_default();
        if folder.starts_with("/proc") && folder.ends_with("fd") {
            return true;
        }
        let Ok(next) = fs::read_link(&path) else {
            return false;
        };
        path = folder.join(next);
    }
    false
}

/// Makes a file that takes another one's place in its end. Why it cannot is said without its name,
/// which nobody knows.
fn made(
    folder: &Path,
    make: impl FnOnce() -> io::Result<NamedTempFile>,
) -> io::Result<NamedTempFile> {
    fs::metadata(folder)?;
    make().map_err(|error| match error.kind() {
        kind @ (io::ErrorKind::NotADirectory
        | io::ErrorKind::PermissionDenied
        | io::ErrorKind::QuotaExceeded
        | io::ErrorKind::ReadOnlyFilesystem
        | io::ErrorKind::StorageFull) => kind.into(),
        _ => error,
    })
}

fn unwritten(option: &str, path: &Path, error: &io::Error) -> UserError {
    failed(format!(
        "{option} {}: {}",
        path.display(),
        with_advice(error)
    ))
}

/// The open file of this process's that a path leads to, if others write to it as well.
pub(super) fn open_already(path: &Path) -> io::Result<Option<File>> {
    Ok(match Target::of(path)? {
        Target::Open(file) => Some(file),
        Target::Stream | Target::File(_) => None,
    })
}

/// Whether [`write()`] could, as far as can be told before.
pub(super) fn may_write(option: &str, path: &Path) -> Result<(), UserError> {
    let tried = Target::of(path).and_then(|target| match target {
        Target::File(path) => {
            let folder = folder_of(&path);
            made(folder, || NamedTempFile::new_in(folder)).map(drop)
        }
        Target::Open(_) => Ok(()),
        Target::Stream if path.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Target::Stream => Ok(()),
    });
    tried.map_err(|error: io::Error| unwritten(option, path, &error))
}

/// Writes the file of an option whole or not at all. What is no regular file, a pipe say, is
/// written to, and so is what this process has open for its output.
pub(super) fn write(
    option: &str,
    path: &Path,
    content: impl FnOnce(&mut File) -> io::Result<()>,
) -> Result<(), UserError> {
    let put = || {
        let path = match Target::of(path)? {
            Target::File(path) => path,
            target => {
                let mut whole = tempfile::tempfile()?;
                content(&mut whole)?;
                whole.rewind()?;
                let mut to = match target {
                    Target::Open(file) => file,
                    _ => File::options().write(true).open(path)?,
                };
                io::copy(&mut whole, &mut to)?;
                return Ok(());
            }
        };
        let folder = folder_of(&path);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let prefix = format!(".{name}.partial-");
        partial::sweep(folder, &prefix, false);
        // Others may read it, as far as the umask lets them: it goes into repositories.
        let mut file = made(folder, || partial::file(folder, &prefix, 0o666))?;
        content(file.as_file_mut())?;
        file.as_file().sync_all()?;
        file.persist(&path)?;
        Ok(())
    };
    put().map_err(|error: io::Error| unwritten(option, path, &error))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;

    use super::*;

    fn put(path: &Path) {
        may_write("--x", path).expect("it may be written");
        let done = write("--x", path, |file| file.write_all(b"new"));
        done.expect("written");
    }

    #[test]
    fn what_others_write_to_is_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let mut open = File::create(&path).expect("room");
        open.write_all(b"before ").expect("room");
        let number = open.as_raw_fd();
        let link = folder.path().join("link");
        symlink(format!("/proc/self/fd/{number}"), &link).expect("a link");
        put(Path::new(&format!("/dev/fd/{number}")));
        put(&link);
        assert_eq!(fs::read_to_string(&path).expect("text"), "before newnew");
        // Still the same file.
        let [there, own] = [fs::metadata(&path), open.metadata()].map(|it| it.expect("it").ino());
        assert_eq!(there, own);
    }

    #[test]
    fn a_link_leads_to_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let [path, link] = ["file", "link"].map(|name| folder.path().join(name));
        fs::write(&path, "old").expect("room");
        symlink("file", &link).expect("a link");
        put(&link);
        assert_eq!(fs::read_to_string(&path).expect("text"), "new");
        assert_eq!(fs::read_link(&link).expect("a link"), Path::new("file"));
    }

    #[test]
    fn what_cannot_be_written_is_named_as_it_was_given() {
        let check = |path: &str, expected: &str| {
            let path = Path::new(path);
            let before = may_write("--x", path).expect_err("no place").to_string();
            assert_eq!(before, format!("--x {}: {expected}", path.display()));
        };
        check("/no/such/x", "No such file or directory (os error 2)");
        check("/", "is a directory");
    }
}
