//! What can be wrong with a guest's files or memory. Each message names the next step.

use std::io;
use std::path::PathBuf;

use super::memory::MemoryError;

/// A reason why a guest could not be put into memory.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The file could not be opened or read.
    #[error("cannot read {role} {}: {source}", path.display())]
    Unreadable {
        /// What the file was to be: "kernel", "initrd" or "module".
        role: &'static str,
        /// The file as the user named it.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The path names a directory, a pipe or a device.
    #[error("cannot read {role} {}: it is not a regular file; give the file itself", path.display())]
    NotAFile {
        /// What the file was to be.
        role: &'static str,
        /// The file as the user named it.
        path: PathBuf,
    },
    /// A header or a segment lies beyond the end of the file.
    #[error(
        "{role} {} is truncated: {what} ends at byte {needed}, the file has {len} bytes; \
         copy or build it again", path.display()
    )]
    Truncated {
        /// What the file was to be.
        role: &'static str,
        /// The file as the user named it.
        path: PathBuf,
        /// The part that is cut off.
        what: &'static str,
        /// Where that part ends, in bytes from the start of the file.
        needed: u64,
        /// The length of the file in bytes.
        len: u64,
    },
    /// The file is none of the supported kernel kinds.
    #[error(
        "{} is not a kernel that can be booted: it is {seen}; \
         give a bzImage, an x86 ELF vmlinux or a Multiboot v1 kernel", path.display()
    )]
    NotAKernel {
        /// The file as the user named it.
        path: PathBuf,
        /// What the content looks like.
        seen: String,
    },
    /// The file is of a known kind, but its headers contradict themselves.
    #[error("kernel {} is malformed: {what}; build or copy it again", path.display())]
    Malformed {
        /// The file as the user named it.
        path: PathBuf,
        /// The contradiction.
        what: String,
    },
    /// The kernel is well-formed, but asks for what this VMM does not have.
    #[error("kernel {} cannot be booted: {what}", path.display())]
    Unsupported {
        /// The file as the user named it.
        path: PathBuf,
        /// The missing feature and what to do instead.
        what: String,
    },
    /// The kernel does not fit below the memory hole.
    #[error(
        "kernel {} is too large for the guest's memory: it needs {needs_mib} MiB, \
         the guest has {has_mib} MiB below the hole at 3 GiB: give --memory {needs_mib} or more",
        path.display()
    )]
    KernelTooLarge {
        /// The file as the user named it.
        path: PathBuf,
        /// Memory that would be enough, in MiB.
        needs_mib: u64,
        /// Memory below the hole, in MiB.
        has_mib: u64,
    },
    /// An initrd or a module does not fit beside the kernel.
    #[error(
        "{role} {} is too large: it has {len} bytes, and only {room} bytes are free beside the \
         kernel; {advice}", path.display()
    )]
    NoRoom {
        /// "initrd" or "module".
        role: &'static str,
        /// The file as the user named it.
        path: PathBuf,
        /// Its length in bytes.
        len: u64,
        /// Bytes free in the place where it would go.
        room: u64,
        /// What to do about it.
        advice: String,
    },
    /// An initrd was given with a kernel that takes modules.
    #[error(
        "initrd {} cannot be used: a Multiboot kernel takes modules; give it with --module",
        path.display()
    )]
    InitrdWithMultiboot {
        /// The file as the user named it.
        path: PathBuf,
    },
    /// Modules were given with a kernel that has no protocol for them.
    #[error(
        "module {} cannot be used: {} is not a Multiboot kernel; give a file for a Linux kernel \
         with --initrd", module.display(), kernel.display()
    )]
    ModuleWithoutMultiboot {
        /// The first module.
        module: PathBuf,
        kernel: PathBuf,
    },
    /// More modules than the module table holds.
    #[error("{count} modules were given, {limit} is the most: leave some out")]
    TooManyModules {
        /// How many were given.
        count: usize,
        /// How many there may be.
        limit: usize,
    },
    /// The strings of all modules exceed their area.
    #[error("the modules' command lines are too long: they share {limit} bytes; shorten them")]
    ModuleStringsTooLong {
        /// The size of the area in bytes, terminators included.
        limit: usize,
    },
    /// The command line exceeds what the kernel accepts.
    #[error("the command line is too long: {len} bytes, this kernel takes {limit}; shorten it")]
    CmdlineTooLong {
        /// Its length in bytes, without the terminator.
        len: usize,
        /// The longest possible, without the terminator.
        limit: usize,
    },
    /// A NUL byte would end the string early, unseen.
    #[error("the command line of {owner} contains a NUL byte: remove it")]
    CmdlineNul {
        /// "the kernel" or a module's file.
        owner: String,
    },
    /// The payload of a bzImage could not be unpacked on the host.
    #[error("kernel {} cannot be unpacked on the host: {what}", path.display())]
    Unpack {
        /// The file as the user named it.
        path: PathBuf,
        /// What went wrong and what to do next.
        what: String,
    },
    /// Firmware that is malformed, or that wants to be elsewhere.
    #[error(
        "--firmware {}: {what}; see docs/guide/firmware.md for what an image has to be", path.display()
    )]
    Firmware {
        /// The file as the user named it.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// More counters for the firmware than its configuration holds.
    #[error("--firmware-counter was given {count} times, {limit} is the most: leave some out")]
    TooManyFirmwareCounters {
        /// How many were given.
        count: usize,
        /// How many there may be.
        limit: usize,
    },
    /// Zero vCPUs, or more than the interrupt tables describe.
    #[error("{cpus} vCPUs cannot be described to the guest: give 1 to {limit}")]
    CpuCount {
        /// How many were asked for.
        cpus: u32,
        /// The most there may be.
        limit: u32,
    },
    /// The guest's memory has another shape than [`super::memory::create`] makes.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}
