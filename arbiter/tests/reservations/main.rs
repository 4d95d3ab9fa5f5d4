//! The reservation machine, against `docs/pcr.md`: tables, properties, a naive
//! model, and every state that a small bank can be in.

mod bed;
mod guard;
mod names;
mod operations;
mod play;
mod policy;
mod registers;
mod replay;
mod verdicts;
mod words;
