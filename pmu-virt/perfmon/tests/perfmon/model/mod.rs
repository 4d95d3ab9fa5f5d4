//! A context as the specification tells of it, one rule after the other and
//! nothing clever: what the real one is compared with. It shares no code with
//! it. Registers are those of model `amd-core`, told here once more.

mod commands;
mod flow;
pub(crate) mod format;
mod notice;
pub(crate) mod puppet;
mod ring;

use std::collections::{BTreeMap, BTreeSet};

use perfmon::{Account, Moment};
use perfmon_abi::{Message, consts as pfm};
use pmu_model::Ring;

use format::{Asked, Format};

/// Counters, of 48 bits. Those between are IBS's, which there is not.
pub(crate) const COUNTERS: [u16; 6] = [0, 1, 2, 3, 14, 15];
const WIDTH: u32 = 48;
/// Virtual PMDs 64 to 80. 76 to 79 are of an overflow: told in samples, and
/// until PFM_RESTART.
const VIRTUAL: std::ops::RangeInclusive<u16> = 64..=80;
const OF_OVERFLOW: std::ops::RangeInclusive<u16> = 76..=79;

/// Ring, CR3, instruction pointer or TSC.
fn of_overflow(n: u16, at: &Moment) -> u64 {
    match n {
        76 => u64::from(at.ring == Ring::User) * 3,
        77 => at.cr3,
        78 => at.ip,
        _ => at.tsc,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Unloaded,
    Loaded,
    Masked,
}

#[derive(Clone, Debug, Default)]
struct Pmc {
    value: u64,
    notify: bool,
    random: bool,
    narrow: bool,
    eventid: u64,
    reset_pmds: BTreeSet<u16>,
    smpl_pmds: BTreeSet<u16>,
}

#[derive(Clone, Debug)]
struct Pmd {
    value: u64,
    long: u64,
    short: u64,
    last: u64,
    threshold: u64,
    left: u64,
    mask: u64,
    seed: u64,
    /// PFM_PROV_*.
    how: u32,
}

impl Default for Pmd {
    fn default() -> Self {
        Pmd {
            value: 0,
            long: 0,
            short: 0,
            last: 0,
            threshold: 0,
            left: 0,
            mask: 0,
            seed: 0,
            how: pfm::PFM_PROV_NOT_COUNTED,
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Set {
    by_overflow: bool,
    by_time: bool,
    excludes_idle: bool,
    flags: u32,
    next: Option<u16>,
    timeout: u64,
    left: u64,
    pmcs: BTreeMap<u16, Pmc>,
    pmds: BTreeMap<u16, Pmd>,
    runs: u64,
    duration: u64,
    triggers: BTreeSet<u16>,
    overflowed: BTreeSet<u16>,
}

#[derive(Clone, Debug)]
pub(crate) struct Model {
    system_wide: bool,
    blocks: bool,
    quiet: bool,
    pub(crate) state: State,
    pub(crate) started: bool,
    pub(crate) active: u16,
    pub(crate) blocked: bool,
    pub(crate) generation: u16,
    pub(crate) switch_later: bool,
    sets: BTreeMap<u16, Set>,
    /// Counters of the active set that have wrapped and were not dealt with.
    pub(crate) wrapped: BTreeSet<u16>,
    /// The set in which monitoring was masked by an overflow that no restart has reset yet.
    masked_in: Option<u16>,
    late: u64,
    late_counts: bool,
    /// The last overflow that was dealt with.
    at: Option<Moment>,
    /// Quantities were seen when the context was detached.
    seen: bool,
    /// Messages that the tool has not read.
    pub(crate) queue: Vec<Option<Message>>,
    pub(crate) format: Option<Format>,
    /// It cannot work with more than set 0.
    pub(crate) only_set_0: bool,
    /// What handlers were told.
    pub(crate) asked: Vec<Asked>,
    pub(crate) limit: Limit,
    pub(crate) account: Account,
}

/// Interrupts in a window of time (§4.4.4). The window begins with the first, and
/// ends with one too many.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    pub(crate) most: u64,
    pub(crate) window: u64,
    begin: Option<u64>,
    seen: u64,
}

impl Limit {
    pub(crate) fn new(most: u64, window: u64) -> Self {
        Limit {
            most,
            window,
            begin: None,
            seen: 0,
        }
    }

    fn exceeded(&mut self, tsc: u64) -> bool {
        let inside = self
            .begin
            .is_some_and(|begin| (begin..begin + self.window).contains(&tsc));
        if !inside {
            (self.begin, self.seen) = (Some(tsc), 0);
        }
        self.seen += 1;
        let exceeded = self.seen > self.most;
        if exceeded {
            self.begin = None;
        }
        exceeded
    }
}

/// PMDs of a vector of bits.
fn members(words: [u64; 2]) -> BTreeSet<u16> {
    let has = |&n: &u16| words[usize::from(n / 64)] >> (n % 64) & 1 == 1;
    (0..128).filter(has).collect()
}

pub(crate) fn words(members: &BTreeSet<u16>) -> [u64; 2] {
    let mut words = [0; 2];
    for n in members {
        words[usize::from(n / 64)] |= 1 << (n % 64);
    }
    words
}

fn is_pmd(n: u16) -> bool {
    COUNTERS.contains(&n) || VIRTUAL.contains(&n)
}

impl Pmc {
    /// EN, and OS or USR. GuestOnly (APM vol. 2, 13.2.1) is what a tool of the host counts
    /// anyway; what comes of HostOnly, bit 41, the host's core says at the load.
    fn counts(&self) -> bool {
        let bit = |n: u32| self.value >> n & 1 == 1;
        bit(22) && (bit(16) || bit(17))
    }
}

impl Set {
    /// The largest value of a counter.
    fn top(&self, n: u16) -> u64 {
        match self.pmcs.get(&n) {
            Some(pmc) if pmc.narrow => (1 << WIDTH) - 1,
            _ => u64::MAX,
        }
    }
}

impl Model {
    pub(crate) fn new(flags: u32) -> Self {
        Model {
            system_wide: flags & pfm::PFM_FL_SYSTEM_WIDE != 0,
            blocks: flags & pfm::PFM_FL_NOTIFY_BLOCK != 0,
            quiet: flags & pfm::PFM_FL_OVFL_NO_MSG != 0,
            state: State::Unloaded,
            started: false,
            active: 0,
            blocked: false,
            generation: 0,
            switch_later: false,
            sets: BTreeMap::from([(0, Set::default())]),
            wrapped: BTreeSet::new(),
            masked_in: None,
            late: 0,
            late_counts: false,
            at: None,
            seen: false,
            queue: Vec::new(),
            format: None,
            only_set_0: false,
            asked: Vec::new(),
            limit: Limit::new(u64::MAX, 0),
            account: Account::default(),
        }
    }

    fn active(&mut self) -> &mut Set {
        self.sets.get_mut(&self.active).expect("the active set")
    }

    fn counts(&self) -> bool {
        self.state == State::Loaded && self.started
    }

    /// Counters that are to count now, with the distance to an overflow that
    /// matters.
    pub(crate) fn wanted(&self) -> Vec<(u16, Option<u64>)> {
        if !self.counts() {
            return Vec::new();
        }
        let set = &self.sets[&self.active];
        let mut wanted = Vec::new();
        for (&n, pmc) in &set.pmcs {
            if !pmc.counts() {
                continue;
            }
            let pmd = set.pmds.get(&n).cloned().unwrap_or_default();
            let matters =
                self.format.is_some() || pmc.notify || (set.by_overflow && pmd.threshold != 0);
            let distance = u128::from(set.top(n)) + 1 - u128::from(pmd.value);
            let distance = u64::try_from(distance).unwrap_or(u64::MAX);
            wanted.push((n, matters.then_some(distance)));
        }
        wanted
    }

    pub(crate) fn switch_due(&self) -> Option<u64> {
        let set = &self.sets[&self.active];
        (self.counts() && set.by_time).then_some(set.left)
    }

    /// Times that any set became active.
    pub(crate) fn runs(&self) -> u64 {
        self.sets.values().map(|set| set.runs).sum()
    }

    pub(crate) fn set_ids(&self) -> Vec<u16> {
        self.sets.keys().copied().collect()
    }
}
