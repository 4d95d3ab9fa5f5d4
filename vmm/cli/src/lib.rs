//! The `umpire` program: its command line, its configuration files, its exit
//! statuses, and the commands that have no library of their own.
//!
//! - What can be typed: [`flags`]; flags over a file over defaults: [`config`].
//! - How it ends: [`exit`]; log lines: [`logging`].
//! - Commands: [`run`], [`doctor`], [`demo`], [`events`], [`arbitrate`], [`count`], [`host`], [`packaging`], and the
//!   ways into the libraries of the others, [`tools`] and [`mod@bench`].

#![forbid(unsafe_code)]

pub mod arbitrate;
pub mod bench;
pub mod config;
pub mod count;
pub mod demo;
pub mod doctor;
mod engine;
pub mod events;
pub mod exit;
mod first_tools;
pub mod flags;
pub mod host;
pub mod lease;
pub mod logging;
pub mod packaging;
pub mod run;
pub mod slurm;
pub mod tools;
