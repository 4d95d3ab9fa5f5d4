//! The L1 machine: a Linux with a faithful KVM (`kvm-amd` on emulated SVM), for one command at a time.
//!
//! QEMU 10 emulates an AMD processor with SVM; a stock Debian Linux 6.12 runs on it, loads `kvm-amd`
//! and runs the command from an initramfs. Everything comes from Debian packages, unpacked into a
//! [`Cache`]; nothing is installed. `cargo l1 -- COMMAND` is the command line; tests use [`Machine`]:
//!
//! ```no_run
//! use guest_tests::l1::{End, Machine, Run};
//!
//! let output = Machine::new().output(&Run::new("ls").arg("/dev/kvm"))?;
//! assert_eq!(output.outcome.end, End::Exited(0));
//! # Ok::<(), guest_tests::l1::L1Error>(())
//! ```

mod cache;
pub mod cli;
pub(crate) mod cpio;
pub(crate) mod elf;
mod error;
mod headers;
mod initramfs;
pub(crate) mod libraries;
mod machine;
mod packages;
mod qemu;
mod run;
mod session;
#[allow(unsafe_code)]
mod sys;
pub(crate) mod tool;

pub use cache::{Cache, Cached};
pub use debian_packages::Package;
pub use error::L1Error;
pub(crate) use headers::BUILD as HEADERS;
pub(crate) use initramfs::{add_merged_usr, guest_name, stripped};
pub use machine::{Machine, Output};
pub(crate) use packages::GUEST_MODULES;
pub use packages::Set;
pub(crate) use qemu::command as qemu_command;
pub(crate) use run::GUEST_OUT;
pub use run::{Run, inside};
pub use session::{End, Outcome};
pub(crate) use sys::spawn_bound;
