//! `umpire arbiterd` and the commands that ask it, as processes.

mod bench;
mod c_library;
mod commands;
mod events;
pub(crate) mod fixture;
mod group_events;
mod groups;
mod host;
mod killed;
mod metrics;
mod names;
mod package;
pub(crate) mod python;
mod rude;
mod service;
pub(crate) mod vm;
