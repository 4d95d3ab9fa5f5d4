//! What comes of an overflow (§3.4.3, §3.5.14, §3.7.6).
//!
//! First everything is decided: what the format, or the absence of one, asks
//! for; which thresholds were reached; whether the tool can be told. Then the
//! effects follow in their order: mask, switch of sets, notification, short
//! reset. A mask puts switch and reset off until PFM_RESTART.

use perfmon_abi::consts::{
    PFM_FL_NOTIFY_BLOCK, PFM_FL_SYSTEM_WIDE, PFM_MAX_PMDS, PFM_REGFL_OVFL_NOTIFY,
    PFM_SETFL_OVFL_SWITCH,
};

use super::reset::Period;
use super::{Context, EventSet, Phase, Pmc, Pmd, UNKNOWN};
use crate::bits::PmdBits;
use crate::description::PmdKind;
use crate::format::{Control, OverflowArg};
use crate::moment::{MessageQueue, Moment, Quantities};

/// What is to come of an interrupt.
#[derive(Clone, Copy, Debug, Default)]
struct Verdict {
    mask: bool,
    notify: bool,
    block: bool,
    /// PMDs to reset now, unless monitoring is masked.
    reset: PmdBits,
    /// PMDs that are left as they are, to be reset later.
    keep: PmdBits,
}

impl Context {
    /// Deals with the overflows of the active set that [`Context::count`] found.
    /// `moment`: where the vCPU is. `values`: the quantities behind virtual PMDs
    /// that a sample may ask for.
    pub fn overflow(
        &mut self,
        moment: &Moment,
        values: &dyn Quantities,
        queue: &mut dyn MessageQueue,
    ) {
        let pending = std::mem::take(&mut self.pending);
        if pending.is_empty() {
            return;
        }
        if self.phase != Phase::Loaded {
            self.account.spurious = self.account.spurious.saturating_add(1);
            self.keep(self.active, pending);
            return;
        }
        self.account.overflows = self.account.overflows.saturating_add(1);
        self.moment = Some(*moment);
        let set = self.active;
        let triggers = self.thresholds_reached(pending);
        let mut verdict = if self.sampler.is_some() {
            self.ask_handler(pending, moment, values)
        } else {
            self.without_format(pending, triggers)
        };
        let throttled = self.throttle.hit(moment.tsc);
        verdict.mask |= throttled || (verdict.notify && self.cannot_notify(queue));
        if verdict.mask {
            self.phase = Phase::Masked;
            self.keep(set, pending);
        } else {
            self.keep(set, verdict.keep.difference(verdict.reset));
        }
        self.blocked |= verdict.block && self.may_block();
        if !triggers.is_empty() {
            self.switch_by_overflow(triggers, verdict.mask);
        }
        if verdict.notify {
            self.notify(set, pending, queue);
        }
        if throttled {
            self.throttled(queue);
        }
        if !verdict.mask {
            self.reset(set, verdict.reset, Period::Short);
        }
    }

    /// Lowers the thresholds of triggers; those that have reached 0. Nothing in
    /// a set that does not switch by overflows.
    fn thresholds_reached(&mut self, pending: PmdBits) -> PmdBits {
        let Some(set) = self.active_mut().filter(|set| set.switches_by_overflow()) else {
            return PmdBits::EMPTY;
        };
        let mut reached = PmdBits::EMPTY;
        for num in pending.iter() {
            if let Some(pmd) = set.pmds.get_mut(&num).filter(|pmd| pmd.threshold != 0) {
                pmd.threshold_left = pmd.threshold_left.saturating_sub(1);
                if pmd.threshold_left == 0 {
                    reached.insert(num);
                }
            }
        }
        reached
    }

    /// Notification masks. A counter that does not ask for it just wraps, unless
    /// it is a trigger: that one is reset, after a switch when its set becomes
    /// active again (§3.7.7).
    fn without_format(&self, pending: PmdBits, reached: PmdBits) -> Verdict {
        let Some(set) = self.sets.get(&self.active) else {
            return Verdict::default();
        };
        let is_trigger = |pmd: &u16| set.switches_by_overflow() && set.pmd(*pmd).threshold != 0;
        let triggers: PmdBits = pending.iter().filter(is_trigger).collect();
        let notify = pending.iter().any(|pmd| self.pmc(set, pmd).notifies());
        Verdict {
            mask: notify,
            notify,
            block: notify,
            reset: if reached.is_empty() {
                triggers
            } else {
                PmdBits::EMPTY
            },
            keep: triggers,
        }
    }

    /// The format's handler for each PMD, by ascending index. The first error is
    /// the end of it; PMDs that it was not asked about are reset at a restart.
    fn ask_handler(
        &mut self,
        pending: PmdBits,
        moment: &Moment,
        values: &dyn Quantities,
    ) -> Verdict {
        let (mut reset, mut all, mut any_notifies) = (PmdBits::EMPTY, Control::default(), false);
        let mut notify = false;
        let mut room = [0; PFM_MAX_PMDS as usize];
        for pmd in pending.iter() {
            let Some((pmc, failed, control)) = self.handle(pmd, moment, values, &mut room) else {
                break;
            };
            any_notifies |= pmc.notifies();
            notify |= control.notify_user && pmc.notifies();
            all.notify_user |= control.notify_user;
            all.block_thread |= control.block_thread;
            all.mask_monitoring |= control.mask_monitoring;
            if control.reset_ovfl_pmds {
                reset.insert(pmd);
            }
            if failed {
                break;
            }
        }
        Verdict {
            mask: all.mask_monitoring,
            // A format that stops, as a full buffer does, tells whoever asked
            // for notification by any of the overflowed counters (§3.6.5).
            notify: notify || (all.notify_user && all.mask_monitoring && any_notifies),
            block: all.block_thread,
            reset,
            keep: pending,
        }
    }

    fn handle(
        &mut self,
        num: u16,
        moment: &Moment,
        values: &dyn Quantities,
        room: &mut [u64],
    ) -> Option<(Pmc, bool, Control)> {
        let set = self.sets.get(&self.active)?;
        let (pmc, pmd) = (self.pmc(set, num), set.pmd(num));
        let value = self.sampled_value(set, num, moment, values);
        for (num, place) in pmc.smpl_pmds.iter().zip(room.iter_mut()) {
            *place = self.sampled_value(set, num, moment, values);
        }
        let sampler = self.sampler.as_mut()?;
        let mut arg = OverflowArg {
            ovfl_pmd: num,
            active_set: self.active,
            last_reset: pmd.last_reset,
            value,
            eventid: pmc.eventid,
            notify: pmc.notifies(),
            smpl_pmds: pmc.smpl_pmds,
            values: room.get(..pmc.smpl_pmds.len())?,
            guest: values.guest().filter(|_| !sampler.wish.is_empty()),
            num_pmds: u16::try_from(self.pmu.pmds().len()).unwrap_or(u16::MAX),
            control: Control::default(),
        };
        let buffer = sampler.buffer.bytes();
        let result = sampler.format.handler(buffer, &mut arg, moment);
        Some((pmc, result.is_err(), arg.control))
    }

    /// What a sample says of a PMD.
    fn sampled_value(&self, set: &EventSet, num: u16, at: &Moment, values: &dyn Quantities) -> u64 {
        match self.pmu.pmd(num).map(|pmd| pmd.what) {
            Some(PmdKind::Counter { .. } | PmdKind::Sample { .. }) => set.pmd(num).value,
            Some(PmdKind::Sampler { kind, pmc, .. }) => set.sampler_value(kind, pmc, &set.pmd(num)),
            Some(PmdKind::Virtual(which)) => {
                let value = at.value(which).or_else(|| values.read(which));
                value.unwrap_or(UNKNOWN)
            }
            None => UNKNOWN,
        }
    }

    fn may_block(&self) -> bool {
        self.flags & (PFM_FL_NOTIFY_BLOCK | PFM_FL_SYSTEM_WIDE) == PFM_FL_NOTIFY_BLOCK
    }

    /// These have overflowed and are not reset yet.
    fn keep(&mut self, set: u16, pmds: PmdBits) {
        if let Some(set) = self.sets.get_mut(&set) {
            set.overflowed = set.overflowed.union(pmds);
        }
    }

    fn switch_by_overflow(&mut self, triggers: PmdBits, masked: bool) {
        if let Some(set) = self.active_mut() {
            set.switch_pmds = triggers;
        }
        if masked {
            self.switch_pending = true;
        } else {
            self.switch(Period::Short);
        }
    }

    fn active_mut(&mut self) -> Option<&mut EventSet> {
        self.sets.get_mut(&self.active)
    }

    /// The PMC of a PMD that overflows.
    fn pmc(&self, set: &EventSet, pmd: u16) -> Pmc {
        match self.pmu.pmd(pmd).map(|pmd| pmd.what) {
            Some(PmdKind::Counter { pmc, .. } | PmdKind::Sampler { pmc, .. }) => {
                set.pmcs.get(&pmc).copied().unwrap_or_default()
            }
            _ => Pmc::default(),
        }
    }
}

impl EventSet {
    fn switches_by_overflow(&self) -> bool {
        self.flags & PFM_SETFL_OVFL_SWITCH != 0
    }

    fn pmd(&self, num: u16) -> Pmd {
        self.pmds.get(&num).copied().unwrap_or_default()
    }
}

impl Pmc {
    fn notifies(&self) -> bool {
        self.flags & PFM_REGFL_OVFL_NOTIFY != 0
    }
}
