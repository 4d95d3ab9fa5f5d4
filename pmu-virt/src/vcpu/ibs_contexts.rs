//! Samplers of IBS in the hands of tools: a context of the vCPU uses one instead of its
//! guest. What it counts is counted on slots as its counters are; only who takes the sample
//! is the same for both.

use arbiter::CounterId;
use perfmon::ContextId;
use perfmon_abi::wire::{Call, Errno, Refusal};
use pmu_model::IbsKind;
use pmu_model::ibs::IbsSample;

use super::{Here, VcpuPmu};
use crate::attached::AttachedContext;

/// A context of a core cannot have a sampler: it belongs to a vCPU and its guest.
pub(crate) fn check_core_samplers(hosted: &AttachedContext) -> Result<(), Refusal> {
    let mut kinds = IbsKind::ALL.into_iter();
    let used = kinds.find(|kind| hosted.context().uses_sampler(*kind));
    used.map_or(Ok(()), |kind| Err(no_sampler_of_core(kind)))
}

/// The first write that would use one in a context of a core.
pub(crate) fn refused_on_core(hosted: &AttachedContext, call: &Call) -> Option<(usize, Refusal)> {
    first_refused(hosted, call, |kind| Err(no_sampler_of_core(kind)))
}

fn no_sampler_of_core(kind: IbsKind) -> Refusal {
    let sampler = CounterId::Ibs(kind);
    let reason = format!(
        "{sampler} is each vCPU's own: load a context for each vCPU, without PFM_FL_SYSTEM_WIDE"
    );
    Refusal::new(Errno::EINVAL, reason)
}

/// The first write that would make a context use a sampler which it does not use yet and
/// which `check` refuses.
fn first_refused(
    hosted: &AttachedContext,
    call: &Call,
    check: impl Fn(IbsKind) -> Result<(), Refusal>,
) -> Option<(usize, Refusal)> {
    let Call::WritePmcs(writes) = call else {
        return None;
    };
    let context = hosted.context();
    writes.iter().enumerate().find_map(|(at, write)| {
        let kind = context.sampler_wanted(write)?;
        if context.uses_sampler(kind) {
            return None;
        }
        let refusal = check(kind).err()?;
        let reason = format!(
            "event set {}, PMC{}: {}",
            write.set, write.num, refusal.reason
        );
        Some((at, Refusal::new(refusal.errno, reason)))
    })
}

impl VcpuPmu {
    /// The context that uses a sampler.
    pub(super) fn sampling_context(&self, kind: IbsKind) -> Option<ContextId> {
        let mut hosts = self.hosts.iter();
        let user = hosts.find(|hosted| hosted.context().uses_sampler(kind))?;
        Some(user.id())
    }

    /// Whether a context may use the samplers that its sets name.
    pub(super) fn check_samplers(&self, hosted: &AttachedContext) -> Result<(), Refusal> {
        let mut used = IbsKind::ALL
            .into_iter()
            .filter(|kind| hosted.context().uses_sampler(*kind));
        used.try_for_each(|kind| self.check_free(kind))
    }

    /// The first write that would take a sampler from somebody.
    pub(super) fn refused_sampler(
        &self,
        hosted: &AttachedContext,
        call: &Call,
    ) -> Option<(usize, Refusal)> {
        first_refused(hosted, call, |kind| self.check_free(kind))
    }

    /// A sampler has one user at a time, and what a layer of the guest has reserved is its.
    fn check_free(&self, kind: IbsKind) -> Result<(), Refusal> {
        let (sampler, owner) = (CounterId::Ibs(kind), self.owner);
        let user = if let Some(context) = self.sampling_context(kind) {
            format!("{context} has it; unload that first")
        } else if self.guests_holding().contains(sampler) {
            "the guest has reserved it; `umpire pcr` shows who".to_owned()
        } else if self.guest_samples(kind) {
            "the guest has enabled it; try again when it has finished".to_owned()
        } else {
            return Ok(());
        };
        let reason = format!("{sampler} of {owner} is in use: {user}");
        Err(Refusal::new(Errno::EBUSY, reason))
    }

    /// The sampler of a context whose sample is to be taken.
    #[inline]
    pub(super) fn context_sample_due(&self) -> Option<IbsKind> {
        if !self.hosting {
            return None;
        }
        let mut hosts = self.hosts.iter();
        hosts.find_map(|hosted| hosted.context().sample_due())
    }

    /// Whether a sample of a context may fall due while the guest runs.
    #[inline]
    pub(super) fn contexts_sample(&self) -> bool {
        self.hosting
            && self
                .hosts
                .iter()
                .any(|hosted| hosted.context().may_sample())
    }

    /// Takes in a sample for the context that waits for it; its sampler stands until that
    /// has been dealt with ([`VcpuPmu::sample_hosts`]).
    pub(super) fn sample_context(&mut self, here: &mut Here<'_>, sample: &IbsSample) {
        let waits = |hosted: &mut AttachedContext| hosted.take_in_sample(sample);
        let taken = self.hosts.iter_mut().any(waits);
        if taken {
            self.arrange(here);
        }
    }
}
