//! The reservation ABI in numbers: one [`TABLE`], and the constants that are generated
//! from it. `docs/reference/pcr.md` says what they mean.
//!
//! `UPDATE_ABI=1 cargo test -p arbiter --test all abi::` rewrites `constants.rs`, the C header
//! `arbiter/include/umpire_pcr.h` and the tables of `docs/reference/pcr.md`.

mod constants;
mod table;

pub use constants::*;
pub use table::{Entry, Group, TABLE, Width};
