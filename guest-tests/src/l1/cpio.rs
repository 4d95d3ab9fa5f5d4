//! Writes cpio archives in the `newc` format, which the kernel unpacks as initramfs.
//!
//! The `cpio` crate writes the bytes. This file adds what an initramfs needs: parents of entries,
//! one entry a name, and names that stay inside. Modification times are 0 and inode numbers count
//! up, so the same input gives the same bytes.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};

use cpio::newc::{self, ModeFileType};

use super::error::L1Error;

/// Writer of one archive. Directories above an entry are made as needed; a name is written once, the first one wins.
#[derive(Debug)]
pub(crate) struct Cpio<W> {
    out: W,
    written: BTreeSet<String>,
    inode: u32,
}

impl<W: Write> Cpio<W> {
    /// Starts an archive on `out`.
    pub(crate) fn new(out: W) -> Self {
        Self {
            out,
            written: BTreeSet::new(),
            inode: 0,
        }
    }

    /// Adds a directory with mode 755, and those above it.
    pub(crate) fn directory(&mut self, path: &str) -> Result<(), L1Error> {
        self.entry(path, ModeFileType::Directory, 0o755, 0, &mut io::empty())
    }

    /// Adds a regular file with the permissions `mode` and `length` bytes of `content`.
    pub(crate) fn file(
        &mut self,
        path: &str,
        mode: u32,
        length: u64,
        content: &mut dyn Read,
    ) -> Result<(), L1Error> {
        self.entry(path, ModeFileType::Regular, mode & 0o7777, length, content)
    }

    /// Adds a regular file that is in memory.
    pub(crate) fn bytes(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<(), L1Error> {
        self.file(path, mode, content.len() as u64, &mut &content[..])
    }

    /// Adds a symbolic link to `target`.
    pub(crate) fn symlink(&mut self, path: &str, target: &str) -> Result<(), L1Error> {
        let length = target.len() as u64;
        self.entry(
            path,
            ModeFileType::Symlink,
            0o777,
            length,
            &mut target.as_bytes(),
        )
    }

    /// Whether an entry with this name was written.
    pub(crate) fn contains(&self, path: &str) -> bool {
        self.written.contains(&normalise(path))
    }

    /// Writes the trailer and gives the stream back.
    pub(crate) fn finish(self) -> Result<W, L1Error> {
        let written = newc::trailer(self.out).and_then(|mut out| {
            out.flush()?;
            Ok(out)
        });
        written.map_err(L1Error::file("write", "the initramfs"))
    }

    fn entry(
        &mut self,
        path: &str,
        kind: ModeFileType,
        permissions: u32,
        length: u64,
        content: &mut dyn Read,
    ) -> Result<(), L1Error> {
        let path = normalise(path);
        let refuse = |reason| L1Error::Archive {
            path: path.clone(),
            reason,
        };
        if path.split('/').any(|part| part == "..") {
            return Err(refuse("its name contains `..`"));
        }
        if path.contains('\0') {
            return Err(refuse("its name contains a NUL byte"));
        }
        if path.is_empty() || self.written.contains(&path) {
            return Ok(());
        }
        let size =
            u32::try_from(length).map_err(|_| refuse("it is larger than 4 GiB, newc's limit"))?;
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.directory(parent)?;
        }
        self.inode += 1;
        // A directory is also linked to by its own `.`.
        let links = 1 + u32::from(matches!(kind, ModeFileType::Directory));
        let entry = newc::Builder::new(&path)
            .ino(self.inode)
            .mode(permissions)
            .set_mode_file_type(kind)
            .nlink(links);
        let mut writer = entry.write(&mut self.out, size);
        let failed = L1Error::file("copy", &path);
        let copied = io::copy(&mut content.take(length), &mut writer).map_err(failed)?;
        if copied != length {
            return Err(refuse("it became shorter while it was copied"));
        }
        let written = writer.finish();
        written.map_err(L1Error::file("write", "the initramfs"))?;
        self.written.insert(path);
        Ok(())
    }
}

/// Archive names are relative, without empty or `.` parts.
fn normalise(path: &str) -> String {
    let parts: Vec<&str> = path
        .split('/')
        .filter(|part| !part.is_empty() && *part != ".")
        .collect();
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn archive(fill: impl FnOnce(&mut Cpio<Vec<u8>>) -> Result<(), L1Error>) -> Vec<u8> {
        let mut cpio = Cpio::new(Vec::new());
        fill(&mut cpio).expect("entries fit");
        cpio.finish().expect("memory takes everything")
    }

    /// Reads an archive back: name, mode, content.
    fn list(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = Vec::new();
        let field = |header: &[u8], index: usize| {
            let text = std::str::from_utf8(&header[6 + 8 * index..14 + 8 * index]).expect("digits");
            u32::from_str_radix(text, 16).expect("hexadecimal")
        };
        loop {
            assert_eq!(&bytes[..6], b"070701");
            let (mode, size) = (field(bytes, 1), field(bytes, 6) as usize);
            let name_end = 110 + field(bytes, 11) as usize;
            assert_eq!(bytes[name_end - 1], 0);
            let name = String::from_utf8(bytes[110..name_end - 1].to_vec()).expect("UTF-8");
            bytes = &bytes[name_end.next_multiple_of(4)..];
            if name == "TRAILER!!!" {
                assert!(bytes.is_empty());
                return entries;
            }
            entries.push((name, mode, bytes[..size].to_vec()));
            bytes = &bytes[size.next_multiple_of(4)..];
        }
    }

    #[test]
    fn entries_come_back_with_their_directories() {
        let bytes = archive(|cpio| {
            cpio.bytes("/usr/bin/tool", 0o755, b"12345")?;
            cpio.symlink("bin", "usr/bin")?;
            cpio.bytes("usr//bin/./tool", 0o644, b"second one loses")
        });
        let expected: Vec<(String, u32, Vec<u8>)> = vec![
            ("usr".into(), 0o040_755, vec![]),
            ("usr/bin".into(), 0o040_755, vec![]),
            ("usr/bin/tool".into(), 0o100_755, b"12345".to_vec()),
            ("bin".into(), 0o120_777, b"usr/bin".to_vec()),
        ];
        assert_eq!(list(&bytes), expected);
    }

    #[test]
    fn bad_entries_are_refused() {
        fn check(path: &str, length: u64, content: &[u8], expected: &str) {
            let error = Cpio::new(Vec::new())
                .file(path, 0o644, length, &mut &content[..])
                .expect_err("refused");
            assert!(error.to_string().contains(expected), "{error}");
        }
        check("a/../b", 0, b"", "`..`");
        check("a\0b", 0, b"", "NUL");
        check("a", 1 << 32, b"", "4 GiB");
        check("a", 3, b"12", "shorter");
    }

    proptest! {
        #[test]
        fn any_content_survives(files in proptest::collection::btree_map("[a-z]{1,12}", proptest::collection::vec(any::<u8>(), 0..64), 0..8)) {
            let bytes = archive(|cpio| {
                files.iter().try_for_each(|(name, content)| cpio.bytes(name, 0o600, content))
            });
            let read: Vec<_> = list(&bytes).into_iter().map(|(name, _, content)| (name, content)).collect();
            prop_assert_eq!(read, files.into_iter().collect::<Vec<_>>());
        }
    }
}
