//! Who a client is, as the kernel tells it.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
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
    pub(crate) fn of(socket: &impl AsFd) -> io::Result<Self> {
        let Peer { pid, uid, groups } = Peer::of(socket)?;
        let cgroup = cgroup(pid);
        // If the process is gone, its number may have been another's when that was read.
        let gone = match process(socket) {
            Ok(process) => process.is_some_and(|process| has_ended(&process)),
            Err(_) => true,
        };
        Ok(Client {
            pid,
            uid,
            groups,
            cgroup: cgroup.filter(|_| !gone),
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

/// The process that has connected. `None`: the kernel names it by its number only (before
/// Linux 6.5).
///
/// # Errors
/// It has ended.
pub(crate) fn process(socket: &impl AsFd) -> io::Result<Option<OwnedFd>> {
    let unknown = rustix::io::Errno::NOPROTOOPT.raw_os_error();
    match Peer::pidfd(socket) {
        Err(error) if error.raw_os_error() == Some(unknown) => Ok(None),
        process => process.map(Some),
    }
}

/// Whether the process of a descriptor has ended.
pub(crate) fn has_ended(process: &OwnedFd) -> bool {
    let mut ended = [PollFd::new(process, PollFlags::IN)];
    poll(&mut ended, Some(&Timespec::default())) != Ok(0)
}

/// What tells a thread from a later one of the same number: when it was started, in ticks
/// since the boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Started(pub(crate) u64);

/// A thread of the process that is `client`, of its user. `None`: it is not.
pub(crate) fn thread(thread: u32, client: &Client) -> Option<Started> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    let own = client.pid != 0 && process.trim().parse() == Ok(client.pid) && client.owns(thread);
    started(thread).filter(|_| own)
}

/// When a thread was started, whoever's it is. `None`: it has ended.
pub(crate) fn started(thread: u32) -> Option<Started> {
    let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).ok()?;
    // proc_pid_stat(5): the name, which may hold anything, is field 2; this is field 22.
    let started = stat.rsplit(')').next()?.split_whitespace().nth(19)?;
    started.parse().ok().map(Started)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_a_process() {
        let me = Client {
            pid: std::process::id(),
            uid: rustix::process::geteuid().as_raw(),
            ..Client::default()
        };
        let own = u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).expect("an id");
        assert!(thread(own, &me).is_some() && thread(me.pid, &me).is_some());
        assert_eq!(thread(own, &me), thread(own, &me));
        assert_eq!(thread(own, &me), started(own));
        assert_eq!(started(u32::MAX), None);
        let other = Client {
            pid: 1,
            ..me.clone()
        };
        assert_eq!(thread(own, &other), None);
        let stranger = Client {
            uid: me.uid + 1,
            ..me
        };
        assert_eq!(thread(own, &stranger), None);
    }
}
