//! What perf is told of the guest's files, so that it takes none of this host for them.
//!
//! perf opens what a record names, and where the record has a build id, it uses nothing that has
//! another. So each file has one. Its own where that is known; else one that no file has.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::super::names::Names;
use super::super::programs::{FileId, FileInfo};

/// Memory that perf takes for just-in-time code if it may be run: then it reads names for it
/// from this host's `/tmp/perf-PID.map`.
const WITHOUT_FILE: [&str; 4] = ["/dev/zero", "/anon_hugepage", "[stack", "/SYSV"];
/// What perf reads at once, as a map of just-in-time code.
const JIT_MAP: &str = "/tmp/perf-";
/// What the build ids begin with that no file has.
const OURS: &[u8; 4] = b"ump:";

/// A build id as perf compares them: at most 20 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct BuildId {
    bytes: [u8; 20],
    length: u8,
}

impl BuildId {
    /// Of hexadecimal digits; none of what are none.
    fn of_digits(digits: &str) -> Option<Self> {
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let pairs = digits.as_bytes().chunks_exact(2);
        let known: Vec<u8> = pairs.map_while(byte).take(20).collect();
        let mut bytes = [0; 20];
        bytes[..known.len()].copy_from_slice(&known);
        let length = u8::try_from(known.len())
            .ok()
            .filter(|length| *length > 0)?;
        Some(Self { bytes, length })
    }

    /// One that nothing has but what is described by `text`.
    pub(super) fn of_nothing_else(text: &str) -> Self {
        let mut bytes = [0; 20];
        bytes[..4].copy_from_slice(OURS);
        bytes[4..12].copy_from_slice(&fnv(text, 0xcbf2_9ce4_8422_2325).to_be_bytes());
        bytes[12..].copy_from_slice(&fnv(text, 0x6c62_272e_07bb_0142).to_be_bytes());
        Self { bytes, length: 20 }
    }

    /// Another one, for `name` in what this one is of.
    pub(super) fn with(&self, name: &str) -> Self {
        let digits: String = self
            .bytes
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        Self::of_nothing_else(&format!("{name}\0{digits}"))
    }

    /// All 20 bytes, and how many of them count.
    pub(super) fn parts(&self) -> (&[u8; 20], u8) {
        (&self.bytes, self.length)
    }
}

/// FNV-1a.
fn fnv(text: &str, start: u64) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    text.bytes().fold(start, step)
}

/// By what perf tells a file from others of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Identity {
    /// No other file is taken for it.
    BuildId(BuildId),
    /// Device as `MAJOR << 20 | MINOR`, inode and generation of a file that has no build id, and
    /// that perf shall find by its name.
    Inode(u32, u64, u32),
}

/// A file, or what is mapped without one, as perf is told of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Object {
    pub(super) name: String,
    pub(super) identity: Identity,
    /// perf may look for code there.
    pub(super) code: bool,
    /// It is a file of the guest.
    file: bool,
    /// The guest has it no more.
    deleted: bool,
}

impl Object {
    /// Where nothing is known to be mapped.
    pub(super) fn nothing() -> Self {
        let name = "[unknown]";
        Self {
            name: name.to_owned(),
            identity: Identity::BuildId(BuildId::of_nothing_else(name)),
            code: true,
            file: false,
            deleted: false,
        }
    }

    /// perf is told a build id for it that no file has.
    fn is_nowhere(&self) -> bool {
        matches!(self.identity, Identity::BuildId(id) if id.bytes.starts_with(OURS))
    }

    fn new(info: &FileInfo, names: &Names, id: FileId) -> Self {
        if info.name.is_empty() {
            return Self::nothing();
        }
        let (device, inode, generation) = info.inode;
        let found = names.program_file(id);
        let own = BuildId::of_digits(&info.build_id);
        let (name, identity) = match (own, found) {
            (Some(own), _) => (info.name.clone(), Identity::BuildId(own)),
            // Below the folder where perf looks for it, another may have its short name.
            (None, Some(found)) => match BuildId::of_digits(found.build_id()) {
                Some(own) => (info.whole_name(), Identity::BuildId(own)),
                None => (
                    info.whole_name(),
                    Identity::Inode(device, inode, generation),
                ),
            },
            (None, None) => {
                let none = BuildId::of_nothing_else(&info.name);
                (info.name.clone(), Identity::BuildId(none))
            }
        };
        Self {
            name,
            identity,
            code: info.name != "//anon"
                && info.name != "[heap]"
                && !WITHOUT_FILE.iter().any(|one| info.name.starts_with(one)),
            file: info.is_file(),
            deleted: info.deleted,
        }
    }
}

/// All files of a profile.
#[derive(Debug)]
pub(super) struct Objects {
    files: HashMap<FileId, Object>,
    nothing: Object,
}

impl Objects {
    /// Those of `names`; `others` are the names of the kernel and of its modules.
    pub(super) fn new(names: &Names, others: &BTreeSet<String>) -> Self {
        let files = names.programs.files();
        let files = files.map(|(id, info)| (id, Object::new(info, names, id)));
        let mut files: HashMap<FileId, Object> = files.collect();
        // perf knows one file of a name: that which can be found keeps it, and others are told
        // apart by their devices, or else by their inodes, too.
        for with_inode in [false, true] {
            let shared = shared(&files, others);
            for (id, object) in &mut files {
                let Some(found) = shared.get(&object.name) else {
                    continue;
                };
                if *found == Namesakes::One && !object.is_nowhere() {
                    continue;
                }
                let info = names.file(*id);
                let inode = if with_inode {
                    format!(":{}", info.inode.1)
                } else {
                    String::new()
                };
                object.name = format!("{}{inode}{}", info.device(), info.name);
            }
        }
        Self {
            files,
            nothing: Object::nothing(),
        }
    }

    /// A file of the profile.
    pub(super) fn file(&self, id: FileId) -> &Object {
        self.files.get(&id).unwrap_or(&self.nothing)
    }

    /// How many files the guest has for which perf looks nowhere, and the name of one.
    pub(super) fn nowhere(&self) -> Option<(usize, &str)> {
        let files = self.files.values();
        let files = files.filter(|object| object.file && !object.deleted);
        let nowhere = files.filter(|object| object.code && object.is_nowhere());
        let names: BTreeSet<&str> = nowhere.map(|object| object.name.as_str()).collect();
        Some((names.len(), names.first()?))
    }

    /// What perf has to know of before the first record, in the order of names: files with
    /// their build ids.
    pub(super) fn known(&self) -> BTreeMap<&str, BuildId> {
        let files = self
            .files
            .values()
            .filter(|object| object.file && object.code);
        let known = files.filter_map(|object| match object.identity {
            Identity::BuildId(id) => Some((object.name.as_str(), id)),
            Identity::Inode(..) => None,
        });
        known.collect()
    }
}

/// How many files of one name perf can find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Namesakes {
    One,
    /// Or the name is that of something of perf's own.
    Several,
}

/// Names under which perf would take one file for another, or for something of its own.
fn shared(
    files: &HashMap<FileId, Object>,
    others: &BTreeSet<String>,
) -> BTreeMap<String, Namesakes> {
    let mut named: BTreeMap<&str, Vec<&Object>> = BTreeMap::new();
    for object in files.values().filter(|object| object.code) {
        named.entry(object.name.as_str()).or_default().push(object);
    }
    let found = |(name, all): (&str, Vec<&Object>)| {
        let found = all.iter().filter(|object| !object.is_nowhere());
        let several = is_several(&found.map(|object| object.identity).collect());
        let found = if several || others.contains(name) || name.starts_with(JIT_MAP) {
            Namesakes::Several
        } else if all
            .iter()
            .any(|object| object.is_nowhere() != all[0].is_nowhere())
        {
            Namesakes::One
        } else {
            return None;
        };
        Some((name.to_owned(), found))
    };
    named.into_iter().filter_map(found).collect()
}

/// An inode that is not known is any.
fn is_several(all: &BTreeSet<Identity>) -> bool {
    let mut inodes = BTreeSet::new();
    let mut others = 0;
    for one in all {
        match one {
            Identity::BuildId(_) => others += 1,
            Identity::Inode(device, inode, _) => {
                inodes.insert((*device, *inode));
            }
        }
    }
    if inodes.len() > 1 {
        inodes.remove(&(0, 0));
    }
    others + inodes.len() > 1
}
