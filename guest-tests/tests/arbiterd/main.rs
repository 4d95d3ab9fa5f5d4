//! `umpire arbiterd` and the commands that ask it, as processes.

mod commands;
mod fixture;
mod killed;
mod python;
mod rude;
mod service;
mod vm;
