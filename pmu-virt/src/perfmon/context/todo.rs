//! Scaffold: signatures that are agreed upon and not written yet. Whoever writes
//! one takes it out here; the file goes when it is empty.
#![allow(clippy::unimplemented, unused_variables, missing_docs)]

use super::{Context, Phase, Wanted};
use crate::backend::Provenance;
use crate::perfmon::description::LogicalPmu;
use crate::perfmon::format::Sampler;
use crate::perfmon::moment::{MessageQueue, Quantities};
use crate::request::CountRequest;
use perfmon_abi::wire::{Call, Refusal};
use std::sync::Arc;

// core-a
impl Context {
    pub fn new(
        pmu: Arc<LogicalPmu>,
        flags: u32,
        sampler: Option<Sampler>,
    ) -> Result<Self, Refusal> {
        unimplemented!()
    }
    pub fn call(
        &mut self,
        call: &mut Call,
        values: &dyn Quantities,
        queue: &mut dyn MessageQueue,
    ) -> Result<(), Refusal> {
        unimplemented!()
    }
    pub fn prepare_load(&self, set: u16) -> Result<(), Refusal> {
        unimplemented!()
    }
    pub fn attached(&mut self, set: u16) {
        unimplemented!()
    }
    pub fn detached(&mut self) {
        unimplemented!()
    }
    /// Per set: its number, and PMD and request of each counter that can advance.
    pub fn demands(&self) -> Vec<(u16, Vec<(u16, CountRequest)>)> {
        unimplemented!()
    }
    pub fn wanted(&self) -> Vec<Wanted> {
        unimplemented!()
    }
    pub fn count(&mut self, pmd: u16, events: u64, provenance: Provenance) {
        unimplemented!()
    }
    pub fn lose(&mut self, pmd: u16) {
        unimplemented!()
    }
    pub fn pass(&mut self, ns: u64, counted: bool) {
        unimplemented!()
    }
    pub fn switch_due(&self) -> Option<u64> {
        unimplemented!()
    }
    pub fn phase(&self) -> Phase {
        unimplemented!()
    }
    pub fn is_started(&self) -> bool {
        unimplemented!()
    }
    pub fn is_blocked(&self) -> bool {
        unimplemented!()
    }
    pub fn is_system_wide(&self) -> bool {
        unimplemented!()
    }
    pub fn flags(&self) -> u32 {
        unimplemented!()
    }
    pub fn generation(&self) -> u16 {
        unimplemented!()
    }
    pub fn active_set(&self) -> u16 {
        unimplemented!()
    }
    pub fn has_pending_overflow(&self) -> bool {
        unimplemented!()
    }
}
