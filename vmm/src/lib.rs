//! The Umpire VMM.

pub mod boot;
