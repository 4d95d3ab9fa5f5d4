//! A kernel, initrd or module as a run of bytes: a file, or what was unpacked from one.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::error::BootError;
use super::memory::{GuestMemory, write};

/// Bytes that are copied at a time.
const CHUNK: usize = 1 << 20;

/// A source of bytes of known length.
#[derive(Debug)]
pub(crate) struct Image {
    role: &'static str,
    path: PathBuf,
    len: u64,
    source: Source,
}

#[derive(Debug)]
enum Source {
    File(File),
    Bytes(Vec<u8>),
}

impl Image {
    /// Opens a regular file; `role` names it in errors.
    pub(crate) fn open(role: &'static str, path: &Path) -> Result<Self, BootError> {
        let unreadable = |source| BootError::Unreadable {
            role,
            path: path.to_owned(),
            source,
        };
        // Opening a pipe would wait for its writer, so the kind of file is asked first.
        let metadata = std::fs::metadata(path).map_err(unreadable)?;
        if !metadata.is_file() {
            return Err(BootError::NotAFile {
                role,
                path: path.to_owned(),
            });
        }
        let file = File::open(path).map_err(unreadable)?;
        let len = file.metadata().map_err(unreadable)?.len();
        Ok(Self {
            role,
            path: path.to_owned(),
            len,
            source: Source::File(file),
        })
    }

    /// Bytes in memory under the name of the file that they come from.
    pub(crate) fn from_bytes(role: &'static str, path: &Path, bytes: Vec<u8>) -> Self {
        Self {
            role,
            path: path.to_owned(),
            len: bytes.len() as u64,
            source: Source::Bytes(bytes),
        }
    }

    /// The file as the user named it.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The last part of the path, for strings that the guest sees.
    pub(crate) fn file_name(&self) -> String {
        let name = self.path.file_name().unwrap_or(self.path.as_os_str());
        name.to_string_lossy().into_owned()
    }

    /// What the file is for.
    pub(crate) fn role(&self) -> &'static str {
        self.role
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Up to `max` bytes from the start, fewer where the image is shorter.
    pub(crate) fn head(&self, max: usize) -> Result<Vec<u8>, BootError> {
        let len = usize::try_from(self.len).map_or(max, |len| len.min(max));
        self.read(0, len, "the start")
    }

    /// `len` bytes from `offset`; `what` names them when they are beyond the end.
    pub(crate) fn read(
        &self,
        offset: u64,
        len: usize,
        what: &'static str,
    ) -> Result<Vec<u8>, BootError> {
        self.check_range(offset, len as u64, what)?;
        let mut buffer = vec![0; len];
        self.fill(offset, &mut buffer)?;
        Ok(buffer)
    }

    /// Copies `len` bytes from `offset` to a guest-physical address.
    pub(crate) fn copy_to_guest(
        &self,
        mem: &GuestMemory,
        address: u64,
        offset: u64,
        len: u64,
        what: &'static str,
    ) -> Result<(), BootError> {
        self.check_range(offset, len, what)?;
        let mut buffer = vec![0; CHUNK];
        let mut done = 0;
        while done < len {
            let part = usize::try_from(len - done).map_or(CHUNK, |rest| rest.min(CHUNK));
            self.fill(offset + done, &mut buffer[..part])?;
            write(mem, address.saturating_add(done), &buffer[..part])?;
            done += part as u64;
        }
        Ok(())
    }

    fn check_range(&self, offset: u64, len: u64, what: &'static str) -> Result<(), BootError> {
        let needed = offset.saturating_add(len);
        if needed <= self.len {
            return Ok(());
        }
        let (role, path, len) = (self.role, self.path.clone(), self.len);
        Err(BootError::Truncated {
            role,
            path,
            what,
            needed,
            len,
        })
    }

    /// Fills the buffer from a range that [`Self::check_range`] has accepted.
    fn fill(&self, offset: u64, buffer: &mut [u8]) -> Result<(), BootError> {
        let unreadable = |source| BootError::Unreadable {
            role: self.role,
            path: self.path.clone(),
            source,
        };
        match &self.source {
            Source::File(file) => file.read_exact_at(buffer, offset).map_err(unreadable),
            Source::Bytes(bytes) => {
                let part = usize::try_from(offset)
                    .ok()
                    .and_then(|start| bytes.get(start..start.checked_add(buffer.len())?))
                    .ok_or_else(|| unreadable(std::io::ErrorKind::UnexpectedEof.into()))?;
                buffer.copy_from_slice(part);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::boot::memory::{MIB, create};
    use vm_memory::{Bytes, GuestAddress};

    fn temporary(content: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().expect("temporary file");
        file.write_all(content).expect("written");
        file
    }

    #[test]
    fn a_file_and_its_bytes_read_alike() {
        let content: Vec<u8> = (0..=255u8).cycle().take(3 * CHUNK / 2).collect();
        let file = temporary(&content);
        let mem = create(8).expect("memory");
        let images = [
            Image::open("kernel", file.path()).expect("opened"),
            Image::from_bytes("kernel", file.path(), content.clone()),
        ];
        for (image, address) in images.iter().zip([2 * MIB, 4 * MIB]) {
            assert_eq!(image.head(4).expect("head"), [0, 1, 2, 3]);
            assert_eq!(image.read(255, 2, "two").expect("read"), [255, 0]);
            image
                .copy_to_guest(&mem, address, 1, image.len() - 1, "all")
                .expect("copied");
            let mut back = vec![0; content.len() - 1];
            mem.read_slice(&mut back, GuestAddress(address))
                .expect("read back");
            assert!(back == content[1..]);
        }
    }

    #[test]
    fn ranges_beyond_the_end_name_the_part() {
        let image = Image::from_bytes("kernel", Path::new("k"), vec![0; 10]);
        for (offset, len) in [(0, 11), (10, 1), (u64::MAX, 1), (11, 0)] {
            let error = image
                .read(offset, len, "the header")
                .expect_err("beyond the end");
            assert!(
                error.to_string().contains("the header ends at byte"),
                "{error}"
            );
        }
        assert_eq!(image.head(99).expect("short head").len(), 10);
    }

    #[test]
    fn paths_that_are_no_files_are_named() {
        let folder = tempfile::tempdir().expect("folder");
        let missing = folder.path().join("missing");
        let error = Image::open("initrd", &missing).expect_err("missing");
        assert!(
            error.to_string().starts_with("cannot read initrd"),
            "{error}"
        );
        assert!(matches!(
            Image::open("kernel", folder.path()),
            Err(BootError::NotAFile { .. })
        ));
    }
}
