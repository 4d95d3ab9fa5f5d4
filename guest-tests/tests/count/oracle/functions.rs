//! Functions of one program under one name each, whoever counts them.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use super::binary::Binary;
use super::{Counted, Spots, callgrind};

/// The entries of all files' PLTs: Callgrind does not say whose they are.
pub(super) const PLTS: (&str, &str) = ("", "entries of PLTs");

/// A file, by the last part of its path, and a function of it.
type Key = (String, String);

/// Instructions by function.
#[derive(Default)]
pub(super) struct Tally(BTreeMap<Key, u64>);

impl Tally {
    fn add(&mut self, (object, function): (&str, &str), count: u64) {
        let key = (object.to_owned(), function.to_owned());
        *self.0.entry(key).or_default() += count;
    }

    pub(super) fn total(&self) -> u64 {
        self.0.values().sum()
    }

    pub(super) fn of(&self, object: &str, function: &str) -> u64 {
        let key = (object.to_owned(), function.to_owned());
        self.0.get(&key).copied().unwrap_or(0)
    }

    /// Each function of either, with its count here and there.
    pub(super) fn beside<'a>(
        &'a self,
        other: &'a Self,
    ) -> impl Iterator<Item = (&'a Key, u64, u64)> {
        let more = other.0.keys().filter(|key| !self.0.contains_key(*key));
        let keys = self.0.keys().chain(more);
        let of = |tally: &Self, key: &Key| tally.0.get(key).copied().unwrap_or(0);
        keys.map(move |key| (key, of(self, key), of(other, key)))
    }
}

/// The functions of one program.
pub(super) struct Functions {
    binaries: HashMap<String, Binary>,
    pub(super) umpire: Tally,
}

/// The last part of a path.
fn base(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// The place that stands for a name.
fn unnamed(name: &str) -> Option<u64> {
    let place = name.strip_prefix("[0x")?.strip_suffix(']')?;
    u64::from_str_radix(place, 16).ok()
}

impl Functions {
    /// Those that were counted, of files that are below `here` or have a whole path.
    pub(super) fn of(here: &Path, counted: &Counted) -> Self {
        let functions = counted.record()["counts"]["functions"].as_array();
        let functions = functions.expect("functions").iter().map(|function| {
            let text = |key: &str| function[key].as_str().expect("text");
            let own = function["own"].as_u64().expect("a count");
            (text("object"), text("name"), own)
        });
        let functions: Vec<(&str, &str, u64)> = functions.collect();
        let mut files: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
        for (object, name, _) in &functions {
            files.entry(object).or_default().extend(unnamed(name));
        }
        let mut this = Self {
            binaries: HashMap::new(),
            umpire: Tally::default(),
        };
        for (object, unnamed) in files {
            let path = here.join(object);
            if path.is_file() {
                let binary = Binary::of(&path, unnamed.into_iter());
                this.binaries.insert(base(object).to_owned(), binary);
            }
        }
        let mut umpire = Tally::default();
        for (object, name, own) in functions {
            let object = base(object);
            let place = |binary: &Binary| unnamed(name).or_else(|| binary.place(name));
            let place = this.binaries.get(object).and_then(place);
            let key = match place {
                Some(place) => this.key(object, place),
                None if name.ends_with("@plt") => PLTS,
                None => (object, name),
            };
            umpire.add(key, own);
        }
        Self { umpire, ..this }
    }

    /// The function at a place of a file.
    fn key<'a>(&'a self, object: &'a str, place: u64) -> (&'a str, &'a str) {
        match self.binaries.get(object).map(|binary| binary.at(place)) {
            None => (object, "[unknown]"),
            Some(None) => PLTS,
            Some(Some(name)) => (object, name),
        }
    }

    /// What somebody else has counted by places.
    pub(super) fn tally(&self, spots: &Spots) -> Tally {
        let mut tally = Tally::default();
        for ((object, place), count) in spots {
            let key = match object.as_str() {
                callgrind::NOWHERE => PLTS,
                object => self.key(base(object), *place),
            };
            tally.add(key, *count);
        }
        tally
    }
}
