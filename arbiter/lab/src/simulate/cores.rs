//! Cores: vCPUs share the time of their core equally, and move between cores.

use arbiter::Wanted;

use crate::figures::Class;
use crate::random::Micros;

use super::{Happening, Run};

/// A core.
#[derive(Debug, Default)]
pub(super) struct Core {
    pub(super) vcpus: Vec<u32>,
    /// The running time that each vCPU had that was here from the start, up to `at`.
    /// Differences of this clock are what any vCPU of the core ran.
    shared: f64,
    at: Micros,
    /// Tools that look at this core: until when, and which counters each wants.
    pub(super) tools: Vec<(Micros, Wanted)>,
}

impl Core {
    /// vCPUs that share the core, at least 1.
    pub(super) fn load(&self) -> f64 {
        self.vcpus.len().max(1) as f64
    }

    pub(super) fn clock(&self, now: Micros) -> f64 {
        self.shared + now.saturating_sub(self.at) as f64 / self.load()
    }

    /// Moves the clock on. To be called before the number of vCPUs changes.
    fn settle(&mut self, now: Micros) {
        self.shared = self.clock(now);
        self.at = now;
    }
}

impl Run<'_> {
    /// Moves a vCPU to the emptier of two other cores. The counters of its guest go
    /// with it. Those of a core's tools stay behind.
    pub(super) fn migrate(&mut self, number: u32) {
        let cores = self.machine.cores;
        let gap = self.moves.gap(self.machine.migrations);
        let (one, other) = (self.moves.below(cores), self.moves.below(cores));
        if let Some(gap) = gap {
            self.plan(gap, Happening::Migrate(number));
        }
        let load = |core: u32| self.cores[core as usize].vcpus.len();
        let to = if load(other) < load(one) { other } else { one };
        let from = self.vcpus[number as usize].core;
        if to == from {
            return;
        }
        for id in std::mem::take(&mut self.vcpus[number as usize].tools) {
            self.end_job(id, false);
        }
        let now = self.now;
        for core in [from, to] {
            self.cores[core as usize].settle(now);
        }
        let slot = self.vcpus[number as usize].slot;
        let list = &mut self.cores[from as usize].vcpus;
        list.swap_remove(slot);
        if let Some(moved) = list.get(slot).copied() {
            self.vcpus[moved as usize].slot = slot;
        }
        let leaves = self.cores[from as usize].clock(now);
        let core = &mut self.cores[to as usize];
        core.vcpus.push(number);
        let arrives = core.clock(now);
        let slot = core.vcpus.len() - 1;
        core.tools.retain(|(until, _)| *until > now);
        let tools = core.tools.clone();
        let vcpu = &mut self.vcpus[number as usize];
        vcpu.core = to;
        vcpu.slot = slot;
        vcpu.ran += leaves - arrives;
        for (until, wanted) in tools {
            self.join_tool(number, until, wanted);
        }
        self.serve(number);
    }

    /// A tool begins to look at a core.
    pub(super) fn start_tool(&mut self, number: u32, hold: Micros, wanted: Wanted) {
        let until = self.now.saturating_add(hold);
        let now = self.now;
        let core = &mut self.cores[number as usize];
        core.tools.retain(|(until, _)| *until > now);
        core.tools.push((until, wanted));
        for vcpu in core.vcpus.clone() {
            self.join_tool(vcpu, until, wanted);
            self.serve(vcpu);
        }
    }

    /// A tool wants its counters on one vCPU.
    fn join_tool(&mut self, vcpu: u32, until: Micros, wanted: Wanted) {
        let hold = until.saturating_sub(self.now);
        let id = self.start_job(vcpu, Class::Tools, hold, wanted);
        self.plan(hold, Happening::End(id));
        let list = &mut self.vcpus[vcpu as usize].tools;
        list.push(id);
        if list.len() > 8 {
            let jobs = &mut self.jobs;
            list.retain(|id| jobs.get(*id).is_some());
        }
    }
}
