//! A hierarchy of control groups that a test plays: folders and files as the kernel has them, and
//! which of the test's threads run where. It is of the thread that plays it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

thread_local! {
    static PLAYED: RefCell<Option<Played>> = const { RefCell::new(None) };
}

#[derive(Debug)]
struct Played {
    /// The kind of file system that the folders are on.
    kind: i64,
    /// Where threads run.
    cgroups: BTreeMap<u32, String>,
}

/// Whether a file system of this kind is played to be that of the hierarchy.
pub(crate) fn is_v2(kind: i64) -> bool {
    PLAYED.with_borrow(|played| played.as_ref().is_some_and(|played| played.kind == kind))
}

/// Where a thread is played to run.
pub(crate) fn cgroup(number: u32) -> Option<Vec<u8>> {
    PLAYED.with_borrow(|played| {
        let cgroups = &played.as_ref()?.cgroups;
        cgroups.get(&number).map(|path| path.clone().into_bytes())
    })
}

/// The groups, and who runs in them.
#[derive(Debug)]
pub(crate) struct PlayedGroups {
    root: TempDir,
    /// So many were removed.
    removed: usize,
}

impl PlayedGroups {
    /// With nothing but the root, in which these threads run.
    pub(crate) fn new(threads: &[u32]) -> Self {
        let root = tempfile::tempdir().expect("a folder");
        let [top, gone, own] = ["groups", "gone", "proc/self"].map(|name| root.path().join(name));
        for folder in [&top, &gone, &own] {
            fs::create_dir_all(folder).expect("a folder");
        }
        let mount = "30 23 0:26 / /groups rw - cgroup2 cgroup rw\n";
        fs::write(own.join("mountinfo"), mount).expect("a file");
        let played = Played {
            kind: rustix::fs::statfs(&top).expect("it is there").f_type,
            cgroups: threads.iter().map(|one| (*one, "/".to_owned())).collect(),
        };
        PLAYED.set(Some(played));
        PlayedGroups { root, removed: 0 }
    }

    /// Where the kernel's files are.
    pub(crate) fn root(&self) -> &Path {
        self.root.path()
    }

    fn folder(&self, path: &str) -> PathBuf {
        self.root.path().join("groups").join(&path[1..])
    }

    /// The number of a group; `None`: it is not there.
    pub(crate) fn number(&self, path: &str) -> Option<u64> {
        let seen = fs::metadata(self.folder(path));
        seen.ok().map(|seen| seen.ino())
    }

    /// Makes a group, if what it is to be in is there.
    pub(crate) fn make(&self, path: &str) {
        if fs::create_dir(self.folder(path)).is_ok() {
            self.write();
        }
    }

    /// Removes a group, if nothing is in it.
    pub(crate) fn remove(&mut self, path: &str) {
        let inside = format!("{path}/");
        let is_used = self.all().iter().any(|one| one.starts_with(&inside)) || self.runs(path);
        if is_used || self.number(path).is_none() {
            return;
        }
        // Its number stays taken: the kernel gives no other group the same one.
        self.removed += 1;
        let gone = self.root.path().join("gone").join(self.removed.to_string());
        fs::rename(self.folder(path), gone).expect("it was there");
    }

    /// Whether something runs in a group or below it.
    pub(crate) fn runs(&self, path: &str) -> bool {
        let below = format!("{path}/");
        let is_in = |at: &String| at == path || at.starts_with(&below);
        PLAYED.with_borrow(|played| {
            let mut places = played.iter().flat_map(|played| played.cgroups.values());
            places.any(is_in)
        })
    }

    /// Has a thread run in a group from now on, if that is there.
    pub(crate) fn place(&self, thread: u32, path: &str) {
        if path != "/" && self.number(path).is_none() {
            return;
        }
        PLAYED.with_borrow_mut(|played| {
            let played = played.as_mut().expect("it is played");
            played.cgroups.insert(thread, path.to_owned());
        });
        self.write();
    }

    /// The groups that a thread runs in, from the outermost on.
    pub(crate) fn chain(&self, thread: u32) -> Vec<u64> {
        let path = cgroup(thread).and_then(|path| String::from_utf8(path).ok());
        let path = path.filter(|path| path != "/").unwrap_or_default();
        let ends = path.match_indices('/').map(|(at, _)| at).skip(1);
        let ends = ends.chain([path.len()]).filter(|end| *end > 0);
        ends.filter_map(|end| self.number(&path[..end])).collect()
    }

    fn all(&self) -> Vec<String> {
        let mut all = Vec::new();
        let mut next = vec![String::new()];
        while let Some(path) = next.pop() {
            let inside = fs::read_dir(self.root.path().join(format!("groups{path}")));
            for entry in inside.expect("it is there").flatten() {
                if entry.path().is_dir() {
                    let name = entry.file_name().into_string().expect("text");
                    next.push(format!("{path}/{name}"));
                }
            }
            all.extend(Some(path).filter(|path| !path.is_empty()));
        }
        all
    }

    /// The kernel's files say what is so now.
    fn write(&self) {
        for path in self.all() {
            let folder = self.folder(&path);
            let threads = PLAYED.with_borrow(|played| {
                let places = played.iter().flat_map(|played| &played.cgroups);
                let here = places.filter(|(_, at)| **at == path);
                here.map(|(one, _)| format!("{one}\n")).collect::<String>()
            });
            let populated = format!("populated {}\nfrozen 0\n", u8::from(self.runs(&path)));
            fs::write(folder.join("cgroup.events"), populated).expect("a file");
            let process = if threads.is_empty() {
                String::new()
            } else {
                format!("{}\n", std::process::id())
            };
            fs::write(folder.join("cgroup.procs"), process).expect("a file");
            fs::write(folder.join("cgroup.threads"), threads).expect("a file");
        }
    }
}

impl Drop for PlayedGroups {
    fn drop(&mut self) {
        PLAYED.set(None);
    }
}
