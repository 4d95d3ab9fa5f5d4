//! PEBS: which counters have it, and when a record is due.
//!
//! An overflow of a counter with PEBS sets no status bit and raises no PMI. It arms the
//! counter, and the next event of it makes a record (SDM vol. 3B, "Processor Event Based
//! Sampling"). Where every instruction is seen, that is the next one that causes the
//! event. Elsewhere the overflow is noticed when the guest has been stopped, some way
//! behind it: the record is of that place.
//!
//! The caller writes the record before anything else happens to the vCPU
//! ([`VcpuPmu::pebs_due`], [`VcpuPmu::write_pebs`]): the counter is reloaded from the
//! debug store area, and where the buffer has come to its threshold, the status says so
//! and a PMI is raised. A vCPU in SMM is the exception: its registers are the firmware's,
//! and the record waits until it has left.

use arbiter::{CounterId, CounterSet, Shared};
use pmu_model::{KnownEvent, OVF_BUFFER, OwnerId};

use super::{Here, VcpuPmu, index_of};
use crate::core_pmu::CorePmu;
use crate::pebs::{
    LinearMemory, PebsArea, PebsMoment, PebsNeeds, PebsRecord, PebsSkip, PebsStats, XMM,
};
use crate::step::OperandKind;

/// `Adaptive_Record` of an event select, and of FIXED0 in `IA32_FIXED_CTR_CTRL`.
const SELECT_ADAPTIVE: u64 = 1 << 34;
const FIXED_ADAPTIVE: u64 = 1 << 32;

/// PEBS of one vCPU.
#[derive(Debug)]
pub(super) struct PebsState {
    /// Counters that have it enabled.
    pub(super) enabled: CounterSet,
    /// `MSR_PEBS_DATA_CFG`.
    pub(super) data_config: u64,
    /// `IA32_DS_AREA`.
    pub(super) ds_area: u64,
    /// Counters that have overflowed, and whose next event makes a record.
    pub(super) armed: CounterSet,
    /// Counters of the record to be written now.
    due: CounterSet,
    /// Those of them whose overflow was noticed late: what they have counted since
    /// belongs to the next record.
    late: CounterSet,
    /// What is counted now was done by one instruction that was seen.
    pub(super) retiring: bool,
    stats: PebsStats,
    /// The last reason that was logged.
    told: Option<PebsSkip>,
}

impl Default for PebsState {
    fn default() -> Self {
        PebsState {
            enabled: CounterSet::EMPTY,
            data_config: 0,
            ds_area: 0,
            armed: CounterSet::EMPTY,
            due: CounterSet::EMPTY,
            late: CounterSet::EMPTY,
            retiring: false,
            stats: PebsStats::default(),
            told: None,
        }
    }
}

impl PebsState {
    /// Reset values; what was counted about records stays.
    pub(super) fn reset(&mut self) {
        *self = PebsState {
            stats: self.stats,
            ..PebsState::default()
        };
    }

    /// Whether the next event of `counter` makes a record.
    #[inline]
    pub(super) fn awaits(&self, counter: CounterId) -> bool {
        self.armed.contains(counter) && self.enabled.contains(counter)
    }

    /// An overflow of `counter`, or the event that it waits for; false if the counter has
    /// no PEBS.
    #[inline]
    pub(super) fn takes_overflow(&mut self, counter: CounterId) -> bool {
        if !self.enabled.contains(counter) {
            return false;
        }
        if self.retiring && !self.armed.contains(counter) {
            self.armed.insert(counter);
            return true;
        }
        self.armed.remove(counter);
        self.due.insert(counter);
        if !self.retiring {
            self.late.insert(counter);
        }
        true
    }

    /// The counter was written or counts something else: its overflow is over.
    #[inline]
    pub(super) fn disarm(&mut self, counter: CounterId) {
        self.armed.remove(counter);
        self.due.remove(counter);
        self.late.remove(counter);
    }

    /// Counters whose overflow has no record yet.
    pub(super) fn waiting(&self) -> CounterSet {
        self.armed | self.due
    }

    /// Whether the record of `counter` is to be written now.
    #[inline]
    pub(super) fn is_due(&self, counter: CounterId) -> bool {
        self.due.contains(counter)
    }

    /// Leaves nothing of the counter's former owner.
    pub(super) fn clear(&mut self, counter: CounterId) {
        self.enabled.remove(counter);
        self.disarm(counter);
    }

    /// Says why there is no record, once for each kind of reason.
    fn skip(&mut self, owner: OwnerId, why: PebsSkip) {
        self.stats.skipped += 1;
        let kind = std::mem::discriminant(&why);
        if self.told.map(|told| std::mem::discriminant(&told)) != Some(kind) {
            log::info!("{owner}: no PEBS record: {why}");
            self.told = Some(why);
        }
    }
}

impl VcpuPmu {
    /// Whether a record is due, and what it needs: [`VcpuPmu::write_pebs`] is to be called
    /// before the guest goes on and before its exit is answered, unless the vCPU is in SMM.
    #[inline]
    pub fn pebs_due(&self) -> Option<PebsNeeds> {
        (!self.pebs.due.is_empty()).then(|| PebsNeeds {
            xmm: self.pebs_groups() & XMM != 0,
            operand: self.sampled_operand(),
        })
    }

    /// Which operand in memory the record that is due is about, as its counters' events say.
    fn sampled_operand(&self) -> OperandKind {
        let samples = |event| {
            let request = |counter| self.request_of(counter).and_then(|one| one.event.known());
            let mut due = self.pebs.due.iter();
            due.any(|counter| request(counter) == Some(event))
        };
        match (samples(KnownEvent::Loads), samples(KnownEvent::Stores)) {
            (true, false) => OperandKind::Load,
            (false, true) => OperandKind::Store,
            _ => OperandKind::Any,
        }
    }

    /// Whether PEBS is enabled for some counter.
    #[inline]
    pub fn has_pebs(&self) -> bool {
        !self.pebs.enabled.is_empty()
    }

    /// Records so far.
    pub fn pebs_stats(&self) -> PebsStats {
        self.pebs.stats
    }

    /// Writes the record that is due, of `moment`, and reloads its counters. Where it
    /// cannot be written, the guest's buffer stays as it is and the counters go on.
    pub fn write_pebs(
        &mut self,
        core: &mut CorePmu,
        memory: &dyn LinearMemory,
        moment: &PebsMoment,
    ) {
        let here = &mut self.here(Some(core));
        match self.append_record(memory, moment) {
            Ok((area, is_full)) => {
                self.pebs.stats.records += 1;
                self.reload(here, &area);
                if is_full {
                    self.global_status |= OVF_BUFFER;
                    let due = self.pebs.due;
                    for counter in due.iter() {
                        self.pmi.overflowed(counter);
                    }
                    let reach = self.reached_by(Shared::Freeze);
                    self.freeze.due |= self.freeze.on && !(reach & due).is_empty();
                }
            }
            Err(why) => self.pebs.skip(self.owner, why),
        }
        self.pebs.late = CounterSet::EMPTY;
        let due = std::mem::replace(&mut self.pebs.due, CounterSet::EMPTY);
        for counter in due.iter() {
            self.rearm(here, counter);
        }
        if self.freeze.due {
            self.freeze_counters(here);
        }
    }

    fn append_record(
        &mut self,
        memory: &dyn LinearMemory,
        moment: &PebsMoment,
    ) -> Result<(PebsArea, bool), PebsSkip> {
        let at = self.pebs.ds_area;
        let pebs = self.model.pebs().ok_or(PebsSkip::Area(at))?;
        let names = self.names_of(self.pebs.due);
        let record = PebsRecord::of(pebs.format, self.pebs_groups(), names.bits(), moment);
        let area = PebsArea::read(memory, at, names.iter())?;
        let is_full = area.append(memory, record.bytes())?;
        Ok((area, is_full))
    }

    /// Groups of the record that is due: those of `MSR_PEBS_DATA_CFG`, if one of its
    /// counters asks for them.
    fn pebs_groups(&self) -> u64 {
        let adaptive = |counter| match counter {
            CounterId::Programmable(n) => self.select[usize::from(n)] & SELECT_ADAPTIVE != 0,
            CounterId::Fixed(n) => self.fixed_control & FIXED_ADAPTIVE << (4 * u32::from(n)) != 0,
            CounterId::Ibs(_) => false,
        };
        if self.pebs.due.iter().any(adaptive) {
            self.pebs.data_config
        } else {
            0
        }
    }

    /// Counters by the names that the guest has for them.
    fn names_of(&mut self, counters: CounterSet) -> CounterSet {
        match &mut self.reservations {
            None => counters,
            Some(reservations) => {
                CounterSet::from_bits(reservations.unit.map().to_names(counters.bits()))
            }
        }
    }

    /// Sets the counters to their reset values, as of the record. Where that comes late,
    /// what was counted since the overflow is counted from there on; whole periods of it
    /// have no record.
    fn reload(&mut self, here: &mut Here<'_>, area: &PebsArea) {
        for counter in self.pebs.due.iter() {
            self.settle(here, counter);
            let name = self
                .names_of(std::iter::once(counter).collect())
                .iter()
                .next();
            let Some(name) = name else { continue };
            let mask = self.model.counter_mask(counter);
            let reset = area.reset_value(name) & mask;
            let logical = &mut self.counters[index_of(counter)];
            let since = if self.pebs.late.contains(counter) {
                logical.value % (mask - reset).saturating_add(1)
            } else {
                0
            };
            logical.value = reset + since;
            logical.times.start_over(self.ran);
        }
    }

    /// Counters that `IA32_PEBS_ENABLE` reaches, and that have a legacy name.
    fn pebs_touchable(&mut self) -> CounterSet {
        let all = CounterSet::from_bits(self.model.global_mask());
        self.touchable(Shared::PebsEnable) & all
    }

    /// `IA32_PEBS_ENABLE` as a legacy read shows it.
    pub(super) fn read_pebs_enable(&mut self) -> u64 {
        let reached = self.pebs_touchable();
        self.names_of(self.pebs.enabled & reached).bits()
    }

    /// A legacy write of `IA32_PEBS_ENABLE`, reserved bits checked.
    pub(super) fn write_pebs_enable(&mut self, here: &mut Here<'_>, value: u64) {
        let touched = self.pebs_touchable();
        let wanted = CounterSet::from_bits(self.behind(value)) & touched;
        self.set_pebs(here, self.pebs.enabled & !touched | wanted);
    }

    /// Counters that `IA32_PEBS_ENABLE` no longer reaches have no PEBS.
    pub(super) fn take_pebs_reach(&mut self, here: &mut Here<'_>) {
        let reached = self.reached_by(Shared::PebsEnable);
        self.set_pebs(here, self.pebs.enabled & reached);
    }

    /// Enables PEBS for these counters and no others.
    fn set_pebs(&mut self, here: &mut Here<'_>, enabled: CounterSet) {
        let changed = CounterSet::from_bits(enabled.bits() ^ self.pebs.enabled.bits());
        for counter in changed.iter() {
            self.settle(here, counter);
        }
        self.pebs.enabled = enabled;
        // What waits for the end of SMM is no more, either.
        self.pebs.due = self.pebs.due & enabled;
        self.pebs.late = self.pebs.late & enabled;
        for counter in changed.iter() {
            self.rearm(here, counter);
        }
    }
}
