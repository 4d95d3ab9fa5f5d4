//! Builds the guest's first program. Without its target the crate is built without it, with a
//! warning.

use std::path::{Path, PathBuf};

use freestanding::{Announced, Crate, Freestanding};

fn main() {
    let announced = Announced {
        cfg: "count_init",
        variable: "UMPIRE_COUNT_INIT",
        without: "the guest's first program (`umpire count`)",
    };
    freestanding::build_script(&announced, build);
}

fn build(compiler: &Freestanding, package: &Path) -> Result<PathBuf, String> {
    compiler.library(&Crate {
        name: "count_init",
        root: &package.join("src/lib.rs"),
        uses: &[],
    })?;
    let program = Crate {
        name: "count_init_program",
        root: &package.join("src/guest/main.rs"),
        uses: &["count_init"],
    };
    compiler.host_program(&program, &package.join("build/init.ld"))
}
