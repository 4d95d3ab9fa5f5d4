//! Chains of callers as numbers: equal ones have one.

use ahash::AHashMap;
use perfmon_abi::compact::ChainEnd;

use super::location::CodeLocation;
use super::names::Names;
use super::record::{Ring, Sample};

/// Addresses whose location is remembered.
const MOST_ADDRESSES: usize = 1 << 20;
/// Stands for the kernel in place of a mapping.
const KERNEL: u64 = u64::MAX;

/// A row of locations, from the outermost caller to where a sample was taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(u32);

/// Whether a path has callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Callers {
    /// It is where the sample was taken alone.
    Left,
    /// It is the whole chain.
    Kept,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    caller: PathId,
    location: CodeLocation,
}

/// All paths of a profile.
#[derive(Debug)]
pub struct Paths<'a> {
    names: &'a Names,
    /// By address and mapping.
    locations: AHashMap<(u64, u64), CodeLocation>,
    /// Node 0 is that of no location.
    nodes: Vec<Node>,
    numbers: AHashMap<(PathId, CodeLocation), PathId>,
}

impl<'a> Paths<'a> {
    /// None so far.
    #[must_use]
    pub fn new(names: &'a Names) -> Self {
        let none = Node {
            caller: PathId::default(),
            location: CodeLocation::Missing(ChainEnd::Broken),
        };
        Self {
            names,
            locations: AHashMap::new(),
            nodes: vec![none],
            numbers: AHashMap::new(),
        }
    }

    /// The names of its locations.
    #[must_use]
    pub fn names(&self) -> &'a Names {
        self.names
    }

    /// The path of `sample`.
    pub fn of(&mut self, sample: &Sample, callers: Callers) -> PathId {
        let leaf = self.leaf(sample);
        let mut path = PathId::default();
        let chain = &sample.guest.chain;
        if callers == Callers::Kept && !chain.is_empty() {
            // The first frame is the sample's own.
            let own = usize::from(chain.kernel_end.is_none());
            path = self.missing(path, chain.program_end);
            for frame in chain.program.iter().skip(own).rev() {
                let location = self.program(sample, frame.address, frame.mapping);
                path = self.next(path, location);
            }
            path = self.missing(path, chain.kernel_end);
            for address in chain.kernel.iter().skip(1).rev() {
                let location = self.kernel(*address);
                path = self.next(path, location);
            }
        }
        self.next(path, leaf)
    }

    /// The locations of a path, from where the sample was taken outwards.
    pub fn outwards(&self, path: PathId) -> impl Iterator<Item = CodeLocation> {
        let mut at = path;
        std::iter::from_fn(move || {
            let node = self.nodes.get(at.0 as usize).filter(|_| at.0 != 0)?;
            at = node.caller;
            Some(node.location)
        })
    }

    /// The locations of a path, from the outermost caller inwards.
    #[must_use]
    pub fn inwards(&self, path: PathId) -> Vec<CodeLocation> {
        let mut locations: Vec<CodeLocation> = self.outwards(path).collect();
        locations.reverse();
        locations
    }

    fn missing(&mut self, path: PathId, end: Option<ChainEnd>) -> PathId {
        match end {
            Some(end @ (ChainEnd::Depth | ChainEnd::Broken | ChainEnd::NoProgram)) => {
                self.next(path, CodeLocation::Missing(end))
            }
            Some(ChainEnd::Outermost | ChainEnd::Entry) | None => path,
        }
    }

    /// `path`, and inside it `location`.
    fn next(&mut self, path: PathId, location: CodeLocation) -> PathId {
        let nodes = &mut self.nodes;
        *self.numbers.entry((path, location)).or_insert_with(|| {
            nodes.push(Node {
                caller: path,
                location,
            });
            PathId(u32::try_from(nodes.len() - 1).unwrap_or(0))
        })
    }

    fn leaf(&mut self, sample: &Sample) -> CodeLocation {
        match sample.ring {
            Some(Ring::User) => self.program(sample, sample.ip, sample.guest.mapping),
            Some(Ring::Kernel) => self.kernel(sample.ip),
            None => CodeLocation::of(sample, self.names),
        }
    }

    fn kernel(&mut self, address: u64) -> CodeLocation {
        let names = self.names;
        self.remembered((address, KERNEL), || CodeLocation::kernel(address, names))
    }

    fn program(&mut self, sample: &Sample, address: u64, mapping: u64) -> CodeLocation {
        let names = self.names;
        if mapping == 0 || mapping == KERNEL {
            return CodeLocation::program(sample, address, 0, names);
        }
        let found = || CodeLocation::program(sample, address, mapping, names);
        match self.remembered((address, mapping), found) {
            // It is the sample's own.
            CodeLocation::User(_) | CodeLocation::Program(super::programs::FileId::UNKNOWN, _) => {
                CodeLocation::program(sample, address, mapping, names)
            }
            location => location,
        }
    }

    fn remembered(
        &mut self,
        place: (u64, u64),
        find: impl FnOnce() -> CodeLocation,
    ) -> CodeLocation {
        if self.locations.len() >= MOST_ADDRESSES {
            self.locations.clear();
        }
        *self.locations.entry(place).or_insert_with(find)
    }
}
