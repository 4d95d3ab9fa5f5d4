//! A tree in memory: for tests, and empty for a guest that starts and has no program yet.

use std::collections::BTreeMap;
use std::sync::Arc;

use rustix::io::Errno;

use crate::tree::{Attributes, Kind, Listed, Owner, Refusal, Stamp, Tree};

/// Folders that the guest mounts something on before it has a program.
const MOUNTED_ON: [&str; 3] = ["/dev", "/proc", "/sys"];

/// Files by their absolute paths. Without any it has the folders that a guest starts with.
#[derive(Debug)]
pub struct MemoryTree {
    files: BTreeMap<Vec<u8>, Content>,
}

#[derive(Clone, Debug)]
enum Content {
    File(Arc<[u8]>),
    Folder,
    Link(Vec<u8>),
}

impl Default for MemoryTree {
    fn default() -> Self {
        let folders = MOUNTED_ON.map(|path| (path.into(), Content::Folder));
        Self {
            files: folders.into(),
        }
    }
}

impl MemoryTree {
    /// A file with this content; folders on the way to it come by themselves.
    pub fn file(&mut self, path: &str, content: &[u8]) {
        self.add(path, Content::File(content.into()));
    }

    /// A symbolic link.
    pub fn symlink(&mut self, path: &str, target: &str) {
        self.add(path, Content::Link(target.into()));
    }

    fn add(&mut self, path: &str, content: Content) {
        for (at, _) in path.match_indices('/').skip(1) {
            self.files.insert(path[..at].into(), Content::Folder);
        }
        self.files.insert(path.into(), content);
    }

    fn get(&self, path: &[u8]) -> Result<&Content, Refusal> {
        match path {
            b"/" => Ok(&Content::Folder),
            path => self.files.get(path).ok_or(Refusal::Missing),
        }
    }
}

fn kind(content: &Content) -> Kind {
    match content {
        Content::File(_) => Kind::File,
        Content::Folder => Kind::Folder,
        Content::Link(_) => Kind::Link,
    }
}

impl Tree for MemoryTree {
    type File = Arc<[u8]>;

    fn stat(&mut self, path: &[u8]) -> Result<Attributes, Refusal> {
        let content = self.get(path)?;
        let size = match content {
            Content::File(bytes) => bytes.len(),
            Content::Link(target) => target.len(),
            Content::Folder => 0,
        };
        Ok(Attributes {
            kind: kind(content),
            size: size as u64,
            mode: 0o755,
            owner: Owner::System,
            modified: None,
        })
    }

    fn list(&mut self, path: &[u8]) -> Result<Vec<Listed>, Refusal> {
        if kind(self.get(path)?) != Kind::Folder {
            return Err(Refusal::Kind);
        }
        let before = [path.strip_suffix(b"/").unwrap_or(path), b"/"].concat();
        let below = self.files.range(before.clone()..);
        let children = below
            .map_while(|(path, content)| Some((path.strip_prefix(&before[..])?, kind(content))))
            .filter(|(name, _)| !name.contains(&b'/'));
        let listed = children.map(|(name, kind)| Listed {
            name: name.to_vec(),
            kind,
        });
        Ok(listed.collect())
    }

    fn link(&mut self, path: &[u8]) -> Result<Vec<u8>, Refusal> {
        match self.get(path)? {
            Content::Link(target) => Ok(target.clone()),
            _ => Err(Refusal::Kind),
        }
    }

    fn open(&mut self, path: &[u8]) -> Result<Self::File, Refusal> {
        match self.get(path)? {
            Content::File(bytes) => Ok(bytes.clone()),
            Content::Folder => Err(Refusal::Host(Errno::ISDIR)),
            Content::Link(_) => Err(Refusal::Kind),
        }
    }

    fn read(
        &mut self,
        file: &Self::File,
        at: u64,
        len: usize,
        into: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        into.extend_from_slice(part(file, at, len));
        Ok(())
    }

    fn stamp(&mut self, file: &Self::File) -> Result<Stamp, Refusal> {
        Ok(Stamp {
            size: file.len() as u64,
            ..Stamp::default()
        })
    }
}

/// At most `len` bytes from `at` on.
pub(crate) fn part(bytes: &[u8], at: u64, len: usize) -> &[u8] {
    let at = usize::try_from(at).unwrap_or(usize::MAX).min(bytes.len());
    let rest = &bytes[at..];
    &rest[..len.min(rest.len())]
}
