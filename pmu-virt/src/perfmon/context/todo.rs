//! Scaffold: signatures that are agreed upon and not written yet. Whoever writes
//! one takes it out here; the file goes when it is empty.
#![allow(clippy::unimplemented, unused_variables, missing_docs)]

use super::Context;
use crate::perfmon::moment::{MessageQueue, Moment, Quantities};
use perfmon_abi::wire::Refusal;

// core-b
impl Context {
    pub fn overflow(
        &mut self,
        moment: &Moment,
        values: &dyn Quantities,
        queue: &mut dyn MessageQueue,
    ) {
        unimplemented!()
    }
    pub fn expire(&mut self) {
        unimplemented!()
    }
    pub(super) fn restart(&mut self, queue: &mut dyn MessageQueue) -> Result<(), Refusal> {
        unimplemented!()
    }
    /// The long reset of one PMD, and of those in its PMC's `reset_pmds` (6.2.2).
    pub(super) fn read_reset(&mut self, set: u16, pmd: u16) {
        unimplemented!()
    }
    pub fn preempted(&mut self, queue: &mut dyn MessageQueue) {
        unimplemented!()
    }
    pub fn restored(&mut self, blind_ns: u64, queue: &mut dyn MessageQueue) {
        unimplemented!()
    }
}
