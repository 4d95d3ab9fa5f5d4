//! Builds freestanding programs for guests, with plain `rustc`, from a build script.
//!
//! A program is a chain of crates without dependencies outside of this repository:
//! libraries first, then the program, which names a linker script. A build script
//! hands that chain to [`build_script`], which announces the program to the crate.
#![forbid(unsafe_code)]

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The target of freestanding code: no operating system, no SSE, no red zone.
const TARGET: &str = "x86_64-unknown-none";

/// For programs that guests run in KVM's instruction emulator, too.
const SMALL: &str = "-Copt-level=s";

/// Set to 1, it makes a build install the target.
const INSTALL: &str = "UMPIRE_INSTALL_TARGET";

/// What a build script announces to the crate that it belongs to.
#[derive(Debug)]
pub struct Announced {
    /// The `cfg` that is set where the program could be built.
    pub cfg: &'static str,
    /// The variable that then names the program's file.
    pub variable: &'static str,
    /// What the crate goes without where the target cannot be had.
    pub without: &'static str,
}

/// Runs a build script: `build` makes the program out of the package's folder.
///
/// A missing target is a warning, because the crate works without the program; a
/// program that does not compile is an error.
pub fn build_script(
    announced: &Announced,
    build: impl FnOnce(&Freestanding, &Path) -> Result<PathBuf, String>,
) {
    println!("cargo::rustc-check-cfg=cfg({})", announced.cfg);
    println!("cargo::rerun-if-changed=build");
    // The lint run over the program itself needs no image of it.
    if env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("none") {
        return;
    }
    let compiler = match Freestanding::prepare() {
        Ok(compiler) => compiler,
        Err(why) => {
            println!("cargo::warning=built without {}: {why}", announced.without);
            return;
        }
    };
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    match build(&compiler, &package) {
        Ok(image) => {
            println!("cargo::rustc-cfg={}", announced.cfg);
            println!(
                "cargo::rustc-env={}={}",
                announced.variable,
                image.display()
            );
        }
        Err(why) => {
            for line in why.lines() {
                println!("cargo::error={line}");
            }
        }
    }
}

/// A compiler for the target, and where its output goes.
#[derive(Debug)]
pub struct Freestanding {
    rustc: PathBuf,
    out: PathBuf,
}

/// One crate of a chain.
#[derive(Debug)]
pub struct Crate<'a> {
    /// Its name in Rust.
    pub name: &'a str,
    pub root: &'a Path,
    /// Names of the libraries that it uses, built before.
    pub uses: &'a [&'a str],
}

impl Freestanding {
    /// The target. A build changes nobody's toolchain: only if
    /// `UMPIRE_INSTALL_TARGET=1` asks for it, a missing target is installed.
    ///
    /// # Errors
    /// It is missing: why, and what to do.
    fn prepare() -> Result<Self, String> {
        println!("cargo::rerun-if-env-changed=UMPIRE_NO_FREESTANDING");
        println!("cargo::rerun-if-env-changed={INSTALL}");
        if env::var_os("UMPIRE_NO_FREESTANDING").is_some() {
            return Err("UMPIRE_NO_FREESTANDING is set".to_owned());
        }
        let rustc = PathBuf::from(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        let out = env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: this is no build script")?;
        let libraries = libraries(&rustc)?;
        // While it is missing, cargo runs the build script anew each time.
        println!("cargo::rerun-if-changed={}", libraries.display());
        if !has_core(&libraries) {
            if env::var_os(INSTALL).is_some_and(|value| value == "1") {
                install()?;
            }
            if !has_core(&libraries) {
                return Err(format!(
                    "the Rust target {TARGET} is not installed; run `rustup target add {TARGET}` \
                     and build again, or build with {INSTALL}=1"
                ));
            }
        }
        let out = PathBuf::from(out).join("freestanding");
        std::fs::create_dir_all(&out).map_err(|error| format!("{}: {error}", out.display()))?;
        Ok(Self { rustc, out })
    }

    /// Builds a library for the crates that come after it.
    ///
    /// # Errors The compiler's message.
    pub fn library(&self, unit: &Crate<'_>) -> Result<(), String> {
        let library = ["--crate-type=rlib".into(), SMALL.into()];
        self.compile(unit, &library).map(drop)
    }

    /// Builds and links a program, and returns its file, a static ELF64
    /// executable.
    ///
    /// # Errors The message of compiler or linker.
    pub fn program(&self, unit: &Crate<'_>, script: &Path) -> Result<PathBuf, String> {
        self.link(
            unit,
            script,
            // Segments need no pages of their own in the file.
            &["-Clink-arg=--nmagic".into(), SMALL.into()],
        )
    }

    /// Builds and links a program that Linux can execute too, for speed; its loops are not
    /// unrolled, as gcc's are not at -O2, so that blocks have the length of usual code.
    ///
    /// # Errors The message of compiler or linker.
    pub fn host_program(&self, unit: &Crate<'_>, script: &Path) -> Result<PathBuf, String> {
        let flags = ["-Copt-level=2", "-Cllvm-args=-unroll-count=1"];
        self.link(unit, script, &flags.map(str::to_owned))
    }

    fn link(&self, unit: &Crate<'_>, script: &Path, more: &[String]) -> Result<PathBuf, String> {
        println!("cargo::rerun-if-changed={}", script.display());
        let mut flags = vec![
            "--crate-type=bin".into(),
            format!("-Clink-arg=-T{}", script.display()),
            "-Clink-arg=--orphan-handling=error".into(),
            "-Cstrip=debuginfo".into(),
        ];
        flags.extend_from_slice(more);
        self.compile(unit, &flags)
    }

    fn compile(&self, unit: &Crate<'_>, more: &[String]) -> Result<PathBuf, String> {
        if let Some(folder) = unit.root.parent() {
            println!("cargo::rerun-if-changed={}", folder.display());
        }
        let is_library = more.iter().any(|word| word.contains("rlib"));
        let file = if is_library {
            self.out.join(format!("lib{}.rlib", unit.name))
        } else {
            self.out.join(unit.name)
        };
        let mut command = Command::new(&self.rustc);
        command
            .args(["--edition=2024", "--target", TARGET, "--cap-lints=warn"])
            .args(["-Cpanic=abort", "-Ccodegen-units=1"])
            // The linker script puts code below 2 GiB.
            .args(["-Crelocation-model=static", "-Ccode-model=small"])
            .args(["--crate-name", unit.name])
            .args(more)
            .arg("-L")
            .arg(&self.out)
            .arg("-o")
            .arg(&file);
        for name in unit.uses {
            let library = self.out.join(format!("lib{name}.rlib"));
            command.arg(format!("--extern={name}={}", library.display()));
        }
        // Flags that cargo passes down are for the host's code.
        command
            .env_remove("RUSTFLAGS")
            .env_remove("CARGO_ENCODED_RUSTFLAGS");
        let output = command
            .arg(unit.root)
            .output()
            .map_err(|error| format!("{} cannot be started: {error}", self.rustc.display()))?;
        if output.status.success() {
            Ok(file)
        } else {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(format!("{} for {TARGET}: {said}", unit.name))
        }
    }
}

fn install() -> Result<(), String> {
    let output = Command::new("rustup")
        .args(["target", "add", TARGET])
        .output()
        .map_err(|error| format!("{INSTALL} is set, but rustup cannot be started: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    // The warning that is made of this has one line.
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim().replace('\n', "; ");
    Err(format!("rustup target add {TARGET}: {said}"))
}

/// Where the target's libraries are, or would be.
fn libraries(rustc: &Path) -> Result<PathBuf, String> {
    let output = Command::new(rustc)
        .args(["--print=target-libdir", "--target", TARGET])
        .output()
        .map_err(|error| format!("{} cannot be started: {error}", rustc.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.trim() {
        "" => Err(format!("this rustc does not know the target {TARGET}")),
        path => Ok(PathBuf::from(path)),
    }
}

fn has_core(libraries: &Path) -> bool {
    std::fs::read_dir(libraries).is_ok_and(|entries| {
        entries
            .flatten()
            .any(|entry| entry.file_name().to_string_lossy().starts_with("libcore-"))
    })
}
