//! What safe Rust cannot say.

pub(crate) mod ram;
