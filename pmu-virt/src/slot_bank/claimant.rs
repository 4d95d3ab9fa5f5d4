//! Who can be on a slot.

use std::fmt;

use arbiter::CounterId;
use pmu_model::{ContextId, CountRequest, OwnerId, SlotIndex};

/// Who wants an event counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claimant {
    /// A guest's.
    Guest {
        /// The vCPU.
        vcpu: OwnerId,
        counter: CounterId,
    },
    /// A host context's.
    Context {
        /// The vCPU that it is loaded on; none if that is the core.
        vcpu: Option<OwnerId>,
        context: ContextId,
        pmd: u16,
    },
}

impl Claimant {
    /// The vCPU that takes the counter along; none if it stays with the core.
    #[must_use]
    pub fn vcpu(&self) -> Option<OwnerId> {
        match *self {
            Claimant::Guest { vcpu, .. } => Some(vcpu),
            Claimant::Context { vcpu, .. } => vcpu,
        }
    }

    /// Whether it counts where vCPU `attached` does: it is that one's, or the core's own.
    pub(crate) fn is_present(&self, attached: Option<OwnerId>) -> bool {
        self.vcpu().is_none_or(|vcpu| attached == Some(vcpu))
    }

    /// Whether it is a guest's.
    #[must_use]
    pub fn is_guest(&self) -> bool {
        matches!(self, Claimant::Guest { .. })
    }
}

impl fmt::Display for Claimant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Claimant::Guest { vcpu, counter } => {
                write!(f, "{counter} of {vcpu}'s guest")
            }
            Claimant::Context { context, pmd, .. } => write!(f, "PMD{pmd} of {context}"),
        }
    }
}

/// A slot that somebody holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HolderReport {
    /// The slot; the even one of a pair.
    pub slot: SlotIndex,
    /// Who holds it.
    pub holder: Claimant,
    pub request: CountRequest,
    /// Name of the source behind it.
    pub source: &'static str,
    /// It counts while the attached vCPU runs. If not, it is kept for one that
    /// is away or has stopped, and goes to whoever needs it.
    pub counting: bool,
}
