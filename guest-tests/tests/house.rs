//! The structure of the code: which crate may use which, no cycle of modules, no
//! `unsafe` but in `sys`. docs/internals/architecture.md states it, and this holds it.

mod crates;
mod determinism;
mod invariants;
mod modules;
mod names;
mod parsed;
mod programs;
mod sources;
mod walls;

use std::path::{Path, PathBuf};

/// The repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}
