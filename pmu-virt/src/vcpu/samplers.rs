//! Instruction-based sampling (AMD): two counters of their own, each of which stops where
//! it comes to its maximum, and the registers that describe what was sampled.
//!
//! What is counted takes a physical counter, as any counter of the guest's does: one of
//! cycles, of instructions for ops, and of what comes nearest to fetches
//! ([`PmuModel::ibs_requests`]). When it has come to its end, the sample is due
//! ([`VcpuPmu::ibs_due`](super::VcpuPmu::ibs_due)): the VMM looks where the guest stands, or
//! knows the very instruction, and says so
//! ([`VcpuPmu::take_samples`](super::VcpuPmu::take_samples)). Only then the guest sees it, and
//! the interrupt is raised by the entry of the extended vector table that IBSCTL names.
//!
//! Sources: APM vol. 2, section 13.3; the BKDGs and PPRs, MSRC001_1030 to 103B.

use arbiter::{CounterId, CounterSet};
use pmu_model::ibs::{
    CONTROL_VALID, EXTENDED_VECTORS, IBS_VECTOR, IbsSample, fetch, is_on, maximum, op, valid_of,
};
use pmu_model::{CountRequest, IbsKind, IbsRegister, PmuModel, Register, Ticks, Tsc, low_bits};

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

#[derive(Debug)]
struct Ibs {
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
    fn of(model: &PmuModel, throttle: PmiThrottle) -> Option<Box<Self>> {
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

    /// Random bits: the generator of Park and Miller, the same in each run.
    fn random(&mut self, mask: u64) -> u64 {
        let next = u64::from(self.seed) * 16_807 % 0x7fff_ffff;
        self.seed = u32::try_from(next).unwrap_or(1);
        // The lowest bits of such a generator are its worst.
        (next >> 8) & mask
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

/// Instruction-based sampling of one vCPU, where its model has it.
#[derive(Debug)]
pub(super) struct Samplers(Option<Box<Ibs>>);

impl Samplers {
    pub(super) fn of(model: &PmuModel) -> Self {
        Samplers(Ibs::of(model, PmiThrottle::new(Ticks(0))))
    }

    /// So much time is between two interrupts at least from now on.
    pub(super) fn set_floor(&mut self, ticks: Ticks) {
        if let Some(ibs) = &mut self.0 {
            ibs.throttle = PmiThrottle::new(ticks);
        }
    }

    /// After a reset, which leaves the floor between two interrupts as it is.
    pub(super) fn reset(&mut self, model: &PmuModel) {
        if let Some(ibs) = &mut self.0 {
            let mut throttle = ibs.throttle.clone();
            throttle.reset();
            self.0 = Ibs::of(model, throttle);
        }
    }

    fn sampler(&self, kind: IbsKind) -> Option<&Sampler> {
        Some(self.0.as_deref()?.sampler(kind))
    }

    /// Whether an interrupt waits to be sent.
    #[inline]
    pub(super) fn is_waiting(&self) -> bool {
        self.0.as_ref().is_some_and(|ibs| ibs.pending.is_some())
    }

    /// When one is due that the throttle holds back.
    pub(super) fn deadline(&self) -> Option<Tsc> {
        let ibs = self.0.as_deref()?;
        ibs.pending.and(ibs.throttle.deadline())
    }

    /// What a sampler counts, from its last start on.
    pub(super) fn request(&self, kind: IbsKind) -> Option<CountRequest> {
        let sampler = self.sampler(kind)?;
        sampler.request.map(|request| CountRequest {
            enabled: sampler.running,
            any_thread: false,
            ..request
        })
    }

    /// What a sampler would count on a core.
    pub(super) fn choose(
        &self,
        model: &PmuModel,
        core: Option<&CorePmu>,
        kind: IbsKind,
    ) -> Option<CountRequest> {
        let ibs = self.0.as_deref()?;
        match kind {
            IbsKind::Fetch => best_for_fetches(model, core),
            IbsKind::Op => ibs.op_requests[usize::from(ibs.op.control & op::COUNT_OPS != 0)],
        }
    }

    /// It has come to its maximum.
    pub(super) fn fell_due(&mut self, kind: IbsKind) {
        if let Some(ibs) = &mut self.0 {
            let sampler = ibs.sampler_mut(kind);
            sampler.due |= sampler.running;
        }
    }

    /// Whether one that is due still runs.
    #[inline]
    pub(super) fn has_to_stop(&self) -> bool {
        self.0
            .as_ref()
            .is_some_and(|ibs| ibs.fetch.due && ibs.fetch.running || ibs.op.due && ibs.op.running)
    }

    /// Stops one that has come to its maximum, if it still runs, and leaves the count there
    /// that is to be read.
    pub(super) fn stop(&mut self, kind: IbsKind) -> bool {
        let Some(ibs) = &mut self.0 else {
            return false;
        };
        if !(ibs.sampler(kind).due && ibs.sampler(kind).running) {
            return false;
        }
        let by_ops = ibs.op.control & op::COUNT_OPS != 0;
        let count = match kind {
            IbsKind::Fetch => ibs.fetch.max(kind),
            IbsKind::Op if by_ops => ibs.random(OP_RANDOM),
            IbsKind::Op => 0,
        };
        let sampler = ibs.sampler_mut(kind);
        (sampler.count, sampler.running) = (count, false);
        true
    }

    /// The sampler whose sample is to be taken.
    #[inline]
    pub(super) fn due(&self) -> Option<IbsKind> {
        let ibs = self.0.as_deref()?;
        match (ibs.op.due, ibs.fetch.due) {
            (true, _) => Some(IbsKind::Op),
            (false, true) => Some(IbsKind::Fetch),
            (false, false) => None,
        }
    }

    /// Whether there are samplers at all.
    #[inline]
    pub(super) fn exist(&self) -> bool {
        self.0.is_some()
    }

    /// Whether one runs.
    #[inline]
    pub(super) fn run(&self) -> bool {
        let ibs = self.0.as_deref();
        ibs.is_some_and(|ibs| ibs.op.running || ibs.fetch.running)
    }

    pub(super) fn is_running(&self, kind: IbsKind) -> bool {
        self.sampler(kind).is_some_and(|sampler| sampler.running)
    }

    /// Takes in a sample; false if none was due.
    pub(super) fn take(&mut self, sample: &IbsSample) -> bool {
        let Some(ibs) = &mut self.0 else {
            return false;
        };
        let sampler = ibs.sampler_mut(sample.kind());
        if !std::mem::take(&mut sampler.due) {
            return false;
        }
        sampler.control = sample.control(sampler.control);
        for (register, value) in sample.registers() {
            ibs.set_data(register, value);
        }
        ibs.interrupt();
        true
    }

    /// What is to be done about the interrupt of samples at TSC value `now`. To be sent, it
    /// is over.
    pub(super) fn interrupt_due(&mut self, now: Tsc) -> IbsDue {
        let Some(ibs) = &mut self.0 else {
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

    /// RDMSR of a register in which there is no count.
    pub(super) fn read(&self, register: IbsRegister) -> u64 {
        match register {
            IbsRegister::Control => CONTROL_VALID | u64::from(IBS_VECTOR),
            IbsRegister::ApicFeature => u64::from(EXTENDED_VECTORS) << 16,
            IbsRegister::ApicControl => 0,
            IbsRegister::ApicVector(n) => {
                let vectors = self.0.as_ref().map(|ibs| ibs.vectors);
                let entry = vectors.and_then(|all| all.get(usize::from(n)).copied());
                entry.unwrap_or(MASKED).into()
            }
            _ => self.0.as_ref().map_or(0, |ibs| ibs.data(register)),
        }
    }

    /// RDMSR of a control register; `left`: events until the sampler comes to its maximum.
    pub(super) fn read_control(&self, kind: IbsKind, left: u64) -> u64 {
        let count = self.count(kind, left);
        let control = self.sampler(kind).map_or(0, |sampler| sampler.control);
        control
            | match kind {
                IbsKind::Fetch => (count >> FETCH_UNIT & fetch::MAX) << fetch::COUNT_SHIFT,
                IbsKind::Op => count << op::COUNT_SHIFT,
            }
    }

    /// The present count.
    fn count(&self, kind: IbsKind, left: u64) -> u64 {
        self.sampler(kind).map_or(0, |sampler| {
            if sampler.running {
                sampler.max(kind).saturating_sub(left)
            } else {
                sampler.count
            }
        })
    }

    /// WRMSR of a register that is no control register, reserved bits checked.
    pub(super) fn write(&mut self, register: IbsRegister, value: u64) {
        let Some(ibs) = &mut self.0 else {
            return;
        };
        if let IbsRegister::ApicVector(n) = register {
            if let (Some(entry), Ok(value)) =
                (ibs.vectors.get_mut(usize::from(n)), u32::try_from(value))
            {
                *entry = value;
            }
        } else {
            ibs.set_data(register, value);
        }
    }

    /// A control register is written: the sampler stands, or counts on from what was
    /// written. A sample that was due and nobody saw is none.
    pub(super) fn write_control(&mut self, kind: IbsKind, value: u64) {
        let Some(ibs) = &mut self.0 else {
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
    }

    /// Whether its control lets it count.
    pub(super) fn is_on(&self, kind: IbsKind) -> bool {
        self.sampler(kind)
            .is_some_and(|sampler| is_on(kind, sampler.control))
    }

    /// Whether it stands although its control lets it count, and nobody waits for a sample.
    pub(super) fn stands(&self, kind: IbsKind) -> bool {
        self.is_on(kind)
            && self
                .sampler(kind)
                .is_some_and(|sampler| !sampler.running && !sampler.due)
    }

    /// It counts this from now on. How many events are left until its maximum.
    pub(super) fn start(&mut self, kind: IbsKind, request: Option<CountRequest>) -> u64 {
        let Some(ibs) = &mut self.0 else {
            return 1;
        };
        let sampler = ibs.sampler_mut(kind);
        (sampler.request, sampler.running) = (request, true);
        sampler.max(kind).saturating_sub(sampler.count).max(1)
    }

    /// It goes on with what another core can count for it.
    pub(super) fn count_instead(&mut self, kind: IbsKind, request: Option<CountRequest>) {
        if let Some(ibs) = &mut self.0 {
            ibs.sampler_mut(kind).request = request;
        }
    }

    /// Leaves nothing of a sampler's former owner.
    pub(super) fn clear(&mut self, kind: IbsKind) {
        let Some(ibs) = &mut self.0 else {
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

    /// Whether the guest has it enabled.
    #[cfg(feature = "contexts")]
    pub(super) fn is_enabled(&self, kind: IbsKind) -> bool {
        self.sampler(kind)
            .is_some_and(|sampler| sampler.control & pmu_model::ibs::enable_of(kind) != 0)
    }

    /// The state without what is in the samplers of `held`, which somebody has reserved;
    /// `left`: as for [`Samplers::read_control`].
    pub(super) fn save(&self, held: CounterSet, left: impl Fn(IbsKind) -> u64) -> Option<SavedIbs> {
        let ibs = self.0.as_deref()?;
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
        let control = |kind| shown(kind, self.read_control(kind, left(kind)));
        let fetch_count = self.count(IbsKind::Fetch, left(IbsKind::Fetch)) & FETCH_RANDOM;
        Some(SavedIbs {
            fetch_control: control(IbsKind::Fetch),
            op_control: control(IbsKind::Op),
            fetch_count: shown(IbsKind::Fetch, fetch_count),
            data,
            vectors: ibs.vectors.map(|entry| Hex(entry.into())),
            seed: Hex(ibs.seed.into()),
            pending: pending.map(|vector| Hex(vector.into())),
        })
    }

    /// Takes a state in, which was checked before.
    pub(super) fn restore(&mut self, saved: &SavedIbs) {
        let Some(ibs) = &mut self.0 else {
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
