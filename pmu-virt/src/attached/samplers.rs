//! Which samplers of IBS a context uses, or would.

use arbiter::CounterId;
use perfmon::Context;
use perfmon_abi::wire::{Call, Errno, Refusal};
use pmu_model::IbsKind;

/// The first write that would make a context use a sampler which it does not use yet and
/// which `check` refuses.
pub(super) fn refused(
    context: &Context,
    call: &Call,
    check: impl Fn(IbsKind) -> Result<(), Refusal>,
) -> Option<(usize, Refusal)> {
    let Call::WritePmcs(writes) = call else {
        return None;
    };
    writes.iter().enumerate().find_map(|(at, write)| {
        let kind = context.sampler_wanted(write)?;
        if context.uses_sampler(kind) {
            return None;
        }
        let Refusal { errno, reason, .. } = check(kind).err()?;
        let reason = format!("event set {}, PMC{}: {reason}", write.set, write.num);
        Some((at, Refusal::new(errno, reason)))
    })
}

/// A context of a core has none: a sampler belongs to a vCPU and its guest.
pub(crate) fn no_sampler_of_core(kind: IbsKind) -> Result<(), Refusal> {
    let sampler = CounterId::Ibs(kind);
    let reason = format!(
        "{sampler} is each vCPU's own: load a context for each vCPU, without PFM_FL_SYSTEM_WIDE"
    );
    Err(Refusal::new(Errno::EINVAL, reason))
}
