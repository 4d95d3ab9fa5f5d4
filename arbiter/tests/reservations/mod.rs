//! The reservation machine, against `docs/reference/pcr.md`: tables, properties, a naive
//! model, and every state that a small bank can be in.

mod fixture;
mod format;
mod guard;
mod mistakes;
mod names;
mod operations;
mod play;
mod policy;
mod properties;
mod registers;
mod replay;
mod secrets;
mod states;
mod verdicts;
