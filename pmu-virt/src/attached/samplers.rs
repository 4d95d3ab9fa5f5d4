//! Which samplers of IBS a context uses, or would.

use arbiter::CounterId;
use perfmon_abi::wire::{Call, Errno, Refusal};
use pmu_model::IbsKind;

use super::AttachedContext;

impl AttachedContext {
    /// What `check` says of the samplers that it uses.
    pub(crate) fn check_samplers(
        &self,
        check: impl Fn(IbsKind) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let kinds = IbsKind::ALL.into_iter();
        let mut used = kinds.filter(|kind| self.context.uses_sampler(*kind));
        used.try_for_each(check)
    }

    /// The first write that would make it use a sampler which it does not use yet and
    /// which `check` refuses.
    pub(crate) fn refused_sampler(
        &self,
        call: &Call,
        check: impl Fn(IbsKind) -> Result<(), Refusal>,
    ) -> Option<(usize, Refusal)> {
        let Call::WritePmcs(writes) = call else {
            return None;
        };
        writes.iter().enumerate().find_map(|(at, write)| {
            let kind = self.context.sampler_wanted(write)?;
            if self.context.uses_sampler(kind) {
                return None;
            }
            let Refusal { errno, reason, .. } = check(kind).err()?;
            let reason = format!("event set {}, PMC{}: {reason}", write.set, write.num);
            Some((at, Refusal::new(errno, reason)))
        })
    }
}

/// A context of a core has none: a sampler belongs to a vCPU and its guest.
pub(crate) fn no_sampler_of_core(kind: IbsKind) -> Result<(), Refusal> {
    let sampler = CounterId::Ibs(kind);
    let reason = format!(
        "{sampler} is each vCPU's own: load a context for each vCPU, without PFM_FL_SYSTEM_WIDE"
    );
    Err(Refusal::new(Errno::EINVAL, reason))
}
