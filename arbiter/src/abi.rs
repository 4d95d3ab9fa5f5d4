//! The reservation ABI in numbers: one [`TABLE`], and what is generated from
//! it. `docs/pcr.md` says what they mean.
//!
//! `UPDATE_ABI=1 cargo test -p arbiter --test abi` writes `constants.rs`, the C
//! header `arbiter/include/umpire_pcr.h` and the tables of `docs/pcr.md` anew.

mod constants;
mod table;

pub use constants::*;
pub use table::{Entry, Group, TABLE, Width};
