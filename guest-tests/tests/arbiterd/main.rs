//! `umpire arbiterd` and the commands that ask it, as processes.

mod commands;
mod fixture;
mod host;
mod killed;
mod python;
mod rude;
mod service;
