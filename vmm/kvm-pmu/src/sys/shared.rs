//! Guest memory that a VMM has mapped itself, mapped again for KVM.

use std::fs::File;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{fmt, io};

use thiserror::Error;

use super::memory::PAGE_SIZE;
use crate::memory::GuestBytes;
use crate::trap::PatchRefusal;

/// Why guest memory cannot be mapped again. Its slot then has the VMM's own mapping, and a
/// handler in it is not patched.
#[derive(Debug, Error)]
pub enum SharedError {
    #[error("guest memory of {len:#x} bytes at {start:#x} does not consist of whole pages")]
    Unaligned { start: u64, len: usize },
    /// Who reads behind the end of a file is killed.
    #[error("guest memory at {0:#x} ends behind its file, which has {1:#x} bytes")]
    Short(u64, u64),
    #[error("guest memory at {0:#x} is there already")]
    Overlap(u64),
    /// Private memory has no second mapping. The slot is there all the same, and is tried again
    /// when it was removed ([`SharedMemory::remove`]).
    #[error("guest memory at {0:#x} cannot be mapped again: {1}")]
    NotShared(u64, io::Error),
}

/// The memory of a VMM that has mapped it itself, shared: each slot of KVM's gets another
/// mapping of the same memory, of which a page can be made read-only for the guest alone.
pub struct SharedMemory {
    regions: Mutex<Vec<Region>>,
    wrote: Box<dyn Fn(u64, usize) + Send + Sync>,
}

/// One slot.
struct Region {
    start: u64,
    len: usize,
    /// The slot's mapping, of which pages are protected. None: there is no second one.
    guest: Option<Mapping>,
    /// That of this crate's own accesses. None: it could not be mapped, and the VMM has not said
    /// where it has it.
    ours: Option<Mapping>,
}

/// A mapping of this crate's own, or the VMM's where there is no other one.
struct Mapping {
    at: NonNull<libc::c_void>,
    len: usize,
    is_ours: bool,
}

// SAFETY: the pages are shared with the guest and only accessed volatilely; the address is
// valid on every thread.
unsafe impl Send for Mapping {}

impl SharedMemory {
    /// Without a slot yet. `wrote` is told of each write of this crate, by its guest-physical
    /// address and length, for a VMM that keeps account of dirty pages; it must not call
    /// the VM's traps.
    pub fn new(wrote: impl Fn(u64, usize) + Send + Sync + 'static) -> Self {
        Self {
            regions: Mutex::default(),
            wrote: Box::new(wrote),
        }
    }

    /// Memory of `len` bytes of `file` from `offset` on, which the guest has at `start`; the
    /// address for KVM's slot. What the guest reaches at two addresses is not to be added. Of
    /// memory that could not be mapped nothing can be read here either: who has its address adds
    /// it by that.
    ///
    /// # Errors
    /// [`SharedError`].
    pub fn add(
        &self,
        (start, len): (u64, usize),
        (file, offset): (BorrowedFd<'_>, i64),
    ) -> Result<u64, SharedError> {
        let borrowed = file.try_clone_to_owned().map(File::from);
        let size = borrowed.and_then(|file| file.metadata());
        let size = size
            .map_err(|error| SharedError::NotShared(start, error))?
            .len();
        let end = u64::try_from(offset).map(|offset| offset.saturating_add(len as u64));
        if end.is_ok_and(|end| end > size) {
            return Err(SharedError::Short(start, size));
        }
        self.insert((start, len), None, || {
            // SAFETY: a new mapping, at an address that the kernel chooses, replaces nothing.
            Mapping::of(len, unsafe {
                libc::mmap(
                    ptr::null_mut(),
                    len,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED,
                    file.as_raw_fd(),
                    offset,
                )
            })
        })
    }

    /// The same of what the VMM has mapped at `host`, for one that has no descriptor of it.
    ///
    /// # Safety
    /// The `len` bytes at `host` are guest memory of one mapping (not of two that lie side by side,
    /// of which the second would be other memory here) and, where that is of a file, do not reach
    /// behind its end. No Rust reference to them exists. They stay mapped until they are removed
    /// here, or this value is dropped: what is private is read and written there.
    ///
    /// # Errors
    /// [`SharedError`].
    pub unsafe fn add_mapped(
        &self,
        (start, len): (u64, usize),
        host: *mut u8,
    ) -> Result<u64, SharedError> {
        let theirs = NonNull::new(host.cast()).map(|at| Mapping {
            at,
            len,
            is_ours: false,
        });
        self.insert((start, len), theirs, || {
            // SAFETY: a length of 0 leaves the old mapping as it is and makes another one of
            // it (`mremap(2)`), which the caller allows.
            Mapping::of(len, unsafe {
                libc::mremap(host.cast(), 0, len, libc::MREMAP_MAYMOVE)
            })
        })
    }

    /// KVM has no slot at `start` any more. Patches in it are to be taken back before
    /// ([`VmTraps::restore`](crate::VmTraps::restore)).
    pub fn remove(&self, start: u64) {
        self.lock().retain(|region| region.start != start);
    }

    /// Makes the page at `page` read-only in its slot's mapping, or writable again.
    pub(crate) fn set_writable(&self, page: u64, writable: bool) -> Result<(), PatchRefusal> {
        let regions = self.lock();
        let region = regions
            .iter()
            .find(|one| (one.start..one.end()).contains(&page))
            .ok_or(PatchRefusal::NotRam)?;
        let mapping = region.guest.as_ref().ok_or(PatchRefusal::NoProtection)?;
        if !page.is_multiple_of(PAGE_SIZE as u64) {
            return Err(PatchRefusal::Protect(libc::EINVAL));
        }
        let offset = usize::try_from(page - region.start).unwrap_or(0);
        let done = mapping.protect(offset, writable);
        done.map_err(|error| PatchRefusal::Protect(error.raw_os_error().unwrap_or(0)))
    }

    fn insert(
        &self,
        (start, len): (u64, usize),
        theirs: Option<Mapping>,
        map: impl Fn() -> io::Result<Mapping>,
    ) -> Result<u64, SharedError> {
        let page = PAGE_SIZE as u64;
        if start % page != 0 || len == 0 || len % PAGE_SIZE != 0 {
            return Err(SharedError::Unaligned { start, len });
        }
        let end = start.saturating_add(len as u64);
        let mut regions = self.lock();
        if regions
            .iter()
            .any(|one| one.start < end && start < one.end())
        {
            return Err(SharedError::Overlap(start));
        }
        let both = map().and_then(|guest| Ok((guest, map()?)));
        let (guest, ours, told) = match both {
            Ok((guest, ours)) => {
                let address = guest.at.as_ptr().expose_provenance() as u64;
                (Some(guest), Some(ours), Ok(address))
            }
            Err(error) => (None, theirs, Err(SharedError::NotShared(start, error))),
        };
        regions.push(Region {
            start,
            len,
            guest,
            ours,
        });
        told
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Region>> {
        // Plain data, which a panic elsewhere does not spoil.
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does `act` with each piece of `len` bytes at `address`, and where it begins among
    /// them; false where some of it is no memory.
    fn pieces(&self, address: u64, len: usize, mut act: impl FnMut(Piece<'_>, usize)) -> bool {
        let regions = self.lock();
        let mut done = 0;
        while done < len {
            let at = address.wrapping_add(done as u64);
            let Some((region, mapping)) = regions.iter().find_map(|one| one.holding(at)) else {
                return false;
            };
            let offset = usize::try_from(at - region.start).unwrap_or(region.len);
            let piece = (len - done).min(region.len - offset);
            act(mapping.piece(offset, piece), done);
            done += piece;
        }
        true
    }
}

impl Region {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.len as u64)
    }

    /// Where its bytes are, if it has `address`.
    fn holding(&self, address: u64) -> Option<(&Region, &Mapping)> {
        let has = (self.start..self.end()).contains(&address);
        Some((self, self.ours.as_ref().filter(|_| has)?))
    }
}

impl Mapping {
    fn of(len: usize, at: *mut libc::c_void) -> io::Result<Self> {
        match NonNull::new(at) {
            Some(at) if at.as_ptr() != libc::MAP_FAILED => Ok(Self {
                at,
                len,
                is_ours: true,
            }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// `len` bytes from `offset` on.
    fn piece(&self, offset: usize, len: usize) -> Piece<'_> {
        assert!(offset <= self.len && len <= self.len - offset);
        // SAFETY: the bytes lie within the mapping, as was just found.
        let at = unsafe { self.at.as_ptr().cast::<u8>().add(offset) };
        Piece {
            at,
            len,
            _mapping: PhantomData,
        }
    }

    fn protect(&self, offset: usize, writable: bool) -> io::Result<()> {
        assert!(offset < self.len);
        let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        // SAFETY: the page lies within this value's mapping, which nobody on this side writes
        // through.
        let done = unsafe {
            let page = self.at.as_ptr().cast::<u8>().add(offset);
            libc::mprotect(page.cast(), PAGE_SIZE, protection)
        };
        match done {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Bytes of a mapping, which the guest may change at any time.
#[derive(Clone, Copy)]
struct Piece<'a> {
    at: *mut u8,
    len: usize,
    _mapping: PhantomData<&'a Mapping>,
}

/// How many of the `left` bytes from `address` on are one access: as many as the processor has at
/// once there (SDM vol. 3A, 10.1.1 "Guaranteed Atomic Operations"), so that an entry of a page
/// table, of 8 bytes or of 4, is never half of one, nor what a guest stores by one instruction.
fn at_once(address: usize, left: usize) -> usize {
    let is_one = |len: &usize| *len <= left && address.is_multiple_of(*len);
    [8, 4, 2].into_iter().find(is_one).unwrap_or(1)
}

/// Reads a `T` at `from` by one access, into the first bytes of `to`.
///
/// # Safety
/// `T` is an integer, and `from` is aligned for it, with as many bytes that may be read
/// volatilely.
unsafe fn read_one<T: Copy>(from: *const u8, to: &mut [u8]) {
    let to = &mut to[..size_of::<T>()];
    // SAFETY: the caller promises it of `from`; `to` was just cut to the size of a `T`, which an
    // integer fills with bytes that are all initialised.
    unsafe {
        let value = from.cast::<T>().read_volatile();
        to.as_mut_ptr().cast::<T>().write_unaligned(value);
    }
}

/// Writes a `T` of the first bytes of `from` by one access at `to`.
///
/// # Safety
/// `T` is an integer, and `to` is aligned for it, with as many bytes that may be written
/// volatilely.
unsafe fn write_one<T: Copy>(to: *mut u8, from: &[u8]) {
    let from = &from[..size_of::<T>()];
    // SAFETY: the caller promises it of `to`; `from` was just cut to the size of a `T`, an integer,
    // for which any bytes are valid.
    unsafe {
        let value = from.as_ptr().cast::<T>().read_unaligned();
        to.cast::<T>().write_volatile(value);
    }
}

impl Piece<'_> {
    /// Reads them into `buffer`, which is as long. Each of 2, 4 or 8 bytes that are aligned and
    /// do not belong to a wider one is read at once.
    fn read(self, buffer: &mut [u8]) {
        assert_eq!(buffer.len(), self.len);
        let mut done = 0;
        while done < self.len {
            let rest = &mut buffer[done..];
            // SAFETY: `done` and what is read there lie among the piece's bytes. These are of a
            // mapping that stays as long as its value, or that a VMM has promised to keep; no
            // reference to them exists, and whoever else has them is taken into account: the
            // access is volatile. It is aligned, as `at_once` has found.
            done += unsafe {
                let at = self.at.add(done);
                let len = at_once(at.addr(), self.len - done);
                match len {
                    8 => read_one::<u64>(at, rest),
                    4 => read_one::<u32>(at, rest),
                    2 => read_one::<u16>(at, rest),
                    _ => read_one::<u8>(at, rest),
                }
                len
            };
        }
    }

    /// Writes `bytes`, which are as many, there, likewise.
    fn write(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len);
        let mut done = 0;
        while done < self.len {
            let rest = &bytes[done..];
            // SAFETY: as of `read`.
            done += unsafe {
                let at = self.at.add(done);
                let len = at_once(at.addr(), self.len - done);
                match len {
                    8 => write_one::<u64>(at, rest),
                    4 => write_one::<u32>(at, rest),
                    2 => write_one::<u16>(at, rest),
                    _ => write_one::<u8>(at, rest),
                }
                len
            };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.is_ours {
            // SAFETY: the mapping is this value's alone.
            unsafe { libc::munmap(self.at.as_ptr(), self.len) };
        }
    }
}

impl GuestBytes for SharedMemory {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.pieces(address, buffer.len(), |piece, at| {
            piece.read(&mut buffer[at..at + piece.len]);
        })
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        let whole = self.pieces(address, bytes.len(), |_, _| ());
        if whole {
            self.pieces(address, bytes.len(), |piece, at| {
                piece.write(&bytes[at..at + piece.len]);
            });
            (self.wrote)(address, bytes.len());
        }
        whole
    }
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let regions = self.lock();
        let regions = regions.iter();
        let told = regions.map(|one| (one.start, one.len, one.guest.is_some()));
        f.debug_list().entries(told).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::super::memory::unnamed_file;
    use super::*;

    type Wrote = Arc<Mutex<Vec<(u64, usize)>>>;

    fn memory() -> (SharedMemory, Wrote) {
        let wrote = Wrote::default();
        let told = wrote.clone();
        let memory = SharedMemory::new(move |at, len| told.lock().unwrap().push((at, len)));
        (memory, wrote)
    }

    /// What the guest would see at `address` of its slot.
    fn byte(address: u64) -> u8 {
        let at = usize::try_from(address).unwrap();
        // SAFETY: a slot's address, of a memory that lives to the end of the test.
        unsafe { ptr::with_exposed_provenance::<u8>(at).read_volatile() }
    }

    #[test]
    fn slots_are_the_vmms_memory_and_can_be_protected() {
        let file = unnamed_file(0x4000).unwrap();
        let (memory, wrote) = memory();
        let low = memory.add((0, 0x2000), (file.as_fd(), 0)).unwrap();
        let high = memory.add((0x2000, 0x1000), (file.as_fd(), 0x2000));
        let high = high.unwrap();
        // Over the border, and beyond the end.
        assert!(memory.write(0x1ffe, &[1, 2, 3]));
        assert!(!memory.write(0x2fff, &[9, 9]));
        assert_eq!((byte(low + 0x1fff), byte(high)), (2, 3));
        let mut read = [0; 4];
        assert!(memory.read(0x1ffd, &mut read) && read == [0, 1, 2, 3]);
        assert_eq!(*wrote.lock().unwrap(), [(0x1ffe, 3)]);
        // Read-only for the guest, not for us.
        memory.set_writable(0x1000, false).unwrap();
        assert!(memory.write(0x1000, &[7]) && byte(low + 0x1000) == 7);
        memory.set_writable(0x1000, true).unwrap();
        assert_eq!(
            memory.set_writable(0x3000, false),
            Err(PatchRefusal::NotRam)
        );
        let odd = Err(PatchRefusal::Protect(libc::EINVAL));
        assert_eq!(memory.set_writable(0x1800, false), odd);
        memory.remove(0x2000);
        assert_eq!(
            memory.set_writable(0x2000, false),
            Err(PatchRefusal::NotRam)
        );
        assert!(!memory.read(0x1ffd, &mut read));
    }

    /// Wherever it begins, and however much it is.
    #[test]
    fn what_is_read_and_written_is_what_is_there() {
        let file = unnamed_file(0x2000).unwrap();
        let (memory, _) = memory();
        memory.add((0, 0x2000), (file.as_fd(), 0)).unwrap();
        let pieces = (0xff8..0x1000).flat_map(|at| (1..=20).map(move |len| (at, len)));
        for (at, len) in pieces {
            let bytes: Vec<u8> = (1..=len).collect();
            let framed = [&[0; 8][..], &bytes, &[0; 8]].concat();
            assert!(memory.write(at - 8, &vec![0; framed.len()]) && memory.write(at, &bytes));
            let mut read = vec![9; framed.len()];
            assert!(memory.read(at - 8, &mut read));
            assert_eq!(read, framed, "{len} bytes at {at:#x}");
        }
    }

    #[test]
    fn an_access_is_as_wide_as_it_is_aligned() {
        let check = |address, left, expected| {
            assert_eq!(at_once(address, left), expected, "{left} at {address:#x}");
        };
        for (address, most) in [(0x10, 8), (0x18, 8), (0x14, 4), (0x12, 2), (0x11, 1)] {
            for (left, fits) in [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (100, 8)] {
                check(address, left, fits.min(most));
            }
        }
    }

    /// Entries of both sizes of page tables, and a store of 2 bytes: another processor changes
    /// all of their bits, and reads them.
    #[test]
    fn what_is_aligned_is_never_half_of_it() {
        const ROUNDS: u32 = 100_000;
        let file = unnamed_file(0x1000).unwrap();
        let (memory, _) = memory();
        let slot = memory.add((0, 0x1000), (file.as_fd(), 0)).unwrap();
        for (offset, len) in [(0, 8), (4, 4), (8, 2), (10, 2), (12, 4)] {
            let mut read = [0; 8];
            let read = &mut read[..len];
            let whole = |bytes: &[u8]| bytes.iter().all(|byte| *byte == bytes[0]);
            let word = usize::try_from(slot).unwrap() + offset / 8 * 8;
            // SAFETY: an aligned word of a slot that lives to the end of the test, which all
            // others reach atomically or volatilely.
            let word = unsafe { AtomicU64::from_ptr(ptr::with_exposed_provenance_mut(word)) };
            let ended = AtomicBool::new(false);
            let told = format!("{len} bytes at {offset}");
            let halves = std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !ended.load(Ordering::Relaxed) {
                        word.store(u64::MAX, Ordering::Relaxed);
                        word.store(0, Ordering::Relaxed);
                    }
                });
                let halves =
                    (0..ROUNDS).filter(|_| !memory.read(offset as u64, read) || !whole(read));
                let halves = halves.count();
                ended.store(true, Ordering::Relaxed);
                halves
            });
            assert_eq!(halves, 0, "{told} were read in parts");
            ended.store(false, Ordering::Relaxed);
            let halves = std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !ended.load(Ordering::Relaxed) {
                        memory.write(offset as u64, &[0xff; 8][..len]);
                        memory.write(offset as u64, &[0; 8][..len]);
                    }
                });
                let halves = (0..10 * ROUNDS).filter(|_| {
                    let bytes = word.load(Ordering::Relaxed).to_ne_bytes();
                    !whole(&bytes[offset % 8..][..len])
                });
                let halves = halves.count();
                ended.store(true, Ordering::Relaxed);
                halves
            });
            assert_eq!(halves, 0, "{told} were written in parts");
        }
    }

    #[test]
    fn what_is_not_shared_says_so() {
        let (memory, _) = memory();
        let told = |error: Result<u64, SharedError>| error.unwrap_err().to_string();
        let private = vec![0u8; 0x3000].leak();
        let page = private
            .as_mut_ptr()
            .map_addr(|at| at.next_multiple_of(PAGE_SIZE));
        // SAFETY: leaked memory, which nobody uses any more.
        let added = unsafe { memory.add_mapped((0, 0x1000), page) };
        let error = told(added);
        assert!(
            error.starts_with("guest memory at 0x0 cannot be mapped again: "),
            "{error}"
        );
        assert_eq!(
            memory.set_writable(0, false),
            Err(PatchRefusal::NoProtection)
        );
        // It is the guest's memory all the same, and stays the VMM's.
        let mut read = [0; 2];
        assert!(memory.write(0xffe, &[3, 4]) && memory.read(0xffe, &mut read) && read == [3, 4]);
        assert!(!memory.read(0xfff, &mut read));
        let file = unnamed_file(0x4000).unwrap();
        let at = |range| memory.add(range, (file.as_fd(), 0));
        assert_eq!(
            told(at((0, 0x1000))),
            "guest memory at 0x0 is there already"
        );
        memory.remove(0);
        assert!(!memory.read(0xffe, &mut read) && at((0, 0x1000)).is_ok());
        // SAFETY: as above.
        assert_eq!(unsafe { page.add(0xffe).read_volatile() }, 3);
        for range in [(0x1800, 0x1000), (0x1000, 0), (0x1000, 0x800)] {
            let error = told(at(range));
            assert!(
                error.ends_with(" does not consist of whole pages"),
                "{error}"
            );
        }
        let error = told(memory.add((0x1000, 0x2000), (file.as_fd(), 0x3000)));
        assert!(
            error.ends_with(" ends behind its file, which has 0x4000 bytes"),
            "{error}"
        );
        // Shared memory by its address.
        let first = at((0x10_0000, 0x4000)).unwrap();
        let (other, _) = self::memory();
        let host = ptr::with_exposed_provenance_mut(usize::try_from(first).unwrap());
        // SAFETY: a slot's memory, to which no reference exists.
        let again = unsafe { other.add_mapped((0, 0x4000), host) }.unwrap();
        assert!(memory.write(0x10_3fff, &[5]) && byte(again + 0x3fff) == 5);
    }
}
