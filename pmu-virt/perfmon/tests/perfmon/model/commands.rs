//! The commands.

use perfmon_abi::wire::{Call, Errno};
use perfmon_abi::{PmcArg, PmdArg, SetDesc, SetInfo, Timespec, consts as pfm};

use super::{
    COUNTERS, Model, OF_OVERFLOW, Pmc, Pmd, State, VIRTUAL, is_pmd, members, of_overflow, words,
};

type Outcome = Result<(), Errno>;
/// Nothing, or the bad element's return flag.
type Element = Result<(), u32>;

const EINVAL: u32 = pfm::PFM_REG_RETFL_EINVAL;
const NOTAVAIL: u32 = pfm::PFM_REG_RETFL_NOTAVAIL;
const NOSET: u32 = pfm::PFM_REG_RETFL_NOSET;
const MOST_SETS: usize = 1024;

/// One element after the other, until one is bad.
fn each<T>(
    vector: &mut [T],
    flags: impl Fn(&mut T) -> &mut u32,
    returned: u32,
    mut step: impl FnMut(&mut T) -> Element,
) -> Outcome {
    for element in vector {
        *flags(element) &= !returned;
        if let Err(flag) = step(element) {
            *flags(element) |= flag;
            return Err(Errno::EINVAL);
        }
    }
    Ok(())
}

impl Model {
    /// Carries out a command; what it returns is in its argument.
    pub(crate) fn call(&mut self, call: &mut Call) -> Outcome {
        let of_reg = NOTAVAIL | EINVAL | NOSET;
        let of_pmd = of_reg | pfm::PFM_REG_RETFL_PROV_MASK;
        let of_set = pfm::PFM_SET_RETFL_EINVAL | pfm::PFM_SET_RETFL_NOSET;
        match call {
            Call::WritePmcs(v) => each(v, |arg| &mut arg.flags, of_reg, |arg| self.write_pmc(arg)),
            Call::WritePmds(v) => each(v, |arg| &mut arg.flags, of_pmd, |arg| self.write_pmd(arg)),
            Call::ReadPmds(v) => each(v, |arg| &mut arg.flags, of_pmd, |arg| self.read_pmd(arg)),
            Call::Start(start) => self.start(start.map(|start| start.set)),
            Call::Stop if self.state == State::Unloaded => Err(Errno::EBUSY),
            Call::Stop => {
                self.started = false;
                Ok(())
            }
            Call::Restart => self.restart(),
            Call::Unload if self.state == State::Unloaded => Err(Errno::EBUSY),
            Call::CreateEvtsets(_) | Call::DeleteEvtsets(_) if self.state != State::Unloaded => {
                Err(Errno::EBUSY)
            }
            Call::CreateEvtsets(v) => {
                for desc in v {
                    desc.flags &= !of_set;
                    match self.create_set(desc) {
                        Ok(()) => {}
                        Err(Errno::EINVAL) => {
                            desc.flags |= pfm::PFM_SET_RETFL_EINVAL;
                            return Err(Errno::EINVAL);
                        }
                        Err(errno) => return Err(errno),
                    }
                }
                Ok(())
            }
            Call::DeleteEvtsets(v) => each(
                v,
                |desc| &mut desc.flags,
                of_set,
                |desc| self.delete_set(desc),
            ),
            Call::GetinfoEvtsets(v) => each(
                v,
                |info| &mut info.flags,
                of_set,
                |info| self.getinfo_set(info),
            ),
            other => unreachable!("the model does not know {other:?}"),
        }
    }

    fn write_pmc(&mut self, arg: &PmcArg) -> Element {
        let Some(set) = self.sets.get_mut(&arg.set) else {
            return Err(NOSET);
        };
        if !COUNTERS.contains(&arg.num) {
            return Err(NOTAVAIL);
        }
        let (notify, random) = (pfm::PFM_REGFL_OVFL_NOTIFY, pfm::PFM_REGFL_RANDOM);
        let narrow = pfm::PFM_REGFL_NO_64BIT_EMUL;
        let (reset_pmds, smpl_pmds) = (members(arg.reset_pmds), members(arg.smpl_pmds));
        let exist = reset_pmds.iter().chain(&smpl_pmds).all(|&n| is_pmd(n));
        if arg.flags & !(notify | random | narrow) != 0 || !exist {
            return Err(EINVAL);
        }
        let pmc = Pmc {
            value: arg.value,
            notify: arg.flags & notify != 0,
            random: arg.flags & random != 0,
            narrow: arg.flags & narrow != 0,
            eventid: arg.eventid,
            reset_pmds,
            smpl_pmds,
        };
        set.pmcs.insert(arg.num, pmc);
        let top = set.top(arg.num);
        if let Some(pmd) = set.pmds.get_mut(&arg.num) {
            pmd.value &= top;
        }
        Ok(())
    }

    fn write_pmd(&mut self, arg: &PmdArg) -> Element {
        let Some(set) = self.sets.get_mut(&arg.set) else {
            return Err(NOSET);
        };
        if !is_pmd(arg.num) {
            return Err(NOTAVAIL);
        }
        if arg.flags != 0 || !COUNTERS.contains(&arg.num) {
            return Err(EINVAL);
        }
        let value = arg.value & set.top(arg.num);
        let pmd = Pmd {
            value,
            long: arg.long_reset,
            short: arg.short_reset,
            last: value,
            threshold: arg.ovflsw_thres,
            left: arg.ovflsw_thres,
            mask: arg.random_mask,
            seed: arg.random_seed.into(),
            ..Pmd::default()
        };
        set.pmds.insert(arg.num, pmd);
        // A new value is a new period: a wrap of the old one that nobody has dealt with is
        // history. What was dealt with is over with PFM_RESTART, or when the set has its turn
        // (3.4.2, 3.7.7).
        if arg.set == self.active {
            self.wrapped.remove(&arg.num);
        }
        Ok(())
    }

    fn read_pmd(&mut self, arg: &mut PmdArg) -> Element {
        let Some(set) = self.sets.get(&arg.set) else {
            return Err(NOSET);
        };
        if !is_pmd(arg.num) {
            return Err(NOTAVAIL);
        }
        let resets = arg.flags == pfm::PFM_REGFL_READ_RESET;
        if arg.flags != 0 && !resets {
            return Err(EINVAL);
        }
        let how = if VIRTUAL.contains(&arg.num) {
            if resets {
                return Err(EINVAL);
            }
            let attached = self.state != State::Unloaded;
            let value = if OF_OVERFLOW.contains(&arg.num) {
                let waits = self.state == State::Masked || self.blocked;
                let at = self.at.filter(|_| waits);
                at.map(|at| of_overflow(arg.num, &at))
            } else {
                (attached || self.seen).then(|| arg.num.into())
            };
            let known = value.is_some();
            arg.value = value.unwrap_or(u64::MAX);
            arg.last_reset_val = 0;
            arg.ovflsw_thres = 0;
            if known {
                pfm::PFM_PROV_NONE
            } else {
                pfm::PFM_PROV_NOT_COUNTED
            }
        } else {
            let pmd = set.pmds.get(&arg.num).cloned().unwrap_or_default();
            arg.value = pmd.value;
            arg.last_reset_val = pmd.last;
            arg.ovflsw_thres = if set.by_overflow { pmd.left } else { 0 };
            pmd.how
        };
        arg.flags |= how << pfm::PFM_REG_RETFL_PROV_SHIFT;
        if resets {
            // A tool's own reset is no restart: what has overflowed has.
            let overflowed = self.sets[&arg.set].overflowed.clone();
            self.reset(arg.set, [arg.num].into(), true);
            let set = self.sets.get_mut(&arg.set).expect("the set");
            set.overflowed = overflowed;
        }
        Ok(())
    }

    fn start(&mut self, set: Option<u16>) -> Outcome {
        if self.state == State::Unloaded {
            return Err(Errno::EBUSY);
        }
        if set.is_some_and(|set| !self.sets.contains_key(&set)) {
            return Err(Errno::EINVAL);
        }
        let other = set.filter(|&set| set != self.active || self.switch_later);
        if let Some(set) = other.filter(|_| !self.counts()) {
            self.choose(set);
        }
        self.started = true;
        Ok(())
    }

    /// The tool makes a set the active one.
    pub(super) fn choose(&mut self, set: u16) {
        let wrapped = std::mem::take(&mut self.wrapped);
        self.active().overflowed.extend(wrapped);
        self.switch_later = false;
        self.late = 0;
        self.active = set;
        self.begin();
    }

    fn create_set(&mut self, desc: &mut SetDesc) -> Outcome {
        let has = |flag| desc.flags & flag != 0;
        let (by_overflow, by_time) = (
            has(pfm::PFM_SETFL_OVFL_SWITCH),
            has(pfm::PFM_SETFL_TIME_SWITCH),
        );
        let refused = self.only_set_0 && desc.id != 0;
        if desc.flags >= 0x10 || (by_overflow && by_time) || refused {
            return Err(Errno::EINVAL);
        }
        let mut timeout = 0;
        if by_time {
            let Timespec { sec, nsec } = desc.timeout;
            let is_time = sec >= 0 && (0..1_000_000_000).contains(&nsec);
            let ns = i128::from(sec) * 1_000_000_000 + i128::from(nsec);
            let rounded = (ns + 99_999) / 100_000 * 100_000;
            match u64::try_from(rounded) {
                Ok(ns) if is_time && ns != 0 => timeout = ns,
                _ => return Err(Errno::EINVAL),
            }
        }
        if !self.sets.contains_key(&desc.id) && self.sets.len() == MOST_SETS {
            return Err(Errno::ENOMEM);
        }
        let explicit = has(pfm::PFM_SETFL_EXPL_NEXT);
        let excludes_idle = has(pfm::PFM_SETFL_EXCL_IDLE);
        let set = self.sets.entry(desc.id).or_default();
        set.by_overflow = by_overflow;
        set.by_time = by_time;
        set.excludes_idle = excludes_idle;
        set.flags = desc.flags;
        set.next = explicit.then_some(desc.next);
        set.timeout = timeout;
        set.left = timeout;
        if by_time {
            desc.timeout = time(timeout);
        }
        Ok(())
    }

    fn delete_set(&mut self, desc: &SetDesc) -> Element {
        if desc.flags != 0 || desc.id == 0 {
            return Err(EINVAL);
        }
        if self.sets.remove(&desc.id).is_none() {
            return Err(NOSET);
        }
        if self.active == desc.id {
            self.active = 0;
        }
        Ok(())
    }

    fn getinfo_set(&mut self, info: &mut SetInfo) -> Element {
        if info.flags != 0 {
            return Err(EINVAL);
        }
        let Some(set) = self.sets.get(&info.id) else {
            return Err(NOSET);
        };
        *info = SetInfo {
            id: info.id,
            next: set.next.unwrap_or(0),
            flags: set.flags,
            switch_pmds: if set.by_overflow {
                words(&set.triggers)
            } else {
                [0; 2]
            },
            runs: set.runs,
            timeout: time(if set.by_time { set.left } else { 0 }),
            act_duration: time(set.duration),
        };
        Ok(())
    }

    /// What PFM_LOAD_CONTEXT checks.
    pub(crate) fn may_load(&self, set: u16) -> Outcome {
        if self.state != State::Unloaded {
            return Err(Errno::EBUSY);
        }
        let links = self.sets.values().filter_map(|set| set.next);
        if links.chain([set]).all(|id| self.sets.contains_key(&id)) {
            Ok(())
        } else {
            Err(Errno::EINVAL)
        }
    }

    pub(crate) fn load(&mut self, set: u16) {
        self.unload(false);
        self.state = State::Loaded;
        self.generation = self.generation.wrapping_add(1);
        self.queue.clear();
        self.masked_in = None;
        for set in self.sets.values_mut() {
            set.triggers.clear();
            set.overflowed.clear();
        }
        self.choose(set);
    }

    /// `seen`: the quantities of the VMM were looked at.
    pub(crate) fn unload(&mut self, seen: bool) {
        self.state = State::Unloaded;
        self.started = false;
        self.blocked = false;
        self.switch_later = false;
        self.wrapped.clear();
        self.at = None;
        self.late = 0;
        self.seen |= seen;
    }
}

fn time(ns: u64) -> Timespec {
    let part = |ns: u64| i64::try_from(ns).expect("a number of seconds or nanoseconds");
    Timespec {
        sec: part(ns / 1_000_000_000),
        nsec: part(ns % 1_000_000_000),
    }
}
