//! Names against tables made up for the purpose: everything but libpfm itself,
//! which `guest-tests` covers where it is installed.

mod identifying;
mod listing;
mod names;
mod tables;
