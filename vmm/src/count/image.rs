//! A booted machine in a file.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use emu::State;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use thiserror::Error;
use vm_memory::GuestMemoryMmap;

use super::console::KernelSaid;
use super::end::{End, RunFailure};
use super::guest::{Guest, Stop};
use super::key::Key;
use super::limits::{Limits, Pauses};
use super::machine::{COMMAND_LINE, MACHINE, MachineFailure};
use super::platform::{Signals, VIRTIO};
use super::snapshot::{self, Snapshot, SnapshotError};
use crate::boot::{self, BootRequest, Unpack};
use crate::emu::{NotSaved, starting_at};
use crate::entropy::Randomness;

/// How often who waits for another one looks.
const LOOK: Duration = Duration::from_millis(100);

/// The number from which the kernel's random numbers come.
const SEED: u64 = 0x756d_7069_7265;

/// What a snapshot is one of.
#[derive(Debug, Clone, Copy)]
pub struct Plan<'a> {
    /// A bzImage of Linux.
    pub kernel: &'a [u8],
    /// What it unpacks as its first files, a newc archive.
    pub initramfs: &'a [u8],
    /// The guest's memory in MiB.
    pub memory_mib: u64,
    /// The first program's words.
    pub signals: Signals,
    /// Names the Umpire that boots: another one makes a snapshot of its own.
    pub engine: &'a str,
}

/// How far a boot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Another process boots it, or another machine to be kept in the same place: that one is
    /// waited for.
    Waits,
    /// The guest boots, and has executed so many instructions.
    Boots {
        /// Of kernel and programs.
        instructions: u64,
    },
    /// Its memory is written.
    Writes,
}

/// There is no snapshot, and none could be made.
#[derive(Debug, Error)]
pub enum BootFailure {
    /// The kernel cannot be put into memory.
    #[error(transparent)]
    Load(#[from] boot::BootError),
    /// No memory of this size can be had.
    #[error(transparent)]
    Memory(#[from] boot::memory::MemoryError),
    /// A bug of Umpire's.
    #[error(transparent)]
    Machine(#[from] MachineFailure),
    /// Likewise.
    #[error(transparent)]
    Run(#[from] RunFailure),
    /// The guest was not ready when it ended.
    #[error(
        "the guest's kernel did not get so far as to run programs: {end}{}",
        last_words(said)
    )]
    Ended {
        /// How it ended.
        end: End,
        /// The last that its kernel said.
        said: String,
    },
    /// The machine cannot be kept where it stands.
    #[error(transparent)]
    NotSaved(#[from] NotSaved),
    /// The file.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The kernel cannot be kept for the loader.
    #[error("no memory for the guest's kernel and its first files: {0}")]
    Files(io::Error),
}

fn last_words(said: &str) -> String {
    match said.lines().last() {
        Some(line) => format!("; its last words: {line}"),
        None => String::new(),
    }
}

impl Plan<'_> {
    /// The key of its snapshot.
    #[must_use]
    pub fn key(&self) -> Key {
        let Signals {
            tag,
            port,
            ready,
            done,
        } = self.signals;
        let parts: [&[u8]; 8] = [
            &Sha256::digest(self.kernel),
            &Sha256::digest(self.initramfs),
            &self.memory_mib.to_le_bytes(),
            self.engine.as_bytes(),
            &MACHINE.to_le_bytes(),
            COMMAND_LINE.as_bytes(),
            tag.as_bytes(),
            &[port.to_le_bytes()[0], port.to_le_bytes()[1], ready, done],
        ];
        let mut all = Sha256::new();
        for part in parts {
            // With its length, or two parts could be taken for two others.
            all.update((part.len() as u64).to_le_bytes());
            all.update(part);
        }
        Key(all
            .finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect())
    }

    /// The machine with its kernel in memory.
    fn begin<F>(&self, serve: F, limits: Limits, pauses: Pauses) -> Result<Guest<F>, BootFailure>
    where
        F: FnMut(&[u8], &mut Vec<u8>) + Send + 'static,
    {
        let ranges = boot::memory::ranges(self.memory_mib)?;
        let memory = GuestMemoryMmap::from_ranges(&ranges);
        let memory = memory.map_err(|error| boot::memory::MemoryError::Allocation {
            mib: self.memory_mib,
            reason: error.to_string(),
        })?;
        let kernel = LoaderFile::new("kernel", self.kernel).map_err(BootFailure::Files)?;
        let initramfs = LoaderFile::new("initramfs", self.initramfs).map_err(BootFailure::Files)?;
        let loaded = boot::load(&memory, &self.request(kernel.path(), initramfs.path()))?;
        let start = Some(starting_at(&loaded.state));
        Ok(Guest::new(
            memory,
            start,
            self.signals,
            serve,
            limits,
            pauses,
        )?)
    }

    fn request(&self, kernel: PathBuf, initramfs: PathBuf) -> BootRequest {
        BootRequest {
            kernel,
            initrd: Some(initramfs),
            cmdline: COMMAND_LINE.to_owned(),
            modules: Vec::new(),
            cpus: 1,
            unpack: Unpack::Always,
            pm_timer: true,
            virtio: Some(VIRTIO),
            rng_seed: Randomness::of(Some(SEED)).bytes(),
            firmware: None,
        }
    }
}

/// A machine that is ready for a job, in a file.
#[derive(Debug)]
pub struct MachineImage {
    pub(super) snapshot: Snapshot,
    pub(super) signals: Signals,
}

impl MachineImage {
    /// The one at `path`, looked at from its mode to its last byte.
    ///
    /// # Errors
    /// There is none, or it is none of `key`'s, or not to be trusted.
    pub fn open(path: &Path, key: &Key, signals: Signals) -> Result<Self, SnapshotError> {
        Ok(Self {
            snapshot: Snapshot::open(path, key)?,
            signals,
        })
    }

    /// The one at `path`; if there is none that can be used, boots one and writes it there,
    /// in a folder that exists. Of several that do so at a time one boots. `serve` answers
    /// requests for files until the guest is ready.
    ///
    /// # Errors
    /// [`BootFailure`]. Nothing is left behind then.
    pub fn boot<F>(
        plan: &Plan<'_>,
        path: &Path,
        serve: F,
        limits: Limits,
        mut progress: impl FnMut(Progress),
    ) -> Result<Self, BootFailure>
    where
        F: FnMut(&[u8], &mut Vec<u8>) + Send + 'static,
    {
        let key = plan.key();
        let failed = |source| SnapshotError::Io {
            what: "lock",
            path: path.to_owned(),
            source,
        };
        let lock = lock_file(path).map_err(failed)?;
        let mut told = false;
        let patience = limits.patience();
        while let Err(error) = lock.try_lock() {
            if let TryLockError::Error(error) = error {
                return Err(failed(error).into());
            }
            if !std::mem::replace(&mut told, true) {
                progress(Progress::Waits);
            }
            if let Some(met) = patience.is_over() {
                return Err(ended(met.into(), &KernelSaid::default()));
            }
            std::thread::sleep(LOOK);
        }
        // Somebody else may have booted meanwhile.
        if let Ok(image) = Self::open(path, &key, plan.signals) {
            return Ok(image);
        }
        let mut guest = plan.begin(serve, limits, Pauses::NowAndThen)?;
        loop {
            match guest.run() {
                Stop::Ready => break,
                Stop::Paused => progress(Progress::Boots {
                    instructions: guest.executed().iter().sum(),
                }),
                Stop::Ended(end) => return Err(ended(end, &guest.said())),
            }
        }
        progress(Progress::Writes);
        snapshot::write(path, guest.save(&key)?, guest.memory())?;
        Ok(Self::open(path, &key, plan.signals)?)
    }

    /// The guest's memory as it is before each run, in a mapping of its own, for who looks for
    /// the kernel in it.
    ///
    /// # Errors
    /// It cannot be mapped.
    pub fn memory(&self) -> Result<GuestMemoryMmap, SnapshotError> {
        self.snapshot.map()
    }

    /// The processor's registers as they are before each run.
    #[must_use]
    pub fn registers(&self) -> Option<&State> {
        self.snapshot.saved.room.registers(0)
    }

    /// One number for all that a guest could notice as it is before each run.
    ///
    /// # Errors
    /// As of [`MachineImage::run`].
    pub fn state_hash(&self) -> Result<u64, RunFailure> {
        let (limits, memory) = (Limits::default(), self.snapshot.map()?);
        let nobody = |_: &[u8], _: &mut Vec<u8>| {};
        let mut guest = Guest::new(memory, None, self.signals, nobody, limits, Pauses::Never)?;
        guest.restore(&self.snapshot.saved)?;
        Ok(guest.state_hash())
    }

    /// Instructions that its boot took.
    #[must_use]
    pub fn booted(&self) -> u64 {
        self.snapshot.saved.booted
    }
}

/// The file that one process at a time has locked, until it closes it.
fn lock_file(path: &Path) -> io::Result<File> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(false).mode(0o600);
    options.custom_flags(libc::O_NOFOLLOW).open(name)
}

/// One number for all that a guest could notice when it is ready, after it has gone on in another
/// machine, from a snapshot in `folder`, at each of these virtual times of its boot, in
/// nanoseconds. It is the same whatever the times are: this is for tests of that.
///
/// # Errors
/// As of [`MachineImage::boot`].
pub fn boot_in_parts<F>(
    plan: &Plan<'_>,
    folder: &Path,
    serve: impl Fn() -> F,
    times: &[u64],
) -> Result<u64, BootFailure>
where
    F: FnMut(&[u8], &mut Vec<u8>) + Send + 'static,
{
    let parts = || (Limits::default(), Pauses::At(times.to_vec()));
    let (limits, pauses) = parts();
    let (key, path) = (plan.key(), folder.join("part"));
    let mut guest = plan.begin(serve(), limits, pauses)?;
    loop {
        match guest.run() {
            Stop::Ready => return Ok(guest.state_hash()),
            Stop::Ended(end) => return Err(ended(end, &guest.said())),
            Stop::Paused => {
                snapshot::write(&path, guest.save(&key)?, guest.memory())?;
                let snapshot = Snapshot::open(&path, &key)?;
                let (limits, pauses) = parts();
                let memory = snapshot.map()?;
                guest = Guest::new(memory, None, plan.signals, serve(), limits, pauses)?;
                guest.restore(&snapshot.saved)?;
            }
        }
    }
}

fn ended(end: End, said: &KernelSaid) -> BootFailure {
    let said = String::from_utf8_lossy(&said.tail).into_owned();
    BootFailure::Ended { end, said }
}

/// Bytes as a file, for the loader, which reads files. It is nowhere on a disk.
struct LoaderFile(OwnedFd);

impl LoaderFile {
    fn new(name: &str, bytes: &[u8]) -> io::Result<Self> {
        let create = |flag| memfd_create(name, MemfdFlags::CLOEXEC | flag);
        // Kernels before 6.3 know no files that are never executed; others may make no other.
        let file = match create(MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => create(MemfdFlags::empty())?,
            made => made?,
        };
        let file = File::from(file);
        file.write_all_at(bytes, 0)?;
        Ok(Self(file.into()))
    }

    fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::fstat;

    use super::*;

    #[test]
    fn what_the_loader_reads_is_never_executed() {
        let file = LoaderFile::new("test", b"kernel").expect("a memory file");
        assert_eq!(std::fs::read(file.path()).expect("it is read"), b"kernel");
        let knows = memfd_create("test", MemfdFlags::NOEXEC_SEAL).is_ok();
        let mode = fstat(&file.0).expect("its mode").st_mode;
        assert!(!knows || mode & 0o111 == 0, "{mode:o}");
    }
}
