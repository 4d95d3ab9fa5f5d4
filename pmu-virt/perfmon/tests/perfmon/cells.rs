//! Which errors each command has: those that the specification lists for it,
//! and those that Umpire adds. And which of them only a server can show: the
//! test of `vmm` includes this file and has to play each of these.

use perfmon_abi::wire::Errno;
use perfmon_abi::wire::Errno::{E2BIG, EBADF, EBUSY, EFAULT, EINVAL, ENOMEM, ENOSYS, EPERM, ESRCH};

/// A command.
pub(crate) struct Command {
    pub(crate) name: &'static str,
    /// Where the specification has it.
    pub(crate) section: &'static str,
    /// It is for a context, and looks at its state.
    pub(crate) of_context: bool,
    /// Errors that the specification lists.
    pub(crate) listed: &'static [Errno],
    /// Errors that Umpire, or another implementation, gives besides.
    pub(crate) added: &'static [Errno],
}

const fn command(
    name: &'static str,
    section: &'static str,
    of_context: bool,
    listed: &'static [Errno],
    added: &'static [Errno],
) -> Command {
    Command {
        name,
        section,
        of_context,
        listed,
        added,
    }
}

pub(crate) const COMMANDS: &[Command] = &[
    command(
        "PFM_CREATE_CONTEXT",
        "3.1.1",
        false,
        &[ENOSYS, EINVAL, ENOMEM, E2BIG, EFAULT, EPERM],
        &[],
    ),
    command(
        "PFM_WRITE_PMCS",
        "3.1.2",
        true,
        &[ENOSYS, EINVAL, EBADF, EFAULT],
        &[EBUSY],
    ),
    command(
        "PFM_WRITE_PMDS",
        "3.1.3",
        true,
        &[ENOSYS, EINVAL, EBADF, EFAULT],
        &[],
    ),
    command(
        "PFM_READ_PMDS",
        "3.1.4",
        true,
        &[ENOSYS, EBADF, EINVAL, EFAULT, EBUSY],
        &[],
    ),
    command(
        "PFM_START",
        "3.1.5",
        true,
        &[ENOSYS, EBADF, EBUSY, EFAULT],
        &[EINVAL],
    ),
    command("PFM_STOP", "3.1.6", true, &[ENOSYS, EBADF, EBUSY], &[]),
    command(
        "PFM_LOAD_CONTEXT",
        "3.1.7",
        true,
        &[ENOSYS, EBADF, EPERM, EINVAL, EFAULT, EBUSY],
        &[ESRCH],
    ),
    command(
        "PFM_UNLOAD_CONTEXT",
        "3.1.8",
        true,
        &[ENOSYS, EBADF, EBUSY],
        &[],
    ),
    command(
        "PFM_RESTART",
        "3.1.9",
        true,
        &[ENOSYS, EBADF, EBUSY],
        &[EINVAL],
    ),
    command(
        "PFM_CREATE_EVTSETS",
        "3.1.10",
        true,
        &[ENOSYS, EINVAL, EFAULT],
        &[EBADF, EBUSY, ENOMEM],
    ),
    command(
        "PFM_DELETE_EVTSETS",
        "3.1.11",
        true,
        &[ENOSYS, EINVAL, EFAULT],
        &[EBADF, EBUSY],
    ),
    command(
        "PFM_GETINFO_EVTSETS",
        "3.1.12",
        true,
        &[ENOSYS, EINVAL, EFAULT],
        &[EBADF],
    ),
    command(
        "PFM_GETINFO_PMCS",
        "3.1.13",
        false,
        &[ENOSYS, EINVAL, EFAULT],
        &[],
    ),
    command(
        "PFM_GETINFO_PMDS",
        "3.1.14",
        false,
        &[ENOSYS, EINVAL, EFAULT],
        &[],
    ),
    command(
        "PFM_SET_CONFIG",
        "3.1.16",
        false,
        &[ENOSYS, EFAULT, EPERM],
        &[EINVAL],
    ),
    command("PFM_GET_CONFIG", "3.1.17", false, &[ENOSYS, EFAULT], &[]),
];

/// What only a server, or the library before it, can show. `None`: success.
pub(crate) struct ByServer {
    pub(crate) command: &'static str,
    /// "any", "unloaded" or "attached".
    pub(crate) states: &'static str,
    pub(crate) outcome: Option<Errno>,
    pub(crate) when: &'static str,
}

const fn by_server(
    command: &'static str,
    states: &'static str,
    outcome: Option<Errno>,
    when: &'static str,
) -> ByServer {
    ByServer {
        command,
        states,
        outcome,
        when,
    }
}

/// For every command: nobody serves the interface.
pub(crate) const NO_INTERFACE: &str = "the library finds no control socket, or nobody serves it";
/// For every command of a context, and what a zombie comes to: no descriptor
/// leads to it any more.
pub(crate) const NO_CONTEXT: &str =
    "the descriptor or handle is not a context's, or that one is destroyed or a zombie";

/// Besides [`NO_INTERFACE`] and [`NO_CONTEXT`].
pub(crate) const BY_SERVER: &[ByServer] = &[
    by_server(
        "PFM_CREATE_CONTEXT",
        "any",
        None,
        "the reply carries the descriptors",
    ),
    by_server(
        "PFM_CREATE_CONTEXT",
        "any",
        Some(EINVAL),
        "no sampling format has the UUID",
    ),
    by_server(
        "PFM_CREATE_CONTEXT",
        "any",
        Some(EINVAL),
        "the sampling format refuses its argument",
    ),
    by_server(
        "PFM_CREATE_CONTEXT",
        "any",
        Some(ENOMEM),
        "the sampling buffers would exceed `cf_smpl_buf_size_max`",
    ),
    by_server(
        "PFM_CREATE_CONTEXT",
        "any",
        Some(ENOMEM),
        "the VM has as many contexts as it may",
    ),
    by_server(
        "PFM_CREATE_CONTEXT",
        "any",
        Some(EPERM),
        "the caller is not in `cf_thread_gid`, or for a core in `cf_sys_gid`",
    ),
    by_server(
        "PFM_LOAD_CONTEXT",
        "unloaded",
        Some(ESRCH),
        "there is no such vCPU or core",
    ),
    by_server(
        "PFM_LOAD_CONTEXT",
        "unloaded",
        Some(EBUSY),
        "the vCPU or core has as many contexts as it may, or has ended",
    ),
    by_server(
        "PFM_LOAD_CONTEXT",
        "unloaded",
        Some(EBUSY),
        "no counters are left for one of the event sets",
    ),
    by_server(
        "PFM_LOAD_CONTEXT",
        "unloaded",
        Some(EINVAL),
        "no source of the host counts one of the events",
    ),
    by_server(
        "PFM_LOAD_CONTEXT",
        "unloaded",
        Some(EBUSY),
        "the guest, or another context, uses a sampler of IBS that one of the event sets uses",
    ),
    by_server(
        "PFM_LOAD_CONTEXT",
        "unloaded",
        Some(EINVAL),
        "an event set of a core's context uses a sampler of IBS",
    ),
    by_server(
        "PFM_WRITE_PMCS",
        "attached",
        Some(EINVAL),
        "no source of the host counts the event",
    ),
    by_server(
        "PFM_WRITE_PMCS",
        "attached",
        Some(EBUSY),
        "the guest, or another context, uses the sampler of IBS",
    ),
    by_server(
        "PFM_SET_CONFIG",
        "any",
        None,
        "the caller is root or runs the VMM",
    ),
    by_server(
        "PFM_SET_CONFIG",
        "any",
        Some(EPERM),
        "the caller is somebody else",
    ),
    by_server(
        "PFM_SET_CONFIG",
        "any",
        Some(EINVAL),
        "a limit is below a page, or `cf_flags` is not 0",
    ),
    by_server("PFM_GET_CONFIG", "any", None, "anybody asks"),
];

/// Errors of these that Umpire has no occasion to give, and why.
pub(crate) const NEVER: &[(&str, Errno, &str)] = &[
    (
        "PFM_READ_PMDS",
        EBUSY,
        "the thread that runs the vCPU reads them between two entries into the guest; the caller waits for it",
    ),
    (
        "PFM_RESTART",
        EINVAL,
        "other implementations give it where monitoring is masked and no notification is outstanding; without a sampling format only a notification or PFM_MSG_THROTTLED masks, and with one it is the format that decides",
    ),
    (
        "PFM_LOAD_CONTEXT",
        EPERM,
        "permission is asked for at creation; who has the descriptor may attach it to any vCPU or core",
    ),
];
