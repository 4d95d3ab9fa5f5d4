//! `umpire arbiterd` and the commands that ask it, as processes.

mod commands;
mod events;
mod fixture;
mod host;
mod killed;
mod metrics;
mod python;
mod rude;
mod service;
