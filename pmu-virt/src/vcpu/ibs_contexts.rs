//! Samplers of IBS in the hands of tools: a context of the vCPU uses one instead of its
//! guest. What it counts is counted on slots as its counters are; only who takes the sample
//! is the same for both.

use arbiter::CounterId;
use perfmon::ContextId;
use perfmon_abi::wire::{Errno, Refusal};
use pmu_model::IbsKind;
use pmu_model::ibs::IbsSample;

use super::{Here, VcpuPmu};
use crate::attached::AttachedContext;

impl VcpuPmu {
    /// The context that uses a sampler.
    pub(super) fn sampling_context(&self, kind: IbsKind) -> Option<ContextId> {
        let mut hosts = self.hosts.iter();
        let user = hosts.find(|hosted| hosted.context().uses_sampler(kind))?;
        Some(user.id())
    }

    /// A sampler has one user at a time, and what a layer of the guest has reserved is its.
    pub(super) fn check_free(&self, kind: IbsKind) -> Result<(), Refusal> {
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
