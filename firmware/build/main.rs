//! Builds the firmware for the guest. Without its target the crate is built
//! without firmware, with a warning.

use std::path::{Path, PathBuf};

use freestanding::{Announced, Crate, Freestanding};

fn main() {
    let announced = Announced {
        cfg: "firmware_image",
        variable: "UMPIRE_FIRMWARE_IMAGE",
        without: "firmware (`--firmware builtin`)",
    };
    freestanding::build_script(&announced, build);
}

fn build(compiler: &Freestanding, package: &Path) -> Result<PathBuf, String> {
    compiler.library(&Crate {
        name: "arbiter",
        root: &package.join("../arbiter/src/lib.rs"),
        uses: &[],
    })?;
    compiler.library(&Crate {
        name: "firmware",
        root: &package.join("src/lib.rs"),
        uses: &["arbiter"],
    })?;
    let program = Crate {
        name: "umpire_firmware",
        root: &package.join("src/guest/main.rs"),
        uses: &["arbiter", "firmware"],
    };
    compiler.program(&program, &package.join("build/firmware.ld"))
}
