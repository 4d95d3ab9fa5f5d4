//! From an address to the symbol that covers it.

use std::collections::{BTreeSet, HashMap};

/// Where a symbol ends if nothing else says so: at the end of its page.
const PAGE: u64 = 4096;

/// A symbol as it stands in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawSymbol {
    pub address: u64,
    /// Its length in bytes; 0 if the file does not say.
    pub size: u64,
    pub name: String,
    /// The module that it belongs to; none for the kernel itself.
    pub module: Option<String>,
    /// Which one is shown of several names for one address: the one with the
    /// greatest rank.
    pub rank: u8,
    /// It is code. Other symbols only show where code ends.
    pub code: bool,
}

/// A symbol of a [`SymbolTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SymbolIndex(usize);

impl SymbolIndex {
    /// The one with this number in a table of another kind.
    pub(in crate::profile) fn of(number: usize) -> Self {
        Self(number)
    }

    /// Its number.
    pub(in crate::profile) fn number(self) -> usize {
        self.0
    }
}

/// A symbol that covers an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    pub index: SymbolIndex,
    /// How far the address is behind its beginning, in bytes.
    pub offset: u64,
}

/// The symbols of a kernel.
#[derive(Clone, Debug, Default)]
pub struct SymbolTable {
    symbols: Vec<Symbol>,
    modules: Vec<String>,
    /// Ranges that one symbol covers, in ascending order and apart from each
    /// other.
    ranges: Vec<Range>,
    offset: u64,
}

#[derive(Clone, Debug)]
struct Symbol {
    start: u64,
    name: Box<str>,
    /// Index in `modules` plus 1; 0 for the kernel itself.
    module: u32,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    start: u64,
    end: u64,
    symbol: usize,
}

impl SymbolTable {
    /// A table of `raw`, in any order. Every address that it is asked about is
    /// `offset` greater than in `raw`, modulo 2^64.
    #[must_use]
    pub fn new(mut raw: Vec<RawSymbol>, offset: u64) -> Self {
        // Of the names for an address the one to show comes first.
        raw.sort_by(|a, b| {
            let key = |one: &RawSymbol| {
                let underscores = one.name.bytes().take_while(|&b| b == b'_').count();
                (one.address, !one.code, u8::MAX - one.rank, underscores)
            };
            key(a).cmp(&key(b)).then_with(|| a.name.cmp(&b.name))
        });
        let mut table = Self {
            offset,
            ..Self::default()
        };
        let mut ends = Vec::new();
        let mut modules = HashMap::new();
        let mut rest = raw.as_slice();
        while let Some(first) = rest.first() {
            let aliases = rest.partition_point(|one| one.address == first.address);
            let (same, later) = rest.split_at(aliases);
            rest = later;
            if first.code {
                ends.push(end_of(same, later.first()));
                table.push(first, &mut modules);
            }
        }
        table.ranges = ranges(&table.symbols, &ends);
        table
    }

    /// `modules` has those that are known, with their numbers.
    fn push<'a>(&mut self, raw: &'a RawSymbol, modules: &mut HashMap<&'a str, u32>) {
        let module = match &raw.module {
            None => 0,
            Some(name) => *modules.entry(name).or_insert_with(|| {
                self.modules.push(name.clone());
                u32::try_from(self.modules.len()).unwrap_or(0)
            }),
        };
        self.symbols.push(Symbol {
            start: raw.address,
            name: raw.name.as_str().into(),
            module,
        });
    }

    /// How many addresses have a name.
    #[must_use]
    pub fn len(&self) -> usize {
        self.symbols.len()
    }

    /// No address has a name.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.symbols.is_empty()
    }

    /// The symbol that covers `address`: of several, the one that begins last.
    #[must_use]
    pub fn find(&self, address: u64) -> Option<Found> {
        let address = address.wrapping_sub(self.offset);
        self.range_of(address).map(|range| Found {
            index: SymbolIndex(range.symbol),
            offset: address - self.symbols[range.symbol].start,
        })
    }

    /// The range that has `address`, as the file has it.
    fn range_of(&self, address: u64) -> Option<&Range> {
        let behind = self.ranges.partition_point(|range| range.start <= address);
        let range = self.ranges.get(behind.checked_sub(1)?)?;
        (address < range.end).then_some(range)
    }

    /// The part of the table that `addresses` need, in the form of `/proc/kallsyms`: what
    /// covers one of them, and where that ends.
    #[must_use]
    pub fn of_addresses(&self, addresses: &BTreeSet<u64>) -> String {
        let mut text = String::new();
        let mut behind = 0;
        for address in addresses.iter().map(|at| at.wrapping_sub(self.offset)) {
            let Some(range) = self.range_of(address).filter(|range| range.start >= behind) else {
                continue;
            };
            behind = range.end;
            let index = SymbolIndex(range.symbol);
            let module = self.module(index);
            let module = module.map_or(String::new(), |module| format!("\t[{module}]"));
            let (name, start) = (self.name(index), range.start.wrapping_add(self.offset));
            let end = range.end.wrapping_add(self.offset);
            text.push_str(&format!(
                "{start:016x} t {name}{module}\n{end:016x} d .{module}\n"
            ));
        }
        text
    }

    /// All symbols and their addresses, ascending.
    pub fn all(&self) -> impl Iterator<Item = (SymbolIndex, u64)> {
        let symbols = self.symbols.iter().enumerate();
        symbols.map(|(index, one)| (SymbolIndex(index), one.start.wrapping_add(self.offset)))
    }

    /// Where a symbol of this table begins and ends. What others have of it in between counts.
    #[must_use]
    pub fn span(&self, index: SymbolIndex) -> Option<(u64, u64)> {
        let start = self.symbols.get(index.0)?.start;
        let from = self.ranges.partition_point(|range| range.end <= start);
        let own = self.ranges[from..]
            .iter()
            .filter(|range| range.symbol == index.0);
        let end = own.map(|range| range.end).max()?;
        let moved = |address: u64| address.wrapping_add(self.offset);
        Some((moved(start), moved(end)))
    }

    /// The name of a symbol of this table.
    #[must_use]
    pub fn name(&self, index: SymbolIndex) -> &str {
        self.symbols.get(index.0).map_or("", |symbol| &symbol.name)
    }

    /// All modules that symbols are of.
    #[must_use]
    pub fn modules(&self) -> &[String] {
        &self.modules
    }

    /// The module of a symbol of this table; none if it is the kernel's.
    #[must_use]
    pub fn module(&self, index: SymbolIndex) -> Option<&str> {
        let module = self.symbols.get(index.0)?.module.checked_sub(1)?;
        let module = usize::try_from(module).ok()?;
        self.modules.get(module).map(String::as_str)
    }
}

/// Where symbols of one address end: as far as the longest of them says, else
/// where `next` begins. A module is followed by something else or nothing, so
/// its last symbol ends with its page at the latest; so does the very last one.
fn end_of(same: &[RawSymbol], next: Option<&RawSymbol>) -> u64 {
    let start = same[0].address;
    let size = same.iter().map(|one| one.size).max().unwrap_or(0);
    if size > 0 {
        return start.saturating_add(size);
    }
    let page_end = (start | (PAGE - 1)).saturating_add(1);
    match next {
        Some(next) if next.module == same[0].module => next.address,
        Some(next) => next.address.min(page_end),
        None => page_end,
    }
}

/// Where which symbol is the one that began last, of those that have not ended.
/// `symbols` ascend.
fn ranges(symbols: &[Symbol], ends: &[u64]) -> Vec<Range> {
    let mut ranges = Vec::with_capacity(symbols.len());
    let mut open: Vec<usize> = Vec::new();
    let mut from = 0;
    let mut cover = |from: u64, to: u64, symbol: usize| {
        if from < to {
            ranges.push(Range {
                start: from,
                end: to,
                symbol,
            });
        }
    };
    for (index, symbol) in symbols.iter().enumerate() {
        while let Some(&last) = open.last() {
            cover(from, ends[last].min(symbol.start), last);
            from = from.max(ends[last].min(symbol.start));
            if ends[last] > symbol.start {
                break;
            }
            open.pop();
        }
        from = symbol.start;
        open.push(index);
    }
    while let Some(last) = open.pop() {
        cover(from, ends[last], last);
        from = from.max(ends[last]);
    }
    ranges
}
