//! Builds the guest programs. Without their target the crate is built without
//! programs, with a warning.

use std::path::{Path, PathBuf};

use freestanding::{Announced, Crate, Freestanding};

fn main() {
    let announced = Announced {
        cfg: "guest_images",
        variable: "UMPIRE_ARBITERS_GUEST",
        without: "guest programs in Rust, tests of them are skipped",
    };
    freestanding::build_script(&announced, build);
}

fn build(compiler: &Freestanding, package: &Path) -> Result<PathBuf, String> {
    compiler.library(&Crate {
        name: "arbiter",
        root: &package.join("../../arbiter/src/lib.rs"),
        uses: &[],
    })?;
    let program = Crate {
        name: "arbiters_guest",
        root: &package.join("src/arbiters/main.rs"),
        uses: &["arbiter"],
    };
    compiler.program(&program, &package.join("build/guest.ld"))
}
