//! The reservation machine, against `docs/pcr.md`: tables, properties, a naive
//! model, and every state that a small bank can be in.

mod bed;
mod operations;
mod play;
mod replay;
mod verdicts;
