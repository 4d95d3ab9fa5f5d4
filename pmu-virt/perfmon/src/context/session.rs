//! From creation to the next load: state, and the commands that change it.

use std::collections::BTreeMap;
use std::sync::Arc;

use perfmon_abi::StartArg;
use perfmon_abi::consts::{
    PFM_FL_NO_ASK, PFM_FL_NOTIFY_BLOCK, PFM_FL_OVFL_NO_MSG, PFM_FL_PREEMPTIBLE, PFM_FL_SYSTEM_WIDE,
    PFM_SETFL_EXPL_NEXT,
};
use perfmon_abi::wire::{Call, Errno, Refusal};

use super::{Account, Context, EventSet, Phase};
use crate::bits::PmdBits;
use crate::description::LogicalPmu;
use crate::format::{Sampler, Wish};
use crate::moment::{MessageQueue, Quantities};
use crate::throttle::Throttle;
use pmu_model::{Nanos, VirtualPmd};

const FLAGS: u32 = PFM_FL_NOTIFY_BLOCK
    | PFM_FL_SYSTEM_WIDE
    | PFM_FL_OVFL_NO_MSG
    | PFM_FL_PREEMPTIBLE
    | PFM_FL_NO_ASK;

fn refuse<T>(errno: Errno, reason: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal::new(errno, reason.into()))
}

impl Context {
    /// A context that is attached to nothing, with set 0 (3.1.1).
    ///
    /// # Errors
    /// EINVAL: `flags` has bits that are not defined, or a combination that
    /// table 3.2 excludes.
    pub fn new(
        pmu: Arc<LogicalPmu>,
        flags: u32,
        sampler: Option<Sampler>,
    ) -> Result<Self, Refusal> {
        let unknown = flags & !FLAGS;
        if unknown != 0 {
            let reason =
                format!("ctx_flags {flags:#x} has bits that are not defined: {unknown:#x}");
            return refuse(Errno::EINVAL, reason);
        }
        let excluded = PFM_FL_NOTIFY_BLOCK | PFM_FL_SYSTEM_WIDE;
        if flags & excluded == excluded {
            let reason = format!(
                "ctx_flags {flags:#x}: PFM_FL_NOTIFY_BLOCK is for contexts of vCPUs, not for PFM_FL_SYSTEM_WIDE"
            );
            return refuse(Errno::EINVAL, reason);
        }
        Ok(Context {
            pmu,
            flags,
            sampler,
            sets: BTreeMap::from([(0, EventSet::default())]),
            phase: Phase::Unloaded,
            started: false,
            active: 0,
            generation: 0,
            blocked: false,
            switch_pending: false,
            moment: None,
            pending: PmdBits::EMPTY,
            due: PmdBits::EMPTY,
            fetch_choice: 0,
            overdue: Nanos(0),
            overdue_counts: false,
            throttle: Throttle::default(),
            account: Account::default(),
            kept: BTreeMap::new(),
        })
    }

    /// Carries out a command for this context. The caller has settled its counts
    /// before, and brings the counters in line with [`Context::wanted`] after,
    /// also when the command fails: elements before the bad one are done.
    ///
    /// # Errors
    /// The specification's for the command; EINVAL for a command that is not for
    /// an existing context, or needs its host (creation, load, unload of one that
    /// is attached, the configuration).
    pub fn call(
        &mut self,
        call: &mut Call,
        values: &dyn Quantities,
        queue: &mut dyn MessageQueue,
    ) -> Result<(), Refusal> {
        match call {
            Call::WritePmcs(vector) => self.write_pmcs(vector),
            Call::WritePmds(vector) => self.write_pmds(vector),
            Call::ReadPmds(vector) => self.read_pmds(vector, values),
            Call::Start(start) => self.start(*start),
            Call::Stop => self.stop(),
            Call::Restart => self.restart(queue),
            Call::CreateEvtsets(vector) => self.create_sets(vector),
            Call::DeleteEvtsets(vector) => self.delete_sets(vector),
            Call::GetinfoEvtsets(vector) => self.getinfo_sets(vector),
            Call::GetinfoPmcs(vector) => self.pmu.getinfo_pmcs(vector),
            Call::GetinfoPmds(vector) => self.pmu.getinfo_pmds(vector),
            Call::Unload if self.phase == Phase::Unloaded => {
                let reason = "the context is attached to nothing, so there is nothing to unload";
                refuse(Errno::EBUSY, reason)
            }
            Call::Create(..)
            | Call::Load(_)
            | Call::TryLoad(_)
            | Call::Unload
            | Call::SetConfig(_)
            | Call::GetConfig(_) => refuse(
                Errno::EINVAL,
                format!("command {} is not for the context itself", call.command()),
            ),
        }
    }

    /// 3.1.5. Time is accounted as it passes, so that the second of two starts
    /// changes nothing, the duration included.
    fn start(&mut self, start: Option<StartArg>) -> Result<(), Refusal> {
        if self.phase == Phase::Unloaded {
            let reason =
                "the context is attached to nothing: PFM_LOAD_CONTEXT comes before PFM_START";
            return refuse(Errno::EBUSY, reason);
        }
        let set = start.map_or(self.active, |start| start.set);
        if !self.sets.contains_key(&set) {
            let reason = format!("start_set {set}: there is no such event set");
            return refuse(Errno::EINVAL, reason);
        }
        let counts = self.started && self.phase == Phase::Loaded;
        // Where a switch of sets was put off, naming the active one chooses it.
        let stays = start.is_none() || (set == self.active && !self.switch_pending);
        if !counts && !stays {
            self.designate(set);
        }
        self.started = true;
        Ok(())
    }

    /// 3.1.6
    fn stop(&mut self) -> Result<(), Refusal> {
        if self.phase == Phase::Unloaded {
            let reason = "the context is attached to nothing, so there is nothing to stop";
            return refuse(Errno::EBUSY, reason);
        }
        self.started = false;
        Ok(())
    }

    /// Makes `set` the active one because the tool says so. Its timeout and
    /// thresholds begin anew. A switch that waited for PFM_RESTART is overruled;
    /// overflows of the former set that were not handled are left for the time
    /// when that one becomes active again.
    fn designate(&mut self, set: u16) {
        let pending = std::mem::take(&mut self.pending);
        if let Some(former) = self.sets.get_mut(&self.active) {
            former.overflowed = former.overflowed.union(pending);
        }
        self.switch_pending = false;
        self.forget_due();
        self.overdue = Nanos(0);
        self.active = set;
        if let Some(set) = self.sets.get_mut(&set) {
            set.runs += 1;
            set.rearm();
        }
    }

    /// Whether it can be loaded with `set` first (3.1.7).
    ///
    /// # Errors
    /// EBUSY: it is loaded. EINVAL: there is no such set, or an explicit link
    /// leads to none.
    pub fn prepare_load(&self, set: u16) -> Result<(), Refusal> {
        if self.phase != Phase::Unloaded {
            let reason = "the context is loaded already: PFM_UNLOAD_CONTEXT comes first";
            return refuse(Errno::EBUSY, reason);
        }
        if !self.sets.contains_key(&set) {
            let reason = format!("load_set {set}: there is no such event set");
            return refuse(Errno::EINVAL, reason);
        }
        let explicit = |set: &EventSet| set.flags & PFM_SETFL_EXPL_NEXT != 0;
        let astray =
            |&(_, set): &(&u16, &EventSet)| explicit(set) && !self.sets.contains_key(&set.next);
        if let Some((id, set)) = self.sets.iter().find(astray) {
            let next = set.next;
            let reason = format!("event set {id}: set_id_next {next} is no event set");
            return refuse(Errno::EINVAL, reason);
        }
        Ok(())
    }

    /// It has been attached; `set` is active, nothing counts before PFM_START.
    /// What an earlier load left unhandled is forgotten.
    pub fn attached(&mut self, set: u16) {
        self.detached();
        self.generation = self.generation.wrapping_add(1);
        self.phase = Phase::Loaded;
        for set in self.sets.values_mut() {
            set.switch_pmds = PmdBits::EMPTY;
            set.overflowed = PmdBits::EMPTY;
        }
        self.designate(set);
    }

    /// It has been detached. The PMDs keep their values, the active set is no
    /// longer told.
    pub fn detached(&mut self) {
        self.phase = Phase::Unloaded;
        self.started = false;
        self.blocked = false;
        self.switch_pending = false;
        self.moment = None;
        self.pending = PmdBits::EMPTY;
        self.forget_due();
        self.overdue = Nanos(0);
    }

    /// Keeps the quantities of the VMM for reads after the context is detached.
    /// To be called before it is.
    pub fn keep_quantities(&mut self, values: &dyn Quantities) {
        let known = |&which: &VirtualPmd| Some((which.pmd(), values.read(which)?));
        self.kept = VirtualPmd::ALL.iter().filter_map(known).collect();
    }

    /// Where it is.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// PFM_START came, and no PFM_STOP since. It may be masked nevertheless.
    #[must_use]
    pub fn is_started(&self) -> bool {
        self.started
    }

    /// Nothing counts before PFM_RESTART.
    #[must_use]
    pub fn is_masked(&self) -> bool {
        self.phase == Phase::Masked
    }

    /// Its vCPU is kept off its core until PFM_RESTART.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// It is for a core.
    #[must_use]
    pub fn is_system_wide(&self) -> bool {
        self.flags & PFM_FL_SYSTEM_WIDE != 0
    }

    /// PFM_FL_*.
    #[must_use]
    pub fn flags(&self) -> u32 {
        self.flags
    }

    /// Counts the times that it was loaded.
    #[must_use]
    pub fn generation(&self) -> u16 {
        self.generation
    }

    /// The event set that is active, or was last.
    #[must_use]
    pub fn active_set(&self) -> u16 {
        self.active
    }

    /// Number of its event sets.
    #[must_use]
    pub fn set_count(&self) -> usize {
        self.sets.len()
    }

    /// Its sampling format and buffer.
    #[must_use]
    pub fn sampler(&self) -> Option<&Sampler> {
        self.sampler.as_ref()
    }

    /// A counter has wrapped, and [`Context::overflow`] has not been called.
    #[must_use]
    pub fn has_pending_overflow(&self) -> bool {
        !self.pending.is_empty()
    }

    /// What its sampling format records of the guest's memory.
    #[must_use]
    pub fn wish(&self) -> Wish {
        self.sampler.as_ref().map_or(Wish::default(), |it| it.wish)
    }
}
