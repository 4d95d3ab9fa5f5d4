//! The files of a guest that runs one program for `umpire count`: which files of this machine it
//! sees, how it reads them, and what comes back of it.
//!
//! - [`FileServer`] answers the requests of the guest's kernel (FUSE, as virtiofs carries it), one
//!   at a time and at once. It is pure over a [`Tree`] of files and a [`Sink`] for what the guest
//!   says, and remembers what was read ([`Input`]) and looked for ([`Looked`]).
//! - [`View`] is the tree of files of this machine that are given: the system's, the working
//!   directory, and what is named.
//! - [`MemoryTree`] is a tree for tests, and for a guest that has no program yet.
//! - [`Kernel`] is the guest's kernel, checked by name for what it has to have, and [`initramfs`]
//!   puts its modules and the first program (`count-init`) together.
//! - [`unpack`] puts what the program changed into a folder of this machine.
//!
//! # What a guest can do to its host
//!
//! | a guest | what it finds |
//! |---|---|
//! | sends any bytes as a request | an error, or an answer of at most 1 MiB and 64 KiB |
//! | asks for files that were not given | ENOENT: names are joined to paths here, and a name with a slash, `.` or `..` is refused |
//! | goes through symbolic links | links are text for the guest; nobody here follows one |
//! | writes | nothing but its output is taken, by a [`Sink`] that may refuse it |
//! | sends an archive of its files | names that leave the folder, links that lead out of it, devices and rights of another user are left out or cut; no link is followed; bytes and names are bounded |
//! | asks for more and more files | it holds 4 million at most, and the server 128 open ones |
#![forbid(unsafe_code)]

mod host;
mod initramfs;
mod inputs;
mod kernel;
mod memory;
mod nodes;
mod server;
mod tree;
mod unpack;
mod view;
mod wire;

pub use initramfs::initramfs;
pub use inputs::{Input, Looked};
pub use kernel::{Kernel, KernelError};
pub use memory::MemoryTree;
pub use nodes::Out;
pub use rustix::io::Errno;
pub use server::{Errand, FileServer, Sink};
pub use tree::{Attributes, Kind, Listed, Owner, Refusal, Stamp, Tree};
pub use unpack::{UnpackError, Unpacked, unpack};
pub use view::{Given, View, ViewError, ViewFile};
