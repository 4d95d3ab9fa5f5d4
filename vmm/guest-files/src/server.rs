//! The server: a request of the guest's kernel in, an answer out.

use std::collections::VecDeque;
use std::sync::Arc;

use fuse_abi::linux::{
    FOPEN_DIRECT_IO, FUSE_ASYNC_READ, FUSE_CACHE_SYMLINKS, FUSE_DO_READDIRPLUS,
    FUSE_KERNEL_VERSION, FUSE_MAX_PAGES, FUSE_NO_OPEN_SUPPORT, FUSE_NO_OPENDIR_SUPPORT,
    FUSE_PARALLEL_DIROPS, FUSE_READDIRPLUS_AUTO, fuse_attr, fuse_attr_out, fuse_batch_forget_in,
    fuse_entry_out, fuse_forget_in, fuse_forget_one, fuse_init_in, fuse_init_out, fuse_kstatfs,
    fuse_opcode, fuse_open_out, fuse_read_in, fuse_statfs_out, fuse_write_in, fuse_write_out,
};
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::inputs::{Input, Inputs, Looked};
use crate::memory::part;
use crate::nodes::{Node, Nodes, Out, inode};
use crate::tree::{Attributes, Kind, Listed, Owner, Refusal, Tree};
use crate::wire::{Reply, Request};

/// The protocol that is spoken: 7.31, of Linux 5.4, has all that is used.
const MINOR: u32 = 31;
/// What the guest may ask for, of what it offers.
const FLAGS: u32 = FUSE_ASYNC_READ
    | FUSE_DO_READDIRPLUS
    | FUSE_READDIRPLUS_AUTO
    | FUSE_NO_OPEN_SUPPORT
    | FUSE_PARALLEL_DIROPS
    | FUSE_MAX_PAGES
    | FUSE_CACHE_SYMLINKS
    | FUSE_NO_OPENDIR_SUPPORT;

/// Bytes of a page, and pages of the longest read or write.
const PAGE: u32 = 4096;
const MOST_PAGES: u16 = 256;
/// Bytes of the longest read, write, or part of a folder.
const MOST: usize = PAGE as usize * MOST_PAGES as usize;

/// Seconds for which the guest believes what it was told: 34 years. Nothing changes in a run.
const FOR_LONG: u64 = 1 << 30;
/// The time that files have where theirs says nothing of them, in seconds: the first of January
/// 2024.
const TIME: u64 = 1_704_067_200;

/// Bytes of the archive of changed files that are taken if nothing else is said: a guest could
/// send for ever.
const LARGEST_ARCHIVE: u64 = 4 << 30;

/// Open files, and lists of folders, that are kept.
const OPEN_FILES: usize = 128;
const LISTS: usize = 16;

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;

/// Who takes what the guest says, at once.
pub trait Sink {
    /// Bytes for `out`, behind those of before.
    ///
    /// # Errors
    /// They cannot be taken: what the guest's writer is told, as [`Errno::PIPE`].
    fn take(&mut self, out: Out, bytes: &[u8]) -> Result<(), Errno>;
}

/// What a guest is to do.
#[derive(Clone, Debug, Default)]
pub struct Errand {
    /// The job, as `count_init::Job` encodes it.
    pub job: Vec<u8>,
    /// What the program reads from its standard input.
    pub stdin: Vec<u8>,
}

/// The files of a guest.
#[derive(Debug)]
pub struct FileServer<T: Tree, S> {
    tree: T,
    sink: S,
    errand: Errand,
    nodes: Nodes,
    /// The one that was used last is the last.
    open: VecDeque<(Arc<[u8]>, T::File)>,
    lists: VecDeque<(u64, Vec<Listed>)>,
    inputs: Inputs,
    /// Bytes that are still taken for [`Out::Files`].
    archive_left: u64,
}

impl<T: Tree, S: Sink> FileServer<T, S> {
    /// A server of the files of `tree`, which goes on where another one was when the guest was
    /// ready.
    pub fn new(tree: T, sink: S, errand: Errand) -> Self {
        Self {
            tree,
            sink,
            errand,
            nodes: Nodes::new(),
            open: VecDeque::new(),
            lists: VecDeque::new(),
            inputs: Inputs::default(),
            archive_left: LARGEST_ARCHIVE,
        }
    }

    /// The same, which takes so many bytes for [`Out::Files`] instead of 4 GiB; behind them the
    /// guest has no space left.
    #[must_use]
    pub fn with_largest_archive(self, bytes: u64) -> Self {
        Self {
            archive_left: bytes,
            ..self
        }
    }

    /// Answers one request, header included. `reply` is the answer, header included; it is empty
    /// where the guest waits for none, and never longer than 1 MiB and 64 KiB.
    pub fn answer(&mut self, request: &[u8], reply: &mut Vec<u8>) {
        reply.clear();
        // Without a header there is nobody to answer.
        let Some(request) = Request::read(request) else {
            return;
        };
        if request.is_one_way() {
            self.forget(&request);
            return;
        }
        let mut reply = Reply::new(reply);
        let outcome = self.dispatch(&request, &mut reply);
        reply.end(&request, outcome);
    }

    fn dispatch(&mut self, request: &Request<'_>, reply: &mut Reply<'_>) -> Result<(), Errno> {
        const LOOKUP: u32 = fuse_opcode::FUSE_LOOKUP as u32;
        const GETATTR: u32 = fuse_opcode::FUSE_GETATTR as u32;
        const SETATTR: u32 = fuse_opcode::FUSE_SETATTR as u32;
        const READLINK: u32 = fuse_opcode::FUSE_READLINK as u32;
        const OPEN: u32 = fuse_opcode::FUSE_OPEN as u32;
        const READ: u32 = fuse_opcode::FUSE_READ as u32;
        const WRITE: u32 = fuse_opcode::FUSE_WRITE as u32;
        const STATFS: u32 = fuse_opcode::FUSE_STATFS as u32;
        const RELEASE: u32 = fuse_opcode::FUSE_RELEASE as u32;
        const RELEASEDIR: u32 = fuse_opcode::FUSE_RELEASEDIR as u32;
        const INIT: u32 = fuse_opcode::FUSE_INIT as u32;
        const READDIR: u32 = fuse_opcode::FUSE_READDIR as u32;
        const READDIRPLUS: u32 = fuse_opcode::FUSE_READDIRPLUS as u32;
        const ACCESS: u32 = fuse_opcode::FUSE_ACCESS as u32;
        const DESTROY: u32 = fuse_opcode::FUSE_DESTROY as u32;
        match request.opcode {
            LOOKUP => self.lookup(request, reply),
            GETATTR => self.getattr(request, reply),
            SETATTR => self.setattr(request, reply),
            READLINK => self.readlink(request, reply),
            OPEN => self.open(request, reply),
            READ => self.read(request, reply),
            WRITE => self.write(request, reply),
            STATFS => statfs(reply),
            RELEASE | RELEASEDIR | ACCESS | DESTROY => Ok(()),
            INIT => init(request, reply),
            READDIR => self.readdir(request, reply, false),
            READDIRPLUS => self.readdir(request, reply, true),
            other if changes(other) => Err(Errno::ROFS),
            // The guest's kernel asks for no such thing again.
            _ => Err(Errno::NOSYS),
        }
    }

    fn node(&self, request: &Request<'_>) -> Result<Node, Errno> {
        self.nodes.get(request.node).ok_or(Errno::STALE)
    }

    fn attributes(&mut self, node: &Node) -> Result<Attributes, Refusal> {
        let fixed = |kind, size: usize, mode, owner| Attributes {
            kind,
            size: size as u64,
            mode,
            owner,
            modified: None,
        };
        Ok(match node {
            Node::Path(path) => return self.tree.stat(path),
            Node::Root | Node::OutFolder => fixed(Kind::Folder, 0, 0o755, Owner::System),
            Node::Job => fixed(Kind::File, self.errand.job.len(), 0o400, Owner::System),
            Node::Stdin => fixed(Kind::File, self.errand.stdin.len(), 0o444, Owner::User),
            Node::Out(_) => fixed(Kind::File, 0, 0o200, Owner::System),
        })
    }

    fn lookup(&mut self, request: &Request<'_>, reply: &mut Reply<'_>) -> Result<(), Errno> {
        let folder = self.node(request)?;
        let name = request.name()?;
        let child = Nodes::child(&folder, name).ok_or(Errno::NOENT)?;
        let found = self.attributes(&child);
        if let Node::Path(path) = &child {
            self.inputs.asked(path, found);
        }
        let entry = match found {
            Ok(attributes) => self.entry(&child, &attributes)?,
            // A name without a number: the guest remembers that there is none.
            Err(Refusal::Missing | Refusal::Outside) => entry_out(0, fuse_attr::default()),
            Err(refusal) => return Err(refusal.errno()),
        };
        reply.put(&entry);
        Ok(())
    }

    fn entry(&mut self, node: &Node, attributes: &Attributes) -> Result<fuse_entry_out, Errno> {
        let number = self.nodes.give(node).ok_or(Errno::NFILE)?;
        Ok(entry_out(number, fuse_attributes(node, attributes)))
    }

    fn getattr(&mut self, request: &Request<'_>, reply: &mut Reply<'_>) -> Result<(), Errno> {
        let node = self.node(request)?;
        let attributes = self.attributes(&node).map_err(Refusal::errno)?;
        if let Node::Path(path) = &node {
            self.inputs.shown(path, &attributes);
        }
        reply.put(&fuse_attr_out {
            attr_valid: FOR_LONG,
            attr_valid_nsec: 0,
            dummy: 0,
            attr: fuse_attributes(&node, &attributes),
        });
        Ok(())
    }

    /// Files that take output are cut to nothing before they are written, which changes nothing.
    fn setattr(&mut self, request: &Request<'_>, reply: &mut Reply<'_>) -> Result<(), Errno> {
        match self.node(request)? {
            Node::Out(_) => self.getattr(request, reply),
            _ => Err(Errno::ROFS),
        }
    }

    fn readlink(&mut self, request: &Request<'_>, reply: &mut Reply<'_>) -> Result<(), Errno> {
        let Node::Path(path) = self.node(request)? else {
            return Err(Errno::INVAL);
        };
        let target = self.tree.link(&path).map_err(Refusal::errno)?;
        self.inputs.link(&path, &target);
        // The longest that Linux makes.
        reply.body().extend_from_slice(part(&target, 0, 4095));
        Ok(())
    }

    /// Only what takes output is opened. For the others the guest's kernel learns that it need not
    /// ask, and keeps what it has read.
    fn open(&mut self, request: &Request<'_>, reply: &mut Reply<'_>) -> Result<(), Errno> {
        match self.node(request)? {
            Node::Out(_) => {
                reply.put(&fuse_open_out {
                    fh: request.node,
                    open_flags: FOPEN_DIRECT_IO,
                    ..fuse_open_out::default()
                });
                Ok(())
            }
            _ => Err(Errno::NOSYS),
        }
    }

    fn read(&mut self, request: &Request<'_>, reply: &mut Reply<'_>) -> Result<(), Errno> {
        let (wanted, _) = request.take::<fuse_read_in>()?;
        let len = usize::try_from(wanted.size).unwrap_or(MOST).min(MOST);
        let at = wanted.offset;
        match self.node(request)? {
            Node::Job => reply
                .body()
                .extend_from_slice(part(&self.errand.job, at, len)),
            Node::Stdin => reply
                .body()
                .extend_from_slice(part(&self.errand.stdin, at, len)),
            Node::Path(path) => {
                let read = self.read_file(&path, at, len, reply.body());
                read.map_err(Refusal::errno)?;
            }
            Node::Root | Node::OutFolder => return Err(Errno::ISDIR),
            Node::Out(_) => return Err(Errno::BADF),
        }
        Ok(())
    }

    fn read_file(
        &mut self,
        path: &Arc<[u8]>,
        at: u64,
        len: usize,
        into: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        let known = self.open.iter().position(|(open, _)| open == path);
        let (_, file) = match known {
            Some(known) => self.open.remove(known).ok_or(Refusal::Missing)?,
            None => {
                let file = self.tree.open(path)?;
                self.inputs.file(path, self.tree.stamp(&file)?);
                (path.clone(), file)
            }
        };
        let read = self.tree.read(&file, at, len, into);
        if self.open.len() >= OPEN_FILES {
            self.open.pop_front();
        }
        self.open.push_back((path.clone(), file));
        read
    }

    fn write(&mut self, request: &Request<'_>, reply: &mut Reply<'_>) -> Result<(), Errno> {
        let Node::Out(out) = self.node(request)? else {
            return Err(Errno::ROFS);
        };
        let (header, bytes) = request.take::<fuse_write_in>()?;
        if usize::try_from(header.size) != Ok(bytes.len()) || bytes.len() > MOST {
            return Err(Errno::INVAL);
        }
        if out == Out::Files {
            let left = self.archive_left.checked_sub(bytes.len() as u64);
            self.archive_left = left.ok_or(Errno::NOSPC)?;
        }
        self.sink.take(out, bytes)?;
        let (size, padding) = (header.size, 0);
        reply.put(&fuse_write_out { size, padding });
        Ok(())
    }

    fn forget(&mut self, request: &Request<'_>) {
        const FORGET: u32 = fuse_opcode::FUSE_FORGET as u32;
        const BATCH_FORGET: u32 = fuse_opcode::FUSE_BATCH_FORGET as u32;
        match request.opcode {
            FORGET => {
                if let Ok((one, _)) = request.take::<fuse_forget_in>() {
                    self.nodes.forget(request.node, one.nlookup);
                }
            }
            BATCH_FORGET => {
                let Ok((batch, mut rest)) = request.take::<fuse_batch_forget_in>() else {
                    return;
                };
                for _ in 0..batch.count {
                    let Ok((one, after)) = fuse_forget_one::read_from_prefix(rest) else {
                        return;
                    };
                    self.nodes.forget(one.nodeid, one.nlookup);
                    rest = after;
                }
            }
            // An interrupt comes too late: every request was answered at once.
            _ => {}
        }
    }

    fn readdir(
        &mut self,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        plus: bool,
    ) -> Result<(), Errno> {
        let (wanted, _) = request.take::<fuse_read_in>()?;
        let room = usize::try_from(wanted.size).unwrap_or(MOST).min(MOST);
        let folder = self.node(request)?;
        let listed = self.list(request.node, &folder, wanted.offset == 0)?;
        let skipped = usize::try_from(wanted.offset).unwrap_or(usize::MAX);
        let dots = [&b"."[..], b".."].map(|name| Listed {
            name: name.to_vec(),
            kind: Kind::Folder,
        });
        let all = dots.iter().chain(&listed).enumerate().skip(skipped);
        for (at, entry) in all {
            let size = size_of_entry(entry, plus);
            if reply.len() + size > room {
                break;
            }
            let node = match at {
                0 | 1 => folder.clone(),
                _ => Nodes::child(&folder, &entry.name).ok_or(Errno::NOENT)?,
            };
            if plus {
                let known = match at {
                    // The guest's kernel knows these two.
                    0 | 1 => None,
                    _ => self.known(&node),
                };
                reply.put(&known.unwrap_or_else(|| entry_out(0, fuse_attr::default())));
            }
            put_entry(reply, entry, inode(&node), at as u64 + 1);
        }
        self.keep_list(request.node, listed);
        Ok(())
    }

    fn known(&mut self, node: &Node) -> Option<fuse_entry_out> {
        let attributes = self.attributes(node).ok()?;
        if let Node::Path(path) = node {
            self.inputs.shown(path, &attributes);
        }
        self.entry(node, &attributes).ok()
    }

    /// What is in a folder: the list that the guest reads on, or a new one from its beginning.
    fn list(&mut self, number: u64, folder: &Node, anew: bool) -> Result<Vec<Listed>, Errno> {
        let kept = self.lists.iter().position(|(known, _)| *known == number);
        let kept = kept.and_then(|at| self.lists.remove(at));
        if let Some((_, listed)) = kept.filter(|_| !anew) {
            return Ok(listed);
        }
        match folder {
            Node::Path(path) => {
                let listed = self.tree.list(path).map_err(Refusal::errno)?;
                self.inputs.folder(path, &listed);
                Ok(listed)
            }
            // Nobody but the guest's first program looks here, and it knows the names.
            Node::Root | Node::OutFolder => Ok(Vec::new()),
            Node::Job | Node::Stdin | Node::Out(_) => Err(Errno::NOTDIR),
        }
    }

    fn keep_list(&mut self, number: u64, listed: Vec<Listed>) {
        if self.lists.len() >= LISTS {
            self.lists.pop_front();
        }
        self.lists.push_back((number, listed));
    }

    /// The first ten names that the guest asked for, that the host has, and that were not given.
    pub fn outside(&self) -> &[Vec<u8>] {
        self.inputs.outside()
    }

    /// Libraries (`lib….so…`) that the guest looked for and found nowhere.
    pub fn missing_libraries(&self) -> Vec<Vec<u8>> {
        self.inputs.missing_libraries()
    }

    /// The names that the guest has been told something of, in the order of the paths, and
    /// whether there were more than are remembered (a million).
    pub fn looked(&self) -> (impl Iterator<Item = &Looked>, bool) {
        self.inputs.looked()
    }

    /// All that the guest has read, in the order of the paths. Each file is read once more, whole,
    /// as long as `go_on`, which is asked now and then, says so; else there is nothing.
    pub fn inputs(&mut self, mut go_on: impl FnMut() -> bool) -> Option<Vec<Input>> {
        self.inputs.all(&mut self.tree, &mut go_on)
    }

    /// Who took what the guest said.
    pub fn into_sink(self) -> S {
        self.sink
    }
}

/// Whether a request would change the file system.
fn changes(opcode: u32) -> bool {
    const CHANGES: [fuse_opcode; 14] = [
        fuse_opcode::FUSE_SYMLINK,
        fuse_opcode::FUSE_MKNOD,
        fuse_opcode::FUSE_MKDIR,
        fuse_opcode::FUSE_UNLINK,
        fuse_opcode::FUSE_RMDIR,
        fuse_opcode::FUSE_RENAME,
        fuse_opcode::FUSE_RENAME2,
        fuse_opcode::FUSE_LINK,
        fuse_opcode::FUSE_CREATE,
        fuse_opcode::FUSE_TMPFILE,
        fuse_opcode::FUSE_SETXATTR,
        fuse_opcode::FUSE_REMOVEXATTR,
        fuse_opcode::FUSE_FALLOCATE,
        fuse_opcode::FUSE_COPY_FILE_RANGE,
    ];
    CHANGES.into_iter().any(|one| one as u32 == opcode)
}

fn init(request: &Request<'_>, reply: &mut Reply<'_>) -> Result<(), Errno> {
    // Older kernels send less behind the first four words.
    let words = request.body.get(..16).ok_or(Errno::INVAL)?;
    let mut asked = fuse_init_in::default();
    asked.as_mut_bytes()[..16].copy_from_slice(words);
    if asked.major != FUSE_KERNEL_VERSION || asked.minor < MINOR {
        return Err(Errno::PROTO);
    }
    reply.put(&fuse_init_out {
        major: FUSE_KERNEL_VERSION,
        minor: MINOR,
        max_readahead: asked.max_readahead.min(PAGE * u32::from(MOST_PAGES)),
        flags: asked.flags & FLAGS,
        max_background: 64,
        congestion_threshold: 48,
        max_write: PAGE * u32::from(MOST_PAGES),
        time_gran: 1,
        max_pages: MOST_PAGES,
        ..fuse_init_out::default()
    });
    Ok(())
}

fn statfs(reply: &mut Reply<'_>) -> Result<(), Errno> {
    reply.put(&fuse_statfs_out {
        st: fuse_kstatfs {
            blocks: 1 << 20,
            files: 1 << 20,
            bsize: PAGE,
            namelen: 255,
            frsize: PAGE,
            ..fuse_kstatfs::default()
        },
    });
    Ok(())
}

fn entry_out(number: u64, attr: fuse_attr) -> fuse_entry_out {
    fuse_entry_out {
        nodeid: number,
        generation: 0,
        entry_valid: FOR_LONG,
        attr_valid: FOR_LONG,
        entry_valid_nsec: 0,
        attr_valid_nsec: 0,
        attr,
    }
}

fn fuse_attributes(node: &Node, of: &Attributes) -> fuse_attr {
    let (kind, size) = match of.kind {
        Kind::File => (REGULAR, of.size),
        Kind::Folder => (DIRECTORY, u64::from(PAGE)),
        Kind::Link => (SYMLINK, of.size),
    };
    let user = match of.owner {
        Owner::System => 0,
        Owner::User => count_init::USER,
    };
    fuse_attr {
        ino: inode(node),
        size,
        blocks: size.div_ceil(512),
        atime: TIME,
        mtime: of.modified.unwrap_or(TIME),
        ctime: TIME,
        mode: kind | u32::from(of.mode & 0o7777),
        // Also of folders: so nobody takes it for the number of folders in them.
        nlink: 1,
        uid: user,
        gid: user,
        blksize: PAGE,
        ..fuse_attr::default()
    }
}

/// What stands in front of a name, in the order of `fuse_dirent`, which ends with the name.
#[derive(IntoBytes, zerocopy::Immutable)]
#[repr(C)]
struct Dirent {
    inode: u64,
    next: u64,
    name_len: u32,
    kind: u32,
}

fn size_of_entry(entry: &Listed, plus: bool) -> usize {
    let before = if plus { size_of::<fuse_entry_out>() } else { 0 };
    before + (size_of::<Dirent>() + entry.name.len()).next_multiple_of(8)
}

fn put_entry(reply: &mut Reply<'_>, entry: &Listed, inode: u64, next: u64) {
    // The same as the upper bits of a mode (`DT_REG` and so on).
    let kind = match entry.kind {
        Kind::File => REGULAR >> 12,
        Kind::Folder => DIRECTORY >> 12,
        Kind::Link => SYMLINK >> 12,
    };
    reply.put(&Dirent {
        inode,
        next,
        name_len: u32::try_from(entry.name.len()).unwrap_or(u32::MAX),
        kind,
    });
    let padding = entry.name.len().next_multiple_of(8) - entry.name.len();
    reply.body().extend_from_slice(&entry.name);
    reply.body().extend_from_slice(&[0; 8][..padding]);
}
