//! The structure of the code: which crate may use which, no cycle of modules, no
//! `unsafe` but in `sys`. docs/internals/architecture.md states it, and this holds it.

#[path = "house/crates.rs"]
mod crates;
#[path = "house/invariants.rs"]
mod invariants;
#[path = "house/modules.rs"]
mod modules;
#[path = "house/names.rs"]
mod names;
#[path = "house/parsed.rs"]
mod parsed;
#[path = "house/sources.rs"]
mod sources;
#[path = "house/still_open.rs"]
mod still_open;
#[path = "house/walls.rs"]
mod walls;

use std::path::{Path, PathBuf};

/// The repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}
