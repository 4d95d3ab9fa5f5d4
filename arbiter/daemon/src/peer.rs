//! Who a client is, as the kernel tells it.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use umpire_socket::Peer;

/// A client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Client {
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    pub(crate) groups: Vec<u32>,
    /// Its control group in the unified hierarchy.
    pub(crate) cgroup: Option<String>,
}

impl Client {
    /// Who has connected.
    pub(crate) fn of(socket: &OwnedFd) -> io::Result<Self> {
        let Peer { pid, uid, groups } = Peer::of(socket)?;
        Ok(Client {
            pid,
            uid,
            groups,
            cgroup: cgroup(pid),
        })
    }

    /// Whether `thread` is one of its user's.
    pub(crate) fn owns(&self, thread: u32) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{thread}/status"));
        // Real, effective, saved, and of file accesses: proc_pid_status(5).
        status.ok().is_some_and(|status| {
            let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
            let own = |uid: &str| uid.parse() == Ok(self.uid);
            line.is_some_and(|uids| uids.split_whitespace().all(own))
        })
    }
}

/// cgroups(7): the line of the unified hierarchy is `0::PATH`.
fn cgroup(pid: u32) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    (pid != 0).then(|| line.to_owned())
}

/// The names of a file like passwd(5) or group(5), with their numbers.
pub(crate) fn names(file: &Path) -> HashMap<String, u32> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            Some((name.to_owned(), fields.nth(1)?.parse().ok()?))
        })
        .collect()
}
