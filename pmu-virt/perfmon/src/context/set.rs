//! One event set: the whole state of the PMU under one number.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use perfmon_abi::consts::{
    PFM_PROV_NONE, PFM_PROV_NOT_COUNTED, PFM_REGFL_NO_64BIT_EMUL, PFM_REGFL_RANDOM,
    PFM_SETFL_EXCL_IDLE, PFM_SETFL_EXPL_NEXT, PFM_SETFL_OVFL_SWITCH, PFM_SETFL_TIME_SWITCH,
};
use perfmon_abi::{PmdArg, SetDesc, SetInfo, Timespec};
use pmu_model::ibs::{IbsSample, is_on, maximum, valid_of};
use pmu_model::{CountRequest, IbsKind, Nanos, Provenance, low_bits};

use super::Wanted;
use super::ibs::{bits_of, count_in, random_bits};
use super::registers::{How, Pmc, Pmd, UNKNOWN};
use super::requests::Requests;
use crate::bits::PmdBits;
use crate::carta;
use crate::description::{LogicalPmu, PmcDescription, PmdDescription, PmdKind};

/// Which of its reset values a PMD is loaded with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Period {
    /// After an overflow that needs no restart.
    Short,
    /// At PFM_RESTART.
    Long,
}

/// An event set. It knows nothing of the others, nor whether it is active.
#[derive(Clone, Debug, Default)]
pub(super) struct EventSet {
    /// PFM_SETFL_*.
    flags: u32,
    next: u16,
    /// Effective timeout, and what is left of it.
    timeout: Nanos,
    timeout_left: Nanos,
    /// Registers that were written, or are not at their default.
    pmcs: BTreeMap<u16, Pmc>,
    pmds: BTreeMap<u16, Pmd>,
    runs: u64,
    switch_pmds: PmdBits,
    /// How long it was active.
    active_time: Nanos,
    /// Overflowed, and not reset since.
    overflowed: PmdBits,
}

/// How it is chosen and left.
impl EventSet {
    /// Its properties become those of `desc`; registers, runs and duration stay.
    pub(super) fn describe(&mut self, desc: &SetDesc, timeout: Nanos) {
        self.flags = desc.flags;
        self.next = match desc.flags & PFM_SETFL_EXPL_NEXT {
            0 => 0,
            _ => desc.next,
        };
        self.timeout = timeout;
        self.timeout_left = timeout;
    }

    pub(super) fn info(&self, id: u16) -> SetInfo {
        let by_overflow = self.flags & PFM_SETFL_OVFL_SWITCH != 0;
        let by_time = self.flags & PFM_SETFL_TIME_SWITCH != 0;
        let switch_pmds = if by_overflow {
            self.switch_pmds
        } else {
            PmdBits::EMPTY
        };
        SetInfo {
            id,
            next: self.next,
            flags: self.flags,
            switch_pmds: switch_pmds.words(),
            runs: self.runs,
            timeout: Timespec::from_ns(if by_time { self.timeout_left.0 } else { 0 }),
            act_duration: Timespec::from_ns(self.active_time.0),
        }
    }

    /// The set that it names as the one after it.
    pub(super) fn explicit_next(&self) -> Option<u16> {
        (self.flags & PFM_SETFL_EXPL_NEXT != 0).then_some(self.next)
    }

    /// It becomes active, with timeout and thresholds as they were written.
    pub(super) fn begin_run(&mut self) {
        self.runs = self.runs.saturating_add(1);
        self.timeout_left = self.timeout;
        for pmd in self.pmds.values_mut() {
            pmd.threshold_left = pmd.threshold;
        }
    }

    /// It was active so often, each time until its timeout.
    pub(super) fn add_rounds(&mut self, rounds: u64, counts: bool) {
        self.runs = self.runs.saturating_add(rounds);
        self.live(self.timeout * rounds, counts);
    }

    /// It is active for `time`, or until its timeout; returns what is left then.
    /// `counts`: it is time that a set with PFM_SETFL_EXCL_IDLE counts as its own.
    pub(super) fn spend(&mut self, time: Nanos, counts: bool) -> Nanos {
        let taken = if self.round().is_some() {
            time.min(self.timeout_left)
        } else {
            time
        };
        self.timeout_left = self.timeout_left - taken;
        self.live(taken, counts);
        time - taken
    }

    /// It is active for `time`, whatever its timeout says.
    pub(super) fn live(&mut self, time: Nanos, counts: bool) {
        if counts || self.flags & PFM_SETFL_EXCL_IDLE == 0 {
            self.active_time += time;
        }
    }

    /// Time until it is left; `None` if it does not switch by time.
    pub(super) fn switch_due(&self) -> Option<Nanos> {
        (self.flags & PFM_SETFL_TIME_SWITCH != 0).then_some(self.timeout_left)
    }

    /// How long each of its turns lasts; `None` if no time ends one. A timeout of 0
    /// would be up for ever; no set is made with one.
    pub(super) fn round(&self) -> Option<Nanos> {
        let by_time = self.flags & PFM_SETFL_TIME_SWITCH != 0;
        Some(self.timeout).filter(|timeout| by_time && *timeout != Nanos(0))
    }

    pub(super) fn time_is_up(&self) -> bool {
        self.round().is_some() && self.timeout_left == Nanos(0)
    }

    fn switches_by_overflow(&self) -> bool {
        self.flags & PFM_SETFL_OVFL_SWITCH != 0
    }
}

/// What it counts.
impl EventSet {
    /// The bits that a PMD has: 64 for a counter, or the hardware's if its PMC
    /// says so (6.2.1).
    fn mask(&self, pmd: &PmdDescription) -> u64 {
        let PmdKind::Counter { width, pmc, .. } = pmd.what else {
            return u64::MAX;
        };
        let narrow = |pmc: &Pmc| pmc.flags & PFM_REGFL_NO_64BIT_EMUL != 0;
        if self.pmcs.get(&pmc).is_some_and(narrow) {
            low_bits(width)
        } else {
            u64::MAX
        }
    }

    /// The PMCs whose counters can advance: which, its state, the request.
    fn requests<'a>(
        &'a self,
        requests: &'a Requests,
    ) -> impl Iterator<Item = (&'a PmcDescription, &'a Pmc, CountRequest)> {
        self.pmcs.iter().filter_map(move |(&num, pmc)| {
            let description = requests.pmu().pmc(num)?;
            let request = requests.of(description, pmc.value)?;
            request.can_advance().then_some((description, pmc, request))
        })
    }

    /// PMD and request of each counter that can advance.
    pub(super) fn demands(&self, requests: &Requests) -> Vec<(u16, CountRequest)> {
        let all = self.requests(requests);
        all.map(|(pmc, _, request)| (pmc.pmd, request)).collect()
    }

    /// The counters that are to count while it is active, but for samplers that hold a
    /// sample, and for those in `due`. `has_format`: somebody sees each overflow.
    pub(super) fn wanted(
        &self,
        requests: &Requests,
        due: PmdBits,
        has_format: bool,
    ) -> Vec<Wanted> {
        let pmu = requests.pmu();
        self.requests(requests)
            .filter(|(pmc, ..)| !due.contains(pmc.pmd) && !self.holds_sample(pmu, pmc.pmd))
            .map(|(pmc, state, request)| Wanted {
                pmd: pmc.pmd,
                request,
                until: self.until(pmu, pmc.pmd, state, has_format),
            })
            .collect()
    }

    /// Events until the overflow of a PMD; `None` if nothing comes of it: the
    /// counter simply wraps then (3.4.3), which needs nobody's attention.
    fn until(&self, pmu: &LogicalPmu, num: u16, pmc: &Pmc, has_format: bool) -> Option<NonZeroU64> {
        let pmd = self.pmd(num);
        let description = pmu.pmd(num)?;
        if let PmdKind::Sampler { kind, .. } = description.what {
            // It stops there, whoever is told.
            let left = maximum(kind, pmc.value).saturating_sub(pmd.value);
            return NonZeroU64::new(left.max(1));
        }
        let is_trigger = self.switches_by_overflow() && pmd.threshold != 0;
        if !has_format && !pmc.notifies() && !is_trigger {
            return None;
        }
        let mask = self.mask(description);
        // 2^64 events, from a counter at 0, are more than any u64 can say and
        // than anybody will see.
        NonZeroU64::new((mask - (pmd.value & mask)).wrapping_add(1)).or(Some(NonZeroU64::MAX))
    }

    /// `events` have taken place at a counter; true if it has wrapped. The value goes on
    /// from there, and several wraps at once are one.
    pub(super) fn count(
        &mut self,
        counter: &PmdDescription,
        events: u64,
        provenance: Provenance,
    ) -> bool {
        let mask = self.mask(counter);
        let state = self.pmds.entry(counter.num).or_default();
        let sum = u128::from(state.value) + u128::from(events);
        state.value = state.value.wrapping_add(events) & mask;
        state.how = state.how.and(provenance);
        sum > u128::from(mask)
    }

    /// A counter was to count for a time in which nobody did.
    pub(super) fn lose(&mut self, num: u16) {
        self.pmds.entry(num).or_default().how = How::Lost;
    }

    pub(super) fn pmd(&self, num: u16) -> Pmd {
        self.pmds.get(&num).copied().unwrap_or_default()
    }

    /// The PMC of a PMD that overflows.
    pub(super) fn pmc_of(&self, pmu: &LogicalPmu, pmd: u16) -> Pmc {
        let pmc = counter(pmu, pmd).and_then(|(_, pmc)| self.pmcs.get(&pmc));
        pmc.copied().unwrap_or_default()
    }

    pub(super) fn pmc_value(&self, num: u16) -> Option<u64> {
        self.pmcs.get(&num).map(|pmc| pmc.value)
    }

    /// PMDs that were written, or are not at their default.
    pub(super) fn known_pmds(&self) -> impl Iterator<Item = u16> {
        self.pmds.keys().copied()
    }
}

/// Samplers.
impl EventSet {
    /// The control of a sampler, and its PMD.
    fn sampler(&self, pmu: &LogicalPmu, kind: IbsKind) -> Option<(u64, u16)> {
        let (pmc, pmd) = pmu.sampler(kind)?;
        Some((self.pmc_value(pmc)?, pmd))
    }

    pub(super) fn uses_sampler(&self, pmu: &LogicalPmu, kind: IbsKind) -> bool {
        let sampler = self.sampler(pmu, kind);
        sampler.is_some_and(|(control, _)| is_on(kind, control))
    }

    /// The sampler counts while the set is active, unless its PMD is in `due`.
    pub(super) fn may_sample(&self, pmu: &LogicalPmu, kind: IbsKind, due: PmdBits) -> bool {
        let sampler = self.sampler(pmu, kind);
        sampler.is_some_and(|(control, pmd)| {
            is_on(kind, control) && !due.contains(pmd) && !self.holds_sample(pmu, pmd)
        })
    }

    /// Whether this is a sampler that holds a sample: it stands.
    fn holds_sample(&self, pmu: &LogicalPmu, num: u16) -> bool {
        match pmu.pmd(num).map(|pmd| pmd.what) {
            Some(PmdKind::Sampler { kind, .. }) => self.pmd(num).sample & valid_of(kind) != 0,
            _ => false,
        }
    }

    /// `events` have taken place at a sampler; true if its sample is due.
    pub(super) fn count_for_sample(
        &mut self,
        pmu: &LogicalPmu,
        kind: IbsKind,
        events: u64,
        provenance: Provenance,
    ) -> bool {
        let Some((control, num)) = self.sampler(pmu, kind) else {
            return false;
        };
        let pmd = self.pmds.entry(num).or_default();
        if pmd.sample & valid_of(kind) != 0 {
            // It stands; what still counts has not been told yet.
            return false;
        }
        pmd.how = pmd.how.and(provenance);
        let maximum = maximum(kind, control);
        pmd.value = pmd.value.saturating_add(events).min(maximum);
        maximum != 0 && pmd.value == maximum
    }

    /// Takes in a sample of the sampler whose PMD is `control`.
    pub(super) fn take_sample(&mut self, pmu: &LogicalPmu, control: u16, sample: &IbsSample) {
        let pmd = self.pmds.entry(control).or_default();
        pmd.sample = sample.control(pmd.sample);
        if sample.kind() == IbsKind::Op {
            pmd.value = 0;
        }
        let how = pmd.how;
        for (register, value) in sample.registers() {
            if let Some(described) = pmu.sample(register) {
                let pmd = self.pmds.entry(described.num).or_default();
                (pmd.value, pmd.how) = (value, how);
            }
        }
    }

    /// What the PMD of a sampler's control reads.
    fn sampler_value(&self, kind: IbsKind, pmc: u16, pmd: &Pmd) -> u64 {
        self.pmc_value(pmc).unwrap_or(0) | bits_of(kind, pmd.value) | pmd.sample
    }

    /// A sampler's PMD is loaded with its count, and random bits where its control asks for
    /// them: the sample of the last period is over.
    fn load_if_sampler(&mut self, description: &PmdDescription, value: u64) {
        let PmdKind::Sampler { kind, pmc, count } = description.what else {
            return;
        };
        let control = self.pmc_value(pmc).unwrap_or(0);
        let pmd = self.pmds.entry(description.num).or_default();
        let (random, state) = random_bits(kind, control, pmd.random);
        pmd.value = count_in(kind, value & count) | random;
        pmd.random = state;
        pmd.sample = 0;
        pmd.how = How::NotCounted;
        pmd.last_reset = value & count;
    }
}

/// What tools write and read.
impl EventSet {
    pub(super) fn write_pmc(&mut self, pmu: &LogicalPmu, which: &PmcDescription, state: Pmc) {
        self.pmcs.insert(which.num, state);
        // With PFM_REGFL_NO_64BIT_EMUL the counter has no upper bits.
        if let Some(description) = pmu.pmd(which.pmd) {
            let mask = self.mask(description);
            if let Some(pmd) = self.pmds.get_mut(&which.pmd) {
                pmd.value &= mask;
            }
        }
    }

    pub(super) fn write_pmd(&mut self, which: &PmdDescription, arg: &PmdArg) {
        let state = Pmd::written(arg, self.mask(which));
        self.pmds.insert(which.num, state);
        self.load_if_sampler(which, state.value);
    }

    /// What a PMD reads: value, last reset and threshold go to `arg`, PFM_PROV_* is
    /// returned. `quantity`: what is known of a virtual one.
    pub(super) fn read(
        &self,
        pmd: &PmdDescription,
        quantity: Option<u64>,
        arg: &mut PmdArg,
    ) -> u32 {
        let state = self.pmd(pmd.num);
        (arg.last_reset_val, arg.ovflsw_thres) = (0, 0);
        match pmd.what {
            PmdKind::Virtual(_) => {
                arg.value = quantity.unwrap_or(UNKNOWN);
                return quantity.map_or(PFM_PROV_NOT_COUNTED, |_| PFM_PROV_NONE);
            }
            PmdKind::Sample { .. } => {
                arg.value = state.value;
                return match state.how {
                    How::NotCounted => PFM_PROV_NOT_COUNTED,
                    _ => PFM_PROV_NONE,
                };
            }
            PmdKind::Sampler { kind, pmc, .. } => arg.value = self.sampler_value(kind, pmc, &state),
            PmdKind::Counter { .. } => arg.value = state.value,
        }
        arg.last_reset_val = state.last_reset;
        if self.switches_by_overflow() {
            arg.ovflsw_thres = state.threshold_left;
        }
        state.how.code()
    }

    /// What a sample says of a PMD that is not virtual.
    pub(super) fn sampled_value(&self, pmd: &PmdDescription) -> u64 {
        let state = self.pmd(pmd.num);
        match pmd.what {
            PmdKind::Counter { .. } | PmdKind::Sample { .. } => state.value,
            PmdKind::Sampler { kind, pmc, .. } => self.sampler_value(kind, pmc, &state),
            PmdKind::Virtual(_) => UNKNOWN,
        }
    }
}

/// Overflows, and the next periods (§3.4.1, §3.4.2).
impl EventSet {
    /// These have overflowed and are not reset yet.
    pub(super) fn keep(&mut self, pmds: PmdBits) {
        self.overflowed = self.overflowed.union(pmds);
    }

    /// What an earlier load has left is forgotten.
    pub(super) fn forget_overflows(&mut self) {
        self.switch_pmds = PmdBits::EMPTY;
        self.overflowed = PmdBits::EMPTY;
    }

    /// The set is left because of these.
    pub(super) fn note_triggers(&mut self, triggers: PmdBits) {
        self.switch_pmds = triggers;
    }

    /// The counters of these whose overflows lead to the next set.
    pub(super) fn triggers_among(&self, pmds: PmdBits) -> PmdBits {
        let is_trigger = |pmd: &u16| self.switches_by_overflow() && self.pmd(*pmd).threshold != 0;
        pmds.iter().filter(is_trigger).collect()
    }

    /// Lowers the thresholds of triggers; those that have reached 0.
    pub(super) fn lower_thresholds(&mut self, overflowed: PmdBits) -> PmdBits {
        let triggers = self.triggers_among(overflowed);
        let mut reached = PmdBits::EMPTY;
        for num in triggers.iter() {
            if let Some(pmd) = self.pmds.get_mut(&num) {
                pmd.threshold_left = pmd.threshold_left.saturating_sub(1);
                if pmd.threshold_left == 0 {
                    reached.insert(num);
                }
            }
        }
        reached
    }

    /// Loads what has overflowed and was not reset since.
    pub(super) fn reset_overflowed(&mut self, pmu: &LogicalPmu, period: Period) {
        self.reset(pmu, self.overflowed, period);
    }

    /// Loads these PMDs, and those in the `reset_pmds` of their PMCs: their overflows are
    /// over.
    pub(super) fn reset(&mut self, pmu: &LogicalPmu, pmds: PmdBits, period: Period) {
        let all = self.load(pmu, pmds, period);
        self.overflowed = self.overflowed.difference(all);
    }

    /// Loads these PMDs, and those in the `reset_pmds` of their PMCs (6.2.2); which they are.
    pub(super) fn load(&mut self, pmu: &LogicalPmu, pmds: PmdBits, period: Period) -> PmdBits {
        let of_pmcs = pmds.iter().map(|pmd| self.pmc_of(pmu, pmd).reset_pmds);
        let all = of_pmcs.fold(pmds, PmdBits::union);
        for pmd in all.iter() {
            self.reload(pmu, pmd, period);
        }
        all
    }

    /// Loads one PMD. One that neither counts nor samples has nothing that could be loaded.
    fn reload(&mut self, pmu: &LogicalPmu, num: u16, period: Period) {
        let Some((description, pmc)) = counter(pmu, num) else {
            return;
        };
        let mask = self.mask(description);
        let flags = self.pmcs.get(&pmc).map_or(0, |pmc| pmc.flags);
        let pmd = self.pmds.entry(num).or_default();
        let base = match period {
            Period::Short => pmd.short_reset,
            Period::Long => pmd.long_reset,
        };
        let value = if flags & PFM_REGFL_RANDOM == 0 {
            base
        } else {
            let (value, state) = carta::vary(base, pmd.random_mask, pmd.random);
            pmd.random = state;
            value
        };
        // What is told later is what was loaded (3.1.4), not what was asked for.
        pmd.value = value & mask;
        pmd.last_reset = pmd.value;
        pmd.how = How::NotCounted;
        self.load_if_sampler(description, value);
    }
}

/// A counter's or a sampler's PMD and its PMC; `None` if it is neither's.
fn counter(pmu: &LogicalPmu, pmd: u16) -> Option<(&PmdDescription, u16)> {
    let pmd = pmu.pmd(pmd)?;
    match pmd.what {
        PmdKind::Counter { pmc, .. } | PmdKind::Sampler { pmc, .. } => Some((pmd, pmc)),
        PmdKind::Sample { .. } | PmdKind::Virtual(_) => None,
    }
}

/// Tests put sets together by hand.
#[cfg(test)]
impl EventSet {
    pub(super) fn pmc_mut(&mut self, num: u16) -> &mut Pmc {
        self.pmcs.entry(num).or_default()
    }

    pub(super) fn pmd_mut(&mut self, num: u16) -> &mut Pmd {
        self.pmds.entry(num).or_default()
    }

    pub(super) fn overflowed(&self) -> PmdBits {
        self.overflowed
    }
}
