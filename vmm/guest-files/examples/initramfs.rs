//! Takes a kernel out of a Debian package and writes what a guest starts with:
//! `initramfs PACKAGE KERNEL INITRAMFS`.

use std::error::Error;
use std::path::Path;
use std::{env, fs};

use guest_files::{Kernel, initramfs};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = env::args_os().skip(1).collect();
    let [package, image, archive] = &arguments[..] else {
        return Err("initramfs PACKAGE KERNEL INITRAMFS".into());
    };
    let kernel = Kernel::of_package(Path::new(package))?;
    fs::write(image, kernel.image())?;
    fs::write(archive, initramfs(&kernel)?)?;
    Ok(())
}
