//! Files that are written whole or not at all.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Seek};
use std::path::Path;

use tempfile::NamedTempFile;

use super::ended::failed;
use crate::exit::UserError;

/// The folder in which a file is made anew.
fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn unwritten(option: &str, path: &Path, error: &io::Error) -> UserError {
    failed(format!(
        "{option} {}: {}",
        path.display(),
        with_advice(error)
    ))
}

/// Whether [`write()`] could, as far as can be told before.
pub(super) fn may_write(option: &str, path: &Path) -> Result<(), UserError> {
    let folder = folder_of(path);
    let tried = match fs::metadata(path) {
        Ok(there) if there.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(there) if !there.is_file() => Ok(()),
        _ => fs::metadata(folder).and_then(|_| NamedTempFile::new_in(folder).map(drop)),
    };
    tried.map_err(|error: io::Error| unwritten(option, path, &error))
}

/// Writes the file of an option whole or not at all. What is no regular file, a pipe say, is
/// written to.
pub(super) fn write(
    option: &str,
    path: &Path,
    content: impl FnOnce(&mut File) -> io::Result<()>,
) -> Result<(), UserError> {
    let put = || {
        if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
            let mut whole = tempfile::tempfile()?;
            content(&mut whole)?;
            whole.rewind()?;
            io::copy(&mut whole, &mut File::options().write(true).open(path)?)?;
            return Ok(());
        }
        // A link leads to the file that is to be kept.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let folder = folder_of(&path);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let prefix = format!(".{name}.partial-");
        partial::sweep(folder, &prefix, false);
        // Others may read it, as far as the umask lets them: it goes into repositories.
        let mut file: NamedTempFile = builder
            .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666))
            .tempfile_in(folder_of(&path))?;
        content(file.as_file_mut())?;
        file.as_file().sync_all()?;
        file.persist(&path)?;
        Ok(())
    };
    put().map_err(|error: io::Error| unwritten(option, path, &error))
}
