//! A context's commands and state, without anything that counts.

mod bench;
mod counting;
mod registers;
mod session;
mod sets;
