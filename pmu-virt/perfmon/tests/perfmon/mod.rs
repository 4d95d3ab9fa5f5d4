//! A context's commands and state, without anything that counts.

mod bench;
mod cases;
mod cells;
mod counting;
mod ibs;
mod model;
mod page;
mod play;
mod props;
mod reach;
mod registers;
mod replay;
mod session;
mod sets;
mod statements;
mod steps;
mod table;
