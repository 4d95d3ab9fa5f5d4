//! Builds the guest programs. Where their target cannot be had, the crate is
//! built without them, and says so.

#[path = "../../../firmware/build/freestanding.rs"]
mod freestanding;

use std::env;
use std::path::{Path, PathBuf};

use freestanding::{Crate, Freestanding};

fn main() {
    println!("cargo::rustc-check-cfg=cfg(guest_images)");
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rerun-if-changed=../../firmware/build/freestanding.rs");
    // The lint run over the programs themselves needs no images of them.
    if env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("none") {
        return;
    }
    let compiler = match Freestanding::prepare() {
        Ok(compiler) => compiler,
        Err(why) => {
            println!(
                "cargo::warning=built without guest programs in Rust, tests of them are skipped: {why}"
            );
            return;
        }
    };
    match build(&compiler) {
        Ok(image) => {
            println!("cargo::rustc-cfg=guest_images");
            println!("cargo::rustc-env=UMPIRE_ARBITERS_GUEST={}", image.display());
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
        root: &here.join("../../arbiter/src/lib.rs"),
        uses: &[],
    })?;
    let program = Crate {
        name: "arbiters_guest",
        root: &here.join("src/arbiters/main.rs"),
        uses: &["arbiter"],
    };
    compiler.program(&program, Path::new(&here.join("build/guest.ld")))
}
