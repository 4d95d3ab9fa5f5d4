//! Debian packages by a private apt: the machine's own mirror, keys and proxies, and folders of its
//! own. Nothing is installed, nothing of the system is changed, and no rights are needed.

#![forbid(unsafe_code)]

mod apt;
mod cache;
mod error;
mod sources;
mod tool;

pub use apt::{Apt, Package, unpack};
pub use cache::user_cache;
pub use error::PackagesError;
pub use tool::{Tools, last_lines};
