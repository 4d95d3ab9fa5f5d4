//! Numbers of the files that the guest knows, and numbers that it is shown.

use std::collections::BTreeMap;
use std::sync::Arc;

use sha2::{Digest, Sha256};

/// What a node of the guest is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    /// The root of the file system.
    Root,
    /// The job.
    Job,
    /// Standard input.
    Stdin,
    /// The folder of [`Out`] files.
    OutFolder,
    /// A file that takes what the guest says.
    Out(Out),
    /// A file of the tree, by its absolute path in it.
    Path(Arc<[u8]>),
}

/// What the guest says something by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Out {
    /// The program's standard output.
    Stdout,
    /// The program's standard error.
    Stderr,
    /// How it ended.
    Status,
    /// An archive of what it changed.
    Files,
}

/// Nodes that have the same number in every run, in the order of these numbers, from
/// [`FIRST_FIXED`] on, with the names by which they are looked up. The guest looks these up
/// before its state is kept, and another server goes on with them.
const FIXED_OUTS: [(&str, Out); 4] = [
    ("stdout", Out::Stdout),
    ("stderr", Out::Stderr),
    ("status", Out::Status),
    ("files", Out::Files),
];
const FIXED_PATHS: [&str; 6] = ["/", "/proc", "/sys", "/dev", "/tmp", "/run"];

const ROOT: u64 = 1;
const JOB: u64 = 2;
const STDIN: u64 = 3;
const OUT_FOLDER: u64 = 4;
const FIRST_OUT: u64 = 5;
const FIRST_PATH: u64 = 16;
const FIRST_FREE: u64 = 64;

/// More files than any host's folder of sources has: what a guest can make this server remember.
const MOST: usize = 4 << 20;

/// The files that the guest's kernel holds.
#[derive(Debug)]
pub(crate) struct Nodes {
    known: BTreeMap<u64, Known>,
    numbers: BTreeMap<Arc<[u8]>, u64>,
    next: u64,
}

#[derive(Debug)]
struct Known {
    path: Arc<[u8]>,
    /// How often the guest was given the number and has not given it back.
    lookups: u64,
}

impl Nodes {
    pub(crate) fn new() -> Self {
        let mut nodes = Self {
            known: BTreeMap::new(),
            numbers: BTreeMap::new(),
            next: FIRST_FREE,
        };
        for (number, path) in (FIRST_PATH..).zip(FIXED_PATHS) {
            nodes.insert(number, path.as_bytes().into(), 0);
        }
        nodes
    }

    fn insert(&mut self, number: u64, path: Arc<[u8]>, lookups: u64) {
        self.numbers.insert(path.clone(), number);
        self.known.insert(number, Known { path, lookups });
    }

    /// What a number stands for; `None` if the guest was not given it.
    pub(crate) fn get(&self, number: u64) -> Option<Node> {
        match number {
            ROOT => Some(Node::Root),
            JOB => Some(Node::Job),
            STDIN => Some(Node::Stdin),
            OUT_FOLDER => Some(Node::OutFolder),
            number if number < FIRST_PATH => {
                let at = usize::try_from(number.checked_sub(FIRST_OUT)?).ok()?;
                Some(Node::Out(FIXED_OUTS.get(at)?.1))
            }
            number => Some(Node::Path(self.known.get(&number)?.path.clone())),
        }
    }

    /// The node of this name in a folder; whether there is a file at a path is not asked here.
    pub(crate) fn child(folder: &Node, name: &[u8]) -> Option<Node> {
        match folder {
            Node::Root => match name {
                b"job" => Some(Node::Job),
                b"stdin" => Some(Node::Stdin),
                b"out" => Some(Node::OutFolder),
                b"tree" => Some(Node::Path(Arc::from(&b"/"[..]))),
                _ => None,
            },
            Node::OutFolder => {
                let mut outs = FIXED_OUTS.into_iter();
                let found = outs.find(|(known, _)| known.as_bytes() == name)?;
                Some(Node::Out(found.1))
            }
            Node::Path(path) => {
                let path = path.strip_suffix(b"/").unwrap_or(path);
                Some(Node::Path([path, b"/", name].concat().into()))
            }
            Node::Job | Node::Stdin | Node::Out(_) => None,
        }
    }

    /// Gives the guest the number of a node, once more.
    pub(crate) fn give(&mut self, node: &Node) -> Option<u64> {
        let Node::Path(path) = node else {
            return fixed_number(node);
        };
        if let Some(&number) = self.numbers.get(path) {
            if let Some(known) = self.known.get_mut(&number) {
                known.lookups = known.lookups.saturating_add(1);
            }
            return Some(number);
        }
        if self.known.len() >= MOST {
            return None;
        }
        let number = self.next;
        self.next += 1;
        self.insert(number, path.clone(), 1);
        Some(number)
    }

    /// The guest gives a number back that it was given so often.
    pub(crate) fn forget(&mut self, number: u64, lookups: u64) {
        if number < FIRST_FREE {
            return;
        }
        let Some(known) = self.known.get_mut(&number) else {
            return;
        };
        known.lookups = known.lookups.saturating_sub(lookups);
        if known.lookups == 0 {
            self.numbers.remove(&known.path);
            self.known.remove(&number);
        }
    }

    /// How many paths the guest holds, beside those that are always there.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        self.known.len() - FIXED_PATHS.len()
    }
}

fn fixed_number(node: &Node) -> Option<u64> {
    Some(match node {
        Node::Path(_) => return None,
        Node::Root => ROOT,
        Node::Job => JOB,
        Node::Stdin => STDIN,
        Node::OutFolder => OUT_FOLDER,
        Node::Out(out) => {
            let before = FIXED_OUTS.iter().take_while(|(_, one)| one != out);
            FIRST_OUT + before.count() as u64
        }
    })
}

/// The inode number of a node: of its path alone, so it is the same wherever that path is given.
pub(crate) fn inode(node: &Node) -> u64 {
    let Node::Path(path) = node else {
        return fixed_number(node).unwrap_or(ROOT);
    };
    let [a, b, c, d, e, f, g, h, ..] = <[u8; 32]>::from(Sha256::digest(path));
    // Numbers that a double has too, as some scripts read them; none of the fixed ones.
    u64::from_le_bytes([a, b, c, d, e, f, g, h]) >> 12 | 1 << 52
}

#[cfg(test)]
mod tests {
    use super::{FIRST_FREE, Node, Nodes, Out, fixed_number};

    fn path(text: &str) -> Node {
        Node::Path(text.as_bytes().into())
    }

    #[test]
    fn what_was_given_is_found_until_it_is_given_back() {
        let mut nodes = Nodes::new();
        let a = nodes.give(&path("/a")).expect("room");
        assert_eq!(a, FIRST_FREE);
        assert_eq!(nodes.give(&path("/a")), Some(a));
        let b = nodes.give(&path("/b")).expect("room");
        nodes.forget(a, 1);
        assert_eq!(nodes.get(a), Some(path("/a")));
        nodes.forget(a, 7);
        assert_eq!(nodes.get(a), None);
        assert_eq!(nodes.held(), 1);
        // Numbers are not used again.
        assert!(nodes.give(&path("/a")) > Some(b));
    }

    #[test]
    fn fixed_numbers_stand_for_the_same_in_every_server() {
        let mut nodes = Nodes::new();
        for out in [Out::Stdout, Out::Stderr, Out::Status, Out::Files] {
            let number = fixed_number(&Node::Out(out)).expect("fixed");
            assert_eq!(nodes.get(number), Some(Node::Out(out)));
        }
        let root = nodes.give(&path("/")).expect("the tree's root");
        nodes.forget(root, 100);
        assert_eq!(nodes.get(root), Some(path("/")));
        assert_eq!(nodes.get(9), None);
        assert_eq!(nodes.get(0), None);
    }
}
