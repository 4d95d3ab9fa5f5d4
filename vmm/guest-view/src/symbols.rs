//! Names of a kernel's addresses: tables that `/proc/kallsyms` is printed from.

use std::fmt;
use std::ops::Range;

use crate::space::Space;

/// A name in a kernel, as a line of `/proc/kallsyms` has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Symbol<'a> {
    /// Where it begins. Those of per-CPU variables are offsets.
    pub address: u64,
    /// The letter of `nm`: `T` or `t` for code.
    pub kind: char,
    /// Visible ASCII characters; whatever else the guest has is a `?`.
    pub name: &'a str,
    /// The module it belongs to.
    pub module: Option<&'a str>,
}

impl fmt::Display for Symbol<'_> {
    /// As a line of `/proc/kallsyms`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x} {} {}", self.address, self.kind, self.name)?;
        match self.module {
            Some(module) => write!(f, "\t[{module}]"),
            None => Ok(()),
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct NamedAddress {
    address: u64,
    name: u32,
    len: u16,
    kind: u8,
}

/// Names by address.
#[derive(Debug, Default)]
pub(crate) struct SymbolTable {
    entries: Vec<NamedAddress>,
    /// Places in `entries`, by address; of one address in the order of `entries`.
    sorted: Vec<u32>,
    text: String,
}

/// Longest name that is kept; longer ones are cut (`KSYM_NAME_LEN` is 512).
pub(crate) const LONGEST: usize = 1024;
/// Most names of a kernel or a module.
pub(crate) const MOST: usize = 1 << 20;

impl SymbolTable {
    /// Adds a name, and takes it of the budget of `space`; `None` when that is used up.
    pub(crate) fn push(
        &mut self,
        space: &Space<'_>,
        address: u64,
        kind: u8,
        name: &str,
    ) -> Option<()> {
        let entry = NamedAddress {
            address,
            name: u32::try_from(self.text.len()).ok()?,
            len: u16::try_from(name.len()).ok()?,
            kind,
        };
        if self.entries.len() >= MOST || !space.charge(size_of::<NamedAddress>() + name.len()) {
            return None;
        }
        self.text.push_str(name);
        self.entries.push(entry);
        Some(())
    }

    /// Gives every name another address: that which is made of its place in the kernel's
    /// order and its present one.
    pub(crate) fn move_to(&mut self, address: impl Fn(usize, u64) -> u64) {
        for (place, entry) in self.entries.iter_mut().enumerate() {
            entry.address = address(place, entry.address);
        }
    }

    /// Makes look-ups by address possible; to be called once, behind the last name.
    pub(crate) fn sort(&mut self) {
        let places = 0..u32::try_from(self.entries.len()).unwrap_or(u32::MAX);
        self.sorted = places.collect();
        self.sorted
            .sort_by_key(|place| self.entries[*place as usize].address);
    }

    /// The first name of the last address that is not behind `address`.
    pub(crate) fn at(&self, address: u64) -> Option<Symbol<'_>> {
        let start = |place: &u32| self.entries[*place as usize].address;
        let behind = self.sorted.partition_point(|place| start(place) <= address);
        let found = start(self.sorted.get(behind.checked_sub(1)?)?);
        let first = self.sorted.partition_point(|place| start(place) < found);
        Some(self.symbol(&self.entries[self.sorted[first] as usize]))
    }

    /// The first symbol of that name: its place in the kernel's order, and its address.
    pub(crate) fn position(&self, name: &str) -> Option<(usize, u64)> {
        let mut all = self.iter().enumerate();
        let (place, symbol) = all.find(|(_, symbol)| symbol.name == name)?;
        Some((place, symbol.address))
    }

    /// The address of the first symbol of that name.
    pub(crate) fn address(&self, name: &str) -> Option<u64> {
        self.position(name).map(|(_, address)| address)
    }

    /// From the first symbol of that name to the next one behind it.
    pub(crate) fn range(&self, name: &str) -> Option<Range<u64>> {
        let start = self.address(name)?;
        let address = |place: &u32| self.entries[*place as usize].address;
        let behind = self.sorted.partition_point(|place| address(place) <= start);
        Some(start..address(self.sorted.get(behind)?))
    }

    /// In the kernel's order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Symbol<'_>> {
        self.entries.iter().map(|entry| self.symbol(entry))
    }

    fn symbol(&self, entry: &NamedAddress) -> Symbol<'_> {
        let start = entry.name as usize;
        let end = start + usize::from(entry.len);
        Symbol {
            address: entry.address,
            kind: char::from(entry.kind),
            name: self.text.get(start..end).unwrap_or(""),
            module: None,
        }
    }
}
