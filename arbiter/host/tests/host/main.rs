//! The arbiter of a host: what it decides, against a naive model of what is right.

mod decisions;
mod fixture;
mod naive;
mod properties;
mod records;
mod words;
