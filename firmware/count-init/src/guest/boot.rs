//! Makes the guest ready: what is the same for every job.

use core::ffi::CStr;

use count_init::HOST_NAME;

use crate::sys::{self, Errno, Fd, Mount};

/// What the guest's first program holds of the host.
pub(crate) struct Host {
    /// The root of what the host gives.
    pub(crate) root: Fd,
    pub(crate) stdout: Fd,
    pub(crate) stderr: Fd,
    pub(crate) status: Fd,
    pub(crate) files: Fd,
    /// The folder that takes what programs write.
    pub(crate) changed: Fd,
}

/// What failed.
pub(crate) struct Failure {
    pub(crate) what: &'static CStr,
    pub(crate) errno: Errno,
}

fn at<T>(what: &'static CStr, outcome: Result<T, Errno>) -> Result<T, Failure> {
    outcome.map_err(|errno| Failure { what, errno })
}

/// Where the files of the host and what is written lie, before the root changes.
const GIVEN: &CStr = c"/given";
const WRITES: &CStr = c"/rw";
const NEW: &CStr = c"/new";

pub(crate) fn boot() -> Result<Host, Failure> {
    load_modules()?;
    let given = Mount {
        kind: c"virtiofs",
        from: c"umpire",
        to: GIVEN,
        flags: sys::NO_ATIME,
        options: c"",
    };
    at(c"the host's files", sys::mount(&given))?;
    let out = |name| at(name, sys::open(name, sys::WRITE_ONLY));
    let (stdout, stderr) = (out(c"/given/out/stdout")?, out(c"/given/out/stderr")?);
    let (status, files) = (out(c"/given/out/status")?, out(c"/given/out/files")?);
    let root = at(GIVEN, sys::open(GIVEN, sys::DIRECTORY))?;
    let changed = overlay()?;
    for mount in MOUNTS {
        if let Some(kept) = mount.make {
            at(mount.mount.to, sys::mkdir(mount.mount.to, kept))?;
        }
        at(mount.mount.to, sys::mount(&mount.mount))?;
    }
    for (target, link) in LINKS {
        at(link, sys::symlink(target, link))?;
    }
    at(c"the new root", sys::change_root(NEW))?;
    at(c"the host's name", sys::set_host_name(HOST_NAME))?;
    at(c"the loopback interface", sys::loopback_up())?;
    at(c"the port to the host", sys::allow_ports())?;
    sys::umask(0o022);
    Ok(Host {
        root,
        stdout,
        stderr,
        status,
        files,
        changed,
    })
}

/// What programs see is the host's tree, and what they write lies above it in memory.
fn overlay() -> Result<Fd, Failure> {
    let memory = Mount {
        kind: c"tmpfs",
        from: c"rw",
        to: WRITES,
        flags: sys::NO_ATIME,
        options: c"mode=755",
    };
    at(WRITES, sys::mount(&memory))?;
    at(WRITES, sys::mkdir(c"/rw/upper", 0o755))?;
    at(WRITES, sys::mkdir(c"/rw/work", 0o755))?;
    let both = Mount {
        kind: c"overlay",
        from: c"umpire",
        to: NEW,
        flags: sys::NO_ATIME,
        options: c"lowerdir=/given/tree,upperdir=/rw/upper,workdir=/rw/work",
    };
    at(c"the overlay", sys::mount(&both))?;
    at(WRITES, sys::open(c"/rw/upper", sys::DIRECTORY))
}

struct Mounted {
    mount: Mount<'static>,
    /// The folder is made first, with this mode.
    make: Option<u32>,
}

const fn mounted(
    kind: &'static CStr,
    to: &'static CStr,
    options: &'static CStr,
    make: Option<u32>,
) -> Mounted {
    let mount = Mount {
        kind,
        from: kind,
        to,
        flags: sys::NO_ATIME,
        options,
    };
    Mounted { mount, make }
}

const MOUNTS: [Mounted; 5] = [
    mounted(c"proc", c"/new/proc", c"", None),
    mounted(c"sysfs", c"/new/sys", c"", None),
    mounted(c"devtmpfs", c"/new/dev", c"mode=755", None),
    mounted(
        c"devpts",
        c"/new/dev/pts",
        c"gid=5,mode=620,ptmxmode=666",
        Some(0o755),
    ),
    mounted(c"tmpfs", c"/new/dev/shm", c"mode=1777", Some(0o1777)),
];

const LINKS: [(&CStr, &CStr); 4] = [
    (c"/proc/self/fd", c"/new/dev/fd"),
    (c"/proc/self/fd/0", c"/new/dev/stdin"),
    (c"/proc/self/fd/1", c"/new/dev/stdout"),
    (c"/proc/self/fd/2", c"/new/dev/stderr"),
];

/// Loads `/modules/0`, `/modules/1` and so on, as many as there are: the host has put them into
/// the order in which they need each other.
fn load_modules() -> Result<(), Failure> {
    let mut name = *b"/modules/00\0";
    for number in 0..100u8 {
        name[9] = b'0' + number / 10;
        name[10] = b'0' + number % 10;
        let path = CStr::from_bytes_with_nul(&name).unwrap_or(c"");
        let file = match sys::open(path, sys::READ_ONLY) {
            Err(errno) if errno == sys::ENOENT => break,
            file => at(c"/modules", file)?,
        };
        match sys::load_module(&file) {
            Err(errno) if errno == sys::EEXIST => {}
            outcome => at(c"a module of the kernel", outcome)?,
        }
    }
    Ok(())
}
