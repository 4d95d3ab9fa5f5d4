//! Memory files: memory of the VMM's that clients read by a descriptor, until the VMM cuts it.
//!
//! A client may keep a descriptor, or a mapping, for as long as it likes. So the VMM ends such
//! memory itself: it cuts the file to nothing. That is why files are not sealed against
//! becoming shorter, and why clients get descriptors that only read.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{
    FallocateFlags, IFlags, MemfdFlags, Mode, SealFlags, fallocate, fchmod, fcntl_add_seals,
    ftruncate, ioctl_setflags, memfd_create,
};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Resource, getrlimit};

/// A memory file. All of it is there from the beginning.
#[derive(Debug)]
pub(crate) struct MemoryFile {
    file: OwnedFd,
    bytes: u64,
    cut: AtomicBool,
}

impl MemoryFile {
    /// `bytes` bytes, all 0.
    ///
    /// # Errors
    /// The host has no memory, or the process no descriptor left.
    pub(crate) fn new(name: &str, bytes: u64) -> io::Result<Self> {
        // The kernel would rather end processes than refuse memory.
        if let Some(there) = available()
            && bytes > there
        {
            let reason = format!("the host has {there} bytes of memory available");
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, reason));
        }
        // A file beyond this limit would end the process, too, by SIGXFSZ.
        if let Some(most) = getrlimit(Resource::Fsize).current
            && bytes > most
        {
            let reason = format!("the VMM's files may have {most} bytes (`ulimit -f`)");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, reason));
        }
        let file = create(name)?;
        // Now, for memory that is missing later ends the process.
        retry_on_intr(|| fallocate(&file, FallocateFlags::empty(), 0, bytes))?;
        // Other users do not open it anew by /proc.
        fchmod(&file, Mode::RUSR)?;
        // Nobody does for writing, where the VMM may say so; `guard` is for where it may not.
        let _ = ioctl_setflags(&file, IFlags::IMMUTABLE);
        let cut = AtomicBool::new(false);
        Ok(Self { file, bytes, cut })
    }

    /// A file that has these bytes, and that nobody changes.
    ///
    /// # Errors
    /// As [`MemoryFile::new`].
    pub(crate) fn of(name: &str, bytes: &[u8]) -> io::Result<Self> {
        let this = Self::new(name, bytes.len() as u64)?;
        let mut at = 0;
        while at < bytes.len() {
            at += retry_on_intr(|| rustix::io::pwrite(&this.file, &bytes[at..], at as u64))?;
        }
        this.seal()?;
        Ok(this)
    }

    /// From now on only mappings that exist can write; the file does not grow.
    ///
    /// # Errors
    /// The kernel has no such seals.
    pub(crate) fn seal(&self) -> io::Result<()> {
        let seals = SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        Ok(fcntl_add_seals(&self.file, seals)?)
    }

    /// A descriptor for a client, which only reads, and has a place in the file of its own.
    ///
    /// # Errors
    /// The process has no descriptor left, or no /proc.
    pub(crate) fn reader(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        Ok(File::open(path)?.into())
    }

    /// Gives all of its memory back, whoever has it open or mapped. To read what is mapped
    /// is SIGBUS from then on.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn cut(&self) -> io::Result<()> {
        self.cut.store(true, Ordering::Relaxed);
        let cut = || retry_on_intr(|| ftruncate(&self.file, 0));
        // A kernel may take that for a change of what is immutable.
        Ok(cut().or_else(|_| {
            let _ = ioctl_setflags(&self.file, IFlags::empty());
            cut()
        })?)
    }

    /// Whether its memory was given back.
    pub(crate) fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Relaxed)
    }

    /// How many bytes it was made with.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// How many bytes it has now.
    #[cfg(test)]
    pub(crate) fn left(&self) -> u64 {
        u64::try_from(rustix::fs::fstat(&self.file).unwrap().st_size).unwrap()
    }
}

fn create(name: &str) -> rustix::io::Result<OwnedFd> {
    // The first implies that it can be sealed. Kernels before 6.3 do not know it.
    let create = |flag| memfd_create(name, MemfdFlags::CLOEXEC | flag);
    match create(MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => create(MemfdFlags::ALLOW_SEALING),
        made => made,
    }
}

/// How much memory the host can give without swapping; `None`: it does not say.
fn available() -> Option<u64> {
    available_of(&std::fs::read("/proc/meminfo").ok()?)
}

fn available_of(meminfo: &[u8]) -> Option<u64> {
    let mut lines = meminfo.split(|byte| *byte == b'\n');
    let line = lines.find_map(|line| line.strip_prefix(b"MemAvailable:"))?;
    let number = std::str::from_utf8(line).ok()?.trim().strip_suffix(" kB")?;
    number.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::Mapping;
    use rustix::fs::{OFlags, fstat, ioctl_getflags};
    use rustix::io::{pread, pwrite};

    const PAGE: u64 = 4096;

    /// Bytes that the kernel has for it.
    fn allocated(file: &OwnedFd) -> u64 {
        u64::try_from(fstat(file).unwrap().st_blocks).unwrap() * 512
    }

    #[test]
    fn all_of_it_is_there_from_the_beginning_and_gone_at_the_end() {
        let file = MemoryFile::new("test", 64 * PAGE).unwrap();
        file.seal().unwrap();
        let reader = file.reader().unwrap();
        assert_eq!(allocated(&reader), 64 * PAGE);
        assert_eq!(file.bytes(), 64 * PAGE);
        file.cut().unwrap();
        assert_eq!((allocated(&reader), file.left()), (0, 0));
        assert_eq!(pread(&reader, &mut [0; 1], 0), Ok(0), "no bytes");
    }

    #[test]
    fn what_nobody_can_have_is_an_error() {
        let error = MemoryFile::new("test", 1 << 60).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
        assert!(error.to_string().contains("available"), "{error}");
    }

    #[test]
    fn readers_read_each_for_itself() {
        use std::io::Read;
        let file = MemoryFile::of("test", b"all that is said").unwrap();
        for _ in 0..2 {
            let mut text = String::new();
            let mut reader = File::from(file.reader().unwrap());
            reader.read_to_string(&mut text).unwrap();
            assert_eq!(text, "all that is said");
        }
    }

    /// Not by the descriptor, not by one that is opened anew, not by a mapping; even of root.
    #[test]
    fn nobody_who_reads_can_write() {
        let file = MemoryFile::of("test", &[7; 8192]).unwrap();
        let reader = file.reader().unwrap();
        assert_eq!(pwrite(&reader, &[1], 0), Err(Errno::BADF));
        assert_eq!(ftruncate(&reader, 0), Err(Errno::INVAL));
        assert!(fcntl_add_seals(&reader, SealFlags::SHRINK).is_err());
        assert!(Mapping::new(&reader, 4096).is_err());
        let mode = fstat(&reader).unwrap().st_mode & 0o777;
        assert_eq!(mode, 0o400, "others do not open it, and nobody executes it");
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        let open = || rustix::fs::open(&path, OFlags::RDWR, Mode::empty());
        if ioctl_getflags(&reader).is_ok_and(|flags| flags.contains(IFlags::IMMUTABLE)) {
            assert!(open().is_err(), "not even root opens it");
            ioctl_setflags(&reader, IFlags::empty()).unwrap();
        }
        // Root may open it where it is so, and does no better.
        if let Ok(again) = open() {
            assert_eq!(pwrite(&again, &[1], 0), Err(Errno::PERM));
            assert_eq!(ftruncate(&again, 1 << 20), Err(Errno::PERM));
            assert!(Mapping::new(&again, 4096).is_err());
            assert!(fcntl_add_seals(&again, SealFlags::SHRINK).is_err());
        }
    }

    #[test]
    fn what_is_available_is_read() {
        let text = b"MemTotal:  100 kB\nMemFree:  1 kB\nMemAvailable:    12 kB\nBuffers: 3 kB\n";
        assert_eq!(available_of(text), Some(12 << 10));
        for odd in [
            &b""[..],
            b"MemAvailable:",
            b"MemAvailable: x kB",
            b"MemAvailable: 99999999999999999999 kB",
            b"MemAvailable: 18446744073709551615 kB",
            b"MemAvailable: 12 MB",
            b"MemAvailable: \xff kB",
        ] {
            assert_eq!(available_of(odd), None);
        }
    }
}
