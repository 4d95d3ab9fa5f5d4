//! Regions that programs have marked, by the names under which another run has them.

use std::borrow::Cow;
use std::collections::BTreeMap;

use attribution::{Counts, Events, Region};

use crate::record::short_name;

/// What programs have marked when there was no room for another name.
pub const REST: &str = "(the rest)";

/// Each region with what it is called: as its program did, or by its number among the nameless
/// ones of its process, `#1` first. So a region that gets a name leaves the others theirs. What
/// is of several names is [`REST`].
#[must_use]
pub fn named(counts: &Counts) -> Vec<(Cow<'_, str>, &Region)> {
    let mut nameless: BTreeMap<(u32, &str), u32> = BTreeMap::new();
    let mut all = Vec::new();
    for region in &counts.regions {
        let called = match region.name.as_str() {
            _ if region.is_rest => REST.into(),
            "" => {
                let number = nameless.entry((region.pid, &region.program)).or_default();
                *number += 1;
                format!("#{number}").into()
            }
            called => called.into(),
        };
        all.push((called, region));
    }
    all
}

/// Regions of one name, of programs of one name: a loop ends many of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionSum {
    /// How often one was ended.
    pub times: u64,
    /// In user mode, of all of them.
    pub user: Events,
    /// In the kernel.
    pub kernel: Events,
}

/// A region of two runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionPair<'a> {
    /// The last part of the program's path: builds lie in other folders.
    pub program: &'a str,
    pub name: Cow<'a, str>,
    /// It is [`REST`]: of other regions in each run, maybe.
    pub is_rest: bool,
    /// Before and now; none where the run has no such region.
    pub sums: [Option<RegionSum>; 2],
}

/// The regions of two runs side by side: those of now in their order, then those that are gone.
#[must_use]
pub fn pairs<'a>(before: &'a Counts, now: &'a Counts) -> Vec<RegionPair<'a>> {
    let mut pairs: Vec<RegionPair<'a>> = Vec::new();
    let mut places = BTreeMap::new();
    for (run, counts) in [(1, now), (0, before)] {
        for (name, region) in named(counts) {
            let program = short_name(&region.program);
            let place = *places
                .entry((program, name.clone(), region.is_rest))
                .or_insert(pairs.len());
            if place == pairs.len() {
                let sums = [None; 2];
                pairs.push(RegionPair {
                    program,
                    name,
                    is_rest: region.is_rest,
                    sums,
                });
            }
            let sum = pairs[place].sums[run].get_or_insert_default();
            sum.times = sum.times.saturating_add(1).saturating_add(region.more);
            sum.user += region.user;
            sum.kernel += region.kernel;
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::region;

    fn counts(regions: &[(&str, u32, &str, u64)]) -> Counts {
        let regions = regions.iter();
        let regions = regions.map(|(program, pid, name, user)| Region {
            pid: *pid,
            ..region(program, name, *user)
        });
        Counts {
            regions: regions.collect(),
            ..Counts::default()
        }
    }

    #[test]
    fn nameless_ones_have_the_number_of_their_process() {
        let counts = counts(&[
            ("/bin/a", 1, "", 1),
            ("/bin/a", 1, "loop", 2),
            ("/bin/b", 2, "", 3),
            ("/bin/a", 1, "", 4),
        ]);
        let names: Vec<_> = named(&counts).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["#1", "loop", "#1", "#2"]);
    }

    #[test]
    fn the_rest_is_no_region_of_that_name() {
        let mut now = counts(&[("", 1, "", 5), ("", 1, REST, 7), ("/bin/a", 1, "loop", 8)]);
        now.regions[0].is_rest = true;
        now.regions[2].more = 3;
        let nothing = Counts::default();
        let all = pairs(&nothing, &now).into_iter();
        let all = all.map(|one| {
            let times = one.sums[1].map(|sum| sum.times);
            (one.name.into_owned(), one.is_rest, times)
        });
        let row = |name: &str, is_rest, times| (name.to_owned(), is_rest, Some(times));
        let expected = [
            row(REST, true, 1),
            row(REST, false, 1),
            row("loop", false, 4),
        ];
        assert_eq!(all.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn regions_of_one_name_are_added_and_those_of_one_run_are_there() {
        let before = counts(&[
            ("/old/a", 1, "loop", 10),
            ("/old/a", 1, "gone", 5),
            ("/old/a", 1, "loop", 11),
        ]);
        let now = counts(&[("/new/a", 3, "", 7), ("/new/a", 3, "loop", 30)]);
        let rows: Vec<_> = pairs(&before, &now)
            .into_iter()
            .map(|one| {
                let sums = one.sums;
                let sums = sums.map(|sum| sum.map(|sum| (sum.times, sum.user.instructions)));
                (one.name.into_owned(), sums)
            })
            .collect();
        let row = |name: &str, before, now| (name.to_owned(), [before, now]);
        assert_eq!(
            rows,
            [
                row("#1", None, Some((1, 7))),
                row("loop", Some((2, 21)), Some((1, 30))),
                row("gone", Some((1, 5)), None),
            ]
        );
    }
}
