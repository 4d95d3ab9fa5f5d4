//! Builds the programs, as one file. Without their target the crate is built without them, with a
//! warning.

use std::path::{Path, PathBuf};

use freestanding::{Announced, Crate, Freestanding};

fn main() {
    let announced = Announced {
        cfg: "bench_programs",
        variable: "UMPIRE_BENCH_PROGRAMS",
        without: "programs to measure the emulator with (`umpire bench emu`)",
    };
    freestanding::build_script(&announced, build);
}

fn build(compiler: &Freestanding, package: &Path) -> Result<PathBuf, String> {
    let program = Crate {
        name: "bench_programs",
        root: &package.join("src/programs/main.rs"),
        uses: &[],
    };
    compiler.host_program(&program, &package.join("build/programs.ld"))
}
