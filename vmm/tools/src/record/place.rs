//! Where a recording's file is to be: what is there stays until there is a sample to put there.

use std::fs::{self, File};
use std::io::{self, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::private;

/// The place of one file. One that fails before its first sample leaves everything as it was.
#[derive(Debug)]
pub(super) struct Place {
    path: PathBuf,
    /// Where the file is until it takes its place.
    beside: Option<PathBuf>,
    /// Device and inode of the file; none where it was opened at its place.
    id: Option<(u64, u64)>,
}

impl Place {
    /// A new file for `path`. What is no regular file, or a link to nothing, is opened itself:
    /// there is nothing to lose.
    ///
    /// # Errors
    /// It cannot be made, or the one before could not be kept.
    pub(super) fn open(path: &Path) -> io::Result<(Self, File)> {
        let mut place = Self {
            path: path.to_owned(),
            beside: None,
            id: None,
        };
        let is_empty_link = path.is_symlink() && !private::has_some(path);
        if path.is_dir() || private::is_special(path) || is_empty_link {
            return Ok((place, private::create(path)?));
        }
        private::check_old(path).map_err(io::Error::other)?;
        let (file, beside) = private::create_beside(path)?;
        place.beside = Some(beside);
        place.id = Some(identity(&file.metadata()?));
        Ok((place, file))
    }

    /// The file takes its place; the one that was there is kept under another name.
    ///
    /// # Errors
    /// It cannot; the text says where it stays.
    pub(super) fn take(&mut self) -> io::Result<()> {
        let Some(beside) = self.beside.take() else {
            return Ok(());
        };
        let kept = private::keep_old(&self.path);
        let taken =
            kept.and_then(|()| fs::rename(&beside, &self.path).map_err(|error| error.to_string()));
        let stays = |why| format!("{why}; what was recorded is in {}", beside.display());
        taken.map_err(|why| io::Error::other(stays(why)))
    }

    /// Whether it has not taken its place yet.
    pub(super) fn waits(&self) -> bool {
        self.beside.is_some()
    }

    /// Whether another file would have to give way to it.
    pub(super) fn would_replace(&self) -> bool {
        self.waits() && private::has_some(&self.path)
    }

    /// Whether somebody else has removed or replaced the file since it took its place.
    pub(super) fn is_lost(&self) -> bool {
        let is_there = |id| fs::symlink_metadata(&self.path).is_ok_and(|it| identity(&it) == id);
        self.beside.is_none() && self.id.is_some_and(|id| !is_there(id))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(beside) = &self.beside {
            let _ = fs::remove_file(beside);
        }
    }
}

fn identity(of: &fs::Metadata) -> (u64, u64) {
    (of.dev(), of.ino())
}

/// Copies a file that has no name any more into a new one at `to`.
///
/// # Errors
/// It cannot be read, or written.
pub(super) fn rescue(lost: &mut File, to: &mut File) -> io::Result<()> {
    lost.rewind()?;
    io::copy(lost, to).map(drop)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// The names in a folder, and what the files have.
    fn found(folder: &Path) -> Vec<String> {
        let each = fs::read_dir(folder).expect("a folder").flatten();
        let text = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
        let words = each.map(|it| format!("{}={}", it.file_name().display(), text(it.path())));
        let mut words: Vec<String> = words.collect();
        words.sort();
        words
    }

    #[test]
    fn what_is_there_stays_until_there_is_something_new() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("p");
        let (place, mut file) = Place::open(&path).expect("a file");
        file.write_all(b"header").expect("room");
        drop(place);
        assert!(found(folder.path()).is_empty(), "no trace");
        fs::write(&path, "good").expect("a file");
        fs::write(folder.path().join("p.old"), "older").expect("a file");
        let (mut place, mut file) = Place::open(&path).expect("a file");
        file.write_all(b"new").expect("room");
        drop(Place::open(&path).expect("another at once"));
        assert_eq!(found(folder.path()).len(), 3);
        place.take().expect("its place");
        place.take().expect("it has it");
        assert_eq!(found(folder.path()), ["p.old=good", "p=new"]);
        assert!(!place.is_lost());
        drop(place);
        assert_eq!(found(folder.path()), ["p.old=good", "p=new"]);
    }

    #[test]
    fn what_cannot_be_kept_is_said_before_anything_is_sampled() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, old) = (folder.path().join("p"), folder.path().join("p.old"));
        fs::write(&path, "good").expect("a file");
        let (mut place, mut file) = Place::open(&path).expect("a file");
        file.write_all(b"new").expect("room");
        fs::create_dir(&old).expect("a folder");
        let error = Place::open(&path).expect_err("a folder").to_string();
        assert!(error.contains("p.old") && error.contains("-o"), "{error}");
        // What was sampled by then is not lost.
        let error = place.take().expect_err("a folder").to_string();
        drop(place);
        let beside = error.rsplit(' ').next().expect("a name");
        assert_eq!(fs::read_to_string(beside).expect("text"), "new");
        assert_eq!(fs::read_to_string(&path).expect("text"), "good");
    }

    #[test]
    fn a_file_of_somebody_else_is_not_taken_for_ours() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("p");
        let (mut place, mut file) = Place::open(&path).expect("a file");
        file.write_all(b"ours").expect("room");
        place.take().expect("its place");
        let other = folder.path().join("other");
        fs::write(&other, "foreign").expect("a file");
        fs::rename(&other, &path).expect("renamed");
        assert!(place.is_lost());
        let (mut to, beside) = private::create_beside(&path).expect("a file");
        rescue(&mut file, &mut to).expect("room");
        assert_eq!(fs::read_to_string(beside).expect("text"), "ours");
        assert_eq!(fs::read_to_string(&path).expect("text"), "foreign");
        fs::remove_file(&path).expect("removed");
        assert!(place.is_lost());
    }
}
