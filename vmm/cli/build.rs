//! Has the linker lay the code of an exit together, as `exit_path.ld` says, and names the engine
//! that `umpire count` counts with.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// Sources on which counts depend: the processor, its machine, what its guest begins with, and who
/// attributes; and the versions of what these use.
const ENGINE: [&str; 14] = [
    "Cargo.lock",
    "arbiter/src",
    "firmware/count-init/src",
    "firmware/freestanding/src",
    "pmu-virt/instructions/src",
    "pmu-virt/model/src",
    "pmu-virt/src",
    "vmm/attribution/src",
    "vmm/emu/fpu/src",
    "vmm/emu/src",
    "vmm/guest-files/src",
    "vmm/guest-view/src",
    "vmm/irqchip/src",
    "vmm/src",
];

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=exit_path.ld");
    println!("cargo::rerun-if-changed=build.rs");
    let here = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    println!("cargo::rustc-link-arg-bins=-Wl,-T,{here}/exit_path.ld");
    let root = Path::new(&here).join("../..");
    let mut engine = Sha256::new();
    for part in ENGINE {
        let path = root.join(part);
        println!("cargo::rerun-if-changed={}", path.display());
        let mut files = Vec::new();
        below(&path, &mut files)?;
        files.sort();
        for file in files {
            let content = fs::read(&file)?;
            let name = file.strip_prefix(&root).unwrap_or(&file);
            // With its length each part ends where it ends.
            for bytes in [name.as_os_str().as_encoded_bytes(), &content] {
                engine.update((bytes.len() as u64).to_le_bytes());
                engine.update(bytes);
            }
        }
    }
    let digest = engine.finalize();
    let digits: String = digest
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    println!("cargo::rustc-env=UMPIRE_ENGINE={digits}");
    Ok(())
}

/// The file, or all files of the folder and those in it.
fn below(path: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    if path.is_file() {
        found.push(path.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        below(&entry?.path(), found)?;
    }
    Ok(())
}
