//! A VM as a whole: contexts of the same make on all its vCPUs, read as one.

use std::time::{Duration, Instant};

use perfmon_abi::consts::{
    PFM_PROV_DERIVED, PFM_PROV_EXACT, PFM_PROV_HARDWARE, PFM_PROV_LOST, PFM_PROV_NONE,
    PFM_PROV_NOT_COUNTED, PFM_PROV_SCALED, PFM_PROV_SIMULATED, PFM_REG_RETFL_PROV_MASK,
    PFM_REG_RETFL_PROV_SHIFT,
};
use perfmon_abi::wire::{Call, Errno, Refusal};
use perfmon_abi::{LoadArg, PmcArg, PmdArg};

use crate::client::Client;
use crate::context::ContextHandle;

/// Provenances, from the one that says most about what took place to the one that says
/// least. The sum of two has the later one.
const WORSE: [u32; 8] = [
    PFM_PROV_NOT_COUNTED,
    PFM_PROV_NONE,
    PFM_PROV_EXACT,
    PFM_PROV_HARDWARE,
    PFM_PROV_DERIVED,
    PFM_PROV_SCALED,
    PFM_PROV_SIMULATED,
    PFM_PROV_LOST,
];

/// A value, and how it was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    pub pmd: u16,
    /// Its value, or the sum of values.
    pub value: u64,
    /// `PFM_PROV_*`; of a sum that of the part that says least about what took place. A vCPU
    /// that has counted nothing yet takes nothing from it.
    pub provenance: u32,
}

impl Count {
    /// What PFM_READ_PMDS says of a PMD.
    #[must_use]
    pub fn of(pmd: &PmdArg) -> Self {
        Count {
            pmd: pmd.num,
            value: pmd.value,
            provenance: (pmd.flags & PFM_REG_RETFL_PROV_MASK) >> PFM_REG_RETFL_PROV_SHIFT,
        }
    }

    /// Both together, as of the same PMD of two vCPUs.
    #[must_use]
    pub fn and(self, other: Count) -> Count {
        Count {
            value: self.value.wrapping_add(other.value),
            provenance: and(self.provenance, other.provenance),
            ..self
        }
    }
}

/// Registers at one moment, or what was counted between two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Since the contexts were made; of a difference, how long it took.
    pub at: Duration,
    /// The PMDs, in the order in which they were named.
    pub counts: Vec<Count>,
}

/// The one of two provenances that says less about what took place.
fn and(one: u32, other: u32) -> u32 {
    let rank = |which| WORSE.iter().position(|it| *it == which);
    // One that this version does not know says nothing.
    match (rank(one), rank(other)) {
        (Some(first), Some(second)) if first < second => other,
        (Some(_), None) => other,
        _ => one,
    }
}

impl Snapshot {
    /// What was counted since `before`, which has the same PMDs. A count that was lost at
    /// either moment is lost.
    #[must_use]
    pub fn since(&self, before: &Snapshot) -> Snapshot {
        let pairs = self.counts.iter().zip(&before.counts);
        Snapshot {
            at: self.at.saturating_sub(before.at),
            counts: pairs
                .map(|(after, before)| Count {
                    value: after.value.wrapping_sub(before.value),
                    provenance: and(after.provenance, before.provenance),
                    ..*after
                })
                .collect(),
        }
    }

    /// Both together, as of two vCPUs, which have the same PMDs. [`Snapshot::at`] is that of
    /// the later one: times are not added.
    #[must_use]
    pub fn and(&self, other: &Snapshot) -> Snapshot {
        let pairs = self.counts.iter().zip(&other.counts);
        Snapshot {
            at: self.at.max(other.at),
            counts: pairs.map(|(one, other)| one.and(*other)).collect(),
        }
    }
}

/// A context on each vCPU of a VM. vCPUs that start later count from their first instruction
/// on: their contexts are there before. One that has ended keeps its last counts.
#[derive(Debug)]
pub struct WholeVm {
    contexts: Vec<ContextHandle>,
    pmds: Vec<u16>,
    began: Instant,
}

impl WholeVm {
    /// Contexts with these registers in set 0 and these `PFM_FL_*`, on every vCPU; they count
    /// from [`WholeVm::start`] on. `quantities` are virtual PMDs to be read, too.
    ///
    /// # Errors
    /// Those of the commands (3.1): nothing is left behind. ESRCH: the VM has no vCPU.
    pub fn attach(
        client: &Client,
        flags: u32,
        registers: (&[PmcArg], &[PmdArg]),
        quantities: &[u16],
    ) -> Result<Self, Refusal> {
        let (pmcs, pmds) = registers;
        let mut contexts = Vec::new();
        for vcpu in 0..client.hello()?.vcpus {
            let context = client.create(flags, None, &[])?;
            client.call(&context, &mut Call::WritePmcs(pmcs.to_vec()))?;
            client.call(&context, &mut Call::WritePmds(pmds.to_vec()))?;
            let pid = i32::try_from(vcpu).unwrap_or(i32::MAX);
            client.call(&context, &mut Call::Load(LoadArg { pid, set: 0 }))?;
            contexts.push(context);
        }
        let counters = pmds.iter().map(|pmd| pmd.num);
        Ok(WholeVm {
            contexts,
            pmds: counters.chain(quantities.iter().copied()).collect(),
            began: Instant::now(),
        })
    }

    /// The contexts, by the number of their vCPU.
    #[must_use]
    pub fn contexts(&self) -> &[ContextHandle] {
        &self.contexts
    }

    /// All begin to count, or go on. One whose vCPU has ended does not.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn start(&self, client: &Client) -> Result<(), Refusal> {
        self.each(client, &Call::Start(None))
    }

    /// All stop. What they have counted stays.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn stop(&self, client: &Client) -> Result<(), Refusal> {
        self.each(client, &Call::Stop)
    }

    fn each(&self, client: &Client, call: &Call) -> Result<(), Refusal> {
        for context in &self.contexts {
            match client.call(context, &mut call.clone()) {
                // It is attached to nothing any more. A VMM of before says EINVAL.
                Err(refusal) if matches!(refusal.errno, Errno::EBUSY | Errno::EINVAL) => {}
                other => other?,
            }
        }
        Ok(())
    }

    /// The registers of one vCPU now.
    ///
    /// # Errors
    /// Those of the command and the connection. ESRCH: there is no such vCPU.
    pub fn of(&self, client: &Client, vcpu: usize) -> Result<Snapshot, Refusal> {
        let context = self.contexts.get(vcpu);
        let context = context.ok_or(Errno::ESRCH)?;
        let named = |&num: &u16| PmdArg {
            num,
            ..PmdArg::default()
        };
        let mut call = Call::ReadPmds(self.pmds.iter().map(named).collect());
        client.call(context, &mut call)?;
        let read = match call {
            Call::ReadPmds(read) => read,
            _ => Vec::new(),
        };
        Ok(Snapshot {
            at: self.began.elapsed(),
            counts: read.iter().map(Count::of).collect(),
        })
    }

    /// The sums over all vCPUs. They are not of one moment: each vCPU is read in its turn.
    ///
    /// # Errors
    /// As [`WholeVm::of`].
    pub fn sum(&self, client: &Client) -> Result<Snapshot, Refusal> {
        let mut sum = self.of(client, 0)?;
        for vcpu in 1..self.contexts.len() {
            sum = sum.and(&self.of(client, vcpu)?);
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(ms: u64, counts: &[(u64, u32)]) -> Snapshot {
        let count = |(pmd, (value, provenance)): (u16, &(u64, u32))| Count {
            pmd,
            value: *value,
            provenance: *provenance,
        };
        Snapshot {
            at: Duration::from_millis(ms),
            counts: (0..).zip(counts).map(count).collect(),
        }
    }

    #[test]
    fn snapshots_subtract_and_add() {
        let before = snapshot(10, &[(5, PFM_PROV_EXACT), (u64::MAX, PFM_PROV_EXACT)]);
        let after = snapshot(30, &[(9, PFM_PROV_SCALED), (2, PFM_PROV_LOST)]);
        let since = snapshot(20, &[(4, PFM_PROV_SCALED), (3, PFM_PROV_LOST)]);
        assert_eq!(after.since(&before), since);
        let sum = snapshot(30, &[(14, PFM_PROV_SCALED), (1, PFM_PROV_LOST)]);
        assert_eq!(after.and(&before), sum);
    }

    #[test]
    fn a_sum_says_no_more_than_its_parts() {
        for (one, other, sum) in [
            (PFM_PROV_EXACT, PFM_PROV_EXACT, PFM_PROV_EXACT),
            (PFM_PROV_EXACT, PFM_PROV_DERIVED, PFM_PROV_DERIVED),
            (PFM_PROV_HARDWARE, PFM_PROV_NOT_COUNTED, PFM_PROV_HARDWARE),
            (PFM_PROV_LOST, PFM_PROV_SIMULATED, PFM_PROV_LOST),
            (PFM_PROV_EXACT, 99, 99),
        ] {
            assert_eq!(and(one, other), sum);
            assert_eq!(and(other, one), sum);
        }
    }
}
