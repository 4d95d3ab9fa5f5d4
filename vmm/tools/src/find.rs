//! Which VM a tool means: a socket, a name or process id, or the only one that runs.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use perfmon_abi::wire::Errno;
use rustix::process::{Uid, geteuid};
pub use umpire_perfmon::socket_folder;
use umpire_perfmon::{Client, ENVIRONMENT, socket_folders};

use crate::error::ToolError;

/// The VM that is meant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct VmChoice {
    /// The VM, by the name of its umpire run --name or by its process id [default: the one
    /// that UMPIRE_PERFMON names, or the only one that runs]
    #[arg(long, value_name = "NAME|PID", global = true)]
    pub vm: Option<String>,
    /// The VM, by its control socket
    #[arg(long, value_name = "SOCKET", global = true, conflicts_with = "vm")]
    pub control: Option<PathBuf>,
}

impl VmChoice {
    /// The VM's socket: what was chosen, else what the environment names, else that of the
    /// only VM that runs.
    ///
    /// # Errors
    /// There is none, or several are meant.
    pub fn socket(&self) -> Result<PathBuf, ToolError> {
        if let Some(path) = &self.control {
            return Ok(path.clone());
        }
        if let Some(vm) = &self.vm {
            let sockets = known_sockets();
            let named = sockets.iter().filter(|socket| name_of(socket) == vm);
            let named = running(named.cloned().collect());
            if !named.is_empty() {
                return choose(vm, &named);
            }
            return choose(vm, &running(sockets));
        }
        if let Some(path) = from_environment() {
            return Ok(path);
        }
        only(&running(known_sockets()))
    }
}

/// Connects to a control socket.
///
/// # Errors
/// Nobody answers there.
pub(crate) fn connect(path: &Path) -> Result<Client, ToolError> {
    Client::connect(path).map_err(|refusal| ToolError::Connect {
        path: path.to_owned(),
        reason: refusal.reason.into_owned(),
        errno: refusal.errno,
    })
}

/// A VM that serves its socket.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Running {
    socket: PathBuf,
    /// `None`: it does not answer in time, and yet is there.
    pid: Option<u32>,
}

impl Running {
    fn name(&self) -> &str {
        name_of(&self.socket)
    }
}

/// The name of the VM with this socket.
pub(crate) fn name_of(socket: &Path) -> &str {
    socket.file_stem().and_then(OsStr::to_str).unwrap_or("?")
}

fn from_environment() -> Option<PathBuf> {
    let named = std::env::var_os(ENVIRONMENT).filter(|path| !path.is_empty());
    named.map(PathBuf::from)
}

/// The socket that the environment names, and those in the folders of sockets.
pub(crate) fn known_sockets() -> Vec<PathBuf> {
    let mut sockets: Vec<PathBuf> = from_environment().into_iter().collect();
    for folder in socket_folders() {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let paths = entries.map(|entry| entry.path());
        let mut found: Vec<PathBuf> = paths
            .filter(|path| path.extension().is_some_and(|it| it == "sock"))
            .collect();
        found.sort();
        found.retain(|path| !sockets.contains(path));
        sockets.extend(found);
    }
    sockets
}

/// The sockets of the VMs that run, of this user and of root.
pub(crate) fn running_sockets() -> Vec<PathBuf> {
    let running = running(known_sockets());
    running.into_iter().map(|one| one.socket).collect()
}

/// How long a VM may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(1);

/// Those behind which there is a VM. What a VM that ended badly has left is passed over, and
/// so is a VM of another user than this one or root: nobody is to be led to the wrong one.
fn running(sockets: Vec<PathBuf>) -> Vec<Running> {
    let answer = |socket: PathBuf| {
        let pid = match Client::with_timeout(&socket, PATIENCE) {
            Ok(client) => {
                is_trusted(client.server().ok()?.uid).then_some(())?;
                Some(client.hello().ok()?.pid)
            }
            // Nobody is there, this user may not, or it is something else.
            Err(refusal)
                if matches!(refusal.errno, Errno::ENOSYS | Errno::EPERM | Errno::EPROTO) =>
            {
                return None;
            }
            Err(_) => {
                let owner = std::fs::metadata(&socket).ok()?.uid();
                is_trusted(Uid::from_raw(owner)).then_some(())?;
                None
            }
        };
        Some(Running { socket, pid })
    };
    sockets.into_iter().filter_map(answer).collect()
}

/// Whether a VM of this user is looked at by a tool that was not led to it.
pub(crate) fn is_trusted(owner: Uid) -> bool {
    [Uid::ROOT, geteuid()].contains(&owner)
}

fn choose(vm: &str, running: &[Running]) -> Result<PathBuf, ToolError> {
    let number = vm.parse().ok();
    let is_it = |one: &&Running| one.name() == vm || number.is_some() && one.pid == number;
    let found: Vec<&Running> = running.iter().filter(is_it).collect();
    match found[..] {
        [one] => Ok(one.socket.clone()),
        [] => Err(ToolError::NoSuchVm {
            vm: vm.to_owned(),
            running: listed(running),
        }),
        _ => Err(ToolError::SeveralVms {
            sockets: found.iter().map(|one| one.socket.clone()).collect(),
        }),
    }
}

fn only(running: &[Running]) -> Result<PathBuf, ToolError> {
    match running {
        [one] => Ok(one.socket.clone()),
        [] => Err(ToolError::NoVm),
        several => Err(ToolError::WhichVm(listed(several))),
    }
}

/// `web1 (4711), db (4712)`.
fn listed(running: &[Running]) -> String {
    let words = running.iter().map(|one| match one.pid {
        Some(pid) => format!("{} ({pid})", one.name()),
        None => format!("{} (does not answer)", one.name()),
    });
    words.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn running(all: &[(&str, u32)]) -> Vec<Running> {
        let one = |(socket, pid): &(&str, u32)| Running {
            socket: socket.into(),
            pid: Some(*pid).filter(|pid| *pid > 0),
        };
        all.iter().map(one).collect()
    }

    fn check(found: Result<PathBuf, ToolError>, expected: &str) {
        let found = found.map_or_else(
            |error| error.to_string(),
            |socket| socket.display().to_string(),
        );
        assert!(found.starts_with(expected), "{found}");
    }

    #[test]
    fn a_name_or_a_process_id() {
        let all = running(&[("/a/web1.sock", 7), ("/a/8.sock", 8), ("/b/7.sock", 9)]);
        check(choose("web1", &all), "/a/web1.sock");
        check(choose("8", &all), "/a/8.sock");
        check(choose("9", &all), "/b/7.sock");
        check(
            choose("7", &all),
            "several VMs are meant: /a/web1.sock, /b/7.sock; ",
        );
        check(
            choose("web2", &all),
            "there is no VM web2; running are web1 (7), 8 (8), 7 (9)",
        );
        check(choose("web2", &[]), "there is no VM web2; none is running");
    }

    #[test]
    fn without_a_word_the_only_one() {
        check(only(&running(&[("/a/web1.sock", 7)])), "/a/web1.sock");
        check(only(&[]), "no VM is running");
        let two = running(&[("/a/web1.sock", 7), ("/a/db.sock", 8)]);
        check(only(&two), "which VM? running are web1 (7), db (8); ");
    }
}
