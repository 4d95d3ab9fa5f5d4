//! Control groups (version 2) that leases are for: found by a path once, known by the kernel's
//! number from then on, and watched until nothing runs in them. The number is that of the
//! group's inode, which the kernel gives to no other one before the next boot; a path may be
//! another's by now.

mod find;
mod watch;

pub(crate) use find::{Job, Named, NoGroup, Tree};
pub(crate) use watch::{Ended, Groups};
