//! Instruction-based sampling (AMD): two counters of their own, each of which stops where
//! it comes to its maximum, and the registers that describe what was sampled.
//!
//! What is counted takes a physical counter, as any counter of the guest's does: one of
//! cycles, of instructions for ops, and of what comes nearest to fetches
//! ([`PmuModel::ibs_requests`]). When it has come to its end, the sample is due
//! ([`VcpuPmu::ibs_due`]): the VMM looks where the guest stands, or knows the very
//! instruction, and says so ([`VcpuPmu::ibs_sampled`]). Only then the guest sees it, and
//! the interrupt is raised by the entry of the extended vector table that IBSCTL names.
//!
//! Sources: APM vol. 2, section 13.3; the BKDGs and PPRs, MSRC001_1030 to 103B.

use arbiter::{CounterId, CounterSet};
use pmu_model::ibs::{
    CONTROL_VALID, EXTENDED_VECTORS, IBS_VECTOR, IbsSample, enable_of, fetch, is_on, maximum, op,
    valid_of,
};
use pmu_model::{
    CountRequest, IbsKind, IbsRegister, PmuModel, Register, Tsc, UnavailableReason, low_bits,
};

use super::{Here, VcpuPmu, WriteOutcome, index_of};
use crate::core_pmu::CorePmu;
use crate::state::Hex;
use crate::state::{IBS_DATA, SavedIbs};
use crate::throttle::{PmiThrottle, ThrottleDecision};

/// An entry of the extended vector table after reset: masked.
const MASKED: u32 = 1 << 16;
/// Random bits of the op counter after a sample, and of the fetch counter at its start.
const OP_RANDOM: u64 = low_bits(7);
const FETCH_RANDOM: u64 = low_bits(4);
/// The lowest bit of a fetch count that can be read and written.
const FETCH_UNIT: u32 = 4;

/// What is to be done about the interrupt of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IbsDue {
    /// None is to be sent now.
    Nothing,
    /// It is held back by the throttle.
    Late,
    /// It is to be sent now, with this delivery mode and vector, as in LVTPC.
    Send {
        /// Bits 10:8 the mode, 7:0 the vector.
        vector: u32,
    },
}

/// One of the two samplers.
#[derive(Clone, Copy, Debug, Default)]
struct Sampler {
    /// The control register but for its count.
    control: u64,
    /// The count, while the sampler stands.
    count: u64,
    /// What it counts, from its last start on.
    request: Option<CountRequest>,
    running: bool,
    /// It has come to its maximum, and the sample is yet to be taken.
    due: bool,
}

/// Instruction-based sampling of one vCPU.
#[derive(Debug)]
pub(super) struct Ibs {
    fetch: Sampler,
    op: Sampler,
    /// What the op sampler counts, cycles and ops: the same on every core.
    op_requests: [Option<CountRequest>; 2],
    /// Registers of the last samples, by [`slot_of`].
    data: [u64; IBS_DATA],
    vectors: [u32; EXTENDED_VECTORS as usize],
    /// Seed of the random bits.
    seed: u32,
    /// An interrupt with this mode and vector was let through, and waits to be sent.
    pending: Option<u32>,
    throttle: PmiThrottle,
}

/// The registers of samples, in the order in which they are kept.
const SAMPLED: [IbsRegister; IBS_DATA] = [
    IbsRegister::FetchLinear,
    IbsRegister::FetchPhysical,
    IbsRegister::OpRip,
    IbsRegister::OpData,
    IbsRegister::OpData2,
    IbsRegister::OpData3,
    IbsRegister::DataLinear,
    IbsRegister::DataPhysical,
    IbsRegister::BranchTarget,
];

/// Where a register of a sample is kept.
fn slot_of(register: IbsRegister) -> Option<usize> {
    SAMPLED.iter().position(|one| *one == register)
}

impl Ibs {
    /// After reset; `None` for a model without.
    pub(super) fn of(model: &PmuModel, throttle: PmiThrottle) -> Option<Box<Self>> {
        (model.ibs() != 0).then(|| {
            Box::new(Ibs {
                fetch: Sampler::default(),
                op: Sampler::default(),
                op_requests: [false, true].map(|by_ops| {
                    let mut requests = model.ibs_requests(IbsKind::Op, by_ops);
                    requests.next()
                }),
                data: [0; IBS_DATA],
                vectors: [MASKED; EXTENDED_VECTORS as usize],
                seed: 1,
                pending: None,
                throttle,
            })
        })
    }

    pub(super) fn set_throttle(&mut self, throttle: PmiThrottle) {
        self.throttle = throttle;
    }

    /// After a reset, which leaves the floor between two interrupts as it is.
    pub(super) fn reset(&mut self, model: &PmuModel) {
        let mut throttle = self.throttle.clone();
        throttle.reset();
        if let Some(fresh) = Ibs::of(model, throttle) {
            *self = *fresh;
        }
    }

    fn sampler(&self, kind: IbsKind) -> &Sampler {
        match kind {
            IbsKind::Fetch => &self.fetch,
            IbsKind::Op => &self.op,
        }
    }

    fn sampler_mut(&mut self, kind: IbsKind) -> &mut Sampler {
        match kind {
            IbsKind::Fetch => &mut self.fetch,
            IbsKind::Op => &mut self.op,
        }
    }

    /// What a sampler counts on a core.
    fn chosen(
        &self,
        model: &PmuModel,
        core: Option<&CorePmu>,
        kind: IbsKind,
    ) -> Option<CountRequest> {
        match kind {
            IbsKind::Fetch => best_for_fetches(model, core),
            IbsKind::Op => self.op_requests[usize::from(self.op.control & op::COUNT_OPS != 0)],
        }
    }

    /// Random bits: the generator of Park and Miller, the same in each run.
    fn random(&mut self, mask: u64) -> u64 {
        let next = u64::from(self.seed) * 16_807 % 0x7fff_ffff;
        self.seed = u32::try_from(next).unwrap_or(1);
        // The lowest bits of such a generator are its worst.
        (next >> 8) & mask
    }

    #[inline]
    pub(super) fn is_waiting(&self) -> bool {
        self.pending.is_some()
    }

    pub(super) fn deadline(&self) -> Option<Tsc> {
        self.pending.and(self.throttle.deadline())
    }

    pub(super) fn request(&self, kind: IbsKind) -> Option<CountRequest> {
        self.sampler(kind).request.map(|request| CountRequest {
            enabled: self.sampler(kind).running,
            ..request
        })
    }

    /// It has come to its maximum.
    pub(super) fn fell_due(&mut self, kind: IbsKind) {
        let sampler = self.sampler_mut(kind);
        sampler.due |= sampler.running;
    }

    /// Whether one that is due still runs.
    #[inline]
    pub(super) fn has_to_stop(&self) -> bool {
        self.fetch.due && self.fetch.running || self.op.due && self.op.running
    }

    /// Whether there is a sample to be read.
    fn has_sample(&self, kind: IbsKind) -> bool {
        self.sampler(kind).control & valid_of(kind) != 0
    }

    fn data(&self, register: IbsRegister) -> u64 {
        slot_of(register).map_or(0, |slot| self.data[slot])
    }

    fn set_data(&mut self, register: IbsRegister, value: u64) {
        if let Some(slot) = slot_of(register) {
            self.data[slot] = value;
        }
    }

    /// The entry that IBSCTL names lets an interrupt through: it is pending, with those
    /// that are on their way.
    fn interrupt(&mut self) {
        let entry = self.vectors[usize::from(IBS_VECTOR)];
        if entry & MASKED == 0 {
            self.pending = Some(entry & 0x7ff);
        }
    }
}

impl Sampler {
    /// The count at which the sample is due; 0: never.
    fn max(&self, kind: IbsKind) -> u64 {
        maximum(kind, self.control)
    }
}

impl VcpuPmu {
    /// A sampler has come to its maximum, and its sample is to be taken where the guest
    /// stands.
    #[inline]
    pub fn ibs_due(&self) -> Option<IbsKind> {
        let ibs = self.ibs.as_deref()?;
        match (ibs.op.due, ibs.fetch.due) {
            (true, _) => Some(IbsKind::Op),
            (false, true) => Some(IbsKind::Fetch),
            (false, false) => self.context_sample_due(),
        }
    }

    /// Whether a sample may fall due while the guest runs.
    #[inline]
    pub fn ibs_runs(&self) -> bool {
        let ibs = self.ibs.as_deref();
        ibs.is_some_and(|ibs| ibs.op.running || ibs.fetch.running || self.contexts_sample())
    }

    /// Takes in a sample that was due; one that was not is dropped.
    pub fn ibs_sampled(&mut self, core: Option<&mut CorePmu>, sample: IbsSample) {
        let here = &mut self.here(core);
        self.stop_ibs(here);
        let Some(ibs) = self.ibs.as_deref_mut() else {
            return;
        };
        let sampler = ibs.sampler_mut(sample.kind());
        if !std::mem::take(&mut sampler.due) {
            self.sample_context(here, &sample);
            return;
        }
        sampler.control = sample.control(sampler.control);
        for (register, value) in sample.registers() {
            ibs.set_data(register, value);
        }
        ibs.interrupt();
    }

    /// What is to be done about the interrupt of samples at TSC value `now`. To be sent, it
    /// is over.
    pub fn ibs_interrupt(&mut self, now: Tsc) -> IbsDue {
        let Some(ibs) = self.ibs.as_deref_mut() else {
            return IbsDue::Nothing;
        };
        let Some(vector) = ibs.pending else {
            return IbsDue::Nothing;
        };
        let waited = ibs.throttle.deadline().is_some();
        let due = if waited {
            ibs.throttle.due(now)
        } else {
            ibs.throttle.request(now) == ThrottleDecision::Deliver
        };
        match (due, waited) {
            (true, _) => {
                ibs.pending = None;
                IbsDue::Send { vector }
            }
            (false, true) => IbsDue::Nothing,
            (false, false) => IbsDue::Late,
        }
    }

    /// Stops what has come to its maximum, and leaves the count there that is to be read.
    #[cold]
    pub(super) fn stop_ibs(&mut self, here: &mut Here<'_>) {
        for kind in IbsKind::ALL {
            let Some(ibs) = self.ibs.as_deref_mut() else {
                return;
            };
            if !(ibs.sampler(kind).due && ibs.sampler(kind).running) {
                continue;
            }
            let by_ops = ibs.op.control & op::COUNT_OPS != 0;
            let count = match kind {
                IbsKind::Fetch => ibs.fetch.max(kind),
                IbsKind::Op if by_ops => ibs.random(OP_RANDOM),
                IbsKind::Op => 0,
            };
            let sampler = ibs.sampler_mut(kind);
            (sampler.count, sampler.running) = (count, false);
            self.take_control(here, CounterId::Ibs(kind));
        }
        self.refresh_needs(here.as_deref());
    }

    /// RDMSR.
    pub(super) fn read_ibs(&mut self, here: &mut Here<'_>, register: IbsRegister) -> u64 {
        let count = |pmu: &mut Self, here: &mut Here<'_>, kind| {
            pmu.settle(here, CounterId::Ibs(kind));
            pmu.stop_ibs_if_due(here);
            pmu.ibs_count(kind)
        };
        match register {
            IbsRegister::FetchControl => {
                let count = count(self, here, IbsKind::Fetch) >> FETCH_UNIT;
                let control = self.ibs.as_ref().map_or(0, |ibs| ibs.fetch.control);
                control | (count & fetch::MAX) << fetch::COUNT_SHIFT
            }
            IbsRegister::OpControl => {
                let count = count(self, here, IbsKind::Op) << op::COUNT_SHIFT;
                let control = self.ibs.as_ref().map_or(0, |ibs| ibs.op.control);
                control | count
            }
            IbsRegister::Control => CONTROL_VALID | u64::from(IBS_VECTOR),
            IbsRegister::ApicFeature => u64::from(EXTENDED_VECTORS) << 16,
            IbsRegister::ApicControl => 0,
            IbsRegister::ApicVector(n) => {
                let vectors = self.ibs.as_ref().map(|ibs| ibs.vectors);
                let entry = vectors.and_then(|all| all.get(usize::from(n)).copied());
                entry.unwrap_or(MASKED).into()
            }
            _ => self.ibs.as_ref().map_or(0, |ibs| ibs.data(register)),
        }
    }

    /// WRMSR.
    pub(super) fn write_ibs(
        &mut self,
        here: &mut Here<'_>,
        register: IbsRegister,
        value: u64,
    ) -> WriteOutcome {
        let Some(rule) = self.model.write_rule(Register::Ibs(register)) else {
            return WriteOutcome::Gp;
        };
        let Some(accepted) = rule.accept(value) else {
            return WriteOutcome::Gp;
        };
        match (register, self.ibs.as_deref_mut()) {
            (IbsRegister::FetchControl, _) => self.control_ibs(here, IbsKind::Fetch, accepted),
            (IbsRegister::OpControl, _) => self.control_ibs(here, IbsKind::Op, accepted),
            (IbsRegister::ApicVector(n), Some(ibs)) => {
                if let (Some(entry), Ok(value)) =
                    (ibs.vectors.get_mut(usize::from(n)), u32::try_from(accepted))
                {
                    *entry = value;
                }
            }
            (_, Some(ibs)) => ibs.set_data(register, accepted),
            (_, None) => {}
        }
        WriteOutcome::Done
    }

    /// Leaves nothing of a sampler's former owner.
    pub(super) fn clear_sampler(&mut self, kind: IbsKind) {
        let Some(ibs) = self.ibs.as_deref_mut() else {
            return;
        };
        *ibs.sampler_mut(kind) = Sampler::default();
        for register in SAMPLED {
            if register.sampler() == Some(kind) {
                ibs.set_data(register, 0);
            }
        }
        if !IbsKind::ALL.into_iter().any(|kind| ibs.has_sample(kind)) {
            ibs.pending = None;
        }
    }

    /// A control register is written: the sampler stands, or counts on from what was
    /// written. A sample that was due and nobody saw is none.
    fn control_ibs(&mut self, here: &mut Here<'_>, kind: IbsKind, value: u64) {
        self.settle(here, CounterId::Ibs(kind));
        let Some(ibs) = self.ibs.as_deref_mut() else {
            return;
        };
        let sampler = ibs.sampler_mut(kind);
        (sampler.due, sampler.running) = (false, false);
        match kind {
            IbsKind::Fetch => {
                let count = fetch::MAX << fetch::COUNT_SHIFT;
                sampler.control = sampler.control & fetch::SAMPLE | value & !count;
                sampler.count = (value & count) >> fetch::COUNT_SHIFT << FETCH_UNIT;
                if value & (fetch::ENABLE | fetch::RANDOM) == fetch::ENABLE | fetch::RANDOM {
                    let random = ibs.random(FETCH_RANDOM);
                    ibs.fetch.count |= random;
                }
            }
            IbsKind::Op => {
                sampler.control = value & op::CONTROL;
                sampler.count = value >> op::COUNT_SHIFT;
            }
        }
        self.start_ibs(here, kind);
    }

    /// Lets a sampler count, if its control does.
    fn start_ibs(&mut self, here: &mut Here<'_>, kind: IbsKind) {
        let counter = CounterId::Ibs(kind);
        let is_taken = self.sampling_context(kind).is_some();
        let Some(ibs) = self.ibs.as_deref_mut() else {
            return;
        };
        if !is_on(kind, ibs.sampler(kind).control) {
            // It stands.
        } else if is_taken {
            let request = ibs.chosen(&self.model, here.as_deref(), kind);
            if let (Some(request), Some(core)) = (request, here.as_deref()) {
                let backend = core.backend().name();
                let reason = UnavailableReason::Busy { backend };
                self.uncounted.log(self.owner, counter, &request, reason);
            }
            self.note_unbacked(counter);
        } else {
            let request = ibs.chosen(&self.model, here.as_deref(), kind);
            let sampler = ibs.sampler_mut(kind);
            (sampler.request, sampler.running) = (request, true);
            let left = sampler.max(kind).saturating_sub(sampler.count).max(1);
            let mask = self.model.counter_mask(counter);
            let logical = &mut self.counters[index_of(counter)];
            logical.value = (mask - left).wrapping_add(1) & mask;
            logical.times.start_over(self.ran);
        }
        if self
            .ibs
            .as_ref()
            .is_some_and(|ibs| ibs.sampler(kind).request.is_some())
        {
            self.take_control(here, counter);
            self.refresh_needs(here.as_deref());
        }
    }

    /// The vCPU has come to a core with other sources: what runs is counted by what that
    /// one has.
    pub(super) fn choose_for_ibs(&mut self, here: &mut Here<'_>) {
        for kind in IbsKind::ALL {
            let Some(ibs) = self.ibs.as_deref_mut() else {
                return;
            };
            if ibs.sampler(kind).running {
                let request = ibs.chosen(&self.model, here.as_deref(), kind);
                ibs.sampler_mut(kind).request = request;
                self.take_control(here, CounterId::Ibs(kind));
            }
        }
    }

    /// Whether the guest has a sampler enabled.
    pub(super) fn guest_samples(&self, kind: IbsKind) -> bool {
        let ibs = self.ibs.as_deref();
        ibs.is_some_and(|ibs| ibs.sampler(kind).control & enable_of(kind) != 0)
    }

    /// Tools' contexts have changed: what none of them uses any more counts for the guest
    /// again, if its control does.
    pub(super) fn return_samplers(&mut self, here: &mut Here<'_>) {
        if here.is_none() {
            // Its core will say what it counts.
            return;
        }
        for kind in IbsKind::ALL {
            let stands = |ibs: &&Ibs| {
                let sampler = ibs.sampler(kind);
                is_on(kind, sampler.control) && !sampler.running && !sampler.due
            };
            let is_free = self.sampling_context(kind).is_none();
            if is_free && self.ibs.as_deref().is_some_and(|ibs| stands(&ibs)) {
                self.start_ibs(here, kind);
            }
        }
    }

    #[inline]
    pub(super) fn stop_ibs_if_due(&mut self, here: &mut Here<'_>) {
        if self.ibs.as_ref().is_some_and(|ibs| ibs.has_to_stop()) {
            self.stop_ibs(here);
        }
    }

    /// The present count, as of the last settlement.
    fn ibs_count(&self, kind: IbsKind) -> u64 {
        let Some(ibs) = self.ibs.as_deref() else {
            return 0;
        };
        let sampler = ibs.sampler(kind);
        if !sampler.running {
            return sampler.count;
        }
        let counter = CounterId::Ibs(kind);
        let left = self.model.counter_mask(counter) - self.counters[index_of(counter)].value + 1;
        sampler.max(kind).saturating_sub(left)
    }
}

/// What a fetch sampler counts on a core: the best that it has a source for. Where it has
/// none for any of them, the last one says so.
fn best_for_fetches(model: &PmuModel, core: Option<&CorePmu>) -> Option<CountRequest> {
    let mut requests = model.ibs_requests(IbsKind::Fetch, false);
    let mut best = requests.next()?;
    for next in requests {
        if core.is_some_and(|core| core.plan_for_guest(&best).is_ok()) {
            break;
        }
        best = next;
    }
    Some(best)
}

impl VcpuPmu {
    /// The state without what is in the samplers of `held`, which somebody has reserved.
    pub(super) fn save_ibs(&mut self, here: &mut Here<'_>, held: CounterSet) -> Option<SavedIbs> {
        let fetch_control = self.read_ibs(here, IbsRegister::FetchControl);
        let op_control = self.read_ibs(here, IbsRegister::OpControl);
        let fetch_count = self.ibs_count(IbsKind::Fetch) & FETCH_RANDOM;
        let ibs = self.ibs.as_deref()?;
        let is_held = |kind| held.contains(CounterId::Ibs(kind));
        let shown = |kind, value| Hex(if is_held(kind) { 0 } else { value });
        let mut data = ibs.data.map(Hex);
        for (value, register) in data.iter_mut().zip(SAMPLED) {
            if register.sampler().is_some_and(is_held) {
                *value = Hex(0);
            }
        }
        let has_sample = |kind| !is_held(kind) && ibs.has_sample(kind);
        let pending = ibs
            .pending
            .filter(|_| IbsKind::ALL.into_iter().any(has_sample));
        Some(SavedIbs {
            fetch_control: shown(IbsKind::Fetch, fetch_control),
            op_control: shown(IbsKind::Op, op_control),
            fetch_count: shown(IbsKind::Fetch, fetch_count),
            data,
            vectors: ibs.vectors.map(|entry| Hex(entry.into())),
            seed: Hex(ibs.seed.into()),
            pending: pending.map(|vector| Hex(vector.into())),
        })
    }

    /// Takes a state in, which was checked before. Without one, all is as after a reset.
    pub(super) fn restore_ibs(&mut self, here: &mut Here<'_>, saved: Option<&SavedIbs>) {
        let (Some(ibs), Some(saved)) = (self.ibs.as_deref_mut(), saved) else {
            return;
        };
        let count = fetch::MAX << fetch::COUNT_SHIFT;
        ibs.fetch.control = saved.fetch_control.0 & !count;
        ibs.fetch.count = (saved.fetch_control.0 & count) >> fetch::COUNT_SHIFT << FETCH_UNIT
            | saved.fetch_count.0;
        ibs.op.control = saved.op_control.0 & op::CONTROL;
        ibs.op.count = saved.op_control.0 >> op::COUNT_SHIFT;
        ibs.data = saved.data.map(|value| value.0);
        for (entry, value) in ibs.vectors.iter_mut().zip(&saved.vectors) {
            *entry = u32::try_from(value.0).unwrap_or(MASKED);
        }
        ibs.seed = u32::try_from(saved.seed.0).unwrap_or(1).max(1);
        ibs.pending = saved
            .pending
            .and_then(|vector| u32::try_from(vector.0).ok());
        for kind in IbsKind::ALL {
            if self.held().contains(CounterId::Ibs(kind)) {
                self.clear_sampler(kind);
            }
            self.start_ibs(here, kind);
        }
    }
}

/// The registers of a state, their values, and the bits that a model has of each.
pub(super) fn saved_registers(model: &PmuModel, saved: &SavedIbs) -> Vec<(&'static str, u64, u64)> {
    let bits = |register| {
        let rule = model.write_rule(Register::Ibs(register));
        rule.map_or(0, |rule| rule.implemented)
    };
    let fetch_bits = bits(IbsRegister::FetchControl) | fetch::SAMPLE;
    let vector_bits = bits(IbsRegister::ApicVector(0));
    let mut all = vec![
        ("IbsFetchCtl", saved.fetch_control.0, fetch_bits),
        ("IbsOpCtl", saved.op_control.0, bits(IbsRegister::OpControl)),
        ("the fetch count", saved.fetch_count.0, FETCH_RANDOM),
        (
            "IbsFetchPhysAd",
            saved.data[1].0,
            bits(IbsRegister::FetchPhysical),
        ),
        (
            "IbsDcPhysAd",
            saved.data[7].0,
            bits(IbsRegister::DataPhysical),
        ),
        ("the seed of IBS", saved.seed.0, low_bits(31)),
        (
            "the pending interrupt of IBS",
            saved.pending.map_or(0, |one| one.0),
            0x7ff,
        ),
    ];
    let vectors = saved.vectors.iter();
    all.extend(vectors.map(|entry| ("an extended APIC vector", entry.0, vector_bits)));
    all
}
