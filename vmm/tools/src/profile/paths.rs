//! Chains of callers as numbers: equal ones have one.

use ahash::AHashMap;
use perfmon_abi::compact::ChainEnd;

use super::location::{CodeLocation, process};
use super::names::Names;
use super::programs::FileId;
use super::record::{Ring, Sample};

/// Addresses whose location is remembered at most.
const MOST_ADDRESSES: usize = 1 << 20;
/// Chains whose path is remembered at most.
const MOST_CHAINS: usize = 1 << 16;
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

/// The number of a location: maps of small things stay in caches.
pub type LocationIndex = u32;

#[derive(Clone, Copy, Debug)]
struct PathNode {
    caller: PathId,
    location: LocationIndex,
}

/// All paths of a profile.
#[derive(Debug)]
pub struct Paths<'a> {
    names: &'a Names,
    locations: Vec<CodeLocation>,
    indices: AHashMap<CodeLocation, LocationIndex>,
    /// By address and mapping.
    places: AHashMap<(u64, u64), LocationIndex>,
    /// Node 0 is that of no location.
    nodes: Vec<PathNode>,
    numbers: AHashMap<(PathId, LocationIndex), PathId>,
    /// The callers of samples, by all that they were told from.
    chains: AHashMap<Box<[u64]>, PathId>,
    /// What is looked for there.
    chain: Vec<u64>,
}

impl<'a> Paths<'a> {
    /// None so far.
    #[must_use]
    pub fn new(names: &'a Names) -> Self {
        let none = PathNode {
            caller: PathId::default(),
            location: 0,
        };
        Self {
            names,
            locations: Vec::new(),
            indices: AHashMap::new(),
            places: AHashMap::new(),
            nodes: vec![none],
            numbers: AHashMap::new(),
            chains: AHashMap::new(),
            chain: Vec::new(),
        }
    }

    /// The names of its locations.
    #[must_use]
    pub fn names(&self) -> &'a Names {
        self.names
    }

    /// The path of `sample`.
    pub fn of(&mut self, sample: &Sample, callers: Callers) -> PathId {
        let (callers, leaf) = self.parts_of(sample, callers);
        self.next(callers, leaf)
    }

    /// The path of the callers of `sample`, and where it was taken: many samples have the
    /// same callers, and few have both.
    pub(super) fn parts_of(
        &mut self,
        sample: &Sample,
        callers: Callers,
    ) -> (PathId, LocationIndex) {
        let leaf = self.leaf(sample);
        let callers = match callers {
            Callers::Kept if !sample.guest.chain.is_empty() => self.callers(sample),
            _ => PathId::default(),
        };
        (callers, leaf)
    }

    /// The path of the callers of `sample`. Many samples have the same.
    fn callers(&mut self, sample: &Sample) -> PathId {
        let chain = &sample.guest.chain;
        // The first frame is the sample's own.
        let own = usize::from(chain.kernel_end.is_none());
        let end = |end: Option<ChainEnd>| end.map_or(0, |end| end as u64);
        let cr3 = process(sample.cr3).unwrap_or(u64::MAX);
        let ends = end(chain.kernel_end) << 8 | end(chain.program_end);
        self.chain.clear();
        self.chain.extend([sample.guest.task, cr3, ends]);
        self.chain.extend(chain.kernel.iter().skip(1));
        self.chain.push(KERNEL);
        for frame in chain.program.iter().skip(own) {
            self.chain.extend([frame.address, frame.mapping]);
        }
        if let Some(path) = self.chains.get(self.chain.as_slice()) {
            return *path;
        }
        let mut path = match chain.program_end {
            Some(ChainEnd::Broken) => {
                let location = self.index(CodeLocation::BrokenProgram);
                self.next(PathId::default(), location)
            }
            end => self.missing(PathId::default(), end),
        };
        for frame in chain.program.iter().skip(own).rev() {
            let location = self.program(sample, frame.address, frame.mapping);
            path = self.next(path, location);
        }
        path = self.missing(path, chain.kernel_end);
        for address in chain.kernel.iter().skip(1).rev() {
            let location = self.kernel(*address);
            path = self.next(path, location);
        }
        if self.chains.len() >= MOST_CHAINS {
            self.chains.clear();
        }
        self.chains.insert(self.chain.as_slice().into(), path);
        path
    }

    /// The numbers of a path's locations, from where the sample was taken outwards.
    pub fn steps(&self, path: PathId) -> impl Iterator<Item = LocationIndex> {
        let mut at = path;
        std::iter::from_fn(move || {
            let node = self.nodes.get(at.0 as usize).filter(|_| at.0 != 0)?;
            at = node.caller;
            Some(node.location)
        })
    }

    /// The location with a number.
    #[must_use]
    pub fn location(&self, index: LocationIndex) -> Option<CodeLocation> {
        self.locations.get(index as usize).copied()
    }

    /// The locations of a path, from where the sample was taken outwards.
    pub fn outwards(&self, path: PathId) -> impl Iterator<Item = CodeLocation> {
        self.steps(path).filter_map(|index| self.location(index))
    }

    /// The layers that a drawing has of a path, from the outermost caller inwards.
    #[must_use]
    pub fn layers(&self, path: PathId) -> Vec<CodeLocation> {
        let locations = self.outwards(path);
        let mut locations: Vec<CodeLocation> = locations.filter(|one| one.is_layer()).collect();
        locations.reverse();
        locations
    }

    fn missing(&mut self, path: PathId, end: Option<ChainEnd>) -> PathId {
        match end {
            Some(end @ (ChainEnd::Depth | ChainEnd::Broken | ChainEnd::NoProgram)) => {
                let location = self.index(CodeLocation::Missing(end));
                self.next(path, location)
            }
            Some(ChainEnd::Outermost | ChainEnd::Entry) | None => path,
        }
    }

    /// `path`, and inside it `location`.
    fn next(&mut self, path: PathId, location: LocationIndex) -> PathId {
        let nodes = &mut self.nodes;
        *self.numbers.entry((path, location)).or_insert_with(|| {
            nodes.push(PathNode {
                caller: path,
                location,
            });
            PathId(u32::try_from(nodes.len() - 1).unwrap_or(0))
        })
    }

    fn leaf(&mut self, sample: &Sample) -> LocationIndex {
        match sample.ring {
            Some(Ring::User) => self.program(sample, sample.ip, sample.guest.mapping),
            Some(Ring::Kernel) => self.kernel(sample.ip),
            None => self.index(CodeLocation::of(sample, self.names)),
        }
    }

    fn kernel(&mut self, address: u64) -> LocationIndex {
        if let Some(index) = self.places.get(&(address, KERNEL)) {
            return *index;
        }
        let location = CodeLocation::kernel(address, self.names);
        self.remember((address, KERNEL), location)
    }

    fn program(&mut self, sample: &Sample, address: u64, mapping: u64) -> LocationIndex {
        if mapping != KERNEL
            && let Some(index) = self.places.get(&(address, mapping))
        {
            return *index;
        }
        let location = CodeLocation::program(sample, address, mapping, self.names);
        match location {
            CodeLocation::Program(file, _)
                if file != FileId::UNKNOWN && mapping != KERNEL && !self.names.is_made(file) =>
            {
                self.remember((address, mapping), location)
            }
            // It depends on the sample.
            _ => self.index(location),
        }
    }

    fn remember(&mut self, place: (u64, u64), location: CodeLocation) -> LocationIndex {
        if self.places.len() >= MOST_ADDRESSES {
            self.places.clear();
        }
        let index = self.index(location);
        self.places.insert(place, index);
        index
    }

    fn index(&mut self, location: CodeLocation) -> LocationIndex {
        let locations = &mut self.locations;
        *self.indices.entry(location).or_insert_with(|| {
            locations.push(location);
            u32::try_from(locations.len() - 1).unwrap_or(0)
        })
    }
}
