//! The file of a snapshot.
//!
//! | from | content |
//! |---|---|
//! | 0 | [`MAGIC`], version, bytes of the state, its SHA-256 |
//! | 4096 | the state, as JSON |
//! | the next page | memory, region behind region; pages of zeroes are holes of the file |
//!
//! It is written beside its place and renamed, so that it is there whole or not at all. Whoever
//! opens it looks at owner, mode, length, version and both checksums: it decides about every
//! count, and memory is mapped from it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{SeekFrom, seek};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use thiserror::Error;
use vm_memory::mmap::MmapRegion;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap,
};

use super::key::Key;
use super::platform::DevicesState;
use crate::emu::RoomState;
use crate::files::folder_of;

const MAGIC: &[u8; 16] = b"umpire snapshot\n";
/// Of the layout, and of what the state holds.
const VERSION: u32 = 1;
const PAGE: u64 = PAGE_BYTES as u64;
const PAGE_BYTES: usize = 4096;
/// Where the state begins.
const STATE_START: u64 = PAGE;
/// Bytes of the header that are used.
const HEADER: usize = 56;
/// More than any state has; a file that says more is none of ours.
const MOST_STATE: u32 = 64 << 20;
/// Bytes of memory that are looked at or written at once.
const CHUNK: usize = 1 << 20;
/// Its owner alone reads and writes it.
const OTHERS: u32 = 0o077;

/// A snapshot cannot be written, or not be used.
#[derive(Debug, Error)]
pub enum SnapshotError {
    /// There is none.
    #[error("there is no snapshot {}", .0.display())]
    Absent(PathBuf),
    /// It is one of another kernel, another machine or another Umpire.
    #[error("{} is the snapshot of another machine: remove it", .0.display())]
    Other(PathBuf),
    /// It is none, or may be written by others.
    #[error("{} is no snapshot to be trusted: {why}; remove it", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A system call has failed.
    #[error("cannot {what} the snapshot {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

/// What is kept of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedGuest {
    pub(super) key: Key,
    pub(super) room: RoomState,
    pub(super) devices: DevicesState,
    /// Instructions that the boot took, of both rings.
    pub(super) booted: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Contents {
    saved: SavedGuest,
    regions: Vec<MemoryPart>,
    /// Pages of the memory's part of the file that are not zeroes: the first, and how many.
    data: Vec<(u64, u64)>,
    /// CRC-32 of these, in their order.
    checksum: u32,
}

/// A region of memory.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct MemoryPart {
    start: u64,
    len: u64,
}

/// A snapshot that may be used.
#[derive(Debug)]
pub(super) struct Snapshot {
    file: Arc<File>,
    path: PathBuf,
    regions: Vec<MemoryPart>,
    /// Where memory begins in the file.
    memory_start: u64,
    pub(super) saved: SavedGuest,
}

/// Writes a snapshot to `path`, in the place of one that is there.
pub(super) fn write(
    path: &Path,
    saved: SavedGuest,
    memory: &GuestMemoryMmap,
) -> Result<(), SnapshotError> {
    let failed = |what| {
        move |source| SnapshotError::Io {
            what,
            path: path.to_owned(),
            source,
        }
    };
    let regions = memory.iter().map(|region| MemoryPart {
        start: region.start_addr().0,
        len: region.len(),
    });
    let mut contents = Contents {
        saved,
        regions: regions.collect(),
        data: Vec::new(),
        checksum: 0,
    };
    let mut file = partial(path).map_err(failed("write"))?;
    // Where memory begins depends on the state, which says which pages there are.
    (contents.data, contents.checksum) = survey(memory).map_err(failed("read the memory for"))?;
    let state = serde_json::to_vec(&contents)
        .map_err(io::Error::from)
        .map_err(failed("write"))?;
    let start = memory_start(state.len() as u64);
    let mut header = Vec::with_capacity(HEADER);
    header.extend(MAGIC);
    header.extend(VERSION.to_le_bytes());
    header.extend(u32::try_from(state.len()).unwrap_or(u32::MAX).to_le_bytes());
    header.extend(Sha256::digest(&state));
    let written = || -> io::Result<()> {
        let out = file.as_file();
        out.write_all_at(&header, 0)?;
        out.write_all_at(&state, STATE_START)?;
        copy_pages(memory, &contents.data, |at, bytes| {
            out.write_all_at(bytes, start + at)
        })?;
        out.set_len(start + bytes_of(&contents.regions))?;
        out.sync_data()
    };
    written().map_err(failed("write"))?;
    file.flush().map_err(failed("write"))?;
    let renamed = file.persist(path).map_err(|error| error.error);
    renamed.map(|_| ()).map_err(failed("put in its place"))
}

/// The file that becomes the one at `path`: of mode 0600, and removed unless it is renamed. One
/// that is there is of somebody who was killed, as the next one would be who has this name.
fn partial(path: &Path) -> io::Result<tempfile::NamedTempFile> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    let folder = folder_of(path);
    match std::fs::remove_file(folder.join(&name)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut builder = tempfile::Builder::new();
    builder.prefix(&name).rand_bytes(0).tempfile_in(folder)
}

/// Where memory begins behind a state of so many bytes.
fn memory_start(state: u64) -> u64 {
    (STATE_START + state).next_multiple_of(PAGE)
}

fn bytes_of(regions: &[MemoryPart]) -> u64 {
    regions.iter().map(|region| region.len).sum()
}

/// Which pages are not zeroes, and the checksum of these.
fn survey(memory: &GuestMemoryMmap) -> io::Result<(Vec<(u64, u64)>, u32)> {
    let mut data: Vec<(u64, u64)> = Vec::new();
    let mut checksum = crc32fast::Hasher::new();
    let mut first_page = 0;
    let mut bytes = vec![0; CHUNK];
    for region in memory.iter() {
        // A run of pages is in one region, as what reads it wants it in one piece.
        let mut run_is_here = false;
        let mut done = 0;
        while done < region.len() {
            let piece = piece(&mut bytes, region.len() - done);
            let at = GuestAddress(region.start_addr().0 + done);
            memory.read_slice(piece, at).map_err(io::Error::other)?;
            let (pages, _) = piece.as_chunks::<PAGE_BYTES>();
            for (number, page) in (first_page + done / PAGE..).zip(pages) {
                if page.iter().all(|byte| *byte == 0) {
                    continue;
                }
                checksum.update(page);
                match data.last_mut() {
                    Some((first, count)) if run_is_here && *first + *count == number => {
                        *count += 1;
                    }
                    _ => data.push((number, 1)),
                }
                run_is_here = true;
            }
            done += piece.len() as u64;
        }
        first_page += region.len() / PAGE;
    }
    Ok((data, checksum.finalize()))
}

fn piece(bytes: &mut [u8], left: u64) -> &mut [u8] {
    let len = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
    &mut bytes[..len]
}

/// Has `put` take the bytes of these pages, with where they are among all of memory.
fn copy_pages(
    memory: &GuestMemoryMmap,
    data: &[(u64, u64)],
    mut put: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut bytes = vec![0; CHUNK];
    for (first, count) in data {
        let (mut at, end) = (first * PAGE, (first + count) * PAGE);
        while at < end {
            let piece = piece(&mut bytes, end - at);
            let address = guest_address(memory, at).ok_or(io::ErrorKind::InvalidData)?;
            memory
                .read_slice(piece, address)
                .map_err(io::Error::other)?;
            put(at, piece)?;
            at += piece.len() as u64;
        }
    }
    Ok(())
}

/// The guest-physical address of a byte of all memory.
fn guest_address(memory: &GuestMemoryMmap, offset: u64) -> Option<GuestAddress> {
    let mut before = 0;
    for region in memory.iter() {
        if offset - before < region.len() {
            return Some(GuestAddress(region.start_addr().0 + offset - before));
        }
        before += region.len();
    }
    None
}

impl Snapshot {
    /// Opens the one at `path`, which has to be that of `key`.
    pub(super) fn open(path: &Path, key: &Key) -> Result<Self, SnapshotError> {
        let io = |what| {
            move |source: io::Error| match source.kind() {
                io::ErrorKind::NotFound => SnapshotError::Absent(path.to_owned()),
                _ => SnapshotError::Io {
                    what,
                    path: path.to_owned(),
                    source,
                },
            }
        };
        let refused = |why: &str| SnapshotError::Refused {
            path: path.to_owned(),
            why: why.to_owned(),
        };
        let mut options = OpenOptions::new();
        let options = options.read(true).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(path).map_err(io("open"))?;
        let about = file.metadata().map_err(io("read"))?;
        if !about.is_file() {
            return Err(refused("it is no file"));
        }
        if about.uid() != rustix::process::geteuid().as_raw() || about.mode() & OTHERS != 0 {
            return Err(refused(
                "others can read or write it, or it is somebody else's",
            ));
        }
        let mut header = [0; HEADER];
        file.read_exact_at(&mut header, 0).map_err(io("read"))?;
        let state = state_of(&file, &header).map_err(io("read"))?;
        let state = state.map_err(refused)?;
        let contents: Contents = serde_json::from_slice(&state)
            .map_err(|error| refused(&format!("its state is not as it should be ({error})")))?;
        if contents.saved.key != *key {
            return Err(SnapshotError::Other(path.to_owned()));
        }
        let memory_start = memory_start(state.len() as u64);
        if about.len() != memory_start + bytes_of(&contents.regions) {
            return Err(refused("it has been cut off"));
        }
        let checksum = checksum(&file, memory_start, &contents.data).map_err(io("read"))?;
        let holes = is_empty(&file, memory_start, about.len(), &contents.data);
        if checksum != contents.checksum || !holes.map_err(io("read"))? {
            return Err(refused("its memory is damaged"));
        }
        Ok(Self {
            file: Arc::new(file),
            path: path.to_owned(),
            regions: contents.regions,
            memory_start,
            saved: contents.saved,
        })
    }

    /// Its memory, of which this mapping alone sees what is written to it.
    pub(super) fn map(&self) -> Result<GuestMemoryMmap, SnapshotError> {
        let failed = |source| SnapshotError::Io {
            what: "map",
            path: self.path.clone(),
            source,
        };
        let mut at = self.memory_start;
        let mut regions = Vec::new();
        for region in &self.regions {
            let len = usize::try_from(region.len).map_err(|e| failed(io::Error::other(e)))?;
            let mapping = MmapRegion::build(
                Some(FileOffset::from_arc(self.file.clone(), at)),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_NORESERVE,
            );
            let mapping = mapping.map_err(|e| failed(io::Error::other(e)))?;
            let mapped = GuestRegionMmap::new(mapping, GuestAddress(region.start));
            regions.push(mapped.ok_or_else(|| failed(io::ErrorKind::InvalidData.into()))?);
            at += region.len;
        }
        GuestMemoryMmap::from_regions(regions).map_err(|e| failed(io::Error::other(e)))
    }
}

/// The state's bytes, or what is wrong with the file.
fn state_of(file: &File, header: &[u8; HEADER]) -> io::Result<Result<Vec<u8>, &'static str>> {
    let (magic, rest) = header.split_at(MAGIC.len());
    let (version, rest) = rest.split_at(4);
    let (len, digest) = rest.split_at(4);
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_le_bytes);
    if magic != MAGIC {
        return Ok(Err("it is another kind of file"));
    }
    if word(version) != VERSION {
        return Ok(Err("another version of Umpire wrote it"));
    }
    let len = word(len);
    if len > MOST_STATE {
        return Ok(Err("its header is damaged"));
    }
    let mut state = vec![0; usize::try_from(len).unwrap_or(0)];
    file.read_exact_at(&mut state, STATE_START)?;
    if Sha256::digest(&state)[..] != *digest {
        return Ok(Err("its state is damaged"));
    }
    Ok(Ok(state))
}

/// The checksum of these pages of a file whose memory begins at `start`.
fn checksum(file: &File, start: u64, data: &[(u64, u64)]) -> io::Result<u32> {
    let mut checksum = crc32fast::Hasher::new();
    let mut bytes = vec![0; CHUNK];
    for (first, count) in data {
        let (mut at, end) = (first * PAGE, (first + count) * PAGE);
        while at < end {
            let piece = piece(&mut bytes, end - at);
            file.read_exact_at(piece, start + at)?;
            checksum.update(piece);
            at += piece.len() as u64;
        }
    }
    Ok(checksum.finalize())
}

/// Whether all of a file's memory but these pages is zeroes: holes, or blocks of zeroes where a
/// file system has none.
fn is_empty(file: &File, start: u64, end: u64, data: &[(u64, u64)]) -> io::Result<bool> {
    let mut bytes = vec![0; CHUNK];
    let mut at = start;
    let behind_all = ((end - start) / PAGE, 0);
    for (first, count) in data.iter().chain([&behind_all]) {
        let gap_end = start.saturating_add(first.saturating_mul(PAGE));
        while at < gap_end {
            at = match seek(file, SeekFrom::Data(at)) {
                Ok(next) => next,
                // Nothing but a hole is left.
                Err(rustix::io::Errno::NXIO) => return Ok(true),
                Err(error) => return Err(error.into()),
            };
            if at >= gap_end {
                break;
            }
            let piece = piece(&mut bytes, gap_end - at);
            file.read_exact_at(piece, at)?;
            if piece.iter().any(|byte| *byte != 0) {
                return Ok(false);
            }
            at += piece.len() as u64;
        }
        at = gap_end.saturating_add(count.saturating_mul(PAGE));
    }
    Ok(true)
}

#[cfg(test)]
mod tests;
