//! Builds the firmware for the guest. Where its target cannot be had, the crate
//! is built without it, and says so.

#[path = "freestanding.rs"]
mod freestanding;

use std::env;
use std::path::{Path, PathBuf};

use freestanding::{Crate, Freestanding};

fn main() {
    println!("cargo::rustc-check-cfg=cfg(firmware_image)");
    println!("cargo::rerun-if-changed=build");
    // The lint run over the program itself needs no image of it.
    if env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("none") {
        return;
    }
    let compiler = match Freestanding::prepare() {
        Ok(compiler) => compiler,
        Err(why) => {
            println!("cargo::warning=built without firmware (`--firmware builtin`): {why}");
            return;
        }
    };
    match build(&compiler) {
        Ok(image) => {
            println!("cargo::rustc-cfg=firmware_image");
            println!("cargo::rustc-env=UMPIRE_FIRMWARE_IMAGE={}", image.display());
        }
        Err(why) => {
            for line in why.lines() {
                println!("cargo::error={line}");
            }
        }
    }
}

fn build(compiler: &Freestanding) -> Result<PathBuf, String> {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    compiler.library(&Crate {
        name: "arbiter",
        root: &here.join("../arbiter/src/lib.rs"),
        uses: &[],
    })?;
    compiler.library(&Crate {
        name: "firmware",
        root: &here.join("src/lib.rs"),
        uses: &["arbiter"],
    })?;
    let program = Crate {
        name: "umpire_firmware",
        root: &here.join("src/guest/main.rs"),
        uses: &["arbiter", "firmware"],
    };
    compiler.program(&program, Path::new(&here.join("build/firmware.ld")))
}
