//! Counts, time, overflows, switches and PFM_RESTART.

use std::collections::BTreeSet;

use perfmon::Moment;
use perfmon_abi::consts as pfm;
use perfmon_abi::wire::Errno;

use super::{Asked, COUNTERS, Model, State, of_overflow};

/// What is to come of counters that overflowed at once.
#[derive(Clone, Debug, Default)]
struct Verdict {
    notify: bool,
    block: bool,
    mask: bool,
    /// Reset now.
    reset: BTreeSet<u16>,
    /// Left as they are, if not reset now.
    keep: BTreeSet<u16>,
}

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
            pmd.last = pmd.value;
            pmd.how = pfm::PFM_PROV_NOT_COUNTED;
            set.overflowed.remove(&n);
        }
    }

    /// Deals with the counters that have wrapped.
    pub(crate) fn overflow(&mut self, moment: &Moment) {
        let wrapped = std::mem::take(&mut self.wrapped);
        if wrapped.is_empty() {
            return;
        }
        if self.state != State::Loaded {
            // They are reset by PFM_RESTART like those that masked.
            self.account.spurious += 1;
            self.active().overflowed.extend(wrapped);
            return;
        }
        self.account.overflows += 1;
        self.at = Some(*moment);
        let active = self.active;
        let (triggers, reached) = self.triggers(&wrapped);
        let mut verdict = if self.format.is_some() {
            self.ask_format(&wrapped, moment)
        } else {
            self.alone(&wrapped, &triggers, &reached)
        };
        let throttled = self.limit.exceeded(moment.tsc);
        // A notification that finds no room masks, too.
        let no_room = verdict.notify && !self.quiet && self.queue.len() >= self.depth();
        let masked = verdict.mask || throttled || no_room;
        if masked {
            // Masked: reset and switch wait for PFM_RESTART.
            self.state = State::Masked;
            self.masked_in = Some(active);
            verdict.reset.clear();
            verdict.keep.clone_from(&wrapped);
        }
        let left: Vec<u16> = verdict.keep.difference(&verdict.reset).copied().collect();
        self.active().overflowed.extend(left);
        self.blocked |= verdict.block && self.blocks;
        if !reached.is_empty() {
            self.active().triggers = reached;
            if masked {
                self.switch_later = true;
            } else {
                self.switch(false);
            }
        }
        if verdict.notify {
            self.notify(active, &wrapped);
        }
        if throttled {
            self.account.throttled += 1;
            self.tell(pfm::PFM_MSG_THROTTLED, [0; 2]);
        }
        self.reset(active, verdict.reset, false);
    }

    /// Which of these counters can make the set switch, and which do now.
    fn triggers(&mut self, wrapped: &BTreeSet<u16>) -> (BTreeSet<u16>, BTreeSet<u16>) {
        let (mut triggers, mut reached) = (BTreeSet::new(), BTreeSet::new());
        let set = self.active();
        for &n in wrapped {
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
        (triggers, reached)
    }

    /// Without a format, a notification masks and blocks. A trigger is reset now,
    /// or when its set is active again.
    fn alone(
        &self,
        wrapped: &BTreeSet<u16>,
        triggers: &BTreeSet<u16>,
        reached: &BTreeSet<u16>,
    ) -> Verdict {
        let set = &self.sets[&self.active];
        let asks = |n: &u16| set.pmcs.get(n).is_some_and(|pmc| pmc.notify);
        let notify = wrapped.iter().any(asks);
        Verdict {
            mask: notify,
            block: notify,
            notify,
            reset: if reached.is_empty() {
                triggers.clone()
            } else {
                BTreeSet::new()
            },
            keep: triggers.clone(),
        }
    }

    /// The handler, one counter after the other, until it fails.
    fn ask_format(&mut self, wrapped: &BTreeSet<u16>, moment: &Moment) -> Verdict {
        let mut verdict = Verdict {
            keep: wrapped.clone(),
            ..Verdict::default()
        };
        let (mut wants_to_notify, mut asks) = (false, false);
        for &n in wrapped {
            let asked = self.asked_about(n, moment);
            let format = self.format.as_mut().expect("a format");
            let answer = format.handle(&asked, moment);
            asks |= asked.notify;
            wants_to_notify |= answer.notify;
            verdict.notify |= answer.notify && asked.notify;
            verdict.mask |= answer.mask;
            verdict.block |= answer.block;
            if answer.reset {
                verdict.reset.insert(n);
            }
            self.asked.push(asked);
            if answer.fail {
                break;
            }
        }
        // A full buffer tells whoever asks for notification by any of the
        // counters that overflowed at once (3.6.5).
        verdict.notify |= verdict.mask && wants_to_notify && asks;
        verdict
    }

    fn asked_about(&self, n: u16, moment: &Moment) -> Asked {
        let set = &self.sets[&self.active];
        let value = |n: u16| match n {
            64..76 | 80 => n.into(),
            76..=79 => of_overflow(n, moment),
            _ => set.pmds.get(&n).map_or(0, |pmd| pmd.value),
        };
        let pmc = set.pmcs.get(&n).cloned().unwrap_or_default();
        Asked {
            pmd: n,
            set: self.active,
            last: set.pmds.get(&n).map_or(0, |pmd| pmd.last),
            value: value(n),
            eventid: pmc.eventid,
            notify: pmc.notify,
            values: pmc.smpl_pmds.iter().map(|&n| (n, value(n))).collect(),
        }
    }

    pub(super) fn restart(&mut self) -> Result<(), Errno> {
        let active = self.state == State::Loaded;
        let (reset, mask) = match (&mut self.format, self.state) {
            (_, State::Unloaded) | (None, State::Loaded) => return Err(Errno::EBUSY),
            (None, State::Masked) => (true, false),
            (Some(format), _) => {
                let answer = format.restart(active);
                if answer.fail {
                    return Err(Errno::EBUSY);
                }
                (answer.reset, answer.mask)
            }
        };
        if reset {
            // Those of the set that the tool was told of, and of the one that counts now.
            let mut sets = BTreeSet::from([self.active]);
            sets.extend(self.masked_in.take());
            for id in sets {
                let overflowed = self.sets[&id].overflowed.clone();
                self.reset(id, overflowed, true);
            }
        }
        self.blocked = false;
        self.state = if mask { State::Masked } else { State::Loaded };
        if !mask && std::mem::take(&mut self.switch_later) {
            self.switch(true);
        }
        Ok(())
    }

    /// Time in which the context is active; `counted` is false for a core's idle
    /// time.
    pub(crate) fn pass(&mut self, ns: u64, counted: bool) {
        if self.counts() {
            let rest = self.spend(ns, counted);
            if counted {
                // Events of a late exit are the active set's, and so is its time.
                self.active().duration += rest;
            } else {
                self.late += rest;
                self.late_counts = counted;
            }
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
