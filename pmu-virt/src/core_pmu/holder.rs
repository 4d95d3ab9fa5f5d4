//! Who can be on a slot, and who is.

use std::fmt;

use arbiter::CounterId;
use pmu_model::{CountRequest, OwnerId, SlotIndex};

use super::CorePmu;
use crate::perfmon::ContextId;

/// Whose counter is on a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A guest's.
    Guest {
        /// The vCPU.
        vcpu: OwnerId,
        /// Its counter.
        counter: CounterId,
    },
    /// A host context's.
    Context {
        /// The vCPU that it is loaded on; none if that is the core.
        vcpu: Option<OwnerId>,
        /// The context.
        context: ContextId,
        /// Its PMD.
        pmd: u16,
    },
}

impl Holder {
    /// The vCPU that takes the counter along; none if it stays with the core.
    #[must_use]
    pub fn vcpu(&self) -> Option<OwnerId> {
        match *self {
            Holder::Guest { vcpu, .. } => Some(vcpu),
            Holder::Context { vcpu, .. } => vcpu,
        }
    }

    /// Whether it is a guest's.
    #[must_use]
    pub fn is_guest(&self) -> bool {
        matches!(self, Holder::Guest { .. })
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Holder::Guest { vcpu, counter } => write!(f, "{counter} of {vcpu}'s guest"),
            Holder::Context { context, pmd, .. } => write!(f, "PMD{pmd} of {context}"),
        }
    }
}

/// A slot that somebody holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HolderReport {
    /// The slot; the even one of a pair.
    pub slot: SlotIndex,
    /// Who holds it.
    pub holder: Holder,
    /// What it counts.
    pub request: CountRequest,
    /// Name of the source behind it.
    pub source: &'static str,
    /// It counts while the attached vCPU runs. If not, it is kept for one that
    /// is away or has stopped, and goes to whoever needs it.
    pub counting: bool,
}

impl CorePmu {
    /// Who holds which slot, by ascending slot.
    #[must_use]
    pub fn holders(&self) -> Vec<HolderReport> {
        let first = |slot: &SlotIndex| {
            let resident = self.occupant(*slot)?;
            (resident.slots.iter().next() == Some(*slot)).then_some(resident)
        };
        self.taken
            .iter()
            .filter_map(|slot| {
                let resident = first(&slot)?;
                Some(HolderReport {
                    slot,
                    holder: resident.holder,
                    request: resident.request,
                    source: self.backend.source(slot),
                    counting: self.running.contains(slot),
                })
            })
            .collect()
    }
}
