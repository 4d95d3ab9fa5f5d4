//! Samplers of IBS: what their control reads, when a sample is due, and what becomes of it.
//!
//! A sampler counts up to the maximum of its control. There its sample is due, and who
//! knows the guest takes it ([`Context::sampled`]): it is in the PMDs that describe it, the
//! control's PMD says so, and that PMD has overflowed. It counts on when that PMD is written
//! or reset, as the processor's does when software clears the bit; PFM_STOP does neither.

use pmu_model::ibs::{IbsSample, fetch, is_on, maximum, op, valid_of};
use pmu_model::{CountRequest, CounterId, IbsKind, Provenance};

use perfmon_abi::PmcArg;

use super::{Context, EventSet, How, Pmd};
use crate::bits::PmdBits;
use crate::carta;
use crate::description::{LogicalPmu, PmcDescription, PmdKind};

/// The lowest bit of a fetch count that reads.
const FETCH_UNIT: u32 = 4;
/// Bits of it that are random at the begin of a period, with `IbsRandEn`.
const FETCH_RANDOM: u64 = 0xf;

/// A count as the control's register has it.
fn bits_of(kind: IbsKind, count: u64) -> u64 {
    match kind {
        IbsKind::Fetch => (count >> FETCH_UNIT & fetch::MAX) << fetch::COUNT_SHIFT,
        IbsKind::Op => count << op::COUNT_SHIFT,
    }
}

/// The count in such a value, of which these are the bits.
fn count_in(kind: IbsKind, value: u64, bits: u64) -> u64 {
    match kind {
        IbsKind::Fetch => (value & bits) >> fetch::COUNT_SHIFT << FETCH_UNIT,
        IbsKind::Op => (value & bits) >> op::COUNT_SHIFT,
    }
}

impl Pmd {
    /// A period begins with the count in `value`, and random bits where `control` asks for
    /// them: the sample of the last one is over. Returns what the PMD was loaded with.
    pub(super) fn load_sampler(
        &mut self,
        (kind, bits): (IbsKind, u64),
        control: u64,
        value: u64,
    ) -> u64 {
        self.value = count_in(kind, value, bits);
        self.sample = 0;
        if kind == IbsKind::Fetch && control & fetch::RANDOM != 0 {
            let (random, state) = carta::vary(0, FETCH_RANDOM, self.random);
            self.value |= random;
            self.random = state;
        }
        self.how = How::NotCounted;
        value & bits
    }
}

impl EventSet {
    /// The control of a sampler, and its PMD.
    fn sampler(&self, pmu: &LogicalPmu, kind: IbsKind) -> Option<(u64, Pmd)> {
        let (pmc, pmd) = pmu.sampler(kind)?;
        let control = self.pmcs.get(&pmc)?.value;
        Some((control, self.pmds.get(&pmd).copied().unwrap_or_default()))
    }

    /// What the PMD of a sampler's control reads.
    pub(super) fn sampler_value(&self, kind: IbsKind, pmc: u16, pmd: &Pmd) -> u64 {
        let control = self.pmcs.get(&pmc).map_or(0, |pmc| pmc.value);
        control | bits_of(kind, pmd.value) | pmd.sample
    }
}

impl Context {
    /// Of what can be counted for the samplers, chooses the best that `counts`; where
    /// nothing does, the last says so.
    pub fn choose_for_samplers(&mut self, mut counts: impl FnMut(&CountRequest) -> bool) {
        if self.pmu.sampler(IbsKind::Fetch).is_none() {
            return;
        }
        let all: Vec<_> = self.pmu.sampler_requests(IbsKind::Fetch, 0).collect();
        let best = all.iter().position(|request| {
            counts(&CountRequest {
                enabled: true,
                ..*request
            })
        });
        self.fetch_choice = best.unwrap_or(all.len().saturating_sub(1));
    }

    /// What a PMC of this value asks for.
    pub(super) fn request_by(&self, pmc: &PmcDescription, value: u64) -> Option<CountRequest> {
        request_by(&self.pmu, self.fetch_choice, pmc, value)
    }

    /// Whether any of its sets uses a sampler.
    #[must_use]
    pub fn uses_sampler(&self, kind: IbsKind) -> bool {
        let is_used = |set: &EventSet| {
            let sampler = set.sampler(&self.pmu, kind);
            sampler.is_some_and(|(control, _)| is_on(kind, control))
        };
        self.sets.values().any(is_used)
    }

    /// The sampler that a write of a control would use, if that control exists.
    #[must_use]
    pub fn sampler_wanted(&self, write: &PmcArg) -> Option<IbsKind> {
        let pmc = self.pmu.pmc(write.num)?;
        match pmc.counter {
            CounterId::Ibs(kind) if is_on(kind, pmc.accept(write.value)) => Some(kind),
            _ => None,
        }
    }

    /// A sampler of the active set has come to its maximum, and its sample is to be taken.
    #[inline]
    #[must_use]
    pub fn sample_due(&self) -> Option<IbsKind> {
        match self
            .due
            .iter()
            .next()
            .and_then(|pmd| self.pmu.pmd(pmd))?
            .what
        {
            PmdKind::Sampler { kind, .. } => Some(kind),
            _ => None,
        }
    }

    /// Whether a sample may fall due while the vCPU runs.
    #[must_use]
    pub fn may_sample(&self) -> bool {
        let counts = |kind| {
            let set = self.counting()?;
            let (_, num) = self.pmu.sampler(kind)?;
            let (control, _) = set.sampler(&self.pmu, kind)?;
            Some(is_on(kind, control) && !self.is_standing(set, num))
        };
        let mut kinds = IbsKind::ALL.into_iter();
        kinds.any(|kind| counts(kind) == Some(true))
    }

    /// Takes in a sample that was due; false if none was. The PMD of the sampler's control
    /// has overflowed then.
    pub fn sampled(&mut self, sample: &IbsSample) -> bool {
        let kind = sample.kind();
        let pmu = self.pmu.clone();
        let Some((_, control)) = pmu.sampler(kind).filter(|(_, pmd)| self.due.contains(*pmd))
        else {
            return false;
        };
        let Some(set) = self.sets.get_mut(&self.active) else {
            return false;
        };
        self.due.remove(control);
        let pmd = set.pmds.entry(control).or_default();
        pmd.sample = sample.control(pmd.sample);
        if kind == IbsKind::Op {
            pmd.value = 0;
        }
        let how = pmd.how;
        for (register, value) in sample.registers() {
            if let Some(described) = pmu.sample(register) {
                let pmd = set.pmds.entry(described.num).or_default();
                (pmd.value, pmd.how) = (value, how);
            }
        }
        self.pending.insert(control);
        true
    }

    /// `events` have taken place at a sampler of the active set.
    pub(super) fn count_for_sample(
        &mut self,
        (kind, num): (IbsKind, u16),
        events: u64,
        provenance: Provenance,
    ) {
        let due = self.due.contains(num);
        let Some(set) = self.sets.get_mut(&self.active) else {
            return;
        };
        let Some((control, _)) = set.sampler(&self.pmu, kind) else {
            return;
        };
        let pmd = set.pmds.entry(num).or_default();
        if due || pmd.sample & valid_of(kind) != 0 {
            // It stands; what still counts has not been told yet.
            return;
        }
        pmd.how = pmd.how.and(provenance);
        let maximum = maximum(kind, control);
        pmd.value = pmd.value.saturating_add(events).min(maximum);
        if maximum != 0 && pmd.value == maximum {
            self.due.insert(num);
        }
    }

    /// Whether this is a sampler that holds a sample, or one that is due: it stands.
    pub(super) fn is_standing(&self, set: &EventSet, num: u16) -> bool {
        let pmd = set.pmds.get(&num).copied().unwrap_or_default();
        match self.pmu.pmd(num).map(|pmd| pmd.what) {
            Some(PmdKind::Sampler { kind, .. }) => {
                self.due.contains(num) || pmd.sample & valid_of(kind) != 0
            }
            _ => false,
        }
    }

    /// Another set is active, or none: samples that are due and nobody saw are none. They
    /// are due again with the next event.
    pub(super) fn forget_due(&mut self) {
        self.due = PmdBits::EMPTY;
    }
}

/// The request of a PMC: of fetches, the one that was chosen.
pub(super) fn request_by(
    pmu: &LogicalPmu,
    choice: usize,
    pmc: &PmcDescription,
    value: u64,
) -> Option<CountRequest> {
    match pmc.counter {
        CounterId::Ibs(kind @ IbsKind::Fetch) => pmu.sampler_requests(kind, value).nth(choice),
        _ => pmu.request(pmc, value),
    }
}
