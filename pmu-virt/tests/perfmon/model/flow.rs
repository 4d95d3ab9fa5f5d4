//! Counts, time, overflows, switches and PFM_RESTART, without a format.

use super::{COUNTERS, Model, State, words};
use perfmon_abi::Message;
use perfmon_abi::consts as pfm;
use perfmon_abi::wire::Errno;
use std::collections::BTreeSet;

/// Messages that a queue holds.
const DEPTH: usize = 8;

/// Carta: 16807 times the last number, modulo 2^31 - 1. A seed that would stay
/// 0 stands for 1.
fn random(seed: &mut u64) -> u64 {
    const MODULUS: u64 = (1 << 31) - 1;
    let from = match *seed % MODULUS {
        0 => 1,
        rest => rest,
    };
    *seed = from * 16807 % MODULUS;
    *seed
}

impl Model {
    pub(crate) fn count(&mut self, n: u16, events: u64, how: u32) {
        let set = self.active();
        let top = set.top(n);
        let pmd = set.pmds.entry(n).or_default();
        let sum = u128::from(pmd.value) + u128::from(events);
        let size = u128::from(top) + 1;
        pmd.value = u64::try_from(sum % size).expect("below the counter's size");
        // Least certain wins: exact, hardware, derived, scaled, simulated.
        let order = [
            pfm::PFM_PROV_NOT_COUNTED,
            pfm::PFM_PROV_EXACT,
            pfm::PFM_PROV_HARDWARE,
            pfm::PFM_PROV_DERIVED,
            pfm::PFM_PROV_SCALED,
            pfm::PFM_PROV_SIMULATED,
            pfm::PFM_PROV_LOST,
        ];
        let rank = |how: u32| order.iter().position(|&it| it == how);
        if rank(how) > rank(pmd.how) {
            pmd.how = how;
        }
        if sum >= size {
            self.wrapped.insert(n);
        }
    }

    pub(crate) fn lose(&mut self, n: u16) {
        self.active().pmds.entry(n).or_default().how = pfm::PFM_PROV_LOST;
    }

    /// The active set becomes so.
    pub(super) fn begin(&mut self) {
        let set = self.active();
        set.runs += 1;
        set.left = set.timeout;
        for pmd in set.pmds.values_mut() {
            pmd.left = pmd.threshold;
        }
    }

    /// To the next set, whose counters that overflowed are reset.
    fn switch(&mut self, long: bool) {
        let ids = self.set_ids();
        let after = ids.iter().copied().find(|&id| id > self.active);
        self.active = match self.active().next {
            Some(next) => next,
            None => after.unwrap_or(0),
        };
        self.begin();
        let overflowed = self.active().overflowed.clone();
        self.reset(self.active, overflowed, long);
    }

    /// Counters, and those that their PMCs name, begin their next period.
    pub(super) fn reset(&mut self, set: u16, counters: BTreeSet<u16>, long: bool) {
        let set = self.sets.get_mut(&set).expect("the set");
        let mut all = counters.clone();
        for n in &counters {
            if let Some(pmc) = set.pmcs.get(n) {
                all.extend(&pmc.reset_pmds);
            }
        }
        for n in all.into_iter().filter(|n| COUNTERS.contains(n)) {
            let varied = set.pmcs.get(&n).is_some_and(|pmc| pmc.random);
            let top = set.top(n);
            let pmd = set.pmds.entry(n).or_default();
            let mut value = if long { pmd.long } else { pmd.short };
            if varied {
                let mut number = random(&mut pmd.seed);
                if pmd.mask >= 1 << 32 {
                    number |= random(&mut pmd.seed) << 32;
                }
                value = value.wrapping_add(number & pmd.mask);
            }
            pmd.value = value & top;
            pmd.last = value;
            pmd.how = pfm::PFM_PROV_NOT_COUNTED;
            set.overflowed.remove(&n);
        }
    }

    /// Deals with the counters that have wrapped.
    pub(crate) fn overflow(&mut self) {
        let wrapped = std::mem::take(&mut self.wrapped);
        if wrapped.is_empty() || self.state != State::Loaded {
            return;
        }
        let active = self.active;
        let (mut triggers, mut reached) = (BTreeSet::new(), BTreeSet::new());
        let set = self.active();
        let notify = wrapped
            .iter()
            .any(|n| set.pmcs.get(n).is_some_and(|pmc| pmc.notify));
        for &n in &wrapped {
            let by_overflow = set.by_overflow;
            let pmd = set.pmds.entry(n).or_default();
            if by_overflow && pmd.threshold != 0 {
                triggers.insert(n);
                pmd.left = pmd.left.saturating_sub(1);
                if pmd.left == 0 {
                    reached.insert(n);
                }
            }
        }
        if !reached.is_empty() {
            set.triggers.clone_from(&reached);
        }
        if notify {
            // Masked: reset and switch wait for PFM_RESTART.
            set.overflowed.extend(&wrapped);
            self.state = State::Masked;
            self.blocked = self.blocks;
            self.switch_later |= !reached.is_empty();
            self.notify(active, &wrapped);
        } else if reached.is_empty() {
            self.reset(active, triggers, false);
        } else {
            set.overflowed.extend(triggers);
            self.switch(false);
        }
    }

    /// One message for all counters that overflowed at once.
    fn notify(&mut self, set: u16, counters: &BTreeSet<u16>) {
        if self.quiet {
            self.queue.push(None);
        } else if self.queue.len() < DEPTH {
            self.queue.push(Some(Message {
                kind: pfm::PFM_MSG_OVFL,
                active_set: set,
                generation: self.generation,
                ovfl_pmds: words(counters),
            }));
        }
    }

    pub(super) fn restart(&mut self) -> Result<(), Errno> {
        if self.state != State::Masked {
            return Err(Errno::EBUSY);
        }
        let overflowed = self.active().overflowed.clone();
        self.reset(self.active, overflowed, true);
        self.state = State::Loaded;
        self.blocked = false;
        if std::mem::take(&mut self.switch_later) {
            self.switch(true);
        }
        Ok(())
    }

    /// Time in which the context is active; `counted` is false for a core's idle
    /// time.
    pub(crate) fn pass(&mut self, ns: u64, counted: bool) {
        if self.counts() {
            let rest = self.spend(ns, counted);
            self.late += rest;
            self.late_counts = counted;
        }
    }

    /// The active set uses up time, until its timeout; what is left.
    fn spend(&mut self, ns: u64, counted: bool) -> u64 {
        let system_wide = self.system_wide;
        let set = self.active();
        let mut used = ns;
        if set.by_time {
            used = ns.min(set.left);
            set.left -= used;
        }
        if counted || !(system_wide && set.excludes_idle) {
            set.duration += used;
        }
        ns - used
    }

    /// The timeout may be up, perhaps those of several sets.
    pub(crate) fn expire(&mut self) {
        if !self.counts() || !self.wrapped.is_empty() {
            return;
        }
        let mut rest = std::mem::take(&mut self.late);
        let counted = self.late_counts;
        while self.switch_due() == Some(0) {
            self.switch(false);
            rest = self.spend(rest, counted);
        }
    }
}
