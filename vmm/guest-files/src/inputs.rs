//! What of the host the guest has seen, and what it looked for.

use std::collections::{BTreeMap, BTreeSet};

use sha2::{Digest, Sha256};

use crate::tree::{Attributes, Kind, Listed, Refusal, Stamp, Tree};

/// How many names outside of what was given are told.
const OUTSIDE: usize = 10;
/// How many names of libraries are remembered.
const LIBRARIES: usize = 1000;
/// How many names that were looked at are remembered, and bytes of their paths: guests may look
/// for as many as they like.
const LOOKED: usize = 1 << 20;
const LOOKED_BYTES: usize = 128 << 20;
/// Bytes that are read at a time to hash a file.
const PIECE: usize = 1 << 20;

/// Something of the host that the guest has read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// Its path in the guest, which is that of the host.
    pub path: Vec<u8>,
    /// What it is: a file with its content, a folder with its names, a link with its text.
    pub kind: Kind,
    /// Bytes of that.
    pub size: u64,
    /// SHA-256 of that; `None` for a file that could not be read once more at the end.
    pub digest: Option<[u8; 32]>,
    /// The file became another one, or got another content, while the guest ran: what was counted
    /// was counted with parts of both.
    pub changed: bool,
}

/// A name of the host that the guest has asked for, whether it then read what is there or not:
/// programs decide by what exists, by sizes and by rights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Looked {
    /// Its path in the guest, which is that of the host.
    pub path: Vec<u8>,
    /// What the guest was told of it; `None`: that there is nothing.
    pub found: Option<Attributes>,
    /// The name was asked for by itself; else what it stands for came along with a list of its
    /// folder.
    pub by_name: bool,
    /// It was something else when it was asked for again.
    pub changed: bool,
}

/// The names that the guest has asked for, each with the first answer.
#[derive(Debug, Default)]
struct Names {
    known: BTreeMap<Vec<u8>, Looked>,
    bytes: usize,
    /// There were more than are remembered.
    more: bool,
}

impl Names {
    fn told(&mut self, path: &[u8], found: Option<Attributes>, by_name: bool) {
        if let Some(before) = self.known.get_mut(path) {
            before.by_name |= by_name;
            before.changed |= before.found != found;
            return;
        }
        if self.known.len() >= LOOKED || self.bytes + path.len() > LOOKED_BYTES {
            self.more = true;
            return;
        }
        self.bytes += path.len();
        let looked = Looked {
            path: path.to_vec(),
            found,
            by_name,
            changed: false,
        };
        self.known.insert(path.to_vec(), looked);
    }
}

/// What the guest has read so far.
#[derive(Debug, Default)]
pub(crate) struct Inputs {
    names: Names,
    files: BTreeMap<Vec<u8>, Stamp>,
    others: BTreeMap<Vec<u8>, Input>,
    outside: Vec<Vec<u8>>,
    missed: Vec<Vec<u8>>,
    found: BTreeSet<Vec<u8>>,
}

impl Inputs {
    /// A file is read, for the first time or again; it is in this state.
    pub(crate) fn file(&mut self, path: &[u8], stamp: Stamp) {
        if !self.files.contains_key(path) {
            self.files.insert(path.to_vec(), stamp);
        }
    }

    pub(crate) fn folder(&mut self, path: &[u8], listed: &[Listed]) {
        let mut names = Vec::new();
        for entry in listed {
            let kind = match entry.kind {
                Kind::File => b'f',
                Kind::Folder => b'd',
                Kind::Link => b'l',
            };
            names.extend_from_slice(&entry.name);
            names.extend_from_slice(&[0, kind]);
        }
        self.other(path, Kind::Folder, &names);
    }

    pub(crate) fn link(&mut self, path: &[u8], target: &[u8]) {
        self.other(path, Kind::Link, target);
    }

    fn other(&mut self, path: &[u8], kind: Kind, content: &[u8]) {
        let input = Input {
            path: path.to_vec(),
            kind,
            size: content.len() as u64,
            digest: Some(Sha256::digest(content).into()),
            changed: false,
        };
        match self.others.get_mut(path) {
            Some(before) => before.changed |= before.digest != input.digest,
            None => {
                self.others.insert(path.to_vec(), input);
            }
        }
    }

    /// The guest was told what a name stands for, along with a list of its folder, or once more.
    pub(crate) fn shown(&mut self, path: &[u8], attributes: &Attributes) {
        self.names.told(path, Some(*attributes), false);
    }

    /// The names that it was told something of, by path, and whether there were more.
    pub(crate) fn looked(&self) -> (impl Iterator<Item = &Looked>, bool) {
        (self.names.known.values(), self.names.more)
    }

    /// The guest asked for a name, and that is what came of it.
    pub(crate) fn asked(&mut self, path: &[u8], outcome: Result<Attributes, Refusal>) {
        match outcome {
            Ok(attributes) => self.names.told(path, Some(attributes), true),
            Err(Refusal::Missing | Refusal::Outside) => self.names.told(path, None, true),
            // The host's refusals are errors of this run.
            Err(Refusal::Kind | Refusal::Host(_)) => {}
        }
        if matches!(outcome, Err(Refusal::Outside))
            && self.outside.len() < OUTSIDE
            && !self.outside.iter().any(|known| known == path)
        {
            self.outside.push(path.to_vec());
        }
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
        if !is_library(name) {
            return;
        }
        match outcome {
            Ok(_) if self.found.len() < LIBRARIES => {
                self.found.insert(name.to_vec());
            }
            Err(_)
                if self.missed.len() < LIBRARIES && !self.missed.iter().any(|one| one == name) =>
            {
                self.missed.push(name.to_vec());
            }
            _ => {}
        }
    }

    pub(crate) fn outside(&self) -> &[Vec<u8>] {
        &self.outside
    }

    pub(crate) fn missing_libraries(&self) -> Vec<Vec<u8>> {
        let missed = self.missed.iter();
        missed
            .filter(|name| !self.found.contains(*name))
            .cloned()
            .collect()
    }

    /// All of it, by path, with the digests of files as they are now; `None` if not all could be
    /// digested as long as `go_on` said so.
    pub(crate) fn all<T: Tree>(
        &self,
        tree: &mut T,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Option<Vec<Input>> {
        let mut all: Vec<Input> = self.others.values().cloned().collect();
        for (path, stamp) in &self.files {
            all.push(finish(tree, path, *stamp, go_on)?);
        }
        all.sort_by(|a, b| a.path.cmp(&b.path));
        Some(all)
    }
}

/// `lib….so` and `lib….so.1`, as programs are linked with.
fn is_library(name: &[u8]) -> bool {
    name.starts_with(b"lib")
        && (name.ends_with(b".so") || name.windows(4).any(|part| part == b".so."))
}

/// `None`: it had to end.
fn finish<T: Tree>(
    tree: &mut T,
    path: &[u8],
    stamp: Stamp,
    go_on: &mut dyn FnMut() -> bool,
) -> Option<Input> {
    let again = content(tree, path, go_on).transpose()?;
    let after = again.as_ref().ok().map(|(stamp, _)| *stamp);
    Some(Input {
        path: path.to_vec(),
        kind: Kind::File,
        size: stamp.size,
        digest: again.ok().map(|(_, digest)| digest),
        changed: after != Some(stamp),
    })
}

/// The state of a file, and the digest of its content in that state. A file may be larger than
/// anybody waits for.
fn content<T: Tree>(
    tree: &mut T,
    path: &[u8],
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Option<(Stamp, [u8; 32])>, Refusal> {
    let file = tree.open(path)?;
    let mut hash = Sha256::new();
    let mut piece = Vec::new();
    let mut at = 0;
    loop {
        if !go_on() {
            return Ok(None);
        }
        piece.clear();
        tree.read(&file, at, PIECE, &mut piece)?;
        hash.update(&piece);
        at += piece.len() as u64;
        if piece.len() < PIECE {
            break;
        }
    }
    Ok(Some((tree.stamp(&file)?, hash.finalize().into())))
}
