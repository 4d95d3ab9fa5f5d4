//! The first files of a guest: its first program, and the kernel's modules.

use std::io::{self, Write};

use cpio::newc::{self, ModeFileType};

use crate::kernel::Kernel;

/// The initramfs of a guest, a cpio archive in the format `newc`.
///
/// # Errors
/// This program was built without the guest's first program: the Rust target
/// `x86_64-unknown-none` was missing.
pub fn initramfs(kernel: &Kernel) -> io::Result<Vec<u8>> {
    let Some(init) = count_init::image() else {
        let why = "this umpire was built without the guest's first program, since the Rust target \
                   x86_64-unknown-none was not installed: install it and build again";
        return Err(io::Error::new(io::ErrorKind::Unsupported, why));
    };
    let mut archive = Vec::new();
    for folder in ["dev", "given", "modules", "new", "rw"] {
        entry(&mut archive, folder, ModeFileType::Directory, 0o755, b"")?;
    }
    // The kernel opens it for its first program.
    let console = newc::Builder::new("dev/console").mode(0o600).nlink(1);
    let console = console.rdev_major(5).rdev_minor(1);
    let console = console.set_mode_file_type(ModeFileType::Char);
    console.write(&mut archive, 0).finish()?;
    entry(&mut archive, "init", ModeFileType::Regular, 0o755, init)?;
    for (number, module) in kernel.modules().iter().enumerate() {
        let name = format!("modules/{number:02}");
        entry(&mut archive, &name, ModeFileType::Regular, 0o644, module)?;
    }
    newc::trailer(&mut archive)?;
    Ok(archive)
}

fn entry(
    archive: &mut Vec<u8>,
    name: &str,
    kind: ModeFileType,
    mode: u32,
    content: &[u8],
) -> io::Result<()> {
    let len = u32::try_from(content.len()).map_err(io::Error::other)?;
    let builder = newc::Builder::new(name).mode(mode).nlink(1);
    let mut writer = builder.set_mode_file_type(kind).write(&mut *archive, len);
    writer.write_all(content)?;
    writer.finish().map(drop)
}
