//! `UMPIRE_VCPU`: `VM:VCPU`, `VM` or `:VCPU`. A VM is a control socket, if there is a `/` in
//! it, or a name or process id; without one it is that of `UMPIRE_PERFMON`.

use std::path::{Path, PathBuf};

use libc::{EINVAL, ENOSYS};
use umpire_perfmon::{Client, ENVIRONMENT, socket_folders};

use crate::failure::{Failure, Subcode, fail};

/// A vCPU of a VM, as it was named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VcpuName {
    vm: String,
    pub(crate) vcpu: usize,
}

impl VcpuName {
    /// `text` names it; the VM's first one where no number is behind the last colon.
    ///
    /// # Errors
    /// EINVAL: it is no such name.
    pub(crate) fn parse(text: &str) -> Result<Self, Failure> {
        let (vm, vcpu) = match text.rsplit_once(':') {
            Some((vm, number)) => (vm, number.parse().ok()),
            None => (text, Some(0)),
        };
        match vcpu {
            Some(vcpu) if !text.is_empty() => Ok(VcpuName {
                vm: vm.to_owned(),
                vcpu,
            }),
            _ => {
                let reason = format_args!(
                    "UMPIRE_VCPU={text}: it is SOCKET:VCPU, NAME:VCPU or PID:VCPU, as in \
                     /run/umpire/web1.sock:0"
                );
                Err(fail(EINVAL, Subcode::BindFailed, reason))
            }
        }
    }

    /// The VM's control socket.
    ///
    /// # Errors
    /// ENOSYS: there is none.
    pub(crate) fn socket(&self) -> Result<PathBuf, Failure> {
        let none = |reason| Err(fail(ENOSYS, Subcode::BindFailed, reason));
        match self.vm.as_str() {
            path if path.contains('/') => Ok(path.into()),
            "" => match std::env::var_os(ENVIRONMENT).filter(|path| !path.is_empty()) {
                Some(path) => Ok(path.into()),
                None => none(format_args!(
                    "UMPIRE_VCPU names no VM, and {ENVIRONMENT} names no control socket"
                )),
            },
            name => match socket_folders()
                .iter()
                .find_map(|folder| in_folder(folder, name))
            {
                Some(path) => Ok(path),
                None => none(format_args!(
                    "no VM of the name or process id {name} runs; umpire ls shows those that do"
                )),
            },
        }
    }
}

/// The socket `NAME.sock`, or that of the VM with this process id.
fn in_folder(folder: &Path, name: &str) -> Option<PathBuf> {
    let path = folder.join(format!("{name}.sock"));
    if path.exists() {
        return Some(path);
    }
    let pid: u32 = name.parse().ok()?;
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let mut sockets = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|it| it == "sock"));
    sockets.find(|path| {
        let hello = Client::connect(path).and_then(|client| client.hello());
        hello.is_ok_and(|hello| hello.pid == pid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_and_a_number() {
        for (text, vm, vcpu) in [
            ("/run/a.sock:2", "/run/a.sock", 2),
            ("/run/a.sock", "/run/a.sock", 0),
            ("web1:0", "web1", 0),
            ("4711:3", "4711", 3),
            (":1", "", 1),
            ("/run/a:b/c:7", "/run/a:b/c", 7),
        ] {
            let name = VcpuName::parse(text).unwrap();
            assert_eq!((name.vm.as_str(), name.vcpu), (vm, vcpu), "{text}");
        }
        for text in ["", "/run/a.sock:", "web1:x", "a:-1", "/run/a:b/c"] {
            assert!(VcpuName::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_name_is_a_socket_in_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("web1.sock");
        std::fs::write(&path, "").unwrap();
        assert_eq!(in_folder(folder.path(), "web1"), Some(path));
        assert_eq!(in_folder(folder.path(), "web2"), None);
        assert_eq!(in_folder(folder.path(), "4711"), None);
        let direct = VcpuName::parse("/tmp/x:0").unwrap();
        assert_eq!(direct.socket().unwrap(), Path::new("/tmp/x"));
    }
}
