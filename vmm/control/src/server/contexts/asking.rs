//! Loads that found no room: the owners of reserved counters are asked for some.
//!
//! One load of the VM asks at a time, every vCPU at once; the others wait for its end
//! and are then judged anew. What owners give up is the hypervisor's as long as the
//! context is attached. Each vCPU answers after a bounded time (the grace, for each of its
//! counters), so each load gets its answer.

use std::collections::VecDeque;

use perfmon_abi::LoadArg;
use perfmon_abi::wire::{Errno, Refusal};
use pmu_virt::perfmon::ContextId;

use crate::job::GivenUp;
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

/// What became of a load for which owners are to be asked.
#[derive(Debug)]
pub(super) enum Begun {
    /// They were asked often enough: why there is no room.
    Spent(Refusal),
    /// Another load asks; this one comes after it.
    Later,
    /// Every vCPU is to be asked now.
    Now,
}

/// A load of which every vCPU has said what it gives up.
#[derive(Debug)]
pub(super) enum Concluded {
    Again(Load),
    /// It failed. Nobody hears why who does not wait for it.
    Failed(ContextId, Option<(RequestId, Refusal)>),
}

/// A load that nobody waits for any more.
#[derive(Debug, Default)]
pub(super) struct Canceled {
    /// Whether there was one.
    pub(super) any: bool,
    /// It had not asked yet: an earlier round of it may have got some.
    pub(super) before_its_turn: bool,
    pub(super) refused: Option<(RequestId, Refusal)>,
    /// vCPUs that are asked in vain.
    pub(super) in_vain: Vec<usize>,
}

impl AskingLoads {
    /// A load found no room, and would if owners gave some up.
    pub(super) fn begin(&mut self, load: Load, refusal: Refusal, vcpus: usize) -> Begun {
        if load.rounds >= MOST_ROUNDS {
            return Begun::Spent(refusal);
        }
        if self.current.is_some() {
            self.next.push_back(load);
            return Begun::Later;
        }
        self.current = Some(Asking {
            load,
            refusal,
            left: (0..vcpus).collect(),
            given: Vec::new(),
            kept: None,
            canceled: false,
        });
        Begun::Now
    }

    /// A vCPU has answered for the load of `id`, or has ended: then it keeps nothing. The
    /// vCPUs that are asked in vain from now on.
    pub(super) fn answered(
        &mut self,
        id: ContextId,
        vcpu: usize,
        answer: Result<Option<GivenUp>, String>,
    ) -> Vec<usize> {
        let current = self.current.as_mut();
        let Some(asking) = current.filter(|asking| asking.load.context == id) else {
            return Vec::new();
        };
        asking.left.retain(|one| *one != vcpu);
        match answer {
            Ok(given) => asking.given.extend(given.map(|given| (vcpu, given))),
            Err(why) if asking.kept.is_none() && !asking.canceled => {
                asking.kept = Some(why);
                // What the others would give up is of no use.
                return asking.left.clone();
            }
            Err(_) => {}
        }
        Vec::new()
    }

    /// The load that asked, once every vCPU has answered.
    pub(super) fn conclude(&mut self) -> Option<Concluded> {
        let is_done = |asking: &mut Asking| asking.left.is_empty();
        let Asking {
            load,
            refusal,
            given,
            kept,
            canceled,
            ..
        } = self.current.take_if(is_done)?;
        let id = load.context;
        let given = given.into_iter().map(|(vcpu, given)| (id, vcpu, given));
        self.given.extend(given);
        let refusal = match kept {
            _ if canceled => Refusal::new(Errno::ECANCELED, CANCELED),
            Some(why) => {
                let reason = format!("{}; the owners were asked: {why}", refusal.reason);
                Refusal::new(refusal.errno, reason)
            }
            None => {
                return Some(Concluded::Again(Load {
                    rounds: load.rounds + 1,
                    ..load
                }));
            }
        };
        self.forget_refusals(id);
        if load.waits {
            return Some(Concluded::Failed(id, Some((load.request, refusal))));
        }
        if !canceled {
            self.refused.push((load, refusal));
        }
        Some(Concluded::Failed(id, None))
    }

    /// The load whose turn it is, if none asks.
    pub(super) fn next(&mut self) -> Option<Load> {
        match self.current {
            Some(_) => None,
            None => self.next.pop_front(),
        }
    }

    /// Nobody waits for the load of a context any more.
    pub(super) fn cancel(&mut self, id: ContextId) -> Canceled {
        let mut done = Canceled {
            any: self.has(id),
            ..Canceled::default()
        };
        let at = self.next.iter().position(|load| load.context == id);
        done.before_its_turn = at.is_some();
        if let Some(load) = at.and_then(|at| self.next.remove(at))
            && load.waits
        {
            let refusal = Refusal::new(Errno::ECANCELED, CANCELED);
            done.refused = Some((load.request, refusal));
        }
        if let Some(asking) = &mut self.current
            && asking.load.context == id
        {
            if !asking.canceled && asking.kept.is_none() {
                done.in_vain = asking.left.clone();
            }
            asking.canceled = true;
        }
        done
    }

    /// The contexts with loads that a connection waits for.
    pub(super) fn of(&self, connection: ConnectionId) -> Vec<ContextId> {
        let is_its = |load: &&Load| load.waits && load.request.connection == connection;
        let its = self.loads().filter(is_its);
        its.map(|load| load.context).collect()
    }

    /// What owners gave up for a context, which needs it no longer.
    pub(super) fn take_given(&mut self, id: ContextId) -> Vec<(usize, GivenUp)> {
        let of_context = |(of, ..): &mut (ContextId, usize, GivenUp)| *of == id;
        let given = self.given.extract_if(.., of_context);
        given.map(|(_, vcpu, given)| (vcpu, given)).collect()
    }
}
