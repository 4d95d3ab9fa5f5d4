//! Opening a file by its name below a folder, as if the folder was the root: `..` and symbolic
//! links do not lead out of it.
//!
//! The kernel does this by openat2(2), since Linux 5.6. Where it does not, or a filter of system
//! calls (a container's) forbids it, the name is resolved here, one part at a time.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2, readlinkat};
use rustix::io::Errno;

/// Symbolic links on the way to one file, at most; as in the kernel (`MAXSYMLINKS`).
const MOST_LINKS: usize = 40;
/// Parts of names that are still to be resolved, at most: links may have many.
const MOST_PARTS: usize = 4096;
/// Nothing there makes the tool wait or act.
const READ: OFlags = OFlags::RDONLY
    .union(OFlags::CLOEXEC)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY);
/// Looks, and opens nothing; a symbolic link is itself.
const LOOK: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// What is called `name` below `root`, open for reading; what is neither a file nor a folder may
/// be open for nothing but a look at what it is.
///
/// # Errors
/// There is no such thing, or it may not be read.
pub(super) fn open(root: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd, Errno> {
    match by_kernel(root, name) {
        // A kernel before 5.6, or a filter that knows no openat2: most say EPERM. By hand it is
        // refused again where it was the file that was.
        Err(Errno::NOSYS | Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP) => by_hand(root, name),
        found => found,
    }
}

fn by_kernel(root: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let mut tries = 0..8;
    loop {
        match openat2(root, name, READ, Mode::empty(), resolve) {
            // Somebody renames while it is resolved.
            Err(Errno::AGAIN) if tries.next().is_some() => {}
            other => return other,
        }
    }
}

/// The same without the kernel's help. Every folder on the way stays open, and `..` goes back
/// to the one before: so nobody who moves folders meanwhile leads out of `root`.
fn by_hand(root: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd, Errno> {
    let mut parts = Parts::default();
    parts.push(name)?;
    let mut way: Vec<OwnedFd> = Vec::new();
    let mut links = 0;
    while let Some(part) = parts.0.pop() {
        if *part == *b".." {
            way.pop();
            continue;
        }
        let here = way.last().map_or(root, AsFd::as_fd);
        let found = openat(here, &*part, LOOK, Mode::empty())?;
        let status = fstat(&found)?;
        match FileType::from_raw_mode(status.st_mode) {
            FileType::Directory => way.push(found),
            FileType::Symlink => {
                links += 1;
                if links > MOST_LINKS {
                    return Err(Errno::LOOP);
                }
                let target = readlinkat(&found, c"", Vec::new())?;
                if target.as_bytes().starts_with(b"/") {
                    way.clear();
                }
                parts.push(CStr::to_bytes(&target))?;
            }
            _ if !parts.0.is_empty() => return Err(Errno::NOTDIR),
            FileType::RegularFile => return the_same(here, &part, &status),
            // To open a device may do something.
            _ => return Ok(found),
        }
    }
    let here = way.last().map_or(root, AsFd::as_fd);
    openat(here, c".", READ | OFlags::DIRECTORY, Mode::empty())
}

/// The file `name` in `folder`, if it still is the one that was looked at.
fn the_same(folder: BorrowedFd<'_>, name: &[u8], seen: &Stat) -> Result<OwnedFd, Errno> {
    let file = openat(folder, name, READ | OFlags::NOFOLLOW, Mode::empty())?;
    let now = fstat(&file)?;
    if (now.st_dev, now.st_ino) == (seen.st_dev, seen.st_ino) {
        Ok(file)
    } else {
        Err(Errno::AGAIN)
    }
}

/// Parts of a name that are still to be resolved, the next one last.
#[derive(Default)]
struct Parts(Vec<Box<[u8]>>);

impl Parts {
    /// `name` comes in front of them.
    fn push(&mut self, name: &[u8]) -> Result<(), Errno> {
        let parts = name.split(|byte| *byte == b'/').rev();
        let parts = parts.filter(|part| !matches!(*part, b"" | b"."));
        self.0.extend(parts.map(Box::from));
        if self.0.len() > MOST_PARTS {
            return Err(Errno::NAMETOOLONG);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;

    fn folder(path: &Path) -> OwnedFd {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).unwrap()
    }

    /// What was found: device, inode and kind; or why it was not.
    fn outcome(found: Result<OwnedFd, Errno>) -> Result<(u64, u64, u32), Errno> {
        let status = fstat(found?)?;
        Ok((status.st_dev, status.st_ino, status.st_mode))
    }

    /// A tree whose root has folders and files beside it that nobody may reach.
    fn tree() -> tempfile::TempDir {
        let all = tempfile::tempdir().unwrap();
        let at = |name: &str| all.path().join(name);
        fs::create_dir_all(at("root/usr/lib/deep")).unwrap();
        fs::create_dir_all(at("root/etc")).unwrap();
        for name in [
            "secret",
            "root/inside",
            "root/usr/lib/x",
            "root/usr/lib/deep/y",
        ] {
            fs::write(at(name), name).unwrap();
        }
        let outside = at("secret");
        let links = [
            ("usr/lib", "lib"),
            ("/usr/lib", "etc/absolute"),
            ("../../../../../secret", "etc/out"),
            ("../../inside", "usr/lib/up"),
            (outside.to_str().unwrap(), "host"),
            ("loop-b", "loop-a"),
            ("loop-a", "loop-b"),
            ("self/self", "self"),
            ("", "etc/none"),
            ("/", "top"),
            ("..", "usr/parent"),
        ];
        for (target, name) in links {
            // There are no empty links.
            if !target.is_empty() {
                symlink(target, at("root").join(name)).unwrap();
            }
        }
        let fifo = rustix::fs::CWD;
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(fifo, at("root/fifo"), FileType::Fifo, mode, 0).unwrap();
        all
    }

    #[test]
    fn by_hand_is_as_by_the_kernel() {
        let all = tree();
        let root = folder(&all.path().join("root"));
        let root = root.as_fd();
        let names = [
            "/inside",
            "inside",
            "//inside",
            "/./inside",
            "/missing",
            "/missing/x",
            "/inside/x",
            "/usr/lib/x",
            "/lib/x",
            "/lib/deep/../x",
            "/lib/deep/../../../inside",
            "/etc/absolute/deep/y",
            "/../../../secret",
            "/../inside",
            "/etc/out",
            "/etc/none",
            "/host",
            "/usr/lib/up",
            "/lib/up",
            "/loop-a",
            "/self",
            "/top/top/top/inside",
            "/usr/parent/inside",
            "/usr/parent/parent",
            "/fifo",
            "/usr",
            "/usr/",
            "/",
            "",
        ];
        if by_kernel(root, b"/inside").is_err() {
            eprintln!("not compared: openat2 is not there");
            return;
        }
        for name in names {
            let (kernel, hand) = (
                outcome(by_kernel(root, name.as_bytes())),
                outcome(by_hand(root, name.as_bytes())),
            );
            match name {
                // openat2 knows no empty name.
                "" => assert_eq!(kernel, Err(Errno::NOENT)),
                _ => assert_eq!(hand, kernel, "{name}"),
            }
        }
    }

    #[test]
    fn by_hand_nothing_leads_out() {
        let all = tree();
        let root = folder(&all.path().join("root"));
        for (name, found) in [
            ("/usr/lib/up", Some("root/inside")),
            ("/etc/absolute/deep/y", Some("root/usr/lib/deep/y")),
            ("/etc/out", None),
            ("/host", None),
            ("/../secret", None),
            ("/self", None),
        ] {
            let file = by_hand(root.as_fd(), name.as_bytes()).ok();
            let text = file.map(|file| std::io::read_to_string(fs::File::from(file)).unwrap());
            assert_eq!(text.as_deref(), found, "{name}");
        }
    }

    #[test]
    fn by_hand_has_an_end() {
        let all = tempfile::tempdir().unwrap();
        // Each link has many parts, and the next link.
        for number in 0..50 {
            let target = format!("{}link{}", "./../".repeat(400), number + 1);
            symlink(target, all.path().join(format!("link{number}"))).unwrap();
        }
        let root = folder(all.path());
        assert_eq!(by_hand(root.as_fd(), b"link0").err(), Some(Errno::LOOP));
        let many = "a/".repeat(MOST_PARTS + 1);
        let error = by_hand(root.as_fd(), many.as_bytes()).err();
        assert_eq!(error, Some(Errno::NAMETOOLONG));
    }
}
