//! PFM_CREATE_EVTSETS, PFM_DELETE_EVTSETS and PFM_GETINFO_EVTSETS.

use perfmon_abi::consts::{
    PFM_SET_RETFL_EINVAL, PFM_SET_RETFL_MASK, PFM_SET_RETFL_NOSET, PFM_SETFL_EXCL_IDLE,
    PFM_SETFL_EXCL_KERNEL_ONLY_THREADS, PFM_SETFL_EXPL_NEXT, PFM_SETFL_OVFL_SWITCH,
    PFM_SETFL_TIME_SWITCH,
};
use perfmon_abi::wire::{Errno, Refusal};
use perfmon_abi::{SetDesc, SetInfo, Timespec};
use pmu_model::Nanos;

use super::registers::Bad;
use super::{Context, EventSet, Phase};
use crate::bits::PmdBits;

const FLAGS: u32 =
    PFM_SETFL_OVFL_SWITCH | PFM_SETFL_TIME_SWITCH | PFM_SETFL_EXPL_NEXT | PFM_SETFL_EXCL_IDLE;

/// Sets of one context, set 0 included.
const MAX_SETS: usize = 1024;

/// Timeouts are multiples of this, in nanoseconds.
const GRANULE: u64 = 100_000;

fn bad<T>(flag: u32, reason: String) -> Result<T, Bad> {
    Err(Bad::new(flag, reason))
}

impl Context {
    /// 3.1.10
    pub(super) fn create_sets(&mut self, vector: &mut [SetDesc]) -> Result<(), Refusal> {
        self.only_detached()?;
        for desc in vector {
            desc.flags &= !PFM_SET_RETFL_MASK;
            let timeout = self
                .check_set(desc)
                .map_err(|bad| bad.mark(&mut desc.flags))?;
            self.create_set(desc, timeout)?;
        }
        Ok(())
    }

    /// Checks a set's description; its effective timeout.
    fn check_set(&self, desc: &SetDesc) -> Result<Nanos, Bad> {
        let (id, flags) = (desc.id, desc.flags);
        if flags & PFM_SETFL_EXCL_KERNEL_ONLY_THREADS != 0 {
            let reason = format!(
                "event set {id}: PFM_SETFL_EXCL_KERNEL_ONLY_THREADS is not supported, PFM_SETFL_EXCL_IDLE excludes the idle thread"
            );
            return bad(PFM_SET_RETFL_EINVAL, reason);
        }
        let unknown = flags & !FLAGS;
        if unknown != 0 {
            let reason =
                format!("event set {id}: set_flags has bits that are not defined: {unknown:#x}");
            return bad(PFM_SET_RETFL_EINVAL, reason);
        }
        let both = PFM_SETFL_OVFL_SWITCH | PFM_SETFL_TIME_SWITCH;
        if flags & both == both {
            let reason = format!(
                "event set {id}: PFM_SETFL_OVFL_SWITCH and PFM_SETFL_TIME_SWITCH exclude each other"
            );
            return bad(PFM_SET_RETFL_EINVAL, reason);
        }
        let only_set_0 = |format: &dyn crate::SamplingFormat| format.only_set_0();
        if id != 0 && self.sampler().is_some_and(|it| only_set_0(it.format())) {
            let reason = format!(
                "event set {id}: the sampling format of this context supports set 0 only (PFM_FMTFL_NOSET)"
            );
            return bad(PFM_SET_RETFL_EINVAL, reason);
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

    /// Creates a set, or changes the properties of one: its registers, runs and
    /// duration stay.
    fn create_set(&mut self, desc: &mut SetDesc, timeout: Nanos) -> Result<(), Refusal> {
        if !self.sets.contains_key(&desc.id) && self.sets.len() >= MAX_SETS {
            let id = desc.id;
            let reason = format!(
                "event set {id}: the context has {MAX_SETS} sets already, which is the most"
            );
            return Err(Refusal::new(Errno::ENOMEM, reason));
        }
        let set = self.sets.entry(desc.id).or_default();
        set.flags = desc.flags;
        set.next = match desc.flags & PFM_SETFL_EXPL_NEXT {
            0 => 0,
            _ => desc.next,
        };
        set.timeout = timeout;
        set.timeout_left = timeout;
        if desc.flags & PFM_SETFL_TIME_SWITCH != 0 {
            desc.timeout = Timespec::from_ns(timeout.0);
        }
        Ok(())
    }

    /// 3.1.11
    pub(super) fn delete_sets(&mut self, vector: &mut [SetDesc]) -> Result<(), Refusal> {
        self.only_detached()?;
        for desc in vector {
            desc.flags &= !PFM_SET_RETFL_MASK;
            self.delete_set(desc)
                .map_err(|bad| bad.mark(&mut desc.flags))?;
        }
        Ok(())
    }

    fn delete_set(&mut self, desc: &SetDesc) -> Result<(), Bad> {
        let id = desc.id;
        if desc.flags != 0 {
            let flags = desc.flags;
            let reason = format!("event set {id}: set_flags {flags:#x} are none of this command's");
            return bad(PFM_SET_RETFL_EINVAL, reason);
        }
        if id == 0 {
            let reason = "event set 0 is always there and cannot be deleted".to_owned();
            return bad(PFM_SET_RETFL_EINVAL, reason);
        }
        if self.sets.remove(&id).is_none() {
            let reason = format!("event set {id}: there is no such event set");
            return bad(PFM_SET_RETFL_NOSET, reason);
        }
        if self.active == id {
            self.active = 0;
        }
        Ok(())
    }

    /// 3.1.12
    pub(super) fn getinfo_sets(&self, vector: &mut [SetInfo]) -> Result<(), Refusal> {
        for info in vector {
            info.flags &= !PFM_SET_RETFL_MASK;
            let set = self
                .find_info(info)
                .map_err(|bad| bad.mark(&mut info.flags))?;
            *info = set.info(info.id);
        }
        Ok(())
    }

    fn find_info(&self, info: &SetInfo) -> Result<&EventSet, Bad> {
        let id = info.id;
        if info.flags != 0 {
            let flags = info.flags;
            let reason = format!("event set {id}: set_flags {flags:#x} are none of this command's");
            return bad(PFM_SET_RETFL_EINVAL, reason);
        }
        self.sets.get(&id).ok_or_else(|| {
            let reason = format!("event set {id}: there is no such event set");
            Bad::new(PFM_SET_RETFL_NOSET, reason)
        })
    }

    /// Sets come and go only while the context is detached.
    fn only_detached(&self) -> Result<(), Refusal> {
        if self.phase == Phase::Unloaded {
            return Ok(());
        }
        let reason = "event sets can only be created, changed and deleted while the context is detached: PFM_UNLOAD_CONTEXT comes first";
        Err(Refusal::new(Errno::EBUSY, reason))
    }
}

impl EventSet {
    fn info(&self, id: u16) -> SetInfo {
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
