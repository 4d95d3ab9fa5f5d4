//! What a program has mapped where: its `struct mm_struct`'s maple tree (since 6.1,
//! `include/linux/maple_tree.h`), and the file behind a mapping.
//!
//! An address is looked up in the tree each time. A look-up reads a node for each level,
//! of which there are two or three; nothing that the guest keeps would say more cheaply
//! that a mapping of before still stands: 6.1 counts no changes of a program's mappings,
//! and a freed `struct vm_area_struct` looks as before until it is used again.

use std::ops::RangeInclusive;

use crate::btf::{Btf, BtfError, Member};
use crate::bytes::u64_at;
use crate::layout::Types;
use crate::space::Space;
use crate::symbols::SymbolTable;
use crate::task::ProgramMemory;
use crate::text::printable;
use crate::unknown::Unknown;

/// Levels of a tree (`MAPLE_HEIGHT_MAX`).
const HIGHEST: usize = 31;
/// Bytes of a node; its address has that many multiples, so bits below are free.
const NODE: usize = 256;
/// Most parts of a path, those of mount points included, and bytes of one.
const MOST_PARTS: usize = 256;
const LONGEST_PART: u32 = 255;
/// `VM_EXEC` (`include/linux/mm.h`).
const EXECUTABLE: u64 = 4;
/// Where pages are counted.
const PAGE: u64 = 0x1000;

/// A mapping of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mapping {
    /// Its first address.
    pub start: u64,
    /// Behind its last one.
    pub end: u64,
    /// Bytes from the start of the file to `start`; 0 without a file.
    pub offset: u64,
    /// The file, where it is one's.
    pub file: Option<File>,
    /// It is the kernel's own code for programs, `[vdso]`.
    pub is_vdso: bool,
    /// The program may execute what is there. Where it may not, a frame that was guessed is
    /// none.
    pub is_executable: bool,
}

impl Mapping {
    /// Both are of one file, or of the kernel's code for programs.
    pub(crate) fn is_of(&self, other: &Self) -> bool {
        self.file == other.file && self.is_vdso == other.is_vdso
    }
}

/// A file that is mapped. Two that are equal are the same file by the same name, unless it
/// was renamed: so the name of one need not be made twice. It serves as a key, and
/// [`Look::path`](crate::Look::path) of it may be asked at any later time, on any thread: a
/// file that is gone by then has no name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct File {
    /// The number of its file system's device: `MAJOR << 20 | MINOR`.
    pub device: u32,
    /// Its inode's number.
    pub inode: u64,
    /// Tells inodes that have the same number one after the other.
    pub generation: u32,
    dentry: u64,
    mount: u64,
    /// Of its `struct inode`.
    address: u64,
    /// The inode that `dentry` names, and its number. An overlay's is another one.
    named: (u64, u64),
}

/// A file's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Path {
    /// From the root of all, or of a file system that is mounted nowhere: of a file of an
    /// overlay this may be the name in its layer. Control characters are replaced by `?`.
    pub name: String,
    /// The file has no name any more.
    pub deleted: bool,
    /// What the name begins at, where that is not the root of the guest's first process: that
    /// of a container, or of a part of its file system. Empty if it is that root, or if that is
    /// not known.
    ///
    /// It is a folder's name from that root on, `/var/lib/machines/web`, or the number of
    /// another device and, but for its own root, the folder's name there: `0:53`, `8:2/web`.
    pub root: String,
}

/// Where a kernel keeps mappings and files.
#[derive(Debug)]
pub(crate) struct MappingLayout {
    root: u64,
    vdso: u64,
    wide: Node,
    leaf: Node,
    inner: Node,
    area: Area,
    dentry: Dentry,
    mount: Mount,
    first: Option<FirstProcess>,
}

/// Where the root of the guest's first process is: of the idle task's list, and of tasks. A
/// kernel without these has no containers that are known as such.
#[derive(Debug)]
struct FirstProcess {
    /// `init_task`.
    idle: u64,
    tasks: u64,
    pid: u64,
    fs: u64,
    /// In `struct fs_struct`.
    dentry: u64,
}

impl FirstProcess {
    fn of(types: Types<'_>, symbols: &SymbolTable) -> Option<Self> {
        const TASK: &str = "task_struct";
        Some(Self {
            idle: symbols.address("init_task")?,
            tasks: types.at(TASK, "tasks", 16).ok()?,
            pid: types.u32(TASK, "pid").ok()?,
            fs: types.u64(TASK, "fs").ok()?,
            dentry: types.u64("fs_struct", "root.dentry").ok()?,
        })
    }

    /// The `struct dentry` that is its root.
    fn root(&self, space: &Space<'_>) -> Option<u64> {
        let u64_of = |base: u64, offset: u64| space.u64(base.wrapping_add(offset)).ok();
        // The first behind the idle task.
        let task = u64_of(self.idle, self.tasks)?.wrapping_sub(self.tasks);
        let is_first = space.u32(task.wrapping_add(self.pid)).ok()? == 1;
        let fs = u64_of(task, self.fs)?;
        is_first.then(|| u64_of(fs, self.dentry))?
    }
}

/// A kind of node: its number, and its arrays.
#[derive(Debug)]
struct Node {
    kind: u64,
    pivots: usize,
    slots: usize,
    /// Slots; there is one pivot less.
    count: usize,
}

#[derive(Debug)]
struct Area {
    start: u64,
    end: u64,
    memory: u64,
    offset: u64,
    file: u64,
    flags: u64,
    /// In `struct file`, `struct inode` and `struct super_block`.
    file_dentry: u64,
    file_mount: u64,
    file_inode: u64,
    inode_number: u64,
    inode_generation: u64,
    inode_super: u64,
    super_device: u64,
}

#[derive(Debug)]
struct Dentry {
    parent: u64,
    name: u64,
    len: u64,
    inode: u64,
    /// Whether it has a name: `d_hash.pprev`.
    hashed: u64,
}

#[derive(Debug)]
struct Mount {
    parent: u64,
    point: u64,
    /// What other structures point to, in a `struct mount`.
    inner: u64,
    root: u64,
}

impl Node {
    fn of(types: Types<'_>, kind: &str, of: &str) -> Result<Self, BtfError> {
        let unexpected = || BtfError::Unexpected(of.to_owned());
        let pivots = types.0.member(of, "pivot")?;
        let slots = types.0.member(of, "slot")?;
        let count = slots.size as usize / 8;
        let ends = |part: &Member| part.offset.checked_add(part.size);
        let inside = |part| ends(part).is_some_and(|end| end as usize <= NODE);
        let fits = inside(&pivots) && inside(&slots) && pivots.size + 8 == slots.size && count > 1;
        let kind = types.0.enumerator("maple_type", kind)?;
        fits.then_some(Self {
            kind: kind.into(),
            pivots: pivots.offset as usize,
            slots: slots.offset as usize,
            count,
        })
        .ok_or_else(unexpected)
    }

    /// The slot that `address` belongs to (`mtree_range_walk` of `lib/maple_tree.c`): the
    /// first whose pivot is not below it. A pivot 0 behind the first is the node's end.
    /// `around` shrinks to the addresses of that slot.
    fn slot(&self, bytes: &[u8; NODE], address: u64, around: &mut RangeInclusive<u64>) -> u64 {
        let last = self.count - 1;
        let pivot = |index: usize| u64_at(bytes, self.pivots + 8 * index);
        let holds = |index: &usize| pivot(*index) >= address || pivot(*index) == 0 && *index > 0;
        let index = (0..last).find(holds).unwrap_or(last);
        let before = index
            .checked_sub(1)
            .map(|index| pivot(index).wrapping_add(1));
        let end = (0..last).contains(&index).then(|| pivot(index));
        let end = end.filter(|end| *end >= address);
        *around = before.map_or(*around.start(), |start| start.max(*around.start()))
            ..=end.map_or(*around.end(), |end| end.min(*around.end()));
        u64_at(bytes, self.slots + 8 * index)
    }
}

impl MappingLayout {
    pub(crate) fn of(btf: &Btf, symbols: &SymbolTable) -> Result<Self, BtfError> {
        let types = Types(btf);
        let area = |name| types.u64("vm_area_struct", name);
        let node = |kind, of| Node::of(types, kind, of);
        Ok(Self {
            root: types.u64("mm_struct", "mm_mt.ma_root")?,
            vdso: types.u64("mm_struct", "context.vdso")?,
            leaf: node("maple_leaf_64", "maple_range_64")?,
            inner: node("maple_range_64", "maple_range_64")?,
            wide: node("maple_arange_64", "maple_arange_64")?,
            area: Area {
                start: area("vm_start")?,
                end: area("vm_end")?,
                memory: area("vm_mm")?,
                offset: area("vm_pgoff")?,
                file: area("vm_file")?,
                flags: area("vm_flags")?,
                file_dentry: types.u64("file", "f_path.dentry")?,
                file_mount: types.u64("file", "f_path.mnt")?,
                file_inode: types.u64("file", "f_inode")?,
                inode_number: types.u64("inode", "i_ino")?,
                inode_generation: types.u32("inode", "i_generation")?,
                inode_super: types.u64("inode", "i_sb")?,
                super_device: types.u32("super_block", "s_dev")?,
            },
            dentry: Dentry {
                parent: types.u64("dentry", "d_parent")?,
                name: types.u64("dentry", "d_name.name")?,
                len: types.u32("dentry", "d_name.len")?,
                inode: types.u64("dentry", "d_inode")?,
                hashed: types.u64("dentry", "d_hash.pprev")?,
            },
            mount: Mount {
                parent: types.u64("mount", "mnt_parent")?,
                point: types.u64("mount", "mnt_mountpoint")?,
                inner: types.0.member("mount", "mnt")?.offset.into(),
                root: types.u64("vfsmount", "mnt_root")?,
            },
            first: FirstProcess::of(types, symbols),
        })
    }

    /// The mapping of `memory` that has `address`.
    pub(crate) fn find(
        &self,
        space: &Space<'_>,
        memory: ProgramMemory,
        address: u64,
    ) -> Result<Mapping, Unknown> {
        let area = self.area(space, memory, address, &mut (0..=u64::MAX))?;
        self.mapping(space, memory, address, area)
    }

    /// The addresses of `memory` around `address` that have the same answer, and the mapping
    /// there, if the program may execute it.
    pub(crate) fn code(
        &self,
        space: &Space<'_>,
        memory: ProgramMemory,
        address: u64,
    ) -> (RangeInclusive<u64>, Option<Mapping>) {
        let mut around = 0..=u64::MAX;
        let area = self.area(space, memory, address, &mut around);
        let found = area.and_then(|area| self.mapping(space, memory, address, area));
        (around, found.ok().filter(|found| found.is_executable))
    }

    /// That of the `struct vm_area_struct` at `area`, if it has `address`.
    fn mapping(
        &self,
        space: &Space<'_>,
        memory: ProgramMemory,
        address: u64,
        area: u64,
    ) -> Result<Mapping, Unknown> {
        let of = &self.area;
        let at = |offset: u64| space.u64(area.wrapping_add(offset));
        let (start, end) = (at(of.start)?, at(of.end)?);
        // It may have changed while it was looked up.
        if at(of.memory)? != memory.address || !(start..end).contains(&address) {
            return Err(Unknown::Inconsistent("mappings"));
        }
        let file = match at(of.file)? {
            0 => None,
            file => Some(self.file(space, file)?),
        };
        let offset = match file {
            Some(_) => at(of.offset)?.wrapping_mul(PAGE),
            None => 0,
        };
        let vdso = space.u64(memory.address.wrapping_add(self.vdso))?;
        Ok(Mapping {
            start,
            end,
            offset,
            file,
            is_vdso: file.is_none() && start == vdso,
            is_executable: at(of.flags)? & EXECUTABLE != 0,
        })
    }

    /// The `struct vm_area_struct` in the tree's slot for `address`.
    fn area(
        &self,
        space: &Space<'_>,
        memory: ProgramMemory,
        address: u64,
        around: &mut RangeInclusive<u64>,
    ) -> Result<u64, Unknown> {
        let root = memory.address.wrapping_add(self.root);
        let mut entry = space.u64(root)?;
        // A pointer to a node; a tree of one entry at 0 has none.
        if entry & 3 != 2 || entry <= 4096 {
            return Err(Unknown::NoMapping);
        }
        for _ in 0..HIGHEST {
            let (kind, at) = (entry >> 3 & 0xf, entry & !(NODE as u64 - 1));
            let bytes: [u8; NODE] = space.array(at).ok_or(Unknown::Unmapped(at))?;
            // A node that was removed is its own parent, the first of its words.
            if u64_at(&bytes, 0) & !(NODE as u64 - 1) == at {
                return Err(Unknown::Inconsistent("mappings"));
            }
            let nodes = [&self.leaf, &self.inner, &self.wide];
            let node = nodes.into_iter().find(|node| node.kind == kind);
            let node = node.ok_or(Unknown::Inconsistent("mappings"))?;
            entry = node.slot(&bytes, address, around);
            if kind != self.leaf.kind {
                continue;
            }
            // Small numbers with these last bits are the tree's own.
            let none = entry == 0 || entry & 3 != 0;
            return if none {
                Err(Unknown::NoMapping)
            } else {
                Ok(entry)
            };
        }
        Err(Unknown::TooMany("mappings"))
    }

    fn file(&self, space: &Space<'_>, file: u64) -> Result<File, Unknown> {
        let u64_of = |offset: u64| space.u64(file.wrapping_add(offset));
        let of = &self.area;
        let dentry = u64_of(of.file_dentry)?;
        self.identity(
            space,
            u64_of(of.file_inode)?,
            dentry,
            u64_of(of.file_mount)?,
        )
    }

    /// The file of the inode at `address` that `dentry` names.
    fn identity(
        &self,
        space: &Space<'_>,
        address: u64,
        dentry: u64,
        mount: u64,
    ) -> Result<File, Unknown> {
        let of = &self.area;
        let u64_of = |base: u64, offset: u64| space.u64(base.wrapping_add(offset));
        let u32_of = |base: u64, offset: u64| space.u32(base.wrapping_add(offset));
        let inode = u64_of(address, of.inode_number)?;
        let named = match u64_of(dentry, self.dentry.inode)? {
            same if same == address => (same, inode),
            other => (other, u64_of(other, of.inode_number)?),
        };
        Ok(File {
            device: u32_of(u64_of(address, of.inode_super)?, of.super_device)?,
            inode,
            generation: u32_of(address, of.inode_generation)?,
            dentry,
            mount,
            address,
            named,
        })
    }

    /// The name of `file`, which may have been mapped long ago: the same file has to be there
    /// before the name is read, and behind.
    pub(crate) fn path(&self, space: &Space<'_>, file: &File) -> Result<Path, Unknown> {
        let check = || {
            space.forget();
            let now = self.identity(space, file.address, file.dentry, file.mount)?;
            (now == *file)
                .then_some(())
                .ok_or(Unknown::Inconsistent("files"))
        };
        check()?;
        let path = self.name(space, file)?;
        check()?;
        Ok(path)
    }

    /// As `__prepend_path` of `fs/d_path.c` makes it.
    fn name(&self, space: &Space<'_>, file: &File) -> Result<Path, Unknown> {
        let u64_of = |base: u64, offset: u64| space.u64(base.wrapping_add(offset));
        let of = &self.dentry;
        let mut parts = Vec::new();
        let mut dentry = file.dentry;
        let mut mount = file.mount.wrapping_sub(self.mount.inner);
        let mut deleted = u64_of(dentry, of.hashed)? == 0;
        // Of the file systems that lie over each other at the root, the one that is seen.
        let mut seen = (usize::MAX, dentry);
        for _ in 0..MOST_PARTS {
            let root = u64_of(mount.wrapping_add(self.mount.inner), self.mount.root)?;
            if dentry == root {
                if seen.0 != parts.len() {
                    seen = (parts.len(), root);
                }
                let parent = u64_of(mount, self.mount.parent)?;
                if parent == mount {
                    // A root is in no directory.
                    deleted &= dentry != file.dentry;
                    let root = self.elsewhere(space, seen.1)?;
                    return Ok(joined(&parts, deleted, root));
                }
                dentry = u64_of(mount, self.mount.point)?;
                mount = parent;
                continue;
            }
            let (part, parent) = self.part(space, dentry)?;
            parts.push(part);
            if parent == dentry {
                // Of no directory: a file in memory, for example.
                return Ok(joined(&parts, deleted, String::new()));
            }
            dentry = parent;
        }
        Err(Unknown::TooMany("names"))
    }

    /// The name of `dentry` in the directory that it is in, and that.
    fn part(&self, space: &Space<'_>, dentry: u64) -> Result<(Vec<u8>, u64), Unknown> {
        let u64_of = |offset: u64| space.u64(dentry.wrapping_add(offset));
        let at = u64_of(self.dentry.name)?;
        let len = space.u32(dentry.wrapping_add(self.dentry.len))?;
        if len > LONGEST_PART {
            return Err(Unknown::Inconsistent("names"));
        }
        let part = space.bytes(at, len as usize);
        let part = part.ok_or(Unknown::Unmapped(at))?;
        Ok((part, u64_of(self.dentry.parent)?))
    }

    /// The same of the root of the `struct task_struct` at `task`; none where it has none any
    /// more, or it is not known.
    pub(crate) fn root_of(&self, space: &Space<'_>, task: u64) -> Option<String> {
        let first = self.first.as_ref()?;
        let u64_of = |base: u64, offset: u64| space.u64(base.wrapping_add(offset)).ok();
        let dentry = u64_of(u64_of(task, first.fs)?, first.dentry)?;
        self.elsewhere(space, dentry).ok()
    }

    /// What [`Path::root`] says of names that begin at `dentry`.
    fn elsewhere(&self, space: &Space<'_>, mut dentry: u64) -> Result<String, Unknown> {
        let first = self.first.as_ref().and_then(|first| first.root(space));
        let Some(first) = first.filter(|first| *first != dentry) else {
            return Ok(String::new());
        };
        let device = |dentry: u64| {
            let of = &self.area;
            let inode = space.u64(dentry.wrapping_add(self.dentry.inode))?;
            let file_system = space.u64(inode.wrapping_add(of.inode_super))?;
            space.u32(file_system.wrapping_add(of.super_device))
        };
        let own = device(dentry)?;
        let mut parts = Vec::new();
        for _ in 0..MOST_PARTS {
            if dentry == first {
                return Ok(folder(&parts));
            }
            let (part, parent) = self.part(space, dentry)?;
            if parent == dentry {
                let (major, minor) = (own >> 20, own & 0xf_ffff);
                return Ok(format!("{major}:{minor}{}", folder(&parts)));
            }
            parts.push(part);
            dentry = parent;
        }
        Err(Unknown::TooMany("names"))
    }
}

/// The name of a folder, whose last part is the first; empty for a root.
fn folder(parts: &[Vec<u8>]) -> String {
    let mut name = String::new();
    for part in parts.iter().rev() {
        name.push('/');
        name.push_str(&printable(part));
    }
    name
}

fn joined(parts: &[Vec<u8>], deleted: bool, root: String) -> Path {
    let mut name = folder(parts);
    if name.is_empty() {
        name.push('/');
    }
    Path {
        name,
        deleted,
        root,
    }
}
