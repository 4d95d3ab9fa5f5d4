//! A context on a core.

#![allow(clippy::unimplemented, unused_variables, missing_docs)]

use super::context::Context;
use super::moment::{MessageQueue, Moment, Quantities};
use crate::{CorePmu, VcpuPmu};
use perfmon_abi::wire::{Call, Refusal};

/// Names a context of the machine; no other one has the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContextId(pub u32);

/// A context that is attached, with its queue.
#[derive(Debug)]
pub struct Hosted {
    id: ContextId,
    context: Box<Context>,
    queue: Box<dyn MessageQueue>,
}

impl Hosted {
    pub fn new(id: ContextId, context: Box<Context>, queue: Box<dyn MessageQueue>) -> Box<Self> {
        Box::new(Hosted { id, context, queue })
    }
    pub fn into_parts(self) -> (ContextId, Box<Context>, Box<dyn MessageQueue>) {
        (self.id, self.context, self.queue)
    }
    pub fn id(&self) -> ContextId {
        self.id
    }
    pub fn context(&self) -> &Context {
        &self.context
    }
}

/// A context that could not be attached, and why.
pub type NotLoaded = (Box<Hosted>, Refusal);

// The vCPU's own context.
impl VcpuPmu {
    pub fn load_context(&mut self, hosted: Box<Hosted>, set: u16) -> Result<(), NotLoaded> {
        unimplemented!()
    }
    pub fn unload_context(&mut self) -> Option<Box<Hosted>> {
        unimplemented!()
    }
    pub fn host_context(&self) -> Option<&Hosted> {
        unimplemented!()
    }
    pub fn call_context(
        &mut self,
        call: &mut Call,
        values: &dyn Quantities,
    ) -> Result<(), Refusal> {
        unimplemented!()
    }
    /// The core that it is on, whose context may be called.
    pub fn core_mut(&mut self) -> Option<&mut CorePmu> {
        unimplemented!()
    }
    /// A counter of the vCPU's or the core's context has overflowed.
    pub fn has_host_overflow(&self) -> bool {
        unimplemented!()
    }
    pub fn sample_hosts(&mut self, moment: &Moment, values: &dyn Quantities) {
        unimplemented!()
    }
    /// Its context keeps it off its core until PFM_RESTART.
    pub fn is_blocked(&self) -> bool {
        unimplemented!()
    }
}

// The core's context. While a vCPU is attached, go by `VcpuPmu::core_mut`.
impl CorePmu {
    pub fn load_context(&mut self, hosted: Box<Hosted>, set: u16) -> Result<(), NotLoaded> {
        unimplemented!()
    }
    pub fn unload_context(&mut self) -> Option<Box<Hosted>> {
        unimplemented!()
    }
    pub fn host_context(&self) -> Option<&Hosted> {
        unimplemented!()
    }
    pub fn call_context(
        &mut self,
        call: &mut Call,
        values: &dyn Quantities,
    ) -> Result<(), Refusal> {
        unimplemented!()
    }
    /// `ns` have passed in which no vCPU ran on the core.
    pub fn pass_idle(&mut self, ns: u64) {
        unimplemented!()
    }
}
