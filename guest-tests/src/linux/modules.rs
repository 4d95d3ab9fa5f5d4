//! Builds the kernel modules of `guest-tests/linux` against the guest's own kernel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::l1::tool::capture;
use crate::l1::{HEADERS, L1Error};

/// The modules, without `.ko`; `pcr_client` needs `pcr_full`.
pub const MODULES: [&str; 5] = [
    "pcr_minimal",
    "pcr_enforcing",
    "pcr_full",
    "pcr_interacting",
    "pcr_client",
];

macro_rules! source {
    ($name:literal) => {
        ($name, include_str!(concat!("../../linux/pcr/", $name)))
    };
}

/// Some modules that are built together: names without `.ko`, names and texts of files.
pub(super) struct ModuleSet {
    names: &'static [&'static str],
    sources: &'static [(&'static str, &'static str)],
}

/// [`MODULES`].
pub(super) const ARBITERS: ModuleSet = ModuleSet {
    names: &MODULES,
    sources: &SOURCES,
};

/// A module that hangs its processor.
pub(super) const LOCKUP: ModuleSet = ModuleSet {
    names: &["lockup"],
    sources: &[
        ("Kbuild", include_str!("../../linux/lockup/Kbuild")),
        ("lockup.c", include_str!("../../linux/lockup/lockup.c")),
    ],
};

const SOURCES: [(&str, &str); 12] = [
    source!("Kbuild"),
    source!("pcr.h"),
    source!("pcr_access.h"),
    source!("pcr_arbiter.h"),
    source!("pcr_keep.h"),
    source!("pcr_place.h"),
    source!("pcr_minimal.c"),
    source!("pcr_enforcing.c"),
    source!("pcr_full.c"),
    source!("pcr_interacting.c"),
    source!("pcr_client.c"),
    (
        "umpire_pcr.h",
        include_str!("../../../arbiter/include/umpire_pcr.h"),
    ),
];
const ADVICE: &str = "GNU make and a C compiler are needed, gcc-12 as for Debian's kernel if there is one (Debian: make and gcc)";

/// Builds the modules of `set`; `kernel` is the cached set of the guest's kernel. Names and
/// contents.
pub(super) fn build(kernel: &Path, set: &ModuleSet) -> Result<Vec<(String, Vec<u8>)>, L1Error> {
    let folder = tempfile::Builder::new().prefix("modules-").tempdir();
    let folder = folder.map_err(L1Error::file("create a folder in", std::env::temp_dir()))?;
    for (name, text) in set.sources {
        let path = folder.path().join(name);
        fs::write(&path, text).map_err(L1Error::file("write", &path))?;
    }
    let mut make = Command::new("make");
    make.arg("-C")
        .arg(kernel.join(HEADERS))
        .arg(format!("M={}", folder.path().display()))
        // Type information for BPF takes a tool that is not part of the headers.
        .args([
            "modules",
            "KCFLAGS=-Werror",
            "CONFIG_DEBUG_INFO_BTF_MODULES=",
        ]);
    if !on_path("gcc-12") {
        make.arg("CC=gcc");
    }
    // Options of an outer make or cargo are not for this one.
    for variable in ["MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARCH", "CROSS_COMPILE"] {
        make.env_remove(variable);
    }
    capture(&mut make, "building the guest's modules", ADVICE)?;
    set.names
        .iter()
        .map(|name| Ok((format!("{name}.ko"), small(folder.path(), name)?)))
        .collect()
}

/// The module without its debug information, which is nine tenths of it.
fn small(folder: &Path, name: &str) -> Result<Vec<u8>, L1Error> {
    let path = folder.join(format!("{name}.ko"));
    let mut strip = Command::new("strip");
    strip.arg("--strip-debug").arg(&path);
    capture(&mut strip, "stripping a module", ADVICE)?;
    fs::read(&path).map_err(L1Error::file("read", &path))
}

fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let files = std::env::split_paths(&path).map(|folder: PathBuf| folder.join(program));
    files.into_iter().any(|file| file.is_file())
}
