//! The integration tests of this crate: one program, because each one more is linked with all that
//! it tests once more. A file or folder beside this one is a module here.

mod abi;
mod admin;
mod grant;
mod guest;
mod harness;
mod mailbox;
mod reservations;
mod samplers;
mod schemes;
mod schemes_prop;
