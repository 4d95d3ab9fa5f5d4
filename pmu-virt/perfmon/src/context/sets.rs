//! The event sets of a context, and which of them is active.

use std::collections::BTreeMap;

use perfmon_abi::consts::{
    PFM_REG_RETFL_MASK, PFM_REG_RETFL_NOSET, PFM_REG_RETFL_PROV_SHIFT, PFM_SET_RETFL_EINVAL,
    PFM_SET_RETFL_MASK, PFM_SET_RETFL_NOSET, PFM_SETFL_EXCL_IDLE,
    PFM_SETFL_EXCL_KERNEL_ONLY_THREADS, PFM_SETFL_EXPL_NEXT, PFM_SETFL_OVFL_SWITCH,
    PFM_SETFL_TIME_SWITCH,
};
use perfmon_abi::wire::{Errno, Refusal};
use perfmon_abi::{PmcArg, PmdArg, SetDesc, SetInfo, Timespec};
use pmu_model::ibs::IbsSample;
use pmu_model::{CountRequest, IbsKind, Nanos, Provenance};

use super::Wanted;
use super::registers::{Bad, Name, PMD_RETURNED, Pmc, readable, writable};
use super::requests::Requests;
use super::set::{EventSet, Period};
use crate::bits::PmdBits;
use crate::description::{LogicalPmu, PmdKind};

const FLAGS: u32 =
    PFM_SETFL_OVFL_SWITCH | PFM_SETFL_TIME_SWITCH | PFM_SETFL_EXPL_NEXT | PFM_SETFL_EXCL_IDLE;

/// Sets of one context, set 0 included.
const MAX_SETS: usize = 1024;

/// Timeouts are multiples of this, in nanoseconds.
const GRANULE: u64 = 100_000;

/// The sets, of which one is active. Set 0 is always there.
#[derive(Debug)]
pub(super) struct EventSets {
    sets: BTreeMap<u16, EventSet>,
    active: u16,
    /// PMDs of the active set that wrapped, and were not dealt with.
    pending: PmdBits,
    /// Samplers of the active set whose sample is to be taken.
    due: PmdBits,
    /// The set whose overflow masked monitoring: PFM_RESTART is about it, whichever is
    /// active by then.
    masked_in: Option<u16>,
    /// Time that passed after the active set's timeout was up, and whether it
    /// counts with PFM_SETFL_EXCL_IDLE.
    overdue: Nanos,
    overdue_counts: bool,
}

/// Which there are.
impl EventSets {
    pub(super) fn new() -> Self {
        EventSets {
            sets: BTreeMap::from([(0, EventSet::default())]),
            active: 0,
            pending: PmdBits::EMPTY,
            due: PmdBits::EMPTY,
            masked_in: None,
            overdue: Nanos(0),
            overdue_counts: false,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.sets.len()
    }

    pub(super) fn get(&self, set: u16) -> Option<&EventSet> {
        self.sets.get(&set)
    }

    pub(super) fn active(&self) -> u16 {
        self.active
    }

    pub(super) fn active_set(&self) -> Option<&EventSet> {
        self.get(self.active)
    }

    fn active_mut(&mut self) -> Option<&mut EventSet> {
        self.sets.get_mut(&self.active)
    }

    /// 3.1.10. `only_set_0`: the sampling format works with no other.
    pub(super) fn create(
        &mut self,
        vector: &mut [SetDesc],
        only_set_0: bool,
    ) -> Result<(), Refusal> {
        for desc in vector {
            desc.flags &= !PFM_SET_RETFL_MASK;
            let timeout = check(desc, only_set_0).map_err(|bad| bad.mark(&mut desc.flags))?;
            self.create_one(desc, timeout)?;
        }
        Ok(())
    }

    /// Creates a set, or changes the properties of one.
    fn create_one(&mut self, desc: &mut SetDesc, timeout: Nanos) -> Result<(), Refusal> {
        if !self.sets.contains_key(&desc.id) && self.sets.len() >= MAX_SETS {
            let id = desc.id;
            let reason = format!(
                "event set {id}: the context has {MAX_SETS} sets already, which is the most"
            );
            return Err(Refusal::new(Errno::ENOMEM, reason));
        }
        let set = self.sets.entry(desc.id).or_default();
        set.describe(desc, timeout);
        if desc.flags & PFM_SETFL_TIME_SWITCH != 0 {
            desc.timeout = Timespec::from_ns(timeout.0);
        }
        Ok(())
    }

    /// 3.1.11
    pub(super) fn delete(&mut self, vector: &mut [SetDesc]) -> Result<(), Refusal> {
        for desc in vector {
            desc.flags &= !PFM_SET_RETFL_MASK;
            self.delete_one(desc)
                .map_err(|bad| bad.mark(&mut desc.flags))?;
        }
        Ok(())
    }

    fn delete_one(&mut self, desc: &SetDesc) -> Result<(), Bad> {
        let id = desc.id;
        no_flags(id, desc.flags)?;
        if id == 0 {
            let reason = "event set 0 is always there and cannot be deleted".to_owned();
            return Err(Bad::new(PFM_SET_RETFL_EINVAL, reason));
        }
        if self.sets.remove(&id).is_none() {
            return Err(no_set(id));
        }
        if self.active == id {
            self.active = 0;
        }
        Ok(())
    }

    /// 3.1.12
    pub(super) fn getinfo(&self, vector: &mut [SetInfo]) -> Result<(), Refusal> {
        for info in vector {
            info.flags &= !PFM_SET_RETFL_MASK;
            let (id, flags) = (info.id, info.flags);
            let found = no_flags(id, flags)
                .and_then(|()| self.sets.get(&id).ok_or_else(|| no_set(id)))
                .map_err(|bad| bad.mark(&mut info.flags))?;
            *info = found.info(id);
        }
        Ok(())
    }

    /// Whether `set` is one. `what` names the argument.
    pub(super) fn check_exists(&self, what: &str, set: u16) -> Result<(), Refusal> {
        if self.sets.contains_key(&set) {
            return Ok(());
        }
        let reason = format!("{what} {set}: there is no such event set");
        Err(Refusal::new(Errno::EINVAL, reason))
    }

    /// Every explicit link leads to a set.
    pub(super) fn check_links(&self) -> Result<(), Refusal> {
        let link = |(id, set): (&u16, &EventSet)| Some((*id, set.explicit_next()?));
        let mut links = self.sets.iter().filter_map(link);
        match links.find(|(_, next)| !self.sets.contains_key(next)) {
            None => Ok(()),
            Some((id, next)) => {
                let reason = format!("event set {id}: set_id_next {next} is no event set");
                Err(Refusal::new(Errno::EINVAL, reason))
            }
        }
    }

    /// What tells all of every set: those of set 0 are all PMDs that there are, others
    /// have what was written.
    pub(super) fn all_reads(&self, pmu: &LogicalPmu) -> (Vec<SetInfo>, Vec<PmdArg>) {
        let (mut sets, mut pmds) = (Vec::new(), Vec::new());
        for (&id, set) in &self.sets {
            sets.push(SetInfo {
                id,
                ..SetInfo::default()
            });
            let read = |num| PmdArg {
                num,
                set: id,
                ..PmdArg::default()
            };
            match id {
                0 => pmds.extend(pmu.pmds().iter().map(|pmd| read(pmd.num))),
                _ => pmds.extend(set.known_pmds().map(read)),
            }
        }
        (sets, pmds)
    }
}

/// Their registers.
impl EventSets {
    /// 3.1.2
    pub(super) fn write_pmcs(
        &mut self,
        pmu: &LogicalPmu,
        vector: &mut [PmcArg],
    ) -> Result<(), Refusal> {
        for arg in vector {
            arg.flags &= !PFM_REG_RETFL_MASK;
            self.write_pmc(pmu, arg)
                .map_err(|bad| bad.mark(&mut arg.flags))?;
        }
        Ok(())
    }

    fn write_pmc(&mut self, pmu: &LogicalPmu, arg: &PmcArg) -> Result<(), Bad> {
        let set = self.find(arg.set, &Name::of_pmc(arg))?;
        let (pmc, state) = Pmc::written(pmu, arg)?;
        set.write_pmc(pmu, pmc, state);
        Ok(())
    }

    /// 3.1.3
    pub(super) fn write_pmds(
        &mut self,
        pmu: &LogicalPmu,
        vector: &mut [PmdArg],
    ) -> Result<(), Refusal> {
        for arg in vector {
            arg.flags &= !PMD_RETURNED;
            self.write_pmd(pmu, arg)
                .map_err(|bad| bad.mark(&mut arg.flags))?;
        }
        Ok(())
    }

    fn write_pmd(&mut self, pmu: &LogicalPmu, arg: &PmdArg) -> Result<(), Bad> {
        let is_active = arg.set == self.active;
        let set = self.find(arg.set, &Name::of_pmd(arg))?;
        let pmd = writable(pmu, arg)?;
        // What was told of its overflow stays true: PFM_RESTART, or the switch to its set,
        // loads it with a reset value that is written here (3.4.2, 3.7.7).
        set.write_pmd(pmd, arg);
        if is_active {
            self.pending.remove(arg.num);
            self.due.remove(arg.num);
        }
        Ok(())
    }

    /// Reads one PMD (3.1.4), of whose quantity so much is known if it is virtual.
    pub(super) fn read_pmd(
        &mut self,
        pmu: &LogicalPmu,
        arg: &mut PmdArg,
        quantity: Option<u64>,
    ) -> Result<(), Refusal> {
        arg.flags &= !PMD_RETURNED;
        self.read_one(pmu, arg, quantity)
            .map_err(|bad| bad.mark(&mut arg.flags))
    }

    fn read_one(
        &mut self,
        pmu: &LogicalPmu,
        arg: &mut PmdArg,
        quantity: Option<u64>,
    ) -> Result<(), Bad> {
        let set = self.find(arg.set, &Name::of_pmd(arg))?;
        let (pmd, reset) = readable(pmu, arg)?;
        let provenance = set.read(pmd, quantity, arg);
        arg.flags |= provenance << PFM_REG_RETFL_PROV_SHIFT;
        if reset {
            // As a write, it leaves PFM_RESTART what that has to do.
            set.load(pmu, [arg.num].into_iter().collect(), Period::Long);
        }
        Ok(())
    }

    fn find(&mut self, set: u16, name: &Name) -> Result<&mut EventSet, Bad> {
        self.sets.get_mut(&set).ok_or_else(|| {
            let reason = format!("{name}: there is no such event set");
            Bad::new(PFM_REG_RETFL_NOSET, reason)
        })
    }
}

/// What counts.
impl EventSets {
    /// Per set: its number, and PMD and request of each counter that can advance.
    pub(super) fn demands(&self, requests: &Requests) -> Vec<(u16, Vec<(u16, CountRequest)>)> {
        let sets = self.sets.iter();
        sets.map(|(&id, set)| (id, set.demands(requests))).collect()
    }

    /// The counters of the active set that can advance and have no sample that waits.
    pub(super) fn wanted(&self, requests: &Requests, has_format: bool) -> Vec<Wanted> {
        let set = self.active_set();
        set.map_or(Vec::new(), |set| set.wanted(requests, self.due, has_format))
    }

    /// `events` have taken place at a counter of the active set.
    pub(super) fn count(
        &mut self,
        pmu: &LogicalPmu,
        num: u16,
        events: u64,
        provenance: Provenance,
    ) {
        let (Some(pmd), Some(set)) = (pmu.pmd(num), self.sets.get_mut(&self.active)) else {
            return;
        };
        match pmd.what {
            PmdKind::Counter { .. } => {
                if set.count(pmd, events, provenance) {
                    self.pending.insert(num);
                }
            }
            PmdKind::Sampler { kind, .. } => {
                // What is due stands; what still counts has not been told yet.
                let stands = self.due.contains(num);
                if !stands && set.count_for_sample(pmu, kind, events, provenance) {
                    self.due.insert(num);
                }
            }
            PmdKind::Sample { .. } | PmdKind::Virtual(_) => {}
        }
    }

    /// A counter of the active set was to count for a time in which nobody did.
    pub(super) fn lose(&mut self, pmu: &LogicalPmu, num: u16) {
        let what = pmu.pmd(num).map(|pmd| pmd.what);
        let counts = matches!(
            what,
            Some(PmdKind::Counter { .. } | PmdKind::Sampler { .. })
        );
        if let Some(set) = self.active_mut().filter(|_| counts) {
            set.lose(num);
        }
    }

    pub(super) fn uses_sampler(&self, pmu: &LogicalPmu, kind: IbsKind) -> bool {
        self.sets.values().any(|set| set.uses_sampler(pmu, kind))
    }

    /// Whether a sample may fall due while the active set counts.
    pub(super) fn may_sample(&self, pmu: &LogicalPmu) -> bool {
        let set = self.active_set();
        let may = |set: &EventSet, kind| set.may_sample(pmu, kind, self.due);
        set.is_some_and(|set| IbsKind::ALL.into_iter().any(|kind| may(set, kind)))
    }

    /// The first sampler whose sample is to be taken.
    pub(super) fn sample_due(&self, pmu: &LogicalPmu) -> Option<IbsKind> {
        let pmd = pmu.pmd(self.due.iter().next()?)?;
        match pmd.what {
            PmdKind::Sampler { kind, .. } => Some(kind),
            _ => None,
        }
    }

    /// Takes in a sample that was due; false if none was. The PMD of the sampler's control
    /// has overflowed then.
    pub(super) fn sampled(&mut self, pmu: &LogicalPmu, sample: &IbsSample) -> bool {
        let sampler = pmu.sampler(sample.kind());
        let Some((_, control)) = sampler.filter(|(_, pmd)| self.due.contains(*pmd)) else {
            return false;
        };
        let Some(set) = self.active_mut() else {
            return false;
        };
        set.take_sample(pmu, control, sample);
        self.due.remove(control);
        self.pending.insert(control);
        true
    }
}

/// Overflows.
impl EventSets {
    pub(super) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    pub(super) fn take_pending(&mut self) -> PmdBits {
        std::mem::take(&mut self.pending)
    }

    /// These of `set` have overflowed and are not reset yet.
    pub(super) fn keep(&mut self, set: u16, pmds: PmdBits) {
        if let Some(set) = self.sets.get_mut(&set) {
            set.keep(pmds);
        }
    }

    /// Lowers the thresholds of the active set's triggers; those that have reached 0.
    pub(super) fn lower_thresholds(&mut self, overflowed: PmdBits) -> PmdBits {
        let set = self.active_mut();
        set.map_or(PmdBits::EMPTY, |set| set.lower_thresholds(overflowed))
    }

    /// The active set is left, or will be, because of these.
    pub(super) fn note_triggers(&mut self, triggers: PmdBits) {
        if let Some(set) = self.active_mut() {
            set.note_triggers(triggers);
        }
    }

    /// Loads these PMDs of a set, and those in the `reset_pmds` of their PMCs.
    pub(super) fn reset(&mut self, pmu: &LogicalPmu, set: u16, pmds: PmdBits, period: Period) {
        if let Some(set) = self.sets.get_mut(&set) {
            set.reset(pmu, pmds, period);
        }
    }

    /// Monitoring is masked by an overflow of `set`.
    pub(super) fn note_masked(&mut self, set: u16) {
        self.masked_in = Some(set);
    }

    /// PFM_RESTART loads what has overflowed and was not reset since: in the set that
    /// masked, and in the active one, which the tool may have chosen meanwhile.
    pub(super) fn restart(&mut self, pmu: &LogicalPmu) {
        let masked = self.masked_in.take().filter(|set| *set != self.active);
        for set in [masked, Some(self.active)].into_iter().flatten() {
            if let Some(set) = self.sets.get_mut(&set) {
                set.reset_overflowed(pmu, Period::Long);
            }
        }
    }
}

/// From one set to the next (§3.7.6, §3.7.7).
impl EventSets {
    /// The context is attached with `set` as the active one. What an earlier load left
    /// is forgotten.
    pub(super) fn begin(&mut self, set: u16) {
        self.end();
        self.masked_in = None;
        for set in self.sets.values_mut() {
            set.forget_overflows();
        }
        self.designate(set);
    }

    /// The context is detached.
    pub(super) fn end(&mut self) {
        self.pending = PmdBits::EMPTY;
        self.due = PmdBits::EMPTY;
        self.overdue = Nanos(0);
    }

    /// Makes `set` the active one because the tool says so. Its timeout and
    /// thresholds begin anew. Overflows of the former set that were not handled are
    /// left for the time when that one becomes active again.
    pub(super) fn designate(&mut self, set: u16) {
        let pending = self.take_pending();
        self.keep(self.active, pending);
        self.end();
        self.active = set;
        if let Some(set) = self.active_mut() {
            set.begin_run();
        }
    }

    /// Time until the time switch; `None` if none is going to come.
    pub(super) fn switch_due(&self) -> Option<Nanos> {
        self.active_set()?.switch_due()
    }

    /// `time` has passed, also beyond the active set's timeout: it is all that set's.
    pub(super) fn pass(&mut self, time: Nanos) {
        let beyond = self.spend(time, true);
        if let Some(set) = self.active_mut() {
            set.live(beyond, true);
        }
    }

    /// `time` has passed in which nothing was counted: what is beyond the active set's
    /// timeout waits for [`EventSets::expire`].
    pub(super) fn idle(&mut self, time: Nanos, counts: bool) {
        let beyond = self.spend(time, counts);
        self.overdue_counts = counts;
        self.overdue += beyond;
    }

    /// The active set's time is up. Nothing while an overflow or a sample of it waits.
    pub(super) fn expire(&mut self, pmu: &LogicalPmu) {
        if !self.pending.is_empty() || !self.due.is_empty() {
            return;
        }
        // A chain of sets can lead into a circle. After one step for each set it
        // has, and whole rounds need not be walked any more.
        let mut rest = std::mem::take(&mut self.overdue);
        for _ in 0..self.sets.len() {
            if !self.time_is_up() {
                return;
            }
            rest = self.turn(pmu, rest);
        }
        rest = self.skip_rounds(rest);
        while self.time_is_up() {
            rest = self.turn(pmu, rest);
        }
    }

    fn spend(&mut self, time: Nanos, counts: bool) -> Nanos {
        let set = self.active_mut();
        set.map_or(Nanos(0), |set| set.spend(time, counts))
    }

    /// The set after `set`: the one that its explicit link names, else the one
    /// with the next number, after the last the first.
    pub(super) fn next_set(&self, set: u16) -> u16 {
        let explicit = self.sets.get(&set).and_then(EventSet::explicit_next);
        let explicit = explicit.filter(|next| self.sets.contains_key(next));
        let above = || self.sets.range(set.checked_add(1)?..).next();
        let in_order = || above().or_else(|| self.sets.first_key_value());
        explicit.unwrap_or_else(|| in_order().map_or(set, |(&next, _)| next))
    }

    /// Makes the next set the active one. PMDs of it that overflowed when it was
    /// active last, and were not reset since, are now. Samples of the former that are due
    /// and nobody saw are none: they are due again with the next event.
    pub(super) fn switch(&mut self, pmu: &LogicalPmu, period: Period) {
        self.due = PmdBits::EMPTY;
        self.active = self.next_set(self.active);
        if let Some(set) = self.active_mut() {
            set.begin_run();
            set.reset_overflowed(pmu, period);
        }
    }

    /// The next set gets what it may of `time`.
    fn turn(&mut self, pmu: &LogicalPmu, time: Nanos) -> Nanos {
        self.switch(pmu, Period::Short);
        self.spend(time, self.overdue_counts)
    }

    fn time_is_up(&self) -> bool {
        self.active_set().is_some_and(EventSet::time_is_up)
    }

    /// If the sets from the active one on switch by time and lead back to it,
    /// gives each of them its share of all whole rounds that fit into `time`, and
    /// returns the rest.
    fn skip_rounds(&mut self, time: Nanos) -> Nanos {
        let start = self.active;
        let (mut round, mut whole, mut at) = (Vec::new(), Nanos(0), start);
        loop {
            match self.sets.get(&at).and_then(EventSet::round) {
                Some(timeout) if round.len() < self.sets.len() => {
                    round.push(at);
                    whole += timeout;
                }
                _ => return time,
            }
            at = self.next_set(at);
            if at == start {
                break;
            }
        }
        let Some(rounds) = time.0.checked_div(whole.0) else {
            return time;
        };
        for number in round {
            if let Some(set) = self.sets.get_mut(&number) {
                set.add_rounds(rounds, self.overdue_counts);
            }
        }
        time - whole * rounds
    }
}

/// Tests put sets together by hand.
#[cfg(test)]
impl EventSets {
    pub(super) fn set_mut(&mut self, number: u16) -> &mut EventSet {
        self.sets.entry(number).or_default()
    }

    pub(super) fn infos(&self) -> impl Iterator<Item = SetInfo> {
        self.sets.iter().map(|(&id, set)| set.info(id))
    }
}

/// Checks a set's description; its effective timeout.
fn check(desc: &SetDesc, only_set_0: bool) -> Result<Nanos, Bad> {
    let (id, flags) = (desc.id, desc.flags);
    if flags & PFM_SETFL_EXCL_KERNEL_ONLY_THREADS != 0 {
        let reason = format!(
            "event set {id}: PFM_SETFL_EXCL_KERNEL_ONLY_THREADS is not supported, PFM_SETFL_EXCL_IDLE excludes the idle thread"
        );
        return Err(Bad::new(PFM_SET_RETFL_EINVAL, reason));
    }
    let unknown = flags & !FLAGS;
    if unknown != 0 {
        let reason =
            format!("event set {id}: set_flags has bits that are not defined: {unknown:#x}");
        return Err(Bad::new(PFM_SET_RETFL_EINVAL, reason));
    }
    let both = PFM_SETFL_OVFL_SWITCH | PFM_SETFL_TIME_SWITCH;
    if flags & both == both {
        let reason = format!(
            "event set {id}: PFM_SETFL_OVFL_SWITCH and PFM_SETFL_TIME_SWITCH exclude each other"
        );
        return Err(Bad::new(PFM_SET_RETFL_EINVAL, reason));
    }
    if id != 0 && only_set_0 {
        let reason = format!(
            "event set {id}: the sampling format of this context supports set 0 only (PFM_FMTFL_NOSET)"
        );
        return Err(Bad::new(PFM_SET_RETFL_EINVAL, reason));
    }
    if flags & PFM_SETFL_TIME_SWITCH == 0 {
        return Ok(Nanos(0));
    }
    effective(desc.timeout).map_err(|what| {
        let Timespec { sec, nsec } = desc.timeout;
        let reason = format!("event set {id}: set_timeout {sec} s {nsec} ns {what}");
        Bad::new(PFM_SET_RETFL_EINVAL, reason)
    })
}

/// Return flags alone are ignored.
fn no_flags(id: u16, flags: u32) -> Result<(), Bad> {
    if flags == 0 {
        return Ok(());
    }
    let reason = format!("event set {id}: set_flags {flags:#x} are none of this command's");
    Err(Bad::new(PFM_SET_RETFL_EINVAL, reason))
}

fn no_set(id: u16) -> Bad {
    let reason = format!("event set {id}: there is no such event set");
    Bad::new(PFM_SET_RETFL_NOSET, reason)
}

/// The timeout that a requested one becomes, or what is wrong with it.
fn effective(requested: Timespec) -> Result<Nanos, &'static str> {
    let ns = requested
        .to_ns()
        .ok_or("is no time: negative, not normalised, or too long")?;
    if ns == 0 {
        return Err("is 0, which would switch all the time");
    }
    ns.checked_next_multiple_of(GRANULE)
        .map(Nanos)
        .ok_or("is too long")
}
