//! Loads that found no room: the owners of reserved counters are asked for some.
//!
//! One load of the VM asks at a time, every vCPU at once; the others wait for its end
//! and are then judged anew. What owners give up is the hypervisor's as long as the
//! context is attached. Each vCPU answers after a bounded time (the grace, for each of its
//! counters), so each load gets its answer.

use std::collections::VecDeque;

use perfmon_abi::LoadArg;
use perfmon_abi::wire::{Errno, Refusal};
use pmu_virt::perfmon::{ContextId, GuestLimit};

use super::Contexts;
use crate::job::{Ask, GivenUp, Target, Work};
use crate::server::answer::{ConnectionId, RequestId};

/// How often owners are asked for one load. They may reserve counters again as fast as
/// they gave others up.
const MOST_ROUNDS: u8 = 4;

/// What a load hears that does not wait.
pub(super) const ASKED: &str =
    "there is no room, and the owners of reserved counters are asked for some; load again";
const CANCELED: &str = "the load was canceled";

/// The load that asks.
#[derive(Debug)]
struct Asking {
    load: Load,
    /// Why there was no room.
    refusal: Refusal,
    /// vCPUs that have not answered.
    left: Vec<usize>,
    given: Vec<(usize, GivenUp)>,
    /// Why an owner keeps its counters; of several, what the first said.
    kept: Option<String>,
    canceled: bool,
}

/// A load on its way.
#[derive(Clone, Copy, Debug)]
pub(in crate::server) struct Load {
    pub(in crate::server) context: ContextId,
    pub(in crate::server) request: RequestId,
    pub(in crate::server) arg: LoadArg,
    /// Whether its answer may come later than that of owners.
    pub(in crate::server) waits: bool,
    /// How often owners were asked for it.
    pub(in crate::server) rounds: u8,
}

/// The loads of a VM that found no room.
#[derive(Debug, Default)]
pub(super) struct AskingLoads {
    current: Option<Asking>,
    next: VecDeque<Load>,
    /// What owners gave up for each context.
    given: Vec<(ContextId, usize, GivenUp)>,
    /// What came of loads that nobody waited for.
    refused: Vec<(Load, Refusal)>,
}

impl AskingLoads {
    /// Those for which owners are asked, or will be.
    fn loads(&self) -> impl Iterator<Item = &Load> {
        let current = self.current.iter().map(|asking| &asking.load);
        current.chain(&self.next)
    }

    /// Whether there is one of this context.
    pub(super) fn has(&self, id: ContextId) -> bool {
        self.loads().any(|load| load.context == id)
    }

    /// Why this load has failed when it was tried last and nobody waited for it, once.
    pub(super) fn take_refusal(&mut self, id: ContextId, arg: LoadArg) -> Option<Refusal> {
        let is_it = |(of, _): &(Load, Refusal)| of.context == id && of.arg == arg;
        let at = self.refused.iter().position(is_it)?;
        Some(self.refused.swap_remove(at).1)
    }

    /// What failed before is of no interest any more: the context changes, or its tool
    /// waits.
    pub(super) fn forget_refusals(&mut self, id: ContextId) {
        self.refused.retain(|(of, _)| of.context != id);
    }
}

impl Contexts {
    /// A load found no room, and would if owners kept to `limit`: they are asked. The
    /// answer to it, unless it comes later.
    pub(super) fn ask_owners(
        &mut self,
        (load, target): (Load, Target),
        limit: GuestLimit,
        refusal: Refusal,
    ) -> Option<Refusal> {
        if load.rounds >= MOST_ROUNDS {
            return Some(refusal);
        }
        let answer = (!load.waits).then(|| Refusal::new(Errno::EAGAIN, ASKED));
        if self.asking.current.is_some() {
            self.asking.next.push_back(load);
            return answer;
        }
        let dispatcher = &self.vm.dispatcher;
        let left: Vec<usize> = (0..dispatcher.vcpus()).collect();
        for vcpu in &left {
            // On cores of their own vCPUs never meet.
            let is_there = dispatcher.shares_cores() || *vcpu == target.number();
            let ask = Ask::KeepTo { limit, is_there };
            dispatcher.post(load.context, Target::Vcpu(*vcpu), Work::Ask(ask));
        }
        log::debug!("context {}: owners of counters are asked", load.context.0);
        self.asking.current = Some(Asking {
            load,
            refusal,
            left,
            given: Vec::new(),
            kept: None,
            canceled: false,
        });
        answer
    }

    /// A vCPU has answered, or has ended: then it keeps nothing.
    pub(in crate::server) fn owners_answered(
        &mut self,
        id: ContextId,
        target: Target,
        answer: Result<Option<GivenUp>, String>,
    ) {
        let vcpu = target.number();
        let asking = self.asking.current.as_mut();
        let Some(asking) = asking.filter(|asking| asking.load.context == id) else {
            return;
        };
        asking.left.retain(|one| *one != vcpu);
        match answer {
            Ok(given) => asking.given.extend(given.map(|given| (vcpu, given))),
            Err(why) if asking.kept.is_none() && !asking.canceled => {
                asking.kept = Some(why);
                // What the others would give up is of no use.
                self.ask_no_more();
            }
            Err(_) => {}
        }
        self.conclude();
    }

    /// Tells vCPUs that have not answered that nobody waits any more.
    fn ask_no_more(&self) {
        let Some(asking) = &self.asking.current else {
            return;
        };
        for vcpu in &asking.left {
            let work = Work::Ask(Ask::NoMore);
            let dispatcher = &self.vm.dispatcher;
            dispatcher.post(asking.load.context, Target::Vcpu(*vcpu), work);
        }
    }

    /// Goes on with the load once every vCPU has answered.
    fn conclude(&mut self) {
        let is_done = |asking: &mut Asking| asking.left.is_empty();
        let Some(asking) = self.asking.current.take_if(is_done) else {
            return;
        };
        let Asking {
            load,
            refusal,
            given,
            kept,
            canceled,
            ..
        } = asking;
        let id = load.context;
        let given = given.into_iter().map(|(vcpu, given)| (id, vcpu, given));
        self.asking.given.extend(given);
        let failed = match kept {
            _ if canceled => Some(Refusal::new(Errno::ECANCELED, CANCELED)),
            Some(why) => {
                let reason = format!("{}; the owners were asked: {why}", refusal.reason);
                Some(Refusal::new(refusal.errno, reason))
            }
            None => None,
        };
        match failed {
            None => self.load_again(Load {
                rounds: load.rounds + 1,
                ..load
            }),
            Some(refusal) => {
                self.give_back(id);
                if load.waits {
                    self.answers.push_back((load.request, refusal.into()));
                } else if !canceled {
                    self.asking.refused.push((load, refusal));
                }
            }
        }
        while self.asking.current.is_none()
            && let Some(load) = self.asking.next.pop_front()
        {
            self.load_again(load);
        }
    }

    /// Goes on with a load that has waited. A tool that does not wait for it comes again.
    fn load_again(&mut self, load: Load) {
        if !load.waits {
            return;
        }
        if let Err(refusal) = self.start_load(load) {
            self.give_back(load.context);
            self.answers.push_back((load.request, refusal.into()));
        }
    }

    /// Nobody waits for the load of a context any more. Whether there was one.
    pub(super) fn cancel_load(&mut self, id: ContextId) -> bool {
        let waits = self.asking.has(id);
        let at = self.asking.next.iter().position(|load| load.context == id);
        if let Some(load) = at.and_then(|at| self.asking.next.remove(at))
            && load.waits
        {
            let refusal = Refusal::new(Errno::ECANCELED, CANCELED);
            self.answers.push_back((load.request, refusal.into()));
        }
        if at.is_some() {
            // An earlier round may have had some.
            self.give_back(id);
        }
        if let Some(asking) = &mut self.asking.current
            && asking.load.context == id
        {
            let is_told = asking.canceled || asking.kept.is_some();
            asking.canceled = true;
            if !is_told {
                self.ask_no_more();
            }
        }
        waits
    }

    /// A connection has ended: loads that it waits for are canceled.
    pub(super) fn cancel_loads_of(&mut self, connection: ConnectionId) {
        let is_its = |load: &Load| load.waits && load.request.connection == connection;
        let its = self.asking.loads().filter(|load| is_its(load));
        let its: Vec<ContextId> = its.map(|load| load.context).collect();
        for id in its {
            // Nobody reads the answer.
            self.cancel_load(id);
        }
    }

    /// A context needs the counters no longer that owners gave up for it. Whether there
    /// were any.
    pub(super) fn give_back(&mut self, id: ContextId) -> bool {
        self.asking.forget_refusals(id);
        let before = self.asking.given.len();
        let dispatcher = &self.vm.dispatcher;
        let of_context = |(of, ..): &mut (ContextId, usize, GivenUp)| *of == id;
        for (_, vcpu, given) in self.asking.given.extract_if(.., of_context) {
            let work = Work::Ask(Ask::GiveBack(given));
            dispatcher.post(id, Target::Vcpu(vcpu), work);
        }
        self.asking.given.len() < before
    }
}
