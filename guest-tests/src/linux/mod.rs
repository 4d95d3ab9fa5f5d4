//! A stock Linux as guest: Debian's cloud kernel 6.1, busybox, Debian's `perf`, and a script.
//!
//! The kernel is the package's own file, bit for bit. The initramfs holds busybox, `perf` with its
//! libraries, and `spin`, a busy loop whose time is spent in the function `spin_hot`. Each line of
//! the script is one [`Step`] of the guest's console log:
//!
//! ```no_run
//! use guest_tests::linux::{self, Image};
//!
//! let guest = Image::fetch()?.with_script("perf stat -e cycles spin 1\ndmesg")?;
//! // umpire run --kernel guest.kernel() --initrd guest.initrd() --cmdline linux::COMMAND_LINE
//! # let console = String::new();
//! let steps = linux::steps(&console);
//! # let _ = (guest, steps);
//! # Ok::<(), guest_tests::l1::L1Error>(())
//! ```

mod emulator;
mod steps;

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::l1::cpio::Cpio;
use crate::l1::libraries::{Files, Libraries};
use crate::l1::tool::capture;
use crate::l1::{Cache, L1Error, Set, add_merged_usr, guest_name};

pub use steps::{Step, steps};

/// What the guest's kernel needs on its command line.
pub const COMMAND_LINE: &str = "console=ttyS0 mitigations=off panic=-1";

const INIT: &str = include_str!("init.sh");
const SPIN: &str = include_str!("../../linux/spin.c");

/// The parts of the guest, in the cache.
#[derive(Debug, Clone)]
pub struct Image {
    kernel: PathBuf,
    busybox: PathBuf,
    perf: PathBuf,
}

/// A guest that can be booted. Its initramfs is a temporary file that goes with it.
#[derive(Debug)]
pub struct Guest {
    kernel: PathBuf,
    initrd: tempfile::NamedTempFile,
}

impl Image {
    /// Finds the parts in the user's cache; fetches them once.
    ///
    /// # Errors
    /// No apt, no network, no room; the message says what to do.
    pub fn fetch() -> Result<Self, L1Error> {
        Self::fetch_into(&Cache::of_user())
    }

    /// Finds the parts in `cache`; fetches them once.
    ///
    /// # Errors
    /// No apt, no network, no room; the message says what to do.
    pub fn fetch_into(cache: &Cache) -> Result<Self, L1Error> {
        let sets = cache.fetch(&Set::LINUX_GUEST)?;
        Ok(Self {
            kernel: sets[0].folder.join("vmlinuz"),
            busybox: sets[1].folder.join("busybox"),
            perf: sets[2].folder.clone(),
        })
    }

    /// The kernel, a bzImage.
    pub fn kernel(&self) -> &Path {
        &self.kernel
    }

    /// Builds the initramfs with `script`: one shell command a line; empty lines and lines that start
    /// with `#` are skipped.
    ///
    /// # Errors
    /// No C compiler for `spin`, an incomplete cache, or no room for the file.
    pub fn with_script(&self, script: &str) -> Result<Guest, L1Error> {
        let initrd = tempfile::Builder::new()
            .prefix("guest-")
            .suffix(".cpio")
            .tempfile();
        let initrd = initrd.map_err(L1Error::file("create a file in", std::env::temp_dir()))?;
        let mut cpio = Cpio::new(BufWriter::new(initrd.as_file()));
        self.fill(&mut cpio, script)?;
        cpio.finish()?;
        Ok(Guest {
            kernel: self.kernel.clone(),
            initrd,
        })
    }

    fn fill(&self, cpio: &mut Cpio<impl Write>, script: &str) -> Result<(), L1Error> {
        add_merged_usr(cpio)?;
        let mut files = Files::new();
        let perf = Path::new("/usr/bin/perf");
        Libraries::of_root(&self.perf).collect(perf, &mut files)?;
        files.insert(perf.to_owned(), self.perf.join("usr/bin/perf"));
        files.insert("/bin/busybox".into(), self.busybox.clone());
        for (name, place) in &files {
            let content = fs::read(place).map_err(L1Error::file("read", place))?;
            cpio.bytes(&guest_name(name)?, 0o755, &content)?;
        }
        cpio.bytes("usr/bin/spin", 0o755, &spin()?)?;
        cpio.bytes("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n")?;
        cpio.bytes("init", 0o755, INIT.as_bytes())?;
        cpio.bytes("run.sh", 0o644, format!("{script}\n").as_bytes())
    }
}

impl Guest {
    /// The kernel, a bzImage.
    pub fn kernel(&self) -> &Path {
        &self.kernel
    }

    /// The initramfs.
    pub fn initrd(&self) -> &Path {
        self.initrd.path()
    }

    /// Boots the guest in QEMU without KVM and without a PMU, to try a script; returns its console.
    ///
    /// # Errors
    /// QEMU cannot be had, or the guest did not power off within `timeout`.
    pub fn emulate(&self, timeout: Duration) -> Result<String, L1Error> {
        emulator::boot(self, timeout)
    }
}

/// Compiles the busy loop: static, with symbols.
fn spin() -> Result<Vec<u8>, L1Error> {
    const ADVICE: &str = "a C compiler and the static libc are needed (Debian: gcc and libc6-dev)";
    let folder = tempfile::tempdir();
    let folder = folder.map_err(L1Error::file("create a folder in", std::env::temp_dir()))?;
    let (source, program) = (folder.path().join("spin.c"), folder.path().join("spin"));
    fs::write(&source, SPIN).map_err(L1Error::file("write", &source))?;
    let mut command = Command::new("cc");
    command
        .args(["-static", "-O1", "-o"])
        .arg(&program)
        .arg(&source);
    capture(&mut command, "compiling spin.c", ADVICE)?;
    fs::read(&program).map_err(L1Error::file("read", &program))
}
