//! KERNEL: what the guest's kernel is, found in its memory alone. Argument and answer are
//! documents (JSON).

use serde::{Deserialize, Serialize};

/// The number of the command. It has one argument (`nargs` 1): a [`KernelRequest`]. It
/// answers with a [`KernelInfo`], which may take a second: the guest's memory is searched.
/// ENOENT: there is no kernel that can be known.
pub const KERNEL: u16 = 0x117;

/// Which kernel is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelRequest {
    /// CR3 of a vCPU that runs it, as of a sample at ring 0. What is found has to be mapped
    /// by it, so that no program of the guest passes for its kernel.
    pub cr3: u64,
}

/// A Linux kernel in a guest's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelInfo {
    /// As `uname -r` prints it.
    pub release: String,
    /// Its symbols and those of its modules, where they are now, as the guest's own
    /// `/proc/kallsyms` has them.
    pub kallsyms: String,
}
