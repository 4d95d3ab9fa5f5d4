//! A stock Linux as guest: Debian's cloud kernel 6.1, busybox, Debian's `perf`, and a script.
//!
//! The kernel is the package's own file, bit for bit. The initramfs holds busybox, `perf` with its
//! libraries, the kernel's own `msr.ko` in `/lib/modules`, and the programs of `guest-tests/linux`.
//! The modules of `guest-tests/linux/pcr`, `lockup` and Debian's `gdb` are added on request. Each line of the
//! script is one [`Step`] of the guest's console log:
//!
//! ```no_run
//! use guest_tests::linux::{self, LinuxImage};
//!
//! let guest = LinuxImage::fetch()?.with_script("perf stat -e cycles spin 1\ndmesg")?;
//! // umpire run --kernel guest.kernel() --initrd guest.initrd() --cmdline linux::COMMAND_LINE
//! # let console = String::new();
//! let steps = linux::steps(&console);
//! # let _ = (guest, steps);
//! # Ok::<(), guest_tests::l1::L1Error>(())
//! ```

mod emulator;
pub mod exit_cost;
mod in_software;
mod kernel;
mod modules;
pub mod perf;
pub mod profile;
mod script;
mod steps;
mod under_umpire;
mod watched;

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use guest_view::{GuestMemory, Registers};

use crate::l1::cpio::Cpio;
use crate::l1::libraries::{Files, Libraries};
use crate::l1::tool::capture;
use crate::l1::{
    Cache, Cached, GUEST_MODULES, L1Error, Set, add_merged_usr, elf, guest_name, stripped,
};

pub use in_software::InSoftware;
pub use modules::MODULES;
pub use script::{Log, Script, lines};
pub use steps::{Step, steps};
pub use under_umpire::{LinuxRun, UnderUmpire};
pub use watched::Watched;

/// What the guest's kernel needs on its command line. A line on the console takes 20 ms in L1, so
/// it has warnings alone; all others are in `dmesg`.
pub const COMMAND_LINE: &str = "console=ttyS0 loglevel=5 mitigations=off panic=-1";

/// Flags with which the processor in software has cycles, as KVM's guests have them of `clock`.
pub const SIMULATED_CYCLES: [&str; 2] = ["--cycles", "simulated"];

const INIT: &str = include_str!("linux/init.sh");
/// Programs of ours in C.
const SOURCES: [(&str, &str); 8] = [
    ("spin", include_str!("../linux/spin.c")),
    ("msr", include_str!("../linux/msr.c")),
    ("walk", include_str!("../linux/walk.c")),
    ("frameless", include_str!("../linux/frameless.c")),
    ("breakpoints", include_str!("../linux/breakpoints.c")),
    ("pmu-accounting", ACCOUNTING),
    ("event-holder", include_str!("../linux/event-holder.c")),
    ("workers", include_str!("../linux/workers.c")),
];
/// The same without libc.
const WITHOUT_LIBC: [(&str, &str); 1] = [("loops", include_str!("../linux/loops.c"))];
const PERF: &str = "/usr/bin/perf";
const ACCOUNTING: &str = include_str!("../linux/pmu-accounting.c");

/// The parts of the guest, in the cache.
#[derive(Debug, Clone)]
pub struct LinuxImage {
    kernel: PathBuf,
    /// The kernel, where it is no file of the cache: goes with the last who may boot it.
    own_kernel: Option<Arc<tempfile::NamedTempFile>>,
    busybox: PathBuf,
    /// Programs of Debian's: name in the guest, and root folder.
    packaged: Vec<(&'static str, PathBuf)>,
    modules: PathBuf,
    /// Programs of ours: name in the guest, and file here.
    programs: Vec<(String, PathBuf)>,
    /// Modules of ours: name in `/lib/modules`, and content.
    built: Vec<(String, Vec<u8>)>,
}

/// A guest that can be booted. Its initramfs is a temporary file that goes with it.
#[derive(Debug)]
pub struct Guest {
    kernel: PathBuf,
    initrd: tempfile::NamedTempFile,
}

/// A guest that is halted to be looked at.
pub trait Halted: GuestMemory + Sized {
    /// Bytes of the guest's memory, which begins at 0 and has no hole.
    fn memory_bytes(&self) -> u64;

    /// Waits until the guest has said something that ends with `end`, and gives all of it.
    ///
    /// # Panics
    /// It has not within `timeout`.
    fn said(&mut self, end: &str, timeout: Duration) -> String;

    /// Halts the guest a little later, and gives the registers of its processors.
    ///
    /// # Errors
    /// The guest cannot be halted, or not be asked for its registers.
    fn halt_later(&mut self) -> io::Result<Vec<Registers>>;
}

impl LinuxImage {
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
        Self::of_sets(&cache.fetch(&Set::LINUX_GUEST)?)
    }

    /// The same with Debian's newer kernel, 6.12. `perf` stays that of 6.1.
    ///
    /// # Errors
    /// No apt, no network, no room; the message says what to do.
    pub fn fetch_newer() -> Result<Self, L1Error> {
        let mut sets = Set::LINUX_GUEST;
        sets[0] = Set::NewGuestKernel;
        Self::of_sets(&Cache::of_user().fetch(&sets)?)
    }

    /// The same with the newest kernel that Debian has for its cloud images, whose version it
    /// prints. `perf` stays that of 6.1, and there are no headers for modules of ours.
    ///
    /// # Errors
    /// No apt, no network, no room; the message says what to do.
    pub fn fetch_newest() -> Result<Self, L1Error> {
        let mut sets = Set::LINUX_GUEST;
        sets[0] = Set::NewestGuestKernel;
        let sets = Cache::of_user().fetch(&sets)?;
        for package in &sets[0].packages {
            println!("the guest's kernel: {} {}", package.name, package.version);
        }
        Self::of_sets(&sets)
    }

    /// The guest's `perf`, on this machine.
    #[must_use]
    pub fn perf(&self) -> Command {
        let root = self.packaged.iter().find(|(name, _)| *name == PERF);
        let root = root.map_or(Path::new("/"), |(_, root)| root);
        Libraries::of_root(root).command(PERF.trim_start_matches('/'))
    }

    fn of_sets(sets: &[Cached]) -> Result<Self, L1Error> {
        Ok(Self {
            kernel: sets[0].folder.join("vmlinuz"),
            own_kernel: None,
            busybox: sets[1].folder.join("busybox"),
            packaged: vec![(PERF, sets[2].folder.clone())],
            modules: sets[0].folder.clone(),
            programs: Vec::new(),
            built: Vec::new(),
        })
    }

    /// Builds [`MODULES`] against the guest's kernel and adds them to `/lib/modules`.
    ///
    /// # Errors
    /// No make or no C compiler, or they fail.
    pub fn with_arbiters(mut self) -> Result<Self, L1Error> {
        self.built = modules::build(&self.modules, &modules::ARBITERS)?;
        Ok(self)
    }

    /// Builds the module `lockup`, which hangs the processor that loads it, and adds it to
    /// `/lib/modules`.
    ///
    /// # Errors
    /// No make or no C compiler, or they fail.
    pub fn with_lockup(mut self) -> Result<Self, L1Error> {
        self.built = modules::build(&self.modules, &modules::LOCKUP)?;
        Ok(self)
    }

    /// Adds Debian's `gdb`, from the user's cache.
    ///
    /// # Errors
    /// No apt, no network, no room; the message says what to do.
    pub fn with_gdb(mut self) -> Result<Self, L1Error> {
        let sets = Cache::of_user().fetch(&[Set::Gdb])?;
        self.packaged.push(("/usr/bin/gdb", sets[0].folder.clone()));
        Ok(self)
    }

    /// The kernel does not describe its types: a vmlinux, whose BTF is zeros.
    ///
    /// # Errors
    /// The kernel is no bzImage of Debian's, or there is no room for a file.
    pub fn without_btf(mut self) -> Result<Self, L1Error> {
        let read = || kernel::without_btf(&fs::read(&self.kernel)?);
        let bytes = read().map_err(L1Error::file("unpack", &self.kernel))?;
        let make = || {
            let file = tempfile::NamedTempFile::new()?;
            fs::write(file.path(), bytes)?;
            Ok(file)
        };
        let file = make().map_err(L1Error::file("create a file in", std::env::temp_dir()))?;
        file.path().clone_into(&mut self.kernel);
        self.own_kernel = Some(Arc::new(file));
        Ok(self)
    }

    /// Adds a program of this machine with its libraries, as `/usr/bin/NAME` of the guest.
    #[must_use]
    pub fn with_program(mut self, name: &str, file: impl Into<PathBuf>) -> Self {
        self.programs.push((name.to_owned(), file.into()));
        self
    }

    /// The kernel, a bzImage.
    pub fn kernel(&self) -> &Path {
        &self.kernel
    }

    /// Builds the initramfs with `script`: one shell command a line; empty lines and lines that start
    /// with `#` are skipped.
    ///
    /// # Errors
    /// No C compiler for our programs, an incomplete cache, or no room for the file.
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
        for (program, root) in &self.packaged {
            let program = Path::new(program);
            Libraries::of_root(root).collect(program, &mut files)?;
            let place = program.strip_prefix("/").unwrap_or(program);
            files.insert(program.to_owned(), root.join(place));
        }
        files.insert("/bin/busybox".into(), self.busybox.clone());
        for module in GUEST_MODULES {
            let file = format!("{module}.ko");
            let place = Path::new("/lib/modules").join(&file);
            files.insert(place, self.modules.join(file));
        }
        for (name, place) in &files {
            let content = fs::read(place).map_err(L1Error::file("read", place))?;
            cpio.bytes(&guest_name(name)?, 0o755, &content)?;
        }
        for (name, file) in &self.programs {
            add_program(cpio, name, file)?;
        }
        for (name, content) in &self.built {
            cpio.bytes(&format!("lib/modules/{name}"), 0o644, content)?;
        }
        for (name, source) in SOURCES {
            cpio.bytes(
                &format!("usr/bin/{name}"),
                0o755,
                &compile(name, source, &[])?,
            )?;
        }
        for (name, source) in WITHOUT_LIBC {
            let program = compile(name, source, &["-nostdlib"])?;
            cpio.bytes(&format!("usr/bin/{name}"), 0o755, &program)?;
        }
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
        emulator::boot(self, &[], timeout)
    }

    /// Likewise on one processor, whose emulator counts: the console, and how many instructions
    /// each run of `program` executed. That is a static program at addresses that no other
    /// program of the guest has; no instruction of it is followed by itself.
    ///
    /// # Errors
    /// As [`Guest::emulate`]; no C compiler, or it is no such program.
    pub fn emulate_counting(
        &self,
        program: &[u8],
        timeout: Duration,
    ) -> Result<(String, Vec<u64>), L1Error> {
        emulator::count(self, program, timeout)
    }
}

/// Adds a program of this machine. Its loader and libraries get a folder of their own, as the
/// guest's `perf` brings those of another release; a script starts the one with the other.
fn add_program(cpio: &mut Cpio<impl Write>, name: &str, file: &Path) -> Result<(), L1Error> {
    let folder = format!("opt/{name}");
    let bytes = fs::read(file).map_err(L1Error::file("read", file))?;
    let program = std::path::absolute(file).map_err(L1Error::file("find", file))?;
    let mut files = Files::new();
    Libraries::of_host().collect(&program, &mut files)?;
    for (library, place) in &files {
        let content = fs::read(place).map_err(L1Error::file("read", place))?;
        let library = library.file_name().unwrap_or_default().to_string_lossy();
        cpio.bytes(&format!("{folder}/{library}"), 0o755, &content)?;
    }
    let start = match elf::parse(&bytes, file)?.interpreter {
        Some(loader) => {
            let loader = loader.rsplit('/').next().unwrap_or_default();
            format!("/{folder}/{loader} --library-path /{folder} /{folder}/{name}")
        }
        None => format!("/{folder}/{name}"),
    };
    let script = format!("#!/bin/busybox sh\nexec {start} \"$@\"\n");
    let small = stripped(file, bytes.len() as u64).unwrap_or(bytes);
    cpio.bytes(&format!("{folder}/{name}"), 0o755, &small)?;
    cpio.bytes(&format!("usr/bin/{name}"), 0o755, script.as_bytes())
}

/// A program of ours that every guest has in `/usr/bin`: the same bytes.
///
/// # Errors
/// No C compiler.
///
/// # Panics
/// There is no such program.
pub fn own_program(name: &str) -> Result<Vec<u8>, L1Error> {
    let mut all = SOURCES.into_iter();
    let (_, source) = all.find(|(other, _)| *other == name).expect("a program");
    compile(name, source, &[])
}

/// Compiles a program with these flags besides: static, with symbols.
fn compile(name: &str, text: &str, flags: &[&str]) -> Result<Vec<u8>, L1Error> {
    const ADVICE: &str = "a C compiler and the static libc are needed (Debian: gcc and libc6-dev)";
    let folder = tempfile::tempdir();
    let folder = folder.map_err(L1Error::file("create a folder in", std::env::temp_dir()))?;
    let (source, program) = (
        folder.path().join(format!("{name}.c")),
        folder.path().join(name),
    );
    fs::write(&source, text).map_err(L1Error::file("write", &source))?;
    let mut command = Command::new("cc");
    command
        .args(["-static", "-O1"])
        .args(flags)
        .arg("-o")
        .arg(&program)
        .arg(&source);
    capture(&mut command, "compiling a program of the guest", ADVICE)?;
    fs::read(&program).map_err(L1Error::file("read", &program))
}

#[cfg(test)]
mod tests {
    use arbiter::abi;
    use pmu_virt::accounting::{
        self, LOSS_CODES, PAGE, PROVENANCE_CODES, REASON_CODES, STATE_CODES,
    };

    use super::ACCOUNTING;

    /// What the program in C defines a name as: a number, a bit, or the first of a row.
    fn defined(name: &str) -> u32 {
        let mut lines = ACCOUNTING.lines();
        let value = lines.find_map(|line| {
            let rest = line.strip_prefix("#define ")?.strip_prefix(name)?;
            rest.strip_prefix("(i)")
                .or(rest.strip_prefix("(n)"))
                .or(Some(rest))?
                .strip_prefix(' ')
        });
        let value = value.unwrap_or_else(|| panic!("pmu-accounting.c lacks {name}"));
        let first = value.trim_matches(['(', ')']).split(" + ").next();
        let first = first.unwrap_or(value);
        let number = |text: &str| match text.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16),
            None => text.trim_end_matches('u').parse(),
        };
        let number = |text| number(text).unwrap_or_else(|_| panic!("{name} is {value}"));
        match first.split_once(" << ") {
            Some((one, bit)) => number(one) << number(bit),
            None => number(first),
        }
    }

    #[test]
    fn the_accounting_program_knows_the_abi() {
        let row = |name| {
            let mut rows = PAGE.iter();
            let row = rows.find(|row| row.name == name).expect("a row");
            row.offset
        };
        let expected = [
            ("CPUID_FIRST", accounting::CPUID_BASE),
            ("ABI_VERSION", accounting::ABI_VERSION),
            ("FEATURE_ACCOUNTING", accounting::FEATURE_ACCOUNTING),
            ("FEATURE_RESERVATIONS", abi::CPUID_FEATURES_ECX_PCR),
            ("SNAPSHOT", row("SNAPSHOT")),
            ("SEQUENCE", row("SEQUENCE")),
            ("WORDS", row("STATUS")),
            ("LEGACY_MAP", abi::MSR_LEGACY_MAP),
            ("RESERVATIONS_LEGACY_MAP", abi::FEATURE_LEGACY_MAP),
            ("RESERVATIONS_VERSION", abi::VERSION),
        ];
        for (name, value) in expected {
            assert_eq!(defined(name), value, "{name}");
        }
    }

    /// The program in C has the ABI's tables once more, as a guest has nothing else of Umpire.
    #[test]
    fn the_accounting_program_knows_every_code() {
        let tables = [STATE_CODES, PROVENANCE_CODES, REASON_CODES, LOSS_CODES];
        let mut rest = ACCOUNTING;
        for (code, text) in tables.into_iter().flatten() {
            let entry = format!("[{code}] = \"{text}\",");
            // In this order, so each is found in its own table.
            let at = rest.find(&entry);
            let at = at.unwrap_or_else(|| panic!("pmu-accounting.c lacks {entry}"));
            rest = &rest[at + entry.len()..];
        }
        assert!(!rest.contains("] = \""), "a code that the ABI lacks");
    }
}
