//! How many counters of a node are for jobs, and the lines that say so.

use std::collections::BTreeMap;
use std::fmt::Write;

use thiserror::Error;
use umpire_lease::{CounterKind, Lease, LeaseScope, Outsider, OutsiderKind, Place};

use crate::{FIXED, PROGRAMMABLE};

/// Counters on each CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Those that count any event.
    pub programmable: u32,
    /// Those of one event each.
    pub fixed: u32,
}

/// What is kept for somebody who is no job, whether he holds it now or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The tenant.
    pub tenant: String,
    /// How much.
    pub share: Share,
}

/// There is nothing for jobs.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum NoShare {
    /// The arbiter has no such PMU.
    #[error("the arbiter has no PMU '{asked}'; it has: {known}")]
    NoPmu {
        /// The one that was asked for.
        asked: String,
        /// Those that there are.
        known: String,
    },
    /// The arbiter has no counters at all.
    #[error("the arbiter has no counters; umpire who shows what it has")]
    NoCounters,
    /// Others have all of them.
    #[error(
        "no counter is left for jobs on CPUs {cpus}: {programmable} programmable and {fixed} fixed \
         ones are there, and monitoring, the watchdog and outsiders have them; see umpire who"
    )]
    AllTaken {
        /// The CPUs with the fewest.
        cpus: String,
        /// Counters there.
        programmable: u32,
        /// And fixed-function ones.
        fixed: u32,
    },
}

impl Share {
    /// The GRES of this share, as a node or a request names them; empty: none.
    #[must_use]
    pub fn gres(self) -> String {
        let parts = [(PROGRAMMABLE, self.programmable), (FIXED, self.fixed)];
        let parts = parts.iter().filter(|(_, count)| *count > 0);
        let parts: Vec<String> = parts
            .map(|(name, count)| format!("{name}:{count}"))
            .collect();
        parts.join(",")
    }

    fn least(self, other: Self) -> Self {
        Share {
            programmable: self.programmable.min(other.programmable),
            fixed: self.fixed.min(other.fixed),
        }
    }
}

/// What a lease has that jobs never get: counters of whole CPUs that it need not give.
fn firmly_held(lease: &Lease) -> Share {
    let mut share = Share::default();
    if lease.scope != LeaseScope::Cpu || !lease.guaranteed || lease.preemptible {
        return share;
    }
    for counter in &lease.counters {
        match counter.kind {
            Some(CounterKind::Fixed) => share.fixed += counter.count.unwrap_or(1),
            _ => share.programmable += counter.count.unwrap_or(1),
        }
    }
    share
}

fn left_at(place: &Place, kept: &[Kept], is_watched: bool) -> Share {
    let mut taken: BTreeMap<&str, Share> = BTreeMap::new();
    for lease in &place.leases {
        let held = firmly_held(lease);
        let of = taken.entry(&lease.tenant).or_default();
        of.programmable += held.programmable;
        of.fixed += held.fixed;
    }
    for one in kept {
        // What a tenant holds is out of what is kept for it.
        let of = taken.entry(&one.tenant).or_default();
        of.programmable = of.programmable.max(one.share.programmable);
        of.fixed = of.fixed.max(one.share.fixed);
    }
    let sum = |of: fn(&Share) -> u32| taken.values().map(of).sum::<u32>();
    let outside = place.outside.max(u32::from(is_watched));
    let programmable = place
        .programmable
        .saturating_sub(sum(|share| share.programmable));
    Share {
        programmable: programmable.saturating_sub(outside),
        fixed: place.fixed.saturating_sub(sum(|share| share.fixed)),
    }
}

/// How many counters of `pmu` (without one, the first) jobs may have on every CPU: what is there,
/// less what is kept, what leases of whole CPUs hold that need not give it, and what outsiders
/// have, the NMI watchdog among them.
///
/// # Errors
/// Nothing is left, or there is no such PMU.
pub fn jobs_share(
    places: &[Place],
    outsiders: &[Outsider],
    pmu: Option<&str>,
    kept: &[Kept],
) -> Result<Share, NoShare> {
    let first = places.first().ok_or(NoShare::NoCounters)?;
    let asked = pmu.unwrap_or(&first.pmu);
    // Where the arbiter gives no lease to the watchdog, it is one of those outside.
    let is_watched = outsiders
        .iter()
        .any(|outsider| outsider.what == OutsiderKind::NmiWatchdog);
    let of_pmu = places.iter().filter(|place| place.pmu == asked);
    let shares = of_pmu.map(|place| (place, left_at(place, kept, is_watched)));
    let least = shares.reduce(|(at, least), (place, share)| {
        let is_less = share.programmable < least.programmable;
        (if is_less { place } else { at }, least.least(share))
    });
    let Some((at, share)) = least else {
        let mut known: Vec<&str> = places.iter().map(|place| place.pmu.as_str()).collect();
        known.dedup();
        return Err(NoShare::NoPmu {
            asked: asked.to_owned(),
            known: known.join(", "),
        });
    };
    if share == Share::default() {
        return Err(NoShare::AllTaken {
            cpus: at.cpus.clone(),
            programmable: at.programmable,
            fixed: at.fixed,
        });
    }
    Ok(share)
}

/// The lines of gres.conf and slurm.conf for a node with this share.
#[must_use]
pub fn gres_lines(node: &str, share: Share) -> String {
    let mut text = String::from("# gres.conf\n");
    let mut names = Vec::new();
    for (name, count) in [(PROGRAMMABLE, share.programmable), (FIXED, share.fixed)] {
        if count > 0 {
            let _ = writeln!(text, "NodeName={node} Name={name} Count={count}");
            names.push(name);
        }
    }
    let tres: Vec<String> = names.iter().map(|name| format!("gres/{name}")).collect();
    let _ = write!(
        text,
        "# slurm.conf; what these keys and this node have already stays in front, with a comma\n\
         GresTypes={}\nAccountingStorageTRES={}\nJobSubmitPlugins=lua\nNodeName={node} Gres={}\n",
        names.join(","),
        tres.join(","),
        share.gres()
    );
    text
}

#[cfg(test)]
mod tests;
