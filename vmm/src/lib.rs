//! The Umpire VMM.

pub mod devices;
