//! From creation to the next load: where a context is, and whether it counts.

use std::collections::BTreeMap;

use perfmon_abi::consts::{
    PFM_FL_NO_ASK, PFM_FL_NOTIFY_BLOCK, PFM_FL_OVFL_NO_MSG, PFM_FL_PREEMPTIBLE, PFM_FL_SYSTEM_WIDE,
};
use perfmon_abi::wire::{Errno, Refusal};
use pmu_model::VirtualPmd;

use crate::moment::{Moment, Quantities};

const FLAGS: u32 = PFM_FL_NOTIFY_BLOCK
    | PFM_FL_SYSTEM_WIDE
    | PFM_FL_OVFL_NO_MSG
    | PFM_FL_PREEMPTIBLE
    | PFM_FL_NO_ASK;

/// Where a context is. A context without a descriptor is a zombie until its
/// host lets it go; no command reaches it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Attached to nothing.
    Unloaded,
    /// Attached; counts if it was started.
    Loaded,
    /// Attached; nothing counts before PFM_RESTART.
    Masked,
}

/// The state of a context that commands and overflows change. What it does not know:
/// which set is active, and what that counts.
#[derive(Debug)]
pub(super) struct Session {
    /// PFM_FL_*.
    flags: u32,
    phase: Phase,
    started: bool,
    /// Counts the times that it was loaded.
    generation: u16,
    /// The vCPU is kept off its core until PFM_RESTART.
    blocked: bool,
    /// A switch of sets was put off until PFM_RESTART.
    switch_pending: bool,
    /// The last overflow that was dealt with since it was loaded.
    moment: Option<Moment>,
    /// Quantities of the VMM when the context was detached, by PMD.
    kept: BTreeMap<u16, u64>,
}

fn busy<T>(reason: &'static str) -> Result<T, Refusal> {
    Err(Refusal::new(Errno::EBUSY, reason))
}

impl Session {
    /// Attached to nothing (3.1.1). EINVAL: `flags` has bits that are not defined, or a
    /// combination that table 3.2 excludes.
    pub(super) fn new(flags: u32) -> Result<Self, Refusal> {
        let refuse = |reason| Err(Refusal::new(Errno::EINVAL, reason));
        let unknown = flags & !FLAGS;
        if unknown != 0 {
            return refuse(format!(
                "ctx_flags {flags:#x} has bits that are not defined: {unknown:#x}"
            ));
        }
        let excluded = PFM_FL_NOTIFY_BLOCK | PFM_FL_SYSTEM_WIDE;
        if flags & excluded == excluded {
            return refuse(format!(
                "ctx_flags {flags:#x}: PFM_FL_NOTIFY_BLOCK is for contexts of vCPUs, not for PFM_FL_SYSTEM_WIDE"
            ));
        }
        Ok(Session {
            flags,
            phase: Phase::Unloaded,
            started: false,
            generation: 0,
            blocked: false,
            switch_pending: false,
            moment: None,
            kept: BTreeMap::new(),
        })
    }

    pub(super) fn flags(&self) -> u32 {
        self.flags
    }

    pub(super) fn has_flag(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    pub(super) fn phase(&self) -> Phase {
        self.phase
    }

    pub(super) fn generation(&self) -> u16 {
        self.generation
    }

    pub(super) fn is_started(&self) -> bool {
        self.started
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// It is neither detached, nor stopped, nor masked.
    pub(super) fn counts(&self) -> bool {
        self.started && self.phase == Phase::Loaded
    }

    pub(super) fn check_start(&self) -> Result<(), Refusal> {
        match self.phase {
            Phase::Unloaded => {
                busy("the context is attached to nothing: PFM_LOAD_CONTEXT comes before PFM_START")
            }
            Phase::Loaded | Phase::Masked => Ok(()),
        }
    }

    /// 3.1.5. True if the set that was `named` begins anew: the second of two starts
    /// changes nothing. A switch that waited for PFM_RESTART is overruled then.
    pub(super) fn start(&mut self, named: Option<u16>, active: u16) -> bool {
        // Where a switch of sets was put off, naming the active one chooses it.
        let stays = named.is_none_or(|set| set == active && !self.switch_pending);
        let begins = !self.counts() && !stays;
        if begins {
            self.switch_pending = false;
        }
        self.started = true;
        begins
    }

    /// 3.1.6
    pub(super) fn stop(&mut self) -> Result<(), Refusal> {
        if self.phase == Phase::Unloaded {
            return busy("the context is attached to nothing, so there is nothing to stop");
        }
        self.started = false;
        Ok(())
    }

    pub(super) fn check_load(&self) -> Result<(), Refusal> {
        if self.phase == Phase::Unloaded {
            return Ok(());
        }
        busy("the context is loaded already: PFM_UNLOAD_CONTEXT comes first")
    }

    pub(super) fn check_unload(&self) -> Result<(), Refusal> {
        if self.phase != Phase::Unloaded {
            return Ok(());
        }
        busy("the context is attached to nothing, so there is nothing to unload")
    }

    /// Sets come and go only while the context is detached.
    pub(super) fn check_sets_may_change(&self) -> Result<(), Refusal> {
        if self.phase == Phase::Unloaded {
            return Ok(());
        }
        busy(
            "event sets can only be created, changed and deleted while the context is detached: PFM_UNLOAD_CONTEXT comes first",
        )
    }

    /// It is attached, and nothing counts before PFM_START.
    pub(super) fn attach(&mut self) {
        self.detach();
        self.generation = self.generation.wrapping_add(1);
        self.phase = Phase::Loaded;
    }

    pub(super) fn detach(&mut self) {
        self.phase = Phase::Unloaded;
        self.started = false;
        self.blocked = false;
        self.switch_pending = false;
        self.moment = None;
    }

    /// An overflow is dealt with: nothing counts before PFM_RESTART if it `masks`, and the
    /// vCPU waits if it `blocks` and flags allow it.
    pub(super) fn overflowed(&mut self, at: &Moment, masks: bool, blocks: bool) {
        self.moment = Some(*at);
        if masks {
            self.phase = Phase::Masked;
        }
        self.blocked |= blocks && self.has_flag(PFM_FL_NOTIFY_BLOCK);
    }

    /// A switch of sets is due: true if it takes place now, and not at PFM_RESTART.
    pub(super) fn switches_now(&mut self) -> bool {
        self.switch_pending |= self.phase == Phase::Masked;
        self.phase != Phase::Masked
    }

    /// Whether there is something to restart, and monitoring is active while it is.
    pub(super) fn check_restart(&self) -> Result<bool, Refusal> {
        match self.phase {
            Phase::Unloaded => busy("the context is not loaded, so there is nothing to restart"),
            Phase::Loaded => Ok(true),
            Phase::Masked => Ok(false),
        }
    }

    /// PFM_RESTART: the vCPU goes on, and monitoring resumes unless it `stays_masked`. True
    /// if a switch of sets was put off until now.
    pub(super) fn restart(&mut self, stays_masked: bool) -> bool {
        self.blocked = false;
        if stays_masked {
            self.phase = Phase::Masked;
            return false;
        }
        self.phase = Phase::Loaded;
        std::mem::take(&mut self.switch_pending)
    }

    /// Keeps the quantities of the VMM for reads after the context is detached.
    pub(super) fn keep_quantities(&mut self, values: &dyn Quantities) {
        let known = |&which: &VirtualPmd| Some((which.pmd(), values.read(which)?));
        self.kept = VirtualPmd::ALL.iter().filter_map(known).collect();
    }

    /// A quantity of the VMM now, or when the context was detached; while monitoring
    /// waits for PFM_RESTART, also where the vCPU was at the overflow behind it. A VM whose
    /// clock is its own tells that at other times, too: nobody else can.
    pub(super) fn quantity(&self, which: VirtualPmd, values: &dyn Quantities) -> Option<u64> {
        if which.is_of_overflow() {
            let waits = self.phase == Phase::Masked || self.blocked;
            let then = self.moment.filter(|_| waits);
            if then.is_some() || which != VirtualPmd::Tsc {
                return then?.value(which);
            }
        }
        match self.phase {
            Phase::Unloaded => self.kept.get(&which.pmd()).copied(),
            Phase::Loaded | Phase::Masked => values.read(which),
        }
    }
}
