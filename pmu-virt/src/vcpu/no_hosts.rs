//! A vCPU beside whose guest no tool counts: in place of `hosts`, where the feature `contexts`
//! is off. What nobody attached wants nothing, and is in nobody's way.

use pmu_model::ibs::IbsSample;
use pmu_model::{ContextId, IbsKind, Progress, SlotSet, Ticks, Tsc};

use super::claims::Claims;
use super::seat::Seat;
use super::tally::Tally;
use crate::assign::Demand;
use crate::core_pmu::CorePmu;
use crate::moment::Moment;
use crate::placement::HostClaims;

pub(super) use NoHosts as Hosts;

/// No contexts.
#[derive(Debug, Default)]
pub(super) struct NoHosts {}

impl NoHosts {
    #[inline]
    pub(super) fn are_present(&self) -> bool {
        false
    }

    pub(super) fn are_active(&self, _: Option<&CorePmu>) -> bool {
        false
    }

    pub(super) fn is_empty(&self) -> bool {
        true
    }

    #[inline]
    pub(super) fn has_overflow(&self, _: &CorePmu) -> bool {
        false
    }

    pub(super) fn overflow_waits(&self, _: Option<&CorePmu>) -> bool {
        false
    }

    pub(super) fn uses_sampler(&self, _: IbsKind) -> bool {
        false
    }

    #[inline]
    pub(super) fn may_sample(&self) -> bool {
        false
    }

    #[inline]
    pub(super) fn sample_due(&self) -> Option<IbsKind> {
        None
    }

    pub(super) fn take_sample(&mut self, _: &IbsSample) -> bool {
        false
    }

    pub(super) fn take_samples<M: Moment>(
        &mut self,
        _: &mut Seat<'_>,
        _: &mut M,
    ) -> (bool, Result<(), M::Error>) {
        (false, Ok(()))
    }

    pub(super) fn claims(&self, _: &CorePmu) -> HostClaims {
        HostClaims::default()
    }

    pub(super) fn preempt(&mut self, _: &mut Seat<'_>, _: ContextId) {}

    pub(super) fn displace(&mut self, _: &mut Seat<'_>, _: ContextId, _: u16) {}

    pub(super) fn come(&mut self, _: &mut Seat<'_>, _: ContextId, _: u16, _: Option<SlotSet>) {}

    pub(super) fn reconcile(&mut self, _: &mut Seat<'_>) {}

    /// Whether places are missing.
    pub(super) fn place_missing(&mut self, _: &mut Seat<'_>) -> bool {
        false
    }

    pub(super) fn miss_the_rest(&mut self, _: &mut Seat<'_>) {}

    pub(super) fn restore(&mut self, _: &mut Seat<'_>, _: impl Fn(&[Demand]) -> bool) {}

    pub(super) fn deadline(&self, _: Option<&CorePmu>, _: Option<Tsc>) -> Option<Tsc> {
        None
    }

    #[inline]
    pub(super) fn enter(&mut self, _: &mut Seat<'_>, _: Tsc) {}

    pub(super) fn settle_overflows(&mut self, _: &mut Seat<'_>) -> SlotSet {
        SlotSet::EMPTY
    }

    /// Neither is there a switch of sets, nor somebody to look for room.
    pub(super) fn leave(&mut self, _: &mut Seat<'_>, _: &Progress, _: Ticks) -> (bool, bool) {
        (false, false)
    }

    pub(super) fn note(&mut self, _: Option<&CorePmu>) {}

    pub(super) fn come_back(&mut self, _: &mut Seat<'_>) {}

    pub(super) fn park(&mut self, _: &mut Seat<'_>) {}

    pub(super) fn leave_core(&mut self, _: &mut Seat<'_>) {}

    pub(super) fn leave_private(_: &mut Seat<'_>) {}
}

pub(super) fn are_taken(_: Option<&CorePmu>) -> bool {
    false
}

/// Nobody has to keep out of the guest's way.
pub(super) fn introduce(_: &mut Seat<'_>, _: &Tally, _: &Claims) {}

pub(super) fn introduce_anew(_: &mut Seat<'_>, _: &Tally, _: &Claims) {}
