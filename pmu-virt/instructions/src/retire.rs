//! What an instruction did, from its facts and where the guest went.

use iced_x86::ConditionCode;
use pmu_model::{EventCounts, Retirement};

use crate::facts::InsnFacts;
use crate::kinds::{InsnClass, Taken};

const CF: u64 = 1 << 0;
const PF: u64 = 1 << 2;
const ZF: u64 = 1 << 6;
const SF: u64 = 1 << 7;
const OF: u64 = 1 << 11;

impl InsnFacts {
    /// Whether the instruction has retired when RIP is `next_rip`: a repeated
    /// one has not while RIP still points at it.
    pub fn completes(&self, next_rip: u64) -> bool {
        !(self.rep && next_rip == self.rip)
    }

    /// What the instruction did when it led to `next_rip`. RFLAGS and RCX are
    /// those from before it executed; after an event was delivered on top of
    /// it, `next_rip` is the address that the event's frame returns to.
    pub fn retire(&self, next_rip: u64, rflags_before: u64, rcx_before: u64) -> Retirement {
        let taken = self.is_taken(next_rip, rflags_before, rcx_before);
        self.retired(taken, self.is_idle(rcx_before))
    }

    /// What the instruction does whenever it is executed; of a conditional branch, where it
    /// falls through, and of a repeated instruction, where it has something to do.
    pub fn events(&self) -> EventCounts {
        let taken = self.taken == Taken::Always;
        EventCounts::of(&self.retired(taken, false))
    }

    /// A repeated instruction that finds a count of 0, and accesses nothing.
    pub fn is_idle(&self, rcx_before: u64) -> bool {
        self.rep && self.rep_count.of(rcx_before) == 0
    }

    /// What the instruction did, if as a branch it was `taken`, and if it was `idle` as
    /// [`InsnFacts::is_idle`] says.
    pub fn retired(&self, taken: bool, idle: bool) -> Retirement {
        Retirement {
            branch: self.class != InsnClass::Plain,
            taken,
            conditional: self.class == InsnClass::ConditionalBranch,
            far: self.class == InsnClass::Far,
            loads: if idle { 0 } else { self.loads },
            stores: if idle { 0 } else { self.stores },
            call: self.class == InsnClass::Call,
            near_return: self.class == InsnClass::Return,
            string: self.string,
            unit: self.unit,
        }
    }

    fn is_taken(&self, next_rip: u64, rflags: u64, rcx: u64) -> bool {
        // Where the guest went decides, unless both ways lead there.
        if let (true, Some(target)) = (self.conditional, self.near_target)
            && target != self.next
            && (next_rip == target || next_rip == self.next)
        {
            return next_rip == target;
        }
        match self.taken {
            Taken::Never => false,
            Taken::Always => true,
            Taken::If(code) => holds(code, rflags),
            Taken::IfZero(count) => count.of(rcx) == 0,
            Taken::Loop(count, code) => {
                count.of(rcx) != 1 && code.is_none_or(|code| holds(code, rflags))
            }
            Taken::IfOverflow => rflags & OF != 0,
        }
    }
}

/// SDM vol. 1, appendix B, "EFLAGS Condition Codes".
fn holds(code: ConditionCode, rflags: u64) -> bool {
    let flag = |bit: u64| rflags & bit != 0;
    let less = flag(SF) != flag(OF);
    match code {
        ConditionCode::None => true,
        ConditionCode::o => flag(OF),
        ConditionCode::no => !flag(OF),
        ConditionCode::b => flag(CF),
        ConditionCode::ae => !flag(CF),
        ConditionCode::e => flag(ZF),
        ConditionCode::ne => !flag(ZF),
        ConditionCode::be => flag(CF) || flag(ZF),
        ConditionCode::a => !(flag(CF) || flag(ZF)),
        ConditionCode::s => flag(SF),
        ConditionCode::ns => !flag(SF),
        ConditionCode::p => flag(PF),
        ConditionCode::np => !flag(PF),
        ConditionCode::l => less,
        ConditionCode::ge => !less,
        ConditionCode::le => flag(ZF) || less,
        ConditionCode::g => !(flag(ZF) || less),
    }
}
