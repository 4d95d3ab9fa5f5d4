//! Where the kernel and its modules are for perf, and their names.
//!
//! The guest chooses how many modules and samples there are: nothing here looks through the one
//! for each of the other.

use std::collections::{BTreeMap, BTreeSet};

use super::super::symbols::SymbolTable;
use super::PAGE;
use super::kallsyms::Kallsyms;

/// A beginning and an end.
type Range = (u64, u64);

/// What perf is told of the kernel.
#[derive(Debug)]
pub(super) struct KernelLayout {
    /// The kernel itself, with a page in front, for `_text`, in which there is nothing else; and
    /// around it what has no name, as far as there is no module. Where all names are those of
    /// modules it is the page in front of these: perf reads no names without a kernel.
    pub(super) kernel: Option<Range>,
    /// Modules by their names, in brackets.
    pub(super) modules: BTreeMap<String, Range>,
    /// The names, in the form of `/proc/kallsyms`.
    pub(super) text: String,
}

impl KernelLayout {
    /// Of addresses that have names in `symbols`, and of the kernel's that have none.
    pub(super) fn new(
        symbols: &SymbolTable,
        named: &BTreeSet<u64>,
        nameless: &BTreeSet<u64>,
    ) -> Self {
        let mut own: Option<Range> = None;
        let mut modules: BTreeMap<&str, Range> = BTreeMap::new();
        for &address in named {
            let found = symbols.find(address);
            let start = found.map_or(address, |found| address - found.offset);
            match found.and_then(|found| symbols.module(found.index)) {
                Some(module) => {
                    let new = (start & !(PAGE - 1), page_behind(address));
                    let range = modules.entry(module).or_insert(new);
                    *range = (range.0.min(new.0), range.1.max(new.1));
                }
                None => {
                    let (low, high) = own.unwrap_or((start, address));
                    own = Some((low.min(start), high.max(address)));
                }
            }
        }
        let kernel = kernel(own, &apart(modules.values().copied().collect()), nameless);
        let text = kernel.map_or(String::new(), |(start, _)| {
            Kallsyms::new(start, nameless).text(&symbols.of_addresses(named))
        });
        let in_brackets = |(name, range)| (format!("[{name}]"), range);
        Self {
            kernel,
            modules: modules.into_iter().map(in_brackets).collect(),
            text,
        }
    }
}

/// The kernel, of which names are from the first to the second of `own`.
fn kernel(own: Option<Range>, modules: &[Range], nameless: &BTreeSet<u64>) -> Option<Range> {
    let lowest = modules.first().map(|(start, _)| *start);
    let in_front = lowest.map(|start| (start, start.saturating_sub(1)));
    let first = nameless.first().map(|&first| (first, first));
    let (mut low, mut high) = own.or(in_front).or(first)?;
    for &address in nameless {
        let (from, to) = (low.min(address), high.max(address));
        let before = modules.partition_point(|(start, _)| *start <= to);
        let last = before.checked_sub(1).map(|last| modules[last]);
        if last.is_none_or(|(_, end)| end <= from) {
            (low, high) = (from, to);
        }
    }
    let start = (low & !(PAGE - 1)).saturating_sub(PAGE);
    Some((start, page_behind(high)))
}

/// The same addresses in ranges that are apart, ascending.
fn apart(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort_unstable();
    let mut apart: Vec<Range> = Vec::new();
    for (start, end) in ranges {
        match apart.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => apart.push((start, end)),
        }
    }
    apart
}

fn page_behind(address: u64) -> u64 {
    (address | (PAGE - 1)).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ranges() -> impl Strategy<Value = Vec<Range>> {
        let range = (0..60u64, 1..6u64).prop_map(|(start, pages)| {
            let start = start * PAGE;
            (start, start + pages * PAGE)
        });
        proptest::collection::vec(range, 0..8)
    }

    proptest! {
        /// As far as there is no module: looked for in each of them.
        #[test]
        fn what_has_no_name_is_the_kernels_up_to_modules(
            modules in ranges(),
            own in proptest::option::of((100_000..120_000u64, 0..20_000u64)),
            nameless in proptest::collection::btree_set(0..300_000u64, 1..12),
        ) {
            let own = own.map(|(low, length)| (low, low + length));
            let found = kernel(own, &apart(modules.clone()), &nameless).unwrap();
            let lowest = modules.iter().map(|(start, _)| *start).min();
            let lowest = lowest.map(|start| (start, start.saturating_sub(1)));
            let first = *nameless.first().unwrap();
            let (mut low, mut high) = own.or(lowest).unwrap_or((first, first));
            for &address in &nameless {
                let (from, to) = (low.min(address), high.max(address));
                if !modules.iter().any(|&(start, end)| start <= to && from < end) {
                    (low, high) = (from, to);
                }
            }
            let start = (low & !(PAGE - 1)).saturating_sub(PAGE);
            prop_assert_eq!(found, (start, page_behind(high)));
        }
    }
}
