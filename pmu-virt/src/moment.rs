//! What samples need of a guest that has been stopped, before anything else happens to it: a
//! counter that made one due is reloaded behind it.

use instruction_facts::{Operand, OperandKind};
#[cfg(feature = "contexts")]
use perfmon::{Quantities, Wish};
use pmu_model::ibs::{
    BranchRecord, DataAddress, FetchRecord, IbsSample, MemoryRecord, OpRecord, OpSample,
};
use pmu_model::{IbsKind, Retirement};

use crate::pebs::{LinearMemory, PebsMoment, PebsNeeds};

/// A place in the guest's code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CodePlace {
    /// In its code segment.
    pub rip: u64,
    /// With the segment's base.
    pub linear: u64,
}

impl CodePlace {
    /// A place in a segment that begins at 0, as those of 64-bit mode do.
    #[must_use]
    pub fn flat(rip: u64) -> Self {
        CodePlace { rip, linear: rip }
    }
}

/// What is known of the instruction that samples are of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SampledInstruction {
    /// It was executed somewhere before the place where the guest stands.
    #[default]
    Unseen,
    /// One is under way, and its end will be seen: samples of instructions wait for it.
    UnderWay,
    /// It was seen.
    Executed { at: CodePlace, did: Retirement },
}

/// A guest behind the instruction that samples are of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MomentRegisters {
    /// Which instruction that is.
    pub instruction: SampledInstruction,
    /// Where it led: RIP.
    pub next: CodePlace,
    /// RFLAGS.
    pub flags: u64,
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    pub general: [u64; 16],
}

/// A stopped vCPU, for [`VcpuPmu::take_samples`](crate::VcpuPmu::take_samples): who runs it
/// tells what the samples that are due ask for, and no more is looked at. It is used on the
/// vCPU's own thread, while the guest does not run.
pub trait Moment {
    /// The vCPU could not be asked.
    type Error;

    /// The registers behind the instruction. `None`: they are not those of the guest, whose
    /// own samples wait (in SMM they are the firmware's).
    ///
    /// # Errors
    /// The vCPU could not be asked.
    fn registers(&mut self) -> Result<Option<MomentRegisters>, Self::Error>;

    /// XMM0 to XMM15.
    ///
    /// # Errors
    /// The vCPU could not be asked.
    fn xmm(&mut self) -> Result<[[u8; 16]; 16], Self::Error>;

    /// The guest's TSC.
    ///
    /// # Errors
    /// The vCPU could not be asked.
    fn tsc(&mut self) -> Result<u64, Self::Error>;

    /// What the instruction accessed in memory; `None` if it accessed nothing of that kind,
    /// or nobody knows it.
    fn operand(&mut self, kind: OperandKind) -> Option<Operand>;

    /// The guest's memory.
    ///
    /// # Errors
    /// The vCPU could not be asked how it translates addresses.
    fn memory(&mut self) -> Result<&dyn LinearMemory, Self::Error>;

    /// Calls `take` with the place where the guest stands and what the host knows of it, for
    /// a context of a tool that has such a `wish`; not at all, if the overflow is to wait for
    /// another moment. There is no default: who never called it would take contexts and sample
    /// none.
    ///
    /// # Errors
    /// The vCPU could not be asked.
    #[cfg(feature = "contexts")]
    fn host(
        &mut self,
        wish: Wish,
        take: &mut dyn FnMut(&perfmon::Moment, &dyn Quantities),
    ) -> Result<(), Self::Error>;
}

/// The contents of a PEBS record; `None` if it has to wait.
pub(crate) fn record<M: Moment>(
    moment: &mut M,
    needs: PebsNeeds,
) -> Result<Option<PebsMoment>, M::Error> {
    let Some(registers) = moment.registers()? else {
        return Ok(None);
    };
    let eventing_ip = match registers.instruction {
        SampledInstruction::Executed { at, .. } => at.rip,
        SampledInstruction::Unseen | SampledInstruction::UnderWay => registers.next.rip,
    };
    Ok(Some(PebsMoment {
        eventing_ip,
        flags: registers.flags,
        ip: registers.next.rip,
        registers: registers.general,
        tsc: moment.tsc()?,
        data_address: moment.operand(needs.operand).map_or(0, |one| one.linear),
        xmm: if needs.xmm {
            moment.xmm()?
        } else {
            Default::default()
        },
    }))
}

/// A sample of IBS; `None` if it has to wait.
pub(crate) fn sample<M: Moment>(
    moment: &mut M,
    kind: IbsKind,
) -> Result<Option<IbsSample>, M::Error> {
    let Some(registers) = moment.registers()? else {
        return Ok(None);
    };
    // Where nobody saw it, the fetch is that of the instruction to come.
    let (at, did) = match registers.instruction {
        SampledInstruction::UnderWay => return Ok(None),
        SampledInstruction::Unseen => (registers.next, None),
        SampledInstruction::Executed { at, did } => (at, Some(did)),
    };
    Ok(Some(match (kind, did) {
        (IbsKind::Fetch, _) => IbsSample::Fetch(FetchRecord {
            linear: at.linear,
            physical: moment.memory()?.locate(at.linear),
        }),
        (IbsKind::Op, None) => IbsSample::Op(OpSample::Near { rip: at.linear }),
        (IbsKind::Op, Some(did)) => IbsSample::Op(OpSample::Exact(OpRecord {
            rip: at.linear,
            branch: did.branch.then(|| BranchRecord {
                target: did.taken.then_some(registers.next.linear),
                is_return: did.near_return,
            }),
            memory: accessed(moment, &did)?,
        })),
    }))
}

/// What an instruction accessed that did `did`.
fn accessed<M: Moment>(moment: &mut M, did: &Retirement) -> Result<Option<MemoryRecord>, M::Error> {
    if did.loads == 0 && did.stores == 0 {
        return Ok(None);
    }
    let Some(operand) = moment.operand(OperandKind::Any) else {
        return Ok(Some(MemoryRecord {
            load: did.loads > 0,
            store: did.stores > 0,
            address: None,
        }));
    };
    let located = moment.memory()?.locate(operand.linear);
    Ok(Some(MemoryRecord {
        load: operand.load,
        store: operand.store,
        address: Some(DataAddress {
            linear: operand.linear,
            physical: located.map(|(physical, _)| physical),
            bytes: operand.bytes,
        }),
    }))
}
