//! Which files of this machine a guest sees, each at its own path.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use count_init::{HOME, HOST_NAME, USER, USER_NAME};
use rustix::io::Errno;
use thiserror::Error;

use crate::host::{self, Place};
use crate::memory::part;
use crate::tree::{Attributes, Kind, Listed, Owner, Refusal, Stamp, Tree};

/// Folders of the system that are given as they are, links as links.
const SYSTEM: [&str; 7] = [
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
];

/// What of `/etc` is given, where this machine has it: what programs need to start, and nothing
/// that says whose machine it is.
const OF_ETC: [&str; 19] = [
    "alternatives",
    "debian_version",
    "gitconfig",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "localtime",
    "magic",
    "magic.mime",
    "mime.types",
    "os-release",
    "perl",
    "protocols",
    "rpc",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
];
/// The first letters of further names there: a folder for each version.
const VERSIONS_IN_ETC: &str = "python3";

/// Folders that every guest has, empty but for what is given in them.
const EMPTY: [(&str, u16, Owner); 14] = [
    ("/dev", 0o755, Owner::System),
    ("/etc", 0o755, Owner::System),
    ("/home", 0o755, Owner::System),
    (HOME, 0o755, Owner::User),
    ("/mnt", 0o755, Owner::System),
    ("/opt", 0o755, Owner::System),
    ("/proc", 0o555, Owner::System),
    ("/root", 0o755, Owner::System),
    ("/run", 0o755, Owner::System),
    ("/srv", 0o755, Owner::System),
    ("/sys", 0o555, Owner::System),
    ("/tmp", 0o1777, Owner::System),
    ("/var", 0o755, Owner::System),
    ("/var/tmp", 0o1777, Owner::System),
];

/// Links that every guest has.
const LINKS: [(&str, &str); 2] = [("/etc/mtab", "/proc/self/mounts"), ("/var/run", "/run")];

/// What this machine may have and no guest misses: the library of SELinux looks for it in every
/// program that lists files.
const MISSED_BY_NOBODY: [&str; 1] = ["/etc/selinux"];

/// Where the guest has something of its own, and nothing can be given.
const TAKEN: [&str; 3] = ["/dev", "/proc", "/sys"];

/// Links that are followed on the way to a program.
const MOST_LINKS: usize = 40;

/// What is given beside the system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Given {
    /// The working directory, absolute.
    pub folder: PathBuf,
    /// The file to run, where it is named by a path.
    pub program: Option<PathBuf>,
    /// Further folders or files.
    pub with: Vec<PathBuf>,
}

/// Something cannot be given.
#[derive(Debug, Error)]
pub enum ViewError {
    /// It is not there, or may not be looked at.
    #[error("{path}: {error}", path = .path.display())]
    Absent {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The guest has something of its own there.
    #[error(
        "{path} cannot be given to the guest, which has a {taken} of its own: work in another \
         folder", path = .path.display()
    )]
    Taken {
        /// Which.
        path: PathBuf,
        /// Where it lies.
        taken: &'static str,
    },
    /// It is everything.
    #[error("/ cannot be given: name the folders that the program needs")]
    Everything,
}

/// The files that a guest sees.
#[derive(Debug)]
pub struct View {
    /// By absolute path: what is given there, and below it unless that is here as well.
    given: BTreeMap<Vec<u8>, Offer>,
    /// The folder of the name that was asked for last, and its path: the next one is mostly in it,
    /// and the way there is a system call for each name.
    near: Option<(Vec<u8>, Place)>,
}

#[derive(Debug)]
enum Offer {
    /// What is there on this machine.
    Host(Place, Owner),
    /// A folder in which only others of these are.
    Folder(u16, Owner),
    /// A file that says the same on every machine.
    Text(Arc<[u8]>),
    Link(Vec<u8>),
}

/// An open file of a [`View`].
#[derive(Debug)]
pub enum ViewFile {
    /// Of this machine.
    Host(OwnedFd),
    /// One that says the same on every machine.
    Text(Arc<[u8]>),
}

impl View {
    /// The system's files and what is named.
    ///
    /// # Errors
    /// Something that is named cannot be given.
    pub fn new(given: &Given) -> Result<Self, ViewError> {
        let mut view = Self {
            given: BTreeMap::new(),
            near: None,
        };
        let root = Offer::Folder(0o755, Owner::System);
        view.given.insert(b"/".to_vec(), root);
        for (path, mode, owner) in EMPTY {
            let folder = Offer::Folder(mode, owner);
            view.given.insert(path.as_bytes().to_vec(), folder);
        }
        for (path, target) in LINKS {
            let link = Offer::Link(target.as_bytes().to_vec());
            view.given.insert(path.as_bytes().to_vec(), link);
        }
        for path in SYSTEM {
            view.add_system(Path::new(path));
        }
        for name in OF_ETC {
            view.add_system(&Path::new("/etc").join(name));
        }
        for entry in fs::read_dir("/etc").into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name.as_bytes().starts_with(VERSIONS_IN_ETC.as_bytes()) {
                view.add_system(&entry.path());
            }
        }
        for (name, text) in texts() {
            let path = Path::new("/etc").join(name);
            view.insert(&path, Offer::Text(text.into_bytes().into()));
        }
        if given.folder != Path::new("/") {
            view.add_named(&given.folder)?;
        }
        for path in &given.with {
            view.add_named(path)?;
        }
        if let Some(program) = &given.program {
            view.add_program(program)?;
        }
        Ok(view)
    }

    /// Whether something of this machine is given in `/tmp`, so that the guest can have no file
    /// system of its own there.
    #[must_use]
    pub fn tmp_is_given(&self) -> bool {
        match self.given.get(&b"/tmp"[..]) {
            Some(Offer::Folder(..)) => {
                let mut below = self.given.range(b"/tmp/".to_vec()..);
                below
                    .next()
                    .is_some_and(|(path, _)| path.starts_with(b"/tmp/"))
            }
            _ => true,
        }
    }

    /// What this machine does not have is not given either.
    fn add_system(&mut self, path: &Path) {
        let Ok(place) = Place::of_path(path) else {
            return;
        };
        let offer = match place.link() {
            Ok(target) => Offer::Link(target),
            Err(_) => Offer::Host(place, Owner::System),
        };
        self.insert(path, offer);
    }

    /// Something that the user names: it is the guest's user's. Where a link leads to it, the link
    /// is there too.
    fn add_named(&mut self, path: &Path) -> Result<(), ViewError> {
        let absent = |error| ViewError::Absent {
            path: path.to_owned(),
            error,
        };
        let real = fs::canonicalize(path).map_err(absent)?;
        let named = std::path::absolute(path).map_err(absent)?;
        for one in [&real, &named] {
            refuse_taken(one)?;
        }
        let place = Place::of_path(&real).map_err(|errno| absent(errno.into()))?;
        self.insert(&real, Offer::Host(place, Owner::User));
        let is_plain = named.components().all(|part| part != Component::ParentDir);
        if named != real && is_plain && !self.is_given(&named) {
            let target = real.as_os_str().as_bytes().to_vec();
            self.insert(&named, Offer::Link(target));
        }
        Ok(())
    }

    /// The program's file and the links on the way to it, whatever else is in their folders.
    fn add_program(&mut self, program: &Path) -> Result<(), ViewError> {
        let absent = |error| ViewError::Absent {
            path: program.to_owned(),
            error,
        };
        let mut path = std::path::absolute(program).map_err(absent)?;
        for _ in 0..MOST_LINKS {
            // Links among the folders are gone through once, as the guest need not.
            let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
                break;
            };
            let real = fs::canonicalize(folder).map_err(absent)?.join(name);
            refuse_taken(&real)?;
            if real != path && !self.is_given(&path) {
                let target = real.as_os_str().as_bytes().to_vec();
                self.insert(&path, Offer::Link(target));
            }
            let place = Place::of_path(&real).map_err(|errno| absent(errno.into()))?;
            match place.link() {
                Ok(target) => {
                    let next = real.parent().unwrap_or(Path::new("/"));
                    let next = next.join(std::ffi::OsStr::from_bytes(&target));
                    if !self.is_given(&real) {
                        self.insert(&real, Offer::Link(target));
                    }
                    path = next;
                }
                Err(_) => {
                    if !self.is_given(&real) {
                        self.insert(&real, Offer::Host(place, Owner::User));
                    }
                    return Ok(());
                }
            }
        }
        Err(absent(Errno::LOOP.into()))
    }

    fn is_given(&mut self, path: &Path) -> bool {
        self.stat(path.as_os_str().as_bytes()).is_ok()
    }

    /// Offers something, and folders on the way to it where nothing is offered.
    fn insert(&mut self, path: &Path, offer: Offer) {
        let path = path.as_os_str().as_bytes();
        // Below a link that is offered the guest finds what the link leads to.
        if matches!(self.find(path), Way::NoFolder) {
            return;
        }
        for (at, _) in path.iter().enumerate().filter(|(_, byte)| **byte == b'/') {
            let above = &path[..at.max(1)];
            if matches!(self.find(above), Way::Nothing) {
                let folder = Offer::Folder(0o755, Owner::System);
                self.given.insert(above.to_vec(), folder);
            }
        }
        self.given.insert(path.to_vec(), offer);
    }

    /// Who decides about a path.
    fn find(&self, path: &[u8]) -> Way<'_> {
        if let Some(offer) = self.given.get(path) {
            return Way::Here(offer);
        }
        let slashes = path.iter().enumerate().rev();
        for (at, _) in slashes.filter(|(_, byte)| **byte == b'/') {
            if let Some(offer) = self.given.get(&path[..at.max(1)]) {
                return match offer {
                    Offer::Host(place, owner) => Way::Below(place, path[at + 1..].to_vec(), *owner),
                    Offer::Folder(..) => Way::Nothing,
                    Offer::Text(_) | Offer::Link(_) => Way::NoFolder,
                };
            }
        }
        Way::Nothing
    }

    /// What is offered in a folder, beside what it has of this machine.
    fn offered_in(&self, folder: &[u8]) -> impl Iterator<Item = (&[u8], &Offer)> {
        let before = [folder.strip_suffix(b"/").unwrap_or(folder), b"/"].concat();
        let len = before.len();
        let below = self.given.range(before.clone()..);
        below
            .take_while(move |(path, _)| path.starts_with(&before))
            .map(move |(path, offer)| (&path[len..], offer))
            .filter(|(name, _)| !name.is_empty() && !name.contains(&b'/'))
    }

    /// The place of a folder of this machine, which is kept until another one is asked for. One
    /// that is in the folder of before is a step from there.
    fn near(&mut self, folder: &[u8]) -> Result<&Place, Refusal> {
        let place = match self.near.take() {
            Some((known, place)) if known == folder => place,
            Some((known, place)) => {
                let below = folder.strip_prefix(&known[..]);
                match below.and_then(|below| below.strip_prefix(b"/")) {
                    // Something else may be given there, or on the way.
                    Some(name)
                        if !name.contains(&b'/') && matches!(self.find(folder), Way::Below(..)) =>
                    {
                        place.below(name)?
                    }
                    _ => self.place(folder)?.0,
                }
            }
            None => self.place(folder)?.0,
        };
        let (_, place) = self.near.insert((folder.to_vec(), place));
        Ok(place)
    }

    /// The place of this machine that a path stands for.
    fn place(&self, path: &[u8]) -> Result<(Place, Owner), Refusal> {
        match self.find(path) {
            Way::Here(Offer::Host(place, owner)) => Ok((place.below(b"")?, *owner)),
            Way::Below(place, rest, owner) => Ok((place.below(&rest)?, owner)),
            Way::Here(_) => Err(Refusal::Kind),
            Way::NoFolder => Err(Refusal::Missing),
            Way::Nothing => Err(outside(path)),
        }
    }
}

enum Way<'a> {
    Here(&'a Offer),
    /// At this path below something of this machine.
    Below(&'a Place, Vec<u8>, Owner),
    /// What is above it is no folder.
    NoFolder,
    Nothing,
}

fn refuse_taken(path: &Path) -> Result<(), ViewError> {
    if path == Path::new("/") {
        return Err(ViewError::Everything);
    }
    match TAKEN.into_iter().find(|taken| path.starts_with(taken)) {
        Some(taken) => Err(ViewError::Taken {
            path: path.to_owned(),
            taken,
        }),
        None => Ok(()),
    }
}

/// Whether this machine has something at a path that is not given.
fn outside(path: &[u8]) -> Refusal {
    let path = Path::new(std::ffi::OsStr::from_bytes(path));
    if MISSED_BY_NOBODY
        .iter()
        .any(|missed| path.starts_with(missed))
    {
        return Refusal::Missing;
    }
    match fs::symlink_metadata(path) {
        Ok(_) => Refusal::Outside,
        Err(_) => Refusal::Missing,
    }
}

fn file(size: usize, mode: u16) -> Attributes {
    Attributes {
        kind: Kind::File,
        size: size as u64,
        mode,
        owner: Owner::System,
        modified: None,
    }
}

fn attributes(offer: &Offer) -> Result<Attributes, Refusal> {
    Ok(match offer {
        Offer::Host(place, owner) => return place.attributes(*owner),
        Offer::Folder(mode, owner) => Attributes {
            kind: Kind::Folder,
            size: 0,
            mode: *mode,
            owner: *owner,
            modified: None,
        },
        Offer::Text(text) => file(text.len(), 0o644),
        Offer::Link(target) => Attributes {
            kind: Kind::Link,
            ..file(target.len(), 0o777)
        },
    })
}

impl Tree for View {
    type File = ViewFile;

    fn stat(&mut self, path: &[u8]) -> Result<Attributes, Refusal> {
        let (owner, end) = match self.find(path) {
            Way::Here(offer) => return attributes(offer),
            Way::Below(_, _, owner) => (owner, path.iter().rposition(|byte| *byte == b'/')),
            _ => {
                let (place, owner) = self.place(path)?;
                return place.attributes(owner);
            }
        };
        let (folder, name) = path.split_at(end.unwrap_or(0));
        let place = self.near(folder)?;
        place.attributes_of(name.strip_prefix(b"/").unwrap_or(name), owner)
    }

    fn list(&mut self, path: &[u8]) -> Result<Vec<Listed>, Refusal> {
        let mut listed: BTreeMap<Vec<u8>, Kind> = match self.find(path) {
            Way::Here(Offer::Folder(..)) => BTreeMap::new(),
            _ => {
                let listed = self.near(path)?.list()?.into_iter();
                listed.map(|entry| (entry.name, entry.kind)).collect()
            }
        };
        for (name, offer) in self.offered_in(path) {
            if let Ok(attributes) = attributes(offer) {
                listed.insert(name.to_vec(), attributes.kind);
            }
        }
        let listed = listed.into_iter();
        Ok(listed.map(|(name, kind)| Listed { name, kind }).collect())
    }

    fn link(&mut self, path: &[u8]) -> Result<Vec<u8>, Refusal> {
        match self.find(path) {
            Way::Here(Offer::Link(target)) => Ok(target.clone()),
            _ => self.place(path)?.0.link(),
        }
    }

    fn open(&mut self, path: &[u8]) -> Result<ViewFile, Refusal> {
        match self.find(path) {
            Way::Here(Offer::Text(text)) => Ok(ViewFile::Text(text.clone())),
            Way::Here(Offer::Folder(..)) => Err(Refusal::Host(Errno::ISDIR)),
            _ => Ok(ViewFile::Host(self.place(path)?.0.file()?)),
        }
    }

    fn read(
        &mut self,
        file: &ViewFile,
        at: u64,
        len: usize,
        into: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        match file {
            ViewFile::Host(file) => host::read(file.as_fd(), at, len, into),
            ViewFile::Text(text) => {
                into.extend_from_slice(part(text, at, len));
                Ok(())
            }
        }
    }

    fn stamp(&mut self, file: &ViewFile) -> Result<Stamp, Refusal> {
        match file {
            ViewFile::Host(file) => host::stamp(file.as_fd()),
            ViewFile::Text(text) => Ok(Stamp {
                size: text.len() as u64,
                ..Stamp::default()
            }),
        }
    }
}

/// What stands for this machine's own: files of `/etc`, by their names.
fn texts() -> [(&'static str, String); 9] {
    [
        (
            "passwd",
            format!(
                "root:x:0:0:root:/root:/bin/sh\n\
                 {USER_NAME}:x:{USER}:{USER}::{HOME}:/bin/sh\n\
                 nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
            ),
        ),
        (
            "group",
            format!("root:x:0:\ntty:x:5:\n{USER_NAME}:x:{USER}:\nnogroup:x:65534:\n"),
        ),
        (
            "hosts",
            format!("127.0.0.1\tlocalhost {HOST_NAME}\n::1\tlocalhost\n"),
        ),
        ("hostname", format!("{HOST_NAME}\n")),
        ("host.conf", "multi on\n".to_owned()),
        ("resolv.conf", String::new()),
        (
            "nsswitch.conf",
            "passwd: files\ngroup: files\nshadow: files\nhosts: files\nnetworks: files\n\
             protocols: files\nservices: files\n"
                .to_owned(),
        ),
        ("environment", String::new()),
        ("shells", "/bin/sh\n/bin/bash\n".to_owned()),
    ]
}
