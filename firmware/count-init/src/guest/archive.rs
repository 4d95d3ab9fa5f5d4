//! What programs changed, as a tar archive (POSIX.1-1988 headers, with GNU's records for names of
//! more than 100 bytes).

use core::ffi::CStr;

use crate::sys::{self, Entry, Errno, Fd, FileKind, Listing, Status};

const BLOCK: usize = 512;
/// Folders within folders that are followed.
const DEEPEST: usize = 200;
const LONGEST_PATH: usize = 4096;
const BUFFER: usize = 64 * 1024;

/// Sends what is in `folder`, without `folder` itself.
pub(crate) fn send(folder: i32, to: i32) -> Result<(), Errno> {
    let mut archive = Archive {
        to,
        buffer: [0; BUFFER],
        used: 0,
        path: [0; LONGEST_PATH],
        path_len: 0,
    };
    archive.folder(folder, 0)?;
    // Two blocks of zeros are the end, by which the host sees that all of it has come.
    archive.put(&[0; 2 * BLOCK])?;
    archive.flush()
}

struct Archive {
    to: i32,
    buffer: [u8; BUFFER],
    used: usize,
    /// Of what is being sent.
    path: [u8; LONGEST_PATH],
    path_len: usize,
}

impl Archive {
    fn folder(&mut self, folder: i32, depth: usize) -> Result<(), Errno> {
        if depth > DEEPEST {
            return Err(sys::EINVAL);
        }
        let mut listing = Listing::new(folder);
        while let Some(entry) = listing.next()? {
            let before = self.path_len;
            if self.enter(entry.name()) {
                self.entry(folder, &entry, depth)?;
            }
            self.path_len = before;
        }
        Ok(())
    }

    /// Makes the path longer by a name; false if it would be too long.
    fn enter(&mut self, name: &CStr) -> bool {
        let name = name.to_bytes();
        let slash = usize::from(self.path_len > 0);
        let end = self.path_len + slash + name.len();
        let Some(room) = self.path.get_mut(self.path_len..end) else {
            return false;
        };
        if let (Some(first), 1) = (room.first_mut(), slash) {
            *first = b'/';
        }
        room[slash..].copy_from_slice(name);
        self.path_len = end;
        true
    }

    fn entry(&mut self, folder: i32, entry: &Entry, depth: usize) -> Result<(), Errno> {
        let status = sys::status_at(folder, entry.name())?;
        match status.kind {
            FileKind::Folder => {
                self.header(b'5', &status, 0, b"")?;
                let open = sys::open_at(folder, entry.name(), sys::DIRECTORY | sys::NO_FOLLOW)?;
                self.folder(open.get(), depth + 1)
            }
            FileKind::Regular => {
                let open = sys::open_at(folder, entry.name(), sys::READ_ONLY | sys::NO_FOLLOW)?;
                self.header(b'0', &status, status.size, b"")?;
                self.content(&open, status.size)
            }
            FileKind::Link => {
                let mut target = [0; LONGEST_PATH];
                let len = sys::read_link_at(folder, entry.name(), &mut target)?;
                self.header(b'2', &status, 0, &target[..len])
            }
            // Sockets and pipes end with who holds them; a device is what the overlay puts where
            // a file was deleted.
            FileKind::Other => Ok(()),
        }
    }

    /// Nobody writes any more, so the size is still what it was.
    fn content(&mut self, file: &Fd, size: u64) -> Result<(), Errno> {
        let mut left = size;
        let mut bytes = [0; 16 * 1024];
        while left > 0 {
            let most = usize::try_from(left)
                .unwrap_or(bytes.len())
                .min(bytes.len());
            let read = sys::read(file.get(), &mut bytes[..most])?;
            if read == 0 {
                return Err(sys::EINVAL);
            }
            self.put(&bytes[..read])?;
            left -= read as u64;
        }
        self.pad(size)
    }

    fn pad(&mut self, size: u64) -> Result<(), Errno> {
        let over = usize::try_from(size % BLOCK as u64).unwrap_or(0);
        if over > 0 {
            self.put(&[0; BLOCK][over..])?;
        }
        Ok(())
    }

    fn header(&mut self, kind: u8, status: &Status, size: u64, target: &[u8]) -> Result<(), Errno> {
        let path = self.path;
        let path = &path[..self.path_len];
        for (kind, text) in [(b'L', path), (b'K', target)] {
            if text.len() > 100 {
                let size = text.len() as u64 + 1;
                self.block(kind, 0, size, b"././@LongLink", b"")?;
                self.put(text)?;
                self.put(b"\0")?;
                self.pad(size)?;
            }
        }
        self.block(kind, status.mode, size, path, target)
    }

    fn block(
        &mut self,
        kind: u8,
        mode: u32,
        size: u64,
        name: &[u8],
        target: &[u8],
    ) -> Result<(), Errno> {
        let mut block = [0; BLOCK];
        text(&mut block[..100], name);
        octal(&mut block[100..107], u64::from(mode));
        octal(&mut block[108..115], 0);
        octal(&mut block[116..123], 0);
        octal(&mut block[124..135], size);
        octal(&mut block[136..147], 0);
        block[156] = kind;
        text(&mut block[157..257], target);
        block[257..265].copy_from_slice(b"ustar  \0");
        // The sum is made with spaces in its own place.
        block[148..156].fill(b' ');
        let sum = block.iter().map(|byte| u64::from(*byte)).sum();
        octal(&mut block[148..154], sum);
        block[154] = 0;
        self.put(&block)
    }

    fn put(&mut self, mut bytes: &[u8]) -> Result<(), Errno> {
        while !bytes.is_empty() {
            if self.used == BUFFER {
                self.flush()?;
            }
            let taken = bytes.len().min(BUFFER - self.used);
            let (now, later) = bytes.split_at(taken);
            self.buffer[self.used..self.used + taken].copy_from_slice(now);
            self.used += taken;
            bytes = later;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Errno> {
        sys::write_all(self.to, &self.buffer[..self.used])?;
        self.used = 0;
        Ok(())
    }
}

fn text(field: &mut [u8], text: &[u8]) {
    let len = text.len().min(field.len());
    field[..len].copy_from_slice(&text[..len]);
}

fn octal(field: &mut [u8], mut value: u64) {
    for digit in field.iter_mut().rev() {
        *digit = b'0' + u8::try_from(value & 7).unwrap_or(0);
        value >>= 3;
    }
}
