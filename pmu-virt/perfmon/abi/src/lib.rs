//! The binary interface of perfmon2 as Umpire serves it.
//!
//! The structures and names are those of the perfmon2 interface specification
//! (HPL-2004-200 (R.1), version 0.6), laid out as a C compiler for x86-64 lays
//! them out. [`records`] has them all in one table, from which their bytes, the
//! C header and its test derive. Server, tools and the C library share this
//! crate, so that none has an idea of its own of a field's place.
#![deny(unsafe_code)]

#[macro_use]
mod table;

pub mod compact;
pub mod consts;
mod field;
pub mod parse;
mod place;
pub mod records;
pub mod wire;

pub use field::{BadLength, Field, FieldInfo, Record, Timespec};
pub use records::{
    CompactArg, CompactBlock, CompactHeader, CompactLast, Config, CtxArg, DefaultArg, DefaultEntry,
    DefaultHeader, DoubleHeader, FmtInfo, LoadArg, Message, PmcArg, PmcInfo, PmdArg, PmdInfo,
    SetDesc, SetInfo, StartArg,
};

/// Length of a vector of bits, one for each PMC, in words of 64 bits.
pub const PMC_WORDS: usize = (consts::PFM_MAX_PMCS as usize).div_ceil(64);
/// Length of a vector of bits, one for each PMD, in words of 64 bits.
pub const PMD_WORDS: usize = (consts::PFM_MAX_PMDS as usize).div_ceil(64);
