//! The names of the guest's kernel for `perf report --kallsyms`.
//!
//! The text has no sizes. perf has a symbol end where the next one begins, but where one of them
//! has a `[` in its name, as those of modules have, and the other has none, it ends it with the
//! page behind its first. Behind what is last perf ends the kernel.

use std::collections::BTreeSet;

use super::PAGE;

/// What has no name, and is so near behind a symbol that perf would count it there.
const NEAR: &str = "unknown";
/// As perf itself calls what has no name; the bracket ends the symbol before it.
const FAR: &str = "[unknown]";

/// A symbol, or part of one.
#[derive(Clone, Copy, Debug)]
struct Named<'a> {
    start: u64,
    end: u64,
    /// With its module, if it is of one.
    name: &'a str,
}

impl Named<'_> {
    /// What its name ends with, if it is of a module.
    fn module(&self) -> &str {
        self.name.find('\t').map_or("", |at| &self.name[at..])
    }

    /// Where perf ends it if the next one has a bracket and it has none, or the other way round.
    fn page_behind(start: u64) -> u64 {
        start.saturating_add(2 * PAGE - 1) & !(PAGE - 1)
    }
}

/// Makes the text.
#[derive(Debug)]
pub(super) struct Kallsyms<'a> {
    start: u64,
    nameless: &'a BTreeSet<u64>,
}

impl<'a> Kallsyms<'a> {
    /// Of a kernel that begins at `start` for perf, with samples where there is no name.
    pub(super) fn new(start: u64, nameless: &'a BTreeSet<u64>) -> Self {
        Self { start, nameless }
    }

    /// `named` has each symbol in a line, and in the line behind it where that ends.
    pub(super) fn text(&self, named: &str) -> String {
        let first = Named {
            start: self.start,
            end: self.start.saturating_add(PAGE),
            name: "_text",
        };
        let lines: Vec<&str> = named.lines().collect();
        let pairs = lines.chunks_exact(2).filter_map(|pair| {
            let (start, name) = address(pair[0])?;
            let (end, _) = address(pair[1])?;
            Some(Named { start, end, name })
        });
        let mut all: Vec<Named<'_>> = pairs.collect();
        all.sort_by_key(|one| one.start);
        all.insert(0, first);
        let mut text = String::new();
        for (number, one) in all.iter().enumerate() {
            text += &format!("{:016x} T {}\n", one.start, one.name);
            self.end(one, all.get(number + 1), &mut text);
        }
        text
    }

    /// What ends a symbol where the next one does not.
    fn end(&self, one: &Named<'_>, next: Option<&Named<'_>>, text: &mut String) {
        let Named { start, end, .. } = *one;
        let module = one.module();
        let behind = next.map_or(u64::MAX, |next| next.start);
        let nameless = self.nameless.range(end..behind.max(end));
        let (first, last) = (nameless.clone().next(), nameless.clone().next_back());
        // Behind it perf has nothing, up to this one.
        let far = match (last, next) {
            (Some(_), Some(next)) => Some((next.start & !(PAGE - 1)).saturating_sub(PAGE)),
            (Some(last), None) => Some((last | (PAGE - 1)).saturating_add(1)),
            (None, _) => None,
        };
        // perf ends the first one with its page.
        let is_first = start == self.start;
        let far = far.filter(|far| module.is_empty() && (*far > end || is_first && *far == end));
        let short = Named::page_behind(start);
        let needs_end = match (far, next) {
            (Some(_), _) => end > short || first.is_some_and(|first| *first < short),
            (None, Some(next)) => first.is_some() || next.module().is_empty() != module.is_empty(),
            (None, None) => true,
        };
        if needs_end && end < behind && !is_first {
            *text += &format!("{end:016x} t {NEAR}{module}\n");
        }
        if let Some(far) = far {
            *text += &format!("{far:016x} t {FAR}\n");
        }
    }
}

/// The address of a line, and the name.
fn address(line: &str) -> Option<(u64, &str)> {
    let (address, rest) = line.split_once(' ')?;
    let (_, name) = rest.split_once(' ')?;
    Some((u64::from_str_radix(address, 16).ok()?, name))
}
